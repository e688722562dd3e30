"""Fixtures of the ops."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope='session')
def other_process() -> Callable[[str], dict[str, Any]]:
    """What a new process says with an instruction set of torch's: see ``worker.py``."""

    @functools.cache
    def run(capability: str) -> dict[str, Any]:
        env = {**os.environ, 'ATEN_CPU_CAPABILITY': capability, 'PYTHONPATH': os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, str(Path(__file__).with_name('worker.py'))]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run
