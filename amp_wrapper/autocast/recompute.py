"""Activation checkpointing: a segment that runs again in a backward pass sees the casts that its forward pass saw.

torch gives a segment its autocast back. What it cannot know of, our open regions, is remembered here: whatever enters
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
from types import FunctionType
from typing import Any

import torch
from torch.utils import checkpoint

from .. import torch_internals
from ..policy import copies
from . import regions, state

_lock = threading.Lock()
_installed = False


class Segment:
    """A function that finds active, wherever it is called, what was active at its first call.

    The first call is that of the forward pass, inside of the contexts that the script asked for.

    Args:
        function: The segment.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._before: state.Snapshot | None = None
        self._originals: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        now = state.snapshot()
        if self._before is None:
            self._before = now
            self._originals = [copies.original_of(value) for value in args]
        for value, original in zip(args, self._originals):
            # it runs again with detached arguments
            if original is not None and original is not value:
                copies.keep_original(value, original)
        if now == self._before:
            return self._function(*args, **kwargs)
        with regions.resumed(self._before):
            return self._function(*args, **kwargs)


def _segment(function: Any) -> Any:
    return Segment(function) if callable(function) and not isinstance(function, Segment) else function


def install() -> None:
    """Put the entries into torch, once in a process.

    Where somebody has put a function of their own in the place of torch's, that one is left alone.
    """
    global _installed
    if _installed:
        return
    with _lock:
        if not _installed:
            _enter_function()
            _enter_reentrant()
            _enter_decorated()
            _installed = True


def _enter_function() -> None:
    """Into :func:`torch.utils.checkpoint.checkpoint`, below the decorators that torch has around it."""
    function = inspect.unwrap(checkpoint.checkpoint)
    if not isinstance(function, FunctionType) or function.__module__ != checkpoint.__name__ or function.__closure__:
        return
    original = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            args = (_segment(args[0]), *args[1:])
        elif 'function' in kwargs:
            kwargs = {**kwargs, 'function': _segment(kwargs['function'])}
        return original(*args, **kwargs)

    def entry(*args: Any, _amp_wrapper_run: Any, **kwargs: Any) -> Any:
        return _amp_wrapper_run(args, kwargs)

    # torch.compile and others read the names of its arguments
    signature = inspect.signature(function)
    function.__kwdefaults__ = {'_amp_wrapper_run': run}
    function.__code__ = entry.__code__.replace(co_name=function.__code__.co_name)
    function.__signature__ = signature  # type: ignore[attr-defined]


def _enter_reentrant() -> None:
    """Into ``CheckpointFunction.forward``, which some apply directly."""
    cls: Any = checkpoint.CheckpointFunction
    forward = cls.forward
    place = list(inspect.signature(forward).parameters).index('run_function')

    @functools.wraps(forward)
    def entry(*args: Any) -> Any:
        return forward(*args[:place], _segment(args[place]), *args[place + 1 :])

    cls.forward = staticmethod(entry)


def _enter_decorated() -> None:
    """Into what ``checkpoint(use_reentrant=False)`` makes of a function as a decorator, where torch has that."""
    cls = torch_internals.checkpointed_function()
    if cls is None:
        return
    call = cls.__call__

    @functools.wraps(call)
    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            self = copy.copy(self)
            self.function = _segment(self.function)
        return call(self, *args, **kwargs)

    cls.__call__ = entry
