"""Arguments and results of a model: nested containers are cast and keep their types, and the caller's are never changed."""

from __future__ import annotations

import collections
import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from bits import same_bits
from forwards import prepared
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
OTHERS = (torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float64)


class Point(NamedTuple):
    x: Any
    y: Any = None


@dataclasses.dataclass
class Box:
    content: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    content: Any


@dataclasses.dataclass
class Output(collections.OrderedDict):
    """As the outputs of transformers."""

    logits: Any = None

    def __post_init__(self) -> None:
        self['logits'] = self.logits


def noted(value: Any) -> Any:
    """With an attribute of its own."""
    value.note = 'instance'
    return value


leaves = st.one_of(
    st.sampled_from([*FLOATS, *OTHERS]).map(lambda dtype: torch.ones(2, dtype=dtype)),
    st.sampled_from([None, True, 2, 1.5, 1j, 'text', b'bytes', range(3), slice(1), torch.Size([2]), Box]),
    # tuples of torch, and what is no container
    st.builds(lambda: torch.max(torch.eye(2), dim=0)),
    st.builds(lambda: np.ones(2, np.float32)),
    st.builds(lambda: SimpleNamespace(tensor=torch.ones(1))),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=3)
    dicts = st.dictionaries(st.sampled_from(['a', 'b', 'c']), inner, max_size=3)
    makers = [dict, collections.OrderedDict, lambda items: collections.defaultdict(list, items)]
    makers.append(lambda items: noted(type('Words', (dict,), {})(items)))
    return st.one_of(
        *(lists.map(make) for make in (list, tuple, type('Row', (list,), {}))),
        *(dicts.map(make) for make in makers),
        *(inner.map(make) for make in (Point, Frozen, Output)),
        inner.map(Box).map(noted),
    )


def children(value: Any) -> list[Any] | None:
    """The parts of a container, or None for what is none."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def snapshot(value: Any) -> Any:
    """Identity of everything inside."""
    parts = children(value)
    return id(value) if parts is None else (id(value), tuple(map(snapshot, parts)))


def check(old: Any, new: Any, dtype: torch.dtype, sources: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Tensors of the sources have been cast; all else is as it was."""
    assert type(new) is type(old)
    parts, others = children(old), children(new)
    if isinstance(old, Tensor) and old.dtype in sources and old.dtype is not dtype:
        assert same_bits(new, old.to(dtype))
    elif parts is None:
        assert new is old
    else:
        assert others is not None and len(others) == len(parts)
        for part, other in zip(parts, others):
            check(part, other, dtype, sources)
    if isinstance(old, dict):
        assert list(old) == list(new)
    for name in ('note', 'default_factory'):
        assert getattr(new, name, 0) == getattr(old, name, 0)


class Echo(nn.Module):
    """Returns what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.got: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.got = (*args, *kwargs.values())
        return self.got[0]


@pytest.fixture(scope='module')
def models() -> dict[torch.dtype, Any]:
    return {half: prepared(Echo(), level) for level, half in (('O2', torch.float16), ('O5', torch.bfloat16))}


@settings(max_examples=80, deadline=None)
@given(value=st.recursive(leaves, containers, max_leaves=10), by_name=st.booleans())
def test_any_nesting(models: dict[torch.dtype, Any], value: Any, by_name: bool) -> None:
    before = snapshot(value)
    for half, model in models.items():
        result = model(value=value) if by_name else model(value)
        check(value, model.got[0], half)
        check(model.got[0], result, torch.float32, (torch.float16, torch.bfloat16))
    assert snapshot(value) == before


def test_packed_sequences_and_gradients(models: dict[torch.dtype, Any]) -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)], enforce_sorted=False)
    parameter = nn.Parameter(torch.ones(3))
    for half, model in models.items():
        out = model(packed)
        (got,) = model.got
        assert type(got) is type(out) is PackedSequence
        assert (packed.data.dtype, got.data.dtype, out.data.dtype) == (torch.float32, half, torch.float32)
        for name in ('batch_sizes', 'sorted_indices', 'unsorted_indices'):
            assert getattr(got, name) is getattr(packed, name)
        parameter.grad = None
        model({'x': [parameter]})['x'][0].sum().backward()
        assert model.got[0]['x'][0].dtype is half and parameter.grad is not None
        assert same_bits(parameter.grad, torch.ones(3))
