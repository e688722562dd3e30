"""Plants faults, one after the other, and asks the tests whether they notice.

``python tests/system/planted_faults.py [--only NAME ...]``: each fault of ``data/planted_faults.toml`` takes a protection away.
It is planted in a copy of the tree, the tests that should notice are run there, and red is good. ``--green`` runs the same
tests on the copy without a fault first: they have to be green.

Files move and tests are sorted anew, so neither is found by its path. A fault is found by its text, which has to stand in
exactly one place of the package and ``csrc``; how it is wrapped over lines does not matter. Its tests are found by the names of
their files, wherever below ``tests`` these lie. What is not found is 'stale': the list has to follow.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

ROOT = next(folder for folder in Path(__file__).parents if (folder / 'pyproject.toml').exists())
LIST = ROOT / 'tests' / 'data' / 'planted_faults.toml'
SOURCES = ('amp_wrapper', 'csrc')
#: Tests with environments of their own.
APART = {'downstream', 'foreign_packages'}
#: What a copy leaves out: nothing of it is needed, or it is made anew.
LEFT_OUT = (
    '.git',
    '.venv*',
    '__pycache__',
    'build',
    'dist',
    'site',
    '*.egg-info',
    '.*_cache',
    '.hypothesis',
    'work_dirs',
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """One replacement of a piece of code; the head of the list says what the words mean."""

    name: str
    room: str
    promise: str
    old: str
    new: str
    tests: str
    only: str = ''
    everywhere: bool = False
    reference: bool = False
    builds: bool = False


FAULTS = [Fault(**words) for words in tomllib.loads(LIST.read_text())['fault']]


class Stale(Exception):
    """The list does not fit the tree any more."""


def pattern(text: str) -> re.Pattern[str]:
    """Finds a piece of code however it is wrapped over lines."""
    return re.compile(r'\s+'.join(map(re.escape, text.split())))


def sources(tree: Path) -> Iterator[Path]:
    for folder in SOURCES:
        for path in sorted((tree / folder).rglob('*')):
            if path.suffix in ('.py', '.h', '.inl', '.cpp', '.cuh', '.cu'):
                yield path


def find(tree: Path, fault: Fault) -> Path:
    """The one file that the text of a fault stands in.

    Raises:
        Stale: It stands nowhere, or in several places.
    """
    wanted = pattern(fault.old)
    found = [(path, len(wanted.findall(path.read_text()))) for path in sources(tree)]
    found = [(path, count) for path, count in found if count]
    if not found:
        raise Stale('its text is not there')
    if len(found) > 1 or (found[0][1] > 1 and not fault.everywhere):
        places = ', '.join(f'{path.relative_to(tree)} ({count})' for path, count in found)
        raise Stale(f'its text is not unique: {places}')
    return found[0][0]


def tests_of(tree: Path, fault: Fault) -> list[str]:
    """The arguments for pytest.

    Raises:
        Stale: There is no file of such a name.
    """
    paths = []
    for name in fault.tests.split():
        found = sorted(path for path in (tree / 'tests').rglob(name) if not APART & set(path.parts))
        if not found:
            raise Stale(f'there is no {name} below tests')
        paths += map(str, found)
    return [*paths, *(['-k', fault.only] if fault.only else [])]


def run(tree: Path, fault: Fault) -> tuple[str, str]:
    """Run the tests of a fault: 'red', 'green', 'stale' or 'broken', and what pytest says in a line."""
    if fault.builds:
        done = _called(tree, fault, [sys.executable, 'setup.py', 'build_ext', '--inplace'])
        if done.returncode:
            return 'broken', 'the ops cannot be built: ' + done.stderr.strip().splitlines()[-1][:200]
    command = [sys.executable, '-m', 'pytest', '-x', '-q', '-p', 'no:cacheprovider', *tests_of(tree, fault)]
    done = _called(tree, fault, command)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(('FAILED', 'ERROR'))]
    said = (failed or lines or ['nothing'])[-1]
    if done.returncode == 5:
        return 'stale', f'no test is called {fault.only!r}'
    if done.returncode not in (0, 1):
        return 'broken', (done.stderr.strip().splitlines() or [said])[-1]
    # a fault that cannot be imported says nothing about the tests; one may show when a test is over, as an error
    broken = done.returncode == 1 and not any('::' in line for line in failed)
    return ('broken' if broken else 'red' if done.returncode else 'green'), said.removeprefix('FAILED ').removeprefix(
        'ERROR '
    )


def _called(tree: Path, fault: Fault, command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, 'PYTHONPATH': str(tree), 'PYTHONDONTWRITEBYTECODE': '1', 'OMP_NUM_THREADS': '1'}
    if fault.reference:
        environment['AMP_WRAPPER_OPS'] = 'reference'
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=1200, check=False)


def try_fault(tree: Path, fault: Fault, green: bool = False) -> tuple[str, str, str]:
    """Plant a fault, run its tests and take it out again.

    Returns:
        What became of it, the file it was planted in, and a line about it.
    """
    try:
        path = find(tree, fault)
        tests_of(tree, fault)
    except Stale as error:
        return 'stale', '', str(error)
    where = str(path.relative_to(tree))
    if green:
        state, said = run(tree, fault)
        if state != 'green':
            return f'{state} without it', where, said
    text = path.read_text()
    libraries = {library: library.read_bytes() for library in tree.rglob('*.so')} if fault.builds else {}
    path.write_text(pattern(fault.old).sub(lambda _: fault.new, text))
    try:
        return (*(result := run(tree, fault))[:1], where, result[1])
    finally:
        path.write_text(text)
        for library, content in libraries.items():
            library.write_bytes(content)


def table(rows: Iterable[tuple[Fault, str, str, str]]) -> str:
    """The result as a page."""
    rows = list(rows)
    red = sum(state == 'red' for _, state, _, _ in rows)
    lines = [
        '# Planted faults',
        '',
        f'{datetime.date.today()}, `python tests/system/planted_faults.py`: {red} of {len(rows)} are noticed. Each takes one '
        'protection away; the test named is the first that fails.',
        '',
        '| room | fault | what is protected | file | noticed | by |',
        '| --- | --- | --- | --- | --- | --- |',
    ]
    for fault, state, where, said in sorted(rows, key=lambda row: row[0].room):
        test = said.partition(' - ')[0].rpartition('/')[2] if state == 'red' else said
        test = f'`{test}`' if state == 'red' else test
        file = f'`{where.removeprefix("amp_wrapper/")}`'
        cells = (fault.room, fault.name, fault.promise, file, 'yes' if state == 'red' else f'**{state}**', test)
        lines.append('| ' + ' | '.join(cell.replace('|', '\\|') for cell in cells) + ' |')
    return '\n'.join([*lines, ''])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--only', nargs='+', default=[], help='names, or rooms, of faults')
    parser.add_argument('--green', action='store_true', help='run the tests without the fault, too')
    parser.add_argument('--find', action='store_true', help='say where faults would be planted, and run nothing')
    parser.add_argument('--table', type=Path, help='write the result there')
    args = parser.parse_args()
    chosen = [fault for fault in FAULTS if not args.only or {fault.name, fault.room} & set(args.only)]
    if not chosen:
        raise SystemExit(f'no fault is called {" or ".join(args.only)}')
    if args.find:
        stale = 0
        for fault in chosen:
            try:
                tests_of(ROOT, fault)
                print(f'{fault.name}: {find(ROOT, fault).relative_to(ROOT)}')
            except Stale as error:
                stale += 1
                print(f'{fault.name}: stale: {error}')
        raise SystemExit(1 if stale else 0)
    rows = []
    with tempfile.TemporaryDirectory(prefix='planted-') as folder:
        tree = Path(folder) / 'tree'
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for fault in chosen:
            begin = time.monotonic()
            state, where, said = try_fault(tree, fault, args.green)
            rows.append((fault, state, where, said))
            print(
                f'{state:8} {fault.name} ({where or fault.room}, {time.monotonic() - begin:.0f} s): {said[:160]}',
                flush=True,
            )
    page = table(rows)
    if args.table:
        args.table.write_text(page)
    wrong = [fault.name for fault, state, _, _ in rows if state != 'red']
    print(f'\n{len(rows) - len(wrong)} of {len(rows)} red' + (f'; not: {", ".join(wrong)}' if wrong else ''))
    raise SystemExit(1 if wrong else 0)


if __name__ == '__main__':
    main()
