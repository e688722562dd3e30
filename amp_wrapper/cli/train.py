"""``amp-wrapper train``: train a model from an mmengine config, at any opt level."""

from __future__ import annotations

import argparse

from . import options

HELP = 'train a model from an mmengine config, at any opt level'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that mmengine users know, and ``--opt-level``.

    Args:
        parser: Gets them.
    """
    parser.description = 'Train a model from an mmengine config, at any opt level.'
    parser.epilog = f'example: {parser.prog} configs/digits/cnn_o2.py --opt-level O5 --seed 1'
    options.add_config(
        parser,
        'override entries of the config, e.g. optim_wrapper.loss_scale=1024 train_cfg.max_epochs=20',
    )
    parser.add_argument('--work-dir', help='folder for logs and checkpoints; default: work_dirs/<name of the config>')
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='auto|PATH',
        help='go on from a checkpoint, bit for bit: a path, a URL, or "auto" (also without a value) for the newest one in '
        'the work dir',
    )
    parser.add_argument(
        '--amp',
        action='store_true',
        help='automatic mixed precision in float16 with a dynamic loss scale: O1, if the config says OptimWrapper',
    )
    parser.add_argument(
        '--opt-level',
        choices=options.LEVELS,
        help='replace the level of the config: O0 FP32, O1 autocast to float16, O2 float16 model with FP32 masters, '
        'O3 pure float16, O4 and O5 the bfloat16 counterparts of O1 and O2',
    )
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help="scale the learning rate to the real batch size, by the config's rule",
    )
    parser.add_argument('--seed', type=options.seed, help='seed of all random generators')
    options.add_launcher(parser)


def run(args: argparse.Namespace) -> int:
    """Train.

    Args:
        args: From the parser.

    Returns:
        0.

    Raises:
        AmpError: Config, options or checkpoint cannot be used.
    """
    options.note_rank(args)
    from ..openmmlab import commands

    commands.train(args)
    return 0
