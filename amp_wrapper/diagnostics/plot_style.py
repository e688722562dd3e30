"""How pictures look: fonts, colours, line styles; and how they are written to files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import AmpConfigError, AmpUsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Okabe and Ito's colours, which differ for colour-blind eyes too, on a light ground.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#A66F00', '#56B4E9', '#000000')
#: So that lines differ without colours. Five of them and seven colours make 35 pairs.
LINE_STYLES: tuple[Any, ...] = ('-', (0, (5, 1.5)), (0, (1, 1)), (0, (7, 1.5, 1, 1.5)), (0, (4, 1, 1, 1, 1, 1)))
GROUND, INK, FAINT, ALARM = '#ffffff', '#222222', '#767676', '#B3202C'
FORMATS = ('png', 'svg')
#: Dots of a PNG per inch: twice matplotlib's own number.
DPI = 200

_SETTINGS: dict[str, Any] = {
    'figure.facecolor': GROUND,
    'axes.facecolor': GROUND,
    'savefig.facecolor': GROUND,
    'text.color': INK,
    'font.family': 'sans-serif',
    'font.sans-serif': ['DejaVu Sans', 'Arial', 'Helvetica'],
    'font.size': 9,
    'axes.titlesize': 9.5,
    'axes.titlelocation': 'left',
    'axes.titlepad': 6,
    'axes.labelcolor': INK,
    'axes.labelsize': 9,
    'axes.edgecolor': '#9a9a9a',
    'axes.linewidth': 0.8,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': True,
    'axes.axisbelow': True,
    'grid.color': '#e4e4e4',
    'grid.linewidth': 0.7,
    'xtick.color': '#9a9a9a',
    'ytick.color': '#9a9a9a',
    'xtick.labelcolor': INK,
    'ytick.labelcolor': INK,
    'xtick.labelsize': 8.5,
    'ytick.labelsize': 8.5,
    'legend.frameon': False,
    'legend.fontsize': 8.5,
    'lines.solid_capstyle': 'round',
    'mathtext.fontset': 'dejavusans',
    # letters stay letters: they can be searched, and copied
    'svg.fonttype': 'none',
    # the same picture is the same file
    'svg.hashsalt': 'amp-wrapper',
}


@contextmanager
def styled() -> Iterator[None]:
    """Inside, figures are made and written in the style of the package, whatever the user's own settings are.

    Raises:
        AmpUsageError: matplotlib is not installed.
    """
    try:
        import matplotlib
        import matplotlib.style
    except ModuleNotFoundError as error:
        if (error.name or '').partition('.')[0] != 'matplotlib':
            raise
        raise AmpUsageError('pictures need matplotlib, which is not installed: pip install matplotlib') from error
    with matplotlib.style.context(['default', _SETTINGS]):
        yield


def line_look(number: int) -> dict[str, Any]:
    """Colour and line style of the n-th line, as keywords of ``Axes.plot``."""
    return {'color': COLOURS[number % len(COLOURS)], 'linestyle': LINE_STYLES[number % len(LINE_STYLES)]}


def mark_iterations(axes: Axes) -> None:
    """Write whole iterations under an axis, with thousands set apart."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: f'{place:,.0f}'.replace(',', '\N{THIN SPACE}')))
    axes.set_xlabel('iteration')


def write_beside(
    axes: Axes, words: str, place: tuple[float, float], offset: tuple[float, float], **options: Any
) -> None:
    """Write small words at an offset in points from a place.

    Args:
        axes: Get the words.
        words: What is written.
        place: In the coordinates of the axes, or those of ``xycoords``.
        offset: To the right and up.
        **options: Of ``Axes.annotate``.
    """
    axes.annotate(words, place, offset, textcoords='offset points', **{'fontsize': 7.5, 'color': FAINT, **options})


def power_text(power: float) -> str:
    """A power of two, for matplotlib."""
    return f'$2^{{{power:.0f}}}$'


def chosen_files(out: str | os.PathLike[str] | None, file_format: str | None, default: str) -> list[Path]:
    """Where a picture is written.

    Args:
        out: A file; its suffix chooses the format, where no format is given.
        file_format: 'png', 'svg' or 'both'.
        default: The name of the file without its suffix, in the current folder, where ``out`` is None.

    Raises:
        AmpConfigError: Another suffix; a suffix that is not that of the format.
    """
    path = Path(default if out is None else out)
    suffix = path.suffix.lower().removeprefix('.') if out is not None else ''
    if file_format == 'both':
        stem = path.with_suffix('') if suffix in FORMATS else path
        return [stem.with_name(f'{stem.name}.{each}') for each in FORMATS]
    if suffix and suffix not in FORMATS:
        raise AmpConfigError([f'out={str(path)!r}: pictures are written as .png or .svg.'])
    if suffix and file_format not in (None, suffix):
        raise AmpConfigError([f'out={str(path)!r} does not end in .{file_format}, the format that was asked for.'])
    return [path if suffix else path.with_name(f'{path.name}.{file_format or "png"}')]


def save(figure: Figure, files: Sequence[str | os.PathLike[str]]) -> None:
    """Write a picture. Files that are there are replaced, when the new ones are complete.

    Args:
        figure: From one of the functions of this package.
        files: Paths that end in .png or .svg. Folders on the way are made.

    Raises:
        AmpUsageError: A file cannot be written.
    """
    for file in map(Path, files):
        half = file.with_name(f'.{file.name}.{os.getpid()}.part')
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with styled():
                kind = file.suffix.lower().removeprefix('.')
                # a date would make each file differ from the last one
                figure.savefig(half, format=kind, dpi=DPI, metadata={'Date': None} if kind == 'svg' else None)
            half.replace(file)
        except OSError as error:
            raise AmpUsageError(f'the picture {str(file)!r} cannot be written: {error.strerror or error}.') from error
        finally:
            with suppress(OSError):
                half.unlink(missing_ok=True)
