"""What ``make test`` leaves to the grids: tests and parameters with the marker ``grid``.

``make test`` tries every behaviour once. Where a test has parameters whose trial takes long, some of them stay there, chosen
by name or by counting, so that each run of it tries the same; the rest is marked, and ``make test-grids`` tries it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

grid = pytest.mark.grid


def but(kept: Sequence[Any], values: Iterable[Any]) -> list[Any]:
    """For ``parametrize``: all ``values``, marked ``grid`` but for the ``kept`` ones.

    Raises:
        ValueError: One of the kept is not among the values.
    """
    values = list(values)
    absent = [value for value in kept if value not in values]
    if absent:
        raise ValueError(f'{absent} are not among {values}')
    return [value if value in kept else _marked(value) for value in values]


def but_every(count: int, values: Iterable[Any]) -> list[Any]:
    """For ``parametrize``: all ``values``, marked ``grid`` but for the first one and every ``count``-th after it."""
    return [_marked(value) if index % count else value for index, value in enumerate(values)]


def _marked(value: Any) -> Any:
    """A tuple is a row of several parameters, as ``parametrize`` takes it."""
    return pytest.param(*value, marks=grid) if isinstance(value, tuple) else pytest.param(value, marks=grid)
