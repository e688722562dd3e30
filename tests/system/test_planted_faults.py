"""The list of planted faults fits the tree; whether tests notice them is for ``planted_faults.py``."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import planted_faults
import pytest
from grid import grid
from planted_faults import FAULTS, ROOT, Fault, Stale

ROOMS = {
    'policy',
    'ops',
    'autocast',
    'casting',
    'checkpoint',
    'optim',
    'engine',
    'diagnostics',
    'amp',
    'openmmlab',
    'cli',
    'csrc',
}
ONE = Fault('one', 'policy', '', 'a = 1', 'a = 2', 'test_a.py')


@pytest.mark.parametrize('fault', FAULTS, ids=lambda fault: fault.name)
def test_every_fault_can_be_planted(fault: Fault) -> None:
    assert planted_faults.find(ROOT, fault).is_file()
    assert planted_faults.tests_of(ROOT, fault)
    assert fault.old.split() != fault.new.split()


class Words(dict[str, bool]):
    """What pytest's -k makes of the words in an expression: whether the name of a test contains each."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name.lower()

    def __missing__(self, word: str) -> bool:
        return word.lower() in self.name


@pytest.fixture(scope='module')
def collected() -> dict[str, list[str]]:
    """The tests of each file that a fault names, as pytest collects them."""
    files = sorted(
        {path for fault in FAULTS for path in planted_faults.tests_of(ROOT, dataclasses.replace(fault, only=''))}
    )
    command = [sys.executable, '-m', 'pytest', '--collect-only', '-q', '-p', 'no:cacheprovider', *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        path, separator, test = line.partition('::')
        if separator:
            found.setdefault(path, []).append(test)
    return found


@grid
def test_every_file_of_a_fault_has_tests_for_it(collected: dict[str, list[str]]) -> None:
    missing = []
    for fault in FAULTS:
        for path in map(Path, planted_faults.tests_of(ROOT, dataclasses.replace(fault, only=''))):
            names = [f'{path.name}::{test}' for test in collected.get(path.relative_to(ROOT).as_posix(), [])]
            if not any(eval(fault.only or 'True', {}, Words(name)) for name in names):
                missing.append(f'{fault.name}: {path.name} has no {fault.only!r}')
    assert missing == []


def test_there_are_faults_in_every_room() -> None:
    assert {fault.room for fault in FAULTS} == ROOMS
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 45


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {
        'amp_wrapper/a.py': 'a = 1\nb = a\nc = f(\n    a,\n    b,\n)\n',
        'amp_wrapper/below/b.py': 'b = 2\n',
        'csrc/c.h': 'int b;\n',
        'tests/room/test_a.py': 'def test_a():\n    from amp_wrapper.a import a\n    assert a == 1\n',
        'tests/downstream/test_a.py': 'import nothing\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.replace('f(', 'max('))
    (tmp_path / 'amp_wrapper' / '__init__.py').write_text('')
    return tmp_path


def test_what_becomes_of_a_fault(tree: Path) -> None:
    assert planted_faults.try_fault(tree, ONE, green=True)[:2] == ('red', 'amp_wrapper/a.py')
    assert (tree / 'amp_wrapper' / 'a.py').read_text().startswith('a = 1')
    for words, state in (
        (dict(new='a = 1 # the same'), 'green'),
        (dict(new='a = ='), 'red'),
        (dict(old='a = 3'), 'stale'),
        (dict(tests='test_b.py'), 'stale'),
        (dict(only='nothing'), 'stale'),
    ):
        assert planted_faults.try_fault(tree, dataclasses.replace(ONE, **words))[0] == state, words


def test_a_fault_is_found_by_its_text_alone(tree: Path) -> None:
    # wrapped over lines, and in another folder
    assert planted_faults.find(tree, dataclasses.replace(ONE, old='c = max( a, b, )')).name == 'a.py'
    assert planted_faults.find(tree, dataclasses.replace(ONE, old='b = 2')).parent.name == 'below'
    with pytest.raises(Stale, match=r'not unique: amp_wrapper/a\.py \(1\), amp_wrapper/below/b\.py \(1\)'):
        planted_faults.find(tree, dataclasses.replace(ONE, old='b ='))
    with pytest.raises(Stale, match='not unique'):
        planted_faults.find(tree, dataclasses.replace(ONE, old='a,'.replace(',', '')))
