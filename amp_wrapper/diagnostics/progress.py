"""A progress bar of several phases, on stderr."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Progress:
    """One line for each phase, gone at the end; nothing where stderr is no terminal, or rich is not installed.

    Args:
        shown: Whether anything is shown.
    """

    def __init__(self, shown: bool) -> None:
        self._bar: Any = None
        self._task: Any = None
        if shown and sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
                from rich.progress import Progress as Bar
            except ModuleNotFoundError:
                return
            columns = (
                TextColumn('{task.description}'),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn('{task.fields[now]}', markup=False),
            )
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def phase(self, text: str, total: int) -> None:
        """Begin a phase.

        Args:
            text: What is done.
            total: Of how many parts.
        """
        if self._bar is not None:
            if self._task is not None:
                self._bar.update(self._task, now='')
            self._task = self._bar.add_task(text, total=total, now='')

    def step(self, now: str) -> None:
        """The next part of the phase begins.

        Args:
            now: What it is.
        """
        if self._bar is not None:
            self._bar.update(self._task, advance=1, now=now)

    def advance(self) -> None:
        """A part of the phase is done."""
        if self._bar is not None:
            self._bar.update(self._task, advance=1)
