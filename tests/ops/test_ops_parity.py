"""The compiled ops against the reference, bit for bit, and both against models in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_models import (
    EDGES,
    FLOATS,
    LISTED,
    NORMS,
    REFERENCE,
    NoHostRead,
    Row,
    bits,
    make_call,
    random_tensor,
    same_bits,
    seeded_rows,
    state,
    without_compiled,
    zero,
)
from torch import Tensor

from amp_wrapper import ops

F32, F64 = torch.float32, torch.float64
SHAPES: list[tuple[int, ...]] = [
    (),
    (0,),
    (1,),
    (2, 0, 3),
    (3,),
    (7,),
    (2, 3),
    (33,),
    (5, 13),
    (2, 3, 4, 5),
    (1, 4, 1, 3),
]

shapes = st.one_of(st.sampled_from(SHAPES), st.sampled_from(EDGES[:9]).map(lambda size: (size,)))
layouts = st.integers(0, 4)


def rows_of(dtypes: Sequence[torch.dtype], max_size: int = 6) -> st.SearchStrategy[list[Row]]:
    types = st.sampled_from(dtypes)
    row = st.tuples(st.integers(0, 99), shapes, st.tuples(types, types, types), st.tuples(layouts, layouts, layouts))
    return st.lists(row, max_size=max_size)


factor = st.sampled_from([None, 0.0, 1.0, 2.0**-16, 1 / 3, -7.0, 2.0**120, 1e-42, math.inf, math.nan])


@pytest.fixture
def compiled(device: torch.device) -> None:
    if without_compiled(device):
        pytest.skip(without_compiled(device))


def agree(name: str, rows: Any, device: torch.device, *more: Any) -> None:
    """Both implementations, each on tensors of its own; the lists of the reference are watched for host reads, too."""
    one, other = make_call(name, rows, device, *more), make_call(name, rows, device, *more)
    kept = [bits(tensor).clone() for tensor in one.tensors()]
    with NoHostRead():
        results, wanted = one.run(ops), other.run(REFERENCE)
    assert len(results) == len(wanted)
    for index, (result, want) in enumerate(zip(results, wanted)):
        assert same_bits(result, want), f'{name}: result {index}'
        assert result.stride() == want.stride()
    outputs = {id(tensor) for tensor in one.outputs()}
    for tensor, old in zip(one.tensors(), kept):
        assert id(tensor) in outputs or torch.equal(bits(tensor), old), 'an input was written'


@pytest.mark.usefixtures('compiled')
@pytest.mark.parametrize('name', LISTED)
@settings(max_examples=60, deadline=None)
@given(rows=rows_of(FLOATS), factors=st.tuples(factor, factor), options=st.tuples(*[st.booleans()] * 5))
def test_parity(name: str, device: torch.device, rows: Any, factors: Any, options: Any) -> None:
    flag, per_tensor, special, *checks = options
    agree(name, rows, device, factors, flag, per_tensor, special, tuple(checks))


@pytest.mark.parametrize('name', [name for name in LISTED if name != 'multi_tensor_refresh'])
@settings(max_examples=30, deadline=None)
@given(rows=rows_of([*FLOATS, F64]), factors=st.tuples(factor, factor), options=st.tuples(*[st.booleans()] * 3))
def test_parity_with_float64_among_the_types(
    name: str, device: torch.device, rows: Any, factors: Any, options: Any
) -> None:
    # one float64 tensor sends the whole list to the reference; tensors of the other types must not notice
    agree(name, rows, device, factors, *options)


@pytest.mark.usefixtures('compiled')
@pytest.mark.parametrize('special', [False, True], ids=['finite', 'special'])
@pytest.mark.parametrize('name', LISTED)
def test_parity_over_blocks_and_chunks(name: str, special: bool, device: torch.device) -> None:
    for start in (0, 27):
        agree(name, seeded_rows(27, start), device, (1 / 3, -0.7), True, True, special)


@pytest.mark.usefixtures('compiled')
@pytest.mark.parametrize('name', LISTED)
def test_parity_over_hundreds_of_tensors(name: str, device: torch.device) -> None:
    rows: list[Row] = [
        (i, (i % 40,), (FLOATS[i % 3], FLOATS[i % 2], FLOATS[i // 2 % 3]), (i % 4, 0, 0)) for i in range(700)
    ]
    agree(name, rows, device, (0.3, 2.0), True, True)


@pytest.mark.usefixtures('compiled')
@pytest.mark.parametrize('name', ['multi_tensor_scale', 'multi_tensor_axpby', 'multi_tensor_copy'])
@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_parity_of_targets_that_go_around_the_caches(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Targets of 32 MiB and more are streamed; the second is aligned to 16 bytes and not to 64, the third is short."""
    size = (32 << 20) // dtype.itemsize
    results = []
    for where in (ops, REFERENCE):
        base = torch.zeros(size + 1000, dtype=dtype, device=device)
        place = -base.data_ptr() % 64 // dtype.itemsize
        targets = [base[place : place + size - 77], base[place + size - 72 : place + size - 5], base[-5:]]
        values = torch.linspace(-3, 70000, 4099, device=device)
        sources = [values.repeat(len(t) // 4099 + 1)[: len(t)] for t in targets]
        call = make_call(name, [], device, (1 / 3, 0.7))
        for key, value in call.arguments.items():
            if isinstance(value, list):
                call.arguments[key] = targets if key == 'targets' else sources
        call.run(where)
        results.append(base)
        del call, targets, sources
    assert same_bits(*results)


@pytest.mark.usefixtures('compiled')
@settings(max_examples=150, deadline=None)
@given(
    scale=st.one_of(st.sampled_from([0.0, 1.0, 2.0**-126, 2.0**127, 1e-45]), st.floats(2.0**-100, 2.0**100, width=32)),
    tracker=st.sampled_from([0, 1, 2, 5, 2**31 - 2, 2**31 - 1]),
    left=st.integers(0, 3),
    found=st.sampled_from([0.0, 1.0, 0.5, math.nan]),
    factors=st.tuples(st.sampled_from([2.0, 1.001, 1e30]), st.sampled_from([0.5, 1 / 3, 1e-40])),
    rule=st.tuples(st.sampled_from([1, 2, 2000, 2**31 - 1, 2**31, 2**40]), st.sampled_from([1, 2, 2**31, 2**40])),
    bounds=st.tuples(st.sampled_from([None, 0.1, 2.0**20]), st.sampled_from([None, 3.3, 2.0**24])),
)
def test_parity_of_update_scale(
    device: torch.device, scale: float, tracker: int, left: int, found: float, **rest: Any
) -> None:
    results = []
    for where in (ops, REFERENCE):
        tensors = state(device, scale, tracker, left)
        tensors[3].fill_(found)
        with NoHostRead():
            where.update_scale(*tensors, *rest['factors'], *rest['rule'], *rest['bounds'])
        results.append(tensors)
    assert all(same_bits(a, b) for a, b in zip(*results)), results


# -- axpby --------------------------------------------------------------------------------------------------------


def _once(value: Tensor) -> Tensor:
    return value.float().double()


@settings(max_examples=60, deadline=None)
@given(rows=rows_of(FLOATS), factors=st.tuples(*[st.sampled_from([None, 1.0, -1.0, 0.5, 1 / 3, 2.0**-16])] * 2))
def test_axpby_rounds_each_product_and_the_sum(device: torch.device, rows: Any, factors: Any) -> None:
    """The model in float64: products of two float32 are exact there, and so each step rounds once."""
    call = make_call('multi_tensor_axpby', rows, device, factors)
    wanted = []
    for x, y, target in zip(call.arguments['xs'], call.arguments['ys'], call.arguments['targets']):
        left, right = (t.double() * float(np.float32(1 if f is None else f)) for t, f in zip((x, y), factors))
        # the sum of two float32, rounded to float64 and then to float32, is the one rounded once
        wanted.append((_once(left) + _once(right)).float().to(target.dtype))
    for where in (ops, REFERENCE):
        call = make_call('multi_tensor_axpby', rows, device, factors)
        call.run(where)
        assert all(same_bits(target, want) for target, want in zip(call.arguments['targets'], wanted))


def test_axpby_does_not_contract_product_and_sum(device: torch.device) -> None:
    """With one rounding for both, the remainder of the product would be left over."""
    x = torch.full((70,), 1 + 2.0**-23, device=device)
    target = torch.empty_like(x)
    square = float(np.float32((1 + 2.0**-23) ** 2))
    ops.multi_tensor_axpby([x], [torch.full_like(x, -square)], [target], zero(device, 1 + 2.0**-23), None)
    assert target.unique().tolist() == [0.0]


@pytest.mark.parametrize(('check_x', 'check_y'), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize('value', [math.inf, math.nan])
def test_axpby_flags_the_lists_that_are_checked(
    check_x: bool, check_y: bool, value: float, device: torch.device
) -> None:
    for size in (3, 64, 1000, 40000):
        for in_x in (True, False):
            clean, bad = torch.ones(size, device=device), torch.ones(size, device=device)
            bad[-1] = value
            lists = [[clean, bad if in_x else clean], [clean, clean if in_x else bad]]
            found = zero(device)
            targets = [torch.zeros(size, device=device) for _ in range(2)]
            ops.multi_tensor_axpby(*lists, targets, None, None, found, check_x, check_y)
            assert found.item() == float(check_x if in_x else check_y)


# -- norms --------------------------------------------------------------------------------------------------------


def units(tensors: Sequence[Tensor], scaled: bool) -> float:
    """The largest relative error of a norm, in half units of float32 (2^-24).

    An element goes through its square, 16 rows, 6 levels of lanes, a tree of blocks and a tree of tensors, and is rounded
    at each. Terms are not negative, so relative errors do not grow by addition. The root halves that, and is rounded; so is
    the product with the inverse scale.
    """
    blocks = max(1, *(-(-tensor.numel() // 1024) for tensor in tensors))
    additions = 1 + 16 + 6 + math.ceil(math.log2(blocks)) + math.ceil(math.log2(max(len(tensors), 1)))
    return additions / 2 + 1 + scaled


def moderate(seed: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, layout: int) -> Tensor:
    tensor = random_tensor(seed, shape, dtype, device, layout)
    # squares must not underflow: the bound is about rounding
    return tensor if dtype is torch.float16 else tensor.mul_(2.0 ** (seed % 30 - 15))


def check_l2norm(where: Any, tensors: list[Tensor], device: torch.device, scale: float | None) -> None:
    total, each = where.multi_tensor_l2norm(tensors, None if scale is None else zero(device, scale), None, True)
    assert total.dtype is each.dtype is F32 and total.shape == () and each.shape == (len(tensors),)
    factor = 1.0 if scale is None else float(np.float32(scale))
    squares = [float(tensor.double().square().sum()) for tensor in tensors]
    for got, square, some in [(total, math.fsum(squares), tensors), *zip(each, squares, ([t] for t in tensors))]:
        exact = math.sqrt(square) * factor
        assert abs(got.item() - exact) <= exact * units(some, scale is not None) * 2.0**-24 * 1.0001


@pytest.mark.parametrize('where', [ops, REFERENCE], ids=['front', 'reference'])
@settings(max_examples=60, deadline=None)
@given(rows=rows_of(FLOATS, 9), scale=st.sampled_from([None, 2.0**-16, 1 / 3]))
def test_l2norm_is_within_its_bound(where: Any, device: torch.device, rows: Any, scale: float | None) -> None:
    tensors = [moderate(seed, shape, types[0], device, kinds[0]) for seed, shape, types, kinds in rows]
    if tensors:
        check_l2norm(where, tensors, device, scale)


@pytest.mark.parametrize('where', [ops, REFERENCE], ids=['front', 'reference'])
def test_l2norm_of_many_elements_is_within_its_bound(where: Any, device: torch.device) -> None:
    large = [
        moderate(i, (size,), FLOATS[i % 3], device, 0) for i, size in enumerate((3_000_001, 32768 * 33 + 1, *EDGES))
    ]
    check_l2norm(where, large, device, 1 / 3)
    check_l2norm(where, [moderate(i, (i % 70,), FLOATS[i % 3], device, 0) for i in range(2000)], device, None)


def test_l2norm_adds_in_the_order_of_the_planner(device: torch.device) -> None:
    """Each value is lost when it is added to a larger one by itself, and counts when its like are added first."""
    tiny = 2.0**-12
    # 1 in lane 0, row 0; in lane 32: 4096 squares of 2^-24 would be lost one by one, and half a unit is lost in any case
    one = torch.zeros(1024, device=device)
    one[0], one[64], one[128] = 1.0, tiny, tiny
    assert ops.multi_tensor_l2norm([one])[0].item() == 1.0
    one[0], one[32] = 0.0, 1.0
    # rows of lane 0 come before the other lanes
    assert ops.multi_tensor_l2norm([one])[0].item() == float(np.sqrt(np.float32(1 + 2.0**-23)))
    blocks = torch.zeros(4, 1024, device=device)
    blocks[0, 0], blocks[2, 0], blocks[3, 0] = 1.0, tiny, tiny
    assert ops.multi_tensor_l2norm([blocks])[0].item() == float(np.sqrt(np.float32(1 + 2.0**-23)))
    assert ops.multi_tensor_l2norm(list(blocks))[0].item() == float(np.sqrt(np.float32(1 + 2.0**-23)))
    blocks[1, 0], blocks[2, 0] = tiny, 0.0
    assert ops.multi_tensor_l2norm([blocks])[0].item() == 1.0


@pytest.mark.parametrize('where', [ops, REFERENCE], ids=['front', 'reference'])
def test_a_sum_that_overflows_raises_no_flag(where: Any, device: torch.device) -> None:
    tensors = [
        torch.full((7,), 1e19, device=device),
        torch.full((5000,), 1e19, device=device),
        torch.ones(3, device=device),
    ]
    found = zero(device)
    total, each = where.multi_tensor_l2norm(tensors, zero(device, 0.5), found, True)
    assert math.isinf(total.item()) and found.item() == 0.0
    assert torch.isinf(each).tolist() == [True, True, False]
    where.multi_tensor_l2norm([*tensors, torch.tensor([1.0, math.inf], device=device)], None, found)
    assert found.item() == 1.0


@settings(max_examples=60, deadline=None)
@given(rows=rows_of(FLOATS), scale=st.sampled_from([None, 2.0**-16, 1 / 3]), special=st.booleans())
def test_maxnorm_is_exact(device: torch.device, rows: Any, scale: float | None, special: bool) -> None:
    tensors = [random_tensor(seed, shape, types[0], device, kinds[0], special) for seed, shape, types, kinds in rows]
    found = zero(device)
    total, each = ops.multi_tensor_maxnorm(tensors, None if scale is None else zero(device, scale), found, True)
    most = [tensor.float().abs().max() if tensor.numel() else zero(device) for tensor in tensors]
    wanted = torch.stack(most) if most else torch.zeros(0, device=device)
    factor = zero(device, 1.0 if scale is None else scale)
    assert same_bits(each, wanted * factor)
    # torch's maximum of NaN and anything is NaN, that of nothing an error
    assert same_bits(total, (wanted.max() if most else zero(device)) * factor)
    assert found.item() == float(not all(tensor.isfinite().all() for tensor in tensors))


@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_nan_wins_over_infinity(dtype: torch.dtype, device: torch.device) -> None:
    for values in ([math.inf, math.nan], [math.nan, math.inf], [math.nan, 1.0], [-math.inf, math.nan, 2.0]):
        for padding in (0, 61, 40000):
            tensor = torch.tensor(values, dtype=dtype, device=device)
            tensor = torch.cat([tensor[:1], torch.ones(padding, dtype=dtype, device=device), tensor[1:]])
            for norm in NORMS:
                assert math.isnan(getattr(ops, norm)([torch.ones(2, device=device), tensor])[0].item())


@pytest.mark.parametrize('name', NORMS)
def test_norms_of_nothing(name: str, device: torch.device) -> None:
    norm = getattr(ops, name)
    total, each = norm([], None, zero(device), True)
    assert total.item() == 0.0 and each.shape == (0,) and total.device.type == each.device.type == device.type
    total, each = norm([torch.zeros(0, device=device), torch.ones(2, 0, device=device)], None, None, True)
    assert total.item() == 0.0 and each.tolist() == [0.0, 0.0]
    assert norm([torch.ones(3, device=device)])[1].shape == (0,)
