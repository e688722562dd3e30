"""Whole training steps, eager and compiled: ``python -m benchmarks.compiled [--write]``.

FP32, ``torch.autocast``, and the levels that a device has fast types for: O4 and O5 on a CPU, O1 and O2 as well on a GPU.
ResNet-50 and Swin-T of torchvision, and torch's own transformer encoder, without and with its dropout. The levels train with
``FusedAdamW``, the others with torch's fused AdamW. Each way has a process of its own, as torch.compile looks for a graph among
all those of a class of models. They take their steps in turn, so that a slow minute of the machine meets all of them; tables
give medians, and ratios step by step. The time of the first step is that of compiling. Peak memory is what a step adds to what
lies there anyway.

torchvision is needed for two of the models; without it they are left out, and the page says so.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import datetime
import gc
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import Library

from amp_wrapper import FusedAdamW, amp

from .pages import add_write, processor

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

    def __init__(self, dims: int, depth: int, classes: int, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            dims, dims // 64, 4 * dims, dropout, 'gelu', batch_first=True, norm_first=True
        )
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
    sequences = (batch, 128, 384)
    found = [
        Case('transformer', lambda: Encoder(384, 6, 100, 0.0), sequences),
        Case('transformer with dropout', lambda: Encoder(384, 6, 100, 0.1), sequences),
    ]
    models = _torchvision()
    if models is not None:
        picture = (batch, 3, size, size)
        found += [
            Case('ResNet-50', lambda: models.resnet50(num_classes=100), picture),
            Case('Swin-T', lambda: models.swin_t(num_classes=100), picture),
        ]
    return found


@dataclasses.dataclass(frozen=True)
class Begun:
    """What the first steps of a way were like.

    Attributes:
        first: Seconds that the first step took.
        graphs: That were compiled in the first three steps.
        breaks: Of graphs, in the first three steps.
        again: Recompilations in the first three steps.
        later: Recompilations after them.
        peak: MiB that a step adds at its peak; NaN where that is not known.
    """

    first: float
    graphs: int
    breaks: int
    again: int
    later: int
    peak: float


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
        self.is_level = kind.startswith('O')
        self.optimizer: torch.optim.Optimizer
        if self.is_level:
            self.optimizer = FusedAdamW(self.model.parameters(), lr=1e-4)
            amp.initialize(self.model, self.optimizer, opt_level=kind, verbosity=0)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.call = torch.compile(self.model) if compiles else self.model
        self.x = torch.randn(case.shape, device=device)
        self.labels = torch.randint(0, case.classes, case.shape[:1], device=device)

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

    def begin(self) -> Begun:
        """The first steps: compile, and count."""
        before = _counts()
        start = time.perf_counter()
        self.step()
        first = time.perf_counter() - start
        self.step()
        self.step()
        third = _counts()
        for _ in range(3):
            self.step()
        last = _counts()
        with _peak(self.device) as peak:
            self.step()
        graphs, breaks, again = (now - then for now, then in zip(third, before))
        return Begun(first, graphs, breaks, again, last[2] - third[2], peak[0])

    def time(self) -> float:
        """Take one step more. The seconds that it takes."""
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start


def serve(pipe: Connection, name: str, kind: str, compiles: bool, options: argparse.Namespace) -> None:
    """A process for one way: begins, and takes a step whenever it is asked for one.

    Args:
        pipe: Where it is asked.
        name: Of the model.
        kind: As :class:`Way` takes it.
        compiles: As :class:`Way` takes it.
        options: Of the command line.
    """
    torch.set_num_threads(options.threads)
    case = next(case for case in cases(options.batch, options.size) if case.name == name)
    way = Way(case, kind, compiles, torch.device(options.device))
    while (asked := pipe.recv()) is not None:
        pipe.send(way.begin() if asked == 'begin' else way.time())


class Process:
    """The other end of :func:`serve`."""

    def __init__(self, case: Case, kind: str, compiles: bool, options: argparse.Namespace) -> None:
        self.kind, self.compiles = kind, compiles
        self.label = f'{kind}, {"compiled" if compiles else "eager"}'
        context = multiprocessing.get_context('spawn')
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, case.name, kind, compiles, options), daemon=False)
        self._process.start()
        other.close()
        self.begun: Begun = self._ask('begin')
        self.seconds: list[float] = []

    def _ask(self, what: str) -> Any:
        self._pipe.send(what)
        return self._pipe.recv()

    def time(self) -> None:
        """Take one step more, and note how long it takes."""
        self.seconds.append(self._ask('time'))

    def end(self) -> None:
        """The process is not needed any more."""
        self._pipe.send(None)
        self._process.join()


def _counts() -> tuple[int, int, int]:
    counters = torch._dynamo.utils.counters
    again = sum(times - 1 for times in torch._dynamo.convert_frame.FRAME_COMPILE_COUNTER.values())
    return counters['stats']['unique_graphs'], sum(counters['graph_break'].values()), again


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
    # what lies free goes back to the system, so that it counts again
    trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)
    if trim is not None:
        trim(0)
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


def measure(case: Case, options: argparse.Namespace) -> list[Process]:
    """All ways of one model, timed in turn.

    Args:
        case: The model.
        options: Of the command line.
    """
    ways = []
    for kind in ('FP32', 'autocast', *_LEVELS[options.device]):
        for compiles in (False, True):
            print(f'{case.name}: {kind}, {"compiled" if compiles else "eager"}', file=sys.stderr, flush=True)
            ways.append(Process(case, kind, compiles, options))
    for number in range(options.rounds):
        print(f'{case.name}: round {number + 1} of {options.rounds}', file=sys.stderr, flush=True)
        # one after another, then back
        for way in ways if number % 2 else ways[::-1]:
            way.time()
    for way in ways:
        way.end()
    return ways


def _ratio(way: Process, other: Process) -> str:
    """The median of the ratios step by step, so that what slows the machine for a while slows both; and their quartiles."""
    ratios = [mine / its for mine, its in zip(way.seconds, other.seconds)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return f'{middle:.2f} ({low:.2f} to {high:.2f})'


def table(case: Case, ways: list[Process]) -> str:
    """The rows of one model."""
    found = {(way.kind, way.compiles): way for way in ways}
    rows = [
        f'## {case.name}, input {" x ".join(map(str, case.shape))}',
        '',
        '| | ms a step | to compiled autocast | to the same, eager | first step, s | graphs | breaks | recompilations (later) '
        '| peak, MiB |',
        '| --- | --- | --- | --- | --- | --- | --- | --- | --- |',
    ]
    for way in ways:
        begun = way.begun
        peak = '' if begun.peak != begun.peak else f'{begun.peak:.0f}'
        counted = f'{begun.graphs} | {begun.breaks} | {begun.again} ({begun.later})' if way.compiles else '| |'
        eager = _ratio(way, found[way.kind, False]) if way.compiles else ''
        rows.append(
            f'| {way.label} | {statistics.median(way.seconds) * 1000:.0f} | {_ratio(way, found["autocast", True])} | {eager} | '
            f'{begun.first:.1f} | {counted} | {peak} |'
        )
    return '\n'.join(rows)


def main() -> None:
    """Measure, print, and keep the page where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--device', default='cpu', choices=('cpu', 'cuda'))
    parser.add_argument('--rounds', type=int, default=15)
    parser.add_argument('--batch', type=int, default=16)
    parser.add_argument('--size', type=int, default=112, help='edge of the pictures, in pixels')
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--models', nargs='*', help='names of the page; all by default')
    add_write(parser, 'compiled_{device}.md')
    arguments = parser.parse_args()
    chosen = [
        case for case in cases(arguments.batch, arguments.size) if not arguments.models or case.name in arguments.models
    ]
    machine = (
        torch.cuda.get_device_name() if arguments.device == 'cuda' else f'{processor()}, {arguments.threads} threads'
    )
    parts = [
        '# Training steps, eager and compiled',
        '',
        f'`python -m benchmarks.compiled {" ".join(sys.argv[1:])}`, {datetime.date.today()}, {machine}, Python '
        f'{platform.python_version()}, torch {torch.__version__}. Backend inductor, forward calls compiled as '
        f'`torch.compile(model)`; `FusedAdamW` at the levels, fused AdamW of torch for the others; a process each; '
        f'{arguments.rounds} steps of each, in turn. Ratios are medians of the ratios step by step, with their quartiles. '
        f'Graphs, breaks and recompilations are those of the first three steps, and in brackets of the later ones. The peak is '
        f'what a step adds to what lies there anyway.',
        '',
    ]
    if len(cases(1, 32)) == 1:
        parts += ['torchvision is not installed here: ResNet-50 and Swin-T were not measured.', '']
    # nothing is there that was compiled before
    with tempfile.TemporaryDirectory() as folder:
        os.environ['TORCHINDUCTOR_CACHE_DIR'] = folder
        for case in chosen:
            parts += [table(case, measure(case, arguments)), '']
    page = '\n'.join(parts)
    print(page)
    if arguments.write is not None:
        path = Path(str(arguments.write).format(device=arguments.device))
        path.write_text(page, encoding='utf-8')


if __name__ == '__main__':
    main()
