"""Short, seeded runs of the two long proofs: ``make crash-test`` and ``make fuzz-test``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import crash_harness
import pytest
from command_line import python
from grid import long

from amp_wrapper.checkpoint import random_state

TESTS = Path(__file__).parent


def _run(name: str, tmp_path: Path, *arguments: str) -> str:
    report = tmp_path / 'report.md'
    # a process of its own: its logging is not for the other tests
    done = python(TESTS / name, *arguments, '--report', report, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return report.read_text()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ('kills', 'levels'), [(2, ('O2',)), pytest.param(12, ('O2', 'O5'), marks=long)], ids=['2', '12']
)
def test_killed_trainings_become_the_uninterrupted_ones(kills: int, levels: tuple[str, ...], tmp_path: Path) -> None:
    page = _run('crash_harness.py', tmp_path, '--kills', str(kills), '--seed', '5', '--levels', *levels)
    assert f'- {kills} processes killed with SIGKILL' in page
    assert '- 0 differences.' in page


def _train_without_random_states(work_dir: Path, case: dict[str, Any], train: Any = crash_harness.train) -> None:
    with mock.patch.object(random_state, 'restore', return_value=[]):
        train(work_dir, case)


@long
@pytest.mark.timeout(600)
def test_the_comparison_sees_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the test: where random states are not put back, the harness reports differences."""
    monkeypatch.setattr(crash_harness, 'train', _train_without_random_states)
    assert crash_harness.run(3, 1, tmp_path, levels=('O5',), kinds=('epochs',)).failures


@long
@pytest.mark.timeout(600)
def test_damaged_files_give_typed_errors_and_change_nothing(tmp_path: Path) -> None:
    page = _run('fuzz_checkpoints.py', tmp_path, '--files', '300', '--seed', '4')
    assert '300 files, seed 4' in page
    assert '0 failures.' in page


@pytest.mark.parametrize(
    'script',
    ['crash_harness.py', 'fuzz_checkpoints.py', 'planted_faults.py'],
)
def test_scripts_start_without_pytest(script: str) -> None:
    """``make crash-test`` and its like find the modules that tests share without the paths that pytest knows."""
    root = TESTS.parents[1]
    done = python(TESTS / script, '--help', env={**os.environ, 'PYTHONPATH': str(root)})
    assert done.returncode == 0, done.stderr[-2000:]
    assert 'usage:' in done.stdout
