"""Which trainings, and which lines of them, are drawn."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import AmpConfigError, AmpUsageError, nearest
from .log_files import Run, names_of, read_run
from .log_rows import base
from .panels import DEFAULT_PANELS, PANELS
from .series import Series


def chosen_runs(
    runs: Sequence[Run | str | os.PathLike[str]], panels: Sequence[str], first: int | None, last: int | None
) -> list[Run]:
    """What of some runs is drawn; arguments and errors are those of :func:`amp_wrapper.diagnostics.plots.plot_runs`."""
    problems = [
        f'panels={name!r} is none of {", ".join(PANELS)}{nearest(name, PANELS)}.'
        for name in panels
        if name not in PANELS
    ]
    if not runs:
        problems.append('runs=[] is empty: there is nothing to draw.')
    if first is not None and last is not None and first > last:
        problems.append(f'from={first} is after to={last}.')
    if problems:
        raise AmpConfigError(problems)
    paths = [Path(run) for run in runs if not isinstance(run, Run)]
    read = iter(list(map(read_run, paths, names_of(paths))))
    whole = [run if isinstance(run, Run) else next(read) for run in runs]
    chosen = [dataclasses.replace(run, name=name).between(first, last) for run, name in zip(whole, _numbered(whole))]
    wanted = {number for name in panels for number in PANELS[name].numbers}
    if any(has(run, number) for run in chosen for number in wanted):
        return chosen
    shown = ', '.join(run.name for run in whole)
    if any(has(run, number) for run in whole for number in wanted):
        limits = f'from iteration {"1" if first is None else first} to {"the end" if last is None else last}'
        raise AmpUsageError(f'nothing to draw {limits}. The logs: {"; ".join(map(summary, whole))}.')
    there = sorted({base(name) or name for run in whole for name in run.numbers})
    raise AmpUsageError(f'nothing to draw: {shown} has none of {", ".join(sorted(wanted))}, but {", ".join(there)}.')


def _numbered(runs: Sequence[Run]) -> list[str]:
    """The names of runs, with a number where several have the same."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else f'{name} ({names[: at + 1].count(name)})' for at, name in enumerate(names)
    ]


def missing(runs: Sequence[Run], panels: Sequence[str] = DEFAULT_PANELS) -> dict[str, list[str]]:
    """Panels that are left out or lack something, with the names of the log that no run has.

    Args:
        runs: Trainings.
        panels: Which of :data:`PANELS`.
    """
    lacking = {
        name: [number for number in PANELS[name].numbers if not any(has(run, number) for run in runs)]
        for name in panels
    }
    return {name: numbers for name, numbers in lacking.items() if numbers}


def summary(run: Run) -> str:
    """A line on what a training has: its iterations, its skipped steps, where it was resumed.

    Args:
        run: Its numbers.
    """
    if not run.numbers:
        return f'{run.name}: nothing in these iterations'
    places = np.concatenate([series.iterations for series in run.numbers.values()])
    words = [f'iterations {places.min()} to {places.max()}']
    for member, skips in run.skips.items():
        count = int(skips.values.sum())
        words.append(f'{count} step{"" if count == 1 else "s"} skipped{f" by {member}" if member else ""}')
    if run.resumed:
        words.append(f'resumed at {", ".join(map(str, run.resumed))}')
    return f'{run.name}: {", ".join(words)}'


def has(run: Run, number: str) -> bool:
    """Whether a training, or a part of it, has a number."""
    return bool(lines_of(run, number))


def lines_of(run: Run, number: str) -> dict[str, Series]:
    """A number by the losses or members that have it; ``''`` is the run as a whole."""
    if number != 'loss':
        return run.members(number)
    return {'' if name == 'loss' else name: series for name, series in run.losses().items()}


@dataclasses.dataclass(frozen=True)
class Line:
    """What has one entry in the legend: a run, or a member of an ``OptimWrapperDict`` or one of several losses in it."""

    run: Run
    part: str

    @property
    def label(self) -> str:
        return f'{self.run.name}: {self.part}' if self.part else self.run.name


def lines_in(runs: Sequence[Run]) -> list[Line]:
    """The entries of the legend."""
    found: list[Line] = []
    for run in runs:
        # one learning rate may serve all members
        numbers = [number for panel in PANELS.values() for number in panel.numbers if number != 'lr']
        parts = dict.fromkeys(part for number in numbers for part in lines_of(run, number)) or {'': None}
        found += [Line(run, part) for part in parts]
    return found


def belongs(part: str, line: Line, lines: Sequence[Line]) -> bool:
    """Whether a number of a run is drawn with this entry of the legend; what is of no entry, with the run's first."""
    mine = [each for each in lines if each.run is line.run]
    owner = next((each for each in mine if each.part == part), mine[0])
    return owner is line
