"""Gradient exchange of DDP at the opt levels: ``python -m benchmarks.distributed [--processes N] [--report FILE.md]``.

Starts real processes, gloo on the CPU or nccl with a GPU for each, and prints tables: the bytes that each rank hands to the
all-reduce per optimizer step, counted from DDP's buckets; the memory of the gradients; the time of the exchange alone and of
whole steps, side by side.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
TYPES = ('float32', 'float16', 'bfloat16')


def choose_backend(wanted: str, processes: int) -> str:
    """'nccl' where every process finds a GPU of its own, else 'gloo'."""
    if not dist.is_available():
        sys.exit('This torch was built without torch.distributed.')
    enough = torch.cuda.device_count() >= processes and dist.is_nccl_available()
    if wanted == 'nccl' and not enough:
        sys.exit(
            f'--backend nccl needs {processes} GPUs, and torch sees {torch.cuda.device_count()}: use --backend gloo.'
        )
    if wanted != 'auto':
        return wanted
    return 'nccl' if enough else 'gloo'


def launch(processes: int, backend: str, size: str, timeout: float) -> dict[str, Any]:
    """Run the ranks to their end; rank 0 says on stderr how far they are.

    Raises:
        SystemExit: A rank failed, or they took longer than ``timeout`` seconds. None of them is left running.
    """
    # without it, SIGTERM would pass over the finally below
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [str(processes), backend, str(folder), size]
        logs = [folder / f'rank{rank}.log' for rank in range(processes)]
        ranks = []
        try:
            for rank, path in enumerate(logs):
                with path.open('w') as log:
                    ranks.append(
                        subprocess.Popen(
                            [sys.executable, '-m', 'benchmarks.ddp_rank', str(rank), *words],
                            cwd=ROOT,
                            stdout=log,
                            stderr=None if rank == 0 else log,
                            env={**os.environ, 'OMP_NUM_THREADS': '1'},
                        )
                    )
            end = time.monotonic() + timeout
            while any(rank.poll() is None for rank in ranks):
                if any(rank.poll() for rank in ranks):
                    # the others would wait for it; a moment, so that they can say what they saw
                    end = min(end, time.monotonic() + 5)
                if time.monotonic() > end:
                    break
                time.sleep(0.2)
        finally:
            for one in ranks:
                if one.poll() is None:
                    one.kill()
            codes = [one.wait() for one in ranks]
        if any(codes):
            tails = '\n'.join(f'-- rank {rank}\n{path.read_text()[-3000:]}' for rank, path in enumerate(logs))
            sys.exit(f'The ranks ended with {codes} (-9: killed after a failure or {timeout:.0f} s).\n{tails}')
        return json.loads((folder / 'result.json').read_text())


# -- tables --------------------------------------------------------------------------------------------------------


def rows(cells: list[list[str]]) -> list[str]:
    """Markdown from a head and its rows."""
    head, *body = cells
    lines = [head, ['---'] * len(head), *body]
    return [f'| {" | ".join(line)} |' for line in lines]


def find(counts: list[dict[str, Any]], model: str, variant: str, passes: int = 1, view: bool = False) -> dict[str, Any]:
    """The one record."""
    wanted = (model, variant, passes, view)
    return next(one for one in counts if (one['model'], one['variant'], one['passes'], one['view']) == wanted)


def unique(values: list[str]) -> list[str]:
    """Without repetitions, in order."""
    return list(dict.fromkeys(values))


def bytes_table(counts: list[dict[str, Any]]) -> list[str]:
    """What is handed to the all-reduce."""
    cells = [['model', 'variant', *TYPES, 'all', 'to O0', 'buckets', '4 passes: all', '4 passes: to 4 steps of O0']]
    for model in unique([one['model'] for one in counts]):
        base = sum(find(counts, model, 'O0')['bytes'].values())
        for variant in unique([one['variant'] for one in counts]):
            single, window = (find(counts, model, variant, passes) for passes in (1, 4))
            total, summed = (sum(one['bytes'].values()) for one in (single, window))
            cells.append(
                [
                    model,
                    variant,
                    *(f'{single["bytes"].get(kind, 0):,}' for kind in TYPES),
                    f'{total:,}',
                    f'{total / base:.4f}',
                    str(len(single['buckets'])),
                    f'{summed:,}',
                    f'{summed / (4 * base):.4f}',
                ]
            )
    return rows(cells)


def memory_table(counts: list[dict[str, Any]]) -> list[str]:
    """What gradients and buckets take."""
    cells = [['model', 'variant', 'after backward', 'after the step', 'views: after backward', 'views: after the step']]
    for model in unique([one['model'] for one in counts]):
        for variant in unique([one['variant'] for one in counts]):
            line = [model, variant]
            for view in (False, True):
                one = find(counts, model, variant, view=view)
                line += [
                    f'{one["memory"][moment] / one["parameters"]:.2f}'
                    for moment in ('after backward', 'after the step')
                ]
            cells.append(line)
    return rows(cells)


def spread(values: list[float]) -> str:
    """Median and quartiles."""
    low, middle, high = (
        f'{value:.0f}' if value >= 100 else f'{value:.3g}'
        for value in statistics.quantiles(values, n=4, method='inclusive')
    )
    return f'{middle} ({low} to {high})'


def time_cells(name: str, times: dict[str, list[float]], base: str) -> list[list[str]]:
    """A row for each way, with the ratio to ``base`` taken round by round."""
    return [
        [name, way, str(len(values)), spread(values), spread([a / b for a, b in zip(values, times[base])])]
        for way, values in times.items()
    ]


def exchange_table(exchanges: list[dict[str, Any]]) -> list[str]:
    """All-reduces without anything around them."""
    cells = [['gradients of', 'type', 'rounds', 'ms', 'to float32']]
    for one in exchanges:
        cells += time_cells(f'{one["model"]}, {one["parameters"] / 1e6:.1f} M', one['times'], 'float32')
    return rows(cells)


def step_table(times: list[dict[str, Any]]) -> list[str]:
    """Whole optimizer steps."""
    cells = [['model, inputs of a rank', 'variant', 'rounds', 'ms', 'to O0']]
    for one in times:
        shape = ' x '.join(str(size) for size in one['shape'])
        cells += time_cells(f'{one["model"]}, {shape}', one['times'], 'O0')
    return rows(cells)


def skipped_line(result: dict[str, Any]) -> str:
    """Skipped steps are cheaper, so they are named."""
    lines = []
    for one in result['times']:
        lines += [f'{one["model"]}, {variant}: {number}' for variant, number in one['skipped'].items() if number]
    return f'Skipped steps among the timed: {"; ".join(lines) or "none"}.'


def page(result: dict[str, Any], processes: int, backend: str, command: str, load: tuple[float, float]) -> str:
    """The result as a page."""
    cpu = backend == 'gloo'
    norms = {one['model']: (one['parameters'], one['norms']) for one in result['counts']}
    models = '; '.join(f'{name}: {all_:,}, of BatchNorm {kept:,}' for name, (all_, kept) in norms.items())
    versions = ', '.join(f'{name} {version}' for name, version in result['versions'].items())
    devices = f'{os.cpu_count()} cores' if cpu else f'{processes} x {torch.cuda.get_device_name(0)}'
    stock = (
        "mmengine's own `AmpOptimWrapper` refuses a CPU; what stands for it here is `OptimWrapper` with `torch.autocast` and "
        "`torch.amp.GradScaler('cpu')`, which are its parts."
        if cpu
        else "Stock AMP is mmengine's own `AmpOptimWrapper`."
    )
    lines = [
        '# Gradient exchange with DDP: bytes and time',
        '',
        f'`{command}`: {processes} processes, {backend}, one thread each, {datetime.date.today()}, {devices} '
        f'({platform.machine()}), Python {platform.python_version()}, {versions}. Load of the machine '
        f'just before: {load[0]:.2f}; at the end, these processes included: {load[1]:.2f}.',
        '',
        f'Plain DDP is `MMDistributedDataParallel` with `OptimWrapper` in FP32. {stock}',
        '',
        '## Bytes that a rank hands to the all-reduce in one optimizer step',
        '',
        'A communication hook adds up the buckets of DDP (`numel() * element_size()`), then averages as DDP does by itself. '
        'It is there only here: the times further down come from new models without it. The numbers were the same in two '
        "steps and on every rank, equal to the bytes of the parameters, and the ranks' weights agreed after "
        'steps none of which was skipped. '
        '"4 passes" is `accumulative_counts=4`: three backward passes under `no_sync`, one that exchanges. '
        'The last column compares it with four steps of O0 of one pass each.',
        '',
        f'Parameters: {models}.',
        '',
        *bytes_table(result['counts']),
        '',
        '## Memory of gradients and buckets, bytes for each parameter',
        '',
        "Storages of the model's gradients, the masters' gradients and DDP's buckets, each counted once, after the last "
        'backward pass and after the step, before they are cleared. "views" is `gradient_as_bucket_view=True`.',
        '',
        *memory_table(result['counts']),
        '',
        '## The exchange alone',
        '',
        'All-reduces of the buckets counted above (those of O0 and O3), started together and awaited; the types take turns. '
        'Median and quartiles; the ratio is taken round by round.',
        '',
        *exchange_table(result['exchanges']),
        '',
        '## Whole optimizer steps',
        '',
        'Forward, backward with the exchange, optimizer step; the variants of a block take turns, and the slowest rank counts. '
        'ResNet with SGD and momentum, the transformer with AdamW. Median and quartiles; the ratio to O0 is taken round by '
        'round, within its block.',
    ]
    if cpu:
        lines += [
            'float16 layers have no fast path on a CPU (see the ratios), so the float16 blocks have few '
            'rounds, and their times say nothing about a GPU. O4 and O5 are the levels for a CPU.',
        ]
    lines += [
        '',
        *step_table(result['times']),
        '',
        skipped_line(result),
        'The loss scale starts at 8 for stock AMP, O1 and O2, so that no step is skipped; it costs the same at any value.',
        '',
        '## Not measured',
        '',
    ]
    if cpu:
        lines += [
            '- nccl and GPUs: none at hand. The bytes do not depend on the backend; the times do, entirely.',
            "- mmengine's own `AmpOptimWrapper` itself (see above).",
            '- A network: all processes share one machine, and gloo goes through its loopback and memory. Cores that compute '
            'also do the exchange.',
        ]
    else:
        lines += ['- Several machines.']
    return '\n'.join([*lines, ''])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--processes', type=int, default=2, help='ranks (default: 2)')
    parser.add_argument('--backend', choices=('auto', 'gloo', 'nccl'), default='auto')
    parser.add_argument('--quick', action='store_true', help='small models and few rounds: does it run?')
    parser.add_argument('--report', type=Path, metavar='FILE', help='write the tables there, too')
    parser.add_argument('--json', type=Path, metavar='FILE', help='write the numbers there')
    parser.add_argument('--timeout', type=float, default=1800, help='seconds until the ranks are stopped')
    args = parser.parse_args()
    if args.processes < 2:
        parser.error('--processes must be at least 2: one alone exchanges nothing')
    backend = choose_backend(args.backend, args.processes)
    before = os.getloadavg()[0]
    result = launch(args.processes, backend, 'quick' if args.quick else 'full', args.timeout)
    if args.json is not None:
        # first: whatever the tables meet, the numbers of a long run are kept
        args.json.write_text(json.dumps(result))
    command = ' '.join(['python -m benchmarks.distributed', *sys.argv[1:]])
    text = page(result, args.processes, backend, command, (before, os.getloadavg()[0]))
    print(text)
    if args.report is not None:
        args.report.write_text(text)


if __name__ == '__main__':
    main()
