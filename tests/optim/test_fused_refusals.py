"""What the fused optimizers refuse, before anything changes; configs, schedulers, profiles and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import same, same_bits
from mmengine.config import ConfigDict
from mmengine.optim import build_optim_wrapper
from mmengine.registry import OPTIMIZERS as MMENGINE_OPTIMIZERS
from mmengine.registry import DefaultScope
from ops_models import without_compiled
from torch import nn
from toy_fused import MOMENTUM, NEWER, THEIRS, give, options, snapshot, weights

from amp_wrapper import AmpConfigError, AmpUsageError, FusedAdam, FusedAdamW, FusedSGD
from amp_wrapper.optim import FusedOptimizer, Update

pytestmark = pytest.mark.usefixtures('with_and_without_ops')

# -- refusals ---------------------------------------------------------------------------------------------------------


def sparse(parameters: list[nn.Parameter]) -> None:
    parameters[1].grad = torch.randn_like(parameters[1]).to_sparse()


WRONG: dict[str, tuple[Callable[[FusedOptimizer, list[nn.Parameter]], None], str]] = {
    'sparse': (
        lambda o, p: sparse(p),
        r"parameter \(param_groups\[0\]\['params'\]\[1\]\) has a sparse gradient: use torch",
    ),
    'differentiable': (lambda o, p: o.param_groups[0].update(differentiable=True), "'differentiable'] is True"),
    'lr': (lambda o, p: o.param_groups[0].update(lr='fast'), r"param_groups\[0\]\['lr'\] is 'fast': a number"),
    'lr-tensor': (lambda o, p: o.param_groups[0].update(lr=torch.ones(2)), r'a tensor of shape \(2,\): one number'),
    'weight_decay': (lambda o, p: o.param_groups[0].update(weight_decay=None), 'numbers are expected'),
}


@pytest.mark.parametrize('wrong', WRONG)
@pytest.mark.parametrize('begun', [False, True])
@options
def test_refusals_come_before_anything_changes(
    cls: type[FusedOptimizer], kwargs: dict[str, Any], begun: bool, wrong: str, device: torch.device
) -> None:
    mine = weights(device)
    optimizer = cls(mine, **kwargs)
    give(mine, 0)
    if begun:
        optimizer.step()
    kept = dict(optimizer.param_groups[0])
    before = snapshot(mine, optimizer)
    edit, words = WRONG[wrong]
    edit(optimizer, mine)
    for _ in range(2):
        with pytest.raises(AmpUsageError, match=words):
            optimizer.step()
    optimizer.param_groups[0].update(kept)
    assert same(snapshot(mine, optimizer), before) and bool(optimizer.state) == (begun and bool(before[3:]))
    give(mine, 1)
    optimizer.step()
    assert not same(snapshot(mine, optimizer), before)


@pytest.mark.parametrize('begun', [False, True])
@pytest.mark.parametrize(
    ('edit', 'words'),
    [
        (dict(exp_avg=torch.zeros(3)), r"state\['exp_avg'\] of parameter .*has shape \(3,\)"),
        (dict(exp_avg_sq=torch.zeros(16, dtype=torch.int32)), 'has dtype int32'),
        (dict(step=torch.zeros(2)), r"state\['step'\] .* has shape \(2,\)"),
        (dict(step='two'), 'is a str: one number'),
        (dict(step=None), "state.'step'. .* is missing, without which"),
    ],
)
def test_a_state_that_cannot_be_is_refused(edit: dict[str, Any], words: str, begun: bool, device: torch.device) -> None:
    mine = weights(device)
    optimizer = FusedAdam([*nn.Module().parameters(), *mine])
    give(mine, 0)
    optimizer.step()
    if not begun:
        optimizer._lists = None
    before = [p.detach().clone() for p in mine], float(optimizer.state[mine[2]]['step'])
    optimizer.state[mine[0]].update(edit)
    with pytest.raises(AmpUsageError, match=words):
        optimizer.step()
    assert all(map(torch.equal, mine, before[0])) and float(optimizer.state[mine[2]]['step']) == before[1]


@pytest.mark.parametrize('begun', [False, True])
def test_an_op_that_refuses_takes_the_new_state_along(begun: bool, device: torch.device) -> None:
    if without_compiled(device):
        pytest.skip('all is looked at before the first call then')
    storage = torch.ones(8, device=device)
    mine = [nn.Parameter(torch.ones(4, device=device)), nn.Parameter(storage[:6]), nn.Parameter(storage[2:])]
    # those with other state are a second call
    optimizer = FusedAdam([dict(params=mine[:1], amsgrad=True), dict(params=mine[1:])])
    if begun:
        mine[1].grad = torch.ones_like(mine[1])
        optimizer.step()
        mine[2].grad = torch.ones_like(mine[2])
    else:
        give(mine[1:], 0)
    before = snapshot(mine, optimizer)
    with pytest.raises(AmpUsageError, match='share memory'):
        optimizer.step()
    assert same(snapshot(mine, optimizer), before) and len(optimizer.state) == begun
    # and in a second call, when the first has written: those are counted
    mine[0].grad, mine[2].grad = torch.ones_like(mine[0]), None
    optimizer.step()
    mine[0].grad, mine[2].grad = torch.zeros_like(mine[0]), None
    counts = [float(optimizer.state[p]['step']) for p in mine[:2]]
    mine[1].data = torch.ones(1, device=device).expand(6)
    with pytest.raises(AmpUsageError, match='share memory'):
        optimizer.step()
    assert [float(optimizer.state[p]['step']) for p in mine[:2]] == counts


def test_what_was_written_before_a_refusal_keeps_its_state(device: torch.device) -> None:
    if without_compiled(device):
        pytest.skip('all is looked at before the first call then')
    storage = torch.ones(8, device=device)
    mine = [nn.Parameter(torch.ones(4, device=device)), nn.Parameter(storage[:6]), nn.Parameter(storage[2:])]
    optimizer = FusedAdam([dict(params=mine[:1]), dict(params=mine[1:], amsgrad=True)])
    give(mine, 0)
    # those with other state are a second call, which refuses
    with pytest.raises(ValueError, match='share memory'):
        optimizer.step()
    assert list(optimizer.state) == [mine[0]] and float(optimizer.state[mine[0]]['step']) == 1
    assert not torch.equal(mine[0], torch.ones_like(mine[0])) and bool((storage == 1).all())


def test_data_that_is_exchanged_is_noticed(device: torch.device) -> None:
    """``module.double()`` and pruning leave the parameter, and give it other numbers."""
    mine = [nn.Parameter(torch.ones(4, device=device)), nn.Parameter(torch.ones(3, device=device))]
    optimizer, exact = FusedSGD(mine, lr=0.1), 1.0
    for edit in (lambda t: t, lambda t: t[:2].clone(), lambda t: t.double()):
        for parameter in mine:
            parameter.grad = None
            parameter.data = edit(parameter.data)
            parameter.grad = torch.full_like(parameter, 1 / 3)
        optimizer.step()
        exact -= 0.1 / 3
    assert [p.shape[0] for p in mine] == [2, 2] and mine[0].dtype is torch.float64
    # the last step was computed in float64
    before = mine[0].detach().clone()
    optimizer.step()
    torch.testing.assert_close(before - mine[0].detach(), torch.full_like(before, 0.1 / 3), rtol=1e-14, atol=0)
    assert float(mine[0].detach()[0]) == pytest.approx(exact - 0.1 / 3, rel=1e-6)


def test_arguments_that_cannot_be() -> None:
    mine = [nn.Parameter(torch.ones(2))]
    with pytest.raises(AmpConfigError) as caught:
        FusedSGD(mine, lr=0.1, state_dtype='float64', fused=False, differentiable=True)
    assert len(caught.value.problems) == 3
    assert 'torch.optim.SGD' in str(caught.value) and "state_dtype='float64'" in str(caught.value)
    for kwargs in (dict(lr=-1.0), dict(betas=(1.5, 0.9)), dict(eps=-1.0)):
        with pytest.raises(ValueError, match='Invalid'):
            FusedAdam(mine, **kwargs)
    for cls, own in THEIRS.items():
        assert FusedOptimizer in cls.__mro__
        names = cls(mine, lr=0.1, fused=True).param_groups[0].keys()
        assert names - NEWER == own(mine, lr=0.1).param_groups[0].keys() - NEWER
    assert FusedAdam(mine, foreach=True, capturable=True).param_groups[0]['foreach'] is True


# -- doors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['FusedAdam', 'FusedAdamW', 'FusedSGD', 'amp_wrapper.FusedAdamW'])
def test_configs_name_them(name: str) -> None:
    config = ConfigDict(
        dict(type='OptimWrapper', optimizer=dict(type=name, lr=0.25, weight_decay=0.1, state_dtype='bfloat16'))
    )
    config.paramwise_cfg = dict(bias_lr_mult=2.0)
    wrapper = build_optim_wrapper(nn.Linear(2, 2), config)
    assert type(wrapper.optimizer).__name__ == name.split('.')[-1]
    assert {g['lr'] for g in wrapper.optimizer.param_groups} == {0.25, 0.5}
    with DefaultScope.overwrite_default_scope('amp_wrapper'):
        assert MMENGINE_OPTIMIZERS.get(name).__module__.startswith('amp_wrapper.optim')


def test_schedulers_hooks_and_profiles_see_a_step(device: torch.device) -> None:
    mine = weights(device)
    optimizer = FusedAdamW(mine, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2)
    calls = []
    optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append(len(o.state)))
    give(mine, 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    scheduler.step()
    assert calls == [3] and optimizer.param_groups[0]['lr'] == pytest.approx(0.075)
    assert 'Optimizer.step#FusedAdamW.step' in {event.key for event in profile.key_averages()}


def test_torch_compile_leaves_a_step_alone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = weights(device), weights(device)
    compiled, plain = FusedSGD(mine, **MOMENTUM), FusedSGD(other, **MOMENTUM)
    inner, traced = FusedSGD._take_step, []

    def take_step(optimizer: FusedSGD, update: Update | None) -> None:
        traced.append(torch.compiler.is_compiling())
        inner(optimizer, update)

    call = torch.compile(lambda: compiled.step(), backend='eager')
    for seed in range(3):
        give(mine, seed)
        give(other, seed)
        with monkeypatch.context() as patch:
            patch.setattr(FusedSGD, '_take_step', take_step)
            call()
        plain.step()
    assert all(map(same_bits, mine, other)) and traced == [False] * 3
