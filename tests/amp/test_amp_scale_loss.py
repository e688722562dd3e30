"""amp.scale_loss: misuse, blocks within blocks, exceptions, backward passes without a block."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from bits import differing, same
from torch import nn
from torch.optim import SGD, Optimizer
from toy_amp import (
    LEVELS,
    MASTERS,
    Net,
    agree,
    backward,
    check_rounded,
    data,
    gradients,
    logged,
    make,
    scales,
    set_scales,
    sgd,
    values,
)

from amp_wrapper import amp
from amp_wrapper.autocast import regions
from amp_wrapper.autocast.patching import patches
from amp_wrapper.errors import AmpUsageError

F16, F32 = torch.float16, torch.float32


# -- scale_loss ---------------------------------------------------------------------------------------------------------


def test_misuse_of_scale_loss(device: torch.device) -> None:
    net, optimizer = make('O2', device, num_losses=2)
    loss = net(data(0, device))
    stranger, off = sgd([Net()]), sgd([Net()])
    amp.initialize(Net(), off, enabled=False)
    for arguments, match in (
        ((loss, stranger), 'was not initialised'),
        ((loss, [optimizer, stranger]), 'was not initialised'),
        ((loss, copy.copy(optimizer)), 'was not initialised'),
        ((loss, []), 'empty'),
        ((loss, net), 'Net'),
        ((loss, None), 'NoneType'),
        ((loss, [optimizer, off]), 'enabled=False'),
        ((loss, optimizer, 2), 'loss_id=2 is not below num_losses=2'),
        ((loss, optimizer, -1), 'loss_id=-1'),
        ((loss, optimizer, '0'), "loss_id='0'"),
        ((loss, optimizer, None), 'loss_id=None'),
        ((3.5, optimizer), 'float'),
        ((None, optimizer), 'NoneType'),
        ((torch.ones((), dtype=torch.int64), optimizer), 'int64'),
        (((loss, loss), optimizer), 'tuple'),
    ):
        before = gradients([optimizer])
        with pytest.raises(AmpUsageError, match=match):
            amp.scale_loss(*arguments).__enter__()
        assert same(before, gradients([optimizer]))
    # and all is well afterwards
    backward(loss, optimizer)
    optimizer.step()
    assert scales(optimizer) == [8.0, 8.0]


@pytest.mark.parametrize('level', LEVELS)
def test_step_within_the_block(level: str, device: torch.device) -> None:
    net, optimizer = make(level, device)
    before = values([net], [optimizer])

    def script() -> None:
        with amp.scale_loss(net(data(0, device)), optimizer) as scaled:
            scaled.backward()
            optimizer.step()

    with pytest.raises(AmpUsageError, match='Step after the block'):
        script()
    assert differing(before, values([net], [optimizer])) == [] and gradients([optimizer]) == [None, None]


@pytest.mark.parametrize('level', LEVELS)
def test_blocks_within_blocks_of_one_optimizer(level: str, device: torch.device) -> None:
    ours, theirs = make(level, device), make(None, device)
    net, optimizer = ours

    def script() -> None:
        with amp.scale_loss(net(data(0, device)), optimizer) as outer:
            with amp.scale_loss(outer, optimizer) as inner:
                inner.backward()

    with pytest.raises(AmpUsageError, match='inside another one'):
        script()
    assert gradients([optimizer]) == [None, None]
    backward(net(data(0, device)), optimizer)
    theirs[0](data(0, device)).backward()
    for _, each in (ours, theirs):
        each.step()
    agree(ours, theirs, level)


@pytest.mark.parametrize('order', ['inner first', 'outer first', 'outer last', 'twice', 'by turns'])
@pytest.mark.parametrize('sessions', [1, 2])
@pytest.mark.parametrize('level', LEVELS)
def test_blocks_within_blocks_of_two_optimizers(level: str, sessions: int, order: str, device: torch.device) -> None:
    """Each loss has a scale of its own; the outer one may reach the models of both, as whoever calls backward() last."""

    def train(at: str | None) -> tuple[list[Net], list[Optimizer]]:
        nets = [Net().to(device), Net(2).to(device)]
        optimizers = [sgd([net]) for net in nets]
        words: dict[str, Any] = dict(opt_level=at or 'O0', loss_scale='dynamic', verbosity=0)
        if at is not None and sessions == 1:
            amp.initialize(nets, optimizers, num_losses=2, **words)
            set_scales(optimizers[0], 4.0, 16.0)
        elif at is not None:
            for place in range(2):
                amp.initialize(nets[place], optimizers[place], **words)
                set_scales(optimizers[place], (4.0, 16.0)[place])
        for index in range(3):
            for optimizer in optimizers:
                if index != 1:
                    optimizer.zero_grad()
            x = data(index, device)
            losses = [nets[0](x) + nets[1](x), nets[1](x * 2)]
            if at is None:
                for loss in losses:
                    loss.backward(retain_graph=True)
                if order in ('twice', 'by turns'):
                    losses[0].backward(retain_graph=True)
                if order == 'by turns':
                    losses[1].backward()
            else:
                inner_id = 1 if sessions == 1 else 0
                with amp.scale_loss(losses[0], optimizers[0]) as outer:
                    if order in ('outer first', 'twice'):
                        outer.backward(retain_graph=True)
                    with amp.scale_loss(losses[1], optimizers[1], inner_id) as inner:
                        inner.backward(retain_graph=True)
                        if order in ('inner first', 'by turns'):
                            outer.backward(retain_graph=True)
                        if order == 'by turns':
                            inner.backward(retain_graph=True)
                            outer.backward(retain_graph=True)
                    if order in ('outer last', 'twice'):
                        outer.backward()
            for optimizer in optimizers:
                optimizer.step()
        return nets, optimizers

    (plain, theirs), (run, ours) = train(None), train(level)
    wrong = differing(values(run, ours), values(plain, theirs))
    check_rounded(run, level)
    assert [key for key in wrong if level not in MASTERS or 'net' not in key] == []


@pytest.mark.parametrize('sessions', [1, 2])
@pytest.mark.parametrize('level', LEVELS)
def test_one_backward_of_two_blocks(level: str, sessions: int, device: torch.device) -> None:
    """Whose scale a gradient carries cannot be known: refused, and gradients are as before."""
    nets = [Net().to(device), Net(2).to(device)]
    optimizers = [sgd([net]) for net in nets]
    words: dict[str, Any] = dict(opt_level=level, loss_scale=16.0, verbosity=0)
    if sessions == 1:
        amp.initialize(nets, optimizers, **words)
    else:
        for net, optimizer in zip(nets, optimizers):
            amp.initialize(net, optimizer, **words)
    x = data(0, device)

    def script() -> None:
        with amp.scale_loss(nets[0](x), optimizers[0]) as first, amp.scale_loss(nets[1](x), optimizers[1]) as second:
            (first + second).backward()

    with pytest.raises(AmpUsageError, match='two scaled losses'):
        script()
    assert gradients(optimizers) == [None] * 4 and nets[0].fc.weight.grad is None
    with amp.scale_loss(nets[0](x), optimizers[0]) as first, amp.scale_loss(nets[1](x), optimizers[1]) as second:
        first.backward()
        second.backward()
    wanted = [Net(), Net(2)]
    for net in wanted:
        net(data(0)).backward()
    for ours, theirs in zip(gradients(optimizers), [p.grad for net in wanted for p in net.trained]):
        assert ours is not None and theirs is not None and torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize('place', ['before', 'in', 'after'])
@pytest.mark.parametrize('level', LEVELS)
def test_exceptions_within_the_block(level: str, place: str, error: type[BaseException], device: torch.device) -> None:
    """Gradients, flags and all that is global are as before; what follows is as if the pass had not been."""
    ours, theirs = make(level, device), make(None, device)
    net, optimizer = ours
    for index, how in enumerate(('optimizer', 'model', 'model')):
        for model, each in (ours, theirs):
            each.zero_grad() if how == 'optimizer' else model.zero_grad()
        backward(net(data(index, device)), optimizer)
        theirs[0](data(index, device)).backward()
        before = gradients([optimizer]), [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        state = [scaler.state_dict() for scaler in amp.amp_session.session_of(optimizer).scalers]

        def broken(index: int = index) -> None:
            loss = net(data(index, device)) * math.inf
            if place == 'in':
                # some gradients have arrived by then
                net.fc.weight.register_hook(lambda grad: (_ for _ in ()).throw(error()))
            with amp.scale_loss(loss, optimizer) as scaled:
                if place == 'before':
                    raise error
                scaled.backward()
                raise error

        with pytest.raises((error, RuntimeError) if error is ValueError else error):
            broken()
        net.fc.weight._backward_hooks = None
        after = gradients([optimizer]), [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        assert same(before, after)
        assert [scaler.state_dict() for scaler in amp.amp_session.session_of(optimizer).scalers] == state
        assert not torch.is_autocast_enabled() and not torch.is_autocast_enabled('cpu')
        assert regions.count() == 0 and not patches.in_place
        assert torch.is_grad_enabled()
        if index == 1:
            # clear by the model what was left after the exception, and begin again
            for model, _ in (ours, theirs):
                model.zero_grad()
            backward(net(data(3, device)), optimizer)
            theirs[0](data(3, device)).backward()
        for _, each in (ours, theirs):
            each.step()
    agree(ours, theirs, level)
    assert scales(optimizer) == [8.0]


def test_exceptions_leave_no_pass_of_others_open(device: torch.device) -> None:
    """Gradients that had been set aside at an optimizer that the pass was not meant for."""
    nets = [Net().to(device), Net(2).to(device)]
    optimizers = [sgd([net]) for net in nets]
    amp.initialize(nets, optimizers, opt_level='O2', loss_scale=8.0, verbosity=0)
    for loss, optimizer in zip([net(data(0, device)) for net in nets], optimizers):
        backward(loss, optimizer)
    before = gradients(optimizers), [p.grad for net in nets for p in net.parameters()]
    before = copy.deepcopy(before)

    def broken() -> None:
        with amp.scale_loss(nets[0](data(1, device)) + nets[1](data(1, device)), optimizers[0]) as scaled:
            scaled.backward()
            raise ValueError

    with pytest.raises(ValueError):
        broken()
    assert same(before, (gradients(optimizers), [p.grad for net in nets for p in net.parameters()]))
    nets[1].zero_grad()
    backward(nets[1](data(0, device)), optimizers[1])
    assert same(gradients([optimizers[1]]), before[0][2:])


@pytest.mark.parametrize('level', LEVELS)
def test_the_loss_keeps_its_form(level: str, device: torch.device) -> None:
    """Any shape; float64 stays; 16-bit losses are scaled in FP32."""
    _, optimizer = make(level, device)
    for dtype, shape in itertools.product((F16, F32, torch.float64), ((), (1,), (2, 3))):
        loss = torch.full(shape, 3.0, dtype=dtype, device=device, requires_grad=True)
        with amp.scale_loss(loss, optimizer) as scaled:
            assert scaled.shape == shape and scaled.dtype is (torch.float64 if dtype is torch.float64 else F32)
            assert torch.equal(scaled.float(), torch.full(shape, 24.0, device=device))
    # without a graph too
    with amp.scale_loss(torch.tensor(2.0, device=device), optimizer) as scaled:
        assert float(scaled) == 16.0


@pytest.mark.parametrize('level', LEVELS)
def test_plain_backward(level: str, device: torch.device) -> None:
    """loss.backward() without scale_loss is a pass at scale 1; it adds to scaled ones, and its infinities are seen."""
    ours, theirs = make(level, device), make(None, device)
    for index in range(4):
        for _, each in (ours, theirs):
            each.zero_grad()
        ours[0](data(index, device)).backward()
        theirs[0](data(index, device)).backward()
        if index == 2:
            backward(ours[0](data(3, device)), ours[1])
            theirs[0](data(3, device)).backward()
        if index == 1:
            ours[0].fc.weight.grad[0, 0] = math.inf  # type: ignore[index]
        else:
            theirs[1].step()
        ours[1].step()
    agree(ours, theirs, level)
    # nobody scaled: no scale has to learn
    assert scales(ours[1]) == [8.0]


@pytest.mark.parametrize('level', LEVELS)
def test_plain_backward_in_a_second_pass(level: str, device: torch.device) -> None:
    """After a scaled one, onto the same weights; the sum cannot be told apart there, which a warning says."""
    net, optimizer = make(level, device, verbosity=1)
    backward(net(data(0, device)), optimizer)
    with logged() as lines:
        net(data(0, device)).backward()
        optimizer.step()
    assert any('outside' in line for line in lines) == (level in MASTERS)


@pytest.mark.parametrize('level', ['O1', 'O4', 'O2'])
def test_gradient_penalty(level: str, device: torch.device) -> None:
    """Double backward: the penalty's own graph goes through the gradients of a first one, unscaled."""

    def train(at: str | None) -> tuple[nn.Linear, Optimizer]:
        model = nn.Linear(2, 1, bias=False).to(device)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[0.5, -1.0]]))
        optimizer = SGD(model.parameters(), 0.25)
        if at is not None:
            amp.initialize(model, optimizer, opt_level=at, loss_scale=16.0, verbosity=0)
        for index in range(3):
            optimizer.zero_grad()
            x = data(index, device).requires_grad_(True)
            output = model(x).sum()
            (slope,) = torch.autograd.grad(output, x, create_graph=True)
            loss = output + slope.square().sum() / 4
            if at is None:
                loss.backward()
            else:
                backward(loss, optimizer)
            optimizer.step()
        return model, optimizer

    plain, run = train(None), train(level)
    wanted, found = (next(iter(amp.master_params(o))) for _, o in (plain, run))
    if level == 'O2':
        assert torch.allclose(wanted, found, rtol=2e-3)
    else:
        assert torch.allclose(wanted, found, rtol=2e-3 if level == 'O1' else 2e-2)
    assert found.dtype is F32 and not torch.equal(found, plain[0].weight * 0)
