"""Trainings that are killed become the uninterrupted ones; ``nox -s nightly`` kills more (``KILLS``, ``SEED``)."""

from __future__ import annotations

import os
from pathlib import Path

import crash_harness
import pytest
import toy

KILLS, SEED = int(os.environ.get('KILLS', 2)), int(os.environ.get('SEED', 0))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize('kind', crash_harness.KINDS)
@pytest.mark.parametrize('level', toy.LEVELS)
def test_killed_training_becomes_the_uninterrupted_one(level: str, kind: str, tmp_path: Path) -> None:
    found, rows = crash_harness.run(tmp_path, KILLS, SEED, level, kind)
    assert rows == [] and found['killed'] == KILLS
