"""Results of the compiled ops, for two processes: ``compare.py FILE`` writes those of the package's library, and
``compare.py FILE LIBRARY`` prints, as JSON, the calls in which another library that serves the CPU gives others.

The other library takes the dispatcher's names, so that ours must not be loaded beside it: AMP_WRAPPER_OPS names another folder.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from op_lists import BF16, EDGES, F16, F32, FLOATS, SHAPES, random_tensor, same_bits, scalar
from torch import Tensor

from amp_wrapper import ops

DEVICE = torch.device('cpu')
#: Sums of squares may be added in another order.
NORMS = ('multi_tensor_l2norm', 'multi_tensor_scale_l2norm')


def column(count: int, seed: int, which: int, special: bool, halves: bool = False) -> list[Tensor]:
    """Tensors of all types and layouts, with sizes around blocks and chunks."""
    shapes = [*SHAPES, (33, 31), *((size,) for size in EDGES)]
    types = FLOATS[1:] if halves else FLOATS
    return [
        random_tensor(
            i + 100 * which, shapes[i % len(shapes)], types[i // 3**which % len(types)], DEVICE, i // 2 % 5, special
        )
        for i in range(seed, seed + count)
    ]


def list_calls() -> Iterator[tuple[str, list[Any]]]:
    """No tensors, and so many that they need several launches."""
    for special, count in itertools.product((False, True), (0, 25)):
        one, two, three = (column(count, 5 * special, i, special) for i in range(3))
        factor, found = scalar(DEVICE, 1 / 3), [scalar(DEVICE) for _ in range(6)]
        yield 'multi_tensor_scale', [one, two, factor, found[0]]
        yield 'multi_tensor_scale', [one, column(count, 5 * special, 2, special), None, None]
        yield (
            'multi_tensor_axpby',
            [one, column(count, 5 * special, 1, special), three, factor, scalar(DEVICE, -0.7), found[1]],
        )
        yield 'multi_tensor_copy', [one, column(count, 5 * special, 2, special)]
        yield 'multi_tensor_isnonfinite', [one, found[2]]
        yield 'multi_tensor_l2norm', [one, factor, found[3], True]
        yield 'multi_tensor_maxnorm', [one, factor, found[4], True]
        yield 'multi_tensor_scale_l2norm', [one, column(count, 5 * special, 1, special), factor, found[5]]
        counts = torch.ones(count, ops.EXPONENTS, dtype=torch.int64), torch.zeros(count)
        yield 'multi_tensor_exponents', [one, *counts]
        weights = column(count, 0, 0, special, halves=True)
        masters = [weight.float() * (1 + i % 2) for i, weight in enumerate(weights)]
        yield 'multi_tensor_refresh', [weights, masters]


def step_calls() -> Iterator[tuple[str, list[Any]]]:
    """Prologues and updates, with copies and remainders beside the parameters, taken and skipped."""
    types = ((F32, F16), (F32, BF16), (BF16, torch.int16), (F16, torch.int16), (F32, None))
    for name, flags in itertools.product((ops.ADAM, ops.SGD), range(4)):
        shapes = [(1,), (0,), (7,), (3, 5), (16,), (2, 3, 4, 5), (33, 31), (17,), (32769,), (8,)] * (
            2 if flags == 1 else 1
        )
        steps = [scalar(DEVICE, float(i % 3 * 50)) for i in range(len(shapes))]
        decision, rows = torch.zeros(ops.DECISION), torch.zeros(len(shapes), ops.ROW)
        last = float(flags & 1)
        adam = [[1e-2, 0.9, 0.999, 1e-8, 0.05, last, 1.0], [3e-3, 0.3, 0.95, 1e-6, 0.0, 0.0, 0.0]]
        sgd = [[1e-1, 0.9, 0.1, last, 0.05, last, 0.0], [3e-2, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]]
        hyper = torch.tensor(adam if name == ops.ADAM else sgd, dtype=torch.float64)
        table = [decision, rows, steps, hyper, torch.arange(len(shapes)) % 2, name, [scalar(DEVICE, 1e-2)], [1]]
        state = [scalar(DEVICE, 1024.0), *(scalar(DEVICE, n, torch.int32) for n in (2, 1)), torch.tensor([7, 3, 1])]
        found = scalar(DEVICE, float(flags == 3))
        yield (
            'step_prologue',
            [*table, found, None, scalar(DEVICE, 3.0), *state, [2.0, 0.5, 3.0, 2.0, 0.25, 2.0**20], 1.0, 0.5],
        )
        yield (
            'step_prologue',
            [decision.clone(), rows[:0].clone(), [], hyper, torch.zeros(0, dtype=torch.int64), name, [], []],
        )

        def made(which: int, shapes: Any = shapes, flags: int = flags) -> list[Tensor]:
            return [random_tensor(i + 1000 * which, s, F32, DEVICE, i % 5, flags == 2) for i, s in enumerate(shapes)]

        kinds = [types[(i + flags) % 5] for i in range(len(shapes))]
        params = [p.to(kind) for p, (kind, _) in zip(made(1), kinds)]
        partners = [p if other is None else torch.zeros_like(p, dtype=other) for p, (_, other) in zip(params, kinds)]
        grads = [grad.to(FLOATS[i % 3]) for i, grad in enumerate(made(0))]
        states = [made(2), [t.abs() for t in made(3)], [t.abs() for t in made(4)] if flags & 1 else []]
        states = states if name == ops.ADAM else [states[0] if flags & 1 else []]
        yield ('fused_adam' if name == ops.ADAM else 'fused_sgd'), [grads, params, *states, partners, rows, decision]
    # more tensors than the arguments of all launches hold
    yield 'multi_tensor_l2norm', [[torch.full((9,), float(i)) for i in range(100)]]
    for i in range(20):
        state = [scalar(DEVICE, 3.0 ** (i % 7 - 3)), *(scalar(DEVICE, n, torch.int32) for n in (i % 4, i % 3))]
        limits = [None if i % 2 else 0.5, 700.0]
        yield 'update_scale', [*state, scalar(DEVICE, float(i % 5 == 0)), 2.0, 0.5, 3, 2, *limits]


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_of(item)] if isinstance(value, (list, tuple)) else []


def results() -> list[tuple[str, list[Tensor]]]:
    """What is returned and what the arguments are afterwards, of every call in turn."""
    found = []
    for name, arguments in itertools.chain(list_calls(), step_calls()):
        result = getattr(torch.ops.amp_wrapper, name)(*arguments)
        found.append((name, [t.clone() for t in (*tensors_of(result), *tensors_of(arguments))]))
    return found


def main() -> None:
    """The command."""
    if len(sys.argv) == 2:
        assert ops.compiled_devices(), 'there is no library to compare with'
        torch.save(results(), sys.argv[1])
        return
    wanted = torch.load(sys.argv[1], weights_only=True)
    assert not ops.compiled_devices()
    torch.ops.load_library(sys.argv[2])
    host = ctypes.CDLL(sys.argv[2])
    found: list[str] = []
    launches: list[int] = []
    for captured in (0, 1):
        # while a graph is recorded there are no tables, but several launches
        host.set_capture(captured)
        host.count_launches()
        for (name, tensors), (_, others) in zip(results(), wanted, strict=True):
            # each call has its own tensors, of which a norm may be one
            close = [
                torch.allclose(a, b, rtol=2.0**-20, atol=0, equal_nan=True) if name in NORMS else same_bits(a, b)
                for a, b in zip(tensors, others, strict=True)
            ]
            found += [] if all(close) else [f'{name} {captured}']
        launches.append(host.count_launches())
    assert 0 < launches[0] < launches[1], launches
    print(json.dumps(found))


if __name__ == '__main__':
    main()
