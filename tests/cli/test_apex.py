"""apex's names: ten scripts for apex run as they are and with other imports, or say what to write; ``amp-wrapper migrate``."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from processes import ROOT
from snippets import titled

from amp_wrapper import AmpConfigError, AmpUsageError, apex
from amp_wrapper.cli import main

SCRIPTS = titled((ROOT / 'tests/cli/apex_scripts.md').read_text())
#: Those that no function can run.
ADVISED = {'toolkit.py': 'FP16_Optimizer', 'halves.py': 'network_to_half'}
SED = re.search(r'^(sed .+\') ', (ROOT / 'docs/migrating_from_apex.md').read_text(), re.MULTILINE)
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def installed() -> Iterator[None]:
    """``import apex`` finds the names of this package."""
    apex.install()
    yield
    for name in [name for name in sys.modules if name.split('.')[0] == 'apex']:
        del sys.modules[name]


def run(path: Path, capsys: Capture) -> list[float]:
    """The losses that a script prints."""
    capsys.readouterr()
    with mock.patch.object(sys, 'argv', [path.name]):
        runpy.run_path(str(path), run_name='__main__')
    return [float(loss) for loss in re.findall(r'(?im)^\w*loss(?!_scale)[^\d\n]*([\d.]+)', capsys.readouterr().out)]


@pytest.mark.usefixtures('installed')
@pytest.mark.parametrize('name', SCRIPTS)
def test_script_trains_either_way_or_says_what_to_write(name: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / name
    path.write_text(SCRIPTS[name])
    assert main(['migrate', str(path)]) == (name in ADVISED)
    said = capsys.readouterr().out
    assert SED is not None and f'{SED[1]} {path}\n' in said and path.read_text() == SCRIPTS[name]
    assert all(re.match(rf'{path}:\d+: ', line) for line in said.split('\n\n')[0].splitlines())
    if name in ADVISED:
        with pytest.raises(AmpUsageError, match=rf'{ADVISED[name]} .* write .*amp\.initialize\(model, optimizer'):
            run(path, capsys)
        assert re.search(rf'{name}:\d+: apex\.fp16_utils\..*{ADVISED[name]} .* write model', said)
        return
    losses = run(path, capsys)
    subprocess.run(f'{SED[1]} {path}', shell=True, check=True)
    assert run(path, capsys) == losses and losses[-1] < losses[0] and len(losses) > 4
    assert main(['migrate', str(path)]) == 0 and capsys.readouterr().out.count(str(path)) == 0


def test_arguments_are_followed_or_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    assert apex.optimizers.FusedAdam([weight], capturable=True).defaults['weight_decay'] == 0.0
    assert apex.optimizers.FusedSGD([weight], 0.1, 0.9, nesterov=True, set_grad_none=True).defaults['nesterov']
    assert apex.normalization.FusedRMSNorm(2, 1e-3, False, memory_efficient=True).weight is None
    refused: dict[str, tuple[Any, dict[str, bool]]] = {
        'warm up': (apex.optimizers.FusedAdam, dict(bias_correction=False)),
        "opt_level='O2'": (apex.optimizers.FusedAdam, dict(master_weights=True)),
        'decay': (lambda params, **given: apex.optimizers.FusedSGD(params, 0.1, **given), dict(wd_after_momentum=True)),
        'world_size': (apex.parallel.DistributedDataParallel, dict(gradient_average=False)),
        "opt_level='O4'": (apex.parallel.DistributedDataParallel, dict(allreduce_always_fp32=True)),
    }
    for remedy, (call, given) in refused.items():
        with pytest.raises(AmpConfigError, match=f'{next(iter(given))}=.*apex.* write .*{remedy}'):
            call([weight], **given)
    for call in (apex.optimizers.FusedAdam, apex.optimizers.FusedSGD, apex.parallel.DistributedDataParallel):
        with pytest.raises(TypeError, match='nesterof'):
            call([weight], 0.1, nesterof=True)
    assert not isinstance(weight, apex.optimizers.FusedLAMB)


@pytest.mark.usefixtures('installed')
def test_modules_that_are_missing_say_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    for line in ('import apex.contrib.xentropy', 'from apex.transformer import x', 'from amp_wrapper.apex import mlp'):
        with pytest.raises(ImportError, match=r'apex\.\w+.* is not part of amp_wrapper: write torch'):
            exec(line)
    with pytest.raises(ImportError, match='torchrun'):
        exec('import apex.parallel.multiproc')
    with pytest.raises(AttributeError, match=r'amp\.master_params'):
        exec('import apex; apex.amp._amp_state.opt_properties')
    apex.install()
    monkeypatch.setitem(sys.modules, 'apex', sys)
    with pytest.raises(AmpUsageError, match=r'sys.* is imported already'):
        apex.install()


def test_places_left_by_hand_are_listed(tmp_path: Path, capsys: Capture) -> None:
    texts = {
        'from apex.parallel import DistributedDataParallel as DDP\nDDP(m, gradient_average=False)': 'gradient_average',
        'import apex\napex.parallel.LARC(o)': 'LARC',
        'import apex.amp as mixed\nmixed._amp_state.handle': 'amp.state_dict',
        'from amp_wrapper.apex.contrib.xentropy import X': 'contrib',
        'import torch, apex': 'one import a line',
        'import apex; import torch': 'one import a line',
        "optim_wrapper = dict(type='ApexOptimWrapper')": 'custom_imports',
        'from apex import amp\nprint "two"': 'cannot be read',
    }
    for folder in ('deep', '.git', 'venv'):
        (tmp_path / folder).mkdir()
    for text, remedy in texts.items():
        for folder in tmp_path.iterdir():
            (folder / 'script.py').write_text(text)
        assert main(['migrate', str(tmp_path)]) == 1
        said = capsys.readouterr().out
        assert re.search(rf'deep/script\.py:{len(text.splitlines())}: .*{remedy}', said)
        assert 'Files: 1. Places left to do by hand: 1.' in said
