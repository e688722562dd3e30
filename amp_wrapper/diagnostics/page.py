"""What a tool has found, as text, as a page and as JSON: one class for all of them."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.file import replacing
from ..version import __version__

#: Of the JSON of all tools; it rises when a key changes its meaning or goes.
FORMAT = 2


@dataclasses.dataclass
class Table:
    """Rows of numbers, texts and None.

    Attributes:
        title: Above it.
        columns: Their heads.
        rows: As many cells each.
        note: What the columns mean.
        marks: Row number to 'good' or 'bad'.
        bars: Columns whose numbers are shown as bars on the page, too.
        is_tree: Whether the first column has names of modules, of which text may show those down to a depth.
    """

    title: str
    columns: Sequence[str]
    rows: list[list[Any]]
    note: str = ''
    marks: Mapping[int, str] = dataclasses.field(default_factory=dict)
    bars: Sequence[str] = ()
    is_tree: bool = False

    def text(self, depth: int | None, width: int) -> str:
        """Return the table as lines, of which the last column fits into a width where that leaves room.

        Args:
            depth: Of the deepest modules that are shown; None for all.
            width: In characters.
        """
        rows = self.rows
        if self.is_tree and depth is not None:
            # '(model)' is not below anything
            rows = [row for row in rows if row[0].startswith('(') or row[0].count('.') < depth]
        cells = [list(self.columns), *[[shown(cell) for cell in row] for row in rows]]
        widths = [max(map(len, column)) for column in list(zip(*cells))[:-1]]
        indent = ' ' * (sum(widths) + 2 * len(widths))
        lines = [self.title, '']
        for row in cells:
            front = ''.join(f'{cell:{size}}  ' for cell, size in zip(row, widths))
            words: Any = {'initial_indent': front, 'subsequent_indent': indent}
            lines.append(textwrap.fill(row[-1], max(width, len(indent) + 24), **words) or front.rstrip())
        return '\n'.join([*lines, *(['', textwrap.fill(self.note, width)] if self.note else [])])


def shown(value: Any) -> str:
    """Return a cell as text: three digits of a number, nothing for None."""
    if value is None:
        return ''
    if isinstance(value, float):
        return f'{value:.3g}' if abs(value) < 1000 or not math.isfinite(value) or abs(value) >= 1e6 else f'{value:.0f}'
    return ', '.join(map(shown, value)) if isinstance(value, (list, tuple)) else str(value)


def percent(share: float) -> str:
    """Return a share in words: ``'12 %'``, ``'0.34 %'``, ``'0 %'``; what is not all does not look like it."""
    return f'{100 * share:.2g} %' if share < 0.995 else '> 99 %' if share < 1 else f'{100 * share:.0f} %'


@dataclasses.dataclass
class Page:
    """What a tool has found. ``print`` shows it as text.

    Attributes:
        title: In a few words.
        lead: What was found, in sentences.
        facts: What else belongs to it: name to text.
        tables: Those without rows are left out.
        lines: To copy: a config, a call.
        data: All of it as plain dicts, lists, strings and numbers, for JSON.
    """

    title: str
    lead: str
    facts: dict[str, str]
    tables: list[Table]
    lines: list[str]
    data: dict[str, Any]

    def text(self, depth: int | None = None) -> str:
        """Return it as text.

        Args:
            depth: Of the deepest modules that tables show; None for all.
        """
        width = shutil.get_terminal_size((120, 24)).columns
        tables = [table.text(depth, width) for table in self.tables if table.rows]
        facts = '\n'.join(f'{name}: {fact}' for name, fact in self.facts.items() if fact)
        parts = (self.title, textwrap.fill(self.lead, width), *tables, facts, '\n'.join(self.lines))
        return '\n\n'.join(part for part in parts if part)

    def __str__(self) -> str:
        return self.text()

    def html(self) -> str:
        """Return a page that needs no network and no other file."""
        return str(_template().render(page=self, version=__version__))

    def json(self) -> str:
        """Return :attr:`data` as JSON that any reader takes. Numbers that are not finite are null."""
        data = finite({'format': FORMAT, 'amp_wrapper': __version__, **self.data})
        return f'{json.dumps(data, indent=1, default=str)}\n'

    def write(self, folder: str | os.PathLike[str], stem: str = 'report') -> tuple[Path, Path]:
        """Write ``<stem>.html`` and ``<stem>.json``, each whole or not at all.

        Args:
            folder: Made where it is missing.
            stem: Name of both files, without an ending.

        Returns:
            Their paths.

        Raises:
            OSError: A file could not be written.
        """
        paths = Path(folder, f'{stem}.html'), Path(folder, f'{stem}.json')
        for path, text in zip(paths, (self.html(), self.json())):
            with replacing(path) as part:
                part.write_text(text, encoding='utf-8')
        return paths


def finite(value: Any) -> Any:
    """Return plain data in which None stands for numbers that are not finite, which JSON has no word for."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value


@functools.cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = FileSystemLoader(Path(__file__).parent)
    made = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters['shown'] = shown
    return made.get_template('page.html.j2')
