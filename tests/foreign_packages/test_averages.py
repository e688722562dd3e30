"""timm's ModelEma V1 to V3 and torch_ema hold what they hold of an FP32 model, made before the model is cast or after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm.utils
from bits import differences
from pairs import pairs
from torch import Tensor, nn
from torch_ema import ExponentialMovingAverage
from toy_training import Net, Training

LEVELS = ('O1', 'O2', 'O4', 'O5')
AVERAGES: dict[str, Callable[[nn.Module], Any]] = {
    'ModelEma': lambda model: timm.utils.ModelEma(model, decay=0.9),
    'V2': lambda model: timm.utils.ModelEmaV2(model, decay=0.9),
    'V3': lambda model: timm.utils.ModelEmaV3(model, decay=0.9),
    'V3, one by one': lambda model: timm.utils.ModelEmaV3(model, decay=0.9, foreach=False),
    'torch_ema': lambda model: ExponentialMovingAverage(model.parameters(), decay=0.9),
}


def values(average: Any) -> list[Tensor]:
    if isinstance(average, ExponentialMovingAverage):
        # those that were made of 16-bit weights are read as they are
        return [value.float() for value in average.shadow_params]
    return list((getattr(average, 'ema', None) or average.module).state_dict().values())


@pairs(level=LEVELS, kind=AVERAGES, made=('before', 'after'))
def test_averages_are_those_of_an_fp32_model(level: str, kind: str, made: str) -> None:
    model, outside = Net(), Net()
    early = AVERAGES[kind](model)
    run = Training(level, 'amp', model=model, loss_scale=8.0)
    outside.load_state_dict(model.state_dict())
    average, expected = early if made == 'before' else AVERAGES[kind](model), AVERAGES[kind](outside)
    start = [value.clone() for value in values(expected)]
    for index in range(4):
        run.train(index)
        outside.load_state_dict(model.state_dict())
        average.update(model.parameters() if kind == 'torch_ema' else model)
        expected.update(outside.parameters() if kind == 'torch_ema' else outside)
    assert differences(values(average), values(expected)) == []
    assert differences(values(average), start) != []
