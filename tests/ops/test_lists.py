"""Ops over lists of tensors give what plain torch gives, with a compiled library and without one."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import op_lists
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_lists import BF16, F16, F32, FLOATS, HALVES, NoHostRead, random_tensor, same_bits, scalar, threads
from torch import Tensor

from amp_wrapper import ops

F64 = torch.float64
Lists = tuple[list[Tensor], list[Tensor]]
Factor = Tensor | None
#: (seed, shape, types of two tensors, their layouts, whether there are special values).
Row = tuple[int, Sequence[int], Sequence[torch.dtype], Sequence[int], bool]

pytestmark = pytest.mark.usefixtures('with_and_without_ops')


def times(tensor: Tensor, factor: Factor, dtype: torch.dtype) -> Tensor:
    """A product, rounded to float32 (float64 where either type is that), and then to the type."""
    wide = F64 if F64 in (tensor.dtype, dtype) else F32
    return (tensor if factor is None else tensor.to(wide) * factor.to(wide)).to(dtype)


def scale(lists: Lists, factors: Sequence[Factor], found: Tensor) -> list[Tensor]:
    wanted = [times(source, factors[0], target.dtype) for source, target in zip(*lists)]
    ops.multi_tensor_scale(*lists, factors[0], found)
    return wanted


def axpby(lists: Lists, factors: Sequence[Factor], found: Tensor) -> list[Tensor]:
    wanted = []
    for x, y in zip(*lists):
        wide = F64 if y.dtype is F64 else F32
        wanted.append((times(x, factors[0], wide) + times(y, factors[1], wide)).to(y.dtype))
    ops.multi_tensor_axpby(*lists, *factors, found)
    return wanted


def copy(lists: Lists, factors: Sequence[Factor], found: Tensor) -> list[Tensor]:
    wanted = [source.to(target.dtype) for source, target in zip(*lists)]
    ops.multi_tensor_copy(*lists)
    ops.multi_tensor_isnonfinite(lists[0], found)
    return wanted


def norms(lists: Lists, factors: Sequence[Factor], found: Tensor) -> list[Tensor]:
    """Squares of what is too large for float32 are infinite, so those are taken out."""
    small = [source.where(source.double().abs() < 1e18, 1.0) for source in lists[0]]
    # torch adds the numbers of a tensor one after the other
    rtol = 2.0**-20 if ops.serves(found.device) else 1e-5
    ends = (ops.multi_tensor_l2norm, 2, small), (ops.multi_tensor_maxnorm, math.inf, lists[0])
    for norm, order, tensors in ends:
        result = norm(tensors, factors[0], found)
        assert result.dtype is F32 and result.shape == ()
        numbers = torch.cat([torch.zeros(1, device=found.device), *(t.double().flatten() for t in tensors)])
        wanted = torch.linalg.vector_norm(numbers, order) * (1.0 if factors[0] is None else factors[0].double())
        torch.testing.assert_close(result, wanted.float(), rtol=rtol, atol=1e-18, equal_nan=True)
    return lists[1]


def check(rows: Sequence[Row], factors: Sequence[float | None], device: torch.device) -> None:
    """Every op on these lists gives the bits of its model, keeps strides, and leaves what it reads as it was."""
    for op in (scale, axpby, copy, norms):
        sources, targets = lists = tuple(
            [random_tensor(row[0] + 100 * i, row[1], row[2][i], device, row[3][i], row[4]) for row in rows]
            for i in (0, 1)
        )
        before, strides = [t.clone() for t in sources], [t.stride() for t in targets]
        found = scalar(device)
        wanted = op(lists, [None if f is None else scalar(device, f) for f in factors], found)
        wrong = [f'{i}: {a} {b}' for i, (a, b) in enumerate(zip(targets, wanted)) if not same_bits(a, b)]
        assert not wrong, (op, factors, wrong[:5])
        assert found.item() == float(not all(t.isfinite().all() for t in sources)), op
        assert all(map(same_bits, sources, before)) and [t.stride() for t in targets] == strides, op


_shapes = st.one_of(st.sampled_from(op_lists.SHAPES), st.sampled_from(op_lists.EDGES[:9]).map(lambda size: (size,)))
_factors = st.sampled_from([None, 0.0, 1.0, 2.0**-16, 1 / 3, -7.0, 2.0**10])


def _rows(types: Sequence[torch.dtype]) -> st.SearchStrategy[list[Row]]:
    layouts, dtypes = st.integers(0, 4), st.sampled_from(types)
    two = st.tuples(dtypes, dtypes), st.tuples(layouts, layouts)
    return st.lists(st.tuples(st.integers(0, 99), _shapes, *two, st.booleans()), max_size=5)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.one_of(_rows(FLOATS), _rows([*FLOATS, F64])), factors=st.tuples(_factors, _factors))
def test_ops_match_plain_torch(device: torch.device, rows: list[Row], factors: tuple[Any, ...]) -> None:
    """For all types, layouts, empty tensors, subnormal numbers, infinities and NaN."""
    check(rows, factors, device)


def test_ops_over_blocks_threads_and_hundreds_of_tensors(device: torch.device) -> None:
    large: list[Row] = [
        (i, (size,), (FLOATS[i % 3], FLOATS[i // 3 % 3]), (0, i % 5), i % 2 == 0)
        for i, size in enumerate(op_lists.EDGES)
    ]
    for count in (1, 3):
        with threads(count):
            check(large, (1 / 3, -0.7), device)
    check([(i, (i % 40,), (FLOATS[i % 3], F32), (i % 4, 0), False) for i in range(120)], (0.3, 2.0), device)


def test_norms_are_the_same_bits_with_any_number_of_threads(device: torch.device) -> None:
    """Wherever the tensors lie in memory, too."""
    op_lists.skip_without_library(device)
    found = set()
    for count, layout in itertools.product((1, 2, 3), (0, 3)):
        tensors = [random_tensor(i, (size,), FLOATS[i % 3], device, layout) for i, size in enumerate(op_lists.EDGES)]
        with threads(count):
            found.add(ops.multi_tensor_l2norm(tensors).item())
    assert len(found) == 1


# -- flags ----------------------------------------------------------------------------------------------------------


def test_huge_finite_values_are_no_overflow(device: torch.device) -> None:
    for dtype in (*FLOATS, F64):
        tensors = [torch.full((1000,), torch.finfo(dtype).max, device=device, dtype=dtype) for _ in range(3)]
        found = scalar(device)
        ops.multi_tensor_isnonfinite([*tensors, torch.full((3,), 3e38 + 3e38j, device=device)], found)
        ops.multi_tensor_scale(tensors, tensors, scalar(device, 4.0), found)
        # the product is infinite in float32, and the source was not
        assert found.item() == 0.0, dtype


def test_overflow_is_found_wherever_it_is(device: torch.device) -> None:
    """Beside empty tensors too: apex lost a launch where the last tensor of a list was empty."""
    missed = []
    real = [(value, dtype) for value in (math.nan, math.inf, -math.inf) for dtype in (*FLOATS, F64)]
    values = [*real, (complex(math.nan, 0), torch.complex64), (complex(0, math.inf), torch.complex64)]
    lists: list[list[tuple[int, ...]]] = [[(3,)], [(0,), (3,)], [(3,), (0,)], [(40,), (2, 0), (70,), (40000,)]]
    places = [(shapes, bad, place) for shapes in lists for bad in range(len(shapes)) for place in (0, -1)]
    for (value, dtype), (shapes, bad, place) in itertools.product(values, places):
        tensors = [torch.ones(shape, device=device, dtype=dtype) for shape in shapes]
        if tensors[bad].numel():
            tensors[bad][place] = value
            others = [torch.ones_like(tensor) for tensor in tensors]
            for name, arguments in (
                ('isnonfinite', ()),
                ('scale', (others, None)),
                ('axpby', (others, None, None)),
                ('l2norm', (None,)),
            ):
                found = scalar(device)
                getattr(ops, f'multi_tensor_{name}')(tensors, *arguments, found)
                if found.item() != 1.0:
                    missed.append((name, value, dtype, shapes, bad, place))
    assert not missed


def test_flag_is_never_lowered(device: torch.device) -> None:
    for bad, before in itertools.product((False, True), (1.0, 2.0)):
        found = scalar(device, before)
        tensors = [torch.full((2,), math.inf if bad else 1.0, device=device, dtype=dtype) for dtype in FLOATS]
        for listed in (tensors, []):
            ops.multi_tensor_isnonfinite(listed, found)
            ops.multi_tensor_l2norm(listed, None, found)
            ops.multi_tensor_maxnorm(listed, None, found)
            ops.multi_tensor_scale(listed, [t.clone() for t in listed], None, found)
            ops.multi_tensor_axpby(listed, [t.clone() for t in listed], None, None, found)
            # many bad tensors on top of a raised flag are no sum
            assert found.item() in (before, float(bad))


# -- memory ---------------------------------------------------------------------------------------------------------


def test_unscaling_into_a_narrow_type_rounds_the_product_only(device: torch.device) -> None:
    """A gradient of 70000 unscaled by 2^-16 is 1.07, whatever float16 can hold; 2049 and 2051 lie halfway."""
    target = torch.zeros(3, device=device, dtype=F16)
    ops.multi_tensor_scale([torch.tensor([70000.0, 1e38, -3.7], device=device)], [target], scalar(device, 2.0**-16))
    assert target.tolist() == [1.068359375, math.inf, torch.tensor(-3.7 * 2.0**-16).half().item()]
    ops.multi_tensor_scale([torch.tensor([2049.0, 2051.0, 65520.0], device=device)], [target])
    assert target.tolist() == [2048.0, 2052.0, math.inf]
    # a source may be expanded
    ops.multi_tensor_scale([scalar(device, 7.0).expand(3)], [target], scalar(device, 2.0))
    assert target.eq(14.0).all()


def test_targets_may_be_their_sources(device: torch.device) -> None:
    for dtype, layout in itertools.product((*FLOATS, F64), range(4)):
        tensors = [random_tensor(i, (5, 5), dtype, device, layout) for i in range(3)]
        wanted = [times(t, scalar(device, 0.25), dtype) for t in tensors]
        ops.multi_tensor_scale(tensors, tensors, scalar(device, 0.25), None)
        assert all(map(same_bits, tensors, wanted)), (dtype, layout)


def test_neighbours_in_one_buffer_are_no_overlap(device: torch.device) -> None:
    """DDP hands out gradients as views of one bucket, each beginning where the one before ends."""
    bucket = torch.arange(8.0, device=device)
    ops.multi_tensor_scale([bucket[:3], bucket[3:4]], [bucket[4:7], bucket[7:]], scalar(device, 2.0), None)
    assert bucket.tolist() == [0.0, 1.0, 2.0, 3.0, 0.0, 2.0, 4.0, 6.0]
    views = [bucket[:2], bucket[2:4]]
    ops.multi_tensor_scale(views, views, scalar(device, 3.0), None)
    assert bucket.tolist() == [0.0, 3.0, 6.0, 9.0, 0.0, 2.0, 4.0, 6.0]


def test_parameters_are_written_and_autograd_notices(device: torch.device) -> None:
    weight = torch.ones(2, device=device, dtype=F16, requires_grad=True)
    ops.multi_tensor_copy([torch.full((2,), 3.0, device=device, requires_grad=True)], [weight])
    assert weight.tolist() == [3.0, 3.0] and weight.grad_fn is None and weight.requires_grad
    assert not ops.multi_tensor_l2norm([weight]).requires_grad and not ops.multi_tensor_maxnorm([weight]).requires_grad
    x = torch.full((3,), 2.0, device=device, requires_grad=True)
    unscale = functools.partial(ops.multi_tensor_scale, scale=scalar(device, 2.0), found_inf=scalar(device))
    for write in (ops.multi_tensor_copy, ops.multi_tensor_scale, ops.multi_tensor_axpby, unscale):
        y = x * 1
        z = (y * y).sum()
        target = y.detach()
        write([target if write is unscale else x], [target])
        with pytest.raises(RuntimeError, match='modified by an inplace operation'):
            z.backward()


def test_copies_onto_themselves_are_no_writes_and_empty_lists_are_taken(device: torch.device) -> None:
    tensor, found = torch.tensor([1.0, math.nan], device=device), scalar(device)
    before = tensor._version, found._version
    ops.multi_tensor_copy([tensor], [tensor])
    for write in (ops.multi_tensor_copy, ops.multi_tensor_scale, ops.multi_tensor_axpby):
        write([], [])
    ops.multi_tensor_isnonfinite([], found)
    assert (tensor._version, found._version) == before
    assert ops.multi_tensor_l2norm([], None, found).item() == ops.multi_tensor_maxnorm([], None, found).item() == 0.0
    source = torch.arange(6, device=device)
    targets = [torch.zeros(6, device=device), torch.zeros(6, device=device, dtype=torch.int32)]
    ops.multi_tensor_copy([source, source], targets)
    assert all(target.tolist() == [0, 1, 2, 3, 4, 5] for target in targets)


def test_masters_take_what_is_not_their_rounding(device: torch.device) -> None:
    """Bit for bit, in one batch or several; a NaN is that of its master, whatever its payload."""
    for dtype in HALVES:
        masters = [torch.linspace(-3, 3, size, device=device) for size in (5, 2**22, 1, 0)]
        masters[0].view(torch.int32)[2] = 0x7FC00123
        weights = [master.to(dtype) for master in masters]
        weights[0][1], weights[1][-1], weights[2][0] = 7.0, -0.0, math.nan
        weights[0].view(torch.int16)[2] ^= 1
        wanted = [master.clone() for master in masters]
        wanted[0][1], wanted[1][-1], wanted[2][0] = 7.0, -0.0, math.nan
        ops.refresh_masters(zip(weights, masters))
        assert all(map(same_bits, masters, wanted)), dtype
        assert not any(bool(ops.differ(weight, master).any()) for weight, master in zip(weights, masters))


def test_sparse_and_dense_gradients_are_added(device: torch.device) -> None:
    dense = torch.tensor([1.0, 2.0], device=device)
    assert ops.add_gradients(None, dense) is dense and ops.add_gradients(dense, None) is dense
    assert ops.add_gradients(None, None) is None
    for dtype in (F16, BF16, F32):
        sparse = torch.tensor([0.0, 0.5], device=device, dtype=dtype).to_sparse()
        for pair in ((sparse, dense), (dense, sparse)):
            total = ops.add_gradients(*pair)
            assert total is not None and total.dtype is F32 and total.tolist() == [1.0, 2.5]
        both = ops.add_gradients(sparse, sparse)
        assert both is not None and both.is_sparse and both.dtype is dtype and both.to_dense().tolist() == [0.0, 1.0]


# -- the loss scale -------------------------------------------------------------------------------------------------

_TINY, _TOP = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    scale=st.one_of(st.sampled_from([1.0, 2.0**16, _TINY, _TOP, 3.0]), st.floats(2.0**-100, 2.0**100, width=32)),
    tracker=st.sampled_from([0, 1, 2, 5, 2**31 - 2]),
    left=st.integers(0, 4),
    found=st.sampled_from([0.0, 1.0, 0.5, math.nan]),
    factors=st.tuples(st.sampled_from([2.0, 1.001, 1e30]), st.sampled_from([0.5, 1 / 3, 1e-40])),
    counts=st.tuples(st.sampled_from([1, 2, 6, 2**31 - 1]), st.integers(1, 4)),
    limits=st.tuples(st.sampled_from([_TINY, 1.0, 2.0**20]), st.sampled_from([math.inf, 2.0, 2.0**24])),
)
def test_loss_scale_moves_by_its_rule(
    device: torch.device,
    scale: float,
    tracker: int,
    left: int,
    found: float,
    factors: tuple[float, float],
    counts: tuple[int, int],
    limits: tuple[float, float],
) -> None:
    """Growth after clean steps, hysteresis, floor and ceiling; a limit beyond the scale never moves it."""
    wanted = op_lists.moved_scale((scale, tracker, left), found > 0, (*factors, *counts, *limits))
    state = [scalar(device, scale), *(scalar(device, n, torch.int32) for n in (tracker, left))]
    with NoHostRead():
        ops.update_scale(*state, scalar(device, found), *factors, *counts, *limits)
    assert tuple(tensor.item() for tensor in state) == wanted and 0 < wanted[0] < math.inf
    assert [tensor.dtype for tensor in state] == [F32, torch.int32, torch.int32]
