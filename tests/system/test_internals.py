"""The private names of torch that the package uses, called on the torch that runs.

Beside ``conftest.py``, the one file of tests that imports ``*_internals.py``: a new torch that lacks a name shows here first.
The names of DDP and FSDP2 show in ``tests/distributed``.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amp_wrapper import compiler_internals, torch_internals
from amp_wrapper.openmmlab import shard_files

ROOT = Path(__file__).resolve().parents[2]


def test_pinned_torch_was_tried_and_is_allowed() -> None:
    oldest, newest = (torch_internals.TRIED[index].split('.')[1] for index in (0, -1))
    assert f'"torch>=2.{oldest},<2.{int(newest) + 1}"' in (ROOT / 'pyproject.toml').read_text(encoding='utf-8')
    pinned = re.search(r'^torch==(\S+)', (ROOT / 'constraints.txt').read_text(encoding='utf-8'), re.M)
    assert pinned is not None and pinned[1] in torch_internals.TRIED


# -- the dispatcher, autograd and tensors -----------------------------------------------------------------------------


def test_backward_pass_is_known_to_a_dispatch_mode() -> None:
    seen: list[tuple[int, Any, bool]] = []

    class Noting(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            node = torch_internals.current_node()
            seen.append((torch_internals.graph_task_id(), node and node.name(), torch_internals.writes_in_place(op)))
            return op(*args, **(kwargs or {}))

    x = torch.ones(1, requires_grad=True)
    with Noting():
        x.exp().backward()
        x.detach().add_(1)
        assert not torch_internals.in_function_transform()
    assert seen[0] == (-1, None, False) and seen[-1] == (-1, None, True)
    (task,) = {task for task, name, _ in seen if name == 'ExpBackward0'}
    assert task >= 0


def test_names_that_are_only_looked_up() -> None:
    found = torch_internals.variable_function('exp')
    assert found is not None and found(torch.zeros(1)).item() == 1 and torch_internals.variable_function('none') is None
    for module, names in shard_files.METADATA_CLASSES.items():
        assert all(hasattr(importlib.import_module(module), name) for name in names), module
    assert issubclass(nn.BatchNorm2d, torch_internals.BatchNorm) and issubclass(nn.MSELoss, torch_internals.Loss)
    assert issubclass(nn.InstanceNorm2d, torch_internals.BatchOrInstanceNorm)


# -- torch.compile ----------------------------------------------------------------------------------------------------


def test_functions_are_kept_out_of_graphs_or_are_constants_in_them() -> None:
    seen: list[object] = []

    @compiler_internals.untraced
    def outside(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x * 2

    @compiler_internals.constant_when_traced
    def constant() -> bool:
        seen.append('constant')
        return True

    x = torch.ones(1)
    assert torch.compile(lambda x: outside(x + 1) + 1, backend='eager')(x).item() == 5 and seen == [False]
    whole = torch.compile(lambda x: x + 10 if constant() else x, backend='eager', fullgraph=True)
    assert [whole(x).item() for _ in range(2)] == [11, 11] and seen[1:] == ['constant']


def test_compiled_modules_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    eval_frame = importlib.import_module('torch._dynamo.eval_frame')
    plain = nn.Linear(1, 1)
    wrapper = torch.compile(plain, backend='eager')
    assert compiler_internals.compiled_module(wrapper) is plain and compiler_internals.compiled_module(plain) is None
    assert compiler_internals.name_without_wrappers('0._orig_mod.1') == '0.1' and compiler_internals.is_loaded()
    heard: list[int] = []
    monkeypatch.setattr(eval_frame, '_callback_from_stance', eval_frame._callback_from_stance)
    compiler_internals.before_compiled_calls(lambda: heard.append(1))
    with compiler_internals.eager():
        assert wrapper(torch.ones(1)) is not None and heard == []
    wrapper(torch.ones(1))
    assert heard
    compiler_internals.backward_without_autocast()
    plain.compile(backend='eager')
    assert compiler_internals.keeps_compiled_functions(plain) and compiler_internals.COMPILED_CALL in vars(plain)
