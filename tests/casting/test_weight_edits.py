"""A weight changed by anyone but the optimizer wins, at every place where weights can be changed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from torch import Tensor, nn
from torch.optim import SGD
from weight_edits import FINE, HIDDEN, IN_PLACE, LOADS

from amp_wrapper import AmpOptimWrapper
from amp_wrapper.casting.masters import Fp32Masters

LEVELS = ('O2', 'O5')


def build(level: str, lr: float = 0.0) -> tuple[toy.ToyModel, AmpOptimWrapper]:
    torch.manual_seed(0)
    model = toy.ToyModel()
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=SGD(model.parameters(), lr=lr), loss_scale=1.0)
    wrapper.initialize_count_status(model, 0, 100)
    return model, wrapper


def step(model: nn.Module, wrapper: AmpOptimWrapper) -> None:
    batch = toy.ToyData()
    data = dict(inputs=batch.images[:8], labels=batch.labels[:8])
    model.train_step(data, wrapper)


def master(wrapper: AmpOptimWrapper, model: nn.Module) -> Tensor:
    index = [name for name, _ in model.named_parameters()].index('fc.weight')
    # master_params() would bring both sides together
    return [parameter for group in wrapper.optimizer.param_groups for parameter in group['params']][index]


@pytest.mark.parametrize('then', ['step', 'save', 'save and step', 'resume'])
@pytest.mark.parametrize('place', LOADS)
@pytest.mark.parametrize('level', LEVELS)
def test_loads_win_unrounded(level: str, place: str, then: str, tmp_path: Path) -> None:
    model, wrapper = build(level)
    step(model, wrapper)
    LOADS[place](model, tmp_path)
    _go_on(model, wrapper, then)
    assert torch.equal(master(wrapper, model), FINE)
    assert torch.equal(model.fc.weight, FINE.to(model.fc.weight.dtype))
    assert torch.equal(model.state_dict()['fc.weight'], FINE)


@pytest.mark.parametrize('then', ['step', 'save', 'save and step'])
@pytest.mark.parametrize('place', IN_PLACE)
@pytest.mark.parametrize('level', LEVELS)
def test_edits_in_place_win(level: str, place: str, then: str, tmp_path: Path) -> None:
    model, wrapper = build(level)
    step(model, wrapper)
    IN_PLACE[place](model, tmp_path)
    _expect_edit(model, wrapper, then)


@pytest.mark.parametrize('then', ['announce and step', 'save and step', 'save'])
@pytest.mark.parametrize('place', HIDDEN)
@pytest.mark.parametrize('level', LEVELS)
def test_hidden_edits_win_when_announced_or_saved(level: str, place: str, then: str, tmp_path: Path) -> None:
    model, wrapper = build(level)
    step(model, wrapper)
    HIDDEN[place](model, tmp_path)
    _expect_edit(model, wrapper, then)


def _expect_edit(model: Any, wrapper: AmpOptimWrapper, then: str) -> None:
    edited = model.fc.weight.detach().clone()
    before = master(wrapper, model).clone()
    assert not torch.equal(edited, before.to(edited.dtype))
    _go_on(model, wrapper, then)
    assert torch.equal(model.fc.weight, edited)
    assert torch.equal(model.state_dict()['fc.weight'], edited.float().where(edited != before.to(edited.dtype), before))
    assert torch.equal(master(wrapper, model).to(edited.dtype), edited)


def _go_on(model: Any, wrapper: AmpOptimWrapper, then: str) -> None:
    if 'announce' in then:
        assert wrapper.weights_changed() == ['fc.weight']
    if 'save' in then:
        model.state_dict()
    if 'resume' in then:
        wrapper.load_state_dict(copy.deepcopy(wrapper.state_dict()))
    if 'step' in then:
        step(model, wrapper)


@pytest.mark.parametrize('level', LEVELS)
def test_edits_of_masters_around_an_evaluation_keep_all_digits(level: str) -> None:
    def trained(evaluates: bool) -> Tensor:
        model, wrapper = build(level, lr=0.1)
        for _ in range(2):
            for group in wrapper.optimizer.param_groups:
                for parameter in group['params']:
                    parameter.data.mul_(1.2345)
            if evaluates:
                with torch.no_grad():
                    model(toy.ToyData().images[:8], mode='tensor')
                evaluates = False
                assert torch.equal(model.fc.weight, master(wrapper, model).to(model.fc.weight.dtype))
        step(model, wrapper)
        return master(wrapper, model)

    assert torch.equal(trained(True), trained(False))


@pytest.mark.parametrize('level', LEVELS)
def test_averages_that_are_evaluated_before_the_first_step_are_taken_out_again(level: str) -> None:
    def trained(evaluates: bool) -> Tensor:
        model, wrapper = build(level, lr=0.1)
        if evaluates:
            own = [parameter.detach().clone() for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.data.copy_(parameter.data * 0.5)
            model.eval()
            with torch.no_grad():
                halved = model(toy.ToyData().images[:8], mode='tensor')
                assert torch.equal(halved, model(toy.ToyData().images[:8], mode='tensor'))
            assert torch.equal(model.fc.weight, own[-2] * 0.5)
            model.train()
            for parameter, value in zip(model.parameters(), own):
                parameter.data.copy_(value)
        step(model, wrapper)
        return master(wrapper, model)

    assert torch.equal(trained(True), trained(False))


@pytest.mark.parametrize('level', LEVELS)
def test_a_key_encoder_moves_through_data(level: str) -> None:
    """Weights in the optimizer that get no gradient and move by themselves: steps of the others leave them alone."""
    model, wrapper = build(level, lr=0.1)
    for parameter in model.fc.parameters():
        parameter.requires_grad_(False)
    expected = model.fc.weight.detach().clone()
    for _ in range(3):
        moved = model.conv.weight.detach().clone()
        step(model, wrapper)
        assert not torch.equal(moved, model.conv.weight)
        model.fc.weight.data.mul_(0.5).add_(0.25)
        expected = expected * 0.5 + 0.25
    step(model, wrapper)
    assert torch.equal(model.fc.weight, expected)
    assert torch.equal(model.state_dict()['fc.weight'], expected.float())


def test_where_masters_do_not_follow_the_key_encoder_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the test before."""
    monkeypatch.setattr(Fp32Masters, 'follow_idle', lambda self, busy=(): None)
    with pytest.raises(AssertionError):
        test_a_key_encoder_moves_through_data('O2')


class _Frees(SGD):
    """Steps through ``.data`` and lets each gradient go at once: nothing tells afterwards which masters it changed."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group['params']:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group['lr'])
                    parameter.grad = None
                else:
                    parameter.data.mul_(0.5)


@pytest.mark.parametrize('level', LEVELS)
def test_weights_follow_whatever_the_optimizer_did(level: str) -> None:
    torch.manual_seed(0)
    model = toy.ToyModel()
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=_Frees(model.parameters(), lr=0.1), loss_scale=1.0)
    wrapper.initialize_count_status(model, 0, 100)
    model.fc.bias.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step(model, wrapper)
    for (name, weight), master_of_it in zip(model.named_parameters(), wrapper.master_params()):
        assert torch.equal(weight, master_of_it.to(weight.dtype)), name
        assert not torch.equal(master_of_it, before[name]) or not before[name].any(), name
    assert torch.equal(model.state_dict()['fc.bias'], before['fc.bias'] * 0.5)


@pytest.mark.parametrize('level', LEVELS)
def test_a_master_that_somebody_wrote_to_stands(level: str) -> None:
    model, wrapper = build(level)
    model.fc.weight.requires_grad_(False)
    step(model, wrapper)
    with torch.no_grad():
        master(wrapper, model).copy_(FINE)
    step(model, wrapper)
    assert torch.equal(master(wrapper, model), FINE)
    assert torch.equal(model.fc.weight, FINE.to(model.fc.weight.dtype))


@pytest.mark.parametrize('level', LEVELS)
def test_an_edited_deep_copy_speaks_for_itself(level: str) -> None:
    model, wrapper = build(level)
    step(model, wrapper)
    before = master(wrapper, model).clone()
    copied = copy.deepcopy(model)
    copied.fc.weight.data.fill_(2.0)
    assert (copied.state_dict()['fc.weight'] == 2).all()
    step(model, wrapper)
    assert torch.equal(master(wrapper, model), before)
    model.load_state_dict(copied.state_dict())
    step(model, wrapper)
    assert (master(wrapper, model) == 2).all()


@pytest.mark.parametrize('level', ['O0', 'O1', 'O3', 'O4'])
def test_levels_without_masters_have_nothing_to_decide(level: str, tmp_path: Path) -> None:
    for places in (LOADS, IN_PLACE, HIDDEN):
        for change in places.values():
            model, wrapper = build(level)
            step(model, wrapper)
            change(model, tmp_path)
            edited = model.fc.weight.detach().clone()
            step(model, wrapper)
            assert torch.equal(model.fc.weight, edited)
            assert wrapper.weights_changed() == []
