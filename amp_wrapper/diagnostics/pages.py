"""Writes reports as HTML pages that need no network and no other file, and as JSON beside them.

The templates are in ``templates/``. ``base.html.j2`` is what all pages share: its blocks are ``title``, ``lead`` and
``content``. ``macros.html.j2`` has the pieces: a table with a search box and columns to sort by, a histogram over powers
of two.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment

_UNITS = ('B', 'KiB', 'MiB', 'GiB', 'TiB')


def bytes_text(count: float) -> str:
    """``'1.5 MiB'`` for a number of bytes."""
    size, unit = float(count), _UNITS[0]
    for unit in _UNITS:
        if abs(size) < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f'{size:.0f} B' if unit == 'B' else f'{size:.1f} {unit}'


def share_text(share: float) -> str:
    """A share as per cent: ``'0'`` for none, ``'< 0.01 %'`` for very little, ``'12.50 %'``."""
    if share == 0:
        return '0'
    if abs(share) < 1e-4:
        return '< 0.01 %'
    # what is not all must not look like it
    return '> 99.99 %' if 0.9999 < share < 1 else f'{100 * share:.2f} %'


def number_text(number: float) -> str:
    """Three digits, or four: ``'1.23e-05'``, ``'0.5'``, ``'65504'``."""
    if not math.isfinite(number) or number == 0:
        return f'{number:g}'
    return f'{number:.3g}' if abs(number) < 1000 else f'{number:.4g}' if abs(number) >= 1e5 else f'{number:.0f}'


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = Path(__file__).with_name('templates')
    made = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(bytes=bytes_text, share=share_text, number=number_text)
    made.globals.update(version=__version__)
    return made


def render(template_name: str, **values: Any) -> str:
    """Fill in a template.

    Args:
        template_name: A file of ``templates/``, such as ``'report.html.j2'``.
        **values: What the template asks for. Text in them is escaped.

    Returns:
        A whole page.

    Raises:
        jinja2.TemplateError: There is no such template, or it asks for more.
        ModuleNotFoundError: jinja2, which comes with torch, is not installed.
    """
    return _environment().get_template(template_name).render(**values)


def to_json(data: Any) -> str:
    """JSON that any reader takes, with a final newline. Numbers that are not finite become the strings 'inf', '-inf', 'nan'."""
    return json.dumps(finite(data), indent=1, allow_nan=False) + '\n'


def finite(value: Any, null: bool = False) -> Any:
    """Plain data without numbers that JSON has no word for: they become strings, or None.

    Args:
        value: Plain data.
        null: Whether they become None.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None if null else str(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item, null) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item, null) for item in value]
    return value


def write(folder: str | os.PathLike[str], stem: str, html: str, data: Any) -> tuple[Path, Path]:
    """Write ``<stem>.html`` and ``<stem>.json``. Whoever looks sees the old file or the whole new one.

    Args:
        folder: Made where it is missing.
        stem: Name of both files, without an ending.
        html: From :func:`render`.
        data: Plain dicts, lists, strings and numbers.

    Returns:
        The paths of both.

    Raises:
        OSError: A file could not be written; nothing is left half written.
    """
    place = Path(folder)
    page, beside = place / f'{stem}.html', place / f'{stem}.json'
    write_text(page, html)
    write_text(beside, to_json(data))
    return page, beside


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file whole or not at all, in UTF-8.

    Args:
        path: Its folder is made where it is missing.
        text: Its content.

    Raises:
        OSError: It could not be written; an old file is what it was.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f'{target.name}.{os.getpid()}.part')
    try:
        part.write_text(text, encoding='utf-8')
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
