"""Plants faults in a copy of the tree, one after the other, and runs the tests that should notice: red is good.

``python tests/system/planted_faults.py [--only NAME ...]`` plants those of ``tests/faults``, which are found by their text.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
LISTS = ROOT / 'tests' / 'faults'
#: Tests with environments of their own.
APART = {'downstream', 'foreign_packages'}
#: What a copy leaves out: nothing of it is needed, or it is made anew.
LEFT_OUT = '.git .venv* .nox __pycache__ build dist site *.egg-info .*_cache .hypothesis work_dirs'.split()


class StaleFault(Exception):
    """The list does not fit the tree any more."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One replacement of a piece of code; ``tests/faults/README.md`` explains the rest."""

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

    @property
    def pattern(self) -> re.Pattern[str]:
        """Finds the code however it is wrapped over lines."""
        return re.compile(r'\s+'.join(map(re.escape, self.old.split())))

    def find(self, tree: Path) -> Path:
        """The one file that has the code.

        Raises:
            StaleFault: None has it, or it is in several places.
        """
        counts = {path: len(self.pattern.findall(text)) for path, text in texts(tree).items()}
        found = {path: count for path, count in counts.items() if count}
        if len(found) != 1 or (sum(found.values()) > 1 and not self.everywhere):
            raise StaleFault(f'its text is in {[f"{path.relative_to(tree)} ({n})" for path, n in found.items()]}')
        return next(iter(found))

    def arguments(self, tree: Path) -> list[str]:
        """What pytest is given.

        Raises:
            StaleFault: There is no file of such a name.
        """
        paths = []
        for name in self.tests.split():
            found = [path for path in sorted((tree / 'tests').rglob(name)) if not APART & set(path.parts)]
            if not found:
                raise StaleFault(f'there is no {name} below tests')
            paths += map(str, found)
        return [*paths, *(['-k', self.only] if self.only else [])]


def read_faults() -> list[Fault]:
    """All of ``tests/faults``."""
    lists = {path.stem: tomllib.loads(path.read_text()) for path in sorted(LISTS.glob('*.toml'))}
    return [Fault(room=room, **words) for room, content in lists.items() for words in content['fault']]


@functools.cache
def texts(tree: Path) -> dict[Path, str]:
    """The files that faults are planted in, as they were at first."""
    paths: Iterator[Path] = (path for folder in ('amp_wrapper', 'csrc') for path in sorted((tree / folder).rglob('*')))
    return {path: path.read_text() for path in paths if path.suffix in ('.py', '.h', '.inl', '.cpp', '.cuh', '.cu')}


def call(tree: Path, command: list[str], reference: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command of Python in a tree."""
    environment = {**os.environ, 'PYTHONPATH': str(tree), 'PYTHONDONTWRITEBYTECODE': '1', 'OMP_NUM_THREADS': '1'}
    if reference:
        environment['AMP_WRAPPER_OPS'] = 'torch'
    command = [sys.executable, *command]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=1200, check=False)


def run_tests(tree: Path, arguments: list[str], reference: bool = False) -> tuple[str, str]:
    """Run tests: 'red', 'green' or 'broken', and what pytest says in a line."""
    done = call(
        tree,
        ['-m', 'pytest', '-x', '-q', '-p', 'no:cacheprovider', '--hypothesis-profile=any-example', *arguments],
        reference,
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(('FAILED', 'ERROR'))]
    said = (failed or lines or done.stderr.splitlines() or ['nothing'])[-1]
    if done.returncode in (0, 1) and (done.returncode == 0 or any('::' in line for line in failed)):
        return ('red' if done.returncode else 'green'), said
    # what cannot be imported says nothing about the tests
    return 'broken', said


def try_fault(tree: Path, fault: Fault, green: bool = False) -> tuple[str, str]:
    """Plant a fault, run its tests, and take it out again: what became of it, and a line about it."""
    try:
        path, arguments = fault.find(tree), fault.arguments(tree)
    except StaleFault as error:
        return 'stale', str(error)
    if green:
        state, said = run_tests(tree, arguments, fault.reference)
        if state != 'green':
            return f'{state} without it', said
    text = path.read_text()
    libraries = {library: library.read_bytes() for library in tree.rglob('*.so')} if fault.builds else {}
    path.write_text(fault.pattern.sub(lambda _: fault.new, text))
    try:
        if fault.builds and call(tree, ['setup.py', 'build_ext', '--inplace']).returncode:
            return 'broken', 'the ops cannot be built'
        return run_tests(tree, arguments, fault.reference)
    finally:
        path.write_text(text)
        for library, content in libraries.items():
            library.write_bytes(content)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--only', nargs='+', default=[], help='names, or rooms, of faults')
    parser.add_argument('--green', action='store_true', help='run the tests without the fault, too')
    args = parser.parse_args()
    states = []
    with tempfile.TemporaryDirectory(prefix='planted-') as folder:
        tree = Path(folder) / 'tree'
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))

        for fault in read_faults():
            if not args.only or {fault.name, fault.room} & set(args.only):
                begin, what = time.monotonic(), f'{fault.room}: {fault.name}'
                state, said = try_fault(tree, fault, args.green)
                states.append((state, what))
                print(f'{state:7} {what} ({time.monotonic() - begin:.0f} s): {said[:160]}', flush=True)
    missed = [what for state, what in states if state != 'red']
    print(f'\n{len(states) - len(missed)} of {len(states)} are noticed')
    print('\n'.join(missed))
    raise SystemExit(1 if missed else 0)


if __name__ == '__main__':
    main()
