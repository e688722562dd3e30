"""``amp-wrapper convert``: look into a checkpoint of any kind, and turn it into weights."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

HELP = 'look into a checkpoint of any kind, and turn it into weights'
#: Those of :mod:`amp_wrapper.checkpoint.convert`, which imports torch.
WEIGHT_TYPES = ('fp32', 'fp16', 'bf16')
WEIGHTS = ('average', 'trained')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options.

    Args:
        parser: Gets them.
    """
    parser.description = 'Look into a checkpoint of any kind, or take the weights out of it, in another type.'
    parser.epilog = f'example: {parser.prog} work_dirs/cnn_o2/epoch_10.pth --to fp16 --publish'
    parser.add_argument(
        'source',
        metavar='SRC',
        help='checkpoint file of any kind, or a folder of shards; read without running code from it',
    )
    parser.add_argument('out', metavar='OUT', nargs='?', help='file to write; default: beside SRC, epoch_10_fp16.pth')
    parser.add_argument('--inspect', action='store_true', help='print what is in SRC; writes nothing without --to')
    parser.add_argument(
        '--to',
        choices=WEIGHT_TYPES,
        help='the type of the weights, which are all that is written',
    )
    parser.add_argument(
        '--weights',
        choices=WEIGHTS,
        help='of a file with an EMA: the averaged weights (default), or the trained ones',
    )
    parser.add_argument(
        '--publish',
        action='store_true',
        help='weights alone (fp32 unless --to says otherwise), with the first 8 digits of its SHA-256 in the file name',
    )


def parse_args(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The options; at least one thing to do.

    Args:
        parser: With :func:`add_arguments`.
        words: Of the command line.
    """
    # OUT may stand behind the options
    args = parser.parse_intermixed_args(words)
    if args.publish:
        args.to = args.to or 'fp32'
    if args.to is None and not args.inspect:
        parser.error(f'nothing to do with {args.source}: give --inspect, --to or --publish')
    if args.out and not args.to:
        parser.error('OUT is written with --to or --publish only')
    return args


def run(args: argparse.Namespace) -> int:
    """Inspect, convert, or both.

    Args:
        args: From :func:`parse_args`.

    Returns:
        0.

    Raises:
        AmpCheckpointError: The checkpoint is missing, damaged or of no known kind, or lacks what is asked for.
        AmpUsageError: OUT would replace SRC, or is a folder.
        CheckpointWriteError: OUT cannot be written.
    """
    from . import conversion

    conversion.run(args)
    return 0
