"""The compiled steps of optimizers against themselves: lists of all kinds give the bits of plain float32 lists.

Their arithmetic is float32 whatever the tensors are. ``tests/optim/test_fused.py`` compares them with torch's optimizers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from typing import Any

import numpy as np
import op_lists
import pytest
import torch
from op_lists import (
    BF16,
    F16,
    F32,
    FLOATS,
    HALVES,
    SHAPES,
    NoHostRead,
    joined,
    random_tensor,
    same_bits,
    scalar,
    threads,
)
from pairs import pairs
from torch import Tensor

from amp_wrapper import ops

pytestmark = pytest.mark.usefixtures('library')

KINDS = ('adam', 'sgd')


@dataclasses.dataclass
class Lists:
    """What a step works on: amsgrad's maximum, or the momentum, may be missing from the states; SGD counts no steps."""

    grads: list[Tensor]
    params: list[Tensor]
    states: list[list[Tensor]]
    steps: list[Tensor]
    partners: list[Tensor] = dataclasses.field(default_factory=list)

    def written(self) -> list[Tensor]:
        return [*self.params, *itertools.chain(*self.states), *self.steps, *self.partners]


def plain_lists(name: str, shapes: Any, device: torch.device, special: bool = False, seed: int = 0) -> Lists:
    """Float32 tensors without gaps, that take their first step or a later one; second moments are not negative."""

    def column(which: int) -> list[Tensor]:
        made = [random_tensor(seed + i + 1000 * which, s, F32, device, 0, special) for i, s in enumerate(shapes)]
        return [t.abs_() for t in made] if which in (3, 4) else made

    states = [column(2 + i) for i in range((3 if name == 'adam' else 1) - seed % 2)]
    steps = [scalar(device, float(i % 3 * 50)) for i in range(len(shapes))] if name == 'adam' else []
    return Lists(column(0), column(1), states, steps)


def table(name: str, flags: int = 0) -> Tensor:
    """Two groups of hyper-parameters; bits of ``flags``: maximize (1), decoupled decay or Nesterov (2)."""
    maximize, more = float(flags & 1), float(flags >> 1 & 1)
    if name == 'adam':
        groups = [[1e-2, 0.9, 0.999, 1e-8, 0.05, maximize, more], [3e-3, 0.3, 0.95, 1e-6, 0.0, 0.0, 1 - more]]
    else:
        groups = [[1e-1, 0.9, 0.1, more, 0.05, maximize, 0.0], [3e-2, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]]
    return torch.tensor(groups, dtype=torch.float64)


def step(name: str, lists: Lists, hyper: Tensor, **given: Any) -> Tensor:
    """Decide on a step and take it, without a host read: parameters belong to the groups of ``hyper`` by turns."""
    decision = torch.full((ops.DECISION,), -1.0, device=lists.params[0].device)
    rest = (decision, hyper, torch.arange(len(lists.params)) % len(hyper))
    with NoHostRead():
        if name == 'adam':
            first, second, *most = lists.states
            states = first, second, most[0] if most else [], lists.steps
            ops.fused_adam(lists.grads, lists.params, *states, lists.partners, *rest, **given)
        else:
            (momentum,) = lists.states or [[]]
            ops.fused_sgd(lists.grads, lists.params, momentum, lists.partners, *rest, **given)
    return decision


# -- against plain float32 lists -------------------------------------------------------------------------------------


def test_groups_and_learning_rates_in_tensors_are_one_call(device: torch.device) -> None:
    """Each of 40 parameters takes the step that it takes alone, with the numbers of its group."""
    for name, flags in itertools.product(KINDS, range(4)):
        whole, apart = (plain_lists(name, [(9,)] * 40, device, seed=flags) for _ in range(2))
        hyper = table(name, flags)
        step(name, whole, hyper, rates=[scalar(device, 0.25)], rated=[1])
        hyper[1, 0] = 0.25
        for i in range(40):
            grads, params, steps = ([c[i]] if c else [] for c in (apart.grads, apart.params, apart.steps))
            step(name, Lists(grads, params, [[s[i]] for s in apart.states], steps), hyper[i % 2 :][:1])
        assert all(map(same_bits, whole.written(), apart.written())), (name, flags)
        assert [s.item() for s in whole.steps] == [i % 3 * 50 + 1.0 for i in range(len(whole.steps))]


#: (type of a parameter, type of what stands beside it): nothing, the parameter itself, a copy, or a remainder.
BESIDE: list[tuple[torch.dtype, torch.dtype | None]] = [
    *((F32, None), (F32, BF16), (BF16, torch.int16), (F16, torch.int16), (F32, F16), (BF16, None), (F16, None))
]


@pairs(name=KINDS, flags=range(4), special=[False, True], start=range(3))
def test_types_layouts_and_partners(name: str, flags: int, special: bool, start: int, device: torch.device) -> None:
    """63 tensors go through all types of gradients, parameters, states and partners, in all layouts without gaps."""
    plain = plain_lists(name, [SHAPES[(i + i // 11) % 11] for i in range(63)], device, special, seed=63 * start)
    mixed = Lists([], [], [[] for _ in plain.states], [s.clone() for s in plain.steps])
    for i, (grad, param) in enumerate(zip(plain.grads, plain.params)):
        kind, beside = BESIDE[(i + start) % 7]

        def laid_out(tensor: Tensor, dtype: torch.dtype, layout: int = (0, 1, 3, 4)[(i + i // 5) % 4]) -> Tensor:
            # the values that both sides begin with
            tensor.copy_(tensor.to(dtype))
            return random_tensor(0, tuple(tensor.shape), dtype, device, layout).copy_(tensor)

        mixed.grads.append(laid_out(grad, FLOATS[i // 7 % 3]))
        for column, states in zip(mixed.states, plain.states):
            column.append(laid_out(states[i], FLOATS[i // 3 % 3] if i % 3 == 0 else F32))
        mixed.params.append(laid_out(param, kind))
        mixed.partners.append(mixed.params[i] if beside is None else laid_out(torch.zeros_like(param), beside))
        if beside is torch.int16:
            # any bits are a master
            remainder = mixed.partners[i]
            remainder.copy_(torch.arange(remainder.numel(), device=device).view(remainder.shape) % 4000 - 2000)
            param.copy_(joined(mixed.params[i], remainder))
    strides = [t.stride() for t in mixed.written()]
    for lists in (plain, mixed):
        step(name, lists, table(name, flags))
    wrong = []
    for i, (param, mine, partner) in enumerate(zip(plain.params, mixed.params, mixed.partners)):
        if partner.dtype is torch.int16:
            exact = param.isfinite() & ((param.abs() >= 2.0**-16) | (param == 0))
            exact &= (param.abs() < 65520) | (mine.dtype is BF16)
            good = torch.equal(joined(mine, partner)[exact], param[exact])
        else:
            good = same_bits(mine, param.to(mine.dtype)) and same_bits(partner, param.to(partner.dtype))
        wrong += [] if good else [f'parameter {i}: {mine.dtype} beside {partner.dtype}']
    for column, mine_column in zip([*plain.states, plain.steps], [*mixed.states, mixed.steps]):
        wrong += [f'state {i}' for i, (a, b) in enumerate(zip(column, mine_column)) if not same_bits(b, a.to(b.dtype))]
    assert not wrong and [t.stride() for t in mixed.written()] == strides


def test_gradients_are_unscaled_then_clipped(device: torch.device) -> None:
    """The inverse scale, the coefficient of the norm, and the limit of each element: each product is rounded."""
    ways = itertools.product(KINDS, (None, 2.0**16, 2.0**126), (None, 0.37, 3.0), (0.0, 1e-3, None))
    for name, scale, max_norm, limit in ways:
        ours, wanted = (plain_lists(name, SHAPES, device, special=True, seed=5) for _ in range(2))
        given = dict(scale=scale and scalar(device, scale), norm=scalar(device, 1.0 if scale is None else scale))
        decision = step(name, ours, table(name, 3), **given, max_norm=max_norm, clip_value=limit)
        assert decision[1] == 1 / (scale or 1) and decision[2].item() == pytest.approx(
            min(max_norm or 1.0, 1.0), rel=1e-5
        )
        most = math.inf if limit is None else limit
        wanted.grads = [(g * decision[1] * decision[2]).clamp(-most, most) for g in wanted.grads]
        step(name, wanted, table(name, 3))
        assert all(map(same_bits, ours.written(), wanted.written())), (name, scale, max_norm, limit)


@pytest.mark.parametrize('name', KINDS)
def test_large_tensors_take_the_steps_of_their_pieces(name: str, device: torch.device) -> None:
    """Over the edges of chunks, and with any number of threads."""
    sizes = (32769, 511, 2 * 32768 + 7, 513)
    wanted = plain_lists(name, [(size,) for size in sizes], device, special=True)
    for i, begin in [(i, begin) for i, size in enumerate(sizes) for begin in range(0, size, 5000)]:
        grads, params, *states = ([c[i][begin : begin + 5000]] for c in (wanted.grads, wanted.params, *wanted.states))
        steps = [wanted.steps[i].clone()] if wanted.steps else []
        step(name, Lists(grads, params, states, steps), table(name, 2)[i % 2 :][:1])
    for taken in wanted.steps:
        taken.add_(1)
    for count in (1, 2, 3):
        ours = plain_lists(name, [(size,) for size in sizes], device, special=True)
        with threads(count):
            step(name, ours, table(name, 2))
        assert all(map(same_bits, ours.written(), wanted.written())), count


def test_skipped_step_changes_no_bit(device: torch.device) -> None:
    for name, found in itertools.product(KINDS, (1.0, 0.5, math.inf)):
        lists = plain_lists(name, SHAPES, device, special=True)
        lists.partners = [param.to(BF16) for param in lists.params]
        lists.grads = [torch.full_like(grad, math.nan) for grad in lists.grads]
        kept = [tensor.clone() for tensor in lists.written()]
        assert step(name, lists, table(name, 1), found_inf=scalar(device, found))[0] == 1.0
        assert all(map(same_bits, lists.written(), kept)), (name, found)


# -- decisions --------------------------------------------------------------------------------------------------------


def test_decision_is_taken_on_the_device(device: torch.device) -> None:
    """Skip, inverse scale, clip coefficient and limit, norm, scale after the step, and counts, against a model in float32."""
    wrong = []
    rule = (2.0, 0.5, 3, 2, 0.25, 2.0**20)
    founds, norms = (None, 0.0, 1.0, 0.5, math.nan), (None, 0.0, 0.7, 1e-30, 3e38, math.inf)
    scales = ((None, False), (3.0, False), (2.0**16, True), (2.0**20, True), (0.3, True))
    for i, (found, norm, (scale, moves)) in enumerate(itertools.product(founds, norms, scales)):
        max_norm, clip_value = (None if norm is None or i % 3 == 0 else 0.5), (None if i % 4 else 0.1)
        learned, tracker = (None if i % 5 else float(i % 2)), i % 4
        numbers = dict(found_inf=found, norm=norm, scale=scale, learned=learned)
        given: dict[str, Any] = {key: v if v is None else scalar(device, v) for key, v in numbers.items()}
        state = [scalar(device, count, torch.int32) for count in (tracker, 1)]
        counts = torch.tensor([7, 3, 1], device=device)
        if moves:
            given |= dict(growth_tracker=state[0], hysteresis_tracker=state[1], rule=[*map(float, rule)], counts=counts)
        lists = plain_lists('adam', [(2,)], device)
        decision = step('adam', lists, table('adam'), max_norm=max_norm, clip_value=clip_value, **given)
        skip = found is not None and found > 0
        with np.errstate(all='ignore'):
            inverse = np.float32(1) if scale is None else np.float32(1) / np.float32(scale)
            length = inverse if norm is None else np.float32(norm) * inverse
            coefficient = np.float32(1)
            if max_norm is not None:
                coefficient = min(coefficient, np.float32(1) / (length + np.float32(1e-6)) * np.float32(max_norm))
        moved = (scale, tracker, 1)
        if moves and scale is not None:
            moved = op_lists.moved_scale((scale, tracker, 1), skip if learned is None else learned > 0, rule)
        counted = [8, 3 + skip, 2 * skip] if moves else [7, 0, 0]
        wanted = torch.tensor(
            [
                *(skip, inverse, coefficient, math.inf if clip_value is None else clip_value),
                *(math.nan if norm is None or skip else length, math.nan if scale is None else moved[0], *counted[1:]),
            ]
        )
        after = [tensor.item() for tensor in state]
        good = same_bits(decision.cpu(), wanted) and after == [*moved[1:]] and lists.steps[0].item() == 1.0 - skip
        if not good or (moves and counts.tolist() != counted):
            wrong.append((found, norm, scale, moves, decision.tolist(), wanted.tolist(), after, counts.tolist()))
    assert not wrong, wrong[:3]


def test_bias_corrections_come_from_exact_powers(device: torch.device) -> None:
    """To the last bit of float32 or the one beside it, from the count alone: a resumed run has the same ones."""
    wrong = []
    for count, beta in itertools.product((1, 2, 10, 777, 10**5, 10**7), (0.5, 0.9, 0.999, 1 - 2.0**-20)):
        hyper = torch.tensor([[1.0, 0.0, beta, 0.0, 0, 0, 0], [1.0, beta, 0.0, 0.0, 0, 0, 0]], dtype=torch.float64)
        # averages of 1 that stay where they are, as the gradient is 1, too
        grads, *states = ([torch.ones(1, device=device) for _ in range(2)] for _ in range(3))
        weights = [torch.zeros(1, device=device) for _ in range(2)]
        step('adam', Lists(grads, weights, states, [scalar(device, count - 1.0) for _ in range(2)]), hyper)
        correction = -math.expm1(count * math.log1p(-(1 - beta)))
        for weight, exact in zip(weights, (-math.sqrt(correction), -1 / correction)):
            if abs(weight.item() / exact - 1) > 2.0**-22:
                wrong.append((count, beta, weight.item(), exact))
    assert not wrong


# -- masters in two halves --------------------------------------------------------------------------------------------

#: Lower halves of a float32 at, just below and just above a tie of a 16-bit type, and between.
ENDINGS = (0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xA5C3, 0xFFFF)


@pytest.mark.parametrize('dtype', HALVES, ids=str)
def test_split_masters_are_exact(dtype: torch.dtype, device: torch.device) -> None:
    """SGD at a rate of -1 from zero writes its gradient: every upper half of a float32 with endings of all kinds."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    master = torch.cat([every * 2**16 + ending for ending in ENDINGS]).view(F32).to(device)
    weight, remainder = torch.zeros_like(master, dtype=dtype), torch.zeros_like(master, dtype=torch.int16)
    hyper = torch.tensor([[-1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    step('sgd', Lists([master], [weight], [], [], [remainder]), hyper)
    result, size = joined(weight, remainder), master.abs()
    exact = ~master.isnan() if dtype is BF16 else (size >= 2.0**-16) & (size < 65520)
    # a sum with zero has no negative zero
    assert torch.equal(result[exact], master[exact]) and exact.sum() > 100_000
    assert ((result.double() - master.double()).abs()[~exact & (size < 1)] <= 2.0**-40).all()
    assert weight[master.isnan()].isnan().all() and torch.equal(result[size == math.inf], master[size == math.inf])
    # to the nearest; where two are as near, bfloat16 goes away from zero and float16 to the even one
    tie = ((master.view(torch.int32) & 0xFFFF) == 0x8000) & (dtype is BF16)
    assert torch.equal(weight[exact & ~tie], master.to(dtype)[exact & ~tie])
    assert (weight[exact & tie].float().abs() > size[exact & tie]).all()
    # weights and remainders of all kinds are read as they are written
    for lower in (0, 1, -1, 1000, -1000):
        weight = every.to(torch.int16).view(dtype).to(device)
        remainder = torch.full((2**16,), lower, dtype=torch.int16, device=device)
        old = joined(weight, remainder)
        there = old.isfinite() & ((old.abs() >= 2.0**-16) | (dtype is BF16)) & ((old.abs() < 65520) | (dtype is BF16))
        step('sgd', Lists([torch.zeros(2**16, device=device)], [weight], [], [], [remainder]), hyper)
        assert torch.equal(joined(weight, remainder)[there], old[there])


# -- instruction sets -------------------------------------------------------------------------------------------------


def digests(device: torch.device) -> list[str]:
    """Of what every kernel gives."""
    found = []
    for name, flags in itertools.product(KINDS, range(4)):
        lists = plain_lists(name, [(size,) for size in (5, 37, 64, 1000, 33000)], device, special=True, seed=flags)
        lists.grads = [grad.to(FLOATS[i % 3]) for i, grad in enumerate(lists.grads)]
        lists.partners = [param.to(HALVES[i % 2]) for i, param in enumerate(lists.params)]
        sums = [grad.clone() for grad in lists.grads]
        ops.multi_tensor_axpby(lists.params, sums, scalar(device, 0.3), scalar(device, 1 / 3))
        ops.multi_tensor_scale(lists.grads, lists.grads, scalar(device, 1 / 3))
        norm = ops.multi_tensor_l2norm([t.where(t.double().abs() < 1e18, 1.0) for t in lists.params])
        step(name, lists, table(name, flags), norm=norm, scale=scalar(device, 3.0), max_norm=0.7, clip_value=8.0)
        total = hashlib.sha256()
        for tensor in [norm, *lists.grads, *sums, *lists.written()]:
            # which NaN comes out of many, processors choose
            total.update(tensor.float().nan_to_num(12345.0).cpu().numpy().tobytes())
        found.append(total.hexdigest())
    return found


@pytest.mark.parametrize('capability', ['avx2', pytest.param('default', marks=pytest.mark.long)])
def test_instruction_sets_give_the_same_bits(capability: str, device: torch.device, other_process: Any) -> None:
    if device.type != 'cpu' or torch.backends.cpu.get_cpu_capability().lower() not in ('avx512', 'avx2'):
        pytest.skip('this processor has no other instruction set')
    found = other_process(capability)
    # torch 2.6 calls it so
    assert found['capability'].lower().replace('no avx', 'default') == capability
    assert found['digests'] == digests(device)
