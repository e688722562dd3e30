"""``amp-wrapper info``: what is installed here, and what serves the ops."""

from __future__ import annotations

import argparse

HELP = 'versions, devices, and what serves the compiled ops here'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options.

    Args:
        parser: Gets them.
    """
    parser.epilog = f'example: {parser.prog} --json'
    parser.add_argument('--json', action='store_true', help='print one JSON object')


def run(args: argparse.Namespace) -> int:
    """Print the report.

    Args:
        args: From the parser.

    Returns:
        0.

    Raises:
        AmpConfigError: An environment variable has a value that means nothing.
    """
    from .. import info

    info.show(as_json=args.json)
    return 0
