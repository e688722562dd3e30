"""The saved state of an engine: exact resume between two backward passes, other levels, and damage."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import differing, same
from torch.optim import Adam, Optimizer
from toy_engine import Run, momentum, poisoned

from amp_wrapper.engine import Stage
from amp_wrapper.engine.clipping import GradientClip
from amp_wrapper.errors import AmpCheckpointError
from amp_wrapper.policy import LEVELS

# -- state --------------------------------------------------------------------------------------------------------


def reload(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize('when', ['before', 'after'])
@pytest.mark.parametrize('num_losses', [1, 2])
@pytest.mark.parametrize('level', LEVELS)
def test_resume_during_accumulation_is_exact(level: str, num_losses: int, when: str, device: torch.device) -> None:
    # in float16, Adam's epsilon is 0 and its weights NaN: nothing to compare
    make = momentum if level == 'O3' else lambda p: Adam(p, lr=0.01)
    whole = Run(level, device, make, num_losses=num_losses)
    whole.train(0, 1)
    whole.backward(2)
    whole.backward(3)
    model, optimizer = reload(copy.deepcopy(dict(whole.model.state_dict()))), reload(whole.engine.state_dict())

    part = Run(level, device, make, attach=False, num_losses=num_losses)
    part.model.load_state_dict(model)
    if when == 'after':
        part.engine.attach(part.model)
    notes = part.engine.load_state_dict(optimizer)
    assert not any('dropped' in note for note in notes) and any('unfinished accumulation' in note for note in notes)
    part.engine.attach(part.model)
    assert part.engine.stage is Stage.ACCUMULATING
    assert differing(whole.bits(), part.bits()) == []
    assert same(whole.engine.state_dict(), part.engine.state_dict())
    for run in (whole, part):
        run.backward(4)
        run.engine.step(GradientClip.parse({'max_norm': 0.1}))
        run.engine.zero_grad()
        run.train(5)
    assert differing(whole.bits(), part.bits()) == []
    assert torch.equal(whole.losses(6)[0], part.losses(6)[0])
    assert same(whole.engine.state_dict(), part.engine.state_dict())


def test_overflow_during_accumulation_is_resumed(device: torch.device) -> None:
    whole, part = (Run('O2', device, num_losses=2, verbosity=0) for _ in range(2))
    with poisoned(whole.parameter('fc.weight')):
        whole.backward(0)
    part.engine.load_state_dict(reload(whole.engine.state_dict()))
    part.backward(1)
    before = part.bits()
    assert part.engine.step().skipped and differing(before, part.bits()) == []
    assert [scaler.get_scale() for scaler in part.engine.scalers] == [2.0**15, 2.0**15]


@pytest.mark.parametrize('when', ['before', 'after'])
@pytest.mark.parametrize('level', LEVELS)
def test_load_neither_changes_nor_aliases_the_callers_dict(level: str, when: str, device: torch.device) -> None:
    make = momentum if level == 'O3' else lambda p: Adam(p, lr=0.1)
    source = Run(level, device, make, num_losses=2)
    source.train(0)
    source.backward(1)
    state = copy.deepcopy(source.engine.state_dict())
    kept = copy.deepcopy(state)
    run = Run(level, device, make, attach=when == 'after', num_losses=2)
    run.engine.load_state_dict(state)
    run.engine.attach(run.model)
    run.backward(2)
    run.engine.step()
    run.train(3)
    assert same(state, kept) and not run.engine.scalers[0].counts[1]


def test_accumulated_gradients_waiting_for_attachment_are_not_the_callers(device: torch.device) -> None:
    source = Run('O2', device)
    source.backward(0)
    state = copy.deepcopy(source.engine.state_dict())
    run = Run('O2', device, attach=False)
    run.engine.load_state_dict(state)
    for gradient in state['amp']['window']['gradients']:
        gradient.fill_(9.0)
    run.engine.attach(run.model)
    assert torch.equal(run.parameter('fc.weight').grad, source.parameter('fc.weight').grad)


def test_state_dict_is_a_snapshot_of_accumulated_gradients(device: torch.device) -> None:
    run = Run('O2', device)
    run.backward(0)
    state = run.engine.state_dict()
    kept = copy.deepcopy(state['amp']['window'])
    run.backward(1)
    assert same(state['amp']['window'], kept)


BREAK: dict[str, Callable[[dict[str, Any]], Any]] = {
    'group missing': lambda s: s['param_groups'].pop(),
    'group twice': lambda s: s['param_groups'].append(copy.deepcopy(s['param_groups'][0])),
    'parameter missing': lambda s: s['param_groups'][0]['params'].pop(),
    'parameters lost': lambda s: s['param_groups'][0].pop('params'),
    'scale': lambda s: s['amp']['loss_scalers'][0].update(scale=math.nan),
    'counter': lambda s: s['amp']['loss_scalers'][0].update(steps=2**70),
    'future': lambda s: s['amp'].update(version=2),
    'properties': lambda s: s['amp']['properties'].update(loss_scale=None),
    'state shape': lambda s: s['state'][0].update(exp_avg=torch.ones(7)),
    'state type': lambda s: s['state'].update({0: 'text'}),
    'gradient shape': lambda s: s['amp']['window']['gradients'].__setitem__(0, torch.ones(7)),
}


@pytest.mark.parametrize('when', ['before', 'after'])
@pytest.mark.parametrize('how', BREAK)
def test_a_bad_state_is_a_typed_error_and_changes_nothing(how: str, when: str, device: torch.device) -> None:
    def adam(parameters: Any) -> Optimizer:
        return Adam(parameters, lr=0.1)

    source = Run('O2', device, adam)
    source.train(0)
    source.backward(1)
    state = copy.deepcopy(source.engine.state_dict())
    BREAK[how](state)
    run = Run('O2', device, adam, attach=when == 'after')
    if when == 'after':
        run.train(4)
    before, own = run.bits(), copy.deepcopy(run.engine.state_dict())
    with pytest.raises(AmpCheckpointError):
        run.engine.load_state_dict(state)
    assert differing(before, run.bits()) == [] and same(run.engine.state_dict(), own)


def _verbs(source: str, target: str) -> list[str]:
    dynamic = ('O1', 'O2')
    # to O3, weights and state are rounded; from O3, the state becomes FP32
    verbs = ['kept'] if source == target or 'O3' not in (source, target) else ['kept', 'converted'][target == 'O3' :]
    return verbs + (['dropped'] if (source in dynamic) != (target in dynamic) else [])


@pytest.mark.parametrize('target', LEVELS)
@pytest.mark.parametrize('source', LEVELS)
def test_state_goes_from_any_level_to_any(source: str, target: str, device: torch.device) -> None:
    first = Run(source, device)
    first.train(0, 1)
    second = Run(target, device, attach=False)
    second.model.load_state_dict(first.model.state_dict())
    notes = second.engine.load_state_dict(reload(first.engine.state_dict()))
    second.engine.attach(second.model)
    assert all(note.startswith(f'saved at {source}, resumed at {target}: ') for note in notes)
    assert [note.split(': ')[1] for note in notes] == _verbs(source, target)
    for mine, theirs in zip(second.engine.master_params(), first.engine.master_params()):
        buffer, saved = (r.optimizer.state[p]['momentum_buffer'] for r, p in ((second, mine), (first, theirs)))
        assert buffer.dtype is mine.dtype and torch.equal(buffer, saved.float().to(mine.dtype))
    second.train(2)
    assert second.losses(3)[0].isfinite()


@pytest.mark.parametrize('level', LEVELS)
def test_stock_and_plain_states_are_read(level: str, device: torch.device) -> None:
    plain = Run('O0', device, attach=False)
    plain.losses()[0].backward()
    plain.optimizer.step()
    stock = torch.amp.GradScaler(device.type, init_scale=512.0).state_dict()
    run = Run(level, device, loss_scale='dynamic')
    run.engine.load_state_dict({**copy.deepcopy(plain.optimizer.state_dict()), 'loss_scaler': stock})
    assert run.engine.scalers[0].get_scale() == 512.0
    run = Run(level, device, loss_scale='dynamic')
    notes = run.engine.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    if run.engine.scalers[0].is_dynamic:
        assert 'new: loss scale 65536, which the checkpoint does not hold' in notes[-1]
    assert run.engine.scalers[0].get_scale() == 2.0**16


def test_accumulated_gradients_of_another_configuration_are_dropped(device: torch.device) -> None:
    source, run = Run('O2', device), Run('O5', device)
    source.backward()
    notes = run.engine.load_state_dict(source.engine.state_dict())
    assert any('dropped' in note and 'accumulation' in note for note in notes) and run.engine.stage is Stage.READY
    assert run.parameter('fc.weight').grad is None
