"""``python -m amp_wrapper.info`` says what really serves the calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch

from amp_wrapper import info, ops
from amp_wrapper.ops import exponents, loader, norms, optimizer_step, prologue, reference, schemas

#: The modules of the ops in plain torch.
REFERENCES = (reference, exponents, norms, prologue, optimizer_step)


def calls(device: torch.device) -> dict[str, Callable[[], object]]:
    """One call of every op."""
    x, y, half = torch.ones(5, device=device), torch.ones(5, device=device), torch.ones(5, device=device).half()
    scale, flag = torch.ones((), device=device), torch.zeros((), device=device)
    count, left = (torch.zeros((), dtype=torch.int32, device=device) for _ in range(2))
    counts = torch.zeros(1, ops.EXPONENTS, dtype=torch.int64, device=device)
    decision, rows = torch.zeros(ops.DECISION, device=device), torch.zeros(1, ops.ROW, device=device)
    hyper, group = torch.zeros(1, ops.HYPER, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    return {
        'multi_tensor_scale': lambda: ops.multi_tensor_scale([x], [y], scale, flag),
        'multi_tensor_axpby': lambda: ops.multi_tensor_axpby([x], [x], [y], scale, scale, flag),
        'multi_tensor_copy': lambda: ops.multi_tensor_copy([x], [y]),
        'multi_tensor_isnonfinite': lambda: ops.multi_tensor_isnonfinite([x], flag),
        'multi_tensor_exponents': lambda: ops.multi_tensor_exponents([x], counts, flag.view(1)),
        'multi_tensor_l2norm': lambda: ops.multi_tensor_l2norm([x], scale, flag, True),
        'multi_tensor_maxnorm': lambda: ops.multi_tensor_maxnorm([x], scale, flag, True),
        'multi_tensor_scale_l2norm': lambda: ops.multi_tensor_scale_l2norm([x], [y], scale, flag),
        'multi_tensor_refresh': lambda: ops.multi_tensor_refresh([half], [y]),
        'update_scale': lambda: ops.update_scale(scale, count, left, flag, 2.0, 0.5, 2000, 1),
        'step_prologue': lambda: ops.step_prologue(decision, rows, [flag], hyper, group, ops.ADAM),
        'fused_adam': lambda: ops.fused_adam([x], [y], [x.clone()], [x.clone()], [], [], rows, decision),
        'fused_sgd': lambda: ops.fused_sgd([x], [y], [], [], rows, decision),
    }


def what_served(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> str:
    """'reference' or 'op', by counting functions of the library and of the reference that were entered."""
    seen: Counter[str] = Counter()
    found = loader.library()

    class Counting(ModuleType):
        def __getattr__(self, name: str) -> Any:
            seen['op'] += 1
            return getattr(found.module, name)

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == 'call' and frame.f_code.co_filename in {module.__file__ for module in REFERENCES}:
            seen['reference'] += 1

    with monkeypatch.context() as patch:
        if found.module is not None:
            counted = loader.Library(Counting('_C'), found.devices, found.reason, found.chosen, found.facts)
            patch.setattr(loader, 'library', lambda: counted)
        sys.setprofile(profile)
        try:
            call()
        finally:
            sys.setprofile(None)
    # the dispatcher may answer a call of the library with the reference
    return 'reference' if seen['reference'] else 'op' if seen['op'] else 'nothing'


def agree(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every op, as reported and as counted; returns what was reported."""
    kind = device.type
    table = info.backends()
    assert set(table) == set(schemas.SCHEMAS) == set(calls(device))
    for name, call in calls(device).items():
        stated = table[name][kind]
        with warnings.catch_warnings():
            warnings.simplefilter('ignore', UserWarning)
            assert what_served(call, monkeypatch) == stated.replace(f'{kind.upper()} op', 'op'), name
        assert stated == ops.backend_of(device), name
    return {served[kind] for served in table.values()}


def test_report_agrees_with_the_calls(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    found = loader.library()
    served = device.type in found.devices
    assert agree(device, monkeypatch) == {f'{device.type.upper()} op' if served else 'reference'}
    assert info.build()['loaded'] == (found.module is not None)


@pytest.mark.parametrize('chosen', [True, False], ids=['chosen', 'missing'])
def test_report_without_a_library(device: torch.device, monkeypatch: pytest.MonkeyPatch, chosen: bool) -> None:
    monkeypatch.setattr(loader, 'library', lambda: loader.Library(None, reason='the moon is full', chosen=chosen))
    assert agree(device, monkeypatch) == {'reference'}
    facts = info.build()
    assert not facts['loaded'] and facts['reason'] == 'the moon is full'
    text = info.text(info.report())
    assert 'none, since the moon is full' in text
    # nobody is told how to get what he refused
    assert (loader.HOW_TO_BUILD in text) == (not chosen) == bool(facts['how'])


def test_report_of_a_build_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {'torch': '2.13.0', 'cuda': '13.0', 'architectures': '9.0+PTX', 'compiler': 'g++ 12', 'nvcc': 'nvcc 13.0'}
    built = loader.Library(ModuleType('_C'), frozenset({'cpu', 'cuda'}), facts={**facts, 'python': 'cpython-311'})
    monkeypatch.setattr(loader, 'library', lambda: built)
    for changed, words in ((True, 'build again'), (False, 'matches the library'), (None, None)):
        monkeypatch.setattr(loader, 'changed_sources', lambda changed=changed: changed)
        text = info.text(info.report())
        assert '13.0, architectures 9.0+PTX, nvcc 13.0' in text and 'torch 2.13.0, cpython-311' in text
        assert (words or 'compiled library') in text and ('csrc ' in text) == (changed is not None)


def test_what_is_missing_or_broken_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info.importlib.util, 'find_spec', lambda name: None if name == 'mmengine' else object())

    def broken(name: str) -> ModuleType:
        raise AssertionError('MMCV==9 is used but incompatible')

    monkeypatch.setattr(info.importlib, 'import_module', broken)
    versions = info.versions()
    assert versions['mmengine'] is None
    assert versions['mmcv'] == 'cannot be imported (AssertionError: MMCV==9 is used but incompatible)'
    assert versions['torch'] == torch.__version__


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in info.VARIABLES}
    # a warning of ours would end it
    command = [sys.executable, '-W', 'error::UserWarning:amp_wrapper', '-m', 'amp_wrapper.info', *words]
    return subprocess.run(command, env={**env, **environment}, capture_output=True, text=True, timeout=120)


def test_command_line() -> None:
    done = run('--json', AMP_WRAPPER_OPS='reference', ATEN_CPU_CAPABILITY='default')
    assert done.returncode == 0, done.stderr
    assert 'compiled ops' not in done.stderr
    facts = json.loads(done.stdout)
    assert facts['environment'] == {'AMP_WRAPPER_OPS': 'reference', 'ATEN_CPU_CAPABILITY': 'default'}
    assert facts['build']['reason'] == 'AMP_WRAPPER_OPS=reference is set'
    assert {served for row in facts['ops'].values() for served in row.values()} == {'reference'}
    assert 'kernels for any processor' in facts['devices']['cpu']
    assert facts['versions']['torch'] == torch.__version__


def test_command_line_without_mmengine_and_library() -> None:
    """In one process, so that the loader finds what it would find in a package without a build."""
    code = (
        'import sys; sys.modules["mmengine"] = sys.modules["mmcv"] = None\n'
        'import importlib.util as u; old = u.find_spec\n'
        'u.find_spec = lambda name, *rest: None if name in ("mmengine", "mmcv") else old(name, *rest)\n'
        'from pathlib import Path\n'
        'from amp_wrapper.ops import loader; loader._FOLDER = Path("nowhere", "ops")\n'
        'from amp_wrapper import info; info.main([])'
    )
    env = {k: v for k, v in os.environ.items() if k not in info.VARIABLES}
    # torch 2.6 leaves a temporary folder to the end of the process
    command = [sys.executable, '-W', 'error', '-W', 'ignore::ResourceWarning', '-c', code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ''
    for line in ('mmengine      none', 'none, since they were never built here', 'AMP_WRAPPER_OPS      not set'):
        assert line in done.stdout
    assert loader.HOW_TO_BUILD in done.stdout
