"""Builds the compiled ops of ``csrc/``; all else about the package stands in pyproject.toml.

Environment variables, named as in mmcv:

* ``AMP_WRAPPER_WITH_OPS``: 0 installs pure Python, 1 fails where the ops cannot be built. Unset: they are built where there is
  a torch and a compiler, and left out with a warning where there is none, as in an isolated build.
* ``FORCE_CUDA``: 1 builds the CUDA ops although no GPU is seen, or fails; needs a torch with CUDA, and nvcc. 0 leaves them out.
* ``TORCH_CUDA_ARCH_LIST``: architectures, such as "9.0"; ``MAX_JOBS``: compilers at a time; ``CXX``, ``CUDA_HOME``.
* ``AMP_WRAPPER_LOCAL_VERSION``: such as "torch2.13cpu", which the version of a wheel ends with, to tell it from others.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn

from setuptools import Command, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

ROOT = Path(__file__).resolve().parent
OPS = Path('amp_wrapper', 'ops')
MEANINGS = {
    'AMP_WRAPPER_WITH_OPS': '0 leaves the compiled ops out, 1 insists on them',
    'FORCE_CUDA': '0 leaves the CUDA ops out, 1 insists on them',
}
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
#: Why a build has no torch, in the words of the record.
NO_TORCH = 'no torch was there when the package was built, as in isolated builds of pip and in py3-none-any wheels'
BROKEN_TORCH = (
    'the torch that is installed cannot be imported ({}): mend it, or leave the compiled ops out: '
    'AMP_WRAPPER_WITH_OPS=0 pip install --no-build-isolation .'
)


def load_building() -> Any:
    """What compiles the ops: a file of the package, which itself cannot be imported yet."""
    spec = importlib.util.spec_from_file_location('amp_wrapper_building', ROOT / OPS / 'building.py')
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


building = load_building()


def destination(command: Command, inplace: bool) -> Path:
    """Where the package is put together: the source tree itself, or the folder that becomes a wheel."""
    return ROOT if inplace else Path(command.build_lib)


class PackageWithSources(build_py):
    """The package, with csrc/ in it: ``amp-wrapper build-ops`` builds the ops where there is no source tree."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in building.sources(ROOT, *building.SUFFIXES):
            copy = Path(self.build_lib, 'amp_wrapper', name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy)


def choice(name: str) -> str:
    """A variable that may be 0 or 1, or not be set."""
    value = os.environ.get(name, '')
    if value not in ('', '0', '1'):
        raise SystemExit(f'{name}={value} means nothing: {MEANINGS[name]}.')
    return value


def demanded_by() -> str:
    """The variable that makes it an error where no ops are built; empty where there is none."""
    return next((name for name in ('AMP_WRAPPER_WITH_OPS', 'FORCE_CUDA') if choice(name) == '1'), '')


def refuse(reason: str) -> NoReturn:
    """The ops are demanded, and cannot be built."""
    if reason == NO_TORCH:
        reason = (
            'this build sees no torch, as isolated builds of pip do not. Install torch, and build in that environment: '
            'pip install torch, then pip install --no-build-isolation '
        )
    raise SystemExit(f'{demanded_by()}=1, but {reason}.')


def pure(reason: str) -> dict[str, Any]:
    """The arguments of setup() for a package without compiled ops."""
    if demanded_by():
        refuse(reason)
    if reason:
        first = (
            'where torch is installed'
            if reason == NO_TORCH
            else 'install g++ (Debian and Ubuntu: apt-get install g++), then'
        )
        print(
            f'warning: amp_wrapper is built without its compiled ops, since {reason}. It computes the same, slower. '
            f'To build them: {first} run amp-wrapper build-ops.',
            file=sys.stderr,
        )
    facts = {'built': False, 'reason': reason or 'it was installed with AMP_WRAPPER_WITH_OPS=0', 'chosen': not reason}

    def note(base: Path) -> None:
        # an isolated build of a checkout knows nothing against the library that lies there
        if not (base == ROOT and reason == NO_TORCH and building.has_library(base / OPS)):
            building.write_record(base / OPS, **facts)

    class RecordOnly(PackageWithSources):
        """Notes why there is no library, so that one left from an earlier build is not loaded."""

        def run(self) -> None:
            super().run()
            base = destination(self, self.editable_mode)
            for stale in () if base == ROOT else base.glob('amp_wrapper/ops/_C.*'):
                stale.unlink()
            note(base)

    class NothingToBuild(build_ext):
        """The same for ``build_ext --inplace``."""

        def run(self) -> None:
            note(destination(self, self.inplace))

    return {'cmdclass': {'build_py': RecordOnly, 'build_ext': NothingToBuild}}


def compiled() -> dict[str, Any]:
    """The arguments of setup() that build the ops."""
    if choice('AMP_WRAPPER_WITH_OPS') == '0':
        return pure('')
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        # a package that torch needs may be missing as well
        if isinstance(error, ModuleNotFoundError) and error.name == 'torch':
            return pure(NO_TORCH)
        raise SystemExit(BROKEN_TORCH.format(error)) from None
    missing = building.what_is_missing()
    if missing:
        return pure(missing)
    cuda = {'': None, '0': False, '1': True}[choice('FORCE_CUDA')]
    try:
        what = building.plan(ROOT, cuda=cuda, asked_by='FORCE_CUDA=1')
    except building.BuildError as error:
        raise SystemExit(f'{error}.') from None
    found: dict[str, Any] = building.setup_arguments(what, ROOT / 'build' / building.kind(what))
    found['cmdclass']['build_py'] = PackageWithSources
    return found


def local_version() -> str:
    """What the version of the wheel ends with, to tell one for one torch from the others."""
    word = os.environ.get('AMP_WRAPPER_LOCAL_VERSION', '')
    if word and not re.fullmatch(r'[a-z0-9]+(\.[a-z0-9]+)*', word):
        raise SystemExit(
            f'AMP_WRAPPER_LOCAL_VERSION={word} is no local version: small letters, digits and dots, as in torch2.13cpu.'
        )
    return f'+{word}' if word else ''


def description() -> str:
    """README.md for a package index, where no other file lies beside it: links become names of files, pictures go."""
    text = (ROOT / 'README.md').read_text(encoding='utf-8')
    kept = [part for part in text.split('\n\n') if not part.startswith('![')]

    def named(link: re.Match[str]) -> str:
        return link[1] if link[1] == link[2] else f'{link[1]} (`{link[2]}`)'

    return re.sub(r'\[([^\]]+)\]\((?![a-z]+:)([^)#]+)[^)]*\)', named, '\n\n'.join(kept))


class TaggedVersion(egg_info):
    """Where setuptools puts a version together."""

    def finalize_options(self) -> None:
        # not as an option of setup(): a source distribution has a setup.cfg, which would win
        self.tag_build = local_version()
        super().finalize_options()


arguments: dict[str, Any] = {}
if BUILDING & set(sys.argv):
    arguments = compiled()
elif 'dist_info' in sys.argv and demanded_by() and importlib.util.find_spec('torch') is None:
    # pip asks for this first. It would fetch a torch of several GB before the build could say that it cannot see it
    refuse(NO_TORCH)
local_version()
arguments['cmdclass'] = {'egg_info': TaggedVersion, **arguments.get('cmdclass', {})}
setup(long_description=description(), long_description_content_type='text/markdown', **arguments)
