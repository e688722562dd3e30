"""Imports modules once, and forks a process for each Python command that it reads.

``python python_server.py MODULE ...`` reads one JSON object in a line: ``words`` (what follows ``python``: a script, ``-m`` and
a module, or ``-c`` and code, with arguments), ``env``, ``cwd``, ``out`` and ``err`` (files for what the command writes). It
prints the id of the process, and then its exit code. ``command_line.python`` asks it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import sys
import types
from typing import Any


def _prepare(request: dict[str, Any]) -> None:
    """Make this process what the interpreter would find at its start."""
    # not to be looked through, and copied for it, by each collection of garbage and at the end
    gc.freeze()
    if 'triton' in sys.modules:
        # in Python 3.13, nanobind (of the Triton of torch 2.15) says on stderr that what is still frozen at the end has leaked
        atexit.register(gc.unfreeze)
    os.setsid()
    os.chdir(request['cwd'])
    os.environ.clear()
    os.environ.update(request['env'])
    for name, number in (('out', 1), ('err', 2)):
        file = os.open(request[name], os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(os.devnull)  # noqa: SIM115 (until the end)
    first = request['words'][0]
    folder = os.getcwd() if first in ('-m', '-c') else os.path.dirname(os.path.abspath(first))
    # in place of this script's
    sys.path[:1] = [folder, *filter(None, os.environ.get('PYTHONPATH', '').split(os.pathsep))]


def _become(words: list[str]) -> None:
    sys.orig_argv = [sys.executable, *words]
    if words[0] == '-m':
        # as while the interpreter looks for the module
        sys.argv = ['-m', *words[2:]]
        runpy.run_module(words[1], run_name='__main__', alter_sys=True)
    elif words[0] == '-c':
        sys.argv = ['-c', *words[2:]]
        module = sys.modules['__main__'] = types.ModuleType('__main__')
        exec(compile(words[1], '<string>', 'exec'), vars(module))
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name='__main__')


def main() -> None:
    """Serve until the input ends; in a forked process, run its command instead."""
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            request = json.loads(line)
            _prepare(request)
            _become(request['words'])
            return
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == '__main__':
    main()
