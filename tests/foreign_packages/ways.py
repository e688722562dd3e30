"""A training of a small net on digits, at a level or in plain FP32, for what is built around trainings."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_wrapper import amp

LEVELS = ('O1', 'O2', 'O4', 'O5')
CAST = {'O2': torch.float16, 'O5': torch.bfloat16}
#: The first steps of a search for a scale are skipped: with this one no step is, so that each has its counterpart in FP32.
SCALE: dict[str, Any] = dict(init_scale=2.0**7, growth_interval=7)
Batch = tuple[Tensor, Tensor]


class DigitsNet(nn.Module):
    """Convolutions, BatchNorm, LayerNorm, two linear layers, for 8 x 8 images of ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8)
        )
        self.hidden, self.norm, self.head = nn.Linear(72, 32), nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.features(images)).flatten(1)
        return self.head(F.gelu(self.norm(self.hidden(x))))


_digits: list[Batch] = []


def digits(index: int, size: int = 32) -> Batch:
    """Batch ``index`` of the first 1,024 digits, (size, 1, 8, 8) and (size,)."""
    if not _digits:
        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        found = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 8 - 1
        _digits.append((found, torch.tensor(labels)[order]))
    images, labels = _digits[0]
    rows = torch.arange(size) + index * size % 1024
    return images[rows], labels[rows]


def held_out() -> Batch:
    """512 digits that no batch holds."""
    digits(0)
    images, labels = _digits[0]
    return images[1024:1536], labels[1024:1536]


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@dataclasses.dataclass
class Task:
    """What is trained, and the batch for evaluation."""

    model: Callable[[], nn.Module] = DigitsNet
    loss: Callable[[Any, Any], Tensor] = classify


DIGITS = Task()


class Way:
    """One training; ``level`` is None for plain FP32."""

    def __init__(
        self, optimizer: Callable[[nn.Module], Optimizer], task: Task = DIGITS, level: str | None = None, seed: int = 0
    ) -> None:
        torch.manual_seed(seed)
        self.task, self.level = task, level
        self.model = task.model()
        self.optimizer = optimizer(self.model)
        self.start = self.values()
        if level is not None:
            scale = SCALE if level in ('O1', 'O2') else None
            amp.initialize(self.model, self.optimizer, opt_level=level, loss_scale=scale, verbosity=0)

    def step(self, batch: Batch) -> None:
        self.model.train()
        self.optimizer.zero_grad()
        loss = self.task.loss(self.model, batch)
        with amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Loss on what was held out."""
        self.model.eval()
        return float(self.task.loss(self.model, held_out()))

    def values(self) -> dict[str, Tensor]:
        """FP32 values of the model, copied."""
        return {key: value.detach().clone() for key, value in self.model.state_dict().items()}

    def stepped(self) -> list[Tensor]:
        """What the optimizer steps, copied."""
        return [parameter.detach().clone() for parameter in amp.master_params(self.optimizer)]

    def save(self) -> bytes:
        file = io.BytesIO()
        parts = [self.model.state_dict(), self.optimizer.state_dict(), amp.state_dict(), torch.get_rng_state()]
        torch.save(parts, file)
        return file.getvalue()

    def load(self, file: bytes) -> None:
        model, optimizer, session, random = torch.load(io.BytesIO(file), weights_only=True)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        amp.load_state_dict(session)
        torch.set_rng_state(random)

    def everything(self) -> dict[str, Any]:
        """What two runs that are the same have in common."""
        return {'model': self.values(), 'optimizer': self.optimizer.state_dict(), 'stepped': self.stepped()}


def check_masters(way: Way) -> None:
    """Model weights are their masters, rounded, and the file has the masters."""
    weights = dict(way.model.named_parameters())
    for name, value in way.values().items():
        if name in weights:
            assert value.dtype is torch.float32, name
            assert torch.equal(weights[name], value.to(weights[name].dtype)), f'{name} is not its master, rounded'
