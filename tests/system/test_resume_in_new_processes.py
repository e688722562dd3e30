"""A resumed run equals the uninterrupted one bit for bit, each phase in a process of its own.

The protections of a resume are taken away one by one in ``tests/faults/openmmlab.toml``; these tests are red without them.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import crash_harness
import processes
import pytest
import torch
import toy
from bits import differences

Case = dict[str, Any]
SGD = dict(type='SGD', lr=0.2, momentum=0.9, weight_decay=1e-3)
#: The epoch after which early stopping ends a training that gets no better.
EARLY = 10


def everything(level: str, stop: dict[str, int], second: dict[str, Any] | None = None, **words: Any) -> Case:
    """A training with all that draws random numbers, counts or decides; where it stops, and what the resumed config changes."""
    return dict(toy.everything(level, **words), stop=stop, second=second or {})


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    kinds: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
        # between a checkpoint and the validation after it
        'epochs': (dict(), dict(val=14)),
        # in the middle of the third epoch, after a checkpoint at iteration 15
        'within': (dict(save_each=5), dict(iters=16)),
        'iterations': (dict(by_epoch=False), dict(iters=17)),
    }
    for level in toy.LEVELS:
        for kind, (words, stop) in kinds.items():
            found[f'{level}-{kind}'] = everything(level, stop, **words)
    for level in ('O2', 'O5'):
        found[f'{level}-workers'] = everything(level, dict(iters=16), save_each=5, num_workers=2)
        found[f'{level}-open-accumulation'] = everything(level, dict(epochs=1))
    found['O5-random-sampler'] = everything('O5', dict(iters=16), save_each=5, sampler='ToyRandomSampler')
    found['O5-iterations-val'] = everything('O5', dict(val=15), by_epoch=False)
    found['O5-early-stopping'] = everything(
        'O5', dict(val=7 * EARLY), max_epochs=12, patience=EARLY - 1, min_delta=1000.0
    )
    found['O5-persistent'] = everything('O5', dict(iters=17), by_epoch=False, num_workers=2)
    found['O5-persistent']['train_dataloader']['persistent_workers'] = True
    # the hook alone, without a wrapper of ours
    found['stock-within'] = dict(
        everything('O0', dict(iters=16), save_each=5), optim_wrapper=dict(type='OptimWrapper', optimizer=SGD)
    )
    for level, words in (('O1', dict(type='AdamW', lr=0.02, weight_decay=0.05, eps=1e-4)), ('O3', SGD)):
        found[f'{level}-other'] = everything(level, dict(epochs=2))
        found[f'{level}-other']['optim_wrapper'] |= dict(optimizer=words, clip_grad=dict(type='value', clip_value=0.05))
        found[f'{level}-other']['custom_hooks'][0] = dict(
            type='EMAHook', ema_type='StochasticWeightAverage', update_buffers=True, begin_iter=3
        )
    return found


def train(folder: Path, phase: str, named: dict[str, Case]) -> None:
    """'whole' trains in one go, 'first' stops half way, and 'second' resumes what 'first' left, having never seen it."""
    torch.set_num_threads(1)
    for name, case in copy.deepcopy(named).items():
        stop, second = case.pop('stop'), case.pop('second')
        work_dir = folder / name / ('whole' if phase == 'whole' else 'parts')
        if phase == 'first':
            case['custom_hooks'] = [*case['custom_hooks'], dict(type='StopAt', **stop)]
        elif phase == 'second':
            case.update(second, resume=True)
        try:
            toy.run(work_dir, **case)
        except toy.Stop:
            shutil.copytree(work_dir, work_dir.with_name('first'))


def run(folder: Path, named: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """Run all phases of the cases, in one process for each phase; what the uninterrupted runs became."""
    for phase in ('whole', 'first', 'second'):
        log = folder / f'{phase}.log'
        code = processes.wait(processes.start(log, train, folder, phase, named), 900)
        assert code == 0, f'{phase} ended with {code}:\n{log.read_text()[-4000:]}'
        stopped = [name for name in named if (folder / name / 'first').exists()]
        assert stopped == ([] if phase == 'whole' else list(named))
    return {name: crash_harness.result(folder / name / 'whole') for name in named}


def differing(folder: Path, whole: dict[str, dict[str, Any]]) -> list[str]:
    pairs = ((name, result, crash_harness.result(folder / name / 'parts')) for name, result in whole.items())
    return [f'{name}: {row}' for name, result, parts in pairs for row in differences(result, parts)]


#: Two levels, and the cases that interrupt where it hurts most.
SHORT = ('O2-within', 'O2-open-accumulation', 'O5-random-sampler', 'O5-persistent')


@pytest.mark.timeout(900)
def test_resumed_training_equals_uninterrupted_one(tmp_path: Path) -> None:
    """And not where the hook is left out."""
    named = {name: case for name, case in cases().items() if name in SHORT}
    without = everything('O5', dict(iters=17), by_epoch=False)
    without['second'] = dict(custom_hooks=without['custom_hooks'][:-1])
    whole = run(tmp_path, {**named, 'without': without})
    rows = differing(tmp_path, whole)
    assert [row for row in rows if not row.startswith('without: ')] == []
    assert [row for row in rows if row.startswith("without: ['state_dict']")]
    # the runs were interesting: interrupted within an epoch, with a scale that moved, skipped steps and open accumulations
    within = toy.checkpoint(tmp_path / 'O2-within' / 'first', 'iter_15.pth')
    assert within['meta']['iter'] == 15 and within['ema_state_dict'].keys() > {'steps'}
    scalars = whole['O2-within']['scalars']
    assert len(set(scalars['train/amp_scale'])) > 2 and scalars['train/amp_skipped'][-1] > 0
    assert toy.checkpoint(tmp_path / 'O2-open-accumulation' / 'first', 'epoch_1.pth')['meta']['iter'] % 2 == 1


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_resumed_training_equals_uninterrupted_one_in_every_case(tmp_path: Path) -> None:
    whole = run(tmp_path, {name: case for name, case in cases().items() if name not in SHORT})
    assert differing(tmp_path, whole) == []
    assert whole['O5-early-stopping']['place'][0] == EARLY < 12
