"""torch's losses run in FP32 inside forward passes of ours, however they were imported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fp32_functions import scores
from torch import Tensor, nn
from torch.nn.functional import l1_loss as imported_by_name

from amp_wrapper.autocast import regions
from amp_wrapper.autocast.op_set import OpSet
from amp_wrapper.policy.fp32_registry import FP32_OPS

HALVES = (torch.float16, torch.bfloat16)
KEPT_REFERENCE = F.smooth_l1_loss
PARTIAL = functools.partial(F.mse_loss, reduction='sum')


# -- torch's losses ----------------------------------------------------------------------------------------------------

Make = Callable[[Tensor, Tensor], Tensor]


def classes(x: Tensor) -> Tensor:
    return torch.tensor([0, 1, 2, 3], device=x.device)


# x is (4, 5) scores; y is (4, 5) in (0, 1)
CALLS: dict[str, Make] = {
    'binary_cross_entropy': lambda x, y: F.binary_cross_entropy(y, y),
    'binary_cross_entropy_with_logits': lambda x, y: F.binary_cross_entropy_with_logits(x, y, weight=y),
    'cosine_embedding_loss': lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(4, device=x.device)),
    'cross_entropy': lambda x, y: F.cross_entropy(x, classes(x), label_smoothing=0.1),
    'ctc_loss': lambda x, y: F.ctc_loss(
        x[:, None].float().log_softmax(-1).to(x.dtype), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
    ),
    'gaussian_nll_loss': lambda x, y: F.gaussian_nll_loss(x, y, y),
    'hinge_embedding_loss': lambda x, y: F.hinge_embedding_loss(x, y.round() * 2 - 1),
    'huber_loss': lambda x, y: F.huber_loss(x, y),
    'kl_div': lambda x, y: F.kl_div(x, y, reduction='batchmean'),
    'l1_loss': lambda x, y: F.l1_loss(input=x, target=y),
    'margin_ranking_loss': lambda x, y: F.margin_ranking_loss(x, y, y.round() * 2 - 1),
    'mse_loss': lambda x, y: F.mse_loss(x, target=y),
    'multi_margin_loss': lambda x, y: F.multi_margin_loss(x, classes(x)),
    'multilabel_margin_loss': lambda x, y: F.multilabel_margin_loss(x, torch.full((4, 5), -1, device=x.device)),
    'multilabel_soft_margin_loss': lambda x, y: F.multilabel_soft_margin_loss(x, y.round()),
    'nll_loss': lambda x, y: F.nll_loss(x, classes(x)),
    'poisson_nll_loss': lambda x, y: F.poisson_nll_loss(x, y),
    'smooth_l1_loss': lambda x, y: F.smooth_l1_loss(x, y),
    'soft_margin_loss': lambda x, y: F.soft_margin_loss(x, y.round() * 2 - 1),
    'triplet_margin_loss': lambda x, y: F.triplet_margin_loss(x, y, x * 2),
    'triplet_margin_with_distance_loss': lambda x, y: F.triplet_margin_with_distance_loss(x, y, x * 2),
}
# the same objects under torch, which models call too
DIRECT: dict[str, Make] = {
    'binary_cross_entropy_with_logits': lambda x, y: torch.binary_cross_entropy_with_logits(x, y, reduction=1),
    'cosine_embedding_loss': lambda x, y: torch.cosine_embedding_loss(
        x, y, torch.ones(4, device=x.device), reduction=1
    ),
    'ctc_loss': lambda x, y: torch.ctc_loss(
        x.view(4, 1, 5), torch.tensor([[1, 2]], device=x.device), torch.tensor([4]), torch.tensor([2])
    ),
    'hinge_embedding_loss': lambda x, y: torch.hinge_embedding_loss(x, y.round() * 2 - 1, reduction=1),
    'kl_div': lambda x, y: torch.kl_div(x, y, reduction=1),
    'margin_ranking_loss': lambda x, y: torch.margin_ranking_loss(x, y, y.round() * 2 - 1, reduction=1),
    'poisson_nll_loss': lambda x, y: torch.poisson_nll_loss(x, y, True, False, 1e-8, 1),
    'triplet_margin_loss': lambda x, y: torch.triplet_margin_loss(x, y, x * 2, reduction=1),
}


def test_every_registered_loss_has_a_call_here() -> None:
    prefix = 'torch.nn.functional.'
    functional = {n[len(prefix) :] for n, op in FP32_OPS.items() if n.startswith(prefix) and op.output == 'float32'}
    direct = {n[6:] for n, op in FP32_OPS.items() if n.count('.') == 1 and op.output == 'float32'}
    assert set(CALLS) == functional and set(DIRECT) == direct


@pytest.mark.parametrize('dtype', HALVES, ids=str)
@pytest.mark.parametrize('name', CALLS)
@pytest.mark.usefixtures('inside')
def test_loss_runs_in_fp32(name: str, dtype: torch.dtype, device: torch.device) -> None:
    x, y = scores(dtype, device)
    result = CALLS[name](x, y)
    assert result.dtype is torch.float32
    if name != 'ctc_loss':  # its input is rounded on the way here
        assert torch.equal(result.detach(), CALLS[name](x.detach().float(), y.float()))
    if name not in ('binary_cross_entropy', 'multilabel_margin_loss'):
        result.backward()
        assert x.grad is not None and x.grad.dtype is dtype


@pytest.mark.parametrize('dtype', HALVES, ids=str)
@pytest.mark.parametrize('name', DIRECT)
@pytest.mark.usefixtures('inside')
def test_its_namesake_in_torch_runs_in_fp32(name: str, dtype: torch.dtype, device: torch.device) -> None:
    x, y = scores(dtype, device)
    result = DIRECT[name](x, y)
    assert result.dtype is torch.float32
    assert torch.equal(result.detach(), DIRECT[name](x.detach().float(), y.float()))


@pytest.mark.usefixtures('inside')
def test_sum_that_float16_cannot_hold(device: torch.device) -> None:
    x = torch.full((100_000,), 0.9, device=device, dtype=torch.float16)
    loss = F.l1_loss(x, torch.zeros_like(x), reduction='sum')
    assert loss.dtype is torch.float32 and loss.item() == pytest.approx(90_000, rel=1e-3)


@pytest.mark.parametrize('dtype', HALVES, ids=str)
@pytest.mark.usefixtures('inside')
def test_grid_sample_takes_mixed_types(dtype: torch.dtype, device: torch.device) -> None:
    """Deformable DETR: 16-bit values at FP32 locations are an error in torch."""
    value = torch.arange(16.0, device=device).reshape(1, 1, 4, 4).to(dtype)
    grid = torch.rand(1, 2, 2, 2, device=device) - 0.5
    result = F.grid_sample(value, grid, align_corners=False)
    assert result.dtype is dtype
    assert torch.equal(result, F.grid_sample(value.float(), grid, align_corners=False).to(dtype))


@pytest.mark.usefixtures('inside')
def test_local_response_norm_of_large_values(device: torch.device) -> None:
    x = torch.full((1, 4, 2, 2), 300.0, device=device, dtype=torch.float16)
    result = F.local_response_norm(x, 2)
    assert result.dtype is torch.float16 and torch.isfinite(result).all() and bool((result > 0).all())


# -- how a function came to its caller -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'function',
    [
        lambda x: F.l1_loss(x, x * 0),
        lambda x: imported_by_name(x, x * 0),
        lambda x: KEPT_REFERENCE(x, x * 0),
        lambda x: PARTIAL(x, x * 0),
        lambda x: nn.functional.cross_entropy(x[None], torch.zeros(1, dtype=torch.int64, device=x.device)),
    ],
    ids=['attribute', 'from-import', 'kept reference', 'partial', 'another path'],
)
@pytest.mark.usefixtures('inside')
def test_however_it_was_imported(function: Any, device: torch.device) -> None:
    assert function(torch.ones(3, device=device, dtype=torch.float16)).dtype is torch.float32


@pytest.mark.usefixtures('inside')
def test_other_functions_and_types_are_left_alone(device: torch.device) -> None:
    x = torch.ones(3, 3, device=device, dtype=torch.float16)
    assert F.relu(x).dtype is torch.float16 and (x + x).dtype is torch.float16
    wide = x.double()
    assert F.mse_loss(wide, wide).dtype is torch.float64


@pytest.mark.parametrize('dtype', HALVES, ids=str)
def test_meta_tensors(dtype: torch.dtype) -> None:
    """Shapes and FLOPs are counted on the meta device, which has no autocast."""
    x = torch.ones(3, 3, device='meta', dtype=dtype)
    regions.enter(OpSet(('torch.matmul',)).keys)
    assert torch.matmul(x, x).dtype is dtype and F.mse_loss(x, x).dtype is torch.float32
    regions.leave()
