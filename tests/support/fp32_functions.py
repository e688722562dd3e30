"""Functions, methods and autograd functions for the FP32 registry, under names that tests give it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp_wrapper.autocast import regions
from amp_wrapper.autocast.op_set import OpSet

ME = __name__


def product(x: Tensor, y: Tensor) -> Tensor:
    """Says in which types it ran."""
    seen.append((x.dtype, y.dtype, torch.is_autocast_enabled(x.device.type)))
    return x @ y.T


seen: list[tuple[torch.dtype, torch.dtype, bool]] = []


def nested(items: dict[str, list[Tensor]], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {'sum': items['x'][0] + 1, 'labels': items['x'][1], 'made': torch.zeros(1, dtype=dtype), 'text': 'as it is'}


class Coder:
    def decode(self, x: Tensor) -> Tensor:
        return self._double(x)

    @staticmethod
    def encode(x: Tensor) -> Tensor:
        assert x.dtype is torch.float32
        return x * 2

    @classmethod
    def make(cls, x: Tensor) -> Tensor:
        assert x.dtype is torch.float32 and cls is Coder
        return x * 2

    def _double(self, x: Tensor) -> Tensor:
        assert x.dtype is torch.float32
        return x * 2


class Square(torch.autograd.Function):
    """A custom op without 16-bit kernels, as most of mmcv's are for bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        if x.dtype is not torch.float32:
            raise RuntimeError(f'expected scalar type Float but found {x.dtype}')
        ctx.save_for_backward(x)
        ctx.scale = scale
        index = (x * 0).argmax()
        ctx.mark_non_differentiable(index)
        return x * x * scale, index

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        (x,) = ctx.saved_tensors
        if gradient.dtype is not torch.float32 or x.dtype is not torch.float32:
            raise RuntimeError(f'expected scalar type Float but found {gradient.dtype}')
        return 2 * x * gradient * ctx.scale, None


square = Square.apply


class Modern(torch.autograd.Function):
    """The newer style, with setup_context."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        assert x.dtype is torch.float32
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        assert inputs[0].dtype is torch.float32 and output.dtype is torch.float32
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (output,) = ctx.saved_tensors
        assert gradient.dtype is torch.float32 and output.dtype is torch.float32
        return gradient * output


class Marks(torch.autograd.Function):
    """A floating output that carries no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        score = x.sum(0)
        ctx.mark_non_differentiable(score)
        return x * 2, score

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        return gradient * 2


def scores(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 2, 20, device=device).reshape(4, 5).to(dtype).requires_grad_()
    y = torch.linspace(0.1, 0.9, 20, device=device).reshape(4, 5).to(dtype)
    return x, y


def run(names: str | tuple[str, ...], function: Callable[[], Any]) -> Any:
    names = (names,) if isinstance(names, str) else names
    regions.enter(OpSet(tuple(f'{ME}.{name}' for name in names)).keys)
    try:
        return function()
    finally:
        regions.leave()


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert x.dtype is torch.float32
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@dataclasses.dataclass
class Counter:
    weight: Tensor
    calls: int = 0

    def scaled(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


class ModernPair(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        return gradient * 2


class OtherBackward(Square):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        assert gradient.dtype is torch.float32
        return gradient * 5, None
