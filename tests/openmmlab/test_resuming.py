"""Resuming through mmengine: the newest complete file, checked as a whole before any of it is applied."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_checkpoints
import pytest
import torch
import toy
from bits import differences
from mmengine.runner import FlexibleRunner, Runner

from amp_wrapper import AmpCheckpointError
from amp_wrapper.openmmlab.patches import resuming

OURS = dict(type='AmpOptimWrapper', opt_level='O2', optimizer=dict(type='SGD', lr=0.1))
STOCK = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1))
LONGER = dict(train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=1))


@pytest.fixture(scope='module')
def target(tmp_path_factory: pytest.TempPathFactory) -> fuzz_checkpoints.Target:
    """A runner at one checkpoint that can be asked to resume from damaged copies of another."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    return fuzz_checkpoints.Target('O2', tmp_path_factory.mktemp('target'), attached=True)


def _set(*path: Any, to: Any) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        for step in path[:-1]:
            file = file[step]
        file[path[-1]] = to

    return change


def _drop(*path: Any) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        for step in path[:-1]:
            file = file[step]
        del file[path[-1]]

    return change


def _rename(*path: Any, to: Any) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        for step in path[:-1]:
            file = file[step]
        file[to] = file.pop(path[-1])

    return change


SCALER = ('optimizer', 'loss_scaler')
AMP = ('optimizer', 'amp')
DAMAGE: list[tuple[Callable[[Any], None], str]] = [
    # missing and superfluous keys
    (_drop('state_dict'), "no key 'state_dict'"),
    (_drop('optimizer'), r"no key 'optimizer' .*load the weights alone"),
    (_drop('message_hub'), "no key 'message_hub'"),
    (_drop('meta'), "no key 'meta'"),
    (_drop('meta', 'iter'), r"meta\['iter'\]=None"),
    (_drop('state_dict', 'fc.weight'), "state_dict lacks 'fc.weight'"),
    (_set('state_dict', 'extra', to=torch.ones(1)), "state_dict has 'extra', which the model has not"),
    (_drop('ema_state_dict', 'module.fc.weight'), "ema_state_dict lacks 'fc.weight'"),
    (_drop('ema_state_dict', 'steps'), "ema_state_dict lacks 'steps'"),
    (_rename('optimizer', 'state', 0, 'momentum_buffer', to='buffer'), r"'state'\[0\] lacks 'momentum_buffer'"),
    (_set('optimizer', 'state', 99, to={}), "'state' has 99, which no parameter group has"),
    (_drop('optimizer', 'param_groups', 0, 'momentum'), r"'param_groups'\[0\] lacks 'momentum'"),
    (_drop(*AMP, 'loss_scalers'), r"amp\['loss_scalers'\]"),
    (_drop('param_schedulers', 0, 'last_step'), r"param_schedulers\[0\] lacks 'last_step'"),
    (_set('param_schedulers', 0, 'something', to=1), r"param_schedulers\[0\] has an unknown 'something'"),
    (_drop('message_hub', 'log_scalars'), r"message_hub\['log_scalars'\] must be a dict"),
    (
        _set('message_hub', 'runtime_info', 'amp_monitor', to={'': [4, 'x', 0, 0, 0]}),
        r"runtime_info'\]\['amp_monitor'\]\[''\].* must be five whole numbers",
    ),
    (_drop('exact_resume', 'ranks'), r"exact_resume\['ranks'\] must be a list"),
    # shapes and dtypes
    (
        _set('state_dict', 'fc.weight', to=torch.ones(2, 2)),
        r"state_dict\['fc.weight'\] has shape \(2, 2\), but the model",
    ),
    (_set('state_dict', 'fc.weight', to=torch.ones(3, 4, dtype=torch.int64)), r"'fc.weight'\] is torch.int64"),
    (_set('state_dict', 'fc.weight', to=[1.0]), r"'fc.weight'\] must be a tensor, but is list"),
    (
        _set('ema_state_dict', 'module.fc.weight', to=torch.ones(1)),
        r"ema_state_dict\['module.fc.weight'\] has shape \(1,\)",
    ),
    (_set('ema_state_dict', 'steps', to=torch.ones(3)), r"ema_state_dict\['steps'\]"),
    (_set('optimizer', 'state', 0, 'momentum_buffer', to=torch.ones(7)), r"\['momentum_buffer'\] has shape \(7,\)"),
    (_set('optimizer', 'state', 0, 'momentum_buffer', to=torch.tensor(1.0)), r"\['momentum_buffer'\] has shape \(\)"),
    (_set('optimizer', 'state', 0, 'momentum_buffer', to='x'), r'must be a floating tensor, but is str'),
    # values
    (_set(*SCALER, 'scale', to=math.nan), r"loss_scaler'?\]?\['scale'\]=nan must be a positive finite number"),
    (_set(*AMP, 'loss_scalers', 0, 'scale', to=math.nan), r"amp\['loss_scalers'\]\[0\].*nan"),
    (_set(*AMP, 'loss_scalers', 0, 'skips', to=-1), r"\['skips'\]=-1 must be a whole number of at least 0"),
    (_set(*AMP, 'loss_scalers', 0, '_growth_tracker', to=-3), r"_growth_tracker'\]=-3"),
    (_set(*AMP, 'inner_count', to=-1), r"amp\['inner_count'\]=-1"),
    (_set('meta', 'epoch', to=-1), r"meta\['epoch'\]=-1"),
    (_set('meta', 'iter', to=True), r"meta\['iter'\]=True"),
    (_set('meta', 'seed', to='7'), r"meta\['seed'\]='7'"),
    (_set('optimizer', 'param_groups', 0, 'lr', to=math.nan), r"'param_groups'\[0\]\['lr'\]=nan"),
    (_set('optimizer', 'param_groups', 0, 'lr', to='0.1'), r"'param_groups'\[0\]\['lr'\]='0.1' must be a number"),
    (_set('param_schedulers', 0, 'last_step', to=-2), r"\['last_step'\]=-2 must be a whole number of at least -1"),
    (_set('param_schedulers', 0, '_global_step', to=0.5), r"\['_global_step'\]=0.5 must be a whole number"),
    (_set('param_schedulers', 0, 'begin', to=math.nan), r"param_schedulers\[0\]\['begin'\]=nan must be a number"),
    (_set('param_schedulers', 0, 'base_values', to=[0.1]), r"\['base_values'\]=\[0.1\] must be a list of \d numbers"),
    (_set('param_schedulers', 0, 'by_epoch', to=True), r"\['by_epoch'\]=True must be False"),
    (_set('param_schedulers', 0, 'start_factor', to=math.inf), r"\['start_factor'\]=inf must be a number"),
    (_set('param_schedulers', 1, 'T_max', to=0), r"\['T_max'\]=0 must be a number other than 0"),
    (_set('param_schedulers', 1, 'verbose', to='no'), r"\['verbose'\]='no' must be True or False"),
    (_set('exact_resume', 'batches', to=torch.zeros(0)), r"exact_resume\['batches'\] must be a whole number"),
    (_set('exact_resume', 'batches', to=-1), r"exact_resume\['batches'\] must be a whole number"),
    (
        _set('exact_resume', 'ranks', 0, 'now', 'torch', to=torch.zeros(5, dtype=torch.uint8)),
        r"\['torch'\] is no state",
    ),
    (_set('message_hub', 'runtime_info', 'best_score', to='high'), r"\['best_score'\]='high' must be a number"),
    # formats of the future
    (_set(*AMP, 'version', to=2), r"amp\['version'\]=2 comes from a newer amp_wrapper"),
    (_set('exact_resume', 'version', to=9), r"exact_resume\['version'\]=9 comes from a newer amp_wrapper"),
    # numbers and names of groups
    (lambda file: file['optimizer']['param_groups'].pop(), r'parameter groups and the optimizer'),
    (lambda file: file['optimizer']['param_groups'][0]['params'].append(77), r'parameter group 0 has 2 parameters'),
    (_rename('optimizer', 'param_groups', 0, 'lr', to='learning_rate'), r"lacks 'lr' \(found: .*learning_rate"),
    (_rename('optimizer', 'param_groups', to='groups'), "no key 'param_groups'"),
    (lambda file: file['param_schedulers'].pop(), r'param_schedulers has 1 entries, but 2 schedulers'),
    # what mmengine would execute
    (_set('meta', 'config', to='import os'), r"meta\['config'\] holds a text that mmengine would execute"),
]


@pytest.mark.parametrize(('change', 'words'), DAMAGE, ids=lambda value: value[:40] if isinstance(value, str) else None)
def test_damage_is_named_before_anything_changes(
    target: fuzz_checkpoints.Target, tmp_path: Path, change: Callable[[Any], None], words: str
) -> None:
    file = copy.deepcopy(target.content)
    change(file)
    path = tmp_path / 'damaged.pth'
    torch.save(file, path)
    with pytest.raises(AmpCheckpointError, match=words) as caught:
        target.runner.resume(str(path))
    assert str(path) in str(caught.value)
    assert differences(target.here, target.state()) == []


def test_the_same_file_undamaged_is_taken(target: fuzz_checkpoints.Target) -> None:
    target.resumed(target.names['there'])
    assert differences(target.there, target.state()) == []
    target.resumed(target.names['here'])


def test_a_model_that_loads_in_its_own_way_is_left_to_itself(tmp_path: Path) -> None:
    from amp_wrapper.checkpoint import validate as checkpoint_judge

    class Migrates(torch.nn.Linear):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
            state_dict[prefix + 'weight'] = state_dict.pop(prefix + 'kernel')
            super()._load_from_state_dict(state_dict, prefix, *args)

    model = torch.nn.Sequential(Migrates(2, 2), torch.nn.Linear(2, 2))
    state = dict(model.state_dict())
    state['0.kernel'] = state.pop('0.weight')
    checkpoint_judge.check_model(state, model)
    state['1.kernel'] = state.pop('1.weight')
    with pytest.raises(AmpCheckpointError, match=r"lacks '1\.weight'"):
        checkpoint_judge.check_model(state, model)


@pytest.mark.parametrize('runner_type', [Runner, FlexibleRunner])
def test_damaged_files_end_a_training_before_it_begins(tmp_path: Path, runner_type: Any) -> None:
    toy.run(tmp_path / 'work', OURS)
    path = tmp_path / 'work' / 'epoch_2.pth'
    file = torch.load(path, weights_only=True)
    del file['state_dict']['bn.weight']
    torch.save(file, path)
    cfg = toy.toy_config(tmp_path / 'again', OURS, resume=True, load_from=str(path), **LONGER)
    if runner_type is FlexibleRunner:
        cfg.strategy = dict(type='SingleDeviceStrategy')
        cfg.randomness, cfg.env_cfg = dict(seed=0), {}
    with pytest.raises(AmpCheckpointError, match=r"epoch_2\.pth cannot be resumed from: state_dict lacks 'bn\.weight'"):
        runner_type.from_cfg(cfg).train()


@pytest.mark.parametrize('resume', [True, False])
def test_truncated_and_malicious_files_are_refused(
    tmp_path: Path, resume: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')
    mark, path = tmp_path / 'hacked', tmp_path / 'file.pth'

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f'touch {mark}',)

    torch.save({'state_dict': {}, 'x': Evil()}, path)
    with pytest.raises(AmpCheckpointError, match=r'file\.pth is refused: it asks for code to run'):
        toy.run(tmp_path / 'work', OURS, load_from=str(path), resume=resume)
    assert not mark.exists()
    torch.save({'state_dict': {'conv.weight': torch.zeros(4, 1, 3, 3)}}, path)
    data = bytearray(path.read_bytes())
    data[data.find(bytes(100)) + 50] ^= 1
    path.write_bytes(data)
    # torch alone would load the changed weight
    with pytest.raises(AmpCheckpointError, match='does not have the checksum'):
        toy.run(tmp_path / 'work', OURS, load_from=str(path), resume=resume)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(AmpCheckpointError, match=r'file\.pth is truncated'):
        toy.run(tmp_path / 'work', OURS, load_from=str(path), resume=resume)


def test_weights_alone_may_be_of_another_model(tmp_path: Path) -> None:
    """Fine-tuning: load_from without resume stays as lenient as mmengine has it."""
    torch.save({'state_dict': {'conv.weight': torch.zeros(4, 1, 3, 3), 'other': torch.ones(1)}}, tmp_path / 'file.pth')
    runner = toy.run(tmp_path / 'work', OURS, load_from=str(tmp_path / 'file.pth'))
    assert runner.iter == 14
    with pytest.raises(AmpCheckpointError, match=r"no key 'meta'.*load the weights alone"):
        toy.run(tmp_path / 'work', OURS, load_from=str(tmp_path / 'file.pth'), resume=True)


def test_scripts_without_mmengine_are_sent_to_the_converter(tmp_path: Path) -> None:
    torch.save({'model': {}, 'optimizer': {}, 'amp': {}}, tmp_path / 'file.pth')
    with pytest.raises(AmpCheckpointError, match='amp-wrapper convert --to stock'):
        toy.run(tmp_path / 'work', OURS, load_from=str(tmp_path / 'file.pth'), resume=True)


# -- which file --------------------------------------------------------------------------------------------------------


def test_broken_files_are_passed_over_and_named(tmp_path: Path) -> None:
    toy.run(tmp_path, OURS, **LONGER)
    for name, data in (('epoch_3.pth', b'PK\x03\x04'), ('epoch_9.pth', b'')):
        (tmp_path / name).write_bytes(data)
    with toy.run_log() as lines:
        runner = toy.run(tmp_path, OURS, resume=True, log_level='INFO', **LONGER)
    assert runner.epoch == 3
    assert sum('amp: passed over' in line for line in lines) == 2
    assert any(f'amp: resuming from {(tmp_path / "epoch_2.pth").resolve()}' in line for line in lines)


def test_nothing_there_begins_anew_and_nothing_complete_is_an_error(tmp_path: Path) -> None:
    with toy.run_log() as lines:
        assert toy.run(tmp_path, OURS, resume=True, log_level='INFO').epoch == 2
    assert any('nothing to resume from' in line for line in lines)
    for path in tmp_path.glob('*.pth'):
        path.write_bytes(b'PK')
    with pytest.raises(AmpCheckpointError, match=r'no checkpoint in .* is complete .*To start anew, remove them'):
        toy.run(tmp_path, OURS, resume=True)


def test_nothing_changes_without_a_wrapper_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError('a run without a wrapper of ours was judged')

    monkeypatch.setattr(resuming, 'validate_file', never)
    monkeypatch.setattr(resuming, 'choose_newest', never)
    monkeypatch.setattr(resuming.checkpoint_file, 'verify', never)
    toy.run(tmp_path, STOCK)
    runner = toy.run(tmp_path, STOCK, resume=True, **LONGER)
    assert runner.epoch == 3
