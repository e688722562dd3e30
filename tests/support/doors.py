"""A model behind each of the two public doors: the functional API and the optimizer wrapper of mmengine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from amp_wrapper import AmpOptimWrapper, amp
from amp_wrapper.policy import LEVELS, resolve

DOORS = ('amp', 'wrapper')
#: The levels whose weights are 16-bit.
CAST_LEVELS = tuple(level for level in LEVELS if resolve(level).casts_model)


def behind(door: str, model: nn.Module, level: str, **options: Any) -> Callable[..., Any]:
    """What calls the model as a training step of that door does; ``verbosity`` is 0 where it is not given."""
    options = {'verbosity': 0, **options}
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad] or [nn.Parameter(torch.ones(1))], lr=0.1
    )
    if door == 'amp':
        amp.initialize(model, opt_level=level, **options)
        return model
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=optimizer, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        with wrapper.optim_context(model):
            return model(*args, **kwargs)

    return call
