"""Sharded parameters on two and four ranks. Checked by exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
import torch

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason='this torch was built without torch.distributed'),
]
_OLD = tuple(map(int, torch.__version__.split('.')[:2])) < (2, 7)


@pytest.mark.parametrize('world', [2, 4])
def test_fused_optimizers_on_shards(world: int, tmp_path: Path, device: torch.device) -> None:
    """What each is about stands in ``scenarios/sharding.py``; the last line of a failure names it."""
    ranks.succeed(tmp_path, 'one_process_per_shard', device, world=world)


def test_fused_optimizers_of_models_that_are_sharded(tmp_path: Path, device: torch.device) -> None:
    if _OLD and device.type == 'cpu':
        pytest.skip('fully_shard of torch 2.6 needs a GPU')
    ranks.succeed(tmp_path, 'fused_training', device)
