"""Damaged checkpoints, and those of something else, are refused in words before anything of them is applied."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from bits import differences
from damage import APEX, BYTES, FILE, STATE, with_code, with_flipped_bit
from mmengine.runner import Runner
from torch import nn

from amp_wrapper import AmpCheckpointError, AmpOptimWrapper
from amp_wrapper.cli import main

SGD = dict(type='SGD', lr=0.1, momentum=0.9)


@pytest.fixture(scope='module')
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, Path]:
    """A runner with an average and a schedule, and its last checkpoint."""
    folder = tmp_path_factory.mktemp('trained')
    runner = toy.run(
        folder,
        dict(type='AmpOptimWrapper', opt_level='O2', optimizer=SGD),
        train_dataloader=toy.loader(batch_size=2, length=4),
        val_dataloader=toy.loader(length=2, shuffle=False),
        custom_hooks=[dict(type='EMAHook')],
        param_scheduler=[dict(type='CosineAnnealingLR', T_max=4)],
        # what hooks are told of a resume
        resume=True,
    )
    return runner, folder / 'epoch_2.pth'


def snapshot(runner: Runner) -> Any:
    model = {key: value.clone() for key, value in runner.model.state_dict().items()}
    return copy.deepcopy((model, runner.optim_wrapper.state_dict(), runner.epoch, runner.iter))


def refusals(load: Callable[[Any], Any], damages: dict[str, tuple[Callable[[Any], Any], str]]) -> list[str]:
    """What is wrong with the errors of loading: each damage has to end in one with its word."""
    found = []
    for name, (change, word) in damages.items():
        try:
            load(change)
        except AmpCheckpointError as error:
            if word not in str(error):
                found.append(f'{name}: {word!r} is not in: {error}')
        else:
            found.append(f'{name}: taken')
    return found


# -- files ------------------------------------------------------------------------------------------------------------


def test_damaged_bytes_are_refused_by_runners(trained: tuple[Runner, Path], tmp_path: Path) -> None:
    runner, source = trained
    before, content, path = snapshot(runner), source.read_bytes(), tmp_path / 'a.pth'
    weight = torch.load(source, weights_only=True)['state_dict']['fc.weight']
    flipped = {
        'a flipped bit': (lambda content: with_flipped_bit(content, weight), 'checksum'),
        'in its name': (lambda content: content[:500], str(path)),
    }
    for load in (runner.resume, runner.load_checkpoint):

        def read(change: Callable[[Any], Any], load: Any = load) -> None:
            path.write_bytes(change(content))
            load(str(path))

        assert refusals(read, {**BYTES, **flipped}) == []
        with pytest.raises(FileNotFoundError, match=r'b\.pth'):
            load(str(tmp_path / 'b.pth'))
    assert differences(before, snapshot(runner)) == []


def test_code_in_a_file_is_never_run(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    # what mmengine's own checkpoints need without this package
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')
    path, mark = tmp_path / 'a.pth', tmp_path / 'mark'
    for archive in (True, False):
        path.write_bytes(with_code(mark, archive))
        for call in (trained[0].resume, trained[0].load_checkpoint):
            with pytest.raises(AmpCheckpointError, match=r'a\.pth is refused: it asks for code to run.*mkdir'):
                call(str(path))
        assert main(['convert', str(path), '--inspect']) == 1
        assert 'code to run' in capsys.readouterr().err and not mark.exists()


def test_config_in_a_file_is_never_executed(trained: tuple[Runner, Path], tmp_path: Path) -> None:
    """mmcv 1 wrote the text of its config to ``meta``, and mmengine would run it."""
    file = torch.load(trained[1], weights_only=True)
    file['meta']['config'] = f"import os\nos.mkdir('{tmp_path / 'mark'}')"
    torch.save(file, tmp_path / 'a.pth')
    with contextlib.suppress(AmpCheckpointError):
        trained[0].resume(str(tmp_path / 'a.pth'))
    assert not (tmp_path / 'mark').exists()


def test_every_flipped_byte_is_refused_or_harmless(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / 'a.pth', tmp_path / 'out.pth'
    content = {'x': torch.arange(300.0), 'y': torch.ones(3)}
    torch.save(content, path)
    data = path.read_bytes()
    refused = 0
    places = range(0, len(data), 13)
    for position in places:
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :])
        if main(['convert', str(path), '--to', 'fp32', str(out)]):
            refused += str(path) in capsys.readouterr().err
        else:
            assert differences(torch.load(out, weights_only=True)['state_dict'], content) == [], position
    # the numbers alone are more than a third of the file
    assert refused > len(places) / 3


# -- their content ----------------------------------------------------------------------------------------------------


def test_damaged_checkpoints_are_refused_by_runners(trained: tuple[Runner, Path], tmp_path: Path) -> None:
    """The whole file is checked before any of it is applied, and the error names the file."""
    runner, source = trained
    path, before = tmp_path / 'a.pth', snapshot(runner)

    def resume(change: Callable[[Any], Any]) -> None:
        file = torch.load(source, weights_only=True)
        change(file)
        torch.save(file, path)
        try:
            runner.resume(str(path))
        except AmpCheckpointError as error:
            if str(path) not in str(error):
                raise AmpCheckpointError('the file is not named') from error
            raise

    damages = dict(FILE)
    for name in ('a group without parameters', 'a newer format', 'another optimizer'):
        change, word = STATE[name]
        damages[f'optimizer: {name}'] = (lambda file, change=change: change(file['optimizer'])), word
    assert refusals(resume, damages) == []
    assert differences(before, snapshot(runner)) == []
    resume(lambda file: None)
    assert runner.epoch == 2


def test_only_what_is_wanted_has_to_be_there(trained: tuple[Runner, Path], tmp_path: Path) -> None:
    file = torch.load(trained[1], weights_only=True)
    for key in ('optimizer', 'param_schedulers', 'ema_state_dict'):
        file.pop(key)
    torch.save(file, tmp_path / 'a.pth')
    runner = trained[0]
    runner.resume(str(tmp_path / 'a.pth'), resume_optimizer=False)
    assert runner.iter == file['meta']['iter']
    # files of older versions of mmengine lack words of schedulers
    file = torch.load(trained[1], weights_only=True)
    del file['param_schedulers'][0]['verbose'], file['param_schedulers'][0]['eta_min_ratio']
    torch.save(file, tmp_path / 'a.pth')
    runner.resume(str(tmp_path / 'a.pth'))
    assert runner.param_schedulers[0].last_step == file['param_schedulers'][0]['last_step']


# -- the optimizer's part ---------------------------------------------------------------------------------------------


def wrapper_of(level: str = 'O2', losses: int = 2) -> tuple[nn.Module, AmpOptimWrapper]:
    """Two groups; after two steps, with a gradient of each loss that waits for the third."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    groups = [dict(params=[model[0].weight, model[0].bias]), dict(params=list(model[1].parameters()), lr=0.5)]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    scale = dict(init_scale=8.0, growth_interval=2)
    wrapper = AmpOptimWrapper(
        opt_level=level, optimizer=optimizer, num_losses=losses, loss_scale=scale, accumulative_counts=4
    )
    wrapper.initialize_count_status(model, 0, 100)
    for index in range(10):
        with wrapper.optim_context(model):
            loss = model(torch.full((2, 3), index / 8.0)).float().square().mean()
        wrapper.update_params(loss, loss_id=index % losses)
    return model, wrapper


def reread(content: Any) -> Any:
    file = io.BytesIO()
    torch.save(content, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def loading(wrapper: AmpOptimWrapper, good: dict[str, Any], part: str = '') -> Callable[[Callable[[Any], Any]], None]:
    """Changes a copy of a state, or of a part of it, and loads that; what is loaded stays as it is."""

    def load(change: Callable[[Any], Any]) -> None:
        state = copy.deepcopy(good)
        change(state[part] if part else state)
        kept = copy.deepcopy(state)
        try:
            wrapper.load_state_dict(state)
        finally:
            assert differences(kept, state) == []

    return load


def test_states_of_wrappers_come_back_and_damaged_ones_are_refused_by_wrappers() -> None:
    (_, wrapper), (_, again) = wrapper_of(), wrapper_of()
    good = reread(wrapper.state_dict())
    again.load_state_dict(copy.deepcopy(good))
    assert differences(good, reread(again.state_dict())) == []
    assert [scaler['scale'] for scaler in good['amp']['loss_scalers']] == [16.0, 16.0]
    assert {'gradients', 'unscaled', 'used', 'found_inf'} <= good['amp']['window'].keys()
    assert refusals(loading(wrapper, good), STATE) == []
    assert differences(good, reread(wrapper.state_dict())) == []
    for state in (None, [], 'text', 3):
        with pytest.raises(AmpCheckpointError, match='must be a dict'):
            wrapper.load_state_dict(state)


def test_damaged_states_of_apex_are_refused() -> None:
    """mmengine's ApexOptimWrapper writes ``apex_amp``; scripts that merge apex's state into the optimizer's, ``amp``."""
    _, wrapper = wrapper_of()
    own = wrapper.state_dict()
    bare = {name: own[name] for name in ('state', 'param_groups')}
    saved = {
        'loss_scaler0': {'loss_scale': 4096.0, 'unskipped': 3},
        'loss_scaler1': {'loss_scale': 0.5, 'unskipped': 1},
    }
    for key in ('apex_amp', 'amp'):
        load = loading(wrapper, {**bare, key: saved}, key)
        load(lambda state: None)
        assert [scaler.get_scale() for scaler in wrapper.loss_scalers] == [4096.0, 0.5]
        before = copy.deepcopy(wrapper.state_dict())
        assert refusals(load, APEX) == []
        assert differences(before, wrapper.state_dict()) == []
    for name in ('loss_scaler', 'amp'):
        # which of two scales was the last is nobody's to guess
        with pytest.raises(AmpCheckpointError, match='remove'):
            wrapper.load_state_dict({**bare, 'apex_amp': saved, name: own[name]})
    assert differences(before, wrapper.state_dict()) == []
