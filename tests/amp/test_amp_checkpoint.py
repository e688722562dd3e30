"""Saving and restoring with the functional API: models and optimizers by themselves, loss scales by ``amp.state_dict()``."""

from __future__ import annotations

import copy
import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same
from command_line import python
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from toy_amp import (
    LEVELS,
    MASTERS,
    backward,
    logged,
    scalers,
    scales,
    set_scales,
)
from toy_engine import Net

from amp_wrapper import amp
from amp_wrapper.errors import AmpCheckpointError, AmpUsageError

F16, F32 = torch.float16, torch.float32


def make(device: torch.device, optimizer: str = 'SGD') -> tuple[Net, Optimizer]:
    torch.manual_seed(3)
    model = Net(dropout=0.25).to(device)
    if optimizer == 'Adam':
        return model, Adam(model.parameters(), 2.0**-5, eps=2.0**-10)
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9)


def initialize(model: Net, optimizer: Optimizer, level: str, **options: Any) -> None:
    amp.initialize(model, optimizer, opt_level=level, **{'verbosity': 0, **options})


def step(model: Net, optimizer: Optimizer, index: int, device: torch.device) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(index)).to(device)
    torch.manual_seed(100 + index)
    output = model(x)
    optimizer.zero_grad()
    backward(output.float().square().mean(), optimizer)
    optimizer.step()
    return output.detach().clone()


def saved(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    state = {'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'amp': amp.state_dict()}
    return copy.deepcopy(state)


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """All that training goes on from, in its own types."""
    masters = [p.detach().clone() for p in amp.master_params(optimizer)]
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {name: p.detach().clone() for name, p in model.named_buffers()}
    return copy.deepcopy([weights, buffers, masters, optimizer.state_dict(), amp.state_dict()])


# -- across levels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('first', [True, False], ids=['initialize first', 'load first'])
@pytest.mark.parametrize(('level', 'to'), list(itertools.product(LEVELS, LEVELS)))
def test_restored_at_any_level(level: str, to: str, first: bool, device: torch.device) -> None:
    """What was saved is there, bit for bit where the level holds it; at the same level training goes on as if nothing were."""
    model, optimizer = make(device)
    initialize(model, optimizer, level)
    for index in range(6):
        step(model, optimizer, index, device)
    state = saved(model, optimizer)
    assert all(value.dtype is F32 for key, value in state['model'].items() if 'num_batches' not in key)
    outputs = [step(model, optimizer, index, device) for index in (6, 7)]
    wanted = everything(model, optimizer)
    del model, optimizer
    gc.collect()

    before = copy.deepcopy(state)
    model, optimizer = make(device)
    if first:
        initialize(model, optimizer, to)
    model.load_state_dict(state['model'])
    optimizer.load_state_dict(state['optimizer'])
    if not first:
        initialize(model, optimizer, to)
    amp.load_state_dict(state['amp'])

    kept = {key: value.to(F16).float() if to == 'O3' and value.is_floating_point() else value
            for key, value in state['model'].items()}  # fmt: skip
    assert same(dict(model.state_dict()), dict(kept))
    for key, entry in optimizer.state_dict()['state'].items():
        before_it = state['optimizer']['state'][key]['momentum_buffer']
        momentum = entry['momentum_buffer']
        assert momentum.dtype is (F16 if to == 'O3' else F32)
        assert torch.equal(momentum, before_it.to(momentum.dtype))
    if (level in ('O1', 'O2')) == (to in ('O1', 'O2')):
        assert amp.state_dict() == state['amp']
    found = [step(model, optimizer, index, device) for index in (6, 7)]
    if to == level:
        assert same(found, outputs) and same(everything(model, optimizer), wanted)
    # loading changed nobody's dict, and neither did the steps after it
    assert same(before['model'], state['model']) and before['amp'] == state['amp']


@pytest.mark.parametrize('level', LEVELS)
def test_another_model_reads_the_weights(level: str, device: torch.device) -> None:
    """Plain FP32 code, without this package's help."""
    model, optimizer = make(device)
    initialize(model, optimizer, level)
    for index in range(4):
        step(model, optimizer, index, device)
    plain, plain_optimizer = make(device)
    assert plain.load_state_dict(model.state_dict()).missing_keys == []
    plain_optimizer.load_state_dict(optimizer.state_dict())
    for parameter, master in zip(plain.parameters(), amp.master_params(optimizer)):
        assert torch.equal(parameter, master.float())
    # and back, unrounded where there are masters
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1 + 2.0**-20)
    model.load_state_dict(plain.state_dict())
    for parameter, master, weight in zip(plain.parameters(), amp.master_params(optimizer), model.parameters()):
        assert torch.equal(master, parameter.to(master.dtype))
        assert torch.equal(weight, parameter.to(weight.dtype))


# -- a fresh process ----------------------------------------------------------------------------------------------------

CASES = [(level, kind) for level in LEVELS for kind in ('SGD', 'Adam')]


def _train(level: str, kind: str, device: torch.device, state: dict[str, Any] | None, until: int) -> dict[str, Any]:
    """Dropout draws from torch's generator, which the script itself saves; the scale grows and falls on the way."""
    model, optimizer = make(device, kind)
    # grows at the third clean step, and is too much for float16 then
    initialize(model, optimizer, level, loss_scale=dict(init_scale=2.0**17, growth_interval=3), num_losses=2)
    torch.manual_seed(5)
    start = 0
    if state is not None:
        model.load_state_dict(state['model'])
        optimizer.load_state_dict(state['optimizer'])
        amp.load_state_dict(state['amp'])
        torch.set_rng_state(state['rng'])
        start = state['step']
    losses = []
    for _ in range(start, until):
        x = torch.randn(8, 4).to(device)
        optimizer.zero_grad()
        for loss_id in range(2):
            loss = model(x).float().square().mean() / (1 + loss_id)
            backward(loss, optimizer, loss_id)
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(list(amp.master_params(optimizer)), 1.0)
        optimizer.step()
    result = saved(model, optimizer)
    result |= {'losses': torch.stack(losses), 'weights': [p.detach() for p in model.parameters()]}
    return {**result, 'rng': torch.get_rng_state(), 'step': until}


def resume(folder: str, device_type: str) -> None:
    """What the fresh process does."""
    for level, kind in CASES:
        path = Path(folder) / f'{level}{kind}'
        state = torch.load(f'{path}.first', weights_only=True)
        torch.save(_train(level, kind, torch.device(device_type), state, 12), f'{path}.second')


def test_resume_in_a_fresh_process(tmp_path: Path, device: torch.device) -> None:
    """Weights, masters, optimizer state, scales and losses, bit for bit, at every level."""
    wanted = {}
    for level, kind in CASES:
        torch.save(_train(level, kind, device, None, 7), tmp_path / f'{level}{kind}.first')
        wanted[level, kind] = _train(level, kind, device, None, 12)
        gc.collect()
    command = f'import test_amp_checkpoint as t; t.resume({str(tmp_path)!r}, {device.type!r})'
    ended = python('-c', command, cwd=Path(__file__).parent)
    assert ended.returncode == 0, ended.stderr[-3000:]
    for (level, kind), one_run in wanted.items():
        second = torch.load(tmp_path / f'{level}{kind}.second', weights_only=True)
        one_run['losses'] = one_run['losses'][-len(second['losses']) :]
        assert len(second['losses']) == 10 and one_run['losses'].isfinite().all()
        bad = [key for key in one_run if not same(one_run[key], second[key])]
        assert bad == [], (level, kind)
    # it did fall and grow on the way
    assert len({state['amp']['loss_scaler0']['loss_scale'] for state in wanted.values()} - {2.0**17}) > 1


# -- the loss scales ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
def test_form_of_the_state(level: str, device: torch.device) -> None:
    """What ``apex.amp.load_state_dict`` reads, and nothing else."""
    model, optimizer = make(device)
    initialize(model, optimizer, level, num_losses=3)
    state = amp.state_dict()
    start = 2.0**16 if level in ('O1', 'O2') else 1.0
    assert state == {f'loss_scaler{index}': {'loss_scale': start, 'unskipped': 0} for index in range(3)}
    assert list(state) == ['loss_scaler0', 'loss_scaler1', 'loss_scaler2']
    assert type(state) is dict
    for entry in state.values():
        assert list(entry) == ['loss_scale', 'unskipped']
        assert type(entry) is dict and type(entry['loss_scale']) is float and type(entry['unskipped']) is int
    mine: dict[str, Any] = {'epoch': 3}
    assert amp.state_dict(mine) is mine and mine == {'epoch': 3, **state}
    assert amp.state_dict(destination={}) == state


@pytest.mark.parametrize('level', LEVELS)
def test_each_loss_falls_by_itself(level: str, device: torch.device) -> None:
    """Of three losses, the first never overflows, the second once, the third twice."""
    model, optimizer = make(device)
    initialize(model, optimizer, level, num_losses=3, loss_scale='dynamic')
    set_scales(optimizer, 2.0**7, 2.0**7, 2.0**7)
    for index in range(2):
        optimizer.zero_grad()
        for loss_id in range(3):
            x = torch.ones(8, 4, device=device)
            hit = index < loss_id
            backward(model(x).float().mean() * (float('inf') if hit else 1.0), optimizer, loss_id)
        optimizer.step()
    assert amp.state_dict() == {
        'loss_scaler0': {'loss_scale': 2.0**7, 'unskipped': 2},
        'loss_scaler1': {'loss_scale': 2.0**6, 'unskipped': 1},
        'loss_scaler2': {'loss_scale': 2.0**5, 'unskipped': 0},
    }


@pytest.mark.parametrize('count', [1, 2, 3, 4])
def test_another_number_of_scales(count: int, device: torch.device) -> None:
    model, optimizer = make(device)
    initialize(model, optimizer, 'O2', num_losses=3, verbosity=1)
    with logged() as lines:
        amp.load_state_dict({f'loss_scaler{i}': {'loss_scale': 2.0 ** (i + 3), 'unskipped': 7} for i in range(count)})
    assert scales(optimizer) == [2.0**3, 2.0**4, 2.0**5][:count] + [2.0**16] * (3 - count)
    assert len(lines) == (count != 3)
    if count != 3:
        assert f'holds {count} loss scales, and 3 are configured' in lines[0]


@pytest.mark.parametrize('level', ['O0', 'O3', 'O4', 'O5'])
def test_a_static_scale_stays(level: str, device: torch.device) -> None:
    model, optimizer = make(device)
    initialize(model, optimizer, level, verbosity=1)
    with logged() as lines:
        amp.load_state_dict({'loss_scaler0': {'loss_scale': 512.0, 'unskipped': 3}})
    assert scales(optimizer) == [1.0]
    assert len(lines) == 1 and '512' in lines[0]


GOOD = {'loss_scale': 4.0, 'unskipped': 1}
DAMAGED: dict[str, Any] = {
    'no dict': [GOOD],
    'None': None,
    'another key': {'loss_scaler0': GOOD, 'loss_scaler1': GOOD, 'model': {}},
    'a hole': {'loss_scaler0': GOOD, 'loss_scaler2': GOOD},
    'not from 0': {'loss_scaler1': GOOD},
    'our own form': {'version': 1, 'loss_scalers': [GOOD]},
    'no number': {'loss_scaler0': GOOD, 'loss_scalerx': GOOD},
    'an entry that is no dict': {'loss_scaler0': GOOD, 'loss_scaler1': 4.0},
    'no scale': {'loss_scaler0': GOOD, 'loss_scaler1': {'unskipped': 1}},
    'no counter': {'loss_scaler0': GOOD, 'loss_scaler1': {'loss_scale': 4.0}},
    'NaN': {'loss_scaler0': GOOD, 'loss_scaler1': {'loss_scale': float('nan'), 'unskipped': 1}},
    'infinity': {'loss_scaler0': GOOD, 'loss_scaler1': {'loss_scale': float('inf'), 'unskipped': 1}},
    'zero': {'loss_scaler0': GOOD, 'loss_scaler1': {'loss_scale': 0.0, 'unskipped': 1}},
    'negative': {'loss_scaler0': GOOD, 'loss_scaler1': {'loss_scale': -4.0, 'unskipped': 1}},
    'text': {'loss_scaler0': GOOD, 'loss_scaler1': {'loss_scale': 'dynamic', 'unskipped': 1}},
    'a negative counter': {'loss_scaler0': GOOD, 'loss_scaler1': {'loss_scale': 4.0, 'unskipped': -1}},
    'a doubtful kind': {'loss_scaler0': GOOD, 'loss_scaler1': {**GOOD, 'dynamic': 'yes'}},
    'half a counter': {'loss_scaler0': GOOD, 'loss_scaler1': {'loss_scale': 4.0, 'unskipped': 0.5}},
}


@pytest.mark.parametrize('level', ['O1', 'O5'])
@pytest.mark.parametrize('name', DAMAGED)
def test_damage(name: str, level: str, device: torch.device) -> None:
    """A typed error, and nothing of it applied."""
    model, optimizer = make(device)
    initialize(model, optimizer, level, num_losses=2)
    for index in range(2):
        step(model, optimizer, index, device)
    before = everything(model, optimizer)
    state = copy.deepcopy(DAMAGED[name])
    with pytest.raises(AmpCheckpointError) as caught:
        amp.load_state_dict(state)
    assert len(str(caught.value)) > 40
    assert same(before, everything(model, optimizer)) and repr(state) == repr(DAMAGED[name])


def test_sessions_are_numbered_on(device: torch.device) -> None:
    """Those that live, in the order of the calls; inference has no scale."""
    pairs = [make(device) for _ in range(3)]
    initialize(*pairs[0], 'O1')
    initialize(*pairs[1], 'O2', num_losses=2)
    amp.initialize(Net(dropout=0.25).to(device), opt_level='O2', verbosity=0)
    initialize(*pairs[2], 'O5')
    set_scales(pairs[1][1], 4.0, 8.0)
    assert [entry['loss_scale'] for entry in amp.state_dict().values()] == [2.0**16, 4.0, 8.0, 1.0]
    del pairs[0]
    assert [entry['loss_scale'] for entry in amp.state_dict().values()] == [4.0, 8.0, 1.0]
    amp.load_state_dict({f'loss_scaler{i}': {'loss_scale': 2.0 ** (i + 1), 'unskipped': 0} for i in range(3)})
    assert scales(pairs[0][1]) == [2.0, 4.0] and scales(pairs[1][1]) == [1.0]


def test_scales_that_two_words_do_not_tell(device: torch.device) -> None:
    """A moving scale of 1.0 looks static to readers of apex's files, and so does a long row of clean steps."""
    model, optimizer = make(device)
    rule = dict(init_scale=2.0, growth_interval=4000, hysteresis=2)
    initialize(model, optimizer, 'O2', loss_scale=rule, num_losses=2)
    for index in range(4):
        for loss_id in range(2):
            hit = index in (1, 2, 3) and loss_id == 0
            backward(model(torch.ones(8, 4, device=device)).mean() * (float('inf') if hit else 1.0), optimizer, loss_id)
        optimizer.step()
    for scaler in scalers(optimizer)[1:]:
        scaler.load_state_dict({**scaler.state_dict(), '_growth_tracker': 2500})
    before = [scaler.state_dict() for scaler in scalers(optimizer)]
    state = amp.state_dict()
    assert [entry['loss_scale'] for entry in state.values()] == [0.5, 2.0]
    scalers(optimizer)[0].load_state_dict({**before[0], 'scale': 1.0})
    before, state = [scaler.state_dict() for scaler in scalers(optimizer)], amp.state_dict()
    assert all({'loss_scale', 'unskipped'} < entry.keys() for entry in state.values())
    del model, optimizer
    model, optimizer = make(device)
    initialize(model, optimizer, 'O2', loss_scale=rule, num_losses=2)
    amp.load_state_dict(state)
    for scaler, wanted in zip(scalers(optimizer), before):
        found = scaler.state_dict()
        keys = ('scale', '_growth_tracker', 'hysteresis_tracker', 'dynamic')
        assert [found[key] for key in keys] == [wanted[key] for key in keys]


def test_before_initialize() -> None:
    gc.collect()
    with pytest.raises(AmpUsageError, match='initialize'):
        amp.state_dict()
    with pytest.raises(AmpUsageError, match='initialize'):
        amp.load_state_dict({'loss_scaler0': GOOD})


@pytest.mark.parametrize('level', MASTERS)
def test_loading_in_the_middle_of_training(level: str, device: torch.device) -> None:
    """Back to an earlier state, weights through a submodule too, with gradients waiting: as if nothing had been."""
    model, optimizer = make(device)
    initialize(model, optimizer, level)
    for index in range(4):
        step(model, optimizer, index, device)
    state = saved(model, optimizer)
    wanted = [step(model, optimizer, index, device) for index in (4, 5)]
    backward(model(torch.ones(8, 4, device=device)).float().sum(), optimizer)
    model.load_state_dict(state['model'])
    model.fc.load_state_dict({key[3:]: value for key, value in state['model'].items() if key.startswith('fc.')})
    optimizer.load_state_dict(state['optimizer'])
    amp.load_state_dict(state['amp'])
    assert same([step(model, optimizer, index, device) for index in (4, 5)], wanted)
