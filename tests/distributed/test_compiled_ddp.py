"""Compiled models on two ranks. Checked by exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
import torch
from grid import but, long

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason='this torch was built without torch.distributed'),
]


@pytest.mark.parametrize('level', but(['O1'], ['O1', 'O5'], long))
def test_compiled_models(level: str, tmp_path: Path, two_ranks: ranks.Group) -> None:
    """What it is about stands in ``scenarios/compiled.py``."""
    two_ranks.succeed(tmp_path, 'compiled', level)
