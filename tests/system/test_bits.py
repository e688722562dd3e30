"""The comparison of bits that the tests share sees every difference, and no other."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from bits import differences, differing, identical, same, same_bits
from torch import nn

ONES = torch.ones(2, 3)
NAN = torch.tensor([math.nan])
OTHER_NAN = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)


@dataclasses.dataclass
class Record:
    value: Any


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    ('left', 'right'),
    [
        (ONES, ONES.double()),
        (ONES, ONES.reshape(3, 2)),
        (ONES, ONES.to('meta')),
        (ONES, ONES.to_sparse()),
        (ONES, ONES + 2.0**-23),
        (torch.zeros(1), -torch.zeros(1)),
        (torch.zeros(1, dtype=torch.complex128), -torch.zeros(1, dtype=torch.complex128)),
        (NAN, OTHER_NAN),
        (NAN, ONES[0, :1]),
        (torch.tensor([True]), torch.tensor([False])),
        (ONES.to_sparse(), ONES.to_sparse() * 2),
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        (None, 0),
        ([1, 2], [1]),
        ({'a': 1}, {'b': 1}),
        ({'a': [ONES]}, {'a': [ONES * 2]}),
        (Record(ONES), Record(ONES * 2)),
        (Plain(ONES), Plain(ONES * 2)),
        (np.ones(2), np.ones(2, np.float32)),
        (torch.add, torch.sub),
    ],
)
def test_differences_are_seen(left: Any, right: Any) -> None:
    assert len(differences(left, right)) == 1
    assert not same(left, right) and not same([left], [right]) and not identical(left, right)
    assert differing({'a': left, 'b': 1}, {'a': right, 'b': 1}) == ['a']


@pytest.mark.parametrize(
    'value',
    [
        ONES.t(),
        torch.ones(()),
        NAN,
        OTHER_NAN,
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(4, dtype=torch.bfloat16)[::2],
        ONES.to_sparse(),
        math.nan,
        {'a': [ONES, (None, 'a')]},
        Record(ONES),
        Plain({'a': NAN}),
        np.array([math.nan]),
        torch.float16,
        torch.add,
    ],
)
def test_copies_are_the_same(value: Any) -> None:
    assert same(value, copy.deepcopy(value)) and identical(value, copy.deepcopy(value))
    assert differing({'a': value}, {'a': value, 'b': value}) == ['b']


def test_what_only_a_strict_comparison_sees() -> None:
    for left, right in (
        (ONES, nn.Parameter(ONES)),
        (torch.ones(2, 2), torch.ones(2, 2).t()[:, :1].expand(2, 2)),
        ((1, 2), [1, 2]),
        ({'a': 1, 'b': 2}, {'b': 2, 'a': 1}),
        ({}, OrderedDict()),
    ):
        assert same(left, right) and not identical(left, right)
    assert not same({'a': 1, 'b': 2}, {'b': 2, 'a': 1}, ordered=True) and same({}, OrderedDict(), ordered=True)
    # parameters in an optimizer's state are numbered, in any order
    assert identical({0: 1, 1: 2}, {1: 2, 0: 1})


def test_any_nan() -> None:
    assert same_bits(NAN, OTHER_NAN, any_nan=True) and same([NAN], [OTHER_NAN], any_nan=True)
    assert not same_bits(NAN, ONES[0, :1], any_nan=True)
