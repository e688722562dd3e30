"""FusedAdam, FusedAdamW and FusedSGD: torch's optimizers in every respect, without the host reading the device."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.optim import build_optim_wrapper
from mmengine.registry import OPTIMIZERS as MMENGINE_OPTIMIZERS
from mmengine.registry import DefaultScope
from ops_models import NoHostRead, bits, same_bits
from torch import Tensor, nn

from amp_wrapper import AmpCheckpointError, AmpConfigError, AmpUsageError, FusedAdam, FusedAdamW, FusedSGD, ops
from amp_wrapper.ops.split import join, split
from amp_wrapper.optim import FusedOptimizer, Update

#: What torch's Adam has in its groups from 2.7 on, and ours always.
NEWER = set() if 'decoupled_weight_decay' in torch.optim.Adam([torch.ones(1)]).defaults else {'decoupled_weight_decay'}


def _schedules_one_element() -> bool:
    """Whether torch's schedulers take a learning rate in a tensor of shape (1,); not in 2.6."""
    try:
        torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], lr=torch.tensor([0.1])), 1)
    except RuntimeError:
        return False
    return True


SCHEDULES_ONE_ELEMENT = _schedules_one_element()
THEIRS = {FusedAdam: torch.optim.Adam, FusedAdamW: torch.optim.AdamW, FusedSGD: torch.optim.SGD}
MOMENTUM = dict(lr=0.1, momentum=0.9)
#: One of each kind of state.
KINDS = [(FusedAdam, {}), (FusedAdamW, dict(amsgrad=True)), (FusedSGD, dict(lr=0.1)), (FusedSGD, MOMENTUM)]
#: torch's fused CPU kernels are vectorised in sixteens; their tails are rounded otherwise.
SHAPES = ((16,), (4, 16), (2, 3, 16))

options = pytest.mark.parametrize(
    ('cls', 'kwargs'), KINDS, ids=['adam', 'adamw-amsgrad', 'sgd', 'sgd-momentum'], scope='module'
)


def weights(device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    real = dtype if not dtype.is_complex else torch.complex64
    return [nn.Parameter(torch.randn(shape, generator=draw, dtype=real).to(device, dtype)) for shape in SHAPES]


def give(parameters: list[nn.Parameter], seed: int, scale: float = 1.0, bad: float | None = None) -> None:
    """The same gradients for the same seed."""
    draw = torch.Generator().manual_seed(1000 + seed)
    for parameter in parameters:
        real = torch.float32 if not parameter.is_complex() else torch.complex64
        gradient = torch.randn(parameter.shape, generator=draw, dtype=real) * scale
        if bad is not None:
            gradient.view(-1)[0] = bad
        parameter.grad = gradient.to(parameter.device, parameter.dtype)


def pair(
    cls: type[FusedOptimizer], device: torch.device, dtype: torch.dtype = torch.float32, **kwargs: Any
) -> tuple[list[nn.Parameter], Any, list[nn.Parameter], Any]:
    """Ours and torch's own, on equal weights."""
    mine, theirs = weights(device, dtype), weights(device, dtype)
    fused = dict(fused=True) if not dtype.is_complex else dict(foreach=False)
    return mine, cls(mine, **kwargs), theirs, THEIRS[cls](theirs, **fused, **kwargs)


def agree(one: list[nn.Parameter], other: list[nn.Parameter]) -> None:
    """Bit for bit where torch's vector instructions are ours."""
    for a, b in zip(one, other, strict=True):
        if a.device.type == 'cpu' and torch.backends.cpu.get_cpu_capability() == 'AVX512' and not a.is_complex():
            assert same_bits(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=3e-6, atol=1e-6)


def snapshot(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All bits of weights and of what would be saved."""
    saved = optimizer.state_dict()['state']
    return [
        bits(torch.view_as_real(t) if t.is_complex() else t).clone()
        for t in [*(p.detach() for p in parameters), *(v for s in saved.values() for v in s.values())]
    ]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# -- the same steps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('cls', 'kwargs'),
    [
        (FusedAdam, dict(lr=0.01, weight_decay=0.1, maximize=True)),
        (FusedAdam, dict(betas=(0.8, 0.99), eps=1e-3, amsgrad=True)),
        (FusedAdamW, dict(lr=0.01)),
        (FusedAdamW, dict(amsgrad=True, maximize=True, weight_decay=0.3)),
        (FusedSGD, dict(lr=0.1)),
        (FusedSGD, dict(lr=0.1, weight_decay=0.1, maximize=True)),
        (FusedSGD, dict(**MOMENTUM, dampening=0.5, weight_decay=0.1)),
        (FusedSGD, dict(**MOMENTUM, nesterov=True, maximize=True)),
    ],
)
def test_steps_are_those_of_torchs_fused_optimizer(
    cls: type[FusedOptimizer], kwargs: dict[str, Any], device: torch.device
) -> None:
    mine, ours, theirs, own = pair(cls, device, **kwargs)
    for seed in range(5):
        give(mine, seed)
        give(theirs, seed)
        ours.step()
        own.step()
        agree(mine, theirs)
    assert isinstance(ours, THEIRS[cls])
    assert set(ours.param_groups[0]) - NEWER == set(own.param_groups[0]) - NEWER
    assert set(ours.state[mine[0]]) - {'step'} == set(own.state[theirs[0]]) - {'step'}


@pytest.mark.parametrize('dtype', [torch.float64, torch.complex64, torch.complex128])
@options
def test_wide_and_complex_parameters(
    cls: type[FusedOptimizer], kwargs: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    mine, ours, theirs, own = pair(cls, device, dtype, **kwargs)
    for seed in range(3):
        give(mine, seed)
        give(theirs, seed)
        ours.step()
        own.step()
    precision = 1e-12 if dtype in (torch.float64, torch.complex128) else 3e-6
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=precision, atol=precision)
    moments = [v for state in ours.state.values() for name, v in state.items() if name != 'step']
    assert all(moment.dtype is dtype for moment in moments)


@options
def test_one_optimizer_for_all_types_takes_the_steps_of_one_for_each(
    cls: type[FusedOptimizer], kwargs: dict[str, Any], device: torch.device
) -> None:
    types = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.float16)
    apart, together = [weights(device, dtype) for dtype in types], [weights(device, dtype) for dtype in types]
    each = [cls(parameters, **kwargs) for parameters in apart]
    whole = cls([parameter for parameters in together for parameter in parameters], **kwargs)
    for seed in range(3):
        for parameters in (*apart, *together):
            give(parameters, seed)
        for optimizer in each:
            optimizer.step()
        whole.step()
    for one, other in zip(apart, together):
        assert equal([bits(p.view(torch.uint8)) for p in one], [bits(p.view(torch.uint8)) for p in other])
    assert {s['step'].dtype for s in whole.state.values()} <= {torch.float32}


@pytest.mark.parametrize('state_dtype', [None, 'bfloat16', torch.float32])
def test_moments_of_16_bit_parameters(state_dtype: Any, device: torch.device) -> None:
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
        wanted = {None: torch.float32, 'bfloat16': torch.bfloat16}.get(state_dtype, state_dtype)
        assert state['exp_avg'].dtype is state['exp_avg_sq'].dtype is wanted is optimizer.state_dtype
        assert state['step'].dtype is torch.float32
        if wanted is torch.float32:
            torch.testing.assert_close(state['exp_avg_sq'], own['exp_avg_sq'])


def test_a_closure_is_evaluated_with_gradients(device: torch.device) -> None:
    weight = nn.Parameter(torch.ones(2, device=device))
    optimizer = FusedSGD([weight], lr=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight * 2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4 and optimizer.step(closure).item() == 0
    assert optimizer.step() is None and weight.tolist() == [-2, -2]


# -- gradients and groups that come and go ----------------------------------------------------------------------------


@options
def test_late_and_missing_gradients(cls: type[FusedOptimizer], kwargs: dict[str, Any], device: torch.device) -> None:
    mine, ours = weights(device), None
    theirs = weights(device)
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
        for a, b in zip(mine, theirs):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    if cls is not FusedSGD:
        assert [int(ours.state[p]['step']) for p in mine] == [3, 3, 3]


@options
def test_groups_keep_their_hyper_parameters(
    cls: type[FusedOptimizer], kwargs: dict[str, Any], device: torch.device
) -> None:
    def grouped(parameters: list[nn.Parameter], kind: Any, **more: Any) -> Any:
        groups = [dict(params=parameters[:1], lr=0.3), dict(params=parameters[1:2], weight_decay=0.2, maximize=True)]
        return kind(groups, **{**kwargs, **more})

    mine, theirs = weights(device), weights(device)
    ours, own = grouped(mine, cls), grouped(theirs, THEIRS[cls], foreach=False)

    def both(action: Callable[[Any, list[nn.Parameter]], None]) -> None:
        action(ours, mine)
        action(own, theirs)

    def step(optimizer: Any, parameters: list[nn.Parameter], seed: int) -> None:
        give(parameters, seed)
        optimizer.step()

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
        edits += [
            lambda o, p: o.param_groups[2].update(momentum=0.5),
            lambda o, p: o.param_groups[2].update(momentum=0),
        ]
        edits += [lambda o, p: o.param_groups[2].update(momentum=0.2, dampening=0.1)]
    else:
        edits += [lambda o, p: o.param_groups[2].update(betas=(0.5, 0.9), eps=1e-2)]
    for seed, edit in enumerate(edits):
        both(edit)
        both(lambda o, p, seed=seed: step(o, p, seed))  # type: ignore[misc]
        for index, (a, b) in enumerate(zip(mine, theirs)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=f'edit {seed}, parameter {index}')


def test_many_groups_are_one_call(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    inner = ops.fused_adam
    monkeypatch.setattr(ops, 'fused_adam', lambda grads, *rest: (calls.append(len(grads)), inner(grads, *rest))[1])
    mine = [nn.Parameter(torch.ones(2, device=device)) for _ in range(20)]
    optimizer = FusedAdam([dict(params=[p], lr=0.1 * (i + 1)) for i, p in enumerate(mine)])
    for _ in range(2):
        for parameter in mine:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert calls == [20, 20]
    assert [round(1 - float(p.detach()[0]), 4) for p in mine] == [round(0.2 * (i + 1), 4) for i in range(20)]


def test_hyper_parameters_are_read_only_where_they_changed(device: torch.device) -> None:
    mine = weights(device)
    optimizer = FusedAdamW(mine)
    tables = []
    for lr in (1e-3, 1e-3, 2e-3, 2e-3):
        optimizer.param_groups[0]['lr'] = lr
        give(mine, 0)
        optimizer.step()
        tables.append((optimizer._hyper, optimizer._lists))
    assert tables[0] == tables[1] and tables[2] == tables[3]
    assert tables[1][0] is not tables[2][0] and tables[1][1] is tables[2][1]
    # what a device may still be reading stays as it was
    assert float(tables[1][0].table[0, 0]) == 1e-3 and float(tables[2][0].table[0, 0]) == 2e-3
    # a list may change in place
    optimizer.param_groups[0]['betas'] = [0.9, 0.999]
    optimizer.step()
    optimizer.param_groups[0]['betas'][0] = 0.5
    optimizer.step()
    assert optimizer._hyper.table[0, 1] == 0.5


@options
def test_tensor_lr_and_a_scheduler(cls: type[FusedOptimizer], kwargs: dict[str, Any], device: torch.device) -> None:
    mine, theirs, hosted = weights(device), weights(device), weights(device)
    settings = {**kwargs, 'lr': 0.1}
    ours = cls(mine, **{**settings, 'lr': torch.tensor(0.1, device=device)})
    # of another type, and on the CPU wherever the parameters are
    lr = torch.tensor([0.1], dtype=torch.float64)
    third = cls(hosted, **{**settings, 'lr': lr if SCHEDULES_ONE_ELEMENT else lr[0]})
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
    for a, b, c in zip(mine, theirs, hosted):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(c, b, rtol=1e-4, atol=1e-5)


# -- overflow ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('pattern', ['xcc', 'xxx', 'cxcx', 'xcxcc'])
@options
def test_skipped_steps_leave_everything_as_it_was(
    cls: type[FusedOptimizer], kwargs: dict[str, Any], pattern: str, device: torch.device
) -> None:
    mine, theirs = weights(device), weights(device)
    ours, own = cls(mine, **kwargs), THEIRS[cls](theirs, foreach=False, **kwargs)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=2)
    scaler.scale(torch.zeros((), device=device))
    for seed, kind in enumerate(pattern):
        scale = float(scaler.get_scale())
        give(mine, seed, scale, bad=math.inf if kind == 'x' else None)
        # torch's SGD has no momentum then, and Adam no state, or one of zeros
        before = snapshot(mine, ours)
        with NoHostRead():
            scaler.step(ours)
        scaler.update()
        if kind == 'x':
            assert equal([b for b in snapshot(mine, ours) if b.any()], [b for b in before if b.any()])
            assert scaler.get_scale() == scale / 2
        else:
            give(theirs, seed)
            own.step()
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    # and torch's own goes on from there
    resumed = THEIRS[cls](theirs, foreach=False, **kwargs)
    resumed.load_state_dict(copy.deepcopy(ours.state_dict()))
    for seed in (20, 21):
        give(mine, seed)
        give(theirs, seed)
        ours.step()
        resumed.step()
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_flag_that_is_a_sum_over_devices(device: torch.device) -> None:
    """torch's fused kernels compare with 1: two devices with infinities make 2, and the gradients are applied."""
    mine = weights(device)
    optimizer = FusedSGD(mine, **MOMENTUM)
    before = [p.detach().clone() for p in mine]
    give(mine, 0, bad=math.inf)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor([2.0], device=device), None
    optimizer.step()
    assert all(map(torch.equal, mine, before)) and optimizer.state_dict()['state'] == {}
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(0.0, dtype=torch.float64), 4.0
    give(mine, 1, scale=4.0)
    optimizer.step()
    other = weights(device)
    give(other, 1)
    FusedSGD(other, **MOMENTUM).step()
    assert all(map(same_bits, mine, other))
    optimizer.grad_scale = 'big'
    with pytest.raises(AmpUsageError, match=r"FusedSGD\.grad_scale is 'big': one number or None"):
        optimizer.step()


@options
def test_a_step_reads_nothing(cls: type[FusedOptimizer], kwargs: dict[str, Any], device: torch.device) -> None:
    mine = weights(device) + weights(device, torch.float64) + weights(device, torch.bfloat16)
    optimizer = cls([dict(params=mine[:4]), dict(params=mine[4:], lr=torch.tensor(0.1, device=device))], **kwargs)
    for seed in range(3):
        give(mine, seed)
        mine[seed].grad = None
        with NoHostRead():
            optimizer.step()


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
        assert equal(snapshot(mine, target), before[0]) and target.param_groups[0] is before[1]
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
    for twin in (copied, pickled):
        assert twin.state_dtype is torch.bfloat16 and type(twin) is cls
        theirs = twin.param_groups[0]['params']
        assert theirs[0] is not mine[0]
        for seed in (1, 2):
            give(theirs, seed)
            twin.step()
    for seed in (1, 2):
        give(mine, seed)
        optimizer.step()
    for twin in (copied, pickled):
        assert equal(snapshot(twin.param_groups[0]['params'], twin), snapshot(mine, optimizer))


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


# -- under somebody else's loss scale ---------------------------------------------------------------------------------


class Owner:
    """Holds gradients apart, has a loss scale, and clips: what the engine does."""

    def __init__(self, optimizer: FusedOptimizer, partners: Mapping[int, Tensor], device: torch.device) -> None:
        self.optimizer = optimizer
        self.partners = partners
        self.gradients: dict[int, Tensor] = {}
        self.scale = torch.full((), 1024.0, device=device)
        self.trackers = [torch.zeros((), dtype=torch.int32, device=device) for _ in range(2)]
        self.counts = torch.zeros(3, dtype=torch.int64, device=device)
        self.seen: list[int] = []

    def decide(self, gradients: list[Tensor]) -> dict[str, Any]:
        self.seen.append(len(gradients))
        found = torch.zeros_like(self.scale)
        norm, _ = ops.multi_tensor_l2norm(gradients, None, found)
        return dict(
            found_inf=found,
            norm=norm,
            scale=self.scale,
            growth_tracker=self.trackers[0],
            hysteresis_tracker=self.trackers[1],
            counts=self.counts,
            rule=(2.0, 0.5, 2, 1, 0.0, 2.0**24),
            max_norm=1.0,
        )

    def step(self) -> Tensor | None:
        mine = [p for group in self.optimizer.param_groups for p in group['params']]
        gradients, partners = ([found.get(id(p)) for p in mine] for found in (self.gradients, self.partners))
        update = Update(gradients, partners, lambda grads: self.decide(grads))
        with NoHostRead(), self.optimizer.updating(update):
            self.optimizer.step()
        return update.decision


@pytest.fixture
def owned(device: torch.device) -> Iterator[tuple[list[nn.Parameter], Owner]]:
    """A float32 parameter with a copy, a 16-bit one with a remainder, and a float32 one with nothing beside it."""
    mine = weights(device)
    weight, remainder = split(mine[1].detach(), torch.bfloat16)
    mine[1] = nn.Parameter(weight)
    partners = {id(mine[0]): mine[0].detach().half(), id(mine[1]): remainder}
    optimizer = FusedAdamW(mine, lr=0.01)
    yield mine, Owner(optimizer, partners, device)
    assert optimizer._update is None


def test_an_owner_decides_and_partners_follow(owned: tuple[list[nn.Parameter], Owner], device: torch.device) -> None:
    mine, owner = owned
    exact = weights(device)
    own = torch.optim.AdamW(exact, lr=0.01)
    called: list[str] = []
    owner.optimizer.register_step_pre_hook(lambda *_: called.append('pre'))
    owner.optimizer.register_step_post_hook(lambda *_: called.append('post'))
    for seed, kind in enumerate('xcccx'):
        scale = float(owner.scale)
        give(exact, seed)
        gradients = [p.grad.half() for p in exact]
        owner.gradients = {id(p): g * scale for p, g in zip(mine, gradients)}
        if kind == 'x':
            owner.gradients[id(mine[2])][0, 0, 0] = math.nan
        decision = owner.step()
        assert decision is not None and decision.device.type == device.type
        skip, _, coefficient, _, norm, after, skipped, _ = decision.tolist()
        assert (skip == 1) == (kind == 'x') and math.isnan(norm) == (kind == 'x')
        assert after == float(owner.scale) and skipped == int(owner.counts[1])
        if kind == 'c':
            for parameter, gradient in zip(exact, gradients):
                parameter.grad = gradient.float()
            total = nn.utils.clip_grad_norm_(exact, 1.0)
            assert coefficient < 1 and norm == pytest.approx(float(total), rel=1e-3)
            own.step()
    for parameter, b in zip(mine, exact):
        partner = owner.partners.get(id(parameter))
        a = parameter if parameter.dtype is torch.float32 else join(parameter, partner)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert same_bits(owner.partners[id(mine[0])], mine[0].detach().half())
    assert called == ['pre', 'post'] * 5 and owner.seen == [3] * 5 and owner.counts.tolist() == [5, 2, 1]
    assert float(owner.scale) == 1024 / 2 * 2 / 2


def test_partners_that_change_and_gradients_that_miss(owned: tuple[list[nn.Parameter], Owner]) -> None:
    mine, owner = owned
    # all ranks decide, also one that has no gradient at all
    decision = owner.step()
    assert decision is not None and owner.seen == [0] and not owner.optimizer.state
    owner.gradients = {id(mine[0]): torch.ones_like(mine[0], dtype=torch.float16)}
    owner.step()
    owner.partners = {**owner.partners, id(mine[0]): torch.zeros_like(mine[0], dtype=torch.bfloat16)}
    again = owner.step()
    # an owner may keep what it was told
    assert again is not None and again.data_ptr() != decision.data_ptr()
    assert same_bits(owner.partners[id(mine[0])], mine[0].detach().bfloat16())
    assert list(owner.optimizer.state) == [mine[0]] and owner.seen == [0, 1, 1]
    # without an owner it stands beside nothing
    partner = owner.partners[id(mine[0])].clone()
    mine[0].grad = torch.ones_like(mine[0])
    owner.optimizer.step()
    assert same_bits(owner.partners[id(mine[0])], partner)
    with owner.optimizer.updating(Update([None] * 3, [None] * 3, owner.decide)):
        with pytest.raises(AmpUsageError, match='does not nest'):
            with owner.optimizer.updating(Update([None] * 3, [None] * 3, owner.decide)):
                pass


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
    with pytest.raises(AmpUsageError, match=words):
        optimizer.step()
    optimizer.param_groups[0].update(kept)
    assert equal(snapshot(mine, optimizer), before) and bool(optimizer.state) == (begun and bool(before[3:]))
    give(mine, 1)
    optimizer.step()
    assert not equal(snapshot(mine, optimizer), before)


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
def test_gradients_of_an_owner_are_checked_before_it_decides(
    owned: tuple[list[nn.Parameter], Owner], begun: bool
) -> None:
    mine, owner = owned
    good = {id(p): torch.ones_like(p, dtype=torch.float16) for p in mine}
    if begun:
        owner.gradients = good
        owner.step()
        owner.seen.clear()
    count = len(owner.optimizer.state)
    for gradient, words in (
        (torch.ones(3, dtype=torch.float16), r'has shape \(16,\) and its gradient \(3,\)'),
        (torch.ones(16).to_sparse(), 'has a sparse gradient'),
        (torch.ones(16, device='meta'), 'its gradient on meta: move the gradient there'),
    ):
        if begun and gradient.is_meta and mine[0].device.type == 'cpu':
            # torch gives both the same number, and the op refuses
            continue
        owner.gradients = {**good, id(mine[0]): gradient}
        with pytest.raises(AmpUsageError, match=words):
            owner.step()
        assert owner.seen == [] and len(owner.optimizer.state) == count
    owner.optimizer.add_param_group(dict(params=[nn.Parameter(torch.ones(2, device='meta'))]))
    late = owner.optimizer.param_groups[1]['params'][0]
    owner.gradients = {**good, id(late): torch.ones(2, device='meta')}
    with pytest.raises(AmpUsageError, match='under one loss scale they must be on one device'):
        owner.step()
    owner.gradients = good
    owner.step()
    assert owner.seen == [3]


@pytest.mark.parametrize('begun', [False, True])
def test_an_op_that_refuses_takes_the_new_state_along(begun: bool, device: torch.device) -> None:
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
    assert equal(snapshot(mine, optimizer), before) and len(optimizer.state) == begun
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
