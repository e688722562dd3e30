"""Optimizers inside an optimizer, which step the same groups: SAM's base optimizer, Lookahead's.

The outer one does its work around that step, in methods that this package does not know (``first_step``,
``second_step``) and with closures that run in the middle. So the inner ``step`` is where gradients are used: it is
taken or skipped, and the loss scale is updated there, whoever calls it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch.optim import Optimizer

from ..ops.attributes import same


def inside(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that another one holds as attributes, and that step its very groups; theirs too, outermost first."""
    found = [optimizer]
    # it grows meanwhile; two may hold each other
    for each in found:
        for value in vars(each).values():
            if isinstance(value, Optimizer) and value not in found and same(value.param_groups, optimizer.param_groups):
                found.append(value)
    return found[1:]


def lead(inner: Optimizer, is_under_way: Callable[[], bool], take: Callable[..., Any]) -> None:
    """Let ``step`` of an inner optimizer lead through the engine of the outer one, unless that one's own step calls it.

    Args:
        inner: Its ``step`` becomes an attribute of the object, which torch neither pickles nor copies.
        is_under_way: Whether a step of the outer optimizer runs that leads through the engine already.
        take: Takes the inner optimizer's own ``step`` and the arguments of the call.
    """
    own_step = inner.step

    @functools.wraps(getattr(own_step, '__func__', own_step))
    def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if is_under_way():
            return own_step(*args, **kwargs)
        return take(own_step, args, kwargs)

    inner.step = MethodType(step, inner)  # type: ignore[method-assign]
