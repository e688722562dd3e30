"""``amp-wrapper plot``: pictures of the loss scale and skipped steps, from the logs of one training or several."""

from __future__ import annotations

import argparse

from ..diagnostics.plot import DEFAULT_PANELS, PANELS, Run

HELP = 'pictures of loss scale and skipped steps, from logs'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options.

    Args:
        parser: Gets them.
    """
    parser.description = (
        'Draw loss, gradient norm, loss scale with skipped steps, and what the monitor measured, over the iterations of one '
        'training or several.'
    )
    parser.epilog = f'example: {parser.prog} work_dirs/cnn_o2 work_dirs/cnn_o5 --out levels.png --from 100'
    log = (
        'work dir (its newest run, and those it was resumed from), folder of one run, scalars.json or other JSON lines'
    )
    parser.add_argument('logs', metavar='LOG', nargs='+', help=log)
    out = 'file to write, .png or .svg; default: amp_plot.png here'
    parser.add_argument('--out', metavar='FILE', default='amp_plot.png', help=out)
    shown = f'some of: {" ".join(PANELS)}; default: all but lr'
    parser.add_argument('--panels', nargs='+', choices=tuple(PANELS), metavar='PANEL', help=shown)
    parser.add_argument('--from', dest='first', type=int, metavar='N', help='first iteration')
    parser.add_argument('--to', dest='last', type=int, metavar='N', help='last iteration')
    parser.add_argument('--title', default='', help='above the picture')


def run(args: argparse.Namespace) -> int:
    """Draw and write the picture, and print what is in it.

    Args:
        args: From the parser.

    Returns:
        0.

    Raises:
        AmpUsageError: A log cannot be read; there is nothing to draw; the file cannot be written; matplotlib is not installed.
    """
    from ..diagnostics import plot

    panels = args.panels or DEFAULT_PANELS
    figure = plot.plot_runs(args.logs, panels=panels, first=args.first, last=args.last, title=args.title)
    plot.save(figure, args.out)
    runs = plot.read_runs(args.logs, args.first, args.last)
    print(*map(_summary, runs), sep='\n')
    missing = [name for name in panels if not any(run.lines(PANELS[name][1]) for run in runs)]
    if missing:
        print('left out:', ', '.join(f'{name} (no {PANELS[name][1]} in the log)' for name in missing))
    print(args.out)
    return 0


def _summary(run: Run) -> str:
    words = [f'iterations {min(run.rows)} to {max(run.rows)}']
    for member, skips in run.lines('amp_skipped').items():
        count = f'{sum(skips.values()):.0f} step{"" if sum(skips.values()) == 1 else "s"} skipped'
        words.append(f'{count} by {member}' if member else count)
    words += [f'resumed at {place}' for place in run.resumed]
    return f'{run.name}: {", ".join(words)}'
