"""The picture of ``python -m benchmarks.fidelity``: losses of all levels over one another, and how far they are from FP32."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_wrapper.diagnostics.plot_style import ALARM, FAINT, line_look, mark_iterations, save, styled

from .fidelity_tasks import BLOCK, REFERENCE, TASKS, VARIANTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Blocks of steps that are drawn as one mean, so that a line is no band.
_SMOOTH = 2


def draw(records: Sequence[Mapping[str, Any]], stem: Path) -> list[Path]:
    """Write the picture as PNG and SVG.

    Args:
        records: Of runs.
        stem: The path without its suffix.

    Returns:
        The files.
    """
    files = [stem.with_suffix('.png'), stem.with_suffix('.svg')]
    save(figure(records), files)
    return files


def figure(records: Sequence[Mapping[str, Any]]) -> Figure:
    """A row for each task: the mean loss over the seeds, and its distance from O0.

    Args:
        records: Of runs.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    tasks = [task for name, task in TASKS.items() if any(record['task'] == name for record in records)]
    variants = [name for name in VARIANTS if any(record['variant'] == name for record in records)]
    with styled():
        found = Figure(figsize=(8.0, 0.7 + 2.05 * len(tasks)), layout='constrained')
        grid = found.subplots(len(tasks), 2, squeeze=False)
        for (left, right), task in zip(grid, tasks):
            curves = {name: _curves(records, task.name, name) for name in variants}
            left.set_title(f'{task.title}: {task.loss_title}')
            right.set_title(f'distance from {REFERENCE}')
            left.set_gid(f'loss {task.name}')
            right.set_gid(f'distance {task.name}')
            for name in variants:
                _plot(left, list(curves[name].values()), VARIANTS.index(name))
            _mark_failures(left, curves)
            _distances(right, curves)
            for axes in (left, right):
                axes.margins(x=0.02)
                mark_iterations(axes)
                axes.set_xlabel('step' if task is tasks[-1] else '')
        handles = [Line2D([], [], linewidth=1.6, **line_look(VARIANTS.index(name))) for name in variants]
        found.legend(handles, variants, loc='outside upper left', ncols=4, handlelength=3.2)
    return found


def _curves(records: Sequence[Mapping[str, Any]], task: str, variant: str) -> dict[int, list[float]]:
    """By seed; NaN where a loss was not finite."""
    chosen = [record for record in records if (record['task'], record['variant']) == (task, variant)]
    return {
        record['seed']: [_mean([math.nan if x is None else x for x in part]) for part in _parts(record['curve'])]
        for record in chosen
    }


def _parts(curve: Sequence[float | None]) -> list[Sequence[float | None]]:
    return [curve[start : start + _SMOOTH] for start in range(0, len(curve), _SMOOTH)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _spread(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))


def _places(count: int) -> list[float]:
    return [(place + 0.5) * BLOCK * _SMOOTH for place in range(count)]


def _plot(axes: Axes, rows: Sequence[Sequence[float]], number: int) -> None:
    if rows:
        means = [_mean(column) for column in zip(*rows)]
        look = line_look(number)
        axes.plot(_places(len(means)), means, linewidth=2.2 if number == 0 else 1.2, gid=VARIANTS[number], **look)


def _mark_failures(axes: Axes, curves: Mapping[str, Mapping[int, Sequence[float]]]) -> None:
    """A cross at the bottom, where the loss of a run has ceased to be finite."""
    failed = {name: [row for row in rows.values() if not all(map(math.isfinite, row))] for name, rows in curves.items()}
    for height, (name, rows) in enumerate((name, rows) for name, rows in failed.items() if rows):
        first = min(next(place for place, value in enumerate(row) if not math.isfinite(value)) for row in rows)
        at = (_places(first + 1)[-1], 0.06 + 0.1 * height)
        cross: dict[str, Any] = {'marker': 'x', 'markersize': 6, 'color': ALARM, 'linestyle': 'none', 'gid': 'failed'}
        axes.plot(*([value] for value in at), transform=axes.get_xaxis_transform(), **cross)
        text = f'{name}: not finite from here in {len(rows)} of {len(curves[name])} runs'
        axes.annotate(
            text, at, (7, -3), axes.get_xaxis_transform(), 'offset points', fontsize=7.5, color=ALARM, gid='failed'
        )


def _distances(axes: Axes, curves: Mapping[str, Mapping[int, Sequence[float]]]) -> None:
    base = curves.get(REFERENCE, {})
    if len(base) > 1:
        spread = [_spread(column) for column in zip(*base.values())]
        axes.fill_between(
            _places(len(spread)), [-x for x in spread], spread, color=FAINT, alpha=0.22, linewidth=0, gid='seeds'
        )
    for name, rows in curves.items():
        shared = [seed for seed in rows if seed in base]
        if name != REFERENCE:
            _plot(axes, [[a - b for a, b in zip(rows[seed], base[seed])] for seed in shared], VARIANTS.index(name))
