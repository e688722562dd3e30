"""Which compiled library is used, what is said where there is none, and how it is built."""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from op_lists import ops_from, scalar

from amp_wrapper import AmpConfigError, ops
from amp_wrapper.cli import main

GOOD: dict[str, Any] = dict(built=True, torch=torch.__version__, cuda=None, python=sys.implementation.cache_tag)


RECORDS: list[tuple[Any, str]] = [
    (None, 'never built'),
    (GOOD | dict(torch='1.0.0'), 'built for torch 1.0.0'),
    (GOOD | dict(cuda='1.0'), 'built for CUDA 1.0'),
    (GOOD | dict(python='cpython-20'), 'built for cpython-20'),
    (GOOD, 'could not be loaded'),
    (dict(built=False, reason='there is no C++ compiler', chosen=False), 'there is no C.. compiler'),
    *((damage, 'cannot be understood') for damage in ('', '{"built": tr', 'null', '[]', '3', '{"built": true}')),
]


def test_library_that_does_not_fit_is_not_loaded(tmp_path: Path, capsys: Any) -> None:
    """The folder says what its library was built for; ``amp-wrapper info`` says why it is not used."""
    for record, reason in RECORDS:
        if record is not None:
            text = record if isinstance(record, str) else json.dumps(record)
            (tmp_path / '_build.json').write_text(text, encoding='utf-8')
        with ops_from(tmp_path):
            main(['info'])
            assert ops.compiled_devices() == frozenset() and ops.backend_of('cpu') == 'reference'
            assert ops.backend() == 'reference (plain torch)'
        shown = capsys.readouterr().out
        assert re.search(reason, shown), shown


def test_patch_releases_of_torch_are_one_release(tmp_path: Path, capsys: Any) -> None:
    major, minor, *_ = torch.__version__.split('.')
    for release, fits in (
        (f'{major}.{minor}.99+cpu', True),
        (f'{major}.{minor}1.0', False),
        (f'9{major}.{minor}.0', False),
    ):
        (tmp_path / '_build.json').write_text(json.dumps(GOOD | dict(torch=release)), encoding='utf-8')
        with ops_from(tmp_path):
            main(['info'])
        # one that fits is looked for, and there is none
        assert ('could not be loaded' in capsys.readouterr().out) == fits


def test_misspelt_setting_is_an_error() -> None:
    with ops_from('refrence'), pytest.raises(AmpConfigError, match=r'AMP_WRAPPER_OPS.*did you mean .reference'):
        ops.compiled_devices()
    with ops_from('reference'):
        assert not ops.compiled_devices()


def test_library_serves_what_it_says(device: torch.device) -> None:
    assert (ops.backend_of(device) == f'{device.type.upper()} op') == (device.type in ops.compiled_devices())
    assert ops.backend_of('meta') == 'reference' and set(ops.compiled_devices()) <= {'cpu', 'cuda'}
    assert all(hasattr(ops, name) for name in ops.__all__)


def test_one_warning_says_why_there_is_no_library_and_how_to_get_it(other_process: Any) -> None:
    """In a new process, which has not warned before."""
    missing, *chosen = other_process('avx2')['said'][:3]
    assert len(missing[0]) == 1 and 'never built' in missing[0][0] and 'build-ops' in missing[0][0]
    assert 'AMP_WRAPPER_OPS=reference' in missing[0][0] and missing[1] == [3.0, 3.0]
    # nobody is told what he has chosen
    assert chosen == [[[], [3.0, 3.0]]] * 2


def test_library_without_cuda_warns_once_on_gpus(library: None, other_process: Any) -> None:
    said = other_process('avx2')['said'][3:]
    if not said:
        pytest.skip('of a torch without CUDA')
    messages, backends = said[0]
    assert len(messages) == 1 and 'on GPUs' in messages[0]
    assert backends == ['CPU op', 'CPU op; reference on GPUs']


@pytest.mark.xfail(strict=True, reason='ops')
def test_argument_with_a_lone_surrogate_does_not_end_the_process(library: None, other_process: Any) -> None:
    assert other_process('avx2')['ended'] == 0


def test_importing_and_using_the_ops_warns_of_nothing_where_they_are_built(device: torch.device) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        ops.multi_tensor_scale([torch.ones(2, device=device)], [torch.ones(2, device=device)], scalar(device, 2.0))


def test_build_with_cuda_is_refused_where_it_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """In one line, before anything is compiled: nvcc is missing in this folder, or CUDA in torch."""
    monkeypatch.setenv('CUDA_HOME', str(tmp_path))
    assert main(['build-ops', '--cuda', '--out', str(tmp_path)])
    assert re.search(r'error: .*(CUDA|nvcc)', ''.join(capsys.readouterr()))
    assert not list(tmp_path.iterdir())
