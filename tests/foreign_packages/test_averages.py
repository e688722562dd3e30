"""Averages of weights: torch's AveragedModel with SWALR, timm's ModelEma V1 to V3, torch_ema; made before and after."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm.utils
import torch
import torch_ema
from bits import same
from torch import Tensor, nn
from torch.optim import swa_utils
from ways import DIGITS, LEVELS, Task, Way, check_masters, digits, held_out

from amp_wrapper import amp

STEPS = 12
Average = Callable[[nn.Module], Any]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loader() -> Iterator[Tensor]:
    return (digits(index)[0] for index in range(4))


#: name -> how it is made, how it takes up a step
AVERAGES: dict[str, tuple[Average, Callable[[Any, nn.Module], None]]] = {
    'AveragedModel (SWA)': (swa_utils.AveragedModel, lambda a, m: a.update_parameters(m)),
    'AveragedModel (EMA, foreach)': (
        lambda m: swa_utils.AveragedModel(m, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
        lambda a, m: a.update_parameters(m),
    ),
    'AveragedModel (buffers)': (
        lambda m: swa_utils.AveragedModel(m, avg_fn=swa_utils.get_ema_avg_fn(0.9), use_buffers=True),
        lambda a, m: a.update_parameters(m),
    ),
    'ModelEma': (lambda m: timm.utils.ModelEma(m, decay=0.9), lambda a, m: a.update(m)),
    'ModelEmaV2': (lambda m: timm.utils.ModelEmaV2(m, decay=0.9), lambda a, m: a.update(m)),
    'ModelEmaV3': (lambda m: timm.utils.ModelEmaV3(m, decay=0.9), lambda a, m: a.update(m)),
    'ModelEmaV3 (one by one, warm-up)': (
        lambda m: timm.utils.ModelEmaV3(m, decay=0.9999, foreach=False, use_warmup=True),
        lambda a, m: a.update(m, step=7),
    ),
    'deepcopy, lerp by hand': (copy.deepcopy, lambda a, m: lerp(a, m)),
}


@torch.no_grad()
def lerp(average: nn.Module, model: nn.Module) -> None:
    """As scripts do it, with what ``state_dict()`` of the model gives."""
    values = model.state_dict()
    for name, parameter in average.named_parameters():
        parameter.lerp_(values[name].to(parameter.dtype), 0.1)


def inside(average: Any) -> nn.Module:
    """The averaged model itself."""
    return getattr(average, 'ema', None) or getattr(average, 'module', average)


def holder(average: Any) -> nn.Module:
    """What is saved: the average with its counters, where it is a module."""
    return average if isinstance(average, nn.Module) else inside(average)


def fp32_model(way: Way) -> nn.Module:
    """A plain model with the FP32 values of a training."""
    model = DIGITS.model()
    model.load_state_dict(way.values())
    model.train(way.model.training)
    return model


@pytest.mark.parametrize('when', ['before', 'after'])
@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('name', AVERAGES)
def test_average_of_the_masters(name: str, level: str, when: str) -> None:
    """Bit-equal to the average of an FP32 model that follows the training outside; saved and resumed, evaluated, updated BN."""
    make, update = AVERAGES[name]
    made: list[Any] = []

    def start(seed: int = 0) -> tuple[Way, Any]:
        if when == 'before':
            # Way initialises what the task builds
            def model() -> nn.Module:
                made.append(built := DIGITS.model())
                made.append(make(built))
                return built

            way = Way(sgd, Task(model), level, seed=seed)
            return way, made[-1]
        way = Way(sgd, DIGITS, level, seed=seed)
        return way, make(way.model)

    way, average = start()
    outside = make(fp32_model(way))
    swa = swa_utils.SWALR(way.optimizer, swa_lr=0.05, anneal_epochs=5)
    for index in range(STEPS):
        way.step(digits(index))
        if index >= STEPS // 2:
            swa.step()
        update(average, way.model)
        update(outside, fp32_model(way))
        if index == STEPS // 2:
            file, saved, rate = way.save(), copy.deepcopy(holder(average).state_dict()), swa.state_dict()
            assert not any(value.dtype in (torch.float16, torch.bfloat16) for value in saved.values())
    expected = {key: value.float() for key, value in inside(outside).state_dict().items()}
    found = {key: value.float() for key, value in inside(average).state_dict().items()}
    start_values = {key: value.float() for key, value in way.start.items()}
    assert any(not torch.equal(found[key], start_values[key]) for key in found), 'the average does not move'
    off = {
        key: float((found[key] - value).abs().max()) for key, value in expected.items() if not same(found[key], value)
    }
    assert not off, f'not the average of the FP32 values: {off}'

    inside(average).eval(), inside(outside).eval()
    with torch.no_grad():
        ours, theirs = inside(average)(held_out()[0]), inside(outside)(held_out()[0])
        assert (ours.float() - theirs).abs().max() < 0.1, 'evaluation with the average'
        if 'buffers' not in name:
            swa_utils.update_bn(loader(), inside(average)), swa_utils.update_bn(loader(), inside(outside))
            for key, value in inside(outside).named_buffers():
                assert torch.allclose(dict(inside(average).named_buffers())[key].float(), value.float(), atol=0.05), key
    # the training has noticed nothing of it
    ending = way.everything()
    del way
    again, other = start(seed=5)
    again.load(file)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # the scheduler was not stepped after the optimizer, torch says
        swa = swa_utils.SWALR(again.optimizer, swa_lr=0.05, anneal_epochs=5)
    swa.load_state_dict(rate)
    again.load(file)
    holder(other).load_state_dict(saved)
    for index in range(STEPS // 2 + 1, STEPS):
        again.step(digits(index))
        swa.step()
        update(other, again.model)
    assert same(again.everything(), ending)
    resumed = {key: value.float() for key, value in inside(other).state_dict().items()}
    for key, value in found.items():
        if 'running' not in key and 'num_batches' not in key:
            assert same(resumed[key], value), key


@pytest.mark.parametrize('level', LEVELS)
def test_torch_ema(level: str) -> None:
    """Of what the optimizer steps; exchanged for evaluation, with the documented call for edits through ``.data``."""
    way = Way(sgd, DIGITS, level)
    masters = list(amp.master_params(way.optimizer))
    ema = torch_ema.ExponentialMovingAverage(masters, decay=0.9)
    outside_model = fp32_model(way)
    outside = torch_ema.ExponentialMovingAverage(outside_model.parameters(), decay=0.9)
    for index in range(STEPS):
        way.step(digits(index))
        ema.update()
        outside.update(fp32_model(way).parameters())
    assert same(list(ema.shadow_params), list(outside.shadow_params))
    before, plain = way.everything(), way.evaluate()
    with ema.average_parameters():
        amp.masters_changed(way.optimizer)
        averaged = way.evaluate()
        assert same(way.stepped(), list(ema.shadow_params))
        check_masters(way)
        exchanged = fp32_model(way)
    amp.masters_changed(way.optimizer)
    assert abs(averaged - plain) > 1e-4, 'evaluation has not used the average'
    exchanged.eval()
    with torch.no_grad():
        assert abs(float(DIGITS.loss(exchanged, held_out())) - averaged) < 0.05
    assert same(way.everything(), before) and way.evaluate() == plain
    way.step(digits(STEPS))


@pytest.mark.parametrize('when', ['before', 'after'])
@pytest.mark.parametrize('level', LEVELS)
def test_torch_ema_of_model_parameters(level: str, when: str) -> None:
    """``ExponentialMovingAverage(model.parameters())``, as its page has it."""
    made: list[torch_ema.ExponentialMovingAverage] = []

    def model() -> nn.Module:
        built = DIGITS.model()
        made.append(torch_ema.ExponentialMovingAverage(built.parameters(), decay=0.9))
        return built

    way = Way(sgd, Task(model), level)
    ema = made[0] if when == 'before' else torch_ema.ExponentialMovingAverage(way.model.parameters(), decay=0.9)
    outside = torch_ema.ExponentialMovingAverage(fp32_model(way).parameters(), decay=0.9)
    for index in range(STEPS):
        way.step(digits(index))
        ema.update(way.model.parameters())
        outside.update(fp32_model(way).parameters())
    expected = [value.float() for value in outside.shadow_params]
    found = [value.float() for value in ema.shadow_params]
    away = max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) for a, b in zip(found, expected, strict=True))
    plain, before = way.evaluate(), way.everything()
    with ema.average_parameters(way.model.parameters()):
        averaged = way.evaluate()
    assert averaged != plain
    assert same(way.everything(), before) and way.evaluate() == plain
    way.step(digits(STEPS))
    assert away == 0, f'off by {away:.3g}: 16-bit weights were averaged'
