"""Tells one listener, where there is one, which rule is about to cast a call: a report of what ran in FP32 listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

#: Makes a block around a call, of the rule by which its arguments are cast (an ``Fp32Op``, an ``OpRule`` or a ``CallRule``) and
#: of what is called. It is told of calls on every thread.
Listener = Callable[[Any, Any], AbstractContextManager[None]]

_listener: Listener | None = None
_NOTHING = nullcontext()


def told(rule: Any, function: Any) -> AbstractContextManager[None]:
    """A block in which the listener, if there is one, knows of a call."""
    return _NOTHING if _listener is None else _listener(rule, function)


@contextmanager
def listening(by: Listener) -> Iterator[None]:
    """Inside, ``by`` is told; whoever listened before is not."""
    global _listener
    before, _listener = _listener, by
    try:
        yield
    finally:
        _listener = before
