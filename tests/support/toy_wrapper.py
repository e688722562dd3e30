"""A small model and one step of it with a wrapper, without a runner."""

from __future__ import annotations

from typing import Any

import torch
from mmengine.optim import OptimWrapper, OptimWrapperDict
from torch import Tensor, nn

from amp_wrapper import (
    AmpOptimWrapper,
)

SGD = dict(type='SGD', lr=0.1, momentum=0.9)


def wrap(model: nn.Module, **words: Any) -> AmpOptimWrapper:
    words.setdefault('optimizer', torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return AmpOptimWrapper(**words)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def one_step(model: nn.Module, wrapper: OptimWrapper, batch: Tensor | None = None, factor: float = 1.0) -> Tensor:
    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(3)) if batch is None else batch
    with wrapper.optim_context(model):
        loss = model(batch.to(next(model.parameters()).device)).float().square().mean() * factor
    wrapper.update_params(loss)
    return loss.detach()


def two_wrappers(counts: int = 1) -> tuple[nn.Module, OptimWrapperDict]:
    torch.manual_seed(0)
    model = nn.ModuleDict(dict(g=nn.Linear(4, 4), d=nn.Linear(4, 1)))
    words = dict(opt_level='O2', accumulative_counts=counts, loss_scale=64.0)
    return model, OptimWrapperDict(**{k: wrap(model[k], **words) for k in ('g', 'd')})


def turn(model: nn.Module, wrappers: OptimWrapperDict, index: int) -> None:
    batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(index))
    for key in ('d', 'g'):
        with wrappers[key].optim_context(model):
            loss = model['d'](model['g'](batch)).square().mean()
        grads = [p.grad for p in model['g' if key == 'd' else 'd'].parameters()]
        wrappers[key].update_params(loss)
        for p, grad in zip(model['g' if key == 'd' else 'd'].parameters(), grads):
            p.grad = grad
