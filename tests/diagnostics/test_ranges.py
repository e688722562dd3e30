"""Counts over powers of two, and what 16-bit types make of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from amp_wrapper import AmpUsageError
from amp_wrapper.diagnostics.ranges import added, count_on_device, exponent_of, measure, measure_one, range_of

HALF = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize('dtype', HALF)
def test_range_of_a_type(dtype: torch.dtype) -> None:
    known = range_of(dtype)
    info = torch.finfo(dtype)
    assert 2.0 ** (known.top - 1) <= info.max < 2.0**known.top
    assert 2.0**known.normal == info.tiny
    smallest = torch.tensor(2.0**known.bottom, dtype=torch.float64)
    assert smallest.to(dtype) == smallest
    assert (smallest / 2.0001).to(dtype) == 0
    assert known.largest == info.max


@given(st.floats(min_value=1e-30, max_value=1e30, allow_subnormal=False))
def test_exponent(number: float) -> None:
    assert 2.0 ** exponent_of(number) <= number < 2.0 ** (exponent_of(number) + 1)


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_subnormal=True), max_size=40))
def test_counts_are_those_of_the_values(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    found = measure_one(values)
    finite = values.isfinite()
    assert found.total == len(numbers)
    assert found.nonfinite == int((~finite).sum())
    assert found.zeros == int((values == 0).sum())
    assert found.largest == float(values[finite].abs().max() if finite.any() else 0.0)
    assert found.between(None, -14) == int(((values != 0) & (values.abs() < 2.0**-14)).sum())
    assert found.between(3, None) == int((finite & (values.abs() >= 8.0)).sum())


def test_powers_and_sums(device: torch.device) -> None:
    values = torch.tensor([0.0, -0.0, 0.75, -1.0, 1.5, 1000.0, math.inf, math.nan], device=device)
    found = measure({'a': values, 'b': values.half(), 'c': torch.arange(3, device=device), 'd': values[:0]})
    assert set(found) == {'a', 'b', 'd'}
    assert found['a'].powers() == {-1: 1, 0: 2, 9: 1} == found['b'].powers()
    assert (found['a'].zeros, found['a'].nonfinite, found['a'].largest) == (2, 2, 1000.0)
    both = added(found.values())
    assert both.powers() == {-1: 2, 0: 4, 9: 2}
    assert both.total == 16
    assert added([]).total == 0
    assert found['d'].share(0) == 0.0
    assert found['a'].between(0, 1) == 2
    assert found['a'].plain() == {
        'elements': 8,
        'largest': 1000.0,
        'zeros': 2,
        'nonfinite': 2,
        'powers': {'-1': 1, '0': 2, '9': 1},
    }


def test_nothing_to_count() -> None:
    with pytest.raises(AmpUsageError, match='tensors'):
        count_on_device([])


def test_nothing_is_written(device: torch.device) -> None:
    values: Tensor = torch.randn(100, device=device, requires_grad=True)
    version = values._version
    counts, largest = count_on_device([values, values.detach()])
    assert counts.shape == (2, 257)
    assert torch.equal(counts[0], counts[1])
    assert float(largest[0]) == float(values.detach().abs().max())
    assert values._version == version
