"""What the package costs on the host: ``python -m benchmarks.host [--tree LABEL=PATH ...] [--write]``.

Importing it and asking the tools for ``--help``; calls of Python and changes of file in one iteration; and the time of an
optimizer step on 200 tiny tensors beside ``torch.amp.GradScaler`` with torch's fused AdamW. Any number of source trees are
measured side by side in one run, by turns, each in processes of their own with the tree on PYTHONPATH: two commits of this
project, say, made with ``git worktree add`` and ``python setup.py build_ext --inplace``.

Calls are counted with :func:`sys.setprofile`: every frame of Python that is entered and whose code lies in the package. A
change of file is a call of another file than the package's call before it. Both depend on the version of Python, which has run
list comprehensions without a frame of their own since 3.12.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .pages import add_write, processor
from .wrapping import mmengine_version

ROOT = Path(__file__).resolve().parents[1]
PROBE = Path(__file__).with_name('host_probe.py')
LEVELS = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')
COUNTED = {
    'wrapper': '`AmpOptimWrapper.update_params`',
    'functional': 'functional, `torch.optim.AdamW`',
    'fused': 'functional, `FusedAdamW`',
}
TIMED = {
    'functional': 'functional, `FusedAdamW`',
    'torch fused': "functional, torch's fused AdamW",
    'wrapper': '`AmpOptimWrapper`, `FusedAdamW`',
}
HIDDEN = """
import sys
import importlib.util as util
for name in ('mmengine', 'mmcv'):
    sys.modules[name] = None
find_spec = util.find_spec
util.find_spec = lambda name, *rest: None if name in ('mmengine', 'mmcv') else find_spec(name, *rest)
"""
LOADED = """
import importlib, json, sys
import torch
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
before = set(sys.modules)
from amp_wrapper import amp
print(json.dumps(sorted(name for name in set(sys.modules) - before if name.partition('.')[0] != 'amp_wrapper')))
"""


@dataclasses.dataclass
class Tree:
    """A source tree, and what was found out about it.

    Attributes:
        label: Its name on the page.
        path: Its folder.
        seconds: Command to the times of its processes: by the clock, and of the processor.
        loaded: Modules beside torch's, and mmengine's where it is not hidden; by whether it is.
        counts: (way, level) to calls and changes of file.
        ratios: (way, level) to the medians of each process: of torch and of ours, without and with the backward pass.
    """

    label: str
    path: Path
    seconds: dict[str, list[tuple[float, float]]] = dataclasses.field(default_factory=dict)
    loaded: dict[bool, list[str]] = dataclasses.field(default_factory=dict)
    counts: dict[tuple[str, str], tuple[int, int]] = dataclasses.field(default_factory=dict)
    ratios: dict[tuple[str, str], list[dict[str, Sequence[float]]]] = dataclasses.field(default_factory=dict)

    def run(self, *words: str) -> str:
        """What Python says with this tree on its path.

        Raises:
            SystemExit: It failed.
        """
        env = {**os.environ, 'PYTHONPATH': str(self.path), 'OMP_NUM_THREADS': '1'}
        done = subprocess.run([sys.executable, *words], cwd=self.path, env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f'{self.label}: {" ".join(words)[:200]}\n{done.stderr[-4000:]}')
        return done.stdout

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """What is timed: its name on the page, and the words for Python."""
        yield '`import torch`', ['-c', 'import torch']
        yield '`from amp_wrapper import amp`', ['-c', 'from amp_wrapper import amp']
        if has_mmengine():
            yield '`from amp_wrapper import amp`, mmengine hidden', ['-c', f'{HIDDEN}from amp_wrapper import amp']
        yield '`import amp_wrapper`', ['-c', 'import amp_wrapper']
        yield '`amp-wrapper info`', ['-m', 'amp_wrapper', 'info']
        yield '`amp-wrapper info --help`', ['-m', 'amp_wrapper', 'info', '--help']
        if (self.path / 'amp_wrapper' / '__main__.py').is_file():
            yield '`amp-wrapper --help`', ['-m', 'amp_wrapper', '--help']
            yield '`amp-wrapper train --help`', ['-m', 'amp_wrapper', 'train', '--help']
        for path in sorted((self.path / 'tools').glob('*.py')):
            if "__name__ == '__main__'" not in path.read_text(encoding='utf-8'):
                continue
            if (path.stem in ('train', 'test') and not has_mmengine()) or (
                'migrate' in path.stem and not has('libcst')
            ):
                continue
            yield f'`tools/{path.name} --help`', [f'tools/{path.name}', '--help']


def has(name: str) -> bool:
    """Whether a package is installed."""
    return find_spec(name) is not None


def has_mmengine() -> bool:
    """Whether the wrapper can be measured."""
    return has('mmengine')


# -- measuring ---------------------------------------------------------------------------------------------------------


def progress(text: str) -> None:
    """Say how far the measurement is."""
    print(f'{time.strftime("%H:%M:%S")}  {text}', file=sys.stderr, flush=True)


def measure_imports(trees: Sequence[Tree], rounds: int) -> None:
    """Times of whole processes, by turns, and the modules that are loaded."""
    for index in range(rounds + 1):
        for tree in trees:
            progress(f'imports, round {index} of {rounds}: {tree.label}')
            for name, words in tree.commands():
                start, used = time.perf_counter(), children()
                tree.run(*words)
                # the first round writes what is compiled to bytecode, and fills the file cache
                if index:
                    spent = (time.perf_counter() - start, children() - used)
                    tree.seconds.setdefault(name, []).append(spent)
    for tree in trees:
        first: list[str] = []
        if has_mmengine():
            found = json.loads(tree.run('-c', LOADED, '[]'))
            first = [name for name in found if name.partition('.')[0] == 'mmengine']
            tree.loaded[False] = json.loads(tree.run('-c', LOADED, json.dumps(first)))
        tree.loaded[True] = json.loads(tree.run('-c', HIDDEN + LOADED, '[]'))


def children() -> float:
    """Seconds of the processor that ended processes have taken."""
    used = os.times()
    return used.children_user + used.children_system


def measure_calls(trees: Sequence[Tree], levels: Sequence[str]) -> None:
    """Calls and changes of file; these depend on no machine, so once each."""
    for tree in trees:
        for way in COUNTED:
            progress(f'calls of Python, {tree.label}: {way}')
            for level in levels:
                if way != 'wrapper' or has_mmengine():
                    found = json.loads(tree.run(str(PROBE), 'calls', level, way))
                    tree.counts[way, level] = (found['calls'], found['changes'])


def measure_times(trees: Sequence[Tree], levels: Sequence[str], processes: int, steps: int) -> None:
    """Times of steps, in several processes for each, by turns."""
    for index in range(processes):
        for way in TIMED:
            for level in levels:
                progress(f'times, process {index + 1} of {processes}: {way}, {level}')
                for tree in trees:
                    if way != 'wrapper' or has_mmengine():
                        found = json.loads(tree.run(str(PROBE), 'times', level, way, str(steps)))
                        tree.ratios.setdefault((way, level), []).append(found)


# -- the page ----------------------------------------------------------------------------------------------------------


def _row(*cells: Any) -> str:
    return f'| {" | ".join(map(str, cells))} |'


def _head(*cells: str) -> list[str]:
    return ['', _row(*cells), _row(*('---' for _ in cells))]


def import_lines(trees: Sequence[Tree], rounds: int) -> list[str]:
    """Seconds of processes, and modules."""
    lines = [
        '## Importing',
        '',
        f'Seconds of a whole process by the clock, the fastest of {rounds} by turns (noise only adds); then those of the '
        'processor, their median, and in brackets how many more than for `import torch` with the same tree. The aim: the '
        'report and `--help` within half a second of it.',
        *_head('', *(tree.label for tree in trees)),
    ]
    for name in dict.fromkeys(name for tree in trees for name in tree.seconds):
        lines.append(_row(name, *(seconds(tree, name) for tree in trees)))
    lines += ['', 'Modules that `from amp_wrapper import amp` loads, and neither torch nor mmengine does:']
    lines += _head('', *(tree.label for tree in trees))
    for hidden in (False, True):
        if all(hidden in tree.loaded for tree in trees):
            title = 'mmengine hidden' if hidden else 'beside mmengine'
            lines.append(_row(title, *(modules(tree.loaded[hidden]) for tree in trees)))
    return lines


def seconds(tree: Tree, name: str) -> str:
    """A cell: by the clock, of the processor, and beyond those of torch."""
    if name not in tree.seconds:
        return ''
    clock, used = zip(*tree.seconds[name])
    base = statistics.median(used for _, used in tree.seconds['`import torch`'])
    return f'{min(clock):.2f}; {statistics.median(used):.2f} ({statistics.median(used) - base:+.2f})'


def modules(names: Sequence[str]) -> str:
    """How many, and packages that are among them."""
    if not names:
        return 'none'
    known = [name for name in ('torch._dynamo', 'torch._inductor', 'sympy') if name in names]
    return f'{len(names)}' + (f', among them {", ".join(f"`{name}`" for name in known)}' if known else '')


def call_lines(trees: Sequence[Tree], levels: Sequence[str]) -> list[str]:
    """Calls, changes of file."""
    lines = [
        '',
        '## Calls of Python',
        '',
        'Calls / changes of file in the package, of one iteration after some others: `update_params` with `FusedAdamW` and '
        '`clip_grad=dict(max_norm=1)` (Linear, BatchNorm, ReLU, Linear: six parameters), or forward to `zero_grad` of the '
        'functional interface (Linear, ReLU, Linear: four). A call is a frame of Python that is entered and whose code lies in '
        "the package; a change of file is a call of another file than the package's call before it.",
        *_head('', 'level', *(tree.label for tree in trees)),
    ]
    for way, title in COUNTED.items():
        for level in levels:
            if all((way, level) in tree.counts for tree in trees):
                lines.append(_row(title, level, *('{} / {}'.format(*tree.counts[way, level]) for tree in trees)))
    return lines


def spread(values: Sequence[float]) -> str:
    """The median, and what lies around it."""
    median = statistics.median(values)
    return f'**{median:.2f}**' + (f' ({min(values):.2f} to {max(values):.2f})' if len(values) > 1 else '')


def time_lines(trees: Sequence[Tree], levels: Sequence[str], processes: int, steps: int) -> list[str]:
    """Times of steps, as shares of torch's."""
    cells = [f'{tree.label}: {what}' for tree in trees for what in ('microseconds', 'of torch', 'with backward')]
    lines = [
        '',
        '## A step on 200 tiny tensors',
        '',
        'What scales the loss, unscales, checks, steps, moves the scale and frees the gradients, without the forward and '
        'without the backward pass; time of the thread. "Of torch" is its share of `torch.amp.GradScaler` with '
        '`torch.optim.AdamW(fused=True)` over FP32 weights, in the same process by turns; "with backward" that of both with a '
        f'short backward pass. Medians of {steps} steps, then of {processes} processes, and the range of these. '
        'The aim: at most 1.00.',
        *_head('', 'level', *cells),
    ]
    for way, title in TIMED.items():
        for level in levels:
            cells = []
            for tree in trees:
                found = tree.ratios.get((way, level), [])
                if found:
                    cells.append(f'{statistics.median(one["ours"][0] for one in found) * 1e6:.0f}')
                    cells += [spread([one['ours'][i] / one['torch'][i] for one in found]) for i in (0, 1)]
            if cells:
                lines.append(_row(title, level, *cells))
    return lines


def report(
    trees: Sequence[Tree], levels: Sequence[str] = LEVELS, rounds: int = 5, processes: int = 3, steps: int = 200
) -> str:
    """Measure, and make the page.

    Args:
        trees: To be measured side by side.
        levels: Of 'O0' to 'O5'.
        rounds: Processes for each import.
        processes: For each time of a step.
        steps: Timed in each of these.
    """
    measure_imports(trees, rounds)
    measure_calls(trees, levels)
    measure_times(trees, levels, processes, steps)
    lines = [
        '# Cost on the host',
        '',
        f'{datetime.date.today()}, {processor()}, {platform.machine()}, Python '
        f'{platform.python_version()}, torch {torch.__version__}, {mmengine_version()}, one thread; one run of '
        f'`python -m benchmarks.host`. Load of the machine at its end: {os.getloadavg()[0]:.2f}.',
        '',
        *import_lines(trees, rounds),
        *call_lines(trees, levels),
        *time_lines(trees, levels, processes, steps),
    ]
    return '\n'.join(lines) + '\n'


def parse_tree(text: str) -> Tree:
    """``LABEL=PATH``."""
    label, _, path = text.partition('=')
    folder = Path(path).resolve()
    if not label or not (folder / 'amp_wrapper' / '__init__.py').is_file():
        raise argparse.ArgumentTypeError(f'{text!r} is not LABEL=PATH with a folder that holds amp_wrapper/')
    return Tree(label, folder)


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument(
        '--tree', action='append', type=parse_tree, metavar='LABEL=PATH', help='default: this one alone'
    )
    parser.add_argument('--levels', nargs='+', choices=LEVELS, default=LEVELS)
    parser.add_argument('--rounds', type=int, default=5, help='processes for each import')
    parser.add_argument('--processes', type=int, default=3, help='for each time of a step')
    parser.add_argument('--steps', type=int, default=200, help='timed in each process')
    add_write(parser, 'host_cpu.md')
    args = parser.parse_args()
    text = report(args.tree or [Tree('this tree', ROOT)], args.levels, args.rounds, args.processes, args.steps)
    print(text)
    if args.write is not None:
        args.write.write_text(text)


if __name__ == '__main__':
    main()
