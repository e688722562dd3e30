"""The record of one configuration option (default, test, error text), and the tests that options are made of."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any, TypeGuard


def is_number(value: Any) -> bool:
    """Whether ``value`` is a real number and no boolean."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole(value: Any, low: int = 0, below: int | None = None) -> TypeGuard[int]:
    """Whether ``value`` is an ``int``, no boolean, not less than ``low`` and less than ``below``."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value and (below is None or value < below)


def is_count(value: Any) -> bool:
    """Whether ``value`` is a whole number of at least 1."""
    return is_whole(value, 1)


def is_flag(value: Any) -> bool:
    """Whether ``value`` is True or False."""
    return isinstance(value, bool)


def one_of(*allowed: Any) -> Callable[[Any], bool]:
    """A test for "equal to one of ``allowed``, and of its type": 1 is not True."""
    return lambda value: any(type(value) is type(each) and value == each for each in allowed)


def optional(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A test that None passes too."""
    return lambda value: value is None or test(value)


def _same(value: Any) -> Any:
    return value


@dataclasses.dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        default: Its value where none is given.
        test: Whether a value means something, at some level.
        expected: What an error says after ``name=value``.
        convert: Gives the form that the code works with; called with values that passed.
        per_op: Why O1 and O4, which cast per operation, refuse any value but None; '' where they do not.
    """

    default: Any
    test: Callable[[Any], bool]
    expected: str
    convert: Callable[[Any], Any] = _same
    per_op: str = ''

    def read(self, label: str, value: Any, problems: list[str]) -> Any:
        """The converted value; for one that fails the test, the default, and a sentence in ``problems``."""
        if self.test(value):
            return self.convert(value)
        problems.append(f'{label}={value!r} {self.expected}.')
        return self.default
