"""Modules with buffers of every kind, and a training with either interface, for tests of skipped steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from bits import same_bits
from torch import Tensor, nn

from amp_wrapper import AmpOptimWrapper, amp
from amp_wrapper.engine.buffers import copies

NAN = math.nan


class Probe(nn.Module):
    """Buffers of many kinds, changed in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('mean', torch.zeros(3))
        self.register_buffer('count', torch.tensor(0))
        self.register_buffer('small', torch.zeros(2, dtype=torch.int8))
        self.register_buffer('flag', torch.tensor(False))
        self.register_buffer('wide', torch.zeros(2, dtype=torch.float64))
        self.register_buffer('phase', torch.zeros(2, dtype=torch.complex64))
        self.register_buffer('phases', torch.zeros(2, dtype=torch.complex128))
        self.register_buffer('replaced', torch.ones(3))
        self.register_buffer('through_data', torch.ones(3))
        self.register_buffer('passing', torch.zeros(1), persistent=False)
        self.register_buffer('channels_last', torch.zeros(1, 2, 3, 3).contiguous(memory_format=torch.channels_last))
        self.register_buffer('part', self.mean[1:])
        self.register_buffer('again', self.count)
        self.register_buffer('strided', torch.zeros(6)[::2])
        self.register_buffer('constant', torch.arange(4.0))
        self.register_buffer('large', torch.zeros(copies.LARGE // 4 + 1))
        self.register_buffer('nothing', torch.zeros(0))
        self.register_buffer('absent', None)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            value = x.float().mean()
            self.mean.mul_(0.5).add_(value)
            self.count += 1
            self.small.add_(3)
            self.flag.logical_not_()
            self.wide[0] += value
            self.phase += 1j * value
            self.phases += value
            self.replaced = self.replaced * 0.5 + value
            self.through_data.data.add_(value)
            self.passing.fill_(value)
            self.channels_last[:, 1] += value
            self.strided.add_(value)
            self.large[0] += value
        return x


class Around(nn.Module):
    """A module with buffers among weights that train."""

    def __init__(self, part: nn.Module, *more: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.part = part
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        result = self.part(x, *(value.to(x.device) for value in self.more))
        if not isinstance(result, Tensor):
            result = result.loss
        # no channel goes around what the test puts into x
        return result.float().sum() * self.scale.float().sum() + x.float().sum() * self.scale.float().sum()


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: buffer.detach().clone() for name, buffer in model.named_buffers(remove_duplicate=False) if buffer.numel()
    }


def changed(before: dict[str, Tensor], model: nn.Module) -> list[str]:
    now = snapshot(model)
    assert now.keys() == before.keys()
    return [name for name in now if not same_bits(now[name], before[name])]


class Scripted:
    """A wrapper and the functional API under one face."""

    def __init__(self, api: str, level: str, model: nn.Module, kind: Any = torch.optim.SGD, **words: Any) -> None:
        self.model = model
        self.optimizer = kind(model.parameters(), lr=2.0**-6)
        self.wrapper = None
        if api == 'wrapper':
            words = {'skip_nonfinite': True, 'loss_scale': dict(init_scale=1.0), **words}
            self.wrapper = AmpOptimWrapper(opt_level=level, optimizer=self.optimizer, verbosity=0, **words)
            self.wrapper.attach(model)
        else:
            # without a dynamic scale, O0 checks nothing
            words = {'loss_scale': dict(init_scale=1.0), **words}
            amp.initialize(model, self.optimizer, opt_level=level, verbosity=0, **words)

    def forward(self, x: Tensor | tuple[Tensor, ...], call: Callable[..., Tensor] | None = None) -> Tensor:
        call = self.model if call is None else call
        given = (x,) if isinstance(x, Tensor) else x
        if self.wrapper is None:
            return call(*given)
        with self.wrapper.optim_context(self.model):
            return call(*given)

    def backward(self, loss: Tensor) -> None:
        if self.wrapper is not None:
            self.wrapper.backward(loss)
            return
        with amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()

    def step(self) -> None:
        self.optimizer.step() if self.wrapper is None else self.wrapper.step()
        self.optimizer.zero_grad() if self.wrapper is None else self.wrapper.zero_grad()

    def train(
        self, *batches: Tensor | tuple[Tensor, ...], call: Callable[..., Tensor] | None = None, steps: bool = True
    ) -> None:
        """One step over some batches."""
        for x in batches:
            self.backward(self.forward(x, call).float().sum())
        if steps:
            self.step()


APIS = ('wrapper', 'functional')


def batch(shape: tuple[int, ...], device: torch.device, bad: bool = False, seed: int = 0) -> Tensor:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.25 + seed
    if bad:
        x.view(-1)[0] = NAN
    return x.to(device)


def hooks_of(module: nn.Module) -> list[Any]:
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('count', torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x
