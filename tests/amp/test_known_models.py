"""Optimizers over weights of models that were cast, conversions of such models, and weights beyond the range of float16."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import same
from exact_scripts import LEVELS, MASTERS, backward, clear, scales, sgd, start, state, unlike_fp32
from pairs import pairs
from play import WEIGHT_TYPES, Part, data
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from amp_wrapper import AmpAttachError, AmpConfigError, AmpOptimWrapper, AmpUsageError, amp

EVERYWHERE = [*itertools.product(LEVELS, ['amp', 'wrapper'])]


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def stepping(net: nn.Module) -> Optimizer:
    return SGD(net.parameters(), lr=0.25)


def take(net: nn.Module, optimizers: Any, level: str, door: str = 'amp', **options: Any) -> None:
    if door == 'amp':
        amp.initialize(net, optimizers, opt_level=level, **{'verbosity': 0, **options})
    else:
        AmpOptimWrapper(opt_level=level, optimizer=optimizers, **{'verbosity': 0, **options}).attach(net)


def values(net: nn.Module) -> dict[str, Tensor]:
    """As they are, not as they are saved."""
    return {name: value.detach().clone() for name, value in net.state_dict(keep_vars=True).items()}


# -- optimizers that were not initialised -------------------------------------------------------------------------------


def test_optimizer_that_was_not_initialised_is_refused_over_weights_with_masters(log: list[str]) -> None:
    """Elsewhere gradients are unscaled, and it steps."""
    for level in LEVELS:
        net, optimizer = start(level)
        other = sgd([net])
        backward(net(data(0)), optimizer)
        before = state([net], [optimizer])
        if level in MASTERS:
            with pytest.raises(AmpUsageError, match=r'amp\.initialize\(\[\], optimizer\)'):
                other.step()
        else:
            other.step()
        assert (state([net], [optimizer]) == before) is (level in MASTERS), level
    assert log == []


# -- optimizers of other models -----------------------------------------------------------------------------------------

STRANGERS: dict[str, Callable[[Any], Any]] = {
    'a copy': lambda copied: copied.parameters(),
    'a part of a copy': lambda copied: copied[2].parameters(),
    'another model': lambda copied: nn.Linear(3, 3).parameters(),
    'groups of a copy': lambda copied: [{'params': [p for p in copied.parameters() if p.ndim == d]} for d in (2, 1)],
}


@pytest.mark.parametrize('which', STRANGERS)
def test_optimizer_of_another_model_is_refused_with_nothing_changed(which: str) -> None:
    for level, door in EVERYWHERE:
        net = model()
        before = values(net)
        with pytest.raises(AmpAttachError, match=r'\d parameters that do not belong to the model'):
            take(net, SGD(STRANGERS[which](copy.deepcopy(net)), lr=0.1), level, door)
        assert same(values(net), before)
        take(net, stepping(net), level, door)


def test_model_and_optimizer_that_were_copied_together() -> None:
    """The copied optimizer has copies of the masters, which nobody reads."""
    for level in LEVELS:
        net = model()
        optimizer = stepping(net)
        take(net, optimizer, level)
        copied, theirs = copy.deepcopy((net, optimizer))
        if level in MASTERS:
            before = values(copied)
            with pytest.raises(AmpAttachError, match=r'4 parameters that do not belong to the model.*copied'):
                take(copied, theirs, level)
            assert same(values(copied), before)
            theirs = stepping(copied)
        take(copied, theirs, level)


def loose(*shape: int) -> Optimizer:
    return SGD([nn.Parameter(torch.ones(shape))], lr=0.1)


#: Optimizers of a model that hold more or less than it has.
MORE_OR_LESS: dict[str, Callable[[Any], list[Optimizer]]] = {
    'a parameter beside the model': lambda net: [SGD([*net.parameters(), nn.Parameter(torch.ones(()))], lr=0.1)],
    'a temperature': lambda net: [stepping(net), loose()],
    'centres as large as a layer': lambda net: [stepping(net), loose(2, 8)],
    'a head and centres': lambda net: [SGD([*net[2].parameters(), nn.Parameter(torch.ones(8, 4))], lr=0.1)],
    'an image': lambda net: [SGD([torch.ones(1, 4).requires_grad_()], lr=0.1)],
    'an image and a frozen model': lambda net: [loose(1, 4)] if net.requires_grad_(False) else [],
    'a part': lambda net: [stepping(net[2])],
    'nothing': lambda net: [],
}


@pytest.mark.parametrize('made', MORE_OR_LESS)
def test_optimizers_may_hold_more_or_less_than_the_model(made: str) -> None:
    """One step moves whatever they hold, and changes no type."""
    for level in LEVELS:
        net = model()
        optimizers = MORE_OR_LESS[made](net)
        stepped = [p for each in optimizers for group in each.param_groups for p in group['params']]
        others: list[Tensor] = [p for p in stepped if not any(p is own for own in net.parameters())]
        take(net, optimizers, level, loss_scale=8.0)
        assert net[0].weight.dtype is WEIGHT_TYPES.get(level, torch.float32)
        held = [p for each in optimizers for p in amp.master_params(each)]
        before = [p.detach().clone() for p in held]
        loss = net.eval()(torch.randn(3, 4)).float().square().sum() + sum(p.float().sum() for p in others)
        if optimizers:
            backward(loss, optimizers)
        for each in optimizers:
            each.step()
        for new, old in zip(held, before, strict=True):
            assert new.dtype is old.dtype and new.isfinite().all() and not new.equal(old), level
        assert all(p.dtype is torch.float32 for p in others), level


# -- another optimizer for the same model -------------------------------------------------------------------------------


@pairs(old=['kept', 'gone', 'gone, gradients left'], how=['optimizer', 'model'])
def test_new_optimizer_goes_on_from_the_masters(how: str, old: str) -> None:
    """Bit for bit as in FP32, whatever became of the old one."""

    def train(at: str | None) -> Any:
        net = Part()
        with torch.no_grad():
            # numbers that no 16-bit type holds
            net.fc.weight += 2.0**-14
        first: Any = sgd([net])
        if at is not None:
            take(net, first, at, loss_scale=8.0)
        for index in range(2):
            first.zero_grad()
            backward(net(data(index)), first, level=at)
            first.step()
        if old == 'gone':
            first.zero_grad()
        second = SGD(net.trained, lr=0.5, momentum=0.25)
        if old != 'kept':
            del first
            gc.collect()
        if at is not None:
            amp.initialize([], second, verbosity=0)
            assert scales(second) == [8.0]
        for index in range(3):
            clear(how, [second], [net])
            for part in range(2):
                backward(net(data(index + part)), second, level=at)
            second.step()
        return state([net], [second])

    assert unlike_fp32(train) == []


def test_new_optimizer_is_of_the_level_of_its_model() -> None:
    net = model()
    take(net, stepping(net), 'O5', num_losses=2)
    new = stepping(net)
    with pytest.raises(AmpAttachError, match=r"opt_level='O2'.*at O5"):
        amp.initialize([], new, opt_level='O2', verbosity=0)
    with pytest.raises(AmpConfigError, match=r'keep_fp32.*was decided'):
        amp.initialize([], new, keep_fp32='Linear', verbosity=0)
    with pytest.raises(AmpAttachError, match=r'amp\.initialize\(\[\], optimizer\)'):
        take(net, new, 'O5')
    with pytest.raises(AmpUsageError, match=r'amp\.initialize\(\[\], optimizer\)'):
        amp.scale_loss(net(torch.ones(2, 4)).sum(), new).__enter__()
    amp.initialize([], new, loss_scale=4.0, verbosity=0)
    assert scales(new, 2) == [4.0, 4.0] and {p.dtype for p in amp.master_params(new)} == {torch.float32}
    with pytest.raises(AmpAttachError, match='made from FP32 masters'):
        amp.initialize([], SGD(amp.master_params(new), lr=0.1), verbosity=0)


def test_older_optimizer_is_refused_once_a_later_one_has_made_masters() -> None:
    """By the later call, or by the older one's step."""

    def script(level: str, later: str) -> None:
        net = nn.Linear(3, 2)
        old, new = stepping(net), stepping(net)
        take(net, old, level)
        take(net, new, later)
        backward(net(torch.ones(1, 3)).float().sum(), old)
        old.step()

    for level, later in itertools.product(['O0', 'O1', 'O4'], MASTERS):
        with pytest.raises((AmpAttachError, AmpUsageError), match=r'amp\.initialize|already|another optimizer'):
            script(level, later)


# -- conversions --------------------------------------------------------------------------------------------------------

CONVERSIONS: dict[str, tuple[Callable[[nn.Module], Any], torch.dtype]] = {
    'half': (lambda m: m.half(), torch.float16),
    'float': (lambda m: m.float(), torch.float32),
    'double': (lambda m: m.double(), torch.float64),
    'bfloat16': (lambda m: m.bfloat16(), torch.bfloat16),
    'to': (lambda m: m.to(torch.float16), torch.float16),
    'to a tensor': (lambda m: m.to(torch.ones(1, dtype=torch.float64)), torch.float64),
    'type': (lambda m: m.type(torch.bfloat16), torch.bfloat16),
}


@pytest.mark.parametrize('how', CONVERSIONS)
def test_conversions_of_the_model_or_around_it_are_refused(how: str) -> None:
    """Unless nothing would change. Deep copies are converted, and models that are detached."""
    convert, target = CONVERSIONS[how]
    for level, door in EVERYWHERE:
        net = model()
        around = nn.Sequential(nn.Linear(2, 2), net)
        take(net, stepping(net), level, door)
        before = values(net)
        for converted in (net, around):
            if {p.dtype for p in net.parameters()} != {target}:
                with pytest.raises(AmpUsageError, match=f'attached to, at {level}'):
                    convert(converted)
            elif all(t.dtype is target for t in net.buffers() if t.is_floating_point()):
                convert(net)
        assert same(values(net), before)
        convert(copy.deepcopy(net))
    wrapper = AmpOptimWrapper(opt_level='O2', optimizer=stepping(other := model()), verbosity=0)
    wrapper.attach(other)
    wrapper.detach()
    assert convert(other)[0].weight.dtype is target


@pytest.mark.parametrize('level', LEVELS)
def test_moves_and_traces_go_on(level: str) -> None:
    net = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
    optimizer = stepping(net)
    take(net, optimizer, level)
    x = torch.randn(3, 2, 2, 2)
    for _ in range(2):
        assert net.to('cpu').to(memory_format=torch.channels_last) is net
        net.cpu().share_memory()
        backward(net(x).sum(), optimizer)
        optimizer.step()
    with pytest.raises(TypeError, match='floating point'):
        net.to(torch.int64)
    assert torch.equal(torch.jit.trace(net.eval(), x)(x * 2), net(x * 2))


# -- numbers beyond float16 ---------------------------------------------------------------------------------------------


def test_weights_beyond_the_range_are_refused_with_the_setting_that_helps() -> None:
    for level, door in EVERYWHERE:
        net = model()
        optimizer = stepping(net)
        with torch.no_grad():
            net[2].weight[0, 0] = -7e4
            # the largest that rounds into the range stays, and what is infinite already surprises nobody
            net[0].weight[0, 0], net[0].weight[0, 1] = 65519.0, float('inf')
            net[1].weight.fill_(1e5)
        if level not in ('O2', 'O3'):
            take(net, optimizer, level, door)
            continue
        setting = r"keep_fp32=\['1', '2'\]" if level == 'O3' else r"keep_fp32=\['2'\]"
        with pytest.raises(AmpAttachError, match=rf'beyond the range of float16.*2\.weight.*{setting}.*O5') as error:
            take(net, optimizer, level, door)
        assert '0.weight' not in str(error.value) and {p.dtype for p in net.parameters()} == {torch.float32}
        assert optimizer.param_groups[0]['params'][0] is net[0].weight
        take(net, optimizer, level, keep_fp32=['1', '2'])
        assert net[2].weight.min().item() == -7e4


@pytest.mark.parametrize('level', LEVELS)
def test_buffers_beyond_the_range_stay_finite(level: str) -> None:
    for door in ('amp', 'wrapper'):
        net = model()
        net[0].register_buffer('count', torch.tensor([7e4, 1.0]))
        net[2].register_buffer('table', torch.tensor([65519.0, float('inf'), -float('inf'), float('nan')]))
        net[2].register_buffer('whole', torch.tensor([70000]))
        net[1].running_var.fill_(1e6)
        take(net, stepping(net), level, door, keep_fp32=['BatchNorm1d'])
        half = torch.float16 if level in ('O2', 'O3') else WEIGHT_TYPES.get(level, torch.float32)
        count = 7e4 if level != 'O5' else torch.tensor(7e4).bfloat16()
        assert net[2].table.dtype is half and net[0].count[0].item() == count
        assert net[2].whole.item() == 70000 and net[1].running_var.eq(1e6).all()
