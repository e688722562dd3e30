"""Faults inside of mmcv's compiled ops: the diagnosis names the module that calls the op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planted_overflows import examine
from torch import Tensor, nn

ops = pytest.importorskip('mmcv.ops', reason='this mmcv has no compiled ops', exc_type=ImportError)


class Detector(nn.Module):
    """A stem, a deformable convolution, and boxes that are cut out of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.deform = ops.ModulatedDeformConv2dPack(4, 4, 3, padding=1)
        self.align = ops.RoIAlign(3, sampling_ratio=2)
        self.head = nn.Linear(4 * 9, 2)
        self.boxes = torch.tensor([[0.0, 1.0, 1.0, 5.0, 5.0], [1.0, 0.0, 2.0, 6.0, 7.0]])

    def forward(self, x: Tensor) -> Any:
        x = self.deform(self.stem(x)) * 1e-3
        return self.head(self.align(x, self.boxes).flatten(1))


@pytest.mark.parametrize('level', ['O1', 'O2', 'O3'])
def test_overflow_of_a_deformable_convolution(level: str) -> None:
    torch.manual_seed(0)
    model = Detector()
    with torch.no_grad():
        model.deform.weight.mul_(3e5 / model.deform.weight.abs().max()).clamp_(-6e4, 6e4)
    (found,) = examine(model, level, [torch.randn(2, 3, 8, 8)])
    # the boxes are cut out of what is infinite by then, by an op that torch does not see
    assert (found.cause, found.module) == ('forward_range', 'deform'), found.text
    # what the module gives back is out of range, wherever it was computed
    assert {remedy.kind: remedy.finite for remedy in found.remedies} == {
        'keep_fp32': False,
        'fp32_ops': False,
        'bfloat16': True,
    }
