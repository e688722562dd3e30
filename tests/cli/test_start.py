"""How a process finds out that it is one of the package's commands, and what the user typed to start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ROOT

from amp_wrapper import start

SCRIPT = '/env/bin/amp-wrapper'
DOOR = str(ROOT / 'tools' / 'train.py')


@pytest.mark.parametrize(
    ('argv', 'original', 'expected'),
    [
        ([SCRIPT, 'train'], ['/env/bin/python', SCRIPT, 'train'], (SCRIPT,)),
        # torchrun, profilers
        ([SCRIPT], ['python', '-u', SCRIPT], (SCRIPT,)),
        ([DOOR], ['python', DOOR], (DOOR,)),
        (['-m', 'info'], ['python', '-m', 'amp_wrapper', 'info'], ('-m', 'amp_wrapper')),
        (['-m'], ['python', '-X', 'importtime', '-m', 'amp_wrapper.info'], ('-m', 'amp_wrapper.info')),
        # other programs
        (['-m'], ['python', '-m', 'project.train', 'amp_wrapper'], ()),
        (['-m'], ['python', '-m'], ()),
        (['train.py'], ['python', 'train.py'], ()),
        (['/elsewhere/tools/train.py'], ['python', '/elsewhere/tools/train.py'], ()),
        (['my-amp-wrapper'], ['python', 'my-amp-wrapper'], ()),
        (['-c'], ['python', '-c', 'import amp_wrapper'], ()),
        ([''], ['python'], ()),
        ([], [], ()),
        # a worker process, to which multiprocessing hands the arguments of its parent
        ([SCRIPT, 'train'], ['python', '-c', 'from multiprocessing.spawn import ...', '--multiprocessing-fork'], ()),
    ],
)
def test_which_command_was_started(argv: list[str], original: list[str], expected: tuple[str, ...]) -> None:
    assert start.command_of(argv, original) == expected


def test_these_tests_are_no_command() -> None:
    assert start.COMMAND == () and start.script() == ''
    assert start.typed('train') == ['amp-wrapper', 'train']


@pytest.mark.parametrize(
    ('command', 'on_path', 'expected'),
    [
        (('{here}/env/bin/amp-wrapper',), True, ['amp-wrapper', 'train']),
        (('{here}/env/bin/amp-wrapper',), False, ['env/bin/amp-wrapper', 'train']),
        (('/elsewhere/bin/amp-wrapper',), True, ['/elsewhere/bin/amp-wrapper', 'train']),
        (('-m', 'amp_wrapper'), False, ['env/bin/python', '-m', 'amp_wrapper', 'train']),
        (('tools/train.py',), False, ['env/bin/python', 'tools/train.py']),
        (('{here}/tools/train.py',), False, ['env/bin/python', 'tools/train.py']),
    ],
)
def test_what_was_typed(
    command: tuple[str, ...], on_path: bool, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / 'env' / 'bin' / 'amp-wrapper'
    program.parent.mkdir(parents=True)
    program.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('PATH', f'{program.parent if on_path else tmp_path}{os.pathsep}/nowhere')
    monkeypatch.setattr(sys, 'executable', str(program.with_name('python')))
    monkeypatch.setattr(start, 'COMMAND', tuple(word.format(here=tmp_path) for word in command))
    assert start.typed('train') == expected


def test_an_interpreter_of_elsewhere_is_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'executable', '/usr/bin/python3')
    assert start.python() == 'python'


# A stand-in for a command of the package, in a process of its own.
NAMES = """
import json, sys
sys.argv[0] = 'amp-wrapper'
sys.orig_argv[:] = ['python', 'amp-wrapper']
import amp_wrapper
before = {'torch', 'mmengine'} & set(sys.modules)
try:
    amp_wrapper.nothing
except AttributeError as error:
    missing = str(error)
still = {'torch', 'mmengine'} & set(sys.modules)
from amp_wrapper import errors, start
from amp_wrapper import AmpOptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
after = [name for name in amp_wrapper.__all__ if not hasattr(amp_wrapper, name)]
print(json.dumps([sorted(before | still), missing, after, OPTIM_WRAPPERS.get('AmpOptimWrapper') is AmpOptimWrapper]))
"""


def test_a_command_loads_the_rest_of_the_package_when_a_name_is_asked_for() -> None:
    done = subprocess.run([sys.executable, '-c', NAMES], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], "module 'amp_wrapper' has no attribute 'nothing'", [], True]
