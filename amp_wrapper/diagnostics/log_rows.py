"""Reads the lines of one log, which are JSON objects, as iterations and numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .measured_numbers import NUMBERS as MEASURED

#: The numbers that are looked for. A member of an ``OptimWrapperDict`` has its name in front: ``generator_amp_scale``.
NUMBERS: tuple[str, ...] = ('loss', 'grad_norm', 'lr', 'amp_scale', 'amp_skipped', *MEASURED)
#: What a row says about its place in the training, the best first. The last counts only where no row has another one:
#: mmengine counts epochs in it where it logs a validation.
_PLACES = ('iteration', 'iter', 'step')

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


def _is_wanted(name: str) -> bool:
    """Whether a name of a log is one of the numbers, or that of a loss."""
    return bool(base(name)) or 'loss' in name


def json_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Read the JSON objects of a file that has one in each line."""
    with file.open(encoding='utf-8', errors='replace') as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                # half written, or damaged
                continue
            if isinstance(row, dict):
                yield row


def rows_of(file: Path) -> list[Row]:
    """Read iteration and numbers of the lines that have a place, all of one kind; none of a file without numbers."""
    by_place: dict[str, list[Row]] = {place: [] for place in _PLACES}
    for row in json_rows(file):
        for place in _PLACES:
            at = _number(row.get(place))
            if at is not None and at == at and abs(at) < 2**53:
                values = {name.removeprefix('train/'): _number(value) for name, value in row.items()}
                found = {name: value for name, value in values.items() if value is not None and _is_wanted(name)}
                by_place[place].append((int(at), found))
                break
    return next((found for found in by_place.values() if any(values for _, values in found)), [])


def _number(value: Any) -> float | None:
    """Read a number of a log; None for what is none. null is what JSON has in place of NaN."""
    if value is None:
        return float('nan')
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        # texts are what json.dumps(default=str) makes of scalars of NumPy
        return float(value)
    except (ValueError, OverflowError):
        return None
