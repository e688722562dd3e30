"""A model at a level with masters, by either interface, for tests of writes to weights and to masters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from amp_wrapper import AmpOptimWrapper, amp
from amp_wrapper.optim import FusedAdamW
from amp_wrapper.policy import LEVELS, resolve

MASTERED = [level for level in LEVELS if resolve(level).master_weights]


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    'SGD': lambda parameters: SGD(parameters, lr=0.03125, momentum=0.5),
    'AdamW': lambda parameters: AdamW(parameters, lr=0.01),
    'FusedAdamW': lambda parameters: FusedAdamW(parameters, lr=0.01),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Ours:
    """A model at a level with masters, by either interface."""

    def __init__(self, level: str, interface: str, optimizer: str, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = Net().to(device)
        self.start = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.dtype = resolve(level).cast_model_type
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.wrapper: Any = None
        if interface == 'amp':
            amp.initialize(self.model, self.optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
        else:
            masters: Any = 'split' if interface == 'split' else True
            self.wrapper = AmpOptimWrapper(
                opt_level=level, optimizer=self.optimizer, loss_scale=8.0, master_weights=masters, verbosity=0
            )
            self.wrapper.attach(self.model)
        self.weights = list(self.model.parameters())
        self.names = [name for name, _ in self.model.named_parameters()]
        self.masters: list[Tensor] = [p for group in self.optimizer.param_groups for p in group['params']]
        self.x = torch.ones(2, 3, device=device)

    def weights_changed(self, *tensors: Tensor) -> list[str]:
        if self.wrapper is not None:
            return self.wrapper.weights_changed(tensors or None)
        return amp.weights_changed(self.optimizer, tensors or None)

    def masters_changed(self, *tensors: Tensor) -> None:
        if self.wrapper is not None:
            self.wrapper.masters_changed(tensors or None)
        else:
            amp.masters_changed(self.optimizer, tensors or None)

    def backward(self, factor: float = 1.0) -> None:
        """Gradients of 0.5 in every element, without a forward pass."""
        loss = sum((weight.float() * 0.5 * factor).sum() for weight in self.weights)
        if self.wrapper is not None:
            self.wrapper.backward(loss)
        else:
            with amp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()

    def step(self) -> None:
        stepper = self.optimizer if self.wrapper is None else self.wrapper
        stepper.step()
        stepper.zero_grad()

    def forward(self) -> Tensor:
        if self.wrapper is None:
            return self.model(self.x)
        with self.wrapper.optim_context(self.model):
            return self.model(self.x)
