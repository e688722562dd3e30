"""``amp-wrapper build-ops``: compile the ops for the torch at hand, in a checkout or in an installed package."""

from __future__ import annotations

import argparse

from ..errors import AmpUsageError

HELP = 'compile the ops for the torch that is installed'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options.

    Args:
        parser: Gets them.
    """
    parser.description = (
        'Compile the ops for the torch that is installed here, into a folder of the cache. '
        'Needs a C++ compiler and ninja; for the CUDA ops, nvcc as well.'
    )
    parser.epilog = f'example: MAX_JOBS=4 {parser.prog} --no-cuda'
    parser.add_argument(
        '--cuda',
        action=argparse.BooleanOptionalAction,
        help='build the CUDA ops, or leave them out (default: as FORCE_CUDA says, or where torch sees a GPU)',
    )


def run(args: argparse.Namespace) -> int:
    """Build, and print what serves each device then.

    Args:
        args: From the parser.

    Returns:
        0.

    Raises:
        AmpUsageError: The ops cannot be built here.
    """
    from .. import info
    from ..ops import building

    try:
        building.build(building.with_cuda(args.cuda))
    except (OSError, RuntimeError) as error:
        raise AmpUsageError(f'the ops cannot be built: {error}') from error
    info.show_rows('ops', info.ops())
    return 0
