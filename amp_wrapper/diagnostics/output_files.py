"""The files that a command was asked to write, checked before its work and written after it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import AmpUsageError
from . import pages


class OutputFiles:
    """A page and a JSON file.

    Args:
        html: Where the page goes; None for no page.
        json: Where the JSON goes; None for none.

    Raises:
        AmpUsageError: One of them cannot be written, or is empty. Nothing is made yet.
    """

    def __init__(self, html: str | os.PathLike[str] | None, json: str | os.PathLike[str] | None) -> None:
        for option, given in (('--html', html), ('--json', json)):
            if given is not None and not os.fspath(given):
                raise AmpUsageError(f"{option} '' names no file: give a path, or leave the option out.")
        self._html = None if html is None else Path(html)
        self._json = None if json is None else Path(json)
        for path in (self._html, self._json):
            if path is not None:
                _check_writable(path)

    def write(self, page: Callable[[], str], data: Any) -> list[Path]:
        """Write those that were asked for.

        Args:
            page: Makes the page.
            data: Plain dicts, lists, strings and numbers.

        Returns:
            Their paths.

        Raises:
            AmpUsageError: One of them could not be written.
        """
        written = []
        for path, make in ((self._html, page), (self._json, lambda: pages.to_json(data))):
            if path is None:
                continue
            text = make()
            try:
                pages.write_text(path, text)
            except OSError as error:
                raise AmpUsageError(f'{path} cannot be written: {error.strerror or error}.') from error
            written.append(path)
        return written


def _check_writable(path: Path) -> None:
    place = next(above for above in path.absolute().parents if above.exists())
    if path.is_dir() or not place.is_dir() or not os.access(place, os.W_OK):
        problem = f'{path} is a folder' if path.is_dir() else f'{place} is no folder that can be written to'
        raise AmpUsageError(f'{path} cannot be written: {problem}.')
