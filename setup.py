"""Builds the compiled ops of ``csrc/``; all else about the package stands in pyproject.toml.

Environment variables, named as in mmcv:

* ``AMP_WRAPPER_WITH_OPS``: 0 installs pure Python, 1 fails where the ops cannot be built. Unset: they are built where there is
  a torch and a compiler, and left out with a warning where there is none, as in an isolated build.
* ``FORCE_CUDA``: 1 builds the CUDA ops although no GPU is seen, or fails; 0 leaves them out.
* ``TORCH_CUDA_ARCH_LIST``, ``MAX_JOBS``, ``CXX`` and ``CUDA_HOME``, as torch reads them.
"""

from __future__ import annotations

import importlib.util
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
NO_TORCH = (
    'this build sees no torch, as isolated builds do not: pip install --no-build-isolation sees the one that is there'
)
building = SimpleNamespace(**runpy.run_path(str(ROOT / 'amp_wrapper' / 'ops' / 'building.py')))


class PackageWithSources(build_py):
    """Command for the package with csrc/ in it: ``amp-wrapper build-ops`` compiles that where there is no checkout."""

    def run(self) -> None:
        super().run()
        package = Path(self.build_lib, 'amp_wrapper')
        if not self.editable_mode:
            # build/ may have what an earlier build left
            shutil.rmtree(package / 'csrc', ignore_errors=True)
            for library in package.glob('ops/amp_ops_*'):
                library.unlink()
            shutil.copytree(ROOT / 'csrc', package / 'csrc')


def extension_arguments() -> dict[str, Any]:
    """Return the arguments of ``setup`` that build the ops; none where they are left out.

    Raises:
        RuntimeError: They are demanded, and cannot be built.
        ImportError: torch is broken.
    """
    wanted = building.switch('AMP_WRAPPER_WITH_OPS')
    if wanted is False:
        return {}
    missing = building.missing_compiler() if importlib.util.find_spec('torch') else NO_TORCH
    if missing and (wanted or building.switch('FORCE_CUDA')):
        raise RuntimeError(f'compiled ops are demanded, and {missing}')
    if missing:
        print(f'warning: no compiled ops, since {missing}. amp-wrapper build-ops adds them later.', file=sys.stderr)
        return {}
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    building.prepare()
    cuda = building.with_cuda()
    extension = (CUDAExtension if cuda else CppExtension)(
        name=f'amp_wrapper.ops.{building.name()}',
        sources=[str(path.relative_to(ROOT)) for path in building.sources(cuda)],
        extra_compile_args={'cxx': building.CXX_FLAGS, 'nvcc': building.NVCC_FLAGS},
    )
    return {
        'ext_modules': [extension],
        'cmdclass': {'build_ext': BuildExtension.with_options(no_python_abi_suffix=True)},
        # ninja judges what has to be compiled: the library of the last build may be one without CUDA
        'options': {'build_ext': {'force': True}},
    }


try:
    arguments = extension_arguments()
except (ImportError, OSError, RuntimeError) as error:
    raise SystemExit(f'{error}. AMP_WRAPPER_WITH_OPS=0 installs the package without compiled ops.') from None
setup(cmdclass={'build_py': PackageWithSources, **arguments.pop('cmdclass', {})}, **arguments)
