"""Descriptions of saved data: what they take, and what they say of the rest."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import numpy as np
import pytest
import torch

from amp_wrapper import AmpCheckpointError
from amp_wrapper.checkpoint import schema

TAKEN: list[tuple[schema.Schema, list[Any]]] = [
    (schema.ANYTHING, [None, 'a', torch.ones(1)]),
    (schema.whole(), [0, 7, 2**63 - 1]),
    (schema.whole(-1, bits=None), [-1, 2**70]),
    (schema.whole(types=Integral), [np.int64(3)]),
    (schema.between(0, 2), [0, 2]),
    (schema.version(2), [1, 2]),
    (schema.exactly('a'), ['a']),
    (schema.REAL, [-math.inf, 0, np.float32(0.5), torch.tensor([2.0]), np.array(3), 2**70]),
    (schema.SETTING, [-0.1, 2**40, torch.tensor(0.1)]),
    (schema.NOT_NEGATIVE, [0, torch.tensor(3.0)]),
    (schema.COUNTER, [-1, 3.0, np.int64(3), torch.tensor(3)]),
    (schema.POSITIVE, [1, 0.5, 2.0**127]),
    (schema.FINITE, [-1, 0.5, 2**70]),
    (schema.FLAG, [0, 1.0]),
    (schema.SWITCH, [True]),
    (schema.CHOICE, [True, None, np.bool_(False)]),
    (schema.Maybe(schema.whole()), [None, 3]),
    (schema.ListOf(schema.whole()), [[], (1, 2)]),
    (schema.MapOf(schema.whole(), names=True), [{}, {'a': 1}]),
    (schema.Record({'a': schema.whole()}, {'b': schema.SWITCH}), [{'a': 1}, {'a': 1, 'b': True, 'c': 'other'}]),
    (schema.TensorOf(torch.Size([2]), floating=True), [torch.ones(2), torch.ones(2, dtype=torch.complex64)]),
    (schema.TensorOf(dense=False), [torch.ones(1).expand(3), torch.eye(2).to_sparse()]),
]


@pytest.mark.parametrize(('form', 'values'), TAKEN, ids=range(len(TAKEN)))
def test_what_is_taken(form: schema.Schema, values: list[Any]) -> None:
    for value in values:
        form.check(value, 'x')
        assert form.fits(value)


NAMES = schema.MapOf(schema.whole(), names=True)
PAIR = schema.Record(
    {'a': schema.whole(), 'b': schema.SWITCH},
    {'c': schema.SWITCH},
    missing='{path} lacks {keys}, first {first!r} (found: {found}).',
    unknown='{path} has {keys}.',
)
REFUSED: list[tuple[schema.Schema, Any, str]] = [
    (schema.whole(), -1, 'x=-1 must be a whole number of at least 0 and below 2**63.'),
    (schema.whole(), True, 'x=True must be a whole number of at least 0 and below 2**63.'),
    (schema.whole(bits=31), 2**31, 'x=2147483648 must be a whole number of at least 0 and below 2**31.'),
    (schema.whole(1, bits=None), 1.0, 'x=1.0 must be a whole number of at least 1.'),
    (schema.between(0, 2), 3, 'x=3 must be a whole number from 0 to 2.'),
    (schema.version(2), 0, 'x=0 must be a whole number from 1 to 2.'),
    (schema.version(2), 3, 'x=3 comes from a newer amp_wrapper; this one reads up to 2: upgrade it.'),
    (schema.exactly(3), True, 'x=True must be 3.'),
    (schema.REAL, 10**400, f'x={10**400} must be a number.'),
    (schema.REAL, math.nan, 'x=nan must be a number.'),
    (schema.SETTING, math.inf, 'x=inf must be a number.'),
    (schema.NOT_NEGATIVE, -1e-9, 'x=-1e-09 must be a number of at least 0.'),
    (schema.COUNTER, 0.5, 'x=0.5 must be a whole number of at least -1.'),
    (schema.POSITIVE, 1e300, 'x=1e+300 must be a positive finite number that float32 can hold.'),
    (schema.FINITE, 10**400, f'x={10**400} must be a number.'),
    (schema.FLAG, 2, 'x=2 must be 0 or 1.'),
    (schema.SWITCH, None, 'x=None must be True or False.'),
    (schema.CHOICE, 'no', "x='no' must be True, False or None."),
    (schema.kind('a name', str), [0] * 900, 'x must be a name: the file is damaged.'),
    (schema.Maybe(schema.whole()), 'a', "x='a' must be a whole number of at least 0 and below 2**63."),
    (schema.named('two names', schema.ListOf(length=2)), [1], 'x=[1] must be two names.'),
    (schema.ListOf(), {}, 'x must be a list, but is dict: the file is damaged.'),
    (schema.ListOf(schema.SWITCH), [True, 1], 'x[1]=1 must be True or False.'),
    (
        schema.ListOf(expected='a list of 2', length=2),
        [1],
        'x must be a list of 2, but has 1 entries: the file is damaged.',
    ),
    (schema.ListOf(least=1), (), 'x must be a list, but is empty: the file is damaged.'),
    (NAMES, [], 'x must be a dict, but is list: the file is damaged.'),
    (NAMES, {3: 1}, 'x has the key 3, which is no name: the file is damaged.'),
    (NAMES, {'a': {}}, "x['a']={} must be a whole number of at least 0 and below 2**63."),
    (PAIR, {'c': True}, "x lacks 'a', 'b', first 'a' (found: c)."),
    (PAIR, {'a': 1, 'b': True, 'd': 1}, "x has 'd'."),
    (PAIR, {'a': 1, 'b': 1}, "x['b']=1 must be True or False."),
    (PAIR, {'a': 1, 'b': True, 'c': None}, "x['c']=None must be True or False."),
    (schema.Record({'a': schema.SWITCH}), {}, "x['a']=None must be True or False."),
    (schema.TensorOf(), 1.0, 'x must be a tensor, but is float: the file is damaged.'),
    (schema.TensorOf(), torch.ones(1).expand(2), 'x is no plain tensor (torch.strided, on cpu): the file is damaged.'),
    (schema.TensorOf(torch.Size([2])), torch.ones(3), 'x has shape (3,), but its parameter (2,).'),
    (
        schema.TensorOf(floating=True),
        torch.ones(2).bool(),
        'x must be a floating tensor, but is torch.bool: the file is damaged.',
    ),
    (schema.Both(schema.SWITCH, schema.exactly(True)), False, 'x=False must be True.'),
]


@pytest.mark.parametrize(('form', 'value', 'text'), REFUSED, ids=range(len(REFUSED)))
def test_what_is_said_of_the_rest(form: schema.Schema, value: Any, text: str) -> None:
    with pytest.raises(AmpCheckpointError) as caught:
        form.check(value, 'x')
    assert str(caught.value) == text
    assert not form.fits(value)


def test_values_are_left_out_where_a_caller_says_so() -> None:
    with pytest.raises(AmpCheckpointError, match=r"^x\['a'\]\[0\] must be True or False: the file is damaged\.$"):
        schema.Record({'a': schema.ListOf(schema.SWITCH)}).check({'a': [1]}, 'x', show=False)


def test_keys_stand_alone_where_there_is_no_path() -> None:
    with pytest.raises(AmpCheckpointError, match=r"^'a'\['b'\]=1 must be True or False\.$"):
        schema.MapOf(schema.MapOf(schema.SWITCH)).check({'a': {'b': 1}}, '')
