"""A copy of the source tree that tests build in, with a stand-in for the compiler.

The stand-in hands out the objects that the build of this tree left in ``build/``; where there are none, or of other sources, it
calls the real one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from processes import python

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path('amp_wrapper', 'ops', '_build.json')
SUFFIXES = ('.h', '.cpp', '.inl', '.cu', '.cuh')
FOLDERS = ('amp_wrapper', 'csrc', 'requirements')
FILES = 'setup.py pyproject.toml MANIFEST.in README.md LICENSE CHANGELOG.md CONTRIBUTING.md Makefile'.split()
#: What a build reads; no test takes it from its own environment.
VARIABLES = 'AMP_WRAPPER_WITH_OPS AMP_WRAPPER_OPS FORCE_CUDA TORCH_CUDA_ARCH_LIST MAX_JOBS CXX PYTHONPATH'.split()
# Compiles by copying. The objects do not know where their sources lie: they are made without debug information.
STAND_IN = """#!{python}
import os, shutil, sys
words, log, kept = sys.argv[1:], {log!r}, {kept!r}
if '-c' in words:
    # torch says -c twice
    source = words[len(words) - words[::-1].index('-c')]
    name = source[source.rindex('csrc/'):]
    open(log, 'a').write(name + '\\n')
    target, headers = words[words.index('-o') + 1], kept.get(name)
    if headers is not None and 'BROKEN' not in open(source).read():
        shutil.copyfile(os.path.join({objects!r}, os.path.splitext(name)[0] + '.o'), target)
        used = [source[:source.rindex('csrc/')] + header for header in [name, *headers]]
        open(words[words.index('-MF') + 1], 'w').write(target + ': ' + ' '.join(used))
        sys.exit()
os.execvp('c++', ['c++', *words])
"""


def kept_objects() -> tuple[str, dict[str, list[str]]]:
    """The folder of this tree's objects, and the headers of each source; nothing where they are of other sources."""
    folders = list((ROOT / 'build').glob(f'ops-{torch.__version__}-cpu-{sys.implementation.cache_tag}'))
    ninja = shutil.which('ninja', path=f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}')
    if not folders or ninja is None:
        return '', {}
    told = subprocess.run([ninja, '-C', folders[0], '-t', 'deps'], capture_output=True, text=True, check=True).stdout
    headers: dict[str, list[str]] = {}
    for block in told.split('\n\n'):
        target, *lines = block.splitlines() or ['']
        used = [line.strip()[len(f'{ROOT}/') :] for line in lines if line.strip().startswith(f'{ROOT}/csrc/')]
        made = (folders[0] / target.split(':')[0]).stat().st_mtime if used else 0
        if used and '(VALID)' in target and all((ROOT / name).stat().st_mtime <= made for name in used):
            headers[used[0]] = used[1:]
    return str(folders[0]), headers


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file()}


class Tree:
    """A copy of the source tree, the way it is published, with a compiler that writes down what it compiles."""

    def __init__(self, root: Path) -> None:
        self.root, self.log, self.compiler, self.no_torch = (
            root / 'amp',
            root / 'compiled',
            root / 'c++',
            root / 'no_torch',
        )
        built = shutil.ignore_patterns('*.so', '_build.json', '__pycache__')
        for name in FOLDERS:
            shutil.copytree(ROOT / name, self.root / name, ignore=built)
        for name in FILES:
            shutil.copy2(ROOT / name, self.root)
        objects, kept = kept_objects()
        self.compiler.write_text(STAND_IN.format(python=sys.executable, log=str(self.log), objects=objects, kept=kept))
        self.compiler.chmod(0o755)
        self.no_torch.mkdir()
        # what an isolated build of pip sees
        (self.no_torch / 'torch.py').write_text("raise ModuleNotFoundError('No module', name='torch')")

    def run(self, *command: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {key: value for key, value in os.environ.items() if key not in VARIABLES}
        env = {**env, 'CXX': str(self.compiler), **variables}
        if Path(variables.get('PYTHONPATH', ''), 'torch.py').exists():
            words = [sys.executable, *command]
            return subprocess.run(words, cwd=self.root, env=env, capture_output=True, text=True, timeout=550)
        return python(*command, cwd=cwd or self.root, env=env, timeout=550)

    def build(self, *command: str, **variables: str) -> list[str]:
        """Build in place, or by another command; returns what was compiled."""
        self.log.write_text('')
        done = self.run('setup.py', *(command or ('build_ext', '--inplace')), **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return sorted(self.log.read_text().split())

    def record(self) -> dict[str, Any]:
        return json.loads((self.root / RECORD).read_text())

    def library(self, package: Path | None = None) -> dict[str, Any]:
        """What the installed package says of its library, after an op has computed; and how often it has warned."""
        code = (
            'import contextlib, io, json, torch\n'
            'from amp_wrapper import cli, ops\n'
            'target = torch.zeros(3)\n'
            'for factor in (2.0, 3.0):\n'
            '    ops.multi_tensor_scale([torch.ones(3)], [target], torch.tensor(factor))\n'
            'assert target.sum().item() == 9.0\n'
            'cli.main(["info", "--json"])'
        )
        done = self.run('-c', code, cwd=self.root.parent, PYTHONPATH=str(package or self.root))
        assert done.returncode == 0, done.stderr
        facts = json.loads(done.stdout)['build']
        return {**facts, 'warnings': done.stderr.count('runs without its compiled ops')}
