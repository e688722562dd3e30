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

from amp_wrapper.ops import loader

ROOT = Path(__file__).resolve().parents[2]
PACKED = ('amp_wrapper', 'csrc', 'requirements')
FILES = (
    'setup.py',
    'pyproject.toml',
    'MANIFEST.in',
    'README.md',
    'LICENSE',
    'CHANGELOG.md',
    'CONTRIBUTING.md',
    'Makefile',
)
RECORD = Path('amp_wrapper', 'ops', '_build.json')
SUFFIXES = ('.h', '.cpp', '.inl', '.cu', '.cuh')
OURS = (
    'AMP_WRAPPER_WITH_OPS',
    'AMP_WRAPPER_OPS',
    'FORCE_CUDA',
    'TORCH_CUDA_ARCH_LIST',
    'MAX_JOBS',
    'CXX',
    'AMP_WRAPPER_LOCAL_VERSION',
    'PYTHONPATH',
)

# Compiles by copying. The objects do not know where their sources lie: they are made without debug information.
STAND_IN = """#!{python}
import os, shutil, sys
words, tree, kept, log, headers = sys.argv[1:], {tree!r}, {kept!r}, {log!r}, {headers!r}
if '-c' in words:
    # torch says -c twice
    source = os.path.relpath(words[len(words) - words[::-1].index('-c')], tree)
    open(log, 'a').write(source + '\\n')
    ready = os.path.join(kept, os.path.splitext(source)[0] + '.o') if kept else ''
    target = words[words.index('-o') + 1]
    if os.path.exists(ready) and 'BROKEN' not in open(os.path.join(tree, source)).read():
        shutil.copyfile(ready, target)
        used = [os.path.join(tree, name) for name in [source, *headers[source]]]
        open(words[words.index('-MF') + 1], 'w').write(target + ': ' + ' '.join(used))
        sys.exit()
os.execvp('c++', ['c++', *words])
"""


def kept_objects() -> tuple[str, dict[str, list[str]]]:
    """The folder of this tree's objects and what each was made of; nothing where they are of other sources."""
    facts = loader.library().facts
    folders = list((ROOT / 'build').glob(f'ops-{torch.__version__}-cpu-{sys.implementation.cache_tag}'))
    ninja = shutil.which('ninja', path=f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}')
    if not folders or ninja is None or facts.get('cuda') or loader.changed_sources() is not False:
        return '', {}
    told = subprocess.run([ninja, '-C', folders[0], '-t', 'deps'], capture_output=True, text=True, check=True).stdout
    headers: dict[str, list[str]] = {}
    for block in told.split('\n\n'):
        lines = [line.strip() for line in block.splitlines()]
        used = [str(Path(line).relative_to(ROOT)) for line in lines[1:] if line.startswith(f'{ROOT}/csrc/')]
        if used and '(VALID)' in lines[0]:
            headers[used[0]] = used[1:]
    return str(folders[0]), headers


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file()}


class Tree:
    """A copy of the source tree, the way it is published, with a compiler that writes down what it compiles."""

    def __init__(self, root: Path) -> None:
        self.root = root / 'amp'
        built = shutil.ignore_patterns('*.so', '_build.json', '__pycache__')
        for name in PACKED:
            shutil.copytree(ROOT / name, self.root / name, ignore=built)
        for name in FILES:
            shutil.copy2(ROOT / name, self.root)
        self.log = root / 'compiled'
        self.compiler = root / 'c++'
        kept, headers = kept_objects()
        words = {
            'python': sys.executable,
            'tree': str(self.root),
            'kept': kept,
            'log': str(self.log),
            'headers': headers,
        }
        self.compiler.write_text(STAND_IN.format(**words))
        self.compiler.chmod(0o755)
        (root / 'no_torch').mkdir()
        # what an isolated build of pip sees
        (root / 'no_torch' / 'torch.py').write_text("raise ModuleNotFoundError('No module', name='torch')")

    def run(self, *command: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {key: value for key, value in os.environ.items() if key not in OURS}
        env = {**env, 'CXX': str(self.compiler), **variables}
        words = [sys.executable, *command]
        return subprocess.run(words, cwd=cwd or self.root, env=env, capture_output=True, text=True, timeout=550)

    def build(self, *command: str, **variables: str) -> list[str]:
        """Build in place, or by another command; returns what was compiled."""
        self.log.write_text('')
        done = self.run('setup.py', *(command or ('build_ext', '--inplace')), **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return sorted(self.log.read_text().split())

    def record(self) -> dict[str, Any]:
        return json.loads((self.root / RECORD).read_text())

    def library(self, package: Path | None = None) -> dict[str, Any]:
        """What the loader finds in a process of its own, elsewhere, and whether an op computes."""
        code = (
            'import json, torch\n'
            'from amp_wrapper import ops\n'
            'from amp_wrapper.ops import loader\n'
            'target = torch.zeros(3)\n'
            'ops.multi_tensor_scale([torch.ones(3)], [target], torch.tensor(2.0))\n'
            'ops.multi_tensor_scale([torch.ones(3)], [target], torch.tensor(3.0))\n'
            'found = loader.library()\n'
            'print(json.dumps(dict(file=getattr(found.module, "__file__", None), reason=found.reason, sum=target.sum().item(),'
            ' changed=loader.changed_sources())))'
        )
        done = self.run('-c', code, cwd=self.root.parent, PYTHONPATH=str(package or self.root))
        assert done.returncode == 0, done.stderr
        facts = json.loads(done.stdout)
        assert facts.pop('sum') == 9.0
        return {**facts, 'warnings': done.stderr.count('runs without its compiled ops')}
