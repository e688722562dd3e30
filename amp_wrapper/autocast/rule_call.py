"""One call of a function whose rule the user gave: half, bfloat16, float or promote."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from contextlib import ExitStack
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..policy.nested import CASTABLE, map_tensors
from . import state as passes
from .call import Copies, autocast_is_on, untraced

# x.add_(y), x += y
_WRITES = re.compile(r'(?:.*[^_]_|__i(?:add|sub|mul|div|truediv|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift)__)')


@dataclasses.dataclass(frozen=True)
class CallRule:
    """What becomes of the floating arguments of a call.

    Attributes:
        dtype: float16, bfloat16 or float32; None for the widest type among them.
    """

    dtype: torch.dtype | None


class _Look:
    """What the tensors of one call are like."""

    def __init__(self) -> None:
        self.first: Tensor | None = None
        self.types: set[torch.dtype] = set()
        self.devices: list[str] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        if self.first is None:
            self.first = tensor
        if tensor.dtype in CASTABLE:
            self.types.add(tensor.dtype)
        device = tensor.device.type
        if device not in self.devices:
            self.devices.append(device)
        return tensor


def look(args: Any, kwargs: Any) -> _Look:
    """What the tensors among the arguments are like."""
    seen = _Look()
    map_tensors(seen, args)
    if kwargs:
        map_tensors(seen, kwargs)
    return seen


def applies(seen: _Look) -> bool:
    """Whether casts are on for these tensors: not in FP32 regions, where autocast is off."""
    return passes.casts_on() and any(autocast_is_on(device) for device in seen.devices)


def _target(rule: CallRule, function: Callable[..., Any], seen: _Look, kwargs: dict[str, Any]) -> torch.dtype | None:
    """The type to cast to; None where there is nothing to cast."""
    if rule.dtype is not None:
        return rule.dtype
    written = kwargs.get('out')
    if written is None and _WRITES.fullmatch(getattr(function, '__name__', '')):
        written = seen.first
    if isinstance(written, Tensor):
        # what is written to keeps its type, and the others follow it
        return written.dtype if written.dtype in CASTABLE else None
    if len(seen.types) > 1:
        return torch.float32
    return next(iter(seen.types), None)


def _is_op(function: Any) -> bool:
    """Whether a callable is one op: compiled, or a function of torch. What is written in Python may use weights."""
    while isinstance(function, (functools.partial, MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    if isinstance(function, nn.Module):
        return False
    kind = type(function)
    if kind is not FunctionType:
        return kind.__module__ == 'builtins' or kind.__module__.partition('.')[0] == 'torch'
    return (function.__module__ or '').partition('.')[0] == 'torch'


def run(
    rule: CallRule,
    function: Callable[..., Any],
    seen: _Look,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    held: int = 0,
) -> Any:
    """Call ``function`` by the rule.

    A function of torch is the op that the rule is about: autocast and the FP32 registry have no say in it. Other
    functions of Python may use weights, too: inside one with a 16-bit rule autocast has that type, inside one with the
    FP32 rule it is off, and the promote rule leaves it as it is.

    Args:
        rule: The type.
        function: The original.
        seen: From :func:`look`.
        args: Floating tensors in any nesting are cast; differentiable. float64 is left alone.
        kwargs: The same.
        held: How many of the first arguments are handed on as they are: 1 for the ``self`` of a method.

    Returns:
        The result as it comes. What the function wrote into its arguments reaches the caller's tensors.
    """
    # torch.compile runs it as it is, as any call in FP32
    return (_untraced if torch.compiler.is_compiling() else _run)(rule, function, seen, args, kwargs, held)


def _run(
    rule: CallRule, function: Callable[..., Any], seen: _Look, args: tuple[Any, ...], kwargs: dict[str, Any], held: int
) -> Any:
    target = _target(rule, function, seen, kwargs)
    is_op = _is_op(function)
    with ExitStack() as stack:
        if is_op:
            stack.enter_context(passes.overruling())
        for device in seen.devices:
            if (is_op or rule.dtype is torch.float32) and autocast_is_on(device):
                stack.enter_context(torch.autocast(device, enabled=False))
            elif (
                not is_op and rule.dtype in (torch.float16, torch.bfloat16) and torch.amp.is_autocast_available(device)
            ):
                stack.enter_context(torch.autocast(device, dtype=rule.dtype))
        if target is None:
            return function(*args, **kwargs)
        copies = Copies(target, CASTABLE)
        result = function(*args[:held], *map_tensors(copies.cast, args[held:]), **map_tensors(copies.cast, kwargs))
    return copies.write_back(result)


_untraced = untraced(_run)
