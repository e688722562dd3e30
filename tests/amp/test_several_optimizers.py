"""Several models, optimizers and losses of one session: who skips, which scale falls, and what gradients are.

Everything is compared bit for bit with plain FP32 training that leaves out the skipped steps.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact_scripts import CLEARS, backward, clear, counters, gradients, scales, set_scales, sgd, start, state
from pairs import pairs
from play import EXACT_LEVELS, Part, data
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from amp_wrapper import FusedAdam, FusedAdamW, FusedSGD, amp


@dataclasses.dataclass(frozen=True)
class Case:
    """Which models each optimizer steps, and for each loss: the models that it reaches, and the optimizers it is for."""

    owners: tuple[tuple[int, ...], ...]
    losses: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


THREE_LOSSES = Case(((0, 1), (2,)), (((0,), (0,)), ((2,), (1,)), ((1, 2), (0, 1))))
#: A generator's loss flows through the discriminator, whose optimizer the loss is not for.
GAN = Case(((0,), (1,)), (((0, 1), (0,)), ((1,), (1,))))
CASES = {
    '2 losses, 1 optimizer': Case(((0, 1),), (((0,), (0,)), ((1,), (0,)))),
    '3 losses, 1 optimizer': Case(((0, 1),), (((0,), (0,)), ((1,), (0,)), ((0, 1), (0,)))),
    '2 losses, 2 optimizers': Case(((0,), (1,)), (((0,), (0,)), ((1,), (1,)))),
    '3 losses, 2 optimizers': THREE_LOSSES,
    'a loss for both optimizers': Case(((0, 1), (2,)), (((0, 1), (0,)), ((1, 2), (1, 0)))),
}
#: Iteration, loss and model in which a gradient becomes infinite.
Fault = tuple[int, int, int]


class Training:
    """The same script with mixed precision and without; scales begin at 4, 16, 64."""

    def __init__(
        self, case: Case, level: str | None, own_scales: bool = True, make: Callable[..., Optimizer] = sgd
    ) -> None:
        self.case, self.level = case, level
        self.nets = [Part(index + 1) for index in range(1 + max(itertools.chain(*case.owners)))]
        self.optimizers = [make([self.nets[index] for index in owned]) for owned in case.owners]
        self.ids = [index if own_scales else 0 for index in range(len(case.losses))]
        self.start = [4.0 * 4**index for index in range(max(self.ids) + 1)]
        if level is not None:
            words: dict[str, Any] = dict(num_losses=len(self.start), loss_scale='dynamic', verbosity=0)
            amp.initialize(self.nets, self.optimizers, opt_level=level, **words)
            set_scales(self.optimizers[0], *self.start)

    def loss(self, index: int, iteration: int) -> Tensor:
        x = data(iteration + index) * (index + 1)
        return torch.stack([self.nets[model](x) for model in self.case.losses[index][0]]).sum()

    def backward(self, index: int, iteration: int, fault: Fault | None = None, **options: Any) -> None:
        hit = None if fault is None or fault[:2] != (iteration, index) else self.nets[fault[2]].fc.weight
        listed = [self.optimizers[o] for o in self.case.losses[index][1]]
        words = dict(loss_id=self.ids[index], hit=hit, level=self.level, **options)
        backward(self.loss(index, iteration), listed if len(listed) > 1 else listed[0], **words)

    def passes(self, iteration: int, fault: Fault | None = None, **options: Any) -> None:
        for index in range(len(self.case.losses)):
            self.backward(index, iteration, fault, **options)

    def step(self, skipped: tuple[int, ...] = ()) -> None:
        """All optimizers step; plain training leaves out those that mixed precision has to skip, and forgets the buffers."""
        for place, optimizer in enumerate(self.optimizers):
            if self.level is not None or place not in skipped:
                optimizer.step()

    def train(self, how: str, iterations: int, fault: Fault | None = None) -> Training:
        for iteration in range(iterations):
            clear(how, self.optimizers, self.nets)
            self.passes(iteration, fault)
            self.step(() if fault is None or fault[0] != iteration else self.case.losses[fault[1]][1])
        return self

    def state(self) -> dict[Any, Any]:
        """Without buffers: whose statistics are restored is tested with those."""
        return {
            key: value for key, value in state(self.nets, self.optimizers).items() if key[-1] not in ('total', 'count')
        }


def faults(case: Case) -> list[Fault | None]:
    return [None, *((index % 2, index, reached[-1]) for index, (reached, _) in enumerate(case.losses))]


@pairs(case=CASES, level=EXACT_LEVELS, how=CLEARS, own_scales=[True, False])
def test_overflow_skips_the_optimizers_of_its_loss_and_lowers_its_scale(
    case: str, level: str, how: str, own_scales: bool
) -> None:
    wrong = []
    for fault in faults(CASES[case]):
        plain = Training(CASES[case], None).train(how, 3, fault).state()
        run = Training(CASES[case], level, own_scales).train(how, 3, fault)
        wanted, clean = list(run.start), [3] * len(run.start)
        if fault is not None:
            wanted[run.ids[fault[1]]] /= 2
            # a loss that is finite counts the step, whoever skips it
            clean[run.ids[fault[1]]] = 2 - fault[0]
        found = run.state(), scales(run.optimizers[0], len(wanted)), counters(run.optimizers[0])
        if found[:2] != (plain, wanted) or (own_scales and found[2] != clean):
            wrong.append((fault, found[1:], [key for key in plain if plain[key] != found[0].get(key)]))
    assert wrong == []


@pytest.mark.parametrize('level', ['O1', 'O2', 'O4', 'O5'])
def test_scale_of_a_joint_pass_learns_once_whoever_steps_first(level: str) -> None:
    for order, listed in itertools.product(itertools.permutations((0, 1)), repeat=2):
        run = Training(THREE_LOSSES, level)
        before = run.state()
        for fault in ((0, 2, 2), None):
            clear('optimizer', run.optimizers, run.nets)
            hit = None if fault is None else run.nets[2].fc.weight
            backward(run.loss(2, 0), [run.optimizers[o] for o in listed], 2, hit)
            for place in order:
                run.optimizers[place].step()
            assert (run.state() == before) is (fault is not None)
            assert scales(run.optimizers[0], 3) == [4.0, 16.0, 32.0]


@pairs(level=EXACT_LEVELS, delays=['', 'delay_unscale', 'delay_overflow_check'], how=CLEARS)
def test_accumulation_remembers_an_overflow_in_any_of_its_passes(level: str, delays: str, how: str) -> None:
    """Three passes a step; apex forgot the overflows before the last one."""
    for broken in (None, 0, 2):
        plain, run = Training(THREE_LOSSES, None), Training(THREE_LOSSES, level)
        for window in range(3):
            for training in (plain, run):
                clear(how, training.optimizers, training.nets)
                for each in range(3):
                    iteration = 3 * window + each
                    fault = (iteration, 2, 1) if (window, each) == (1, broken) else None
                    training.passes(iteration, fault, **({delays: True} if delays and each < 2 else {}))
                training.step((0, 1) if window == 1 and broken is not None else ())
        assert run.state() == plain.state(), broken
        assert scales(run.optimizers[0], 3) == [4.0, 16.0, 64.0 if broken is None else 32.0]


@pytest.mark.parametrize('level', EXACT_LEVELS)
def test_another_optimizers_step_may_move_the_scale_during_an_accumulation(level: str) -> None:
    case = CASES['2 losses, 2 optimizers']
    plain, run = Training(case, None), Training(case, level, own_scales=False)
    for training in (plain, run):
        training.passes(0, (0, 1, 1))
        if training is run:
            training.optimizers[1].step()
        training.optimizers[1].zero_grad()
        training.passes(1)
        training.step()
    assert scales(run.optimizers[0]) == [2.0]
    assert run.state() == plain.state()


@pytest.mark.parametrize('cleared', [True, False])
@pytest.mark.parametrize('level', EXACT_LEVELS)
def test_gradients_at_an_optimizer_that_the_loss_is_not_for_are_unscaled(level: str, cleared: bool) -> None:
    plain, run = Training(GAN, None), Training(GAN, level)
    for iteration in range(3):
        for training in (plain, run):
            clear('optimizer', training.optimizers, training.nets)
            training.backward(0, iteration)
            if cleared:
                training.optimizers[1].zero_grad()
            training.backward(1, iteration)
        assert [gradients(o) for o in run.optimizers] == [gradients(o) for o in plain.optimizers]
        run.step()
        plain.step()
    assert run.state() == plain.state()
    assert scales(run.optimizers[0], 2) == run.start


@pytest.mark.parametrize('cleared', [True, False])
@pytest.mark.parametrize('level', EXACT_LEVELS)
def test_infinity_at_an_optimizer_that_the_loss_is_not_for_skips_that_one_alone(level: str, cleared: bool) -> None:
    """Unless it clears the gradient before; no scale falls, since the gradients that the loss is for are finite."""
    case = Case(((0,), (1,), (2,)), (((0, 1, 2), (0, 2)), ((1,), (1,)), ((2,), (2,))))
    run = Training(case, level)
    before = run.state()
    run.backward(0, 0, (0, 0, 1))
    if cleared:
        run.optimizers[1].zero_grad()
    run.backward(1, 0)
    run.step()
    moved = {key[0] for key, value in run.state().items() if before.get(key) != value}
    assert moved == {0, 2} | ({1} if cleared else set())
    assert scales(run.optimizers[0], 3) == [4.0, 16.0, 64.0]


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    'SGD': lambda p: SGD(p, 0.25, 0.5),
    'SGD without momentum': lambda p: SGD(p, 0.25),
    'SGD foreach': lambda p: SGD(p, 0.25, 0.5, foreach=True),
    'SGD fused': lambda p: SGD(p, 0.25, 0.5, fused=True),
    'Adam': lambda p: Adam(p, 0.25),
    'Adam foreach': lambda p: Adam(p, 0.25, foreach=True),
    'Adam fused': lambda p: Adam(p, 0.25, fused=True),
    'FusedSGD': lambda p: FusedSGD(p, 0.25, momentum=0.5),
    'FusedAdam': lambda p: FusedAdam(p, 0.25),
    'FusedAdamW': lambda p: FusedAdamW(p, 0.25),
}


@pairs(name=OPTIMIZERS, level=['O2', 'O1', 'O5'])
def test_every_optimizer_with_skips_and_late_gradients(name: str, level: str) -> None:
    """The optimizer itself steps the FP32 masters, so its bits are those of FP32 training."""

    def train(at: str | None) -> dict[Any, Any]:
        nets = [Part(), Part(2), Part(3)]
        # torch's own fused SGD raises where a gradient comes late
        make = OPTIMIZERS['SGD' if at is None and name == 'SGD fused' else name]
        # the third model has no gradient until the third iteration
        optimizers = [make([*nets[0].trained, *nets[2].trained]), make(nets[1].trained)]
        if at is not None:
            amp.initialize(nets, optimizers, opt_level=at, loss_scale='dynamic', verbosity=0, num_losses=2)
            set_scales(optimizers[0], 4.0, 16.0)
        for index in range(5):
            clear('model', optimizers, nets)
            x = data(index)
            backward(
                nets[0](x) + (nets[2](x) if index > 1 else 0),
                optimizers[0],
                hit=nets[0].fc.weight if index == 0 else None,
                level=at,
            )
            hit = nets[1].norm.weight if index == 3 else None
            backward(nets[0](x * 2) + nets[1](x), optimizers, 1, hit, at)
            for place, optimizer in enumerate(optimizers):
                if at is not None or not (index == 3 or (index == 0 and place == 0)):
                    optimizer.step()
        if at is not None:
            assert scales(optimizers[0], 2) == [2.0, 8.0]
        return {key: value for key, value in state(nets, optimizers).items() if key[-1] not in ('total', 'count')}

    assert train(level) == train(None)


@pytest.mark.parametrize('level', EXACT_LEVELS)
def test_one_model_whose_parameters_two_optimizers_share_out(level: str) -> None:
    def train(at: str | None) -> dict[Any, Any]:
        net = Part()
        optimizers: list[Optimizer] = [SGD([net.fc.weight], 0.25, 0.5), SGD([net.norm.weight], 0.5, 0.5)]
        if at is not None:
            amp.initialize(net, optimizers, opt_level=at, loss_scale='dynamic', verbosity=0, num_losses=2)
            set_scales(optimizers[0], 4.0, 16.0)
        for index in range(3):
            clear('model', optimizers, [net])
            for loss_id in range(2):
                backward(net(data(index + loss_id)), optimizers, loss_id, level=at)
            for optimizer in optimizers:
                optimizer.step()
        return state([net], optimizers)

    assert train(level) == train(None)


@pytest.mark.parametrize('level', EXACT_LEVELS)
def test_weight_that_two_modules_share_has_one_master(level: str) -> None:
    def train(at: str | None) -> dict[Any, Any]:
        nets = nn.ModuleList([Part(), Part(2)])
        nets[1].fc.weight = nets[0].fc.weight
        optimizer = SGD(nets.parameters(), 0.25, 0.5)
        if at is not None:
            amp.initialize(nets, optimizer, opt_level=at, loss_scale=8.0, verbosity=0)
        for index in range(3):
            optimizer.zero_grad()
            backward(nets[0](data(index)) + nets[1](data(index + 1)), optimizer, level=at)
            optimizer.step()
        assert nets[0].fc.weight is nets[1].fc.weight
        return state([nets], [optimizer])

    assert train(level) == train(None)


@pairs(level=['O2', 'O1', 'O4', 'O5'], how=['optimizer', 'model', 'None'])
def test_rows_of_sparse_embeddings_are_summed_and_an_infinity_in_one_is_found(level: str, how: str) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(6, 2, sparse=True)
            with torch.no_grad():
                self.rows.weight.copy_(torch.arange(12.0).view(6, 2) / 4)

        def forward(self, index: Tensor, x: Tensor) -> Tensor:
            return (self.rows(index).float() * x).sum()

    def train(at: str | None) -> dict[Any, Any]:
        model = Words()
        optimizer = SGD(model.parameters(), 0.25)
        if at is not None:
            amp.initialize(model, optimizer, opt_level=at, loss_scale='dynamic', verbosity=0, num_losses=2)
            set_scales(optimizer, 4.0, 16.0)
        for index in range(4):
            clear(how, [optimizer], [model])
            for each in range(2):
                x = data(index) * (torch.inf if at is not None and index == 1 and each == 0 else 1)
                backward(model(torch.tensor([each, 2, 2, index]), x), optimizer, each, level=at)
            assert all(p.grad is not None and p.grad.is_sparse for p in amp.master_params(optimizer))
            if at is not None or index != 1:
                optimizer.step()
        if at is not None:
            assert scales(optimizer, 2) == [2.0, 16.0]
        return state([model], [optimizer])

    assert train(level) == train(None)


@pytest.mark.parametrize('levels', [('O2', 'O1'), ('O5', 'O0'), ('O4', 'O2'), ('O2', 'O2')])
def test_sessions_of_models_that_share_no_loss_have_their_own_scales(levels: tuple[str, str]) -> None:
    trained = [start(level, 4.0 * 4**place) for place, level in enumerate(levels)]
    plain = [start(None) for _ in levels]
    for index in range(4):
        for place, (net, optimizer) in enumerate(trained):
            optimizer.zero_grad()
            # the first overflows in the second step
            broken = (index, place) == (1, 0)
            backward(net(data(index)), optimizer, hit=net.norm.weight if broken else None)
            optimizer.step()
            theirs, other = plain[place]
            if not broken:
                other.zero_grad()
                theirs(data(index)).backward()
                other.step()
    for (net, optimizer), (theirs, other) in zip(trained, plain):
        assert state([net], [optimizer]) == state([theirs], [other])
    assert [scales(optimizer) for _, optimizer in trained] == [[2.0], [16.0]]
