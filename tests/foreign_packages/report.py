"""The table of what ``make test-foreign`` found: printed, and with ``--write`` put into a page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

LEVELS = ('O1', 'O2', 'O4', 'O5')
Rows = list[dict[str, Any]]
_HEAD = """# Foreign optimizers, averages and models

Written by `make test-foreign`. Each trial of `tests/foreign_packages` is held against the same training in plain FP32:

- *trains*: on the same data the mean of the last five losses differs from that of FP32 by at most 10 % of the first loss, the
  loss on held-out data by at most 20 %, and the cosine between the ways that all weights went from their start is at least 0.8
  (unless the recipe in the test file says otherwise). Optimizers first: with gradients that are equal bits, six steps give
  masters equal to the weights of FP32, bit for bit, and a step that overflows leaves weights, masters and state as they were.
- *resumes*: saved in the middle in evaluation mode, loaded into a new model, trained on: losses, weights, masters, optimizer
  state are equal bits.
- *refused*: a typed error whose words the test asks for.

A cell is empty where nothing was tried. It has the fall of the loss, mean of the last five as a part of the first (FP32's in a
column of its own), and the cosine.
"""


def read(folder: Path) -> Rows:
    """What the tests kept."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob('*.json'))]


def cell(rows: Rows) -> str:
    """One level: the verdict and its numbers, once where both interfaces agree."""
    texts = {}
    for row in rows:
        numbers = f' {row["end"]:.2f}' if 'end' in row else ''
        numbers += f', {row["along"]:.2f}' if 'along' in row else ''
        verdict = row.get('verdict', '') if row['passed'] else f'**{row.get("verdict", "fails")}**'
        texts.setdefault(verdict, []).append(numbers)
    return '; '.join(f'{verdict}{max(numbers, key=len)}' for verdict, numbers in texts.items())


def table(rows: Rows) -> str:
    """Markdown, one part for each package."""
    lines = []
    for package in sorted({row['package'] for row in rows}, key=str.lower):
        of_package = [row for row in rows if row['package'] == package]
        lines += ['', f'## {package} {of_package[0]["version"]}', '']
        lines += [
            '| trial | through | FP32 | ' + ' | '.join(LEVELS) + ' |',
            '| --- | --- | --- |' + ' --- |' * len(LEVELS),
        ]
        for trial in dict.fromkeys(row['trial'] for row in of_package):
            found = [row for row in of_package if row['trial'] == trial]
            apis = ', '.join(sorted({row['api'] for row in found}))
            plain = next((f'{row["fp32"]:.2f}' for row in found if 'fp32' in row), '')
            cells = [cell([row for row in found if row['level'] == level]) for level in LEVELS]
            lines.append(f'| {trial} | {apis} | {plain} | ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines) + '\n'


def refusals(rows: Rows) -> str:
    """What users are told."""
    told: dict[str, set[str]] = {}
    for row in rows:
        if row.get('remedy'):
            told.setdefault(row['remedy'], set()).add(row['trial'])
    lines = [f'- {", ".join(sorted(trials))}: {text}' for text, trials in told.items()]
    return '\n## What is refused, in its words\n\n' + '\n'.join(lines) + '\n' if lines else ''


def summary(rows: Rows) -> str:
    """Counts and where it ran."""
    trials = {(row['package'], row['trial']) for row in rows}
    failed = [row for row in rows if not row['passed']]
    places = sorted({row['where'] for row in rows})
    text = f'{len(trials)} trials of {len({package for package, _ in trials})} packages, {len(rows)} runs, '
    text += f'{len(failed)} failed; {sum(row["seconds"] for row in rows) / 60:.0f} minutes of one core.\n\n'
    return text + '\n'.join(f'Measured: {place}.' for place in places) + '\n'


def main() -> None:
    """Print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('folder', type=Path)
    parser.add_argument('--write', type=Path, help='the page')
    arguments = parser.parse_args()
    rows = read(arguments.folder)
    if not rows:
        raise SystemExit(f'{arguments.folder} holds no verdicts: run make test-foreign.')
    text = f'{_HEAD}\n{summary(rows)}{table(rows)}{refusals(rows)}'
    print(text)
    if arguments.write:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(text)


if __name__ == '__main__':
    main()
