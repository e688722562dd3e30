"""Looks for a complete CUDA toolkit before anything is compiled.

torch guesses ``CUDA_HOME`` from the folder of an ``nvcc`` in the path. That ``nvcc`` may be a link, or a script that starts one
of another folder. Then the headers lie elsewhere, and a build would find that out in the middle.

Loaded by its path, as ``building.py`` is, so it imports nothing of the package.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import subprocess
from pathlib import Path

#: What the CUDA sources and nvcc itself include, and the library that is linked.
HEADERS = ('cuda_runtime_api.h', 'cuda_fp16.h', 'crt/host_config.h')
RUNTIME = 'libcudart.so'
REMEDY = 'CUDA_HOME names the folder of a whole CUDA toolkit'


@dataclasses.dataclass(frozen=True)
class Toolkit:
    """The CUDA compiler, and where the rest of it lies.

    Attributes:
        home: The folder with ``bin/nvcc``, as in ``CUDA_HOME``.
        include: The folders with the headers.
        libraries: The folder with the CUDA runtime; empty where ``runtime`` stands in for it.
        runtime: The CUDA runtime of pip's packages, where no toolkit has it under the name that the linker looks for.
    """

    home: Path
    include: tuple[Path, ...]
    libraries: tuple[Path, ...] = ()
    runtime: Path | None = None


def find_toolkit(cuda_home: str | None, cuda: str) -> tuple[Toolkit | None, str]:
    """Look in ``CUDA_HOME``, beside the compiler that the ``nvcc`` there starts, and in pip's packages of NVIDIA.

    Args:
        cuda_home: ``torch.utils.cpp_extension.CUDA_HOME``.
        cuda: ``torch.version.cuda``. A compiler of another major release does not do.

    Returns:
        The toolkit, or None; and what is missing, with the variable that would name it, or nothing.
    """
    homes = [Path(cuda_home)] if cuda_home else []
    homes += [found for home in homes if _has_nvcc(home) for found in _started_by(home / 'bin' / 'nvcc')]
    homes += [nvcc.parent.parent for nvcc in _packages('bin', 'nvcc')]
    homes = [home for home in dict.fromkeys(homes) if _has_nvcc(home)]
    if not homes:
        below = f' below CUDA_HOME, which is {cuda_home}' if cuda_home else ''
        return None, f'nvcc was not found{below}; {REMEDY}'
    releases = {home: _release(home) for home in homes}
    homes = [home for home, release in releases.items() if release.split('.')[0] in ('', cuda.split('.')[0])]
    if not homes:
        found = ', '.join(f'{release} in {home}' for home, release in releases.items())
        return None, f'nvcc is of another CUDA ({found}) than torch, which has {cuda}; {REMEDY}'
    lacking: list[str] = []
    for home, others in [*((home, []) for home in homes), (homes[-1], _packages('include'))]:
        folders = [home / 'include', *sorted(home.glob('targets/*/include')), *others]
        # more places where torch and nvcc look
        folders = [folder for folder in (*folders, *_named_by('CUDA_INC_PATH', 'CPATH')) if folder.is_dir()]
        lacking = [name for name in HEADERS if not any((folder / name).is_file() for folder in folders)]
        if not lacking:
            # compilers look in /usr/include last, and do not like to be told to look there earlier
            return _with_runtime(home, tuple(folder for folder in folders if folder != Path('/usr/include')))
    where = ', '.join(str(home) for home in homes)
    names = ', '.join(lacking)
    return None, f'the headers of CUDA are missing ({names}), in {where} and in the packages of pip; {REMEDY}'


def _with_runtime(home: Path, include: tuple[Path, ...]) -> tuple[Toolkit | None, str]:
    folders = [home / 'lib64', home / 'lib', *sorted(home.glob('targets/*/lib')), *sorted(home.glob('lib/*-linux-gnu'))]
    having = [folder for folder in (*folders, *_named_by('LIBRARY_PATH')) if (folder / RUNTIME).exists()]
    if having:
        return Toolkit(home, include, tuple(having[:1])), ''
    packed = _packages('lib', f'{RUNTIME}.*')
    if packed:
        return Toolkit(home, include, runtime=packed[0]), ''
    return None, f'the runtime of CUDA is missing ({RUNTIME}), in {home} and in the packages of pip; {REMEDY}'


def link_runtime(runtime: Path, folder: Path) -> Path:
    """Give the library of a package the name that the linker looks for.

    Args:
        runtime: The library, which has its version in its name.
        folder: Gets the link.

    Returns:
        The folder, absolute.
    """
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / RUNTIME
    link.unlink(missing_ok=True)
    link.symlink_to(runtime.resolve())
    return folder.absolute()


def _has_nvcc(home: Path) -> bool:
    return (home / 'bin' / 'nvcc').is_file()


def _release(home: Path) -> str:
    """The version of a compiler, such as '13.0'; empty where it does not say."""
    try:
        command = [str(home / 'bin' / 'nvcc'), '--version']
        done = subprocess.run(command, capture_output=True, text=True, errors='replace', timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ''
    found = re.search(r'release (\d+\.\d+)', done.stdout)
    return found[1] if found else ''


def _started_by(nvcc: Path) -> list[Path]:
    """The toolkits that an ``nvcc`` belongs to: it may be a link, or a script that starts the one of another folder."""
    homes = [nvcc.resolve().parent.parent]
    # it prints its folders, and neither reads nor compiles anything
    command = [str(nvcc), '--dryrun', '-x', 'cu', os.devnull]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors='replace', timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return homes
    lines = (done.stdout + done.stderr).splitlines()
    return homes + [Path(line.partition('TOP=')[2].strip()).resolve() for line in lines if line.startswith('#$ TOP=')]


def _packages(*parts: str) -> list[Path]:
    """What the packages of NVIDIA have that pip has installed beside torch, such as ``nvidia/cu13/include``."""
    spec = importlib.util.find_spec('nvidia')
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return [found for folder in folders for found in sorted(Path(folder).glob(str(Path('*', *parts))))]


def _named_by(*variables: str) -> list[Path]:
    """The folders that environment variables name."""
    return [Path(path) for name in variables for path in os.environ.get(name, '').split(os.pathsep) if path]
