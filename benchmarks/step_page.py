"""The page of ``python -m benchmarks.step``: what was found out about each way, tables, targets, a plot."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from amp_wrapper import ops

from .pages import processor
from .step_counting import Counts
from .step_models import MODELS, TITLES, elements
from .step_ways import BEST_OF, GROUPS, Case, Way
from .wrapping import mmengine_version


@dataclasses.dataclass
class Row:
    """What was found out about one way.

    Attributes:
        way: Which.
        reason: Why it was not taken; '' where it was.
        counts: Of one step.
        counted: Elements that they belong to.
        estimate: Bytes for each parameter, resident, at the peak of a step and at any moment, of the list that is counted.
        resident: Bytes of weights, masters, state and gradients, for each parameter.
        peak: The same with what a step allocates on top, at its highest.
        launched: Kernels, and copies beside them; None on a CPU.
        hosts: Seconds until the call returns.
        times: Seconds of a step, one for each round.
    """

    way: Way
    reason: str = ''
    counts: Counts = dataclasses.field(default_factory=Counts)
    counted: int = 1
    estimate: Sequence[float] = (0.0, 0.0, 0.0)
    resident: float = 0.0
    peak: float = 0.0
    launched: tuple[int, int] | None = None
    hosts: list[float] = dataclasses.field(default_factory=list)
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def bytes(self) -> float:
        """Counted, for each parameter."""
        return self.counts.bytes / self.counted

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.times)

    @property
    def host(self) -> float:
        """Seconds until the call returns."""
        return statistics.median(self.hosts)


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


def threads_of(block: Block) -> str:
    """How many, after a comma; nothing on a GPU."""
    return f', {block.threads} thread{"s" * (block.threads > 1)}' if block.case.device.type == 'cpu' else ''


def table(block: Block) -> list[str]:
    """Markdown of one block."""
    case = block.case
    kind = str(case.dtype).split('.')[-1]
    threads = threads_of(block)
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
        where = threads_of(block)
        lines.append([target, place + where, value, 'met' if met else 'missed'])

    for block in blocks:
        fused = block.fused('half')
        if block.parameters < 2e7:
            # the targets are for lists of models
            continue
        if device.type == 'cpu':
            rows = [row for row in block.taken('half') if row.way.name.startswith(BEST_OF)]
            if fused is not None and rows and block.case.optimizer == 'AdamW' and block.case.clip:
                ratios = {row.way.name.removeprefix(BEST_OF): ratio(row, fused) for row in rows}
                value = min(ratios.values())
                each = ', '.join(f'{name} {times:.2f}' for name, times in ratios.items())
                add(block, 'at least 2.5 times as fast as the fastest torch ops', f'{value:.2f} ({each})', value >= 2.5)
            alone = block.fused('single')
            torch_fused = next((row for row in block.taken('single') if row.way.name == 'torch fused'), None)
            if alone is not None and torch_fused is not None and not block.case.clip:
                value = ratio(torch_fused, alone)
                add(block, "FP32: not slower than torch's fused optimizer", f'{value:.2f}', value >= 1.0)
        elif fused is not None and fused.launched is not None:
            for row in block.taken('half'):
                if row.way.name.startswith(fused.way.name) and block.parameters >= 1e8:
                    share = block.share(row)
                    name = row.way.name.removeprefix('this package, ')
                    add(block, f'{name}: at least 0.85 of copy', f'{share:.2f}', share >= 0.85)
            add(block, 'at most 6 launches', str(fused.launched[0]), fused.launched[0] <= 6)
            if len(MODELS[block.model]()) <= 220:
                add(
                    block,
                    'under 150 us of host time at about 200 tensors',
                    f'{fused.host * 1e6:.0f}',
                    fused.host < 150e-6,
                )
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
    models = '; '.join(dict.fromkeys(TITLES[block.model] for block in blocks))
    lines = [
        f'# The optimizer step, side by side: {models}',
        '',
        f'`{command}`: {datetime.date.today()}, {machine}, Python {platform.python_version()}, torch {torch.__version__}, '
        f'{mmengine_version()}, ops: {ops.backend()}. Load of the machine: {os.getloadavg()[0]:.2f}. '
        f'{rounds} rounds, in which all ways of a table take turns.',
        '',
        'A step is everything between the end of backward and updated weights. "To fused" is the time over that of this '
        "package's fused way in the first row of the same table, the median of the rounds. B/param are the bytes that the "
        'operations of a step read and write, counted by `benchmarks/step_counting.py`; "of copy" is these bytes over the '
        'time, as a share of the bandwidth of `copy_` in the same rounds. '
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
    names = {kind: next(b.rows for b in chosen if b.case.optimizer == kind) for kind in kinds}
    rows = {
        kind: [row.way.name for row in of if row.way.group != 'single' and any_taken(chosen, kind, row.way)]
        for kind, of in names.items()
    }
    height = sum(len(of) for of in rows.values()) * 0.42 + 1.2 * len(kinds) + 0.8
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
                left.barh(where, value, thick, color=colours[number])
                left.text(value, where, f' {value:.2f}', va='center', fontsize=7)
                if number == 0:
                    right.barh(place, row.bytes, 0.6, color='0.6')
                    right.text(row.bytes, place, f' {row.bytes:.0f}', va='center', fontsize=8)
        left.set_yticks(range(len(rows[kind])), rows[kind], fontsize=8)
        left.invert_yaxis()
        left.set_title(f'{kind}: time' + (', this package with masters = 1' if of[0].fused('half') else ' in ms'))
        right.set_title(f'{kind}: bytes for each parameter, counted')
        for axes in (left, right):
            axes.spines[['top', 'right']].set_visible(False)
            axes.margins(x=0.12, y=0.01)
    clip = 'clip by norm' if chosen[0].case.clip else 'no clip'
    threads = threads_of(first)
    figure.suptitle(f'The optimizer step, {str(first.case.dtype).split(".")[-1]}, {clip}{threads}')
    models = list(dict.fromkeys(TITLES[block.model] for block in chosen))
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colours[number]) for number in range(len(models))]
    figure.legend(handles, models, loc='lower center', ncols=len(models), frameon=False)
    figure.tight_layout(rect=(0, 0.4 / height, 1, 1 - 0.2 / height))
    figure.savefig(path, dpi=110, metadata={'Date': None} if path.suffix == '.svg' else None, bbox_inches='tight')
    pyplot.close(figure)


def any_taken(blocks: Sequence[Block], kind: str, way: Way) -> bool:
    """Whether a way has a row in any of the tables of an optimizer."""
    of = [block for block in blocks if block.case.optimizer == kind]
    return any(
        row.times for block in of for row in block.rows if row.way.name == way.name and row.way.group == way.group
    )
