"""``amp-wrapper suggest-level``: try the levels on the model of a config, and recommend one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import options

HELP = 'try the levels on the model of a config, and recommend one'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options.

    Args:
        parser: Gets them.
    """
    parser.description = (
        'Try the levels one after the other on copies of the model of a config, with its data, optimizer and clipping: time, '
        'memory, skipped steps, how far loss and gradients are from FP32. Recommends one, with keep_fp32 where a few modules '
        'overflow. Trains nothing, writes nothing but --html and --json. Ctrl-C ends it with what is known by then.'
    )
    parser.epilog = f'example: {parser.prog} configs/digits/cnn_o2.py --levels O0,O2,O5 --html level.html'
    options.add_config(parser)
    parser.add_argument(
        '--levels',
        type=_levels,
        metavar='O0,O1,...',
        help='levels that may be recommended; default: all. O0 always runs',
    )
    parser.add_argument(
        '--steps', type=int, default=20, metavar='N', help='steps of each level, the first two not timed; default: 20'
    )
    parser.add_argument(
        '--prefer', choices=('speed', 'memory'), default='speed', help='what to save; default: speed, on this device'
    )
    options.add_trial(parser, 'weights to begin with; default: load_from of the config, or its first ones')
    parser.add_argument(
        '--seed', type=options.seed, default=0, metavar='N', help='of the random generators; default: 0'
    )
    parser.add_argument('--device', metavar='DEVICE', help='default: the first GPU, or the CPU')


def _levels(text: str) -> Sequence[str]:
    listed = [level.strip() for level in text.split(',') if level.strip()]
    unknown = [level for level in listed if level not in options.LEVELS]
    if unknown or not listed:
        which = f': {", ".join(unknown)} is none of {", ".join(options.LEVELS)}' if unknown else ''
        raise argparse.ArgumentTypeError(f'{text!r} must be levels with commas between them, such as O0,O2,O5{which}')
    return listed


def run(args: argparse.Namespace) -> int:
    """Try, print, write.

    Args:
        args: From the parser.

    Returns:
        0; 130 where it was interrupted, after what is known was printed.

    Raises:
        AmpError: Config, data or options cannot be used; a file cannot be written.
    """
    from ..openmmlab import commands

    return commands.suggest_level(args)
