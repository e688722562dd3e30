"""An optimizer that a wrapper holds, stepped by somebody else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from toy_optimizers import Sam

from amp_wrapper import AmpOptimWrapper, AmpUsageError
from amp_wrapper.policy import LEVELS, resolve


def scaled(level: str) -> bool:
    policy = resolve(level)
    return policy.loss_scale.dynamic or policy.loss_scale.init_scale != 1.0


def awaits(level: str) -> bool:
    return scaled(level) or resolve(level).master_weights


def build(level: str, device: torch.device, sam: bool = False, **words: Any) -> tuple[nn.Module, Any, AmpOptimWrapper]:
    model = nn.Linear(3, 2).to(device)
    optimizer: Any = (
        Sam(model.parameters(), torch.optim.SGD, lr=0.25) if sam else torch.optim.SGD(model.parameters(), lr=0.25)
    )
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=optimizer, verbosity=0, **words)
    wrapper.attach(model)
    return model, optimizer, wrapper


def backward(model: nn.Module, wrapper: AmpOptimWrapper, device: torch.device) -> None:
    with wrapper.optim_context(model):
        loss = model(torch.ones(2, 3, device=device)).float().sum()
    wrapper.backward(wrapper.scale_loss(loss))


@pytest.mark.parametrize('level', LEVELS)
def test_a_step_beside_the_wrapper(level: str, device: torch.device) -> None:
    """Refused where gradients are not what they should be; nothing has happened, and the wrapper's own step is right."""
    scale = dict(init_scale=4.0) if scaled(level) else None
    model, optimizer, wrapper = build(level, device, loss_scale=scale)
    backward(model, wrapper, device)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if not awaits(level):
        optimizer.step()
        assert not model.state_dict()['bias'].equal(before['bias'])
        return
    with pytest.raises(AmpUsageError, match=r'SGD\.step\(\) beside the wrapper.*optim_wrapper\.step\(\)'):
        optimizer.step()
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    wrapper.step()
    wrapper.zero_grad()
    assert model.state_dict()['bias'].equal(before['bias'] - 0.25 * 2)


@pytest.mark.parametrize('level', LEVELS)
def test_sam_by_its_parts(level: str, device: torch.device) -> None:
    """Its inner step would train nothing at levels with masters, and take scaled gradients at others."""
    model, optimizer, wrapper = build(level, device, sam=True)
    backward(model, wrapper, device)
    if not resolve(level).master_weights:
        optimizer.first_step()
        backward(model, wrapper, device)
    if not awaits(level):
        optimizer.second_step()
        return
    with pytest.raises(AmpUsageError, match=r'amp\.initialize\(model, optimizer\)'):
        optimizer.base_optimizer.step()


@pytest.mark.parametrize('level', LEVELS)
def test_steps_in_which_no_gradient_waits(level: str, device: torch.device) -> None:
    """As scripts take one before a scheduler is made; and after the wrapper has let go of the model."""
    model, optimizer, wrapper = build(level, device)
    optimizer.step()
    backward(model, wrapper, device)
    wrapper.step()
    wrapper.zero_grad()
    optimizer.step()
    wrapper.detach()
    before = model.bias.detach().clone()
    model(torch.ones(2, 3, device=device, dtype=model.bias.dtype)).float().sum().backward()
    optimizer.step()
    assert model.bias.detach().equal(before - 0.25 * 2)


@pytest.mark.parametrize('level', [level for level in LEVELS if resolve(level).master_weights])
def test_masters_whose_gradients_did_not_arrive(level: str, device: torch.device) -> None:
    """A backward() without the wrapper leaves gradients at the 16-bit weights alone."""
    model, optimizer, wrapper = build(level, device)
    with wrapper.optim_context(model):
        loss = model(torch.ones(2, 3, device=device)).float().sum()
    loss.backward()
    with pytest.raises(AmpUsageError, match='beside the wrapper'):
        optimizer.step()
    # who has given them gradients of his own steps as he likes
    for master in wrapper.master_params():
        master.grad = torch.ones_like(master)
    optimizer.step()
