"""Every op against a model in float64 or element by element. Parity with the reference: test_ops_parity.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_models import FLOATS, HALVES, NoHostRead, random_tensor, same_bits, zero
from torch import Tensor

from amp_wrapper import ops

SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (2, 0, 3), (3,), (7,), (2, 3), (33,), (1, 1, 5)]
WIDTH = {torch.float16: 1, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}

shapes = st.sampled_from(SHAPES)
dtypes = st.sampled_from(FLOATS)
bad_values = st.sampled_from([math.nan, math.inf, -math.inf])


lists = st.lists(st.tuples(st.integers(0, 99), shapes, dtypes, st.integers(0, 3)), max_size=5)


def poison(tensors: Sequence[Tensor], index: int, value: float) -> bool:
    """Write ``value`` somewhere; False where every tensor is empty."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return False
    target = filled[index % len(filled)]
    position = np.unravel_index(index % target.numel(), target.shape) if target.dim() else ()
    # of its own type: torch 2.6 takes no number that is too large for it
    target[tuple(int(i) for i in position)] = torch.tensor(value, dtype=torch.float64).to(target.dtype)
    return True


# -- finiteness ---------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(spec=lists, where=st.integers(0, 500), value=bad_values)
def test_isnonfinite(device: torch.device, spec: list[Any], where: int, value: float) -> None:
    tensors = [random_tensor(seed, shape, dtype, device, layout) for seed, shape, dtype, layout in spec]
    found = zero(device)
    with NoHostRead():
        ops.multi_tensor_isnonfinite(tensors, found)
    assert found.item() == 0.0
    poisoned = poison(tensors, where, value)
    with NoHostRead():
        ops.multi_tensor_isnonfinite(tensors, found)
    assert found.item() == float(poisoned)


def test_flag_stays_one(device: torch.device) -> None:
    found = zero(device, 1.0)
    ops.multi_tensor_isnonfinite([torch.ones(3, device=device)], found)
    ops.multi_tensor_isnonfinite([], found)
    assert found.item() == 1.0
    bad = [torch.full((2,), math.inf, device=device, dtype=dtype) for dtype in FLOATS]
    # the flag is a maximum: three bad groups on top of a raised flag are still exactly 1
    ops.multi_tensor_isnonfinite(bad, found)
    assert found.item() == 1.0


@pytest.mark.parametrize('dtype', [*FLOATS, torch.float64], ids=str)
def test_huge_finite_values_are_no_overflow(dtype: torch.dtype, device: torch.device) -> None:
    tensors = [torch.full((1000,), torch.finfo(dtype).max, device=device, dtype=dtype) for _ in range(3)]
    assert math.isinf(tensors[0].sum().item())
    found = zero(device)
    ops.multi_tensor_isnonfinite(tensors, found)
    ops.multi_tensor_scale(tensors, tensors, None, found)
    assert found.item() == 0.0


def test_huge_finite_complex_values_are_no_overflow(device: torch.device) -> None:
    found = zero(device)
    ops.multi_tensor_isnonfinite([torch.full((3,), 3e38 + 3e38j, device=device, dtype=torch.complex64)], found)
    assert found.item() == 0.0


@pytest.mark.parametrize('value', [complex(math.nan, 0), complex(0, math.inf)])
def test_nonfinite_complex(value: complex, device: torch.device) -> None:
    found = zero(device)
    ops.multi_tensor_isnonfinite([torch.tensor([1 + 1j, value], device=device)], found)
    assert found.item() == 1.0


@pytest.mark.parametrize(
    'empties', [[(0,)], [(0,), (2, 0)], [(3,), (0,)], [(0,), (3,)], [(3,), (0,), (3,), (0,)]], ids=str
)
def test_empty_tensors_hide_nothing(empties: list[tuple[int, ...]], device: torch.device) -> None:
    # apex lost the pending launch when the last tensor of a list was empty
    tensors = [torch.ones(shape, device=device) for shape in empties]
    found = zero(device)
    ops.multi_tensor_isnonfinite(tensors, found)
    assert found.item() == 0.0
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            clean = [t.clone() for t in tensors]
            clean[index][-1] = math.nan
            found = zero(device)
            ops.multi_tensor_isnonfinite(clean, found)
            assert found.item() == 1.0
            targets = [torch.zeros_like(t) for t in clean]
            ops.multi_tensor_scale(clean, targets, zero(device, 2.0), None)
            assert all(same_bits(target, source * 2) for source, target in zip(clean, targets))


# -- scale and copy -----------------------------------------------------------------------------------------------

pairs = st.lists(st.tuples(st.integers(0, 99), shapes, dtypes, dtypes, st.integers(0, 3)), max_size=5)


@settings(max_examples=60, deadline=None)
@given(spec=pairs, scale=st.sampled_from([None, 1.0, 2.0**-16, 0.3, 1 / 3, 7.0, 2.0**10]), check=st.booleans())
def test_scale_into_types_at_least_as_wide(
    device: torch.device, spec: list[Any], scale: float | None, check: bool
) -> None:
    sources, targets, expected = [], [], []
    for seed, shape, source_type, target_type, layout in spec:
        if source_type is not target_type and WIDTH[target_type] <= WIDTH[source_type]:
            target_type = torch.float32
        source = random_tensor(seed, shape, source_type, device, layout)
        sources.append(source)
        targets.append(torch.full(shape, 9.0, device=device, dtype=target_type))
        # a product of two float32 is exact in float64, so this rounds once
        product = source.double() if scale is None else source.double() * float(np.float32(scale))
        expected.append(product.float().to(target_type))
    kept = [source.clone() for source in sources]
    found = zero(device) if check else None
    with NoHostRead():
        ops.multi_tensor_scale(sources, targets, None if scale is None else zero(device, scale), found)
    assert all(same_bits(target, want) for target, want in zip(targets, expected))
    assert all(same_bits(source, old) for source, old in zip(sources, kept))
    assert found is None or found.item() == 0.0


@pytest.mark.parametrize('target_type', HALVES, ids=str)
@pytest.mark.parametrize('source_type', [torch.float32, torch.bfloat16], ids=str)
def test_scale_into_a_narrower_type_rounds_the_product_only(
    source_type: torch.dtype, target_type: torch.dtype, device: torch.device
) -> None:
    """A gradient of 70000 unscaled by 2^-16 is 1.07, whatever float16 can hold."""
    sources = [torch.tensor([70000.0, 1e38, 2.0**-30, -3.7], device=device).to(source_type)]
    targets = [torch.zeros(4, device=device, dtype=target_type)]
    ops.multi_tensor_scale(sources, targets, zero(device, 2.0**-16), None)
    assert same_bits(targets[0], (sources[0].float() * 2.0**-16).to(target_type))


@pytest.mark.parametrize('dtype', [*FLOATS, torch.float64], ids=str)
def test_scale_in_place(dtype: torch.dtype, device: torch.device) -> None:
    tensor = torch.tensor([1.5, -2.0, 0.0, 3.0], device=device, dtype=dtype)
    ops.multi_tensor_scale([tensor], [tensor], zero(device, 0.25), None)
    assert same_bits(tensor, torch.tensor([0.375, -0.5, 0.0, 0.75], device=device, dtype=dtype))


def test_scale_flags_sources_not_products(device: torch.device) -> None:
    found = zero(device)
    target = torch.zeros(2, device=device)
    ops.multi_tensor_scale([torch.full((2,), 3e38, device=device)], [target], zero(device, 4.0), found)
    assert torch.isinf(target).all() and found.item() == 0.0
    ops.multi_tensor_scale([torch.tensor([1.0, math.nan], device=device)], [target], zero(device, 0.5), found)
    assert found.item() == 1.0 and target[0].item() == 0.5 and math.isnan(target[1].item())


@settings(max_examples=60, deadline=None)
@given(spec=pairs, where=st.integers(0, 500), value=st.one_of(bad_values, st.sampled_from([65519.9, 65520.0, 1e-8])))
def test_copy(device: torch.device, spec: list[Any], where: int, value: float) -> None:
    sources = [random_tensor(seed, shape, source, device, layout) for seed, shape, source, _, layout in spec]
    poison(sources, where, value)
    targets = [torch.zeros(shape, device=device, dtype=target) for _, shape, _, target, _ in spec]
    with NoHostRead():
        ops.multi_tensor_copy(sources, targets)
    for source, target in zip(sources, targets):
        rounded = torch.from_numpy(source.float().cpu().numpy()).to(target.dtype).to(device)
        assert same_bits(target, rounded)


def test_copy_rounds_to_nearest_even(device: torch.device) -> None:
    # 2049 and 2051 lie halfway between float16 neighbours
    target = torch.zeros(4, device=device, dtype=torch.float16)
    ops.multi_tensor_copy([torch.tensor([2049.0, 2051.0, 65519.0, 65520.0], device=device)], [target])
    assert target.tolist() == [2048.0, 2052.0, 65504.0, math.inf]


def test_copy_onto_itself_and_nothing(device: torch.device) -> None:
    tensor = torch.tensor([1.0, math.nan], device=device)
    version = tensor._version
    ops.multi_tensor_copy([tensor], [tensor])
    ops.multi_tensor_copy([], [])
    ops.multi_tensor_scale([], [], zero(device, 2.0), zero(device))
    assert tensor._version == version


@pytest.mark.parametrize('name', ['multi_tensor_copy', 'multi_tensor_scale', 'multi_tensor_refresh'])
@pytest.mark.parametrize(
    ('left', 'right', 'words'),
    [
        ([(2,)], [], ('1 tensors', '0')),
        ([], [(2,), (3,)], ('0 tensors', '2')),
        ([(2,), (2, 3)], [(2,), (3, 2)], ('[1]', '(2, 3)', '(3, 2)')),
        ([(1,)], [(3,)], ('[0]', '(1,)', '(3,)')),
        ([()], [(1,)], ('[0]', '()', '(1,)')),
    ],
    ids=str,
)
def test_lists_must_pair_up(name: str, left: list[Any], right: list[Any], words: tuple[str, ...], device: Any) -> None:
    sources = [torch.ones(shape, device=device, dtype=torch.float16) for shape in left]
    targets = [torch.zeros(shape, device=device) for shape in right]
    more = (None, None) if name == 'multi_tensor_scale' else ()
    with pytest.raises(ValueError) as caught:
        getattr(ops, name)(sources, targets, *more)
    for word in words:
        assert word in str(caught.value)
    assert not any(target.any() for target in targets)


def test_ops_take_what_requires_grad(device: torch.device) -> None:
    weight = torch.ones(2, device=device, dtype=torch.float16, requires_grad=True)
    master = torch.full((2,), 3.0, device=device, requires_grad=True)
    ops.multi_tensor_copy([master], [weight])
    assert weight.tolist() == [3.0, 3.0] and weight.grad_fn is None
    assert not ops.multi_tensor_refresh([weight], [master])[0].item()
    assert master.requires_grad and master.grad_fn is None


# -- refresh ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 99),
    shape=shapes,
    dtype=st.sampled_from(HALVES),
    edits=st.lists(st.tuples(st.integers(0, 200), st.sampled_from([0.0, -0.0, 1.5, math.inf, math.nan])), max_size=3),
)
def test_refresh(device: torch.device, seed: int, shape: tuple[int, ...], dtype: torch.dtype, edits: Any) -> None:
    master = random_tensor(seed, shape, torch.float32, device, 0)
    weight = master.to(dtype)
    for where, value in edits:
        poison([weight], where, value)
    rounded = master.to(dtype)
    kept = weight.clone()
    differs = rounded.view(torch.int16) != weight.view(torch.int16)
    expected = torch.where(differs, weight.float(), master)
    with NoHostRead():
        (flag,) = ops.multi_tensor_refresh([weight], [master])
    assert flag.dtype is torch.bool and flag.shape == ()
    assert flag.item() == bool(differs.any())
    assert same_bits(master, expected) and same_bits(weight, kept)


def test_refresh_sees_the_sign_of_zero(device: torch.device) -> None:
    master, weight = torch.tensor([0.0, 1e-9], device=device), torch.tensor([-0.0, 0.0], device=device).half()
    flags = ops.multi_tensor_refresh([weight], [master])
    assert flags[0].item() and math.copysign(1.0, master[0].item()) == -1.0
    # below what float16 holds, the master stays: 1e-9 rounds to the 0.0 that is there
    assert master[1].item() == pytest.approx(1e-9)


def test_refresh_flags_each_pair(device: torch.device) -> None:
    masters = [torch.tensor([0.1], device=device), torch.zeros(0, device=device), torch.tensor([0.1], device=device)]
    weights = [masters[0].half(), masters[1].bfloat16(), torch.tensor([0.5], device=device).bfloat16()]
    assert [flag.item() for flag in ops.multi_tensor_refresh(weights, masters)] == [False, False, True]
    assert masters[0].item() == pytest.approx(0.1, rel=1e-7) and masters[2].item() == 0.5
    assert ops.multi_tensor_refresh([], []).shape == (0,)


# -- update_scale -------------------------------------------------------------------------------------------------

TINY = np.finfo(np.float32).tiny
TOP = np.finfo(np.float32).max


@settings(max_examples=200, deadline=None)
@given(
    scale=st.one_of(
        st.sampled_from([1.0, 2.0**16, float(TINY), float(TOP), 3.0]), st.floats(2.0**-100, 2.0**100, width=32)
    ),
    tracker=st.integers(0, 5),
    left=st.integers(0, 4),
    bad=st.booleans(),
    growth=st.sampled_from([2.0, 1.001, 3.0, 1e10]),
    backoff=st.sampled_from([0.5, 0.999, 0.3, 1e-10]),
    interval=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
    floor=st.sampled_from([None, 1.0, 2.0**20]),
    ceiling=st.sampled_from([None, 2.0, 2.0**24]),
)
def test_update_scale(
    device: torch.device,
    scale: float,
    tracker: int,
    left: int,
    bad: bool,
    growth: float,
    backoff: float,
    interval: int,
    hysteresis: int,
    floor: float | None,
    ceiling: float | None,
) -> None:
    now = np.float32(scale)
    with np.errstate(over='ignore', under='ignore'):
        if bad:
            want_left, want_tracker = max(left - 1, 0), 0
            lowered = max(np.float32(now * np.float32(backoff)), np.float32(TINY if floor is None else floor))
            want = now if want_left > 0 else min(now, lowered)
        else:
            want_left, want, want_tracker = hysteresis, now, tracker + 1
            if want_tracker >= interval:
                want_tracker = 0
                raised = np.float32(now * np.float32(growth))
                if ceiling is not None:
                    raised = min(raised, np.float32(ceiling))
                want = max(now, raised) if np.isfinite(raised) else now
    state = torch.tensor(scale, device=device)
    growth_tracker = torch.tensor(tracker, dtype=torch.int32, device=device)
    hysteresis_tracker = torch.tensor(left, dtype=torch.int32, device=device)
    with NoHostRead():
        ops.update_scale(
            state,
            growth_tracker,
            hysteresis_tracker,
            zero(device, float(bad)),
            growth,
            backoff,
            interval,
            hysteresis,
            floor,
            ceiling,
        )
    assert state.item() == float(want) and state.dtype is torch.float32
    assert (growth_tracker.item(), hysteresis_tracker.item()) == (want_tracker, want_left)
    assert growth_tracker.dtype is hysteresis_tracker.dtype is torch.int32
    assert 0 < state.item() < math.inf


def test_backend_says_what_runs() -> None:
    assert isinstance(ops.backend(), str) and ops.backend()
    own = {
        name
        for name, value in vars(ops).items()
        if getattr(value, '__module__', None) in (ops.__name__, ops.reference.__name__) and not name.startswith('_')
    }
    # functions know where they were written, numbers do not
    assert set(ops.__all__) == own | {'ADAM', 'COMPILED_DTYPES', 'DECISION', 'EXPONENTS', 'HYPER', 'ROW', 'SGD'}
