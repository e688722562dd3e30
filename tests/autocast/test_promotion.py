"""Functions of several tensors go to the widest type, and what is written to keeps its own."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from amp_wrapper.autocast.global_autocast import GlobalCasts
from amp_wrapper.autocast.patching import patches

BINARY = [
    torch.atan2,
    torch.mul,
    torch.add,
    torch.div,
    lambda x, y: x.atan2(y),
    lambda x, y: x.mul(y),
    lambda x, y: x - y,
    lambda x, y: x / y,
    lambda x, y: torch.addcmul(x, y, x),
    lambda x, y: torch.cross(x, y, dim=0),
    lambda x, y: torch.tensordot(x, y, dims=1),
]
COMPARISONS = [torch.eq, torch.ge, operator.gt, operator.le, torch.lt, operator.ne]


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=['float16', 'bfloat16'])
def half(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    casts = GlobalCasts(request.param)
    casts.start()
    yield request.param
    casts.stop()
    assert not patches.in_place


def _pairs(half: torch.dtype) -> Iterator[tuple[torch.dtype, torch.dtype]]:
    return itertools.product((torch.float32, half), repeat=2)


@pytest.mark.parametrize('function', BINARY)
def test_the_widest_type_wins(function: Callable[[Tensor, Tensor], Tensor], half: torch.dtype) -> None:
    for left, right in _pairs(half):
        x = torch.randn(3).to(left).requires_grad_()
        y = torch.randn(3).to(right).requires_grad_()
        result = function(x, y)
        assert result.dtype is (torch.float32 if torch.float32 in (left, right) else half)
        result.float().sum().backward()
        assert x.grad is not None
        assert y.grad is not None
        assert (x.grad.dtype, y.grad.dtype) == (left, right)


@pytest.mark.parametrize('function', COMPARISONS)
def test_comparisons_take_mixed_types(function: Callable[[Tensor, Tensor], Tensor], half: torch.dtype) -> None:
    for left, right in _pairs(half):
        assert function(torch.ones(3, dtype=left), torch.ones(3, dtype=right)).dtype is torch.bool
    assert torch.equal(torch.ones(3, dtype=half), torch.ones(3)) in (True, False)


@pytest.mark.parametrize('function', [torch.cat, torch.stack, lambda tensors: torch.einsum('a,b,c->abc', *tensors)])
def test_sequences(function: Callable[[list[Tensor]], Tensor], half: torch.dtype) -> None:
    narrow = [torch.randn(2).to(half) for _ in range(2)]
    wide = function([*narrow, torch.randn(2)])
    # a product of matrices is 16-bit whatever it gets
    assert wide.dtype is (half if wide.dim() == 3 else torch.float32)
    assert function([*narrow, narrow[0]]).dtype is half


@pytest.mark.parametrize(
    'function',
    [
        lambda x, y: x.add_(y),
        lambda x, y: x.mul_(y),
        operator.iadd,
        operator.isub,
        operator.itruediv,
        lambda x, y: x.copy_(y),
    ],
)
def test_what_is_written_to_keeps_its_type(function: Callable[[Tensor, Tensor], Tensor], half: torch.dtype) -> None:
    for left, right in _pairs(half):
        leaf = torch.randn(3).to(left).requires_grad_()
        y = torch.randn(3).to(right)
        result = function(leaf.clone(), y)
        assert result.dtype is left
        result.float().sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.dtype is left
