"""Prints, as JSON, the calls in which the CUDA ops on the shim differ from those of the CPU: ``compare.py LIBRARY``.

The library (host.cpp) has both: ``torch.ops.amp_wrapper`` for the CPU, ``torch.ops.amp_shim`` for the shim.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from bits import same_bits
from torch import Tensor

F32, F16, BF16, I16 = torch.float32, torch.float16, torch.bfloat16, torch.int16
FLOATS = (F32, F16, BF16)
#: Empty ones, scalars, channels-last, and sizes around rows, blocks and chunks.
SHAPES = [(1,), (0,), (7,), (3, 5), (), (2, 3, 4, 5), (63,), (65,), (33, 31), (1025,), (32769,), (70001,)]
SPECIAL = (0.0, -0.0, 1e-7, 2.0**-25, 1e-40, 65504.0, 65520.0, 3e38, float('inf'), float('nan'))
#: More small tensors than a launch has room for.
MANY = [(9,)] * 130


class Maker:
    """Tensors by chance, the same for the same seed."""

    def __init__(self, seed: int, special: bool = False) -> None:
        self._chance = torch.Generator().manual_seed(seed)
        self._special = special

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, shifted: bool) -> Tensor:
        """One that begins at an aligned place, or one element behind it."""
        values = torch.randn(tuple(shape), generator=self._chance)
        if self._special and values.numel() > 20:
            values.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
        memory = torch.empty(values.numel() + shifted, dtype=dtype)
        result = memory[int(shifted) :].view(values.shape).copy_(values)
        return result.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else result

    def list(self, shapes: Sequence[Sequence[int]], types: Sequence[torch.dtype] = FLOATS) -> list[Tensor]:
        """One tensor for each shape, of types in turn from a random one on."""
        first = int(torch.randint(6, (), generator=self._chance))
        return [
            self.tensor(shape, types[(first + i) % len(types)], (first + i) % 3 == 0) for i, shape in enumerate(shapes)
        ]


def scalar(value: float = 0.0, dtype: torch.dtype = F32) -> Tensor:
    return torch.tensor(value, dtype=dtype)


def list_calls(maker: Maker, shapes: Sequence[Sequence[int]]) -> Iterator[tuple[str, list[Any]]]:
    third = scalar(1 / 3)
    yield 'multi_tensor_scale', [maker.list(shapes), maker.list(shapes), third, scalar()]
    yield 'multi_tensor_scale', [maker.list(shapes), maker.list(shapes)]
    yield 'multi_tensor_axpby', [maker.list(shapes), maker.list(shapes), third, scalar(-0.7), scalar()]
    yield 'multi_tensor_isnonfinite', [maker.list(shapes), scalar()]
    yield 'multi_tensor_l2norm', [maker.list(shapes), third, scalar()]


def step_calls(maker: Maker, shapes: Sequence[Sequence[int]], flags: int) -> Iterator[tuple[str, list[Any]]]:
    """A step of Adam or SGD, skipped, or with all states."""
    is_sgd, skips, has_all = flags & 1, flags & 2, flags & 4
    adam = [[1e-2, 0.9, 0.999, 1e-8, 0.05, 1.0, 1.0], [3e-3, 0.3, 0.95, 1e-6, 0.0, 0.0, 0.0]]
    sgd = [[1e-1, 0.9, 0.1, 1.0, 0.05, 1.0, 0.0], [3e-2, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]]
    hyper = torch.tensor(sgd if is_sgd else adam, dtype=torch.float64)
    table = [torch.zeros(8), hyper, torch.arange(len(shapes)) % 2, [scalar(1e-2)], [1]]
    state = [scalar(1024.0), scalar(2, torch.int32), scalar(1, torch.int32), torch.tensor([7, 3, 1])]
    rule = [2.0, 0.5, 3.0, 2.0, 0.25, 2.0**20]
    given = [*table, scalar(bool(skips)), None, scalar(3.0), *state, rule, 1.0, 0.5]
    params = maker.list(shapes, (F32, F32, BF16, F16))
    # for every fourth none, which is said by the parameter itself
    partners = [
        maker.tensor(p.shape, FLOATS[i % 3] if p.dtype is F32 else I16, False) if i % 4 else p
        for i, p in enumerate(params)
    ]
    states = [maker.list(shapes) for _ in range(3)]
    if is_sgd:
        yield 'fused_sgd', [maker.list(shapes), params, states[0] if has_all else [], partners, *given]
    else:
        moments = [states[0], [t.abs() for t in states[1]], [t.abs() for t in states[2]] if has_all else []]
        steps = [scalar(i % 3 * 50) for i in range(len(shapes))]
        yield 'fused_adam', [maker.list(shapes), params, *moments, steps, partners, *given]


def calls() -> Iterator[tuple[str, list[Any]]]:
    for special in (False, True):
        yield from list_calls(Maker(int(special), special), SHAPES)
    yield from list_calls(Maker(2), MANY)
    # of no parameters, there is a decision all the same
    yield from step_calls(Maker(3), [], 0)
    for flags in range(8):
        yield from step_calls(Maker(3 + flags), MANY if flags in (4, 5) else SHAPES, flags)


def copied(value: Any, copies: dict[int, Tensor]) -> Any:
    """Arguments of their own, with a tensor that stands twice still the same."""
    if isinstance(value, Tensor):
        if id(value) not in copies:
            memory = torch.empty(value.numel() + 8, dtype=value.dtype)
            offset = value.storage_offset() % 8
            copies[id(value)] = memory.as_strided(value.shape, value.stride(), offset).copy_(value)
        return copies[id(value)]
    return [copied(item, copies) for item in value] if isinstance(value, list) else value


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_of(item)] if isinstance(value, (list, tuple)) else []


def outcome(namespace: Any, name: str, arguments: list[Any]) -> list[Tensor]:
    """What an op returns, and what its arguments are afterwards."""
    arguments = copied(arguments, {})
    result = getattr(namespace, name)(*arguments)
    return [*tensors_of(result), *tensors_of(arguments)]


def main() -> None:
    """The command."""
    torch.ops.load_library(sys.argv[1])
    host = ctypes.CDLL(sys.argv[1])
    found: list[str] = []
    launches: list[int] = []
    for captured in (0, 1):
        # while a graph is recorded there are no tables, but several launches
        host.set_capture(captured)
        host.count_launches()
        for name, arguments in calls():
            wanted = outcome(torch.ops.amp_wrapper, name, arguments)
            given = outcome(torch.ops.amp_shim, name, arguments)
            if not all(same_bits(a, b, any_nan=True) for a, b in zip(wanted, given, strict=True)):
                found.append(f'{name} {captured}')
        launches.append(host.count_launches())
        assert (host.count_tables() > 0) != bool(captured)
    assert 0 < launches[0] < launches[1], launches
    print(json.dumps(found))


if __name__ == '__main__':
    main()
