"""The scaler against a model of its rule, and its state against torch's."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from amp_wrapper.checkpoint.format import check_scaler_state
from amp_wrapper.engine.loss_scale import LossScaler
from amp_wrapper.errors import AmpCheckpointError
from amp_wrapper.policy.loss_scale import LossScaleConfig

TINY = float(np.finfo(np.float32).tiny)


class NoHostRead(TorchDispatchMode):
    """Fails on a read of the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, 'the host read the device'
        return func(*args, **(kwargs or {}))


class Model:
    """The rule of the scale, from its description, in NumPy's float32."""

    def __init__(self, c: LossScaleConfig) -> None:
        self.c, self.scale, self.tracker, self.left = c, np.float32(c.init_scale), 0, c.hysteresis
        self.steps = self.skips = self.streak = 0

    def update(self, bad: bool) -> None:
        c = self.c
        self.steps += 1
        self.skips += bad
        self.streak = self.streak + 1 if bad else 0
        if bad:
            self.tracker, self.left = 0, self.left - 1
            if self.left <= 0:
                floor = np.float32(TINY if c.min_scale is None else c.min_scale)
                self.scale = min(self.scale, max(floor, self.scale * np.float32(c.backoff_factor)))
            return
        self.left, self.tracker = c.hysteresis, self.tracker + 1
        if self.tracker == c.growth_interval:
            grown = self.scale * np.float32(c.growth_factor)
            grown = grown if c.max_scale is None else min(grown, np.float32(c.max_scale))
            self.scale, self.tracker = max(self.scale, grown) if np.isfinite(grown) else self.scale, 0


def flag(value: float, device: torch.device) -> Tensor:
    return torch.tensor(float(value), device=device)


def make(config: LossScaleConfig, device: torch.device, check: bool = True) -> LossScaler:
    scaler = LossScaler(config, check)
    scaler.to(device)
    return scaler


configs = st.builds(
    LossScaleConfig,
    init_scale=st.sampled_from([1.0, 2.0**16, 3.0, 2.0**24, 2.0**120, TINY * 4]),
    growth_factor=st.sampled_from([2.0, 1.1, 2.0**40]),
    backoff_factor=st.sampled_from([0.5, 0.3, 0.9, 2.0**-40]),
    growth_interval=st.integers(1, 4),
    min_scale=st.sampled_from([None, None, 0.25, 2.0**18]),
    max_scale=st.sampled_from([None, 2.0**17, 2.0**24]),
    hysteresis=st.integers(1, 3),
)


@settings(max_examples=150, deadline=None)
@given(config=configs, overflows=st.lists(st.booleans(), max_size=30))
def test_dynamic_scale_follows_its_rule(device: torch.device, config: LossScaleConfig, overflows: list[bool]) -> None:
    scaler, model = make(config, device), Model(config)
    with np.errstate(over='ignore', under='ignore'):
        for bad in overflows:
            with NoHostRead():
                scaler.update(flag(bad, device))
            model.update(bad)
            state = scaler.state_dict()
            assert state['scale'] == float(model.scale) == scaler.get_scale()
            assert state['_growth_tracker'] == model.tracker
            assert state['hysteresis_tracker'] == max(model.left, 0)
            assert scaler.counts.tolist() == [model.steps, model.skips, model.streak]
            assert 0 < scaler.get_scale() < math.inf


def test_defaults_of_the_rule(device: torch.device) -> None:
    scaler = make(LossScaleConfig(), device)
    assert scaler.get_scale() == 2.0**16
    for _ in range(1999):
        scaler.update(flag(0, device))
    assert scaler.get_scale() == 2.0**16
    scaler.update(flag(0, device))
    assert scaler.get_scale() == 2.0**17
    scaler.update(flag(1, device))
    assert scaler.get_scale() == 2.0**16


@pytest.mark.parametrize('start', [1.0, 2.0**16, TINY])
def test_scale_never_reaches_zero(start: float, device: torch.device) -> None:
    scaler = make(LossScaleConfig(init_scale=start), device)
    for _ in range(200):
        scaler.update(flag(1, device))
    assert scaler.get_scale() == TINY
    inverse = scaler.inverse_scale()
    assert inverse is not None and math.isfinite(inverse.item())
    for _ in range(2000):
        scaler.update(flag(0, device))
    assert scaler.get_scale() == 2 * TINY


def test_scale_never_reaches_infinity(device: torch.device) -> None:
    scaler = make(LossScaleConfig(init_scale=2.0**127, growth_interval=1, max_scale=None), device)
    scaler.update(flag(0, device))
    assert scaler.get_scale() == 2.0**127


@pytest.mark.parametrize(('h', 'falls'), [(1, [1, 1, 1]), (2, [0, 1, 1]), (3, [0, 0, 1])])
def test_hysteresis_refills_on_any_clean_step(h: int, falls: list[int], device: torch.device) -> None:
    scaler = make(LossScaleConfig(hysteresis=h), device)
    for _ in range(2):
        before = scaler.get_scale()
        seen = []
        for _ in falls:
            scaler.update(flag(1, device))
            seen.append(int(scaler.get_scale() < before))
            before = scaler.get_scale()
        assert seen == falls
        scaler.update(flag(0, device))


def test_floor_above_the_scale_never_raises_it(device: torch.device) -> None:
    scaler = make(LossScaleConfig(init_scale=4.0, min_scale=64.0), device)
    scaler.update(flag(1, device))
    assert scaler.get_scale() == 4.0


# -- static and disabled ------------------------------------------------------------------------------------------


@pytest.mark.parametrize('check', [True, False])
def test_static_scale_keeps_its_value(check: bool, device: torch.device) -> None:
    config = LossScaleConfig(dynamic=False, init_scale=128.0, growth_interval=1, min_scale=1024.0, max_scale=2.0)
    scaler = make(config, device, check)
    for bad in (1, 0, 1, 1):
        scaler.update(flag(bad, device))
    assert scaler.get_scale() == 128.0 and not scaler.is_dynamic and not scaler.is_one
    assert scaler.checks is check
    assert scaler.counts.tolist() == ([4, 3, 2] if check else [0, 0, 0])


@pytest.mark.parametrize('check', [True, False])
def test_static_one_costs_nothing(check: bool, device: torch.device) -> None:
    scaler = make(LossScaleConfig(dynamic=False, init_scale=1.0), device, check)
    loss = torch.ones((), device=device, dtype=torch.float16)
    assert scaler.is_one and scaler.scale(loss) is loss and scaler.inverse_scale() is None


def test_dynamic_one_is_not_one_for_good(device: torch.device) -> None:
    scaler = make(LossScaleConfig(init_scale=1.0), device)
    assert not scaler.is_one and scaler.inverse_scale() is not None


@pytest.mark.parametrize('dynamic', [True, False])
def test_disabled_does_nothing(dynamic: bool, device: torch.device) -> None:
    scaler = make(LossScaleConfig(dynamic=dynamic, init_scale=8.0, enabled=False), device)
    loss = torch.ones((), device=device)
    assert not scaler.is_enabled() and not scaler.checks and not scaler.is_dynamic and scaler.is_one
    assert scaler.scale(loss) is loss and scaler.inverse_scale() is None
    scaler.update(flag(1, device))
    assert scaler.get_scale() == 1.0 and scaler.counts.tolist() == [0, 0, 0]


def test_dynamic_always_checks(device: torch.device) -> None:
    assert make(LossScaleConfig(), device, check=False).checks


# -- scaling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('dtype', 'result'),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_loss_is_scaled_in_fp32(dtype: torch.dtype, result: torch.dtype, device: torch.device) -> None:
    scaler = make(LossScaleConfig(), device)
    loss = torch.tensor([3.0, -1.5], device=device, dtype=dtype, requires_grad=True)
    with NoHostRead():
        scaled = scaler.scale(loss)
    assert scaled.dtype is result and scaled.tolist() == [3.0 * 2**16, -1.5 * 2**16]
    # in float16, 3 * 65536 would be infinite
    (scaled / 2**16).sum().backward()
    assert loss.grad is not None and loss.grad.dtype is dtype and loss.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize('scale', [2.0**16, 3.0, 0.1, 2.0**127, TINY])
def test_inverse_is_rounded_once(scale: float, device: torch.device) -> None:
    scaler = make(LossScaleConfig(init_scale=scale, max_scale=None), device)
    inverse = scaler.inverse_scale()
    assert inverse is not None and inverse.dtype is torch.float32
    assert inverse.item() == float(np.float32(1.0 / np.float64(np.float32(scale))))


def test_no_host_read(device: torch.device) -> None:
    scaler = make(LossScaleConfig(growth_interval=2), device)
    loss = torch.ones((), device=device)
    good, bad = flag(0, device), flag(1, device)
    with NoHostRead():
        for found in (good, bad, good, good):
            scaler.scale(loss)
            scaler.inverse_scale()
            scaler.update(found)
    with pytest.raises(AssertionError), NoHostRead():
        scaler.get_scale()


# -- state --------------------------------------------------------------------------------------------------------

RULE = {'init_scale': 512.0, 'growth_factor': 3.0, 'backoff_factor': 0.25, 'growth_interval': 7, 'hysteresis': 4}


def used(device: torch.device, **changes: Any) -> LossScaler:
    """A scaler whose every field differs from its default."""
    scaler = make(LossScaleConfig(**{**RULE, **changes}), device)
    for bad in (0, 1, 1, 1, 1, 0, 1, 0, 0, 1):
        scaler.update(flag(bad, device))
    return scaler


def test_round_trip_with_nothing_at_its_default(device: torch.device) -> None:
    scaler = used(device)
    state = scaler.state_dict()
    assert state == {
        'scale': 128.0,
        'growth_factor': 3.0,
        'backoff_factor': 0.25,
        'growth_interval': 7,
        '_growth_tracker': 0,
        'hysteresis_tracker': 3,
        'dynamic': True,
        'steps': 10,
        'skips': 6,
        'consecutive_skips': 1,
    }
    scaler.update(flag(0, device))
    scaler.update(flag(0, device))
    state = scaler.state_dict()
    assert state['_growth_tracker'] == 2
    state.update(hysteresis_tracker=2, consecutive_skips=5)
    other = make(LossScaleConfig(**RULE), device)
    before = copy.deepcopy(state)
    assert other.load_state_dict(state) == []
    assert other.state_dict() == state == before
    assert other.current_scale.device.type == device.type and other.current_scale.dtype is torch.float32


@settings(max_examples=40, deadline=None)
@given(config=configs, first=st.lists(st.booleans(), max_size=12), second=st.lists(st.booleans(), max_size=12))
def test_going_on_from_a_state_is_going_on(
    device: torch.device, config: LossScaleConfig, first: list[bool], second: list[bool]
) -> None:
    whole, part = make(config, device), make(config, device)
    for bad in first:
        whole.update(flag(bad, device))
    part.load_state_dict(whole.state_dict())
    for bad in second:
        whole.update(flag(bad, device))
        part.update(flag(bad, device))
    assert whole.state_dict() == part.state_dict()


@settings(max_examples=200, deadline=None)
@given(
    scale=st.one_of(
        st.integers(1, int(torch.finfo(torch.float32).max)),
        st.floats(torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max),
    )
)
@example(scale=2**63)
@example(scale=int(torch.finfo(torch.float32).max))
def test_every_scale_that_is_accepted_is_taken_over(scale: float, device: torch.device) -> None:
    """Whole numbers too that torch does not take for a tensor, from 2**63 on."""
    state = {**used(device).state_dict(), 'scale': scale}
    check_scaler_state(state)
    target = make(LossScaleConfig(), device)
    target.load_state_dict(state)
    assert target.get_scale() == float(torch.tensor(float(scale), dtype=torch.float32))


@pytest.mark.parametrize('scale', [128.0, 1000.1, 0.3])
def test_static_state_round_trips_without_a_complaint(scale: float, device: torch.device) -> None:
    config = LossScaleConfig(dynamic=False, init_scale=scale)
    scaler = make(config, device)
    scaler.update(flag(1, device))
    other = make(config, device)
    assert other.load_state_dict(scaler.state_dict()) == []
    assert other.state_dict() == scaler.state_dict()


def test_gradscaler_loads_our_state(device: torch.device) -> None:
    theirs = torch.amp.GradScaler(device.type)
    theirs.load_state_dict(used(device).state_dict())
    assert theirs.get_scale() == 128.0
    assert (theirs.get_growth_factor(), theirs.get_backoff_factor(), theirs.get_growth_interval()) == (3.0, 0.25, 7)
    assert theirs.state_dict()['_growth_tracker'] == 0


def test_we_load_gradscalers_state(device: torch.device) -> None:
    theirs = torch.amp.GradScaler(device.type, init_scale=256.0, growth_interval=5)
    theirs.load_state_dict({**theirs.state_dict(), '_growth_tracker': 3})
    ours = make(LossScaleConfig(growth_interval=5, hysteresis=2), device)
    assert ours.load_state_dict(theirs.state_dict()) == []
    state = ours.state_dict()
    assert (state['scale'], state['_growth_tracker'], state['hysteresis_tracker']) == (256.0, 3, 2)
    assert ours.counts.tolist() == [0, 0, 0]


def test_disabled_gradscaler_has_an_empty_state(device: torch.device) -> None:
    ours = make(LossScaleConfig(), device)
    before = ours.state_dict()
    notes = ours.load_state_dict(torch.amp.GradScaler(device.type, enabled=False).state_dict())
    assert len(notes) == 1 and 'disabled' in notes[0] and ours.state_dict() == before


@pytest.mark.parametrize(
    ('mine', 'change', 'words', 'scale'),
    [
        (LossScaleConfig(**RULE), {'dynamic': False}, 'static', 512.0),
        (LossScaleConfig(dynamic=False, init_scale=8.0), {}, 'not used', 8.0),
        (LossScaleConfig(dynamic=False, init_scale=8.0), {'dynamic': False}, 'not used', 8.0),
        (LossScaleConfig(**{**RULE, 'growth_interval': 9}), {}, 'growth_interval 7 -> 9', 128.0),
        (LossScaleConfig(**RULE), {'scale': 0.1}, 'rounded', float(np.float32(0.1))),
        (LossScaleConfig(enabled=False), {}, 'off', 1.0),
    ],
    ids=str,
)
def test_what_is_not_taken_over_is_told(
    mine: LossScaleConfig, change: dict[str, Any], words: str, scale: float, device: torch.device
) -> None:
    scaler = make(mine, device)
    notes = scaler.load_state_dict({**used(device).state_dict(), **change})
    assert len(notes) == 1 and words in notes[0]
    assert scaler.get_scale() == scale
    if mine.enabled:
        assert scaler.counts.tolist() == [10, 6, 1]


BAD = [
    ('scale', math.nan),
    ('scale', math.inf),
    ('scale', 0.0),
    ('scale', -1.0),
    ('scale', 1e39),
    ('scale', 1e-60),
    ('scale', True),
    ('scale', '128'),
    ('scale', None),
    ('_growth_tracker', -1),
    ('_growth_tracker', 1.5),
    ('_growth_tracker', 2**31),
    ('_growth_tracker', None),
    ('hysteresis_tracker', -1),
    ('hysteresis_tracker', 2**31),
    ('hysteresis_tracker', 'one'),
    ('dynamic', 'yes'),
    ('dynamic', None),
    ('steps', -1),
    ('steps', 2.0),
    ('steps', 2**70),
    ('skips', True),
    ('skips', 2**63),
    ('consecutive_skips', None),
]


@pytest.mark.parametrize(('key', 'value'), BAD, ids=str)
def test_bad_state_names_its_key_and_changes_nothing(key: str, value: Any, device: torch.device) -> None:
    scaler = used(device)
    before = scaler.state_dict()
    state = {**make(LossScaleConfig(init_scale=2.0), device).state_dict(), key: value}
    with pytest.raises(AmpCheckpointError) as caught:
        scaler.load_state_dict(state)
    assert repr(key) in str(caught.value) and repr(value) in str(caught.value)
    assert scaler.state_dict() == before


@pytest.mark.parametrize('key', ['scale', '_growth_tracker'])
def test_missing_key(key: str, device: torch.device) -> None:
    scaler = used(device)
    before = scaler.state_dict()
    state = {name: value for name, value in before.items() if name != key}
    with pytest.raises(AmpCheckpointError, match=f'no key {key!r}'):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


@pytest.mark.parametrize('state', [None, [1], 3.0, 'state'])
def test_state_that_is_no_dict(state: Any) -> None:
    with pytest.raises(AmpCheckpointError, match='must be a dict'):
        check_scaler_state(state)
