"""A small network trained through either door, with access to all that a step may change, for tests of single steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from amp_wrapper import AmpOptimWrapper, amp

LEVELS = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')
#: The type of the weights at the levels that cast them.
CAST = {'O2': torch.float16, 'O3': torch.float16, 'O5': torch.bfloat16}
MASTERED = ('O2', 'O5')
#: Levels whose gradients carry a loss scale by default.
SCALED = ('O1', 'O2')


class Net(nn.Module):
    """Weights that levels cast, a BatchNorm that stays FP32."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 32)
        self.bn: nn.Module = nn.BatchNorm1d(32) if norm else nn.Identity()
        # sizes that are multiples of 16: what lies behind them, kernels of torch round in another way
        self.out = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.bn(self.fc(x)).relu())


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.125, momentum=0.5)


def batch(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(100 + index)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 16, generator=generator)


class Training:
    """A model and its optimizer, with a wrapper or in a script of the functional API.

    Args:
        level: Of both doors.
        door: 'wrapper' or 'amp'.
        make: The optimizer, from its parameters.
        model: A :class:`Net` by default.
        attach: Whether the wrapper takes the model over at once.
        options: For the wrapper or ``amp.initialize``.
    """

    def __init__(
        self,
        level: str = 'O2',
        door: str = 'wrapper',
        make: Callable[[Any], Optimizer] = momentum,
        model: nn.Module | None = None,
        attach: bool = True,
        **options: Any,
    ) -> None:
        torch.manual_seed(3)
        self.model: Any = Net() if model is None else model
        self.optimizer = make(self.model.parameters())
        self.losses = options.get('num_losses', 1)
        self.wrapper: Any = None
        options = {'opt_level': level, 'verbosity': 0, **options}
        if door == 'amp':
            amp.initialize(self.model, self.optimizer, **options)
            return
        self.wrapper = AmpOptimWrapper(optimizer=self.optimizer, **{'max_consecutive_skips': None, **options})
        if attach:
            self.wrapper.attach(self.model)

    def forward(self, *inputs: Tensor, call: Callable[..., Tensor] | None = None) -> Tensor:
        call = call or self.model
        if self.wrapper is None:
            return call(*inputs)
        with self.wrapper.optim_context(self.model):
            return call(*inputs)

    def loss(self, index: int = 0, loss_id: int = 0) -> Tensor:
        x, y = batch(index)
        output = self.forward(x).float()
        return output.square().mean() / 2 if loss_id else (output - y).square().mean()

    def backward(self, loss: Tensor, loss_id: int = 0, **words: Any) -> None:
        if self.wrapper is not None:
            self.wrapper.backward(loss, loss_id, **words)
            return
        with amp.scale_loss(loss, self.optimizer, loss_id) as scaled:
            scaled.backward(**words)

    def passes(self, *indices: int) -> None:
        """Forward and backward passes of all losses."""
        for index in indices:
            for loss_id in range(self.losses):
                self.backward(self.loss(index, loss_id), loss_id)

    def step(self, **words: Any) -> None:
        (self.wrapper or self.optimizer).step(**words)

    def clear(self, **words: Any) -> None:
        (self.wrapper or self.optimizer).zero_grad(**words)

    def train(self, *indices: int) -> None:
        """One step for each batch."""
        for index in indices:
            self.passes(index)
            self.step()
            self.clear()

    def skipped(self) -> bool:
        return self.wrapper.step_was_skipped() if self.wrapper else amp.last_step_skipped(self.optimizer)

    def masters(self) -> list[Any]:
        return list(self.wrapper.master_params() if self.wrapper else amp.master_params(self.optimizer))

    def scales(self) -> list[float]:
        return [scaler.get_scale() for scaler in self.wrapper.loss_scalers]

    def weight(self, name: str = 'fc.weight') -> nn.Parameter:
        return self.model.get_parameter(name)

    def bits(self, buffers: bool = False) -> dict[str, Tensor]:
        """Clones of weights, of what is stepped, and of optimizer state; of buffers, if asked for."""
        found = {f'weight {name}': p.detach().clone() for name, p in self.model.named_parameters()}
        for index, master in enumerate(self.masters()):
            found[f'master {index}'] = master.detach().clone()
            for key, value in self.optimizer.state.get(master, {}).items():
                if isinstance(value, Tensor):
                    found[f'state {index} {key}'] = value.clone()
        if buffers:
            found |= {f'buffer {name}': value.clone() for name, value in self.model.named_buffers()}
        return found


@contextmanager
def poisoned(parameter: Tensor, value: float = math.inf) -> Iterator[None]:
    """Gradients that arrive at ``parameter`` have one non-finite element."""

    def poison(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[-1] = value
        return gradient

    handle = parameter.register_hook(poison)
    try:
        yield
    finally:
        handle.remove()


__all__ = ['CAST', 'LEVELS', 'MASTERED', 'SCALED', 'Net', 'Training', 'batch', 'momentum', 'poisoned']
