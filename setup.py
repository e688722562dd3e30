"""Builds the compiled ops of ``csrc/``; all else about the package stands in pyproject.toml.

Environment variables, named as in mmcv:

* ``AMP_WRAPPER_WITH_OPS``: 0 installs pure Python, 1 fails where the ops cannot be built. Unset: they are built where there is
  a compiler, and left out with a warning where there is none.
* ``FORCE_CUDA=1``: builds the CUDA ops although no GPU is seen. Needs a torch with CUDA, and nvcc.
* ``TORCH_CUDA_ARCH_LIST``: architectures, such as "9.0"; ``MAX_JOBS``: compilers at a time; ``CXX``, ``CUDA_HOME``.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any

from setuptools import setup

ROOT = Path(__file__).resolve().parent
RECORD = Path('amp_wrapper', 'ops', '_build.json')
NO_TORCH = """
The compiled ops of amp_wrapper are built against the torch that they will run with, and no torch can be imported here.
  1. Install torch first:  pip install torch
  2. Build in that environment, not in an isolated one:  pip install --no-build-isolation .
Or leave the ops out:  AMP_WRAPPER_WITH_OPS=0 pip install .
"""


def record(base: Path, **facts: Any) -> None:
    """What was built, or why nothing was, for amp_wrapper.ops.loader."""
    path = base / RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1) + '\n', encoding='utf-8')


def sources(*suffixes: str) -> list[str]:
    """Paths below csrc/, relative to this file, as setuptools wants them."""
    return sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / 'csrc').rglob('*') if p.suffix in suffixes)


def digest() -> str:
    """A hash over all sources, the same as amp_wrapper.ops.loader computes."""
    total = hashlib.sha256()
    for name in sources('.h', '.cpp', '.inl', '.cu', '.cuh'):
        total.update(name.encode() + b'\0' + (ROOT / name).read_bytes())
    return total.hexdigest()


def default_architectures(cuda: str) -> str:
    """Those from Turing on that this version of nvcc knows, for machines that see no GPU."""
    names = ['7.5', '8.0', '8.6', '8.9', '9.0']
    if tuple(int(part) for part in cuda.split('.')[:2]) >= (12, 8):
        names += ['10.0', '12.0']
    return ';'.join(names) + '+PTX'


def pure(reason: str, wanted: bool) -> dict[str, Any]:
    """The arguments of setup() for a package without compiled ops."""
    if wanted:
        raise SystemExit(f'AMP_WRAPPER_WITH_OPS=1, but {reason}.')
    if reason:
        warnings.warn(
            f'amp_wrapper is installed without its compiled ops, since {reason}. It computes the same, slower. '
            'To build them: install g++ (Debian and Ubuntu: apt-get install g++), then '
            'pip install --no-build-isolation --force-reinstall --no-deps . (or run "make" again).',
            stacklevel=2,
        )
    record(ROOT, built=False, reason=reason or 'it was installed with AMP_WRAPPER_WITH_OPS=0', chosen=not reason)
    return {}


def compiled() -> dict[str, Any]:
    """The arguments of setup() that build the ops."""
    wanted = os.environ.get('AMP_WRAPPER_WITH_OPS', '')
    if wanted == '0':
        return pure('', False)
    try:
        import torch
    except ImportError:
        raise SystemExit(NO_TORCH) from None
    compiler = os.environ.get('CXX', 'c++')
    if sys.platform == 'win32':
        return pure('they are not built on Windows', wanted == '1')
    if shutil.which(shlex.split(compiler)[0]) is None:
        return pure(f'there is no C++ compiler ({compiler})', wanted == '1')
    headers = Path(sysconfig.get_path('include'), 'Python.h')
    if not headers.exists():
        return pure(
            f'the headers of Python are missing ({headers.name}; python3-dev on Debian and Ubuntu)', wanted == '1'
        )
    try:
        import ninja

        # a virtual environment that is not activated has its programs in no path
        os.environ['PATH'] = ninja.BIN_DIR + os.pathsep + os.environ.get('PATH', '')
    except ImportError:
        pass
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

    without_cuda = ''
    forced = os.environ.get('FORCE_CUDA') == '1'
    if torch.version.cuda is None:
        without_cuda = 'this torch was built without CUDA'
    elif not forced and not torch.cuda.is_available():
        without_cuda = 'no GPU was seen when it was built; FORCE_CUDA=1 builds the CUDA ops all the same'
    elif CUDA_HOME is None or not Path(CUDA_HOME, 'bin', 'nvcc').exists():
        without_cuda = 'nvcc was not found; CUDA_HOME names the folder of a CUDA toolkit'
    if without_cuda and forced:
        raise SystemExit(f'FORCE_CUDA=1, but {without_cuda}.')
    with_cuda = not without_cuda
    if with_cuda and not torch.cuda.is_available():
        os.environ.setdefault('TORCH_CUDA_ARCH_LIST', default_architectures(torch.version.cuda))

    # a product and a sum keep their two roundings, so that every device and every instruction set gives the same bits
    cxx = ['-O3', '-g0', '-ffp-contract=off', '-fvisibility=hidden', '-Wno-psabi']
    if sys.platform == 'linux':
        # the functions of OpenMP come from the library that torch has loaded: its threads are ours
        cxx.append('-fopenmp')
    extension = (CUDAExtension if with_cuda else CppExtension)(
        name='amp_wrapper.ops._C',
        sources=[name for name in sources('.cpp', '.cu') if with_cuda or '/cuda/' not in name],
        extra_compile_args={'cxx': cxx, 'nvcc': ['-O3', '--fmad=false']},
    )
    extension.depends = sources('.h', '.inl', '.cuh')
    facts = {
        'torch': torch.__version__,
        'cuda': torch.version.cuda if with_cuda else None,
        'architectures': os.environ.get('TORCH_CUDA_ARCH_LIST', 'those of the GPUs seen') if with_cuda else None,
        'without_cuda': without_cuda,
        'python': sys.implementation.cache_tag,
        'sources': digest(),
    }

    class BuildOps(BuildExtension):  # type: ignore[misc, valid-type]
        """torch's command with a folder of its own that outlives the call, so that ninja compiles what changed."""

        def finalize_options(self) -> None:
            super().finalize_options()
            kind = f'{torch.__version__}-{"cuda" if with_cuda else "cpu"}-{sys.implementation.cache_tag}'
            self.build_temp = str(ROOT / 'build' / f'ops-{kind}')

        def run(self) -> None:
            # an interrupted build must not leave a record that speaks of a finished one
            record(ROOT, built=False, reason='a build was begun and not finished', chosen=False)
            try:
                super().run()
            except (Exception, subprocess.SubprocessError) as error:
                raise SystemExit(
                    f'The compiled ops could not be built: {error}\nThe messages of the compiler stand above (pip shows them '
                    'with -v). AMP_WRAPPER_WITH_OPS=0 installs the package without them; it computes the same, slower.'
                ) from error
            version = subprocess.run([*shlex.split(compiler), '--version'], capture_output=True, text=True, check=False)
            first = version.stdout.splitlines()[0] if version.stdout else compiler
            for base in {ROOT, Path(self.build_lib)}:
                record(base, built=True, compiler=first, **facts)

    return {
        'ext_modules': [extension],
        'cmdclass': {'build_ext': BuildOps},
    }


# commands that compile nothing need no torch
passive = {'sdist', 'egg_info', 'dist_info', 'clean', '--version', '--help'}
setup(**({} if passive & set(sys.argv) else compiled()))
