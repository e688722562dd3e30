"""Command-line tools, typed as users type them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tool(*words: str, ok: bool = True, **environment: str) -> str:
    """Run ``python tools/...`` in the repository; returns everything it said."""
    command = [sys.executable, *words] if words[0].endswith('.py') else ['bash', *words]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHON': sys.executable, **environment},
    )
    said = done.stdout + done.stderr
    assert (done.returncode == 0) == ok, said[-4000:]
    return said
