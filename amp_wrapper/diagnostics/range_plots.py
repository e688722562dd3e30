"""Draws the ranges of gradients and weights per layer over a training."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import AmpConfigError, AmpUsageError, nearest, some
from .plot_style import ALARM, INK, mark_iterations, power_text, styled, write_beside
from .range_files import KINDS, Counts, StepRanges, added, layers_of, read_ranges
from .ranges import TypeRange, range_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Rows and columns of a heat map, at most. More layers are drawn in groups, more iterations too.
MOST_ROWS, MOST_COLUMNS = 40, 300
#: Limits of the type are drawn as long as they are not further than this from the numbers, in powers of two.
_NEAR = 12
_TITLES = {'gradients': 'Gradients, with the loss scale', 'weights': 'Weights'}


def plot_ranges(
    steps: Sequence[StepRanges] | str | os.PathLike[str],
    *,
    first: int | None = None,
    last: int | None = None,
    title: str = '',
    member: str = '',
) -> Figure:
    """Draw a heat map: a row for each layer, iterations from left to right, the colour tells how large the median element is.

    Two panels: gradients as the 16-bit type sees them, and weights. The limits of the type are marked in the colour bar. Zeros
    are left out of the median; cells with infinities or NaN have a cross.

    Args:
        steps: Measurements, or the log beside them, as :func:`amp_wrapper.diagnostics.range_files.read_ranges` takes it.
        first: The first iteration that is drawn.
        last: The last one.
        title: Above the picture.
        member: Of an ``OptimWrapperDict``.

    Returns:
        A figure without a window.

    Raises:
        AmpUsageError: There is no file with ranges, or nothing in it to draw; matplotlib is not installed.
        AmpConfigError: ``first`` after ``last``.
    """
    chosen = _chosen(steps, first, last, member)
    with styled():
        return _draw_map(chosen, title)


def plot_layer(
    steps: Sequence[StepRanges] | str | os.PathLike[str],
    layer: str,
    *,
    first: int | None = None,
    last: int | None = None,
    title: str = '',
    member: str = '',
) -> Figure:
    """Draw one layer: powers of two from bottom to top, iterations from left to right, the colour tells the share of elements.

    Args:
        steps: As in :func:`plot_ranges`.
        layer: The name of a weight; of a module: its weights together.
        first: The first iteration that is drawn.
        last: The last one.
        title: Above the picture; by default the name.
        member: Of an ``OptimWrapperDict``.

    Returns:
        A figure without a window.

    Raises:
        AmpUsageError: As :func:`plot_ranges`.
        AmpConfigError: There is no such layer; ``first`` after ``last``.
    """
    chosen = _chosen(steps, first, last, member)
    names = layers_of(chosen, 'weights') or layers_of(chosen, 'gradients')
    mine = [name for name in names if name == layer or name.startswith(f'{layer}.')]
    if not mine:
        near = nearest(layer, names)
        raise AmpConfigError([f'layer={layer!r} is no weight or module of this log{near}. It has {some(names)}.'])
    with styled():
        return _draw_layer(chosen, mine, title or layer)


def _chosen(
    steps: Sequence[StepRanges] | str | os.PathLike[str], first: int | None, last: int | None, member: str
) -> list[StepRanges]:
    if first is not None and last is not None and first > last:
        raise AmpConfigError([f'from={first} is after to={last}.'])
    whole = read_ranges(steps, member) if isinstance(steps, (str, os.PathLike)) else list(steps)
    chosen = [
        step
        for step in whole
        if (first is None or step.iteration >= first) and (last is None or step.iteration <= last)
    ]
    if not chosen:
        places = f'; there are ranges of iterations {whole[0].iteration} to {whole[-1].iteration}' if whole else ''
        raise AmpUsageError(f'there are no ranges per layer to draw{places}.')
    return chosen


# -- the heat map ----------------------------------------------------------------------------------------------------------


def grouped(names: Sequence[str], most: int = MOST_ROWS) -> dict[str, list[str]]:
    """Names of weights as rows of a heat map: by modules, as deep as the number of rows allows.

    Args:
        names: In the order of the model.
        most: Rows.

    Returns:
        The label of each row to its names.
    """
    if len(names) <= most:
        return {name: [name] for name in names}
    depth = max(name.count('.') for name in names)
    for parts in range(depth, 0, -1):
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault('.'.join(name.split('.')[:parts]), []).append(name)
        if len(groups) <= most:
            return {key if len(each) == 1 else f'{key} ({len(each)})': each for key, each in groups.items()}
    pieces = [[names[at] for at in piece] for piece in np.array_split(np.arange(len(names)), most)]
    return {f'{each[0]} \N{HORIZONTAL ELLIPSIS} ({len(each)})': each for each in pieces}


def _columns(steps: Sequence[StepRanges]) -> list[list[StepRanges]]:
    """Measurements that share a column."""
    count = min(len(steps), MOST_COLUMNS)
    return [[steps[at] for at in piece] for piece in np.array_split(np.arange(len(steps)), count)]


def _edges(columns: Sequence[Sequence[StepRanges]]) -> npt.NDArray[np.float64]:
    """Where columns begin and end: in the middle between the iterations that were measured."""
    places = np.array([[column[0].iteration, column[-1].iteration] for column in columns], dtype=np.float64)
    between = (places[:-1, 1] + places[1:, 0]) / 2
    width = float(np.median(np.diff(places.mean(axis=1)))) if len(places) > 1 else 1.0
    return np.concatenate([[places[0, 0] - width / 2], between, [places[-1, 1] + width / 2]])


def _cells(columns: Sequence[Sequence[StepRanges]], kind: str, names: Sequence[str]) -> list[Counts]:
    return [
        added(getattr(step, kind)[name] for step in column for name in names if name in getattr(step, kind))
        for column in columns
    ]


def _draw_map(steps: Sequence[StepRanges], title: str) -> Figure:
    from matplotlib.colors import BoundaryNorm
    from matplotlib.figure import Figure

    columns = _columns(steps)
    shown = [kind for kind in KINDS if layers_of(steps, kind)]
    rows = {kind: grouped(layers_of(steps, kind)) for kind in shown}
    heights = [max(len(rows[kind]), 3) for kind in shown]
    figure = Figure(figsize=(9.0, 1.4 + 0.6 * len(shown) + 0.19 * sum(heights)), layout='constrained')
    grid = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, kind in zip(grid, shown):
        table = [_cells(columns, kind, names) for names in rows[kind].values()]
        medians = np.array([[_or_nan(cell.median()) for cell in row] for row in table])
        low, high = _limits(medians, _known(steps))
        edges = np.arange(low, high + 1)
        colours = _colours(len(edges) - 1)
        axes.set_facecolor('#d9d9d9')
        axes.grid(False)
        mesh = axes.pcolormesh(
            _edges(columns),
            np.arange(len(table) + 1) - 0.5,
            medians,
            cmap=colours,
            norm=BoundaryNorm(edges, colours.N),
            rasterized=True,
            gid=kind,
        )
        _mark_cells(axes, table, columns)
        axes.set_yticks(range(len(table)), [_short(name) for name in rows[kind]], fontsize=7.5)
        axes.set_ylim(len(table) - 0.5, -0.5)
        axes.tick_params(axis='y', length=0)
        axes.set_title(f'{_TITLES[kind]}: power of two of the median')
        bar = figure.colorbar(mesh, ax=axes, pad=0.015, fraction=0.06, aspect=max(12, 1.2 * len(table)))
        _mark_bar(bar, low, high, _known(steps))
    mark_iterations(grid[-1])
    figure.suptitle(title or f'Ranges per layer ({steps[0].dtype})', x=0.012, ha='left', fontsize=12, fontweight='bold')
    return figure


def _colours(count: int) -> Any:
    import matplotlib

    return matplotlib.colormaps['viridis'].resampled(count)


def _or_nan(power: int | None) -> float:
    return float('nan') if power is None else float(power)


def _known(steps: Sequence[StepRanges]) -> TypeRange | None:
    dtype = getattr(torch, steps[-1].dtype, None)
    return range_of(dtype) if dtype in (torch.float16, torch.bfloat16) else None


def _limit_words(known: TypeRange | None) -> Mapping[int, str]:
    """The limits of a type: where numbers become zero, where they lose digits, where they overflow."""
    if known is None:
        return {}
    return {known.bottom - 1: 'zero below', known.normal: 'fewer digits below', known.top: 'overflow from here'}


def _limits(values: npt.NDArray[np.float64], known: TypeRange | None, room: int = 1) -> tuple[int, int]:
    """The powers of two that are shown: those of the numbers, and the limits of the type that are near, with room beyond."""
    finite = values[np.isfinite(values)]
    low, high = (int(finite.min()), int(finite.max()) + 1) if len(finite) else (-1, 1)
    near = [limit for limit in _limit_words(known) if low - _NEAR <= limit <= high + _NEAR]
    return min([low, *(limit - room for limit in near)]), max([high, *(limit + room for limit in near)])


def _mark_bar(bar: Any, low: int, high: int, known: TypeRange | None) -> None:
    bar.outline.set_visible(False)
    limits = {limit: words for limit, words in _limit_words(known).items() if low <= limit <= high}
    step = max(1, (high - low) // 8)
    ticks = [
        place
        for place in range(low, high + 1)
        if place % step == 0 and all(abs(place - each) > step / 2 for each in limits)
    ]
    places = sorted([*ticks, *limits])
    labels = [f'{power_text(place)}  {limits[place]}' if place in limits else power_text(place) for place in places]
    bar.set_ticks(places, labels=labels)
    bar.ax.tick_params(length=2, labelsize=7.5)
    bar.ax.minorticks_off()
    for limit in limits:
        bar.ax.axhline(limit, color=ALARM, linewidth=1.6, gid='limit')


def _mark_cells(axes: Axes, table: Sequence[Sequence[Counts]], columns: Sequence[Sequence[StepRanges]]) -> None:
    """Crosses where there are infinities or NaN; grey is what has nothing but zeros or those."""
    edges = _edges(columns)
    middles = (edges[:-1] + edges[1:]) / 2
    places = [(middles[x], y) for y, row in enumerate(table) for x, cell in enumerate(row) if cell.nonfinite]
    words = []
    if places:
        xs, ys = zip(*places)
        axes.plot(
            xs,
            ys,
            linestyle='none',
            marker='x',
            markersize=3.6,
            markeredgewidth=1.1,
            color=ALARM,
            gid='nonfinite',
            clip_on=False,
        )
        words.append('\N{MULTIPLICATION SIGN} NaN or infinite')
    if any(cell.median() is None and not cell.nonfinite for row in table for cell in row):
        words.append('grey: zeros alone, or not measured')
    if words:
        write_beside(axes, '   '.join(words), (1, 1), (0, 5), xycoords='axes fraction', ha='right')


def _short(name: str, most: int = 42) -> str:
    return name if len(name) <= most else f'{name[: most // 2 - 1]}\N{HORIZONTAL ELLIPSIS}{name[-most // 2 :]}'


# -- one layer -------------------------------------------------------------------------------------------------------------


def _draw_layer(steps: Sequence[StepRanges], names: Sequence[str], title: str) -> Figure:
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    columns = _columns(steps)
    cells = {kind: _cells(columns, kind, names) for kind in KINDS}
    shown = [kind for kind in KINDS if any(cell.elements for cell in cells[kind])]
    if not shown:
        raise AmpUsageError(f'there are no ranges of {title} in these iterations.')
    figure = Figure(figsize=(8.0, 0.9 + 3.0 * len(shown)), layout='constrained')
    grid = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axes, kind in zip(grid, shown):
        powers = np.array([float(power) for cell in cells[kind] for power in cell.powers])
        # the words for a limit need some
        low, high = _limits(powers, _known(steps), room=3)
        shares = _shares(cells[kind], low, high)
        axes.grid(False)
        mesh = axes.pcolormesh(
            _edges(columns),
            np.arange(low - 2, high + 3),
            shares,
            cmap='viridis_r',
            norm=LogNorm(1e-4, 1.0),
            rasterized=True,
            gid=kind,
        )
        axes.set_title(f'{_TITLES[kind]}: share of elements from each power of two to the next')
        for limit, words in _limit_words(_known(steps)).items():
            if low <= limit <= high:
                axes.axhline(limit, color=ALARM, linewidth=1.1, linestyle=(0, (4, 2)), gid='limit')
                offset, side = (-3, 'top') if words.endswith('below') else (3, 'bottom')
                where = axes.get_yaxis_transform()
                write_beside(axes, words, (0.995, limit), (0, offset), color=ALARM, xycoords=where, ha='right', va=side)
        step = max(1, (high - low) // 8)
        ticks = [place for place in range(low + 1, high) if place % step == 0]
        # a row of their own for what has no power of two
        axes.set_yticks([low - 1.5, *ticks, high + 1.5], ['zero', *map(power_text, ticks), 'NaN, inf'], fontsize=8)
        for line in (low - 0.5, high + 0.5):
            axes.axhline(line, color=INK, linewidth=0.5)
        bar = figure.colorbar(
            mesh, ax=axes, pad=0.015, fraction=0.05, format=FuncFormatter(lambda share, _: f'{100 * share:g} %')
        )
        bar.outline.set_visible(False)
        bar.ax.minorticks_off()
    mark_iterations(grid[-1])
    figure.suptitle(title, x=0.012, ha='left', fontsize=12, fontweight='bold')
    return figure


def _shares(cells: Sequence[Counts], low: int, high: int) -> npt.NDArray[np.float64]:
    """Shares of elements: rows for zero, for each power of two, and for infinities and NaN, with empty ones between. NaN
    where there are no elements."""
    table = np.full((high - low + 4, len(cells)), np.nan)
    for column, cell in enumerate(cells):
        total = max(cell.elements, 1)
        for power, count in cell.powers.items():
            table[power - low + 2, column] = count / total
        if cell.zeros:
            table[0, column] = cell.zeros / total
        if cell.nonfinite:
            table[-1, column] = cell.nonfinite / total
    return table
