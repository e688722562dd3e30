"""What scripts do around a training step that nobody thinks of: clear gradients anywhere, never, or step in their own ways."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import differing
from torch.optim import SGD, Optimizer
from toy_amp import (
    LEVELS,
    Net,
    backward,
    data,
    logged,
    scales,
    set_scales,
    sgd,
    values,
    zero,
)

from amp_wrapper import FusedSGD, amp
from amp_wrapper.engine.host_read import LateRead
from amp_wrapper.errors import AmpAttachError, AmpUsageError

CHECKED = [level for level in LEVELS if level != 'O0']


def trained(level: str | None, device: torch.device, **options: Any) -> tuple[Net, Optimizer]:
    net = Net().to(device)
    optimizer = sgd([net])
    if level is not None:
        amp.initialize(net, optimizer, opt_level=level, verbosity=0, loss_scale='dynamic', **options)
        set_scales(optimizer, 4.0)
    return net, optimizer


def same_as(net: Net, optimizer: Optimizer, plain: Net, plain_optimizer: Optimizer) -> None:
    mine, theirs = values([], [optimizer]), values([], [plain_optimizer])
    assert not differing(mine, theirs)


# -- gradients that are cleared inside the block, or never --------------------------------------------------------------


@pytest.mark.parametrize('after', [False, True])
@pytest.mark.parametrize('level', LEVELS)
def test_zero_grad_inside_the_block(level: str, after: bool, device: torch.device) -> None:
    """What waited for the pass is cleared with it; cleared after backward(), nothing is left."""
    (net, optimizer), (plain, plain_optimizer) = trained(level, device), trained(None, device)
    for iteration in range(3):
        with amp.scale_loss(net(data(iteration, device)), optimizer) as scaled:
            if not after:
                optimizer.zero_grad()
            scaled.backward()
            if after:
                optimizer.zero_grad()
        if after:
            assert all(p.grad is None for p in amp.master_params(optimizer))
            backward(net(data(iteration, device)), optimizer)
        optimizer.step()
        plain_optimizer.zero_grad()
        plain(data(iteration, device)).backward()
        plain_optimizer.step()
    same_as(net, optimizer, plain, plain_optimizer)


@pytest.mark.parametrize('level', LEVELS)
def test_zero_grad_of_another_optimizer_inside_the_block(level: str, device: torch.device) -> None:
    nets = [Net(1).to(device), Net(2).to(device)]
    optimizers = [sgd([net]) for net in nets]
    amp.initialize(nets, optimizers, opt_level=level, verbosity=0, loss_scale='dynamic')
    set_scales(optimizers[0], 4.0)
    backward(nets[1](data(0, device)), optimizers[1])
    loss = nets[0](data(0, device)) + nets[1](data(1, device))
    with amp.scale_loss(loss, optimizers[0]) as scaled:
        optimizers[1].zero_grad()
        scaled.backward()
    found = [p.grad.float() for p in amp.master_params(optimizers[1]) if p.grad is not None]
    assert torch.equal(found[0], data(1, device).expand(2, 2))
    assert torch.equal(found[1], data(1, device)[0])


@pytest.mark.parametrize('level', LEVELS)
def test_a_skipped_step_whose_gradients_stay(level: str, device: torch.device) -> None:
    """A script that does not clear gradients: what made one step be skipped does not reach the weights with the next."""
    net, optimizer = trained(level, device)
    before = values([net], [optimizer])
    backward(net(data(0, device)), optimizer, poisoned=net.fc.weight)
    optimizer.step()
    assert scales(optimizer) == [2.0]
    for _ in range(2):
        backward(net(data(1, device)), optimizer)
        optimizer.step()
        assert not differing(values([net], [optimizer]), before)
    # these passes were finite
    assert scales(optimizer) == [2.0]
    optimizer.zero_grad()
    backward(net(data(1, device)), optimizer)
    optimizer.step()
    after = values([net], [optimizer])
    assert differing(after, before)
    assert all(bool(value.isfinite().all()) for value in after.values())


@pytest.mark.parametrize('how', ['optimizer', 'zeros', 'model'])
@pytest.mark.parametrize('level', CHECKED)
def test_a_backward_pass_outside_of_any_block(level: str, how: str, device: torch.device) -> None:
    """Without a scale, before the block: finite it counts, and not finite it skips the step, while no scale learns."""
    (net, optimizer), (plain, plain_optimizer) = trained(level, device), trained(None, device)
    for value in (1.0, math.nan, 2.0):
        for each, its in ((net, optimizer), (plain, plain_optimizer)):
            zero(how, [its], [each])
            (each(data(0, device)) * value).backward()
        backward(net(data(1, device)), optimizer)
        optimizer.step()
        if not math.isnan(value):
            plain(data(1, device)).backward()
            plain_optimizer.step()
    same_as(net, optimizer, plain, plain_optimizer)
    assert scales(optimizer) == [4.0]


# -- optimizers of third parties ---------------------------------------------------------------------------------------


class OwnWay(SGD):
    """A step with more arguments, and another name for the closure."""

    told: Any = None

    def step(self, fn: Any = None, rate: float = 1.0, *, flag: bool = False) -> Any:  # type: ignore[override]
        self.told = (rate, flag)
        return super().step(fn)


CALLS: dict[str, Callable[[OwnWay], Any]] = {
    'none': lambda optimizer: optimizer.step(),
    'by place': lambda optimizer: optimizer.step(None, 0.5, flag=True),
    'by name': lambda optimizer: optimizer.step(fn=None, rate=0.5, flag=True),
}


@pytest.mark.parametrize('call', CALLS)
@pytest.mark.parametrize('level', LEVELS)
def test_arguments_of_step_arrive_as_they_are(level: str, call: str, device: torch.device) -> None:
    net = Net().to(device)
    optimizer = OwnWay(net.trained, lr=0.25)
    amp.initialize(net, optimizer, opt_level=level, verbosity=0, loss_scale=4.0)
    before = values([], [optimizer])
    backward(net(data(0, device)), optimizer)
    CALLS[call](optimizer)
    assert optimizer.told == ((1.0, False) if call == 'none' else (0.5, True))
    assert differing(values([], [optimizer]), before)


@pytest.mark.parametrize('by_name', [False, True])
@pytest.mark.parametrize('level', LEVELS)
def test_closure_of_another_name(level: str, by_name: bool, device: torch.device) -> None:
    (net, _), (plain, plain_optimizer) = trained(None, device), trained(None, device)
    optimizer = OwnWay(net.trained, lr=0.25, momentum=0.5)
    amp.initialize(net, optimizer, opt_level=level, verbosity=0, loss_scale=4.0 if level != 'O0' else None)

    def closure() -> float:
        optimizer.zero_grad()
        loss = net(data(0, device))
        backward(loss, optimizer)
        return loss.item()

    told = optimizer.step(fn=closure) if by_name else optimizer.step(closure, 0.5)
    assert isinstance(told, float)
    plain(data(0, device)).backward()
    plain_optimizer.step()
    same_as(net, optimizer, plain, plain_optimizer)


@pytest.mark.parametrize('level', CHECKED)
def test_a_parameter_that_an_optimizer_has_twice(level: str, device: torch.device) -> None:
    net = Net().to(device)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        optimizer = SGD([net.fc.weight, net.bn.weight, net.fc.weight], lr=0.25)
    before = list(optimizer.param_groups[0]['params'])
    with pytest.raises(AmpAttachError, match=r'fc\.weight'):
        amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    assert all(a is b for a, b in zip(before, optimizer.param_groups[0]['params'], strict=True))
    assert net.fc.weight.dtype is torch.float32 and not net._forward_pre_hooks
    assert 'step' not in vars(optimizer)


@pytest.mark.parametrize('level', ['O2', 'O3', 'O5'])
def test_a_model_is_cast_once(level: str, device: torch.device) -> None:
    """The remedy is one that this interface has."""
    net, _ = trained(level, device)
    other = sgd([net])
    with pytest.raises(AmpAttachError, match='build the model again') as caught:
        amp.initialize(net, other, opt_level=level, verbosity=0)
    assert 'detach' not in str(caught.value)
    assert 'step' not in vars(other)


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', ['O1', 'O2'])
def test_sessions_of_other_threads_are_left_alone(level: str, device: torch.device) -> None:
    """A pass sets aside what lies at the other sessions' parameters, but not while another thread makes it."""
    net, optimizer = trained(level, device)
    inside, done = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def other() -> None:
        try:
            theirs, their_optimizer = trained(level, device)
            loss = theirs(data(0, device))
            with amp.scale_loss(loss, their_optimizer) as scaled:
                inside.set()
                assert done.wait(60)
                scaled.backward()
        except BaseException as error:
            failed.append(error)
            inside.set()

    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert inside.wait(60)
        backward(net(data(0, device)), optimizer)
        optimizer.step()
        plain, plain_optimizer = trained(None, device)
        plain(data(0, device)).backward()
        plain_optimizer.step()
    finally:
        done.set()
        thread.join()
    assert not failed
    same_as(net, optimizer, plain, plain_optimizer)
    assert scales(optimizer) == [4.0]


# -- weights that a script edits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
def test_weights_that_are_clamped_after_each_step(level: str, device: torch.device) -> None:
    """As a WGAN does it: in place, without ``.data``."""
    (net, optimizer), (plain, plain_optimizer) = trained(level, device), trained(None, device)
    for iteration in range(4):
        zero('optimizer', [optimizer, plain_optimizer], [])
        backward(net(data(iteration, device)), optimizer)
        plain(data(iteration, device)).backward()
        for its, each in ((optimizer, net), (plain_optimizer, plain)):
            its.step()
            with torch.no_grad():
                for parameter in each.trained:
                    parameter.clamp_(-0.5, 0.5)
        assert torch.equal(net.fc.weight.float(), plain.fc.weight)
    for each, its in ((net, optimizer), (plain, plain_optimizer)):
        its.zero_grad()
        if each is net:
            backward(each(data(0, device)), its)
        else:
            each(data(0, device)).backward()
        its.step()
    same_as(net, optimizer, plain, plain_optimizer)


class Projecting(SGD):
    """An optimizer that multiplies matrices, as second-order ones do."""

    seen: torch.dtype | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group['params']:
                if parameter.grad is not None and parameter.dim() == 2:
                    self.seen = (parameter.grad @ parameter.grad.t()).dtype
        return super().step(closure)


def test_optimizers_compute_in_fp32_while_everything_is_cast(device: torch.device) -> None:
    net = Net().to(device)
    handle = amp.init(loss_scale=4.0)
    try:
        inner = Projecting(net.trained, lr=0.25)
        optimizer = handle.wrap_optimizer(inner)
        with optimizer.scale_loss(net(data(0, device))) as scaled:
            scaled.backward()
        optimizer.step()
    finally:
        handle._deactivate()
    assert inner.seen is torch.float32


# -- steps that nobody waits for ---------------------------------------------------------------------------------------


def test_skips_that_only_the_device_knew_are_told(device: torch.device) -> None:
    """After the step on a CPU, at the latest with state_dict(): and nothing piles up."""
    net = Net().to(device)
    optimizer = FusedSGD(net.trained, lr=0.25)
    amp.initialize(net, optimizer, opt_level='O1', loss_scale='dynamic')
    set_scales(optimizer, 4.0)
    with logged() as lines:
        for _ in range(3):
            optimizer.zero_grad()
            backward(net(data(0, device)), optimizer, poisoned=net.fc.weight)
            optimizer.step()
        if device.type == 'cpu':
            assert len(lines) == 3
        amp.state_dict()
    assert len(lines) == 3 and all('skipped' in line for line in lines)


def test_late_skips_are_told_with_state_dict(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """As on a GPU that has not come so far."""
    monkeypatch.setattr(LateRead, 'is_there', property(lambda read: False))
    net = Net().to(device)
    optimizer = FusedSGD(net.trained, lr=0.25)
    amp.initialize(net, optimizer, opt_level='O1', loss_scale='dynamic')
    set_scales(optimizer, 4.0)
    with logged() as lines:
        backward(net(data(0, device)), optimizer, poisoned=net.fc.weight)
        optimizer.step()
        assert not lines
        amp.state_dict()
    assert len(lines) == 1 and 'skipped' in lines[0]


@pytest.mark.parametrize('level', ['O2', 'O5'])
def test_edits_through_data_are_taken_up_where_a_script_says_so(level: str) -> None:
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, -3.0]]))
        model.bias.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=4.0, verbosity=0)
    model.weight.data.clamp_(-1.0, 1.0)
    assert amp.weights_changed(optimizer) == ['weight']
    assert amp.weights_changed(optimizer) == []
    with amp.scale_loss(model(torch.tensor([[1.0, 2.0]])).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert model.weight.tolist() == [[0.75, -1.5]]
    model.weight.data.fill_(0.5)
    assert amp.weights_changed(optimizer, [model.bias]) == []
    assert amp.weights_changed(optimizer, [model.weight]) == ['weight']
    with pytest.raises(AmpUsageError, match='was not initialised'):
        amp.weights_changed(torch.optim.SGD(model.parameters(), lr=0.25))
