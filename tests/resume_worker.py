"""Runs toy trainings in a process of its own: ``python resume_worker.py FOLDER PHASE``.

FOLDER/cases.json maps names to {optim_wrapper, overrides}. PHASE 'whole' trains in one go, 'first' stops half way, and
'second' resumes what 'first' left, in a process that never saw it.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault('OMP_NUM_THREADS', '1')
import torch

sys.path.insert(0, str(Path(__file__).parent))
import toy
from mmengine.hooks import Hook
from mmengine.registry import HOOKS


class Stop(Exception):
    """The run was interrupted."""


@HOOKS.register_module()
class StopAfter(Hook):
    """Kills the run right after the checkpoint that 'second' resumes, with the schedule of the whole run."""

    priority = 'LOWEST'

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def before_train_epoch(self, runner: Any) -> None:
        if runner.epoch == self.epochs:
            raise Stop


def main(folder: Path, phase: str) -> None:
    torch.set_num_threads(1)
    for name, case in json.loads((folder / 'cases.json').read_text()).items():
        overrides = copy.deepcopy(case.get('overrides', {}))
        work_dir = folder / name / ('whole' if phase == 'whole' else 'parts')
        if phase == 'first':
            overrides['custom_hooks'] = [
                *overrides.get('custom_hooks', []),
                dict(type='StopAfter', epochs=case['stop']),
            ]
        if phase == 'second':
            overrides['resume'] = True
        try:
            toy.run(work_dir, copy.deepcopy(case['optim_wrapper']), **overrides)
        except Stop:
            assert phase == 'first'


if __name__ == '__main__':
    main(Path(sys.argv[1]), sys.argv[2])
