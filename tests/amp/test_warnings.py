"""Warnings about a forgotten scale, name or step; none for scripts that forget nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact_scripts import LEVELS, MASTERS, backward, sgd, start
from pairs import pairs
from play import Part, data
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from amp_wrapper import AmpOptimWrapper, amp


@pytest.mark.parametrize('to_none', [True, False])
@pytest.mark.parametrize('level', LEVELS)
def test_backward_without_a_block_is_warned_of_once(level: str, to_none: bool, log: list[str]) -> None:
    for scale, count in (('8', 1), ('1', 0)):
        net, optimizer = start(level, scale=scale, verbosity=1)
        log.clear()
        for index in range(3):
            optimizer.zero_grad(set_to_none=to_none)
            net(data(index)).backward()
            optimizer.step()
        assert len(log) == count and all('SGD' in line and 'no amp.scale_loss block' in line for line in log)


@pytest.mark.parametrize('level', LEVELS)
def test_backward_of_the_unscaled_loss_inside_a_block_is_warned_of_once(level: str, log: list[str]) -> None:
    net, optimizer = start(level, scale='8', verbosity=1)
    log.clear()
    for index in range(2):
        optimizer.zero_grad()
        loss = net(data(index))
        with amp.scale_loss(loss, optimizer):
            loss.backward()
        optimizer.step()
    assert len(log) == 1 and 'scaled_loss.backward()' in log[0]


@pytest.mark.parametrize('level', MASTERS)
def test_backward_without_a_block_after_a_scaled_one_is_warned_of(level: str, log: list[str]) -> None:
    """The sum on one weight cannot be told apart."""
    net, optimizer = start(level, verbosity=1)
    log.clear()
    backward(net(data(0)), optimizer)
    net(data(0)).backward()
    optimizer.step()
    assert any('outside' in line for line in log)


@pytest.mark.parametrize('level', LEVELS)
def test_backward_after_its_block_is_warned_of_once(level: str, log: list[str]) -> None:
    """An indentation too little: gradients keep their scale. The scaled loss keeps no optimizer alive."""
    for verbosity, scale, count in ((1, '1024', 1), (0, '1024', 0), (1, '1', 0)):
        net, optimizer = start(level, scale=scale, verbosity=verbosity)
        log.clear()
        kept = []
        for index in range(2):
            optimizer.zero_grad()
            with amp.scale_loss(net(data(index)), optimizer) as loss:
                pass
            kept.append(loss)
            loss.backward()
        assert [line for line in log if 'after the end of its "with amp.scale_loss' in line] == log[:count]
        gone = weakref.ref(optimizer)
        del net, optimizer
        gc.collect()
        assert gone() is None and len(kept) == 2


@pytest.mark.parametrize('level', LEVELS)
def test_optimizer_that_no_block_names_is_warned_of_once(level: str, log: list[str]) -> None:
    nets = [Part(), Part(2)]
    optimizers = [sgd([net]) for net in nets]
    amp.initialize(nets, optimizers, opt_level=level, verbosity=1, loss_scale=8.0)
    log.clear()
    x = data(0)
    for _ in range(2):
        # what GANs do: the gradients of the other are thrown away
        backward(nets[0](x) + nets[1](x), optimizers[0])
        optimizers[0].step()
        optimizers[1].zero_grad()
        backward(nets[1](x), optimizers[1])
        optimizers[1].step()
        # both are named
        backward(nets[0](x) + nets[1](x), optimizers)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert log == []
    for _ in range(2):
        backward(nets[0](x) + nets[1](x), optimizers[0])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(log) == 1 and 'optimizer 1' in log[0] and 'Name it too' in log[0]


@pytest.mark.parametrize('clip', [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
@pytest.mark.parametrize('level', LEVELS)
def test_clipping_weights_that_have_masters_is_warned_of_once(clip: Any, level: str, log: list[str]) -> None:
    net, optimizer = start(level, scale='8', verbosity=1)
    log.clear()
    for index in range(2):
        optimizer.zero_grad()
        backward(net(data(index)), optimizer)
        clip(net.trained, 1e-3)
        optimizer.step()
    assert len(log) == (level in MASTERS) and all('amp.master_params(optimizer)' in line for line in log)


def never_clears(net: Part, optimizer: Optimizer, index: int) -> None:
    backward(net(data(index)), optimizer)
    optimizer.step()


def clears_by_zeros(net: Part, optimizer: Optimizer, index: int) -> None:
    net.zero_grad(set_to_none=False)
    optimizer.step()
    backward(net(data(index)), optimizer)


def penalises(net: Part, optimizer: Optimizer, index: int) -> None:
    x = data(index).requires_grad_()
    (slope,) = torch.autograd.grad(net(x), x, create_graph=True)
    backward(net(x) + slope.square().sum() * 0, optimizer)
    optimizer.step()


def trains_another(net: Part, optimizer: Optimizer, index: int) -> None:
    other = nn.Linear(2, 1)
    plain = SGD(other.parameters(), lr=0.1)
    other(data(index)).sum().backward()
    nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    plain.step()
    backward(net(data(index)), optimizer)
    optimizer.step()


def accumulates(net: Part, optimizer: Optimizer, index: int) -> None:
    for part in range(2):
        backward(net(data(index + part)) / 2, optimizer)
    nn.utils.clip_grad_norm_(list(amp.master_params(optimizer)), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def evaluates(net: Part, optimizer: Optimizer, index: int) -> None:
    with torch.no_grad():
        net(data(index))
    x = data(index).requires_grad_()
    # a saliency map: gradients of the input alone
    torch.autograd.grad(net(x), x)


def gives_a_closure(net: Part, optimizer: Optimizer, index: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(data(index))
        backward(loss, optimizer)
        return loss

    optimizer.step(closure)


def combines_gradients(net: Part, optimizer: Optimizer, index: int) -> None:
    """As PCGrad does: the gradients of each loss by themselves, and a mixture put back."""
    kept: list[list[Tensor | None]] = []
    for part in range(2):
        optimizer.zero_grad()
        backward(net(data(index + part)), optimizer)
        kept.append([None if p.grad is None else p.grad.clone() for p in amp.master_params(optimizer)])
    optimizer.zero_grad()
    for parameter, first, second in zip(amp.master_params(optimizer), *kept):
        parameter.grad = None if first is None or second is None else first + second
    optimizer.step()


HABITS: list[Callable[[Part, Optimizer, int], None]] = [
    never_clears, clears_by_zeros, penalises, trains_another, accumulates, evaluates, gives_a_closure, combines_gradients,
]  # fmt: skip


@pairs(habit=HABITS, level=LEVELS)
def test_no_warning_where_nothing_is_wrong(
    level: str, habit: Callable[[Part, Optimizer, int], None], log: list[str]
) -> None:
    net, optimizer = start(level, scale='8', verbosity=1)
    log.clear()
    for index in range(3):
        backward(net(data(index)), optimizer)
        optimizer.step()
        habit(net, optimizer, index)
    assert log == []


# -- optimizers that were not initialised, over parameters of no model ---------------------------------------------------

SCALED = [level for level in LEVELS if level != 'O0']


class Centres:
    """A model, its initialised optimizer, and centres of a loss with an optimizer of their own."""

    def __init__(self, level: str, verbosity: int = 1, scale: float | str = 256.0, together: bool = False) -> None:
        self.net, self.centres = Part(), nn.Parameter(torch.ones(2))
        self.optimizer: Optimizer = SGD(self.net.trained, lr=0.25)
        self.other: Optimizer = SGD([self.centres], lr=0.25)
        optimizers = [self.optimizer, self.other] if together else self.optimizer
        amp.initialize(self.net, optimizers, opt_level=level, verbosity=verbosity, loss_scale=scale)

    def loss(self, index: int) -> Tensor:
        return self.net(data(index)) + (self.centres * data(index)).sum()

    def train(self, step: Callable[[int], None], steps: int = 3) -> None:
        for index in range(steps):
            self.optimizer.zero_grad()
            self.other.zero_grad()
            step(index)
            self.optimizer.step()
            self.other.step()

    def is_exact(self) -> bool:
        return torch.equal(self.centres, 1 - 0.25 * sum(data(index)[0] for index in range(3)))


@pairs(level=SCALED, scale=[256.0, 'dynamic'])
def test_scaled_gradients_of_an_optimizer_that_was_not_initialised(
    level: str, scale: float | str, log: list[str]
) -> None:
    """One warning names the remedies, and none comes without a scale or in silence."""
    for run in (Centres(level, scale=1.0), Centres(level, verbosity=0), Centres(level, scale=scale)):
        run.train(lambda index, run=run: backward(run.loss(index), run.optimizer))  # type: ignore[misc]
    (line,) = [line for line in log if 'not initialised' in line]
    assert 'SGD' in line and 'amp.initialize([], optimizer)' in line and 'amp.scale_loss(loss, [' in line


@pairs(way=['plain first', 'plain backward', 'cleared and plain', 'divided', 'detached'], level=SCALED)
def test_gradients_that_carry_no_scale_are_not_warned_of(way: str, level: str, log: list[str]) -> None:
    run = Centres(level)

    def step(index: int) -> None:
        if way == 'plain first':
            (run.centres * data(index)).sum().backward()
        if way in ('plain first', 'plain backward', 'detached'):
            backward(run.net(data(index)), run.optimizer)
        else:
            backward(run.loss(index), run.optimizer)
        if way == 'divided':
            run.centres.grad.div_(256)  # type: ignore[union-attr]
        elif way in ('plain backward', 'cleared and plain'):
            run.other.zero_grad()
            (run.centres * data(index)).sum().backward()

    run.train(step)
    assert [line for line in log if 'not initialised' in line] == []
    assert way == 'detached' or run.is_exact()


@pytest.mark.parametrize('together', [True, False])
@pytest.mark.parametrize('level', SCALED)
def test_both_remedies_train_as_fp32(level: str, together: bool, log: list[str]) -> None:
    run = Centres(level, together=together)
    if not together:
        amp.initialize([], run.other, loss_scale=256.0)
    run.train(lambda index: backward(run.loss(index), [run.optimizer, run.other]))
    assert run.is_exact() and [line for line in log if 'not initialised' in line] == []


# -- silence ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
def test_verbosity_0_is_silent(level: str, log: list[str], capsys: pytest.CaptureFixture[str], recwarn: Any) -> None:
    """Whatever is warned of otherwise, one after the other."""
    net, optimizer = start(level)
    net(data(0)).backward()
    optimizer.step()
    loss = net(data(0))
    with amp.scale_loss(loss, optimizer):
        loss.backward()
    nn.utils.clip_grad_norm_(net.trained, 1e-3)
    optimizer.step()
    backward(net(data(0)) * float('inf'), optimizer)
    optimizer.step()
    net.fc.weight.data.mul_(2)
    net.state_dict()
    saved = amp.state_dict(optimizers=optimizer)
    amp.load_state_dict({**saved, f'loss_scaler{len(saved)}': dict(loss_scale=1.0, unskipped=0)}, optimizers=optimizer)
    amp.initialize([], SGD([nn.Parameter(torch.ones(1))], lr=0.1), verbosity=0)
    half = nn.Linear(2, 2).bfloat16()
    amp.initialize(half, SGD(half.parameters(), lr=0.1), opt_level=level, from_16bit=True, verbosity=0)
    plain = nn.Linear(2, 2)
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=Adam(plain.parameters()), verbosity=0)
    wrapper.attach(plain)
    wrapper.backward(plain(torch.ones(1, 2)).sum())
    wrapper.load_state_dict(wrapper.state_dict())
    captured = capsys.readouterr()
    assert log == [] and captured.out == captured.err == ''
    assert [str(w.message) for w in recwarn if 'amp' in str(w.message)] == []
