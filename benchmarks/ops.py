"""Compares the bundled list operations with torch's: ``python -m benchmarks.ops [--device cuda] [--threads 2]``.

Each operation works on one huge tensor, on the parameters of ResNet-50, and on 2,000 tiny tensors. In one run and by turns it
stands beside sequences of torch operations with the same meaning, and beside a copy of as many bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from amp_wrapper import ops

from .machine import in_turns, median, options, parse, publish, ratio, say, table
from .models import Shapes, shapes_of

Call = Callable[[], object]
HEADS = ('operation', 'list', 'microseconds', 'GB/s', 'a copy to it', 'fastest of torch', 'microseconds', 'torch to it')


@dataclasses.dataclass
class Lists:
    """Tensors that an operation reads and writes.

    Attributes:
        sources: Gradients of a type.
        sums: FP32 tensors of the same shapes.
        one: A scale that keeps what is scaled in place the same.
        found: The overflow flag.
    """

    sources: list[Tensor]
    sums: list[Tensor]
    one: Tensor
    found: Tensor


def make_lists(shapes: Shapes, dtype: torch.dtype, device: str) -> Lists:
    """Make random tensors of these shapes."""
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    sums = [source.float() + 1 for source in sources]
    return Lists(sources, sums, torch.ones((), device=device), torch.zeros((), device=device))


def unscale(lists: Lists) -> None:
    """Copy to FP32, unscale and check by torch's own operations."""
    torch._foreach_copy_(lists.sums, lists.sources)
    torch._amp_foreach_non_finite_check_and_unscale_(lists.sums, lists.found.view(1), lists.one)


def add_scaled(lists: Lists) -> None:
    """Add in FP32 by torch's own operations, with a rounding for each product."""
    torch._foreach_add_(lists.sums, torch._foreach_mul([tensor.float() for tensor in lists.sources], lists.one))


def add_alpha(lists: Lists) -> None:
    """Add by torch's own operation with a factor of the host."""
    torch._foreach_add_(lists.sums, lists.sources, alpha=1.0)


def check_norms(lists: Lists) -> None:
    """Look for values that are not finite by torch's norms."""
    norms = torch.stack(torch._foreach_norm(lists.sources, math.inf))
    torch.maximum(lists.found, norms.isfinite().all().logical_not().float(), out=lists.found)


def check_unscale(lists: Lists) -> None:
    """Look for values that are not finite by unscaling by one."""
    torch._amp_foreach_non_finite_check_and_unscale_(lists.sources, lists.found.view(1), lists.one)


def total_norm(lists: Lists) -> None:
    """Compute the global norm by torch's own function, without a flag."""
    torch.nn.utils.get_total_norm(lists.sources)


def operations(lists: Lists, size: int) -> dict[str, tuple[Call, Sequence[Callable[[Lists], None]], int]]:
    """Return each operation: our call, torch's sequences, and the bytes per element that it has to move.

    Args:
        lists: What is read and written.
        size: Bytes of an element of the sources.
    """
    sources, sums, one, found = lists.sources, lists.sums, lists.one, lists.found
    scale = functools.partial(ops.multi_tensor_scale, sources, sums, one, found)
    add = functools.partial(ops.multi_tensor_axpby, sources, sums, one)
    norm = functools.partial(ops.multi_tensor_l2norm, sources, one, found)
    check = functools.partial(ops.multi_tensor_isnonfinite, sources, found)
    return {
        'multi_tensor_scale': (scale, (unscale,), size + 4),
        'multi_tensor_axpby': (add, (add_scaled, add_alpha), size + 8),
        'multi_tensor_l2norm': (norm, (total_norm,), size),
        'multi_tensor_isnonfinite': (check, (check_norms, check_unscale), size),
    }


def measure(title: str, shapes: Shapes, dtype: torch.dtype, rounds: int, device: str) -> list[list[str]]:
    """Return the rows of one list."""
    lists = make_lists(shapes, dtype, device)
    count, rows = sum(source.numel() for source in lists.sources), []
    kind = str(dtype).removeprefix('torch.')
    for name, (call, sequences, size) in operations(lists, dtype.itemsize).items():
        # a copy reads and writes
        source = torch.ones(max(1, count * size // 8), device=device)
        copy = functools.partial(torch.empty_like(source).copy_, source)
        peers = {peer.__name__: functools.partial(peer, lists) for peer in sequences}
        times = in_turns({'ours': call, 'a copy': copy, **peers}, rounds, device)
        best = min(peers, key=lambda peer: statistics.median(times[peer]))
        bandwidth = count * size / statistics.median(times['ours']) / 1e9
        row = [f'{name}, {kind}', title, median(times['ours'], 1e-6), f'{bandwidth:.1f}']
        row += [
            ratio(times['a copy'], times['ours']),
            best,
            median(times[best], 1e-6),
            ratio(times[best], times['ours']),
        ]
        rows.append(row)
        say(' | '.join(row))
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the page."""
    args = parse(options(__doc__, 15), words)
    lists: dict[str, Shapes] = {'2,000 tiny tensors': [(8 + index % 57,) for index in range(2000)]}
    if args.quick:
        lists = {'20 tiny tensors': [(8,)] * 20}
    else:
        lists |= {'one huge tensor': [(2**25,)], 'ResNet-50': shapes_of('ResNet-50')}
    rows = [
        row
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
        for title, shapes in lists.items()
        for row in measure(title, shapes, dtype, args.rounds, args.device)
    ]
    note = 'Medians; ratios are medians of the ratios round by round, with their quartiles: above 1 the operation is faster.'
    publish(args, 'ops', 'The bundled operations beside torch', [note, *table(HEADS, rows)])


if __name__ == '__main__':
    main()
