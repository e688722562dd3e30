"""Builds the compiled ops of ``csrc/``; all else about the package stands in pyproject.toml.

Environment variables, named as in mmcv:

* ``AMP_WRAPPER_WITH_OPS``: 0 installs pure Python, 1 fails where the ops cannot be built. Unset: they are built where there is
  a compiler, and left out with a warning where there is none.
* ``FORCE_CUDA=1``: builds the CUDA ops although no GPU is seen, or fails. Needs a torch with CUDA, and nvcc.
* ``TORCH_CUDA_ARCH_LIST``: architectures, such as "9.0"; ``MAX_JOBS``: compilers at a time; ``CXX``, ``CUDA_HOME``.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Command, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
RECORD = Path('amp_wrapper', 'ops', '_build.json')
#: Whatever else may lie in csrc/ is no part of the library.
FOLDERS = ('', 'common', 'cpu', 'cuda')
#: Commands that build the package; all others need neither torch nor a compiler.
BUILDING = {
    'bdist',
    'bdist_egg',
    'bdist_rpm',
    'bdist_wheel',
    'build',
    'build_ext',
    'build_py',
    'develop',
    'editable_wheel',
    'install',
}
NO_TORCH = """
The compiled ops of amp_wrapper are built against the torch that they will run with, and no torch can be imported here
({}).
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
    found = [path for folder in FOLDERS for path in (ROOT / 'csrc' / folder).glob('*') if path.suffix in suffixes]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def digest(with_cuda: bool) -> str:
    """A hash over all sources of the library, the same as amp_wrapper.ops.loader computes."""
    total = hashlib.sha256()
    for name in sources('.h', '.cpp', '.inl', '.cu', '.cuh'):
        if not with_cuda and '/cuda/' in name:
            continue
        total.update(name.encode() + b'\0' + (ROOT / name).read_bytes())
    return total.hexdigest()


def default_architectures(cuda: str) -> str:
    """Those from Turing on that this version of nvcc knows, for machines that see no GPU."""
    names = ['7.5', '8.0', '8.6', '8.9', '9.0']
    if tuple(int(part) for part in cuda.split('.')[:2]) >= (12, 8):
        names += ['10.0', '12.0']
    return ';'.join(names) + '+PTX'


def first_line(*command: str) -> str:
    """What a program says about itself; its name where it says nothing."""
    try:
        done = subprocess.run([*command, '--version'], capture_output=True, text=True, check=False)
    except OSError:
        return command[0]
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    # nvcc introduces itself first
    return next((line for line in lines if 'release' in line), lines[0] if lines else command[0])


def destination(command: Command, inplace: bool) -> Path:
    """Where the package is put together: the source tree itself, or the folder that becomes a wheel."""
    return ROOT if inplace else Path(command.build_lib)


def cxx_compiler() -> str:
    """The command, with its arguments if it has any."""
    return os.environ.get('CXX') or 'c++'


def what_is_missing() -> str:
    """Why nothing can be compiled here, whatever torch there is; empty where it can."""
    if sys.platform == 'win32':
        return 'they are not built on Windows'
    if shutil.which(shlex.split(cxx_compiler())[0]) is None:
        return f'there is no C++ compiler ({cxx_compiler()})'
    headers = Path(sysconfig.get_path('include'), 'Python.h')
    if not headers.exists():
        return f'the headers of Python are missing ({headers.name}; python3-dev on Debian and Ubuntu)'
    return ''


def pure(reason: str, demanded_by: str) -> dict[str, Any]:
    """The arguments of setup() for a package without compiled ops."""
    if demanded_by:
        raise SystemExit(f'{demanded_by}=1, but {reason}.')
    if reason:
        print(
            f'warning: amp_wrapper is built without its compiled ops, since {reason}. It computes the same, slower. '
            'To build them: install g++ (Debian and Ubuntu: apt-get install g++), then '
            'pip install --no-build-isolation --force-reinstall --no-deps . in the source folder (or "make ops").',
            file=sys.stderr,
        )
    facts = {'built': False, 'reason': reason or 'it was installed with AMP_WRAPPER_WITH_OPS=0', 'chosen': not reason}

    class RecordOnly(build_py):
        """Notes why there is no library, so that one left from an earlier build is not loaded."""

        def run(self) -> None:
            super().run()
            base = destination(self, self.editable_mode)
            for stale in () if base == ROOT else base.glob('amp_wrapper/ops/_C.*'):
                stale.unlink()
            record(base, **facts)

    class NothingToBuild(build_ext):
        """The same for ``build_ext --inplace``."""

        def run(self) -> None:
            record(destination(self, self.inplace), **facts)

    return {'cmdclass': {'build_py': RecordOnly, 'build_ext': NothingToBuild}}


def compiled() -> dict[str, Any]:
    """The arguments of setup() that build the ops."""
    wanted = os.environ.get('AMP_WRAPPER_WITH_OPS', '')
    if wanted not in ('', '0', '1'):
        raise SystemExit(
            f'AMP_WRAPPER_WITH_OPS={wanted} means nothing: 0 leaves the compiled ops out, 1 insists on them.'
        )
    if wanted == '0':
        return pure('', '')
    forced = os.environ.get('FORCE_CUDA') == '1'
    missing = what_is_missing()
    if missing:
        return pure(missing, 'AMP_WRAPPER_WITH_OPS' if wanted == '1' else 'FORCE_CUDA' if forced else '')
    try:
        import torch
    except (ImportError, OSError) as error:
        raise SystemExit(NO_TORCH.format(error)) from None
    # torch compiles with this one, and setuptools would link with the one that Python was built with
    compiler = os.environ['CXX'] = cxx_compiler()
    if importlib.util.find_spec('ninja') is not None:
        import ninja

        # a virtual environment that is not activated has its programs in no path; without ninja, torch says what it does
        os.environ['PATH'] = ninja.BIN_DIR + os.pathsep + os.environ.get('PATH', '')
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

    without_cuda = ''
    if torch.version.cuda is None:
        without_cuda = 'the torch that it was built with has no CUDA'
    elif not forced and not torch.cuda.is_available():
        without_cuda = 'no GPU was seen when it was built; FORCE_CUDA=1 builds the CUDA ops all the same'
    elif CUDA_HOME is None or not Path(CUDA_HOME, 'bin', 'nvcc').exists():
        without_cuda = 'nvcc was not found; CUDA_HOME names the folder of a CUDA toolkit'
    if without_cuda and forced:
        raise SystemExit(f'FORCE_CUDA=1, but {without_cuda}.')
    with_cuda = not without_cuda
    if with_cuda and not os.environ.get('TORCH_CUDA_ARCH_LIST'):
        # named here and not by torch, so that the record can say them
        seen = sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})
        names = ';'.join(f'{major}.{minor}' for major, minor in seen)
        os.environ['TORCH_CUDA_ARCH_LIST'] = f'{names}+PTX' if names else default_architectures(torch.version.cuda)

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
    facts = {
        'torch': torch.__version__,
        'cuda': torch.version.cuda if with_cuda else None,
        'architectures': os.environ['TORCH_CUDA_ARCH_LIST'] if with_cuda else None,
        'without_cuda': without_cuda,
        'compiler': first_line(*shlex.split(compiler)),
        'nvcc': first_line(str(Path(CUDA_HOME, 'bin', 'nvcc'))) if with_cuda else None,
        'python': sys.implementation.cache_tag,
        'sources': digest(with_cuda),
    }

    class BuildOps(BuildExtension):  # type: ignore[misc, valid-type]
        """torch's command with a folder of its own that outlives the call, so that ninja compiles what changed."""

        def finalize_options(self) -> None:
            super().finalize_options()
            kind = f'{torch.__version__}-{"cuda" if with_cuda else "cpu"}-{sys.implementation.cache_tag}'
            self.build_temp = str(ROOT / 'build' / f'ops-{kind}')
            # what has to be compiled is judged by ninja. A library that is newer than its sources may still be one for
            # another torch, or without CUDA
            self.force = True

        def run(self) -> None:
            base = destination(self, self.inplace)
            # an interrupted build must not leave a record that speaks of a finished one
            record(base, built=False, reason='a build was begun and not finished', chosen=False)
            try:
                super().run()
                # what the library misses is found here, and not at the first step of a training
                ctypes.CDLL(str(base / self.get_ext_filename('amp_wrapper.ops._C')), mode=os.RTLD_NOW)
            except Exception as error:
                record(base, built=False, reason='the last build of them failed', chosen=False)
                raise SystemExit(
                    f'The compiled ops could not be built: {error}\nThe messages of the compiler are part of this output '
                    '(with pip: of that with -v). AMP_WRAPPER_WITH_OPS=0 installs the package without them; '
                    'it computes the same, slower.'
                ) from error
            record(base, built=True, **facts)

    return {'ext_modules': [extension], 'cmdclass': {'build_ext': BuildOps}}


arguments: dict[str, Any] = {}
if BUILDING & set(sys.argv):
    arguments = compiled()
elif 'dist_info' in sys.argv and importlib.util.find_spec('torch') is None and not what_is_missing():
    wanted = os.environ.get('AMP_WRAPPER_WITH_OPS') != '0'
    if wanted:
        # pip asks for this first. It would fetch a torch of several GB before the build could say that it cannot see it
        raise SystemExit(NO_TORCH.format('there is none in the environment of the build'))
setup(**arguments)
