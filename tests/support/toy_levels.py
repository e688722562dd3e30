"""Models of which it is known which level suits them, and why the others do not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Its logits are ``factor ** 2`` times as large as need be: for a large factor beyond float16, never beyond bfloat16."""

    def __init__(self, width: int, factor: float) -> None:
        super().__init__()
        self.qkv, self.out, self.factor = nn.Linear(width, 3 * width), nn.Linear(width, width), factor

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        logits = (q * self.factor) @ (k * self.factor).transpose(-1, -2)
        return self.out((logits / self.factor**2).softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self, width: int, factor: float) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(width), Attention(width, factor)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class OverflowingFormer(nn.Module):
    """Three blocks; the attention of those in ``large`` overflows in float16."""

    def __init__(self, large: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(16, 300.0 if index in large else 1.0) for index in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class TinyGradientHead(nn.Module):
    """The gradients of ``aux`` are below ``2 ** -25``, which is zero in float16 without a loss scale."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        self.head, self.aux = nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x)
        return self.head(features), self.aux(features.detach())


class PlainCNN(nn.Module):
    """Nothing is the matter with it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout),
        )  # fmt: skip
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))


class Offset(nn.Module):
    """What is left of a number after 1000 was added and taken away: bfloat16 has steps of 4 there."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1000.0) - 1000.0


class OffsetInside(nn.Module):
    """One module, ``stem.1``, needs more digits than bfloat16 has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.stem = nn.Sequential(nn.LayerNorm(16), Offset(), nn.Linear(16, 16))
        self.body = nn.Sequential(nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(self.embed(x))))


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def loss_with_aux(model: nn.Module, batch: Batch) -> Tensor:
    logits, aux = model(batch[0])
    return F.cross_entropy(logits, batch[1]) + aux.float().square().mean() * 2.0**-22


def batches(count: int, *shape: int, size: int = 32) -> list[Batch]:
    """Labels that can be learned."""
    generator = torch.Generator().manual_seed(1)
    found: list[Any] = []
    for _ in range(count):
        labels = torch.randint(4, (size,), generator=generator)
        noise = torch.randn(size, *shape, generator=generator)
        found.append((noise + labels.view(-1, *[1] * len(shape)) * 0.7, labels))
    return found
