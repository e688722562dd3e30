"""A small model, its optimizer and an engine around them, for tests of the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from amp_wrapper.engine import AmpEngine
from amp_wrapper.engine.clipping import GradientClip
from amp_wrapper.policy import resolve

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CAST_LEVELS = {'O2': F16, 'O3': F16, 'O5': BF16}


class Net(nn.Module):
    """One 16-bit and one FP32 parameter group at the levels that keep BatchNorm."""

    def __init__(self, norm: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.fc = nn.Linear(4, 6)
        self.bn = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.dropout(self.bn(self.fc(x)).relu(), self.dropout, self.training))


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.125, momentum=0.5)


def batch(device: torch.device, index: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + index)
    x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)
    return x.to(device), y.to(device)


class Run:
    """A model, its optimizer and an engine around them."""

    def __init__(
        self,
        level: str,
        device: torch.device,
        make: Callable[[Any], Optimizer] = momentum,
        attach: bool = True,
        norm: bool = True,
        **overrides: Any,
    ) -> None:
        torch.manual_seed(3)
        self.device = device
        self.model = Net(norm).to(device)
        self.optimizer = make(self.model.parameters())
        self.engine = AmpEngine(resolve(level, **overrides), self.optimizer)
        if attach:
            self.engine.attach(self.model)

    def losses(self, index: int = 0) -> tuple[Tensor, Tensor]:
        x, y = batch(self.device, index)
        with self.engine.forward_context(self.model):
            output = self.model(x).float()
        return (output - y).square().mean(), output.square().mean() / 2

    def backward(self, index: int = 0) -> None:
        first, second = self.losses(index)
        if self.engine.policy.num_losses > 1:
            self.engine.backward(first, 0, retain_graph=True)
            self.engine.backward(second, 1)
        else:
            self.engine.backward(first)

    def train(self, *indices: int, clip: GradientClip | None = None) -> None:
        for index in indices:
            self.backward(index)
            self.engine.step(clip)
            self.engine.zero_grad()

    def parameter(self, name: str) -> nn.Parameter:
        return dict(self.model.named_parameters())[name]

    def bits(self) -> dict[str, Tensor]:
        """Clones of weights, masters and optimizer state."""
        found = {f'weight {name}': p.detach().clone() for name, p in self.model.named_parameters()}
        for index, master in enumerate(self.engine.master_params()):
            found[f'master {index}'] = master.detach().clone()
            for key, value in self.optimizer.state.get(master, {}).items():
                if isinstance(value, Tensor):
                    found[f'state {index} {key}'] = value.clone()
        return found


@contextmanager
def poisoned(parameter: Tensor, value: float = math.inf) -> Iterator[None]:
    """Gradients that arrive at ``parameter`` have one non-finite element."""

    def spoil(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[-1] = value
        return grad

    handle = parameter.register_hook(spoil)
    yield
    handle.remove()
