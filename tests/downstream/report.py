"""The tables of what ``make test-downstream`` measured: printed, and with ``--write`` put into docs/downstream.md."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zoo import CASES

LEVELS = ('O1', 'O2', 'O4', 'O5')
PAGE = Path(__file__).resolve().parents[2] / 'docs' / 'downstream.md'
BEGIN, END = '<!-- measured: written by tests/downstream/report.py -->', '<!-- end of measured -->'


Rows = dict[str, dict[str, dict[str, Any]]]


def read(folder: Path) -> Rows:
    """model -> level -> what ``test_against_fp32.py`` kept, in the order of the zoo."""
    order = {case.name: index for index, case in enumerate(CASES)}
    found: Rows = {}
    for row in sorted(_rows(folder, two_ranks=False), key=lambda row: order[row['model']]):
        found.setdefault(row['model'], {}).setdefault(row['level'], {}).update(row)
    return found


def _rows(folder: Path, two_ranks: bool) -> list[dict[str, Any]]:
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob('*.json'))]
    return [row for row in rows if ('two_ranks' in row) == two_ranks]


def missing(found: Rows, ranks: list[dict[str, Any]]) -> list[str]:
    """What a complete run has and this one has not."""
    gaps = [] if ranks else ['the trainings on two ranks']
    return gaps + [
        f'{case.name} at {level}'
        for case in CASES
        for level in LEVELS
        if not {'off', 'weights'} <= found.get(case.name, {}).get(level, {}).keys()
    ]


def short(name: str) -> str:
    """The last two parts, which say enough."""
    return '.'.join(name.split('.')[-2:])


def tables(found: Rows) -> str:
    """Markdown."""
    where = sorted({row['where'] for levels in found.values() for row in levels.values() if 'where' in row})
    lines = [
        *(f'Measured: {place}.' for place in where),
        '',
        '**Loss against FP32**, in per cent: the distance of the loss from that of FP32, at the first weights, and at weights '
        'that were trained in FP32 for a dozen steps.',
        '',
        f'| model | {" | ".join(f"{weights}, {level}" for weights in ("first", "trained") for level in LEVELS)} |',
        f'|{" --- |" * (1 + 2 * len(LEVELS))}',
    ]
    for model, levels in found.items():
        cells = [_cell(levels, level, key, 100) for key in ('off', 'warm_off') for level in LEVELS]
        lines.append(f'| {model} | {" | ".join(cells)} |')
    lines += [
        '',
        '**What 36 steps on one batch make of the loss**: the mean of the last five losses, divided by the first one.',
        '',
        f'| model | FP32 | {" | ".join(LEVELS)} |',
        f'|{" --- |" * (2 + len(LEVELS))}',
    ]
    for model, levels in found.items():
        cells = [_cell(levels, level, 'fall') for level in LEVELS]
        fp32 = next((row['fp32_fall'] for row in levels.values() if 'fp32_fall' in row), None)
        lines.append(f'| {model} | {"" if fp32 is None else f"{fp32:.3f}"} | {" | ".join(cells)} |')
    whole = {_memory(levels, ('O1', 'O4'), key) for levels in found.values() for key in ('weights', 'gradients')} - {''}
    lines += [
        '',
        '**Memory of weights and gradients**, in per cent of FP32; masters, their gradients and optimizer state are not in it '
        f'([numbers](numbers.md)). What is above a half is BatchNorm. At O1 and O4 it is {", ".join(sorted(whole))} for all '
        'models.',
        '',
        '| model | weights, O2 and O5 | gradients, O2 and O5 |',
        '| --- | --- | --- |',
    ]
    for model, levels in found.items():
        cells = [_memory(levels, ('O2', 'O5'), key) for key in ('weights', 'gradients')]
        lines.append(f'| {model} | {" | ".join(cells)} |')
    lines += [
        '',
        '**Types**: the module classes whose outputs were FP32 in training (with a star: some of them), and the functions and '
        'methods that the FP32 registry cast up or took out of autocast. What is not named gave out 16-bit numbers.',
        '',
        '| model | level | FP32 modules | FP32 functions and methods |',
        '| --- | --- | --- | --- |',
    ]
    for model, levels in found.items():
        groups: dict[tuple[str, str], list[str]] = {}
        for level in LEVELS:
            if 'outputs' in levels.get(level, {}):
                row = levels[level]
                members = sorted({short(name) for name in row['members'] if not _inner(name)})
                groups.setdefault((_wide(row), _code(members)), []).append(level)
        for (modules, functions), names in groups.items():
            lines.append(f'| {model} | {", ".join(names)} | {modules} | {functions} |')
    return '\n'.join(lines) + '\n'


def two_ranks(rows: list[dict[str, Any]]) -> str:
    """Markdown of what ``test_distributed.py`` kept."""
    order = {case.name: index for index, case in enumerate(CASES)}
    lines = [
        '',
        '**Two ranks**: gradients that the optimizer used, compared with the mean of those that the two ranks had computed. '
        "*Distance* is the largest difference, where 1 is the rounding error of one addition in the gradient's type. *Would "
        "show* is the share of elements in which a rank's own gradient is further from the mean than the test allows: there, a "
        'gradient that was not averaged would be noticed.',
        '',
        '| model | level | with | steps | distance | would show |',
        '| --- | --- | --- | --- | --- | --- |',
    ]
    for row in sorted(rows, key=lambda row: (order[row['model']], row['what'])):
        seen = row['two_ranks']
        numbers = f'{seen["steps"]} | {seen["roundings"]:.2f} | {100 * seen["told_apart"]:.0f} %'
        lines.append(f'| {row["model"]} | {row["level"]} | {row["what"]} | {numbers} |')
    return '\n'.join(lines) + '\n' if rows else ''


def _cell(levels: dict[str, dict[str, Any]], level: str, key: str, times: float = 1) -> str:
    row = levels.get(level, {})
    return f'{times * row[key]:.3f}' if 'off' in row else ''


def _memory(levels: dict[str, dict[str, Any]], pair: tuple[str, str], key: str) -> str:
    values = {f'{100 * levels[level][key]:.1f}' for level in pair if key in levels.get(level, {})}
    return '; '.join(sorted(values))


def _wide(row: dict[str, Any]) -> str:
    narrow = {name for dtype, names in row['outputs'].items() if dtype != 'float32' for name in names}
    wide = [name for name in row['outputs'].get('float32', ()) if 'reprocessor' not in name.lower()]
    return _code(f'{name}*' if name in narrow else name for name in wide)


def _code(names: Iterable[str]) -> str:
    return ', '.join(f'`{name}`' for name in names) or 'none'


def _inner(name: str) -> bool:
    """torch's losses, which run inside loss modules and heads' methods, would fill the column."""
    return name.startswith('torch.') and 'loss' in name.rpartition('.')[2]


def main() -> None:
    """Print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('results', type=Path, help='the folder that pytest --results filled')
    parser.add_argument('--write', action='store_true', help='put them into docs/downstream.md')
    args = parser.parse_args()
    found, ranks = read(args.results), _rows(args.results, two_ranks=True)
    if not found and not ranks:
        raise SystemExit(f'{args.results} holds no results: run pytest tests/downstream --results {args.results}')
    text = tables(found) + two_ranks(ranks)
    print(text)
    if args.write:
        gaps = missing(found, ranks)
        if gaps:
            raise SystemExit(f'not written: the run was not complete or not green. Missing: {", ".join(gaps)}')
        page = PAGE.read_text(encoding='utf-8')
        before, rest = page.split(BEGIN)
        PAGE.write_text(before + BEGIN + '\n' + text + END + rest.split(END)[1], encoding='utf-8')


if __name__ == '__main__':
    main()
