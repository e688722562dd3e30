"""A small model with a place for faults deep inside, and trainings that are examined."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_wrapper import AmpOptimWrapper
from amp_wrapper.diagnostics.diagnosis import Diagnosis
from amp_wrapper.diagnostics.overflow import OverflowDiagnosis
from amp_wrapper.openmmlab.monitor_hook import attach_members


class ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class WriteOutside(torch.autograd.Function):
    """An op that torch sees nothing of, as those of mmcv are: it writes into the memory of a result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, only_16bit: bool) -> Tensor:
        result = x.new_zeros(x.shape)
        result.copy_(x)
        if not only_16bit or x.dtype is not torch.float32:
            # all bits are ones: NaN in every type
            ctypes.memset(result.data_ptr(), 0xFF, result.element_size() * result.numel())
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class WriteBlindly(torch.autograd.Function):
    """The same, of which nobody can tell what it reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.new_zeros(x.shape)
        ctypes.memset(result.data_ptr(), 0xFF, result.element_size() * result.numel())
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Fault(nn.Module):
    """Does what it is told to its input."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


class Block(nn.Module):
    """Two layers with a residual, checkpointed on request, and a place for a fault between them."""

    def __init__(self, checkpointed: str = '') -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)
        self.place: nn.Module = nn.Identity()
        self.checkpointed = checkpointed

    def inner(self, x: Tensor) -> Tensor:
        return self.fc2(self.place(self.fc1(x)).relu())

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return x + checkpoint(self.inner, x, use_reentrant=self.checkpointed == 'reentrant')
        return x + self.inner(x)


class Deep(nn.Module):
    """Three blocks; three outputs on request; a loss of its own on request."""

    def __init__(self, checkpointed: str = '', outputs: int = 1, loss: nn.Module | None = None) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList([Block(checkpointed) for _ in range(3)])
        self.heads = nn.ModuleList([nn.Linear(8, 2) for _ in range(outputs)])
        self.loss = loss
        #: What the model itself does between its modules.
        self.between: Callable[[Tensor], Tensor] = _unchanged

    def forward(self, x: Tensor) -> Any:
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = block(x)
        x = self.between(x)
        outputs = tuple(head(x) for head in self.heads)
        if self.loss is not None:
            return self.loss(outputs[0])
        return outputs if len(outputs) > 1 else outputs[0]


def _unchanged(x: Tensor) -> Tensor:
    return x.contiguous()


def in_range_of_fp32(x: Tensor) -> Tensor:
    """Out of the range of float16 on the way."""
    return (x * 1e6) / 1e6


def nan_input(x: Tensor) -> Tensor:
    x = x.clone()
    x[2, 1] = torch.nan
    return x


def square(output: Tensor) -> Tensor:
    return output.float().square().mean()


def batches(steps: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 4, generator=generator) for _ in range(steps)]


def examine(
    model: nn.Module,
    level: str,
    inputs: Sequence[Tensor],
    loss_fn: Callable[[Any], Tensor] = square,
    optimizer: torch.optim.Optimizer | None = None,
    before: Callable[[int, nn.Module, AmpOptimWrapper], None] | None = None,
    **options: Any,
) -> list[Diagnosis]:
    """Train on each of ``inputs`` once, with every step examined."""
    if level == 'O0':
        options.setdefault('skip_nonfinite', True)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=optimizer, verbosity=0, **options)
    wrapper.attach(model)
    found: list[Diagnosis] = []

    def publish(diagnosis: Diagnosis) -> str:
        found.append(diagnosis)
        return ''

    parts = wrapper._engine.parts
    watch = OverflowDiagnosis([model], attach_members({'': parts}, ''), publish)
    parts.observers.append(watch)
    wrapper.initialize_count_status(model, 0, len(inputs))
    for index, x in enumerate(inputs):
        if before is not None:
            before(index, model, wrapper)
        with wrapper.optim_context(model):
            output = model(x)
        wrapper.update_params(loss_fn(output))
    return found
