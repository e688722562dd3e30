"""Stands in front of methods of an optimizer, and of those inside of it which step the same groups (SAM's base optimizer).

An outer optimizer does its work around the inner step, in methods that this package does not know, and with closures that run
in the middle. So the inner ``step`` is where gradients are used: it is taken or skipped, and the loss scale is updated there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any
from weakref import ref

from torch.optim import Optimizer

from ..compiler_internals import untraced
from ..errors import AmpUsageError
from .engine import Engine


class _FrontMethod:
    """A method of one object that does not keep the object alive, as a bound one would, which lies in the object itself.

    torch's schedulers wrap ``step``, and look for the function and its object.

    Args:
        function: Takes the object, and the arguments of a call.
        owner: The object.
        own: The method that it had.
    """

    def __init__(self, function: Callable[..., Any], owner: object, own: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.__signature__ = inspect.signature(own)
        self.__func__ = function
        self._owner = ref(owner)

    @property
    def __self__(self) -> object:
        return self._owner()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self._owner(), *args, **kwargs)


def put_in_front(optimizer: Optimizer, name: str, front: Callable[..., Any]) -> None:
    """Let calls of a method of one optimizer lead through a function.

    Args:
        optimizer: The method becomes an attribute of the object, which torch neither pickles nor copies: its class, its saved
            form and every copy are those of a plain optimizer. Schedulers that came before stay inside, those that come later
            go around.
        name: Of the method.
        front: Takes the optimizer's own method, and the arguments of a call.
    """
    own: Any = getattr(optimizer, name)
    # a scheduler's wrapper is a function of its own, without the object
    function: Any = own.__func__ if getattr(own, '__self__', None) is optimizer else staticmethod(own)

    @untraced
    @functools.wraps(getattr(own, '__func__', own))
    def method(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return front(function.__get__(self), *args, **kwargs)

    setattr(optimizer, name, _FrontMethod(method, optimizer, own))


def inside(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that another one holds as attributes, and that step its very groups; theirs too, outermost first."""
    found, groups = [optimizer], list(map(id, optimizer.param_groups))
    # it grows meanwhile; two may hold each other
    for each in found:
        for value in vars(each).values():
            if isinstance(value, Optimizer) and value not in found and list(map(id, value.param_groups)) == groups:
                found.append(value)
    return found[1:]


def refuse_direct_steps(engine: Engine) -> None:
    """Refuse ``step()`` of the optimizer of an engine, and of those inside of it, while gradients wait for its own step.

    Args:
        engine: Not kept alive.
    """
    optimizer, reference = engine.optimizer, ref(engine)
    assert optimizer is not None
    kind = type(optimizer).__name__

    def step(own_step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        found = reference()
        if found is not None and found.awaits_step and not found.in_own_step:
            raise AmpUsageError(
                f'{kind}.step() beside the wrapper that holds it, whose gradients carry a scale or are not at masters yet: '
                f'call optim_wrapper.step(). Steps in two parts, as those of SAM, train through amp.initialize.'
            )
        return own_step(*args, **kwargs)

    for each in (optimizer, *inside(optimizer)):
        put_in_front(each, 'step', step)
