"""The ops of a library against the reference, bit for bit: ``compare.py LIBRARY`` prints the calls that differ, as JSON.

The library serves the CPU under the dispatcher's names, so ours must not be loaded: AMP_WRAPPER_OPS=reference.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ops_models import LISTED, make_call, same_bits, seeded_rows, state

from amp_wrapper import ops
from amp_wrapper.ops.schemas import SCHEMAS

FACTORS = ((None, None), (1 / 3, 0.7))


def main() -> None:
    """Print the names of the calls with a difference."""
    torch.ops.load_library(sys.argv[1])
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
                    results = calls[0].run(torch.ops.amp_wrapper)
                    bumps = [t._version - v for t, v in zip(calls[0].outputs(), before)]
                    if not all(same_bits(a, b) for a, b in zip(results, calls[1].run(ops.reference))):
                        found.append(f'{name} {special} {factors} {len(rows)}')
                    if rows and set(bumps) - {1}:
                        found.append(f'versions of {name}: {bumps}')
    for step in range(40):
        ours, theirs = (state(device, 3.0 ** (step % 7 - 3), step % 4, step % 3, step % 5 == 0) for _ in range(2))
        for tensors, where in ((ours, torch.ops.amp_wrapper), (theirs, ops.reference)):
            where.update_scale(*tensors, 2.0, 0.5, 3, 2, None if step % 2 else 0.5, 700.0)
        if not all(same_bits(a, b) for a, b in zip(ours, theirs)):
            found.append(f'update_scale {step}')
    print(json.dumps(found))


if __name__ == '__main__':
    main()
