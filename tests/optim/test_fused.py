"""FusedAdam, FusedAdamW and FusedSGD are torch's optimizers: steps, groups, state, errors; with a library and without one."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import same, same_bits
from fused_training import KINDS, MOMENTUM, NEWER, THEIRS, give, snapshot, weights
from mmengine.config import ConfigDict
from mmengine.optim import build_optim_wrapper
from op_lists import NoHostRead, skip_without_library
from pairs import pairs
from torch import Tensor, nn

from amp_wrapper import AmpCheckpointError, AmpConfigError, AmpUsageError, FusedAdam, FusedAdamW, FusedSGD

pytestmark = pytest.mark.usefixtures('with_and_without_ops')
options = pytest.mark.parametrize(('cls', 'kwargs'), list(KINDS.values()), ids=list(KINDS))


def close(one: list[nn.Parameter], other: list[nn.Parameter], rtol: float = 1e-4, message: str = '') -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol / 10, msg=message or None)


# -- the same steps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('cls', 'kwargs'),
    [
        (FusedAdam, dict(lr=0.01, weight_decay=0.1, maximize=True)),
        (FusedAdam, dict(betas=(0.8, 0.99), eps=1e-3, amsgrad=True)),
        (FusedAdamW, dict(lr=0.01)),
        (FusedAdamW, dict(amsgrad=True, maximize=True, weight_decay=0.3)),
        (FusedSGD, dict(lr=0.1, weight_decay=0.1, maximize=True)),
        (FusedSGD, dict(**MOMENTUM, dampening=0.5, weight_decay=0.1)),
        (FusedSGD, dict(**MOMENTUM, nesterov=True, maximize=True)),
    ],
)
def test_steps_are_those_of_torch(cls: Any, kwargs: dict[str, Any], device: torch.device) -> None:
    """Bit for bit where torch's vector instructions are ours; of float64 and complex parameters, too."""
    for dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        mine, theirs = weights(device, dtype), weights(device, dtype)
        fused = dict(foreach=False) if dtype.is_complex else dict(fused=True)
        ours, own = cls(mine, **kwargs), THEIRS[cls](theirs, **fused, **kwargs)
        for seed in range(4):
            give(mine, seed)
            give(theirs, seed)
            ours.step()
            own.step()
        is_single = dtype in (torch.float32, torch.complex64)
        if dtype is torch.float32 and device.type == 'cpu' and torch.backends.cpu.get_cpu_capability() == 'AVX512':
            assert all(map(same_bits, mine, theirs))
        close(mine, theirs, rtol=5e-6 if is_single else 1e-12)
        moments = [v for state in ours.state.values() for name, v in state.items() if name != 'step']
        assert all(moment.dtype is dtype for moment in moments)
    assert isinstance(ours, THEIRS[cls])
    assert set(ours.param_groups[0]) - NEWER == set(own.param_groups[0]) - NEWER
    assert set(ours.state[mine[0]]) - {'step'} == set(own.state[theirs[0]]) - {'step'}


@options
def test_late_and_missing_gradients(cls: Any, kwargs: dict[str, Any], device: torch.device) -> None:
    mine, theirs = weights(device), weights(device)
    ours, own = cls(mine, **kwargs), THEIRS[cls](theirs, **kwargs)
    ours.step()
    assert not ours.state
    for seed, present in enumerate(((0,), (0, 1), (1, 2), (), (0, 1, 2), (2,))):
        for parameters in (mine, theirs):
            give(parameters, seed)
            for index in {0, 1, 2} - set(present):
                parameters[index].grad = None
        ours.step()
        own.step()
        close(mine, theirs, 1e-5)
    if cls is not FusedSGD:
        assert [int(ours.state[p]['step']) for p in mine] == [3, 3, 3]


@options
def test_edits_of_groups_and_state_count(cls: Any, kwargs: dict[str, Any], device: torch.device) -> None:
    def grouped(parameters: list[nn.Parameter], kind: Any, **more: Any) -> Any:
        groups = [dict(params=parameters[:1], lr=0.3), dict(params=parameters[1:2], weight_decay=0.2, maximize=True)]
        return kind(groups, **{**kwargs, **more})

    mine, theirs = weights(device), weights(device)
    ours, own = grouped(mine, cls), grouped(theirs, THEIRS[cls], foreach=False)
    edits: list[Callable[[Any, list[nn.Parameter]], None]] = [
        lambda o, p: None,
        lambda o, p: o.add_param_group(dict(params=[p[2]], lr=0.01)),
        lambda o, p: o.param_groups[0].update(lr=0.05),
        lambda o, p: o.param_groups[1].update(weight_decay=0.5, maximize=False),
        # torch edits the state of a parameter so: it begins anew
        lambda o, p: o.state.pop(p[0], None),
        # or so
        lambda o, p: o.state.update({q: {n: v + 1 for n, v in s.items()} for q, s in o.state.items()}),
        # a parameter moves to another group
        lambda o, p: o.param_groups[0]['params'].append(o.param_groups[1]['params'].pop()),
        lambda o, p: o.load_state_dict(copy.deepcopy(o.state_dict())),
        lambda o, p: o.param_groups[2].update(lr=0.2),
        # the state of one parameter is given to another
        lambda o, p: o.state.update({nn.Parameter(torch.zeros(1)): o.state.popitem()[1]} if o.state else {}),
    ]
    if cls is FusedSGD:
        edits += [lambda o, p, m=m: o.param_groups[2].update(momentum=m) for m in (0.5, 0)]  # type: ignore[misc]
        edits += [lambda o, p: o.param_groups[2].update(momentum=0.2, dampening=0.1)]
    else:
        # a list, which may change in place
        edits += [lambda o, p: o.param_groups[2].update(betas=[0.5, 0.9], eps=1e-2)]
        edits += [lambda o, p: o.param_groups[2]['betas'].__setitem__(0, 0.25)]
    for number, edit in enumerate(edits):
        for optimizer, parameters in ((ours, mine), (own, theirs)):
            edit(optimizer, parameters)
            give(parameters, number)
            optimizer.step()
        close(mine, theirs, message=f'edit {number}')


@options
def test_learning_rates_in_tensors_and_schedulers(cls: Any, kwargs: dict[str, Any], device: torch.device) -> None:
    mine, theirs, hosted = weights(device), weights(device), weights(device)
    settings = {**kwargs, 'lr': 0.1}
    ours = cls(mine, **{**settings, 'lr': torch.tensor(0.1, device=device)})
    # of another type, and on the CPU wherever the parameters are
    third = cls(hosted, **{**settings, 'lr': torch.tensor(0.1, dtype=torch.float64)})
    own = THEIRS[cls](theirs, **settings, foreach=False)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (ours, own, third)]
    for seed in range(3):
        for parameters in (mine, theirs, hosted):
            give(parameters, seed)
        with NoHostRead():
            ours.step()
        third.step()
        own.step()
        for scheduler in schedulers:
            scheduler.step()
    assert isinstance(ours.param_groups[0]['lr'], Tensor)
    close(mine, theirs)
    close(hosted, theirs)


@pytest.mark.parametrize('state_dtype', [None, 'bfloat16', torch.float32])
def test_moments_of_16_bit_parameters(state_dtype: Any, device: torch.device) -> None:
    skip_without_library(device)
    mine, exact = weights(device, torch.bfloat16), weights(device)
    optimizer = FusedAdamW(mine, lr=0.01, state_dtype=state_dtype)
    reference = torch.optim.AdamW(exact, lr=0.01)
    for parameter, weight in zip(exact, mine):
        parameter.data.copy_(weight)
    for seed in range(3):
        give(mine, seed)
        for parameter, weight in zip(exact, mine):
            parameter.grad = weight.grad.float()
        optimizer.step()
        reference.step()
    for parameter, weight in zip(exact, mine):
        torch.testing.assert_close(weight.float(), parameter, rtol=0.02, atol=0.01)
        state, own = optimizer.state[weight], reference.state[parameter]
        wanted = torch.bfloat16 if state_dtype == 'bfloat16' else torch.float32
        assert state['exp_avg'].dtype is state['exp_avg_sq'].dtype is wanted is optimizer.state_dtype
        assert state['step'].dtype is torch.float32
        if wanted is torch.float32:
            torch.testing.assert_close(state['exp_avg_sq'], own['exp_avg_sq'])


# -- overflow ---------------------------------------------------------------------------------------------------------


@pairs(kind=KINDS, pattern=['xcc', 'xxx', 'cxcx'], dtype=[torch.float32, torch.float64])
def test_grad_scaler_skips_on_the_device(kind: str, pattern: str, dtype: torch.dtype, device: torch.device) -> None:
    """A skipped step (x) leaves everything as it was; torch's own optimizer goes on from the state that is saved."""
    cls, kwargs = KINDS[kind]
    mine, theirs = weights(device, dtype), weights(device, dtype)
    ours, own = cls(mine, **kwargs), THEIRS[cls](theirs, foreach=False, **kwargs)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=2)
    scaler.scale(torch.zeros((), device=device))
    for seed, letter in enumerate(pattern):
        scale = float(scaler.get_scale())
        give(mine, seed, scale, bad=math.inf if letter == 'x' else None)
        before, gradients = snapshot(mine, ours), [p.grad.clone() for p in mine]
        with NoHostRead():
            scaler.step(ours)
        scaler.update()
        assert all(map(same_bits, gradients, (p.grad for p in mine)))
        if letter == 'x':
            assert same(snapshot(mine, ours), before) and scaler.get_scale() == scale / 2
        else:
            give(theirs, seed)
            own.step()
    close(mine, theirs)
    resumed = THEIRS[cls](theirs, foreach=False, **kwargs)
    resumed.load_state_dict(copy.deepcopy(ours.state_dict()))
    for seed in (20, 21):
        give(mine, seed)
        give(theirs, seed)
        ours.step()
        resumed.step()
    close(mine, theirs)


def test_flag_may_be_a_sum_over_devices(device: torch.device) -> None:
    """torch's fused kernels compare with 1: two devices with infinities make 2, and the gradients are applied."""
    mine, other = weights(device), weights(device)
    optimizer = FusedSGD(mine, **MOMENTUM)
    give(mine, 0, bad=math.inf)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor([2.0], device=device), None
    optimizer.step()
    assert all(map(torch.equal, mine, other)) and optimizer.state_dict()['state'] == {}
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(0.0, dtype=torch.float64), 4.0
    give(mine, 1, scale=4.0)
    optimizer.step()
    give(other, 1)
    FusedSGD(other, **MOMENTUM).step()
    assert all(map(same_bits, mine, other))
    optimizer.grad_scale = 'big'
    with pytest.raises(AmpUsageError, match="grad_scale is 'big'"):
        optimizer.step()


# -- saving and loading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('theirs_first', [False, True])
@options
def test_state_dicts_go_both_ways(cls: Any, kwargs: dict[str, Any], theirs_first: bool, device: torch.device) -> None:
    """Through a file; what was loaded is a copy."""
    for own_kwargs in (dict(fused=True), dict(foreach=True)):
        parameters = weights(device)
        own, ours = THEIRS[cls](parameters, **own_kwargs, **kwargs), cls(parameters, **kwargs)
        first, second = (own, ours) if theirs_first else (ours, own)
        for seed in range(2):
            give(parameters, seed)
            first.step()
        saved, file = copy.deepcopy(first.state_dict()), io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        second.load_state_dict(torch.load(file, weights_only=True))
        again = cls(parameters, **kwargs)
        again.load_state_dict(saved)
        untouched = copy.deepcopy(saved)
        start = [p.detach().clone() for p in parameters]
        results = []
        for optimizer in (first, second, again):
            for parameter, value in zip(parameters, start):
                parameter.data.copy_(value)
            for seed in (5, 6):
                give(parameters, seed)
                optimizer.step()
            results.append([nn.Parameter(p.detach().clone()) for p in parameters])
        close(results[0], results[1], 1e-5)
        close(results[0], results[2], 1e-5)
        assert same(saved['state'], untouched['state'])


def test_moments_of_16_bit_parameters_come_back_bit_for_bit(device: torch.device) -> None:
    """torch gives state the parameter's type: second moments below float16's smallest number become 0."""
    skip_without_library(device)
    mine = weights(device, torch.float16)
    optimizer, other = FusedAdam(mine), FusedAdam(mine)
    for seed in range(2):
        give(mine, seed, scale=1e-4)
        optimizer.step()
    other.load_state_dict(optimizer.state_dict())
    for parameter in mine:
        for name, value in optimizer.state[parameter].items():
            loaded = other.state[parameter][name]
            assert same_bits(loaded, value) and loaded.data_ptr() != value.data_ptr()
    # and 16-bit ones, as torch's own saves them, become what this optimizer keeps
    own = torch.optim.Adam(mine)
    own.load_state_dict(optimizer.state_dict())
    for third, dtype in ((FusedAdam(mine), torch.float32), (FusedAdam(mine, state_dtype='bfloat16'), torch.bfloat16)):
        third.load_state_dict(own.state_dict())
        assert {s['exp_avg'].dtype for s in third.state.values()} == {dtype}
        third.step()


def test_state_dict_that_does_not_fit_is_refused_whole(device: torch.device) -> None:
    mine = weights(device)
    optimizer, sgd, adagrad = FusedAdam(mine), FusedSGD(mine, **MOMENTUM), torch.optim.Adagrad(mine)
    for seed in range(2):
        give(mine, seed)
        for each in (optimizer, sgd, adagrad):
            each.step()
    saved = optimizer.state_dict()

    def edited(**changes: Any) -> dict[str, Any]:
        wrong = copy.deepcopy(saved)
        state = {**wrong['state'][1], **changes}
        wrong['state'][1] = {name: value for name, value in state.items() if value is not None}
        return wrong

    cases: list[tuple[Any, dict[str, Any], str]] = [
        (optimizer, edited(exp_avg=torch.zeros(3)), r"state\[1\]\['exp_avg'\] .*shape"),
        (optimizer, edited(exp_avg=5), 'no tensor'),
        (optimizer, edited(exp_avg_sq=None), r"state\[1\] .*'exp_avg_sq'"),
        (optimizer, edited(step=torch.zeros(2)), "'step'.*shape"),
        (optimizer, edited(step='two'), "'step'.*number"),
        (optimizer, {**adagrad.state_dict(), 'param_groups': saved['param_groups']}, "'exp_avg'"),
        (optimizer, sgd.state_dict(), r"param_groups\[0\] .*'betas'"),
        (sgd, saved, "'momentum'"),
    ]
    for target, wrong, words in cases:
        before = snapshot(mine, target), copy.copy(target.param_groups[0])
        with pytest.raises(AmpCheckpointError, match=words):
            target.load_state_dict(wrong)
        assert same(snapshot(mine, target), before[0]) and target.param_groups[0] == before[1]
    # a count that is a number, as old files have it
    optimizer.load_state_dict(edited(step=7))
    optimizer.step()
    assert [int(optimizer.state[p]['step']) for p in mine] == [3, 8, 3]


@options
def test_copies_and_pickles_go_on_alike(cls: Any, kwargs: dict[str, Any], device: torch.device) -> None:
    mine = weights(device, torch.bfloat16)
    optimizer = cls(mine, state_dtype='bfloat16', **kwargs)
    give(mine, 0)
    optimizer.step()
    others = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    lists = [mine, *(other.param_groups[0]['params'] for other in others)]
    for parameters, each in zip(lists, (optimizer, *others)):
        assert type(each) is cls and each.state_dtype is torch.bfloat16
        for seed in (1, 2):
            give(parameters, seed)
            each.step()
    wanted = snapshot(mine, optimizer)
    assert all(same(snapshot(parameters, each), wanted) for parameters, each in zip(lists[1:], others))
    assert not {id(p) for p in lists[0]} & {id(p) for p in [*lists[1], *lists[2]]}


def test_tensors_are_freed_that_nobody_needs(device: torch.device) -> None:
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


# -- errors -----------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[Any, list[nn.Parameter]], Any], str]] = {
    'sparse': (lambda o, p: setattr(p[1], 'grad', p[1].detach().to_sparse()), r"'params'\]\[1\]\) has a sparse gradient"),
    'differentiable': (lambda o, p: o.param_groups[0].update(differentiable=True), "'differentiable'"),
    'lr': (lambda o, p: o.param_groups[0].update(lr='fast'), r"\['lr'\] is 'fast'"),
    'lr of two': (lambda o, p: o.param_groups[0].update(lr=torch.ones(2)), 'shape'),
    'weight_decay': (lambda o, p: o.param_groups[0].update(weight_decay=None), 'numbers are expected'),
    'shape': (lambda o, p: setattr(p[0], 'data', torch.ones(4, 2, device=p[0].device)), 'its gradient'),
}  # fmt: skip
#: Of state that has begun.
WRONG_STATE: list[tuple[dict[str, Any], str]] = [
    (dict(exp_avg=torch.zeros(3)), r"state\['exp_avg'\] of parameter .*shape"),
    (dict(exp_avg_sq=torch.zeros(16, dtype=torch.int32)), 'dtype int32'),
    (dict(step=torch.zeros(2)), r"state\['step'\] .*shape"),
    (dict(step='two'), 'one number'),
    (dict(step=None), r"state\['step'\] .*missing"),
]


@options
def test_step_is_refused_before_anything_changes(cls: Any, kwargs: dict[str, Any], device: torch.device) -> None:
    cases = [(begun, *wrong) for begun in (False, True) for wrong in WRONG.values()]
    if cls is FusedAdam:
        cases += [(True, lambda o, p, edit=edit: o.state[p[0]].update(edit), words) for edit, words in WRONG_STATE]
    for begun, edit, words in cases:
        mine = weights(device)
        optimizer = cls(mine, **kwargs)
        give(mine, 0)
        if begun:
            optimizer.step()
        saved, before, data = copy.deepcopy(optimizer.state_dict()), snapshot(mine, optimizer), mine[0].data
        edit(optimizer, mine)
        for _ in range(2):
            with pytest.raises(AmpUsageError, match=words):
                optimizer.step()
        mine[0].data = data
        optimizer.load_state_dict(saved)
        assert same(snapshot(mine, optimizer), before)
        give(mine, 1)
        optimizer.step()
        assert not same(snapshot(mine, optimizer), before)


def test_arguments_that_cannot_be() -> None:
    mine = [nn.Parameter(torch.ones(2))]
    with pytest.raises(AmpConfigError, match=r'torch\.optim\.SGD') as caught:
        FusedSGD(mine, lr=0.1, state_dtype='float64', fused=False, differentiable=True)
    assert len(caught.value.problems) == 3 and "state_dtype='float64'" in str(caught.value)
    for kwargs in (dict(lr=-1.0), dict(betas=(1.5, 0.9)), dict(eps=-1.0)):
        with pytest.raises(ValueError, match='Invalid'):
            FusedAdam(mine, **kwargs)
    for cls, own in THEIRS.items():
        ours, theirs = (
            {key: value for key, value in each(mine).param_groups[0].items() if key not in NEWER | {'params'}}
            for each in (cls, own)
        )
        assert ours == theirs and cls(mine, fused=True).param_groups[0]['fused'] is True
    assert FusedAdam(mine, foreach=True, capturable=True).param_groups[0]['foreach'] is True


# -- with others ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['FusedAdam', 'FusedAdamW', 'FusedSGD', 'amp_wrapper.FusedAdamW'])
def test_configs_name_them(name: str) -> None:
    optimizer = dict(type=name, lr=0.25, weight_decay=0.1, state_dtype='bfloat16')
    config = ConfigDict(dict(type='OptimWrapper', optimizer=optimizer, paramwise_cfg=dict(bias_lr_mult=2.0)))
    wrapper = build_optim_wrapper(nn.Linear(2, 2), config)
    assert type(wrapper.optimizer).__name__ == name.split('.')[-1]
    assert {g['lr'] for g in wrapper.optimizer.param_groups} == {0.25, 0.5}


def test_schedulers_hooks_profiles_and_closures_are_those_of_torch(device: torch.device) -> None:
    mine = weights(device)
    optimizer = FusedAdamW(mine, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2)
    calls = []
    optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append(len(o.state)))

    def closure() -> Tensor:
        loss = sum((p * 2).sum() for p in mine)
        loss.backward()
        return loss.detach()

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert isinstance(optimizer.step(closure), Tensor)
    scheduler.step()
    assert calls == [3] and optimizer.param_groups[0]['lr'] == pytest.approx(0.075)
    assert 'Optimizer.step#FusedAdamW.step' in {event.key for event in profile.key_averages()}


@pytest.mark.long
def test_torch_compile_takes_the_same_steps(device: torch.device) -> None:
    mine, other = weights(device), weights(device)
    compiled, plain = FusedSGD(mine, **MOMENTUM), FusedSGD(other, **MOMENTUM)
    call = torch.compile(lambda: compiled.step(), backend='eager')
    for seed in range(3):
        give(mine, seed)
        give(other, seed)
        call()
        plain.step()
    assert all(map(same_bits, mine, other))
