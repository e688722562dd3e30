"""amp.scale_loss: what it takes and gives, what gradients are behind a block, and what is wrong inside and outside of one."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import same_bits
from exact_scripts import LEVELS, MASTERS, backward, gradients, scales, sgd, start, state
from pairs import pairs
from play import EXACT_LEVELS, Part, data
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from amp_wrapper import AmpError, AmpUsageError, amp

Trained = tuple[Part, Optimizer]


def unlike(ours: Trained, theirs: Trained) -> list[Any]:
    """Keys that differ; buffers are of every pass, also of those that plain training leaves out."""
    found, wanted = state([ours[0]], [ours[1]]), state([theirs[0]], [theirs[1]])
    return [key for key in wanted if found.get(key) != wanted[key] and key[-1] not in ('total', 'count')]


def test_wrong_arguments_are_named_and_change_nothing() -> None:
    net, optimizer = start('O2', num_losses=2)
    loss = net(data(0))
    stranger, off = sgd([Part()]), sgd([Part()])
    amp.initialize(Part(), off, enabled=False)
    deep = nn.Sequential(*(nn.Linear(2, 2) for _ in range(60)))
    wrong: list[str] = []
    for arguments, word in (
        ((loss, stranger), 'was not initialised'),
        ((loss, [optimizer, stranger]), 'was not initialised'),
        ((loss, copy.copy(optimizer)), 'was not initialised'),
        ((loss, []), 'empty'),
        ((loss, deep), 'optimizers=Sequential'),
        ((loss, None), 'NoneType'),
        ((loss, [optimizer, off]), 'enabled=False'),
        ((loss, optimizer, 2), 'loss_id=2'),
        ((loss, optimizer, -1), 'loss_id=-1'),
        ((loss, optimizer, '0'), "loss_id='0'"),
        ((loss, optimizer, None), 'loss_id=None'),
        ((3.5, optimizer), 'float'),
        ((torch.ones((), dtype=torch.int64), optimizer), 'int64'),
        (((loss, loss), optimizer), 'tuple'),
    ):
        with pytest.raises(AmpUsageError) as caught:
            amp.scale_loss(*arguments).__enter__()
        # a model has a line for each of its layers
        if word not in str(caught.value) or '\n' in str(caught.value) or gradients(optimizer) != [None, None]:
            wrong.append(f'{word}: {caught.value}')
    for call in (amp.loss_scale, amp.skipped_steps, amp.monitor, lambda model: list(amp.master_params(model))):
        with pytest.raises(AmpUsageError, match=r'optimizers?=Sequential') as caught:
            call(deep)
        assert '\n' not in str(caught.value) and len(str(caught.value)) < 250
    assert wrong == []
    backward(loss, optimizer)
    optimizer.step()
    assert scales(optimizer, 2) == [8.0, 8.0]


def test_master_params_of_any_optimizer() -> None:
    net = Part()
    assert list(amp.master_params(sgd([net]))) == net.trained


@pytest.mark.parametrize('level', LEVELS)
def test_loss_keeps_its_shape_and_is_scaled_in_fp32(level: str) -> None:
    _, optimizer = start(level)
    for dtype, shape in itertools.product((torch.float16, torch.float32, torch.float64), ((), (1,), (2, 3))):
        loss = torch.full(shape, 3.0, dtype=dtype, requires_grad=True)
        with amp.scale_loss(loss, optimizer) as scaled:
            wanted = torch.full(shape, 24.0, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
            assert same_bits(scaled, wanted)
    with amp.scale_loss(torch.tensor(2.0), optimizer) as scaled:
        assert float(scaled) == 16.0


@pytest.mark.parametrize('level', EXACT_LEVELS)
def test_step_inside_the_block_is_refused(level: str) -> None:
    net, optimizer = start(level)
    before = state([net], [optimizer])

    def script() -> None:
        with amp.scale_loss(net(data(0)), optimizer) as scaled:
            scaled.backward()
            optimizer.step()

    with pytest.raises(AmpUsageError, match='after the block'):
        script()
    after = state([net], [optimizer])
    assert [key for key in before if after[key] != before[key] and key[-1] not in ('total', 'count')] == []


@pytest.mark.parametrize('level', EXACT_LEVELS)
def test_block_inside_a_block_of_its_optimizer_is_refused(level: str) -> None:
    net, optimizer = ours = start(level)

    def script() -> None:
        with amp.scale_loss(net(data(0)), optimizer) as outer, amp.scale_loss(outer, optimizer) as inner:
            inner.backward()

    with pytest.raises(AmpUsageError, match='inside another'):
        script()
    theirs = start(None)
    backward(net(data(0)), optimizer)
    theirs[0](data(0)).backward()
    optimizer.step()
    theirs[1].step()
    assert unlike(ours, theirs) == []


@pytest.mark.xfail(strict=True, reason='amp')
@pytest.mark.parametrize('what', ['blocks within each other', 'a loss of two sessions', 'parameters of two optimizers'])
def test_several_optimizers_in_ways_that_are_refused(what: str) -> None:
    nets = [Part(), Part(2)]
    optimizers = [sgd([net]) for net in nets]

    def script() -> None:
        if what == 'a loss of two sessions':
            for net, optimizer in zip(nets, optimizers):
                amp.initialize(net, optimizer, opt_level='O2', loss_scale=8.0, verbosity=0)
            backward(nets[0](data(0)) + nets[1](data(0)), optimizers[0])
        elif what == 'parameters of two optimizers':
            amp.initialize(nets, [*optimizers, sgd(nets)], opt_level='O2', loss_scale=8.0, verbosity=0)
        else:
            amp.initialize(nets, optimizers, opt_level='O2', loss_scale=8.0, verbosity=0)
            with amp.scale_loss(nets[0](data(0)), optimizers[0]):
                backward(nets[1](data(0)), optimizers[1])

    with pytest.raises(AmpError):
        script()


@pairs(
    level=EXACT_LEVELS,
    place=['before the pass', 'in the pass', 'after the pass'],
    error=[ValueError, KeyboardInterrupt],
)
def test_training_goes_on_after_an_exception_inside_the_block(
    level: str, place: str, error: type[BaseException]
) -> None:
    """No scale learns from the pass, and once gradients are cleared it is as if it had not been."""
    net, optimizer = ours = start(level)
    theirs = start(None)
    for index in range(3):
        optimizer.zero_grad()
        counted = amp.state_dict(optimizers=optimizer)

        def interrupt(gradient: Tensor) -> Tensor:
            raise error

        def script(index: int) -> None:
            with amp.scale_loss(net(data(index)) * math.inf, optimizer) as scaled:
                if place == 'before the pass':
                    raise error
                scaled.backward()
                raise error

        handle: Any = net.fc.weight.register_hook(interrupt) if place == 'in the pass' else contextlib.nullcontext()
        # an error inside of a backward pass arrives as torch's own
        with pytest.raises((error, RuntimeError) if error is ValueError else error), handle:
            script(index)
        assert amp.state_dict(optimizers=optimizer) == counted
        optimizer.zero_grad()
        backward(net(data(index)), optimizer)
        optimizer.step()
        theirs[1].zero_grad()
        theirs[0](data(index)).backward()
        theirs[1].step()
    assert unlike(ours, theirs) == []
    assert scales(optimizer) == [8.0]


@pytest.mark.parametrize('inside', [True, False])
@pytest.mark.parametrize('level', EXACT_LEVELS)
def test_several_passes_through_one_graph(level: str, inside: bool) -> None:
    net, optimizer = ours = start(level)
    theirs = start(None)
    for index in range(3):
        for _, each in (ours, theirs):
            each.zero_grad()
        loss = theirs[0](data(index))
        loss.backward(retain_graph=True)
        loss.backward()
        loss = net(data(index))
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward(retain_graph=True)
            if inside:
                scaled.backward()
        if not inside:
            backward(loss, optimizer)
        assert gradients(optimizer) == gradients(theirs[1])
        for _, each in (ours, theirs):
            each.step()
    assert unlike(ours, theirs) == []


@pytest.mark.parametrize('when', ['before backward', 'after backward'])
@pytest.mark.parametrize('level', EXACT_LEVELS)
def test_zero_grad_inside_the_block(level: str, when: str) -> None:
    """What waited for the pass is cleared; cleared after it, nothing is left."""
    net, optimizer = ours = start(level)
    theirs = start(None)
    backward(net(data(2)), optimizer)
    with amp.scale_loss(net(data(1)), optimizer) as scaled:
        if when == 'before backward':
            optimizer.zero_grad()
        scaled.backward()
        if when == 'after backward':
            optimizer.zero_grad()
    if when == 'after backward':
        assert gradients(optimizer) == [None, None]
        backward(net(data(1)), optimizer)
    theirs[0](data(1)).backward()
    for _, each in (ours, theirs):
        each.step()
    assert unlike(ours, theirs) == []


@pytest.mark.parametrize('level', EXACT_LEVELS)
def test_zero_grad_of_another_optimizer_inside_the_block(level: str) -> None:
    nets = [Part(), Part(2)]
    optimizers = [sgd([net]) for net in nets]
    amp.initialize(nets, optimizers, opt_level=level, verbosity=0, loss_scale=4.0)
    backward(nets[1](data(0)), optimizers[1])
    loss = nets[0](data(0)) + nets[1](data(1))
    with amp.scale_loss(loss, optimizers[0]) as scaled:
        optimizers[1].zero_grad()
        scaled.backward()
    assert gradients(optimizers[1]) == [data(1).expand(2, 2).tolist(), data(1)[0].tolist()]


# -- gradients that come in other ways ----------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
def test_graph_of_gradients_is_refused_where_it_would_be_of_other_numbers(level: str) -> None:
    """Scaled gradients and those of casts have another graph; elsewhere second derivatives are right."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).float().square().mean()

    net, x = Twice(), torch.ones(2, 4)
    optimizer = SGD(net.parameters(), lr=0.5)
    scale = 8.0 if level in ('O1', 'O2') else None
    amp.initialize(net, optimizer, opt_level=level, loss_scale=scale, verbosity=0)

    def run(**words: Any) -> None:
        with amp.scale_loss(net(x), optimizer) as scaled:
            scaled.backward(**words)

    if level in (*MASTERS, 'O1'):
        with pytest.raises(AmpUsageError, match=r"create_graph(?s:.*)opt_level='O4'"):
            run(create_graph=True)
        run()
        optimizer.step()
        return
    run(create_graph=True)
    assert net.fc.weight.grad is not None
    (second,) = torch.autograd.grad(net.fc.weight.grad.float().sum(), net.fc.weight)
    plain = Twice()
    plain.load_state_dict(net.state_dict())
    (gradient,) = torch.autograd.grad(plain(x), plain.fc.weight, create_graph=True)
    (wanted,) = torch.autograd.grad(gradient.sum(), plain.fc.weight)
    assert torch.allclose(second.float(), wanted, rtol=0.02)


def step_with_autograd_grad(net: Part, optimizer: Optimizer, way: str, index: int) -> None:
    optimizer.zero_grad()
    x = data(index).requires_grad_()
    with amp.scale_loss(net(x), optimizer) as scaled:
        if way == 'backward of some inputs':
            scaled.backward(inputs=net.trained)
        elif way == 'of an input':
            torch.autograd.grad(scaled, x, retain_graph=True)
            scaled.backward()
        else:
            found = list(torch.autograd.grad(scaled, net.trained))
        if way == 'inside':
            for parameter, gradient in zip(net.trained, found):
                parameter.grad = gradient
    if way in ('divided', 'after'):
        for parameter, gradient in zip(net.trained, found):
            parameter.grad = gradient / 8 if way == 'divided' else gradient
    optimizer.step()


@pairs(way=['inside', 'divided', 'backward of some inputs', 'of an input'], level=EXACT_LEVELS)
def test_gradients_of_autograd_grad_are_right_inside_the_block(way: str, level: str, log: list[str]) -> None:
    net, optimizer = ours = start(level, scale='8', verbosity=1)
    log.clear()
    theirs = start(None)
    for index in range(3):
        step_with_autograd_grad(net, optimizer, way, index)
        theirs[1].zero_grad()
        theirs[0](data(index)).backward()
        theirs[1].step()
    assert log == [] and unlike(ours, theirs) == []


@pytest.mark.parametrize('level', EXACT_LEVELS)
def test_gradients_of_autograd_grad_put_there_after_the_block_are_warned_of_once(level: str, log: list[str]) -> None:
    for verbosity, scale, count in ((1, '8', 1), (0, '8', 0), (1, '1', 0)):
        net, optimizer = start(level, scale=scale, verbosity=verbosity)
        log.clear()
        for index in range(2):
            step_with_autograd_grad(net, optimizer, 'after', index)
        assert len(log) == count and all('torch.autograd.grad' in line for line in log)


# -- losses that contain masters ----------------------------------------------------------------------------------------


def penalty(optimizer: Optimizer) -> Tensor:
    return torch.stack([p.float().square().sum() for p in amp.master_params(optimizer)]).sum() / 2


LOSSES: dict[str, Callable[[Part, Optimizer, int], Tensor]] = {
    'masters': lambda net, optimizer, index: penalty(optimizer),
    'model': lambda net, optimizer, index: net(data(index)),
    'both': lambda net, optimizer, index: penalty(optimizer) + net(data(index)),
}
ORDERS = [('masters',), ('both',), ('model', 'masters'), ('masters', 'both', 'model')]


@pairs(order=ORDERS, level=EXACT_LEVELS)
def test_gradients_of_a_loss_that_contains_masters(order: tuple[str, ...], level: str) -> None:
    """Unscaled once, and added to those that come through the model."""
    ours, theirs = start(level, 256.0), start(None)
    for _ in range(2):
        for _, optimizer in (ours, theirs):
            optimizer.zero_grad()
        for index, name in enumerate(order):
            backward(LOSSES[name](*ours, index), ours[1])
            LOSSES[name](*theirs, index).backward()
        assert gradients(ours[1]) == gradients(theirs[1])
        for _, optimizer in (ours, theirs):
            optimizer.step()
    assert unlike(ours, theirs) == []


@pytest.mark.parametrize('level', MASTERS)
def test_overflow_at_a_master_skips_the_step(level: str) -> None:
    net, optimizer = start(level)
    before = state([net], [optimizer])
    backward(penalty(optimizer), optimizer, hit=next(amp.master_params(optimizer)))
    optimizer.step()
    assert state([net], [optimizer]) == before and scales(optimizer) == [4.0]
