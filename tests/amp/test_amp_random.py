"""Random schedules of passes, clips, overflows, clearings and steps against a model of what must come of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from bits import same
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_amp import (
    Net,
    backward,
    check_rounded,
    data,
    scales,
    set_scales,
    sgd,
    unskipped,
    zero,
)

from amp_wrapper import amp

START = (2.0**10, 2.0**6)
#: Which models the losses reach, and which optimizers they are meant for: the second reaches all.
LOSSES = ((0,), (0, 1), (1,))
MEANT = ((0,), (0, 1), (1,))
IDS = (0, 1, 0)


class Model:
    """Two plain FP32 trainings, two scales, and the flags that decide whether a step is taken."""

    def __init__(self) -> None:
        self.nets = [Net(), Net(2)]
        self.optimizers = [sgd([net]) for net in self.nets]
        self.scales, self.clean = list(START), [0, 0]
        self.bad = [False, False]
        #: Of each optimizer: what the losses that it answers for have found since its last step.
        self.found: list[dict[int, bool]] = [{}, {}]

    def passed(self, loss: int, index: int, broken: int | None) -> None:
        for place, net in enumerate(self.nets):
            if self.found[place] and all(p.grad is None for p in net.trained):
                # cleared behind the optimizer's back: noticed now
                self.learn(place)
            elif all(p.grad is None for p in net.trained):
                self.bad[place] = False
        total = torch.stack([self.nets[place](data(index)) for place in LOSSES[loss]]).sum()
        total.backward()
        first = MEANT[loss][0]
        self.found[first][IDS[loss]] = self.found[first].get(IDS[loss], False) or broken is not None
        for place in MEANT[loss]:
            self.bad[place] = self.bad[place] or broken is not None
        if broken is not None:
            self.nets[LOSSES[loss][broken]].fc.weight.grad[0, 0] = math.inf  # type: ignore[index]

    def learn(self, place: int) -> None:
        for loss_id, overflow in self.found[place].items():
            self.scales[loss_id] *= 0.5 if overflow else 1
            self.clean[loss_id] = 0 if overflow else self.clean[loss_id] + 1
        self.found[place], self.bad[place] = {}, False

    def step(self, place: int) -> None:
        grads = [p.grad for p in self.nets[place].trained if p.grad is not None]
        if not self.bad[place] and all(bool(grad.isfinite().all()) for grad in grads):
            self.optimizers[place].step()
        self.learn(place)

    def clear(self, place: int, how: str) -> None:
        zero(how, [self.optimizers[place]], [self.nets[place]])
        if how in ('optimizer', 'zeros'):
            self.learn(place)


ACTIONS = st.one_of(
    st.tuples(st.just('pass'), st.integers(0, 2), st.integers(0, 3), st.sampled_from([None, None, None, 0, 1])),
    st.tuples(st.just('step'), st.integers(0, 1)),
    st.tuples(st.just('clip'), st.integers(0, 1)),
    st.tuples(
        st.just('clear'), st.integers(0, 1), st.sampled_from(['optimizer', 'model', 'none', 'zeros', 'model zeros'])
    ),
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(level=st.sampled_from(['O0', 'O1', 'O2', 'O4', 'O5']), actions=st.lists(ACTIONS, max_size=14))
def test_random_schedules(level: str, actions: list[tuple[Any, ...]]) -> None:
    model, nets = Model(), [Net(), Net(2)]
    optimizers = [sgd([net]) for net in nets]
    amp.initialize(nets, optimizers, opt_level=level, num_losses=2, loss_scale='dynamic', verbosity=0)
    set_scales(optimizers[0], *START)
    for kind, *words in actions:
        if kind == 'pass':
            loss, index, broken = words
            broken = None if broken is None else min(broken, len(LOSSES[loss]) - 1)
            model.passed(loss, index, broken)
            total = torch.stack([nets[place](data(index)) for place in LOSSES[loss]]).sum()
            hit = None if broken is None else nets[LOSSES[loss][broken]].fc.weight
            backward(total, [optimizers[place] for place in MEANT[loss]], IDS[loss], hit)
        elif kind == 'step':
            model.step(words[0])
            optimizers[words[0]].step()
        elif kind == 'clip':
            for parameters in (model.nets[words[0]].trained, list(amp.master_params(optimizers[words[0]]))):
                # torch's own refuses to clip nothing
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter.grad.clamp_(-0.5, 0.5)
        else:
            model.clear(*words)
            zero(words[1], [optimizers[words[0]]], [nets[words[0]]])
        compare(level, model, nets, optimizers, kind == 'pass')


def compare(level: str, model: Model, nets: list[Net], optimizers: list[Any], gradients: bool) -> None:
    assert scales(optimizers[0]) == model.scales
    assert unskipped(optimizers[0]) == model.clean
    check_rounded(nets, level)
    for place, (ours, theirs) in enumerate(zip(optimizers, model.optimizers)):
        for mine, wanted in zip(amp.master_params(ours), model.nets[place].trained):
            assert torch.equal(mine, wanted)
            state, plain = ours.state.get(mine, {}), theirs.state.get(wanted, {})
            momenta = [each.get('momentum_buffer') for each in (state, plain)]
            assert same(*momenta, any_nan=True)
            # of masters, gradients follow what happened to those of the weights when a pass begins
            assert not gradients or same(mine.grad, wanted.grad, any_nan=True)
