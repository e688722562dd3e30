"""What it costs to watch a training: ``python -m benchmarks.monitoring [--write] [--device cuda]``.

Whole training steps with and without, by turns, so that whatever else the machine does falls on both. Watched is as
``AmpMonitorHook`` does it: without numbers, as it is by default, and with numbers of each step.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.logging import MMLogger
from torch import Tensor, nn

from amp_wrapper import AmpOptimWrapper
from amp_wrapper.diagnostics.step import read_options
from amp_wrapper.diagnostics.watch import OPTIONS, TrainingWatch
from amp_wrapper.openmmlab.monitor_hook import attach_members
from amp_wrapper.optim import FusedSGD
from examples.classification import ConvNet

from .pages import RESULTS, processor, table
from .step_training import resnet
from .wrapping import mmengine_version

#: Each with the interval of its numbers.
WAYS = {'off': None, 'on': None, 'measured at each step': 1}


class Detector(nn.Module):
    """A ResNet, and heads of convolutions that say of each place which box it is in: losses are computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.neck = resnet(32, (1, 1, 1))[:-3], nn.Conv2d(512, 64, 1)
        tower = [nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU()) for _ in range(4)]
        self.head = nn.Sequential(*tower, nn.Conv2d(64, 24, 3, padding=1))

    def forward(self, images: list[Tensor], samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Of images of one size with ``boxes`` and ``labels``."""
        out = self.head(self.neck(self.body(torch.stack(images)))).float().flatten(2).transpose(1, 2)
        side = torch.arange(math.isqrt(out.shape[1]), device=out.device) * 16.0 + 8.0
        places = torch.cartesian_prod(side, side).flip(1)
        classes, boxes = torch.zeros(2, device=out.device)
        for scores, sample in zip(out, samples):
            sides = torch.cat([places[:, None] - sample['boxes'][:, :2], sample['boxes'][:, 2:] - places[:, None]], 2)
            inside, which = sides.amin(2).max(1)
            wanted = F.one_hot(sample['labels'][which], 20) * (inside > 0)[:, None].float()
            classes = classes + F.binary_cross_entropy_with_logits(scores[:, :20], wanted)
            boxes = boxes + F.smooth_l1_loss(scores[inside > 0, 20:], sides[inside > 0, which[inside > 0]] / 64)
        return {'loss_cls': classes, 'loss_box': boxes}


def digits() -> tuple[nn.Module, Any]:
    """The CNN of configs/digits, and a batch."""
    net = ConvNet(in_channels=1, channels=[16, 32, 64])
    return nn.Sequential(net, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)), [torch.randn(64, 1, 8, 8)]


def detector() -> tuple[nn.Module, Any]:
    """The detector, and a batch of three boxes an image."""
    boxes = [torch.rand(3, 4) * 96 + torch.tensor([0, 0, 128, 128]) for _ in range(2)]
    samples = [{'boxes': each, 'labels': torch.randint(20, (3,))} for each in boxes]
    return Detector(), [[torch.randn(3, 224, 224) for _ in boxes], samples]


#: By title: what makes a model and a batch, and levels: a CPU takes seconds for float16 convolutions of usual sizes.
MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], str]] = {
    'digits CNN, 64 images of 8 x 8': (digits, 'O2 O5'),
    'small ResNet, 16 images of 32 x 32': (lambda: (resnet(16, (1, 1, 1)), [torch.randn(16, 3, 32, 32)]), 'O2 O5'),
    'detector, 2 images of 224 x 224': (detector, 'O5'),
    'ResNet-26, 2 images of 224 x 224': (lambda: (resnet(64, (2, 2, 2, 2)), [torch.randn(2, 3, 224, 224)]), 'O5'),
}


class Loop:
    """A model that trains.

    Args:
        make: Gives the model and a batch.
        level: The opt level.
        way: One of :data:`WAYS`.
        device: Where.
    """

    def __init__(self, make: Callable[[], tuple[nn.Module, Any]], level: str, way: str, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device, (model, batch), self.watch, self.steps = device, make(), None, 0
        self.model, self.batch = model.to(device), torch.utils._pytree.tree_map(lambda each: each.to(device), batch)
        optimizer = FusedSGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.wrapper = AmpOptimWrapper(opt_level=level, optimizer=optimizer, verbosity=0)
        self.wrapper.attach(self.model)
        if way != 'off':
            engine = self.wrapper._engine
            options = read_options(OPTIONS, {'interval': WAYS[way], 'diagnose_overflow': True})
            self.watch = TrainingWatch(engine, [self.model], attach_members({'': engine}, ''), options, {})

    def step(self) -> None:
        """One training step."""
        self.steps += 1
        if self.watch is not None:
            self.watch.begin(self.steps)
        with self.wrapper.optim_context(self.model):
            out = self.model(*self.batch)
            loss = sum(out.values()) if isinstance(out, dict) else out.float().square().mean()
        self.wrapper.update_params(loss)

    def seconds(self, steps: int) -> float:
        """Of one step: of this process alone on a CPU, so that what else runs there does not count."""
        clock = time.process_time if self.device.type == 'cpu' else time.perf_counter
        _wait(self.device)
        start = clock()
        for _ in range(steps):
            self.step()
        _wait(self.device)
        return (clock() - start) / steps


def _wait(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def measure(title: str, level: str, device: torch.device, seconds: float) -> list[list[str]]:
    """Rows of one model: way, milliseconds of a step, what it adds in percent, and whether the weights are the same."""
    loops = {way: Loop(MODELS[title][0], level, way, device) for way in WAYS}
    warm = [loop.seconds(2) for _ in range(2) for loop in loops.values()]
    steps = max(1, round(0.05 / warm[-1]))
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    orders, end = itertools.cycle(itertools.permutations(WAYS)), time.monotonic() + seconds
    while time.monotonic() < end or len(found['off']) < 6:
        for way in next(orders):
            found[way].append(loops[way].seconds(steps))
    rows = []
    for way, times in found.items():
        ratios = sorted((a / b - 1) * 100 for a, b in zip(times, found['off']))
        # in 95 of 100 samples, the median of what is sampled lies between these two
        place = max(0, math.floor(len(times) / 2 - 0.98 * math.sqrt(len(times))))
        added = f'{statistics.median(ratios):+.2f} % ({ratios[place]:+.2f} to {ratios[-1 - place]:+.2f})'
        state, other = (loops[each].model.state_dict() for each in (way, 'off'))
        is_same = all(torch.equal(state[name], other[name]) for name in state)
        row = [title, level, f'{len(times)} x {steps}', way, f'{statistics.median(times) * 1e3:.3f}']
        rows.append([*row, *(['', ''] if way == 'off' else [added, 'yes' if is_same else '**no**'])])
    return rows


def report(device: torch.device, seconds: float) -> str:
    """The page."""
    MMLogger.get_current_instance().setLevel('WARNING')
    if device.type == 'cpu':
        torch.set_num_threads(1)
    rows: list[list[str]] = []
    for title, (_, levels) in MODELS.items():
        for level in levels.split():
            rows += measure(title, level, device, seconds)
    where = torch.cuda.get_device_name(device) if device.type == 'cuda' else f'{processor()}, one thread'
    clock = 'time of the process' if device.type == 'cpu' else 'wall time'
    commit = subprocess.run(['git', 'rev-parse', '--short', 'HEAD'], capture_output=True, text=True, check=False).stdout
    return '\n'.join(
        [
            '# Cost of the monitor',
            '',
            f'{datetime.date.today()}, commit {commit.strip()}, {where}, Python {platform.python_version()}, '
            f'torch {torch.__version__}, {mmengine_version()}; `python -m benchmarks.monitoring --device {device.type} '
            f'--seconds {seconds:g}`. `FusedSGD`; turns of some steps each, {clock}; medians, and the median of the ratios of '
            'neighbouring turns with its 95 % interval. "On" is `AmpMonitorHook` as it is by default: skipped steps are '
            'examined, and nothing is measured. What measuring at each step adds to that is a fiftieth at an interval of 50. '
            'The last column: whether weights and buffers after all steps are those without a watch, bit for bit.',
            '',
            *table(['model', 'level', 'turns', 'watch', 'ms a step', 'added', 'same bits'], rows),
            '',
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--seconds', type=float, default=80.0, help='of each model and level')
    parser.add_argument('--write', action='store_true', help='keep the page under benchmarks/results')
    args = parser.parse_args(arguments)
    text = report(torch.device(args.device), args.seconds)
    print(text)
    if args.write:
        (RESULTS / f'monitoring_{torch.device(args.device).type}.md').write_text(text)


if __name__ == '__main__':
    main()
