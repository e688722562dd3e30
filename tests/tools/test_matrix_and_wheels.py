"""``make matrix`` and ``make wheels``: what is chosen, kept and told. Neither installs anything here."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / 'tools'))

import build_wheels  # noqa: E402
import interpreters  # noqa: E402
import run_matrix  # noqa: E402
from run_matrix import Cell  # noqa: E402

from amp_wrapper import torch_internals  # noqa: E402

CELL = Cell('3.11', '2.15.0', 'mmengine')
RESULT: dict[str, Any] = dict(
    python='3.11',
    torch='2.15.0',
    engine='mmengine',
    date='2026-11-24',
    machine='2 cores of a processor',
    found=dict(
        torch='2.15.0+cu132', python='3.11.7', packages={'mmengine': '0.10.7', 'mmcv-lite': '2.1.0'}, ops=['cpu']
    ),
    tests='tests/policy',
    passed=3,
    failed=1,
    skipped=2,
    seconds=9,
    failures=['tests/policy/test_policy.py::test_it'],
)


def test_the_cells_are_those_that_the_package_claims() -> None:
    """Every Python of the classifiers, the floor, the pinned torch and every version that was tried; each engine's file."""
    pyproject = (ROOT / 'pyproject.toml').read_text()
    assert tuple(re.findall(r'Python :: (3\.\d+)"', pyproject)) == run_matrix.PYTHONS
    assert set(torch_internals.TRIED) <= set(run_matrix.TORCHES)
    assert f'"torch>={run_matrix.TORCHES[0].rpartition(".")[0]},' in pyproject
    assert list(run_matrix.TORCHES) == sorted(run_matrix.TORCHES, key=interpreters.in_order)
    assert len(run_matrix.all_cells()) == len({cell.record for cell in run_matrix.all_cells()}) == 48


def test_some_cells() -> None:
    assert run_matrix.chosen(['3.11/2.15.0/mmengine']) == [CELL]
    assert {cell.python for cell in run_matrix.chosen(['3.12/*/onedl', '3.11/*/onedl'])} == {'3.11', '3.12'}
    assert run_matrix.chosen([]) == run_matrix.all_cells()
    with pytest.raises(
        SystemExit, match=r'--cell 3.9/\*/mmengine is none of the matrix: PYTHON/TORCH/MMENGINE with 3.10, '
    ):
        run_matrix.chosen(['3.9/*/mmengine'])


def test_the_counts_of_a_run(tmp_path: Path) -> None:
    """Of a real file of pytest: an error in a fixture is a failure, an expected failure is none."""
    (tmp_path / 'test_four.py').write_text(
        'import pytest\n'
        'def test_good(): pass\n'
        'def test_bad(): assert False\n'
        'def test_error(no_such_fixture): pass\n'
        '@pytest.mark.skip\ndef test_skipped(): pass\n'
    )
    command = [
        sys.executable,
        '-m',
        'pytest',
        '-q',
        '-p',
        'no:cacheprovider',
        f'--junitxml={tmp_path}/junit.xml',
        str(tmp_path),
    ]
    subprocess.run([*command, '--rootdir', str(tmp_path)], capture_output=True, check=False, timeout=120)
    found = run_matrix.results(tmp_path / 'junit.xml')
    assert (found['passed'], found['failed'], found['skipped']) == (1, 2, 1)
    assert [name.rpartition('::')[2] for name in found['failures']] == ['test_bad', 'test_error']


def test_a_run_of_some_tests_replaces_none_of_many_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_matrix, 'RECORDS', tmp_path)
    everything = {**RESULT, 'tests': 'all', 'passed': 100}
    without_the_longest = {**RESULT, 'tests': "-m 'not long'", 'passed': 95}
    for record in (RESULT, everything, without_the_longest):
        assert run_matrix.keep_record(CELL, record)
        assert run_matrix.read_records() == [record]
    assert not run_matrix.keep_record(CELL, RESULT)
    assert not run_matrix.keep_record(CELL, {'torch': '2.15.0', 'not_run': 'pip has no torch 2.15.0'})
    # this machine's own trouble says nothing about the versions
    assert not run_matrix.keep_record(CELL, {**everything, 'not_run': 'there is no interpreter', 'here': True})
    assert run_matrix.read_records() == [without_the_longest]


@pytest.mark.parametrize('ops', [['cpu'], []])
def test_a_run_whose_ops_were_taken_away_is_not_kept(
    ops: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another installation from the same folder replaces the library of the ops; the tests that need them were skipped."""

    def make(*words: str, log: Path) -> bool:
        log.write_text('')
        if words[0] == 'test-torch':
            (tmp_path / f'{CELL.record.stem}.xml').write_text('<x><testsuite><testcase name="a"/></testsuite></x>')
        return True

    found = subprocess.CompletedProcess([], 0, json.dumps({**RESULT['found'], 'ops': ops}))
    monkeypatch.setattr(run_matrix, 'make', make)
    monkeypatch.setattr(run_matrix, 'find_interpreter', lambda python: sys.executable)
    monkeypatch.setattr(run_matrix, 'ROOT', tmp_path)
    monkeypatch.setattr(run_matrix.subprocess, 'run', lambda *args, **kwargs: found)
    record = run_matrix.run_cell(CELL, [], 2, True, tmp_path)
    assert record.get('passed') == (1 if ops else None)
    assert bool(record.get('here')) == (not ops)


def test_the_table(tmp_path: Path) -> None:
    page = tmp_path / 'page.md'
    page.write_text(f'before\n{run_matrix.BEGIN}\nold\n{run_matrix.END}\nafter\n')
    lacking = {
        **{key: RESULT[key] for key in ('python', 'engine', 'date')},
        'torch': '2.6.0',
        'not_run': 'pip has no torch',
    }
    run_matrix.write_page(page, [RESULT, lacking])
    text = page.read_text()
    assert text.startswith('before\n') and text.endswith('after\n') and 'old' not in text
    assert [line for line in text.splitlines() if line.startswith('| 2')] == [
        '| 2.6.0 | 3.11 | mmengine | not run: pip has no torch |  |  |  | 2026-11-24 |',
        '| 2.15.0+cu132 | 3.11.7 | mmengine 0.10.7, mmcv-lite 2.1.0 | `tests/policy` | 3 | 1 | 2 | 2026-11-24 |',
    ]
    assert '- 2.15.0, Python 3.11, mmengine: `tests/policy/test_policy.py` 1' in text


def test_the_page_names_the_cells_that_were_not_run() -> None:
    """A cell that pip cannot install is in the table, and one with a record of some tests as well."""
    records = [dataclasses.asdict(cell) for cell in run_matrix.all_cells()]
    assert run_matrix.missing(records) == ''
    gaps = [Cell('3.12', '2.6.0', 'onedl'), CELL, Cell('3.13', '2.15.0', 'mmengine')]
    text = run_matrix.missing([row for row in records if Cell(**row) not in gaps])
    assert text.splitlines() == [
        '',
        'Not run, 3 of 48 cells:',
        '',
        '- mmengine, torch 2.15.0: Python 3.11, 3.13',
        '- onedl, torch 2.6.0: Python 3.12',
    ]


def test_the_page_has_what_was_kept(tmp_path: Path) -> None:
    page = tmp_path / 'versions.md'
    shutil.copy(run_matrix.PAGE, page)
    run_matrix.write_page(page, run_matrix.read_records())
    assert page.read_text() == run_matrix.PAGE.read_text(), 'python tools/run_matrix.py --page'


def test_make_installs_what_a_cell_says() -> None:
    """What make would do, for both engines."""
    if shutil.which('make') is None:
        pytest.skip('there is no make')
    for engine in run_matrix.ENGINES:
        words = [
            'PYTHON=python3',
            'TORCH=2.9.1',
            f'ENGINE={engine}',
            'VENV_TORCH=.venv-nowhere',
            f'.venv-nowhere/.done-{engine}',
        ]
        done = subprocess.run(['make', '-n', *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
        assert 'install --quiet torch==2.9.1' in done.stdout
        name = {'mmengine': 'openmmlab', 'onedl': 'onedl'}[engine]
        assert f'install --quiet --no-deps -r requirements/{name}.txt' in done.stdout


# -- wheels -----------------------------------------------------------------------------------------------------------


def test_the_local_version_says_what_the_library_is_for() -> None:
    assert (
        build_wheels.local_version('2.13.0+cpu', None)
        == build_wheels.local_version('2.13.1+cu130', None)
        == 'torch2.13cpu'
    )
    assert build_wheels.local_version('2.11.0+cu130', '13.0') == 'torch2.11cu130'


def test_what_cannot_be_built_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No interpreter, no such torch, a torch without CUDA, a compiler that fails: the others are built all the same."""

    def environment(work: Path, wanted: build_wheels.Combination, python: Path) -> Path:
        if wanted.torch == '9.9.9':
            raise LookupError('pip has no torch 9.9.9 for Python 3.11 on this platform')
        return tmp_path

    def build_one(sources: Path, out: Path, inside: Path, torch: str, cuda: str | None) -> tuple[Path, str]:
        if cuda:
            raise build_wheels.BuildFailed('\n    many words\n    error: no')
        (tmp_path / 'one.whl').touch()
        return tmp_path / 'one.whl', 'tried'

    def run(*command: Any, **variables: Any) -> str:
        return json.dumps(next(torches))

    torches = iter([dict(torch='2.13.0', cuda=None, missing=''), dict(torch='2.14.0', cuda='13.0', missing='')])
    monkeypatch.setattr(build_wheels, 'source_distribution', lambda work: work)
    monkeypatch.setattr(build_wheels, 'build_pure', lambda sources, out: tmp_path / 'pure.whl')
    monkeypatch.setattr(build_wheels, 'find_interpreter', lambda minor: tmp_path if minor == '3.11' else None)
    for function in (environment, build_one, run):
        monkeypatch.setattr(build_wheels, function.__name__, function)
    pairs = [('3.10', '2.13.0'), ('3.11', '2.13.0'), ('3.11', '2.14.0'), ('3.11', '9.9.9')]
    wanted = [build_wheels.Combination(*pair) for pair in pairs]
    outcome = build_wheels.build_all(wanted, tmp_path / 'out', tmp_path / 'work', keep=False)
    said = capsys.readouterr().out
    assert all(f'[{index}/5] ' in said for index in range(1, 6))
    assert build_wheels.summary(outcome).splitlines() == [
        'built: 2',
        '  pure.whl: for every torch; amp-wrapper build-ops adds the ops',
        '  one.whl: tried',
        'left out: 3',
        '  Python 3.10, torch 2.13.0: there is no interpreter python3.10, neither in the path nor of pyenv',
        '  Python 3.11, torch 2.13.0, CUDA: torch 2.13.0 has no CUDA',
        '  Python 3.11, torch 9.9.9: pip has no torch 9.9.9 for Python 3.11 on this platform',
        'failed: 1',
        '  Python 3.11, torch 2.14.0, CUDA 13.0: error: no',
    ]


def test_an_interpreter_is_started_before_it_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyenv puts a program for every version into the path, and most of them only print that they are not chosen."""
    here = '.'.join(map(str, sys.version_info[:2]))
    assert interpreters.find_interpreter(here) == Path(sys.executable)
    stand_in = tmp_path / 'bin' / 'python3.77'
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\necho "pyenv: python3.77: command not found" >&2\nexit 127\n')
    real = tmp_path / 'versions' / '3.77.10' / 'bin' / 'python'
    for program in (real, tmp_path / 'versions' / '3.77.9' / 'bin' / 'python'):
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\necho {program.parents[1].name}\n')
    for program in (stand_in, *(tmp_path / 'versions').glob('*/bin/python')):
        program.chmod(0o755)
    monkeypatch.setenv('PATH', f'{stand_in.parent}:/bin:/usr/bin')
    monkeypatch.setenv('PYENV_ROOT', str(tmp_path))
    assert interpreters.find_interpreter('3.77') == real
    assert interpreters.find_interpreter('3.78') is None
