"""Draws what the log of a training says about mixed precision, for one training or several."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .log_files import Run
from .panels import DEFAULT_PANELS, PANELS
from .plot_style import ALARM, FAINT, line_look, mark_iterations, power_text, styled, write_beside
from .run_choice import Line, belongs, chosen_runs, has, lines_in, lines_of
from .series import Series, smoothed, thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: A log axis from here on: the largest number over the smallest.
_WIDE = 50.0
#: More points than this of a number that goes up and down are drawn light, with their mean.
_BAND = 1000
_NOISY = ('grad_norm', 'amp_grad_underflow', 'amp_grad_tiny', 'amp_grad_peak', 'amp_update_lost')
#: More skipped steps than this get small marks.
_MANY_SKIPS = 60


def plot_runs(
    runs: Sequence[Run | str | os.PathLike[str]],
    *,
    panels: Sequence[str] = DEFAULT_PANELS,
    first: int | None = None,
    last: int | None = None,
    title: str = '',
) -> Figure:
    """Draw the numbers of one training or several over their iterations.

    Numbers that no run has are left out with their panels; :func:`amp_wrapper.diagnostics.run_choice.missing` tells which.
    With several runs, each has a colour and a line style of its own.

    Args:
        runs: Trainings, or logs as :func:`amp_wrapper.diagnostics.log_files.read_run` takes them.
        panels: Which of :data:`amp_wrapper.diagnostics.panels.PANELS`; their order is always the same.
        first: The first iteration that is drawn.
        last: The last one.
        title: Above the picture; by default the name of a single run.

    Returns:
        A figure without a window. :func:`amp_wrapper.diagnostics.plot_style.save` writes it to files.

    Raises:
        AmpUsageError: A log that cannot be read; nothing to draw; matplotlib is not installed.
        AmpConfigError: No runs, a panel that there is not, ``first`` after ``last``.
    """
    whole = chosen_runs(runs, panels, first, last)
    with styled():
        return _draw(whole, [name for name in PANELS if name in panels], title)


def _draw(runs: Sequence[Run], wanted: Sequence[str], title: str) -> Figure:
    from matplotlib.figure import Figure

    lines = lines_in(runs)
    shown: list[tuple[str, Mapping[str, str], float]] = []
    for name in wanted:
        panel = PANELS[name]
        there = {number: words for number, words in panel.numbers.items() if any(has(run, number) for run in runs)}
        if len(there) > 1 and len(lines) > 1 and name != 'scale':
            # one line a run: it is the run that the line's look tells
            shown += [
                (f'{panel.title}: {words}', {number: words}, panel.height * 0.9) for number, words in there.items()
            ]
        elif there:
            shown.append((panel.title, there, panel.height))
    if not _skipped(runs):
        # without a loss scale either there is nothing to draw in this panel; it stays where it is the only one
        shown = [each for each in shown if each[1].keys() != {'amp_skipped'}] or shown
    heights = [height for *_, height in shown]
    figure = Figure(figsize=(8.0, 0.9 + 1.25 * sum(heights)), layout='constrained')
    grid = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (heading, numbers, _) in zip(grid, shown):
        axes.set_title(heading)
        axes.set_gid('panel_' + '_'.join(numbers))
        _fill(axes, lines, list(numbers), numbers)
        _mark_resumes(axes, runs, first=axes is grid[0], several=len(lines) > 1)
    mark_iterations(grid[-1])
    grid[-1].margins(x=0.02)
    figure.align_ylabels(list(grid))
    _head(figure, lines, title)
    return figure


def _skipped(runs: Sequence[Run]) -> bool:
    return any(len(skips.values) > 0 for run in runs for skips in run.skips.values())


def _head(figure: Figure, lines: Sequence[Line], title: str) -> None:
    from matplotlib.lines import Line2D

    single = len({line.run.name for line in lines}) == 1
    title = title or (lines[0].run.name if single else '')
    bold: Any = {'size': 12, 'weight': 'bold'}
    if len(lines) == 1:
        figure.suptitle(title, x=0.012, ha='left', fontproperties=bold)
        return
    labels = [line.part if single and line.part else line.label for line in lines]
    figure.legend(
        [Line2D([], [], linewidth=1.8, **line_look(number)) for number in range(len(lines))],
        labels,
        loc='outside upper left',
        ncols=max(1, min(len(lines), int(100 / (max(map(len, labels)) + 9)))),
        handlelength=3.2,
        title=title or None,
        title_fontproperties=bold,
        alignment='left',
    )


def _fill(axes: Axes, lines: Sequence[Line], numbers: Sequence[str], words: Mapping[str, str]) -> None:
    values: list[npt.NDArray[np.float64]] = []
    many = len(numbers) > 1 and 'amp_scale' not in words and 'amp_skipped' not in words
    for at, line in enumerate(lines):
        for offset, number in enumerate(numbers):
            if number == 'amp_skipped':
                continue
            for part, series in lines_of(line.run, number).items():
                if not belongs(part, line, lines):
                    continue
                look = line_look(at + offset if many else at)
                label = words[number] if many else line.label
                _draw_series(axes, number, series, look, label)
                values.append(series.values[np.isfinite(series.values)])
    together = np.concatenate(values) if values else np.empty(0)
    _scale_axis(axes, numbers, together)
    if 'amp_skipped' in words:
        _mark_skips(axes, lines)
    if many:
        axes.legend(loc='upper right', ncols=len(numbers), borderaxespad=0, bbox_to_anchor=(1, 1.22), handlelength=2.6)


def _draw_series(axes: Axes, number: str, series: Series, look: dict[str, Any], label: str) -> None:
    finite = np.isfinite(series.values)
    if number == 'grad_norm':
        # a log axis has no place for zero
        finite &= series.values > 0
    points = Series(series.iterations, np.where(finite, series.values, np.nan))
    dots: dict[str, Any] = {'marker': 'o', 'markersize': 3.5} if len(series.values) <= 12 else {}
    # many points would be a band that hides the others
    smooth = smoothed(points) if number == 'loss' or (number in _NOISY and len(series.values) > _BAND) else None
    if smooth:
        drawn = thinned(points)
        light = {**look, 'linestyle': '-', 'alpha': 0.3, 'linewidth': 0.8}
        axes.plot(drawn.iterations, drawn.values, label='', gid=number, **light)
        drawn = thinned(smooth)
        axes.plot(drawn.iterations, drawn.values, linewidth=1.8, label=label, gid=f'smoothed {number}', **look)
    else:
        drawn = thinned(points)
        # holds until the next one; logs repeat what was measured last
        style = 'steps-post' if number.startswith('amp_') else 'default'
        words: dict[str, Any] = {'linewidth': 1.4, 'drawstyle': style, 'label': label, 'gid': number}
        axes.plot(drawn.iterations, drawn.values, **words, **look, **dots)
    wrong = series.iterations[~np.isfinite(series.values)]
    if len(wrong) and number in ('loss', 'grad_norm'):
        _mark_nonfinite(axes, wrong)


def _mark_nonfinite(axes: Axes, places: npt.NDArray[np.int64]) -> None:
    drawn = thinned(Series(places, np.full(len(places), 0.96))).iterations
    is_first = not any(line.get_gid() == 'nonfinite' for line in axes.lines)
    axes.plot(
        drawn,
        np.full(len(drawn), 0.96),
        linestyle='none',
        marker='x',
        markersize=5,
        color=ALARM,
        transform=axes.get_xaxis_transform(),
        gid='nonfinite',
        label='',
    )
    if is_first:
        axes.set_title(f'{axes.get_title("left")}  (\N{MULTIPLICATION SIGN} NaN or infinite)')


def _mark_skips(axes: Axes, lines: Sequence[Line]) -> None:
    marked = False
    for at, line in enumerate(lines):
        for member, skips in line.run.skips.items():
            if not belongs(member, line, lines) or not len(skips.values):
                continue
            marked = True
            scales = line.run.members('amp_scale').get(member)
            heights = None if scales is None else _at(scales, skips.iterations)
            options: dict[str, Any] = {} if heights is not None else {'transform': axes.get_xaxis_transform()}
            axes.plot(
                skips.iterations,
                np.full(len(skips.values), 0.06) if heights is None else heights,
                linestyle='none',
                **_skip_look(len(skips.values)),
                color=ALARM if len(lines) == 1 else line_look(at)['color'],
                zorder=4,
                gid='skips',
                label='',
                clip_on=False,
                **options,
            )
            several = skips.values > 1
            if heights is not None and 0 < several.sum() <= 12:
                for place, count, height in zip(skips.iterations[several], skips.values[several], heights[several]):
                    write_beside(axes, f'{count:.0f}', (place, height), (6, 4))
    if marked:
        axes.set_title(f'{axes.get_title("left")}  (\N{HEAVY MULTIPLICATION X} skipped step)')
    if not any(line.get_gid() == 'amp_scale' for line in axes.lines):
        axes.set_yticks([])
        axes.set_title(axes.get_title('left').replace('Loss scale  (', 'Skipped steps  ('))


def _skip_look(count: int) -> dict[str, Any]:
    if count > _MANY_SKIPS:
        return {'marker': 'x', 'markersize': 3.5, 'markeredgewidth': 0.8}
    return {'marker': 'X', 'markersize': 6.5, 'markeredgewidth': 0.6, 'markeredgecolor': 'white'}


def _at(series: Series, places: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The number in force at some iterations."""
    before = np.searchsorted(series.iterations, places, side='right') - 1
    return series.values[np.clip(before, 0, None)]


def _mark_resumes(axes: Axes, runs: Sequence[Run], first: bool, several: bool) -> None:
    for at, run in enumerate(runs):
        for place in run.resumed:
            colour = line_look(at)['color'] if several and len(runs) > 1 else FAINT
            axes.axvline(place, color=colour, linewidth=0.9, linestyle=(0, (3, 2)), zorder=1, gid='resumed')
            if first:
                where = axes.get_xaxis_transform()
                write_beside(axes, 'resumed', (place, 1.0), (3, -2), color=colour, xycoords=where, va='top')


def _scale_axis(axes: Axes, numbers: Sequence[str], values: npt.NDArray[np.float64]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

    positive = values[values > 0]
    if numbers[0] in ('amp_scale', 'amp_skipped'):
        if len(positive):
            low, high = math.floor(math.log2(positive.min())), math.ceil(math.log2(positive.max()))
            room = max(1, round((high - low) * 0.08))
            axes.set_yscale('log', base=2)
            axes.set_ylim(2.0 ** (low - room), 2.0 ** (high + room))
            ticks = LogLocator(base=2, numticks=6)
            axes.yaxis.set_major_locator(ticks)
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(
                FuncFormatter(lambda value, _: power_text(math.log2(value)) if value > 0 else '')
            )
    elif numbers[0] == 'grad_norm' or (numbers[0] == 'loss' and _is_wide(values)):
        if len(positive):
            axes.set_yscale('log')
            if positive.max() / positive.min() > 20:
                axes.yaxis.set_minor_formatter(NullFormatter())
            else:
                plain = FuncFormatter(lambda value, _: f'{value:g}')
                axes.yaxis.set_major_formatter(plain)
                axes.yaxis.set_minor_formatter(plain)
                axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    elif numbers[0] in ('amp_grad_underflow', 'amp_grad_tiny', 'amp_update_lost'):
        top = values.max() if len(values) else 0.0
        axes.set_ylim(-0.04 * (top or 0.01), 1.1 * (top or 0.01))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f'{100 * share:.3g} %'))
    elif numbers[0] in ('amp_grad_peak', 'amp_weight_peak'):
        axes.axhline(0, color=ALARM, linewidth=0.9, gid='end of the range')
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))


def _is_wide(values: npt.NDArray[np.float64]) -> bool:
    """Whether numbers are seen on a log axis alone."""
    if not len(values) or values.min() <= 0:
        return False
    return float(np.quantile(values, 0.98) / np.quantile(values, 0.02)) >= _WIDE
