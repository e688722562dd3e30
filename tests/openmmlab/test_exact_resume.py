"""The pieces of ExactResumeHook; that they add up to an exact resume is shown in test_resume.py."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crash_harness
import numpy as np
import pytest
import torch
import toy
from bits import differences
from grid import but_every, grid
from mmengine.hooks import CheckpointHook, EarlyStoppingHook, Hook
from mmengine.registry import HOOKS

from amp_wrapper import AmpCheckpointError, AmpConfigError
from amp_wrapper.openmmlab.resume import seen_data
from amp_wrapper.openmmlab.resume.exact_resume import ExactResumeHook

OURS = dict(type='AmpOptimWrapper', opt_level='O5', optimizer=dict(type='SGD', lr=0.1))
HOOK = dict(type='amp_wrapper.ExactResumeHook')


def run(folder: Path, *hooks: dict[str, Any], **more: Any) -> tuple[Any, list[str]]:
    with toy.run_log() as lines:
        runner = toy.run(folder, copy.deepcopy(OURS), custom_hooks=[HOOK, *hooks], log_level='INFO', **more)
    return runner, [line for line in lines if line.startswith('amp: ')]


def test_file_is_plain_and_small(tmp_path: Path) -> None:
    run(tmp_path)
    part = toy.checkpoint(tmp_path)['exact_resume']
    assert part['version'] == 1 and len(part['ranks']) == 1
    assert part['batches'] == 0 and part['validated'] == 7
    torch.save(part, tmp_path / 'part.pth')
    # three states of 5056, 5000 and 4992 bytes, twice
    assert (tmp_path / 'part.pth').stat().st_size < 50_000


def test_files_without_optimizer_stay_small(tmp_path: Path) -> None:
    run(tmp_path, default_hooks=dict(checkpoint=dict(type='CheckpointHook', save_best='toy/score', rule='greater')))
    best = next(tmp_path.glob('best*.pth'))
    assert 'exact_resume' not in torch.load(best, weights_only=True)


@HOOKS.register_module()
class Dice(Hook):
    """Notes what each generator would give at the beginning of each epoch, and wastes numbers around validations."""

    priority = 'LOW'

    def __init__(self) -> None:
        self.seen: list[tuple[float, ...]] = []

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        states = (torch.get_rng_state(), np.random.get_state(), random.getstate())
        self.seen.append((float(torch.rand(())), float(np.random.rand()), random.random()))
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        if runner.cfg.get('waste'):
            _waste()

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if runner.cfg.get('waste'):
            _waste()


def _waste() -> None:
    torch.rand(5)
    np.random.rand(5)
    random.random()


def test_validation_draws_nothing_from_the_training(tmp_path: Path) -> None:
    seen = {}
    for waste in (False, True):
        runner, _ = run(tmp_path / str(waste), dict(type='Dice'), waste=waste)
        seen[waste] = next(hook for hook in runner.hooks if isinstance(hook, Dice)).seen
    assert seen[False] == seen[True] and len(seen[True]) == 14
    # without the hook, they do
    for waste in (False, True):
        config = toy.toy_config(tmp_path / f'plain{waste}', copy.deepcopy(OURS), custom_hooks=[dict(type='Dice')])
        config.waste = waste
        from mmengine.runner import Runner

        torch.manual_seed(0)
        runner = Runner.from_cfg(config)
        runner.train()
        seen[waste] = next(hook for hook in runner.hooks if isinstance(hook, Dice)).seen
    assert seen[False] != seen[True]


# -- early stopping ----------------------------------------------------------------------------------------------------

STOPPING = dict(type='EarlyStoppingHook', monitor='toy/score', rule='greater', patience=1, min_delta=1000.0)
LONG = dict(train_cfg=dict(by_epoch=True, max_epochs=6, val_interval=1))


def test_early_stopping_counts_before_the_file_is_saved_again(tmp_path: Path) -> None:
    saving = dict(checkpoint=dict(type='CheckpointHook', save_best='toy/score', rule='greater'))
    runner, _ = run(tmp_path, dict(STOPPING, patience=9, min_delta=0.0), default_hooks=saving)
    kinds = [type(hook) for hook in runner.hooks]
    assert kinds.index(EarlyStoppingHook) < kinds.index(CheckpointHook)
    file = toy.checkpoint(tmp_path)
    assert file['exact_resume']['validated'] == 14
    saved = file['exact_resume']['early_stopping'][0]
    assert saved['best_score'] == file['message_hub']['runtime_info']['best_score'] and saved['wait_count'] == 0


def test_a_run_that_was_stopped_stays_stopped_until_the_settings_change(tmp_path: Path) -> None:
    first, _ = run(tmp_path, STOPPING, **LONG)
    assert first.epoch == 2
    again, lines = run(tmp_path, STOPPING, resume=True, **LONG)
    assert again.epoch == 2 and any('it runs now, whether or not' in line for line in lines)
    more, lines = run(tmp_path, dict(STOPPING, patience=2), resume=True, **LONG)
    # the due validation is the second without improvement, then a third
    assert more.epoch == 3


def test_the_stop_itself_is_saved(tmp_path: Path) -> None:
    run(tmp_path, STOPPING, **LONG)
    path = tmp_path / 'epoch_2.pth'
    file = torch.load(path, weights_only=True)
    file['exact_resume'].update(stop_training=True, validated=14)
    torch.save(file, path)
    runner, lines = run(tmp_path, STOPPING, resume=True, **LONG)
    assert runner.epoch == 2 and 'amp: this run was ended by early stopping already' in lines
    torch.save(file, path)
    runner, lines = run(tmp_path, dict(STOPPING, patience=3), resume=True, **LONG)
    assert runner.epoch > 2 and any('its settings were changed since' in line for line in lines)


def test_another_number_of_early_stopping_hooks_is_told(tmp_path: Path) -> None:
    run(tmp_path, STOPPING, **LONG)
    _, lines = run(tmp_path, resume=True, **LONG)
    assert any('1 early stopping hooks were saved and 0 are configured' in line for line in lines)


# -- what is said ------------------------------------------------------------------------------------------------------


def _loader(**words: Any) -> dict[str, Any]:
    loader = toy.loader()
    loader.update(words)
    return dict(train_dataloader=loader)


ITERATIONS = dict(train_cfg=dict(by_epoch=False, max_iters=3, val_interval=10))


@pytest.mark.parametrize(
    ('more', 'words'),
    [
        (_loader(num_workers=1, persistent_workers=True), 'Write persistent_workers=False'),
        (dict(_loader(sampler=dict(type='ToyRandomSampler')), **ITERATIONS), "Use mmengine's InfiniteSampler"),
        (dict(randomness=dict(seed=None)), 'the config has no seed'),
        ({}, None),
        (ITERATIONS, None),
        (_loader(sampler=dict(type='ToyRandomSampler')), None),
    ],
)
def test_what_cannot_be_exact_is_said_once_at_the_start(
    tmp_path: Path, more: dict[str, Any], words: str | None
) -> None:
    more.setdefault('train_cfg', dict(by_epoch=True, max_epochs=2, val_interval=1))
    _, lines = run(tmp_path, **copy.deepcopy(more))
    said = [line for line in lines if 'will not be exact' in line]
    assert len(said) == (words is not None)
    if words is not None:
        assert words in said[0]


def test_checkpoints_of_others_are_told(tmp_path: Path) -> None:
    toy.run(tmp_path, copy.deepcopy(OURS))
    _, lines = run(tmp_path, resume=True, train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=1))
    assert any('holds no random states' in line for line in lines)


def test_another_number_of_processes_is_told(tmp_path: Path) -> None:
    run(tmp_path)
    path = tmp_path / 'epoch_2.pth'
    file = torch.load(path, weights_only=True)
    file['exact_resume']['ranks'] *= 2
    torch.save(file, path)
    _, lines = run(tmp_path, resume=True, train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=1))
    assert any('saved by 2 processes and resumed by 1' in line for line in lines)


def test_passing_over_data_shows_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = dict(train_cfg=dict(by_epoch=False, max_iters=6, val_interval=100), **_loader())
    case['default_hooks'] = dict(checkpoint=dict(type='CheckpointHook', interval=5, by_epoch=False))
    run(tmp_path, **copy.deepcopy(case))
    (tmp_path / 'iter_6.pth').unlink()
    clock = iter(range(0, 10_000, 11))
    monkeypatch.setattr(seen_data.time, 'monotonic', lambda: float(next(clock)))
    _, lines = run(tmp_path, resume=True, **copy.deepcopy(case))
    said = [line for line in lines if 'passing over data' in line]
    assert said[0] == 'amp: passing over data seen already: 1 of 5 batches, about 44 s left' and len(said) == 5


def test_revalidate_can_be_turned_off(tmp_path: Path) -> None:
    with pytest.raises(AmpConfigError, match=r"revalidate='no' must be True or False"):
        ExactResumeHook(revalidate='no')  # type: ignore[arg-type]
    run(tmp_path)
    case = dict(resume=True, train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=1))
    with toy.run_log() as lines:
        hook = dict(HOOK, revalidate=False)
        toy.run(tmp_path, copy.deepcopy(OURS), custom_hooks=[hook], log_level='INFO', **case)
    assert not any('it runs now, whether or not' in line for line in lines)


WRONG: list[tuple[Callable[[Any], Any], str]] = [
    (lambda s: 5, 'exact_resume must be a dict'),
    (lambda s: s.update(version='1') or s, r"\['version'\] must be a whole number"),
    (lambda s: s.update(version=2) or s, r"\['version'\]=2 comes from a newer"),
    (lambda s: s.update(batches=-1) or s, r"\['batches'\]"),
    (lambda s: s.update(validated=None) or s, r"\['validated'\]"),
    (lambda s: s.update(stop_training=1) or s, r"\['stop_training'\] must be True or False"),
    (lambda s: s.update(early_stopping=[{}]) or s, r"\['early_stopping'\]\[0\]"),
    (lambda s: s.update(ranks=[]) or s, r"\['ranks'\] must be a list"),
    (lambda s: s.update(ranks=[{}]) or s, r"\['ranks'\]\[0\] must be a dict"),
    (lambda s: s['ranks'][0].update(statistics={'a': 1}) or s, r"\['statistics'\] must be a dict of tensors"),
    (lambda s: s['ranks'][0].update(seeds={}) or s, r"\['ranks'\]\[0\]\['seeds'\] must be the seeds"),
    (lambda s: s['ranks'][0].update(now=None) or s, r"\['ranks'\]\[0\]\['now'\] must be a dict"),
]


@pytest.mark.parametrize(('change', 'words'), WRONG)
def test_damage_is_named(tmp_path: Path, change: Callable[[Any], Any], words: str) -> None:
    from amp_wrapper.checkpoint import random_state

    states = random_state.capture()
    good = dict(
        version=1,
        batches=0,
        length=7,
        validated=-1,
        stop_training=False,
        early_stopping=[],
        ranks=[dict(now=states, begin=None, start=None, seeds=dict(sampler=1, workers=None), statistics={})],
    )
    hook = ExactResumeHook()
    hook.check_states({'exact_resume': good})
    hook.check_states({})
    with pytest.raises(AmpCheckpointError, match=words):
        hook.check_states({'exact_resume': change(copy.deepcopy(good))})


# -- found by a reviewer: whole runs, interrupted -----------------------------------------------------------------------


@HOOKS.register_module()
class DrawsAtEpoch(Hook):
    """A random factor per epoch, as multi-scale training has it: it decides what the data are."""

    def __init__(self, priority: str = 'NORMAL') -> None:
        self.priority = priority

    def before_train_epoch(self, runner: Any) -> None:
        runner.train_loop.dataloader.dataset.images *= 1 + 0.1 * random.random() * float(torch.rand(()))


@HOOKS.register_module()
class SavesByHand(Hook):
    """Saves without CheckpointHook."""

    def after_train_epoch(self, runner: Any) -> None:
        runner.save_checkpoint(runner.work_dir, f'hand_{runner.epoch + 1}.pth')


class OtherHook(ExactResumeHook):
    """A project's own kind."""


def interrupted(
    tmp_path: Path, case: dict[str, Any], runner: Any = toy.run, file: str | None = None, **stop: int
) -> list[str]:
    """What differs between the whole run and one that was stopped and resumed."""
    runner(tmp_path / 'whole', **copy.deepcopy(case))
    stopped = copy.deepcopy(case)
    stopped['custom_hooks'].append(dict(type='StopAt', **stop))
    with pytest.raises(toy.Stop):
        runner(tmp_path / 'part', **stopped)
    again = dict(copy.deepcopy(case), resume=True)
    if file is not None:
        again['load_from'] = str(tmp_path / 'part' / file)
    runner(tmp_path / 'part', **again)
    return differences(*(crash_harness.result(tmp_path / name) for name in ('whole', 'part')))


def _with(case: dict[str, Any], *hooks: Any, **more: Any) -> dict[str, Any]:
    return dict(case, custom_hooks=[*case['custom_hooks'], *hooks], **more)


@pytest.mark.parametrize('priority', ['NORMAL', 'LOWEST'])
@pytest.mark.parametrize('within', [False, True])
def test_hooks_that_draw_at_the_beginning_of_an_epoch(tmp_path: Path, within: bool, priority: str) -> None:
    case = _with(toy.everything('O5', save_each=5 if within else None), dict(type='DrawsAtEpoch', priority=priority))
    # the factors multiply up, so only the epochs from the resume on may be compared with a fresh data set
    whole = toy.run(tmp_path / 'whole', **copy.deepcopy(case))
    stopped = copy.deepcopy(case)
    stopped['custom_hooks'].append(dict(type='StopAt', iters=16 if within else 14))
    with pytest.raises(toy.Stop):
        toy.run(tmp_path / 'part', **stopped)
    states = []
    for name in ('whole', 'part'):
        if name == 'part':
            toy.run(tmp_path / 'part', resume=True, **copy.deepcopy(case))
        file = toy.checkpoint(tmp_path / name)
        states.append([file['exact_resume']['ranks'][0][moment] for moment in ('begin', 'start', 'now')])
    assert differences(*states) == [] and whole.epoch == 4


INTERVALS = [
    dict(by_epoch=True, max_epochs=4, val_begin=3, val_interval=1),
    dict(by_epoch=True, max_epochs=4, val_begin=2, val_interval=2),
    dict(by_epoch=True, max_epochs=4, val_interval=3, dynamic_intervals=[(3, 1)]),
]


@pytest.mark.parametrize('stop', [dict(iters=14), dict(val=21), dict(val=28)])
@pytest.mark.parametrize('train_cfg', but_every(2, INTERVALS))
def test_validations_that_are_due_and_others(tmp_path: Path, train_cfg: dict[str, Any], stop: dict[str, int]) -> None:
    case = dict(toy.everything('O5'), train_cfg=train_cfg)
    if stop == dict(val=21) and train_cfg['val_interval'] == 2:
        # this run does not validate there
        stop = dict(iters=21)
    assert interrupted(tmp_path, case, **stop) == []


def test_generators_of_the_data_are_saved(tmp_path: Path) -> None:
    case = toy.everything('O5', save_each=5)
    case['train_dataloader']['sampler'] = dict(type='ToyGeneratorSampler')
    assert interrupted(tmp_path, case, iters=16) == []


def test_two_hooks_are_one(tmp_path: Path) -> None:
    case = toy.everything('O5', save_each=5)
    case['default_hooks']['exact'] = dict(type='OtherHook')
    HOOKS.register_module(name='OtherHook', module=OtherHook, force=True)
    assert interrupted(tmp_path, case, iters=16) == []


def test_files_saved_by_hand_have_the_states_of_their_moment(tmp_path: Path) -> None:
    case = toy.everything('O5')
    case['default_hooks']['checkpoint'] = dict(
        type='CheckpointHook', interval=3, by_epoch=False, save_optimizer=False, save_last=False
    )
    case['default_hooks']['own'] = dict(type='SavesByHand')
    toy.run(tmp_path / 'whole', **copy.deepcopy(case))
    path = str(tmp_path / 'whole' / 'hand_2.pth')
    toy.run(tmp_path / 'part', resume=True, load_from=path, **copy.deepcopy(case))
    left, right = (torch.load(tmp_path / name / 'hand_4.pth', weights_only=True) for name in ('whole', 'part'))
    for key in ('state_dict', 'optimizer'):
        assert differences(left[key], right[key]) == []


def test_a_finished_run_of_iterations_stays_where_it_is(tmp_path: Path) -> None:
    """Resumed with nothing left to do, and saved again by a hook that counts epochs."""
    case = toy.everything('O5', by_epoch=False)
    case['default_hooks']['checkpoint'] = dict(type='CheckpointHook', interval=1)
    toy.run(tmp_path, **copy.deepcopy(case))
    before = toy.checkpoint(tmp_path)['exact_resume']['ranks']
    toy.run(tmp_path, resume=True, **copy.deepcopy(case))
    assert differences(before, toy.checkpoint(tmp_path)['exact_resume']['ranks']) == []


def test_another_batch_size_is_told(tmp_path: Path) -> None:
    run(tmp_path)
    other = _loader(batch_size=2)
    _, lines = run(tmp_path, resume=True, train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=1), **other)
    assert any('an epoch had 7 batches and has 14 now' in line for line in lines)


def test_workers_with_seeds_of_their_own_are_told(tmp_path: Path) -> None:
    init = dict(type='toy_worker_init')
    _, lines = run(tmp_path, **_loader(num_workers=1, worker_init_fn=init), **ITERATIONS)
    assert any("the workers' seeds are drawn at each pass" in line for line in lines)


@pytest.mark.parametrize(
    ('by_epoch', 'save_each', 'stop'),
    [
        pytest.param(True, None, dict(iters=15), marks=grid),
        (True, 5, dict(iters=16)),
        (False, None, dict(iters=17)),
        pytest.param(True, None, dict(val=14), marks=grid),
    ],
)
def test_flexible_runner_resumes_exactly(
    tmp_path: Path, by_epoch: bool, save_each: int | None, stop: dict[str, int]
) -> None:
    """It overwrites the epoch of a file that ``save_best`` saves again; here the epoch stays."""
    case = toy.everything('O2', by_epoch, save_each=save_each)
    # this runner counts the accumulation before it has loaded the model
    case['optim_wrapper']['accumulative_counts'] = 1
    assert interrupted(tmp_path, case, toy.run_flexible, **stop) == []
