"""The record of one configuration option (default, test, error text), and the tests that options are made of."""

from __future__ import annotations

import dataclasses
import numbers
import operator
from collections.abc import Callable
from typing import Any, SupportsIndex, TypeGuard

import numpy as np
import torch


def is_number(value: Any) -> bool:
    """Whether ``value`` is a real number and no boolean."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """A whole number of any kind, such as one of NumPy, as an ``int``, and NumPy's booleans as ``bool``; all else as it is.

    Syncs with a tensor on a GPU.
    """
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if getattr(value, 'dtype', None) is torch.bool:
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def is_whole(value: Any, low: int | None = 0, below: int | None = None) -> TypeGuard[SupportsIndex]:
    """Whether ``value`` is a whole number as of :func:`plain`, no boolean, not less than ``low`` and less than ``below``."""
    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, int):
        return False
    return (low is None or low <= number) and (below is None or number < below)


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
        """The converted value, one of NumPy as Python's own; for one that fails the test, the default, and a sentence in
        ``problems``."""
        if self.test(plain(value)):
            return self.convert(plain(value))
        problems.append(f'{label}={value!r} {self.expected}.')
        return self.default
