"""What the monitor and an armed diagnosis cost: ``python -m benchmarks.monitoring [--write] [--device cuda]``.

Whole training steps with and without, by turns, so that whatever else the machine does falls on both. Here the monitor measures
each step; what it costs at an interval of 50 is a 50th of that.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import time
from collections.abc import Callable

import torch
from mmengine.logging import MMLogger
from torch import Tensor, nn

from amp_wrapper import AmpOptimWrapper
from amp_wrapper.diagnostics.monitor import Monitor
from amp_wrapper.diagnostics.overflow import OverflowDiagnosis
from amp_wrapper.openmmlab.monitor_hook import attach_members
from amp_wrapper.optim import FusedSGD
from examples.classification import ConvNet

from .pages import RESULTS, processor
from .step_training import resnet

INTERVAL = 50
WAYS = ('off', 'monitor at each step', 'armed')


def digits() -> tuple[nn.Module, tuple[int, ...]]:
    """The CNN of configs/digits, and its batches."""
    net = ConvNet(in_channels=1, channels=[16, 32, 64])
    return nn.Sequential(net, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)), (64, 1, 8, 8)


def resnet18() -> tuple[nn.Module, tuple[int, ...]]:
    """As on ImageNet, with few images."""
    return resnet(64, (2, 2, 2, 2)), (4, 3, 224, 224)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {'digits CNN': digits, 'ResNet-18': resnet18}


class Loop:
    """A model that trains.

    Args:
        make: Gives the model and the shape of a batch.
        level: The opt level.
        way: One of :data:`WAYS`.
        device: Where.
    """

    def __init__(
        self, make: Callable[[], tuple[nn.Module, tuple[int, ...]]], level: str, way: str, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        self.device, self.way = device, way
        model, shape = make()
        self.model = model.to(device)
        self.x = torch.randn(shape, device=device)
        optimizer = FusedSGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.wrapper = AmpOptimWrapper(opt_level=level, optimizer=optimizer, verbosity=0)
        self.wrapper.attach(self.model)
        engine = self.wrapper._engine
        self.rows: list[Tensor] = []
        if way == WAYS[1]:
            self.monitor = Monitor(1, None, self._take)
            engine.observers.append(self.monitor)
        elif way == WAYS[2]:
            attach = attach_members({'': engine}, '')
            engine.observers.append(OverflowDiagnosis([self.model], attach, lambda found: ''))

    def _take(self, row: Tensor) -> None:
        self.rows = [row]

    def step(self) -> None:
        """One training step."""
        if self.way == WAYS[1]:
            self.monitor.begin(1)
        with self.wrapper.optim_context(self.model):
            loss = self.model(self.x).float().square().mean()
        self.wrapper.update_params(loss)

    def seconds(self) -> float:
        """Of one step: of this process alone on a CPU, so that what else runs there does not count."""
        clock = time.process_time if self.device.type == 'cpu' else time.perf_counter
        _wait(self.device)
        start = clock()
        self.step()
        _wait(self.device)
        return clock() - start


def _wait(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def measure(level: str, model: str, device: torch.device, rounds: int) -> list[list[str]]:
    """Rows of one model: way, milliseconds of a step, what it adds in percent, and at the default interval."""
    loops = {way: Loop(MODELS[model], level, way, device) for way in WAYS}
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for index in range(rounds + 3):
        for way in WAYS if index % 2 else reversed(WAYS):
            seconds = loops[way].seconds()
            if index >= 3:
                found[way].append(seconds)
    rows = []
    for way in WAYS:
        ratios = [a / b for a, b in zip(found[way], found['off'])]
        added = (statistics.median(ratios) - 1) * 100
        # what one measurement adds is spread over the steps up to the next one
        share = added / INTERVAL if way == WAYS[1] else added
        row = [model, level, way, f'{statistics.median(found[way]) * 1e3:.3f}']
        rows.append([*row, *(['', ''] if way == 'off' else [f'{added:+.2f} %', f'**{share:+.3f} %**'])])
    return rows


def report(device: torch.device, rounds: int, levels: tuple[str, ...] = ('O2', 'O5')) -> str:
    """The page."""
    MMLogger.get_current_instance().setLevel('WARNING')
    if device.type == 'cpu':
        torch.set_num_threads(1)
    rows: list[list[str]] = []
    for model in MODELS:
        for level in levels:
            # float16 convolutions of this size take seconds on a CPU
            if not (model == 'ResNet-18' and level == 'O2' and device.type == 'cpu'):
                rows += measure(level, model, device, rounds if model == 'digits CNN' else max(rounds // 8, 6))
    where = torch.cuda.get_device_name(device) if device.type == 'cuda' else f'{processor()}, one thread'
    clock = 'time of the process' if device.type == 'cpu' else 'wall time'
    return '\n'.join(
        [
            '# Cost of the monitor and of an armed diagnosis',
            '',
            f'{datetime.date.today()}, {where}, Python {platform.python_version()}, torch {torch.__version__}; '
            f'`python -m benchmarks.monitoring --device {device.type}`. `FusedSGD`, steps of each by turns, {clock}; medians, '
            f'and medians of the ratios of neighbouring steps. The digits CNN has batches of 64, ResNet-18 of 4 images of '
            f'224 x 224. The last column is what a training pays whose monitor measures one step in {INTERVAL}.',
            '',
            '| model | level | | ms a step | added | added at that interval |',
            '| --- | --- | --- | --- | --- | --- |',
            *(f'| {" | ".join(row)} |' for row in rows),
            '',
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--rounds', type=int, default=200)
    parser.add_argument('--write', action='store_true', help='keep the page under benchmarks/results')
    args = parser.parse_args(arguments)
    text = report(torch.device(args.device), args.rounds)
    print(text)
    if args.write:
        (RESULTS / f'monitoring_{torch.device(args.device).type}.md').write_text(text)


if __name__ == '__main__':
    main()
