"""Tells one listener, where there is one, which rule is about to cast a call: a report of what ran in FP32 listens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol


class Listener(Protocol):
    """Is told of calls on every thread, and asks by itself on which."""

    def enters(self, rule: Any, function: Any) -> None:
        """A call begins.

        Args:
            rule: By which its arguments are cast: an ``Fp32Op``, an ``OpRule`` or a ``CallRule``.
            function: What is called.
        """

    def leaves(self) -> None:
        """The innermost call ends."""


listener: Listener | None = None
_NOTHING = nullcontext()


def told(rule: Any, function: Any) -> AbstractContextManager[None]:
    """A block in which the listener, if there is one, knows of a call."""
    return _NOTHING if listener is None else _told(listener, rule, function)


@contextmanager
def _told(who: Listener, rule: Any, function: Any) -> Iterator[None]:
    who.enters(rule, function)
    try:
        yield
    finally:
        who.leaves()


@contextmanager
def listening(by: Listener) -> Iterator[None]:
    """Inside, ``by`` is told; whoever listened before is not."""
    global listener
    before, listener = listener, by
    try:
        yield
    finally:
        listener = before
