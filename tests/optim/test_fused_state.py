"""Saved state of the fused optimizers: torch reads ours and we read theirs; copies, pickles, what is refused."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import weakref
from typing import Any

import pytest
import torch
from bits import same, same_bits
from torch import nn
from toy_fused import MOMENTUM, THEIRS, give, options, snapshot, weights

from amp_wrapper import AmpCheckpointError, FusedAdam, FusedAdamW, FusedSGD
from amp_wrapper.optim import FusedOptimizer

pytestmark = pytest.mark.usefixtures('with_and_without_ops')

# -- saving and loading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('theirs_first', [False, True])
@pytest.mark.parametrize('own_kwargs', [dict(fused=True), dict(foreach=True), dict(capturable=True)])
@options
def test_state_dicts_go_both_ways(
    cls: type[FusedOptimizer],
    kwargs: dict[str, Any],
    own_kwargs: dict[str, Any],
    theirs_first: bool,
    device: torch.device,
) -> None:
    if 'capturable' in own_kwargs and (cls is FusedSGD or device.type == 'cpu'):
        own_kwargs = dict(foreach=False)
    parameters = weights(device)
    own, ours = THEIRS[cls](parameters, **own_kwargs, **kwargs), cls(parameters, **kwargs)
    first, second = (own, ours) if theirs_first else (ours, own)
    for seed in range(2):
        give(parameters, seed)
        first.step()
    saved = copy.deepcopy(first.state_dict())
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    start = [p.detach().clone() for p in parameters]
    results = []
    for optimizer in (first, second):
        for parameter, value in zip(parameters, start):
            parameter.data.copy_(value)
        for seed in (5, 6):
            give(parameters, seed)
            optimizer.step()
        results.append([p.detach().clone() for p in parameters])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    # what was loaded is a copy
    again = cls(parameters, **kwargs)
    again.load_state_dict(saved)
    untouched = copy.deepcopy(saved)
    give(parameters, 7)
    again.step()
    for one, other in zip(saved['state'].values(), untouched['state'].values()):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_moments_of_16_bit_parameters_come_back_bit_for_bit(device: torch.device) -> None:
    """torch gives state the parameter's type: second moments below float16's smallest number become 0."""
    mine = weights(device, torch.float16)
    optimizer = FusedAdam(mine)
    for seed in range(2):
        give(mine, seed, scale=1e-4)
        optimizer.step()
    other = FusedAdam(mine)
    other.load_state_dict(optimizer.state_dict())
    for parameter in mine:
        for name, value in optimizer.state[parameter].items():
            loaded = other.state[parameter][name]
            assert same_bits(loaded, value) and loaded.data_ptr() != value.data_ptr()
    # and 16-bit ones, as torch's own saves them, become what this optimizer keeps
    own = torch.optim.Adam(mine)
    own.load_state_dict(optimizer.state_dict())
    narrow = FusedAdam(mine, state_dtype='bfloat16')
    for third, dtype in ((FusedAdam(mine), torch.float32), (narrow, torch.bfloat16)):
        third.load_state_dict(own.state_dict())
        assert {s['exp_avg'].dtype for s in third.state.values()} == {dtype}
        third.step()


def test_momentum_that_torch_saved_is_begun(device: torch.device) -> None:
    mine = weights(device)
    ours = FusedSGD(mine, lr=0.1, momentum=0.9, dampening=0.5)
    buffers = [torch.full_like(p, 2.0) for p in mine]
    saved = ours.state_dict()
    # counted by ours before, stepped by torch's then; older ones wrote None where there was no momentum
    saved['state'] = {
        0: dict(momentum_buffer=buffers[0]),
        1: dict(step=torch.tensor(0.0), momentum_buffer=buffers[1]),
        2: dict(momentum_buffer=None, step=torch.tensor(3.0)),
    }
    ours.load_state_dict(saved)
    assert saved['state'][1]['step'] == 0
    ours.state[mine[0]].pop('step')
    give(mine, 0)
    ours.step()
    for parameter, wanted in zip(mine, (1.8 + 0.5 * mine[0].grad, 1.8 + 0.5 * mine[1].grad, mine[2].grad)):
        torch.testing.assert_close(ours.state[parameter]['momentum_buffer'], wanted)
    assert [int(ours.state[p]['step']) for p in mine] == [2, 2, 1]


def test_hooks_of_loading_see_and_change_what_is_loaded(device: torch.device) -> None:
    mine = weights(device, torch.float16)
    source = FusedAdam(mine)
    give(mine, 0)
    source.step()
    target = FusedAdam(mine)
    seen = []

    def before(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {k: {**v, 'exp_avg': v['exp_avg'] * 2} for k, v in state_dict['state'].items()}
        return {**state_dict, 'state': state}

    target.register_load_state_dict_pre_hook(before)
    target.register_load_state_dict_post_hook(lambda o: seen.append(o.state[mine[0]]['exp_avg'].clone()))
    target.load_state_dict(source.state_dict())
    assert torch.equal(seen[0], source.state[mine[0]]['exp_avg'] * 2)
    sgd = FusedSGD(mine, **MOMENTUM)
    shown: list[Any] = []
    sgd.register_state_dict_post_hook(lambda o, d: shown.append(list(d['state'])))
    sgd.found_inf = torch.ones((), device=device)
    sgd.step()
    assert sgd.state_dict()['state'] == {} and shown == [[]] and len(sgd._optimizer_state_dict_post_hooks) == 1


def edited(saved: dict[str, Any], **changes: Any) -> dict[str, Any]:
    saved = copy.deepcopy(saved)
    for name, value in changes.items():
        saved['state'][1][name] = value
        if value is None:
            del saved['state'][1][name]
    return saved


def test_a_state_dict_that_does_not_fit_is_refused_whole(device: torch.device) -> None:
    mine = weights(device)
    optimizer, sgd = FusedAdam(mine), FusedSGD(mine, **MOMENTUM)
    for seed in range(2):
        give(mine, seed)
        optimizer.step()
        sgd.step()
    saved = optimizer.state_dict()
    adagrad = torch.optim.Adagrad(mine)
    give(mine, 0)
    adagrad.step()
    foreign = {**adagrad.state_dict(), 'param_groups': saved['param_groups']}
    cases: list[tuple[FusedOptimizer, dict[str, Any], str]] = [
        (optimizer, edited(saved, exp_avg=torch.zeros(3)), r"state\[1\]\['exp_avg'\] .*has shape \(3,\)"),
        (optimizer, edited(saved, exp_avg=5), 'is a int, no tensor'),
        (optimizer, edited(saved, exp_avg_sq=None), r"state\[1\] of the state dict has no 'exp_avg_sq'"),
        (optimizer, edited(saved, step=torch.zeros(2)), r"'step'\] of the state dict has shape \(2,\)"),
        (optimizer, foreign, r"has no 'exp_avg', but 'step', 'sum'"),
        (optimizer, sgd.state_dict(), r"param_groups\[0\] of the state dict has no 'betas'"),
        (sgd, saved, "has no 'momentum'"),
    ]
    for target, wrong, words in cases:
        before = snapshot(mine, target), target.param_groups[0]
        with pytest.raises(AmpCheckpointError, match=words):
            target.load_state_dict(wrong)
        assert same(snapshot(mine, target), before[0]) and target.param_groups[0] is before[1]
        assert not target._optimizer_load_state_dict_pre_hooks
    # a count that is a number, as old files have it
    optimizer.load_state_dict(edited(saved, step=7))
    optimizer.step()
    assert [int(optimizer.state[p]['step']) for p in mine] == [3, 8, 3]


@options
def test_copies_go_on_alike(cls: type[FusedOptimizer], kwargs: dict[str, Any], device: torch.device) -> None:
    mine = weights(device, torch.bfloat16)
    optimizer = cls(mine, state_dtype='bfloat16', **kwargs)
    give(mine, 0)
    optimizer.step()
    copied = copy.deepcopy(optimizer)
    pickled = pickle.loads(pickle.dumps(optimizer))
    for duplicate in (copied, pickled):
        assert duplicate.state_dtype is torch.bfloat16 and type(duplicate) is cls
        theirs = duplicate.param_groups[0]['params']
        assert theirs[0] is not mine[0]
        for seed in (1, 2):
            give(theirs, seed)
            duplicate.step()
    for seed in (1, 2):
        give(mine, seed)
        optimizer.step()
    for duplicate in (copied, pickled):
        assert same(snapshot(duplicate.param_groups[0]['params'], duplicate), snapshot(mine, optimizer))


def test_old_pickles_are_completed(device: torch.device) -> None:
    mine = weights(device)
    optimizer = FusedAdamW(mine)
    give(mine, 0)
    optimizer.step()
    state = optimizer.__getstate__()
    for group in state['param_groups']:
        for key in ('maximize', 'amsgrad', 'fused', 'foreach', 'capturable', 'decoupled_weight_decay'):
            group.pop(key, None)
    state['state'][mine[0]]['step'] = 1
    del state['_state_dtype']
    old = FusedAdamW.__new__(FusedAdamW)
    old.__setstate__(state)
    old.step()
    assert old.param_groups[0]['decoupled_weight_decay'] is True and old.state_dtype is torch.float32
    assert [float(old.state[p]['step']) for p in mine] == [2, 2, 2]


def test_an_optimizer_that_is_dropped_frees_its_tensors(device: torch.device) -> None:
    mine = weights(device)
    optimizer = FusedAdam(mine)
    give(mine, 0)
    optimizer.step()
    gradient, moment = weakref.ref(mine[0].grad), weakref.ref(optimizer.state[mine[0]]['exp_avg'])
    optimizer.zero_grad()
    assert gradient() is None
    optimizer.load_state_dict(optimizer.state_dict())
    gc.collect()
    assert moment() is None


def test_momentum_that_a_skipped_step_made_is_not_saved(device: torch.device) -> None:
    """torch's SGD would take its zeros for a momentum that was begun, and dampen the first gradient."""
    weight = nn.Parameter(torch.ones(3, device=device))
    mine = FusedSGD([weight], lr=0.5, momentum=0.5, dampening=0.5)
    weight.grad = torch.full_like(weight, math.inf)
    mine.found_inf = torch.ones((), device=device)  # type: ignore[attr-defined]
    mine.step()
    assert mine.state_dict()['state'] == {}
    theirs = torch.optim.SGD([weight], lr=0.5, momentum=0.5, dampening=0.5)
    theirs.load_state_dict(mine.state_dict())
    weight.grad = torch.ones_like(weight)
    theirs.step()
    assert weight.tolist() == [0.5, 0.5, 0.5]
