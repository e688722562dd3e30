"""Two processes over gloo: a cast after DDP wrapped the model must not end gradient averaging."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import toy

WORKER = Path(__file__).parent / 'ddp_worker.py'


def launch(folder: Path, level: str, *words: str) -> tuple[list[int], list[str]]:
    """Two ranks; their exit codes and what they said."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(folder / 'store'), str(folder), level, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=180)[0] for rank in ranks]
    return [rank.returncode for rank in ranks], said


def results(folder: Path) -> list[dict[int, Any]]:
    return [torch.load(folder / name, weights_only=True) for name in ('rank0.pt', 'rank1.pt', 'alone.pt')]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason='this torch was built without torch.distributed')
@pytest.mark.parametrize('level', ['O0', 'O1', 'O2', 'O5'])
def test_two_ranks_are_one(level: str, tmp_path: Path) -> None:
    codes, said = launch(tmp_path, level)
    assert codes == [0, 0], said
    zero, one, alone = results(tmp_path)
    half = toy.HALF.get(level)
    for counts in (1, 3):
        left, right, joint = zero[counts], one[counts], alone[counts]
        for key in ('grads', 'weights', 'masters', 'counts', 'state'):
            if key == 'grads' and level == 'O0':
                continue  # the overflow of O0 is not skipped, and NaN compares by payload
            assert toy.differences(left[key], right[key]) == [], (counts, key)
        if level != 'O0':
            # the overflow of one rank skipped the step on both
            assert left['counts'].tolist() == [6, 1, 0]
            assert joint['counts'].tolist() == [6, 1, 0]
            # 16-bit gradients are rounded on each rank and once more by the average: a few units of 2^-8 or 2^-11
            tolerance = {None: 2e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}[half]
            for a, b in zip(left['masters'], joint['masters']):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        assert left['buckets'] == [str(half or torch.float32)]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason='this torch was built without torch.distributed')
def test_the_check_sees_a_reducer_that_was_not_rebuilt(tmp_path: Path) -> None:
    """The silent failure itself: without the rebuild, every rank keeps its own gradients."""
    codes, _ = launch(tmp_path, 'O2', 'no-rebuild')
    if codes == [0, 0]:
        zero, one, _ = results(tmp_path)
        assert toy.differences(zero[1]['grads'], one[1]['grads']) != []
    else:
        assert all(code != 0 for code in codes)
