"""Optimizers over weights that were cast meanwhile, and models converted after amp.initialize."""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from bits import differing
from torch import nn
from torch.optim import SGD, Optimizer
from toy_amp import (
    LEVELS,
    Net,
    amp_speaks,
    backward,
    data,
    logged,
    scaled,
    scales,
    sgd,
    values,
)

from amp_wrapper import AmpOptimWrapper, amp
from amp_wrapper.amp import known_models
from amp_wrapper.errors import AmpAttachError, AmpConfigError, AmpUsageError
from amp_wrapper.policy import resolve

MASTERS = ('O2', 'O5')


# -- optimizers that were not handed over -------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
def test_an_uninitialised_optimizer(level: str, device: torch.device) -> None:
    """At the levels with masters it would step 16-bit weights; elsewhere their gradients are in order."""
    net, optimizer = scaled(level, device)
    other = sgd([net])
    backward(net(data(0, device)), optimizer)
    before = values([net], [optimizer])
    with logged() as lines:
        if level in MASTERS:
            with pytest.raises(AmpUsageError, match=r'amp\.initialize\(\[\], optimizer\)'):
                other.step()
            assert not differing(before, values([net], [optimizer]))
        else:
            other.step()
    assert lines == []


@pytest.mark.parametrize('level', LEVELS)
def test_an_uninitialised_optimizer_of_weights_that_nobody_steps(level: str, device: torch.device) -> None:
    net, head = Net().to(device), nn.Linear(1, 1).to(device)
    optimizer, other = sgd([net]), SGD(head.parameters(), lr=0.1)
    amp.initialize([net, head], [optimizer], opt_level=level, verbosity=0)
    for parameter in head.parameters():
        known_models._policies[parameter] = dataclasses.replace(known_models._policies[parameter], verbosity=1)
    with logged() as lines:
        for _ in range(2):
            head(torch.ones(1, 1, device=device)).sum().backward()
            other.step()
    assert len(lines) == (level in ('O1', 'O2'))
    assert all('SGD, which was not initialised' in line for line in lines)


@pytest.mark.parametrize('level', LEVELS)
def test_an_optimizer_around_an_initialised_one(level: str, device: torch.device) -> None:
    class Around(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            self.inner = inner
            super().__init__(inner.param_groups, {})
            self.param_groups = inner.param_groups

        def step(self, closure: Any = None) -> Any:
            return self.inner.step()

    net = Net().to(device)
    around = Around(sgd([net]))
    amp.initialize(net, around, opt_level=level, verbosity=0, loss_scale=8.0)
    amp_speaks([around])
    with logged() as lines:
        backward(net(data(0, device)), around)
        around.step()
    assert lines == []


# -- optimizers of other models -----------------------------------------------------------------------------------------


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def take(api: str, net: nn.Module, optimizer: Optimizer, level: str = 'O2') -> None:
    if api == 'amp':
        amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    else:
        AmpOptimWrapper(opt_level=level, optimizer=optimizer).attach(net)


@pytest.mark.parametrize('api', ['amp', 'wrapper'])
@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('which', ['copy', 'part of a copy', 'another model', 'groups'])
def test_an_optimizer_of_another_model(which: str, level: str, api: str, device: torch.device) -> None:
    net = model().to(device)
    other = copy.deepcopy(net)
    chosen: Any = {
        'copy': other.parameters(),
        'part of a copy': other[2].parameters(),
        'another model': nn.Linear(3, 3).parameters(),
        'groups': [{'params': [p for p in other.parameters() if p.ndim == d]} for d in (2, 1)],
    }[which]
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(AmpAttachError, match='none of them belongs to the model'):
        take(api, net, SGD(chosen, lr=0.1), level)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    take(api, net, SGD(net.parameters(), lr=0.1), level)


@pytest.mark.parametrize('level', LEVELS)
def test_one_stale_optimizer_among_several(level: str) -> None:
    nets = [model(), nn.Linear(4, 4)]
    optimizers = [SGD(copy.deepcopy(nets[0]).parameters(), lr=0.1), SGD(nets[1].parameters(), lr=0.1)]
    with pytest.raises(AmpAttachError, match='none of them belongs'):
        amp.initialize(nets, optimizers, opt_level=level, verbosity=0)


def extra_parameters(net: nn.Module) -> list[Optimizer]:
    return [SGD([*net.parameters(), nn.Parameter(torch.ones(()))], lr=0.1)]


def a_temperature(net: nn.Module) -> list[Optimizer]:
    return [SGD(net.parameters(), lr=0.1), SGD([nn.Parameter(torch.ones(()))], lr=0.1)]


def centres(net: nn.Module) -> list[Optimizer]:
    """A loss with weights, of the shape of a layer."""
    return [SGD(net.parameters(), lr=0.1), SGD([nn.Parameter(torch.ones(2, 8))], lr=0.1)]


def an_image(net: nn.Module) -> list[Optimizer]:
    return [SGD([torch.ones(1, 4).requires_grad_()], lr=0.1)]


def an_image_and_a_frozen_model(net: nn.Module) -> list[Optimizer]:
    net.requires_grad_(False)
    return [SGD([nn.Parameter(torch.ones(1, 4)), nn.Parameter(torch.ones(4))], lr=0.1)]


def one_part(net: nn.Module) -> list[Optimizer]:
    return [SGD(net[2].parameters(), lr=0.1)]


def none_at_all(net: nn.Module) -> list[Optimizer]:
    return []


@pytest.mark.parametrize(
    'made',
    [extra_parameters, a_temperature, centres, an_image, an_image_and_a_frozen_model, one_part, none_at_all],
)
@pytest.mark.parametrize('level', LEVELS)
def test_optimizers_that_hold_more_or_less_than_the_model(level: str, made: Callable[..., list[Optimizer]]) -> None:
    net = model()
    optimizers = made(net)
    own = set(net.parameters())
    loose = [parameter for parameter in stepped(optimizers) if parameter not in own]
    amp.initialize(net, optimizers, opt_level=level, verbosity=0, loss_scale=8.0)
    assert net[0].weight.dtype is (resolve(level).cast_model_type or torch.float32)
    check_trains(net, optimizers, loose)


def stepped(optimizers: list[Optimizer]) -> list[torch.Tensor]:
    return [parameter for each in optimizers for group in each.param_groups for parameter in group['params']]


def check_trains(net: nn.Module, optimizers: list[Optimizer], loose: Sequence[torch.Tensor] = ()) -> None:
    """One step moves all that the optimizers step, the model's parameters and the ``loose`` others, and changes no type."""
    held = stepped(optimizers)
    types = [parameter.dtype for parameter in held]
    before = [parameter.detach().clone() for parameter in held]
    torch.manual_seed(0)
    loss = net.eval()(torch.randn(3, 4)).float().square().sum() + sum(p.float().sum() for p in loose)
    if optimizers:
        with amp.scale_loss(loss, optimizers) as scaled_loss:
            scaled_loss.backward()
    for each in optimizers:
        each.step()
    assert [parameter.dtype for parameter in held] == types
    moved = [not old.equal(parameter.detach()) for old, parameter in zip(before, held)]
    assert all(moved), moved
    assert all(p.detach().isfinite().all() for p in held)


def test_an_optimizer_alone() -> None:
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    assert amp.initialize([], optimizer, verbosity=0, loss_scale=8.0) == ([], optimizer)
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    check_trains(net, [optimizer])


# -- another optimizer for the same model -------------------------------------------------------------------------------


@pytest.mark.parametrize('old', ['kept', 'gone', 'gone, gradients left'])
@pytest.mark.parametrize('clear', ['optimizer', 'model', 'not at first'])
@pytest.mark.parametrize('level', [*LEVELS, None])
def test_a_new_optimizer(level: str | None, clear: str, old: str, device: torch.device) -> None:
    """Bit for bit as in FP32, masters and their low bits included, whatever became of the old one."""
    net, plain = Net().to(device), Net().to(device)
    first, theirs = sgd([net]), sgd([plain])
    # weights that no 16-bit type holds
    for each in (net, plain):
        with torch.no_grad():
            each.fc.weight += 2.0**-14
    if level is not None:
        amp.initialize(net, first, opt_level=level, verbosity=0, loss_scale=8.0)
    for index in range(2):
        for each, optimizer in ((net, first), (plain, theirs)):
            optimizer.zero_grad()
            loss = each(data(index, device))
            backward(loss, optimizer) if level is not None and each is net else loss.backward()
            optimizer.step()
    if old == 'gone':
        first.zero_grad()
        theirs.zero_grad()
    second, other = SGD(net.trained, lr=0.5, momentum=0.25), SGD(plain.trained, lr=0.5, momentum=0.25)
    if old != 'kept':
        del first
        gc.collect()
    if level is not None:
        amp.initialize([], second, verbosity=0)
        assert scales(second) == [8.0]
    for index in range(3):
        for each, optimizer in ((net, second), (plain, other)):
            if clear == 'model':
                each.zero_grad()
            elif clear == 'optimizer' or index > 0:
                optimizer.zero_grad()
            for part in range(2):
                loss = each(data(index + part, device))
                backward(loss, optimizer) if level is not None and each is net else loss.backward()
            optimizer.step()
    if level == 'O3':
        # no masters
        return
    assert not differing(values([], [second]), values([], [other]))
    if level is not None:
        assert all(p.dtype is torch.float32 for p in amp.master_params(second))
        assert torch.equal(net.state_dict()['fc.weight'], plain.fc.weight)


def test_a_new_optimizer_is_of_the_models_level() -> None:
    net = model()
    amp.initialize(net, SGD(net.parameters(), lr=0.1), opt_level='O5', num_losses=2, verbosity=0)
    new = SGD(net.parameters(), lr=0.1)
    with pytest.raises(AmpAttachError, match=r"opt_level='O2'.*at O5"):
        amp.initialize([], new, opt_level='O2', verbosity=0)
    with pytest.raises(AmpConfigError, match=r'keep_fp32.*was decided'):
        amp.initialize([], new, keep_fp32='Linear', verbosity=0)
    with pytest.raises(AmpAttachError, match='made from FP32 masters'):
        amp.initialize([], SGD(amp.master_params(SGD_of(net)), lr=0.1), verbosity=0)
    amp.initialize([], new, loss_scale=4.0, verbosity=0)
    assert scales(new) == [4.0, 4.0]
    assert {p.dtype for p in amp.master_params(new)} == {torch.float32}


def SGD_of(net: nn.Module) -> Optimizer:
    made = SGD(net.parameters(), lr=0.1)
    amp.initialize([], made, opt_level='O5', verbosity=0)
    return made


def test_both_errors_name_the_way_to_a_new_optimizer() -> None:
    net = model()
    amp.initialize(net, SGD(net.parameters(), lr=0.1), opt_level='O2', verbosity=0)
    new = SGD(net.parameters(), lr=0.1)
    with pytest.raises(AmpAttachError, match=r'amp\.initialize\(\[\], optimizer\)'):
        amp.initialize(net, new, opt_level='O2', verbosity=0)
    with pytest.raises(AmpUsageError, match=r'amp\.initialize\(\[\], optimizer\)'):
        with amp.scale_loss(net(torch.ones(2, 4)).sum(), new):
            pass


# -- conversions --------------------------------------------------------------------------------------------------------

CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    'half': lambda m: m.half(),
    'float': lambda m: m.float(),
    'double': lambda m: m.double(),
    'bfloat16': lambda m: m.bfloat16(),
    'to': lambda m: m.to(torch.float16),
    'to a tensor': lambda m: m.to(torch.ones(1, dtype=torch.float64)),
    'type': lambda m: m.type(torch.bfloat16),
}


@pytest.mark.parametrize('api', ['amp', 'wrapper'])
@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('how', CONVERSIONS)
def test_conversions(how: str, level: str, api: str, device: torch.device) -> None:
    """Refused with nothing changed, unless nothing would change; of parts and from around the model too."""
    net = model().to(device)
    around = nn.Sequential(nn.Linear(2, 2).to(device), net)
    take(api, net, SGD(net.parameters(), lr=0.1), level)
    before = {name: (tensor.dtype, tensor.clone()) for name, tensor in around.state_dict(keep_vars=True).items()}
    target = CONVERSIONS[how](nn.Linear(1, 1)).weight.dtype
    for converted in (net, net[2], around):
        if all(t.dtype is target for t in (*converted.parameters(), *converted.buffers()) if t.is_floating_point()):
            CONVERSIONS[how](converted)
            continue
        changes = any(t.dtype is not target for m in (net, net[2]) if m in converted.modules() for t in m.parameters())
        if changes and (converted is not net[2] or net[2].weight.dtype is not target):
            with pytest.raises(AmpUsageError, match=f'attached to, at {level}'):
                CONVERSIONS[how](converted)
    now = around.state_dict(keep_vars=True)
    assert all(now[name].dtype is dtype and torch.equal(now[name], value) for name, (dtype, value) in before.items())


@pytest.mark.parametrize('level', LEVELS)
def test_moves_go_on(level: str, device: torch.device) -> None:
    net = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)).to(device)
    optimizer = SGD(net.parameters(), lr=0.1)
    amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    for _ in range(2):
        assert net.to(device).to(memory_format=torch.channels_last) is net
        net.cpu().to(device)
        net.share_memory()
        with amp.scale_loss(net(torch.ones(1, 2, 2, 2, device=device)).sum(), optimizer) as loss:
            loss.backward()
        optimizer.step()
    # copies, and models that are let go of, are anybody's
    copy.deepcopy(net).double()


def test_a_detached_model_may_be_converted() -> None:
    net = model()
    wrapper = AmpOptimWrapper(opt_level='O2', optimizer=SGD(net.parameters(), lr=0.1))
    wrapper.attach(net)
    wrapper.detach()
    assert net.half()[0].weight.dtype is torch.float16


def test_conversions_fail_as_they_did(device: torch.device) -> None:
    net = model().to(device)
    take('amp', net, SGD(net.parameters(), lr=0.1))
    with pytest.raises(TypeError, match='floating point'):
        net.to(torch.int64)
    with pytest.raises((RuntimeError, NotImplementedError)):
        net._apply(lambda tensor: tensor.to('nowhere'))


@pytest.mark.parametrize('level', LEVELS)
def test_scripted_and_traced(level: str, device: torch.device) -> None:
    net = model().to(device)
    take('amp', net, SGD(net.parameters(), lr=0.1), level)
    with pytest.raises(AmpUsageError, match=r'torch\.jit\.trace'):
        torch.jit.script(net)
    x = torch.randn(3, 4, device=device)
    traced = torch.jit.trace(net.eval(), x)
    assert torch.equal(traced(x * 2), net(x * 2))
    # who asks politely gets no error
    assert getattr(next(iter(net._forward_hooks.values())), '__name__', None) is None


# -- weights beyond float16 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize('api', ['amp', 'wrapper'])
@pytest.mark.parametrize('level', LEVELS)
def test_weights_beyond_the_range(level: str, api: str, device: torch.device) -> None:
    net = model().to(device)
    optimizer = SGD(net.parameters(), lr=0.1)
    with torch.no_grad():
        net[2].weight[0, 0] = -7e4
        # what rounds to the largest number stays, and what is infinite already is nobody's surprise
        net[0].weight[0, 0], net[0].weight[0, 1] = 65519.0, float('inf')
        net[1].weight.fill_(1e5)
    if level not in ('O2', 'O3'):
        take(api, net, optimizer, level)
        return
    with pytest.raises(
        AmpAttachError, match=r"beyond the range of float16.*2\.weight.*keep_fp32=\['.'(, '.')?\].*O5"
    ) as error:
        take(api, net, optimizer, level)
    assert '0.weight' not in str(error.value) and ('1.weight' in str(error.value)) == (level == 'O3')
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert optimizer.param_groups[0]['params'][0] is net[0].weight
    if level == 'O3':
        # all that have to stay, so that the setting works as it is
        assert "keep_fp32=['1', '2']" in str(error.value)
    with torch.no_grad():
        net[1].weight.fill_(1.0)
    amp.initialize(net, optimizer, opt_level=level, keep_fp32=['2'], verbosity=0)
    assert float(net[2].weight.detach().min()) == -7e4


@pytest.mark.parametrize('api', ['amp', 'wrapper'])
@pytest.mark.parametrize('level', LEVELS)
def test_buffers_beyond_the_range(level: str, api: str, device: torch.device) -> None:
    """A mask may become infinite, and a count may not; only somebody who knows the model can tell them apart."""
    net = model().to(device)
    net[0].register_buffer('count', torch.tensor([7e4, 1.0], device=device))
    net[2].register_buffer('table', torch.tensor([65519.0, float('inf'), -float('inf'), float('nan')], device=device))
    net[2].register_buffer('whole', torch.tensor([70000], device=device))
    net[1].running_var.fill_(1e6)
    for names in (None, ['0', 'BatchNorm1d']):
        for verbosity in (1, 0):
            tried = copy.deepcopy(net)
            words: dict[str, Any] = dict(opt_level=level, verbosity=verbosity, keep_fp32=names)
            if level == 'O3' and names is None:
                words['keep_fp32'] = ['BatchNorm1d']
            with logged() as lines:
                if api == 'amp':
                    amp.initialize(tried, SGD(tried.parameters(), lr=0.1), **words)
                else:
                    AmpOptimWrapper(optimizer=SGD(tried.parameters(), lr=0.1), **words).attach(tried)
            found = [line for line in lines if 'beyond the range of float16' in line]
            assert len(found) == (level in ('O2', 'O3') and names is None and verbosity == 1), lines
            if found:
                assert '0.count' in found[0] and "keep_fp32=['0']" in found[0]
            if names is not None:
                assert float(tried[0].count[0]) == 7e4


@pytest.mark.parametrize('level', MASTERS)
def test_a_new_optimizers_masters_are_followed(level: str, device: torch.device) -> None:
    """What is written to them reaches the next forward pass, the old optimizer being gone."""
    net = Net().to(device)
    first = sgd([net])
    amp.initialize(net, first, opt_level=level, verbosity=0)
    del first
    gc.collect()
    second = SGD(net.trained, lr=0.5)
    amp.initialize([], second, verbosity=0)
    with torch.no_grad():
        for master in amp.master_params(second):
            master.fill_(0.0)
    assert float(net(data(0, device)).detach()) == 0.0


@pytest.mark.parametrize('level', LEVELS)
def test_a_model_and_an_optimizer_that_were_copied_together(level: str, device: torch.device) -> None:
    """The copied optimizer has copies of the masters, which nobody reads."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(device)
    optimizer = SGD(model.parameters(), lr=0.25)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    copied, stepping = copy.deepcopy((model, optimizer))
    if not resolve(level).master_weights:
        amp.initialize(copied, stepping, opt_level=level, verbosity=0)
        return
    before = [parameter.detach().clone() for parameter in copied.parameters()]
    with pytest.raises(AmpAttachError, match=r'4 parameters that do not belong to the model.*copied'):
        amp.initialize(copied, stepping, opt_level=level, verbosity=0)
    assert all(map(torch.equal, before, copied.parameters()))
    # a new one over the copy is what the message asks for
    amp.initialize(copied, SGD(copied.parameters(), lr=0.25), opt_level=level, verbosity=0)


def test_optimizers_over_a_part_and_something_else_are_left_alone(device: torch.device) -> None:
    """A head, and centres or temperatures of a loss, beside a body that is not trained."""
    for loose in ([(4,)], [(4,), (4,)], [(3, 4), (4,)]):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(device)
        extra = [nn.Parameter(torch.zeros(shape, device=device)) for shape in loose]
        optimizer = SGD([*model[2].parameters(), *extra], lr=0.25)
        amp.initialize(model, optimizer, opt_level='O2', verbosity=0, loss_scale=8.0)
        body = model[0].weight.detach().clone()
        assert (body.dtype, model[2].weight.dtype) == (torch.float16, torch.float16)
        masters = [p for p in amp.master_params(optimizer) if not any(p is each for each in extra)]
        assert [p.dtype for p in masters] == [torch.float32] * 2
        old = [p.detach().clone() for p in masters]
        loss = model(torch.randn(5, 3, device=device)).float().square().sum() + sum(p.sum() for p in extra)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        # stepped as they are, by the gradient 1
        assert all(p.dtype is torch.float32 and p.detach().eq(-0.25).all() for p in extra)
        assert not any(map(torch.equal, old, masters))
        assert torch.equal(model[2].weight, masters[0].half()) and torch.equal(model[0].weight, body)


@pytest.mark.parametrize('later', ['O2', 'O5'])
@pytest.mark.parametrize('level', ['O0', 'O1', 'O4'])
def test_an_optimizer_whose_model_has_got_masters_since(level: str, later: str, device: torch.device) -> None:
    model = nn.Linear(3, 2).to(device)
    old, new = SGD(model.parameters(), lr=0.25), SGD(model.parameters(), lr=0.25)
    amp.initialize(model, old, opt_level=level, verbosity=0)
    try:
        amp.initialize(model, new, opt_level=later, verbosity=0)
    except AmpAttachError:
        # said already
        assert level != 'O0'
        return
    for _ in range(2):
        before = model.weight.detach().clone()
        with amp.scale_loss(model(torch.ones(1, 3, device=device)).float().sum(), old) as scaled:
            scaled.backward()
        with pytest.raises(AmpUsageError, match=r'another optimizer steps.*amp\.initialize\(\[\], optimizer\)'):
            old.step()
        old.zero_grad()
        new.zero_grad()
        assert model.weight.equal(before)
    with amp.scale_loss(model(torch.ones(1, 3, device=device)).float().sum() / 2**16, new) as scaled:
        scaled.backward()
    new.step()
