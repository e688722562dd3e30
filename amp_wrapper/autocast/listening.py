"""Tells one listener, where there is one, which rule is about to cast a call.

A report of what ran in FP32 listens here for the time of a forward pass (:mod:`amp_wrapper.diagnostics`). At all other times
:data:`listener` is None, and each call that a rule applies to looks at that once. In graphs nothing is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ..policy.autocast_lists import OpRule
from ..policy.fp32_registry import Fp32Op
from .state import AutocastOff

#: A rule of the FP32 registry or of a configuration, of the lists of autocast, or of the user (a ``CallRule``).
Rule = Fp32Op | OpRule | Any


class Listener(Protocol):
    """Is told of calls on every thread, and asks by itself on which."""

    def enters(self, rule: Rule, function: Any) -> None:
        """A call begins.

        Args:
            rule: By which its arguments are cast.
            function: What is called; for ops, their name.
        """

    def leaves(self) -> None:
        """The innermost call ends."""


listener: Listener | None = None


class Told(AutocastOff):
    """:class:`AutocastOff`, and the listener is told.

    Args:
        told: Who listens.
        rule: As in :meth:`Listener.enters`.
        function: The same.
        devices: As of :class:`AutocastOff`.
    """

    __slots__ = ('_function', '_rule', '_told')

    def __init__(self, told: Listener, rule: Rule, function: Any, devices: Iterable[str] = ()) -> None:
        super().__init__(devices)
        self._told, self._rule, self._function = told, rule, function

    def __enter__(self) -> None:
        self._told.enters(self._rule, self._function)
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._told.leaves()


@contextmanager
def listening(by: Listener) -> Iterator[None]:
    """Inside, ``by`` is told; whoever listened before is not."""
    global listener
    before, listener = listener, by
    try:
        yield
    finally:
        listener = before
