"""Ops over lists of tensors give what plain torch gives, with a compiled library and without one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import op_lists
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_lists import BF16, F16, F32, FLOATS, NoHostRead, random_tensor, same_bits, scalar
from torch import Tensor

from amp_wrapper import ops

F64 = torch.float64
Lists = list[list[Tensor]]
#: What an op gave, and what it should have given.
Results = list[tuple[Tensor, Tensor]]
Call = Callable[..., Any]
#: (seed, shape, types of three tensors, their layouts, whether there are special values).
Row = tuple[int, Sequence[int], tuple[torch.dtype, ...], tuple[int, ...], bool]

pytestmark = pytest.mark.usefixtures('with_and_without_ops')


def made(rows: Sequence[Row], device: torch.device) -> Lists:
    """Three lists with a tensor for each row."""
    return [
        [random_tensor(row[0] + 100 * i, row[1], row[2][i], device, row[3][i], row[4]) for row in rows]
        for i in range(3)
    ]


def is_bad(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    return scalar(device, float(not all(t.isfinite().all() for t in tensors)))


def times(tensor: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A product that is rounded to float32 (float64 in a float64 tensor), then to the type."""
    wide = F64 if dtype is F64 else F32
    return tensor.to(dtype) if factor is None else (tensor.to(wide) * factor.to(wide)).to(dtype)


def near(result: Tensor, exact: Tensor) -> None:
    """Equal to a float64 result but for float32 rounding of a sum of squares; not finite where that is not."""
    assert result.dtype is F32 and result.shape == exact.shape
    torch.testing.assert_close(result.double(), exact, rtol=2.0**-20, atol=1e-18, equal_nan=True)


def norms_of(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Of all, and of each, in float64."""
    squares = [t.double().square().sum() for t in tensors]
    each = torch.stack(squares) if squares else torch.zeros(0, dtype=F64, device=device)
    return each.sum().sqrt(), each.sqrt()


def scale(call: Call, lists: Lists, factors: Sequence[Tensor | None], found: Tensor) -> Results:
    sources, targets, _ = lists
    wanted = [times(s, factors[0], t.dtype) for s, t in zip(sources, targets)]
    call(ops.multi_tensor_scale, sources, targets, factors[0], found)
    return [*zip(targets, wanted), (found, is_bad(sources, found.device))]


def scale_l2norm(call: Call, lists: Lists, factors: Sequence[Tensor | None], found: Tensor) -> Results:
    sources, targets, _ = lists
    wanted = [times(s, factors[0], t.dtype) for s, t in zip(sources, targets)]
    norm = norms_of(sources, found.device)[0] * (1 if factors[0] is None else factors[0].double())
    near(call(ops.multi_tensor_scale_l2norm, sources, targets, factors[0], found), norm)
    return [*zip(targets, wanted), (found, is_bad(sources, found.device))]


def l2norm(call: Call, lists: Lists, factors: Sequence[Tensor | None], found: Tensor) -> Results:
    total, each = call(ops.multi_tensor_l2norm, lists[0], factors[0], found, per_tensor=True)
    for result, exact in zip((total, each), norms_of(lists[0], found.device)):
        near(result, exact if factors[0] is None else exact * factors[0].double())
    return [(found, is_bad(lists[0], found.device))]


def maxnorm(call: Call, lists: Lists, factors: Sequence[Tensor | None], found: Tensor) -> Results:
    total, each = call(ops.multi_tensor_maxnorm, lists[0], factors[0], found, per_tensor=True)
    most = [t.float().abs().max() if t.numel() else scalar(found.device) for t in lists[0]]
    factor = scalar(found.device, 1.0) if factors[0] is None else factors[0]
    wanted = torch.stack(most) if most else torch.zeros(0, device=found.device)
    # torch's maximum of NaN and anything is NaN
    whole = wanted.max() if most else scalar(found.device)
    return [(each, wanted * factor), (total, whole * factor), (found, is_bad(lists[0], found.device))]


def isnonfinite(call: Call, lists: Lists, factors: Sequence[Tensor | None], found: Tensor) -> Results:
    call(ops.multi_tensor_isnonfinite, lists[0], found)
    return [(found, is_bad(lists[0], found.device))]


def copy(call: Call, lists: Lists, factors: Sequence[Tensor | None], found: Tensor) -> Results:
    call(ops.multi_tensor_copy, lists[0], lists[1])
    return [(target, source.to(target.dtype)) for source, target in zip(*lists[:2])]


def axpby(call: Call, lists: Lists, factors: Sequence[Tensor | None], found: Tensor) -> Results:
    xs, ys, targets = lists
    wide = [F64 if F64 in (x.dtype, y.dtype) else F32 for x, y in zip(xs, ys)]
    wanted = [(times(x, factors[0], w) + times(y, factors[1], w)) for x, y, w in zip(xs, ys, wide)]
    wanted = [w.to(target.dtype) for w, target in zip(wanted, targets)]
    call(ops.multi_tensor_axpby, xs, ys, targets, factors[0], factors[1], found)
    return [*zip(targets, wanted), (found, is_bad([*xs, *ys], found.device))]


OPS: list[Callable[[Call, Lists, Sequence[Tensor | None], Tensor], Results]] = [
    *(scale, scale_l2norm, l2norm, maxnorm, isnonfinite, copy, axpby),
]


def watched(op: Call, *args: Any, **kwargs: Any) -> Any:
    with NoHostRead():
        return op(*args, **kwargs)


def plainly(op: Call, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def check(rows: Sequence[Row], factors: Sequence[float | None], device: torch.device, call: Call = plainly) -> None:
    """Every op on these lists gives the bits of its model, keeps strides, and leaves what it reads as it was."""
    wrong = []
    for op in OPS:
        lists = made(rows, device)
        # squares of what is too large for float32 are infinite
        if 'l2norm' in op.__name__:
            lists[0] = [t.clamp_(-1e18, 1e18) if t.dtype is not F16 else t for t in lists[0]]
        before = [[(t.clone(), t.stride()) for t in tensors] for tensors in lists]
        found = scalar(device)
        results = op(call, lists, [None if f is None else scalar(device, f) for f in factors], found)
        wrong += [f'{op.__name__} {i}: {a} {b}' for i, (a, b) in enumerate(results) if not same_bits(a, b)]
        written = {id(a) for a, _ in results}
        for tensor, (old, stride) in zip(itertools.chain(*lists), itertools.chain(*before)):
            if tensor.stride() != stride or not (id(tensor) in written or same_bits(tensor, old)):
                wrong.append(f'{op.__name__} changed an input or a layout')
    assert not wrong, wrong[:5]


_types = st.sampled_from(FLOATS)
_wide = st.sampled_from([*FLOATS, F64])
_shapes = st.one_of(st.sampled_from(op_lists.SHAPES), st.sampled_from(op_lists.EDGES[:9]).map(lambda size: (size,)))


def _rows(types: st.SearchStrategy[torch.dtype]) -> st.SearchStrategy[list[Row]]:
    layouts = st.integers(0, 4)
    three = (st.tuples(types, types, types), st.tuples(layouts, layouts, layouts))
    return st.lists(st.tuples(st.integers(0, 99), _shapes, *three, st.booleans()), max_size=5)


#: A mode that watches for host reads takes the ops another way.
_calls = st.sampled_from([plainly, watched])
_factors = st.sampled_from([None, 0.0, 1.0, 2.0**-16, 1 / 3, -7.0, 2.0**10])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.one_of(_rows(_types), _rows(_wide)), factors=st.tuples(_factors, _factors), call=_calls)
def test_ops_match_plain_torch(device: torch.device, rows: list[Row], factors: tuple[Any, ...], call: Call) -> None:
    """Without a host read, for all types, layouts, empty tensors, subnormal numbers, infinities and NaN."""
    check(rows, factors, device, call)


def test_ops_over_blocks_threads_and_hundreds_of_tensors(device: torch.device) -> None:
    def types(i: int) -> tuple[torch.dtype, ...]:
        return FLOATS[i % 3], FLOATS[i // 3 % 3], FLOATS[i // 9 % 3]

    large: list[Row] = [(i, (size,), types(i), (0, i % 5, i % 4), i % 2 == 0) for i, size in enumerate(op_lists.EDGES)]
    many: list[Row] = [(i, (i % 40,), types(i), (i % 4, 0, 0), False) for i in range(120)]
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            check(large, (1 / 3, -0.7), device)
    finally:
        torch.set_num_threads(before)
    check(many, (0.3, 2.0), device)


def test_large_targets_are_written_to_the_end(device: torch.device) -> None:
    """Targets of 32 MiB and more go around the caches; the second is aligned to 16 bytes and not to 64."""
    op_lists.skip_without_library(device)
    values = torch.linspace(-3, 70000, 4099, device=device)
    for dtype in (F32, BF16):
        size = (32 << 20) // dtype.itemsize
        base = torch.zeros(size + 1000, dtype=dtype, device=device)
        place = -base.data_ptr() % 64 // dtype.itemsize
        targets = [base[place : place + size - 77], base[place + size - 72 : place + size - 5]]
        sources = [values.repeat(len(t) // 4099 + 1)[: len(t)] for t in targets]
        ops.multi_tensor_scale(sources, targets, scalar(device, 1 / 3))
        wanted = torch.zeros_like(base)
        for target, source in zip(
            (wanted[place : place + size - 77], wanted[place + size - 72 : place + size - 5]), sources
        ):
            target.copy_(times(source, scalar(device, 1 / 3), dtype))
        assert same_bits(base, wanted)


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
            found = scalar(device)
            ops.multi_tensor_isnonfinite(tensors, found)
            if found.item() != 1.0:
                missed.append((value, dtype, shapes, bad, place))
    assert not missed


def test_flag_is_never_lowered(device: torch.device) -> None:
    bad = [torch.full((2,), math.inf, device=device, dtype=dtype) for dtype in FLOATS]
    for before in (1.0, 2.0):
        found = scalar(device, before)
        for tensors in ([torch.ones(3, device=device)], [], bad):
            ops.multi_tensor_isnonfinite(tensors, found)
            ops.multi_tensor_scale(tensors, [t.clone() for t in tensors], None, found)
            # a maximum: many bad tensors on top of a raised flag change nothing
            assert found.item() == before


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
    for norm in (ops.multi_tensor_l2norm, ops.multi_tensor_maxnorm):
        assert not norm([weight])[0].requires_grad
    x = torch.full((3,), 2.0, device=device, requires_grad=True)
    for write in (lambda y: ops.multi_tensor_copy([x.new_zeros(3)], [y]), lambda y: ops.multi_tensor_scale([x], [y])):
        y = x * 1
        z = (y * y).sum()
        write(y.detach())
        with pytest.raises(RuntimeError, match='modified by an inplace operation'):
            z.backward()


def test_copies_onto_themselves_are_no_writes_and_empty_lists_are_taken(device: torch.device) -> None:
    tensor, found = torch.tensor([1.0, math.nan], device=device), scalar(device)
    before = tensor._version, found._version
    ops.multi_tensor_copy([tensor], [tensor])
    ops.multi_tensor_copy([], [])
    ops.multi_tensor_scale([], [], scalar(device, 2.0), found)
    ops.multi_tensor_isnonfinite([], found)
    assert (tensor._version, found._version) == before
    for norm in (ops.multi_tensor_l2norm, ops.multi_tensor_maxnorm):
        total, each = norm([], None, found, per_tensor=True)
        assert total.item() == 0.0 and each.shape == (0,) and total.device.type == device.type
        assert norm([torch.ones(3, device=device)])[1].shape == (0,)
    source = torch.arange(6, device=device)
    targets = [torch.zeros(6, device=device), torch.zeros(6, device=device, dtype=torch.int32)]
    ops.multi_tensor_copy([source, source], targets)
    assert all(target.tolist() == [0, 1, 2, 3, 4, 5] for target in targets)


def test_default_dtype_of_the_process_changes_nothing(device: torch.device) -> None:
    torch.set_default_dtype(F64)
    try:
        results = [
            ops.multi_tensor_l2norm(t, None, None, True) for t in ([], [torch.ones(2, dtype=F32, device=device)])
        ]
    finally:
        torch.set_default_dtype(F32)
    assert all(tensor.dtype is F32 for pair in results for tensor in pair)


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
    limits=st.tuples(st.sampled_from([None, 1.0, 2.0**20]), st.sampled_from([None, 2.0, 2.0**24])),
)
def test_loss_scale_moves_by_its_rule(
    device: torch.device,
    scale: float,
    tracker: int,
    left: int,
    found: float,
    factors: tuple[float, float],
    counts: tuple[int, int],
    limits: tuple[Any, Any],
) -> None:
    """Growth after clean steps, hysteresis, floor and ceiling; a limit beyond the scale never moves it."""
    wanted = op_lists.moved_scale((scale, tracker, left), found > 0, (*factors, *counts, *limits))
    state = [scalar(device, scale), *(scalar(device, n, torch.int32) for n in (tracker, left))]
    with NoHostRead():
        ops.update_scale(*state, scalar(device, found), *factors, *counts, *limits)
    assert tuple(tensor.item() for tensor in state) == wanted and 0 < wanted[0] < math.inf
    assert [tensor.dtype for tensor in state] == [F32, torch.int32, torch.int32]
