"""Random schedules of passes, writes and steps against a model of a dozen lines."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_wrapper import AmpOptimWrapper, amp
from amp_wrapper.optim import FusedSGD
from amp_wrapper.policy import LEVELS


class Statistics(nn.Module):
    """A buffer of each kind of change; numbers are exact in every 16-bit type."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer('moving', torch.zeros(2))
        self.register_buffer('count', torch.tensor(0))
        self.register_buffer('odd', torch.tensor(False))
        self.register_buffer('replaced', torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.moving.mul_(0.5).add_(x)
                self.count += 1
                self.odd.logical_not_()
                self.replaced = self.replaced * 0.5 + x
        return (self.weight * x).sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Statistics(), Statistics()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


Values = dict[str, dict[str, list[float]]]


class Simple:
    """What has to happen: the values of both parts, what they return to, and who wrote last."""

    def __init__(self) -> None:
        self.now: Values = {
            part: dict(moving=[0.0, 0.0], count=[0], odd=[False], replaced=[0.0, 0.0]) for part in ('first', 'second')
        }
        self.before: Values | None = None
        self.written: set[tuple[str, str]] = set()

    def copy(self) -> Values:
        return {part: {name: list(value) for name, value in each.items()} for part, each in self.now.items()}

    def run(self, parts: tuple[str, ...], value: float, counts: bool) -> None:
        if counts:
            if self.before is None:
                self.before, self.written = self.copy(), set()
            for part, name in [key for key in self.written if key[0] in parts]:
                self.before[part][name] = list(self.now[part][name])
                self.written.remove((part, name))
        for part in parts:
            each = self.now[part]
            each['moving'] = [0.5 * old + value for old in each['moving']]
            each['replaced'] = [0.5 * old + value for old in each['replaced']]
            each['count'], each['odd'] = [each['count'][0] + 1], [not each['odd'][0]]
            if not counts:
                self.written.update((part, name) for name in each)

    def write(self, part: str, name: str, value: float) -> None:
        self.now[part][name] = [value] * len(self.now[part][name])
        self.written.add((part, name))

    def step(self, skipped: bool) -> None:
        if skipped and self.before is not None:
            for part, each in self.now.items():
                for name in each:
                    if (part, name) not in self.written:
                        each[name] = self.before[part][name]
        self.before, self.written = None, set()


def same(model: nn.Module, simple: Simple) -> list[str]:
    """The buffers that differ."""
    wrong = []
    for part, each in simple.now.items():
        for name, wanted in each.items():
            found = getattr(getattr(model, part), name).float().reshape(-1).tolist()
            if not all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(found, map(float, wanted))):
                wrong.append(f'{part}.{name} is {found}, and should be {wanted}')
    return wrong


PARTS = {'model': ('first', 'second'), 'first': ('first',), 'second': ('second',)}
ACTIONS = st.one_of(
    st.tuples(
        st.just('pass'),
        st.sampled_from(list(PARTS)),
        st.sampled_from(['good', 'good', 'bad', 'unused', 'no_grad', 'eval']),
    ),
    st.tuples(st.just('step')),
    st.tuples(st.just('step')),
    st.tuples(st.just('clear')),
    st.tuples(
        st.just('write'),
        st.sampled_from(['first', 'second']),
        st.sampled_from(['moving', 'count', 'odd', 'replaced']),
        st.sampled_from(['in place', 'load']),
    ),
)


class Runner:
    """Either interface."""

    def __init__(self, api: str, level: str, kind: Any, device: torch.device) -> None:
        self.model = Model().to(device)
        self.optimizer = kind(self.model.parameters(), lr=0.0)
        self.wrapper = None
        # low enough to never overflow by itself
        scale = dict(init_scale=2.0, growth_interval=10**6, min_scale=1.0)
        if api == 'wrapper':
            words: dict[str, Any] = dict(max_consecutive_skips=None, verbosity=0, skip_nonfinite=True)
            self.wrapper = AmpOptimWrapper(opt_level=level, optimizer=self.optimizer, loss_scale=scale, **words)
            self.wrapper.attach(self.model)
        else:
            amp.initialize(self.model, self.optimizer, opt_level=level, loss_scale=scale, verbosity=0)

    def loss(self, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.wrapper is None:
            return call(x)
        with self.wrapper.optim_context(self.model):
            return call(x)

    def backward(self, loss: Tensor) -> None:
        if self.wrapper is not None:
            self.wrapper.backward(loss)
        else:
            with amp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()

    def step(self) -> None:
        (self.wrapper or self.optimizer).step()
        self.clear()

    def clear(self) -> None:
        (self.wrapper or self.optimizer).zero_grad()


@pytest.mark.parametrize('api', ['wrapper', 'functional'])
@pytest.mark.parametrize('level', LEVELS)
def test_random_schedules(level: str, api: str, device: torch.device) -> None:
    values = {'good': 1.0, 'bad': math.nan, 'unused': 2.0, 'no_grad': 4.0, 'eval': 8.0}
    skips = 0

    @settings(max_examples=12, deadline=None, database=None, derandomize=True)
    @given(st.lists(ACTIONS, min_size=4, max_size=30), st.booleans())
    def play(actions: list[tuple[str, ...]], fused: bool) -> None:
        nonlocal skips
        run = Runner(api, level, FusedSGD if fused else torch.optim.SGD, device)
        simple = Simple()
        passes, bad = 0, False
        for action, *words in actions:
            if action == 'pass':
                part, how = words
                module = run.model if part == 'model' else getattr(run.model, part)
                x = torch.full((2,), values[how], device=device)
                if how in ('no_grad', 'eval'):
                    run.model.train(how != 'eval')
                    with torch.no_grad():
                        module(x)
                    run.model.train()
                    if how == 'no_grad':
                        simple.run(PARTS[part], values[how], counts=False)
                else:
                    loss = run.loss(module, x)
                    simple.run(PARTS[part], values[how], counts=True)
                    if how != 'unused':
                        run.backward(loss)
                        passes, bad = passes + 1, bad or how == 'bad'
            elif action == 'write':
                part, name, how = words
                buffer = getattr(getattr(run.model, part), name)
                if how == 'load':
                    getattr(run.model, part).load_state_dict({name: torch.full_like(buffer, 1).float()}, strict=False)
                else:
                    buffer.fill_(1)
                simple.write(part, name, 1)
            elif action == 'clear':
                run.clear()
                passes, bad = 0, False
            elif passes:
                run.step()
                simple.step(bad)
                skips += bad
                passes, bad = 0, False
            assert same(run.model, simple) == [], action

    play()
    assert skips > 2
