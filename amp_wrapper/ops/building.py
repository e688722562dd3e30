"""Compiles the ops of ``csrc``: one list of sources and flags, for ``setup.py`` and for ``amp-wrapper build-ops``.

``setup.py`` loads this file by its path, before the package can be imported, and where there may be no torch. So it imports
nothing of the package, and torch inside of functions alone.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
#: The sources: in the package where it was installed, beside it in a checkout.
CSRC = PACKAGE / 'csrc' if (PACKAGE / 'csrc').is_dir() else PACKAGE.parent / 'csrc'
SUFFIXES = ('.h', '.cpp', '.inl', '.cu', '.cuh')
# a product and a sum keep their two roundings, so that every device and every instruction set gives the same bits
CXX_FLAGS = ['-O3', '-g0', '-ffp-contract=off', '-fvisibility=hidden', '-Wno-psabi']
if sys.platform == 'linux':
    # the functions of OpenMP come from the library that torch has loaded: its threads are ours
    CXX_FLAGS.append('-fopenmp')
NVCC_FLAGS = ['-O3', '--fmad=false']


def files() -> list[Path]:
    """Return all files of the library, headers among them, sorted."""
    return sorted(path for path in CSRC.rglob('*') if path.suffix in SUFFIXES)


def sources(cuda: bool) -> list[Path]:
    """Return the files that are compiled, sorted.

    Args:
        cuda: Whether the CUDA ops are among them.
    """
    return [path for path in files() if path.suffix in ('.cpp', '.cu') and (cuda or path.parent.name != 'cuda')]


def name() -> str:
    """Return the name of the library: it says for which torch and processor, and from which sources and flags it is built."""
    import torch

    digest = hashlib.sha256(repr((CXX_FLAGS, NVCC_FLAGS)).encode())
    for path in files():
        digest.update(path.relative_to(CSRC).as_posix().encode() + b'\0' + path.read_bytes())
    return re.sub(r'\W', '_', f'amp_ops_torch{torch.__version__}_{platform.machine()}_{digest.hexdigest()[:12]}')


def cache() -> Path:
    """Return where ``build-ops`` makes a folder: ``TORCH_EXTENSIONS_DIR``, or torch's folder in ``XDG_CACHE_HOME``."""
    home = os.path.join(os.environ.get('XDG_CACHE_HOME') or '~/.cache', 'torch_extensions')
    # where there is no home, Path.expanduser() raises
    return Path(os.path.expanduser(os.environ.get('TORCH_EXTENSIONS_DIR') or home)).absolute()


def switch(name: str) -> bool | None:
    """Read a variable of the environment that may be 0 or 1; None where it is not set.

    Raises:
        RuntimeError: It has another value.
    """
    value = os.environ.get(name, '')
    if value not in ('', '0', '1'):
        raise RuntimeError(f'{name}={value} means nothing: 1 demands these ops, 0 leaves them out')
    return value == '1' if value else None


def missing_compiler() -> str:
    """Say that there is no C++ compiler, neither that of ``CXX`` nor, without it, ``c++``; '' where there is one."""
    compiler = (os.environ.get('CXX') or 'c++').split()[0]
    return '' if shutil.which(compiler) else f'there is no C++ compiler ({compiler}): install g++, or set CXX'


def with_cuda(asked: bool | None = None) -> bool:
    """Decide whether the CUDA ops are built. Without a word about it: where torch sees a GPU, and finds CUDA's compiler.

    Args:
        asked: True and False decide; where it is None, ``FORCE_CUDA`` of the environment does.

    Raises:
        RuntimeError: They are asked for, and torch has no CUDA, or sees no GPU and is not told which one to compile for.
    """
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    asked = switch('FORCE_CUDA') if asked is None else asked
    if asked is None:
        return torch.version.cuda is not None and torch.cuda.is_available() and CUDA_HOME is not None
    if asked and torch.version.cuda is None:
        raise RuntimeError(f'CUDA ops need a torch with CUDA, and this is torch {torch.__version__}')
    if asked and not torch.cuda.is_available() and not os.environ.get('TORCH_CUDA_ARCH_LIST'):
        raise RuntimeError('torch sees no GPU: set TORCH_CUDA_ARCH_LIST to what to compile for, such as "8.0;9.0+PTX"')
    return asked


def prepare() -> None:
    """Let torch find ninja where a virtual environment is not activated, and setuptools link with what torch compiles with."""
    os.environ['PATH'] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get('PATH', '')])
    os.environ.setdefault('CXX', 'c++')


def build(cuda: bool) -> Path:
    """Compile the library by ninja, load it, and return its file. A build of the same sources again compiles nothing.

    torch reads ``TORCH_CUDA_ARCH_LIST``, ``CUDA_HOME``, ``CXX`` and ``MAX_JOBS``. The compilers print to stdout.

    Args:
        cuda: Whether the CUDA ops are a part of it.

    Raises:
        OSError: There is no compiler, torch finds no CUDA, or the folder cannot be written to.
        RuntimeError: There is no ninja, or a compiler failed.
    """
    from torch.utils.cpp_extension import load

    missing = missing_compiler()
    if missing:
        raise OSError(missing)
    prepare()
    folder = cache() / name()
    folder.mkdir(parents=True, exist_ok=True)
    load(
        name=name(),
        sources=[str(path) for path in sources(cuda)],
        extra_cflags=CXX_FLAGS,
        extra_cuda_cflags=NVCC_FLAGS,
        build_directory=str(folder),
        with_cuda=cuda,
        is_python_module=False,
        verbose=True,
    )
    library = folder / f'{name()}.so'
    # the loader takes the library that was built last
    library.touch()
    return library
