"""The compiled ops of an optimizer step against float64, and against themselves.

Their arithmetic is float32 whatever the tensors are. So lists of all types, layouts and sizes give the bits that plain float32
lists give, rounded to their types; ``tests/optim/test_fused.py`` compares plain lists with torch's optimizers.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import op_lists
import pytest
import torch
from op_lists import BF16, F16, F32, FLOATS, HALVES, SHAPES, NoHostRead, joined, random_tensor, same_bits, scalar
from pairs import pairs
from torch import Tensor

from amp_wrapper import ops

pytestmark = pytest.mark.usefixtures('library')

KINDS = {'adam': ops.ADAM, 'sgd': ops.SGD}
STATES = {'adam': ('exp_avg', 'exp_avg_sq', 'max_exp_avg_sq'), 'sgd': ('momentum_buffer',)}
#: A decision that changes no gradient: taken, not scaled, not clipped.
PLAIN = (0.0, 1.0, 1.0, math.inf)


@dataclasses.dataclass
class Lists:
    """What an update works on. The last of the states may be missing: amsgrad's maximum, or the momentum."""

    grads: list[Tensor]
    params: list[Tensor]
    states: list[list[Tensor]]
    partners: list[Tensor]

    def written(self) -> list[Tensor]:
        return [*self.params, *itertools.chain(*self.states), *self.partners]


def table(name: str, flags: int, device: torch.device) -> Tensor:
    """Two groups of hyper-parameters; bits of ``flags``: maximize (1), decoupled decay or Nesterov (2)."""
    maximize, more = float(flags & 1), float(flags >> 1 & 1)
    if name == 'adam':
        groups = [[1e-2, 0.9, 0.999, 1e-8, 0.05, maximize, more], [3e-3, 0.3, 0.95, 1e-6, 0.0, 0.0, 1 - more]]
    else:
        groups = [[1e-1, 0.9, 0.1, more, 0.05, maximize, 0.0], [3e-2, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]]
    return torch.tensor(groups, dtype=torch.float64)


def prologue(
    name: str, steps: Sequence[Tensor], hyper: Tensor, device: torch.device, **given: Any
) -> tuple[Tensor, Tensor]:
    """The decision and the rows of a step; parameters belong to the groups of ``hyper`` by turns."""
    decision = torch.full((ops.DECISION,), -1.0, device=device)
    rows = torch.full((len(steps), ops.ROW), -1.0, device=device)
    groups = torch.arange(len(steps)) % len(hyper)
    rates, rated = given.pop('rates', []), given.pop('rated', [])
    ops.step_prologue(decision, rows, steps, hyper, groups, KINDS[name], rates, rated, **given)
    return decision, rows


def update(name: str, lists: Lists, rows: Tensor, decision: Tensor | Sequence[float]) -> None:
    """One step; numbers of a decision are skip, inverse scale, clip coefficient and limit."""
    if not isinstance(decision, Tensor):
        decision = torch.tensor([*decision, *[0.0] * (ops.DECISION - len(decision))], device=rows.device)
    if name == 'adam':
        most = lists.states[2] if len(lists.states) > 2 else []
        first, second = lists.states[:2]
        ops.fused_adam(lists.grads, lists.params, first, second, most, lists.partners, rows, decision)
    else:
        ops.fused_sgd(
            lists.grads, lists.params, lists.states[0] if lists.states else [], lists.partners, rows, decision
        )


def plain_lists(
    name: str, shapes: Sequence[Sequence[int]], device: torch.device, special: bool, seed: int = 0
) -> Lists:
    """Float32 tensors without gaps; second moments are not negative."""

    def column(which: int) -> list[Tensor]:
        made = [random_tensor(seed + i + 1000 * which, s, F32, device, 0, special) for i, s in enumerate(shapes)]
        return [t.abs_() for t in made] if which in (3, 4) else made

    count = len(STATES[name]) - seed % 2
    return Lists(column(0), column(1), [column(2 + i) for i in range(count)], [])


def rows_of(name: str, count: int, flags: int, device: torch.device) -> Tensor:
    """Some parameters take their first step, others a later one."""
    steps = [scalar(device, float(i % 3 * 50)) for i in range(count)]
    return prologue(name, steps, table(name, flags, device), device)[1]


# -- against plain float32 lists -------------------------------------------------------------------------------------


def test_groups_and_learning_rates_in_tensors_are_one_call(device: torch.device) -> None:
    """Each of 40 parameters takes the step that it takes alone, with the numbers of its group."""
    for name, flags in itertools.product(KINDS, range(4)):
        hyper, rate = table(name, flags, device), scalar(device, 0.25)
        whole = plain_lists(name, [(9,)] * 40, device, special=False, seed=flags)
        apart = plain_lists(name, [(9,)] * 40, device, special=False, seed=flags)
        steps = [scalar(device, float(i % 3)) for i in range(40)]
        with NoHostRead():
            decision, rows = prologue(name, steps, hyper, device, rates=[rate], rated=[1])
            update(name, whole, rows, decision)
        for i in range(40):
            own = hyper[i % 2 : i % 2 + 1].clone()
            if i % 2:
                own[0, 0] = 0.25
            decision, rows = prologue(name, [scalar(device, float(i % 3))], own, device)
            update(name, Lists([apart.grads[i]], [apart.params[i]], [[s[i]] for s in apart.states], []), rows, decision)
        assert all(map(same_bits, whole.written(), apart.written())), (name, flags)
        assert [step.item() for step in steps] == [i % 3 + 1.0 for i in range(40)]


#: (type of a parameter, type of what stands beside it): nothing, the parameter itself, a copy, or a remainder.
BESIDE: list[tuple[torch.dtype, torch.dtype | None]] = [
    *((F32, None), (F32, BF16), (BF16, torch.int16), (F16, torch.int16), (F32, F16), (BF16, None), (F16, None)),
]


@pairs(name=KINDS, flags=range(4), special=[False, True], start=range(3))
def test_types_layouts_and_partners(name: str, flags: int, special: bool, start: int, device: torch.device) -> None:
    """63 tensors go through all types of gradients, parameters, states and partners, in all layouts."""
    shapes = [SHAPES[(i + i // 11) % 11] for i in range(63)]
    plain = plain_lists(name, shapes, device, special, seed=63 * start)
    mixed = Lists([], [], [[] for _ in plain.states], [])
    rows = rows_of(name, 63, flags, device)
    for i in range(63):
        layout = functools.partial(_laid_out, layout=(i + i // 5) % 5)
        grad, param, *states = (column[i] for column in (plain.grads, plain.params, *plain.states))
        kind, beside = BESIDE[(i + start) % 7]
        grad.copy_(grad.to(FLOATS[i // 7 % 3]))
        mixed.grads.append(layout(grad, FLOATS[i // 7 % 3]))
        for column, state in zip(mixed.states, states):
            dtype = FLOATS[i // 3 % 3] if i % 3 == 0 else F32
            state.copy_(state.to(dtype))
            column.append(layout(state, dtype))
        if beside is torch.int16:
            # any bits are a master
            weight, remainder = layout(param, kind), layout(torch.zeros_like(param), torch.int16)
            remainder.copy_(torch.arange(remainder.numel(), device=device).view(remainder.shape) % 4000 - 2000)
            param.copy_(joined(weight, remainder))
            mixed.params.append(weight)
            mixed.partners.append(remainder)
            continue
        param.copy_(param.to(kind))
        mixed.params.append(layout(param, kind))
        mixed.partners.append(mixed.params[-1] if beside is None else layout(torch.zeros_like(param), beside))
    strides = [t.stride() for t in mixed.written()]
    update(name, plain, rows, PLAIN)
    with NoHostRead():
        update(name, mixed, rows, PLAIN)
    wrong = []
    for i, (param, mine, partner) in enumerate(zip(plain.params, mixed.params, mixed.partners)):
        if partner.dtype is torch.int16:
            exact = param.isfinite() & ((param.abs() >= 2.0**-16) | (param == 0))
            exact &= (param.abs() < 65520) | (mine.dtype is BF16)
            good = torch.equal(joined(mine, partner)[exact], param[exact])
        else:
            good = same_bits(mine, param.to(mine.dtype)) and same_bits(partner, param.to(partner.dtype))
        wrong += [] if good else [f'parameter {i}: {mine.dtype} beside {partner.dtype}']
    for column, mine_column in zip(plain.states, mixed.states):
        wrong += [f'state {i}' for i, (a, b) in enumerate(zip(column, mine_column)) if not same_bits(b, a.to(b.dtype))]
    assert not wrong and [t.stride() for t in mixed.written()] == strides


def _laid_out(tensor: Tensor, dtype: torch.dtype, layout: int) -> Tensor:
    return random_tensor(0, tuple(tensor.shape), dtype, tensor.device, layout).copy_(tensor)


def test_gradients_are_unscaled_then_clipped(device: torch.device) -> None:
    """The inverse scale, the coefficient of the norm, and the limit of each element: each product is rounded."""
    inverses, coefficients, limits = (1.0, 2.0**-16, 2.0**-140), (1.0, 0.37), (0.0, 1e-3, math.inf)
    for name, inverse, coefficient, limit in itertools.product(KINDS, inverses, coefficients, limits):
        rows = rows_of(name, len(SHAPES), 3, device)
        ours, wanted = (plain_lists(name, SHAPES, device, special=True, seed=5) for _ in range(2))
        factors = [scalar(device, factor) for factor in (inverse, coefficient)]
        wanted.grads = [(g * factors[0] * factors[1]).clamp(-limit, limit) for g in wanted.grads]
        update(name, ours, rows, (0.0, inverse, coefficient, limit))
        update(name, wanted, rows, PLAIN)
        assert all(map(same_bits, ours.written(), wanted.written())), (name, inverse, coefficient, limit)


@pytest.mark.parametrize('name', KINDS)
def test_large_tensors_take_the_steps_of_their_pieces(name: str, device: torch.device) -> None:
    """Over the edges of chunks, and with any number of threads."""
    sizes = [(size,) for size in (32769, 511, 2 * 32768 + 7, 513)]
    rows = rows_of(name, 4, 2, device)
    wanted = plain_lists(name, sizes, device, special=True)
    for i, begin in [(i, begin) for i, (size,) in enumerate(sizes) for begin in range(0, size, 5000)]:
        columns = (wanted.grads, wanted.params, *wanted.states)
        grads, params, *states = ([column[i][begin : begin + 5000]] for column in columns)
        update(name, Lists(grads, params, states, []), rows[i : i + 1], PLAIN)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            ours = plain_lists(name, sizes, device, special=True)
            update(name, ours, rows, PLAIN)
            assert all(map(same_bits, ours.written(), wanted.written())), threads
    finally:
        torch.set_num_threads(before)


def test_skipped_step_changes_no_bit(device: torch.device) -> None:
    for name, skip in itertools.product(KINDS, (1.0, math.nan)):
        lists = plain_lists(name, SHAPES, device, special=True)
        lists.partners = [param.to(BF16) for param in lists.params]
        for grad in lists.grads:
            grad.fill_(math.nan)
        kept = [tensor.clone() for tensor in lists.written()]
        update(name, lists, rows_of(name, len(SHAPES), 1, device), (skip, 1.0, 1.0, math.inf))
        assert all(map(same_bits, lists.written(), kept)), (name, skip)


# -- decisions --------------------------------------------------------------------------------------------------------


def test_prologue_decides_on_the_device(device: torch.device) -> None:
    """Skip, inverse scale, clip coefficient and limit, norm, scale after the step, and counts, against a model in float32."""
    wrong = []
    rule = (2.0, 0.5, 3, 2, 0.25, 2.0**20)
    founds, norms = (None, 0.0, 1.0, 0.5, math.nan), (None, 0.0, 0.7, 1e-30, 3e38, math.inf)
    scales = ((None, False), (3.0, False), (2.0**16, True), (2.0**20, True), (0.3, True))
    for i, (found, norm, (scale, moves)) in enumerate(itertools.product(founds, norms, scales)):
        max_norm, clip_value = (None if norm is None or i % 3 == 0 else 0.5), (None if i % 4 else 0.1)
        learned, tracker = (None if i % 5 else float(i % 2)), i % 4
        given: dict[str, Any] = dict(found_inf=found, norm=norm, scale=scale, learned=learned)
        given = {key: None if value is None else scalar(device, value) for key, value in given.items()}
        if moves:
            given |= {
                key: scalar(device, n, torch.int32)
                for key, n in (('growth_tracker', tracker), ('hysteresis_tracker', 1))
            }
            given |= dict(rule=tuple(map(float, rule)), counts=torch.tensor([7, 3, 1], device=device))
        steps = [scalar(device, 4.0)]
        with NoHostRead():
            decision, _ = prologue(
                'sgd', steps, table('sgd', 0, device), device, max_norm=max_norm, clip_value=clip_value, **given
            )
        skip = found is not None and found > 0
        with np.errstate(all='ignore'):
            inverse = np.float32(1) if scale is None else np.float32(1) / np.float32(scale)
            length = inverse if norm is None else np.float32(norm) * inverse
            coefficient = np.float32(1)
            if max_norm is not None:
                coefficient = min(coefficient, np.float32(1) / (length + np.float32(1e-6)) * np.float32(max_norm))
        after, *trackers = (scale, tracker, 1)
        if moves and scale is not None:
            signal = skip if learned is None else learned > 0
            after, *trackers = op_lists.moved_scale((scale, tracker, 1), signal, rule)
        shown_norm = math.nan if norm is None or skip else length
        counts = [8, 3 + skip, 2 * skip] if moves else [0, 0, 0]
        limit = math.inf if clip_value is None else clip_value
        wanted = torch.tensor(
            [skip, inverse, coefficient, limit, shown_norm, math.nan if after is None else after, *counts[1:]]
        )
        state = [given[key].item() for key in ('growth_tracker', 'hysteresis_tracker')] if moves else trackers
        if not same_bits(decision.cpu(), wanted) or state != trackers or steps[0].item() != 5.0 - skip:
            wrong.append((found, norm, scale, moves, decision.tolist(), wanted.tolist()))
        if moves and given['counts'].tolist() != counts:
            wrong.append((found, norm, scale, moves, given['counts'].tolist(), counts))
    assert not wrong, wrong[:3]


def test_bias_corrections_come_from_exact_powers(device: torch.device) -> None:
    """To the last bit of float32 or the one beside it, from the count alone: a resumed run has the same ones."""
    wrong = []
    for count, beta in itertools.product((1, 2, 10, 777, 10**5, 10**7), (0.5, 0.9, 0.999, 1 - 2.0**-20)):
        hyper = torch.tensor(
            [[1.0, 0.0, beta, 0.0, 0.0, 0.0, 0.0], [1.0, beta, 0.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64
        )
        decision, rows = prologue('adam', [scalar(device, count - 1.0) for _ in range(2)], hyper, device)
        # an average of 1 that stays where it is, as the gradient is 1, too
        one = [[torch.ones(1, device=device) for _ in range(2)] for _ in range(3)]
        weights = [torch.zeros(1, device=device) for _ in range(2)]
        update('adam', Lists(one[0], weights, one[1:], []), rows, decision)
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
    decision, rows = prologue('sgd', [scalar(device)], hyper, device)
    update('sgd', Lists([master], [weight], [], [remainder]), rows, decision)
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
        weight, remainder = every.to(torch.int16).view(dtype).to(device), torch.full((2**16,), lower, dtype=torch.int16)
        old = joined(weight, remainder.to(device))
        there = old.isfinite() & ((old.abs() >= 2.0**-16) | (dtype is BF16)) & ((old.abs() < 65520) | (dtype is BF16))
        lists = Lists([torch.zeros(2**16, device=device)], [weight], [], [remainder := remainder.to(device)])
        update('sgd', lists, rows, decision)
        assert torch.equal(joined(weight, remainder)[there], old[there])


# -- instruction sets -------------------------------------------------------------------------------------------------


def digests(device: torch.device) -> list[str]:
    """Of what every kernel of a step and of unscaling gives."""
    found = []
    for name, flags in itertools.product(KINDS, range(4)):
        lists = plain_lists(name, [(size,) for size in (5, 37, 64, 1000, 33000)], device, special=True, seed=flags)
        lists.grads = [grad.to(FLOATS[i % 3]) for i, grad in enumerate(lists.grads)]
        lists.partners = [param.to(HALVES[i % 2]) for i, param in enumerate(lists.params)]
        ops.multi_tensor_scale(lists.grads, lists.grads, scalar(device, 1 / 3), None)
        update(name, lists, rows_of(name, 5, flags, device), (0.0, 0.3, 0.7, 8.0))
        total = hashlib.sha256()
        for tensor in [*lists.grads, *lists.written()]:
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
