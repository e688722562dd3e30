"""What iteration-based schedules do at skipped steps: ``on_skip``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy
from mmengine.hooks import ParamSchedulerHook
from torch import nn

from amp_wrapper import AmpConfigError, AmpOptimWrapper

SGD = dict(type='SGD', lr=0.01)
SCHEDULES = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=40),
    dict(type='MultiStepLR', milestones=[1], by_epoch=True),
]


def last_steps(tmp_path: Path, **words: Any) -> list[int]:
    """How far the two schedules got in 14 iterations, of which the 3rd, 4th and 9th have an infinite loss."""
    wrapper = dict(type='AmpOptimWrapper', opt_level='O2', loss_scale=8.0, optimizer=SGD, verbosity=0) | words
    model = dict(type='PoisonedModel', poisoned=(3, 4, 9))
    runner = toy.run(tmp_path, wrapper, model=model, param_scheduler=SCHEDULES)
    return [scheduler.last_step for scheduler in runner.param_schedulers]


@pytest.mark.parametrize(
    ('words', 'expected'),
    [
        (dict(), [14, 1]),
        (dict(on_skip='advance'), [14, 1]),
        (dict(on_skip='hold'), [11, 1]),
        # a step reads the flag on the device: the host asks once more
        (dict(on_skip='hold', optimizer=dict(type='SGD', lr=0.01, fused=True)), [11, 1]),
        # accumulations of iterations 3 and 4, 9 and 10 are skipped: schedules wait at their last iteration
        (dict(on_skip='hold', accumulative_counts=2), [12, 1]),
        (dict(on_skip='hold', opt_level='O0', loss_scale=1.0), [14, 1]),
    ],
)
def test_schedules_of_iterations_wait_and_those_of_epochs_do_not(
    words: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    assert last_steps(tmp_path, **words) == expected


def test_wrappers_of_a_dict_wait_each_for_its_own_steps() -> None:
    def schedule(by_epoch: bool) -> Any:
        return SimpleNamespace(by_epoch=by_epoch, steps=0)

    def member(on_skip: str, skipped: bool) -> Any:
        return SimpleNamespace(on_skip=on_skip, take_skip=lambda: skipped)

    members = dict(a=member('hold', True), b=member('hold', False), c=member('advance', True), d=SimpleNamespace())
    schedules = {name: [schedule(False), schedule(True)] for name in members}
    for some in schedules.values():
        for one in some:
            one.step = lambda one=one: setattr(one, 'steps', one.steps + 1)
    runner = SimpleNamespace(param_schedulers=schedules, optim_wrapper=SimpleNamespace(optim_wrappers=members))
    ParamSchedulerHook().after_train_iter(runner, 0)
    assert {name: [one.steps for one in some] for name, some in schedules.items()} == dict(
        a=[0, 0], b=[1, 0], c=[1, 0], d=[1, 0]
    )
    assert runner.param_schedulers is schedules


def test_another_word_is_an_error() -> None:
    with pytest.raises(AmpConfigError, match="on_skip='wait' must be 'advance'"):
        AmpOptimWrapper(optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), on_skip='wait')
