"""The picture of ``python -m benchmarks.fidelity``: losses of all levels over one another, and how far they are from FP32."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from amp_wrapper.diagnostics.plot import save, styled

from .fidelity_tasks import BLOCK, REFERENCE, TASKS, VARIANTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Okabe and Ito's colours, which differ for colour-blind eyes too; with the style of the line, each level has its own.
_COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#A66F00', '#56B4E9', '#000000')
_STYLES: tuple[Any, ...] = ('-', (0, (5, 1.5)), (0, (1, 1)), (0, (7, 1.5, 1, 1.5)), (0, (4, 1, 1, 1, 1, 1)))
_RED = '#B3202C'
#: Blocks of steps that are drawn as one mean, so that a line is no band.
_SMOOTH = 2


def draw(records: Sequence[Mapping[str, Any]], stem: Path) -> None:
    """Write the picture as PNG and SVG: a row for each task, the mean loss over the seeds, and its distance from O0.

    Args:
        records: Of runs.
        stem: The path without its suffix.
    """
    from matplotlib.lines import Line2D

    tasks = [task for name, task in TASKS.items() if any(record['task'] == name for record in records)]
    variants = [name for name in VARIANTS if any(record['variant'] == name for record in records)]
    with styled() as (figure_type, _):
        found = figure_type(figsize=(8.0, 0.7 + 2.05 * len(tasks)), layout='constrained')
        grid = found.subplots(len(tasks), 2, squeeze=False)
        for (left, right), task in zip(grid, tasks):
            curves = {name: _curves(records, task.name, name) for name in variants}
            left.set(title=f'{task.title}: {task.loss_title}', gid=f'loss {task.name}')
            right.set(title=f'distance from {REFERENCE}', gid=f'distance {task.name}')
            for name in variants:
                _plot(left, list(curves[name].values()), VARIANTS.index(name))
            _mark_failures(left, curves)
            _distances(right, curves)
            for axes in (left, right):
                axes.margins(x=0.02)
                axes.spines[['top', 'right']].set_visible(False)
                axes.xaxis.set_major_formatter('{x:,.0f}')
                axes.set_xlabel('step' if task is tasks[-1] else '')
        handles = [Line2D([], [], linewidth=1.6, **_look(VARIANTS.index(name))) for name in variants]
        found.legend(handles, variants, loc='outside upper left', ncols=4, handlelength=3.2, frameon=False)
    for suffix in ('.png', '.svg'):
        save(found, stem.with_suffix(suffix))


def _look(number: int) -> dict[str, Any]:
    return {'color': _COLOURS[number % len(_COLOURS)], 'linestyle': _STYLES[number % len(_STYLES)]}


def _curves(records: Sequence[Mapping[str, Any]], task: str, variant: str) -> dict[int, list[float]]:
    """By seed; NaN where a loss was not finite."""
    chosen = [record for record in records if (record['task'], record['variant']) == (task, variant)]
    found = {record['seed']: [math.nan if x is None else x for x in record['curve']] for record in chosen}
    return {
        seed: [fmean(curve[start : start + _SMOOTH]) for start in range(0, len(curve), _SMOOTH)]
        for seed, curve in found.items()
    }


def _spread(values: Sequence[float]) -> float:
    mean = fmean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))


def _places(count: int) -> list[float]:
    return [(place + 0.5) * BLOCK * _SMOOTH for place in range(count)]


def _plot(axes: Axes, rows: Sequence[Sequence[float]], number: int) -> None:
    if rows:
        means = [fmean(column) for column in zip(*rows)]
        width = 2.2 if number == 0 else 1.2
        axes.plot(_places(len(means)), means, linewidth=width, gid=VARIANTS[number], **_look(number))


def _mark_failures(axes: Axes, curves: Mapping[str, Mapping[int, Sequence[float]]]) -> None:
    """A cross at the bottom, where the loss of a run has ceased to be finite."""
    failed = {name: [row for row in rows.values() if not all(map(math.isfinite, row))] for name, rows in curves.items()}
    for height, (name, rows) in enumerate((name, rows) for name, rows in failed.items() if rows):
        first = min(next(place for place, value in enumerate(row) if not math.isfinite(value)) for row in rows)
        at = (_places(first + 1)[-1], 0.06 + 0.1 * height)
        cross: dict[str, Any] = {'marker': 'x', 'markersize': 6, 'color': _RED, 'linestyle': 'none', 'gid': 'failed'}
        axes.plot(*([value] for value in at), transform=axes.get_xaxis_transform(), **cross)
        text = f'{name}: not finite from here in {len(rows)} of {len(curves[name])} runs'
        axes.annotate(
            text, at, (7, -3), axes.get_xaxis_transform(), 'offset points', fontsize=7.5, color=_RED, gid='failed'
        )


def _distances(axes: Axes, curves: Mapping[str, Mapping[int, Sequence[float]]]) -> None:
    base = curves.get(REFERENCE, {})
    if len(base) > 1:
        spread = [_spread(column) for column in zip(*base.values())]
        axes.fill_between(
            _places(len(spread)), [-x for x in spread], spread, color='#767676', alpha=0.22, linewidth=0, gid='seeds'
        )
    for name, rows in curves.items():
        shared = [seed for seed in rows if seed in base]
        if name != REFERENCE:
            _plot(axes, [[a - b for a, b in zip(rows[seed], base[seed])] for seed in shared], VARIANTS.index(name))
