"""The numbers of the monitor against the same ones computed plainly in float64; nothing is read, and nothing is changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from bits import differences
from ops_models import NoHostRead
from torch import Tensor, nn

from amp_wrapper import AmpConfigError, AmpOptimWrapper, FusedAdamW, amp
from amp_wrapper.diagnostics import monitor as monitor_module
from amp_wrapper.diagnostics.measured_numbers import MEANINGS, NUMBERS
from amp_wrapper.diagnostics.monitor import LayerRanges, Monitor, check_interval
from amp_wrapper.engine.parts import EngineParts

HALF = {'O1': torch.float16, 'O2': torch.float16, 'O3': torch.float16, 'O4': torch.bfloat16, 'O5': torch.bfloat16}


def net(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    )
    return model.to(device)


def batch(step: int, device: torch.device) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(device)


class Watched:
    """A training whose steps are measured, all of them or some."""

    def __init__(
        self,
        level: str,
        device: torch.device,
        kind: Callable[..., Any] = torch.optim.AdamW,
        due: Callable[[int], bool] = lambda step: True,
        is_measured: bool = True,
        **options: Any,
    ) -> None:
        self.model, self.device = net(device), device
        optimizer = kind(self.model.parameters(), lr=1e-3)
        self.wrapper = AmpOptimWrapper(opt_level=level, optimizer=optimizer, verbosity=0, **options)
        self.wrapper.attach(self.model)
        self.rows: list[Tensor] = []
        self.layers: list[LayerRanges] = []
        self.step = -1
        self.parts: EngineParts = self.wrapper._engine.parts
        if is_measured:
            self.parts.observers.append(Monitor(lambda: (due(self.step), True), self.rows.append, self.layers.append))

    def backward(self, factor: float = 1.0) -> None:
        self.step += 1
        with self.wrapper.optim_context(self.model):
            loss = self.model(batch(self.step, self.device)).float().square().mean() * 1e-3 * factor
        self.wrapper.backward(loss)

    def update(self, factor: float = 1.0) -> None:
        self.backward(factor)
        self.wrapper.step()
        self.wrapper.zero_grad()

    def numbers(self) -> dict[str, float]:
        return dict(zip(NUMBERS, self.rows[-1].tolist()))


def expected(watched: Watched, level: str) -> dict[str, float]:
    """Gradients and weights before a step, by plain arithmetic in float64."""
    dtype = HALF[level]
    info = torch.finfo(dtype)
    smallest = info.tiny * info.eps
    casts = level not in ('O1', 'O4')
    chosen = [p for p in watched.parts.weights() if p.dtype is dtype or not casts]
    gradients = torch.cat([p.grad.double().flatten() for p in chosen]).abs()
    weights = torch.cat([p.detach().double().flatten() for p in chosen]).abs()
    zero = gradients < smallest / 2
    return {
        'amp_grad_underflow': float(zero.double().mean()),
        'amp_grad_tiny': float(((gradients >= smallest) & (gradients < 4 * smallest)).double().mean()),
        'amp_grad_peak': math.log2(float(gradients.max()) / info.max),
        'amp_weight_peak': math.log2(float(weights.max()) / info.max),
    }


@pytest.mark.parametrize('level', list(HALF))
def test_gradients_and_weights(level: str, device: torch.device) -> None:
    # so small a scale that a part of the gradients is lost
    options: dict[str, Any] = {'loss_scale': 2.0**-6} if HALF[level] is torch.float16 else {}
    # AdamW's eps is zero in float16
    watched = Watched(level, device, torch.optim.SGD, **options)
    for _ in range(3):
        watched.backward()
        wanted = expected(watched, level)
        watched.wrapper.step()
        watched.wrapper.zero_grad()
        found = watched.numbers()
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    if HALF[level] is torch.float16:
        assert wanted['amp_grad_underflow'] > 0.05
        assert wanted['amp_grad_tiny'] > 0.01


def test_nothing_at_o0(device: torch.device) -> None:
    watched = Watched('O0', device, skip_nonfinite=True)
    watched.update()
    assert watched.rows == watched.layers == []


@pytest.mark.parametrize('level', ['O2', 'O5'])
@pytest.mark.parametrize('masters', [True, 'split'])
def test_updates_that_16_bit_weights_would_lose(level: str, masters: Any, device: torch.device) -> None:
    watched = Watched(level, device, FusedAdamW, master_weights=masters)
    for _ in range(4):
        watched.backward()
        before = _exact(watched)
        watched.wrapper.step()
        watched.wrapper.zero_grad()
        after = _exact(watched)
        update = after.double() - before.double()
        rounded = before.to(HALF[level])
        moved = update != 0
        lost = moved & ((rounded.double() + update).to(HALF[level]) == rounded)
        found = watched.numbers()
        assert found['amp_update_lost'] == pytest.approx(float(lost.sum() / moved.sum()), abs=2e-3)
        info = torch.finfo(HALF[level])
        power = rounded.double().abs().clamp(min=info.tiny).log2().floor()
        spacing = torch.exp2(power) * info.eps
        assert found['amp_update_spacing'] == pytest.approx(float((update.abs() / spacing)[moved].mean()), rel=1e-3)
    assert 0.02 < found['amp_update_lost'] < 1


def _exact(watched: Watched) -> Tensor:
    from amp_wrapper.casting import fp32_values

    values = [fp32_values.fp32_value(p) for p in watched.parts.weights() if p.dtype in HALF.values()]
    return torch.cat([value.detach().flatten().clone() for value in values if value is not None])


def test_updates_of_large_models_are_sampled(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Watched('O5', device)
    whole.update()
    taken = []
    copies = monitor_module._masters_of

    def masters_of(parts: EngineParts) -> list[Tensor]:
        taken.append(copies(parts))
        return taken[-1]

    monkeypatch.setattr(monitor_module, '_masters_of', masters_of)
    monkeypatch.setattr(monitor_module, 'SAMPLE', 1000)
    part = Watched('O5', device)
    part.update()
    assert 500 <= sum(value.numel() for value in taken[0]) <= 1000 + len(taken[0])
    assert part.numbers()['amp_update_lost'] == pytest.approx(whole.numbers()['amp_update_lost'], abs=0.08)


def test_no_updates_without_masters(device: torch.device) -> None:
    for level in ('O1', 'O3'):
        watched = Watched(level, device)
        watched.update()
        assert math.isnan(watched.numbers()['amp_update_lost'])


def test_skip_rate(device: torch.device) -> None:
    watched = Watched('O2', device, due=lambda step: step % 4 == 0)
    rates = []
    for step in range(9):
        watched.update(math.inf if step in (0, 2, 3) else 1.0)
        if step % 4 == 0:
            rates.append(watched.numbers()['amp_skip_rate'])
    assert rates == [1.0, 0.5, 0.0]
    # a skipped step updates nothing
    assert watched.rows[0][NUMBERS.index('amp_update_lost')].isnan()
    assert len(watched.rows) == 3


def test_scripts_see_the_same_as_mmengine(device: torch.device) -> None:
    """There gradients are unscaled after each backward pass, in FP32: what was zero before is zero, the limits move."""
    scale = 2.0**-6
    watched = Watched('O2', device, loss_scale=scale)
    watched.update()
    model = net(device)
    model, optimizer = amp.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), opt_level='O2', loss_scale=scale, verbosity=0
    )
    with amp.monitor(optimizer, 1) as watch:
        loss = model(batch(0, device)).float().square().mean() * 1e-3
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    found = watch.read()
    wanted = {name: value for name, value in watched.numbers().items() if not math.isnan(value)}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize('level', ['O1', 'O2', 'O5'])
def test_layers(level: str, device: torch.device) -> None:
    watched = Watched(level, device)
    watched.backward()
    gradients = {watched.parts.name(p): p.grad.clone() for p in watched.parts.weights() if p.grad is not None}
    watched.wrapper.step()
    plain = watched.layers[0].plain()
    assert plain['dtype'] == str(HALF[level]).removeprefix('torch.')
    assert plain['loss_scale'] == (1.0 if level == 'O5' else 65536.0)
    assert set(plain['gradients']) == set(plain['weights'])
    for name, ranges in plain['gradients'].items():
        grad = gradients[name].double().abs()
        assert ranges['elements'] == grad.numel()
        assert ranges['zeros'] == int((grad == 0).sum())
        assert ranges['largest'] == float(grad.max())
        powers = grad[grad > 0].log2().floor().int().tolist()
        assert {int(power): count for power, count in ranges['powers'].items()} == {
            power: powers.count(power) for power in set(powers)
        }


@pytest.mark.parametrize('level', ['O1', 'O2', 'O5'])
@pytest.mark.parametrize('kind', [torch.optim.AdamW, FusedAdamW], ids=['AdamW', 'FusedAdamW'])
def test_training_is_the_same_bit_for_bit(level: str, kind: Any, device: torch.device) -> None:
    runs = []
    for is_measured in (False, True):
        watched = Watched(level, device, kind, is_measured=is_measured)
        for step in range(5):
            watched.update(math.inf if step == 2 else 1.0)
        runs.append([watched.model.state_dict(), watched.wrapper.state_dict()])
    assert differences(runs[0], runs[1]) == []
    assert len(watched.rows) == 5


def test_the_device_is_not_read(device: torch.device) -> None:
    watched = Watched('O2', device, FusedAdamW)
    watched.update()
    with NoHostRead():
        watched.update()
    assert len(watched.rows) == 2


def test_each_number_has_a_meaning() -> None:
    assert tuple(MEANINGS) == NUMBERS
    assert len(NUMBERS) <= 8


@pytest.mark.parametrize('value', [1, np.int64(50), np.uint8(3)])
def test_interval(value: Any) -> None:
    found = check_interval('interval', value)
    assert type(found) is int and found == value


@pytest.mark.parametrize('value', [0, -1, 2.5, True, '5', None, np.int64(0), np.float64(2.0), np.bool_(True)])
def test_wrong_interval(value: Any) -> None:
    with pytest.raises(AmpConfigError, match=r'interval=.* must be a whole number'):
        check_interval('interval', value)
