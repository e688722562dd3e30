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
from .log_rows import NUMBERS, Row, base, is_wanted, resumed_at, rows_of
from .series import Series


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


def read_runs(paths: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """The numbers of several trainings, with names that differ.

    Args:
        paths: As in :func:`read_run`.

    Raises:
        AmpUsageError: As :func:`read_run`.
    """
    names = distinct_names([_candidate_names(Path(path)) for path in paths])
    return [read_run(path, name) for path, name in zip(paths, names)]


def read_run(path: str | os.PathLike[str], name: str | None = None) -> Run:
    """The numbers of one training.

    Args:
        path: A work dir of mmengine, of which the newest training is read, with all folders that it was resumed in; the folder
            of one run; a folder that ``amp.monitor`` writes to; or a file: JSON lines (``scalars.json``,
            ``amp_monitor.jsonl``, or of a script, with ``iteration`` in each line), CSV with a header, or a text log of
            mmengine. Lines that cannot be read are left out: the last one is often half written.
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
            f'{str(path)!r} has none of the numbers {", ".join(NUMBERS)} beside an iteration. What can be read: a work dir of '
            f'mmengine, its scalars.json, its text log, and JSON lines or CSV with an "iteration".'
        )
    # of a run whose beginning is not there, nobody knows how many of the skips were before
    known = pieces[0].resumed_at is None and _starts_fresh(rows)
    skips = {
        # it stands in the log from the first skip on
        key[: -len('amp_skipped')].rstrip('_'): _increments(series, known or series.iterations[0] > rows[0][0])
        for key, series in numbers.items()
        if base(key) == 'amp_skipped'
    }
    name = name or _candidate_names(path)[0]
    return Run(name, numbers, skips, tuple(resumed), tuple(piece.file for piece in pieces))


# -- which files ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Piece:
    """What one file has.

    Attributes:
        resumed_at: The iteration that the training was resumed from, where its text log says so.
    """

    file: Path
    rows: list[Row]
    resumed_at: int | None = None


def _pieces(path: Path) -> list[_Piece]:
    """The files that are one training, in its order; none without numbers."""
    if path.is_file():
        return [_Piece(path, list(rows_of(path)))]
    own = _of_folder(path)
    if own is not None:
        return [own]
    found: list[_Piece] = []
    # the names of run folders are times; a run that was resumed leans on the one before
    for folder in sorted((each for each in path.iterdir() if each.is_dir()), reverse=True):
        piece = _of_folder(folder)
        if piece is None:
            continue
        found.insert(0, piece)
        if piece.resumed_at is None and _starts_fresh(piece.rows):
            break
    return found or [_Piece(path, [])]


def _of_folder(folder: Path) -> _Piece | None:
    """The numbers of the folder of one run."""
    shown = folder / 'vis_data' if (folder / 'vis_data').is_dir() else folder
    logs = sorted(folder.glob('*.log'), reverse=True)
    # further ranks write logs of their own
    texts = [each for each in logs if each.stem == folder.name] or logs
    files = [shown / 'scalars.json', *sorted(shown.glob('[0-9]*.json')), shown / 'amp_monitor.jsonl', *texts]
    for file in files:
        rows = list(rows_of(file)) if file.is_file() else []
        if any(is_wanted(name) for _, values in rows for name in values):
            return _Piece(file, rows, resumed_at(texts[0]) if texts else None)
    return None


def _logs_below(folder: Path, levels: int = 2) -> list[Path]:
    """The folders one and two levels below a folder that are logs; those inside of a log belong to it."""
    try:
        below = [each for each in sorted(folder.iterdir()) if each.is_dir()] if folder.is_dir() else []
    except OSError:
        return []
    found: list[Path] = []
    for each in below:
        try:
            is_log = any(piece.rows for piece in _pieces(each))
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


def _starts_fresh(rows: Sequence[Row]) -> bool:
    """Whether the first row comes as soon as it would in a training from the beginning."""
    places = [place for place, _ in rows]
    gaps = [after - before for before, after in itertools.pairwise(places) if after > before]
    return not places or not gaps or places[0] <= max(gaps)


# -- one training ----------------------------------------------------------------------------------------------------------


def _joined(pieces: Sequence[_Piece]) -> tuple[list[Row], list[int]]:
    """All rows in rising order, and where the training was resumed: what was repeated is taken from the later file."""
    rows: list[Row] = []
    resumed: list[int] = []
    for piece in pieces:
        last = None
        for place, values in piece.rows:
            if last is None and piece.resumed_at is not None:
                _cut(rows, resumed, piece.resumed_at + 1, piece.resumed_at)
            elif (last is None and rows) or (last is not None and place < last):
                _cut(rows, resumed, place, place)
            last = place
            rows.append((place, values))
    return rows, resumed


def _cut(rows: list[Row], resumed: list[int], first: int, mark: int) -> None:
    """Take away the rows from ``first`` on, and note the resume where some are left."""
    while rows and rows[-1][0] >= first:
        rows.pop()
    resumed[:] = [each for each in resumed if each < mark]
    if rows:
        resumed.append(mark)


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


def _candidate_names(path: Path) -> list[str]:
    """Names of a log from short to long. Folders named by a time alone say little, and come late."""
    path = path.absolute()
    parts = [each for each in path.parts if each not in ('vis_data', path.anchor)]
    if path.is_file():
        # files that have the same name in every run
        fixed = path.stem in ('scalars', 'amp_monitor', 'amp_ranges') or path.suffix == '.log' or path.stem.isdigit()
        parts[-1:] = [] if fixed or re.fullmatch(r'\d{8}_\d{6}', path.stem) else [path.stem]
    short = [each for each in parts if not re.fullmatch(r'\d{8}_\d{6}', each)]
    names = ['/'.join(each[-count:]) for each in (short[-1:], parts) for count in range(1, len(each) + 1)]
    return list(dict.fromkeys(name for name in names if not re.fullmatch(r'\d{8}_\d{6}', name))) or [path.name]


def distinct_names(candidates: Sequence[Sequence[str]]) -> list[str]:
    """One name of each list, all different: the first ones where they differ, longer ones where they do not.

    Equal lists, those of one log, are numbered.

    Args:
        candidates: Names from short to long, at least one in each list.
    """
    chosen = [0] * len(candidates)
    while True:
        names = [each[at] for each, at in zip(candidates, chosen)]
        again = [
            at
            for at, name in enumerate(names)
            if chosen[at] + 1 < len(candidates[at])
            and any(other == name and list(candidates[at]) != list(candidates[i]) for i, other in enumerate(names))
        ]
        if not again:
            break
        for at in again:
            chosen[at] += 1
    return [
        name if names.count(name) == 1 else f'{name} ({names[: at + 1].count(name)})' for at, name in enumerate(names)
    ]
