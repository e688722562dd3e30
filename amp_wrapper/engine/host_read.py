"""Lets optimizers of others skip a step: by a flag that they read on the device, or by a late read of the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..optim.fused import FusedOptimizer
from ..torch_internals import hooks_before_all_steps, hooks_before_steps


class LateRead:
    """Numbers on their way to the host, which goes on working until it needs them.

    Args:
        numbers: One-dimensional tensor on any device.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._event: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(numbers.device))  # type: ignore[no-untyped-call]

    @property
    def is_there(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> list[float]:
        """The numbers. Syncs with what was under way when the read began, and with nothing after it."""
        if self._event is not None:
            self._event.synchronize()  # type: ignore[no-untyped-call]
        numbers: list[float] = self._numbers.tolist()
        return numbers


def takes_flag(optimizer: Optimizer) -> bool:
    """Whether the optimizer skips a step by itself where ``found_inf`` says so, reading it on the device.

    That is GradScaler's protocol. torch's fused SGD is left out: a skipped first step leaves memory that nobody wrote as the
    momentum.
    """
    reads = bool(getattr(optimizer, '_step_supports_amp_scaling', False))
    if isinstance(optimizer, FusedOptimizer):
        return reads
    return (
        reads
        and not isinstance(optimizer, torch.optim.SGD)
        and all(g.get('fused', True) for g in optimizer.param_groups)
    )


def has_pre_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody wants to see gradients where the optimizer looks for them, unscaled, before it steps."""
    others = [hook for hook in hooks_before_all_steps().values() if not hasattr(hook, 'sees_no_gradient')]
    return bool(others or hooks_before_steps(optimizer))


@contextlib.contextmanager
def flagged(optimizer: Optimizer, found_inf: Tensor) -> Iterator[None]:
    """The optimizer's next step is skipped where the flag is up.

    Args:
        optimizer: One that :func:`takes_flag`.
        found_inf: float32 scalar, exactly 0 or 1: torch's kernels compare with 1.
    """
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
