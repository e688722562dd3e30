"""Compilers, for the tests that build pieces of ``csrc`` by themselves."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / 'csrc'
SHIM = ROOT / 'tests' / 'cuda_shim'


def compiler() -> list[str]:
    """The C++ compiler as a command, or a skip."""
    command = shlex.split(os.environ.get('CXX', 'c++'))
    if shutil.which(command[0]) is None:
        pytest.skip(f'there is no C++ compiler ({command[0]})')
    return command


def nvcc() -> str:
    """The path of nvcc, or a skip."""
    home = os.environ.get('CUDA_HOME', '/usr/local/cuda')
    found = shutil.which('nvcc') or shutil.which('nvcc', path=os.path.join(home, 'bin'))
    if found is None:
        pytest.skip(f'there is no nvcc, neither in PATH nor in {home}/bin')
    return found


def compile_cpp(target: Path, sources: Sequence[Path], *flags: str) -> Path:
    """Compile and link; a failure shows the compiler's messages."""
    command = [*compiler(), '-std=c++20', '-Wall', '-Wno-unknown-pragmas', '-Wno-psabi', '-pthread', *flags]
    done = subprocess.run(
        [*command, *map(str, sources), '-o', str(target)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target
