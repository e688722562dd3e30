"""``amp-wrapper plot``: pictures of the loss scale, skipped steps and ranges, from the logs of one training or several."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..diagnostics.panels import DEFAULT_PANELS, PANELS
from ..diagnostics.plot_style import FORMATS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HELP = 'pictures of loss scale, skipped steps and ranges, from logs'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options.

    Args:
        parser: Gets them.
    """
    parser.description = (
        'Draw loss, gradient norm, loss scale with skipped steps, and what AmpMonitorHook measured, over the iterations of one '
        'training or several.'
    )
    parser.epilog = f'example: {parser.prog} work_dirs/cnn_o2 work_dirs/cnn_o5 --out levels.png --from 100'
    parser.add_argument(
        'logs',
        metavar='LOG',
        nargs='+',
        help='work dir (its newest training, with all runs that it was resumed in), folder of one run, scalars.json or other '
        'JSON lines',
    )
    parser.add_argument(
        '--out',
        metavar='FILE',
        help='file to write, .png or .svg; default: amp_plot.png, amp_ranges.png or amp_layer.png here',
    )
    parser.add_argument('--format', choices=(*FORMATS, 'both'), help='default: that of FILE, else png')
    parser.add_argument(
        '--ranges',
        action='store_true',
        help='a heat map in place of the lines: how large gradients and weights of each layer are; from amp_ranges.jsonl',
    )
    parser.add_argument(
        '--layer', metavar='NAME', help='one weight or module: how its elements are spread; from amp_ranges.jsonl'
    )
    parser.add_argument(
        '--member', metavar='NAME', default='', help='with --ranges or --layer: which optimizer of an OptimWrapperDict'
    )
    parser.add_argument(
        '--panels',
        nargs='+',
        choices=tuple(PANELS),
        metavar='PANEL',
        help=f'some of: {" ".join(PANELS)}; default: all but lr',
    )
    parser.add_argument('--from', dest='first', type=int, metavar='N', help='first iteration')
    parser.add_argument('--to', dest='last', type=int, metavar='N', help='last iteration')
    parser.add_argument('--title', default='', help='above the picture')


def run(args: argparse.Namespace) -> int:
    """Draw and write the picture, and say what was left out.

    Args:
        args: From the parser.

    Returns:
        0.

    Raises:
        AmpUsageError: A log that cannot be read; nothing to draw; a file that cannot be written; matplotlib is not installed.
        AmpConfigError: Options that do not fit together.
    """
    from ..diagnostics import plot_style
    from ..errors import AmpConfigError

    per_layer = args.ranges or args.layer is not None
    problems = []
    if args.ranges and args.layer is not None:
        problems.append('--ranges and --layer are two pictures: give one of them.')
    if per_layer and len(args.logs) > 1:
        problems.append(f'--ranges and --layer draw one training, and here are {len(args.logs)} logs: give one.')
    if per_layer and args.panels:
        problems.append('--panels chooses lines, of which --ranges and --layer have none.')
    if args.member and not per_layer:
        problems.append('--member is for --ranges and --layer: lines are drawn of all optimizers.')
    if problems:
        raise AmpConfigError(problems)
    stem = 'amp_layer' if args.layer is not None else 'amp_ranges' if args.ranges else 'amp_plot'
    # wrong names are told before logs are read
    files = plot_style.chosen_files(args.out, args.format, stem)
    plot_style.save(_of_layers(args) if per_layer else _of_runs(args), files)
    for file in files:
        print(file)
    return 0


def _of_layers(args: argparse.Namespace) -> Figure:
    from ..diagnostics import range_plots

    limits = {'first': args.first, 'last': args.last}
    if args.layer is not None:
        return range_plots.plot_layer(args.logs[0], args.layer, title=args.title, member=args.member, **limits)
    return range_plots.plot_ranges(args.logs[0], title=args.title, member=args.member, **limits)


def _of_runs(args: argparse.Namespace) -> Figure:
    from ..diagnostics import plots, run_choice

    panels = args.panels or DEFAULT_PANELS
    runs = run_choice.chosen_runs(args.logs, panels, args.first, args.last)
    figure = plots.plot_runs(runs, panels=panels, title=args.title)
    for each in runs:
        print(run_choice.summary(each))
    for name, numbers in run_choice.missing(runs, panels).items():
        panel = PANELS[name]
        whole = 'left out' if len(numbers) == len(panel.numbers) else 'in part'
        print(f'{whole}: {panel.title} (no {", ".join(numbers)} in the log{"s" if len(runs) > 1 else ""})')
    return figure
