"""Where the pages of benchmarks are kept."""

from __future__ import annotations

import argparse
from pathlib import Path

RESULTS = Path(__file__).parent / 'results'


def add_write(parser: argparse.ArgumentParser, name: str) -> None:
    """The option ``--write``: of its value, a path, or None where no page is to be kept.

    Args:
        parser: Of the benchmark.
        name: Of the file, without a value.
    """
    parser.add_argument(
        '--write',
        nargs='?',
        const=RESULTS / name,
        type=Path,
        metavar='FILE',
        help=f'keep the page, as benchmarks/results/{name} unless a file is named',
    )
