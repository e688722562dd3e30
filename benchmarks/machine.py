"""What all benchmarks share: facts about the machine, calls timed in turns, memory, and pages of results."""

from __future__ import annotations

import argparse
import datetime
import gc
import math
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from amp_wrapper import ops

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'benchmarks' / 'results'
MIB = 2**20


# -- command and page --------------------------------------------------------------------------------------------------


def options(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark.

    Args:
        doc: Docstring of the benchmark, whose first line describes it.
        rounds: Default of ``--rounds``.
    """
    parser = argparse.ArgumentParser(description=(doc or '').splitlines()[0])
    parser.add_argument('--device', choices=('cpu', 'cuda'), default='cpu')
    parser.add_argument('--quick', action='store_true', help='small models and few rounds, to see whether it runs')
    parser.add_argument('--rounds', type=int, default=rounds, help=f'in which the ways take turns ({rounds})')
    parser.add_argument('--threads', type=int, default=1, help='of torch, on a CPU (1)')
    parser.add_argument('--write', action='store_true', help='keep the page in benchmarks/results')
    return parser


def parse(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, set the threads, and cut the rounds of a quick run."""
    args = parser.parse_args(words)
    if args.device == 'cuda' and not torch.cuda.is_available():
        parser.error('--device cuda: torch sees no GPU')
    torch.set_num_threads(args.threads)
    args.rounds = min(args.rounds, 3) if args.quick else args.rounds
    return args


def facts(device: str) -> str:
    """Describe the run: command, date, commit, machine and versions."""
    # an interpreter that was started with -m names the file of the module
    command = f'python -m benchmarks.{Path(sys.argv[0]).stem} {" ".join(sys.argv[1:])}'.strip()
    found = subprocess.run(
        ['git', 'rev-parse', '--short', 'HEAD'], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = ['torch', *(name for name in ('mmengine', 'onedl-mmengine') if _version(name))]
    versions = ', '.join(f'{name} {_version(name)}' for name in names)
    where = torch.cuda.get_device_name() if device == 'cuda' else f'{processor()}, {torch.get_num_threads()} thread(s)'
    return (
        f'`{command}`: {datetime.date.today()}, commit {found.stdout.strip() or "unknown"}, {where}, Python '
        f'{platform.python_version()}, {versions}, ops on the CPU: {"compiled" if ops.serves("cpu") else "torch"}.'
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ''


def processor() -> str:
    """Name the processor, and the instructions that torch uses of it."""
    try:
        lines = Path('/proc/cpuinfo').read_text(encoding='utf-8').splitlines()
    except OSError:
        lines = []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(':') for line in lines)}
    known = {'avx512_bf16', 'amx_bf16', 'avx512_fp16', 'amx_fp16'} & {*fields.get('flags', '').split()}
    more = f' ({" and ".join(sorted(known))})' if known else ''
    name = fields.get('model name', platform.processor())
    return f'{name} with {torch.backends.cpu.get_cpu_capability()}{more}, {os.cpu_count()} cores'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, with empty lines around it."""
    lines = [heads, ['---'] * len(heads), *rows]
    return ['', *(f'| {" | ".join(line)} |' for line in lines), '']


def publish(args: argparse.Namespace, name: str, title: str, lines: Sequence[str]) -> None:
    """Print a page; with ``--write``, also keep it.

    Args:
        args: Of :func:`parse`.
        name: Of the file, to which the device is added.
        title: First line.
        lines: Notes and tables.
    """
    text = '\n'.join([f'# {title}', '', facts(args.device), '', *lines]).replace('\n\n\n', '\n\n').rstrip() + '\n'
    print(text)
    if args.write:
        (RESULTS / f'{name}_{args.device}.md').write_text(text, encoding='utf-8')


def say(text: str) -> None:
    """Report progress."""
    print(f'{time.strftime("%H:%M:%S")}  {text}', file=sys.stderr, flush=True)


# -- time --------------------------------------------------------------------------------------------------------------


def wait(device: str) -> None:
    """Wait until the GPU is idle."""
    if device == 'cuda':
        torch.cuda.synchronize()


def seconds(call: Callable[[], object], device: str, repeats: int = 1, wall: bool = False) -> float:
    """Return the mean time of a call.

    Args:
        call: What to time.
        device: 'cpu' or 'cuda'.
        repeats: How often it is called.
        wall: With one thread of a CPU, whether the clock counts; otherwise the time of this process does, so that a busy
            machine disturbs less.
    """
    is_own = device == 'cpu' and torch.get_num_threads() == 1 and not wall
    clock = time.process_time if is_own else time.perf_counter
    wait(device)
    begin = clock()
    for _ in range(repeats):
        call()
    wait(device)
    return (clock() - begin) / repeats


def in_turns(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    device: str,
    prepare: Callable[[str], object] | None = None,
    wall: bool = False,
) -> dict[str, list[float]]:
    """Return the seconds of each way in each round: A B C, C B A, A B C.

    Args:
        ways: Calls by name. What takes less than 2 ms is called several times a round.
        rounds: How many.
        device: 'cpu' or 'cuda'.
        prepare: Called with the name before each single call, and not timed.
        wall: As of :func:`seconds`.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    repeats = dict.fromkeys(ways, 1)
    for turn in range(-2, rounds):
        for name in ways if turn % 2 == 0 else list(ways)[::-1]:
            if prepare is not None:
                prepare(name)
            taken = seconds(ways[name], device, repeats[name], wall)
            if turn >= 0:
                times[name].append(taken)
            elif prepare is None:
                repeats[name] = max(1, min(10_000, int(2e-3 / max(taken, 1e-7))))
        # what was imported stays, and need not be looked through by each collection
        if turn == -1:
            gc.collect()
            gc.freeze()
    gc.unfreeze()
    return times


def ratio(times: Sequence[float], base: Sequence[float]) -> str:
    """Return the median of the ratios round by round, and their quartiles."""
    ratios = [a / b for a, b in zip(times, base)]
    low, middle, high = statistics.quantiles(ratios, n=4, method='inclusive') if len(ratios) > 1 else ratios * 3
    return f'{middle:.2f} ({low:.2f} to {high:.2f})'


def median(times: Sequence[float], unit: float = 1e-3) -> str:
    """Return the median in milliseconds, or another unit, with three digits."""
    return number(statistics.median(times) / unit)


def number(value: float) -> str:
    """Write a number with three digits, or all those before the point."""
    if not math.isfinite(value):
        return 'not finite'
    return f'{value:,.0f}' if abs(value) >= 100 else f'{value:.3g}'


# -- memory ------------------------------------------------------------------------------------------------------------


class Memory:
    """Memory of this process, or on a GPU of torch's allocator, in bytes.

    Args:
        device: 'cpu' or 'cuda'.
    """

    def __init__(self, device: str) -> None:
        self._device = device

    def now(self) -> int:
        """Return what is held at the moment."""
        gc.collect()
        return torch.cuda.memory_allocated() if self._device == 'cuda' else self._linux('VmRSS')

    def reset(self) -> None:
        """Begin a new peak."""
        if self._device == 'cuda':
            torch.cuda.reset_peak_memory_stats()
        else:
            Path('/proc/self/clear_refs').write_text('5', encoding='ascii')

    def peak(self) -> int:
        """Return the most since :meth:`reset`."""
        return torch.cuda.max_memory_allocated() if self._device == 'cuda' else self._linux('VmHWM')

    @staticmethod
    def _linux(key: str) -> int:
        lines = Path('/proc/self/status').read_text(encoding='ascii', errors='replace').splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a call in a new process, which gives freed memory back to the system at once."""
    os.environ.update(MALLOC_MMAP_THRESHOLD_='65536', MALLOC_TRIM_THRESHOLD_='65536')
    with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
        return pool.submit(function, *args).result()
