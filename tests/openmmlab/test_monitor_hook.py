"""``AmpMonitorHook`` in whole trainings: names in the log, files, reports, resumes, several optimizers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import toy
from bits import differences
from grid import but
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_wrapper import AmpConfigError, OverflowStreakError
from amp_wrapper.diagnostics.measured_numbers import NUMBERS
from amp_wrapper.openmmlab.device_log import DeviceLog
from amp_wrapper.openmmlab.monitor_hook import AmpMonitorHook
from amp_wrapper.ops import loader

SGD = dict(type='SGD', lr=0.01)
BY_ITERATION = dict(train_cfg=dict(by_epoch=False, max_iters=20, val_interval=50))
GRADIENTS = ('amp_grad_underflow', 'amp_grad_tiny', 'amp_grad_peak', 'amp_weight_peak')


def wrapper(level: str = 'O2', **words: Any) -> dict[str, Any]:
    return dict(type='AmpOptimWrapper', opt_level=level, optimizer=SGD, verbosity=0) | words


def hook(**words: Any) -> list[dict[str, Any]]:
    return [dict(type='amp_wrapper.AmpMonitorHook', **words)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def scalars(runner: Runner) -> list[dict[str, Any]]:
    return [line for line in lines(Path(runner.log_dir) / 'vis_data' / 'scalars.json') if 'loss' in line]


@pytest.mark.parametrize('level', ['O1', 'O2', 'O5'])
def test_numbers_reach_the_log(level: str, tmp_path: Path) -> None:
    runner = toy.run(tmp_path, wrapper(level), custom_hooks=hook(interval=5, ranges_interval=10))
    wanted = {name for name in NUMBERS if level != 'O1' or not name.startswith('amp_update')}
    logged = scalars(runner)
    assert len(logged) == 14
    for line in logged:
        assert wanted <= set(line)
        assert 0 <= line['amp_grad_underflow'] <= 1
    # a new measurement at iterations 1, 5 and 10, and the last one in between
    peaks = [line['amp_grad_peak'] for line in logged]
    assert peaks[0] == peaks[3] != peaks[4] == peaks[8] != peaks[9] == peaks[13]
    ranges = lines(Path(runner.log_dir) / 'vis_data' / 'amp_ranges.jsonl')
    assert [line['iteration'] for line in ranges] == [1, 10]
    assert 'conv.weight' in ranges[0]['gradients']


def test_a_row_has_the_numbers_of_its_own_iteration(tmp_path: Path) -> None:
    """Those of a training in which each iteration is measured, at the iterations that are both measured and logged."""
    logger = dict(logger=dict(type='LoggerHook', interval=5))
    each, some = (
        toy.run(tmp_path / name, wrapper(), custom_hooks=hook(interval=interval), default_hooks=logger, **BY_ITERATION)
        for name, interval in (('each', 1), ('some', 5))
    )
    rows = [[{name: row[name] for name in ('iter', *GRADIENTS)} for row in scalars(runner)] for runner in (each, some)]
    assert [row['iter'] for row in rows[0]] == [5, 10, 15, 20]
    assert rows[0] == rows[1]


def test_the_share_of_skipped_steps_is_that_since_the_last_measurement(tmp_path: Path) -> None:
    runner = toy.run(
        tmp_path, wrapper(), model=dict(type='PoisonedModel', poisoned=(1, 3, 4, 9)), custom_hooks=hook(interval=5)
    )
    # iteration 1 of one step, 5 of iterations 2 to 5, 10 of 6 to 10
    assert [row['amp_skip_rate'] for row in scalars(runner)] == [1.0] * 4 + [0.5] * 5 + [pytest.approx(0.2)] * 5


class OwnReads(TorchDispatchMode):
    """Notes in which iterations code of the package reads the device; what mmengine reads by itself is not noted."""

    def __init__(self) -> None:
        super().__init__()
        self.runner: Any = None
        self.found: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        if self.runner is not None:
            frame: FrameType | None = sys._getframe(2)
            rooms = ('amp_wrapper', 'mmengine')
            while frame is not None and not str(frame.f_globals.get('__name__')).startswith(rooms):
                frame = frame.f_back
            name = '' if frame is None else frame.f_globals['__name__']
            # where there are no compiled ops, those in plain torch look at tables that lie on the host
            is_check = loader.library().module is None and name.startswith('amp_wrapper.ops')
            if frame is not None and name.startswith('amp_wrapper') and not is_check:
                self.found.setdefault(self.runner.iter + 1, f'{name}:{frame.f_lineno}')


@HOOKS.register_module()
class NoteReads(Hook):
    """Lets :class:`OwnReads` know the iteration."""

    reads: OwnReads

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.reads.runner = runner

    def after_train_epoch(self, runner: Any) -> None:
        self.reads.runner = None


@pytest.mark.parametrize('poisoned', [(), (1,)], ids=['', 'the first step is skipped'])
@pytest.mark.parametrize('level', but(['O2', 'O4'], ['O1', 'O2', 'O3', 'O4', 'O5']))
def test_the_device_is_read_with_the_log_alone(
    level: str, poisoned: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NoteReads, 'reads', OwnReads(), raising=False)
    pushed: set[str] = set()
    update = DeviceLog.update

    def spy(log: DeviceLog, row: Any, names: Any, *more: Any) -> None:
        pushed.update(names)
        update(log, row, names, *more)

    monkeypatch.setattr(DeviceLog, 'update', spy)
    tolist = torch.Tensor.tolist

    def noted(tensor: torch.Tensor) -> Any:
        # on a CPU it goes past the mode
        NoteReads.reads.note()
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, 'tolist', noted)
    with NoteReads.reads:
        runner = toy.run(
            tmp_path,
            wrapper(level, optimizer=dict(type='FusedSGD', lr=0.01), clip_grad=dict(max_norm=1.0)),
            model=dict(type='PoisonedModel', poisoned=poisoned),
            custom_hooks=[dict(type='NoteReads'), *hook(interval=2, ranges_interval=None, diagnose_overflow=False)],
            default_hooks=dict(
                logger=dict(type='LoggerHook', interval=10), checkpoint=dict(type='CheckpointHook', interval=-1)
            ),
            val_cfg=None,
            val_dataloader=None,
            val_evaluator=None,
            **BY_ITERATION,
        )
    # the loader of 7 batches has an end, too
    assert set(NoteReads.reads.found) == {row['iter'] for row in scalars(runner)} == {7, 10, 20}, NoteReads.reads.found
    assert runner.optim_wrapper.device_log.transfers == 3
    updates = {'train/amp_update_lost', 'train/amp_update_spacing'}
    assert pushed & updates == (updates if level in ('O2', 'O5') else set())
    wanted = {name for name in NUMBERS if 'train/' + name in pushed} | {'grad_norm'}
    assert len(wanted) == (8 if level in ('O2', 'O5') else 6)
    assert all(wanted <= set(row) for row in scalars(runner))


def test_without_the_hook_there_is_nothing(tmp_path: Path) -> None:
    runner = toy.run(tmp_path, wrapper())
    assert runner.optim_wrapper._engine.parts.observers == []
    assert not set(NUMBERS) & set(scalars(runner)[0])


def test_everything_is_taken_off_at_the_end(tmp_path: Path) -> None:
    plain = toy.run(tmp_path / 'a', wrapper())
    watched = toy.run(tmp_path / 'b', wrapper(), custom_hooks=hook(diagnose_overflow=True))
    assert watched.optim_wrapper._engine.parts.observers == []

    def hooks(model: nn.Module) -> list[int]:
        return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]

    assert hooks(watched.model) == hooks(plain.model)


@pytest.mark.parametrize('accumulative_counts', [1, 2])
def test_a_report_beside_the_checkpoints(accumulative_counts: int, tmp_path: Path) -> None:
    runner = toy.run(
        tmp_path,
        wrapper(accumulative_counts=accumulative_counts),
        model=dict(type='PoisonedModel', poisoned=(3, 4, 9)),
        custom_hooks=hook(diagnose_overflow=True),
    )
    assert runner.iter == 14
    names = sorted(path.name for path in (tmp_path / 'amp_diagnosis').glob('*.json'))
    at = (3, 4, 9) if accumulative_counts == 1 else (4, 10)
    assert names == sorted(f'iter_{iteration}.json' for iteration in at)
    found = json.loads((tmp_path / 'amp_diagnosis' / names[0]).read_text())
    assert found['level'].startswith('O2')
    assert found['rank'] == 0
    page = (tmp_path / 'amp_diagnosis' / names[0].replace('.json', '.html')).read_text()
    assert found['text'].split('.')[0] in page.replace('&#39;', "'")


def test_the_folder_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / 'amp_diagnosis').write_text('in the way')
    runner = toy.run(
        tmp_path, wrapper(), model=dict(type='PoisonedModel', poisoned=(3,)), custom_hooks=hook(diagnose_overflow=True)
    )
    assert runner.iter == 14


def test_the_streak_error_ends_with_the_cause(tmp_path: Path) -> None:
    with pytest.raises(OverflowStreakError, match=r'Report: .*amp_diagnosis.*iter_\d+\.html'):
        toy.run(
            tmp_path,
            wrapper(max_consecutive_skips=4),
            model=dict(type='PoisonedModel', poisoned=tuple(range(3, 14))),
            custom_hooks=hook(),
        )


@pytest.mark.parametrize('flexible', [False, True], ids=['Runner', 'FlexibleRunner'])
def test_training_is_the_same_bit_for_bit(flexible: bool, tmp_path: Path) -> None:
    run = toy.run_flexible if flexible else toy.run
    runs = []
    for name, hooks in (('a', []), ('b', hook(interval=2, diagnose_overflow=True))):
        runner = run(
            tmp_path / name,
            wrapper(),
            model=dict(type='PoisonedModel', poisoned=(3, 4, 9)),
            custom_hooks=hooks,
        )
        runs.append([runner.model.state_dict(), runner.optim_wrapper.state_dict()])
    assert differences(runs[0], runs[1]) == []


@pytest.mark.parametrize('interval', [4, 7])
def test_a_resumed_run_measures_the_same_steps(interval: int, tmp_path: Path) -> None:
    """Two iterations a step: with 7, the measured step is that of iteration 8, after the checkpoint."""
    words = toy.everything('O2', max_epochs=2)
    # skipped before the end of the first epoch, iteration 7, and measured after it
    healthy = words['model']
    words['model'] = {**healthy, 'type': 'PoisonedModel', 'poisoned': (6,)}
    words['custom_hooks'] = [*words['custom_hooks'], *hook(interval=interval, diagnose_overflow=True)]
    whole = toy.run(tmp_path / 'whole', **words)
    stopped = words | dict(custom_hooks=[*words['custom_hooks'], dict(type='StopAt', epochs=1)])
    with pytest.raises(toy.Stop):
        toy.run(tmp_path / 'part', **stopped)
    # which counts from one again
    part = toy.run(tmp_path / 'part', **words | dict(model=healthy), resume=True)
    assert differences(whole.model.state_dict(), part.model.state_dict()) == []
    measured = {
        name: buffer.data[0].tolist()
        for name, buffer in whole.message_hub.log_scalars.items()
        if name.removeprefix('train/') in NUMBERS
    }
    assert set(measured) == {'train/' + name for name in NUMBERS}
    # of steps 2, 4, 6 to 8 and 10 to 12; or of 2, 4 to 8 and 10 to 14
    assert measured['train/amp_skip_rate'] == (
        [1.0, 1.0, 0.5, 0.0] if interval == 4 else [1.0, pytest.approx(2 / 3), 0.0]
    )
    for name, values in measured.items():
        assert part.message_hub.log_scalars[name].data[0].tolist() == values, name


def test_members_of_a_dict_have_their_name_in_front(tmp_path: Path) -> None:
    from mmengine.config import Config

    config = Config.fromfile(Path(__file__).resolve().parents[2] / 'configs' / 'digits' / 'gan_o2_o5.py')
    config.work_dir = str(tmp_path)
    config.train_cfg.max_epochs = 1
    config.model.generator.width = config.model.discriminator.width = 4
    config.custom_hooks = [*(config.get('custom_hooks') or []), *hook(interval=5, ranges_interval=5)]
    config.default_hooks = dict(logger=dict(type='LoggerHook', interval=1))
    config.log_level = 'WARNING'
    runner = Runner.from_cfg(config)
    runner.train()
    names = set(runner.message_hub.log_scalars)
    members = list(runner.optim_wrapper.keys())
    assert len(members) == 2
    for member in members:
        assert f'train/{member}_amp_grad_peak' in names
        assert (Path(runner.log_dir) / 'vis_data' / f'{member}_amp_ranges.jsonl').exists()


def test_it_is_found_by_its_name() -> None:
    assert isinstance(HOOKS.build(dict(type='amp_wrapper.AmpMonitorHook', interval=10)), AmpMonitorHook)


def test_numbers_of_numpy() -> None:
    words: Any = dict(interval=np.int64(5), ranges_interval=np.int32(10), max_reports=np.int64(2))
    made = AmpMonitorHook(**words)
    assert [type(value) for value in (made._interval, made._ranges_interval, made._max_reports)] == [int, int, int]


@pytest.mark.parametrize(
    'words',
    [dict(interval=0), dict(ranges_interval=-1), dict(diagnose_overflow='yes'), dict(interval=np.bool_(True))],
    ids=str,
)
def test_wrong_arguments(words: dict[str, Any]) -> None:
    with pytest.raises(AmpConfigError, match=next(iter(words))):
        AmpMonitorHook(**words)
