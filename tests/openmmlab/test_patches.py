"""The table of patched attributes, and the hook that every runner is given."""

from __future__ import annotations

import copy
import pathlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from processes import python
from mmengine.hooks import Hook
from mmengine.runner import FlexibleRunner, Runner

from amp_wrapper.openmmlab import patches
from amp_wrapper.openmmlab.patches.runner_hook import AmpRunnerHook

STOCK = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1))
OURS = dict(type='AmpOptimWrapper', opt_level='O2', optimizer=dict(type='SGD', lr=0.1))
TARGETS = [(target, name) for targets, name, _ in patches.PATCHES for target in targets]


@pytest.mark.parametrize(('target', 'name'), TARGETS, ids=lambda value: getattr(value, '__name__', value))
def test_every_attribute_is_patched_once(target: Any, name: str) -> None:
    before = getattr(target, name)
    patches.install()
    assert getattr(target, name) is before
    # not one patch around another
    assert before.__wrapped__.__module__.split('.')[0] == 'mmengine'
    assert before.__wrapped__.__code__ is not before.__code__


def test_no_attribute_stands_in_the_table_twice() -> None:
    assert len(set(TARGETS)) == len(TARGETS)


@pytest.mark.parametrize('run', [toy.run, toy.run_flexible])
@pytest.mark.parametrize('wrapper', [STOCK, OURS])
def test_every_runner_has_one_hook_of_ours_behind_those_of_the_config(
    tmp_path: Path, run: Any, wrapper: dict[str, Any]
) -> None:
    runner = run(tmp_path, copy.deepcopy(wrapper), custom_hooks=[dict(type='StopAt', priority='LOWEST')])
    assert isinstance(runner, (Runner, FlexibleRunner))
    assert type(runner.hooks[-1]) is AmpRunnerHook
    assert sum(isinstance(hook, AmpRunnerHook) for hook in runner.hooks) == 1


LATE = """
import sys, torch
from mmengine.dataset import default_collate
from mmengine.model import BaseModel
from mmengine.runner import Runner
class Model(BaseModel):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)
    def forward(self, x, mode='tensor'):
        return dict(loss=self.fc(x).square().mean())
data = dict(dataset=[dict(x=torch.randn(2)) for _ in range(4)], batch_size=2, collate_fn=default_collate,
            sampler=dict(type='DefaultSampler', shuffle=False))
wrapper = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O2', optimizer=dict(type='SGD', lr=0.1))
runner = Runner(model=Model(), work_dir=sys.argv[1], train_dataloader=data, optim_wrapper=wrapper,
                train_cfg=dict(by_epoch=True, max_epochs=1), log_level='ERROR', custom_hooks=eval(sys.argv[2]))
if 'Exact' not in sys.argv[2]:
    assert 'amp_wrapper' not in sys.modules
runner.train()
print([type(hook).__name__ for hook in runner.hooks][-3:])
"""


@pytest.mark.parametrize(
    ('hooks', 'last'),
    [
        ([], ['ParamSchedulerHook', 'CheckpointHook', 'AmpRunnerHook']),
        ([dict(type='amp_wrapper.ExactResumeHook')], ['CheckpointHook', 'AmpRunnerHook', '_LastWord']),
    ],
)
def test_a_runner_that_is_older_than_the_patches(tmp_path: Path, hooks: list[Any], last: list[str]) -> None:
    """The scope of a type imports this package, when the runner has its hooks already."""
    done = python('-c', LATE, tmp_path, repr(hooks))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == repr(last)


def test_the_hook_does_nothing_without_a_wrapper_of_ours(tmp_path: Path) -> None:
    runner = toy.run(tmp_path, copy.deepcopy(STOCK))
    hook = next(hook for hook in runner.hooks if isinstance(hook, AmpRunnerHook))
    names = sorted(path.name for path in tmp_path.iterdir())
    (tmp_path / 'epoch_9.pth.amp-part').write_text('')
    checkpoint = {
        'meta': dict(epoch=1),
        'state_dict': {'a.module.weight': 1},
        'param_schedulers': [dict(call=print)],
    }
    before = copy.deepcopy(checkpoint)
    for stage in ('before_run', 'before_train'):
        getattr(hook, stage)(runner)
    for stage in ('after_load_checkpoint', 'before_save_checkpoint'):
        getattr(hook, stage)(runner, checkpoint)
    assert checkpoint == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, 'epoch_9.pth.amp-part'])
    # every other stage is mmengine's own
    assert set(hook.get_triggered_stages()) == {
        'before_run',
        'before_train',
        'after_train_iter',
        'after_train',
        'before_save_checkpoint',
        'after_load_checkpoint',
    }
    assert isinstance(hook, Hook)


@pytest.mark.parametrize('module', ['pathlib', 'pathlib._local'])
def test_paths_from_another_python(tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.13 pickles paths under another module than those around it."""
    patches.install()
    with monkeypatch.context() as other_python:
        other_python.setitem(sys.modules, module, pathlib)
        other_python.setattr(type(tmp_path), '__module__', module)
        torch.save({'meta': {'work_dir': tmp_path}}, tmp_path / 'a.pth')
    assert torch.load(tmp_path / 'a.pth', weights_only=True) == {'meta': {'work_dir': tmp_path}}
