"""A layer whose 16-bit result a function is given, inside of a forward of either API at any level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from amp_wrapper import AmpOptimWrapper, amp

APIS = ['amp', 'wrapper']
#: The levels that compute in 16-bit, and in which type.
TYPES = {
    'O1': torch.float16,
    'O2': torch.float16,
    'O3': torch.float16,
    'O4': torch.bfloat16,
    'O5': torch.bfloat16,
}


class Inside(nn.Module):
    """Calls ``body`` with the result of a layer; ``seen`` is what it gave, before the outputs are cast."""

    def __init__(self, body: Callable[[Tensor], Any], *parts: nn.Module, size: int = 8) -> None:
        super().__init__()
        self.layer, self.parts, self.body = nn.Linear(size, size), nn.ModuleList(parts), body
        self.given: Any = None
        self.seen: Any = None

    def forward(self, x: Tensor) -> Any:
        self.given = self.layer(x)
        self.seen = self.body(self.given)
        return self.seen


def forward(model: nn.Module, x: Tensor, level: str, api: str, verbosity: int = 0) -> Any:
    """The model's result, prepared for a level and called once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if api == 'amp':
        prepared: Any = amp.initialize(model, optimizer, opt_level=level, verbosity=verbosity, loss_scale=1.0)[0]
        return prepared(x)
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=optimizer, verbosity=verbosity, loss_scale=1.0)
    with wrapper.optim_context(model):
        return model(x)


def inside(body: Callable[[Tensor], Any], level: str, api: str = 'amp', size: int = 8) -> Inside:
    """A model that has called ``body`` once."""
    torch.manual_seed(0)
    model = Inside(body, size=size)
    forward(model, torch.randn(size, size), level, api)
    return model
