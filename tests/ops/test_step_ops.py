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
    STEPS,
    UPDATES,
    Call,
    NoHostRead,
    bits,
    hyper_of,
    prologue_call,
    random_tensor,
    same_bits,
    step_samples,
    update_call,
    without_compiled,
    zero,
)
from torch import Tensor

from amp_wrapper import ops
from amp_wrapper.ops import split

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
#: Around the width of vectors; each meets every type, partner and layout.
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
    """63 tensors go through all types of gradients, parameters, partners and states, and layouts; the flags by turns."""
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


# -- what is refused ----------------------------------------------------------------------------------------------


FACES = {'front': ops, 'raw': torch.ops.amp_wrapper, 'reference': REFERENCE}
Arguments = dict[str, Any]
Fault = tuple[Callable[[Arguments], Any], str]


def element(name: str, index: int, value: Tensor) -> Callable[[Arguments], Any]:
    return lambda arguments: arguments[name].__setitem__(index, value)


def instead(name: str, value: Any) -> Callable[[Arguments], Any]:
    return lambda arguments: arguments.__setitem__(name, value)


def in_inference(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    with torch.inference_mode():
        return torch.zeros(shape, dtype=dtype)


def without_memory(*shape: int) -> Tensor:
    tensor = torch.zeros(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


def copy_in_gradient(arguments: Arguments) -> None:
    arguments['partners'][4] = arguments['grads'][5].view(F16).view(-1)[:17]


def copy_twice(arguments: Arguments) -> None:
    arguments['partners'][8] = torch.zeros(24, dtype=BF16).view(8, 3)
    arguments['partners'][1] = arguments['partners'][8].view(-1)[:0]
    arguments['partners'][4] = arguments['partners'][8].view(-1).view(F16)[:17]


ROW_SHAPES = '(9, 12) of torch.float32 is expected.'
PARTNERS = (
    'a copy of the same type, a float16 or bfloat16 copy of a float32 parameter, or the int16 remainder of a 16-bit one, is '
    'expected.'
)
INFERENCE = ' was made in inference mode: outside of it, it cannot be written to.'
FREED = ' has no memory: its storage was freed (resized to 0).'
#: Changes and messages, by what is wrong. The lists have 9 tensors: the fifth is a float32 of 17 with a float16 copy.
LISTS: dict[str, Fault] = {
    'fewer partners': (lambda a: a['partners'].pop(), 'grads has 9 tensors and partners 8: the lists must pair up.'),
    'fewer gradients': (lambda a: a['grads'].pop(), 'grads has 8 tensors and params 9: the lists must pair up.'),
    'short decision': (
        instead('decision', torch.zeros(7)),
        'decision has shape (7,) and dtype torch.float32: 8 float32 numbers in a row are expected.',
    ),
    'decision with gaps': (
        instead('decision', torch.zeros(16)[::2]),
        'decision has shape (8,) and dtype torch.float32: 8 float32 numbers in a row are expected.',
    ),
    'freed decision': (instead('decision', without_memory(8)), f'decision{FREED}'),
    'fewer rows': (
        instead('rows', torch.zeros(8, 12)),
        f'rows has shape (8, 12) and dtype torch.float32: {ROW_SHAPES}',
    ),
    'narrow rows': (
        instead('rows', torch.zeros(9, 12, dtype=F16)),
        f'rows has shape (9, 12) and dtype torch.float16: {ROW_SHAPES}',
    ),
    'another shape': (element('grads', 4, torch.zeros(4)), 'grads[4] has shape (4,) and params[4] (17,).'),
    'sparse gradient': (
        element('grads', 4, torch.zeros(17).to_sparse()),
        'grads[4] is not dense: give the values of a sparse tensor, coalesced.',
    ),
    'wide copy': (
        element('partners', 4, torch.zeros(17, dtype=torch.float64)),
        f'partners[4] has dtype torch.float64 beside a parameter of torch.float32: {PARTNERS}',
    ),
    'remainder of float32': (
        element('partners', 4, torch.zeros(17, dtype=torch.int16)),
        f'partners[4] has dtype torch.int16 beside a parameter of torch.float32: {PARTNERS}',
    ),
    'copy of 16 bits': (
        element('partners', 5, torch.zeros(4, 9, dtype=F16)),
        f'partners[5] has dtype torch.float16 beside a parameter of torch.bfloat16: {PARTNERS}',
    ),
    'expanded copy': (
        element('partners', 4, torch.zeros((), dtype=F16).expand(17)),
        'partners[4] has elements that share memory (an expanded tensor): it cannot be written to.',
    ),
    'copy of inference mode': (element('partners', 4, in_inference(17, dtype=F16)), f'partners[4]{INFERENCE}'),
    'copy in a gradient': (
        copy_in_gradient,
        'grads[5] and partners[4] share memory, but are not the same tensor: what is written would be read.',
    ),
    'copy in a copy': (
        copy_twice,
        'partners[4] and partners[8] share memory: give each tensor that is written once.',
    ),
    'decision in a copy': (
        lambda a: (
            a['partners'].__setitem__(4, torch.zeros(40, dtype=F16)[:17])
            or instead('decision', a['partners'][4].as_strided((40,), (1,)).view(F32)[8:16])(a)
        ),
        'decision and partners[4] share memory: give a scalar of its own.',
    ),
}
#: What the compiled op leaves to the reference, which says what is wrong.
LEFT: dict[str, Fault] = {
    'rows elsewhere': (
        instead('rows', torch.zeros(9, 12, device='meta')),
        'rows is on meta and decision on cpu: they belong on one device.',
    ),
    'integers': (
        element('grads', 4, torch.zeros(17, dtype=torch.int32)),
        'grads[4] has dtype torch.int32: a real floating tensor is expected.',
    ),
    'gradient elsewhere': (
        element('grads', 4, torch.zeros(17, device='meta')),
        'grads[4] is on meta and decision on cpu.',
    ),
}
#: Of step_prologue, with three parameters and two groups.
TABLES: dict[str, Fault] = {
    'flat hyper': (instead('hyper', torch.zeros(7)), 'hyper must have two dimensions and groups one.'),
    'narrow hyper': (
        instead('hyper', torch.zeros(2, 7)),
        'hyper has shape (2, 7) and dtype torch.float32: (2, 7) of torch.float64 is expected.',
    ),
    'fewer groups': (
        instead('groups', torch.zeros(2, dtype=torch.int64)),
        'groups has shape (2,) and dtype torch.int64: (3,) of torch.int64 is expected.',
    ),
    'no such group': (instead('groups', torch.tensor([0, 2, 0])), 'groups[1] is 2, and hyper has 2 rows.'),
    'negative group': (instead('groups', torch.tensor([0, 0, -1])), 'groups[2] is -1, and hyper has 2 rows.'),
    'no such rate': (instead('rated', [2]), 'rated[0] is 2, and hyper has 2 rows.'),
    'fewer rates': (instead('rates', []), 'rates has 0 tensors and rated 1 groups: they must pair up.'),
    'kind': (instead('kind', 2), 'kind=2: 0 (Adam) or 1 (SGD) is expected.'),
    'short rule': (instead('rule', (2.0,)), 'rule has 1 numbers: 6 or none are expected.'),
    'rule without scale': (instead('scale', None), 'rule needs scale, growth_tracker and hysteresis_tracker.'),
    'no norm': (instead('norm', None), 'max_norm needs norm.'),
    'wide step': (
        element('steps', 1, torch.zeros(2)),
        'steps[1] has shape (2,) and dtype torch.float32: one element of torch.float32 is expected.',
    ),
    'step of inference mode': (element('steps', 1, in_inference()), f'steps[1]{INFERENCE}'),
    'float64 rate': (
        element('rates', 0, torch.zeros((), dtype=torch.float64)),
        'rates[0] has shape () and dtype torch.float64: one element of torch.float32 is expected.',
    ),
    'wide norm': (
        instead('norm', torch.zeros(3)),
        'norm has shape (3,) and dtype torch.float32: one element of torch.float32 is expected.',
    ),
    'float tracker': (
        instead('growth_tracker', torch.zeros(())),
        'growth_tracker has shape () and dtype torch.float32: one element of torch.int32 is expected.',
    ),
    'narrow counts': (
        instead('counts', torch.zeros(3, dtype=torch.int32)),
        'counts has shape (3,) and dtype torch.int32: (3,) of torch.int64 is expected.',
    ),
    'decision of inference mode': (instead('decision', in_inference(8)), f'decision{INFERENCE}'),
    'scale in the decision': (
        lambda a: instead('scale', a['decision'][5])(a),
        'scale and decision[0] share memory: give a scalar of its own.',
    ),
    'norm in the rows': (
        lambda a: instead('norm', a['rows'][2, 3])(a),
        'norm and rows[0] share memory: give a scalar of its own.',
    ),
    'norm among the steps': (
        lambda a: instead('norm', a['steps'][2])(a),
        'norm and steps[2] share memory: give a scalar of its own.',
    ),
    'one step for two': (
        lambda a: element('steps', 2, a['steps'][0])(a),
        'steps[0] and steps[2] share memory: give each tensor that is written once.',
    ),
}


@pytest.mark.parametrize('face', list(FACES))
@pytest.mark.parametrize(
    ('name', 'fault'),
    [(name, fault) for name in UPDATES for fault in (*LISTS, *LEFT)] + [('step_prologue', fault) for fault in TABLES],
)
def test_bad_input_is_refused_and_nothing_written(name: str, fault: str, face: str, device: torch.device) -> None:
    if device.type != 'cpu' or (face == 'raw' and fault in LEFT):
        pytest.skip('tensors of the faults are on the CPU; what is left to the reference is asked of the front')
    call = (
        step_samples(name, device)[2]
        if name == 'step_prologue'
        else update_call(name, [(3, 5), (0,), (), (2, 3, 4, 5), (17,), (4, 9), (33,), (7,), (8, 3)], device, plain=True)
    )
    change, message = (LISTS | LEFT | TABLES)[fault]
    change(call.arguments)

    def seen() -> list[tuple[Tensor, int]]:
        usable = [t for t in call.tensors() if t.layout is torch.strided and not t.is_meta]
        usable = [t for t in usable if t.untyped_storage().nbytes() or not t.numel()]
        return [(bits(t).clone(), -1 if t.is_inference() else t._version) for t in usable]

    before = seen()
    with pytest.raises(ValueError) as caught:
        call.run(FACES[face])
    assert str(caught.value).split('\nException raised from')[0] == message
    assert type(caught.value) is ValueError
    for (old, was), (now, version) in zip(before, seen(), strict=True):
        assert torch.equal(old, now) and was == version, 'written'


@pytest.mark.parametrize('name', STEPS)
def test_samples_are_taken_as_they_are(name: str, device: torch.device) -> None:
    """What the faults above start from is no fault itself, for each of those who are asked."""
    for face in FACES.values():
        for call in step_samples(name, device):
            call.run(face)


@pytest.mark.parametrize('face', [ops, REFERENCE], ids=['front', 'reference'])
def test_a_prologue_refuses_numbers_that_are_none_and_memory_with_two_names(face: Any) -> None:
    """Each with nothing written; some were taken by one of the two, and did different things on a GPU."""
    rule = [2.0, 0.5, 3.0, 1.0, 0.5, 64.0]

    def call(**changes: Any) -> None:
        state = dict(
            decision=torch.zeros(8),
            rows=torch.zeros(1, 12),
            steps=[torch.ones(())],
            hyper=torch.tensor([[0.1, 0.9, 0.99, 1e-8, 0.0, 0.0, 0.0]], dtype=torch.float64),
            groups=torch.zeros(1, dtype=torch.int64),
            kind=0,
            rates=[],
            rated=[],
            found_inf=torch.zeros(()),
            learned=None,
            norm=torch.ones(()),
            scale=torch.full((), 4.0),
            growth_tracker=torch.zeros((), dtype=torch.int32),
            hysteresis_tracker=torch.ones((), dtype=torch.int32),
            counts=torch.zeros(3, dtype=torch.int64),
            rule=rule,
            max_norm=1.0,
            clip_value=2.0,
        )
        state |= changes
        tensors = [t for v in state.values() for t in (v if isinstance(v, list) else [v]) if isinstance(t, Tensor)]
        before = [t.clone() for t in tensors]
        try:
            face.step_prologue(*state.values())
        except ValueError:
            assert all(torch.equal(a, b) for a, b in zip(tensors, before))
            raise

    call()
    # limits beyond float32 are infinite
    call(clip_value=1e300, max_norm=1e300, rule=[2.0, 0.5, 1e300, -3e9, 0.0, 1e300])
    for index in range(6):
        with pytest.raises(ValueError, match=rf'rule\[{index}\] is not a number'):
            call(rule=[math.nan if i == index else number for i, number in enumerate(rule)])
    with pytest.raises(ValueError, match=r'rule\[2\] is not a number, or not a finite one'):
        call(rule=[*rule[:2], math.inf, *rule[3:]])
    for name in ('max_norm', 'clip_value'):
        with pytest.raises(ValueError, match=f'{name} is not a number'):
            call(**{name: math.nan})
    one, table = torch.full((), 4.0), torch.zeros(20)
    whole = torch.ones((), dtype=torch.int32)
    for changes in (
        dict(scale=one, norm=one),
        dict(scale=one, found_inf=one),
        dict(growth_tracker=whole, hysteresis_tracker=whole),
        dict(decision=table[:8], rows=table[7:19].view(1, 12)),
        dict(decision=table[:8], steps=[table[7]]),
        dict(rows=table[:12].view(1, 12), steps=[table[3]]),
        dict(decision=table[:8], rates=[table[7]], rated=[0]),
        dict(scale=one, rates=[one], rated=[0]),
        dict(steps=[one], rates=[one], rated=[0]),
    ):
        with pytest.raises(ValueError, match='share memory'):
            call(**changes)
    with pytest.raises(ValueError, match='negative bit'):
        call(scale=torch._neg_view(torch.tensor(-4.0)))


def test_what_is_written_twice_or_has_no_rows_of_its_kind_is_refused() -> None:
    tensors = [torch.ones(4) for _ in range(4)]
    tables = (torch.ones(1, 12), torch.zeros(8))
    for face in (ops, REFERENCE):
        with pytest.raises(ValueError, match='share memory'):
            face.fused_adam([tensors[0]], [tensors[1]], [tensors[1]], [tensors[2]], [], [], *tables)
        wide = [torch.ones(4, dtype=torch.float64)]
        with pytest.raises(ValueError, match=r'params\[0\] has dtype torch\.float64: float32, float16 or bfloat16 is'):
            face.fused_sgd([tensors[0]], wide, [], [], *tables)
        weight, remainder = torch.ones(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int16)
        with pytest.raises(ValueError, match=r'rows has .* torch\.float64: \(1, 12\) of torch\.float32 is expected'):
            face.fused_sgd([tensors[0]], [weight], [], [remainder], tables[0].double(), tables[1])
