"""Diagnosis of overflows with several ranks. Checked by exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
import torch
from fsdp import skip_without_fsdp

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason='this torch has no torch.distributed')


@pytest.mark.parametrize('name', ['fault_on_one_rank', 'collective_in_the_model'])
def test_scenarios(tmp_path: Path, two_ranks: ranks.Group, name: str) -> None:
    """What each is about stands in ``scenarios/diagnosis.py``; the last line of a failure names it."""
    two_ranks.succeed(tmp_path, name)


def test_sharded(tmp_path: Path, two_ranks: ranks.Group) -> None:
    """The modules of a sharded model are watched."""
    skip_without_fsdp()
    two_ranks.succeed(tmp_path, 'fault_in_a_sharded_model')
