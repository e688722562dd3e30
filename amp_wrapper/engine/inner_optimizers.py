"""Optimizers inside an optimizer, which step the same groups (SAM's base optimizer), and direct calls of ``step()``.

The outer one does its work around that step, in methods that this package does not know, and with closures that run in the
middle. So the inner ``step`` is where gradients are used: it is taken or skipped, and the loss scale is updated there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import ref

from torch.optim import Optimizer

from ..errors import AmpUsageError
from ..ops.attributes import same
from .engine import Engine


def inside(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that another one holds as attributes, and that step its very groups; theirs too, outermost first."""
    found = [optimizer]
    # it grows meanwhile; two may hold each other
    for each in found:
        for value in vars(each).values():
            if isinstance(value, Optimizer) and value not in found and same(value.param_groups, optimizer.param_groups):
                found.append(value)
    return found[1:]


def lead(optimizer: Optimizer, is_allowed: Callable[[], bool], otherwise: Callable[..., Any]) -> None:
    """Let ``step`` of an optimizer be called where that is allowed, and do something else elsewhere.

    Args:
        optimizer: Its ``step`` becomes an attribute of the object, which torch neither pickles nor copies.
        is_allowed: Whether it may be called now.
        otherwise: Takes the optimizer's own ``step`` and the arguments of the call.
    """
    own_step = optimizer.step

    @functools.wraps(getattr(own_step, '__func__', own_step))
    def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return own_step(*args, **kwargs) if is_allowed() else otherwise(own_step, args, kwargs)

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def refuse_direct_steps(engine: Engine) -> None:
    """Refuse ``step()`` of the optimizer of an engine, and of those inside of it, while gradients wait for its own step.

    Args:
        engine: Not kept alive.
    """
    assert engine.optimizer is not None
    name, reference = type(engine.optimizer).__name__, ref(engine)

    def is_allowed() -> bool:
        found = reference()
        return found is None or found.in_own_step or not found.awaits_step

    def refuse(*_: Any) -> None:
        raise AmpUsageError(
            f'{name}.step() beside the wrapper that holds the optimizer: the gradients of its backward() carry the loss scale, '
            f'or have not come to the FP32 masters yet. Call optim_wrapper.step() or optim_wrapper.update_params(loss). '
            f'Optimizers whose steps have parts of their own, as first_step() and second_step() of SAM, train through '
            f'amp.initialize(model, optimizer) and amp.scale_loss.'
        )

    for each in (engine.optimizer, *inside(engine.optimizer)):
        lead(each, is_allowed, refuse)
