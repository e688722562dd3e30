"""What the two distributions that are called mmengine do otherwise: 0.10.7, and onedl-mmengine."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import toy
from mmengine.logging import HistoryBuffer
from mmengine.runner import IterBasedTrainLoop

from amp_wrapper.openmmlab import patches
from amp_wrapper.openmmlab.resume import seen_data

SKIPS = 'fast_forward_on_resume' in inspect.signature(IterBasedTrainLoop.__init__).parameters
OURS = dict(type='AmpOptimWrapper', opt_level='O5', optimizer=dict(type='SGD', lr=0.1))


@pytest.mark.parametrize('by_method', [True, False])
def test_both_ways_of_passing_over_data(by_method: bool) -> None:
    loop, told = SimpleNamespace(iter=3, dataloader_iterator=iter(range(10))), []
    iterator = loop.dataloader_iterator = seen_data.FastForward(loop, lambda: told.append(True))
    if by_method:
        iterator.skip_iter(3)
    else:
        assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    assert told == [] and loop.dataloader_iterator is iterator
    # from here on the loop has its own again
    assert next(loop.dataloader_iterator) == 3 and told == [True]
    assert next(loop.dataloader_iterator) == 4


@pytest.mark.parametrize('by_method', [True, False])
def test_nothing_is_left_to_train(by_method: bool) -> None:
    nothing = seen_data.Nothing()
    if by_method:
        nothing.skip_iter(10**9)
    assert [next(nothing), next(nothing)] == [None, None]


def _train(folder: Path, end: int, **more: Any) -> tuple[Any, list[str]]:
    case = dict(train_cfg=dict(by_epoch=False, max_iters=end, val_interval=100, **more.pop('loop', {})))
    case['default_hooks'] = dict(checkpoint=dict(type='CheckpointHook', interval=2, by_epoch=False))
    hooks = [dict(type='amp_wrapper.ExactResumeHook')]
    with toy.run_log() as lines:
        runner = toy.run(folder, copy.deepcopy(OURS), custom_hooks=hooks, log_level='INFO', **case, **more)
    return runner, lines


def test_a_run_that_is_over_is_resumed(tmp_path: Path) -> None:
    first, _ = _train(tmp_path, 4)
    again, _ = _train(tmp_path, 4, resume=True)
    assert again.iter == 4
    pairs = zip(first.model.state_dict().values(), again.model.state_dict().values())
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.skipif(not SKIPS, reason='this mmengine always passes over the data')
def test_data_that_begin_anew_are_told(tmp_path: Path) -> None:
    _train(tmp_path, 4)
    again, lines = _train(tmp_path, 6, resume=True, loop=dict(fast_forward_on_resume=True))
    assert again.iter == 6
    assert any('fast_forward_on_resume=True begins the data anew' in line for line in lines)
    assert not isinstance(again.train_loop.dataloader_iterator, seen_data._Passing)


def test_classes_of_checkpoints_stay_allowed(tmp_path: Path) -> None:
    """onedl-mmengine allows them while it reads a file, and takes its own entries out afterwards."""
    patches.install()
    history = HistoryBuffer()
    history.update(1.0)
    torch.save(dict(history=history, array=np.zeros(2), number=np.float64(1), part=slice(1)), tmp_path / 'a.pth')
    for _ in range(2):
        with torch.serialization.safe_globals([HistoryBuffer, np.ndarray, np.dtype, slice, getattr]):
            pass
        read = torch.load(tmp_path / 'a.pth', weights_only=True)
        assert read['history'].current() == 1.0
