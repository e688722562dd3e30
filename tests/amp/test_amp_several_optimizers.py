"""Several models, optimizers and losses in one training: who skips, which scale falls, what is left of the gradients.

Everything is held, bit for bit, against plain FP32 training that leaves the skipped steps out.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import differing, same
from grid import but
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer
from toy_amp import (
    LEVELS,
    MASTERS,
    ZEROINGS,
    Net,
    backward,
    check_rounded,
    data,
    gradients,
    scales,
    set_scales,
    sgd,
    unskipped,
    values,
    zero,
)

from amp_wrapper import FusedAdam, FusedAdamW, FusedSGD, amp


@dataclasses.dataclass(frozen=True)
class Case:
    """Which models each optimizer steps, and for each loss: the models that it reaches, and the optimizers it is meant for."""

    owners: tuple[tuple[int, ...], ...]
    losses: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @property
    def models(self) -> int:
        return 1 + max(index for owned in self.owners for index in owned)


CASES = {
    '2 models, 2 losses, 1 optimizer': Case(((0, 1),), (((0,), (0,)), ((1,), (0,)))),
    '2 models, 3 losses, 1 optimizer': Case(((0, 1),), (((0,), (0,)), ((1,), (0,)), ((0, 1), (0,)))),
    '2 models, 2 losses, 2 optimizers': Case(((0,), (1,)), (((0,), (0,)), ((1,), (1,)))),
    '3 models, 3 losses, 2 optimizers': Case(((0, 1), (2,)), (((0,), (0,)), ((2,), (1,)), ((1, 2), (0, 1)))),
    '3 models, 2 losses, 2 optimizers': Case(((0, 1), (2,)), (((0, 1), (0,)), ((1, 2), (1, 0)))),
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """An infinity in the gradient of one parameter: at this iteration, in this pass, in this model."""

    iteration: int
    loss: int
    model: int
    name: str


def faults(case: Case) -> list[Fault | None]:
    found: list[Fault | None] = [None]
    for iteration, (loss, (reached, _)), name in itertools.product((0, 1), enumerate(case.losses), ('fc', 'bn')):
        found += [Fault(iteration, loss, model, name) for model in reached]
    return found


class Training:
    """The same script with mixed precision and without."""

    def __init__(self, case: Case, device: torch.device, level: str | None, ids: str = 'one', **options: Any) -> None:
        self.case, self.device, self.level = case, device, level
        self.nets = [Net(index + 1).to(device) for index in range(case.models)]
        self.optimizers = [sgd([self.nets[index] for index in owned]) for owned in case.owners]
        self.ids = [0] * len(case.losses) if ids == 'one' else list(range(len(case.losses)))
        if level is not None:
            count = max(self.ids) + 1
            options = {'loss_scale': 'dynamic', 'verbosity': 0, **options}
            amp.initialize(self.nets, self.optimizers, opt_level=level, num_losses=count, **options)
            self.start = [4.0 * 4**index for index in range(count)]
            if options['loss_scale'] == 'dynamic':
                set_scales(self.optimizers[0], *self.start)

    def loss(self, index: int, iteration: int) -> Tensor:
        reached, _ = self.case.losses[index]
        x = data(iteration + index, self.device)
        return torch.stack([self.nets[model](x * (position + 1)) for position, model in enumerate(reached)]).sum()

    def passes(self, iteration: int, fault: Fault | None = None, **options: Any) -> None:
        for index, (_, meant_for) in enumerate(self.case.losses):
            loss = self.loss(index, iteration)
            if self.level is None:
                loss.backward()
                continue
            hit = fault is not None and (fault.iteration, fault.loss) == (iteration, index)
            parameter = getattr(self.nets[fault.model], fault.name).weight if hit and fault is not None else None
            listed = [self.optimizers[o] for o in meant_for]
            backward(loss, listed if len(listed) > 1 else listed[0], self.ids[index], parameter, **options)

    def iterate(self, how: str, iterations: int, fault: Fault | None = None) -> None:
        for iteration in range(iterations):
            zero(how, self.optimizers, self.nets)
            self.passes(iteration, fault)
            for index, optimizer in enumerate(self.optimizers):
                hit = fault is not None and fault.iteration == iteration
                if self.level is None and hit and fault is not None and index in self.case.losses[fault.loss][1]:
                    continue
                optimizer.step()

    def differs_from(self, other: Training) -> list[str]:
        mine, theirs = values(self.nets, self.optimizers), values(other.nets, other.optimizers)
        if self.level in MASTERS:
            # rounded; they are held against their masters
            mine, theirs = ({k: v for k, v in each.items() if not k.startswith('net')} for each in (mine, theirs))
            check_rounded(self.nets, self.level)
        return differing(mine, theirs)


@pytest.mark.parametrize('ids', ['one', 'each its own'])
@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('name', CASES)
def test_overflows_at_any_pass(name: str, level: str, ids: str, device: torch.device) -> None:
    """In each parameter, at each iteration: those that the pass is meant for skip, its scale halves once, all else goes on."""
    case = CASES[name]
    # which scale it is does not depend on the parameter: every third fault will do for a shared one
    for fault, how in zip(faults(case)[:: 3 if ids == 'one' else 1], itertools.cycle(ZEROINGS)):
        plain, run = Training(case, device, None), Training(case, device, level, ids)
        plain.iterate(how, 3, fault)
        run.iterate(how, 3, fault)
        assert run.differs_from(plain) == [], (fault, how)
        wanted = list(run.start)
        if fault is not None:
            wanted[run.ids[fault.loss]] /= 2
        assert scales(run.optimizers[0]) == wanted, (fault, how)
        if ids != 'one':
            # a loss that is finite counts the step, whoever skips it
            clean = [3] * len(case.losses)
            if fault is not None:
                clean[fault.loss] = 2 - fault.iteration
            assert unskipped(run.optimizers[0]) == clean, (fault, how)


@pytest.mark.parametrize('how', ZEROINGS)
@pytest.mark.parametrize('level', LEVELS)
def test_each_way_to_clear_gradients(level: str, how: str, device: torch.device) -> None:
    """A pass that leaves a model out must not hide that model's gradients from whoever clears them."""
    for name, case in CASES.items():
        plain, run = Training(case, device, None), Training(case, device, level, 'each its own')
        plain.iterate(how, 4)
        run.iterate(how, 4)
        assert run.differs_from(plain) == [], name


@pytest.mark.parametrize('level', LEVELS)
def test_default_scales(level: str, device: torch.device) -> None:
    """As configured by the level alone."""
    case = CASES['3 models, 3 losses, 2 optimizers']
    plain, run = Training(case, device, None), Training(case, device, level, loss_scale=None)
    plain.iterate('optimizer', 3)
    run.iterate('optimizer', 3)
    if level in ('O1', 'O2'):
        # 2**16 times 1 is too much for float16: each step was skipped, and the scale has learned
        assert scales(run.optimizers[0])[0] < 2.0**16
    else:
        assert run.differs_from(plain) == []
        assert scales(run.optimizers[0]) == [1.0]


def test_the_first_of_a_joint_pass_may_be_any(device: torch.device) -> None:
    """The scale learns once, whichever of the listed optimizers steps first, or steps at all."""
    case = CASES['3 models, 3 losses, 2 optimizers']
    for order, listed in itertools.product(itertools.permutations((0, 1)), itertools.permutations((0, 1))):
        run = Training(case, device, 'O2', 'each its own')
        backward(run.loss(2, 0), [run.optimizers[o] for o in listed], 2, run.nets[2].fc.weight)
        before = values(run.nets, run.optimizers)
        for index in order:
            run.optimizers[index].step()
        assert differing(before, values(run.nets, run.optimizers)) == []
        assert scales(run.optimizers[0]) == [4.0, 16.0, 32.0]
        # the next step is taken
        zero('optimizer', run.optimizers, run.nets)
        backward(run.loss(2, 1), [run.optimizers[o] for o in listed], 2)
        for index in order:
            run.optimizers[index].step()
        moved = differing(before, values(run.nets, run.optimizers))
        assert {key[:11] for key in moved if key.startswith('optimizer')} == {'optimizer 0', 'optimizer 1'}
        assert scales(run.optimizers[0]) == [4.0, 16.0, 32.0]


# -- accumulation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('how', ZEROINGS)
@pytest.mark.parametrize('delays', [{}, {'delay_unscale': True}, {'delay_overflow_check': True}])
@pytest.mark.parametrize('level', but(['O1', 'O2'], LEVELS))
def test_accumulation(level: str, delays: dict[str, bool], how: str, device: torch.device) -> None:
    """Three passes a step, and an overflow in any of them; apex forgot those before the last one."""
    case = CASES['3 models, 3 losses, 2 optimizers']
    for broken in (None, 0, 1, 2):
        plain, run = Training(case, device, None), Training(case, device, level, 'each its own')
        for window in range(3):
            for training in (plain, run):
                zero(how, training.optimizers, training.nets)
            for each in range(3):
                plain.passes(3 * window + each)
                fault = Fault(3 * window + each, 2, 1, 'fc') if window == 1 and each == broken else None
                run.passes(3 * window + each, fault, **(delays if each < 2 else {}))
            for ours, theirs in zip(run.optimizers, plain.optimizers):
                ours.step()
                if window != 1 or broken is None:
                    theirs.step()
        assert run.differs_from(plain) == [], broken
        assert scales(run.optimizers[0]) == [4.0, 16.0, 64.0 if broken is None else 32.0]


@pytest.mark.parametrize('level', LEVELS)
def test_several_passes_through_one_graph(level: str, device: torch.device) -> None:
    for inside in (False, True):
        plain, run = Net().to(device), Net().to(device)
        theirs, ours = sgd([plain]), sgd([run])
        run, ours = amp.initialize(run, ours, opt_level=level, loss_scale='dynamic', verbosity=0)
        set_scales(ours, 8.0)
        for index in range(3):
            theirs.zero_grad()
            ours.zero_grad()
            loss = plain(data(index, device))
            loss.backward(retain_graph=True)
            loss.backward()
            loss = run(data(index, device))
            if inside:
                with amp.scale_loss(loss, ours) as scaled:
                    scaled.backward(retain_graph=True)
                    scaled.backward()
            else:
                backward(loss, ours, retain_graph=True)
                backward(loss, ours)
            assert same(gradients([ours]), gradients([theirs]))
            theirs.step()
            ours.step()
        wanted = values([plain], [theirs])
        assert [k for k in differing(values([run], [ours]), wanted) if level not in MASTERS or 'net' not in k] == []


@pytest.mark.parametrize('level', LEVELS)
def test_scales_that_move_during_accumulation(level: str, device: torch.device) -> None:
    """Another optimizer's step moves the shared scale between two passes of an accumulation."""
    case = CASES['2 models, 2 losses, 2 optimizers']
    plain, run = Training(case, device, None), Training(case, device, level)
    for training in (plain, run):
        training.passes(0, Fault(0, 1, 1, 'fc'))
        if training.level is not None:
            training.optimizers[1].step()
        training.optimizers[1].zero_grad()
        training.passes(1)
        for optimizer in training.optimizers:
            optimizer.step()
    assert scales(run.optimizers[0]) == [2.0]
    assert run.differs_from(plain) == []


@pytest.mark.parametrize('level', LEVELS)
def test_a_step_within_the_block_of_another_optimizer(level: str, device: torch.device) -> None:
    """The scale that the loss was multiplied with is the one that unscales."""
    case = CASES['2 models, 2 losses, 2 optimizers']
    plain, run = Training(case, device, None), Training(case, device, level)
    plain.loss(0, 0).backward()
    plain.optimizers[0].step()
    backward(run.loss(1, 0), run.optimizers[1], 0, run.nets[1].fc.weight)
    with amp.scale_loss(run.loss(0, 0), run.optimizers[0]) as scaled:
        run.optimizers[1].step()
        scaled.backward()
    run.optimizers[0].step()
    assert scales(run.optimizers[0]) == [2.0]
    assert run.differs_from(plain) == []


# -- losses that reach further ------------------------------------------------------------------------------------------


@pytest.mark.parametrize('ids', ['one', 'each its own'])
@pytest.mark.parametrize('cleared', [True, False])
@pytest.mark.parametrize('level', LEVELS)
def test_gradients_at_an_optimizer_that_is_not_listed(
    level: str, cleared: bool, ids: str, device: torch.device
) -> None:
    """A generator's loss flows through the discriminator: its gradients there are what they are without mixed precision."""
    case = Case(((0,), (1,)), (((0, 1), (0,)), ((1,), (1,))))
    plain, run = Training(case, device, None), Training(case, device, level, ids)
    for iteration in range(3):
        for training in (plain, run):
            zero('optimizer', training.optimizers, training.nets)
            for index in range(2):
                loss = training.loss(index, iteration)
                if training.level is None:
                    loss.backward()
                else:
                    backward(loss, training.optimizers[index], training.ids[index])
                if cleared and index == 0:
                    training.optimizers[1].zero_grad()
        assert same(gradients(run.optimizers), gradients(plain.optimizers))
        for training in (plain, run):
            for optimizer in training.optimizers:
                optimizer.step()
    assert run.differs_from(plain) == []
    assert scales(run.optimizers[0]) == run.start


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('cleared', [True, False])
def test_overflows_at_an_optimizer_that_is_not_listed(level: str, cleared: bool, device: torch.device) -> None:
    """All listed ones and only they answer for a loss; whoever has the infinity, and does not clear it, skips too."""
    case = Case(((0,), (1,), (2,)), (((0, 1, 2), (0, 2)), ((1,), (1,)), ((2,), (2,))))
    run = Training(case, device, level, 'each its own')
    before = values(run.nets, run.optimizers)
    backward(run.loss(0, 0), [run.optimizers[0], run.optimizers[2]], 0, run.nets[1].bn.weight)
    if cleared:
        run.optimizers[1].zero_grad()
    backward(run.loss(1, 0), run.optimizers[1], 1)
    for optimizer in run.optimizers:
        optimizer.step()
    moved = {key[:11] for key in differing(before, values(run.nets, run.optimizers)) if key.startswith('optimizer')}
    assert moved == {'optimizer 0', 'optimizer 2', *(['optimizer 1'] if cleared else [])}
    assert scales(run.optimizers[0]) == [4.0, 16.0, 64.0]


# -- optimizers ---------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    'SGD': lambda p: SGD(p, 0.25, 0.5),
    'SGD without momentum': lambda p: SGD(p, 0.25),
    'SGD foreach': lambda p: SGD(p, 0.25, 0.5, foreach=True),
    'SGD fused': lambda p: SGD(p, 0.25, 0.5, fused=True),
    'Adam': lambda p: Adam(p, 0.25),
    'Adam foreach': lambda p: Adam(p, 0.25, foreach=True),
    'Adam fused': lambda p: Adam(p, 0.25, fused=True),
    'Adam capturable': lambda p: Adam(p, 0.25, capturable=True, foreach=False),
    'FusedSGD': lambda p: FusedSGD(p, 0.25, momentum=0.5),
    'FusedAdam': lambda p: FusedAdam(p, 0.25),
    'FusedAdamW': lambda p: FusedAdamW(p, 0.25),
}


@pytest.mark.parametrize('level', ['O1', 'O2', 'O3', 'O5'])
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_every_optimizer(name: str, level: str, device: torch.device) -> None:
    """It is itself that steps: FP32 masters give its FP32 bits, skipped steps and late gradients included."""
    if 'capturable' in name and device.type == 'cpu':
        pytest.skip('torch has capturable optimizers on GPUs alone')
    if level == 'O3' and name.startswith(('Adam', 'FusedAdam')):
        pytest.skip('float16 has no 1e-8: Adam divides by zero without masters')

    def train(at: str | None) -> tuple[list[Net], list[Optimizer]]:
        nets = [Net().to(device), Net(2).to(device), Net(3).to(device)]
        # torch's own fused SGD raises where a gradient comes late
        make = OPTIMIZERS['SGD' if at is None and name == 'SGD fused' else name]
        # the third model has no gradient until the third iteration
        optimizers = [make([*nets[0].trained, *nets[2].trained]), make(nets[1].trained)]
        if at is not None:
            amp.initialize(nets, optimizers, opt_level=at, loss_scale='dynamic', verbosity=0, num_losses=2)
            set_scales(optimizers[0], 4.0, 16.0)
        for index in range(5):
            zero('model', optimizers, nets)
            x = data(index, device)
            losses = [nets[0](x) + (nets[2](x) if index > 1 else 0), nets[0](x * 2) + nets[1](x)]
            if at is None:
                for loss in losses:
                    loss.backward()
            else:
                backward(losses[0], optimizers[0], 0, nets[0].fc.weight if index == 0 else None)
                backward(losses[1], optimizers, 1, nets[1].bn.weight if index == 3 else None)
            for place, optimizer in enumerate(optimizers):
                if at is not None or not (index == 3 or (index == 0 and place == 0)):
                    optimizer.step()
        return nets, optimizers

    (plain, theirs), (run, ours) = train(None), train(level)
    wanted, found = values(plain, theirs), values(run, ours)
    check_rounded(run, level)
    assert [key for key in differing(wanted, found) if level not in MASTERS or 'net' not in key] == []
    assert scales(ours[0]) == [2.0, 8.0]
    assert type(ours[0]) is type(theirs[0])
