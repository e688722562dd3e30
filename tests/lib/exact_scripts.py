"""Scripts of the functional API with exact numbers: models, passes, and the state that plain FP32 training must give.

For scripts with several optimizers, and for what the acts of ``play`` do not say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from play import EXACT_LEVELS, Part
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from amp_wrapper import amp

LEVELS = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')
#: The levels that cast weights and keep FP32 masters.
MASTERS = ('O2', 'O5')
#: One level of each kind: nothing, autocast, float16 weights with masters and a scale, bfloat16 weights.
KINDS = ('O0', 'O1', 'O2', 'O5')
#: Ways of scripts to clear gradients.
CLEARS = ('optimizer', 'optimizer, to zeros', 'model', 'None', 'model, to zeros')


class Curved(nn.Module):
    """A loss whose gradient depends on the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (0.5 * self.weight * self.weight * x).float().sum()


def sgd(parts: Iterable[Part]) -> Optimizer:
    """SGD with momentum and another rate for each part."""
    groups = [{'params': part.trained, 'lr': 0.25 / 2**index} for index, part in enumerate(parts)]
    return SGD(groups, lr=0.25, momentum=0.5)


def start(level: str | None, scale: Any = 8.0, **options: Any) -> tuple[Part, Optimizer]:
    """A model and its optimizer.

    Args:
        level: None for plain FP32 training.
        scale: A number is where the dynamic scale begins.
        options: More for ``amp.initialize``.
    """
    part = Part()
    optimizer = sgd([part])
    if level is not None:
        if isinstance(scale, float):
            scale = dict(init_scale=scale)
        amp.initialize(part, optimizer, opt_level=level, loss_scale=scale, **{'verbosity': 0, **options})
    return part, optimizer


def initialise(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], level: str | None, *scales: float) -> None:
    """Initialise several models, whose dynamic scales begin at ``scales``; plain FP32 training has no level."""
    if level is not None:
        words: dict[str, Any] = dict(num_losses=len(scales), loss_scale='dynamic', verbosity=0)
        amp.initialize(list(models), list(optimizers), opt_level=level, **words)
        set_scales(optimizers[0], *scales)


def backward(
    loss: Tensor, optimizers: Any, loss_id: int = 0, hit: Tensor | None = None, level: str | None = '', **options: Any
) -> None:
    """One backward pass in a block of its own.

    Args:
        loss: The loss.
        optimizers: Those that the loss is for.
        loss_id: Of the loss.
        hit: A weight whose gradient becomes infinite.
        level: None for plain FP32 training.
        options: More for ``amp.scale_loss``.
    """
    if level is None:
        loss.backward()
        return
    handle = None if hit is None else hit.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
    with amp.scale_loss(loss, optimizers, loss_id, **options) as scaled:
        scaled.backward()
    if handle is not None:
        handle.remove()


def clear(how: str, optimizers: Sequence[Optimizer], models: Sequence[nn.Module]) -> None:
    for optimizer in optimizers if how.startswith('optimizer') else ():
        optimizer.zero_grad(set_to_none='zeros' not in how)
    for model in models if how.startswith('model') else ():
        model.zero_grad(set_to_none='zeros' not in how)
    for parameter in [p for model in models for p in model.parameters()] if how == 'None' else ():
        parameter.grad = None


def state(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], buffers: bool = True) -> dict[Any, Any]:
    """FP32 weights, buffers and moments; each weight is checked to be its FP32 value, rounded.

    Buffers are of every forward pass, also of those that plain training leaves out.
    """
    found: dict[Any, Any] = {}
    for m, model in enumerate(models):
        saved = model.state_dict()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, saved[name].to(parameter.dtype)), f'{name} is not its FP32 value, rounded'
        found |= {(m, name): value.tolist() for name, value in saved.items()}
    for o, optimizer in enumerate(optimizers):
        for index, entry in optimizer.state_dict()['state'].items():
            # that of torch's own SGD counts no steps
            found |= {
                (o, index, key): value.tolist()
                for key, value in entry.items()
                if isinstance(value, Tensor) and (key != 'step' or 'exp_avg' in entry)
            }
    return {key: value for key, value in found.items() if buffers or key[-1] not in ('total', 'count')}


def unlike(ours: tuple[nn.Module, Optimizer], theirs: tuple[nn.Module, Optimizer]) -> list[Any]:
    """Keys of the states of two trainings that differ, without buffers."""
    found, wanted = (state([model], [optimizer], buffers=False) for model, optimizer in (ours, theirs))
    return [key for key in wanted if found.get(key) != wanted[key]]


def unlike_fp32(train: Callable[[str | None], Any], levels: Iterable[str] = EXACT_LEVELS) -> list[str]:
    """The levels at which what ``train`` returns is not what it returns without mixed precision."""
    wanted = train(None)
    return [level for level in levels if train(level) != wanted]


def gradients(optimizer: Optimizer) -> list[Any]:
    """Of what it steps, unscaled."""
    return [None if p.grad is None else p.grad.tolist() for p in amp.master_params(optimizer)]


def scales(optimizer: Optimizer, losses: int = 1) -> list[float]:
    return [amp.loss_scale(optimizer, loss_id) for loss_id in range(losses)]


def set_scales(optimizer: Optimizer, *values: float) -> None:
    state = {f'loss_scaler{i}': {'loss_scale': value, 'unskipped': 0} for i, value in enumerate(values)}
    amp.load_state_dict(state, optimizers=optimizer)
