"""Reads the numbers of a training from its logs: those of mmengine, and those that ``amp.monitor`` and scripts write."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ..errors import AmpUsageError, nearest, some
from .log_rows import Row, base, rows_of
from .series import Series

#: How mmengine names the folder of a run.
_TIME = re.compile(r'\d{8}_\d{6}')


@dataclasses.dataclass(frozen=True)
class Run:
    """The numbers of one training.

    Attributes:
        name: For a legend.
        numbers: Those of :data:`amp_wrapper.diagnostics.log_rows.NUMBERS` that are there, with the names of the log; without
            ``loss``, all that have "loss" in their name.
        skips: Steps skipped since the row before, by the name of the member (``''`` where there is one optimizer). Rows
            without such steps are not in it.
        resumed: Iterations from which the training was resumed.
        files: What was read, in the order of the training.
    """

    name: str
    numbers: Mapping[str, Series]
    skips: Mapping[str, Series]
    resumed: tuple[int, ...] = ()
    files: tuple[Path, ...] = ()

    def between(self, first: int | None, last: int | None) -> Run:
        """The part from one iteration to another one, both included; None for no limit."""
        numbers = {name: series.between(first, last) for name, series in self.numbers.items()}
        return dataclasses.replace(
            self,
            numbers={name: series for name, series in numbers.items() if len(series.values)},
            skips={member: series.between(first, last) for member, series in self.skips.items()},
            resumed=tuple(
                each for each in self.resumed if (first is None or each >= first) and (last is None or each <= last)
            ),
        )

    def members(self, number: str) -> dict[str, Series]:
        """A number of :data:`NUMBERS` by the name of the member; ``''`` for the number without one."""
        return {name[: -len(number)].rstrip('_.'): each for name, each in self.numbers.items() if base(name) == number}

    def losses(self) -> dict[str, Series]:
        """``loss``, or all losses where there is none of that name."""
        if 'loss' in self.numbers:
            return {'loss': self.numbers['loss']}
        return {name: each for name, each in self.numbers.items() if not base(name)}


def read_run(path: str | os.PathLike[str], name: str | None = None) -> Run:
    """Read the numbers of one training.

    Args:
        path: A work dir of mmengine, of which the newest training is read, with all folders that it was resumed in; the folder
            of one run; a folder that ``amp.monitor`` writes to; or a file of JSON lines: ``scalars.json``,
            ``amp_monitor.jsonl``, or of a script, with ``iteration`` in each line. Lines that cannot be read are left out: the
            last one is often half written.
        name: For the legend; by default that of the folder.

    Raises:
        AmpUsageError: There is no such file, it cannot be read, or it has none of the numbers.
    """
    path = Path(path)
    if not path.exists():
        beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        raise AmpUsageError(f'there is no log {str(path)!r}{nearest(path.name, beside)}.')
    try:
        pieces = _pieces(path)
    except OSError as error:
        raise AmpUsageError(f'the log {str(path)!r} cannot be read: {error.strerror or error}.') from error
    rows, resumed = _joined(pieces)
    numbers = _numbers(rows)
    if not numbers:
        below = _logs_below(path)
        if below:
            raise AmpUsageError(
                f'{str(path)!r} is no log by itself, and has those of {len(below)} trainings below it: give '
                f'{some([str(each) for each in below])}.'
            )
        raise AmpUsageError(
            f'{str(path)!r} has no JSON lines with an "iteration" and a loss, grad_norm, lr or number of amp.monitor. CSV and '
            'text logs are not read: give a work dir of mmengine, its scalars.json, the folder of amp.monitor, or such lines.'
        )
    # of a run whose beginning is not there, nobody knows how many of the skips were before
    known = _starts_fresh(rows)
    skips = {
        # it stands in the log from the first skip on
        key[: -len('amp_skipped')].rstrip('_'): _increments(series, known or series.iterations[0] > rows[0][0])
        for key, series in numbers.items()
        if base(key) == 'amp_skipped'
    }
    return Run(name or names_of([path])[0], numbers, skips, tuple(resumed), tuple(file for file, _ in pieces))


# -- which files ---------------------------------------------------------------------------------------------------------


#: A file, and what it has.
_Piece = tuple[Path, list[Row]]


def _pieces(path: Path) -> list[_Piece]:
    """Read the files that are one training, in its order; none without numbers."""
    if path.is_file():
        return [(path, rows_of(path))]
    own = _of_folder(path)
    if own is not None:
        return [own]
    found: list[_Piece] = []
    # the names of run folders are times; a run that was resumed leans on the one before
    for folder in sorted((each for each in path.iterdir() if each.is_dir()), reverse=True):
        piece = _of_folder(folder)
        if piece is None:
            continue
        if found and _starts_fresh(found[0][1], piece[1]):
            break
        found.insert(0, piece)
    return found or [(path, [])]


def _of_folder(folder: Path) -> _Piece | None:
    """The numbers of the folder of one run."""
    shown = folder / 'vis_data' if (folder / 'vis_data').is_dir() else folder
    files = [shown / 'scalars.json', *sorted(shown.glob('[0-9]*.json')), shown / 'amp_monitor.jsonl']
    pieces = ((file, rows_of(file)) for file in files if file.is_file())
    return next((piece for piece in pieces if piece[1]), None)


def _logs_below(folder: Path, levels: int = 2) -> list[Path]:
    """The folders one and two levels below a folder that are logs; those inside of a log belong to it."""
    try:
        below = [each for each in sorted(folder.iterdir()) if each.is_dir()] if folder.is_dir() else []
    except OSError:
        return []
    found: list[Path] = []
    for each in below:
        try:
            is_log = any(rows for _, rows in _pieces(each))
        except OSError:
            # the others can still be told
            continue
        found += [each] if is_log else _logs_below(each, levels - 1) if levels > 1 else []
    return found


def ranges_files(path: str | os.PathLike[str], member: str = '') -> list[Path]:
    """The files of ranges per layer that belong to a log, in the order of the training.

    Args:
        path: As in :func:`read_run`, or such a file itself.
        member: Of an ``OptimWrapperDict``.

    Raises:
        AmpUsageError: There is none.
    """
    path = Path(path)
    wanted = f'{member}_amp_ranges.jsonl' if member else 'amp_ranges.jsonl'
    if path.is_file() and path.name.endswith('amp_ranges.jsonl'):
        return [path]
    run = read_run(path) if path.exists() and not _ranges_in(path, wanted) else None
    folders = [file.parent for file in run.files] if run else [path]
    found = [file for folder in folders for file in _ranges_in(folder, wanted)]
    if not found:
        others = sorted({each.name for folder in folders for each in _ranges_in(folder, '*amp_ranges.jsonl')})
        remedy = (
            f'There is {", ".join(others)}: give the member (generator of generator_amp_ranges.jsonl), or that file.'
            if others
            else 'AmpMonitorHook and amp.monitor write it, with a ranges_interval.'
        )
        raise AmpUsageError(f'there is no {wanted} beside {str(path)!r}. {remedy}')
    return found


def _ranges_in(folder: Path, pattern: str) -> list[Path]:
    return [*folder.glob(pattern), *folder.glob(f'vis_data/{pattern}')] if folder.is_dir() else []


def _starts_fresh(rows: Sequence[Row], before: Sequence[Row] = ()) -> bool:
    """Whether the first row comes as soon as it would in a training from the beginning.

    Args:
        rows: Of the training.
        before: Of the run before it, which has the distance between rows where there is a single one.
    """
    known = rows if len(rows) > 1 else before
    gaps = [after - place for (place, _), (after, _) in itertools.pairwise(known) if after > place]
    return not rows or not gaps or rows[0][0] <= max(gaps)


# -- one training ----------------------------------------------------------------------------------------------------------


def _joined(pieces: Sequence[_Piece]) -> tuple[list[Row], list[int]]:
    """All rows in rising order, and where the training was resumed: what was repeated is taken from the later file."""
    rows: list[Row] = []
    resumed: list[int] = []
    for _, piece in pieces:
        last = None
        for place, values in piece:
            if rows and (last is None or place < last):
                while rows and rows[-1][0] >= place:
                    rows.pop()
                resumed = [each for each in resumed if each < place]
                if rows:
                    resumed.append(place)
            last = place
            rows.append((place, values))
    return rows, resumed


def _numbers(rows: Sequence[Row]) -> dict[str, Series]:
    found: dict[str, tuple[list[int], list[float]]] = {}
    for place, values in rows:
        for name, value in values.items():
            places, numbers = found.setdefault(name, ([], []))
            if places and places[-1] == place:
                numbers[-1] = value
            else:
                places.append(place)
                numbers.append(value)
    if 'loss' in found:
        found = {name: lists for name, lists in found.items() if base(name)}
    return {
        name: Series(np.array(places, dtype=np.int64), np.array(numbers, dtype=np.float64))
        for name, (places, numbers) in found.items()
    }


def _increments(series: Series, known_start: bool) -> Series:
    """What a count grew by at each row where it grew; one that falls has begun again."""
    finite = np.isfinite(series.values)
    places, counts = series.iterations[finite], series.values[finite]
    before = np.concatenate([[0.0 if known_start else counts[0]] if len(counts) else [], counts[:-1]])
    grown = np.where(counts >= before, counts - before, counts)
    return Series(places[grown > 0], grown[grown > 0])


# -- names -----------------------------------------------------------------------------------------------------------------


def names_of(paths: Sequence[Path]) -> list[str]:
    """Name logs by their last folders or files, by as many as make them differ; equal paths have equal names.

    Folders named by a time alone say little, and stand only where names would be equal without them.
    """
    whole = [_telling_parts(path.absolute()) for path in paths]
    names = [next((each for each in reversed(parts) if not _TIME.fullmatch(each)), parts[-1]) for parts in whole]
    count = 1
    while len(set(names)) < len(set(map(tuple, whole))):
        count += 1
        names = ['/'.join(parts[-count:]) for parts in whole]
    return names


def _telling_parts(path: Path) -> list[str]:
    """The parts of a path but for those that are the same in every run."""
    parts = path.parts
    if path.is_file():
        fixed = path.stem in ('scalars', 'amp_monitor', 'amp_ranges') or _TIME.fullmatch(path.stem)
        parts = path.parent.parts if fixed else path.with_suffix('').parts
    return [each for each in parts if each not in ('vis_data', path.anchor)] or [path.name]
