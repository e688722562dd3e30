"""``amp-wrapper info`` and ``build-ops``: what is installed here, and what serves the ops."""

from __future__ import annotations

import argparse

from .. import info as installed
from ..errors import AmpUsageError
from ..ops import building


def info(args: argparse.Namespace) -> None:
    """Print versions, devices, and what serves the ops.

    Args:
        args: The options of ``amp-wrapper info``.

    Raises:
        AmpConfigError: An environment variable has a value that means nothing.
    """
    installed.show(installed.report(), args.json)


def build_ops(args: argparse.Namespace) -> None:
    """Compile the ops into a folder of the cache, and print what serves each device then.

    Args:
        args: The options of ``amp-wrapper build-ops``.

    Raises:
        AmpUsageError: The ops cannot be built here.
    """
    try:
        building.build(building.with_cuda(args.cuda))
    except (OSError, RuntimeError) as error:
        raise AmpUsageError(f'the ops cannot be built: {error}') from error
    installed.show({'ops': installed.ops()})
