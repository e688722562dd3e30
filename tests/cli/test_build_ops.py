"""``amp-wrapper build-ops``: what it says before it compiles anything, and where the library comes from afterwards.

``tests/system/test_build.py`` builds with it in an installed package.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import ROOT

from amp_wrapper import cli
from amp_wrapper.ops import building, loader


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The line of an error of the command."""
    assert cli.main(['build-ops', *words]) == 1
    said = capsys.readouterr()
    assert said.out == '' and said.err.count('\n') == 1
    start = 'amp-wrapper build-ops: error: '
    assert said.err.startswith(start)
    return said.err.removeprefix(start).strip()


def test_a_compiler_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv('CXX', '/nowhere/c++')
    said = refused(capsys, '--out', str(tmp_path))
    assert said == 'the ops cannot be built: there is no C++ compiler (/nowhere/c++).'
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.version.cuda is not None, reason='this torch has CUDA')
@pytest.mark.parametrize(('words', 'variable', 'who'), [(['--cuda'], '', '--cuda'), ([], '1', 'FORCE_CUDA=1')])
def test_cuda_is_asked_for_and_cannot_be(
    words: list[str],
    variable: str,
    who: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    if shutil.which('c++') is None:
        pytest.skip('there is no C++ compiler (c++)')
    monkeypatch.setenv('FORCE_CUDA', variable)
    said = refused(capsys, *words, '--out', str(tmp_path))
    assert said == f'the ops cannot be built: {who}, but the torch that it was built with has no CUDA.'


def test_folders_that_cannot_be_written_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / 'file').touch()
    folder = tmp_path / 'file' / 'ops'
    assert (
        refused(capsys, '--out', str(folder)) == f'{folder} cannot be written to (Not a directory): give another --out.'
    )
    monkeypatch.setattr(building, '__file__', str(folder / 'building.py'))
    assert refused(capsys) == (
        f'{folder} cannot be written to (Not a directory): run this as the user who installed the package, or put the '
        'library elsewhere: --out FOLDER.'
    )


def test_an_installation_without_sources(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(loader, '_FOLDER', Path('/nowhere/amp_wrapper/ops'))
    assert 'has no csrc' in refused(capsys)


@pytest.mark.parametrize('jobs', ['0', '-1', 'two'])
def test_a_number_of_compilers(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(['build-ops', f'--jobs={jobs}'])
    assert caught.value.code == 2 and f"'{jobs}' must be a whole number of at least 1" in capsys.readouterr().err


def test_when_a_toolkit_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, 'cuda', '13.0')
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert building._without_cuda(None).startswith('no GPU was seen')
    assert building._without_cuda(False) == 'they were left out with --no-cuda or FORCE_CUDA=0'
    assert building._without_cuda(True) == ''
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    assert building._without_cuda(None) == ''


@pytest.mark.skipif(loader.library().module is None, reason='there is no compiled library')
def test_the_library_of_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``--out`` wrote."""
    library = Path(str(getattr(loader.library().module, '__file__', '')))
    for path in (library, library.with_name(building.RECORD)):
        shutil.copy(path, tmp_path)
    monkeypatch.setenv('AMP_WRAPPER_OPS', str(tmp_path))

    # as the command itself, which is quick to import
    done = subprocess.run(
        [sys.executable, '-m', 'amp_wrapper', 'info', '--json'], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts['build']['file'] == str(tmp_path / library.name)
    assert facts['ops']['multi_tensor_scale']['cpu'] == 'CPU op'
    (tmp_path / library.name).unlink()
    found = loader._find(library.parent)
    assert found.module is None and found.reason == f'the library could not be loaded (there is none in {tmp_path})'
