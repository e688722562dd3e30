"""Whole training steps, for ``benchmarks.step --device cuda --end-to-end`` and for ``benchmarks.level_numbers``.

Forward, backward and optimizer step of a ResNet and of a stack of transformer blocks in plain torch: FP32, torch.amp in
both types, mmengine's stock AMP, and this package's levels.
"""

from __future__ import annotations

import dataclasses
import datetime
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_wrapper.errors import AmpError
from amp_wrapper.policy import LEVELS

from . import wrapping
from .step_ways import Case, Unavailable, our_optimizer, quiet, torch_optimizer

CLASSES = 1000


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
        """Of (N, C, H, W)."""
        return F.relu(self.body(x) + self.short(x), inplace=True)


def _convolution(into: int, out: int, kernel: int, stride: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(into, out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(out)


def resnet(width: int, depths: tuple[int, ...]) -> nn.Module:
    """A ResNet with bottlenecks; (64, (3, 4, 6, 3)) is ResNet-50."""
    layers: list[nn.Module] = [*_convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    into = width
    for stage, depth in enumerate(depths):
        for index in range(depth):
            layers.append(Residual(into, width << stage, 2 if stage and not index else 1))
            into = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, CLASSES))


class Transformer(nn.Module):
    """Blocks of attention and two layers, over vectors that are embedded already; the mean of the sequence is classified."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Of (N, length, width)."""
        return self.head(self.blocks(x).mean(1))


@dataclasses.dataclass(frozen=True)
class Training:
    """A model with its inputs and optimizer.

    Attributes:
        name: In the table.
        build: Makes the model.
        shape: Of its inputs.
        optimizer: 'SGD' or 'AdamW'.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    optimizer: str


TRAININGS = (
    Training('ResNet-50', lambda: resnet(64, (3, 4, 6, 3)), (64, 3, 224, 224), 'SGD'),
    Training('12 transformer blocks of width 1,024', lambda: Transformer(1024, 12), (16, 512, 1024), 'AdamW'),
)
#: Small enough for a CPU, whose float16 convolutions are slow.
CPU_TRAININGS = (
    Training('small ResNet', lambda: resnet(16, (1, 1, 1)), (16, 3, 32, 32), 'SGD'),
    Training('4 transformer blocks of width 256', lambda: Transformer(256, 4), (8, 64, 256), 'AdamW'),
)
#: torch's own, and the type of its autocast.
TORCH_TYPES = {'FP32': None, 'torch.amp': torch.float16, 'torch.amp, bfloat16': torch.bfloat16}
VARIANTS = (*TORCH_TYPES, 'stock AMP', *LEVELS)


class Loop:
    """One variant of one training; :meth:`step` is a whole training step.

    Args:
        training: Model, inputs, optimizer.
        variant: One of :data:`VARIANTS`.
        device: Where.

    Raises:
        Unavailable: It cannot run here.
    """

    def __init__(self, training: Training, variant: str, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = training.build().to(device)
        self.inputs = torch.randn(training.shape, device=device)
        self.labels = torch.randint(CLASSES, training.shape[:1], device=device)
        case = Case(training.optimizer, False, torch.float16, device)
        own = variant.startswith('O')
        words: dict[str, Any] = dict(clip_grad=dict(max_norm=1.0))
        if own:
            words['optimizer'] = our_optimizer(case, self.model.parameters())
        else:
            words['optimizer'] = torch_optimizer(case, self.model.parameters(), fused=True)
        self.optimizer = f'{type(words["optimizer"]).__name__}{"" if own else "(fused=True)"}'
        try:
            with quiet():
                if own:
                    self.wrapper = wrapping.ours(opt_level=variant, verbosity=0, **words)
                elif variant == 'stock AMP':
                    self.wrapper = wrapping.stock(**words)
                else:
                    self.wrapper = wrapping.TorchAmp(dtype=TORCH_TYPES[variant], **words)
                # it is attached at the first of them
                self.step()
        except (AssertionError, AmpError) as error:
            raise Unavailable(f'{type(error).__name__}: {error}') from error

    def step(self) -> None:
        """Forward, backward, optimizer step."""
        with self.wrapper.optim_context(self.model):
            loss = F.cross_entropy(self.model(self.inputs).float(), self.labels)
        self.wrapper.update_params(loss)


def measure(training: Training, device: torch.device, rounds: int) -> tuple[list[list[str]], list[str]]:
    """Rows of the table of a training, and why which variant is missing."""
    loops: dict[str, Loop] = {}
    reasons: list[str] = []
    peaks: dict[str, int] = {}
    times: dict[str, list[float]] = {}
    for variant in VARIANTS:
        try:
            loop = Loop(training, variant, device)
        except Unavailable as error:
            reasons.append(f'- {training.name}, {variant}: {error}')
            continue
        # cuDNN chooses its kernels, and the state is made
        for _ in range(3):
            loop.step()
        if device.type == 'cuda':
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            loop.step()
            # above what is there between two steps
            peaks[variant] = torch.cuda.max_memory_allocated(device) - before
        loops[variant], times[variant] = loop, []
    for _ in range(rounds):
        for variant, loop in loops.items():
            times[variant].append(_seconds(loop, device))
    base = times.get('FP32')
    rows = [
        [
            training.name,
            variant,
            loop.optimizer,
            f'{statistics.median(times[variant]) * 1e3:.2f}',
            '' if base is None else f'{statistics.median(a / b for a, b in zip(base, times[variant])):.2f}',
            f'{peaks[variant] / 1e9:.2f}' if variant in peaks else '',
        ]
        for variant, loop in loops.items()
    ]
    return rows, reasons


def _seconds(loop: Loop, device: torch.device, repeats: int = 3) -> float:
    # on a CPU, what else runs there does not count
    clock = time.process_time if device.type == 'cpu' else time.perf_counter
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    begin = clock()
    for _ in range(repeats):
        loop.step()
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    return (clock() - begin) / repeats


def report(device: torch.device, rounds: int, command: str, trainings: tuple[Training, ...] = TRAININGS) -> str:
    """The page.

    Args:
        device: A GPU; the CPU only to see whether it runs.
        rounds: In which the variants take turns.
        command: What was typed.
        trainings: What to train.
    """
    columns = ['model', 'variant', 'optimizer', 'ms', 'times as fast as FP32', 'GB a step adds at its peak']
    rows: list[list[str]] = []
    reasons: list[str] = []
    for training in trainings:
        more, missing = measure(training, device, rounds)
        rows += more
        reasons += missing
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'
    shapes = '; '.join(f'{one.name}: {" x ".join(map(str, one.shape))}' for one in trainings)
    kinds = {'matrices': torch.backends.cuda.matmul.allow_tf32, 'convolutions': torch.backends.cudnn.allow_tf32}
    tf32 = ', '.join(f'{kind} {"with" if yes else "without"} TF32' for kind, yes in kinds.items())
    lines = [
        '# Whole training steps',
        '',
        f'`{command}`: {datetime.date.today()}, {name}, Python {platform.python_version()}, torch {torch.__version__}, '
        f'{wrapping.mmengine_version()}. {rounds} rounds of three steps, in which the variants of a model take turns. '
        f'In FP32: {tf32}. Inputs: {shapes}. Gradients are clipped by their norm.',
        '',
        f'| {" | ".join(columns)} |',
        '|' + ' --- |' * len(columns),
        *(f'| {" | ".join(row)} |' for row in rows),
        *(['', 'Not measured:', '', *reasons] if reasons else []),
    ]
    return '\n'.join([*lines, ''])
