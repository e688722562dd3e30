"""Walks through nested containers: types kept, strangers untouched, inputs never changed."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from amp_wrapper.policy.nested import CASTABLE, HALF_TYPES, cast_tensors, map_tensors

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
OTHERS = (torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float64)


class Point(NamedTuple):
    x: Any
    y: Any = None


class Words(dict):
    """A dict with an attribute of its own."""

    note = 'class'


class Row(list):
    pass


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Box:
    content: Any
    label: str = 'box'


@dataclasses.dataclass(frozen=True)
class FrozenBox:
    content: Any
    label: str = 'frozen'


class Stranger:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def words(items: dict[str, Any]) -> Words:
    result = Words(items)
    result.note = 'instance'
    return result


def defaults(items: dict[str, Any]) -> collections.defaultdict[str, Any]:
    return collections.defaultdict(list, items)


tensors = st.sampled_from([*FLOATS, *OTHERS]).map(lambda dtype: torch.ones(2, dtype=dtype))
leaves = st.one_of(
    tensors,
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.text('ab', max_size=2),
    st.builds(lambda: np.ones(2, np.float32)),
    st.builds(lambda: range(3)),
    st.builds(lambda: {1, 2}),
    st.builds(lambda: torch.Size([1, 2])),
    st.builds(lambda: nn.Linear(1, 1)),
    st.builds(lambda: Stranger(torch.ones(1))),
    st.builds(lambda: iter([torch.ones(1)])),
    st.just(Color.RED),
    st.just(Box),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=3)
    dicts = st.dictionaries(st.sampled_from(['a', 'b', 'c']), inner, max_size=3)
    return st.one_of(
        lists,
        lists.map(tuple),
        lists.map(Row),
        st.builds(Point, inner, inner),
        dicts,
        dicts.map(collections.OrderedDict),
        dicts.map(defaults),
        dicts.map(words),
        st.builds(Box, inner),
        st.builds(FrozenBox, inner),
    )


nestings = st.recursive(leaves, containers, max_leaves=10)


def children(value: Any) -> list[Any] | None:
    """The parts of a container, or None for a leaf. The test's own idea of what is entered."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def snapshot(value: Any) -> Any:
    """Identity of everything inside, to see that nothing was replaced in place."""
    parts = children(value)
    return id(value) if parts is None else (id(value), tuple(snapshot(part) for part in parts))


def check(old: Any, new: Any, dtype: torch.dtype) -> bool:
    """Assert the contract for one pair; returns whether something below changed."""
    assert type(new) is type(old)
    if isinstance(old, Tensor):
        if old.dtype in CASTABLE and old.dtype is not dtype:
            assert new.dtype is dtype and torch.equal(new, old.to(dtype))
            return True
        assert new is old
        return False
    parts = children(old)
    if parts is None:
        assert new is old
        return False
    if isinstance(old, dict):
        assert list(old) == list(new)
    others = children(new)
    assert others is not None and len(others) == len(parts)
    changed = [check(a, b, dtype) for a, b in zip(parts, others)]
    if not any(changed):
        assert new is old
    else:
        assert new is not old
    if isinstance(old, collections.defaultdict):
        assert new.default_factory is old.default_factory
    if isinstance(old, Words):
        assert new.note == old.note
    return any(changed)


@settings(max_examples=150, deadline=None)
@given(value=nestings, dtype=st.sampled_from(FLOATS))
def test_any_nesting(value: Any, dtype: torch.dtype) -> None:
    before = snapshot(value)
    result = cast_tensors(value, dtype)
    check(value, result, dtype)
    assert snapshot(value) == before
    # a second cast finds nothing to do
    assert cast_tensors(result, dtype) is result


@settings(max_examples=50, deadline=None)
@given(value=nestings)
def test_identity_function_returns_the_very_object(value: Any) -> None:
    assert map_tensors(lambda tensor: tensor, value) is value


@pytest.mark.parametrize('dtype', OTHERS, ids=str)
@pytest.mark.parametrize('target', FLOATS, ids=str)
def test_other_dtypes_are_left_alone(dtype: torch.dtype, target: torch.dtype, device: torch.device) -> None:
    tensor = torch.ones(3, device=device).to(dtype)
    assert cast_tensors(tensor, target) is tensor
    nested = {'a': [tensor]}
    assert cast_tensors(nested, target) is nested


@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_sources_limit_what_is_cast(dtype: torch.dtype, device: torch.device) -> None:
    tensor = torch.ones(3, device=device, dtype=dtype)
    result = cast_tensors([tensor], torch.float32, HALF_TYPES)[0]
    assert result.dtype is torch.float32
    assert (result is tensor) == (dtype is torch.float32)


def test_cast_is_differentiable(device: torch.device) -> None:
    tensor = torch.ones(3, device=device, requires_grad=True)
    cast_tensors({'x': [tensor]}, torch.float16)['x'][0].sum().backward()
    assert tensor.grad is not None and torch.equal(tensor.grad, torch.ones(3, device=device))


def test_packed_sequence(device: torch.device) -> None:
    packed = pack_sequence([torch.ones(3, 2, device=device), torch.ones(1, 2, device=device)], enforce_sorted=False)
    result = cast_tensors((packed, None), torch.float16)[0]
    assert type(result) is PackedSequence and result.data.dtype is torch.float16
    for name in ('batch_sizes', 'sorted_indices', 'unsorted_indices'):
        assert getattr(result, name) is getattr(packed, name)
    assert packed.data.dtype is torch.float32
    assert cast_tensors(packed, torch.float32) is packed


@pytest.mark.parametrize(
    'make',
    [
        lambda x: torch.max(x, dim=0),
        lambda x: torch.linalg.qr(x),
        lambda x: torch.topk(x, 1),
    ],
    ids=['max', 'qr', 'topk'],
)
def test_torch_return_types(make: Any, device: torch.device) -> None:
    value = make(torch.eye(2, device=device))
    result = cast_tensors(value, torch.bfloat16)
    assert type(result) is type(value) and len(result) == len(value)
    for old, new in zip(value, result):
        assert new is old if old.dtype is torch.int64 else new.dtype is torch.bfloat16
    assert value[0].dtype is torch.float32


def test_slotted_frozen_dataclass_is_rebuilt(device: torch.device) -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Slotted:
        content: Any
        label: str = 'slotted'

    value = Slotted(torch.ones(1, device=device))
    result = cast_tensors(value, torch.float16)
    assert type(result) is Slotted and result.label == 'slotted' and result.content.dtype is torch.float16
    assert value.content.dtype is torch.float32


def test_dataclass_with_init_false_field_and_attribute(device: torch.device) -> None:
    @dataclasses.dataclass
    class Late:
        given: Any
        late: Any = dataclasses.field(init=False)

    value = Late(torch.ones(1, device=device))
    value.extra = 'kept'  # type: ignore[attr-defined]
    result = cast_tensors(value, torch.float16)
    assert result.given.dtype is torch.float16 and result.extra == 'kept' and not hasattr(result, 'late')
    value.late = torch.ones(2, device=device)
    assert cast_tensors(value, torch.float16).late.dtype is torch.float16


def test_dict_that_is_a_dataclass(device: torch.device) -> None:
    @dataclasses.dataclass
    class Output(collections.OrderedDict):
        logits: Any = None

        def __post_init__(self) -> None:
            self['logits'] = self.logits

    value = Output(torch.ones(1, device=device))
    result = cast_tensors(value, torch.float16)
    assert type(result) is Output and result['logits'].dtype is torch.float16
    assert value['logits'].dtype is torch.float32


def test_generator_is_not_consumed(device: torch.device) -> None:
    def generate() -> Iterator[Tensor]:
        yield torch.ones(1, device=device)

    value = generate()
    assert cast_tensors(value, torch.float16) is value
    assert next(value).dtype is torch.float32


@pytest.mark.parametrize(
    'value',
    [
        'text',
        b'bytes',
        None,
        1,
        1.5,
        1j,
        range(3),
        torch.Size([2]),
        Color.RED,
        SimpleNamespace(x=1),
        slice(1),
        Box,
        {1},
    ],
    ids=repr,
)
def test_strangers_pass(value: Any) -> None:
    calls: list[Tensor] = []
    assert map_tensors(lambda tensor: calls.append(tensor) or tensor, value) is value
    assert calls == []


def test_parameters_and_subclasses_count_as_tensors(device: torch.device) -> None:
    parameter = nn.Parameter(torch.ones(1, device=device))
    assert cast_tensors(parameter, torch.float32) is parameter
    result = cast_tensors([parameter], torch.float16)[0]
    assert result.dtype is torch.float16 and result.requires_grad and parameter.dtype is torch.float32


def test_same_list_type_and_new_object(device: torch.device) -> None:
    value = Row([torch.ones(1, device=device), 'a'])
    result = cast_tensors(value, torch.float16)
    assert type(result) is Row and result is not value and result[1] == 'a'
    assert value[0].dtype is torch.float32
