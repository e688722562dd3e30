"""A resumed run equals the uninterrupted one bit for bit, each phase in a process of its own."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import crash_harness
import forked
import pytest
import resume_worker
import toy
from bits import differences
from grid import but, long

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
        # 7 batches an epoch: accumulations of 2 are open at each odd epoch's end, and the last one has a remainder
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


def _split(case: dict[str, Any], **more: Any) -> dict[str, Any]:
    return dict(optim_wrapper=case.pop('optim_wrapper'), overrides=case, **more)


def _exact_cases() -> dict[str, dict[str, Any]]:
    """Trainings with everything that draws random numbers, counts or decides, interrupted where it hurts."""
    cases: dict[str, dict[str, Any]] = {}
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        # between a checkpoint and the validation after it
        'epochs': (dict(by_epoch=True), dict(stop_val=14)),
        # in the middle of the third epoch, after a checkpoint at iteration 15
        'epochs-within': (dict(by_epoch=True, save_each=5), dict(stop_iter=16)),
        'iterations': (dict(by_epoch=False), dict(stop_iter=17)),
        'workers-within': (dict(by_epoch=True, save_each=5, num_workers=2), dict(stop_iter=16)),
    }
    for level in toy.LEVELS:
        for kind, (arguments, stop) in kinds.items():
            if kind == 'workers-within' and level not in ('O2', 'O5'):
                continue  # workers know nothing of levels
            cases[f'{level}-{kind}'] = _split(toy.everything(level, **arguments), **stop)
    cases['O5-workers-iterations'] = _split(toy.everything('O5', by_epoch=False, num_workers=2), stop_iter=17)
    cases['O5-random-sampler'] = _split(toy.everything('O5', save_each=5, sampler='ToyRandomSampler'), stop_iter=16)
    cases['O5-iterations-val'] = _split(toy.everything('O5', by_epoch=False), stop_val=15)
    cases['O5-early-stopping'] = _split(
        toy.everything('O5', max_epochs=12, patience=_EARLY - 1, min_delta=1000.0), stop_val=7 * _EARLY
    )
    # the hook alone, without a wrapper of ours
    stock = toy.everything('O0', save_each=5)
    stock['optim_wrapper'] = dict(type='OptimWrapper', optimizer=SGD)
    cases['stock-within'] = _split(stock, stop_iter=16)
    # resumed by a script that knows no seed before it reads the checkpoint
    no_seed = dict(randomness=dict(seed=None, deterministic=True))
    cases['O5-no-seed'] = _split(toy.everything('O5'), stop=2, second=no_seed)
    persistent = toy.everything('O5', by_epoch=False, num_workers=2)
    persistent['train_dataloader']['persistent_workers'] = True
    cases['O5-persistent-iterations'] = _split(copy.deepcopy(persistent), stop_iter=17)
    cases['O5-no-seed-persistent'] = _split(persistent, stop_iter=17, second=no_seed)
    cases['O5-no-seed-iterations'] = _split(toy.everything('O5', by_epoch=False), stop_iter=17, second=no_seed)
    return cases


# the epoch after which early stopping ends a training that gets no better
_EARLY = 10

#: protection -> the case that must be red without it
PROTECTED_BY = {
    'the random states': ('O5-epochs', 'O5-epochs-within', 'O5-iterations'),
    'the isolation of validations': ('O5-epochs', 'O5-iterations'),
    'the place in the epoch': ('O5-epochs-within', 'O5-workers-within'),
    'the moment after passing over data': ('O5-iterations',),
    'the states at the start of the epoch': ('O5-random-sampler',),
    'the validation that is due': ('O5-epochs', 'O5-iterations-val', 'O5-early-stopping'),
    'the state of early stopping': ('O5-early-stopping',),
    'the seed': ('O5-no-seed', 'O5-no-seed-iterations'),
}


def _broken_cases() -> dict[str, dict[str, Any]]:
    whole = _exact_cases()
    return {
        f'{name}-without-{protection}'.replace(' ', '-'): dict(whole[name], without=protection, reference=name)
        for protection, names in PROTECTED_BY.items()
        for name in names
    }


def _run(folder: Path, phase: str) -> None:
    log = folder / f'{phase}.log'
    code = forked.wait(forked.start(log, resume_worker.main, folder, phase), 600)
    assert code == 0, f'{phase} ended with {code}:\n{log.read_text()[-4000:]}'


#: What ``make test`` trains; the grids train the rest.
SHORT = ('O2-everything-1', 'O5-everything-2', 'O1-adamw', 'O3-ema-buffers')


@pytest.fixture(scope='module')
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of all cases that this session asks for, in one process for each phase."""
    tests = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    asked = {test.callspec.params['name'] for test in tests if 'runs' in test.fixturenames}
    folder = tmp_path_factory.mktemp('resume')
    (folder / 'cases.json').write_text(json.dumps({name: case for name, case in _cases().items() if name in asked}))
    for phase in ('whole', 'first', 'second'):
        _run(folder, phase)
    return folder


#: As above, of the cases with everything that draws random numbers, counts or decides.
SHORT_EXACT = ('O2-epochs-within', 'O5-iterations', 'O5-random-sampler', 'O5-no-seed', 'O5-no-seed-persistent')


def _exact_runs(folder: Path, cases: dict[str, dict[str, Any]], expected: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Run all phases of the cases; what the uninterrupted runs became, which the resumed ones must equal."""
    (folder / 'cases.json').write_text(json.dumps(cases))
    for phase in ('whole', 'first', 'second'):
        _run(folder, phase)
    whole = {name: crash_harness.result(folder / name / 'whole') for name in expected}
    rows = []
    for name, result in whole.items():
        rows += [f'{name}: {row}' for row in differences(result, crash_harness.result(folder / name / 'parts'))]
    assert rows == []
    return whole


@pytest.mark.timeout(900)
def test_resumed_equals_uninterrupted_with_most_things_on(tmp_path: Path) -> None:
    """A part of what follows: two levels, and the cases that interrupt where it hurts most."""
    cases = _exact_cases()
    _exact_runs(tmp_path, {name: cases[name] for name in SHORT_EXACT}, SHORT_EXACT)


@long
@pytest.mark.timeout(900)
def test_resumed_equals_uninterrupted_with_everything_on(tmp_path: Path) -> None:
    """Dropout, augmentation, accumulation, EMA, save_best, early stopping: in a process that never saw the first part.

    Without any one of the protections, the same comparison is red.
    """
    whole = _exact_runs(tmp_path, {**_exact_cases(), **_broken_cases()}, _exact_cases())
    green = [
        name
        for name, case in _broken_cases().items()
        # the worker removes what could not even come to its end
        if (parts := tmp_path / name / 'parts').exists()
        and not differences(whole[case['reference']], crash_harness.result(parts))
    ]
    assert green == [], 'these protections protect nothing'
    # the runs were interesting: stopped early, interrupted in mid-epoch, with a scale that moved and steps that were skipped
    assert whole['O5-early-stopping']['place'][0] == _EARLY < 12
    within = toy.checkpoint(tmp_path / 'O2-epochs-within' / 'first', 'iter_15.pth')
    assert within['exact_resume']['batches'] == 1
    assert within['optimizer']['amp']['window']['used'] == [True]
    scales = whole['O2-epochs']['scalars']
    assert len(set(scales['train/amp_scale'])) > 2 and scales['train/amp_skipped'][-1] > 0


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


@pytest.mark.timeout(900)
@pytest.mark.parametrize('name', but(SHORT, _cases(), long))
def test_resumed_equals_uninterrupted(runs: Path, name: str) -> None:
    whole, parts = _comparable(runs / name / 'whole'), _comparable(runs / name / 'parts')
    assert len(whole['train/loss']) == 28
    assert differences(whole, parts) == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize('name', ['O2-everything-1'])
def test_the_runs_were_interesting(runs: Path, name: str) -> None:
    """Overflows, growth, open accumulations and averages really occurred in the runs that are compared."""
    saved = _comparable(runs / name / 'whole')
    assert saved['train/amp_skipped'][-1] > 0
    assert len(set(saved['train/amp_scale'])) > 2
    inside = toy.checkpoint(runs / name / 'parts', 'epoch_1.pth')
    gradients = inside['optimizer']['amp']['window']['gradients']
    assert any(g is not None and g.dtype.itemsize == 2 and g.abs().sum() > 0 for g in gradients)
    assert differences(saved['state_dict'], {k[7:]: v for k, v in saved['ema_state_dict'].items() if k != 'steps'})
