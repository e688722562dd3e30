"""A step of amp's: closures, schedulers, hooks, clipping, skipped steps, copies of models and optimizers."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from bits import differing, same
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedulers
from toy_amp import (
    LEVELS,
    MASTERS,
    Net,
    agree,
    backward,
    data,
    gradients,
    logged,
    make,
    scales,
    set_scales,
    sgd,
    unskipped,
    values,
)

from amp_wrapper import FusedSGD, amp
from amp_wrapper.errors import OverflowStreakError

F16, F32 = torch.float16, torch.float32


@pytest.mark.parametrize('way', ['place', 'name'])
@pytest.mark.parametrize('dynamic', [True, False])
@pytest.mark.parametrize('level', LEVELS)
def test_closures(level: str, dynamic: bool, way: str, device: torch.device) -> None:
    """With scale_loss inside: what plain torch gives, the loss that step() returns included."""
    ours = make(level, device, loss_scale='dynamic' if dynamic else None)
    theirs = make(None, device)
    if not dynamic and level in ('O1', 'O2'):
        set_scales(ours[1], 8.0)
    for index in range(3):

        def closure(index: int = index) -> Tensor:
            ours[1].zero_grad()
            loss = ours[0](data(index, device))
            with amp.scale_loss(loss, ours[1]) as scaled:
                scaled.backward()
            return loss

        def plain(index: int = index) -> Tensor:
            theirs[1].zero_grad()
            loss = theirs[0](data(index, device))
            loss.backward()
            return loss

        with torch.no_grad():
            found = ours[1].step(closure) if way == 'place' else ours[1].step(closure=closure)
        wanted = theirs[1].step(plain)
        assert isinstance(found, Tensor) and found.requires_grad
        if level not in MASTERS:
            assert torch.equal(found, wanted)
    agree(ours, theirs, level)
    assert ours[1].step() is None


@pytest.mark.parametrize('level', LEVELS)
def test_a_closure_that_overflows_or_fails(level: str, device: torch.device) -> None:
    net, optimizer = make(level, device)
    before = values([net], [optimizer])

    def overflows() -> Tensor:
        loss = net(data(0, device))
        backward(loss, optimizer, poisoned=net.fc.weight)
        return loss

    def fails() -> Tensor:
        raise ValueError

    assert float(optimizer.step(overflows)) == float(net(data(0, device)))  # type: ignore[arg-type]
    assert differing(before, values([net], [optimizer])) == [] and scales(optimizer) == [4.0]
    with pytest.raises(ValueError):
        optimizer.step(fails)
    assert differing(before, values([net], [optimizer])) == [] and scales(optimizer) == [4.0]


@pytest.mark.parametrize('level', LEVELS)
def test_steps_without_a_pass(level: str, device: torch.device) -> None:
    """Once more with the same gradients, and with none: as in torch. A skipped step's infinities stay out."""
    ours, theirs = make(level, device), make(None, device)
    for _, each in (ours, theirs):
        each.step()
    backward(ours[0](data(0, device)), ours[1])
    theirs[0](data(0, device)).backward()
    for _, each in (ours, theirs):
        each.step()
        each.step()
        each.zero_grad()
        each.step()
    agree(ours, theirs, level)
    backward(ours[0](data(0, device)), ours[1], poisoned=ours[0].bn.weight)
    ours[1].step()
    ours[1].step()
    agree(ours, theirs, level)
    assert scales(ours[1]) == [4.0]


@pytest.mark.parametrize('fused', [True, False])
@pytest.mark.parametrize('level', LEVELS)
def test_infinities_that_nobody_clears(level: str, fused: bool, device: torch.device) -> None:
    """After a skipped step the gradients are still there: what is added to them must not bring them into the weights."""
    net = Net().to(device)
    optimizer = FusedSGD(net.trained, 0.25, momentum=0.5) if fused else sgd([net])
    amp.initialize(net, optimizer, opt_level=level, loss_scale='dynamic', verbosity=0)
    set_scales(optimizer, 8.0)

    def stepped() -> dict[str, Tensor]:
        # ours begins its state before it knows whether to step
        return {key: value for key, value in values([net], [optimizer]).items() if len(key.split()) != 5}

    before = stepped()
    backward(net(data(0, device)), optimizer, poisoned=net.fc.weight)
    optimizer.step()
    for index in range(3):
        if index == 2:
            net(data(1, device)).backward()
        elif index:
            backward(net(data(index, device)), optimizer)
        optimizer.step()
        assert differing(before, stepped()) == []
    # the pass in between was clean
    assert scales(optimizer) == [4.0] and unskipped(optimizer) == [1]
    net.zero_grad()
    backward(net(data(0, device)), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert differing(before, stepped()) != []
    assert all(bool(value.isfinite().all()) for value in stepped().values())


@pytest.mark.parametrize('level', LEVELS)
def test_scripts_that_leave_out_the_step(level: str, device: torch.device) -> None:
    """ESPnet's way: where the norm is not finite, the gradients are cleared. The scale falls all the same."""
    for clear in ('optimizer', 'model', 'none', 'zeros'):
        ours, theirs = make(level, device), make(None, device)
        net, optimizer = ours
        for index in range(4):
            broken = index in (1, 2)
            backward(net(data(index, device)), optimizer, poisoned=net.fc.weight if broken else None)
            norm = torch.nn.utils.clip_grad_norm_(list(amp.master_params(optimizer)), 1e9)
            assert bool(norm.isfinite()) is not broken
            if norm.isfinite():
                optimizer.step()
                theirs[0](data(index, device)).backward()
                theirs[1].step()
                theirs[1].zero_grad()
            if clear == 'optimizer':
                optimizer.zero_grad()
            elif clear == 'zeros':
                optimizer.zero_grad(set_to_none=False)
            elif clear == 'model':
                net.zero_grad()
            else:
                for parameter in net.parameters():
                    parameter.grad = None
        backward(net(data(0, device)), optimizer)
        assert scales(optimizer) == [2.0], clear
        assert unskipped(optimizer) == [1], clear
        optimizer.zero_grad()
        agree(ours, theirs, level)


@pytest.mark.parametrize('kind', ['norm', 'value'])
@pytest.mark.parametrize('level', LEVELS)
def test_clipping(level: str, kind: str, device: torch.device) -> None:
    """What master_params() gives is what is stepped."""
    ours, theirs = make(level, device), make(None, device)
    for index in range(3):
        for _, each in (ours, theirs):
            each.zero_grad()
        backward(ours[0](data(index, device)), ours[1])
        theirs[0](data(index, device)).backward()
        for _, each in (ours, theirs):
            if kind == 'value':
                torch.nn.utils.clip_grad_value_(list(amp.master_params(each)), 0.5)
            else:
                norm = torch.nn.utils.clip_grad_norm_(list(amp.master_params(each)), 1.0)
        for _, each in (ours, theirs):
            each.step()
    if kind == 'value' or level != 'O3':
        # O3 rounds the clipped gradients
        agree(ours, theirs, level)
    else:
        assert norm.isfinite()


# -- overflow -----------------------------------------------------------------------------------------------------------


def test_the_message(device: torch.device) -> None:
    net, optimizer = make('O2', device, num_losses=3, verbosity=1)
    with logged() as lines:
        for loss_id in (0, 2):
            optimizer.zero_grad()
            backward(net(data(0, device)), optimizer, 0)
            backward(net(data(0, device)), optimizer, loss_id, net.fc.weight)
            optimizer.step()
        amp.amp_session.session_of(optimizer).read_all()
    assert len(lines) == 2
    assert 'step skipped (1 so far, 1 in a row)' in lines[0] and 'loss 0: 4' in lines[0]
    assert 'loss 2: 4' in lines[1] and 'loss 1' not in lines[1]


@pytest.mark.parametrize('fused', [True, False])
@pytest.mark.parametrize('level', ['O1', 'O2', 'O5'])
def test_a_row_of_skips_ends(level: str, fused: bool, device: torch.device) -> None:
    """After 50, with names; the scale is never 0, and weights are those of the last clean step."""
    net = Net().to(device)
    optimizer = FusedSGD(net.trained, 0.25) if fused else sgd([net])
    amp.initialize(net, optimizer, opt_level=level, loss_scale='dynamic', verbosity=0)
    before = values([net], [])
    steps = 0

    def train() -> None:
        nonlocal steps
        for _ in range(200):
            optimizer.zero_grad()
            backward(net(data(0, device)), optimizer, poisoned=net.fc.weight)
            optimizer.step()
            steps += 1

    with pytest.raises(OverflowStreakError, match=r'(?s)50 optimizer steps.*fc.weight'):
        train()
    assert steps == 49 and differing(before, values([net], [])) == []
    (scale,) = scales(optimizer)
    assert scale == 2.0 ** (16 - 50) > 0
    for _ in range(3):
        optimizer.zero_grad()
        set_scales(optimizer, torch.finfo(F32).tiny)
        backward(net(data(0, device)), optimizer, poisoned=net.fc.weight)
        with mock.patch.object(amp.amp_session.session_of(optimizer).engine(optimizer).parts.monitor, '_limit', None):
            optimizer.step()
        assert scales(optimizer) == [torch.finfo(F32).tiny]


# -- schedulers and hooks -----------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    'StepLR': lambda o: schedulers.StepLR(o, 2, 0.5),
    'LambdaLR': lambda o: schedulers.LambdaLR(o, lambda step: 0.5**step),
    'OneCycleLR': lambda o: schedulers.OneCycleLR(o, 0.5, total_steps=10),
    'CyclicLR': lambda o: schedulers.CyclicLR(o, 0.125, 0.5, step_size_up=2),
    'Sequential': lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.5, 2), schedulers.StepLR(o, 1, 0.5)], [2]
    ),
}


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('first', [True, False], ids=['built before', 'built after'])
@pytest.mark.parametrize('name', SCHEDULERS)
def test_schedulers(name: str, first: bool, level: str, device: torch.device) -> None:
    """The same rates as without, and no warning; not even where the first step was skipped."""
    for broken in (None, 0):
        nets = [Net().to(device), Net().to(device)]
        optimizers = [SGD(net.trained, 0.25, momentum=0.5) for net in nets]
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            # torch 2.6's own, of SequentialLR
            warnings.filterwarnings('ignore', 'The epoch parameter in `scheduler.step')
            made = [SCHEDULERS[name](optimizer) for optimizer in optimizers[: 2 if first else 1]]
            amp.initialize(nets[1], optimizers[1], opt_level=level, loss_scale='dynamic', verbosity=0)
            set_scales(optimizers[1], 8.0)
            if not first:
                made.append(SCHEDULERS[name](optimizers[1]))
            rates: list[list[Any]] = [[], []]
            for index in range(5):
                for place in range(2):
                    optimizers[place].zero_grad()
                    loss = nets[place](data(index, device))
                    if place == 0:
                        loss.backward()
                        if index == broken:
                            optimizers[0].zero_grad()
                    else:
                        backward(loss, optimizers[1], poisoned=nets[1].fc.weight if index == broken else None)
                    optimizers[place].step()
                    made[place].step()
                    group = optimizers[place].param_groups[0]
                    rates[place].append((made[place].get_last_lr(), group['lr'], group['momentum']))
        assert rates[0] == rates[1]
        ours, theirs = (values([nets[p]], [optimizers[p]]) for p in (1, 0))
        if level != 'O3':
            # rates that are no dyadic numbers round in 16-bit weights
            assert [key for key in differing(ours, theirs) if level not in MASTERS or 'net' not in key] == []


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('fused', [True, False])
def test_optimizer_hooks(level: str, fused: bool, device: torch.device) -> None:
    """Registered before and after; they see unscaled gradients in FP32, once a step, and what they change counts."""
    net = Net().to(device)
    make_it = (lambda: FusedSGD(net.trained, 0.25, momentum=0.5)) if fused else (lambda: sgd([net]))
    optimizer = make_it()
    told: list[Any] = []

    def before(who: Optimizer, args: Any, kwargs: Any) -> None:
        assert who is optimizer
        told.append(('pre', gradients([who])))
        for group in who.param_groups:
            for parameter in group['params']:
                if parameter.grad is not None:
                    parameter.grad.mul_(2)

    def after(who: Optimizer, args: Any, kwargs: Any) -> None:
        told.append(('post',))

    optimizer.register_step_pre_hook(before)
    optimizer.register_state_dict_post_hook(lambda who, state: {**state, 'mark': 1})
    amp.initialize(net, optimizer, opt_level=level, loss_scale='dynamic', verbosity=0)
    set_scales(optimizer, 8.0)
    optimizer.register_step_post_hook(after)
    optimizer.register_load_state_dict_pre_hook(
        lambda who, state: {key: value for key, value in state.items() if key != 'mark'}
    )
    theirs = make(None, device)
    theirs[0](data(0, device) * 2).backward()
    theirs[1].step()
    backward(net(data(0, device)), optimizer)
    optimizer.step()
    wanted = Net()
    wanted(data(0)).backward()
    assert [entry[0] for entry in told] == ['pre', 'post']
    assert same([g.cpu() for g in told[0][1]], [p.grad for p in wanted.trained])
    if not fused:
        agree((net, optimizer), theirs, level)
    state = optimizer.state_dict()
    assert state['mark'] == 1
    optimizer.load_state_dict(state)
    # a step that is skipped on the host is no step
    told.clear()
    backward(net(data(0, device)), optimizer, poisoned=net.fc.weight)
    weights = values([net], [optimizer])
    optimizer.step()
    assert fused or told == []
    assert differing(weights, values([net], [optimizer])) == []


# -- copies -------------------------------------------------------------------------------------------------------------


def _through_torch(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    'deepcopy': copy.deepcopy,
    'pickle': lambda value: pickle.loads(pickle.dumps(value)),
    'torch.save': _through_torch,
}


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('way', COPIES)
def test_copies(way: str, level: str, device: torch.device) -> None:
    """Of model and optimizer, before and after steps: on their own, with weights of their own."""
    net, optimizer = make(level, device)
    for index in range(2):
        model, stepper = COPIES[way]((net, optimizer))
        assert type(stepper) is SGD and 'step' not in stepper.__dict__ and 'zero_grad' not in stepper.__dict__
        assert same(stepper.state_dict(), optimizer.state_dict())
        x = data(index, device)
        before = net(x)
        assert torch.equal(model(x), before) and model(x).dtype is before.dtype
        # the copy computes with its own weights, and has no part in the training
        with torch.no_grad():
            model.fc.weight.zero_()
            model.bn.weight.zero_()
        assert float(model(x)) == 0 and torch.equal(net(x), before)
        weights = values([net], [optimizer])
        model(x).backward()
        stepper.step()
        stepper.zero_grad()
        assert differing(weights, values([net], [optimizer])) == []
        backward(net(x), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert type(optimizer) is SGD
    plain = make(None, device)
    for index in range(2):
        plain[0](data(index, device)).backward()
        plain[1].step()
        plain[1].zero_grad()
    agree((net, optimizer), plain, level)


@pytest.mark.parametrize('level', LEVELS)
def test_a_copy_that_is_trained_by_itself(level: str, device: torch.device) -> None:
    """The copy is FP32; at O0 and at the levels that cast ops, it has hooks that make way for new ones."""
    net, _ = make(level, device)
    copied = copy.deepcopy(net)
    ours = copied, sgd([copied])
    amp.initialize(*ours, opt_level=level, loss_scale='dynamic', verbosity=0)
    set_scales(ours[1], 8.0)
    theirs = make(None, device)
    backward(copied(data(0, device)), ours[1])
    theirs[0](data(0, device)).backward()
    for _, each in (ours, theirs):
        each.step()
    agree(ours, theirs, level)


# -- the end ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
def test_sessions_die_with_their_optimizers(level: str, device: torch.device) -> None:
    net, optimizer = make(level, device)
    backward(net(data(0, device)), optimizer)
    optimizer.step()
    session = weakref.ref(amp.amp_session.session_of(optimizer))
    weight = weakref.ref(net.fc.weight)
    living = len(amp.state_dict())
    del optimizer
    gc.collect()
    assert session() is None
    other = make('O1', device)
    assert len(amp.state_dict()) == living
    # the model goes on without it
    assert net(data(0, device)).dtype is F32
    del net
    gc.collect()
    assert weight() is None
    del other


@pytest.mark.parametrize('cleared', ['optimizer', 'module'])
@pytest.mark.parametrize('before', ['failed block', 'block', 'nothing'])
@pytest.mark.parametrize(('level', 'scale'), [('O1', 1.0), ('O1', 8.0), ('O3', None), ('O4', None), ('O5', None)])
def test_gradients_by_hand_are_checked_after_others_were_cleared(
    level: str, scale: float | None, before: str, cleared: str, device: torch.device
) -> None:
    """Whatever was checked before belongs to gradients that are gone."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2).to(device)
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, **({} if scale is None else {'loss_scale': scale})
    )
    if before != 'nothing':
        with (
            contextlib.suppress(RuntimeError),
            amp.scale_loss(model(torch.ones(2, 4, device=device)).sum(), optimizer) as loss,
        ):
            if before == 'failed block':
                raise RuntimeError('no backward pass')
            loss.backward()
    optimizer.zero_grad()
    if cleared == 'module':
        model.zero_grad()
    known = [parameter.detach().clone() for parameter in amp.master_params(optimizer)]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    optimizer.step()
    assert same(known, list(amp.master_params(optimizer)))
