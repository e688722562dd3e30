"""``fp32_ops``: names and objects that a configuration adds to what runs in FP32, and errors that explain a wrong name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amp_wrapper import AmpConfigError, resolve


class Plain:
    """Neither a module nor an autograd Function."""

    value = 3

    def decode(self) -> None: ...


class Doubled(torch.autograd.Function): ...


def problem(*names: Any) -> str:
    """The only problem with some functions."""
    with pytest.raises(AmpConfigError) as caught:
        resolve('O2', fp32_ops=list(names))
    (text,) = caught.value.problems
    return text


def test_names_and_objects() -> None:
    fine = ['torch.nn.LayerNorm', 'torch.Tensor.sum', f'{__name__}.Doubled', f'{__name__}.Plain.decode']
    assert [op.name for op in resolve('O2', fp32_ops=fine).fp32_ops] == fine
    policy = resolve('O2', fp32_ops=['torch.softmax', nn.LayerNorm, torch.softmax, Plain.decode])
    names = ['torch.softmax', 'torch.nn.modules.normalization.LayerNorm', f'{__name__}.Plain.decode']
    assert policy.to_dict()['fp32_ops'] == [{'name': name, 'output': 'caller'} for name in names]
    wide = [dict(name='torch.softmax', output='float32'), {'name': 'torch.cumsum'}]
    assert [op.output for op in resolve('O2', fp32_ops=wide).fp32_ops] == ['float32', 'caller']
    assert resolve('O2').fp32_ops == () and len(resolve('O2', fp32_ops='torch.softmax').fp32_ops) == 1


WRONG: list[tuple[Any, list[str]]] = [
    ('softmax', ['dotted name']),
    ('.nms', ['dotted name']),
    ('nms.', ['dotted name']),
    ('.torch.softmax', ['empty part']),
    ('torch..nms', ['empty part']),
    ('torch.nn.functional.sofmax', ['does not exist', "'torch.nn.functional.softmax'"]),
    ('torch.nn.functional.softmax ', ['does not exist', "'torch.nn.functional.softmax'"]),
    ('torch.nn.functionl.softmax', ['does not exist', "'torch.nn.functional'"]),
    ('torch.Tensor.nowhere_near', ['does not exist']),
    ('__main__.no_such_thing', ['does not exist']),
    ('no_such_package.ops.nms', ['no_such_package is not installed']),
    ('torch.nn.functional', ['is a module']),
    ('torch.nn.Module', ['base of every class']),
    ('torch.autograd.Function', ['base of every class']),
    ('torch.Size.numel', ['built-in type', 'cannot be replaced']),
    (f'{__name__}.Plain', ['no nn.Module and no autograd Function', f'{__name__}.Plain.decode']),
    (f'{__name__}.Plain.value', ['cannot be called', 'int']),
    (lambda x: x, ['dotted name']),
    ({'output': 'float32'}, ['must be dict']),
    ({'name': 'torch.softmax', 'output': 'float64'}, ['must be dict']),
    ({'name': 'torch.softmax', 'type': 'x'}, ['must be dict']),
]


def test_wrong_names_are_explained() -> None:
    said = [(name, words, problem(name)) for name, words in WRONG]
    assert [row for row in said if 'fp32_ops=' not in row[2] or not all(word in row[2] for word in row[1])] == []


@pytest.mark.skipif(importlib.util.find_spec('mmcv._ext') is not None, reason='this mmcv has its ops')
@pytest.mark.parametrize('name', ['mmcv.ops.nms', 'mmcv.ops.roi_align.RoIAlignFunction'])
def test_mmcv_without_ops(name: str) -> None:
    assert 'mmcv-lite' in problem(name) and 'Install mmcv (full)' in problem(name)


@pytest.mark.parametrize('error', ['RuntimeError("no library")', 'SyntaxError("bad")', 'ImportError("gone")'])
def test_package_that_fails_to_import(error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision of another build raises RuntimeError when it is imported."""
    (tmp_path / 'breaks').mkdir()
    (tmp_path / 'breaks' / '__init__.py').write_text(f'raise {error}')
    monkeypatch.syspath_prepend(str(tmp_path))
    assert 'does not exist' in problem('breaks.ops.nms') and error.split('"')[1] in problem('breaks.ops.nms')


def test_function_shadows_the_module_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mmcv.ops.nms is a module and, as an attribute of its package, a function."""
    root = tmp_path / 'shadowing'
    root.mkdir()
    (root / '__init__.py').write_text('from .nms import nms\n')
    (root / 'nms.py').write_text('class NMSop: pass\n\ndef nms(): pass\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ['shadowing.nms', 'shadowing.nms.nms']
    assert [op.name for op in resolve('O2', fp32_ops=names).fp32_ops] == names
    assert 'is a class' in problem('shadowing.nms.NMSop')
    for name in ('shadowing', 'shadowing.nms'):
        monkeypatch.delitem(sys.modules, name)
