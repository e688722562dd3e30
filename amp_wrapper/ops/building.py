"""Compiles the ops of ``csrc``: what ``setup.py`` does, and ``amp-wrapper build-ops`` where there is no ``setup.py``.

``setup.py`` loads this file by its path, before the package can be imported, so it imports nothing of the package, and torch
and setuptools inside of functions alone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cuda_toolkit import Toolkit

#: The library, as a module.
MODULE = 'amp_wrapper.ops._C'
#: What was built, for the loader: the name of the file beside the library.
RECORD = '_build.json'
#: Whatever else may lie in csrc/ is no part of the library.
FOLDERS = ('', 'common', 'cpu', 'cuda')
SUFFIXES = ('.h', '.cpp', '.inl', '.cu', '.cuh')


class BuildError(Exception):
    """The ops cannot be built here, or not as they were asked for."""


def sources(root: Path, *suffixes: str) -> list[str]:
    """Files of the library.

    Args:
        root: The folder that ``csrc`` lies in.
        suffixes: Of the files.

    Returns:
        Paths relative to ``root``, as setuptools wants them, sorted.
    """
    found = [path for folder in FOLDERS for path in (root / 'csrc' / folder).glob('*') if path.suffix in suffixes]
    return sorted(path.relative_to(root).as_posix() for path in found)


def digest(root: Path, with_cuda: bool) -> str:
    """A hash over all sources of the library: the record keeps it, so that a change of the sources is seen.

    Args:
        root: The folder that ``csrc`` lies in.
        with_cuda: Whether the CUDA ops are a part of the library.
    """
    total = hashlib.sha256()
    for name in sources(root, *SUFFIXES):
        if not with_cuda and '/cuda/' in name:
            continue
        total.update(name.encode() + b'\0' + (root / name).read_bytes())
    return total.hexdigest()


def write_record(folder: Path, **facts: Any) -> None:
    """Note what was built, or why nothing was.

    Args:
        folder: That of the library.
        facts: What :mod:`amp_wrapper.ops.loader` reads.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD).write_text(json.dumps(facts, indent=1) + '\n', encoding='utf-8')


def has_library(folder: Path) -> bool:
    """Whether a folder has the record of a finished build."""
    try:
        return bool(json.loads((folder / RECORD).read_text(encoding='utf-8'))['built'])
    except (OSError, ValueError, KeyError, TypeError):
        return False


# -- what is here -----------------------------------------------------------------------------------------------------


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


def cxx_compiler() -> str:
    """The command, with its arguments if it has any."""
    return os.environ.get('CXX') or 'c++'


def _words(command: str) -> list[str]:
    # here, since the loader imports this file in every program
    import shlex

    return shlex.split(command)


def what_is_missing() -> str:
    """Why nothing can be compiled here, whatever torch there is; empty where it can."""
    if sys.platform == 'win32':
        return 'they are not built on Windows'
    if shutil.which(_words(cxx_compiler())[0]) is None:
        return f'there is no C++ compiler ({cxx_compiler()})'
    import sysconfig

    headers = Path(sysconfig.get_path('include'), 'Python.h')
    if not headers.exists():
        return f'the headers of Python are missing ({headers.name}; python3-dev on Debian and Ubuntu)'
    return ''


def _cuda_toolkit() -> Any:
    """The file beside this one; without an import of the package, which may not be there yet."""
    name = 'amp_wrapper_cuda_toolkit'
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name('cuda_toolkit.py'))
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def _without_cuda(wanted: bool | None) -> str:
    """Why the CUDA ops are left out, whatever toolkit there is; empty where one is looked for."""
    import torch

    if wanted is False:
        return 'they were left out with --no-cuda or FORCE_CUDA=0'
    if torch.version.cuda is None:
        return 'the torch that it was built with has no CUDA'
    if wanted is None and not torch.cuda.is_available():
        return 'no GPU was seen when it was built; FORCE_CUDA=1 builds the CUDA ops all the same'
    return ''


# -- the build --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """What will be built.

    Attributes:
        root: The folder that ``csrc`` lies in.
        facts: For the record: versions of torch, Python, CUDA and the compilers, architectures, hash of the sources.
        toolkit: Where nvcc, the headers and the libraries of CUDA lie; None where the CUDA ops are left out.
    """

    root: Path
    facts: Mapping[str, Any]
    toolkit: Toolkit | None = None

    @property
    def with_cuda(self) -> bool:
        """Whether the CUDA ops are a part of it."""
        return self.toolkit is not None


def plan(root: Path, cuda: bool | None = None, asked_by: str = '') -> Plan:
    """Look at torch, the compilers and the GPUs.

    Sets ``CXX``, ``TORCH_CUDA_ARCH_LIST`` and ``CUDA_HOME``, which torch reads, and ``PATH``.

    Args:
        root: The folder that ``csrc`` lies in.
        cuda: Whether the CUDA ops are built; None builds them where torch has CUDA, sees a GPU, and nvcc is found.
        asked_by: What asked for the CUDA ops, for the message.

    Raises:
        BuildError: They were asked for, and cannot be built; or no compiler is here.
        ImportError: There is no torch.
    """
    missing = what_is_missing()
    if missing:
        raise BuildError(missing)
    import torch

    # torch compiles with this one, and setuptools would link with the one that Python was built with
    compiler = os.environ['CXX'] = cxx_compiler()
    if importlib.util.find_spec('ninja') is not None:
        import ninja

        # a virtual environment that is not activated has its programs in no path; without ninja, torch says what it does
        os.environ['PATH'] = ninja.BIN_DIR + os.pathsep + os.environ.get('PATH', '')
    from torch.utils import cpp_extension

    without_cuda = _without_cuda(cuda)
    toolkit: Toolkit | None = None
    if not without_cuda:
        toolkit, without_cuda = _cuda_toolkit().find_toolkit(cpp_extension.CUDA_HOME, str(torch.version.cuda))
    if without_cuda and cuda:
        raise BuildError(f'{asked_by}, but {without_cuda}')
    if toolkit is not None:
        # torch has read the variable already
        cpp_extension.CUDA_HOME = os.environ['CUDA_HOME'] = str(toolkit.home)
    with_cuda = toolkit is not None
    version = torch.version.cuda
    if with_cuda and not os.environ.get('TORCH_CUDA_ARCH_LIST'):
        # named here and not by torch, so that the record can say them
        seen = sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})
        names = ';'.join(f'{major}.{minor}' for major, minor in seen)
        os.environ['TORCH_CUDA_ARCH_LIST'] = f'{names}+PTX' if names else default_architectures(str(version))
    facts = {
        'torch': str(torch.__version__),
        'cuda': version if with_cuda else None,
        'architectures': os.environ['TORCH_CUDA_ARCH_LIST'] if with_cuda else None,
        'without_cuda': without_cuda,
        'compiler': first_line(*_words(compiler)),
        'nvcc': first_line(str(toolkit.home / 'bin' / 'nvcc')) if toolkit is not None else None,
        'python': sys.implementation.cache_tag,
        'sources': digest(root, with_cuda),
    }
    return Plan(root, facts, toolkit)


def setup_arguments(what: Plan, objects: Path) -> dict[str, Any]:
    """The arguments of ``setuptools.setup`` that build the library by the command ``build_ext``.

    Args:
        what: From :func:`plan`. The process must be in its ``root``.
        objects: A folder for the objects. It should outlive the call, so that ninja compiles what changed.
    """
    from torch.utils import cpp_extension

    base: Any = cpp_extension.BuildExtension

    # a product and a sum keep their two roundings, so that every device and every instruction set gives the same bits
    cxx = ['-O3', '-g0', '-ffp-contract=off', '-fvisibility=hidden', '-Wno-psabi']
    if sys.platform == 'linux':
        # the functions of OpenMP come from the library that torch has loaded: its threads are ours
        cxx.append('-fopenmp')
    make: Any = cpp_extension.CUDAExtension if what.with_cuda else cpp_extension.CppExtension
    folders: dict[str, Any] = {}
    if what.toolkit is not None:
        libraries = [str(folder) for folder in what.toolkit.libraries]
        if what.toolkit.runtime is not None:
            folder = _cuda_toolkit().link_runtime(what.toolkit.runtime, objects / 'libraries')
            libraries.append(str(folder))
        folders = {'include_dirs': [str(folder) for folder in what.toolkit.include], 'library_dirs': libraries}
    extension = make(
        name=MODULE,
        sources=[name for name in sources(what.root, '.cpp', '.cu') if what.with_cuda or '/cuda/' not in name],
        extra_compile_args={'cxx': cxx, 'nvcc': ['-O3', '--fmad=false']},
        **folders,
    )

    class BuildOps(base):  # type: ignore[misc]
        """torch's command, with a record of what it built and a first look at the library."""

        def finalize_options(self) -> None:
            super().finalize_options()
            self.build_temp = str(objects)
            # what has to be compiled is judged by ninja. A library that is newer than its sources may still be one for
            # another torch, or without CUDA
            self.force = True

        def run(self) -> None:
            # the source tree itself, or the folder that becomes a wheel
            library = Path(what.root if self.inplace else self.build_lib, self.get_ext_filename(MODULE))
            # an interrupted build must not leave a record that speaks of a finished one
            write_record(library.parent, built=False, reason='a build was begun and not finished', chosen=False)
            try:
                super().run()
                # what the library misses is found here, and not at the first step of a training
                ctypes.CDLL(str(library), mode=os.RTLD_NOW)
            except Exception as error:
                write_record(library.parent, built=False, reason='the last build of them failed', chosen=False)
                raise SystemExit(
                    f'The compiled ops could not be built: {error}\nThe messages of the compiler are part of this output '
                    '(with pip: of that with -v). AMP_WRAPPER_WITH_OPS=0 installs the package without them; '
                    'it computes the same, slower.'
                ) from error
            write_record(library.parent, built=True, **what.facts)

    return {'ext_modules': [extension], 'cmdclass': {'build_ext': BuildOps}}


def kind(what: Plan) -> str:
    """A name for the folder of the objects: those of another torch, Python or device are of no use."""
    return f'ops-{what.facts["torch"]}-{"cuda" if what.with_cuda else "cpu"}-{what.facts["python"]}'


def build(root: Path, target: Path, objects: Path, cuda: bool | None) -> None:
    """Build the library without a ``setup.py``, in a process that does nothing else.

    Args:
        root: The folder that ``csrc`` lies in; becomes the current folder.
        target: A folder that gets ``amp_wrapper/ops/`` with the library and its record.
        objects: A folder for the objects.
        cuda: As for :func:`plan`.

    Raises:
        BuildError: It cannot be built, or not as it was asked for.
        SystemExit: It failed.
    """
    os.chdir(root)
    # python -c puts the current folder on the path, in which names now mean the modules of this package
    sys.path[:] = [path for path in sys.path if path]
    from setuptools import Distribution  # type: ignore[import-untyped]

    command = Distribution(setup_arguments(plan(root, cuda), objects)).get_command_obj('build_ext')
    command.build_lib = str(target)
    command.ensure_finalized()
    command.run()
