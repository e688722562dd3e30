"""The recipes in processes of their own: killed and resumed, bit for bit; and on two ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bits import same
from recipe_runs import LIBRARIES, ROOT


def process(
    library: str, level: str, folder: Path, mode: str, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    script = Path(__file__).with_name('recipe_runs.py')
    return subprocess.run(
        [sys.executable, '-W', 'ignore', *launcher, script, library, level, folder, mode],
        cwd=folder,
        env={**os.environ, 'PYTHONPATH': str(ROOT), 'ACCELERATE_USE_CPU': 'true', 'OMP_NUM_THREADS': '1'},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.parametrize('level', ['O2', 'O5'])
@pytest.mark.parametrize('library', LIBRARIES)
def test_killed_and_resumed(library: str, level: str, tmp_path: Path) -> None:
    done = process(library, level, tmp_path / 'whole', 'whole')
    assert done.returncode == 0, done.stderr[-2000:]
    killed = process(library, level, tmp_path / 'run', 'killed')
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    resumed = process(library, level, tmp_path / 'run', 'resumed')
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    whole = torch.load(tmp_path / 'whole/whole.pt', weights_only=True)
    found = torch.load(tmp_path / 'run/resumed.pt', weights_only=True)
    assert whole.keys() == found.keys()
    assert [key for key in whole if not same(whole[key], found[key])] == []


@pytest.mark.parametrize('level', ['O2', 'O5'])
@pytest.mark.parametrize('library', ['accelerate', 'trainer', 'lightning'])
def test_two_ranks_stay_equal(library: str, level: str, tmp_path: Path) -> None:
    """Each rank has its own half of the data; averaged gradients keep everything but BatchNorm's statistics the same."""
    launcher = ('-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2')
    done = process(library, level, tmp_path / 'run', 'ranks', launcher)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = (torch.load(tmp_path / f'run/ranks{rank}.pt', weights_only=True) for rank in (0, 1))
    for found in (first, second):
        for part in ('model', 'average'):
            found[part] = {name: value for name, value in found.get(part, {}).items() if 'running_' not in name}
    assert [key for key in first if not same(first[key], second[key])] == []
