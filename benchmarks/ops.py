"""The bundled ops beside torch's own: ``python -m benchmarks.ops [--write] [--device cuda] [--threads 1 2]``.

Every op on four lists of tensors: one huge tensor, the parameters of ResNet-50 and of Swin-T, and 2,000 tiny tensors. Each
is timed beside the sequences of torch operations that mean the same, and beside a copy of as many bytes, in one run and by
turns. A ratio above 1 says how many times faster the op is than the fastest of torch's sequences.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from amp_wrapper import ops

from .pages import processor

RESULTS = Path(__file__).parent / 'results'
Shapes = list[tuple[int, ...]]


def resnet50() -> Shapes:
    """The parameters of ResNet-50, in order: 161 tensors, 25.6 million elements."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for out, into, kernel in ((planes, width, 1), (planes, planes, 3), (4 * planes, planes, 1)):
                shapes += [(out, into, kernel, kernel), (out,), (out,)]
            if block == 0:
                shapes += [(4 * planes, width, 1, 1), (4 * planes,), (4 * planes,)]
            width = 4 * planes
    return [*shapes, (1000, 2048), (1000,)]


def swin_t() -> Shapes:
    """The parameters of Swin-T, in order: 173 tensors, 28.3 million elements."""
    shapes: Shapes = [(96, 3, 4, 4), (96,), (96,), (96,)]
    dims = 96
    for stage, (depth, heads) in enumerate(((2, 3), (2, 6), (6, 12), (2, 24))):
        for _ in range(depth):
            shapes += [(dims,), (dims,), (169, heads), (3 * dims, dims), (3 * dims,), (dims, dims), (dims,)]
            shapes += [(dims,), (dims,), (4 * dims, dims), (4 * dims,), (dims, 4 * dims), (dims,)]
        if stage < 3:
            shapes += [(4 * dims,), (4 * dims,), (2 * dims, 4 * dims)]
            dims *= 2
    return [*shapes, (dims,), (dims,), (1000, dims), (1000,)]


def lists_of(huge: int) -> dict[str, Shapes]:
    """The four lists."""
    return {
        'one huge tensor': [(huge,)],
        'ResNet-50': resnet50(),
        'Swin-T': swin_t(),
        '2,000 tiny tensors': [(8 + index % 57,) for index in range(2000)],
    }


@dataclasses.dataclass
class Case:
    """One op on one list.

    Attributes:
        op: Its name.
        what: Types and options.
        ours: The call.
        peers: Sequences of torch operations with the same meaning, by name.
        bytes: Memory traffic that the op cannot avoid.
    """

    op: str
    what: str
    ours: Callable[[], object]
    peers: dict[str, Callable[[], object]]
    bytes: int


NAMES = {torch.float32: 'float32', torch.float16: 'float16', torch.bfloat16: 'bfloat16'}


def cases(shapes: Shapes, device: torch.device) -> list[Case]:
    """Return every compiled list op, in the types that training has them in; :mod:`benchmarks.step` has whole steps."""

    def new(dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]

    # 1 keeps what is scaled in place the same over thousands of calls; no sequence takes a short cut for it
    one, found = torch.ones((), device=device), torch.zeros((), device=device)
    sums = new(torch.float32)
    count = sum(math.prod(shape) for shape in shapes)
    rows: list[Case] = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        rows += _cases_of(dtype, new(dtype), sums, count, one, found)
    rows += [
        Case(
            'multi_tensor_scale',
            'float32 in place, flag',
            lambda: ops.multi_tensor_scale(sums, sums, one, found),
            {'unscale_': lambda: _unscale(sums, found, one)},
            8 * count,
        ),
        Case(
            'multi_tensor_scale',
            'float32 in place',
            lambda: ops.multi_tensor_scale(sums, sums, one, None),
            {'_foreach_mul_': lambda: torch._foreach_mul_(sums, one)},
            8 * count,
        ),
    ]
    return rows


def _unscale(tensors: list[Tensor], found: Tensor, inverse: Tensor) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found.view(1), inverse)


def _cases_of(
    dtype: torch.dtype, tensors: list[Tensor], sums: list[Tensor], count: int, one: Tensor, found: Tensor
) -> list[Case]:
    """The ops that read ``tensors`` of a type."""
    name, size = NAMES[dtype], dtype.itemsize
    third = torch.full_like(one, 1 / 3)

    def copy_unscale() -> None:
        torch._foreach_copy_(sums, tensors)
        _unscale(sums, found, one)

    def mul_norm() -> None:
        for source, target in zip(tensors, sums):
            torch.mul(source, one, out=target)
        finite()

    def mul_add() -> None:
        torch._foreach_add_(sums, torch._foreach_mul([tensor.float() for tensor in tensors], third))

    def finite() -> None:
        torch.maximum(
            found, torch.stack(torch._foreach_norm(tensors, math.inf)).isfinite().all().logical_not().float(), out=found
        )

    adds = {
        '_foreach_mul, _foreach_add_': mul_add,
        '_foreach_add_(alpha=)': lambda: torch._foreach_add_(sums, tensors, alpha=1 / 3),
    }
    checks = {
        '_foreach_norm(inf), isfinite': finite,
        'unscale_ by 1': lambda: _unscale(tensors, found, one),
    }
    return [
        Case(
            'multi_tensor_scale',
            f'{name} to float32, flag',
            lambda: ops.multi_tensor_scale(tensors, sums, one, found),
            {'_foreach_copy_, unscale_': copy_unscale, 'mul(out=), _foreach_norm': mul_norm},
            (size + 4) * count,
        ),
        Case(
            'multi_tensor_axpby',
            f'{name} added to float32',
            lambda: ops.multi_tensor_axpby(tensors, sums, third),
            adds,
            (size + 8) * count,
        ),
        Case(
            'multi_tensor_l2norm',
            f'{name}, flag',
            lambda: ops.multi_tensor_l2norm(tensors, one, found),
            {'get_total_norm, no flag': lambda: torch.nn.utils.get_total_norm(tensors)},
            size * count,
        ),
        Case(
            'multi_tensor_isnonfinite',
            name,
            lambda: ops.multi_tensor_isnonfinite(tensors, found),
            checks,
            size * count,
        ),
    ]


def seconds(calls: dict[str, Callable[[], object]], device: torch.device, budget: float) -> dict[str, float]:
    """Median time of each call, measured by turns, so that a busy moment of the machine meets all of them."""

    def once(call: Callable[[], object], repeats: int) -> float:
        if device.type == 'cuda':
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        if device.type == 'cuda':
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / repeats

    # each often enough for the clock, and so that its own data is as warm as in a loop of nothing else
    repeats = {}
    for name, call in calls.items():
        once(call, 1)
        repeats[name] = max(1, int(2e-3 / max(once(call, 1), 1e-7)))
    round_trip = sum(once(call, repeats[name]) * repeats[name] for name, call in calls.items())
    rounds = max(9, min(51, int(budget / max(round_trip, 1e-6))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(once(call, repeats[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def measure(device: torch.device, threads: int, huge: int, budget: float, only: str) -> list[list[str]]:
    """Rows of the table for one number of threads."""
    torch.set_num_threads(threads)
    table: list[list[str]] = []
    for name, shapes in lists_of(huge).items():
        if not only or only in name:
            rows = cases(shapes, device)
            table += [row(case, name, threads, device, budget) for case in rows]
            print('\n'.join('  '.join(line) for line in table[-len(rows) :]), file=sys.stderr, flush=True)
    return table


def row(case: Case, name: str, threads: int, device: torch.device, budget: float) -> list[str]:
    """One line: op, types, list, threads, microseconds, bytes per second, beside a copy, the fastest peer, the ratio."""
    calls: dict[str, Callable[[], object]] = {'ours': case.ours, **case.peers}
    # a copy reads and writes: half of the bytes each
    source = torch.ones(max(case.bytes // 8, 1), device=device)
    target = torch.empty_like(source)
    calls['a copy'] = lambda: target.copy_(source)
    times = seconds(calls, device, budget)
    best = min(case.peers, key=lambda peer: times[peer])
    return [
        case.op,
        case.what,
        name,
        str(threads),
        f'{times["ours"] * 1e6:.0f}' if times['ours'] > 1e-5 else f'{times["ours"] * 1e6:.1f}',
        f'{case.bytes / times["ours"] / 1e9:.1f}',
        f'{times["a copy"] / times["ours"]:.2f}',
        f'{best}: {times[best] * 1e6:.0f}' if times[best] > 1e-5 else f'{best}: {times[best] * 1e6:.1f}',
        f'{times[best] / times["ours"]:.2f}',
    ]


HEAD = [
    'op',
    'types',
    'list',
    'threads',
    'microseconds',
    'GB/s',
    'of a copy',
    'fastest of torch, microseconds',
    'ratio',
]


def main() -> None:
    """Print the table; write it with ``--write``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--write', action='store_true', help='to benchmarks/results/ops_<device>.md')
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--threads', type=int, nargs='+', default=[1, 2])
    parser.add_argument('--huge', type=int, default=2**25, help='elements of the huge tensor')
    parser.add_argument('--seconds', type=float, default=1.0, help='time for each row')
    parser.add_argument('--only', default='', help='lists whose name contains this')
    words = parser.parse_args()
    if words.write and words.only:
        parser.error('--write takes the whole table: leave --only out.')
    device = torch.device(words.device)
    threads = words.threads if device.type == 'cpu' else words.threads[:1]
    rows = [line for count in threads for line in measure(device, count, words.huge, words.seconds, words.only)]
    machine = torch.cuda.get_device_name(device) if device.type == 'cuda' else f'{processor()}, {platform.machine()}'
    text = '\n'.join(
        [
            '# The bundled ops beside torch',
            '',
            f'{datetime.date.today()}, {machine}, '
            f'Python {platform.python_version()}, torch {torch.__version__}, ops: {ops.backend()}. '
            'Medians of at least nine rounds, all calls of a row by turns. "Of a copy" compares with `copy_` over one pair '
            'of float32 tensors with as many bytes in all. The ratio is the time of the fastest of torch over ours.',
            '',
            '| ' + ' | '.join(HEAD) + ' |',
            '|' + ' --- |' * len(HEAD),
            *('| ' + ' | '.join(line) + ' |' for line in rows),
            '',
        ]
    )
    print(text)
    if words.write:
        (RESULTS / f'ops_{device.type}.md').write_text(text, encoding='utf-8')


if __name__ == '__main__':
    main()
