"""What it costs that a skipped step restores buffers: ``python -m benchmarks.buffers [--write] [--device cuda]``.

Training steps of ResNet-50 with and without ``restore_buffers_on_skip``, by turns, so that whatever else the machine does falls
on both; and the parts of the cost alone, since on a busy machine one percent of a step is less than the steps differ by.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mmengine.logging import MMLogger
from torch import nn

from amp_wrapper import AmpOptimWrapper
from amp_wrapper.optim import FusedSGD

from .pages import processor
from .step_training import resnet

RESULTS = Path(__file__).parent / 'results'
#: name -> words of the wrapper.
WAYS: dict[str, dict[str, Any]] = {
    'O5': dict(opt_level='O5'),
    'O0, checked': dict(opt_level='O0', skip_nonfinite=True),
}


class Loop:
    """A model that trains.

    Args:
        words: For the wrapper.
        restores: Whether skipped steps restore buffers.
        shape: Of a batch.
        device: Where.
    """

    def __init__(
        self,
        words: dict[str, Any],
        restores: bool,
        shape: tuple[int, ...],
        depths: tuple[int, ...],
        device: torch.device,
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model: nn.Module = resnet(64, depths).to(device)
        optimizer = FusedSGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.wrapper = AmpOptimWrapper(optimizer=optimizer, verbosity=0, restore_buffers_on_skip=restores, **words)
        self.x = torch.randn(shape, device=device)
        self.wrapper.attach(self.model)

    def step(self) -> None:
        """One training step."""
        with self.wrapper.optim_context(self.model):
            loss = self.model(self.x).float().square().mean()
        self.wrapper.update_params(loss)

    def seconds(self) -> tuple[float, float]:
        """Of one step: as the clock has it, and of this process alone."""
        _wait(self.device)
        start, busy = time.perf_counter(), time.process_time()
        self.step()
        _wait(self.device)
        return time.perf_counter() - start, time.process_time() - busy

    def parts(self) -> dict[str, Callable[[], object]]:
        """What is added to a step, by name."""
        (snapshot,) = self.wrapper._engine.snapshots
        flag = torch.zeros((), device=self.device)

        def begin() -> None:
            snapshot.begin()
            snapshot._is_live = False

        def restore() -> None:
            snapshot.begin()
            snapshot.settle(flag)

        return {'copies at the first forward pass': begin, 'the same, and a step that is not skipped': restore}


def _wait(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def _microseconds(function: Callable[[], object], device: torch.device, calls: int = 50, rounds: int = 15) -> float:
    times = []
    for _ in range(rounds):
        _wait(device)
        start = time.process_time() if device.type == 'cpu' else time.perf_counter()
        for _ in range(calls):
            function()
        _wait(device)
        end = time.process_time() if device.type == 'cpu' else time.perf_counter()
        times.append((end - start) / calls * 1e6)
    return statistics.median(times)


def measure(
    device: torch.device, rounds: int, shape: tuple[int, ...], depths: tuple[int, ...] = (3, 4, 6, 3)
) -> tuple[list[list[str]], list[list[str]], str]:
    """Rows of whole steps, rows of the parts, and what is copied."""
    MMLogger.get_current_instance().setLevel('WARNING')
    steps, parts, size = [], [], ''
    for name, words in WAYS.items():
        loops = {restores: Loop(words, restores, shape, depths, device) for restores in (False, True)}
        found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for index in range(rounds + 2):
            for restores in (False, True) if index % 2 else (True, False):
                seconds = loops[restores].seconds()
                if index >= 2:
                    found[restores].append(seconds)
        row = [name]
        for which in (0, 1):
            off, on = ([times[which] for times in found[restores]] for restores in (False, True))
            ratios = [b / a for a, b in zip(off, on)]
            row += [f'{statistics.median(off) * 1e3:.1f}', f'{statistics.median(on) * 1e3:.1f}']
            row.append(f'{(statistics.median(ratios) - 1) * 100:+.2f} %')
        steps.append(row)
        times = {what: _microseconds(function, device) for what, function in loops[True].parts().items()}
        _, added = times.values()
        step = statistics.median(times[0] for times in found[False]) * 1e6
        busy = statistics.median(times[1] for times in found[False]) * 1e6
        parts += [[name, what, f'{value:.0f}'] for what, value in times.items()]
        parts.append([name, '**of a step without**', f'**{added / min(step, busy) * 100:.3f} %**'])
        if name == 'O0, checked':
            buffers = list(loops[True].model.buffers())
            groups = [group for each in loops[True].wrapper._engine.snapshots for group in each._groups.values()]
            held = sum(flat.nbytes for group in groups for flat in (group._before, group._now))
            bytes_ = sum(buffer.numel() * buffer.element_size() for buffer in buffers)
            size = f'{len(buffers)} buffers of {bytes_:,} bytes; the copies, and room for what is written back: {held:,} bytes.'
    return steps, parts, size


def report(device: torch.device, rounds: int, shape: tuple[int, ...], depths: tuple[int, ...] = (3, 4, 6, 3)) -> str:
    """The page."""
    if device.type == 'cpu':
        torch.set_num_threads(1)
    steps, parts, size = measure(device, rounds, shape, depths)
    where = torch.cuda.get_device_name(device) if device.type == 'cuda' else f'{processor()}, one thread'
    lines = [
        '# Cost of restoring buffers',
        '',
        f'{datetime.date.today()}, {where}, Python {platform.python_version()}, torch {torch.__version__}; '
        f'`python -m benchmarks.buffers --device {device.type}`. ResNet-50, batches of {tuple(shape)}, `FusedSGD`, '
        f'{rounds} steps of each by turns; no step is skipped. Medians; the differences are medians of the differences of '
        'neighbouring pairs, so that one may have another sign than the difference of the medians.',
        '',
        '| level | ms, off | ms, on | difference | CPU ms, off | CPU ms, on | difference |',
        '| --- | --- | --- | --- | --- | --- | --- |',
        *(f'| {" | ".join(row)} |' for row in steps),
        '',
        'The parts alone, in microseconds' + (' of the process' if device.type == 'cpu' else '') + ':',
        '',
        '| level | part | microseconds |',
        '| --- | --- | --- |',
        *(f'| {" | ".join(row)} |' for row in parts),
        '',
        size,
    ]
    return '\n'.join(lines) + '\n'


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--rounds', type=int, default=20)
    parser.add_argument('--batch', type=int, default=2)
    parser.add_argument('--size', type=int, default=224, help='of an image')
    parser.add_argument('--write', action='store_true', help='keep the page under benchmarks/results')
    args = parser.parse_args()
    device = torch.device(args.device)
    text = report(device, args.rounds, (args.batch, 3, args.size, args.size))
    print(text)
    if args.write:
        (RESULTS / f'buffers_{device.type}.md').write_text(text)


if __name__ == '__main__':
    main()
