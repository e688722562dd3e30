"""Measures whole training steps, eager and compiled: ``python -m benchmarks.compiled [--device cuda]``.

FP32, ``torch.amp`` and the levels that a device has fast types for: O4 and O5 on a CPU, on a GPU O1 and O2 as well. Each way
has a process of its own, since torch.compile looks for a graph among those of all models of a class. They take their steps in
turn.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch._dynamo import convert_frame, utils

from .loops import Loop
from .machine import MIB, Memory, median, options, parse, publish, ratio, say, seconds, table
from .models import Training, Transformer, resnet50, small_resnet, tiny_transformer

KINDS = {
    'quick': ('torch.amp, bfloat16', 'O5'),
    'cpu': ('FP32', 'torch.amp, bfloat16', 'O4', 'O5'),
    'cuda': ('FP32', 'torch.amp', 'torch.amp, bfloat16', 'O1', 'O2', 'O4', 'O5'),
}
HEADS = ('model', 'level', '', 'ms', 'to eager', 'to compiled torch.amp', 'first step, s', 'graphs', 'breaks',
         'recompilations', 'later', 'peak, MiB')  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Begun:
    """Counts of the first six steps of a way.

    Attributes:
        first: Seconds of the first step.
        counts: Graphs, breaks of graphs and recompilations in three steps, and recompilations in three more.
        peak: MiB that a step adds at its peak.
    """

    first: float
    counts: tuple[int, int, int, int]
    peak: float


def transformer() -> Transformer:
    """Build 6 blocks of width 384, without dropout."""
    return Transformer(384, 6)


def transformer_with_dropout() -> Transformer:
    """Build 6 blocks of width 384, with dropout."""
    return Transformer(384, 6, 0.1)


def trainings(device: str, quick: bool) -> tuple[Training, ...]:
    """Return what is trained."""
    if quick:
        return (Training('1 block of width 16', tiny_transformer, (2, 4, 16), 'AdamW'),)
    images = Training('ResNet-50', resnet50, (32, 3, 128, 128), 'SGD')
    if device == 'cpu':
        images = Training('small ResNet', small_resnet, (16, 3, 64, 64), 'SGD')
    return (
        Training('transformer', transformer, (16, 128, 384), 'AdamW'),
        Training('transformer with dropout', transformer_with_dropout, (16, 128, 384), 'AdamW'),
        images,
    )


def counts() -> tuple[int, int, int]:
    """Return graphs, breaks and recompilations so far."""
    again = sum(times - 1 for times in convert_frame.FRAME_COMPILE_COUNTER.values())
    return utils.counters['stats']['unique_graphs'], sum(utils.counters['graph_break'].values()), again


def begin(loop: Loop, device: str) -> Begun:
    """Take the first steps, and count."""
    before, first = counts(), seconds(loop.step, device)
    loop.step()
    loop.step()
    third = counts()
    for _ in range(3):
        loop.step()
    later, memory = counts()[2] - third[2], Memory(device)
    held = memory.now()
    memory.reset()
    loop.step()
    graphs, breaks, again = (now - then for now, then in zip(third, before))
    return Begun(first, (graphs, breaks, again, later), (memory.peak() - held) / MIB)


def serve(pipe: Connection, training: Training, kind: str, compiles: bool, device: str, threads: int) -> None:
    """Begin a way in this process, and take a step whenever one is asked for.

    Args:
        pipe: Sends the fields of :class:`Begun`, then the seconds of each step; None ends it.
        training: What is trained.
        kind: FP32, ``torch.amp`` or a level.
        compiles: Whether the model is compiled.
        device: Where.
        threads: Of torch, on a CPU.
    """
    torch.set_num_threads(threads)
    loop = Loop(training, kind, device)
    if compiles:
        loop.model.compile()
    pipe.send(dataclasses.astuple(begin(loop, device)))
    while pipe.recv() is not None:
        pipe.send(seconds(loop.step, device))


class Way:
    """A process of :func:`serve`, and the seconds of its steps."""

    def __init__(self, *args: Any) -> None:
        context = multiprocessing.get_context('spawn')
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, *args), daemon=False)
        self._process.start()
        other.close()
        self.begun = Begun(*self._pipe.recv())
        self.times: list[float] = []

    def step(self) -> None:
        """Take a step."""
        self._pipe.send(True)
        self.times.append(self._pipe.recv())

    def end(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join()


def measure(training: Training, kinds: Sequence[str], device: str, threads: int, rounds: int) -> list[list[str]]:
    """Return the rows of one model."""
    ways: dict[tuple[str, bool], Way] = {}
    for kind in kinds:
        for compiles in (False, True):
            say(f'{training.name}, {kind}, {"compiled" if compiles else "eager"}')
            ways[kind, compiles] = Way(training, kind, compiles, device, threads)
    for turn in range(rounds):
        for way in list(ways.values())[:: -1 if turn % 2 else 1]:
            way.step()
    amp, rows = ways['torch.amp, bfloat16', True].times, []
    for (kind, compiles), way in ways.items():
        way.end()
        row = [training.name, kind, 'compiled' if compiles else 'eager', median(way.times)]
        row.append(ratio(way.times, ways[kind, False].times) if compiles else '')
        counted = map(str, way.begun.counts) if compiles else ('', '', '', '')
        rows.append([*row, ratio(way.times, amp), f'{way.begun.first:.1f}', *counted, f'{way.begun.peak:.0f}'])
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the page."""
    args = parse(options(__doc__, 15), words)
    kinds = KINDS['quick' if args.quick else args.device]
    # nothing is there that was compiled before
    with tempfile.TemporaryDirectory() as folder:
        os.environ['TORCHINDUCTOR_CACHE_DIR'] = folder
        rows = [
            row
            for training in trainings(args.device, args.quick)
            for row in measure(training, kinds, args.device, args.threads, args.rounds)
        ]
    note = 'Medians; ratios are medians of the ratios round by round, with their quartiles. Backend inductor.'
    publish(args, 'compiled', 'Training steps, eager and compiled', [note, *table(HEADS, rows)])


if __name__ == '__main__':
    main()
