"""What a level costs and saves: ``python -m benchmarks.level_numbers [--write]`` makes the tables of ``docs/numbers.md``.

Bytes for each parameter, by formula, of the tensors and of the process; activations of a CNN and of a transformer; time of
whole training steps. All on a CPU; ``python -m benchmarks.step --device cuda --end-to-end`` times the steps on a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from amp_wrapper import ops
from amp_wrapper.policy import LEVELS

from .numbers_memory import PARTS, Setup, formula, measure, saved_bytes, setups
from .pages import add_write, processor, put, table
from .step_training import CPU_TRAININGS, TORCH_TYPES, Training, Transformer, resnet
from .step_training import measure as measure_steps
from .wrapping import mmengine_version

PAGE = Path(__file__).parents[1] / 'docs/numbers.md'
#: What rows of torch's own ways are called here.
NAMES = {
    'FP32': 'FP32, torch alone',
    'torch.amp': 'stock autocast, float16',
    'torch.amp, bfloat16': 'stock autocast, bfloat16',
}
#: Interface and optimizers of a column of sums.
COLUMNS = (
    ('wrapper', 'Fused{}', '`AmpOptimWrapper`, `Fused{}`'),
    ('wrapper', '{}', "`AmpOptimWrapper`, torch's `{}`"),
    ('functional', 'Fused{}', '`amp.initialize`, `Fused{}`'),
    ('functional', '{}', "`amp.initialize`, torch's `{}`"),
)
#: What process memory is measured for.
MEASURED = (
    Setup('FP32', 'AdamW', 'torch'),
    Setup('torch.amp', 'AdamW', 'torch'),
    *(Setup(level, 'FusedAdamW') for level in LEVELS),
    Setup('O2', 'FusedAdamW', split=True),
    Setup('O2', 'FusedAdamW', split=True, small_state=True),
    Setup('O2', 'AdamW'),
    Setup('O2', 'FusedAdamW', 'functional'),
    Setup('O0', 'FusedSGD'),
    Setup('O2', 'FusedSGD'),
    Setup('O3', 'FusedSGD'),
)
#: Models whose activations are counted: how to build one, and the shape of one sample.
ACTIVATIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    'ResNet-50': (lambda: resnet(64, (3, 4, 6, 3)), (3, 224, 224)),
    'transformer': (lambda: Transformer(768, 12), (196, 768)),
}


def shown(name: str) -> str:
    """A level, or what torch's own way is called."""
    return NAMES.get(name, name)


def parts_table() -> list[str]:
    """Bytes for each parameter with AdamW, by what they are for, from the definition of the level."""
    rows = []
    for setup in (*setups('AdamW', 'torch'), *setups('FusedAdamW', 'wrapper')):
        found = formula(setup)
        together = sum(found[part] for part in PARTS)
        copies = str(found['casts']) if found['casts'] else ''
        name = NAMES.get(setup.level) or setup.name
        rows.append([name, *(str(found[part]) for part in PARTS), f'**{together}**', copies])
    return table(['level', *PARTS, 'together', "autocast's copies of weights"], rows)


def sums_table(kind: str) -> list[str]:
    """The sums through each interface.

    Args:
        kind: 'AdamW' or 'SGD', which is with momentum.
    """
    rows = []
    for setup in setups('FusedAdamW', 'wrapper'):
        cells = []
        for api, optimizer, _ in COLUMNS:
            if setup.split and (api, optimizer) != COLUMNS[0][:2]:
                cells.append('')
                continue
            found = formula(Setup(setup.level, optimizer.format(kind), api, setup.split, setup.small_state))
            cells.append(str(sum(found[part] for part in PARTS)))
        rows.append([setup.name, *cells])
    return table(['level', *(title.format(kind) for *_, title in COLUMNS)], rows)


def process_table(
    say: Callable[[str], object], width: int, layers: int, chosen: Sequence[Setup] = MEASURED
) -> list[str]:
    """The same of a perceptron that is trained, each way in a process of its own."""
    rows = []
    for setup in chosen:
        found = measure(setup, width, layers)
        counted = formula(setup)
        name = NAMES.get(setup.level) or setup.name
        api = {'wrapper': '`AmpOptimWrapper`', 'functional': '`amp.initialize`', 'torch': 'torch'}[setup.api]
        rows.append([name, f'{api}, `{setup.optimizer}`', str(sum(counted[part] for part in PARTS))])
        rows[-1] += [f'{found[key]:.1f}' for key in ('counted', 'held', 'peak', 'between')]
        say(' | '.join(rows[-1]))
    heads = ['by formula', 'of its tensors', 'of the process', 'at its peak', 'between steps']
    return table(['level', 'interface, optimizer', *heads], rows)


def activation_table(
    say: Callable[[str], object], models: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = ACTIVATIONS
) -> list[str]:
    """What a forward pass keeps for the backward pass: for each sample, and whatever the batch is; a row for each level."""
    names = (*TORCH_TYPES, *LEVELS)
    rows = [[shown(name)] for name in names]
    for title, (build, shape) in models.items():
        base = 0.0
        for name, row in zip(names, rows):
            setup = Setup(name, 'SGD', 'torch') if name in TORCH_TYPES else Setup(name, 'FusedSGD')
            one, two = (saved_bytes(setup, build(), torch.zeros(count, *shape)) for count in (1, 2))
            each, fixed = two - one, 2 * one - two
            base = base or each
            row += [f'{each / 1e6:.1f}', f'{each / base:.2f}', f'{fixed / 1e6:.1f}']
            say(f'{title}: {" | ".join([row[0], *row[-3:]])}')
    heads = [f'{title}: {what}' for title in models for what in ('MB for each sample', 'of FP32', 'fixed MB')]
    return table(['level', *heads], rows)


def time_table(rounds: int, trainings: Sequence[Training] = CPU_TRAININGS) -> list[str]:
    """Whole training steps: forward, backward, clipping, optimizer."""
    rows: list[list[str]] = []
    for training in trainings:
        found, _ = measure_steps(training, torch.device('cpu'), rounds)
        rows += [[model, shown(name), f'`{kind}`', ms, ratio] for model, name, kind, ms, ratio, _ in found]
    return table(['model', 'level', 'optimizer', 'ms', 'times as fast as FP32'], rows)


def head(command: str) -> str:
    """Where and when."""
    return (
        f'`{command}`, {datetime.date.today()}, {processor()}, {platform.machine()}, one thread, Python '
        f'{platform.python_version()}, torch {torch.__version__}, {mmengine_version()}, ops: {ops.backend()}.'
    )


def main(words: Sequence[str] | None = None, say: Callable[[str], object] = print) -> None:
    """Measure, print the page, and write it and the tables of ``docs/numbers.md`` with ``--write``."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.level_numbers', description=(__doc__ or '').splitlines()[0]
    )
    parser.add_argument(
        '--width', type=int, default=2500, help='of the perceptron; 8 layers of 2500 are 50 million parameters'
    )
    parser.add_argument('--layers', type=int, default=8)
    parser.add_argument('--rounds', type=int, default=9, help='of the timed steps')
    parser.add_argument('--docs', type=Path, default=PAGE, metavar='FILE', help='whose tables --write replaces')
    add_write(parser, 'numbers_cpu.md')
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    command = ' '.join(['python -m benchmarks.level_numbers', *(sys.argv[1:] if words is None else words)])

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    count = args.width**2 * args.layers
    tables: dict[str, list[str]] = {
        'parts': parts_table(),
        'adamw': sums_table('AdamW'),
        'sgd': sums_table('SGD'),
        'process': process_table(progress, args.width, args.layers),
        'activations': activation_table(progress),
        'times': time_table(args.rounds),
    }
    tables['measured'] = [head(command)]
    text = page(tables, count)
    if args.write is not None:
        args.write.write_text(text, encoding='utf-8')
        for name, lines in tables.items():
            put(args.docs, name, lines)
    say(text)


def page(tables: dict[str, list[str]], count: int) -> str:
    """The page of the results."""
    parts: list[tuple[str, str, str]] = [
        ('Bytes for each parameter, AdamW, by formula', '', 'parts'),
        ('Together, AdamW, by formula', '', 'adamw'),
        ('Together, SGD with momentum, by formula', '', 'sgd'),
        ('Bytes for each parameter, measured', f'A perceptron of {count / 1e6:.1f} million parameters.', 'process'),
        (
            'Activations, measured',
            'What a forward pass in training mode keeps for the backward pass: for each sample, and fixed, whatever the batch '
            'is. A sample is an image of 224 x 224 (ResNet-50), or a sequence of 196 (12 transformer blocks of width 768).',
            'activations',
        ),
        (
            'Whole training steps, measured',
            f'Inputs: {inputs()}. Time of the process, variants by turns, medians; the ratios are medians of those of '
            'each round.',
            'times',
        ),
    ]
    lines = ['# Numbers', '', *tables['measured'], '', 'What they mean: `docs/numbers.md`.']
    for title, words, name in parts:
        lines += ['', f'## {title}', '', *([words, ''] if words else []), *tables[name]]
    return '\n'.join([*lines, ''])


def inputs() -> str:
    """Shapes of the batches of the timed steps."""
    return '; '.join(f'{one.name}: {" x ".join(map(str, one.shape))}' for one in CPU_TRAININGS)


if __name__ == '__main__':
    main()
