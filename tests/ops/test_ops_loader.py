"""Finding the compiled library: every reason why there is none, and one warning that says how to get it."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ops_models import ROOT, in_fresh_process
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_wrapper import info, ops
from amp_wrapper.errors import AmpConfigError
from amp_wrapper.ops import loader

CHANGED = {'torch': '1.0.0', 'cuda': '1.0', 'python': 'cpython-20'}
GOOD: dict[str, Any] = dict(built=True, torch=torch.__version__, cuda=None, python=sys.implementation.cache_tag)


@pytest.fixture(autouse=True)
def nobody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv('AMP_WRAPPER_OPS', raising=False)


def find(folder: Path, record: Any) -> loader.Library:
    (folder / '_build.json').write_text(record if isinstance(record, str) else json.dumps(record), encoding='utf-8')
    found = loader._find(folder)
    assert found.module is None and not found.devices
    return found


def test_no_record(tmp_path: Path) -> None:
    found = loader._find(tmp_path)
    assert (found.module, found.reason, found.chosen, found.facts) == (None, 'they were never built here', False, {})


def test_a_build_that_failed(tmp_path: Path) -> None:
    record = dict(built=False, reason='there is no C++ compiler', chosen=False)
    found = find(tmp_path, record)
    assert (found.reason, found.chosen, found.facts) == ('there is no C++ compiler', False, record)
    assert find(tmp_path, dict(built=False)).reason == 'the build failed'


def test_a_build_that_nobody_wanted(tmp_path: Path) -> None:
    found = find(tmp_path, dict(built=False, reason='AMP_WRAPPER_WITH_OPS=0 was set', chosen=True))
    assert found.reason == 'AMP_WRAPPER_WITH_OPS=0 was set' and found.chosen


@pytest.mark.parametrize(
    ('name', 'reason'),
    [
        ('torch', f'they were built for torch 1.0.0, and this is torch {torch.__version__}'),
        ('cuda', f'they were built for CUDA 1.0, and this torch has {torch.version.cuda}'),
        ('python', f'they were built for cpython-20, and this is {sys.implementation.cache_tag}'),
    ],
)
def test_a_build_for_something_else(name: str, reason: str, tmp_path: Path) -> None:
    record = GOOD | {name: CHANGED[name]}
    found = find(tmp_path, record)
    assert (found.reason, found.chosen, found.facts) == (reason, False, record)


def test_patch_releases_are_one_release() -> None:
    assert loader._same_release('2.6.0+cpu', '2.6.1') and not loader._same_release('2.1.0', '2.13.0')
    assert not loader._same_release('2.6.0', '3.6.0')


@pytest.mark.parametrize(
    'record',
    ['', '{"built": tr', 'null', '[]', '3', '"built"', '{"built": true}', json.dumps(dict(GOOD, built=True))[:-9]],
)
def test_a_record_that_cannot_be_understood(record: str, tmp_path: Path) -> None:
    found = find(tmp_path, record)
    assert found.reason == f'the record of their build cannot be understood ({tmp_path / "_build.json"})'
    assert not found.chosen


def test_the_reference_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('AMP_WRAPPER_OPS', 'reference')
    found = find(tmp_path, GOOD)
    assert found.reason == 'AMP_WRAPPER_OPS=reference is set' and found.chosen


def test_a_slip_of_the_pen_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('AMP_WRAPPER_OPS', 'refrence')
    with pytest.raises(
        AmpConfigError, match=r"AMP_WRAPPER_OPS='refrence' means nothing \(did you mean 'reference'\?\)"
    ):
        find(tmp_path, GOOD)
    # whatever this process has found before
    loader.library.cache_clear()
    try:
        with pytest.raises(SystemExit, match='refrence'):
            info.main([])
    finally:
        loader.library.cache_clear()


@pytest.mark.parametrize('gpu', [False, True])
def test_a_library_without_cuda_says_so_where_there_is_a_gpu(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = loader.Library(module=ModuleType('_C'), devices=frozenset({'cpu'}), reason='no GPU was seen')
    monkeypatch.setattr(loader, 'library', lambda: found)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: gpu)
    assert ops.backend() == ('CPU op; reference on GPUs' if gpu else 'CPU op')
    loader.warn_if_cuda_is_missing.cache_clear()
    if gpu and torch.version.cuda is not None and not torch.cuda.device_count():
        # a fake tensor is enough for it from 2.7 on
        pytest.skip('this torch looks for a driver')
    with FakeTensorMode(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        if gpu:
            for _ in range(2):
                tensors = [torch.ones(3, device='cuda')]
                ops.multi_tensor_scale(tensors, tensors, torch.ones((), device='cuda'))
        else:
            ops.multi_tensor_copy([], [])
    loader.warn_if_cuda_is_missing.cache_clear()
    said = [str(one.message) for one in caught if 'compiled ops' in str(one.message)]
    assert len(said) == gpu
    assert all('on GPUs, since no GPU was seen.' in text for text in said)


def test_a_library_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (
        ImportError('undefined symbol'),
        OSError('libfoo.so: no such file'),
        RuntimeError('registered twice'),
    ):

        def fail(name: str, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(loader.importlib, 'import_module', fail)
        assert find(tmp_path, GOOD).reason == f'the library could not be loaded ({error})'


# -- whole processes ----------------------------------------------------------------------------------------------

PROGRAM = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    import torch
    from amp_wrapper import ops
    at_import = len([w for w in caught if 'compiled ops' in str(w.message)])
    for _ in range(3):
        targets = [torch.zeros(2)]
        ops.multi_tensor_scale([torch.ones(2)], targets, torch.tensor(3.0), torch.tensor(0.0))
        ops.multi_tensor_l2norm(targets)
        state = [torch.tensor(4.0), torch.tensor(0, dtype=torch.int32), torch.tensor(1, dtype=torch.int32), torch.tensor(1.0)]
        ops.update_scale(*state, 2.0, 0.5, 10, 1)
said = [str(w.message) for w in caught if 'compiled ops' in str(w.message)]
print(json.dumps([at_import, said, targets[0].tolist(), state[0].item(), ops.backend()]))
"""


def package(folder: Path, record: dict[str, Any] | None) -> Path:
    """The package in Python alone, with or without the record of a build."""
    leave_out = shutil.ignore_patterns('_C.*', '_build.json', '__pycache__')
    shutil.copytree(ROOT / 'amp_wrapper', folder / 'amp_wrapper', ignore=leave_out)
    if record is not None:
        (folder / 'amp_wrapper' / 'ops' / '_build.json').write_text(json.dumps(record), encoding='utf-8')
    return folder


@pytest.mark.parametrize(
    ('record', 'reason'),
    [
        (None, 'they were never built here'),
        (dict(built=False, reason='there is no C++ compiler', chosen=False), 'there is no C++ compiler'),
        (GOOD, "the library could not be loaded (No module named 'amp_wrapper.ops._C')"),
    ],
    ids=['never', 'failed', 'lost'],
)
def test_one_warning_says_why_and_how(record: Any, reason: str, tmp_path: Path) -> None:
    at_import, said, target, scale, backend = in_fresh_process('-c', PROGRAM, folder=package(tmp_path, record))
    assert at_import == 0 and len(said) == 1
    assert f'since {reason}.' in said[0] and loader.HOW_TO_BUILD in said[0] and 'AMP_WRAPPER_OPS=reference' in said[0]
    assert (target, scale, backend) == ([3.0, 3.0], 2.0, 'reference (plain torch)')


@pytest.mark.parametrize('by_environment', [True, False])
def test_no_warning_where_it_was_chosen(by_environment: bool, tmp_path: Path) -> None:
    record = None if by_environment else dict(built=False, reason='AMP_WRAPPER_WITH_OPS=0 was set', chosen=True)
    environment = {'AMP_WRAPPER_OPS': 'reference'} if by_environment else {}
    found = in_fresh_process('-c', PROGRAM, environment=environment, folder=package(tmp_path, record))
    assert found == [0, [], [3.0, 3.0], 2.0, 'reference (plain torch)']
