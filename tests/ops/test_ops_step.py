"""The ops of an optimizer step: compiled against the reference, bit for bit, and both against torch and float64."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ops_models import (
    ENDINGS,
    HALVES,
    REFERENCE,
    UPDATES,
    Call,
    NoHostRead,
    bits,
    hyper_of,
    prologue_call,
    random_tensor,
    same_bits,
    update_call,
    without_compiled,
    zero,
)
from torch import Tensor

from amp_wrapper import ops
from amp_wrapper.ops import split

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
#: Around the width of vectors; each meets every type, copy and layout.
SHAPES: list[tuple[int, ...]] = [(1,), (0,), (7,), (3, 5), (16,), (), (17,), (2, 3, 4, 5), (31,), (33,), (6, 8)]


@pytest.fixture
def compiled(device: torch.device) -> None:
    if without_compiled(device):
        pytest.skip(without_compiled(device))


def agree(make: Callable[[], Call]) -> Call:
    """Both implementations, each on tensors of its own."""
    one, other = make(), make()
    kept = [(bits(tensor).clone(), tensor._version) for tensor in one.tensors()]
    with NoHostRead():
        results, wanted = one.run(ops), other.run(REFERENCE)
    for index, (result, want) in enumerate(zip(results, wanted, strict=True)):
        assert same_bits(result, want), f'{one.name}: result {index}, {result} and {want}'
        assert result.stride() == want.stride()
    outputs = {id(tensor) for tensor in one.outputs()}
    for tensor, (old, version) in zip(one.tensors(), kept):
        if id(tensor) in outputs:
            assert tensor._version > version
        else:
            assert torch.equal(bits(tensor), old) and tensor._version == version, 'an input was written'
    return one


# -- parity -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures('compiled')
@pytest.mark.parametrize('special', [False, True], ids=['finite', 'special'])
@pytest.mark.parametrize('name', UPDATES)
def test_updates_agree(name: str, special: bool, device: torch.device) -> None:
    """63 tensors go through all types of gradients, parameters, copies and states, and layouts; the flags by turns."""
    for flags in range(8):
        start = 63 * flags if special else 21 * flags
        shapes = [SHAPES[(i + i // 11) % 11] for i in range(63 if flags % 7 == 0 else 21)]
        agree(functools.partial(update_call, name, shapes, device, flags, special, start=start))


@pytest.mark.usefixtures('compiled')
@pytest.mark.parametrize('name', UPDATES)
def test_updates_agree_over_chunks_and_threads(name: str, device: torch.device) -> None:
    sizes = [(size,) for size in (32769, 511, 2 * 32768 + 7, 513)]
    before = torch.get_num_threads()
    try:
        wanted = agree(lambda: update_call(name, sizes, device, 1, True)).outputs()
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            call = update_call(name, sizes, device, 1, True)
            assert all(same_bits(a, b) for a, b in zip(call.run(ops), wanted, strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures('compiled')
@pytest.mark.parametrize('name', UPDATES)
@pytest.mark.parametrize('limit', [0.0, 1e-3, math.inf])
@pytest.mark.parametrize('inverse', [1.0, 2.0**-16, 2.0**-140])
def test_factors_and_limits_agree(name: str, inverse: float, limit: float, device: torch.device) -> None:
    def make() -> Call:
        call = update_call(name, SHAPES, device, 3, True, start=7)
        call.arguments['decision'][1:4] = torch.tensor([inverse, 0.37, limit])
        return call

    agree(make)


@pytest.mark.parametrize('face', [ops, REFERENCE], ids=['front', 'reference'])
@pytest.mark.parametrize('skip', [1.0, math.nan])
@pytest.mark.parametrize('name', UPDATES)
def test_a_skipped_step_leaves_every_bit_alone(name: str, skip: float, face: Any, device: torch.device) -> None:
    """With gradients that are not finite: they would spoil everything. What was written is counted all the same."""
    call = update_call(name, [SHAPES[i % 11] for i in range(63)], device, 1, True, skip)
    for grad in call.arguments['grads']:
        grad.fill_(math.nan)
    kept = [(bits(tensor).clone(), tensor._version) for tensor in call.outputs()]
    call.run(face)
    assert all(torch.equal(bits(t), old) and t._version > was for t, (old, was) in zip(call.outputs(), kept))


STEP_COUNTS = [0.0, 1.0, 2.0, 1000.0, 123456.0, 2.0**24, 2.0**24 - 1, 2.0**40, 0.5, -3.0, math.inf, math.nan, 1e-40]
BETAS = (0.0, 0.5, 0.9, 0.999, 0.9999999, 1 - 2.0**-40, 1 - 2.0**-53)


@pytest.mark.usefixtures('compiled')
def test_rows_agree(device: torch.device) -> None:
    adam = [
        [lr, first, second, eps, decay, float(i % 2), float(i % 3 == 0)]
        for i, (lr, (first, second), eps, decay) in enumerate(
            itertools.product((1e-3, 0.0), itertools.product(BETAS, BETAS[::2]), (1e-8,), (0.0, 0.1))
        )
    ]
    hyper = torch.tensor(adam, dtype=torch.float64)
    counts = [STEP_COUNTS[i // len(adam) % len(STEP_COUNTS)] for i in range(len(adam) * len(STEP_COUNTS))]
    agree(lambda: prologue_call('fused_adam', counts, device, hyper=hyper, rate=0.3))
    for flags, found in itertools.product(range(8), (None, 0.0, 1.0, math.nan)):
        for name in UPDATES:
            rate = 2e-4 if flags & 1 else None
            agree(functools.partial(prologue_call, name, STEP_COUNTS, device, flags, found=found, rate=rate))


@pytest.mark.usefixtures('compiled')
def test_decisions_agree(device: torch.device) -> None:
    founds = (None, 0.0, 1.0, 0.5, math.nan)
    norms = (None, 0.0, 0.7, 1e-30, 3e38, math.inf, math.nan)
    scales = ((None, False), (3.0, False), (2.0**16, True), (1e-40, True), (2.0**20, True), (0.3, True))
    for index, (found, norm, (scale, dynamic)) in enumerate(itertools.product(founds, norms, scales)):
        limits = (None if norm is None or index % 3 == 0 else 0.5, None if index % 4 else 0.1)
        learned = None if index % 5 else float(index % 2)
        more: dict[str, Any] = dict(
            found=found, scale=scale, dynamic=dynamic, norm=norm, limits=limits, learned=learned, tracker=index % 4
        )
        agree(functools.partial(prologue_call, 'fused_sgd', [0.0, 4.0], device, **more))


def test_corrections_are_those_of_exact_powers(device: torch.device) -> None:
    """From the count alone, to the last bit or the one beside it: float64 powers are good to 2^-53, and so is the fraction."""
    for count, beta in itertools.product((1, 2, 10, 777, 10**5, 10**7), (0.5, 0.9, 0.999, 1 - 2.0**-20)):
        hyper = torch.tensor([[1.0, beta, beta, 1e-8, 0.0, 0.0, 0.0]], dtype=torch.float64)
        call = prologue_call('fused_adam', [float(count - 1)], device, hyper=hyper)
        call.run(ops)
        exact = -math.expm1(count * math.log1p(-(1 - beta)))
        assert call.arguments['steps'][0].item() == count
        row = call.arguments['rows'][0].tolist()
        assert row[5] == pytest.approx(math.sqrt(exact), rel=2.0**-23)
        assert row[7] == pytest.approx(-1 / exact, rel=2.0**-23)


# -- numbers in two halves ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures('compiled')
@pytest.mark.parametrize('dtype', HALVES, ids=str)
def test_every_upper_half_is_split_and_joined_as_the_reference_does(dtype: torch.dtype, device: torch.device) -> None:
    """SGD at a rate of -1 from zero writes its gradient, and at a rate of 0 what it joined."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    wide = torch.cat([every * 2**16 + ending for ending in ENDINGS]).view(F32).to(device)
    decision = torch.tensor([0.0, 1.0, 1.0, math.inf, 0.0, 0.0, 0.0, 0.0], device=device)
    row = torch.zeros(1, ops.ROW, device=device)
    row[0, 0], row[0, 5] = 1.0, 1.0
    weight, remainder = torch.zeros_like(wide, dtype=dtype), torch.zeros_like(wide, dtype=torch.int16)
    ops.fused_sgd([wide], [weight], [], [remainder], row, decision)
    wanted = split.split(wide + 0.0, dtype)
    assert same_bits(weight, wanted[0]) and torch.equal(remainder, wanted[1])
    joined = split.join(*wanted)
    # what is promised: exact but for tiny and huge numbers in float16
    size = wide.abs()
    exact = ~wide.isnan() if dtype is BF16 else (size >= 2.0**-16) & (size < 65520)
    assert torch.equal(joined[exact], wide[exact]) and exact.sum() > 100_000
    tiny = ~exact & (size < 1) & (wide == wide)
    assert ((joined.double() - wide.double()).abs()[tiny] <= 2.0**-40).all()
    # every weight with remainders of any kind; the product of the rate is -0, which changes no sum
    row[0, 5] = -0.0
    weights = every.to(torch.int16).view(dtype).to(device)
    for lower in (0, 1, -1, 4096, -4096, 0x7FFF, -0x8000):
        weight, remainder = weights.clone(), torch.full_like(weights, lower, dtype=torch.int16)
        wanted = split.split(split.join(weight, remainder), dtype)
        ops.fused_sgd([torch.zeros_like(weights, dtype=F32)], [weight], [], [remainder], row, decision)
        assert same_bits(weight, wanted[0]) and torch.equal(remainder, wanted[1])


# -- against torch, and against float64 ---------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    'Adam': (torch.optim.Adam, dict(lr=1e-2, weight_decay=0.1)),
    'AMSGrad': (torch.optim.Adam, dict(lr=1e-2, amsgrad=True, maximize=True, betas=(0.3, 0.9))),
    'AdamW': (torch.optim.AdamW, dict(lr=1e-2)),
    'SGD': (torch.optim.SGD, dict(lr=0.1, weight_decay=0.01)),
    'Momentum': (torch.optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.3, maximize=True)),
    'Nesterov': (torch.optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True)),
}


@pytest.mark.parametrize('name', list(OPTIMIZERS))
def test_steps_are_those_of_torchs_fused_optimizers(name: str, device: torch.device) -> None:
    """The same bits where torch uses vectors with one rounding for product and sum; within a few roundings elsewhere."""
    kind, options = OPTIMIZERS[name]
    # torch's remainders of a vector are rounded twice
    params = [random_tensor(i, (size,), F32, device) for i, size in enumerate((16, 64, 70_000 // 16 * 16))]
    ours = [param.clone() for param in params]
    theirs = [torch.nn.Parameter(param.clone()) for param in params]
    optimizer = kind(theirs, fused=True, **options)
    group = optimizer.param_groups[0]
    maximize = float(group['maximize'])
    if 'betas' in group:
        decoupled = float(kind is torch.optim.AdamW)
        numbers = [group['lr'], *group['betas'], group['eps'], group['weight_decay'], maximize, decoupled]
    else:
        numbers = [group[key] for key in ('lr', 'momentum', 'dampening', 'nesterov', 'weight_decay')]
        numbers += [maximize, 0.0]
    hyper = torch.tensor([[float(number) for number in numbers]], dtype=torch.float64)
    groups = torch.zeros(len(params), dtype=torch.int64)
    decision, rows = torch.zeros(ops.DECISION, device=device), torch.zeros(len(params), ops.ROW, device=device)
    steps = [zero(device) for _ in params]
    states = [[torch.zeros_like(param) for param in params] for _ in range(3)]
    exact = device.type == 'cpu' and torch.backends.cpu.get_cpu_capability() in ('AVX2', 'AVX512')
    for index in range(5):
        grads = [random_tensor(50 * index + i, tuple(param.shape), F32, device) for i, param in enumerate(params)]
        for parameter, grad in zip(theirs, grads):
            parameter.grad = grad.clone()
        optimizer.step()
        if 'betas' in group:
            ops.step_prologue(decision, rows, steps, hyper, groups, ops.ADAM)
            most = states[2] if group['amsgrad'] else []
            ops.fused_adam(grads, ours, states[0], states[1], most, [], rows, decision)
        else:
            ops.step_prologue(decision, rows, steps, hyper, groups, ops.SGD)
            ops.fused_sgd(grads, ours, states[0] if group['momentum'] else [], [], rows, decision)
        for mine, parameter in zip(ours, theirs):
            if exact:
                assert same_bits(mine, parameter.detach())
            else:
                torch.testing.assert_close(mine, parameter.detach(), rtol=1e-5, atol=1e-6)


#: After 1,000 steps, in units in the last place of the largest weight. Every step rounds the weight once, to half a unit; the
#: sum of 1,000 such errors is 500 units at most, and about 10 where they are not all of one sign. Hyper-parameters are
#: float32 numbers in the kernels, and in the model. Without weight decay: its product is rounded the same way in step after
#: step, up to half a unit each.
ULPS = 64


@pytest.mark.parametrize('name', UPDATES)
@pytest.mark.parametrize('partner', [None, F16, BF16], ids=['float32', 'split float16', 'split bfloat16'])
def test_a_thousand_steps_stay_near_float64(name: str, partner: torch.dtype | None, device: torch.device) -> None:
    generator = np.random.default_rng(5)
    start = (generator.random(64) + 0.5).astype(np.float32)
    hyper = hyper_of(name, 5)[:1].clone()
    hyper[0, 0] /= 100
    hyper[0, 4] = 0.0
    lr, one, two, eps, *_ = hyper[0].tolist()

    def single(number: float) -> float:
        return float(np.float32(number))

    model = start.astype(np.float64)
    first, second, most = (np.zeros_like(model) for _ in range(3))
    weight = torch.from_numpy(start).to(device)
    partners: list[Tensor] = []
    if partner is not None:
        weight, remainder = split.split(weight, partner)
        partners = [remainder]
    states = [[torch.zeros(64, device=device)] for _ in range(3)]
    decision, rows = torch.zeros(ops.DECISION, device=device), torch.zeros(1, ops.ROW, device=device)
    steps, groups = [zero(device)], torch.zeros(1, dtype=torch.int64)
    all_grads = generator.standard_normal((1000, 64)).astype(np.float32)
    for index, grad in enumerate(torch.from_numpy(all_grads).to(device)):
        ops.step_prologue(decision, rows, steps, hyper, groups, UPDATES.index(name))
        g = all_grads[index].astype(np.float64)
        if name == 'fused_adam':
            # amsgrad
            ops.fused_adam([grad], [weight], states[0], states[1], states[2], partners, rows, decision)
            first += single(1 - one) * (g - first)
            second = single(two) * second + single(1 - two) * g * g
            most = np.maximum(most, second)
            count = index + 1
            model -= lr / (1 - one**count) * first / (np.sqrt(most) / math.sqrt(1 - two**count) + eps)
        else:
            # nesterov, dampening
            ops.fused_sgd([grad], [weight], states[0], partners, rows, decision)
            first = g.copy() if index == 0 else single(one) * first + single(1 - two) * g
            model -= single(lr) * (g + single(one) * first)
    result = weight if partner is None else split.join(weight, partners[0])
    unit = np.spacing(np.float32(np.abs(model).max()))
    error = np.abs(result.cpu().double().numpy() - model).max() / unit
    assert error <= ULPS, error


# -- scale and norm in one pass -----------------------------------------------------------------------------------


def test_scale_and_norm_are_those_of_two_ops(device: torch.device) -> None:
    shapes = [(5,), (0,), (40_000,), (7, 9), (2, 3, 4, 5)]
    for target_layout in (0, 1, 4):
        sources = [random_tensor(i, s, (F32, F16, BF16)[i % 3], device, (1, 4)[i % 2]) for i, s in enumerate(shapes)]
        targets, others = ([random_tensor(9, s, F32, device, target_layout) for s in shapes] for _ in range(2))
        scale, flag = zero(device, 1 / 3), zero(device)
        norm = ops.multi_tensor_scale_l2norm(sources, targets, scale, flag)
        ops.multi_tensor_scale(sources, others, scale)
        assert same_bits(norm, ops.multi_tensor_l2norm(sources, scale)[0]) and flag.item() == 0.0
        assert all(same_bits(a, b) for a, b in zip(targets, others))
    # in place
    wanted = ops.multi_tensor_l2norm(sources, scale)[0]
    sources[2][3] = torch.inf
    assert same_bits(
        ops.multi_tensor_scale_l2norm(sources[:2], sources[:2], scale),
        ops.multi_tensor_l2norm(
            [random_tensor(i, s, (F32, F16)[i], device, (1, 4)[i]) for i, s in enumerate(shapes[:2])], scale
        )[0],
    )
    assert (
        not wanted.isinf() and ops.multi_tensor_scale_l2norm(sources, sources, None, flag).isinf() and flag.item() == 1
    )
