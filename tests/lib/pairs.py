"""Axes of a test: every two values of any two axes occur together, and with ``pytest --full`` all combinations."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

#: Whether ``pytest --full`` runs.
full = False

_Cell = tuple[int, int]


def pairs(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test.

    Args:
        axes: The values of each parameter. A dict gives its keys, which name its cases.
    """
    values = [list(axis) for axis in axes.values()]
    rows = list(itertools.product(*values)) if full or len(values) < 2 else covering_rows(values)
    return pytest.mark.parametrize(tuple(axes), rows, ids=['-'.join(map(_name, row)) for row in rows])


def covering_rows(axes: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Few rows in which every two values of any two axes occur together: the best of some random rows, until none is left.

    The first row has the first value of every axis; the same axes give the same rows.
    """
    chooser = random.Random(0)
    places = range(len(axes))

    def pairs_of(row: Iterable[int]) -> set[tuple[_Cell, _Cell]]:
        return set(itertools.combinations(enumerate(row), 2))

    left = {
        ((i, a), (j, b))
        for i, j in itertools.combinations(places, 2)
        for a in range(len(axes[i]))
        for b in range(len(axes[j]))
    }
    rows = [[0 for _ in places]]
    left -= pairs_of(rows[0])
    while left:
        tried = []
        for start in chooser.sample(sorted(left), min(8, len(left))):
            row = dict(start)
            for i in chooser.sample(places, len(places)):
                if i not in row:
                    scores = [
                        sum(tuple(sorted([(i, a), cell])) in left for cell in row.items()) for a in range(len(axes[i]))
                    ]
                    row[i] = scores.index(max(scores))
            tried.append([row[i] for i in places])
        rows.append(max(tried, key=lambda row: len(pairs_of(row) & left)))
        left -= pairs_of(rows[-1])
    return [tuple(axis[a] for axis, a in zip(axes, row)) for row in rows]


def _name(value: Any) -> str:
    return getattr(value, '__name__', None) or str(value).removeprefix('torch.')
