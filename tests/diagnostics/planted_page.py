"""Writes the table of planted against named faults of ``planted_overflows.py``.

``python tests/diagnostics/planted_page.py [--write FILE]``: each fault is planted at each of its levels, and what the diagnosis
names stands beside it. The exit status is 1 where one of them is not named as planted.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests/support')]

import torch  # noqa: E402
from planted_overflows import CASES, Planted, named_as_planted, place_of, train  # noqa: E402


def named_place(cause: str, module: str) -> str:
    return f'{cause}, `{module}`' if module else cause


def row(each: Planted, level: str) -> tuple[str, bool]:
    """A line of the table, and whether all is right."""
    found = train(each, level)
    right = len(found) == 1 and named_as_planted(each, level, found[0])
    planted = named_place(each.cause, place_of(each, level))
    named = '; '.join(named_place(one.cause, one.module) for one in found) or 'nothing'
    remedies = [
        f'`{remedy.setting}`' for one in found for remedy in one.remedies if remedy.finite and remedy.kind != 'fp32'
    ]
    return (
        f'| {each.name} | {level} | {planted} | {named} | {", ".join(remedies)} | {"yes" if right else "**no**"} |',
        right,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or '').partition('\n')[0])
    parser.add_argument('--write', type=Path, metavar='FILE', help='keep the page there')
    args = parser.parse_args()
    rows = []
    for place, case in enumerate(CASES):
        rows.append(row(*case.values))
        print(f'{place + 1}/{len(CASES)} {case.id}: {"as planted" if rows[-1][1] else "WRONG"}', file=sys.stderr)
    right = sum(each[1] for each in rows)
    page = (
        '# Planted against named\n\n'
        f'{datetime.date.today()}, `python tests/diagnostics/planted_page.py`: the diagnosis of skipped steps names cause '
        f'and place of {right} of {len(rows)} faults. {platform.machine()}, Python {platform.python_version()}, torch '
        f'{torch.__version__}, CPU. *Planted* is the cause and the module that has it, none where it is in the input or in the '
        'loss. The settings are those that made this very step finite. Faults in weights, optimizer state, accumulations, '
        'several losses, mmcv ops and on one rank of DDP are in tests of their own.\n\n'
        '| fault | level | planted | named | settings that help | right |\n| --- | --- | --- | --- | --- | --- |\n'
        + '\n'.join(line for line, _ in rows)
        + '\n'
    )
    print(page)
    if args.write is not None:
        args.write.write_text(page, encoding='utf-8')
    return 0 if right == len(rows) else 1


if __name__ == '__main__':
    sys.exit(main())
