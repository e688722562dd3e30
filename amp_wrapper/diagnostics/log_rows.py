"""Reads the lines of one log, of whatever kind it is, as iterations and numbers."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .measured_numbers import NUMBERS as MEASURED

#: The numbers that are looked for. A member of an ``OptimWrapperDict`` has its name in front: ``generator_amp_scale``.
NUMBERS: tuple[str, ...] = (
    'loss',
    'grad_norm',
    'lr',
    'amp_scale',
    'amp_skipped',
    *MEASURED,
)
#: What a row says about its place in the training, the best first. The last counts only where no row has another one:
#: mmengine counts epochs in it where it logs a validation.
_PLACES = ('iteration', 'iter', 'step')
_TRAIN_LINE = re.compile(r'(?:Epoch\(train\)\s*\[\s*(\d+)\]\[\s*(\d+)/(\d+)\]|Iter\(train\)\s*\[\s*(\d+)/\d+\])(.*)')
_PAIR = re.compile(r'(\S+): (\S+)')
_RESUMED = re.compile(r'resumed epoch: \d+, iter: (\d+)')

#: An iteration, and what a line says there.
Row = tuple[int, dict[str, float]]


def base(name: str) -> str:
    """Which of :data:`NUMBERS` a name of a log is, with or without a member in front; ``''`` for none of them."""
    if name in NUMBERS:
        return name
    if name.endswith('.lr'):
        # mmengine's way to name members
        return 'lr'
    return next((each for each in NUMBERS if each not in ('loss', 'lr') and name.endswith('_' + each)), '')


def resumed_at(log: Path) -> int | None:
    """What a text log says before its first training step."""
    with log.open(encoding='utf-8', errors='replace') as lines:
        for line in lines:
            if found := _RESUMED.search(line):
                return int(found[1])
            if _TRAIN_LINE.search(line):
                return None
    return None


def is_wanted(name: str) -> bool:
    """Whether a name of a log is one of the numbers, or that of a loss."""
    return bool(base(name)) or 'loss' in name


def rows_of(file: Path) -> Iterator[Row]:
    """Iteration and numbers of each line, as the file has them."""
    with file.open(encoding='utf-8', errors='replace', newline='') as lines:
        start = next((line for line in lines if line.strip()), '').strip()
        lines.seek(0)
        fields = [each.strip() for each in start.split(',')]
        if start.startswith('{'):
            yield from _placed(_json_lines(lines))
        elif len(fields) > 1 and any(place in fields for place in _PLACES):
            yield from _placed(_csv_lines(lines))
        else:
            yield from _text_rows(lines)


def _json_lines(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            # half written, or damaged
            continue
        if isinstance(row, dict):
            yield row


def _csv_lines(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    try:
        # None stands for what a half-written line has no more
        yield from (row for row in csv.DictReader(lines, skipinitialspace=True) if None not in row.values())
    except csv.Error:
        return


def _placed(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The rows that have a place, all of one kind."""
    by_place: dict[str, list[Row]] = {place: [] for place in _PLACES}
    for row in rows:
        for place in _PLACES:
            at = _number(row.get(place))
            if at is not None and at == at and abs(at) < 2**53:
                values = {str(name).removeprefix('train/'): _number(value) for name, value in row.items()}
                found = {name: value for name, value in values.items() if value is not None and is_wanted(name)}
                by_place[place].append((int(at), found))
                break
    return next((found for found in by_place.values() if any(values for _, values in found)), [])


def _number(value: Any) -> float | None:
    """A number of a log; None for what is none. null is what JSON has in place of NaN."""
    if value is None:
        return float('nan')
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _text_rows(lines: Iterable[str]) -> Iterator[Row]:
    """The lines that mmengine writes for training steps. They have four digits behind the point."""
    for line in lines:
        if found := _TRAIN_LINE.search(line):
            epoch, inner, length, iteration, rest = found.groups()
            place = int(iteration) if iteration else (int(epoch) - 1) * int(length) + int(inner)
            pairs = {name: _number(value) for name, value in _PAIR.findall(rest)}
            yield place, {name: value for name, value in pairs.items() if value is not None and is_wanted(name)}
