"""Buffers of models with several optimizers: whichever skips, its forward passes alone are undone."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from mmengine.optim import OptimWrapperDict
from torch import Tensor, nn
from toy_buffers import Around, Counter, Probe, Scripted, batch, changed, snapshot

from amp_wrapper import AmpOptimWrapper, amp
from amp_wrapper.optim import FusedAdamW
from amp_wrapper.policy import LEVELS, resolve

NAN = math.nan


# -- several optimizers ----------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = Around(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Counter()))
        self.discriminator = Around(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Counter()))
        self.frozen = nn.BatchNorm1d(3).requires_grad_(False)


class Game:
    """A generator and a discriminator, through either API."""

    def __init__(self, api: str, levels: tuple[str, str], device: torch.device) -> None:
        self.model = Pair().to(device)
        self.optimizers = {
            name: torch.optim.SGD(getattr(self.model, name).parameters(), lr=2.0**-8)
            for name in ('generator', 'discriminator')
        }
        self.wrappers = None
        if api == 'wrapper':
            members = {
                name: AmpOptimWrapper(
                    opt_level=level, optimizer=optimizer, verbosity=0, skip_nonfinite=True, loss_scale=1.0
                )
                for level, (name, optimizer) in zip(levels, self.optimizers.items())
            }
            self.wrappers = OptimWrapperDict(**members)
            self.wrappers.initialize_count_status(self.model, 0, 10)
        else:
            words = dict(opt_level=levels[0], verbosity=0, loss_scale=dict(init_scale=1.0))
            parts = [self.model.generator, self.model.discriminator]
            if api == 'one session':
                amp.initialize(parts, list(self.optimizers.values()), num_losses=2, **words)
            else:
                for part, optimizer in zip(parts, self.optimizers.values()):
                    amp.initialize(part, optimizer, **words)
        self.one = api == 'one session'

    @contextmanager
    def context(self, name: str) -> Iterator[None]:
        if self.wrappers is None:
            yield
            return
        with self.wrappers[name].optim_context(self.model):
            yield

    def update(self, name: str, loss: Tensor) -> None:
        if self.wrappers is not None:
            self.wrappers[name].update_params(loss)
            for wrapper in self.wrappers.values():
                # what the loss brought to the other one
                wrapper.zero_grad()
            return
        optimizer = self.optimizers[name]
        loss_id = int(name == 'discriminator') if self.one else 0
        with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
            scaled.backward()
        optimizer.step()
        for each in self.optimizers.values():
            each.zero_grad()

    def fake(self, x: Tensor) -> Tensor:
        return self.model.generator.part(x).float()

    def judge(self, x: Tensor) -> Tensor:
        return self.model.discriminator.part(x).float().square().sum() * self.model.discriminator.scale.float().sum()

    def counts(self) -> tuple[int, int]:
        return int(self.model.generator.part[2].count), int(self.model.discriminator.part[2].count)

    def play(self, x: Tensor, bad: str = '', again: bool = False) -> None:
        with self.context('discriminator'):
            fake = self.fake(x)
            loss = self.judge(x) + self.judge(fake.detach())
        self.update('discriminator', loss * (NAN if 'd' in bad else 1))
        with self.context('generator'):
            if again:
                # as long as somebody holds it, a loss may come
                del fake
                fake = self.fake(x)
            loss = self.judge(fake) * self.model.generator.scale.float().sum()
        self.update('generator', loss * (NAN if 'g' in bad else 1))


PLAYS = [
    ('wrapper', ('O1', 'O1')),
    ('wrapper', ('O2', 'O2')),
    ('wrapper', ('O5', 'O0')),
    ('wrapper', ('O3', 'O4')),
    ('one session', ('O0', 'O0')),
    ('one session', ('O1', 'O1')),
    ('one session', ('O2', 'O2')),
    ('one session', ('O5', 'O5')),
    ('two sessions', ('O2', 'O2')),
    ('two sessions', ('O4', 'O4')),
]


@pytest.mark.parametrize(('api', 'levels'), PLAYS)
@pytest.mark.parametrize('again', [False, True])
def test_a_game_of_two_optimizers(api: str, levels: tuple[str, str], again: bool, device: torch.device) -> None:
    """Each step gives back what its own passes did, those through the modules of the other included, and nothing else."""
    game = Game(api, levels, device)
    x = batch((4, 3), device)
    g, d = (2 if again else 1), 3
    game.play(x, again=again)
    assert game.counts() == (g, d)
    game.play(x, bad='d', again=again)
    # the passes for the discriminator's loss, and the generator's that was made anew
    first = game.counts()
    assert first == (2 * g - again, 2 * d - 2)
    game.play(x, bad='g', again=again)
    game.play(x, again=again)
    # of the bad game, what was done for the discriminator's loss is left
    second = (first[0] + again + g, first[1] + 2 + d)
    assert game.counts() == second
    game.play(x, bad='dg', again=again)
    game.play(x, again=again)
    assert game.counts() == (second[0] + g, second[1] + d)
    # NaN that comes through the generator itself
    game.play(batch((4, 3), device, bad=True), again=again)
    game.play(x, again=again)
    for buffer in game.model.buffers():
        assert not buffer.isnan().any()
    assert game.counts() == (second[0] + 2 * g, second[1] + 2 * d)


@pytest.mark.parametrize('api', ['wrapper', 'one session', 'two sessions'])
@pytest.mark.parametrize('level', LEVELS)
def test_a_skip_of_one_while_the_other_accumulates(level: str, api: str, device: torch.device) -> None:
    """Passes that a loss has made use of are for its own optimizer to give back."""
    game = Game(api, (level, level), device)
    x = batch((4, 3), device)
    discriminator, generator = game.optimizers['discriminator'], game.optimizers['generator']

    def backward(name: str, loss: Tensor) -> None:
        if game.wrappers is not None:
            game.wrappers[name].backward(loss)
            return
        loss_id = int(name == 'discriminator') if game.one else 0
        with amp.scale_loss(loss, game.optimizers[name], loss_id=loss_id) as scaled:
            scaled.backward()

    def step(name: str) -> None:
        owner = game.optimizers[name] if game.wrappers is None else game.wrappers[name]
        owner.step()
        owner.zero_grad()

    for _ in range(2):
        with game.context('discriminator'):
            loss = game.judge(x)
        backward('discriminator', loss)
        with game.context('generator'):
            # of the generator alone
            loss = game.fake(x).sum() * game.model.generator.scale.float().sum() * NAN
        backward('generator', loss)
        step('generator')
    assert game.counts() == (0, 2)
    step('discriminator')
    assert game.counts() == (0, 2)
    assert all(p.isfinite().all() for o in (discriminator, generator) for g in o.param_groups for p in g['params'])


@pytest.mark.parametrize('level', LEVELS)
def test_one_loss_and_two_optimizers(level: str, device: torch.device) -> None:
    model = Around(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Counter())).to(device)
    # the module's weights belong to one, the model's scale to the other
    optimizers = [torch.optim.SGD(model.part.parameters(), lr=0.01), torch.optim.SGD([model.scale], lr=0.01)]
    amp.initialize(model, optimizers, opt_level=level, loss_scale=dict(init_scale=1.0), verbosity=0)
    before = snapshot(model)
    for bad in (True, False, True):
        with amp.scale_loss(model(batch((4, 3), device, bad)), optimizers) as scaled:
            scaled.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if not bad:
            before = snapshot(model)
            assert model.part[2].count == 1
        assert changed(before, model) == []


@pytest.mark.parametrize('level', LEVELS)
def test_a_wrapper_that_checks_nothing_is_left_alone(level: str, device: torch.device) -> None:
    model = Pair().to(device)
    wrappers = OptimWrapperDict(
        generator=AmpOptimWrapper(
            opt_level=level,
            optimizer=torch.optim.SGD(model.generator.parameters(), lr=0.01),
            verbosity=0,
            skip_nonfinite=True,
        ),
        discriminator=AmpOptimWrapper(
            opt_level='O0', optimizer=torch.optim.SGD(model.discriminator.parameters(), lr=0.01), verbosity=0
        ),
    )
    wrappers.initialize_count_status(model, 0, 10)
    with wrappers['generator'].optim_context(model):
        x = model.frozen(batch((4, 3), device, bad=True))
        loss = model.generator(x) + model.discriminator(x)
    wrappers['generator'].update_params(loss)
    assert model.generator.part[2].count == 0
    assert not model.generator.part[1].running_mean.isnan().any()
    # nobody steps its weights: it belongs to whoever steps any of the model
    assert model.frozen.num_batches_tracked == 0
    assert model.discriminator.part[2].count == 1


@pytest.mark.parametrize('kind', [torch.optim.SGD, torch.optim.AdamW, FusedAdamW, 'fused'])
@pytest.mark.parametrize('level', LEVELS)
def test_kinds_of_optimizers(level: str, kind: Any, device: torch.device) -> None:
    model = Around(nn.Sequential(nn.BatchNorm1d(3), Probe())).to(device)
    if kind == 'fused':
        if resolve(level).casts_model and not resolve(level).master_weights:
            pytest.skip('torch steps no 16-bit weights fused on every device')
        kind = functools.partial(torch.optim.AdamW, fused=True)
    if kind is not torch.optim.SGD:
        # float16 has no 1e-8
        kind = functools.partial(kind, eps=1e-4)
    run = Scripted('wrapper', level, model, kind, clip_grad=dict(max_norm=1.0))
    run.train(batch((4, 3), device))
    before = snapshot(model)
    run.train(batch((4, 3), device, bad=True))
    assert changed(before, model) == []
    run.train(batch((4, 3), device))
    assert model.part[1].count == 2
