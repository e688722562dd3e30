"""Processes for tests, forked from one that has imported what they need and has run nothing.

To import torch and mmengine takes longer than most of what such a process does. The process that asks for them is not forked
itself: once it has started threads of torch's autograd engine, a copy of it lacks them, and torch computes no gradients there.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch

#: Imported once, before the processes are forked.
IMPORTED = (
    'pytest',
    'torch._dynamo',
    'torch.distributed.checkpoint',
    'torch.distributed.fsdp',
    'mmengine.runner',
    'toy',
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


def start(log: Path, target: Callable[..., None], *args: Any) -> BaseProcess:
    """Call a function in a process of its own, the first of a new group; returns at once.

    Args:
        log: What it writes is added there, with the traceback of an error.
        target: A function of a module; so are its arguments sent as pickles.
        args: Its arguments. The environment is that of the caller.
    """
    process = _context().Process(target=_call, args=(log, dict(os.environ), target, args))
    process.start()
    _started.append(process)
    return process  # type: ignore[no-any-return]


def _call(log: Path, environment: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    # what was imported before is not looked through, and copied for it, by each collection of garbage
    gc.freeze()
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with log.open('ab') as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
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
