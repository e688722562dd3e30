"""Several models, optimizers and losses of one session: who skips, which scale falls, and what gradients are.

Everything is compared bit for bit with plain FP32 training that leaves out the skipped steps.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from exact_scripts import CLEARS, KINDS, backward, clear, gradients, initialise, scales, sgd, state, unlike_fp32
from pairs import pairs
from play import EXACT_LEVELS, Part, data
from torch import nn
from torch.optim import SGD, Optimizer

from amp_wrapper import amp

#: Which models each optimizer steps; for each loss the models that it reaches, and the optimizers it is for.
Case = tuple[tuple[tuple[int, ...], ...], tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]]
THREE_LOSSES: Case = ((0, 1), (2,)), (((0,), (0,)), ((2,), (1,)), ((1, 2), (0, 1)))
#: A generator's loss flows through the discriminator, whose optimizer the loss is not for.
GAN: Case = ((0,), (1,)), (((0, 1), (0,)), ((1,), (1,)))
#: Iteration, loss and model in which a gradient becomes infinite.
Fault = tuple[int, int, int]


class Training:
    """The same script with mixed precision and without; each loss has a scale, and they begin at 4, 16, 64."""

    def __init__(self, case: Case, level: str | None) -> None:
        owners, self.losses = case
        self.level = level
        self.nets = [Part(index + 1) for index in range(1 + max(itertools.chain(*owners)))]
        self.optimizers = [sgd([self.nets[index] for index in owned]) for owned in owners]
        self.start = [4.0 * 4**index for index in range(len(self.losses))]
        initialise(self.nets, self.optimizers, level, *self.start)

    def backward(self, index: int, iteration: int, fault: Fault | None = None, **options: Any) -> None:
        hit = None if fault is None or fault[:2] != (iteration, index) else self.nets[fault[2]].fc.weight
        reached, meant = self.losses[index]
        x = data(iteration + index) * (index + 1)
        loss = torch.stack([self.nets[model](x) for model in reached]).sum()
        backward(loss, [self.optimizers[o] for o in meant], index, hit, self.level, **options)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state(self) -> dict[Any, Any]:
        """Whose statistics are restored is tested with buffers."""
        return state(self.nets, self.optimizers, buffers=False)

    def scales(self) -> list[float]:
        return scales(self.optimizers[0], len(self.start))


@pairs(level=KINDS, delays=['', 'delay_unscale', 'delay_overflow_check'], how=CLEARS[1:3])
def test_accumulation_remembers_an_overflow_in_any_of_its_passes(level: str, delays: str, how: str) -> None:
    """Three passes a step, of which the second is skipped; apex forgot the overflows before the last pass."""
    for broken in (None, 0, 2):
        plain, run = Training(THREE_LOSSES, None), Training(THREE_LOSSES, level)
        for training, window in itertools.product((plain, run), range(3)):
            clear(how, training.optimizers, training.nets)
            for each, index in itertools.product(range(3), range(3)):
                fault = (3 * window + each, 2, 1) if (window, each) == (1, broken) else None
                training.backward(index, 3 * window + each, fault, **({delays: True} if delays and each < 2 else {}))
            if training is run or window != 1 or broken is None:
                training.step()
        assert run.state() == plain.state(), broken
        assert run.scales() == [4.0, 16.0, 64.0 if broken is None else 32.0]


@pytest.mark.parametrize('cleared', [True, False])
def test_gradients_at_an_optimizer_that_the_loss_is_not_for_are_unscaled(cleared: bool) -> None:
    for level in EXACT_LEVELS:
        plain, run = Training(GAN, None), Training(GAN, level)
        for iteration in range(3):
            for training in (plain, run):
                clear('optimizer', training.optimizers, training.nets)
                training.backward(0, iteration)
                if cleared:
                    training.optimizers[1].zero_grad()
                training.backward(1, iteration)
            assert [gradients(o) for o in run.optimizers] == [gradients(o) for o in plain.optimizers], level
            run.step()
            plain.step()
        assert run.state() == plain.state() and run.scales() == run.start, level


@pytest.mark.parametrize('cleared', [True, False])
def test_infinity_at_an_optimizer_that_the_loss_is_not_for_skips_that_one_alone(cleared: bool) -> None:
    """Unless it clears the gradient before; no scale falls, since the gradients that the loss is for are finite."""
    case: Case = ((0,), (1,), (2,)), (((0, 1, 2), (0, 2)), ((1,), (1,)), ((2,), (2,)))
    for level in EXACT_LEVELS:
        run = Training(case, level)
        before = run.state()
        run.backward(0, 0, (0, 0, 1))
        if cleared:
            run.optimizers[1].zero_grad()
        run.backward(1, 0)
        run.step()
        moved = {key[0] for key, value in run.state().items() if before.get(key) != value}
        assert moved == ({0, 1, 2} if cleared else {0, 2}) and run.scales() == run.start, level


def test_scale_grows_with_steps_where_the_first_optimizer_gets_no_gradients() -> None:
    """While its model is frozen, say."""
    for level in EXACT_LEVELS:
        nets = [Part().requires_grad_(False), Part(2)]
        optimizers = [sgd([net]) for net in nets]
        rule = dict(init_scale=8.0, growth_interval=2)
        amp.initialize(nets, optimizers, opt_level=level, loss_scale=rule, verbosity=0)
        for wanted in (8.0, 16.0, 16.0, 32.0):
            for _ in range(4):
                backward(nets[0](data(0)) + nets[1](data(0)), optimizers)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert scales(optimizers[0]) == [wanted], level


def test_two_optimizers_of_one_model_in_which_two_modules_share_a_weight() -> None:
    def train(at: str | None) -> dict[Any, Any]:
        nets = nn.ModuleList([Part(), Part(2)])
        nets[1].fc.weight = nets[0].fc.weight
        norms = [nets[0].norm.weight, nets[1].norm.weight]
        optimizers: list[Optimizer] = [SGD([nets[0].fc.weight], 0.25, 0.5), SGD(norms, 0.5, 0.5)]
        initialise([nets], optimizers, at, 4.0, 16.0)
        for index in range(3):
            clear('model', optimizers, [nets])
            for loss_id in range(2):
                backward(nets[0](data(index)) + nets[1](data(index + loss_id)), optimizers, loss_id, level=at)
            for optimizer in optimizers:
                optimizer.step()
        assert nets[0].fc.weight is nets[1].fc.weight
        return state([nets], optimizers)

    assert unlike_fp32(train) == []


@pytest.mark.parametrize('how', ['optimizer', 'model', 'None'])
def test_rows_of_sparse_embeddings_are_summed_and_an_infinity_in_one_is_found(how: str) -> None:
    def train(at: str | None) -> dict[Any, Any]:
        rows = nn.Embedding(6, 2, sparse=True, _weight=torch.arange(12.0).view(6, 2) / 4)
        optimizer = SGD(rows.parameters(), 0.25)
        initialise([rows], [optimizer], at, 4.0, 16.0)
        for index in range(4):
            clear(how, [optimizer], [rows])
            for each in range(2):
                x = data(index) * (torch.inf if at is not None and index == 1 and each == 0 else 1)
                backward((rows(torch.tensor([each, 2, 2, index])).float() * x).sum(), optimizer, each, level=at)
            assert all(p.grad is not None and p.grad.is_sparse for g in optimizer.param_groups for p in g['params'])
            if at is not None or index != 1:
                optimizer.step()
        assert at is None or scales(optimizer, 2) == [2.0, 16.0]
        return state([rows], [optimizer])

    assert unlike_fp32(train, ('O1', 'O2', 'O4', 'O5')) == []
