"""A copy of the source tree that tests build in, with two small files in place of ``csrc``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from processes import python

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ('amp_wrapper', 'csrc')
FILES = ('setup.py', 'pyproject.toml', 'MANIFEST.in', 'README.md', 'LICENSE')
#: What a build reads; no test takes it from its own environment.
VARIABLES = 'AMP_WRAPPER_WITH_OPS AMP_WRAPPER_OPS FORCE_CUDA TORCH_CUDA_ARCH_LIST MAX_JOBS CXX PYTHONPATH'.split()
#: Enough for the loader: one op that has a kernel. No compiler takes long over it.
SOURCE = """#include <torch/library.h>
TORCH_LIBRARY_IMPL(amp_wrapper, CPU, library) {
  library.impl("multi_tensor_scale", torch::CppFunction::makeFallthrough());
}
"""
COMPILER = '#!/bin/sh\nexec c++ "$@" -O0\n'


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file()}


class Tree:
    """A copy of the source tree, the way it is published.

    Args:
        root: A folder for it, and for the cache.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.cache, self.compiler, no_torch = (root / name for name in ('amp', 'cache', 'c++', 'no_torch'))
        for name in FOLDERS:
            built = shutil.ignore_patterns('*.so', '__pycache__')
            shutil.copytree(ROOT / name, self.root / name, ignore=built)
        for name in FILES:
            shutil.copy2(ROOT / name, self.root)
        self.compiler.write_text(COMPILER)
        self.compiler.chmod(0o755)
        no_torch.mkdir()
        # what an isolated build of pip sees
        (no_torch / 'sitecustomize.py').write_text("import sys\nsys.modules['torch'] = None\n")
        self.no_torch = {'PYTHONPATH': str(no_torch)}

    def shrink(self) -> None:
        """Put two small files in place of the sources."""
        shutil.rmtree(self.root / 'csrc')
        (self.root / 'csrc' / 'cpu').mkdir(parents=True)
        (self.root / 'csrc' / 'library.cpp').write_text(SOURCE)
        (self.root / 'csrc' / 'cpu' / 'empty.cpp').write_text('')

    def run(
        self, *words: str, cwd: Path | None = None, ok: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run Python, in the tree unless another folder is named."""
        env = {key: value for key, value in os.environ.items() if key not in VARIABLES}
        env |= {'CXX': str(self.compiler), 'TORCH_EXTENSIONS_DIR': str(self.cache), **variables}
        if words[0] == 'setup.py':
            # with the torch that is there, without one, or with a broken one
            command = [sys.executable, *words]
            done = subprocess.run(command, cwd=cwd or self.root, env=env, capture_output=True, text=True, timeout=550)
        else:
            done = python(*words, cwd=cwd or self.root, env=env, timeout=550)
        assert (done.returncode == 0) == ok, done.stdout + done.stderr
        return done

    def ops(self, package: Path | None = None, **variables: str) -> dict[str, str]:
        """What ``amp-wrapper info`` says of the ops of this tree, or of an installed package."""
        where = str(package or self.root)
        done = self.run('-m', 'amp_wrapper', 'info', '--json', cwd=self.cache.parent, PYTHONPATH=where, **variables)
        found: dict[str, str] = json.loads(done.stdout)['ops']
        return found
