"""``amp-wrapper test``: test a checkpoint, in FP32 or at a level."""

from __future__ import annotations

import argparse

from . import options

HELP = 'test a checkpoint, in FP32 or at a level'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that mmengine users know, and ``--opt-level``.

    Args:
        parser: Gets them.
    """
    parser.description = (
        'Test a checkpoint. No optimizer wrapper exists here, so this runs in FP32 unless --opt-level says otherwise; '
        'validation during training runs at the level of the training.'
    )
    parser.epilog = f'example: {parser.prog} configs/digits/cnn_o2.py work_dirs/cnn_o2/epoch_10.pth --opt-level O2'
    options.add_config(parser)
    parser.add_argument(
        'checkpoint',
        metavar='CHECKPOINT',
        help='checkpoint file or URL; its weights are FP32 whatever the level of the training',
    )
    parser.add_argument('--work-dir', help='folder for logs and metrics; default: work_dirs/<name of the config>')
    parser.add_argument(
        '--opt-level', choices=options.LEVELS, help='run the forward passes at this level (default: FP32)'
    )
    options.add_launcher(parser)


def run(args: argparse.Namespace) -> int:
    """Test, and print the metrics.

    Args:
        args: From the parser.

    Returns:
        0.

    Raises:
        AmpError: Config, options or checkpoint cannot be used.
    """
    options.note_rank(args)
    from ..openmmlab import commands

    commands.test(args)
    return 0
