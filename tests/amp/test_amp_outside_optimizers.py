"""Optimizers that were not initialised, over parameters of no model: scaled gradients are warned of, others are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from toy_amp import HALF, LEVELS, Net, backward, data, logged

from amp_wrapper import amp

SCALED = [level for level in LEVELS if level != 'O0']


class Run:
    """A net, its initialised optimizer, and centres of a loss with an optimizer of their own."""

    def __init__(self, level: str, device: torch.device, verbosity: int = 1, scale: float | str = 256.0) -> None:
        self.net, self.device = Net().to(device), device
        self.centres = nn.Parameter(torch.ones(2, device=device))
        self.optimizer: Optimizer = SGD(self.net.trained, lr=0.25)
        self.other: Optimizer = SGD([self.centres], lr=0.25)
        with logged():
            amp.initialize(self.net, self.optimizer, opt_level=level, verbosity=verbosity, loss_scale=scale)

    def loss(self, index: int) -> Tensor:
        return self.net(data(index, self.device)) + (self.centres * data(index, self.device)).sum()

    def train(self, step: Callable[[int], None], steps: int = 3) -> list[str]:
        with logged() as lines:
            for index in range(steps):
                self.optimizer.zero_grad()
                self.other.zero_grad()
                step(index)
                self.optimizer.step()
                self.other.step()
        return [line for line in lines if 'not initialised' in line]


@pytest.mark.parametrize('scale', [256.0, 'dynamic'])
@pytest.mark.parametrize('level', SCALED)
def test_one_warning_at_the_first_step_names_the_remedy(level: str, scale: float | str, device: torch.device) -> None:
    run = Run(level, device, scale=scale)
    step = lambda index: backward(run.loss(index), run.optimizer)  # noqa: E731
    (line,) = run.train(step, steps=1)
    assert 'SGD' in line and 'amp.initialize([], optimizer)' in line and 'amp.scale_loss(loss, [' in line
    assert run.train(step) == []


@pytest.mark.parametrize('level', LEVELS)
def test_no_warning_without_a_scale_or_in_silence(level: str, device: torch.device) -> None:
    for run in (Run(level, device, scale=1.0), Run(level, device, verbosity=0)):
        assert run.train(lambda index, run=run: backward(run.loss(index), run.optimizer)) == []  # type: ignore[misc]


@pytest.mark.parametrize('level', SCALED)
@pytest.mark.parametrize('way', ['plain first', 'plain backward', 'cleared and plain', 'divided', 'detached'])
def test_gradients_that_carry_no_scale_are_not_warned_of(way: str, level: str, device: torch.device) -> None:
    run = Run(level, device)

    def step(index: int) -> None:
        if way == 'plain first':
            (run.centres * data(index, device)).sum().backward()
        if way in ('plain first', 'plain backward', 'detached'):
            backward(run.net(data(index, device)), run.optimizer)
        else:
            backward(run.loss(index), run.optimizer)
        if way == 'divided':
            assert run.centres.grad is not None
            run.centres.grad.div_(256)
        elif way not in ('plain first', 'detached'):
            run.other.zero_grad()
            (run.centres * data(index, device)).sum().backward()

    assert run.train(step) == []
    assert way == 'detached' or torch.equal(run.centres, 1 - 0.25 * sum(data(index, device)[0] for index in range(3)))


@pytest.mark.parametrize('level', SCALED)
def test_a_loss_that_joins_later_is_seen_from_its_second_step_on(level: str, device: torch.device) -> None:
    run = Run(level, device)
    assert run.train(lambda index: backward(run.net(data(index, device)), run.optimizer)) == []
    assert len(run.train(lambda index: backward(run.loss(index), run.optimizer))) == 1


@pytest.mark.parametrize('level', SCALED)
@pytest.mark.parametrize('when', ['together', 'later'])
def test_the_remedy_trains_as_fp32_does(when: str, level: str, device: torch.device) -> None:
    run = Run(level, device)
    if when == 'together':
        run = Run.__new__(Run)
        run.net, run.device, run.centres = Net().to(device), device, nn.Parameter(torch.ones(2, device=device))
        run.optimizer, run.other = SGD(run.net.trained, lr=0.25), SGD([run.centres], lr=0.25)
        with logged():
            amp.initialize(run.net, [run.optimizer, run.other], opt_level=level, loss_scale=256.0)
    else:
        with logged():
            amp.initialize([], run.other, loss_scale=256.0)
    assert run.train(lambda index: backward(run.loss(index), [run.optimizer, run.other])) == []
    assert torch.equal(run.centres, 1 - 0.25 * sum(data(index, device)[0] for index in range(3)))
    assert run.net.fc.weight.dtype is HALF.get(level, torch.float32)
