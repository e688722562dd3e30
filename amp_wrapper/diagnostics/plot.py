"""Draws the logs of trainings. Importing this module imports neither torch nor matplotlib."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
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
            there = f'{min(self.rows)} to {max(self.rows)}'
            raise AmpUsageError(f'nothing to draw from={low} to={high}: {self.name} has iterations {there}.')
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
    place = Path(path)
    # mmengine names folders by the time
    older = [file for name in _LOGS for file in sorted(place.glob(f'*/vis_data/{name}'), reverse=True)]
    files = [*(place / folder / name for folder in ('', 'vis_data') for name in _LOGS), *older]
    runs: list[list[tuple[int, dict[str, float]]]] = []
    try:
        for lines in map(_lines, filter(Path.exists, files) if place.is_dir() else [place]):
            if runs and lines and _starts_fresh(dict(runs[0]), lines[0][0]):
                break
            runs[:0] = [lines] if lines else []
    except OSError as error:
        raise AmpUsageError(f'no log {str(path)!r} can be read: {error.strerror or error}.') from error
    rows: Rows = {}
    resumed: list[int] = []
    for is_first, (at, values) in ((line is lines[0], line) for lines in runs for line in lines):
        if is_first or (rows.get(at, {}).keys() & values.keys() and at < max(rows)):
            # what was done again is taken from the later run
            rows = {before: row for before, row in rows.items() if before < at}
            resumed = [before for before in resumed if before < at] + [at] * bool(rows)
        rows.setdefault(at, {}).update(values)
    rows = {at: rows[at] for at in sorted(rows) if rows[at]}
    if not rows:
        wanted = 'an "iteration" and a loss, grad_norm, lr or number of amp.monitor'
        raise AmpUsageError(f'{str(path)!r} has no JSON lines with {wanted}. CSV and text logs are not read.')
    _count_skips(rows)
    return Run(str(path), rows, resumed)


def _count_skips(rows: Rows) -> None:
    """Replace how many steps were skipped so far by how many were since the line before."""
    begin, is_whole = next(iter(rows.values())), _starts_fresh(rows, min(rows))
    for key in {name for row in rows.values() for name in row if name.endswith('amp_skipped')}:
        # the log has it from the first skip on; skips in a log without the beginning may be older than its first line
        last = 0.0 if is_whole else begin.get(key, 0.0)
        for row in rows.values():
            count = row.pop(key, math.nan)
            if count > last:
                row[key] = count - last
                # a level without a loss scale skips steps too
                row.setdefault(key.replace('skipped', 'scale'), 1.0)
            last = last if math.isnan(count) else count


def _lines(file: Path) -> list[tuple[int, dict[str, float]]]:
    found, lines = [], []
    for text in file.read_text(encoding='utf-8', errors='replace').split('\n'):
        with suppress(ValueError, TypeError):
            found.append(dict(json.loads(text)))
    key = next((key for key in ('iteration', 'iter') if any(key in line for line in found)), 'step')
    for line in found:
        with suppress(ValueError, TypeError, LookupError, AttributeError, OverflowError):
            # the monitor writes a step alone; so do validations, where mmengine counts epochs
            place = line['step'] if key not in line and any('amp_' in name for name in line) else line[key]
            lines.append((int(place), _log_values(line)))
    return lines


def _log_values(line: dict[str, Any]) -> dict[str, float]:
    wanted = {name: value for name, value in line.items() if re.search('loss|grad_norm|lr$|amp_', name)}
    wanted = {name: value for name, value in wanted.items() if isinstance(value, (int, float, type(None)))}
    # null is what JSON has in place of NaN
    return {name: math.nan if value is None else float(value) for name, value in wanted.items()}


def _starts_fresh(rows: Rows, usual: int) -> bool:
    """Tell whether the first iteration comes within the largest distance of two, or within ``usual`` if it is the only one."""
    return next(iter(rows)) <= max((after - place for place, after in itertools.pairwise(rows)), default=usual)


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
    problems = [f'panels={name!r} is none of {", ".join(PANELS)}.' for name in panels if name not in PANELS]
    if problems or not runs:
        raise AmpConfigError(problems or ['runs=[] is empty: give the log of a training.'])
    paths = [runs] if isinstance(runs, (str, os.PathLike)) else runs
    found = [read_run(path).between(first, last) for path in paths]
    shown = [PANELS[name] for name in PANELS if name in panels and any(run.lines(PANELS[name][1]) for run in found)]
    if not shown:
        raise AmpUsageError(f'nothing to draw for panels={list(panels)} in these iterations of {found[0].name}.')
    with styled() as (figure_type, colours):
        figure = figure_type(figsize=(8.0, 1.0 + 1.45 * len(shown)), layout='constrained')
        grid = figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0]
        chosen: dict[str, str] = {}
        for axes, (heading, number) in zip(grid, shown):
            axes.set_title(heading)
            lines = [(run, part, points) for run in found for part, points in run.lines(number).items()]
            _set_axis(axes, number, [value for *_, points in lines for value in points.values()])
            for run, part, points in lines:
                # mathtext begins with a dollar
                label = (f'{run.name}: {part}' if part and len(found) > 1 else part or run.name).replace('$', r'\$')
                is_known, colour = label in chosen, chosen.setdefault(label, colours[len(chosen) % len(colours)])
                words: Any = {'color': colour, 'label': '' if is_known else label}
                style: Any = {'marker': 'o', 'markersize': 3.5} if len(points) <= 12 else {}
                style['drawstyle'] = 'steps-post' if number == 'amp_scale' else 'default'
                axes.plot(list(points), list(points.values()), **words, **style)
                skips = run.lines('amp_skipped').get(part, {}) if number == 'amp_scale' else {}
                _draw_crosses(axes, number, points, skips, _RED if len(found) == 1 else colour)
            for place in {place for run in found for place in run.resumed}:
                axes.axvline(place, color='#767676', linewidth=0.9, linestyle='--')
        grid[-1].set_xlabel('iteration' + '  (dashed line: resumed)' * any(run.resumed for run in found))
        grid[-1].xaxis.set_major_formatter('{x:,.0f}')
        heading = title or (found[0].name if len(found) == 1 else '')
        figure.suptitle(heading.replace('$', r'\$'), x=0.012, ha='left', weight='bold')
        if len(chosen) > 1:
            figure.legend(loc='outside lower left', ncols=max(1, 90 // (8 + max(map(len, chosen)))))
    return figure


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
        OSError: The file cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() not in ('.png', '.svg'):
        raise AmpConfigError([f'out={str(path)!r}: pictures are written as .png or .svg.'])
    # which imports torch
    from ..checkpoint.file import replacing

    with styled(), replacing(path) as part:
        # a date would make each file differ from the last one
        figure.savefig(part, format=path.suffix[1:].lower(), dpi=200, metadata={'Date': None})
