"""The optimizer step, side by side: ``python -m benchmarks.step [--models resnet50 swin_t] [--write] [--device cuda]``.

Everything between the end of backward and updated weights: unscaling, overflow check, clipping, update, model copy, loss scale.
Every way takes it from gradients that a backward pass has just brought, on the parameters of a model, by turns in one run: this
package with its own and with torch's optimizers, mmengine's stock wrapper, torch.amp, sequences of torch operations that mean
the same as O2, and the fused optimizers of apex and TransformerEngine where they are installed.

``--end-to-end`` times whole training steps in their place, on a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import datetime
import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import mmengine
import torch

from amp_wrapper import ops

from .ops import RESULTS, Shapes, processor
from .step_counting import Counts, allocations, counts_of, launches
from .step_models import MODELS, TITLES, elements, shrunk
from .step_ways import BEST_OF, GROUPS, Case, Step, Unavailable, Way, noise, ways

#: Elements of the list that is counted: as many tensors as in the model, with the same shares.
COUNTED = 2**20
#: Elements of a tensor whose copy tells the bandwidth.
COPIED = {'cpu': 2**25, 'cuda': 2**28}
DTYPES = {'float16': torch.float16, 'bfloat16': torch.bfloat16}


@dataclasses.dataclass
class Row:
    """What was found out about one way.

    Attributes:
        way: Which.
        reason: Why it was not taken; '' where it was.
        counts: Of one step.
        estimate: Bytes for each parameter at the peak, from the list that is counted.
        resident: Bytes of weights, masters, state and gradients, for each parameter.
        peak: The same with what a step allocates on top, at its highest.
        launched: Kernels, and copies beside them; None on a CPU.
        host: Seconds until the call returns.
        times: Seconds of a step, one for each round.
    """

    way: Way
    reason: str = ''
    counts: Counts = dataclasses.field(default_factory=Counts)
    counted: int = 1
    estimate: tuple[float, float] = (0.0, 0.0)
    resident: float = 0.0
    peak: float = 0.0
    launched: tuple[int, int] | None = None
    host: float = 0.0
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def bytes(self) -> float:
        """Counted, for each parameter."""
        return self.counts.bytes / self.counted

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.times)


@dataclasses.dataclass
class Block:
    """One table.

    Attributes:
        model: Key of the list.
        case: What its ways have in common.
        threads: Of torch, on a CPU.
        rows: In order.
        copies: Bytes per second of a copy, one for each round.
        kept: Whether all ways were in memory together.
    """

    model: str
    case: Case
    threads: int
    rows: list[Row]
    copies: list[float] = dataclasses.field(default_factory=list)
    kept: bool = True

    @property
    def parameters(self) -> int:
        """How many."""
        return elements(MODELS[self.model]())

    def taken(self, group: str) -> list[Row]:
        """The rows of a group that were measured."""
        return [row for row in self.rows if row.way.group == group and row.times]

    def fused(self, group: str) -> Row | None:
        """The row that ratios of a group refer to: this package's fused way."""
        first = next(row for row in self.rows if row.way.group == group)
        return first if first.times else None

    def share(self, row: Row) -> float:
        """Counted bytes per second, over those of a copy."""
        return row.bytes * self.parameters / row.median / statistics.median(self.copies)


def ratio(row: Row, base: Row) -> float:
    """Time to that of another row, taken round by round."""
    return statistics.median(a / b for a, b in zip(row.times, base.times))


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


def started(way: Way, case: Case, shapes: Shapes) -> tuple[Step, float, float]:
    """Built, and the bytes for each parameter: resident with gradients, and at the peak of a step."""
    built: list[Step] = []
    tidy(case.device)
    resident, _ = allocations(lambda: built.append(start(way, case, shapes)), case.device)
    _, extra = allocations(built[0].run, case.device)
    built[0].finish()
    count = elements(shapes)
    return built[0], resident / count, (resident + extra) / count


def examine(way: Way, case: Case, shapes: Shapes) -> Row:
    """Everything about a way but its times, from small lists with as many tensors."""
    row = Row(way)
    small = shrunk(shapes, COUNTED)
    row.counted = elements(small)
    try:
        step, *row.estimate = started(way, case, small)
    except Unavailable as error:
        row.reason = str(error)
        return row
    step.prepare()
    row.counts = counts_of(step.run, [tensor.data_ptr() for tensor in step.host_tensors()])
    step.finish()
    if case.device.type == 'cpu':
        # nearly nothing is computed there, so the time is that of calls and checks
        step = start(way, case, [(1,)] * len(shapes))
        once(step, case.device, True)
        row.host = statistics.median(once(step, case.device)[1] for _ in range(20))
    return row


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
        need = row.estimate[1] * count
        if not row.reason and need > 0.95 * free:
            row.reason = f'needs {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free'
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
                step, row.resident, row.peak = started(row.way, case, shapes)
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
                row.host = statistics.median([returned for _, returned in pairs] + [row.host] * bool(turn))
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


# -- the page ----------------------------------------------------------------------------------------------------------


def head(device: torch.device) -> list[str]:
    """Names of the columns."""
    launched = 'kernels' if device.type == 'cuda' else 'operations'
    columns = ['way', 'ms', 'best ms', 'to fused', 'B/param', 'of copy', launched, 'host us', 'reads']
    return [*columns, 'resident B/param', 'peak B/param']


def cells(block: Block, row: Row) -> list[str]:
    """One line."""
    base = block.fused(row.way.group)
    if row.launched is None:
        launched = str(row.counts.operations)
    else:
        launched = f'{row.launched[0]}' + (f' + {row.launched[1]} copies' if row.launched[1] else '')
    return [
        row.way.name,
        f'{row.median * 1e3:.3g}' if row.median < 1 else f'{row.median * 1e3:.0f}',
        f'{min(row.times) * 1e3:.3g}' if min(row.times) < 1 else f'{min(row.times) * 1e3:.0f}',
        '' if base is None else f'{ratio(row, base):.2f}',
        f'{row.bytes:.1f}',
        f'{block.share(row):.2f}',
        launched,
        f'{row.host * 1e6:.0f}',
        str(row.counts.reads),
        f'{row.resident:.1f}',
        f'{row.peak:.1f}',
    ]


def table(block: Block) -> list[str]:
    """Markdown of one block."""
    case = block.case
    kind = str(case.dtype).split('.')[-1]
    threads = f', {block.threads} thread{"s" * (block.threads > 1)}' if case.device.type == 'cpu' else ''
    clip = 'clip by norm' if case.clip else 'no clip'
    lines = [f'### {TITLES[block.model]}, {case.optimizer}, {clip}, {kind}{threads}', '']
    lines += [
        f'{block.parameters:,} parameters in {len(MODELS[block.model]())} tensors; a copy moves '
        f'{statistics.median(block.copies) / 1e9:.1f} GB/s. '
        + (
            'All ways were in memory together.'
            if block.kept
            else 'They do not fit into memory together: each was built anew in each round.'
        ),
        '',
    ]
    columns = head(case.device)
    for group, title in GROUPS.items():
        taken = block.taken(group)
        if taken:
            lines += [f'| {title}: {" | ".join(columns)} |', '|' + ' --- |' * len(columns)]
            lines += [f'| {" | ".join(cells(block, row))} |' for row in taken]
            lines.append('')
    return lines


def missing(blocks: Sequence[Block]) -> list[str]:
    """Why which way is in which table no row."""
    reasons: dict[str, list[str]] = {}
    for block in blocks:
        for row in block.rows:
            if row.reason:
                line = f'{row.way.name} ({GROUPS[row.way.group]}): {row.reason}'
                # what has nothing to do with the list is said once
                where = f'{TITLES[block.model]}, {block.case.optimizer}' if row.estimate[1] else ''
                reasons.setdefault(line, []).append(where)
    return [
        f'- {line}' + (f' [{"; ".join(dict.fromkeys(filter(None, places)))}]' if any(places) else '')
        for line, places in reasons.items()
    ]


def targets(blocks: Sequence[Block]) -> list[str]:
    """The targets of the step beside what was measured."""
    device = blocks[0].case.device
    lines: list[list[str]] = []

    def add(block: Block, target: str, value: str, met: bool) -> None:
        kind = str(block.case.dtype).split('.')[-1]
        place = f'{TITLES[block.model]}, {block.case.optimizer}, {"clip" if block.case.clip else "no clip"}, {kind}'
        where = f', {block.threads} threads' if device.type == 'cpu' else ''
        lines.append([target, place + where, value, 'met' if met else 'missed'])

    for block in blocks:
        fused = block.fused('half')
        if device.type == 'cpu':
            rows = [row for row in block.taken('half') if row.way.name.startswith(BEST_OF)]
            if fused is not None and rows and block.case.optimizer == 'AdamW' and block.case.clip:
                best = min(rows, key=lambda row: ratio(row, fused))
                value = ratio(best, fused)
                add(block, 'at least 2.5 times the best torch ops', f'{value:.2f} ({best.way.name})', value >= 2.5)
            alone = block.fused('single')
            torch_fused = next((row for row in block.taken('single') if row.way.name == 'torch fused'), None)
            if alone is not None and torch_fused is not None:
                value = ratio(torch_fused, alone)
                # a hundredth is less than two runs of the same code differ
                add(block, "FP32: not slower than torch's fused optimizer", f'{value:.2f}', value >= 0.99)
        elif fused is not None and fused.launched is not None:
            for row in block.taken('half'):
                if row.way.name.startswith(fused.way.name) and block.parameters >= 1e8:
                    share = block.share(row)
                    name = row.way.name.removeprefix('this package, ')
                    add(block, f'{name}: at least 0.85 of copy', f'{share:.2f}', share >= 0.85)
            add(block, 'at most 6 launches', str(fused.launched[0]), fused.launched[0] <= 6)
            if len(MODELS[block.model]()) <= 220:
                add(block, 'under 150 us of host time at about 200 tensors', f'{fused.host * 1e6:.0f}', fused.host < 150e-6)
            peers = [row for row in block.taken('half') if not row.way.name.startswith('this package')]
            if peers:
                best = min(peers, key=lambda row: ratio(row, fused))
                value = ratio(best, fused)
                add(block, 'at least 1.5 times the fastest peer', f'{value:.2f} ({best.way.name})', value >= 1.5)
        if fused is not None and fused.counts.reads:
            add(block, 'no host read', str(fused.counts.reads), False)
    if not lines:
        return ['None of the targets could be measured: see "Not measured".']
    return [
        '| target | where | measured | |',
        '| --- | --- | --- | --- |',
        *(f'| {" | ".join(line)} |' for line in lines),
    ]


def page(blocks: Sequence[Block], command: str, plot: str | None, rounds: int) -> str:
    """The result as a page."""
    device = blocks[0].case.device
    cpu = device.type == 'cpu'
    machine = f'{processor()}, {platform.machine()}' if cpu else torch.cuda.get_device_name(device)
    unused = [
        'bytes moved by caches and by passes inside an operation',
        *(['launches, device waits and everything else of a GPU: there was none'] if cpu else []),
    ]
    lines = [
        '# The optimizer step, side by side',
        '',
        f'`{command}`: {datetime.date.today()}, {machine}, Python {platform.python_version()}, torch {torch.__version__}, '
        f'mmengine {mmengine.__version__}, {ops.backend_of(device)}. Load of the machine: {os.getloadavg()[0]:.2f}. '
        f'{rounds} rounds, in which all ways of a table take turns.',
        '',
        'A step is everything between the end of backward and updated weights. "To fused" is the time over that of this '
        "package's fused way in the first row of the same table, the median of the rounds. B/param are the bytes that the "
        'operations of a step read and write, counted by `benchmarks/step_counting.py`; "of copy" is these bytes over the time, '
        'as a share of the bandwidth of `copy_` in the same rounds. '
        + (
            'Operations are those that the dispatcher sees. Host time is the time of the step with as many tensors of one '
            'element each. '
            if cpu
            else 'Host time is the time until the call returns. '
        )
        + 'Reads are values that the host asks the device for. Resident are weights, masters, state and gradients, '
        'peak is with what the step allocates on top; both as the allocator of torch tells it.',
        '',
        'Gradients of the tables of 16-bit weights are 16-bit, all parameters are cast, and clipping always clips.',
        '',
        *([f'![Time and bytes]({plot})', ''] if plot else []),
        '## Targets',
        '',
        *targets(blocks),
        '',
        '## Tables',
        '',
        *(line for block in blocks for line in table(block)),
        '## Not measured',
        '',
        *missing(blocks),
        *(f'- {text[0].upper()}{text[1:]}.' for text in unused),
    ]
    return '\n'.join([*lines, ''])


def draw(blocks: Sequence[Block], path: Path) -> None:
    """Bars of time and bytes: the 16-bit ways with clipping, the first type and number of threads, every model."""
    import matplotlib

    matplotlib.use('Agg')
    # text stays text: a third of the size
    matplotlib.rcParams['svg.fonttype'] = 'none'
    from matplotlib import pyplot

    first = blocks[0]
    chosen = [b for b in blocks if (b.case.dtype, b.threads) == (first.case.dtype, first.threads)]
    chosen = [b for b in chosen if b.case.clip] or chosen
    kinds = list(dict.fromkeys(block.case.optimizer for block in chosen))
    names = {kind: [b.rows for b in chosen if b.case.optimizer == kind][0] for kind in kinds}
    rows = {
        kind: [row.way.name for row in of if row.way.group != 'single' and any_taken(chosen, kind, row.way)]
        for kind, of in names.items()
    }
    height = sum(len(of) for of in rows.values()) * 0.42 + 1.4 * len(kinds)
    figure, grid = pyplot.subplots(
        len(kinds),
        2,
        figsize=(12, height),
        squeeze=False,
        sharey='row',
        gridspec_kw={'height_ratios': [len(rows[kind]) for kind in kinds], 'width_ratios': [3, 2]},
    )
    colours = pyplot.get_cmap('tab10').colors
    for (left, right), kind in zip(grid, kinds):
        of = [block for block in chosen if block.case.optimizer == kind]
        thick = 0.8 / len(of)
        for number, block in enumerate(of):
            base = block.fused('half')
            for place, name in enumerate(rows[kind]):
                row = next(row for row in block.rows if row.way.name == name)
                if not row.times:
                    continue
                where = place + (number - (len(of) - 1) / 2) * thick
                value = row.median * 1e3 if base is None else ratio(row, base)
                label = TITLES[block.model] if place == 0 or name == next(r.way.name for r in block.rows if r.times) else None
                left.barh(where, value, thick, color=colours[number], label=label)
                left.text(value, where, f' {value:.2f}', va='center', fontsize=7)
                if number == 0:
                    right.barh(place, row.bytes, 0.6, color='0.6')
                    right.text(row.bytes, place, f' {row.bytes:.0f}', va='center', fontsize=8)
        left.set_yticks(range(len(rows[kind])), rows[kind], fontsize=8)
        left.invert_yaxis()
        left.set_title(f'{kind}: time' + (' of this package, fused = 1' if of[0].fused('half') else ' in ms'))
        left.legend(fontsize=8, loc='lower right')
        right.set_title(f'{kind}: bytes for each parameter, counted')
        for axes in (left, right):
            axes.spines[['top', 'right']].set_visible(False)
            axes.margins(x=0.12)
    clip = 'clip by norm' if chosen[0].case.clip else 'no clip'
    threads = f', {first.threads} thread(s)' if first.case.device.type == 'cpu' else ''
    figure.suptitle(f'The optimizer step, {str(first.case.dtype).split(".")[-1]}, {clip}{threads}')
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={'Date': None} if path.suffix == '.svg' else None)
    pyplot.close(figure)


def any_taken(blocks: Sequence[Block], kind: str, way: Way) -> bool:
    """Whether a way has a row in any of the tables of an optimizer."""
    of = [block for block in blocks if block.case.optimizer == kind]
    return any(row.times for block in of for row in block.rows if row.way.name == way.name and row.way.group == way.group)


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
        '--write', nargs='?', type=Path, const=Path(), metavar='FILE', help='to FILE, or benchmarks/results/step_<device>.md'
    )
    parser.add_argument('--end-to-end', action='store_true', help='whole training steps, on a GPU')
    args = parser.parse_args(words)
    device = torch.device(args.device)
    if device.type == 'cuda' and not torch.cuda.is_available():
        parser.error('--device cuda: torch sees no GPU.')
    command = ' '.join(['python -m benchmarks.step', *(sys.argv[1:] if words is None else words)])
    path = args.write
    if path == Path():
        path = RESULTS / f'step_{"training" if args.end_to_end else device.type}.md'
    if args.end_to_end:
        if device.type != 'cuda':
            parser.error('--end-to-end needs a GPU: on a CPU, 16-bit layers say nothing about training. Add --device cuda.')
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
    gc.unfreeze()
    say(text)


if __name__ == '__main__':
    main()
