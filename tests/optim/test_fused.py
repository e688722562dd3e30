"""FusedAdam, FusedAdamW and FusedSGD are torch's optimizers: steps, groups, state, errors; with a library and without one."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import math
import pickle
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from bits import same, same_bits
from fused_training import KINDS, MOMENTUM, NEWER, THEIRS, advance, build, give, snapshot, weights
from hypothesis import given
from hypothesis import strategies as st
from mmengine.config import ConfigDict
from mmengine.optim import build_optim_wrapper
from op_lists import NoHostRead, ops_from, skip_without_library
from torch import Tensor, nn

from amp_wrapper import AmpCheckpointError, AmpConfigError, AmpUsageError, FusedAdam, FusedAdamW, FusedSGD, ops

both = pytest.mark.usefixtures('with_and_without_ops')


def torchs(cls: Any) -> Callable[..., Any]:
    """The optimizer of torch that it stands for, one tensor after the other."""
    return functools.partial(THEIRS[cls], foreach=False)


def close(one: list[nn.Parameter], other: list[nn.Parameter], rtol: float = 1e-4, message: str = '') -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol / 10, msg=message or None)


# -- the same steps ---------------------------------------------------------------------------------------------------


@both
def test_steps_are_those_of_torch(device: torch.device) -> None:
    """Bit for bit where torch's vector instructions are ours; of float64 and complex parameters, too."""
    vectors = torch.backends.cpu.get_cpu_capability() in ('AVX2', 'AVX512') and device.type == 'cpu'
    options = [
        *KINDS.values(),
        (FusedAdam, dict(betas=(0.8, 0.99), eps=1e-3)),
        (FusedAdamW, dict(amsgrad=True, maximize=True, weight_decay=0.3)),
    ]
    types = (torch.float32, torch.float64, torch.complex64, torch.complex128)
    for (cls, kwargs), dtype in itertools.product(options, types):
        mine, theirs = weights(device, dtype), weights(device, dtype)
        fused = dict(foreach=False) if dtype.is_complex else dict(fused=True)
        ours, own = cls(mine, **kwargs), THEIRS[cls](theirs, **fused, **kwargs)
        advance(ours, own, seeds=range(4))
        if dtype is torch.float32 and vectors:
            assert all(map(same_bits, mine, theirs)), (cls, kwargs)
        close(mine, theirs, rtol=5e-6 if dtype in (torch.float32, torch.complex64) else 1e-12)
        moments = [v for state in ours.state.values() for name, v in state.items() if name != 'step']
        assert all(moment.dtype is dtype for moment in moments) and isinstance(ours, THEIRS[cls])
        assert set(ours.param_groups[0]) - NEWER == set(own.param_groups[0]) - NEWER
        assert set(ours.state[mine[0]]) - {'step'} == set(own.state[theirs[0]]) - {'step'}


def distance(found: Tensor, exact: Tensor, before: Tensor) -> float:
    """The largest difference in units in the last place of the larger one of the weight before and after."""
    largest = torch.maximum(exact.abs(), before.double().abs()).clamp(min=torch.finfo(found.dtype).tiny)
    unit = torch.exp2(largest.log2().floor()) * torch.finfo(found.dtype).eps
    return float(((found.double() - exact).abs() / unit).max()) if found.numel() else 0.0


@given(
    kind=st.sampled_from(list(KINDS)),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    begun=st.integers(0, 3),
    setting=st.sampled_from(['', 'torch']),
)
def test_step_is_as_near_to_float64_as_its_type_allows(
    device: torch.device, kind: str, dtype: torch.dtype, sizes: list[int], begun: int, setting: str
) -> None:
    """Rounded once to 16 bits; in float32 within 16 units in the last place, which a momentum that cancels may lose."""
    with ops_from(setting):
        # torch's own steps round 16-bit moments
        if dtype is not torch.float32 and not (ops.serves(device) and kind != 'dampened'):
            return
        cls, options = KINDS[kind]
        draw = torch.Generator().manual_seed(sum(sizes))
        mine = [nn.Parameter(torch.randn(size, generator=draw).to(device, dtype)) for size in sizes]
        ours = cls(mine, **options)
        advance(ours, seeds=range(begun))
        before = [parameter.detach().clone() for parameter in mine]
        exact = [nn.Parameter(parameter.double()) for parameter in before]
        theirs = torchs(cls)(exact, **options)
        theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
        give(mine, begun)
        for parameter, weight in zip(exact, mine):
            parameter.grad = weight.grad.double()
        ours.step()
        theirs.step()
        limit = 16.0 if dtype is torch.float32 else 0.51
        assert max(map(distance, (p.detach() for p in mine), (p.detach() for p in exact), before)) <= limit


Edit = Callable[[Any, list[nn.Parameter]], Any]
EDITS: list[Edit] = [
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
    # tensors, which schedulers fill; also one of another type, on the CPU wherever the parameters are
    lambda o, p: o.param_groups[0].update(lr=torch.tensor(0.1, device=p[0].device)),
    lambda o, p: o.param_groups[0]['lr'].fill_(0.05),
    lambda o, p: o.param_groups[0].update(lr=torch.tensor(0.02, dtype=torch.float64)),
    lambda o, p: o.param_groups[0].update(lr=0.01),
    # settings of the other kind are passed over
    lambda o, p: o.param_groups[2].update(momentum=0.5),
    lambda o, p: o.param_groups[2].update(momentum=0),
    lambda o, p: o.param_groups[2].update(momentum=0.2, dampening=0.1, nesterov=False),
    # a list, which may change in place
    lambda o, p: o.param_groups[2].update(betas=[0.5, 0.9], eps=1e-2),
    lambda o, p: o.param_groups[2]['betas'].__setitem__(0, 0.25),
]


@both
def test_16_bit_parameters_on_a_cpu() -> None:
    """torch's fused steps of SGD compute something else there, whatever the size; those of AdamW overflow."""
    for (cls, kwargs), dtype, size in itertools.product(
        KINDS.values(), (torch.float16, torch.bfloat16), (5, 16, 40, 64)
    ):
        mine, exact = ([nn.Parameter(torch.linspace(-1, 1, size).to(kind))] for kind in (dtype, torch.float64))
        ours, theirs = cls(mine, **kwargs), THEIRS[cls](exact, foreach=False, **kwargs)
        for seed in range(3):
            give(mine, seed)
            exact[0].grad = mine[0].grad.double()
            ours.step()
            theirs.step()
        torch.testing.assert_close(mine[0].double(), exact[0], rtol=0.02, atol=0.02)


@both
def test_late_gradients_and_edits_of_groups_and_state_count(device: torch.device) -> None:
    nothing = EDITS[0]
    steps = [(nothing, late) for late in ((1,), (0,), (0, 1))] + [(edit, ()) for edit in EDITS] + [(nothing, (0, 2))]
    for cls, kwargs in KINDS.values():
        mine, theirs = weights(device), weights(device)
        ours, own = (
            kind([dict(params=p[:1], lr=0.3), dict(params=p[1:2], weight_decay=0.2, maximize=True)], **kwargs)
            for kind, p in ((cls, mine), (torchs(cls), theirs))
        )
        ours.step()
        assert not ours.state
        for number, (edit, late) in enumerate(steps):
            for optimizer, parameters in ((ours, mine), (own, theirs)):
                edit(optimizer, parameters)
                give(parameters, number)
                for index in late:
                    parameters[index].grad = None
                is_read = any(getattr(group['lr'], 'dtype', None) is torch.float64 for group in optimizer.param_groups)
                with NoHostRead() if optimizer is ours and ours.fuses and not is_read else nullcontext():
                    optimizer.step()
            close(mine, theirs, message=f'{kwargs} {number}')
        for p, q in zip(mine, theirs):
            assert cls is FusedSGD or int(ours.state[p]['step']) == int(own.state[q]['step']) > 0


@both
def test_groups_of_unlike_options_take_the_steps_of_torch(device: torch.device) -> None:
    for cls, *options in (
        (FusedAdamW, dict(amsgrad=True), dict(amsgrad=False)),
        (FusedSGD, dict(momentum=0.9), dict(momentum=0.0)),
        (FusedSGD, dict(momentum=0.9), dict(momentum=0.9, dampening=0.5)),
    ):
        for first, second in (options, options[::-1]):
            mine, theirs = weights(device), weights(device)
            ours, own = (
                kind([dict(params=p[:1], **first), dict(params=p[1:], **second)], lr=0.1)
                for kind, p in ((cls, mine), (torchs(cls), theirs))
            )
            advance(ours, own, seeds=range(3))
            close(mine, theirs, message=f'{first} {second}')
            # how a step was taken is nobody's business
            assert [group['fused'] for group in ours.param_groups] == [None, None]


def test_moments_in_bfloat16_need_the_library(device: torch.device) -> None:
    with ops_from('torch'):
        mine = weights(device)
        optimizer, before = FusedAdamW(mine, state_dtype='bfloat16'), [parameter.detach().clone() for parameter in mine]
        give(mine, 0)
        with pytest.raises(AmpUsageError, match=r'state_dtype.*build-ops'):
            optimizer.step()
        assert all(map(same_bits, before, mine)) and not optimizer.state


def test_moments_of_16_bit_parameters(device: torch.device) -> None:
    """Of the type that is asked for, and loaded bit for bit, where torch gives state the type of the parameter."""
    skip_without_library(device)
    for state_dtype, wanted in ((None, torch.float32), ('bfloat16', torch.bfloat16), (torch.float32, torch.float32)):
        mine, exact = weights(device, torch.bfloat16), weights(device)
        optimizer = FusedAdamW(mine, lr=0.01, state_dtype=state_dtype)
        reference, other = torch.optim.AdamW(exact, lr=0.01), FusedAdamW(mine, state_dtype=state_dtype)
        for parameter, weight in zip(exact, mine):
            parameter.data.copy_(weight)
        for seed in range(3):
            advance(optimizer, seeds=[seed])
            for parameter, weight in zip(exact, mine):
                parameter.grad = weight.grad.float()
            reference.step()
        other.load_state_dict(optimizer.state_dict())
        for parameter, weight in zip(exact, mine):
            torch.testing.assert_close(weight.float(), parameter, rtol=0.02, atol=0.01)
            state, own = optimizer.state[weight], reference.state[parameter]
            assert [value.dtype for value in state.values()] == [torch.float32, wanted, wanted]
            torch.testing.assert_close(state['exp_avg_sq'].float(), own['exp_avg_sq'], rtol=0.02, atol=0.01)
            for name, value in other.state[weight].items():
                assert same_bits(value, state[name]) and value.data_ptr() != state[name].data_ptr()
        # and 16-bit ones, as torch's own saves them, become what this optimizer keeps
        third = torch.optim.AdamW(mine)
        third.load_state_dict(optimizer.state_dict())
        other.load_state_dict(third.state_dict())
        assert {state['exp_avg'].dtype for state in other.state.values()} == {wanted}
        other.step()


# -- overflow ---------------------------------------------------------------------------------------------------------


@both
def test_grad_scaler_skips_on_the_device(device: torch.device) -> None:
    """A skipped step (x) leaves everything as it was; torch's own optimizer goes on from the state that is saved."""
    patterns, types = ('xcc', 'xxx', 'cxcx'), (torch.float32, torch.float64)
    for (cls, kwargs), pattern, dtype in itertools.product(KINDS.values(), patterns, types):
        mine, theirs = weights(device, dtype), weights(device, dtype)
        ours, own = cls(mine, **kwargs), torchs(cls)(theirs, **kwargs)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=2)
        scaler.scale(torch.zeros((), device=device))
        for seed, letter in enumerate(pattern):
            scale = float(scaler.get_scale())
            give(mine, seed, scale, bad=math.inf if letter == 'x' else None)
            before = snapshot(mine, ours)
            # torch has no fused step with dampening that begins right
            with nullcontext() if 'dampening' in kwargs else NoHostRead():
                scaler.step(ours)
            scaler.update()
            if letter == 'x':
                assert same(snapshot(mine, ours), before) and scaler.get_scale() == scale / 2, (cls, kwargs)
            else:
                advance(own, seeds=[seed])
        close(mine, theirs)
        resumed = torchs(cls)(theirs, **kwargs)
        resumed.load_state_dict(copy.deepcopy(ours.state_dict()))
        advance(ours, resumed, seeds=(20, 21))
        close(mine, theirs)


@both
def test_flag_may_be_a_sum_over_devices(device: torch.device) -> None:
    """torch's fused kernels compare with 1: two devices with infinities make 2, and the gradients are applied."""
    mine, other = weights(device), weights(device)
    optimizer = FusedSGD(mine, **MOMENTUM)
    give(mine, 0, bad=math.inf)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor([2.0], device=device), None
    optimizer.step()
    assert all(map(torch.equal, mine, other)) and not any(s['momentum_buffer'].any() for s in optimizer.state.values())
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(0.0, dtype=torch.float64), 4.0
    give(mine, 1, scale=4.0)
    optimizer.step()
    advance(FusedSGD(other, **MOMENTUM), seeds=[1])
    assert all(map(same_bits, mine, other))


# -- saving and loading -----------------------------------------------------------------------------------------------


@both
def test_state_dicts_go_both_ways(device: torch.device) -> None:
    """Through a file; what was loaded is a copy."""
    ways = (dict(fused=True), dict(foreach=True))
    for (cls, kwargs), way, theirs_first in itertools.product(KINDS.values(), ways, (False, True)):
        parameters = weights(device)
        own, ours = THEIRS[cls](parameters, **way, **kwargs), cls(parameters, **kwargs)
        first, second = (own, ours) if theirs_first else (ours, own)
        advance(first, seeds=range(2))
        saved, file = copy.deepcopy(first.state_dict()), io.BytesIO()
        torch.save(saved, file)
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        second.load_state_dict(loaded)
        start, ends = [p.detach().clone() for p in parameters], []
        for optimizer in (first, second):
            for parameter, value in zip(parameters, start):
                parameter.data.copy_(value)
            advance(optimizer, seeds=(5, 6))
            ends.append([nn.Parameter(p.detach().clone()) for p in parameters])
        close(*ends, rtol=1e-5)
        assert second is own or same(saved['state'], loaded['state'])


@both
def test_state_dict_that_does_not_fit_is_refused_whole(device: torch.device) -> None:
    mine = weights(device)
    optimizer, sgd = FusedAdam(mine), FusedSGD(mine, **MOMENTUM)
    advance(optimizer, sgd, seeds=range(2))
    saved = optimizer.state_dict()

    def edited(**changes: Any) -> dict[str, Any]:
        wrong = copy.deepcopy(saved)
        state = {**wrong['state'][1], **changes}
        wrong['state'][1] = {name: value for name, value in state.items() if value is not None}
        return wrong

    cases: list[Any] = [
        (optimizer, edited(exp_avg=torch.zeros(3)), r"state\[1\]\['exp_avg'\] .*shape"),
        (optimizer, edited(exp_avg=5), r"'exp_avg'\] .*shape \(\)"),
        (optimizer, edited(exp_avg_sq=None), r"state\[1\] .*'exp_avg_sq'"),
        (optimizer, edited(step=torch.zeros(2)), "'step'.*shape"),
        (optimizer, sgd.state_dict(), r"param_groups\[0\] .*'betas'"),
        (sgd, saved, "'momentum'"),
    ]
    for target, wrong, words in cases:
        before, group = snapshot(mine, target), copy.copy(target.param_groups[0])
        with pytest.raises(AmpCheckpointError, match=words):
            target.load_state_dict(wrong)
        assert same(snapshot(mine, target), before) and target.param_groups[0] == group
    # a count that is a number, as old files have it; what others have added is kept
    optimizer.load_state_dict(edited(step=7, note=torch.ones(2)))
    assert torch.equal(optimizer.state[mine[1]]['note'], torch.ones(2))
    optimizer.step()
    assert [int(optimizer.state[p]['step']) for p in mine] == [3, 8, 3]


@both
def test_copies_and_pickles_go_on_alike(device: torch.device) -> None:
    for cls, kwargs in (KINDS[kind] for kind in KINDS if kind != 'dampened'):
        mine = weights(device)
        state_dtype = torch.bfloat16 if ops.serves(device) else None
        optimizer = cls(mine, state_dtype=state_dtype, **(kwargs | dict(lr=0.01)))
        advance(optimizer, seeds=[0])
        optimizers = [optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
        lists = [each.param_groups[0]['params'] for each in optimizers]
        assert all(type(each) is cls and each.state_dtype is (state_dtype or torch.float32) for each in optimizers)
        advance(*optimizers, seeds=(1, 2))
        ends = [snapshot(parameters, each) for parameters, each in zip(lists, optimizers)]
        assert same(ends[0], ends[1]) and same(ends[0], ends[2]), (cls, kwargs)
        assert not {id(p) for p in lists[0]} & {id(p) for p in [*lists[1], *lists[2]]}


@both
def test_tensors_are_freed_that_nobody_needs(device: torch.device) -> None:
    mine = weights(device)
    optimizer = FusedAdam(mine)
    advance(optimizer, seeds=[0])
    gradient, moment = weakref.ref(mine[0].grad), weakref.ref(optimizer.state[mine[0]]['exp_avg'])
    optimizer.zero_grad()
    assert gradient() is None
    optimizer.load_state_dict(optimizer.state_dict())
    gc.collect()
    assert moment() is None


# -- errors -----------------------------------------------------------------------------------------------------------

WRONG: list[tuple[Edit, str]] = [
    (lambda o, p: o.param_groups[0].update(lr='fast'), r"'lr': 'fast'.*numbers are expected"),
    (lambda o, p: o.param_groups[0].update(lr=torch.ones(2)), 'numbers are expected'),
    (lambda o, p: o.param_groups[0].update(weight_decay=None), 'numbers are expected'),
    (
        lambda o, p: o.state[p[0]].update(dict.fromkeys(o._moments, torch.ones(3))),
        r'(exp_avgs|momentum_buffers)\[0\] \[3\].*Remove state',
    ),
]


@pytest.mark.usefixtures('library')
def test_step_is_refused_before_anything_changes(device: torch.device) -> None:
    for kind, begun, (edit, words) in itertools.product(('adamw', 'nesterov'), (False, True), WRONG):
        mine = weights(device)
        optimizer = build(kind, mine)
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
        assert same(snapshot(mine, optimizer), before), (kind, words)
        advance(optimizer, seeds=[1])
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
        ours, theirs = cls(mine).defaults, own(mine).defaults
        assert {key: value for key, value in ours.items() if key not in NEWER} == theirs
        assert cls(mine, fused=True).param_groups[0]['fused'] is True
    assert FusedAdam(mine, foreach=True, capturable=True).param_groups[0]['foreach'] is True


# -- with others ------------------------------------------------------------------------------------------------------


def test_configs_name_them() -> None:
    for name in ('amp_wrapper.FusedAdam', 'FusedAdamW', 'FusedSGD', 'amp_wrapper.FusedAdamW'):
        optimizer = dict(type=name, lr=0.25, state_dtype='bfloat16')
        wrapper = build_optim_wrapper(nn.Linear(2, 2), ConfigDict(dict(type='OptimWrapper', optimizer=optimizer)))
        assert type(wrapper.optimizer).__name__ == name.split('.')[-1]
        assert wrapper.optimizer.state_dtype is torch.bfloat16


@both
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


def test_captured_step_warns_of_a_rate_that_is_a_number(device: torch.device) -> None:
    skip_without_library(device)
    if device.type != 'cuda':
        pytest.skip('needs CUDA graphs: pytest --device cuda')
    mine = weights(device)
    give(mine, 0)
    optimizers = [FusedAdamW(mine, lr=lr) for lr in (0.1, torch.tensor(0.1, device=device))]
    advance(*optimizers, seeds=[0])
    give(mine, 1)
    for index, optimizer in enumerate(optimizers):
        with warnings.catch_warnings(record=True) as caught, torch.cuda.graph(torch.cuda.CUDAGraph()):
            warnings.simplefilter('always')
            optimizer.step()
        assert any('captured step' in str(each.message) for each in caught) == (index == 0)
