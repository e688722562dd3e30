"""Steps of FusedAdam, FusedAdamW and FusedSGD are those of torch's fused optimizers, whatever groups and gradients do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import same, same_bits
from ops_models import NoHostRead, without_compiled
from torch import Tensor, nn
from toy_fused import KINDS, MOMENTUM, NEWER, THEIRS, give, options, snapshot, weights

from amp_wrapper import AmpUsageError, FusedAdam, FusedAdamW, FusedSGD, ops
from amp_wrapper.optim import FusedOptimizer, Update

pytestmark = pytest.mark.usefixtures('with_and_without_ops')


def _schedules_one_element() -> bool:
    """Whether torch's schedulers take a learning rate in a tensor of shape (1,); not in 2.6."""
    try:
        torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], lr=torch.tensor([0.1])), 1)
    except RuntimeError:
        return False
    return True


SCHEDULES_ONE_ELEMENT = _schedules_one_element()


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


@pytest.mark.parametrize('dtype', [torch.float64, torch.complex64])
@pytest.mark.parametrize(
    ('cls', 'kwargs'), [*KINDS, (FusedSGD, dict(**MOMENTUM, dampening=0.5, nesterov=False, weight_decay=0.1))]
)
def test_wide_parameters_in_an_update(
    cls: type[FusedOptimizer], kwargs: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    """torch's own functions get unscaled, clipped gradients, skip as the others do, and work on any layout."""
    start = weights(device, dtype)
    mine = [
        nn.Parameter(start[0].detach()),
        nn.Parameter(start[1].detach().t()),
        nn.Parameter(torch.ones(3, device=device)),
    ]
    copies = [mine[0].detach().clone(), None, None]
    theirs = [nn.Parameter(p.detach().clone()) for p in mine]
    ours, own = cls(mine, **kwargs), THEIRS[cls](theirs, foreach=False, **kwargs)
    scale = torch.tensor(8.0, device=device)
    for seed, kind in enumerate('xcxcc'):
        give(theirs, seed)
        gradients = [p.grad * 8 for p in theirs]
        gradients[1] = gradients[1].t().contiguous().t()
        kept = [g.clone() for g in gradients]
        found = torch.tensor(float(kind == 'x'), device=device)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g).float() for g in gradients]))
        update = Update(gradients, copies, lambda _: dict(found_inf=found, scale=scale, norm=norm, max_norm=0.5))  # noqa: B023
        before = snapshot(mine, ours)
        with NoHostRead(), ours.updating(update):
            ours.step()
        assert all(map(torch.equal, gradients, kept)) and torch.equal(copies[0], mine[0].detach())
        if kind == 'x':
            assert same([b for b in snapshot(mine, ours) if b.any()], [b for b in before if b.any()])
        else:
            nn.utils.clip_grad_norm_(theirs, 0.5)
            own.step()
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_wide_parameters_that_share_memory_are_refused(device: torch.device) -> None:
    storage = torch.ones(8, device=device, dtype=torch.float64)
    mine = [nn.Parameter(torch.ones(4, device=device)), nn.Parameter(storage[:6]), nn.Parameter(storage[2:])]
    optimizer = FusedAdam(mine)
    give(mine, 0)
    with pytest.raises(AmpUsageError, match='share memory'):
        optimizer.step()
    assert not optimizer.state and bool((storage == 1).all()) and torch.equal(mine[0], torch.ones_like(mine[0]))


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
        assert same(one, other)
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
    if without_compiled(device):
        pytest.skip("torch's functions take the hyper-parameters of one group")
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
