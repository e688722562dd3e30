"""Python commands and command-line tools, typed as users type them."""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, cast

import torch

ROOT = Path(__file__).resolve().parents[2]
#: Of other packages, and nothing of this one: what a command does not import itself, it must not find.
IMPORTED = (
    'torch._dynamo',
    'torch.distributed.checkpoint',
    'torch.distributed.fsdp',
    'mmengine.runner',
    'sklearn.datasets',
)


@functools.cache
def _server(owner: int) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name('python_server.py')), *IMPORTED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # an answer that waits in a buffer would not be seen by select
        bufsize=0,
        env={**environment, 'OMP_NUM_THREADS': '1'},
    )


def _is_gone(group: int) -> bool:
    """Whether all processes of a group have ended, soon after the first one has; the others are killed."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    return False


def python(
    *words: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS``, as ``subprocess.run`` does, in a process that has imported what takes long.

    A test of what a command imports, or of how it starts, runs a new interpreter instead.

    Args:
        words: A script, ``-m`` and a module, or ``-c`` and code; then arguments.
        cwd: The folder to run it in.
        env: All of its environment; that of this process by default.
        timeout: Seconds.

    Raises:
        subprocess.TimeoutExpired: The command took longer. It was killed.
        AssertionError: Processes that it has started go on 10 seconds after its end. They were killed.
    """
    command = [str(word) for word in words]
    environment = dict(os.environ if env is None else env)
    if torch.cuda.is_available():
        # the CUDA driver does not survive a fork
        return subprocess.run(
            [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
        )
    server = _server(os.getpid())
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / 'out', Path(folder) / 'err'
        for path in (out, err):
            path.touch()
        request = dict(words=command, env=environment, cwd=str(cwd), out=str(out), err=str(err))
        answers = cast('IO[bytes]', server.stdout)
        cast('IO[bytes]', server.stdin).write(json.dumps(request).encode() + b'\n')
        pid = int(answers.readline())
        ended = bool(select.select([answers], [], [], timeout)[0])
        if not ended:
            os.killpg(pid, signal.SIGKILL)
        code = int(answers.readline())
        is_alone = _is_gone(pid)
        said, errors = out.read_text(), err.read_text()
    if not ended:
        raise subprocess.TimeoutExpired(command, timeout, said, errors)
    assert is_alone, f'{command} has left processes behind'
    return subprocess.CompletedProcess(command, code, said, errors)


def tool(*words: str, ok: bool = True, **environment: str) -> str:
    """Run ``python tools/...`` in the repository; returns everything it said."""
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHON': sys.executable, **environment}
    if words[0].endswith('.py'):
        done = python(*words, env=env)
    else:
        done = subprocess.run(['bash', *words], capture_output=True, text=True, cwd=ROOT, timeout=300, env=env)
    said = done.stdout + done.stderr
    assert (done.returncode == 0) == ok, said[-4000:]
    return said
