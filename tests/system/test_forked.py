"""What the processes that tests start have, say and leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
import torch


def _tell() -> None:
    loaded = all(name in sys.modules for name in forked.IMPORTED)
    print(f'loaded: {loaded}, variable: {os.environ.get("SAID_BY_THE_TEST")}, group: {os.getpgid(0) == os.getpid()}')


def _fail() -> None:
    raise ValueError('on purpose')


def _stay() -> None:
    time.sleep(60)


def _backward() -> None:
    torch.ones(2, requires_grad=True).sum().backward()


def test_what_a_process_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('SAID_BY_THE_TEST', 'yes')
    assert forked.wait(forked.start(tmp_path / 'log', _tell), 60) == 0
    # a process that starts anew, as on a GPU, has imported nothing before
    loaded = forked._context().get_start_method() == 'forkserver'
    assert (tmp_path / 'log').read_text() == f'loaded: {loaded}, variable: yes, group: True\n'


def test_how_processes_end(tmp_path: Path) -> None:
    assert forked.wait(forked.start(tmp_path / 'log', _fail), 60) == 1
    assert 'ValueError: on purpose' in (tmp_path / 'log').read_text()
    process = forked.start(tmp_path / 'log', _stay)
    assert forked.wait(process, 0.2) is None
    assert forked.wait(process, 60, until=lambda: True) is None
    process.kill()
    assert forked.wait(process, 60) == -signal.SIGKILL


def test_a_caller_that_has_compiled(tmp_path: Path) -> None:
    """With torch 2.11 built for CUDA, a copy of such a process cannot compute gradients."""
    torch.compile(torch.nn.Linear(2, 2), backend='aot_eager')(torch.ones(1, 2)).sum().backward()
    assert forked.wait(forked.start(tmp_path / 'log', _backward), 60) == 0, (tmp_path / 'log').read_text()


def test_a_caller_that_leaves_a_process(tmp_path: Path) -> None:
    script = f'import forked, pathlib, time; forked.start(pathlib.Path({str(tmp_path / "log")!r}), time.sleep, 600)'
    assert subprocess.run([sys.executable, '-c', script], timeout=60, check=False).returncode == 0
