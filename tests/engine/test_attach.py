"""Attaching a model and detaching it again: what is cast, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bits import differing
from torch import nn
from toy_engine import CAST_LEVELS, Net, Run, batch, momentum

from amp_wrapper.autocast import regions
from amp_wrapper.autocast.op_set import OpSet
from amp_wrapper.casting.roots import unwrap
from amp_wrapper.engine import AmpEngine, Stage
from amp_wrapper.errors import AmpAttachError, AmpConfigError, AmpUsageError
from amp_wrapper.policy import LEVELS, resolve

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
MASTER_LEVELS = {'O2': torch.float16, 'O5': torch.bfloat16}


# -- attaching ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('verbosity', [0, 1, 2])
def test_attach(level: str, verbosity: int, device: torch.device, log: list[str]) -> None:
    run = Run(level, device, verbosity=verbosity)
    assert run.engine.attached and run.engine.stage is Stage.READY
    assert run.parameter('fc.weight').dtype is CAST_LEVELS.get(level, F32)
    assert run.engine.parts.casts.casts == (level in CAST_LEVELS)
    run.engine.attach(run.model)
    run.train(0, 1)
    wanted = {'fc.weight', 'fc.bias', 'out.weight', 'out.bias'} | ({'bn.weight', 'bn.bias'} if level == 'O3' else set())
    told = {name for name in wanted if any(f' {name} ' in line for line in log)}
    assert told == (wanted if verbosity == 2 and level in CAST_LEVELS else set())
    assert level in CAST_LEVELS or log == []


@pytest.mark.parametrize('level', MASTER_LEVELS)
def test_masters_are_unrounded_and_in_the_optimizer(level: str, device: torch.device) -> None:
    plain, run = Run('O0', device, attach=False), Run(level, device)
    masters = list(run.engine.master_params())
    assert [id(m) for m in masters] == [id(p) for g in run.optimizer.param_groups for p in g['params']]
    for master, before, weight in zip(masters, plain.model.parameters(), run.model.parameters()):
        assert master.dtype is F32 and torch.equal(master, before)
        assert torch.equal(weight, master.to(weight.dtype))
    assert masters[2] is run.model.bn.weight


def test_only_what_the_optimizer_owns_is_cast(device: torch.device) -> None:
    model = Net().to(device)
    engine = AmpEngine(resolve('O2'), momentum(model.out.parameters()))
    engine.attach(model)
    assert model.out.weight.dtype is F16 and model.fc.weight.dtype is F32
    x, _ = batch(device)
    engine.backward(model(x).sum())
    engine.step()
    assert model.fc.weight.grad is not None and model.fc.weight.grad.dtype is F32


def test_frozen_parts_are_cast_with_the_rest(device: torch.device) -> None:
    model = Net().to(device)
    model.fc.requires_grad_(False)
    policy = resolve('O2', loss_scale=8.0)
    engine = AmpEngine(policy, momentum([p for p in model.parameters() if p.requires_grad]))
    engine.attach(model)
    assert model.fc.weight.dtype is F16
    model.fc.requires_grad_(True)
    engine.optimizer.add_param_group({'params': list(model.fc.parameters())})
    masters = list(engine.master_params())
    assert len(masters) == 6 and all(m.dtype is F32 for m in masters) and masters[4] is not model.fc.weight
    before = masters[4].clone()
    engine.backward(model(batch(device)[0]).square().sum())
    engine.step()
    assert not torch.equal(masters[4], before) and torch.equal(model.fc.weight, masters[4].half())


def test_refused_attachment_changes_nothing(device: torch.device) -> None:
    run = Run('O2', device, attach=False)
    run.model.out.half()
    before = run.bits()
    groups = [list(group['params']) for group in run.optimizer.param_groups]
    with pytest.raises(AmpAttachError, match=r'out\.weight'):
        run.engine.attach(run.model)
    assert differing(before, run.bits()) == [] and not run.engine.attached
    assert all(a is b for g, k in zip(run.optimizer.param_groups, groups) for a, b in zip(g['params'], k))


def test_inference_needs_no_optimizer(device: torch.device) -> None:
    model = Net().to(device).eval()
    engine = AmpEngine(resolve('O2'), None)
    engine.attach(model)
    assert model.fc.weight.dtype is F16 and model(batch(device)[0]).dtype is F32
    engine.detach()
    assert model.fc.weight.dtype is F32


class FullyShardedDataParallel(nn.Module):
    pass


@pytest.mark.parametrize(
    ('make', 'words'),
    [
        (lambda p: torch.optim.LBFGS(p), 'LBFGS'),
        (lambda p: type('Mine', (torch.optim.LBFGS,), {})(p), 'LBFGS'),
        (lambda p: 'SGD', "'SGD' must be a torch.optim.Optimizer"),
    ],
    ids=['LBFGS', 'subclass', 'string'],
)
def test_optimizers_that_cannot_be_wrapped(make: Any, words: str, device: torch.device) -> None:
    optimizer = make([nn.Parameter(torch.ones(1, device=device))])
    with pytest.raises((AmpAttachError, AmpConfigError), match=words):
        AmpEngine(resolve('O2'), optimizer)
    assert AmpEngine(resolve('O2', enabled=False), optimizer).optimizer is optimizer


def test_unwrap(device: torch.device) -> None:
    model = nn.Linear(1, 1).to(device)
    compiled = nn.Module()
    compiled._orig_mod = nn.DataParallel(model)
    assert unwrap(model) is model and unwrap(nn.DataParallel(model)) is model and unwrap(compiled) is model
    with pytest.raises(AmpAttachError, match='FullyShardedDataParallel'):
        unwrap(FullyShardedDataParallel())


# -- detaching and editing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
def test_detach(level: str, device: torch.device) -> None:
    run = Run(level, device)
    objects = dict(run.model.named_parameters())
    run.train(0, 1)
    masters = [m.detach().clone() for m in run.engine.master_params()]
    states = [run.optimizer.state[m]['momentum_buffer'].clone() for m in run.engine.master_params()]
    run.engine.detach()
    assert not run.engine.attached
    held = [p for group in run.optimizer.param_groups for p in group['params']]
    assert len(run.optimizer.state) == len(held)
    for (name, parameter), master, state, mine in zip(run.model.named_parameters(), masters, states, held):
        assert parameter is objects[name] is mine and parameter.dtype is F32
        assert torch.equal(parameter, master.float())
        buffer = run.optimizer.state[mine]['momentum_buffer']
        assert buffer.dtype is F32 and torch.equal(buffer, state.float())
    loss = run.model(batch(device)[0]).sum()
    assert loss.dtype is F32
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.engine.attach(run.model)
    run.train(2)


def test_detach_during_accumulation(device: torch.device) -> None:
    run = Run('O2', device)
    run.backward()
    with pytest.raises(AmpUsageError, match='middle of an accumulation'):
        run.engine.detach()
    assert run.parameter('fc.weight').dtype is F16
    run.engine.step()
    run.engine.zero_grad()
    run.engine.detach()
    run.engine.detach()
    assert run.parameter('fc.weight').dtype is F32


def test_detach_lets_edits_win(device: torch.device) -> None:
    run = Run('O2', device)
    run.parameter('fc.bias').data.fill_(2.5)
    run.engine.detach()
    assert run.parameter('fc.bias').tolist() == [2.5] * 6


# -- forward context ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('fails', [True, False])
def test_forward_context(level: str, fails: bool, device: torch.device) -> None:
    run = Run(level, device)
    wanted = {'O1': F16, 'O4': BF16}.get(level)
    try:
        with run.engine.forward_context(run.model):
            assert torch.is_autocast_enabled(device.type) == (wanted is not None)
            assert wanted is None or torch.get_autocast_dtype(device.type) is wanted
            regions.enter(OpSet().keys)
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert not torch.is_autocast_enabled(device.type) and regions.count() == 0
