"""Builds the compiled ops of ``csrc/``; all else about the package stands in pyproject.toml.

Environment variables, named as in mmcv:

* ``AMP_WRAPPER_WITH_OPS``: 0 installs pure Python, 1 fails where the ops cannot be built. Unset: they are built where there is
  a compiler, and left out with a warning where there is none.
* ``FORCE_CUDA=1``: builds the CUDA ops although no GPU is seen, or fails. Needs a torch with CUDA, and nvcc.
* ``TORCH_CUDA_ARCH_LIST``: architectures, such as "9.0"; ``MAX_JOBS``: compilers at a time; ``CXX``, ``CUDA_HOME``.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from setuptools import Command, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
OPS = Path('amp_wrapper', 'ops')
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


def pure(reason: str, demanded_by: str) -> dict[str, Any]:
    """The arguments of setup() for a package without compiled ops."""
    if demanded_by:
        raise SystemExit(f'{demanded_by}=1, but {reason}.')
    if reason:
        print(
            f'warning: amp_wrapper is built without its compiled ops, since {reason}. It computes the same, slower. '
            'To build them: install g++ (Debian and Ubuntu: apt-get install g++), then run amp-wrapper build-ops.',
            file=sys.stderr,
        )
    facts = {'built': False, 'reason': reason or 'it was installed with AMP_WRAPPER_WITH_OPS=0', 'chosen': not reason}

    class RecordOnly(PackageWithSources):
        """Notes why there is no library, so that one left from an earlier build is not loaded."""

        def run(self) -> None:
            super().run()
            base = destination(self, self.editable_mode)
            for stale in () if base == ROOT else base.glob('amp_wrapper/ops/_C.*'):
                stale.unlink()
            building.write_record(base / OPS, **facts)

    class NothingToBuild(build_ext):
        """The same for ``build_ext --inplace``."""

        def run(self) -> None:
            building.write_record(destination(self, self.inplace) / OPS, **facts)

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
    missing = building.what_is_missing()
    if missing:
        return pure(missing, 'AMP_WRAPPER_WITH_OPS' if wanted == '1' else 'FORCE_CUDA' if forced else '')
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        raise SystemExit(NO_TORCH.format(error)) from None
    try:
        what = building.plan(ROOT, cuda=True if forced else None, asked_by='FORCE_CUDA=1')
    except building.BuildError as error:
        raise SystemExit(f'{error}.') from None
    found: dict[str, Any] = building.setup_arguments(what, ROOT / 'build' / building.kind(what))
    found['cmdclass']['build_py'] = PackageWithSources
    return found


arguments: dict[str, Any] = {}
if BUILDING & set(sys.argv):
    arguments = compiled()
elif 'dist_info' in sys.argv and importlib.util.find_spec('torch') is None and not building.what_is_missing():
    wanted = os.environ.get('AMP_WRAPPER_WITH_OPS') != '0'
    if wanted:
        # pip asks for this first. It would fetch a torch of several GB before the build could say that it cannot see it
        raise SystemExit(NO_TORCH.format('there is none in the environment of the build'))
setup(**arguments)
