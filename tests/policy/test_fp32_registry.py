"""The table of what runs in FP32, and how names find objects and near misses."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from amp_wrapper import AmpConfigError
from amp_wrapper.policy import resolve
from amp_wrapper.policy.fp32_registry import FP32_OPS, Fp32Op
from amp_wrapper.policy.lookup import find, is_function_class, is_module_class, parent_of, problems_of

FULL_MMCV = importlib.util.find_spec('mmcv._ext') is not None


class Plain:
    """Neither a module nor an autograd Function."""

    value = 3

    def decode(self) -> None: ...


class Doubled(torch.autograd.Function): ...


def test_every_entry_of_torch_exists() -> None:
    missing = [name for name in FP32_OPS if name.startswith('torch.') and not callable(find(name, load=True))]
    assert missing == [] and sum(name.startswith('torch.') for name in FP32_OPS) > 30


def test_every_entry_says_why_and_avoids_something() -> None:
    for op in FP32_OPS.values():
        assert len(op.reason) > 10 and op.output in ('caller', 'model', 'float32') and (op.cpu or op.cuda)


def test_types_are_apart() -> None:
    carafe, nms = FP32_OPS['mmcv.ops.carafe.CARAFEFunction'], FP32_OPS['mmcv.ops.nms.nms']
    assert carafe.avoids('cuda') == {torch.bfloat16} and nms.avoids('cuda') == {torch.float16, torch.bfloat16}
    upfirdn = FP32_OPS['mmcv.ops.upfirdn2d.upfirdn2d']
    assert upfirdn.avoids('cpu') == frozenset() and upfirdn.avoids('cuda') == {torch.bfloat16}


def test_entries_of_other_packages_import_nothing() -> None:
    """In a fresh process: the registry is consulted, and no package of the table is loaded for it."""
    code = (
        'import sys, json, torch\n'
        'from amp_wrapper.autocast import regions\nfrom amp_wrapper.autocast.op_set import OpSet\n'
        # before torch 2.13, the first region loads torch._dynamo
        'regions.enter(frozenset()); regions.leave()\n'
        'before = set(sys.modules)\n'
        'regions.enter(OpSet().keys); regions.leave()\n'
        'print(json.dumps(sorted(set(sys.modules) - before)))\n'
        'print(json.dumps([m for m in sys.modules if m in ("mmcv.ops", "mmdet")]))'
    )
    lines = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [json.loads(line) for line in lines[-2:]] == [[], []]


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('torch.nn.functional.mse_loss', nn.functional.mse_loss),
        ('torch.nn.LayerNorm', nn.LayerNorm),
        ('torch.Tensor.softmax', torch.Tensor.softmax),
        (f'{__name__}.Plain.decode', Plain.decode),
        ('torch.nn', None),
        ('torch.nowhere', None),
        ('nowhere.at.all', None),
    ],
)
def test_find(name: str, expected: object) -> None:
    assert find(name, load=True) is expected


def test_a_function_shadows_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mmcv.ops.nms is a module and, as an attribute of its package, a function."""
    root = tmp_path / 'shadowing'
    root.mkdir()
    (root / '__init__.py').write_text('from .nms import nms\n')
    (root / 'nms.py').write_text('class NMSop: pass\n\ndef nms(): pass\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ('shadowing', 'shadowing.nms'):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert find('shadowing.nms', load=False) is None
    function = find('shadowing.nms', load=True)
    assert function.__name__ == 'nms' and find('shadowing.nms.NMSop', load=False).__name__ == 'NMSop'
    assert find('shadowing.nms.nms', load=False) is function
    assert parent_of('shadowing.nms') == (sys.modules['shadowing'], 'nms')


def test_kinds() -> None:
    assert is_function_class(Doubled) and not is_function_class(Plain) and not is_function_class(Doubled.apply)
    assert is_module_class(nn.Linear) and not is_module_class(nn.Linear(1, 1)) and not is_module_class(Doubled)


@pytest.mark.parametrize(
    ('name', 'words'),
    [
        ('softmax', ['dotted name']),
        ('torch.nn.functional.sofmax', ['does not exist', "'torch.nn.functional.softmax'"]),
        ('torch.nn.functionl.softmax', ['does not exist', "'torch.nn.functional'"]),
        ('no_such_package.ops.nms', ['no_such_package is not installed']),
        ('torch.Tensor.nowhere_near', ['does not exist']),
        (f'{__name__}.Plain', ['no nn.Module and no autograd Function', f'{__name__}.Plain.decode']),
        (f'{__name__}.Plain.value', ['cannot be called', 'int']),
        ('torch.Size.numel', ['built-in type', 'cannot be replaced']),
        ('torch.nn.functional', ['is a module']),
        ('torch.nn.Module', ['base of every class']),
        ('torch.autograd.Function', ['base of every class']),
        ('.nms', ['dotted name']),
        ('.torch.softmax', ['empty part']),
        ('torch..nms', ['empty part']),
        ('nms.', ['dotted name']),
        ('__main__.no_such_thing', ['does not exist']),
        ('torch.nn.functional.softmax ', ['does not exist', "'torch.nn.functional.softmax'"]),
    ],
)
def test_problems(name: str, words: list[str]) -> None:
    (problem,) = problems_of((name,))
    assert all(word in problem for word in (f'fp32_ops={name!r}', *words)), problem


@pytest.mark.skipif(FULL_MMCV, reason='this mmcv has its ops')
@pytest.mark.parametrize('name', ['mmcv.ops.nms', 'mmcv.ops.roi_align.RoIAlignFunction'])
def test_mmcv_without_ops(name: str) -> None:
    (problem,) = problems_of((name,))
    assert 'comes without its compiled ops (mmcv-lite)' in problem and 'Install mmcv (full)' in problem


@pytest.mark.parametrize('error', ['RuntimeError("no library")', 'SyntaxError("bad")', 'ImportError("gone")'])
def test_packages_that_fail_to_import(error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision of another build raises RuntimeError when it is imported."""
    (tmp_path / 'breaks').mkdir()
    (tmp_path / 'breaks' / '__init__.py').write_text(f'raise {error}')
    monkeypatch.syspath_prepend(str(tmp_path))
    (problem,) = problems_of(('breaks.ops.nms',))
    assert 'does not exist' in problem and error.split('"')[1] in problem


def test_names_that_are_fine() -> None:
    names = (
        'torch.nn.LayerNorm',
        'torch.softmax',
        'torch.Tensor.sum',
        f'{__name__}.Doubled',
        f'{__name__}.Plain.decode',
    )
    assert problems_of(names) == []


def test_policy_takes_names_and_objects() -> None:
    policy = resolve('O2', fp32_ops=['torch.softmax', nn.LayerNorm, torch.softmax, Plain.decode])
    names = ['torch.softmax', 'torch.nn.modules.normalization.LayerNorm', f'{__name__}.Plain.decode']
    assert [op.name for op in policy.fp32_ops] == names
    assert policy.to_dict()['fp32_ops'] == [{'name': name, 'output': 'caller'} for name in names]
    assert resolve('O2', fp32_ops='torch.softmax').fp32_ops == (Fp32Op('torch.softmax'),)
    assert resolve('O2').fp32_ops == ()
    wide = resolve('O2', fp32_ops=[dict(name='torch.softmax', output='float32'), {'name': 'torch.cumsum'}]).fp32_ops
    assert [op.output for op in wide] == ['float32', 'caller']


def test_a_name_in_a_configuration_means_both_types() -> None:
    """CARAFE avoids bfloat16 by itself; a user who names it wants it in FP32."""
    name = 'mmcv.ops.carafe.CARAFEFunction'
    assert Fp32Op(name).avoids('cpu') == {torch.float16, torch.bfloat16} != FP32_OPS[name].avoids('cpu')


@pytest.mark.parametrize(
    ('value', 'words'),
    [
        (3, 'list of dotted names'),
        ([3], 'list of dotted names'),
        ([''], 'list of dotted names'),
        ([lambda x: x], 'hand over its dotted name'),
        ([{'output': 'float32'}], 'must be dict'),
        ([{'name': 'torch.softmax', 'output': 'float64'}], 'must be dict'),
        ([{'name': 'torch.softmax', 'type': 'x'}], 'must be dict'),
    ],
)
def test_policy_refuses_other_things(value: object, words: str) -> None:
    with pytest.raises(AmpConfigError, match=words):
        resolve('O2', fp32_ops=value)  # type: ignore[arg-type]


def test_all_problems_come_in_one_error() -> None:
    with pytest.raises(AmpConfigError) as caught:
        resolve('O2', fp32_ops=['torch.nn.functional.sofmax', 'nms'], loss_scale=-1)
    assert len(caught.value.problems) == 3
