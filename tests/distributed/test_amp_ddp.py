"""The functional API on two ranks, with DistributedDataParallel around the model. Checked by exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
import torch

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason='this torch was built without torch.distributed'),
]


def test_scenarios(tmp_path: Path, two_ranks: ranks.Group) -> None:
    """What each is about stands in ``scenarios/functional_api.py``; the last line of a failure names it."""
    two_ranks.succeed(tmp_path, 'one_after_another')
