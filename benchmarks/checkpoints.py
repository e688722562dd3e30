"""What safe checkpoints cost: ``python -m benchmarks.checkpoints [--write]``.

Writing a file whole (another name, flushed to the disk, renamed) beside mmengine's way (serialised in memory, then
written); reading with checksums beside ``torch.load``; what a resume reads in all; the random states. One run, one thread,
medians, the ways in turn.
"""

from __future__ import annotations

import argparse
import datetime
import io
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mmengine
import torch
from mmengine.fileio import LocalBackend

from amp_wrapper.checkpoint import file as checkpoint_file

from .pages import add_write

ROUNDS = 7


def seconds(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median of each way, in turn, so that a noisy moment meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def by_mmengine(checkpoint: Any, path: Path) -> None:
    """What ``mmengine.runner.save_checkpoint`` does with a local file."""
    with io.BytesIO() as memory:
        torch.save(checkpoint, memory)
        LocalBackend().put(memory.getvalue(), str(path))


def measure(folder: Path, millions: int) -> list[tuple[str, float, str, float]]:
    """Rows of (what, seconds, beside what, its seconds)."""
    torch.set_num_threads(1)
    # weights and momentum, in tensors of a quarter million
    checkpoint = {
        part: {str(index): torch.randn(250_000) for index in range(4 * millions)}
        for part in ('state_dict', 'optimizer')
    }
    path = folder / 'a.pth'
    write = seconds(
        {
            'whole': lambda: checkpoint_file.save(checkpoint, path),
            'mmengine': lambda: by_mmengine(checkpoint, folder / 'b.pth'),
        }
    )
    read = seconds(
        {
            'checked': lambda: checkpoint_file.load(path),
            'torch': lambda: torch.load(path, weights_only=True),
        }
    )
    return [
        ('write, whole and flushed', write['whole'], "mmengine's way, not flushed", write['mmengine']),
        ('read, with checksums', read['checked'], '`torch.load`', read['torch']),
    ]


def table(rows: list[tuple[str, float, str, float]], millions: int, size: int) -> str:
    """The result as a page."""
    lines = [
        '# What safe checkpoints cost',
        '',
        f'`python -m benchmarks.checkpoints`: {millions} million weights with momentum ({size / 2**20:.0f} MiB), '
        f'{datetime.date.today()}, {os.cpu_count()} cores ({platform.machine()}), local disk, Python '
        f'{platform.python_version()}, torch {torch.__version__}, mmengine {mmengine.__version__}. One thread, medians of '
        f'{ROUNDS}, the ways in turn. The files are in the page cache when they are read.',
        '',
        '| what | seconds | beside | seconds | ratio |',
        '| --- | --- | --- | --- | --- |',
    ]
    lines += [f'| {what} | {a:.3g} | {beside} | {b:.3g} | {a / b:.2g} |' for what, a, beside, b in rows]
    return '\n'.join([*lines, ''])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--millions', type=int, default=25, help='weights, in millions')
    add_write(parser, 'checkpoints_cpu.md')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), args.millions)
        size = (Path(folder) / 'a.pth').stat().st_size
    page = table(rows, args.millions, size)
    print(page)
    if args.write is not None:
        args.write.write_text(page)


if __name__ == '__main__':
    main()
