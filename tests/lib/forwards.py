"""A model that calls any function in its forward, behind each of the two public doors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from amp_wrapper import AmpOptimWrapper, amp

LEVELS = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')
#: The levels that compute in 16-bit, and in which type.
HALF = {'O1': torch.float16, 'O2': torch.float16, 'O3': torch.float16, 'O4': torch.bfloat16, 'O5': torch.bfloat16}
#: Those that cast op by op, and those whose weights are 16-bit.
PER_OP, CAST = ('O1', 'O4'), ('O2', 'O3', 'O5')
DOORS = ('amp', 'wrapper')


def prepared(model: nn.Module, level: str, door: str = 'amp', **options: Any) -> Callable[..., Any]:
    """What calls the model as a training step behind that door does; ``verbosity`` is 0 where it is not given."""
    options = {'verbosity': 0, 'loss_scale': 1.0, **options}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if door == 'amp':
        amp.initialize(model, optimizer, opt_level=level, **options)
        return model
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=optimizer, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        with wrapper.optim_context(model):
            return model(*args, **kwargs)

    return call


class Inside(nn.Module):
    """Calls ``body`` with the result of a layer: of 16 bits at the levels that compute so.

    Attributes:
        given: That result.
        seen: What ``body`` returned, before the outputs are cast.
    """

    def __init__(self, body: Callable[[Tensor], Any], size: int = 4) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(size, size), body
        self.given: Any = None
        self.seen: Any = None

    def forward(self, x: Tensor) -> Any:
        self.given = self.layer(x)
        self.seen = self.body(self.given)
        return self.seen


class Forwards:
    """One model for each level and door, whose forward calls what it is handed: a pass costs less than a new model.

    Args:
        door: Behind which the models are. Without one, odd levels are behind the one and even levels behind the other.
    """

    def __init__(self, door: str = '') -> None:
        self._models: dict[tuple[str, str], tuple[Inside, Callable[..., Any]]] = {}
        self._door = door

    def __call__(self, level: str, body: Callable[..., Any], *args: Any, door: str = '') -> Inside:
        """The model that has called ``body`` once: with ``args``, or with the result of a layer, each time the same."""
        door = door or self._door or DOORS[int(level[1]) % 2]
        if (level, door) not in self._models:
            torch.manual_seed(0)
            model = Inside(body)
            self._models[level, door] = model, prepared(model, level, door)
        model, call = self._models[level, door]
        model.body = (lambda _: body(*args)) if args else body
        call(torch.linspace(-2, 2, 16).sin().reshape(4, 4))
        return model
