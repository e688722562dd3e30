"""Compiled ops of mmcv in 16-bit models and under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import differences
from torch import Tensor, nn

from amp_wrapper import amp

ops = pytest.importorskip('mmcv.ops', reason='this mmcv has no compiled ops', exc_type=ImportError)
TYPES = {'O1': torch.float16, 'O2': torch.float16, 'O4': torch.bfloat16, 'O5': torch.bfloat16}


def op_calls(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Calls with numbers that are exact in every type; boxes of 300 pixels have areas beyond the range of float16."""
    boxes = torch.tensor([[0, 0, 304, 304], [8, 8, 304, 304], [320, 320, 400, 400]], dtype=dtype)
    scores, labels = torch.tensor([0.75, 0.5, 0.25], dtype=dtype), torch.tensor([0, 79, 5])
    maps = (torch.randint(-64, 64, (1, 4, 8, 8), generator=torch.Generator().manual_seed(0)) / 32).to(dtype)
    region = torch.tensor([[0, 1, 1, 6, 6]], dtype=dtype)
    offsets, weight = torch.full((1, 18, 6, 6), 0.25, dtype=dtype), torch.full((2, 4, 3, 3), 0.125, dtype=dtype)
    mask = torch.full((1, 9, 6, 6), 0.5, dtype=dtype)
    return {
        'nms': lambda: ops.nms(boxes, scores, 0.5),
        'soft_nms': lambda: ops.soft_nms(boxes, scores, 0.5),
        'batched_nms': lambda: ops.batched_nms(boxes, scores, labels, dict(type='nms', iou_threshold=0.5)),
        'bbox_overlaps': lambda: [ops.bbox_overlaps(boxes, boxes)],
        'roi_align': lambda: [ops.roi_align(maps, region, 2)],
        'deform_conv2d': lambda: [ops.deform_conv2d(maps, offsets, weight)],
        'modulated_deform_conv2d': lambda: [
            ops.modulated_deform_conv2d(maps, offsets, mask, weight, None, 1, 0, 1, 1, 1)
        ],
        'point_sample': lambda: [ops.point_sample(maps, torch.full((1, 3, 2), 0.375))],
    }


class CallsOps(nn.Module):
    """Calls ops of mmcv in its forward pass, and keeps what they give."""

    def __init__(self, calls: dict[str, Callable[[], Any]]) -> None:
        super().__init__()
        self.linear, self.calls, self.results = nn.Linear(1, 1), calls, {}

    def forward(self, x: Tensor) -> Tensor:
        self.results = {name: call() for name, call in self.calls.items()}
        return self.linear(x)


@pytest.mark.parametrize('level', TYPES)
def test_ops_of_mmcv_compute_in_fp32(level: str) -> None:
    """In a model, they give the results of FP32, rounded to the type of their arguments."""
    model = CallsOps(op_calls(TYPES[level]))
    model, _ = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    model(torch.ones(1, 1))
    for name, call in op_calls(torch.float32).items():
        expected = [each.to(TYPES[level]) if each.is_floating_point() else each for each in call()]
        assert differences(model.results[name], expected) == [], name
