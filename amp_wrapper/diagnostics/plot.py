"""Draws the logs of trainings, and the ranges of their layers. Importing this module imports neither torch nor matplotlib."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import AmpConfigError, AmpUsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CROSS = '\N{HEAVY MULTIPLICATION X}'
#: The parts of the picture from top to bottom, by the names for ``panels``: title, and number of the log.
PANELS = {
    'loss': (f'Loss  ({_CROSS} NaN or infinite)', 'loss'),
    'grad_norm': (f'Gradient norm  ({_CROSS} NaN or infinite)', 'grad_norm'),
    'scale': (f'Loss scale  ({_CROSS} skipped step)', 'amp_scale'),
    'subnormal': ('Share of gradient elements below the normal range of float16', 'amp_grad_subnormal'),
    'peak': ('Largest gradient with the loss scale, in powers of two  (0: overflow)', 'amp_grad_peak'),
    'lr': ('Learning rate', 'lr'),
}
DEFAULT_PANELS = tuple(name for name in PANELS if name != 'lr')
_LOGS = ('scalars.json', 'amp_monitor.jsonl')
_RED = '#B3202C'
# words can be searched and copied, and the same picture is the same file
_LOOK = {'axes.spines.top': False, 'axes.spines.right': False, 'svg.fonttype': 'none', 'svg.hashsalt': 'amp-wrapper'}
_STYLE = {'font.size': 9, 'axes.titlelocation': 'left', 'axes.grid': True, 'grid.color': '#e4e4e4', **_LOOK}

#: Values by iteration, which rises, then by the name in the log.
Rows = dict[int, dict[Any, Any]]
PathLike = str | os.PathLike[str]


class Run(NamedTuple):
    """The numbers of one training, its name in a legend, and the iterations of the first lines after a resume.

    Where steps were skipped since the line before, ``amp_skipped`` is how many.
    """

    name: str
    rows: Rows
    resumed: list[int]

    def lines(self, number: str) -> dict[str, dict[int, float]]:
        """Find a number, by the optimizer that it belongs to, or ``''``. Without ``loss``, find all losses by their names."""
        names = dict.fromkeys(name for row in self.rows.values() for name in row)
        # mmengine writes generator.lr, and base_lr beside lr
        special = {'loss': 'loss()' if 'loss' in names else '(.*loss.*)', 'lr': r'(?:(.*)\.)?lr'}
        matches = (re.fullmatch(special.get(number, f'(?:(.*)_)?{number}'), name) for name in names)
        found = {match[1] or '': match[0] for match in matches if match}
        return {part: {at: row[name] for at, row in self.rows.items() if name in row} for part, name in found.items()}

    def between(self, first: int | None, last: int | None) -> Run:
        """Take the part from one iteration to another one, both included."""
        low, high = min(self.rows) if first is None else first, max(self.rows) if last is None else last
        rows = {at: row for at, row in self.rows.items() if low <= at <= high}
        if not rows:
            there = f'{self.name} has iterations {min(self.rows)} to {max(self.rows)}'
            raise AmpUsageError(f'nothing to draw from={low} to={high}: {there}.')
        return Run(self.name, rows, [at for at in self.resumed if at in rows])


# -- logs ------------------------------------------------------------------------------------------------------------


def read_run(path: PathLike) -> Run:
    """Read the numbers of one training. Lines that are damaged or half written are left out.

    Args:
        path: A work dir of mmengine, of which the newest run is read, with those before it that it was resumed from; the folder
            of one run; a folder that ``amp.monitor`` writes to; or a file of JSON lines that have an ``iteration``, ``iter`` or
            ``step``.

    Raises:
        AmpUsageError: There is no such file, it cannot be read, or it has none of the numbers.
    """
    run = _read(Path(path), _LOGS, _log_values, 'an "iteration" and a loss, grad_norm, lr or number of amp.monitor')
    begin, is_whole = next(iter(run.rows.values())), _starts_fresh(run.rows, min(run.rows))
    for key in {name for row in run.rows.values() for name in row if name.endswith('amp_skipped')}:
        # the log has it from the first skip on; skips in a log without the beginning may be older than its first line
        last = 0.0 if is_whole else begin.get(key, 0.0)
        for row in run.rows.values():
            count = row.pop(key, math.nan)
            if count > last:
                row[key] = count - last
                # a level without a loss scale skips steps too
                row.setdefault(key.replace('skipped', 'scale'), 1.0)
            last = last if math.isnan(count) else count
    return run


def _read(path: Path, names: Sequence[str], values_of: Callable[[Any], Any], wanted: str) -> Run:
    """Read the rows of one training.

    Args:
        path: As in :func:`read_run`.
        names: The files that are looked for in folders.
        values_of: Turns a JSON object into a row.
        wanted: What a line has to have, for the error.
    """
    # mmengine names folders by the time
    older = [file for name in names for file in sorted(path.glob(f'*/vis_data/{name}'), reverse=True)]
    files = [*(path / place / name for place in ('', 'vis_data') for name in names), *older]
    runs: list[list[tuple[int, Any]]] = []
    try:
        for lines in (_lines(file, values_of) for file in (filter(Path.exists, files) if path.is_dir() else [path])):
            if runs and lines and _starts_fresh(dict(runs[0]), lines[0][0]):
                break
            runs[:0] = [lines] if lines else []
    except OSError as error:
        raise AmpUsageError(f'no log {str(path)!r} can be read: {error.strerror or error}.') from error
    rows: Rows = {}
    resumed: list[int] = []
    for is_first, (place, values) in ((line is lines[0], line) for lines in runs for line in lines):
        if is_first or (rows.get(place, {}).keys() & values.keys() and place < max(rows)):
            # what was done again is taken from the later run
            rows = {at: row for at, row in rows.items() if at < place}
            resumed = [at for at in resumed if at < place] + [place] * bool(rows)
        rows.setdefault(place, {}).update(values)
    rows = {place: rows[place] for place in sorted(rows) if rows[place]}
    if not rows:
        raise AmpUsageError(f'{str(path)!r} has no JSON lines with {wanted}. CSV and text logs are not read.')
    return Run(_names([path])[0], rows, resumed)


def _lines(file: Path, values_of: Callable[[Any], Any]) -> list[tuple[int, Any]]:
    found, lines = [], []
    for text in file.read_text(encoding='utf-8', errors='replace').split('\n'):
        with suppress(ValueError, TypeError):
            found.append(dict(json.loads(text)))
    key = next((key for key in ('iteration', 'iter') if any(key in line for line in found)), 'step')
    for line in found:
        with suppress(ValueError, TypeError, LookupError, AttributeError, OverflowError):
            # the monitor writes a step alone; so do validations, where mmengine counts epochs
            place = line['step'] if key not in line and any('amp_' in name for name in line) else line[key]
            lines.append((int(place), values_of(line)))
    return lines


def _log_values(line: dict[str, Any]) -> dict[str, float]:
    wanted = {name: value for name, value in line.items() if re.search('loss|grad_norm|lr$|amp_', name)}
    wanted = {name: value for name, value in wanted.items() if isinstance(value, (int, float, type(None)))}
    # null is what JSON has in place of NaN
    return {name: math.nan if value is None else float(value) for name, value in wanted.items()}


def _range_values(line: dict[str, Any]) -> dict[tuple[str, str], tuple[float, int]]:
    """Find the power of two of the median, and the number of infinities and NaN, by kind and layer."""
    # a product with a power of two moves each element by as many places
    shifts = {'gradients': round(math.log2(line['loss_scale'])) if line.get('without_scale') else 0, 'weights': 0}
    found = {}
    for kind, shift in shifts.items():
        for layer, counts in line[kind].items():
            powers = sorted((int(power), count) for power, count in counts['powers'].items())
            below = list(itertools.accumulate(count for _, count in powers))
            median = next((power + shift for (power, _), seen in zip(powers, below) if 2 * seen >= below[-1]), math.nan)
            found[kind, layer] = median, counts['nonfinite']
    return found


def _starts_fresh(rows: Rows, usual: int) -> bool:
    """Tell whether the first iteration comes within the largest distance of two, or within ``usual`` if it is the only one."""
    return next(iter(rows)) <= max((after - place for place, after in itertools.pairwise(rows)), default=usual)


def _names(paths: Sequence[PathLike]) -> list[str]:
    """Name runs by the last folder that is not a time, or by as many last parts of their paths as make them differ."""
    whole = [[part for part in Path(os.path.abspath(path)).parts if part not in ('vis_data', *_LOGS)] for path in paths]
    names = [[part for part in parts if not re.fullmatch(r'\d{8}_\d{6}', part)][-1] for parts in whole]
    for count in range(2, max(map(len, whole)) + 1):
        if len(set(names)) < len(set(map(tuple, whole))):
            names = ['/'.join(parts[-count:]) for parts in whole]
    return names


# -- pictures --------------------------------------------------------------------------------------------------------


def plot_runs(
    runs: PathLike | Sequence[PathLike],
    *,
    panels: Sequence[str] = DEFAULT_PANELS,
    first: int | None = None,
    last: int | None = None,
    title: str = '',
) -> Figure:
    """Draw the numbers of one training or several over their iterations. Panels without numbers are left out.

    Args:
        runs: Logs, as :func:`amp_wrapper.diagnostics.plot.read_run` takes them, or one.
        panels: Which of ``loss``, ``grad_norm``, ``scale``, ``subnormal``, ``peak``, ``lr``; their order is always this one.
        first: The first iteration that is drawn.
        last: The last one.
        title: Above the picture; by default the name of a single run.

    Returns:
        A figure without a window. :func:`amp_wrapper.diagnostics.plot.save` writes it to a file.

    Raises:
        AmpUsageError: A log cannot be read; there is nothing to draw; matplotlib is not installed.
        AmpConfigError: No runs, or an unknown panel.
    """
    runs = [runs] if isinstance(runs, (str, os.PathLike)) else runs
    problems = [f'panels={name!r} is none of {", ".join(PANELS)}.' for name in panels if name not in PANELS]
    if problems or not runs:
        raise AmpConfigError(problems or ['runs=[] is empty: give the log of a training.'])
    return draw(read_runs(runs, first, last), panels, title)


def read_runs(paths: Sequence[PathLike], first: int | None, last: int | None) -> list[Run]:
    """Read the part of some runs from one iteration to another one, with names that tell them apart."""
    named = [run._replace(name=name) for name, run in zip(_names(paths), map(read_run, paths))]
    return [run.between(first, last) for run in named]


def draw(runs: Sequence[Run], panels: Sequence[str], title: str) -> Figure:
    """Draw runs; the other arguments, the result and the errors are those of :func:`plot_runs`."""
    shown = [PANELS[name] for name in PANELS if name in panels and any(run.lines(PANELS[name][1]) for run in runs)]
    if not shown:
        raise AmpUsageError(f'nothing to draw for panels={list(panels)} in these iterations of {runs[0].name}.')
    with styled() as (figure_type, colours):
        figure = figure_type(figsize=(8.0, 1.0 + 1.45 * len(shown)), layout='constrained')
        grid = figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0]
        chosen: dict[str, str] = {}
        for axes, (heading, number) in zip(grid, shown):
            axes.set_title(heading)
            lines = [(run, part, points) for run in runs for part, points in run.lines(number).items()]
            _set_axis(axes, number, [value for *_, points in lines for value in points.values()])
            for run, part, points in lines:
                # mathtext begins with a dollar
                label = (f'{run.name}: {part}' if part and len(runs) > 1 else part or run.name).replace('$', r'\$')
                is_known, colour = label in chosen, chosen.setdefault(label, colours[len(chosen) % len(colours)])
                _draw_line(axes, number, points, color=colour, label='' if is_known else label)
                skips = run.lines('amp_skipped').get(part, {}) if number == 'amp_scale' else {}
                _draw_crosses(axes, number, points, skips, _RED if len(runs) == 1 else colour)
            for place in {place for run in runs for place in run.resumed}:
                axes.axvline(place, color='#767676', linewidth=0.9, linestyle='--')
        grid[-1].set_xlabel('iteration' + '  (dashed line: resumed)' * any(run.resumed for run in runs))
        grid[-1].xaxis.set_major_formatter('{x:,.0f}')
        heading = title or (runs[0].name if len(runs) == 1 else '')
        figure.suptitle(heading.replace('$', r'\$'), x=0.012, ha='left', weight='bold')
        if len(chosen) > 1:
            figure.legend(loc='outside lower left', ncols=max(1, 90 // (8 + max(map(len, chosen)))))
    return figure


def _draw_line(axes: Axes, number: str, points: dict[int, float], **look: Any) -> None:
    """Draw a line with gaps where it is not finite; a long one light, with the mean of a thirtieth of the points over it."""
    finite = {place: value for place, value in points.items() if math.isfinite(value)}
    if len(finite) <= 100 or number in ('amp_scale', 'lr'):
        style: dict[str, Any] = {'marker': 'o', 'markersize': 3.5} if len(points) <= 12 else {}
        style['drawstyle'] = 'steps-post' if number == 'amp_scale' else 'default'
        axes.plot(list(points), list(points.values()), **style, **look)
    else:
        axes.plot(list(points), list(points.values()), linewidth=0.8, alpha=0.3, color=look['color'])
        places, values, half = list(finite), list(finite.values()), len(finite) // 60
        middles = range(0, len(places), 1 + len(places) // 300)
        windows = [values[max(0, middle - half) : middle + half + 1] for middle in middles]
        means = [sum(window) / len(window) for window in windows]
        axes.plot([places[middle] for middle in middles], means, **look)


def _draw_crosses(axes: Axes, number: str, points: dict[int, float], skips: dict[int, float], colour: str) -> None:
    """Mark skipped steps on the line of the loss scale; of other lines, NaN and infinities at the top of the panel."""
    if number == 'amp_scale':
        places, heights, where = list(skips), [points.get(place, 1.0) for place in skips], axes.transData
    else:
        places = [place for place, value in points.items() if not math.isfinite(value)]
        heights, where = [0.95] * len(places), axes.get_xaxis_transform()
    axes.plot(places, heights, 'X', color=colour, markeredgecolor='white', zorder=4, transform=where)


def _set_axis(axes: Axes, number: str, values: list[float]) -> None:
    """Make an axis logarithmic for the loss scale, and for a loss or gradient norm that falls to a fiftieth or less."""
    from matplotlib.ticker import PercentFormatter

    known = sorted(filter(math.isfinite, values)) or [0.0]
    is_wide = known[0] > 0 and known[-1 - len(known) // 50] / known[len(known) // 50] >= 50
    if known[-1] > 0 and (number == 'amp_scale' or (number in ('loss', 'grad_norm') and is_wide)):
        axes.set_yscale('log', base=2 if number == 'amp_scale' else 10)
    else:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0) if number == 'amp_grad_subnormal' else '{x:g}')


def plot_ranges(folder: PathLike, first: int | None = None, last: int | None = None, title: str = '') -> Figure:
    """Draw a heat map: a row for each layer, a column for each measurement, the colour tells how large the median element is.

    Gradients have the loss scale in them, as the 16-bit type sees them. Zeros do not count. Grey cells have nothing but
    zeros, or were not measured; crosses are infinities or NaN.

    Args:
        folder: A log, as :func:`amp_wrapper.diagnostics.plot.read_run` takes it, with an ``amp_ranges.jsonl``; or such a file.
        first: The first iteration that is drawn.
        last: The last one.
        title: Above the picture.

    Returns:
        A figure without a window.

    Raises:
        AmpUsageError: There are no ranges, or none in these iterations; matplotlib is not installed.
    """
    wanted = 'ranges per layer: give a folder with amp_ranges.jsonl, or the file of one optimizer of several'
    run = _read(Path(folder), ('amp_ranges.jsonl',), _range_values, wanted).between(first, last)
    keys = dict.fromkeys(key for row in run.rows.values() for key in row)
    kinds = [kind for kind in ('gradients', 'weights') if any(kind == key[0] for key in keys)]
    with styled() as (figure_type, _):
        from matplotlib.ticker import MaxNLocator

        figure = figure_type(figsize=(9.0, 2.5 + 0.19 * min(len(keys), 80)), layout='constrained')
        grid = figure.subplots(len(kinds), sharex=True, squeeze=False)[:, 0]
        for axes, kind in zip(grid, kinds):
            layers = [layer for each, layer in keys if each == kind]
            cells = [[row.get((kind, layer), (math.nan, 0)) for row in run.rows.values()] for layer in layers]
            medians = [[median for median, _ in row] for row in cells]
            image = axes.imshow(medians, aspect='auto', interpolation='nearest')
            whole = MaxNLocator(8, integer=True, min_n_ticks=1)
            figure.colorbar(image, ax=axes, pad=0.015, format='$2^{{{x:.0f}}}$', ticks=whole)
            crosses = [(x, y) for y, row in enumerate(cells) for x, (_, nonfinite) in enumerate(row) if nonfinite]
            axes.plot([x for x, _ in crosses], [y for _, y in crosses], 'x', color=_RED, markersize=4)
            axes.set(title=f'{kind.capitalize()}: median  ({_CROSS} NaN or infinite)', facecolor='#d9d9d9')
            axes.grid(False)
            axes.set_yticks(*_thinned(layers, 40), fontsize=7.5)
        grid[-1].set_xticks(*_thinned([f'{place:,}' for place in run.rows], 10))
        grid[-1].set_xlabel('iteration')
        figure.suptitle(title or 'Ranges per layer', x=0.012, ha='left', weight='bold')
    return figure


def _thinned(labels: Sequence[str], most: int) -> tuple[range, Sequence[str]]:
    every = math.ceil(len(labels) / most)
    return range(0, len(labels), every), labels[::every]


@contextmanager
def styled() -> Iterator[tuple[type[Figure], list[str]]]:
    """Set the style of the package inside, whatever the user's own settings are; yields the figure class and the colours."""
    try:
        from matplotlib import rcParams, style
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise AmpUsageError('pictures need matplotlib, which is not installed: pip install matplotlib') from error
    with style.context(['default', 'tableau-colorblind10', _STYLE]):
        yield Figure, rcParams['axes.prop_cycle'].by_key()['color']


def save(figure: Figure, path: PathLike) -> None:
    """Write a picture to a file, whole or not at all. Folders on the way are made.

    Args:
        figure: The picture.
        path: Ends in ``.png`` or ``.svg``.

    Raises:
        AmpConfigError: Another suffix.
        AmpUsageError: The file cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() not in ('.png', '.svg'):
        raise AmpConfigError([f'out={str(path)!r}: pictures are written as .png or .svg.'])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with styled(), tempfile.TemporaryDirectory(prefix='.', dir=path.parent) as folder:
            half = Path(folder, path.name)
            # a date would make each file differ from the last one
            figure.savefig(half, dpi=200, metadata={'Date': None})
            half.replace(path)
    except OSError as error:
        raise AmpUsageError(f'the picture {str(path)!r} cannot be written: {error.strerror or error}.') from error
