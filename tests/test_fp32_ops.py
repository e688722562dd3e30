"""Functional losses in FP32 while a cast model runs, and nothing left behind afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack

from amp_wrapper import fp32_ops

HALVES = (torch.float16, torch.bfloat16)


def modes() -> int:
    """Torch function modes of this package that are active on this thread."""
    return sum(isinstance(mode, fp32_ops.Fp32OpsMode) for mode in _get_current_function_mode_stack())


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    assert fp32_ops.depth() == 0 and modes() == 0
    yield
    left = fp32_ops.depth()
    fp32_ops.unwind(0)
    assert left == 0 and modes() == 0


@pytest.fixture
def inside() -> Iterator[None]:
    fp32_ops.enter()
    yield
    fp32_ops.leave()


Make = Callable[[Tensor, Tensor], Tensor]
# x is (4, 5) scores; y is (4, 5) in (0, 1)
CALLS: dict[Any, Make] = {
    F.binary_cross_entropy: lambda x, y: F.binary_cross_entropy(y, y),
    F.binary_cross_entropy_with_logits: lambda x, y: F.binary_cross_entropy_with_logits(x, y, weight=y),
    F.cosine_embedding_loss: lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(4, device=x.device)),
    F.cross_entropy: lambda x, y: F.cross_entropy(x, torch.tensor([0, 1, 2, 3], device=x.device), label_smoothing=0.1),
    F.ctc_loss: lambda x, y: F.ctc_loss(
        x[:, None].log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
    ),
    F.gaussian_nll_loss: lambda x, y: F.gaussian_nll_loss(x, y, y),
    F.hinge_embedding_loss: lambda x, y: F.hinge_embedding_loss(x, y.round() * 2 - 1),
    F.huber_loss: lambda x, y: F.huber_loss(x, y),
    F.kl_div: lambda x, y: F.kl_div(x, y, reduction='batchmean'),
    F.l1_loss: lambda x, y: F.l1_loss(input=x, target=y),
    F.margin_ranking_loss: lambda x, y: F.margin_ranking_loss(x, y, y.round() * 2 - 1),
    F.mse_loss: lambda x, y: F.mse_loss(x, target=y),
    F.multi_margin_loss: lambda x, y: F.multi_margin_loss(x, torch.tensor([0, 1, 2, 3], device=x.device)),
    F.multilabel_margin_loss: lambda x, y: F.multilabel_margin_loss(x, torch.full((4, 5), -1, device=x.device)),
    F.multilabel_soft_margin_loss: lambda x, y: F.multilabel_soft_margin_loss(x, y.round()),
    F.nll_loss: lambda x, y: F.nll_loss(x, torch.tensor([0, 1, 2, 3], device=x.device)),
    F.poisson_nll_loss: lambda x, y: F.poisson_nll_loss(x, y),
    F.smooth_l1_loss: lambda x, y: F.smooth_l1_loss(x, y),
    F.soft_margin_loss: lambda x, y: F.soft_margin_loss(x, y.round() * 2 - 1),
    F.triplet_margin_loss: lambda x, y: F.triplet_margin_loss(x, y, x * 2),
    F.triplet_margin_with_distance_loss: lambda x, y: F.triplet_margin_with_distance_loss(x, y, x * 2),
    torch.binary_cross_entropy_with_logits: lambda x, y: torch.binary_cross_entropy_with_logits(x, y, reduction=1),
    torch.cosine_embedding_loss: lambda x, y: torch.cosine_embedding_loss(
        x, y, torch.ones(4, device=x.device), reduction=1
    ),
    torch.ctc_loss: lambda x, y: torch.ctc_loss(
        x.view(4, 1, 5), torch.tensor([[1, 2]], device=x.device), torch.tensor([4]), torch.tensor([2])
    ),
    torch.hinge_embedding_loss: lambda x, y: torch.hinge_embedding_loss(x, y.round() * 2 - 1, reduction=1),
    torch.kl_div: lambda x, y: torch.kl_div(x, y, reduction=1),
    torch.margin_ranking_loss: lambda x, y: torch.margin_ranking_loss(x, y, y.round() * 2 - 1, reduction=1),
    torch.poisson_nll_loss: lambda x, y: torch.poisson_nll_loss(x, y, True, False, 1e-8, 1),
    torch.triplet_margin_loss: lambda x, y: torch.triplet_margin_loss(x, y, x * 2, reduction=1),
}


def test_every_registered_function_has_a_call_here() -> None:
    assert set(CALLS) == fp32_ops.FP32_FUNCTIONS


@pytest.mark.parametrize('dtype', HALVES, ids=str)
@pytest.mark.parametrize('function', CALLS, ids=lambda f: f.__name__)
@pytest.mark.usefixtures('inside')
def test_function_runs_in_fp32(function: Any, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.linspace(-2, 2, 20, device=device).reshape(4, 5).to(dtype).requires_grad_()
    y = torch.linspace(0.1, 0.9, 20, device=device).reshape(4, 5).to(dtype)
    result = CALLS[function](x, y)
    assert result.dtype is torch.float32
    if function is not F.ctc_loss:  # its log_softmax is a 16-bit one here
        wide = CALLS[function](x.detach().float(), y.float())
        assert torch.equal(result.detach(), wide)
    if function is not F.binary_cross_entropy and function is not F.multilabel_margin_loss:
        result.backward()
        assert x.grad is not None and x.grad.dtype is dtype


@pytest.mark.usefixtures('inside')
def test_sum_that_float16_cannot_hold(device: torch.device) -> None:
    x = torch.full((100_000,), 0.9, device=device, dtype=torch.float16)
    loss = F.l1_loss(x, torch.zeros_like(x), reduction='sum')
    assert loss.dtype is torch.float32 and loss.item() == pytest.approx(90_000, rel=1e-3)


def test_outside_nothing_changes(device: torch.device) -> None:
    x = torch.ones(3, device=device, dtype=torch.float16)
    assert F.mse_loss(x, x).dtype is torch.float16
    fp32_ops.enter()
    fp32_ops.leave()
    assert F.mse_loss(x, x).dtype is torch.float16


@pytest.mark.usefixtures('inside')
def test_other_functions_and_types_are_left_alone(device: torch.device) -> None:
    x = torch.ones(3, 3, device=device, dtype=torch.float16)
    assert F.relu(x).dtype is torch.float16 and (x + x).dtype is torch.float16
    wide = x.double()
    assert F.mse_loss(wide, wide).dtype is torch.float64


def test_one_mode_serves_nested_passes() -> None:
    for depth in (1, 2, 3):
        fp32_ops.enter()
        assert fp32_ops.depth() == depth and modes() == 1
    for depth in (2, 1, 0):
        fp32_ops.leave()
        assert fp32_ops.depth() == depth and modes() == bool(depth)


def test_leaving_once_too_often_is_harmless() -> None:
    fp32_ops.leave()
    assert fp32_ops.depth() == 0
    fp32_ops.enter()
    assert fp32_ops.depth() == 1 and modes() == 1
    fp32_ops.leave()


@pytest.mark.parametrize('to', [0, 1, 2])
def test_unwind(to: int) -> None:
    for _ in range(3):
        fp32_ops.enter()
    fp32_ops.unwind(to)
    assert fp32_ops.depth() == to and modes() == (to > 0)
    fp32_ops.unwind(5)
    assert fp32_ops.depth() == to
    fp32_ops.unwind(0)


@pytest.mark.usefixtures('inside')
def test_threads_do_not_share_the_mode() -> None:
    seen = []
    thread = threading.Thread(target=lambda: seen.append((fp32_ops.depth(), modes())))
    thread.start()
    thread.join()
    assert seen == [(0, 0)] and fp32_ops.depth() == 1
