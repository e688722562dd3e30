"""The Python interpreters that ``make matrix`` finds on a machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def version_of(program: str | Path) -> str | None:
    """The version of an interpreter, such as '3.12.1'.

    Args:
        program: Its path.

    Returns:
        The version; None where it does not start, as with the stand-ins of pyenv for versions that are not chosen.
    """
    command = [str(program), '-c', 'import ensurepip, venv, platform; print(platform.python_version())']
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.fullmatch(r'(\d+\.\d+\.\d+)\S*', done.stdout.strip())
    return found[1] if found and done.returncode == 0 else None


def candidates(minor: str) -> Iterator[str | Path]:
    """Where an interpreter may lie: this one, ``python3.12`` in the path, the versions of pyenv, the newest first."""
    yield sys.executable
    yield shutil.which(f'python{minor}') or f'python{minor}'
    root = Path(os.environ.get('PYENV_ROOT') or Path.home() / '.pyenv')
    names = [path for path in root.glob(f'versions/{minor}.*') if re.fullmatch(r'\d+\.\d+\.\d+', path.name)]
    yield from (path / 'bin' / 'python' for path in sorted(names, key=lambda p: -int(p.name.rpartition('.')[2])))


def find_interpreter(minor: str) -> Path | None:
    """An interpreter that can make virtual environments.

    Args:
        minor: Such as '3.12'.

    Returns:
        Its path; None where there is none.
    """
    for program in candidates(minor):
        version = version_of(program)
        if version is not None and version.rpartition('.')[0] == minor:
            return Path(program)
    return None


def in_order(version: str) -> tuple[int, ...]:
    """A key that sorts versions: 3.9 before 3.10."""
    return tuple(int(part) for part in re.findall(r'\d+', version))
