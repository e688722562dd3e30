"""The tables of what ``make test-downstream`` measured: printed, and with ``--write`` put into docs/openmmlab.md."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from zoo import CASES

LEVELS = ('O1', 'O2', 'O4', 'O5')
PAGE = Path(__file__).resolve().parents[2] / 'docs' / 'openmmlab.md'
BEGIN, END = '<!-- measured: written by tests/downstream/report.py -->', '<!-- end of measured -->'
PACKAGES = ('mmengine', 'mmcv', 'mmpretrain', 'mmsegmentation', 'mmdet')


Rows = dict[str, dict[str, dict[str, Any]]]


def read(folder: Path) -> Rows:
    """model -> level -> what ``test_judged_by_fp32.py`` kept, in the order of the zoo."""
    order = {case.name: index for index, case in enumerate(CASES)}
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob('*.json'))]
    found: Rows = {}
    for row in sorted(rows, key=lambda row: order[row['model']]):
        found.setdefault(row['model'], {}).setdefault(row['level'], {}).update(row)
    return found


def version(name: str) -> str:
    """Of a distribution; mmcv may be mmcv-lite."""
    for candidate in (name, f'{name}-lite'):
        try:
            return f'{candidate} {metadata.version(candidate)}'
        except metadata.PackageNotFoundError:
            continue
    return f'no {name}'


def short(name: str) -> str:
    """The last two parts, which say enough."""
    return '.'.join(name.split('.')[-2:])


def tables(found: Rows) -> str:
    """Markdown."""
    versions = ', '.join([f'torch {torch.__version__}', *map(version, PACKAGES)])
    lines = [
        f'Measured on {datetime.date.today()}, {platform.machine()} CPU with {os.cpu_count()} cores, Python '
        f'{platform.python_version()}, {versions}.',
        '',
        '**Against FP32**: distance of the first loss from that of FP32, then what 36 steps on one batch make of the loss '
        '(mean of the last five, as a part of the first).',
        '',
        '| model | FP32 | O1 | O2 | O4 | O5 |',
        '| --- | --- | --- | --- | --- | --- |',
    ]
    for model, levels in found.items():
        cells = [_cell(levels, level, lambda row: f'{100 * row["off"]:.3f} %, {row["fall"]:.3f}') for level in LEVELS]
        fp32 = next((row['fp32_fall'] for row in levels.values() if 'fp32_fall' in row), None)
        lines.append(f'| {model} | {"" if fp32 is None else f"{fp32:.3f}"} | {" | ".join(cells)} |')
    lines += [
        '',
        '**Memory**: bytes of weights and of gradients, as a part of FP32. The rest above a half is BatchNorm.',
        '',
        '| model | O1, O4 | O2, O5 |',
        '| --- | --- | --- |',
    ]
    for model, levels in found.items():
        cells = [_memory(levels, pair) for pair in (('O1', 'O4'), ('O2', 'O5'))]
        lines.append(f'| {model} | {" | ".join(cells)} |')
    lines += [
        '',
        '**Types**: the module classes whose outputs were FP32 (all others gave out 16-bit numbers), and the members of the '
        'FP32 registry that were at work in training.',
        '',
        '| model | FP32 modules at O1 | at O2 | at O4 | at O5 | FP32 functions at every level |',
        '| --- | --- | --- | --- | --- | --- |',
    ]
    for model, levels in found.items():
        cells = [_cell(levels, level, _wide) for level in LEVELS]
        members = sorted({short(n) for row in levels.values() for n in row.get('members', ()) if not _inner(n)})
        lines.append(f'| {model} | {" | ".join(cells)} | {_code(members)} |')
    return '\n'.join(lines) + '\n'


def _cell(levels: dict[str, dict[str, Any]], level: str, show: Callable[[dict[str, Any]], str]) -> str:
    row = levels.get(level, {})
    return show(row) if 'off' in row else ''


def _memory(levels: dict[str, dict[str, Any]], pair: tuple[str, str]) -> str:
    values = {
        f'{100 * levels[level]["weights"]:.1f} %, {100 * levels[level]["gradients"]:.1f} %'
        for level in pair
        if 'weights' in levels.get(level, {})
    }
    return '; '.join(sorted(values))


def _wide(row: dict[str, Any]) -> str:
    narrow = {name for dtype, names in row['outputs'].items() if dtype != 'float32' for name in names}
    return _code(
        name for name in row['outputs'].get('float32', ()) if name not in narrow and 'reprocessor' not in name.lower()
    )


def _code(names: Iterable[str]) -> str:
    return ', '.join(f'`{name}`' for name in names) or 'none'


def _inner(name: str) -> bool:
    """Torch's losses run inside loss modules."""
    return name.startswith('torch.') and 'loss' in name.rpartition('.')[2]


def main() -> None:
    """Print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('results', type=Path, help='the folder that pytest --results filled')
    parser.add_argument('--write', action='store_true', help='put them into docs/openmmlab.md')
    args = parser.parse_args()
    found = read(args.results)
    if not found:
        raise SystemExit(f'{args.results} holds no results: run pytest tests/downstream --results {args.results}')
    text = tables(found)
    print(text)
    if args.write:
        page = PAGE.read_text(encoding='utf-8')
        before, rest = page.split(BEGIN)
        PAGE.write_text(before + BEGIN + '\n' + text + END + rest.split(END)[1], encoding='utf-8')


if __name__ == '__main__':
    main()
