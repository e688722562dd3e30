"""Buffers across averages, resumed runs, copies and detached models."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import toy
from bits import differing
from mmengine.model import ExponentialMovingAverage
from torch import nn
from torch.optim.swa_utils import AveragedModel
from toy_buffers import Around, Probe, Scripted, batch, changed, hooks_of, snapshot

from amp_wrapper import AmpOptimWrapper
from amp_wrapper.policy import LEVELS, resolve


@pytest.mark.parametrize('level', LEVELS)
def test_averages_see_what_was_restored(level: str, device: torch.device) -> None:
    model = Around(nn.BatchNorm1d(3)).to(device)
    averages = [
        ExponentialMovingAverage(model, momentum=0.5, update_buffers=True),
        AveragedModel(model, use_buffers=True) if not resolve(level).casts_model else None,
    ]
    run = Scripted('wrapper', level, model)
    for seed in range(4):
        run.train(batch((4, 3), device, bad=seed % 2 == 1, seed=seed))
        for average in averages:
            if average is not None:
                average.update_parameters(model)
    for average in averages:
        for buffer in () if average is None else average.buffers():
            assert buffer.isfinite().all()


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('attached', [False, True])
def test_exact_resume_during_accumulation(level: str, attached: bool, device: torch.device) -> None:
    """What buffers were before an open accumulation is in the checkpoint: a skip at its end means the same."""
    ends = []
    for resumes in (False, True):
        torch.manual_seed(0)
        model = Around(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Probe())).to(device)
        run = Scripted('wrapper', level, model)
        run.train(batch((4, 3), device))
        run.backward(run.forward(batch((4, 3), device)))
        if resumes:
            states = copy.deepcopy((model.state_dict(), run.wrapper.state_dict()))
            passing = model.part[2].passing.clone()
            model = Around(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Probe())).to(device)
            run = Scripted('wrapper', level, model) if attached else None
            if run is None:
                optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
                wrapper = AmpOptimWrapper(
                    opt_level=level,
                    optimizer=optimizer,
                    verbosity=0,
                    skip_nonfinite=True,
                    loss_scale=dict(init_scale=1.0),
                )
                model.load_state_dict(states[0])
                wrapper.load_state_dict(states[1])
                wrapper.attach(model)
                run = Scripted.__new__(Scripted)
                run.model, run.optimizer, run.wrapper = model, optimizer, wrapper
            else:
                run.wrapper.load_state_dict(states[1])
                model.load_state_dict(states[0])
            model.part[2].passing.copy_(passing)
        run.train(batch((4, 3), device, bad=True))
        ends.append(snapshot(model))
        run.train(batch((4, 3), device))
        ends[-1] |= {f'then {name}': value for name, value in snapshot(model).items()}
    assert differing(ends[0], ends[1]) == []


def test_a_file_without_the_buffers_of_its_accumulation(device: torch.device) -> None:
    model = Around(nn.BatchNorm1d(3)).to(device)
    run = Scripted('wrapper', 'O2', model)
    run.backward(run.forward(batch((4, 3), device)))
    state = run.wrapper.state_dict()
    assert set(state['amp']['window']['buffers']) == {f'part.{name}' for name in model.part._buffers}
    for damage in (['x'], {1: torch.zeros(())}, {'x': 1}):
        broken = copy.deepcopy(state)
        broken['amp']['window']['buffers'] = damage
        with pytest.raises(Exception, match=r"amp\['window'\]\['buffers'\] must be a dict of tensors by name"):
            run.wrapper.load_state_dict(broken)
    # as older versions wrote it, and with names and shapes of another model
    for other in (None, {'gone': torch.zeros(1), 'part.running_mean': torch.zeros(7)}):
        older = copy.deepcopy(state)
        if other is None:
            del older['amp']['window']['buffers']
        else:
            older['amp']['window']['buffers'] = other
        run.wrapper.load_state_dict(older)
        before = snapshot(model)
        run.train(batch((4, 3), device, bad=True))
        assert changed(before, model) == []


@pytest.mark.parametrize('level', LEVELS)
def test_copies_and_files_of_the_model_speak_for_themselves(level: str, device: torch.device) -> None:
    model = Around(nn.BatchNorm1d(3)).to(device)
    run = Scripted('wrapper', level, model)
    run.train(batch((4, 3), device))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = snapshot(model)
        run.backward(run.forward(batch((4, 3), device, bad=True)))
        other(batch((4, 3), device))
        assert other.part.num_batches_tracked == 2
        run.step()
        assert changed(before, model) == []
        assert other.part.num_batches_tracked == 2


@pytest.mark.parametrize('level', LEVELS)
def test_detach_and_attach_again(level: str, device: torch.device) -> None:
    model = Around(nn.BatchNorm1d(3)).to(device)
    run = Scripted('wrapper', level, model)
    run.train(batch((4, 3), device))
    run.wrapper.detach()
    assert not any(hooks_of(module) for module in model.modules())
    run.wrapper.attach(model)
    before = snapshot(model)
    run.train(batch((4, 3), device, bad=True))
    assert changed(before, model) == []


@pytest.mark.parametrize('level', LEVELS)
def test_a_run_of_mmengine(level: str, tmp_path: Any, device: torch.device) -> None:
    """The data preprocessor is left alone, and the rest runs through the runner."""
    runner = toy.run(
        tmp_path, dict(type='AmpOptimWrapper', opt_level=level, skip_nonfinite=True, optimizer=dict(type='SGD', lr=0.1))
    )
    snapshots = runner.optim_wrapper._engine.parts.buffers
    assert snapshots is not None
    assert not any(name.startswith('data_preprocessor') for name in snapshots.tracked.names)
