"""Wraps generators that a forward returned: whenever one runs, the regions that were open in its forward are open again.

A generator's body runs after its module's hooks have closed everything, piece by piece, in whatever order others ask for the
pieces. So each piece gets its own: what was active, and autocast as the body last had it. What the caller has is kept from it,
and is back at every ``yield``, at the end, and after an exception; a generator that is never finished leaves nothing open.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from types import GeneratorType
from typing import Any

import torch

from . import regions, state

_Autocast = tuple[bool, tuple[tuple[str, bool, torch.dtype], ...]]


def _autocast_now() -> _Autocast:
    devices = ((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in state.AUTOCAST_DEVICES)
    return torch.is_autocast_cache_enabled(), tuple(devices)


def _set_autocast(autocast: _Autocast) -> None:
    cache, devices = autocast
    torch.set_autocast_cache_enabled(cache)
    for device, enabled, dtype in devices:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


class _Surroundings:
    """The cast regions and the autocast state that the body of a generator runs in."""

    def __init__(self) -> None:
        self._active = state.snapshot()
        self._autocast = _autocast_now()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside, both are in force on this thread."""
        callers = _autocast_now()
        # a copy of a weight that was cast for one of the two must not serve the other
        torch.clear_autocast_cache()
        torch.autocast_increment_nesting()
        try:
            _set_autocast(self._autocast)
            with regions.resumed(self._active):
                yield
        finally:
            # the body may have an autocast block open at a yield: it finds that again
            self._autocast = _autocast_now()
            _set_autocast(callers)
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()


def _run(
    generator: Generator[Any, Any, Any], surroundings: _Surroundings, change: Callable[[Any], Any]
) -> Generator[Any, Any, Any]:
    resume: Callable[[], Any] = partial(next, generator)
    while True:
        with surroundings.open():
            try:
                value = resume()
            except StopIteration as end:
                return change(end.value)
        try:
            sent = yield change(value)
        except GeneratorExit:
            with surroundings.open():
                generator.close()
            raise
        except BaseException as error:
            resume = partial(generator.throw, error)
        else:
            resume = partial(generator.send, sent)


def resuming(output: Any, change: Callable[[Any], Any] | None = None) -> Any:
    """A generator that runs with what is open now, in place of a generator; anything else as it is.

    Args:
        output: What a forward returned, before its regions are closed.
        change: Applied to what it yields and returns.
    """
    if not isinstance(output, GeneratorType) or torch.compiler.is_dynamo_compiling():
        return output
    return _run(output, _Surroundings(), change or (lambda value: value))
