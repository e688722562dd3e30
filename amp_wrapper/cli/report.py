"""``amp-wrapper report``: what the model of a config computes in at a level and why, and what each level costs."""

from __future__ import annotations

import argparse

from . import options

HELP = 'report what runs in which type and why, what float16 would lose, and memory'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options.

    Args:
        parser: Gets them.
    """
    parser.description = (
        'Run one training step of the model of a config at each opt level, and report: types of weights and outputs, '
        'what runs in FP32 and why, what float16 would lose, and the memory of each level. Nothing is trained.'
    )
    parser.epilog = f'example: {parser.prog} configs/digits/cnn_o2.py --opt-level O5 --html report.html'
    options.add_config(parser)
    options.add_trial(parser, 'weights to report on; default: load_from of the config, or its first ones')
    parser.add_argument(
        '--opt-level', choices=options.LEVELS, help='the level to report on (default: that of the config)'
    )
    parser.add_argument(
        '--depth',
        type=options.count,
        metavar='N',
        help='show modules down to this depth in the terminal; 0: the model alone',
    )


def run(args: argparse.Namespace) -> int:
    """Report.

    Args:
        args: From the parser.

    Returns:
        0.

    Raises:
        AmpError: Config, options, checkpoint or data cannot be used; a file cannot be written.
    """
    from ..openmmlab import commands

    commands.report(args)
    return 0
