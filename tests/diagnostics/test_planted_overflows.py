"""Faults planted in known places: the diagnosis names the cause and the place of each."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from planted_overflows import (
    ALL,
    CASES,
    DEEP,
    TABLE,
    Planted,
    named_as_planted,
    root_at_zero,
    train,
)
from torch import Tensor, nn
from toy_overflow import (
    Deep,
    Fault,
    ScaleGradient,
    batches,
    examine,
    in_range_of_fp32,
    nan_input,
    square,
)

from amp_wrapper import AmpOptimWrapper, amp
from amp_wrapper.diagnostics.diagnosis import CAUSES


def test_there_are_many() -> None:
    assert len(CASES) >= 60
    assert {each.cause for each in TABLE} < set(CAUSES)


@pytest.mark.parametrize(('each', 'level'), CASES)
def test_the_cause_and_the_place_are_named(each: Planted, level: str) -> None:
    (found,) = train(each, level)
    assert named_as_planted(each, level, found), found.text
    if each.phase == 'backward':
        assert found.first_gradient.startswith(f'{each.module} (')
        assert 'stem.weight' in found.parameters
    assert each.op in found.op
    if each.act is not None and each.phase == 'forward':
        # the line of the fault itself
        assert 'planted_overflows.py' in found.source or 'toy_overflow.py' in found.source
    assert found.outputs or not each.act


@pytest.mark.parametrize('each', [each for each in TABLE if 'O2' in each.levels], ids=lambda each: each.name)
def test_remedies_say_what_really_helps(each: Planted) -> None:
    """Each setting that the report recommends is used for the same step, and each that it rejects."""
    (found,) = train(each, 'O2')
    for remedy in found.remedies:
        if remedy.finite is None or remedy.kind == 'fp32':
            continue
        setting = eval(f'dict({remedy.setting})')
        level = setting.pop('opt_level', 'O2')
        given = dataclasses.replace(each, options={**each.options, **setting})
        if level == 'O5':
            given = dataclasses.replace(given, options={})
        again = train(given, level)
        # a dynamic scale begins where it is told to
        assert (again == []) == remedy.finite, (remedy, [each.text for each in again])
    kinds = {remedy.kind for remedy in found.remedies if remedy.finite}
    if each.cause == 'forward_range':
        assert kinds - {'fp32_ops'} == (
            {'keep_fp32', 'bfloat16'} if each.name != 'one in 16-bit alone' else {'keep_fp32'}
        )
    if each.cause == 'gradient_scale':
        assert 'loss_scale' in kinds
    if each.cause in ('forward_nan', 'gradient_nan', 'input'):
        assert not kinds


@pytest.mark.parametrize('level', ['O1', 'O2'])
@pytest.mark.parametrize(('act', 'cause'), [(in_range_of_fp32, 'forward_range'), (root_at_zero, 'gradient_nan')])
def test_in_the_models_own_forward(act: Callable[[Tensor], Tensor], cause: str, level: str) -> None:
    """Between two modules, in neither of them."""
    torch.manual_seed(0)
    model = Deep()
    model.between = act
    (found,) = examine(model, level, batches(1))
    assert (found.cause, found.module) == (cause, '')
    assert 'the model itself' in found.text


@pytest.mark.parametrize(
    'draw', [random.random, np.random.rand, lambda: float(torch.rand(()))], ids=['Python', 'NumPy', 'torch']
)
def test_by_chance(draw: Callable[[], float]) -> None:
    """One step in three or so is out of range, as the generators say: the copy draws what the step drew."""
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    model = Deep()
    model.blocks[2].place = Fault(lambda x: in_range_of_fp32(x) if draw() < 0.3 else x)
    found = examine(model, 'O2', batches(24))
    assert len(found) >= 2
    assert {(each.cause, each.module) for each in found} == {('forward_range', DEEP)}


# -- weights and optimizer state -------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', ALL)
def test_weight_that_is_nan(level: str) -> None:
    def spoil(index: int, model: nn.Module, wrapper: AmpOptimWrapper) -> None:
        with torch.no_grad():
            model.blocks[1].fc2.weight[0, 0] = torch.nan

    (found,) = examine(Deep(), level, batches(1), before=spoil)
    assert (found.cause, found.module, found.parameters) == ('weight', 'blocks.1.fc2', ['blocks.1.fc2.weight'])


@pytest.mark.parametrize('optimizer', ['SGD', 'FusedSGD'])
def test_master_beyond_the_range_of_its_weight(optimizer: str) -> None:
    from amp_wrapper import FusedSGD

    def spoil(index: int, model: nn.Module, wrapper: AmpOptimWrapper) -> None:
        names = dict(model.named_parameters())
        for parameter, master in wrapper._engine.parts.params.pairs:
            if parameter is names['blocks.1.fc2.weight']:
                with torch.no_grad():
                    master[0, 0] = 7e4

    model = Deep()
    kind = FusedSGD if optimizer == 'FusedSGD' else torch.optim.SGD
    (found,) = examine(model, 'O2', batches(1), optimizer=kind(model.parameters(), lr=0.01), before=spoil)
    assert (found.cause, found.module) == ('weight_range', 'blocks.1.fc2')
    assert 'up to 7e+04' in found.text
    assert {(remedy.kind, remedy.finite) for remedy in found.remedies} == {('keep_fp32', True), ('bfloat16', True)}


@pytest.mark.parametrize('level', ALL)
def test_optimizer_state_that_is_nan(level: str) -> None:
    def spoil(index: int, model: nn.Module, wrapper: AmpOptimWrapper) -> None:
        if index == 1:
            state = list(wrapper.optimizer.state.values())[3]
            state['exp_avg'].fill_(torch.nan)

    model = Deep()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001, eps=1e-4)
    found = examine(model, level, batches(3), optimizer=optimizer, before=spoil)
    # the step with the spoilt state is taken, for its gradients are finite; the next one is not
    assert [each.cause for each in found] == ['optimizer_state']
    name = list(dict(model.named_parameters()))[3]
    assert found[0].parameters == [name]
    assert f'{name}: exp_avg' in found[0].text


def test_buffer_that_is_nan() -> None:
    def spoil(index: int, model: nn.Module, wrapper: AmpOptimWrapper) -> None:
        model.norm.eval()
        model.norm.running_mean[3] = torch.nan

    (found,) = examine(Deep(), 'O2', batches(1), before=spoil)
    assert (found.cause, found.module) == ('weight', 'norm')
    assert 'norm.running_mean' in found.text


# -- accumulation, several losses ------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', ['O1', 'O2', 'O5'])
def test_one_micro_batch_of_three(level: str) -> None:
    inputs = batches(3)
    inputs[1] = nan_input(inputs[1])
    (found,) = examine(Deep(), level, inputs, accumulative_counts=3)
    assert found.cause == 'input'


@pytest.mark.parametrize('level', ['O2', 'O3'])
def test_sum_of_gradients_that_are_finite(level: str) -> None:
    model = Deep()
    model.blocks[2].place = Fault(lambda x: ScaleGradient.apply(x, 1.0))
    torch.manual_seed(0)
    x = batches(1)[0]
    # the largest gradient of one pass fills more than half of the range
    probe = Deep()
    probe.load_state_dict(model.state_dict())
    square(probe(x)).backward()
    largest = max(float(p.grad.abs().max()) for p in probe.parameters() if p.grad is not None)
    (found,) = examine(model, level, [x, x, x], accumulative_counts=3, loss_scale=3 * 0.75 * 65504 / largest)
    assert found.cause == 'gradient_sum', found.text
    assert found.parameters


@pytest.mark.parametrize('level', ['O1', 'O2', 'O5'])
def test_two_of_three_losses(level: str) -> None:
    """One forward pass with three outputs, a loss of each, and NaN in two of them."""
    torch.manual_seed(0)
    model = Deep(outputs=3)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.01), opt_level=level, num_losses=3, verbosity=0
    )
    with amp.monitor(optimizer, diagnose_overflow=True) as watch:
        outputs = model(batches(1)[0])
        for index, output in enumerate(outputs):
            loss = square(output if index == 1 else root_at_zero(output.float()))
            with amp.scale_loss(loss, optimizer, loss_id=index) as scaled:
                scaled.backward(retain_graph=index < 2)
        optimizer.step()
    (found,) = watch.diagnoses
    assert found.cause == 'loss'
    assert found.losses == [0, 2]


@pytest.mark.parametrize('level', ['O1', 'O2'])
def test_two_of_three_losses_in_the_heads(level: str) -> None:
    """Each loss has a forward pass of its own; two of them go through a place that is out of range."""
    torch.manual_seed(0)
    model = Deep()
    spoilt = Fault(in_range_of_fp32)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.01), opt_level=level, num_losses=3, verbosity=0
    )
    with amp.monitor(optimizer, diagnose_overflow=True) as watch:
        for index, x in enumerate(batches(3)):
            model.blocks[1].place = spoilt if index != 1 else nn.Identity()
            with amp.scale_loss(square(model(x)), optimizer, loss_id=index) as scaled:
                scaled.backward()
        optimizer.step()
    (found,) = watch.diagnoses
    # the copy has the place as it is at the step
    assert (found.cause, found.module) == ('forward_range', 'blocks.1.place')
    assert set(found.losses) >= {0, 2}
