"""The ops of a library against the reference, bit for bit: ``compare.py LIBRARY`` prints the calls that differ, as JSON.

The library serves the CPU under the dispatcher's names, so ours must not be loaded: AMP_WRAPPER_OPS=reference.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'support'))

from ops_models import (
    LISTED,
    REFERENCE,
    UPDATES,
    Call,
    make_call,
    prologue_call,
    same_bits,
    seeded_rows,
    state,
    update_call,
)

from amp_wrapper.ops.schemas import SCHEMAS

FACTORS = ((None, None), (1 / 3, 0.7))
#: Of an update: more tensors than an argument of 512 bytes holds, of all types with and without copies, and one of two chunks.
SHAPES: list[tuple[int, ...]] = [(1,), (0,), (7,), (3, 5), (16,), (), (2, 3, 4, 5), (33, 31), (17,), (32769,), (8,)]


def step_calls(device: torch.device) -> Iterator[tuple[Call, Call]]:
    """Calls of the ops of a step, each twice."""
    for index, name in enumerate(UPDATES):
        for flags in (0, 1, 6, 7):
            for skip in (0.0, 1.0) if flags == 1 else (0.0,):
                shapes = SHAPES if flags else SHAPES * 2
                yield tuple(update_call(name, shapes, device, flags, flags == 6, skip, 5 * flags) for _ in range(2))
        for found, norm in ((None, None), (0.0, 3.0), (1.0, 3.0)):
            for steps in ([], [float(i % 4 * 50) for i in range(30)]):
                scale, dynamic = (None, False) if norm is None else (1024.0, True)
                limits = (None, None) if norm is None else (1.0, 0.5)
                more = dict(found=found, scale=scale, dynamic=dynamic, norm=norm, limits=limits, rate=norm and 1e-2)
                yield tuple(prologue_call(name, steps, device, 3 + index, tracker=2, **more) for _ in range(2))


def main() -> None:
    """Print the names of the calls with a difference."""
    torch.ops.load_library(sys.argv[1])
    host = ctypes.CDLL(sys.argv[1])
    for name in SCHEMAS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f'amp_wrapper::{name}', 'CPU'), name
    found = []
    device = torch.device('cpu')
    for name in LISTED:
        for special in (False, True):
            for index, factors in enumerate(FACTORS):
                # no tensors, and so many that they need several launches
                for rows in ([], seeded_rows(9 if special else 27, 5 * index)):
                    checks = (not special, index == 0)
                    calls = [
                        make_call(name, rows, device, factors, True, index == 1, special, checks) for _ in range(2)
                    ]
                    before = [tensor._version for tensor in calls[0].outputs()]
                    # while a graph is recorded there are no tables, but several launches
                    host.set_capture(index)
                    results = calls[0].run(torch.ops.amp_wrapper)
                    bumps = [t._version - v for t, v in zip(calls[0].outputs(), before)]
                    if not all(same_bits(a, b) for a, b in zip(results, calls[1].run(REFERENCE))):
                        found.append(f'{name} {special} {factors} {len(rows)}')
                    if rows and set(bumps) - {1}:
                        found.append(f'versions of {name}: {bumps}')
    for step in range(40):
        ours, theirs = (state(device, 3.0 ** (step % 7 - 3), step % 4, step % 3, step % 5 == 0) for _ in range(2))
        for tensors, where in ((ours, torch.ops.amp_wrapper), (theirs, REFERENCE)):
            where.update_scale(*tensors, 2.0, 0.5, 3, 2, None if step % 2 else 0.5, 700.0)
        if not all(same_bits(a, b) for a, b in zip(ours, theirs)):
            found.append(f'update_scale {step}')
    for captured in (0, 1):
        host.set_capture(captured)
        for ours_call, theirs_call in step_calls(device):
            before = [tensor._version for tensor in ours_call.outputs()]
            host.count_launches()
            results = ours_call.run(torch.ops.amp_wrapper)
            launches = host.count_launches()
            bumps = [t._version - v for t, v in zip(ours_call.outputs(), before)]
            if not all(same_bits(a, b) for a, b in zip(results, theirs_call.run(REFERENCE), strict=True)):
                found.append(f'{ours_call.name} {captured}')
            if 0 in bumps:
                found.append(f'versions of {ours_call.name}: {bumps}')
            if not captured and launches != 1:
                found.append(f'launches of {ours_call.name}: {launches}')
    # more tensors than the arguments of all launches hold: one for the chunks, one for the tensors, one for the norm
    host.set_capture(0)
    lists = [[torch.full((9,), float(i)) for i in range(100)] for _ in range(2)]
    host.count_launches()
    host.count_tables()
    norms = (torch.ops.amp_wrapper.multi_tensor_l2norm(lists[0]), REFERENCE.multi_tensor_l2norm(lists[1]))
    if not same_bits(norms[0][0], norms[1][0]) or (host.count_launches(), host.count_tables()) != (3, 2):
        found.append('multi_tensor_l2norm of many')
    print(json.dumps(found))


if __name__ == '__main__':
    main()
