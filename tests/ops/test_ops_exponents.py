"""Counts over powers of two: against a model in float64, at every edge of a type, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_models import EDGES, FLOATS, REFERENCE, NoHostRead, random_tensor, same_bits, without_compiled
from torch import Tensor

from amp_wrapper import ops

FACES = {'front': ops, 'raw': torch.ops.amp_wrapper, 'reference': REFERENCE}
SUBNORMAL, NONFINITE, ZERO = 0, 255, 256


@pytest.fixture(params=list(FACES))
def where(request: pytest.FixtureRequest, device: torch.device) -> Any:
    if request.param != 'reference' and without_compiled(device):
        pytest.skip(without_compiled(device))
    return FACES[request.param]


def column(value: float) -> int:
    """Where a float32 is counted, from its exponent in float64, which has no subnormal number among them."""
    if not math.isfinite(value):
        return NONFINITE
    return ZERO if value == 0 else max(math.frexp(value)[1] - 1 + 127, SUBNORMAL)


def model(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Counts and largest magnitudes, element by element."""
    counts = np.zeros((len(tensors), ops.EXPONENTS), dtype=np.int64)
    largest = np.zeros(len(tensors), dtype=np.float32)
    for index, tensor in enumerate(tensors):
        for value in tensor.cpu().double().reshape(-1).tolist():
            counts[index, column(value)] += 1
            if math.isfinite(value):
                largest[index] = max(largest[index], np.float32(abs(value)))
    return torch.from_numpy(counts), torch.from_numpy(largest)


def tables(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(count, ops.EXPONENTS, dtype=torch.int64, device=device), torch.zeros(count, device=device)


def check(where: Any, tensors: list[Tensor], device: torch.device) -> None:
    """A call gives what the model gives, and writes to nothing else."""
    kept = [tensor.clone() for tensor in tensors]
    counts, largest = tables(len(tensors), device)
    with NoHostRead():
        where.multi_tensor_exponents(tensors, counts, largest)
    wanted = model(tensors)
    assert torch.equal(counts.cpu(), wanted[0])
    assert same_bits(largest.cpu(), wanted[1])
    assert all(same_bits(tensor, old) for tensor, old in zip(tensors, kept))


def edges(dtype: torch.dtype) -> list[float]:
    """Each power of two of a type with its neighbours, both zeros, and what is not finite."""
    info = torch.finfo(dtype)
    lowest = math.frexp(info.smallest_normal * info.eps)[1] - 1
    powers = [2.0**power for power in range(lowest, math.frexp(info.max)[1])]
    values = [math.nextafter(power, way) for power in powers for way in (0.0, math.inf)] + powers
    return [0.0, -0.0, info.max, -info.max, math.inf, -math.inf, math.nan, *values, *(-power for power in powers)]


@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_every_power_of_two(dtype: torch.dtype, where: Any, device: torch.device) -> None:
    """Also the subnormal numbers of the type, which arithmetic would perhaps take for zeros."""
    values = torch.tensor(edges(dtype), dtype=torch.float64).to(dtype).to(device)
    check(where, [values, values[:7], values[-1:]], device)
    counts, _ = tables(1, device)
    where.multi_tensor_exponents([values], counts, torch.zeros(1, device=device))
    # float16 reaches from its smallest subnormal number to its largest; the others fill every column
    filled = range(127 - 24, 127 + 16) if dtype is torch.float16 else range(255)
    assert counts[0].nonzero().reshape(-1).tolist() == [*filled, NONFINITE, ZERO]


@pytest.mark.parametrize('half', FLOATS[1:], ids=str)
def test_every_16_bit_number(half: torch.dtype, where: Any, device: torch.device) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(half).to(device)
    check(where, [every], device)


shapes = st.sampled_from(
    [(), (0,), (1,), (2, 0, 3), (3,), (7, 9), (33,), (2, 3, 4, 5), *((size,) for size in EDGES[:9])]
)
rows = st.tuples(st.integers(0, 99), shapes, st.sampled_from([*FLOATS, torch.float64]), st.integers(0, 4))


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(rows, max_size=6), special=st.booleans())
def test_counts_are_those_of_the_model(device: torch.device, rows: list[Any], special: bool) -> None:
    """Types mixed, views, channels-last, misaligned, with gaps, empty; float64 goes to the reference."""
    tensors = [random_tensor(seed, shape, dtype, device, layout, special) for seed, shape, dtype, layout in rows]
    check(ops, tensors, device)


def test_counts_are_added_and_the_largest_stays(where: Any, device: torch.device) -> None:
    tensors = [torch.tensor([1.0, -3.0, 0.0], device=device), torch.full((2,), -5.0, device=device)]
    counts, largest = tables(2, device)
    counts[0, ZERO], counts[1, 7] = 2**40, 3
    largest[0] = 4.0
    before = counts._version, largest._version
    where.multi_tensor_exponents(tensors, counts, largest)
    where.multi_tensor_exponents(tensors, counts, largest)
    found = [{index: count for index, count in enumerate(row) if count} for row in counts.tolist()]
    assert found == [{127: 2, 128: 2, ZERO: 2**40 + 2}, {7: 3, 129: 4}]
    assert largest.tolist() == [4.0, 5.0]
    assert counts._version > before[0] and largest._version > before[1]
