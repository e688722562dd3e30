"""The models that several benchmarks train: a ResNet with BatchNorm, a transformer with LayerNorm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 1000

Shapes = Sequence[tuple[int, ...]]


class Residual(nn.Module):
    """The bottleneck of a ResNet."""

    def __init__(self, into: int, planes: int, stride: int) -> None:
        super().__init__()
        out = 4 * planes
        self.body = nn.Sequential(
            *_convolution(into, planes, 1, 1),
            nn.ReLU(inplace=True),
            *_convolution(planes, planes, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(planes, out, 1, 1),
        )
        self.short = nn.Identity() if into == out else nn.Sequential(*_convolution(into, out, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, 4 planes, H / stride, W / stride)."""
        return F.relu(self.body(x) + self.short(x), inplace=True)


def _convolution(into: int, out: int, kernel: int, stride: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(into, out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(out)


def resnet(width: int, depths: tuple[int, ...]) -> nn.Sequential:
    """Build a ResNet of bottlenecks; (64, (3, 4, 6, 3)) is ResNet-50."""
    layers: list[nn.Module] = [*_convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    into = width
    for stage, depth in enumerate(depths):
        for index in range(depth):
            layers.append(Residual(into, width << stage, 2 if stage and not index else 1))
            into = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, CLASSES))


class Transformer(nn.Module):
    """Blocks of attention over vectors that are embedded already; the mean of the sequence is classified."""

    def __init__(self, width: int, depth: int, dropout: float = 0.0) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, dropout, F.gelu, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, length, width) to (N, classes)."""
        scores: Tensor = self.head(self.blocks(x).mean(1))
        return scores


@dataclasses.dataclass(frozen=True)
class Training:
    """A model with its inputs and its optimizer.

    Attributes:
        name: In tables.
        build: Makes the model.
        shape: Of a batch of inputs.
        optimizer: 'SGD', with momentum, or 'AdamW'.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    optimizer: str

    def batch(self, device: str) -> tuple[Tensor, Tensor]:
        """Draw inputs and labels."""
        labels = torch.randint(CLASSES, self.shape[:1], device=device)
        return torch.randn(self.shape, device=device), labels


def resnet50() -> nn.Module:
    """Build ResNet-50: 161 parameters of 25.6 million elements."""
    return resnet(64, (3, 4, 6, 3))


def small_resnet() -> nn.Module:
    """Build a ResNet of three bottlenecks."""
    return resnet(16, (1, 1, 1))


def large_transformer() -> nn.Module:
    """Build 12 blocks of width 1,024: 151 million elements."""
    return Transformer(1024, 12)


def vit() -> nn.Module:
    """Build the blocks of ViT-B: 12 of width 768."""
    return Transformer(768, 12)


def small_transformer() -> nn.Module:
    """Build 4 blocks of width 256."""
    return Transformer(256, 4)


def tiny_transformer() -> nn.Module:
    """Build a block of width 16."""
    return Transformer(16, 1)


def trainings(device: str, quick: bool) -> tuple[Training, ...]:
    """Return what is trained: on a CPU small models, since its float16 convolutions are slow."""
    if quick:
        return (Training('1 block of width 16', tiny_transformer, (2, 4, 16), 'AdamW'),)
    if device == 'cuda':
        return (
            Training('ResNet-50', resnet50, (64, 3, 224, 224), 'SGD'),
            Training('12 transformer blocks of width 1,024', large_transformer, (16, 512, 1024), 'AdamW'),
        )
    return (
        Training('small ResNet', small_resnet, (16, 3, 32, 32), 'SGD'),
        Training('4 transformer blocks of width 256', small_transformer, (8, 64, 256), 'AdamW'),
    )


MODELS = {'ResNet-50': resnet50, 'ViT-B': vit, 'tiny': tiny_transformer}


def shapes_of(model: str) -> Shapes:
    """Return the shapes of the parameters of a model of :data:`MODELS`."""
    with torch.device('meta'):
        return [tuple(parameter.shape) for parameter in MODELS[model]().parameters()]
