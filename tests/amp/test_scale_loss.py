"""amp.scale_loss: what it takes and gives, what gradients are behind a block, and what is wrong inside and outside of one."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from bits import same_bits
from exact_scripts import LEVELS, Curved, backward, gradients, initialise, scales, sgd, start, unlike
from pairs import pairs
from play import EXACT_LEVELS, Part, data
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from amp_wrapper import AmpError, AmpUsageError, amp


def test_wrong_arguments_are_named_and_change_nothing() -> None:
    """In one short line, though a model has one for each of its layers."""
    net, optimizer = start('O2', num_losses=2)
    loss = net(data(0))
    stranger, off = sgd([Part()]), sgd([Part()])
    amp.initialize(Part(), off, enabled=False)
    deep: Any = nn.Sequential(*(nn.Linear(2, 2) for _ in range(60)))
    wrong: list[str] = []
    for arguments, word in (
        ((loss, stranger), 'was not initialised'),
        ((loss, [optimizer, stranger]), 'was not initialised'),
        ((loss, copy.copy(optimizer)), 'was not initialised'),
        ((loss, []), 'empty'),
        ((loss, deep), 'optimizers=Sequential'),
        ((loss, None), 'optimizers=None'),
        ((loss, [optimizer, off]), 'enabled=False'),
        *(((loss, optimizer, loss_id), f'loss_id={loss_id!r}') for loss_id in (2, -1, '0', None)),
        ((3.5, optimizer), 'float'),
        ((torch.ones((), dtype=torch.int64), optimizer), 'int64'),
        (((loss, loss), optimizer), 'tuple'),
    ):
        with pytest.raises(AmpError) as caught:
            amp.scale_loss(*arguments).__enter__()
        if word not in str(caught.value) or '\n' in str(caught.value) or gradients(optimizer) != [None, None]:
            wrong.append(f'{word}: {caught.value}')
    calls: list[Any] = [amp.loss_scale, amp.skipped_steps, amp.last_step_skipped, amp.monitor]
    for call, (who, word) in itertools.product(
        calls, ((stranger, 'was not initialised'), (deep, 'optimizer=Sequential'))
    ):
        with pytest.raises(AmpError) as caught:
            call(who)
        if word not in str(caught.value).replace('optimizers=', 'optimizer=') or len(str(caught.value)) > 250:
            wrong.append(f'{word}: {caught.value}')
    assert wrong == []
    backward(loss, optimizer)
    optimizer.step()
    assert scales(optimizer, 2) == [8.0, 8.0]


def test_losses_keep_their_shape_and_are_scaled_in_fp32() -> None:
    """In float16, 3 * 65536 would be infinite. A scale of one multiplies nothing."""
    dtypes = torch.float16, torch.bfloat16, torch.float32, torch.float64
    for level, dtype, shape in itertools.product(LEVELS, dtypes, ((), (1,), (2, 3))):
        _, optimizer = start(level, 2.0**16)
        loss = torch.full(shape, 3.0, dtype=dtype, requires_grad=True)
        with amp.scale_loss(loss, optimizer) as scaled:
            wide = torch.float64 if dtype is torch.float64 else torch.float32
            assert same_bits(scaled, torch.full(shape, 3.0 * 2**16, dtype=wide)), (level, dtype, shape)
            (scaled / 2**16).sum().backward()
        assert loss.grad is not None and same_bits(loss.grad, torch.ones_like(loss))
        with amp.scale_loss(torch.tensor(2.0), optimizer) as scaled:
            assert float(scaled) == 2.0**17
    for level in ('O0', 'O4', 'O5'):
        _, optimizer = start(level, None)
        loss = torch.ones((), requires_grad=True)
        with amp.scale_loss(loss, optimizer) as scaled:
            assert scaled is loss
            scaled.backward()


@pytest.mark.parametrize('what', ['blocks within each other', 'a loss of two sessions', 'parameters of two optimizers'])
def test_several_optimizers_in_ways_that_are_refused(what: str) -> None:
    nets = [Part(), Part(2)]
    optimizers = [sgd([net]) for net in nets]

    def script() -> None:
        if what == 'a loss of two sessions':
            for net, optimizer in zip(nets, optimizers):
                amp.initialize(net, optimizer, opt_level='O2', loss_scale=8.0, verbosity=0)
            backward(nets[0](data(0)) + nets[1](data(0)), optimizers[0])
            optimizers[1].step()
        elif what == 'parameters of two optimizers':
            amp.initialize(nets, [*optimizers, sgd(nets)], opt_level='O2', loss_scale=8.0, verbosity=0)
        else:
            amp.initialize(nets, optimizers, opt_level='O2', loss_scale=8.0, verbosity=0)
            with amp.scale_loss(nets[0](data(0)), optimizers[0]):
                backward(nets[1](data(0)), optimizers[1])

    with pytest.raises(AmpError):
        script()


# -- what may be in a block ---------------------------------------------------------------------------------------------


def twice_in_a_block(net: Part, optimizer: Optimizer, x: Tensor) -> None:
    with amp.scale_loss(net(x), optimizer) as scaled:
        scaled.backward(retain_graph=True)
        scaled.backward()


def once_in_each_of_two_blocks(net: Part, optimizer: Optimizer, x: Tensor) -> None:
    loss = net(x)
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward(retain_graph=True)
    backward(loss, optimizer)


def zero_grad_before_the_pass(net: Part, optimizer: Optimizer, x: Tensor) -> None:
    """What waited for the pass is cleared."""
    backward(net(x * 2), optimizer)
    with amp.scale_loss(net(x), optimizer) as scaled:
        optimizer.zero_grad()
        scaled.backward()


def zero_grad_after_the_pass(net: Part, optimizer: Optimizer, x: Tensor) -> None:
    with amp.scale_loss(net(x * 2), optimizer) as scaled:
        scaled.backward()
        optimizer.zero_grad()
    assert gradients(optimizer) == [None, None]
    backward(net(x), optimizer)


def another_block(net: Part, optimizer: Optimizer, x: Tensor) -> None:
    with amp.scale_loss(net(x), optimizer) as outer:
        with pytest.raises(AmpUsageError, match='inside another'), amp.scale_loss(outer, optimizer) as inner:
            inner.backward()
        outer.backward()


def a_step(net: Part, optimizer: Optimizer, x: Tensor) -> None:
    with amp.scale_loss(net(x), optimizer) as scaled:
        scaled.backward()
        with pytest.raises(AmpUsageError, match='after the block'):
            optimizer.step()


def gradients_of_autograd_grad(net: Part, optimizer: Optimizer, x: Tensor) -> None:
    with amp.scale_loss(net(x), optimizer) as scaled:
        for parameter, gradient in zip(net.trained, torch.autograd.grad(scaled, net.trained)):
            parameter.grad = gradient


def gradients_divided_by_the_scale(net: Part, optimizer: Optimizer, x: Tensor) -> None:
    scale = amp.loss_scale(optimizer)
    with amp.scale_loss(net(x), optimizer) as scaled:
        found = torch.autograd.grad(scaled, net.trained)
    for parameter, gradient in zip(net.trained, found):
        parameter.grad = gradient / scale


def a_pass_to_some_inputs(net: Part, optimizer: Optimizer, x: Tensor) -> None:
    with amp.scale_loss(net(x), optimizer) as scaled:
        scaled.backward(inputs=net.trained)


def the_gradient_of_an_input(net: Part, optimizer: Optimizer, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    with amp.scale_loss(net(x), optimizer) as scaled:
        torch.autograd.grad(scaled, x, retain_graph=True)
        scaled.backward()


#: What a script does with a block -> how many plain passes that is.
BLOCKS: dict[Callable[[Part, Optimizer, Tensor], None], int] = {
    twice_in_a_block: 2, once_in_each_of_two_blocks: 2, zero_grad_before_the_pass: 1, zero_grad_after_the_pass: 1,
    another_block: 1, a_step: 1, gradients_of_autograd_grad: 1, gradients_divided_by_the_scale: 1, a_pass_to_some_inputs: 1,
    the_gradient_of_an_input: 1,
}  # fmt: skip


@pytest.mark.parametrize('block', BLOCKS, ids=lambda block: block.__name__)
def test_block_has_gradients_of_plain_passes(block: Callable[[Part, Optimizer, Tensor], None], log: list[str]) -> None:
    for level in EXACT_LEVELS:
        ours, theirs = start(level, '8', verbosity=1), start(None)
        log.clear()
        for index in range(3):
            for _, optimizer in (ours, theirs):
                optimizer.zero_grad()
            block(*ours, data(index))
            for _ in range(BLOCKS[block]):
                theirs[0](data(index)).backward()
            for _, optimizer in (ours, theirs):
                optimizer.step()
        assert unlike(ours, theirs) == [] and log == [], level


@pytest.mark.parametrize('level', EXACT_LEVELS)
def test_zero_grad_of_another_optimizer_inside_the_block(level: str) -> None:
    nets = [Part(), Part(2)]
    optimizers = [sgd([net]) for net in nets]
    initialise(nets, optimizers, level, 4.0)
    backward(nets[1](data(0)), optimizers[1])
    with amp.scale_loss(nets[0](data(0)) + nets[1](data(1)), optimizers[0]) as scaled:
        optimizers[1].zero_grad()
        scaled.backward()
    assert gradients(optimizers[1]) == [data(1).expand(2, 2).tolist(), data(1)[0].tolist()]


@pairs(place=['before the pass', 'in the pass', 'after the pass'], error=[ValueError, KeyboardInterrupt])
def test_training_goes_on_after_an_exception_inside_the_block(place: str, error: type[BaseException]) -> None:
    """No scale learns from the pass, and once gradients are cleared it is as if it had not been."""

    def interrupt(_: Tensor) -> Tensor:
        raise error

    def script(net: Part, optimizer: Optimizer, x: Tensor) -> None:
        with amp.scale_loss(net(x) * math.inf, optimizer) as scaled:
            if place != 'before the pass':
                scaled.backward()
            raise error

    for level in EXACT_LEVELS:
        net, optimizer = ours = start(level)
        theirs = start(None)
        for index in range(3):
            counted = amp.state_dict(optimizers=optimizer)
            handle: Any = net.fc.weight.register_hook(interrupt) if place == 'in the pass' else contextlib.nullcontext()
            # an error inside of a backward pass arrives as torch's own
            with pytest.raises((error, RuntimeError) if error is ValueError else error), handle:
                script(net, optimizer, data(index))
            assert amp.state_dict(optimizers=optimizer) == counted
            for each, its in (ours, theirs):
                its.zero_grad()
                backward(each(data(index)), its, level=level if each is net else None)
                its.step()
        assert unlike(ours, theirs) == [] and scales(optimizer) == [8.0], level


@pytest.mark.parametrize('level', ['O1', 'O2', 'O5'])
def test_training_goes_on_after_gradients_that_cannot_be_unscaled(level: str) -> None:
    """Of one optimizer of two: the other one's come home all the same, and nothing stays open."""
    nets = [Part(), Part(2)]
    optimizers = [sgd([net]) for net in nets]
    initialise(nets, optimizers, level, 4.0)
    with pytest.raises(AmpUsageError, match='create_graph'):
        with amp.scale_loss(nets[0](data(0)) * nets[1](data(0)), optimizers) as scaled:
            scaled.backward(create_graph=True)
    for net, optimizer in zip(nets, optimizers):
        optimizer.zero_grad()
        backward(net(data(1)), optimizer)
    assert [gradients(each)[0] for each in optimizers] == [data(1).expand(2, 2).tolist()] * 2


@pytest.mark.parametrize('level', EXACT_LEVELS)
def test_graph_of_gradients_is_refused_where_it_would_be_of_other_numbers(level: str) -> None:
    """Scaled gradients and those of casts have another graph; elsewhere second derivatives are right."""
    net, x = Curved(), torch.tensor([0.5, 2.0])
    optimizer = SGD(net.parameters(), lr=0.5)
    amp.initialize(net, optimizer, opt_level=level, loss_scale=8.0 if level in ('O1', 'O2') else None, verbosity=0)

    def run(**words: Any) -> None:
        with amp.scale_loss(net(x), optimizer) as scaled:
            scaled.backward(**words)

    if level in ('O1', 'O2', 'O5'):
        with pytest.raises(AmpUsageError, match=r"create_graph(?s:.*)opt_level='O4'"):
            run(create_graph=True)
        run()
    else:
        run(create_graph=True)
        assert net.weight.grad is not None
        assert torch.equal(torch.autograd.grad(net.weight.grad.sum(), net.weight)[0], x)
    optimizer.step()
    assert torch.equal(net.state_dict()['weight'], torch.tensor([1.0, -2.0]) * (1 - 0.5 * x))


def test_gradients_that_share_memory_are_refused() -> None:
    """They would be unscaled twice."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    amp.initialize([first, second], optimizer, opt_level='O1', loss_scale=128.0, verbosity=0)
    loss = (first(torch.ones(1, 2)) + second(torch.ones(1, 2))).float().sum()

    def tie() -> None:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            second.weight.grad = first.weight.grad

    with pytest.raises(AmpUsageError, match=r'begin at one address.*clone'):
        tie()
    assert all(parameter.grad is None for parameter in first.parameters())


def test_trainings_on_threads_of_their_own_leave_each_other_alone() -> None:
    """A block looks at gradients of other sessions of its thread; those of another thread may be under way."""
    together = threading.Barrier(2, timeout=60)
    runs = []
    for _ in range(2):
        model = nn.Linear(2, 2)
        runs.append(
            amp.initialize(
                model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level='O1', loss_scale=8.0, verbosity=0
            )
        )

    def train(run: Any) -> bool:
        model, optimizer = run
        for _ in range(3):
            optimizer.zero_grad()
            together.wait()
            with amp.scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
                # what the other thread has brought by now carries its scale
                together.wait()
            together.wait()
            optimizer.step()
        return True

    with ThreadPoolExecutor(2) as pool:
        # each session is known to be of its thread from its first block on
        assert all(pool.map(train, runs))
