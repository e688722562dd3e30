"""Where the pages of benchmarks are kept, how tables come to them, and what they call the machine."""

from __future__ import annotations

import argparse
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import torch

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


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f'| {" | ".join(heads)} |', '|' + ' --- |' * len(heads), *(f'| {" | ".join(row)} |' for row in rows)]


def put(path: Path, name: str, lines: Sequence[str]) -> None:
    """Replace what stands between ``<!-- NAME: ... -->`` and ``<!-- end of NAME -->`` on a page.

    Args:
        path: The page.
        name: Of the part.
        lines: What stands there from now on.

    Raises:
        ValueError: The page has no such part.
    """
    before, _, after = _parted(path, name)
    # a table ends at an empty line
    path.write_text('\n'.join([before, '', *lines, '', after]), encoding='utf-8')


def part(path: Path, name: str) -> list[str]:
    """What stands there now.

    Args:
        path: The page.
        name: Of the part.

    Raises:
        ValueError: The page has no such part.
    """
    return _parted(path, name)[1].strip('\n').splitlines()


def _parted(path: Path, name: str) -> tuple[str, str, str]:
    found = re.fullmatch(
        rf'(.*<!-- {name}: [^\n]*-->)\n(.*?)\n?(<!-- end of {name} -->.*)', path.read_text(encoding='utf-8'), re.DOTALL
    )
    if found is None:
        raise ValueError(f'{path} has no part {name!r}: <!-- {name}: by whom --> and <!-- end of {name} -->.')
    return found[1], found[2], found[3]


def processor() -> str:
    """What the machine calls its processor, and the instructions that torch and the ops use of it."""
    try:
        lines = Path('/proc/cpuinfo').read_text(encoding='utf-8').splitlines()
    except OSError:
        lines = []
    name = next(
        (line.split(':', 1)[1].strip() for line in lines if line.startswith('model name')), platform.processor()
    )
    flags = next((line.split(':', 1)[1].split() for line in lines if line.startswith('flags')), [])
    known = ' and '.join(each for each in ('avx512_bf16', 'amx_bf16', 'avx512_fp16', 'amx_fp16') if each in flags)
    capability = torch.backends.cpu.get_cpu_capability() + (f' ({known})' if known else '')
    return f'{name} with {capability}, {os.cpu_count()} cores'
