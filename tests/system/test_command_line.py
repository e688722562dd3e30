"""Commands that tests run in forked processes find what they would find in a new interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import ROOT, python

#: What a program can see of how it was started.
SEEN = """
import json, os, sys
loaded = [name for name in ('amp_wrapper', 'toy', 'pytest') if name in sys.modules]
here = dict(argv=sys.argv, original=sys.orig_argv[1:], folder=os.getcwd(), path=sys.path, loaded=loaded)
more = dict(input=sys.stdin.read(), variable=os.environ.get('SAID'), main=sys.modules['__main__'].__dict__ is globals())
print(json.dumps(here | more))
"""


def both(*words: str, cwd: Path, code: int = 0, **variables: str) -> list[subprocess.CompletedProcess[str]]:
    env = {**os.environ, 'SAID': 'yes', **variables}
    forked = python(*words, cwd=cwd, env=env)
    new = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert forked.returncode == new.returncode == code, forked.stderr
    return [forked, new]


@pytest.mark.parametrize(
    'words', [['seen.py', 'a', '-b'], ['-m', 'seen', 'a'], ['-c', SEEN, 'a']], ids=['file', 'module', 'code']
)
def test_a_program_sees_what_it_would_see_in_a_new_interpreter(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / 'seen.py').write_text(SEEN)
    seen = [json.loads(done.stdout) for done in both(*words, cwd=tmp_path, PYTHONPATH='/nowhere')]
    if words[0] != '-c':
        # the current folder, written as an empty string for code
        # what was imported may have added folders at its end
        assert seen[0]['path'][: len(seen[1]['path'])] == seen[1]['path']
    assert {**seen[0], 'path': 0} == {**seen[1], 'path': 0}
    assert seen[0]['loaded'] == []


def test_how_programs_end(tmp_path: Path) -> None:
    for code, status in (
        ('import sys; sys.exit(3)', 3),
        ('raise SystemExit("words")', 1),
        ('raise ValueError("words")', 1),
        ('import atexit; atexit.register(print, "at the end")', 0),
        ('import os, signal; os.kill(os.getpid(), signal.SIGKILL)', -9),
    ):
        forked, new = both('-c', code, cwd=tmp_path, code=status)
        assert forked.stdout == new.stdout
        # what was imported may say more at its end
        assert set(new.stderr.splitlines()[-1:]) <= set(forked.stderr.splitlines())


@pytest.mark.skipif(torch.cuda.is_available(), reason='with a GPU, commands are not forked')
def test_what_takes_long_is_loaded_and_nothing_goes_on() -> None:
    assert python('-c', 'import sys; print("torch" in sys.modules)').stdout == 'True\n'
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        python('-c', 'import os, time; print("here", flush=True); time.sleep(600)', timeout=1)
    assert caught.value.stdout == 'here\n'
    with pytest.raises(AssertionError, match='has left processes behind'):
        python('-c', 'import subprocess; subprocess.Popen(["sleep", "600"])')
    assert python('-c', 'print(1)', cwd=ROOT).stdout == '1\n'
