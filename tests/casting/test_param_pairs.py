"""A weight and its master: the side that somebody else wrote to last wins, whoever looks next and in whatever order."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from toy_masters import MASTERED, OPTIMIZERS, Net, Ours

from amp_wrapper import AmpUsageError
from amp_wrapper.ops.split import split


class Reference:
    """What has to come of it: FP32 values, the weights, and which of both was written to since they agreed."""

    def __init__(self, ours: Ours, optimizer: str, is_split: bool) -> None:
        self.values = [nn.Parameter(value.clone()) for value in ours.start]
        self.is_split, self.dtype = is_split, ours.dtype
        self.weights = [self.near(value) for value in self.values]
        self.moved: list[set[str]] = [set() for _ in self.values]
        self.optimizer = OPTIMIZERS[optimizer](self.values)

    def near(self, value: Tensor) -> Tensor:
        return (split(value.detach(), self.dtype)[0] if self.is_split else value.detach().to(self.dtype)).clone()

    def agree(self) -> None:
        for index, (value, weight, moved) in enumerate(zip(self.values, self.weights, self.moved)):
            if moved == {'weight'}:
                keeps = (weight == self.near(value)) & (not self.is_split)
                value.data = value.data.where(keeps, weight.float())
            elif moved == {'master'}:
                self.weights[index] = self.near(value)
            moved.clear()

    def step(self) -> None:
        for value in self.values:
            value.grad = torch.full_like(value, 0.5)
        self.optimizer.step()
        self.weights = [self.near(value) for value in self.values]


WRITES: dict[str, Callable[[Tensor], Any]] = {
    'mul_': lambda p: p.mul_(0.75),
    'clamp_': lambda p: p.clamp_(-0.25, 0.25),
    'a view': lambda p: p[0].fill_(0.3),
    'lerp_': lambda p: p.lerp_(torch.full_like(p, 0.1), 0.5),
    'foreach': lambda p: torch._foreach_add_([p], 0.0625),
    'detach': lambda p: p.detach().mul_(1.5),
    'set .data': lambda p: None,
}
LOOKS = ('forward', 'no_grad', 'part', 'state_dict', 'deepcopy', 'torch.save', 'average', 'step', 'skip', 'detach')
WRITE = st.tuples(st.sampled_from(['weight', 'master']), st.sampled_from(list(WRITES)), st.integers(0, 2))
QUIET = st.tuples(st.sampled_from(['load', 'flip', 'gradients', 'part of a load']), st.integers(0, 3))
LOOK = st.tuples(st.sampled_from(LOOKS), st.sampled_from(['weight', 'master']))
# some writes, and then somebody who looks
SCENES = st.lists(st.tuples(st.lists(WRITE | WRITE | QUIET, min_size=1, max_size=3), LOOK), min_size=4, max_size=8)


class Play:
    """Plays events to both, and compares."""

    def __init__(self, level: str, interface: str, optimizer: str, device: torch.device) -> None:
        self.ours = Ours(level, interface, optimizer, device)
        self.expected = Reference(self.ours, optimizer, interface == 'split')
        self.plain = Net().to(device)
        self.average = AveragedModel(self.ours.model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
        self._fill()
        self.outside = AveragedModel(self.plain, multi_avg_fn=get_ema_multi_avg_fn(0.75))

    def _fill(self) -> None:
        with torch.no_grad():
            for mine, value in zip(self.plain.parameters(), self.expected.values):
                mine.copy_(value)

    @torch.no_grad()
    def write(self, side: str, name: str, index: int) -> None:
        ours, expected = self.ours, self.expected
        if expected.is_split:
            side = 'weight'
        tensors, theirs = (
            (ours.weights, expected.weights) if side == 'weight' else (ours.masters, [v.data for v in expected.values])
        )
        if name == 'set .data':
            # a master tells of it by its address; a weight does not
            if side == 'master':
                tensors[index].data = tensors[index].data * 0.5
                theirs[index].mul_(0.5)
                expected.moved[index].add('master')
            return
        for tensor in (tensors[index], theirs[index]):
            WRITES[name](tensor)
        expected.moved[index].add(side)

    def quietly(self, kind: str, number: int) -> None:
        """What is no write: loads go to both sides; flags and gradients to none."""
        ours, expected = self.ours, self.expected
        if kind == 'flip':
            ours.weights[0].requires_grad_(False).requires_grad_(True)
            ours.masters[1].detach()
        elif kind == 'gradients':
            ours.masters[0].grad = torch.ones_like(ours.masters[0])
            ours.masters[0].grad = None
        else:
            names = ours.names if kind == 'load' else ours.names[number % 3 : number % 3 + 1]
            state = {name: torch.randn_like(expected.values[ours.names.index(name)]) for name in names}
            ours.model.load_state_dict(state, strict=kind == 'load', assign=number == 3)
            for name, value in state.items():
                index = ours.names.index(name)
                expected.values[index].data.copy_(value)
                expected.weights[index] = expected.near(value)
                expected.moved[index].clear()

    def look(self, kind: str, right: str) -> None:
        both = [name for name, moved in zip(self.ours.names, self.expected.moved) if len(moved) == 2]
        if both:
            before = copy.deepcopy([*self.ours.weights, *self.ours.masters])
            if kind in ('step', 'skip'):
                self.ours.backward()
            with pytest.raises(AmpUsageError, match='both sides of .*' + both[0]):
                self._look('step, again' if kind in ('step', 'skip') else kind)
            for name, now, then in zip(self.ours.names * 2, [*self.ours.weights, *self.ours.masters], before):
                assert name not in both or torch.equal(now, then)
            (self.ours.optimizer if self.ours.wrapper is None else self.ours.wrapper).zero_grad()
            for index, moved in enumerate(self.expected.moved):
                if len(moved) == 2:
                    moved.remove('weight' if right == 'master' else 'master')
                    if right == 'master':
                        self.ours.masters_changed(self.ours.masters[index])
                    else:
                        self.ours.weights_changed(self.ours.weights[index])
        if kind in ('step', 'skip'):
            self.ours.backward(torch.inf if kind == 'skip' else 1.0)
        self.expected.agree()
        if kind == 'step':
            self.expected.step()
        self._look(kind)
        for weight, master, near, value in zip(
            self.ours.weights, self.ours.masters, self.expected.weights, self.expected.values
        ):
            assert torch.equal(weight, near)
            assert self.expected.is_split or torch.equal(master, value)

    def _look(self, kind: str) -> None:
        ours, values = self.ours, self.expected.values
        if kind == 'forward':
            ours.forward().sum()
        elif kind == 'no_grad':
            with torch.no_grad():
                ours.model.eval()(ours.x)
        elif kind == 'part':
            if {len(moved) for moved in self.expected.moved[:2]} & {2}:
                ours.model.first(ours.x)
            ours.model.second(torch.ones(1, 4, device=ours.x.device))
            assert torch.equal(ours.model.second.weight, self.expected.weights[2])
            ours.model(ours.x)
        elif kind == 'state_dict':
            assert all(torch.equal(a, b) for a, b in zip(ours.model.state_dict().values(), values))
        elif kind == 'deepcopy':
            copied = copy.deepcopy(ours.model)
            assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), values))
            copied(ours.x)
        elif kind == 'torch.save':
            file = io.BytesIO()
            torch.save(ours.model, file)
            file.seek(0)
            read = torch.load(file, weights_only=False)
            assert all(torch.equal(a, b) for a, b in zip(read.parameters(), self.expected.weights))
            ours.forward()
        elif kind == 'average':
            self.average.update_parameters(ours.model)
            self._fill()
            self.outside.update_parameters(self.plain)
            assert all(torch.equal(a, b) for a, b in zip(self.average.parameters(), self.outside.parameters()))
        elif kind == 'detach' and ours.wrapper is not None:
            ours.wrapper.detach()
            assert all(torch.equal(a, b) for a, b in zip(ours.model.parameters(), values))
            ours.wrapper.attach(ours.model)
            ours.masters = [p for group in ours.optimizer.param_groups for p in group['params']]
        elif kind == 'detach':
            ours.forward()
        elif kind in ('step', 'skip', 'step, again'):
            ours.step()


CASES = [
    (interface, optimizer)
    for interface in ('amp', 'wrapper', 'split')
    for optimizer in OPTIMIZERS
    if interface != 'split' or optimizer == 'FusedAdamW'
]


@pytest.mark.parametrize(('interface', 'optimizer'), CASES)
@pytest.mark.parametrize('level', MASTERED)
def test_any_interleaving_is_that_of_the_reference(
    level: str, interface: str, optimizer: str, device: torch.device
) -> None:
    @settings(max_examples=40, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(SCENES)
    def play(scenes: list[Any]) -> None:
        both = Play(level, interface, optimizer, device)
        for events, (look, right) in [*scenes, ([], ('forward', 'weight')), ([], ('state_dict', 'weight'))]:
            for kind, *rest in events:
                if kind in ('weight', 'master'):
                    both.write(kind, *rest)
                else:
                    both.quietly(kind, *rest)
            both.look(look, right)

    play()
