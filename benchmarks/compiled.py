"""Whole training steps, eager and compiled: ``python -m benchmarks.compiled [--write]``.

FP32, ``torch.autocast``, and the levels that a device has fast types for: O4 and O5 on a CPU, O1 and O2 as well on a GPU.
ResNet-50 and Swin-T of torchvision, and torch's own transformer encoder, with torch's fused AdamW. All ways are built in one
process and take their steps in turn, so that a slow minute of the machine meets all of them; tables give medians, and ratios to
compiled autocast. The time of the first step is that of compiling. Peak memory is what a step adds to what lies there anyway.

torchvision is needed for two of the models; without it they are left out, and the page says so.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import Library

from amp_wrapper import amp, compiler_internals

from .pages import add_write

_LEVELS = {'cpu': ('O4', 'O5'), 'cuda': ('O1', 'O2', 'O4', 'O5')}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its batches.

    Attributes:
        name: For the page.
        build: Makes the model.
        shape: Of the input.
        classes: Of the output.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int = 100


class Encoder(nn.Module):
    """A transformer of torch's own layers, with a mean at its end."""

    def __init__(self, dims: int, depth: int, classes: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(dims, dims // 64, 4 * dims, 0.1, 'gelu', batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dims, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of sequences.

        Args:
            x: (batch, length, dims) float32.
        """
        scores: Tensor = self.head(self.layers(x).mean(1))
        return scores


def _torchvision() -> Any:
    """torchvision; None where it is not installed. A build for CUDA wants operators that a torch for CPUs has not declared."""
    with contextlib.suppress(RuntimeError):
        _LIBRARY.define('nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')
        _LIBRARY.define('qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')
    try:
        import torchvision.models
    except ImportError:
        return None
    return torchvision.models


_LIBRARY = Library('torchvision', 'FRAGMENT')  # type: ignore[no-untyped-call]


def cases(batch: int, size: int) -> list[Case]:
    """The models that can be built here.

    Args:
        batch: Pictures, or sequences, in a batch.
        size: Edge of the pictures, in pixels.
    """
    found = [Case('transformer', lambda: Encoder(384, 6, 100), (batch, 128, 384))]
    models = _torchvision()
    if models is not None:
        picture = (batch, 3, size, size)
        found += [
            Case('ResNet-50', lambda: models.resnet50(num_classes=100), picture),
            Case('Swin-T', lambda: models.swin_t(num_classes=100), picture),
        ]
    return found


class Way:
    """One way to train a model.

    Args:
        case: The model.
        kind: 'FP32', 'autocast' or a level.
        compiles: Whether it is compiled.
        device: Where.
    """

    def __init__(self, case: Case, kind: str, compiles: bool, device: torch.device) -> None:
        self.kind, self.compiles, self.device = kind, compiles, device
        torch.manual_seed(0)
        self.model = case.build().to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.is_level = kind.startswith('O')
        if self.is_level:
            amp.initialize(self.model, self.optimizer, opt_level=kind, verbosity=0)
        self.call = torch.compile(self.model) if compiles else self.model
        self.x = torch.randn(case.shape, device=device)
        self.labels = torch.randint(0, case.classes, case.shape[:1], device=device)
        self.seconds: list[float] = []
        self.peak = 0.0
        self.first = 0.0
        self.counts = self.late = (0, 0, 0)

    def step(self) -> None:
        """A whole step. Syncs at its end."""
        if self.kind == 'autocast':
            half = torch.bfloat16 if self.device.type == 'cpu' else torch.float16
            with torch.autocast(self.device.type, dtype=half):
                loss = F.cross_entropy(self.call(self.x), self.labels)
        else:
            loss = F.cross_entropy(self.call(self.x), self.labels)
        if self.is_level:
            with amp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
        else:
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device.type == 'cuda':
            torch.cuda.synchronize()

    def begin(self) -> None:
        """The first steps: compile, and count."""
        before = _counts()
        start = time.perf_counter()
        self.step()
        self.first = time.perf_counter() - start
        self.step()
        self.step()
        third = _counts()
        self.counts = tuple(now - then for now, then in zip(third, before))  # type: ignore[assignment]
        for _ in range(3):
            self.step()
        self.late = tuple(now - then for now, then in zip(_counts(), third))  # type: ignore[assignment]
        with _peak(self.device) as peak:
            self.step()
        self.peak = peak[0]

    def time(self) -> None:
        """Take one step more, and note how long it takes."""
        start = time.perf_counter()
        self.step()
        self.seconds.append(time.perf_counter() - start)


def _counts() -> tuple[int, int, int]:
    counts = compiler_internals.compile_counts()
    return counts.graphs, sum(counts.breaks.values()), counts.recompilations


@contextlib.contextmanager
def _peak(device: torch.device) -> Iterator[list[float]]:
    """MiB that a block adds at its peak: of the GPU, or of the process."""
    found = [float('nan')]
    gc.collect()
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield found
        found[0] = (torch.cuda.max_memory_allocated() - before) / 2**20
        return
    try:
        # Linux forgets the peak of the process
        Path('/proc/self/clear_refs').write_text('5')
    except OSError:
        yield found
        return
    before = _status('VmRSS')
    yield found
    found[0] = (_status('VmHWM') - before) / 2**10


def _status(name: str) -> int:
    line = next(line for line in Path('/proc/self/status').read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


def measure(case: Case, device: torch.device, rounds: int) -> list[Way]:
    """All ways of one model, timed in turn.

    Args:
        case: The model.
        device: Where.
        rounds: Steps of each that are timed.
    """
    kinds = ('FP32', 'autocast', *_LEVELS[device.type])
    # all models first: amp.initialize makes torch forget what was compiled before
    ways = [Way(case, kind, compiles, device) for kind in kinds for compiles in (False, True)]
    for way in ways:
        print(f'{case.name}: {way.kind}, {"compiled" if way.compiles else "eager"}', file=sys.stderr, flush=True)
        way.begin()
    for number in range(rounds):
        print(f'{case.name}: round {number + 1} of {rounds}', file=sys.stderr, flush=True)
        for way in ways if number % 2 else ways[::-1]:
            way.time()
    return ways


def table(case: Case, ways: list[Way]) -> str:
    """The rows of one model."""
    base = next(way for way in ways if way.kind == 'autocast' and way.compiles)
    rows = [
        f'## {case.name}, input {" x ".join(map(str, case.shape))}',
        '',
        '| | ms a step | to compiled autocast | first step, s | graphs | breaks | recompilations (later) | peak, MiB |',
        '| --- | --- | --- | --- | --- | --- | --- | --- |',
    ]
    for way in ways:
        # step by step, so that what slows the machine for a while slows both
        ratio = statistics.median(mine / other for mine, other in zip(way.seconds, base.seconds))
        graphs, breaks, again = way.counts
        peak = '' if way.peak != way.peak else f'{way.peak:.0f}'
        counted = f'{graphs} | {breaks} | {again} ({way.late[2]})' if way.compiles else '| |'
        rows.append(
            f'| {way.kind}, {"compiled" if way.compiles else "eager"} | {statistics.median(way.seconds) * 1000:.0f} | '
            f'{ratio:.2f} | {way.first:.1f} | {counted} | {peak} |'
        )
    return '\n'.join(rows)


def main() -> None:
    """Measure, print, and keep the page where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--device', default='cpu', choices=('cpu', 'cuda'))
    parser.add_argument('--rounds', type=int, default=15)
    parser.add_argument('--batch', type=int, default=16)
    parser.add_argument('--size', type=int, default=64, help='edge of the pictures, in pixels')
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--models', nargs='*', help='names of the page; all by default')
    add_write(parser, 'compiled_{device}.md')
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    chosen = [
        case for case in cases(arguments.batch, arguments.size) if not arguments.models or case.name in arguments.models
    ]
    machine = torch.cuda.get_device_name() if device.type == 'cuda' else f'CPU, {arguments.threads} threads'
    parts = [
        '# Training steps, eager and compiled',
        '',
        f'`python -m benchmarks.compiled {" ".join(sys.argv[1:])}`, {datetime.date.today()}, {machine}, Python '
        f'{platform.python_version()}, torch {torch.__version__}. Backend inductor, fused AdamW of torch, forward calls '
        f'compiled as `torch.compile(model)`; {arguments.rounds} steps of each, in turn. Graphs, breaks and recompilations are '
        f'those of the first three steps, and in brackets of all later ones. The peak is what a step adds to what lies there '
        f'anyway.',
        '',
    ]
    if len(cases(1, 32)) == 1:
        parts += ['torchvision is not installed here: ResNet-50 and Swin-T were not measured.', '']
    for case in chosen:
        parts += [table(case, measure(case, device, arguments.rounds)), '']
        gc.collect()
    page = '\n'.join(parts)
    print(page)
    if arguments.write is not None:
        path = Path(str(arguments.write).format(device=device.type))
        path.write_text(page, encoding='utf-8')


if __name__ == '__main__':
    main()
