"""The registry with the real packages: every name is found, and mmcv's ops run in 16-bit where they have CPU kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import register

from amp_wrapper.autocast import regions
from amp_wrapper.autocast.op_set import OpSet
from amp_wrapper.policy.fp32_registry import FP32_OPS
from amp_wrapper.policy.lookup import find, problems_of

ops = pytest.importorskip('mmcv.ops', reason='this mmcv has no compiled ops', exc_type=ImportError)
DOCS = Path(__file__).resolve().parents[2] / 'docs'
HALVES = (torch.float16, torch.bfloat16)


def test_every_entry_exists() -> None:
    register('mmdet')
    assert [name for name in FP32_OPS if find(name, load=True) is None] == []


def test_names_in_the_docs_exist() -> None:
    register('mmdet')
    text = ''.join((DOCS / name).read_text() for name in ('fp32_ops.md', 'openmmlab.md', 'downstream.md'))
    names = set(re.findall(r'\bmm(?:cv\.ops|det\.models)\.[\w.]+\w', text))
    assert len(names) > 50 and problems_of(tuple(sorted(names))) == []


def test_near_miss_of_a_real_name() -> None:
    (problem,) = problems_of(('mmcv.ops.nmss',))
    assert "'mmcv.ops.nms'" in problem


@pytest.fixture
def inside() -> Iterator[None]:
    regions.enter(OpSet().keys)
    yield
    regions.leave()


def boxes(dtype: torch.dtype) -> Tensor:
    return torch.tensor([[0, 0, 304, 304], [8, 8, 304, 304], [320, 320, 400, 400]], dtype=dtype)


def maps(dtype: torch.dtype) -> Tensor:
    """Numbers that are exact in every type, as all inputs here are."""
    torch.manual_seed(0)
    return (torch.randint(-64, 64, (1, 4, 8, 8)) / 32).to(dtype).requires_grad_()


def rotated(dtype: torch.dtype) -> Tensor:
    return torch.tensor([[160, 160, 80, 40, 0.5], [160, 160, 80, 40, 0.25], [40, 40, 16, 16, 0]], dtype=dtype)


Call = Callable[[torch.dtype], Any]
SCORES = (0.75, 0.5, 0.25)
CALLS: dict[str, Call] = {
    'nms': lambda t: ops.nms(boxes(t), torch.tensor(SCORES, dtype=t), 0.5),
    'soft_nms': lambda t: ops.soft_nms(boxes(t), torch.tensor(SCORES, dtype=t), 0.5),
    'nms_match': lambda t: [
        x.tolist() for x in ops.nms_match(torch.cat([boxes(t), torch.tensor(SCORES, dtype=t)[:, None]], 1), 0.5)
    ],
    'batched_nms': lambda t: ops.batched_nms(
        boxes(t), torch.tensor(SCORES, dtype=t), torch.tensor([0, 79, 5]), dict(type='nms', iou_threshold=0.5)
    ),
    'nms_rotated': lambda t: ops.nms_rotated(rotated(t), torch.tensor(SCORES, dtype=t), 0.5),
    'bbox_overlaps': lambda t: ops.bbox_overlaps(boxes(t), boxes(t)),
    'box_iou_rotated': lambda t: ops.box_iou_rotated(rotated(t), rotated(t)),
    'roi_align': lambda t: ops.roi_align(maps(t), torch.tensor([[0, 1, 1, 6, 6]], dtype=t), 2),
    'RoIAlign': lambda t: ops.RoIAlign(2)(maps(t), torch.tensor([[0, 1, 1, 6, 6]], dtype=t)),
    'roi_align_rotated': lambda t: ops.roi_align_rotated(
        maps(t), torch.tensor([[0, 4, 4, 3, 3, 0.5]], dtype=t), (2, 2), 1.0
    ),
    'deform_conv2d': lambda t: ops.deform_conv2d(
        maps(t), torch.full((1, 18, 6, 6), 0.25, dtype=t), torch.full((2, 4, 3, 3), 0.125, dtype=t)
    ),
    'modulated_deform_conv2d': lambda t: ops.modulated_deform_conv2d(
        maps(t),
        torch.full((1, 18, 6, 6), 0.25, dtype=t),
        torch.full((1, 9, 6, 6), 0.5, dtype=t),
        torch.full((2, 4, 3, 3), 0.125, dtype=t),
        None,
        1,
        0,
        1,
        1,
        1,
    ),
    'point_sample': lambda t: ops.point_sample(maps(t), torch.full((1, 3, 2), 0.375)),
    'active_rotated_filter': lambda t: ops.active_rotated_filter(
        torch.ones(1, 1, 8, 3, 3, dtype=t), torch.arange(1, 9, dtype=torch.int32).repeat(9, 8).reshape(8, 3, 3, 8)
    ),
}


def tensors(value: Any) -> list[Tensor]:
    items = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in items if isinstance(item, Tensor)]


@pytest.mark.parametrize('dtype', HALVES, ids=str)
@pytest.mark.parametrize('name', CALLS)
@pytest.mark.usefixtures('inside')
def test_op(name: str, dtype: torch.dtype) -> None:
    """The FP32 result, given back in the type of the caller; with a gradient where there is one."""
    narrow, wide = CALLS[name](dtype), CALLS[name](torch.float32)
    values = tensors(narrow)
    if not values:
        assert narrow == wide
        return
    for left, right in zip(values, tensors(wide), strict=True):
        assert left.dtype is (dtype if right.is_floating_point() else right.dtype)
        assert left.isfinite().all() and torch.equal(left, right.to(left.dtype))
        if left.requires_grad:
            left.float().square().sum().backward(retain_graph=True)


def test_large_boxes_overlap_themselves() -> None:
    """mmcv's own float16 kernel gives 0 for equal boxes of 300 pixels: their area is inf."""
    regions.enter(OpSet().keys)
    overlap = ops.bbox_overlaps(boxes(torch.float16), boxes(torch.float16))
    regions.leave()
    assert overlap.diagonal().tolist() == [1.0, 1.0, 1.0]
