"""Dict to dict: what is written, what is read, and what damage looks like."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import identical
from torch import nn

from amp_wrapper import checkpoint
from amp_wrapper.checkpoint import FORMAT_VERSION, Window
from amp_wrapper.engine.loss_scale import LossScaler
from amp_wrapper.errors import AmpCheckpointError
from amp_wrapper.policy import resolve
from amp_wrapper.policy.loss_scale import LossScaleConfig


def optimizer_state(device: torch.device) -> dict[str, Any]:
    parameters = [nn.Parameter(torch.ones(2, device=device)), nn.Parameter(torch.ones(3, device=device))]
    optimizer = torch.optim.Adam([{'params': parameters[:1]}, {'params': parameters[1:], 'lr': 0.5}], lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


def scaler_state(scale: float = 8.0) -> dict[str, Any]:
    scaler = LossScaler(LossScaleConfig(init_scale=scale, growth_interval=9, growth_factor=3.0, hysteresis=2))
    for bad in (1.0, 0.0, 0.0, 1.0):
        scaler.update(torch.tensor(bad))
    return scaler.state_dict()


def window(device: torch.device) -> Window:
    return Window([torch.full((2,), 0.5, device=device, dtype=torch.float16), None], True, [True, False], [1.0, 0.0])


def written(device: torch.device, stock_shaped: bool = False, open_window: bool = True) -> dict[str, Any]:
    level = 'O1' if stock_shaped else 'O2'
    count = 1 if stock_shaped else 2
    return checkpoint.write(
        optimizer_state(device),
        resolve(level, num_losses=count, verbosity=0).to_dict(),
        [scaler_state(8.0 * 2**index) for index in range(count)],
        window(device) if open_window and not stock_shaped else None,
        stock_shaped,
    )


def reload(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# -- round trips --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('saved', [False, True])
def test_round_trip(saved: bool, device: torch.device) -> None:
    state = written(device)
    read = checkpoint.read(reload(state) if saved else state)
    assert read.kind == 'own' and read.opt_level == 'O2'
    assert identical(read.optimizer, optimizer_state(device))
    assert read.properties == resolve('O2', num_losses=2, verbosity=0).to_dict()
    assert list(read.loss_scalers) == [scaler_state(8.0), scaler_state(16.0)]
    assert read.window is not None
    expected = window(device)
    assert identical(list(read.window.gradients), list(expected.gradients))
    assert (read.window.unscaled, list(read.window.used)) == (True, [True, False])
    assert list(read.window.found_inf) == [1.0, 0.0]


def test_our_form(device: torch.device) -> None:
    state = written(device)
    assert list(state) == ['state', 'param_groups', 'loss_scaler', 'amp']
    assert state['loss_scaler'] == scaler_state(8.0)
    assert state['amp']['version'] == FORMAT_VERSION == 1 and state['amp']['opt_level'] == 'O2'
    assert set(state['amp']) == {'version', 'opt_level', 'properties', 'loss_scalers', 'window'}
    assert 'window' not in written(device, open_window=False)['amp']
    assert checkpoint.read(written(device, open_window=False)).window is None


@pytest.mark.parametrize('saved', [False, True])
def test_stock_shaped_form(saved: bool, device: torch.device) -> None:
    state = written(device, stock_shaped=True)
    state = reload(state) if saved else state
    assert list(state) == ['state', 'param_groups', 'loss_scaler']
    theirs = torch.amp.GradScaler(device.type)
    theirs.load_state_dict(state['loss_scaler'])
    assert theirs.get_scale() == scaler_state()['scale'] and theirs.get_growth_interval() == 9
    read = checkpoint.read(state)
    assert read.kind == 'own' and read.opt_level == 'O1' and list(read.loss_scalers) == [scaler_state()]
    assert identical(read.optimizer, optimizer_state(device))


def test_accumulated_gradients_in_a_stock_shaped_form(device: torch.device) -> None:
    single = Window([None, torch.ones(3, device=device)], False, [True], [0.0])
    state = checkpoint.write(optimizer_state(device), resolve('O1').to_dict(), [scaler_state()], single, True)
    read = checkpoint.read(reload(state)).window
    assert read is not None and read.unscaled is False and read.gradients[0] is None
    assert torch.equal(read.gradients[1], torch.ones(3, device=device))


def test_stock_amp_optim_wrapper(device: torch.device) -> None:
    theirs = torch.amp.GradScaler(device.type, init_scale=64.0)
    state = {**optimizer_state(device), 'loss_scaler': theirs.state_dict()}
    read = checkpoint.read(state)
    assert (read.kind, read.opt_level, read.properties, read.window) == ('torch', 'O1', None, None)
    assert list(read.loss_scalers) == [theirs.state_dict()] and identical(read.optimizer, optimizer_state(device))


def test_plain_optimizer(device: torch.device) -> None:
    read = checkpoint.read(optimizer_state(device))
    assert (read.kind, read.opt_level, list(read.loss_scalers), read.window) == ('plain', None, [], None)
    assert identical(read.optimizer, optimizer_state(device))


@pytest.mark.parametrize('stock_shaped', [False, True])
def test_inputs_are_not_changed(stock_shaped: bool, device: torch.device) -> None:
    optimizer, properties, scaler = optimizer_state(device), resolve('O1').to_dict(), scaler_state()
    kept = copy.deepcopy((optimizer, properties, scaler))
    state = checkpoint.write(optimizer, properties, [scaler], None, stock_shaped)
    assert identical((optimizer, properties, scaler), kept)
    before = copy.deepcopy(state)
    read = checkpoint.read(state)
    read.optimizer.pop('param_groups')
    assert identical(state, before)
    state['loss_scaler']['scale'] = -1.0
    assert identical(scaler, kept[2])


# -- damage -------------------------------------------------------------------------------------------------------

Damage = Callable[[dict[str, Any]], Any]


def put(*path: Any) -> Damage:
    """A function that writes the last element of ``path`` at the keys before it."""

    def damage(state: dict[str, Any]) -> None:
        *keys, last, value = path
        for key in keys:
            state = state[key]
        state[last] = value

    return damage


def drop(*path: Any) -> Damage:
    def damage(state: dict[str, Any]) -> None:
        *keys, last = path
        for key in keys:
            state = state[key]
        del state[last]

    return damage


DAMAGE: list[tuple[Damage, list[str]]] = [
    (drop('state'), ["'state'"]),
    (drop('param_groups'), ["'param_groups'"]),
    (put('state', 5), ["'state'"]),
    (put('param_groups', None), ["'param_groups'"]),
    (put('param_groups', 0, 'text'), ["'param_groups'"]),
    (drop('param_groups', 1, 'params'), ["'params'"]),
    (put('loss_scaler', 3), ['loss_scaler', 'int']),
    (put('loss_scaler', 'scale', math.nan), ["'scale'", 'nan']),
    (drop('loss_scaler', 'scale'), ["'scale'"]),
    (drop('loss_scaler', '_growth_tracker'), ["'_growth_tracker'"]),
    (put('amp', [1]), ['amp', 'list']),
    (put('amp', 'text'), ['amp', 'str']),
    (put('amp', {}), ["amp['version']"]),
    (drop('amp', 'version'), ['amp', 'version']),
    (put('amp', 'version', 0), ["amp['version']=0"]),
    (put('amp', 'version', 1.0), ["amp['version']=1.0"]),
    (put('amp', 'version', True), ["amp['version']=True"]),
    (put('amp', 'version', None), ["amp['version']=None"]),
    (put('amp', 'version', 2), ["amp['version']=2", 'newer', 'upgrade']),
    (drop('amp', 'opt_level'), ["amp['opt_level']"]),
    (put('amp', 'opt_level', 2), ["amp['opt_level']=2"]),
    (drop('amp', 'properties'), ["amp['properties']"]),
    (put('amp', 'properties', 'O2'), ["amp['properties']='O2'"]),
    (put('amp', 'properties', 'loss_scale', 3), ['loss_scale']),
    (drop('amp', 'loss_scalers'), ["amp['loss_scalers']"]),
    (put('amp', 'loss_scalers', []), ["amp['loss_scalers']", 'empty']),
    (put('amp', 'loss_scalers', {'scale': 1.0}), ["amp['loss_scalers']"]),
    (put('amp', 'loss_scalers', 1, 'scale', math.inf), ["amp['loss_scalers'][1]", "'scale'", 'inf']),
    (drop('amp', 'loss_scalers', 1, 'scale'), ["amp['loss_scalers'][1]", "'scale'"]),
    (put('amp', 'loss_scalers', 0, None), ["amp['loss_scalers'][0]"]),
    (put('amp', 'loss_scalers', 0, 'steps', -4), ["'steps'", '-4']),
    (put('amp', 'loss_scalers', 0, 'skips', 'two'), ["'skips'"]),
    (put('amp', 'loss_scalers', 0, 'consecutive_skips', 1.5), ["'consecutive_skips'"]),
    (put('amp', 'loss_scalers', 0, 'hysteresis_tracker', None), ["'hysteresis_tracker'"]),
    (put('amp', 'loss_scalers', 0, '_growth_tracker', -1), ["'_growth_tracker'"]),
    (put('amp', 'window', 'open'), ["amp['window']", 'str']),
    (drop('amp', 'window', 'gradients'), ["amp['window']['gradients']", '2']),
    (put('amp', 'window', 'gradients', [None]), ["amp['window']['gradients']", '2']),
    (put('amp', 'window', 'gradients', 1, 0.5), ["amp['window']['gradients'][1]"]),
    (drop('amp', 'window', 'unscaled'), ["amp['window']['unscaled']"]),
    (put('amp', 'window', 'unscaled', 1), ["amp['window']['unscaled']"]),
    (drop('amp', 'window', 'used'), ["amp['window']['used']", '2']),
    (put('amp', 'window', 'used', [True]), ["amp['window']['used']", '2']),
    (put('amp', 'window', 'used', 0, 'yes'), ["amp['window']['used']"]),
    (drop('amp', 'window', 'found_inf'), ["amp['window']['found_inf']", '2']),
    (put('amp', 'window', 'found_inf', 3.0), ["amp['window']['found_inf']"]),
    (put('amp', 'window', 'found_inf', 0, None), ["amp['window']['found_inf']"]),
    (put('amp', 'window', 'found_inf', 0, 'inf?'), ["amp['window']['found_inf']"]),
]


@pytest.mark.parametrize(('damage', 'words'), DAMAGE, ids=lambda v: ' '.join(v) if isinstance(v, list) else '')
def test_damage_is_named(damage: Damage, words: list[str], device: torch.device) -> None:
    state = written(device)
    checkpoint.read(state)
    damage(state)
    before = copy.deepcopy(state)
    with pytest.raises(AmpCheckpointError) as caught:
        checkpoint.read(state)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert identical(state, before)


def test_damage_inside_a_stock_shaped_dict(device: torch.device) -> None:
    state = written(device, stock_shaped=True)
    state['loss_scaler']['amp']['version'] = 7
    with pytest.raises(AmpCheckpointError, match='newer'):
        checkpoint.read(state)


@pytest.mark.parametrize('state', [None, [], 'text', 3])
def test_state_that_is_no_dict(state: Any) -> None:
    with pytest.raises(AmpCheckpointError, match='must be a dict'):
        checkpoint.read(state)


def test_empty_state() -> None:
    with pytest.raises(AmpCheckpointError, match="no key 'state'"):
        checkpoint.read({})


def test_disabled_grad_scaler(device: torch.device) -> None:
    """As mmengine's stock wrapper saves it for bfloat16, or without a GPU."""
    read = checkpoint.read({**optimizer_state(device), 'loss_scaler': torch.amp.GradScaler(enabled=False).state_dict()})
    assert (read.kind, read.opt_level, list(read.loss_scalers)) == ('torch', None, [{}])
    assert LossScaler(LossScaleConfig(init_scale=32.0)).load_state_dict(read.loss_scalers[0]) == [
        'the saved loss scaler was disabled: the scale starts as configured'
    ]


# -- apex ---------------------------------------------------------------------------------------------------------

APEX = {'loss_scaler0': {'loss_scale': 4096.0, 'unskipped': 3}, 'loss_scaler1': {'loss_scale': 0.5, 'unskipped': 1999}}


@pytest.mark.parametrize('saved', [False, True])
@pytest.mark.parametrize('key', ['apex_amp', 'amp'])
def test_apex(key: str, saved: bool, device: torch.device) -> None:
    state = {**optimizer_state(device), 'base_param_settings': {'lr': 1.0}, key: copy.deepcopy(APEX)}
    before = copy.deepcopy(state)
    read = checkpoint.read(reload(state) if saved else state)
    assert (read.kind, read.opt_level, read.properties, read.window) == ('apex', None, None, None)
    assert [(s['scale'], s['_growth_tracker'], s['dynamic']) for s in read.loss_scalers] == [
        (4096.0, 3, True),
        (0.5, 1999, True),
    ]
    assert identical(read.optimizer, {**optimizer_state(device), 'base_param_settings': {'lr': 1.0}})
    assert identical(state, before)
    for part, scale, tracker in zip(read.loss_scalers, (4096.0, 0.5), (3, 1999)):
        scaler = LossScaler(LossScaleConfig())
        assert scaler.load_state_dict(part) == []
        assert (scaler.get_scale(), scaler.state_dict()['_growth_tracker']) == (scale, tracker)
    scaler = LossScaler(LossScaleConfig())
    scaler.load_state_dict(read.loss_scalers[1])
    scaler.update(torch.tensor(0.0))
    assert scaler.get_scale() == 1.0, 'the 2000th clean step doubles, as it would have under apex'


@pytest.mark.parametrize(
    ('scale', 'unskipped', 'dynamic'), [(1.0, 3, False), (128.0, 2000, False), (128.0, 1999, True), (65536, 0, True)]
)
def test_apex_scales_that_cannot_have_moved_are_static(
    scale: float, unskipped: int, dynamic: bool, device: torch.device
) -> None:
    amp = {'loss_scaler0': {'loss_scale': scale, 'unskipped': unskipped}}
    state = checkpoint.read({**optimizer_state(device), 'apex_amp': amp}).loss_scalers[0]
    assert state['dynamic'] is dynamic
    scaler = LossScaler(LossScaleConfig(init_scale=32.0))
    notes = scaler.load_state_dict(state)
    assert scaler.get_scale() == (scale if dynamic else 32.0)
    assert any('was static' in note for note in notes) != dynamic


APEX_DAMAGE: list[tuple[Damage, list[str]]] = [
    (put('loss_scaler0', 'loss_scale', math.nan), ["['loss_scaler0']['loss_scale']=nan"]),
    (put('loss_scaler1', 'loss_scale', math.inf), ["['loss_scaler1']['loss_scale']=inf"]),
    (put('loss_scaler0', 'loss_scale', 0.0), ["['loss_scaler0']['loss_scale']=0.0", 'positive']),
    (put('loss_scaler0', 'loss_scale', -8.0), ["['loss_scaler0']['loss_scale']=-8.0"]),
    (put('loss_scaler0', 'loss_scale', 1e300), ["['loss_scaler0']['loss_scale']=1e+300"]),
    (put('loss_scaler0', 'loss_scale', '128'), ["['loss_scaler0']['loss_scale']='128'"]),
    (put('loss_scaler0', 'loss_scale', True), ["['loss_scaler0']['loss_scale']=True"]),
    (put('loss_scaler0', 'loss_scale', None), ["['loss_scaler0']['loss_scale']=None"]),
    (drop('loss_scaler0', 'loss_scale'), ["['loss_scaler0']['loss_scale'] is missing", 'unskipped']),
    (put('loss_scaler1', 'unskipped', -1), ["['loss_scaler1']['unskipped']=-1", 'at least 0']),
    (put('loss_scaler1', 'unskipped', 1.5), ["['loss_scaler1']['unskipped']=1.5"]),
    (put('loss_scaler1', 'unskipped', 2**31), ["['loss_scaler1']['unskipped']=2147483648"]),
    (drop('loss_scaler1', 'unskipped'), ["['loss_scaler1']['unskipped'] is missing"]),
    (put('loss_scaler1', 7), ["['loss_scaler1']", 'int']),
    (drop('loss_scaler0'), ["['loss_scaler0'] is missing", 'without a hole', 'found: loss_scaler1']),
    (put('loss_scaler3', {'loss_scale': 1.0, 'unskipped': 0}), ["['loss_scaler2'] is missing", 'without a hole']),
]


@pytest.mark.parametrize(('damage', 'words'), APEX_DAMAGE, ids=lambda v: ' '.join(v) if isinstance(v, list) else '')
@pytest.mark.parametrize('key', ['apex_amp', 'amp'])
def test_damage_of_apex_is_named(key: str, damage: Damage, words: list[str], device: torch.device) -> None:
    state = {**optimizer_state(device), key: copy.deepcopy(APEX)}
    checkpoint.read(state)
    damage(state[key])
    with pytest.raises(AmpCheckpointError) as caught:
        checkpoint.read(state)
    for word in (key + words[0], *words[1:]):
        assert word in str(caught.value), str(caught.value)


def test_apex_beside_another_scale_is_refused(device: torch.device) -> None:
    """Two scales in one file: which of them was the last is not ours to guess."""
    for other in ({'loss_scaler': scaler_state()}, {'amp': written(device)['amp']}):
        with pytest.raises(AmpCheckpointError, match='remove the keys'):
            checkpoint.read({**optimizer_state(device), 'apex_amp': APEX, **other})
    for amp, words in (({}, 'is missing'), (3, 'must be a dict')):
        with pytest.raises(AmpCheckpointError, match=f'apex_amp.*{words}'):
            checkpoint.read({**optimizer_state(device), 'apex_amp': amp})


@pytest.mark.parametrize('names', [('generator', 'discriminator'), ('a', 'b')], ids=str)
def test_several_optimizers_are_refused(names: tuple[str, str], device: torch.device) -> None:
    with pytest.raises(AmpCheckpointError, match='several optimizers') as caught:
        checkpoint.read({name: written(device) for name in names})
    assert 'OptimWrapperDict' in str(caught.value) and names[0] in str(caught.value)
