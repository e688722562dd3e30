"""The optimizer step, side by side: ``python -m benchmarks.step [--models resnet50 swin_t] [--write] [--device cuda]``.

Everything between the end of backward and updated weights: unscaling, overflow check, clipping, update, model copy, loss scale.
Every way begins with fresh gradients of a backward pass, on the parameters of a model, by turns in one run: this
package with its own and with torch's optimizers, mmengine's stock wrapper, torch.amp, sequences of torch operations that mean
the same as O2, and the fused optimizers of apex and TransformerEngine where they are installed.

``--end-to-end`` times whole training steps in their place, on a GPU. ``--beside-torch`` times ``FusedAdamW``, without a
compiled library and with it, beside torch's own AdamW at the same level.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from amp_wrapper.ops import loader

from . import pages
from .ops import RESULTS, Shapes, resnet50
from .step_counting import allocations, counts_of, launches
from .step_models import MODELS, elements, shrunk
from .step_page import Block, Row, draw, page, table
from .step_ways import Case, Ours, Step, Unavailable, Way, noise, our_optimizer, torch_optimizer, ways

#: Elements of the list that is counted: as many tensors as in the model, with the same shares.
COUNTED = 2**20
#: Elements of a tensor whose copy tells the bandwidth.
COPIED = {'cpu': 2**25, 'cuda': 2**28}
#: What ``--beside-torch`` steps; on tiny tensors, the time is that of the host.
BESIDE_TORCH: dict[str, Shapes] = {
    '100 small tensors': [(1000,)] * 100,
    '1,000 small tensors': [(1000,)] * 1000,
    '200 tiny tensors': [(4, 4)] * 200,
    'ResNet-50, 25.6 million': resnet50(),
}
DTYPES = {'float16': torch.float16, 'bfloat16': torch.bfloat16}


# -- measuring ---------------------------------------------------------------------------------------------------------


def wait(device: torch.device) -> None:
    """Until the GPU is idle."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def tidy(device: torch.device) -> None:
    """Give freed memory back, so that the next way finds it."""
    gc.collect()
    if device.type == 'cuda':
        torch.cuda.empty_cache()
    elif hasattr(libc := ctypes.CDLL(None), 'malloc_trim'):
        libc.malloc_trim(0)


def free_bytes(device: torch.device) -> int:
    """What can still be allocated."""
    if device.type == 'cuda':
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path('/proc/meminfo').read_text(encoding='utf-8').splitlines()
    except OSError:
        return sys.maxsize
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith('MemAvailable')), sys.maxsize)


def start(way: Way, case: Case, shapes: Shapes) -> Step:
    """Built, with the state that the first step makes, and new gradients."""
    step = way.build(case, shapes)
    once(step, case.device)
    step.prepare()
    return step


def once(step: Step, device: torch.device, prepared: bool = False) -> tuple[float, float]:
    """Seconds of one step, and until its call returned."""
    if not prepared:
        step.prepare()
    wait(device)
    begin = time.perf_counter()
    step.run()
    returned = time.perf_counter()
    wait(device)
    end = time.perf_counter()
    step.finish()
    return end - begin, returned - begin


def started(way: Way, case: Case, shapes: Shapes) -> tuple[Step, float, float, float]:
    """Built, and the bytes for each parameter: resident with gradients, at the peak of a step, and at any moment so far."""
    built: list[Step] = []
    tidy(case.device)
    resident, most = allocations(lambda: built.append(start(way, case, shapes)), case.device)
    _, extra = allocations(built[0].run, case.device)
    built[0].finish()
    count = elements(shapes)
    peak = resident + extra
    return built[0], resident / count, peak / count, max(most, peak) / count


def examine(way: Way, case: Case, shapes: Shapes) -> Row:
    """Everything about a way but its times, from small lists with as many tensors."""
    row = Row(way)
    try:
        _examine(row, case, shapes)
    except Unavailable as error:
        row.reason = str(error)
    except Exception as error:
        if not way.foreign:
            raise
        row.reason = f'{type(error).__name__}: {error}'
    return row


def _examine(row: Row, case: Case, shapes: Shapes) -> None:
    small = shrunk(shapes, COUNTED)
    row.counted = elements(small)
    step, *row.estimate = started(row.way, case, small)
    step.prepare()
    row.counts = counts_of(step.run, [tensor.data_ptr() for tensor in step.host_tensors()])
    step.finish()
    if case.device.type == 'cpu':
        # nearly nothing is computed there, so the time is that of calls and checks
        step = start(row.way, case, [(1,)] * len(shapes))
        once(step, case.device, True)
        row.hosts = [once(step, case.device)[1] for _ in range(20)]


def measure(model: str, case: Case, threads: int, rounds: int) -> Block:
    """One table: every way that fits into memory, by turns."""
    if case.device.type == 'cpu':
        torch.set_num_threads(threads)
    shapes = MODELS[model]()
    # made at the first use, and no part of any way
    noise(case.device)
    block = Block(model, case, threads, [examine(way, case, shapes) for way in ways(case)])
    count = block.parameters
    tidy(case.device)
    free = free_bytes(case.device)
    for row in block.rows:
        # building takes more than a step does, and a CPU's allocator keeps much of what is freed meanwhile
        need = row.estimate[2] * count
        if not row.reason and need > (0.6 if case.device.type == 'cpu' else 0.95) * free:
            row.reason = f'needs {need / 1e9:.1f} GB and room to build them, and {free / 1e9:.1f} GB are free'
    chosen = [row for row in block.rows if not row.reason]
    together = sum(row.estimate[0] for row in chosen) + max((row.estimate[1] for row in chosen), default=0.0)
    block.kept = together * count < 0.75 * free
    size = max(2**20, min(COPIED[case.device.type], count))
    kept: dict[str, Step] = {}
    repeats = 1 if block.kept else 3
    for turn in range(rounds if block.kept else -(-rounds // repeats)):
        block.copies.append(copy_bandwidth(size, case.device))
        for row in chosen:
            if turn == 0:
                step, row.resident, row.peak, _ = started(row.way, case, shapes)
                if case.device.type == 'cuda':
                    step.prepare()
                    row.launched = launches(step.run)
                    step.finish()
            elif block.kept:
                step = kept[row.way.name, row.way.group]
            else:
                step = row.way.build(case, shapes)
                once(step, case.device)
            pairs = [once(step, case.device) for _ in range(repeats)]
            row.times.append(statistics.median(taken for taken, _ in pairs))
            if case.device.type == 'cuda':
                row.hosts.append(statistics.median(returned for _, returned in pairs))
            if block.kept:
                kept[row.way.name, row.way.group] = step
            else:
                del step
                tidy(case.device)
    return block


def copy_bandwidth(size: int, device: torch.device) -> float:
    """Bytes that a copy of float32 reads and writes per second: the best of three."""
    source = torch.ones(size, device=device)
    target = torch.zeros_like(source)
    times = []
    for _ in range(3):
        wait(device)
        begin = time.perf_counter()
        target.copy_(source)
        wait(device)
        times.append(time.perf_counter() - begin)
    return 8 * size / min(times)


# -- beside torch's AdamW ----------------------------------------------------------------------------------------------


class Halves(Ours):
    """A step of this package in which every other parameter has a gradient, the same ones each time."""

    _turn = 0

    def prepare(self) -> None:
        super().prepare()
        for weight in list(self.model.parameters())[self._turn % 2 :: 2]:
            weight.grad = None


class Alternating(Halves):
    """The same, by turns."""

    def prepare(self) -> None:
        self._turn += 1
        super().prepare()


@contextmanager
def ops_from(setting: str) -> Iterator[None]:
    """Let a value of ``AMP_WRAPPER_OPS`` say what serves the ops: 'torch' for no library."""
    with mock.patch.dict(os.environ, AMP_WRAPPER_OPS=setting):
        loader.library.cache_clear()
        # not in the time of a step
        loader.library()
        yield
    loader.library.cache_clear()


def beside_torch(shapes: Shapes, level: str, device: torch.device, rounds: int) -> list[str]:
    """Measure a row in the present setting: milliseconds of torch's fastest AdamW, ours to it, and changing to steady sets."""
    case, levels = Case('AdamW', False, torch.float16, device), (level, level)

    def build(name: str) -> Step:
        # who steps, or which gradients there are
        if name in ('fused', 'foreach'):
            return Ours(case, shapes, levels, functools.partial(torch_optimizer, **{name: True}), {})
        kind = {'ours': Ours, 'steady': Halves, 'changing': Alternating}[name]
        return kind(case, shapes, levels, our_optimizer, {})

    times: dict[str, list[float]] = {name: [] for name in ('ours', 'steady', 'changing', 'fused', 'foreach')}
    # what is built first lies elsewhere in memory, and what runs after another step finds other memory in the caches
    for built in (list(times), list(times)[::-1]):
        # those before are freed first
        steps: dict[str, Step] = {}
        steps |= {name: build(name) for name in built}
        for turn in range(3 + (rounds + 1) // 2):
            for name, step in sorted(steps.items(), reverse=bool(turn % 2)):
                taken, _ = once(step, device)
                # the first ones make state
                times[name] += [taken] if turn >= 3 else []
    best = min(times['fused'], times['foreach'], key=statistics.median)
    pairs = (times['ours'], best), (times['changing'], times['steady'])
    ratios = [statistics.median(a / b for a, b in zip(*pair)) for pair in pairs]
    return [f'{statistics.median(best) * 1e3:.3f}', *(f'{ratio:.2f}' for ratio in ratios)]


def beside_torch_table(device: torch.device, threads: int, rounds: int) -> str:
    """Measure all rows of ``--beside-torch``."""
    torch.set_num_threads(threads)
    rows = []
    for title, shapes in BESIDE_TORCH.items():
        for level in ('O0', 'O2', 'O5'):
            many = rounds if elements(shapes) > 1e7 else 10 * rounds
            for setting, library in (('torch', 'none'), ('', 'compiled')):
                with ops_from(setting):
                    rows.append([title, level, library, *beside_torch(shapes, level, device, many)])
                print('  '.join(rows[-1]), file=sys.stderr, flush=True)
                tidy(device)
    heads = ['parameters', 'level', 'library', "torch's AdamW, ms", 'ours to it', 'changing to steady']
    return '\n'.join(pages.table(heads, rows))


# -- the command -------------------------------------------------------------------------------------------------------


def write(blocks: Sequence[Block], path: Path | None, command: str, rounds: int) -> str:
    """The page, with its plot beside it where it is written."""
    if path is None:
        return page(blocks, command, None, rounds)
    plot = path.with_suffix('.svg')
    if any(row.times for block in blocks for row in block.rows):
        draw(blocks, plot)
    text = page(blocks, command, plot.name, rounds)
    path.write_text(text, encoding='utf-8')
    return text


def main(words: Sequence[str] | None = None, say: Callable[[str], object] = print) -> None:
    """Print the tables; write them with ``--write``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--models', nargs='+', choices=list(MODELS), default=['resnet50', 'swin_t', 'vit_b16'])
    parser.add_argument('--optimizers', nargs='+', choices=('AdamW', 'SGD'), default=['AdamW', 'SGD'])
    parser.add_argument('--clip', nargs='+', choices=('on', 'off'), default=['on', 'off'])
    parser.add_argument('--dtype', nargs='+', choices=list(DTYPES), default=['float16'])
    parser.add_argument('--threads', type=int, nargs='+', default=[1, 2], help='of torch, on a CPU')
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument(
        '--write',
        nargs='?',
        type=Path,
        const=Path(),
        metavar='FILE',
        help='to FILE, or benchmarks/results/step_<device>.md',
    )
    parser.add_argument('--end-to-end', action='store_true', help='whole training steps, on a GPU')
    parser.add_argument('--beside-torch', action='store_true', help="FusedAdamW beside torch's AdamW, printed only")
    args = parser.parse_args(words)
    if torch.device(args.device).type == 'cuda' and not torch.cuda.is_available():
        parser.error('--device cuda: torch sees no GPU.')
    # with its number, as tensors have it
    device = torch.empty(0, device=args.device).device
    if args.beside_torch:
        say(beside_torch_table(device, args.threads[0], args.rounds))
        return
    command = ' '.join(['python -m benchmarks.step', *(sys.argv[1:] if words is None else words)])
    path = args.write
    if path == Path():
        path = RESULTS / f'step_{"training" if args.end_to_end else device.type}.md'
    if args.end_to_end:
        if device.type != 'cuda':
            parser.error(
                '--end-to-end needs a GPU: on a CPU, 16-bit layers say nothing about training. Add --device cuda.'
            )
        from .step_training import report

        text = report(device, args.rounds, command)
        if path is not None:
            path.write_text(text, encoding='utf-8')
        say(text)
        return
    blocks: list[Block] = []
    text = ''
    # what was imported is there to stay: without this, each collection would look at all of it
    gc.collect()
    gc.freeze()
    try:
        for model in args.models:
            for optimizer in args.optimizers:
                for clip in args.clip:
                    for dtype in args.dtype:
                        for threads in args.threads if device.type == 'cpu' else args.threads[:1]:
                            case = Case(optimizer, clip == 'on', DTYPES[dtype], device)
                            blocks.append(measure(model, case, threads, args.rounds))
                            print('\n'.join(table(blocks[-1])), file=sys.stderr, flush=True)
                            # whatever happens later, what is done is kept
                            text = write(blocks, path, command, args.rounds)
                            tidy(device)
    finally:
        gc.unfreeze()
    say(text)


if __name__ == '__main__':
    main()
