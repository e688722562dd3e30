"""Processes for tests, forked from one that has imported what they need and has run nothing.

To import torch and mmengine takes longer than most of what such a process does. The process that asks for them is not forked
itself: once it has started threads of torch's autograd engine, a copy of it lacks them, and torch computes no gradients there.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[2]
#: Imported once, before the processes are forked. Nothing of this package: a command must not find what it does not import.
IMPORTED = (
    'pytest',
    'torch._dynamo',
    'torch.distributed.checkpoint',
    'torch.distributed.fsdp',
    'mmengine.runner',
    'sklearn.datasets',
)


@functools.cache
def _context() -> Any:
    if torch.cuda.is_available():
        # mmengine asks for the devices as it is imported, and the CUDA driver does not survive a fork after that
        return multiprocessing.get_context('spawn')
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(list(IMPORTED))
    # before Python 3.13, the process that imports them does not know the caller's sys.path
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        multiprocessing.forkserver.ensure_running()
    return context


def kill(process: BaseProcess) -> None:
    """SIGKILL to a process that has not ended yet, and to those that it has started; returns when it has ended."""
    if process.exitcode is None:
        # it may be no group yet: then it has started none
        with contextlib.suppress(ProcessLookupError):
            os.killpg(cast(int, process.pid), signal.SIGKILL)
        process.kill()
    process.join()


def _kill_all(processes: list[BaseProcess]) -> None:
    for process in processes:
        kill(process)


_started: list[BaseProcess] = []
# the caller would wait for them at its end, whatever became of its tests
Finalize(None, _kill_all, (_started,), exitpriority=0)


def start(
    log: Path, target: Callable[..., None], *args: Any, errors: Path | None = None, env: Mapping[str, str] | None = None
) -> BaseProcess:
    """Call a function in a process of its own, the first of a new group; returns at once.

    Args:
        log: What it writes is added there, with the traceback of an error.
        target: A function of a module; so are its arguments sent as pickles.
        args: Its arguments.
        errors: Where that goes which it writes to stderr, if not to ``log``.
        env: All of its environment; that of this process by default.
    """
    environment = dict(os.environ if env is None else env)
    process = _context().Process(target=_call, args=(log, errors or log, environment, target, args))
    process.start()
    _started.append(process)
    return process  # type: ignore[no-any-return]


def _call(log: Path, errors: Path, env: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    # what was imported before is not looked through, and copied for it, by each collection of garbage
    gc.freeze()
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    for path, number in ((log, 1), (errors, 2)):
        with path.open('ab') as file:
            os.dup2(file.fileno(), number)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    target(*args)


def wait(process: BaseProcess, seconds: float, until: Callable[[], bool] = lambda: False) -> int | None:
    """The exit code, negative where a signal ended it; None when the time is over or the condition has come true first."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.exitcode is not None:
            return process.exitcode
        if until():
            return None
        time.sleep(0.0003)
    return None


# -- commands ---------------------------------------------------------------------------------------------------------


@functools.cache
def _path_of_python() -> list[str]:
    """What an interpreter finds by itself."""
    words = [sys.executable, '-c', 'import sys; print(*sys.path[1:], sep="\\n")']
    return subprocess.run(words, capture_output=True, text=True, check=True, env={}).stdout.splitlines()


def _become(words: list[str], cwd: Path, path: list[str]) -> None:
    """Do what ``python WORDS`` does."""
    os.chdir(cwd)
    first = words[0]
    folder = os.getcwd() if first in ('-m', '-c') else os.path.dirname(os.path.abspath(first))
    sys.path[:] = [folder, *filter(None, os.environ.get('PYTHONPATH', '').split(os.pathsep)), *path]
    sys.orig_argv = [sys.executable, *words]
    try:
        if first == '-m':
            # as while the interpreter looks for the module
            sys.argv = ['-m', *words[2:]]
            runpy.run_module(words[1], run_name='__main__', alter_sys=True)
        elif first == '-c':
            sys.argv = ['-c', *words[2:]]
            module = sys.modules['__main__'] = types.ModuleType('__main__')
            exec(compile(words[1], '<string>', 'exec'), vars(module))
        else:
            sys.argv = words
            runpy.run_path(first, run_name='__main__')
    finally:
        # which multiprocessing leaves out
        atexit._run_exitfuncs()


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
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / 'out', Path(folder) / 'err'
        process = start(out, _become, command, cwd, _path_of_python(), errors=err, env=env)
        code = wait(process, timeout)
        kill(process)
        is_alone = _is_gone(cast(int, process.pid))
        said, errors = (path.read_text() if path.exists() else '' for path in (out, err))
    if code is None:
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
