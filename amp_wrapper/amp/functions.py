"""Changes what O1 and O4 cast: decorators for your own functions, a registry for those of others, and a way to pause.

All of it acts where O1 or O4 casts are on: inside a model that ``amp.initialize`` attached at one of these levels, and
wherever a handle of ``amp.init`` turned them on. In between, every function does what it did.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..casting import kernels, region
from ..casting.functions import Rules, Target, call_by_rule, install, rules_of
from ..errors import AmpConfigError, nearest
from ..policy import lookup
from ..policy.nested import tensors_in

_Function = TypeVar('_Function', bound=Callable[..., Any])


class CastModels:
    """Counts the models that are alive at O1 and O4: decorated functions act outside of models then.

    Attributes:
        any: Whether there is one. torch.compile looks at it before it takes a graph, and not at how many there are.
    """

    def __init__(self) -> None:
        self.any = False
        self._count = 0

    def add(self, model: nn.Module) -> None:
        """Count a model as long as it is alive."""
        self._move(1)
        weakref.finalize(model, self._move, -1)

    def _move(self, by: int) -> None:
        self._count += by
        self.any = self._count > 0


cast_models = CastModels()


def half_function(function: _Function) -> _Function:
    """Decorator: floating arguments are cast to float16, and autocast inside has that type.

    It acts inside models at O1 and O4, and outside of any model while one is alive; not inside models at other levels.

    Args:
        function: Any function or method. Tensors in lists, tuples, dicts and dataclasses among its arguments are cast,
            float64 and integers are left alone.

    Returns:
        The function, wrapped.

    Examples:
        >>> @half_function
        ... def attention(q, k):
        ...     return q @ k.mT
    """
    return _decorated(function, torch.float16)


def bfloat16_function(function: _Function) -> _Function:
    """Decorator: as :func:`half_function`, with bfloat16, whatever the level."""
    return _decorated(function, torch.bfloat16)


def float_function(function: _Function) -> _Function:
    """Decorator: floating arguments are cast to float32, autocast is off inside, and the result stays as it is."""
    return _decorated(function, torch.float32)


def promote_function(function: _Function) -> _Function:
    """Decorator: floating arguments are cast to the widest type among them; in an in-place function to what is written to."""
    return _decorated(function, 'widest')


def register_half_function(module: Any, name: str) -> None:
    """Let ``module.name`` run in float16 where O1 or O4 casts are on, whatever the lists say.

    Before or after ``initialize``; the last registration of a function counts. In a function of torch the rule stands
    above autocast; in other functions of Python autocast has that type.

    Args:
        module: What holds the function: a module, a class (``torch.Tensor`` too), or any object with attributes.
        name: The attribute. A function of Python is covered under each of its names, one that is written in C where it is
            looked up in ``module``.

    Raises:
        AmpConfigError: A ``ValueError``: there is no such attribute, it is no function, or it cannot be replaced.
    """
    _register(module, name, torch.float16)


def register_bfloat16_function(module: Any, name: str) -> None:
    """As :func:`register_half_function`, with bfloat16, whatever the level."""
    _register(module, name, torch.bfloat16)


def register_float_function(module: Any, name: str) -> None:
    """As :func:`register_half_function`, with float32: autocast is off inside, and the result stays as it is."""
    _register(module, name, torch.float32)


def register_promote_function(module: Any, name: str) -> None:
    """As :func:`register_half_function`, with the widest type among the floating arguments."""
    _register(module, name, 'widest')


def disable_casts() -> AbstractContextManager[None]:
    """Inside, on this thread, O1 and O4 cast nothing: autocast is off, our tables and registrations are suspended.

    Nests, ends with exceptions too, and may be a decorator. Losses that get 16-bit tensors still compute in FP32.
    """
    return region.suspended()


def _decorated(function: _Function, target: Target) -> _Function:
    # inside a class body it is handed the descriptor
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(_decorated(function.__func__, target))  # type: ignore[return-value]
    if isinstance(function, type) or not callable(function):
        raise AmpConfigError([f'{function!r} cannot be decorated: take a function, or the forward of a class.'])
    is_method, rules = _takes_self(function), Rules(target)

    @functools.wraps(function)
    def by_rule(*args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = function
        if is_method and args and not isinstance(args[0], Tensor):
            # tensors that it holds are no arguments
            call, args = MethodType(function, args[0]), args[1:]
        if region.is_open() or region.is_suspended() or not cast_models.any:
            return rules.call(call, args, kwargs)
        install()
        kernels.install_tables(region.device_of(tensors_in((args, kwargs))))
        with region.spare(region.TABLES):
            return call_by_rule(target, call, args, kwargs)

    return by_rule  # type: ignore[return-value]


def _takes_self(function: Callable[..., Any]) -> bool:
    try:
        return next(iter(inspect.signature(function).parameters), '') in ('self', 'cls')
    except (TypeError, ValueError):  # compiled functions have no signature
        return False


def _register(module: Any, name: str, target: Target) -> None:
    if not isinstance(name, str):
        raise AmpConfigError([f'name={name!r} must be the name of an attribute, as a string.'])
    holder = getattr(module, '__qualname__', None) or getattr(module, '__name__', None) or repr(module)
    problem = f'does not exist{nearest(name, dir(module))}'
    if hasattr(module, name):
        problem = lookup.unusable(getattr(module, name), module)
    if problem:
        raise AmpConfigError([f'{holder}.{name} {problem}.'])
    rules_of(module, name).target = target
