"""Writes the files under ``tests/data/saved``: ``python tests/data/make_saved.py [NAME ...]``.

One archive for scripts, one for bare ``AmpOptimWrapper``\\ s, one for mmengine's runners. ``NAME.pth`` is what a training saved
in the middle, as it lay on the disk; ``NAME.after.pth`` is what the same training, uninterrupted, was at its end; and
``versions.json`` tells who wrote them.

Files that are there already stay: they stand for what lies on the disks of users, and a newer version must go on reading
them. So only the cases that were added to ``saved_runs.py`` or ``saved_runners.py`` are written. To replace one, because its
case was changed, name it, as ``scripts/O2_sgd``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault('OMP_NUM_THREADS', '1')
import torch

sys.path.insert(0, str(Path(__file__).parent))
import saved_runners
import saved_runs

FOLDER = Path(__file__).parent / 'saved'


def run(kind: str, name: str) -> tuple[bytes, bytes]:
    """One case: what it saved, and what it became."""
    if kind == 'runners':
        with tempfile.TemporaryDirectory() as folder:
            return saved_runners.run(Path(folder), saved_runners.RUNNERS[name])
    if kind == 'scripts':
        return saved_runs.run(saved_runs.Script, saved_runs.SCRIPTS[name])
    return saved_runs.run(saved_runs.Wrapped, saved_runs.WRAPPED[name])


def main() -> None:
    """The command."""
    torch.use_deterministic_algorithms(True)
    commit = subprocess.run(['git', 'rev-parse', '--short', 'HEAD'], capture_output=True, text=True, check=True)
    written = {'commit': commit.stdout.strip(), 'torch': torch.__version__.partition('+')[0]}
    FOLDER.mkdir(exist_ok=True)
    cases = dict(scripts=saved_runs.SCRIPTS, wrapped=saved_runs.WRAPPED, runners=saved_runners.RUNNERS)
    for kind, names in cases.items():
        path = FOLDER / f'{kind}.tar.xz'
        files = dict(saved_runs.unpack(path)) if path.exists() else {'versions.json': b'{}'}
        versions = json.loads(files['versions.json'])
        for name in names:
            if name in versions and f'{kind}/{name}' not in sys.argv[1:]:
                continue
            files[f'{name}.pth'], files[f'{name}.after.pth'] = run(kind, name)
            versions[name] = written
            print(f'{kind}/{name}')
        files['versions.json'] = json.dumps(versions, indent=1).encode()
        saved_runs.pack(path, files)


if __name__ == '__main__':
    main()
