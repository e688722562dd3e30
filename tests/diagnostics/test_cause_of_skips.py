"""Why a step was skipped: the diagnosis names cause and place of faults that are planted, and settings that help."""

from __future__ import annotations

import dataclasses
import functools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmengine.runner.activation_checkpointing import turn_on_activation_checkpointing
from pairs import pairs
from planted_overflows import (
    DEEP,
    TABLE,
    Act,
    Deep,
    Fault,
    Planted,
    ScaleGradient,
    batches,
    examine,
    in_range_of_fp32,
    named_as_planted,
    nan_input,
    root_at_zero,
    square,
    train,
)
from torch import Tensor, nn

from amp_wrapper import Diagnosis, FusedSGD, amp

Optimizer = torch.optim.Optimizer


def check_remedies(each: Planted, found: Diagnosis) -> None:
    """Use each setting that the diagnosis recommends or rejects for the same step."""
    for remedy in found.remedies:
        if remedy.finite is None or remedy.kind == 'fp32' or each.checkpointed:
            continue
        setting = eval(f'dict({remedy.setting})')
        level = setting.pop('opt_level', 'O2')
        options = {} if level == 'O5' else {**each.options, **setting}
        again = train(dataclasses.replace(each, options=options), level)
        assert (again == []) == remedy.finite, (remedy, [other.text for other in again])
    kinds = {remedy.kind for remedy in found.remedies if remedy.finite} - {'fp32'}
    if each.cause == 'forward_range':
        # what comes after it has no room for such inputs either; NaN in 16 bits is NaN in bfloat16
        rare = {'input out of range': {'bfloat16'}, 'in 16-bit alone': {'keep_fp32'}}
        assert kinds == rare.get(each.name, {'keep_fp32', 'bfloat16'})
    if each.cause == 'gradient_scale':
        assert 'loss_scale' in kinds
    if each.cause in ('forward_nan', 'gradient_nan', 'input'):
        assert not kinds


@pytest.mark.parametrize('each', TABLE, ids=[each.name for each in TABLE])
def test_planted_fault_is_named_with_what_helps(each: Planted) -> None:
    for level in each.levels:
        (found,) = train(each, level)
        assert named_as_planted(each, level, found) and each.op in found.op, (level, found.text)
        assert found.level.startswith(level)
        if each.phase == 'backward':
            assert 'stem.weight' in found.parameters
        elif each.act is not None:
            # the line of the fault itself
            assert found.outputs and 'planted_overflows.py' in found.source
        if level == 'O2':
            check_remedies(each, found)


def test_fault_between_modules_is_that_of_the_model_itself() -> None:
    for level, act, cause in (('O1', in_range_of_fp32, 'forward_range'), ('O2', root_at_zero, 'gradient_nan')):
        torch.manual_seed(0)
        model = Deep()
        model.between = act
        (found,) = examine(model, level, batches(1))
        assert (found.cause, found.module) == (cause, '') and 'the model itself' in found.text


def test_step_that_fails_by_chance_is_run_again_with_the_same_random_numbers() -> None:
    def by_chance(x: Tensor) -> Tensor:
        # normal numbers of NumPy come in twos: the second one is a part of its state
        drawn = random.random(), np.random.randn(), float(torch.rand(()))
        return in_range_of_fp32(x) if min(drawn) < -0.1 or max(drawn) > 0.9 else x

    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    model = Deep()
    model.blocks[2].place = Fault(by_chance)
    found = examine(model, 'O2', batches(12))
    assert len(found) >= 3
    assert {(each.cause, each.module) for each in found} == {('forward_range', DEEP)}


# -- weights and optimizer state -------------------------------------------------------------------------------------


def nan_in_weight(index: int, model: nn.Module, optimizer: Optimizer) -> None:
    model.blocks[1].fc2.weight.data[0, 0] = torch.nan


def nan_in_buffer(index: int, model: nn.Module, optimizer: Optimizer) -> None:
    model.norm.eval().running_mean[3] = torch.nan


def nan_in_state(index: int, model: nn.Module, optimizer: Optimizer) -> None:
    if index == 1:
        list(optimizer.state.values())[3]['exp_avg'].fill_(torch.nan)


def huge_master(index: int, model: nn.Module, optimizer: Optimizer) -> None:
    names = list(dict(model.named_parameters()))
    with torch.no_grad():
        list(amp.master_params(optimizer))[names.index('blocks.1.fc2.weight')][0, 0] = 7e4


@pytest.mark.parametrize('level', ['O0', 'O1', 'O2', 'O5'])
def test_weight_and_optimizer_state_that_are_nan(level: str) -> None:
    model = Deep()
    adam = torch.optim.Adam(model.parameters(), lr=0.001, eps=1e-4)
    # the step with the NaN in its state is taken, for its gradients are finite; the next one is not
    (found,) = examine(model, level, batches(3), optimizer=adam, before=nan_in_state)
    name = list(dict(model.named_parameters()))[3]
    assert found.cause == 'weight' and found.parameters == [name]
    assert 'the state of the optimizer is not finite' in found.text
    (found,) = examine(Deep(), level, batches(1), before=nan_in_weight)
    assert (found.cause, found.module, found.parameters) == ('weight', 'blocks.1.fc2', ['blocks.1.fc2.weight'])


@pytest.mark.parametrize('kind', [torch.optim.SGD, FusedSGD])
def test_master_and_buffer_that_are_out_of_range(kind: Any) -> None:
    model = Deep()
    (found,) = examine(model, 'O2', batches(1), optimizer=kind(model.parameters(), lr=0.01), before=huge_master)
    assert (found.cause, found.module) == ('weight', 'blocks.1.fc2') and 'up to 7e+04' in found.text
    assert {(remedy.kind, remedy.finite) for remedy in found.remedies} == {('keep_fp32', False), ('bfloat16', True)}
    (found,) = examine(Deep(), 'O2', batches(1), before=nan_in_buffer)
    assert (found.cause, found.module) == ('weight', 'norm') and 'norm.running_mean' in found.text


# -- accumulation, several losses ------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', ['O1', 'O2', 'O5'])
def test_one_micro_batch_of_three(level: str) -> None:
    first, second, third = batches(3)
    (found,) = examine(Deep(), level, [first, nan_input(second), third], passes=3)
    assert found.cause == 'input'
    # a gradient that is wrong for large inputs alone
    place = Fault(lambda x: ScaleGradient.apply(x, 1e38 if x.detach().abs().max() > 20 else 1.0))
    model = nn.Sequential(nn.Linear(4, 8), place, nn.Linear(8, 2))
    (found,) = examine(model, level, [first, 100 * second, third], passes=3, loss_scale=8.0)
    assert (found.module, found.phase) == ('1', 'backward'), found.text


@pairs(place=['outside', 'inside'], level=['O1', 'O2'])
def test_losses_concerned_are_named(place: str, level: str) -> None:
    """Three losses, of which the first and the last are not finite: by themselves, or by a place of their forward pass."""
    torch.manual_seed(0)
    model = Deep(outputs=3 if place == 'outside' else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, num_losses=3, verbosity=0)
    with amp.monitor(optimizer) as watch:
        outputs = model(batches(1)[0]) if place == 'outside' else [None] * 3
        for index, output in enumerate(outputs):
            if place == 'outside':
                loss = square(output if index == 1 else root_at_zero(output.float()))
            else:
                model.blocks[1].place = Fault(in_range_of_fp32) if index != 1 else nn.Identity()
                loss = square(model(batches(3)[index]))
            with amp.scale_loss(loss, optimizer, loss_id=index) as scaled:
                scaled.backward(retain_graph=index < 2 and place == 'outside')
        optimizer.step()
    (found,) = watch.diagnoses
    if place == 'outside':
        # one call gave the outputs of all of them
        assert (found.cause, found.losses) == ('loss', [0, 1, 2])
    else:
        # the copy has the place as it is at the step
        assert (found.cause, found.module) == ('forward_range', 'blocks.1.place') and {0, 2} <= set(found.losses)


# -- masks -----------------------------------------------------------------------------------------------------------


class SlicedMask(nn.Module):
    """As models of language write it: a causal mask of the longest text, of which the model hands a part to its blocks."""

    def __init__(self, filled: float) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.gain = 1e6
        self.register_buffer('mask', torch.full((16, 16), filled).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        # wider than long: more of it is masked than of the whole
        mask = self.mask[:3, :8]
        for place, block in enumerate(self.blocks):
            y = block(x)
            x = (y.mT @ y * (self.gain if place == 1 else 1.0))[:, :3] + mask
            x = (x.softmax(-1) @ y.mT).mT[..., :3].mT.repeat(1, 2, 3)[:, :6, :8] if x.shape[-1] != 8 else x.softmax(-1)
        return x


def test_part_of_a_mask_is_a_mask() -> None:
    for level, filled in (('O1', -torch.inf), ('O2', -torch.inf), ('O2', torch.finfo(torch.float32).min)):
        (found,) = examine(SlicedMask(filled), level, [torch.randn(2, 3, 4)])
        assert (found.cause, found.module) == ('forward_range', ''), found.text
        assert 'aten.mul made' in found.text and 'self.gain' in found.source


def test_logarithm_of_zero_that_is_no_mask() -> None:
    for then in (Tensor.mean, nn.Linear(8, 8), nn.Linear(8, 16)):
        model = nn.Sequential(nn.Linear(4, 8), Fault(lambda x: x.relu().log()), Fault(then))
        (found,) = examine(model, 'O2', [torch.randn(8, 4)])
        assert (found.cause, found.module) == ('forward_nan', '1') and 'aten.log' in found.text


# -- what other people's models do -----------------------------------------------------------------------------------


def a_thousand_times(x: Tensor) -> Tensor:
    for _ in range(1100):
        x = x + 1e-3
    return x


def written_in_parts(x: Tensor) -> Tensor:
    out = x.new_zeros(6, 8)
    out[:, :4] = x
    out[:, 4:] = x
    return out


def test_place_is_found_through_many_ops_written_parts_and_complex_numbers() -> None:
    for then in (a_thousand_times, written_in_parts, lambda x: torch.fft.rfft(x.float()).abs()):
        (found,) = examine(nn.Sequential(nn.Linear(4, 4), Fault(in_range_of_fp32), Fault(then)), 'O2', batches(1))
        assert (found.cause, found.module) == ('forward_range', '1'), found.text


class Odd(Deep):
    """A model that does what models of others do."""

    calls = 0

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.last: Any = None
        self.eight_bits = Fault(lambda x: x.to(torch.float8_e4m3fn))
        # of which Python makes no copy
        self.lock = threading.Lock() if what == 'cannot be copied' else None
        Odd.calls = 0

    def forward(self, x: Any) -> Any:
        Odd.calls += 1
        if self.what == 'empties its dict':
            x = x.pop('x')
        if self.what == 'changes its input':
            x = x.sub_(0.5)
            self.eight_bits(x)
        self.last = output = super().forward(x)
        if self.what == 'counts its calls':
            return square(output) * (torch.inf if Odd.calls == 2 else 1.0)
        return SimpleNamespace(y=output) if self.what == 'gives an object' else output


ODD: dict[str, tuple[str, list[str]]] = {
    'counts its calls': ('O2', ['not_reproduced']),
    'gives an object': ('O2', ['not_replayed']),
    # at O1 nothing casts the input first
    'changes its input': ('O1', ['not_replayed']),
    'empties its dict': ('O2', ['input', 'input']),
    # a tensor with a graph, of which Python makes no copy
    'keeps its output': ('O2', ['input', 'input']),
}


@pytest.mark.parametrize('what', ODD)
def test_models_that_cannot_be_run_again_are_told_once(what: str) -> None:
    level, causes = ODD[what]
    if what == 'counts its calls':
        found = examine(Odd(what), level, batches(2), lambda loss: loss)
    else:
        inputs: list[Any] = [{'x': nan_input(x)} if what == 'empties its dict' else nan_input(x) for x in batches(2)]
        found = examine(Odd(what), level, inputs, lambda y: square(getattr(y, 'y', y)))
    assert [each.cause for each in found] == causes


def test_method_that_is_replaced_on_one_module_is_run_or_the_copy_refused() -> None:
    """As mmengine's activation checkpointing does it: a copy with the method of the class would be another model."""
    model = Deep()
    turn_on_activation_checkpointing(model, ['blocks.1'])
    forward = functools.partial(lambda x, original: in_range_of_fp32(original(x)), original=model.heads[0].forward)
    model.heads[0].forward = forward  # type: ignore[assignment]
    (found,) = examine(model, 'O2', batches(1))
    assert (found.cause, found.module) in (('forward_range', 'heads.0'), ('not_replayed', ''))


def test_evaluations_and_thrown_away_batches_are_not_blamed() -> None:
    """Also where no copy of the model can be made, which is said once, with the reason."""
    for what, causes in (('', ['loss', 'loss']), ('cannot be copied', ['not_replayed'])):
        factors = iter([torch.nan, 1.0, torch.nan])

        def between_steps(index: int, model: nn.Module, optimizer: Optimizer, what: str = what) -> None:
            with torch.no_grad():
                model(nan_input(batches(1)[0]))
            if not what:
                # no loss of this step is made of it
                assert not square(model(batches(1)[0] * 1e7)).isfinite()

        loss_fn = lambda y, factors=factors: square(y) * next(factors)  # noqa: E731
        found = examine(Odd(what), 'O2', batches(3), loss_fn, before=between_steps)
        assert [each.cause for each in found] == causes
        assert ('copy.deepcopy(model) failed' in found[0].text) == bool(what)


def test_other_thread_may_call_the_model_during_a_diagnosis() -> None:
    model = Deep()

    def on_other_thread(x: Tensor, part: nn.Module = model.blocks[1].fc2) -> Tensor:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(part, x.new_ones(1, part.in_features, dtype=torch.float32)).result()
        return in_range_of_fp32(x)

    model.blocks[2].place = Fault(on_other_thread)
    (found,) = examine(model, 'O2', batches(1))
    assert (found.cause, found.module) == ('forward_range', DEEP)


# -- words -----------------------------------------------------------------------------------------------------------

#: What FP32 cannot do either, and what the text says of it.
ALWAYS: dict[str, tuple[Act, str]] = {
    'log': (lambda x: torch.log(x * 0), 'aten.log made 48 of 48 elements infinite from finite numbers between 0 and 0'),
    'log in place': (
        lambda x: (x * 0).log_(),
        'aten.log_ made 48 of 48 elements infinite from finite numbers between 0',
    ),
    'root': (
        lambda x: (x * 0 - 1).sqrt(),
        'aten.sqrt made 48 of 48 elements NaN from finite numbers between -1 and -1',
    ),
    'x/0': (
        lambda x: (x * 0 + 1).div_(0),
        'aten.div_ made 48 of 48 elements infinite from finite numbers between 1 and 1',
    ),
    'inf': (
        lambda x: x * 0 + torch.inf,
        'aten.add made 48 of 48 elements infinite from finite numbers between 0 and 0',
    ),
    '0*inf': (lambda x: x * 0 * torch.full_like(x, torch.inf), 'aten.mul made 48 of 48 elements NaN.'),
}
#: What float16 alone cannot do: numbers that are zero in it. No gradient goes through it, which would be out of range.
IN_FLOAT16: dict[str, Act] = {
    'log of an eps': lambda x: x + (x.detach() * 0 + 1e-8).log(),
    '0 over an eps': lambda x: x + x.detach() * 0 / (x.detach().abs() * 0 + 1e-8),
    'root of an eps': lambda x: x + (x.detach() * 0).add(1e-9).rsqrt() * 1e-3,
}


def between(act: Act, level: str, **options: Any) -> list[Diagnosis]:
    """Do something between two layers."""
    torch.manual_seed(0)
    return examine(nn.Sequential(nn.Linear(4, 8), Fault(act), nn.Linear(8, 2)), level, batches(1), **options)


def test_numbers_that_an_op_was_given_tell_a_division_by_zero() -> None:
    wrong = []
    for name, level in zip(2 * list(ALWAYS), cycle(['O1', 'O2', 'O3', 'O4', 'O5'])):
        act, words = ALWAYS[name]
        (found,) = between(act, level)
        if found.cause != 'forward_nan' or words not in found.text or 'no matter of precision' not in found.text:
            wrong.append((name, level, found.cause, found.text))
    assert wrong == []


@pytest.mark.parametrize(('name', 'level'), list(zip(IN_FLOAT16, ['O1', 'O2', 'O3'])))
def test_number_that_float16_rounds_to_zero_is_a_matter_of_range(name: str, level: str) -> None:
    (found,) = between(IN_FLOAT16[name], level)
    assert found.cause == 'forward_range' and 'between 0 and' in found.text and 'In FP32 the forward' in found.text
    assert "With keep_fp32=['1']" in found.text and between(IN_FLOAT16[name], level, keep_fp32=['1']) == []


@pytest.mark.parametrize('level', ['O1', 'O2'])
def test_what_batch_norm_writes_does_not_hide_what_it_was_given(level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), Fault(lambda x: x * 1e6), nn.BatchNorm1d(8), nn.Linear(8, 2))
    (found,) = examine(model, level, batches(1), loss_scale=8.0)
    assert (found.cause, found.module, found.op) == ('forward_range', '1', 'aten.mul')
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    (found,) = examine(model, level, [batches(1)[0].index_fill(0, torch.tensor([1]), torch.inf)], loss_scale=8.0)
    assert found.cause == 'input' and 'input 0' in found.text


def test_what_only_a_hook_does_is_not_blamed_on_the_loss() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model[0].register_forward_hook(lambda module, args, output: output * 1e6)
    (found,) = examine(model, 'O2', batches(1), loss_scale=8.0)
    assert found.cause == 'not_reproduced'


def tiny_root(x: Tensor) -> Tensor:
    return ((x * 1e-5).square().sum(-1, keepdim=True) + 1e-12).sqrt() * x


def huge_loss(x: Tensor) -> Tensor:
    return x + F.mse_loss(x.float(), x.float() * 0 + 1e30).to(x.dtype)


@pytest.mark.parametrize(
    ('act', 'level', 'cause', 'text'),
    [
        (lambda x: (x * 0 + 15).exp() * 1e-3, 'O2', 'forward_range', 'Infinity in float16 in the forward pass'),
        (lambda x: torch.where(x > 0, x * 0 + 300, x * 0).pow(2) * 1e-3, 'O2', 'forward_range', 'between 0 and 300'),
        (tiny_root, 'O2', 'gradient_range', 'in float16 in the backward pass'),
        (lambda x: (x * 0).sqrt(), 'O5', 'gradient_nan', 'Infinity in bfloat16 in the backward pass (SqrtBackward0)'),
        (huge_loss, 'O5', 'forward_nan', 'Infinity in float32 in '),
    ],
    ids=['an overflow', 'a square', 'backward in float16', 'backward', 'a loss'],
)
def test_type_and_pass_are_named(act: Act, level: str, cause: str, text: str) -> None:
    (found,) = between(act, level)
    assert found.cause == cause and text in found.text
    helps = {each.kind for each in found.remedies if each.finite}
    assert {'keep_fp32', 'bfloat16'} <= helps if cause.endswith('range') else not helps


def test_overflow_that_leaves_the_outputs_finite_is_that_of_the_forward_pass() -> None:
    (found,) = between(lambda x: (-(x * 1e9).square()).exp(), 'O2')
    assert (found.cause, found.phase, found.op) == ('forward_range', 'forward', 'aten.mul'), found.text


def test_gradient_that_is_nan_in_fp32_is_told_from_an_overflow_of_the_loss_scale() -> None:
    (found,) = between(lambda x: x + (x * 0).abs().sqrt(), 'O1', loss_fn=lambda y: y.float().square().sum())
    assert (found.cause, found.op) == ('gradient_nan', 'aten.div') and 'SqrtBackward0' in found.text


def test_nothing_is_said_of_calls_that_were_not_kept() -> None:
    first, *others = batches(40)
    (found,) = examine(Deep(), 'O2', [nan_input(first), *others], passes=40, loss_scale=8.0)
    assert found.cause == 'not_replayed' and 'the last 32 are kept' in found.text


def test_dynamic_scale_below_one_is_no_reason() -> None:
    model = Deep()
    loss_fn = lambda y: square(y) + (model.stem.weight.float() * 0).square().sum().sqrt()  # noqa: E731
    (found,) = examine(model, 'O2', batches(1), loss_fn, loss_scale={'init_scale': 1.0})
    assert found.cause == 'not_reproduced'


class Bound(nn.Module):
    """Calls a part of it by a function that a copy would share."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        wrapped = torch.compile(self.inner, backend='eager') if kind == 'compiled' else functools.partial(self.norm)
        self.part = (lambda x: self.norm(x)) if kind == 'lambda' else wrapped

    def inner(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.stem(x))


@pytest.mark.parametrize('kind', ['lambda', 'partial', 'compiled'])
def test_functions_that_hold_parts_of_the_original_are_not_run(kind: str) -> None:
    model = Bound(kind)
    (found,) = examine(model, 'O1', [nan_input(batches(1)[0])])
    assert found.cause == 'not_replayed' and 'part of the model is a function' in found.text
    assert model.norm.num_batches_tracked == 0


def test_numbers_of_the_text_are_those_of_the_op() -> None:
    (found,) = between(lambda x: ScaleGradient.apply(x * 0 + 50.0, 1.0) * 2e3, 'O2')
    assert 'aten.mul made 48 of 48 elements infinite from finite numbers between 50 and 50' in found.text
    assert "With opt_level='O5'" in found.text
