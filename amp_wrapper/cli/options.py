"""Options that several commands have. Reading them imports neither torch nor mmengine."""

from __future__ import annotations

import argparse
import os

#: Those of :mod:`amp_wrapper.policy`, which imports torch.
LEVELS = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')


def count(text: str) -> int:
    """Type of an option: a whole number that is not negative."""
    return _whole(text, 0)


def positive(text: str) -> int:
    """Type of an option: a whole number of at least 1."""
    return _whole(text, 1)


def seed(text: str) -> int:
    """Type of an option: what NumPy and torch take as a seed, a whole number from 0 to 2**32 - 1."""
    number = count(text)
    if number >= 2**32:
        raise argparse.ArgumentTypeError(f'{text!r} must be a whole number below 2**32')
    return number


def _whole(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f'{text!r} must be a whole number of at least {least}')
    return number


def add_config(parser: argparse.ArgumentParser, help: str = 'override entries of the config') -> None:
    """The config file and ``--cfg-options``.

    Args:
        parser: Gets ``config``, a path, and ``cfg_options``, a list or None.
        help: What ``--cfg-options`` is for.
    """
    parser.add_argument('config', metavar='CONFIG', help='config file, text or pure Python')
    parser.add_argument('--cfg-options', nargs='+', action='extend', metavar='KEY=VALUE', help=help)


def add_trial(parser: argparse.ArgumentParser, checkpoint: str) -> None:
    """What a trial of a model runs with, and the files that it writes.

    Args:
        parser: Gets ``checkpoint``, ``html`` and ``json``; each may be None.
        checkpoint: What ``--checkpoint`` is for.
    """
    parser.add_argument('--checkpoint', metavar='FILE', help=checkpoint)
    parser.add_argument('--html', metavar='FILE', help='write a page that needs no network')
    parser.add_argument('--json', metavar='FILE', help='write everything as JSON')


def add_launcher(parser: argparse.ArgumentParser) -> None:
    """How several processes were started.

    Args:
        parser: Gets ``launcher``, and ``local_rank``, which :func:`note_rank` hands on.
    """
    parser.add_argument(
        '--launcher', choices=('none', 'pytorch', 'slurm', 'mpi'), default='none', help='how processes were started'
    )
    # torchrun hands this over, under either spelling
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)


def note_rank(args: argparse.Namespace) -> None:
    """Put the rank where mmengine looks for it.

    Args:
        args: From a parser with :func:`add_launcher`.
    """
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
