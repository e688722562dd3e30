"""Sharded parameters on two and four ranks. Checked by exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
import torch
from fsdp import skip_without_fsdp

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason='this torch was built without torch.distributed'),
]


def test_fused_optimizers_on_shards(tmp_path: Path, two_ranks: ranks.Group, four_ranks: ranks.Group) -> None:
    """What each is about stands in ``scenarios/sharding.py``; the last line of a failure names it."""
    for group in (two_ranks, four_ranks):
        folder = tmp_path / str(group.world)
        folder.mkdir()
        group.succeed(folder, 'one_process_per_shard')


def test_fused_optimizers_of_models_that_are_sharded(
    tmp_path: Path, two_ranks: ranks.Group, device: torch.device
) -> None:
    skip_without_fsdp(device.type)
    two_ranks.succeed(tmp_path, 'fused_training')
