"""Checkpointed segments: what runs again in a backward pass sees the casts that its forward pass saw.

torch gives a segment its autocast back. What it cannot know of, our open passes, is remembered here: whatever enters
:func:`torch.utils.checkpoint.checkpoint` has its function wrapped in a :class:`Segment`, which notes at its first call what is
open, and opens that again at every later call. So it holds in any backward pass, on any thread, with any arguments.

The entry is put into torch's function object itself, so that it is found under every name that somebody kept: by
``from torch.utils.checkpoint import checkpoint``, in a ``functools.partial``, in a checkpoint wrapper. The object, its
signature and its behaviour stay; where nothing of ours is open, a segment is called as it is.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch
from torch.utils import checkpoint

from .. import torch_internals
from . import state as passes

_Held = Callable[[], AbstractContextManager[None]]

_lock = threading.Lock()
_installed = False


class Segment:
    """A function that opens, wherever it is called, the passes that were open at its first call.

    The first call is that of the forward pass, inside of the contexts that the script asked for.

    Args:
        function: The segment.
        held: Makes a context in which the stand-ins of the registry are in place.
    """

    def __init__(self, function: Callable[..., Any], held: _Held) -> None:
        self._function, self._held = function, held
        self._state: passes.State | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        now = passes.snapshot()
        if self._state is None:
            self._state = now
        if now == self._state:
            return self._function(*args, **kwargs)
        with self._held(), passes.resumed(self._state):
            return self._function(*args, **kwargs)


def install(held: _Held) -> None:
    """Put the entries into torch, once in a process.

    Where somebody has put a function of their own in the place of torch's, that one is left alone.

    Args:
        held: As in :class:`Segment`.
    """
    global _installed
    if _installed:
        return
    with _lock:
        if _installed:
            return

        def wrapped(function: Any) -> Any:
            return Segment(function, held) if callable(function) and not isinstance(function, Segment) else function

        _enter_function(wrapped)
        _enter_reentrant(wrapped)
        _enter_decorated(wrapped)
        _installed = True


def _enter_function(wrapped: Callable[[Any], Any]) -> None:
    """Into :func:`torch.utils.checkpoint.checkpoint`, below the decorators that torch has around it."""
    function = inspect.unwrap(checkpoint.checkpoint)
    if not isinstance(function, FunctionType) or function.__module__ != checkpoint.__name__ or function.__closure__:
        return
    original = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            args = (wrapped(args[0]), *args[1:])
        elif 'function' in kwargs:
            kwargs = {**kwargs, 'function': wrapped(kwargs['function'])}
        return original(*args, **kwargs)

    def entry(*args: Any, _amp_wrapper_run: Any, **kwargs: Any) -> Any:
        return _amp_wrapper_run(args, kwargs)

    # torch.compile and others read the names of its arguments
    signature = inspect.signature(function)
    function.__kwdefaults__ = {'_amp_wrapper_run': run}
    function.__code__ = entry.__code__.replace(co_name=function.__code__.co_name)
    function.__signature__ = signature  # type: ignore[attr-defined]


def _enter_reentrant(wrapped: Callable[[Any], Any]) -> None:
    """Into ``CheckpointFunction.forward``, which some apply directly."""
    cls: Any = checkpoint.CheckpointFunction
    forward = cls.forward
    place = list(inspect.signature(forward).parameters).index('run_function')

    @functools.wraps(forward)
    def entry(*args: Any) -> Any:
        return forward(*args[:place], wrapped(args[place]), *args[place + 1 :])

    cls.forward = staticmethod(entry)


def _enter_decorated(wrapped: Callable[[Any], Any]) -> None:
    """Into what ``checkpoint(use_reentrant=False)`` makes of a function as a decorator, where torch has that."""
    cls = torch_internals.checkpointed_function()
    if cls is None:
        return
    call = cls.__call__

    @functools.wraps(call)
    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self = copy.copy(self)
            self.function = wrapped(self.function)
        return call(self, *args, **kwargs)

    cls.__call__ = entry
