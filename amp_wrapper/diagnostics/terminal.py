"""Tables for a terminal: rich's, or plain ones where rich is not installed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any


class PlainTable:
    """Takes the place of rich's table where rich is not installed."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._rows: list[list[str]] = [[]]

    def add_column(self, title: str, **options: object) -> None:
        """As rich's; the options are for rich alone."""
        self._rows[0].append(title)

    def add_row(self, *cells: str) -> None:
        """As rich's."""
        plain = [re.sub(r'(?<!\\)\[/?[a-z ]+\]', '', cell) for cell in cells]
        self._rows.append([cell.replace('\\[', '[') for cell in plain])

    def __str__(self) -> str:
        lines = [
            line
            for row in self._rows
            for line in itertools.zip_longest(*(cell.split('\n') for cell in row), fillvalue='')
        ]
        return '\n'.join([self._title, *aligned(lines), ''])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of as many cells each as lines of text, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ['  '.join(map(str.ljust, row, widths)).rstrip() for row in rows]


def escaped(words: str) -> str:
    """Text for a cell, in which ``[bold]`` is no mark for rich."""
    return words.replace('[', '\\[')


def table(title: str) -> Any:
    """A table without rows: rich's, or :class:`PlainTable`."""
    if find_spec('rich') is None:
        return PlainTable(title)
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify='left', title_style='bold', box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
