"""timm's ModelEma V1 to V3 hold what they hold of an FP32 model, made before the model is cast or after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm.utils
from bits import differences
from pairs import pairs
from torch import Tensor, nn
from toy_training import Net, Training

LEVELS = ('O1', 'O2', 'O4', 'O5')
AVERAGES: dict[str, Callable[[nn.Module], Any]] = {
    'ModelEma': lambda model: timm.utils.ModelEma(model, decay=0.9),
    'V2': lambda model: timm.utils.ModelEmaV2(model, decay=0.9),
    'V3': lambda model: timm.utils.ModelEmaV3(model, decay=0.9),
    'V3, one by one': lambda model: timm.utils.ModelEmaV3(model, decay=0.9, foreach=False),
}


def values(average: Any) -> list[Tensor]:
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
        average.update(model)
        expected.update(outside)
    assert differences(values(average), values(expected)) == []
    assert differences(values(average), start) != []
