"""Bytes that a step moves are those that the pages promise."""

from __future__ import annotations

import pytest
import torch

from amp_wrapper import ops
from benchmarks.counting import counts_of
from benchmarks.step import Case, start, ways


@pytest.mark.skipif(not ops.serves('cpu'), reason='of compiled steps')
@pytest.mark.parametrize(
    ('optimizer', 'name', 'moved'),
    [
        ('AdamW', 'this package, O2, fused', 30),
        ('AdamW', 'this package, O2, fused, split masters', 28),
        ('AdamW', 'torch ops, unscale', 60),
        ('SGD', 'this package, O2, fused', 22),
        ('SGD', 'this package, O2, fused, split masters', 20),
    ],
)
def test_bytes_for_each_parameter_are_those_of_pages(optimizer: str, name: str, moved: int) -> None:
    """And no step reads from the device."""
    builds = next(group for group in ways(Case(optimizer, True, torch.float16, 'cpu')).values() if name in group)
    # enough elements that tables and counters do not show
    step = start(builds[name], [(1024, 64), (512, 128), (1000,)])
    counts = counts_of(step.run, step.host_counts())
    assert counts.bytes / 132_072 == pytest.approx(moved, abs=0.1) and counts.reads == 0
