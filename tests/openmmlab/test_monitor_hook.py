"""``AmpMonitorHook`` in whole trainings: names in the log, files, reports, resumes, several optimizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import toy
from bits import differences
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import nn

from amp_wrapper import AmpConfigError, OverflowStreakError
from amp_wrapper.diagnostics.measured_numbers import NUMBERS
from amp_wrapper.openmmlab.monitor_hook import AmpMonitorHook

SGD = dict(type='SGD', lr=0.01)


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
    # a new measurement at iterations 1, 6 and 11, and the last one in between
    peaks = [line['amp_grad_peak'] for line in logged]
    assert peaks[0] == peaks[4] != peaks[5] == peaks[9] != peaks[10]
    ranges = lines(Path(runner.log_dir) / 'vis_data' / 'amp_ranges.jsonl')
    assert [line['iteration'] for line in ranges] == [1, 11]
    assert 'conv.weight' in ranges[0]['gradients']


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


def test_a_resumed_run_measures_the_same_steps(tmp_path: Path) -> None:
    words = toy.everything('O2', max_epochs=2)
    words['custom_hooks'] = [*words['custom_hooks'], *hook(interval=4, diagnose_overflow=True)]
    whole = toy.run(tmp_path / 'whole', **words)
    stopped = words | dict(custom_hooks=[*words['custom_hooks'], dict(type='StopAt', epochs=1)])
    with pytest.raises(toy.Stop):
        toy.run(tmp_path / 'part', **stopped)
    part = toy.run(tmp_path / 'part', **words, resume=True)
    assert differences(whole.model.state_dict(), part.model.state_dict()) == []
    measured = {
        name: buffer.data[0].tolist()
        for name, buffer in whole.message_hub.log_scalars.items()
        if name.removeprefix('train/') in NUMBERS and 'rate' not in name
    }
    assert set(measured) >= {'train/amp_grad_peak', 'train/amp_update_lost'}
    for name, values in measured.items():
        assert part.message_hub.log_scalars[name].data[0].tolist() == values, name


def test_members_of_a_dict_have_their_name_in_front(tmp_path: Path) -> None:
    from mmengine.config import Config

    config = Config.fromfile(Path(__file__).resolve().parents[2] / 'configs' / 'digits' / 'gan_o2_o5.py')
    config.work_dir = str(tmp_path)
    config.train_cfg.max_epochs = 1
    config.custom_hooks = [*(config.get('custom_hooks') or []), *hook(interval=5, diagnose_overflow=True)]
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


@pytest.mark.parametrize(
    'words', [dict(interval=0), dict(ranges_interval=-1), dict(diagnose_overflow='yes'), dict(interval='10')], ids=str
)
def test_wrong_arguments(words: dict[str, Any]) -> None:
    with pytest.raises(AmpConfigError, match=next(iter(words))):
        AmpMonitorHook(**words)
