"""Which library serves, and how ``build-ops`` compiles for GPUs. ``tests/system/test_build.py`` builds, and looks again."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from op_lists import ops_from, scalar
from torch.utils import cpp_extension

from amp_wrapper import AmpConfigError, ops
from amp_wrapper.cli import main


def test_misspelt_setting_is_an_error() -> None:
    for setting, hint in (('trch', ".did you mean 'torch'"), ('reference', 'means nothing')):
        with ops_from(setting), pytest.raises(AmpConfigError, match=rf'AMP_WRAPPER_OPS.*{hint}'):
            ops.serves('cpu')
    with ops_from('torch'):
        assert not ops.serves('cpu') and not ops.serves('cuda') and ops.backend() == "torch's own"


def test_library_serves_what_it_says(device: torch.device) -> None:
    assert (device.type.upper() in ops.backend()) == ops.serves(device) and not ops.serves('meta')
    assert all(hasattr(ops, name) for name in ops.__all__)


def test_importing_and_using_the_ops_warns_of_nothing(device: torch.device) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        ops.multi_tensor_scale([torch.ones(2, device=device)], [torch.ones(2, device=device)], scalar(device, 2.0))


def test_name_of_an_argument_may_be_any_text() -> None:
    with pytest.raises((TypeError, RuntimeError, UnicodeError)):
        ops.multi_tensor_scale([], [], **{'\ud800': 1})


def test_impossible_build_with_cuda_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """In one line, before anything is compiled."""
    monkeypatch.setenv('TORCH_EXTENSIONS_DIR', str(tmp_path))
    monkeypatch.delenv('TORCH_CUDA_ARCH_LIST', raising=False)
    monkeypatch.setattr(torch.cuda, 'is_available', bool)
    for version, words in ((None, 'CUDA ops need a torch with CUDA'), ('13.0', 'set TORCH_CUDA_ARCH_LIST')):
        monkeypatch.setattr(torch.version, 'cuda', version)
        assert main(['build-ops', '--cuda']) == 1
        assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_new_gpu_gets_the_newest_that_torch_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """As torch chooses; all sources are compiled, and torch names their objects by the names of the files."""
    monkeypatch.setenv('TORCH_EXTENSIONS_DIR', str(tmp_path))
    monkeypatch.setenv('PATH', os.environ['PATH'])
    for name in ('TORCH_CUDA_ARCH_LIST', 'FORCE_CUDA'):
        monkeypatch.delenv(name, raising=False)
    for owner, name, value in (
        (torch.version, 'cuda', '13.0'),
        (torch.cuda, 'is_available', lambda: True),
        (torch.cuda, 'device_count', lambda: 1),
        (torch.cuda, 'get_device_capability', lambda device=None: (12, 1)),
        (torch.cuda, 'get_arch_list', lambda: ['sm_80', 'sm_90']),
        (cpp_extension, 'CUDA_HOME', str(tmp_path)),
    ):
        monkeypatch.setattr(owner, name, value)
    flags: list[str] = []
    objects: list[str] = []

    def load(sources: list[str], with_cuda: bool, extra_cuda_cflags: list[str], **words: Any) -> None:
        assert with_cuda and not words['is_python_module'] and '--fmad=false' in extra_cuda_cflags
        flags.extend(cpp_extension._get_cuda_arch_flags(extra_cuda_cflags))
        objects.extend(Path(source).stem + '.cuda' * source.endswith('.cu') for source in sources)
        raise RuntimeError('not compiled here')

    monkeypatch.setattr(cpp_extension, 'load', load)
    assert main(['build-ops']) == 1 and 'not compiled here' in capsys.readouterr().err
    assert flags == ['-gencode=arch=compute_90,code=compute_90', '-gencode=arch=compute_90,code=sm_90']
    assert len(objects) == len(set(objects)) and any(name.endswith('.cuda') for name in objects)
