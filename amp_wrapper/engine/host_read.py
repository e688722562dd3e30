"""Lets optimizers of others skip a step: by a flag that they read on the device, or by a late read of the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..torch_internals import hooks_of_all_steps, hooks_of_steps

_harmless: list[Callable[..., Any]] = []


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


def _is_torchs_sgd(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.SGD) and not hasattr(optimizer, 'updating')


def _begun(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[bool]:
    """Whether each parameter that is about to be stepped has a momentum."""
    return [
        optimizer.state.get(parameter, {}).get('momentum_buffer') is not None
        for parameter in parameters
        if parameter.grad is not None
    ]


def takes_flag(optimizer: Optimizer) -> bool:
    """Whether the optimizer skips a step by itself where ``found_inf`` says so, reading it on the device.

    That is GradScaler's protocol. torch's fused SGD is left out for steps that begin a momentum: skipped, it would leave
    memory that nobody wrote as the momentum.
    """
    if not getattr(optimizer, '_step_supports_amp_scaling', False):
        return False
    if hasattr(optimizer, 'updating'):
        return True
    if not all(group.get('fused', True) for group in optimizer.param_groups):
        return False
    if not _is_torchs_sgd(optimizer):
        return True
    return all(
        all(_begun(optimizer, group['params'])) for group in optimizer.param_groups if group.get('momentum', 0) != 0
    )


def has_pre_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody wants to see gradients where the optimizer looks for them, unscaled, before it steps."""
    others = any(not any(hook is ours for ours in _harmless) for hook in hooks_of_all_steps('pre').values())
    return others or bool(hooks_of_steps(optimizer, 'pre'))


def mark_harmless(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A global hook that looks at no gradient: :func:`has_pre_hooks` does not count it."""
    _harmless.append(hook)
    return hook


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


@contextlib.contextmanager
def late_gradients(optimizer: Optimizer) -> Iterator[None]:
    """torch's fused SGD raises where only some parameters of a group have a momentum: such a step runs unfused.

    Args:
        optimizer: Any.
    """
    changed = []
    if _is_torchs_sgd(optimizer):
        for group in optimizer.param_groups:
            if group.get('fused') and group['momentum'] != 0 and len(set(_begun(optimizer, group['params']))) > 1:
                group['fused'] = False
                changed.append(group)
    try:
        yield
    finally:
        for group in changed:
            group['fused'] = True


@contextlib.contextmanager
def before_post_hooks(optimizer: Optimizer, call: Callable[[], None] | None) -> Iterator[None]:
    """The optimizer's next step is followed by ``call``, and then by the hooks that somebody registered behind it.

    Such hooks write to what was stepped (a clamp, an average that is copied back), or to the weights of the model.

    Args:
        optimizer: Any.
        call: Called once where the step ends without an error, also by a ``step`` that calls no hooks; None for nothing.
    """
    if call is None:
        yield
        return
    # torch calls those for all optimizers first
    hooks: Any = hooks_of_all_steps('post') or hooks_of_steps(optimizer, 'post')
    if not hooks:
        yield
        call()
        return
    waiting = [call]

    def hook(stepped: Optimizer, args: Any, kwargs: Any) -> None:
        if stepped is optimizer and waiting:
            waiting.pop()()

    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    hooks.move_to_end(handle.id, last=False)
    try:
        yield
    finally:
        handle.remove()
    if waiting:
        call()
