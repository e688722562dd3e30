"""Private names of torch are in five files, those that end with ``_internals.py``, but for a few exceptions.

Those are in a list with reasons.

``test_torch_internals.py`` tries the names that are there.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from canary import INTERNALS, given_by, is_of_self, is_private, names_in
from torch import nn

import amp_wrapper

FOLDER = Path(amp_wrapper.__file__).parent
SOURCES = {
    path.relative_to(FOLDER).as_posix(): path.read_text(encoding='utf-8')
    for path in FOLDER.rglob('*.py')
    if path.name not in INTERNALS
}
#: Private names of torch that any file may use: torch tells its users to, or every version has had them for years and
#: countless packages rely on them. Besides, ``torch._foreach_*``: torch.html lists them under 'Foreach Operations'.
ALLOWED: dict[str, str] = {
    '_version': 'the version counter of a tensor, which "Autograd mechanics" explains; since 0.4',
    '_values': 'the values of a sparse tensor that may be uncoalesced, of which ``values()`` would need a copy; since 0.1',
    '_parameters': "a module's own parameters by name, with those that are None; since 0.1",
    '_buffers': "a module's own buffers by name, with those that are None; since 0.1",
    '_step_supports_amp_scaling': 'the mark by which GradScaler asks an optimizer whether it reads ``found_inf``; since 1.8',
    'torch._C.': 'how the names of modules in C++ begin, which are left as they are',
    '_compile': "an attribute of mmengine's FlexibleRunner; torch has a module of that name",
    '_metadata': 'an attribute of state dicts: the versions of modules, of which the page of Module tells; since 0.4',
    # keys of files, which no version can change
    '_growth_tracker': 'a key of ``GradScaler.state_dict()``',
    '_extra_state': 'the end of a key of ``Module.state_dict()``, for ``get_extra_state``',
    '_g': "the end of the name of weight_norm's magnitude: ``weight_g``, as its page says",
    '_v': "the end of the name of weight_norm's direction: ``weight_v``, as its page says",
    '_u': "the end of the name of spectral_norm's vector: ``weight_u``, a key of state dicts",
    '_orig': 'the end of the name of what spectral_norm divides: ``weight_orig``, as its page says',
}
#: Tables of the functions and ops that users and torch call, under whatever name.
TABLES = (
    'policy/fp32_registry.py',
    'policy/autocast_lists.py',
    'diagnostics/trace.py',
    'diagnostics/module_record.py',
    'diagnostics/op_tensors.py',
)
#: Private names of mmengine, mmcv, apex, numpy, torch_ema and Python; and strings of our own that are no names.
NOT_OF_TORCH: frozenset[str] = frozenset(
    """
    _decide_current_val_interval _epoch _get_checkpoint_loader _has_loaded _indices_of_rank _infinite_indices _iter
    _load_from _maybe_compile _publish_model _resume _save_best_checkpoint _save_checkpoint_with_step _swap_ema_parameters
    _train_loop _global_step _last_value _run_forward
    numpy._core.multiarray ._reconstruct
    _params_refs _runtime_info _log_scalars
    _getframe _fields _DummyThread _exit
    _base_ _delete_ _scope_ _dataloader _evaluator mmcv._ext _unskipped _rank
    _build.json _loss_ _P
    """.split()
)


@functools.cache
def names_of_torch() -> set[str]:
    """The private names that modules, DDP, optimizers, tensors and functions have or ask for, in the torch that runs."""
    modules = (nn.modules.module, nn.parallel.distributed, inspect.getmodule(torch.optim.Optimizer))
    nodes = (node for module in modules for node in ast.walk(ast.parse(inspect.getsource(module))))
    spaces = (torch, torch.Tensor, torch.autograd.Function)
    return {name for names in (*map(names_in, nodes), *map(dir, spaces)) for name in names if is_private(name)}


@functools.cache
def names_of(source: str) -> tuple[set[str], list[tuple[Any, str]]]:
    """The names that a source gives, and its private names, each with the node that has it."""
    nodes = list(ast.walk(ast.parse(source)))
    given = {name for name in map(given_by, nodes) if name is not None}
    return given, [(node, name) for node in nodes for name in names_in(node) if is_private(name)]


def private_names(sources: Mapping[str, str]) -> list[str]:
    """Where sources, by path, have private names of torch that are not on the list.

    What no source of the package has given a name to, is taken for torch's; and whatever torch has as well.
    """
    own = {name for source in sources.values() for name in names_of(source)[0]}
    others = own - names_of_torch()
    found = []
    for path, source in sources.items():
        for node, name in names_of(source)[1]:
            is_table = path in TABLES and isinstance(node, ast.Constant)
            is_foreign = name in NOT_OF_TORCH or name.startswith(('mmengine.', 'amp_wrapper.', 'apex.', '_amp_'))
            is_allowed = name in ALLOWED or name.startswith('_foreach_')
            if not (is_table or is_foreign or is_allowed or name in (own if is_of_self(node) else others)):
                found.append(f'{path}:{node.lineno} {name}')
    return sorted(found)


def test_no_other_file_has_private_names_of_torch() -> None:
    assert private_names(SOURCES) == []


def test_the_list_is_no_longer_than_it_must_be() -> None:
    text = '\n'.join(SOURCES.values())
    assert [name for name in (*ALLOWED, *NOT_OF_TORCH) if name not in text] == []


@pytest.mark.parametrize(
    ('line', 'name'),
    [
        ('ddp._get_ddp_logging_data()', '_get_ddp_logging_data'),
        ('tensor._is_view()', '_is_view'),
        ('torch._dynamo.reset()', '_dynamo'),
        # a name that the package has given to something of its own
        ('other._modules', '_modules'),
        ("getattr(module, '_non_persistent_buffers_set', None)", '_non_persistent_buffers_set'),
        ("hasattr(torch, '_C._nn')", '_C._nn'),
        ("FIELDS = 'device_mesh _join_config'", '_join_config'),
        ("vars(module)['_backward_hooks']", '_backward_hooks'),
        (
            'from torch.optim.optimizer import _global_optimizer_pre_hooks',
            'torch.optim.optimizer._global_optimizer_pre_hooks',
        ),
        ('from torch.utils._pytree import tree_map', 'torch.utils._pytree.tree_map'),
        ('import torch._dynamo', 'torch._dynamo'),
        # inherited from torch
        ('self._optimizer_step_post_hooks', '_optimizer_step_post_hooks'),
    ],
)
def test_private_names_are_found(line: str, name: str) -> None:
    assert private_names({**SOURCES, 'engine/planted.py': line}) == [f'engine/planted.py:1 {name}']
    assert private_names({**SOURCES, 'engine/planted.py': f'"""``{line}`` is the name of it."""\n'}) == []
