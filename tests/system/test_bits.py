"""The comparison of bits that the tests share sees every difference, and no other."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from bits import differences, differing, identical, same, same_bits
from torch import nn

ONES = torch.ones(2, 3)
NAN = torch.tensor([math.nan])
OTHER_NAN = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
COMPLEX = torch.zeros(1, dtype=torch.complex64)


UNLIKE: list[tuple[Any, Any]] = [
    (ONES, ONES.double()), (ONES, ONES.reshape(3, 2)), (ONES, ONES.to('meta')), (ONES, ONES.to_sparse()),
    (ONES, ONES + 2.0**-23), (torch.zeros(1), -torch.zeros(1)), (COMPLEX, -COMPLEX), (NAN, OTHER_NAN), (0.0, -0.0), (1, True),
    ([1, 2], [1]), ({'a': [ONES]}, {'a': [ONES * 2]}), ({'a': 1}, {'b': 1}), (np.ones(2), np.ones(2, np.float32)),
]  # fmt: skip
ALIKE: list[Any] = [
    ONES.t(),
    OTHER_NAN,
    COMPLEX.conj(),
    ONES.to_sparse(),
    ONES.bfloat16()[:, ::2],
    {'a': [ONES, (math.nan,)]},
]


def test_differences_are_seen_and_copies_are_the_same() -> None:
    for left, right in UNLIKE:
        assert len(differences(left, right)) == 1 and not same([left], [right]) and not identical(left, right)
        assert differing({'a': left, 'b': 1}, {'a': right, 'b': 1}) == ['a']
    for value in ALIKE:
        assert same(value, copy.deepcopy(value)) and identical(value, copy.deepcopy(value))


def test_strict_comparison_sees_types_and_order() -> None:
    for left, right in ((ONES, nn.Parameter(ONES)), ((1, 2), [1, 2]), ({'a': 1, 'b': 2}, {'b': 2, 'a': 1})):
        assert same(left, right) and not identical(left, right)
    assert not same({'a': 1, 'b': 2}, {'b': 2, 'a': 1}, ordered=True)
    assert same_bits(NAN, OTHER_NAN, any_nan=True) and not same_bits(NAN, ONES[0, :1], any_nan=True)
