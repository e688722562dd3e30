"""Resuming sharded training from shards: every level, kind of optimizer, clipping, accumulation and average, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import torch
from bits import differences
from mmengine.model import ExponentialMovingAverage
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import amp_wrapper
from amp_wrapper import AmpOptimWrapper, FusedSGD
from amp_wrapper.checkpoint import sharded
from amp_wrapper.openmmlab.sharding import MMFullyShard
from amp_wrapper.policy import LEVELS, resolve
from scenarios.common import Here, scenario
from scenarios.fsdp import Net, adamw, assembled, data, mesh_of, our_fused, our_sgd


def sgd_in_bf16(parameters: Any) -> Any:
    return FusedSGD(parameters, lr=0.1, momentum=0.9, state_dtype='bfloat16')


KINDS = (our_fused, adamw, our_sgd)
CLIPS: tuple[Any, ...] = (None, dict(max_norm=0.5), dict(type='value', clip_value=0.01))
Case = tuple[str, Any, Any, int, bool]


class Small(nn.Module):
    """A group in 16-bit and one in FP32; few, for there are many cases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.head = nn.Conv2d(3, 7, 3, bias=False), nn.BatchNorm2d(7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.bn(self.conv(x)).relu().mean((2, 3)))
        return out


class Run:
    """A training whose state can be saved and loaded."""

    def __init__(self, here: Here, case: Case) -> None:
        level, kind, clip, counts, averages = case
        self._here, self._counts = here, counts
        self.net: Any = Small().to(here.device)
        self.average = ExponentialMovingAverage(self.net, momentum=0.1) if averages else None
        model = MMFullyShard(self.net, reshard_after_forward=counts == 1)
        optimizer = kind(self.net.parameters())
        # grows and falls within the run
        scale = dict(init_scale=2.0**18, growth_interval=1) if level in ('O1', 'O2') else None
        self.wrapper = AmpOptimWrapper(
            optimizer=optimizer,
            opt_level=level,
            clip_grad=clip,
            accumulative_counts=counts,
            loss_scale=scale,
            verbosity=0,
        )
        model.shard(resolve(level), [optimizer], self.average)
        self.wrapper.attach(self.net)

    def train(self, steps: range) -> list[float]:
        return self.micro(range(steps.start * self._counts, steps.stop * self._counts))

    def micro(self, numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            x, y = data(self._here, number)
            with self.wrapper.optim_context(self.net):
                loss = F.cross_entropy(self.net(x), y)
            self.wrapper.update_params(loss)
            losses.append(float(loss))
            if self.average is not None and (number + 1) % self._counts == 0:
                self.average.update_parameters(self.net)
        return losses

    def state(self) -> dict[str, Any]:
        state = {'state_dict': self.net.state_dict(), 'optimizer': self.wrapper.state_dict()}
        return state if self.average is None else {**state, 'ema_state_dict': self.average.state_dict()}

    def load(self, path: Any, buffers: dict[str, Any]) -> None:
        parameters = list(self.net.parameters())
        named = dict(self.net.named_parameters())

        def like(name: str) -> Any:
            part, key = name.split('/', 1)
            if part == 'optimizer':
                parts = key.split('/')
                return parameters[int(parts[-1] if 'window' in parts else parts[1])]
            return named[key.removeprefix('module.')]

        found = sharded.load(path, like)
        # those of rank 0 are in the folder
        self.net.load_state_dict({**found['state_dict'], **buffers})
        self.wrapper.load_state_dict(found['optimizer'])
        if self.average is not None:
            self.average.load_state_dict(found['ema_state_dict'])

    def whole(self) -> dict[str, Any]:
        def walk(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: walk(item) for key, item in value.items()}
            if isinstance(value, (list, tuple)):
                return [walk(item) for item in value]
            return value.full_tensor() if isinstance(value, DTensor) else value

        found: dict[str, Any] = walk(self.state())
        return {**found, 'state_dict': assembled(self.net)}


@scenario
def fsdp_resume_grid(here: Here) -> None:
    """Two steps in one run, or one, saved, one: weights, averages, moments, scales, counters and losses have the same bits."""
    cases = list(itertools.product(LEVELS, KINDS, CLIPS, (1, 3), (False, True)))
    cases += itertools.product(('O2', 'O5'), (sgd_in_bf16,), CLIPS[:1], (1, 3), (False,))
    chosen = cases[:: 19 if 'quick' in here.words else 1]
    for number, case in enumerate(chosen):
        whole = Run(here, case)
        whole.train(range(1))
        folder = here.folder / f'{number}'
        pending = sharded.begin(whole.state(), folder, asynchronous=bool(number % 2))
        buffers = {
            name: value.clone() for name, value in whole.net.state_dict().items() if not isinstance(value, DTensor)
        }
        losses = whole.train(range(1, 2))
        pending.finish()
        again = Run(here, case)
        if number % 3 == 0:
            # what is there is replaced
            again.train(range(5, 6))
        again.load(folder, buffers)
        assert again.train(range(1, 2)) == losses, case
        assert differences(again.whole(), whole.whole()) == [], case
    if 'quick' not in here.words:
        assert len(chosen) == 6 * 3 * 3 * 2 * 2 + 4
    assert torch.distributed.get_world_size() == here.world


@scenario
def fsdp_windows(here: Here) -> None:
    """Saved in the middle of an accumulation: gradients of shards are averages, so they are in the checkpoint."""
    levels = ('O2', 'O4') if 'quick' in here.words else ('O0', 'O2', 'O4', 'O5')
    for level, kind in itertools.product(levels, (our_fused, adamw)):
        case: Case = (level, kind, dict(type='value', clip_value=0.01), 3, False)
        for done in (1, 2):
            whole, again = Run(here, case), Run(here, case)
            for run in (whole, again):
                run.wrapper.initialize_count_status(run.net, 0, 100)
            whole.train(range(1))
            whole.micro(range(3, 3 + done))
            folder = here.folder / f'{level}_{kind.__name__}_{done}'
            sharded.save(whole.state(), folder)
            buffers = {n: v.clone() for n, v in whole.net.state_dict().items() if not isinstance(v, DTensor)}
            again.load(folder, buffers)
            for run in (whole, again):
                run.micro(range(3 + done, 9))
            assert differences(again.whole(), whole.whole()) == [], case


@scenario
def fsdp_windows_of_others(here: Here) -> None:
    """A file that one process has saved in the middle of an accumulation goes on sharded: its gradients are laid out."""
    for level in ('O0', 'O2', 'O5'):
        for losses in (1, 2):
            net: Any = Net().to(here.device)
            one = AmpOptimWrapper(
                optimizer=our_sgd(net.parameters()),
                opt_level=level,
                accumulative_counts=2,
                num_losses=losses,
                loss_scale=8.0,
                verbosity=0,
            )
            one.initialize_count_status(net, 0, 100)
            x, y = data(here, 0, rank=0)
            with one.optim_context(net):
                loss = F.cross_entropy(net(x), y)
            one.backward(one.scale_loss(loss))
            gradients = [p.grad for p in one.master_params()] if losses > 1 else [p.grad for p in net.parameters()]
            expected = [g.detach().float().clone() for g in gradients if g is not None]
            # as a single process saves it
            with mock.patch('amp_wrapper.engine.state.has_several_processes', return_value=False):
                saved = one.state_dict()
            mine: Any = amp_wrapper.fully_shard(Net().to(here.device), level, mesh=mesh_of(here))
            wrapper = AmpOptimWrapper(
                optimizer=our_sgd(mine.parameters()),
                opt_level=level,
                accumulative_counts=2,
                num_losses=losses,
                loss_scale=8.0,
                verbosity=0,
            )
            wrapper.load_state_dict(saved)
            wrapper.initialize_count_status(mine, 1, 100)
            found = [p.grad for p in wrapper.optimizer.param_groups[0]['params']]
            assert all(isinstance(gradient, DTensor) for gradient in found)
            assert differences([gradient.full_tensor().float() for gradient in found], expected) == [], (level, losses)
            with wrapper.optim_context(mine):
                loss = F.cross_entropy(mine(x), y)
            wrapper.update_params(loss)
            assert not wrapper.step_was_skipped()
