"""Loss scales: the dynamic rule against a model of it, which steps count, what is scaled, what a saved scale holds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import pairs
from torch import nn
from torch.optim import SGD, Optimizer
from toy_training import Training

from amp_wrapper import FusedSGD

TINY = float(np.finfo(np.float32).tiny)


class Model:
    """The rule of the scale, from its description, in NumPy's float32."""

    def __init__(self, rule: dict[str, Any]) -> None:
        start = max(rule['init_scale'], rule['min_scale'] or TINY)
        self.scale = np.float32(min(start, rule['max_scale'] or start))
        self.rule, self.tracker, self.left = rule, 0, rule['hysteresis']
        self.steps = self.skips = self.streak = 0

    def update(self, bad: bool) -> None:
        rule = self.rule
        self.steps, self.skips, self.streak = self.steps + 1, self.skips + bad, (self.streak + 1) * bad
        if bad:
            self.tracker, self.left = 0, self.left - 1
            if self.left <= 0:
                floor = np.float32(TINY if rule['min_scale'] is None else rule['min_scale'])
                self.scale = min(self.scale, max(floor, self.scale * np.float32(rule['backoff_factor'])))
            return
        self.left, self.tracker = rule['hysteresis'], self.tracker + 1
        if self.tracker == rule['growth_interval']:
            grown = self.scale * np.float32(rule['growth_factor'])
            grown = grown if rule['max_scale'] is None else min(grown, np.float32(rule['max_scale']))
            self.scale, self.tracker = max(self.scale, grown) if np.isfinite(grown) else self.scale, 0

    def state(self) -> dict[str, Any]:
        return {
            'scale': float(self.scale),
            '_growth_tracker': self.tracker,
            'hysteresis_tracker': max(self.left, 0),
            'steps': self.steps,
            'skips': self.skips,
            'consecutive_skips': self.streak,
        }


def training(scale: Any, make: type[Optimizer] = SGD, level: str = 'O1', **options: Any) -> Training:
    """One weight, whose learning rate is 0."""
    model = nn.Linear(1, 1, bias=False)
    return Training(level, make=lambda p: make(p, lr=0.0), model=model, loss_scale=scale, **options)  # type: ignore[call-arg]


def step(run: Training, bad: bool = False, loss_id: int = 0) -> None:
    run.backward(run.model.weight.float().sum() * (math.inf if bad else 1.0), loss_id)
    run.step()
    run.clear()


def state(run: Training) -> dict[str, Any]:
    return run.wrapper.loss_scaler.state_dict()


RULES = st.fixed_dictionaries(
    dict(
        init_scale=st.sampled_from([1.0, 2.0**16, 3.0, 2.0**24, 2.0**120, TINY * 4]),
        growth_factor=st.sampled_from([2.0, 1.1, 2.0**40]),
        backoff_factor=st.sampled_from([0.5, 0.3, 0.9, 2.0**-40]),
        growth_interval=st.integers(1, 4),
        min_scale=st.sampled_from([None, None, 0.25, 2.0**16]),
        max_scale=st.sampled_from([None, 2.0**17, 2.0**24]),
        hysteresis=st.integers(1, 3),
    )
)


@settings(max_examples=60, deadline=None)
@given(
    rule=RULES.filter(lambda rule: (rule['min_scale'] or 0.0) <= rule['init_scale'] <= (rule['max_scale'] or math.inf)),
    make=st.sampled_from([SGD, FusedSGD]),
    overflows=st.lists(st.booleans(), max_size=20),
    saved_at=st.integers(0, 20),
)
def test_scale_follows_rule(rule: dict[str, Any], make: type[Optimizer], overflows: list[bool], saved_at: int) -> None:
    """Also in a training that ends, and goes on from its state in new objects."""
    run, model = training(rule, make), Model(rule)
    with np.errstate(over='ignore', under='ignore'):
        for index, bad in enumerate(overflows):
            if index == saved_at:
                saved = run.wrapper.state_dict()
                run = training(rule, make)
                run.wrapper.load_state_dict(saved)
            step(run, bad)
            model.update(bad)
            found = state(run)
            assert {key: found[key] for key in model.state()} == model.state()
            assert 0 < run.wrapper.loss_scaler.get_scale() < math.inf


def test_defaults_of_the_rule() -> None:
    run = training(None)
    assert run.scales() == [2.0**16]
    run.wrapper.loss_scaler.load_state_dict({**state(run), '_growth_tracker': 1998})
    scales = []
    for bad in (False, False, True):
        step(run, bad)
        scales += run.scales()
    assert scales == [2.0**16, 2.0**17, 2.0**16]


@pytest.mark.parametrize('make', [SGD, FusedSGD])
def test_scale_reaches_neither_zero_nor_infinity(make: type[Optimizer]) -> None:
    """Without a floor the smallest scale is the smallest normal number."""
    run = training(dict(init_scale=4 * TINY), make)
    scales = []
    for _ in range(4):
        step(run, True)
        scales += run.scales()
    assert scales == [2 * TINY, TINY, TINY, TINY]
    run = training(dict(init_scale=2.0**127, growth_interval=1, max_scale=None), make)
    step(run)
    assert run.scales() == [2.0**127]


@pairs(level=('O1', 'O2'), make=(SGD, FusedSGD))
def test_a_scale_counts_the_steps_of_its_own_loss(level: str, make: type[Optimizer]) -> None:
    """A loss that had no backward pass since the last step has shown nothing about its scale."""
    run = training(dict(init_scale=4.0, growth_interval=3), make, level, num_losses=2)
    for loss_id in (0, 0, 1, 0, 1):
        step(run, loss_id=loss_id)
    found = [scaler.state_dict() for scaler in run.wrapper.loss_scalers]
    assert [(each['scale'], each['_growth_tracker'], each['steps']) for each in found] == [(8.0, 0, 5), (4.0, 2, 5)]


@pytest.mark.parametrize('checks', [True, False])
def test_static_scale_keeps_its_value(checks: bool) -> None:
    run = training(128.0, skip_nonfinite=checks)
    for bad in (True, False, True, True):
        step(run, bad)
    found = state(run)
    assert found['scale'] == 128.0
    assert (found['steps'], found['skips'], found['consecutive_skips']) == ((4, 3, 2) if checks else (0, 0, 0))


def test_inverse_scale_is_rounded_once() -> None:
    for scale in (2.0**16, 3.0, 0.1, 2.0**100):
        run = training(scale, door='amp')
        run.backward(run.model.weight.sum() * 3)
        inverse = np.float32(1.0 / np.float64(np.float32(scale)))
        wanted = float(np.float32(np.float32(scale) * np.float32(3)) * inverse)
        assert run.model.weight.grad.item() == wanted, scale


# -- state ---------------------------------------------------------------------------------------------------------------

RULE = {'init_scale': 512.0, 'growth_factor': 3.0, 'backoff_factor': 0.25, 'growth_interval': 7, 'hysteresis': 4}


def used(**changes: Any) -> Training:
    """A training whose scale has no field at its default."""
    run = training({**RULE, **changes})
    for bad in (0, 1, 1, 1, 1, 0, 1, 0, 0, 1):
        step(run, bool(bad))
    return run


def test_torchs_scaler_loads_a_saved_scale_and_the_other_way_round() -> None:
    run = used()
    theirs = torch.amp.GradScaler('cpu')
    theirs.load_state_dict(state(run))
    assert (theirs.get_scale(), theirs.get_growth_factor(), theirs.get_backoff_factor()) == (128.0, 3.0, 0.25)
    assert (theirs.get_growth_interval(), theirs.state_dict()['_growth_tracker']) == (7, 0)
    ours = training(dict(growth_interval=5, hysteresis=2)).wrapper.loss_scaler
    theirs = torch.amp.GradScaler('cpu', init_scale=256.0, growth_interval=5)
    assert ours.load_state_dict({**theirs.state_dict(), '_growth_tracker': 3}) == []
    found = ours.state_dict()
    assert (found['scale'], found['_growth_tracker'], found['hysteresis_tracker'], found['steps']) == (256.0, 3, 2, 0)


#: Settings of a run, what a saved state has changed, words of the note, and the scale that counts.
NOTES: list[tuple[Any, dict[str, Any], str, float]] = [
    (RULE, {'dynamic': False}, 'static', 512.0),
    (8.0, {}, 'not used', 8.0),
    ({**RULE, 'growth_interval': 9}, {}, 'growth_interval 7 -> 9', 128.0),
    (RULE, {'scale': 0.1}, '', float(np.float32(0.1))),
    # torch makes no tensor of a whole number above 2**63
    (RULE, {'scale': 2**64}, '', 2.0**64),
]


def test_settings_that_a_state_does_not_change_are_reported() -> None:
    for mine, change, word, scale in NOTES:
        scaler = training(mine).wrapper.loss_scaler
        notes = scaler.load_state_dict({**state(used()), **change})
        assert len(notes) == bool(word) and all(word in note for note in notes)
        assert scaler.get_scale() == scale and scaler.state_dict()['skips'] == 6
