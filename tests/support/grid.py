"""What ``make test`` leaves to others: tests and parameters with the marker ``grid`` or ``long``.

``make test`` tries every behaviour once. Where a test has parameters whose trial takes long, some of them stay there, chosen
by name or by counting, so that each run of it tries the same. The rest is marked: ``make test-grids`` tries
``grid`` with each change that lands, ``make test-long`` tries ``long`` before a release and where a change concerns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

grid = pytest.mark.grid
long = pytest.mark.long


def but(kept: Sequence[Any], values: Iterable[Any], mark: pytest.MarkDecorator = grid) -> list[Any]:
    """For ``parametrize``: all ``values``, marked but for the ``kept`` ones.

    Raises:
        ValueError: One of the kept is not among the values.
    """
    values = list(values)
    absent = [value for value in kept if value not in values]
    if absent:
        raise ValueError(f'{absent} are not among {values}')
    return [value if value in kept else _marked(value, mark) for value in values]


def but_every(count: int, values: Iterable[Any], mark: pytest.MarkDecorator = grid) -> list[Any]:
    """For ``parametrize``: all ``values``, marked but for the first one and every ``count``-th after it."""
    return [_marked(value, mark) if index % count else value for index, value in enumerate(values)]


def _marked(value: Any, mark: pytest.MarkDecorator) -> Any:
    """A tuple is a row of several parameters, as ``parametrize`` takes it."""
    return pytest.param(*value, marks=mark) if isinstance(value, tuple) else pytest.param(value, marks=mark)
