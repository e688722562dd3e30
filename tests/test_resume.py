"""A resumed run equals the uninterrupted one bit for bit, each phase in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import toy

WORKER = Path(__file__).parent / 'resume_worker.py'
SGD = dict(type='SGD', lr=0.2, momentum=0.9, weight_decay=1e-3)
ADAMW = dict(type='AdamW', lr=0.02, weight_decay=0.05, eps=1e-4)
SCHEDULE = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=9),
    dict(type='CosineAnnealingLR', T_max=4, by_epoch=True, convert_to_iter_based=True),
    dict(type='LinearMomentum', start_factor=0.8, by_epoch=False, begin=0, end=9),
]
CHECKPOINTS = dict(
    logger=dict(type='LoggerHook', interval=3),
    checkpoint=dict(type='CheckpointHook', interval=1, save_best='toy/score', rule='greater'),
)
EMA = dict(type='EMAHook', momentum=0.1)


def _cases() -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = {}
    base: dict[str, Any] = dict(
        train_cfg=dict(by_epoch=True, max_epochs=4, val_interval=1), param_scheduler=SCHEDULE, default_hooks=CHECKPOINTS
    )
    for level in toy.LEVELS:
        # 7 batches an epoch: windows of 2 are open at each odd epoch's end, and the last one has a remainder
        for stop in (1, 2):
            cases[f'{level}-everything-{stop}'] = dict(
                stop=stop,
                optim_wrapper=dict(
                    type='AmpOptimWrapper',
                    opt_level=level,
                    # grows and backs off within the run
                    loss_scale=dict(init_scale=2.0**18, growth_interval=3) if level in ('O1', 'O2') else None,
                    optimizer=SGD,
                    accumulative_counts=2,
                    clip_grad=dict(max_norm=0.5),
                    paramwise_cfg=dict(
                        bias_decay_mult=0.0, norm_decay_mult=0.0, custom_keys=dict(fc=dict(lr_mult=0.5))
                    ),
                ),
                overrides=dict(base, custom_hooks=[EMA]),
            )
        cases[f'{level}-adamw'] = dict(
            stop=2,
            optim_wrapper=dict(
                type='AmpOptimWrapper', opt_level=level, optimizer=ADAMW, clip_grad=dict(type='value', clip_value=0.05)
            ),
            overrides=dict(base, param_scheduler=SCHEDULE[:2]),
        )
    cases['O2-ema-buffers'] = dict(
        stop=2,
        optim_wrapper=dict(type='AmpOptimWrapper', opt_level='O2', optimizer=SGD),
        overrides=dict(base, custom_hooks=[dict(EMA, update_buffers=True, begin_iter=3)]),
    )
    cases['O3-ema-buffers'] = dict(
        stop=2,
        optim_wrapper=dict(type='AmpOptimWrapper', opt_level='O3', optimizer=SGD),
        overrides=dict(
            base, custom_hooks=[dict(type='EMAHook', ema_type='StochasticWeightAverage', update_buffers=True)]
        ),
    )
    return cases


def _run(folder: Path, phase: str) -> None:
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    done = subprocess.run(
        [sys.executable, str(WORKER), str(folder), phase], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, f'{phase}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}'


@pytest.fixture(scope='module')
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('resume')
    (folder / 'cases.json').write_text(json.dumps(_cases()))
    for phase in ('whole', 'first', 'second'):
        _run(folder, phase)
    return folder


def _comparable(work_dir: Path, name: str | None = None) -> dict[str, Any]:
    saved = toy.checkpoint(work_dir, name)
    losses = saved['message_hub']['log_scalars']
    kept = {
        key: saved[key] for key in ('state_dict', 'ema_state_dict', 'optimizer', 'param_schedulers') if key in saved
    }
    for key in ('train/loss', 'train/grad_norm', 'train/amp_scale', 'train/amp_skipped', 'val/toy/score'):
        if key in losses:
            kept[key] = losses[key].data[0].tolist()
    return kept


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize('name', list(_cases()))
def test_resumed_equals_uninterrupted(runs: Path, name: str) -> None:
    whole, parts = _comparable(runs / name / 'whole'), _comparable(runs / name / 'parts')
    assert len(whole['train/loss']) == 28
    assert toy.differences(whole, parts) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_runs_were_interesting(runs: Path) -> None:
    """Overflows, growth, open windows and averages really occurred in the runs that are compared."""
    saved = _comparable(runs / 'O2-everything-1' / 'whole')
    assert saved['train/amp_skipped'][-1] > 0
    assert len(set(saved['train/amp_scale'])) > 2
    inside = toy.checkpoint(runs / 'O2-everything-1' / 'parts', 'epoch_1.pth')
    gradients = inside['optimizer']['amp']['window']['gradients']
    assert any(g is not None and g.dtype.itemsize == 2 and g.abs().sum() > 0 for g in gradients)
    assert toy.differences(saved['state_dict'], {k[7:]: v for k, v in saved['ema_state_dict'].items() if k != 'steps'})
