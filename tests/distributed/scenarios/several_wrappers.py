"""Two wrappers: a GAN with a DDP for each network, and parts of one model that take turns."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from mmengine.model import BaseModel, MMSeparateDistributedDataParallel
from mmengine.optim import OptimWrapperDict
from torch import Tensor, nn

from amp_wrapper.checkpoint import amp_part
from scenarios.common import (
    HALF,
    Heads,
    Here,
    data,
    differs_somewhere,
    masters_of,
    optim_wrapper,
    same_on_all_ranks,
    scenario,
    wrap,
)


class Pair(BaseModel):
    """A generator and a discriminator, trained by turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.freezes = True

    def train_step(self, inputs: Tensor, wrappers: Any) -> dict[str, Tensor]:
        first, second = wrappers['discriminator'], wrappers['generator']
        with first.optim_context(self.discriminator):
            with torch.no_grad():
                fake = self.generator(inputs)
            real_loss = F.softplus(-self.discriminator(inputs)).mean()
            fake_loss = F.softplus(self.discriminator(fake)).mean()
        # as a user may: one backward pass for the sum of two losses
        first.update_params(real_loss + fake_loss)
        if self.freezes:
            self.discriminator.requires_grad_(False)
        with second.optim_context(self.generator):
            loss = F.softplus(-self.discriminator(self.generator(inputs))).mean()
        second.update_params(loss)
        if self.freezes:
            self.discriminator.requires_grad_(True)
        return dict(loss=loss.detach())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@scenario
def gan(here: Here) -> None:
    """Wrappers of different levels over the parts of one model, alternating, frozen by turns or not."""
    for pair in (('O2', 'O5'), ('O5', 'O0'), ('O1', 'O2'), ('O0', 'O0'), ('O2', 'O2')):
        for freezes in (True, False):
            model = MMSeparateDistributedDataParallel(Pair().to(here.device), find_unused_parameters=not freezes)
            net = model.module
            net.freezes = freezes
            wrappers = OptimWrapperDict(
                generator=optim_wrapper(net.generator.parameters(), pair[0], loss_scale=2.0**10, accumulative_counts=2),
                discriminator=optim_wrapper(net.discriminator.parameters(), pair[1], loss_scale=2.0**6),
            )
            wrappers.initialize_count_status(model, 0, 100)
            for name, level in zip(('generator', 'discriminator'), pair):
                kind = HALF.get(level, torch.float32)
                assert {p.dtype for p in getattr(net, name).parameters()} == {kind}, (pair, name)
            for step in range(5):
                model.train_step(data(here, step), wrappers)
                for wrapper in wrappers.values():
                    if not wrapper.in_window:
                        same_on_all_ranks(here, masters_of(wrapper), f'{pair} {freezes} masters')
            assert differs_somewhere(here, [data(here, 0)])
            # what the generator's loss left in the discriminator is an average, and goes into files on several ranks, too
            window = amp_part(wrappers['discriminator'].state_dict()).get('window')
            assert (window is None) == freezes, (pair, freezes)
            if window is not None:
                same_on_all_ranks(here, window['gradients'], f'{pair} window')
            counts = [wrapper.loss_scaler.counts[0].item() for wrapper in wrappers.values()]
            assert counts == [
                2 if wrappers['generator'].loss_scaler.checks else 0,
                5 if wrappers['discriminator'].loss_scaler.checks else 0,
            ]


@scenario
def turns(here: Here) -> None:
    """Two wrappers over one DDP, frozen by turns; one of them accumulates."""
    for level in ('O0', 'O1', 'O2', 'O5'):
        for find_unused in (False, True):
            for counts in (1, 2):
                net = Heads()
                model = wrap(here, net, find_unused_parameters=find_unused)
                wrappers = OptimWrapperDict(
                    g=optim_wrapper(net.g.parameters(), level, accumulative_counts=counts),
                    d=optim_wrapper(net.d.parameters(), level),
                )
                wrappers.initialize_count_status(model, 0, 100)
                # with find_unused_parameters nobody has to freeze
                for step in range(4):
                    for name in ('d', 'g'):
                        for part in ('d', 'g'):
                            getattr(net, part).requires_grad_(part == name or (find_unused and step > 1))
                        with wrappers[name].optim_context(model):
                            loss = model(data(here, step), use=name)['loss']
                        wrappers[name].update_params(loss)
                    same_on_all_ranks(here, wrappers['d'].master_params(), f'{level} {find_unused} {counts} d')
                    if not wrappers['g'].in_window:
                        same_on_all_ranks(here, wrappers['g'].master_params(), f'{level} {find_unused} {counts} g')
                assert differs_somewhere(here, [loss])
        # one loss through both, while the other accumulates
        net = Heads()
        model = wrap(here, net, find_unused_parameters=True)
        wrappers = OptimWrapperDict(
            g=optim_wrapper(net.g.parameters(), level, accumulative_counts=2),
            d=optim_wrapper(net.d.parameters(), level),
        )
        wrappers.initialize_count_status(model, 0, 100)
        for step in range(4):
            for name, use in (('g', 'g'), ('d', 'gd')):
                with wrappers[name].optim_context(model):
                    loss = model(data(here, step), use=use)['loss']
                wrappers[name].update_params(loss)
            same_on_all_ranks(here, wrappers['d'].master_params(), f'{level} crossing d')
            if step % 2:
                same_on_all_ranks(here, wrappers['g'].master_params(), f'{level} crossing g')
