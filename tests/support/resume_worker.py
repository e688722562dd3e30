"""Runs toy trainings in a process of its own: ``forked.start(LOG, resume_worker.main, FOLDER, PHASE)``.

FOLDER/cases.json maps names to {optim_wrapper, overrides, stop, stop_iter or stop_val, second (overrides), without,
reference}. PHASE 'whole' trains in
one go, 'first' stops half way, and 'second' resumes what 'first' left, in a process that never saw it. ``without`` names a
protection that is taken away in the last two; such a case has the whole run of another as its ``reference``.
"""

from __future__ import annotations

import copy
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import mmengine.runner.runner
import torch
import toy

from amp_wrapper.openmmlab.resume import data_order, early_stopping, rank_states, seen_data
from amp_wrapper.openmmlab.resume.exact_resume import ExactResumeHook

# what a process finds out about its machine takes a second and no part
mmengine.runner.runner.collect_env = dict


def _begin_again(loop: Any, done: int, go_on: Any) -> None:
    del loop.run_epoch
    go_on()
    loop.run_epoch()


def _restore_at_once(self: Any, loop: Any, go_on: Any) -> None:
    original_init(self, loop, go_on)
    go_on()
    self._go_on = lambda: None


original_init = seen_data.FastForward.__init__
original_set = ExactResumeHook._set_random_states
PROTECTIONS: dict[str, tuple[Any, str, Any]] = {
    'the random states': (rank_states.random_state, 'restore', lambda *args: []),
    'the isolation of validations': (ExactResumeHook, 'before_val', lambda self, runner: None),
    'the place in the epoch': (seen_data, 'rest_of_epoch', _begin_again),
    'the moment after passing over data': (seen_data.FastForward, '__init__', _restore_at_once),
    'the states at the start of the epoch': (
        ExactResumeHook,
        '_set_random_states',
        lambda self, runner, moment: original_set(self, runner, 'now'),
    ),
    'the validation that is due': (ExactResumeHook, '_is_validation_due', lambda self, runner, loop: False),
    'the state of early stopping': (early_stopping, 'restore', lambda runner, states: None),
    'the seed': (data_order, 'follow_seeds', lambda loop, saved: None),
}


def main(folder: Path, phase: str) -> None:
    torch.set_num_threads(1)
    for name, case in json.loads((folder / 'cases.json').read_text()).items():
        if phase == 'whole' and 'reference' in case:
            continue
        overrides = copy.deepcopy(case.get('overrides', {}))
        work_dir = folder / name / ('whole' if phase == 'whole' else 'parts')
        if phase == 'first':
            overrides['custom_hooks'] = [
                *overrides.get('custom_hooks', []),
                dict(type='StopAt', epochs=case.get('stop'), iters=case.get('stop_iter'), val=case.get('stop_val')),
            ]
        if phase == 'second':
            overrides['resume'] = True
            overrides.update(case.get('second', {}))
        without = case.get('without') if phase != 'whole' else None
        try:
            with mock.patch.object(*PROTECTIONS[without]) if without else nullcontext():
                toy.run(work_dir, copy.deepcopy(case['optim_wrapper']), **overrides)
        except toy.Stop:
            assert phase == 'first'
            # what the second process began with
            shutil.copytree(work_dir, work_dir.with_name('first'))
        except AssertionError as error:
            # an epoch that is begun again has more iterations than mmengine's own count of them
            if without != 'the place in the epoch' or 'max_counts' not in str(error):
                raise
            shutil.rmtree(work_dir)
