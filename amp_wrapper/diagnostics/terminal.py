"""Tables and lines for a terminal: rich's, or plain ones where rich is not installed."""

from __future__ import annotations

import itertools
import re
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType


def has_rich() -> bool:
    """Whether rich is installed."""
    return find_spec('rich') is not None


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
        # without the marks for colours
        self._rows.append([re.sub(r'\[/?(bold|red|bold red)\]', '', cell) for cell in cells])

    def __str__(self) -> str:
        lines = [
            line
            for row in self._rows
            for line in itertools.zip_longest(*(cell.split('\n') for cell in row), fillvalue='')
        ]
        widths = [max(map(len, column)) for column in zip(*lines)]
        shown = ['  '.join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return '\n'.join([self._title, *shown, ''])


def table(title: str) -> Any:
    """A table without rows: rich's, or :class:`PlainTable`."""
    if not has_rich():
        return PlainTable(title)
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify='left', title_style='bold', box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def line(words: str, style: str = '') -> RenderableType:
    """A line of text, in a style where there is rich."""
    if not has_rich():
        return words
    from rich.text import Text

    return Text(words, style=style)


def escaped(words: str) -> str:
    """Text for a cell, in which brackets mean nothing."""
    if not has_rich():
        return words
    from rich.markup import escape

    return escape(words)
