"""Weights, gradients and torch's own optimizers beside the fused ones."""

from __future__ import annotations

import pytest
import torch
from bits import bits
from torch import Tensor, nn

from amp_wrapper import FusedAdam, FusedAdamW, FusedSGD

#: What torch's Adam has in its groups from 2.7 on, and ours always.
NEWER = set() if 'decoupled_weight_decay' in torch.optim.Adam([torch.ones(1)]).defaults else {'decoupled_weight_decay'}
THEIRS = {FusedAdam: torch.optim.Adam, FusedAdamW: torch.optim.AdamW, FusedSGD: torch.optim.SGD}
MOMENTUM = dict(lr=0.1, momentum=0.9)
#: One of each kind of state.
KINDS = [(FusedAdam, {}), (FusedAdamW, dict(amsgrad=True)), (FusedSGD, dict(lr=0.1)), (FusedSGD, MOMENTUM)]
#: torch's fused CPU kernels are vectorised in sixteens; their tails are rounded otherwise.
SHAPES = ((16,), (4, 16), (2, 3, 16))


options = pytest.mark.parametrize(
    ('cls', 'kwargs'), KINDS, ids=['adam', 'adamw-amsgrad', 'sgd', 'sgd-momentum'], scope='module'
)


def weights(device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    real = dtype if not dtype.is_complex else torch.complex64
    return [nn.Parameter(torch.randn(shape, generator=draw, dtype=real).to(device, dtype)) for shape in SHAPES]


def give(parameters: list[nn.Parameter], seed: int, scale: float = 1.0, bad: float | None = None) -> None:
    """The same gradients for the same seed."""
    draw = torch.Generator().manual_seed(1000 + seed)
    for parameter in parameters:
        real = torch.float32 if not parameter.is_complex() else torch.complex64
        gradient = torch.randn(parameter.shape, generator=draw, dtype=real) * scale
        if bad is not None:
            gradient.view(-1)[0] = bad
        parameter.grad = gradient.to(parameter.device, parameter.dtype)


def snapshot(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All bits of weights and of what would be saved."""
    saved = optimizer.state_dict()['state']
    return [
        bits(t).clone() for t in [*(p.detach() for p in parameters), *(v for s in saved.values() for v in s.values())]
    ]
