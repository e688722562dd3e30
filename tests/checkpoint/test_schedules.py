"""A run that is resumed in any phase of any schedule has the rates and weights of the uninterrupted run, bit for bit."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import foreign
import pairs
import pytest
import toy
from bits import differences
from hypothesis import given, settings
from hypothesis import strategies as st
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapperDict
from mmengine.registry import HOOKS, PARAM_SCHEDULERS
from mmengine.runner import Runner

LEVELS = toy.LEVELS
# 4 epochs of 2 iterations
EPOCHS, LENGTH = 4, 2
END = EPOCHS * LENGTH
SGD = dict(type='SGD', lr=0.2, momentum=0.9, weight_decay=1e-3)
ADAMW = dict(type='AdamW', lr=0.02, weight_decay=0.05, eps=1e-4)


@HOOKS.register_module()
class Watch(Hook):
    """Remembers what each iteration was run with."""

    priority = 'LOWEST'
    seen: dict[int, Any] = {}

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        wrapper = runner.optim_wrapper
        members = wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]
        # torch's groups and the one that mmengine adds for its base settings
        self.seen[runner.iter] = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != 'params'}
            for member in members
            for group in member.param_groups
        ]


def training(level: str, schedulers: Any, optimizer: dict[str, Any] = SGD, **overrides: Any) -> dict[str, Any]:
    """A short training with several parameter groups, that saves after each iteration and validates after each epoch."""
    case: dict[str, Any] = dict(
        optim_wrapper=dict(
            type='AmpOptimWrapper',
            opt_level=level,
            loss_scale=64.0 if level in ('O1', 'O2') else None,
            optimizer=optimizer,
            paramwise_cfg=dict(custom_keys={'fc': dict(lr_mult=0.5), 'conv': dict(decay_mult=0.0)}),
        ),
        param_scheduler=schedulers,
        # everything that draws random numbers
        model=dict(type='ToyModel', dropout=0.3),
        train_dataloader=toy.loader(batch_size=2, length=2 * LENGTH, augment=True),
        val_dataloader=toy.loader(batch_size=2, length=2, shuffle=False),
        train_cfg=dict(by_epoch=True, max_epochs=EPOCHS, val_interval=1),
        default_hooks=dict(
            logger=dict(type='LoggerHook', interval=100),
            checkpoint=dict(type='CheckpointHook', interval=1, by_epoch=False),
        ),
        custom_hooks=[dict(type='Watch'), dict(type='amp_wrapper.ExactResumeHook')],
        log_level='ERROR',
    )
    return {**case, **overrides}


def run(folder: Path, case: dict[str, Any], **more: Any) -> tuple[dict[int, Any], dict[str, Any]]:
    """What its iterations were run with, and its last file."""
    Watch.seen = {}
    toy.run(folder, **copy.deepcopy(case), **more)
    file = toy.checkpoint(folder)
    kept = ('state_dict', 'ema_state_dict', 'optimizer', 'param_schedulers')
    return Watch.seen, {key: file[key] for key in kept if key in file}


def compare(folder: Path, case: dict[str, Any], points: list[int]) -> dict[int, Any]:
    """Resume a training after each of so many iterations, and compare all that follows.

    Returns:
        What the iterations of the uninterrupted run were run with.
    """
    whole, end = run(folder / 'whole', case)
    assert sorted(whole) == list(range(END))
    case = copy.deepcopy(case)
    case['default_hooks']['checkpoint']['interval'] = END
    for point in points:
        path = str(folder / 'whole' / f'iter_{point}.pth')
        part, last = run(folder / f'from{point}', case, resume=True, load_from=path)
        assert sorted(part) == list(range(point, END)), point
        assert differences({step: whole[step] for step in part}, part) == [], point
        assert differences(end, last) == [], point
    return whole


# -- every scheduler that mmengine has --------------------------------------------------------------------------------

ENDINGS = ('ParamScheduler', 'Momentum', 'LR')
#: By the first half of the name; a new kind is tried with no arguments.
ARGUMENTS: dict[str, dict[str, Any]] = {
    'Constant': dict(factor=0.5),
    'CosineAnnealing': dict(eta_min_ratio=0.1),
    'CosineRestart': dict(periods=[1, 1], restart_weights=[1, 0.5], eta_min=0.0),
    'Exponential': dict(gamma=0.7),
    'Linear': dict(start_factor=0.3),
    'MultiStep': dict(milestones=[1], gamma=0.5),
    'OneCycle': dict(eta_max=0.3, three_phase=True),
    'Poly': dict(eta_min=1e-3, power=0.9),
    'ReduceOnPlateau': dict(monitor='toy/score', rule='greater', patience=0, threshold=10.0, threshold_rule='abs'),
    'Step': dict(step_size=1, gamma=0.5),
}
KINDS = sorted(
    name for name, cls in PARAM_SCHEDULERS.module_dict.items() if cls.__module__.startswith('mmengine.optim.scheduler')
)


def scheduler(kind: str, way: str, begin: int, end: int) -> dict[str, Any]:
    """The config of a scheduler whose range is given in epochs, or in iterations."""
    name, ending = next((kind.removesuffix(ending), ending) for ending in ENDINGS if kind.endswith(ending))
    words = dict(ARGUMENTS.get(name, {}), type=kind, begin=begin, end=end, by_epoch=way != 'iterations')
    if way == 'converted':
        words['convert_to_iter_based'] = True
    if ending == 'ParamScheduler':
        words['param_name'] = 'lr' if name == 'OneCycle' else 'weight_decay'
    return words


def ways_of(kind: str) -> list[str]:
    if kind.startswith('ReduceOnPlateau'):
        # there is no other
        return ['epochs']
    # the classes behind those that people write are the same code
    return ['iterations'] if kind.endswith('ParamScheduler') else ['epochs', 'iterations', 'converted']


@pytest.mark.parametrize('part', range(6))
def test_every_scheduler_in_every_phase(part: int, tmp_path: Path) -> None:
    """Before the range of the schedulers, inside it and behind it: that of the second and third epoch."""
    assert len(KINDS) >= 29 and {'LinearLR', 'PolyMomentum', 'ReduceOnPlateauLR', 'OneCycleLR'} <= set(KINDS)
    schedulers = []
    for index, kind in enumerate(KINDS):
        if index % 6 == part:
            way = ways_of(kind)[index % len(ways_of(kind))]
            begin, end = (1, 3) if way != 'iterations' else (LENGTH, 3 * LENGTH)
            schedulers.append(scheduler(kind, way, begin, end))
    whole = compare(tmp_path, training(LEVELS[part], schedulers, ADAMW if part % 2 else SGD), [1, 3, END - 1])
    # before its range begins, nothing has moved; then something has
    assert differences(whole[0], whole[1]) == []
    assert any(differences(whole[0], later) for later in whole.values())


USUAL = {
    'warm-up and cosine by epoch': [
        dict(type='LinearLR', start_factor=0.1, by_epoch=True, begin=0, end=2, convert_to_iter_based=True),
        dict(type='CosineAnnealingLR', by_epoch=True, begin=2, end=EPOCHS),
    ],
    'warm-up and poly by iteration': [
        dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=3),
        dict(type='PolyLR', eta_min=0.0, power=1.0, begin=3, end=END, by_epoch=False),
    ],
    'without begin or end': [
        dict(type='StepLR', step_size=1, begin=EPOCHS, end=EPOCHS + 9),
        dict(type='PolyLR', begin=1, end=float('inf'), power=0.5),
    ],
    'momentum beside it': [
        dict(type='OneCycleLR', eta_max=0.3, total_steps=END, by_epoch=False, anneal_strategy='linear'),
        dict(type='LinearMomentum', start_factor=0.8, begin=2, end=6, by_epoch=False),
        dict(type='CosineAnnealingMomentum', begin=3, T_max=1),
    ],
    'fractions of epochs': [
        dict(type='LinearLR', begin=0.5, end=2.5, convert_to_iter_based=True),
        dict(type='StepLR', step_size=2, begin=0.5, end=3.5),
    ],
}


@pytest.mark.parametrize('name', USUAL)
def test_usual_recipes(name: str, tmp_path: Path) -> None:
    index = list(USUAL).index(name)
    compare(tmp_path, training(LEVELS[index], USUAL[name]), list(range(1, END)) if pairs.full else [2, 5 + index % 3])


@st.composite
def lists_of_schedulers(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Any classes, over any ranges, that may have begun, overlap, or never begin."""
    result = []
    for kind in draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4)):
        way = draw(st.sampled_from(ways_of(kind)))
        unit = LENGTH if way == 'iterations' else 1
        begin = draw(st.integers(0, EPOCHS * unit))
        result.append(scheduler(kind, way, begin, begin + draw(st.integers(2, EPOCHS * unit + 1))))
    return result


@settings(max_examples=60 if pairs.full else 4, deadline=None, derandomize=True)
@given(
    schedulers=lists_of_schedulers(),
    level=st.sampled_from(LEVELS),
    optimizer=st.sampled_from([SGD, ADAMW]),
    by_epoch=st.booleans(),
    accumulate=st.sampled_from([1, 3]),
    point=st.integers(1, END - 1),
)
def test_random_schedules_and_points(
    schedulers: list[dict[str, Any]], level: str, optimizer: dict[str, Any], by_epoch: bool, accumulate: int, point: int
) -> None:
    case = training(level, schedulers, optimizer)
    case['optim_wrapper']['accumulative_counts'] = accumulate
    if not by_epoch:
        case['train_cfg'] = dict(by_epoch=False, max_iters=END, val_interval=LENGTH)
        case['train_dataloader'] = toy.loader(batch_size=2, length=2 * LENGTH, augment=True, sampler='InfiniteSampler')
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), case, [point])


@pytest.mark.parametrize(
    ('level', 'average', 'points'),
    [
        ('O1', dict(begin_iter=3, momentum=0.1), [2, 5]),
        ('O2', dict(ema_type='StochasticWeightAverage', begin_epoch=2), [1, 7]),
        ('O5', dict(ema_type='MomentumAnnealingEMA', gamma=3, update_buffers=True), [1, 5]),
    ],
)
def test_averages_and_early_stopping(level: str, average: dict[str, Any], points: list[int], tmp_path: Path) -> None:
    case = training(level, USUAL['warm-up and cosine by epoch'])
    stopping = dict(type='EarlyStoppingHook', monitor='toy/score', rule='greater', patience=3, min_delta=0.01)
    case['custom_hooks'] += [dict(type='EMAHook', **average), stopping]
    case['default_hooks']['checkpoint'].update(save_best='toy/score', rule='greater')
    # its order comes from the global generator
    case['train_dataloader']['sampler']['type'] = 'ToyRandomSampler'
    compare(tmp_path, case, points)


@pytest.mark.parametrize('level', ['O1', 'O5'])
def test_several_optimizers_with_schedules_of_their_own(level: str, tmp_path: Path) -> None:
    left = USUAL['warm-up and poly by iteration']
    right = [dict(type='StepLR', step_size=1, begin=2), dict(type='LinearMomentum', begin=1, end=3)]
    members = {
        name: dict(type='AmpOptimWrapper', opt_level=level, optimizer=optimizer)
        for name, optimizer in zip(foreign.PAIR, (SGD, ADAMW))
    }
    case = training(
        level,
        dict(zip(foreign.PAIR, (left, right))) if level == 'O5' else left,
        model=dict(type='ForeignPair'),
        optim_wrapper=dict(constructor='ForeignPairConstructor', **members),
        train_dataloader=toy.loader(batch_size=6, length=6 * LENGTH),
        val_dataloader=None,
        val_evaluator=None,
        val_cfg=None,
        train_cfg=dict(by_epoch=True, max_epochs=EPOCHS),
    )
    case['train_dataloader']['dataset'] = dict(type='ForeignData')
    compare(tmp_path, case, [1, 4])
