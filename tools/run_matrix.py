#!/usr/bin/env python
"""Runs the tests on the versions that the package claims: each cell is one ``make test-torch`` in an environment of its own.

``make matrix`` calls this. A cell is a Python, a torch and an mmengine, such as ``3.12/2.15.0/mmengine``. What came out is kept
in ``benchmarks/results/matrix/``, one file for each cell, and becomes the table of ``benchmarks/results/versions.md``. A
record says which tests were run; it does not replace one of many more tests.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import fnmatch
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from interpreters import find_interpreter, in_order

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / 'benchmarks' / 'results' / 'matrix'
PAGE = ROOT / 'benchmarks' / 'results' / 'versions.md'
BEGIN, END = '<!-- matrix: written by tools/run_matrix.py -->', '<!-- end of matrix -->'
PYTHONS = ('3.10', '3.11', '3.12', '3.13')
TORCHES = ('2.6.0', '2.9.1', '2.11.0', '2.13.0', '2.14.1', '2.15.0')
ENGINES = ('mmengine', 'onedl')
# A run of fewer tests than this share of an earlier run does not replace it.
SHARE = 0.9
# What is installed in an environment.
LOOK = """
import json, platform
from importlib.metadata import PackageNotFoundError, version
import torch
from amp_wrapper.ops import loader
packages = {}
for name in ('mmengine', 'onedl-mmengine', 'mmcv', 'mmcv-lite', 'onedl-mmcv'):
    try:
        packages[name] = version(name)
    except PackageNotFoundError:
        pass
devices = sorted(loader.library().devices)
print(json.dumps(dict(torch=torch.__version__, python=platform.python_version(), packages=packages, ops=devices)))
"""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One combination of versions."""

    python: str
    torch: str
    engine: str

    @property
    def name(self) -> str:
        """As it is typed."""
        return f'{self.python}/{self.torch}/{self.engine}'

    @property
    def record(self) -> Path:
        """The file that its results are kept in."""
        return RECORDS / f'{self.name.replace("/", "_")}.json'

    @property
    def environment(self) -> str:
        """The folder of its environment."""
        return f'.venv-matrix-{self.name.replace("/", "-")}'


def all_cells() -> list[Cell]:
    """Every combination, the newest torch last."""
    return [Cell(python, torch, engine) for engine in ENGINES for torch in TORCHES for python in PYTHONS]


def chosen(patterns: Sequence[str]) -> list[Cell]:
    """The cells that any of the patterns means; all of them without one.

    Args:
        patterns: Such as ``3.11/2.15.0/mmengine``, ``3.12/*/onedl``; ``*`` stands for anything.

    Raises:
        SystemExit: A pattern means no cell.
    """
    cells = all_cells()
    for pattern in patterns:
        if not any(fnmatch.fnmatch(cell.name, pattern) for cell in cells):
            raise SystemExit(
                f'--cell {pattern} is none of the matrix: PYTHON/TORCH/MMENGINE with {", ".join(PYTHONS)}; '
                f'{", ".join(TORCHES)}; {", ".join(ENGINES)}; * stands for any.'
            )
    return [cell for cell in cells if not patterns or any(fnmatch.fnmatch(cell.name, pattern) for pattern in patterns)]


def say(text: str) -> None:
    """A line of progress, at once."""
    print(text, flush=True)


def make(*words: str, log: Path) -> bool:
    """Run make, with all that it says in a file; whether it came to a good end."""
    # what an outer make has been told is not for the inner one
    environment = {key: value for key, value in os.environ.items() if key not in ('MAKEFLAGS', 'MFLAGS', 'MAKELEVEL')}
    with log.open('a') as output:
        command = ['make', '--no-print-directory', *words]
        return (
            subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output, check=False).returncode
            == 0
        )


def results(junit: Path) -> dict[str, Any]:
    """The counts, and the names of tests that failed, of a file that ``pytest --junitxml`` wrote."""
    suite = ElementTree.parse(junit).getroot().find('testsuite')
    assert suite is not None
    cases = list(suite.iter('testcase'))
    bad = [case for case in cases if case.find('failure') is not None or case.find('error') is not None]
    skipped = sum(case.find('skipped') is not None for case in cases)
    return {
        'passed': len(cases) - len(bad) - skipped,
        'failed': len(bad),
        'skipped': skipped,
        'failures': sorted(f'{case.get("classname", "").replace(".", "/")}.py::{case.get("name")}' for case in bad)[
            :50
        ],
    }


def machine() -> str:
    """The processor and its cores, for the record."""
    text = Path('/proc/cpuinfo').read_text() if Path('/proc/cpuinfo').exists() else ''
    model = re.search(r'^model name\s*:\s*(.+)$', text, re.MULTILINE)
    return f'{os.cpu_count()} cores of {model[1].strip() if model else platform.machine()}'


def run_cell(cell: Cell, arguments: Sequence[str], workers: int, keep: bool, logs: Path) -> dict[str, Any]:
    """Install, build the ops, test.

    Args:
        cell: What to install.
        arguments: For pytest; all tests without any.
        workers: Tests at a time.
        keep: Whether the environment stays.
        logs: A folder for what make and pytest print.

    Returns:
        The record.
    """
    record: dict[str, Any] = {
        **dataclasses.asdict(cell),
        'date': datetime.date.today().isoformat(),
        'machine': machine(),
    }
    program = find_interpreter(cell.python)
    if program is None:
        return {**record, 'not_run': f'there is no interpreter python{cell.python} on this machine', 'here': True}
    log, junit = logs / f'{cell.record.stem}.log', logs / f'{cell.record.stem}.xml'
    for old in (log, junit):
        old.unlink(missing_ok=True)
    began = time.monotonic()
    common = (f'PYTHON={program}', f'TORCH={cell.torch}', f'ENGINE={cell.engine}', f'VENV_TORCH={cell.environment}')
    try:
        if not make(f'{cell.environment}/.done-{cell.engine}', *common, log=log):
            said = log.read_text(errors='replace')
            if 'No matching distribution found for torch==' in said:
                return {**record, 'not_run': f'pip has no torch {cell.torch} for Python {cell.python}'}
            found = re.search(r'No matching distribution found for (\S+)', said)
            reason = f'pip has no {found[1]} for Python {cell.python}' if found else 'the environment could not be made'
            return {**record, 'not_run': reason, 'here': found is None}
        say(f'  installed in {time.monotonic() - began:.0f} s; building the ops and testing')
        words = shlex.join([*arguments, f'--junitxml={junit}'])
        make('test-torch', *common, f'WORKERS={workers}', f'PYTEST_ARGS={words}', log=log)
        if not junit.is_file():
            return {**record, 'not_run': 'the compiled ops could not be built, or pytest did not start', 'here': True}
        python = ROOT / cell.environment / 'bin' / 'python'
        command = [str(python), '-W', 'ignore', '-c', LOOK]
        facts = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
        if not facts['ops']:
            reason = 'the compiled ops were gone at the end: something else was installed from this folder meanwhile'
            return {**record, 'not_run': reason, 'here': True}
        seconds = round(time.monotonic() - began)
        return {**record, 'found': facts, 'tests': shlex.join(arguments) or 'all', 'seconds': seconds, **results(junit)}
    finally:
        if not keep:
            shutil.rmtree(ROOT / cell.environment, ignore_errors=True)


def tests_in(record: dict[str, Any]) -> int:
    """How many tests a record counts; 0 where none was run."""
    return sum(record.get(name, 0) for name in ('passed', 'failed', 'skipped'))


def keep_record(cell: Cell, record: dict[str, Any]) -> bool:
    """Write a record, unless one of many more tests would be lost.

    Args:
        cell: Whose it is.
        record: The new one.

    Returns:
        Whether it was written. What is the matter with this machine alone is not kept.
    """
    if record.get('here'):
        return False
    # the number of tests changes from commit to commit
    if cell.record.exists() and tests_in(record) < SHARE * tests_in(json.loads(cell.record.read_text())):
        return False
    cell.record.parent.mkdir(parents=True, exist_ok=True)
    cell.record.write_text(json.dumps(record, indent=1) + '\n')
    return True


def table(records: Iterable[dict[str, Any]]) -> str:
    """The records as a table."""
    lines = [
        '| torch | Python | mmengine, mmcv | tests | passed | failed | skipped | when |',
        '| --- | --- | --- | --- | --- | --- | --- | --- |',
    ]
    order = {engine: index for index, engine in enumerate(ENGINES)}
    key = lambda row: (order[row['engine']], in_order(row['torch']), in_order(row['python']))  # noqa: E731
    for row in sorted(records, key=key):
        cells = [row['torch'], row['python'], row['engine'], f'not run: {row.get("not_run")}', '', '', '', row['date']]
        if 'not_run' not in row:
            found, words = row['found'], row['tests']
            packages = ', '.join(f'{name} {version}' for name, version in found['packages'].items())
            tests = words if words == 'all' else f'`{words}`'
            counts = [str(row[name]) for name in ('passed', 'failed', 'skipped')]
            cells = [found['torch'], found['python'], packages, tests, *counts, row['date']]
        lines.append(f'| {" | ".join(cells)} |')
    return '\n'.join(lines) + '\n'


def failures(records: Iterable[dict[str, Any]]) -> str:
    """What failed, as counts per file; the records have the names."""
    lines = []
    for row in records:
        files = Counter(name.partition('::')[0] for name in row.get('failures', ()))
        if files:
            counts = ', '.join(f'`{file}` {count}' for file, count in sorted(files.items()))
            lines.append(f'- {row["torch"]}, Python {row["python"]}, {row["engine"]}: {counts}')
    return (
        '\n'.join(['', 'Failed, by file; `benchmarks/results/matrix/` has the names:', '', *lines, '']) if lines else ''
    )


def missing(records: Iterable[dict[str, Any]]) -> str:
    """The cells of which nothing is kept, by engine and torch."""
    kept = {Cell(row['python'], row['torch'], row['engine']) for row in records}
    groups: dict[tuple[str, str], list[str]] = {}
    for cell in all_cells():
        if cell not in kept:
            groups.setdefault((cell.engine, cell.torch), []).append(cell.python)
    if not groups:
        return ''
    lines = [f'- {engine}, torch {torch}: Python {", ".join(pythons)}' for (engine, torch), pythons in groups.items()]
    count = sum(map(len, groups.values()))
    return '\n'.join(['', f'Not run, {count} of {len(all_cells())} cells:', '', *lines, ''])


def write_page(page: Path, records: list[dict[str, Any]]) -> None:
    """Put the table between its markers."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    assert found, f'{page} has no {BEGIN} ... {END}'
    page.write_text(f'{before}{BEGIN}\n\n{table(records)}{failures(records)}{missing(records)}\n{END}{after}')


def read_records() -> list[dict[str, Any]]:
    """All that is kept."""
    return [json.loads(path.read_text()) for path in sorted(RECORDS.glob('*.json'))]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument(
        '--cell', action='append', default=[], metavar='P/T/M', help='some cells, as in 3.12/*/mmengine'
    )
    parser.add_argument('--workers', type=int, default=2, metavar='N', help='tests at a time')
    parser.add_argument('--keep', action='store_true', help='keep the environments, up to 6 GB each')
    parser.add_argument('--dry', action='store_true', help='say which cells there are')
    parser.add_argument(
        '--page', action='store_true', help='write the table of the page from what is kept, and run nothing'
    )
    parser.add_argument('tests', nargs='*', metavar='PYTEST_ARGS', help='behind --; all tests without any')
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells; 1 where tests failed, or an environment could not be made on this machine."""
    args = parse(arguments)
    cells = chosen(args.cell)
    if args.dry:
        for cell in cells:
            say(f'{cell.name}  {find_interpreter(cell.python) or "no interpreter"}')
        return 0
    bad = 0
    for index, cell in enumerate([] if args.page else cells, 1):
        say(f'[{index}/{len(cells)}] {cell.name}')
        logs = ROOT / 'build' / 'matrix'
        logs.mkdir(parents=True, exist_ok=True)
        record = run_cell(cell, args.tests, args.workers, args.keep, logs)
        kept = keep_record(cell, record)
        if 'not_run' in record:
            say(f'  not run: {record["not_run"]}')
        else:
            say(
                f'  {record["passed"]} passed, {record["failed"]} failed, {record["skipped"]} skipped in {record["seconds"]} s'
            )
        words = f'kept in {cell.record.relative_to(ROOT)}' if kept else 'not kept'
        say(f'  {words}; log: build/matrix/{cell.record.stem}.log')
        bad += bool(record.get('failed') or record.get('here'))
        write_page(PAGE, read_records())
    if args.page:
        write_page(PAGE, read_records())
    return 1 if bad else 0


if __name__ == '__main__':
    sys.exit(main())
