"""Ways to change weights behind the back of an optimizer: by loads, in place, and unseen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mmengine.model import ExponentialMovingAverage
from mmengine.runner.checkpoint import load_checkpoint, load_state_dict
from torch import Tensor, nn

# neither 16-bit type holds these numbers
FINE = 0.1 + torch.arange(12.0).reshape(3, 4) / 7


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {**model.state_dict(), 'fc.weight': FINE.clone()}


def _file(model: nn.Module, folder: Path) -> str:
    torch.save({'state_dict': _state(model)}, folder / 'weights.pth')
    return str(folder / 'weights.pth')


def _by_hand(model: Any, change: Callable[[Tensor], Any]) -> None:
    with torch.no_grad():
        change(model.fc.weight)


def _average(model: nn.Module) -> None:
    """What scripts without mmengine's hook do with an average: load it into the model."""
    average = ExponentialMovingAverage(model)
    with torch.no_grad():
        average.module.fc.weight.copy_(FINE)
    model.load_state_dict(average.module.state_dict())


# what is loaded arrives unrounded
LOADS: dict[str, Callable[[Any, Path], Any]] = {
    'model': lambda model, folder: model.load_state_dict(_state(model)),
    'model, assign': lambda model, folder: model.load_state_dict(_state(model), assign=True),
    'model, not strict': lambda model, folder: model.load_state_dict({'fc.weight': FINE}, strict=False),
    'submodule': lambda model, folder: model.fc.load_state_dict({'weight': FINE, 'bias': model.fc.bias.float()}),
    'submodule, assign': lambda model, folder: model.fc.load_state_dict(
        {'weight': FINE, 'bias': model.fc.bias.float()}, assign=True
    ),
    "mmengine's loader": lambda model, folder: load_state_dict(model, _state(model)),
    "mmengine's loader, a file": lambda model, folder: load_checkpoint(model, _file(model, folder)),
    'an average': lambda model, folder: _average(model),
}


# these write 16-bit numbers, and leave a trace
IN_PLACE: dict[str, Callable[[Any, Path], Any]] = {
    'copy_': lambda model, folder: _by_hand(model, lambda weight: weight.copy_(FINE)),
    'clamp_ and fill_': lambda model, folder: _by_hand(model, lambda weight: weight.fill_(3.0).clamp_(-0.3, 0.3)),
    'init': lambda model, folder: nn.init.constant_(model.fc.weight, 0.3),
    'vector_to_parameters of a view': lambda model, folder: _by_hand(model, lambda weight: weight[0].mul_(2.0)),
}


# these leave none
HIDDEN: dict[str, Callable[[Any, Path], Any]] = {
    '.data.copy_': lambda model, folder: model.fc.weight.data.copy_(FINE),
    '.data.clamp_': lambda model, folder: model.fc.weight.data.clamp_(-0.01, 0.01),
    '.data =': lambda model, folder: setattr(model.fc.weight, 'data', FINE.to(model.fc.weight.dtype)),
}
