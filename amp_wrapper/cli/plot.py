"""``amp-wrapper plot``: pictures of the loss scale, skipped steps and ranges, from the logs of one training or several."""

from __future__ import annotations

import argparse

from ..diagnostics.plot import DEFAULT_PANELS, PANELS, Run

HELP = 'pictures of loss scale, skipped steps and ranges, from logs'


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
    parser.add_argument(
        '--out', metavar='FILE', help='file to write, .png or .svg; default: amp_plot.png or amp_ranges.png here'
    )
    parser.add_argument(
        '--ranges', action='store_true', help='a heat map of gradients and weights per layer, from amp_ranges.jsonl'
    )
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
        AmpConfigError: Options that do not fit together.
    """
    from ..diagnostics import plot
    from ..errors import AmpConfigError

    if args.ranges and (args.panels or len(args.logs) > 1):
        raise AmpConfigError(['--ranges draws one training and has no --panels: give one log, and leave --panels out.'])
    out = args.out or ('amp_ranges.png' if args.ranges else 'amp_plot.png')
    if args.ranges:
        plot.save(plot.plot_ranges(args.logs[0], args.first, args.last, args.title), out)
    else:
        panels = args.panels or DEFAULT_PANELS
        runs = plot.read_runs(args.logs, args.first, args.last)
        plot.save(plot.draw(runs, panels, args.title), out)
        print(*map(_summary, runs), sep='\n')
        missing = [name for name in panels if not any(run.lines(PANELS[name][1]) for run in runs)]
        if missing:
            print('left out:', ', '.join(f'{name} (no {PANELS[name][1]} in the log)' for name in missing))
    print(out)
    return 0


def _summary(run: Run) -> str:
    words = [f'iterations {min(run.rows)} to {max(run.rows)}']
    for member, skips in run.lines('amp_skipped').items():
        count = f'{sum(skips.values()):.0f} step{"" if sum(skips.values()) == 1 else "s"} skipped'
        words.append(f'{count} by {member}' if member else count)
    words += [f'resumed at {place}' for place in run.resumed]
    return f'{run.name}: {", ".join(words)}'
