"""Errors of mmengine that become one line, those that do not, and keys of ``custom_keys`` that are misspelt."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import CheckpointHook
from mmengine.registry import MODELS, OPTIMIZERS
from torch import nn

from amp_wrapper import AmpConfigError
from amp_wrapper.openmmlab import config_errors


def fails(text: str) -> Callable[[], None]:
    def fail() -> None:
        raise KeyError(text)

    return fail


def asks_for(metric: str) -> Callable[[], None]:
    """mmengine's own hook, with a metric that it does not find."""

    def fail() -> None:
        hook = CheckpointHook(interval=1, save_best='acc', rule='greater')
        hook.before_train(
            SimpleNamespace(
                work_dir='.', message_hub=SimpleNamespace(runtime_info={}), epoch=0, logger=SimpleNamespace(info=print)
            )
        )
        hook._save_best_checkpoint(SimpleNamespace(epoch=1, iter=2), {metric: 1.0})

    return fail


def wrong_argument_inside() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            nn.Linear(2, 2, bais=True)  # type: ignore[call-arg]

    MODELS.register_module(name='PartThatFails', module=Part, force=True)
    MODELS.build(dict(type='PartThatFails'))


class PickySGD(torch.optim.SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        raise ValueError('not today')


class Picky:
    def __init__(self, value: Any) -> None:
        raise ValueError(f'value={value} is not liked')


@pytest.mark.parametrize(
    ('work', 'text'),
    [
        (lambda: MODELS.build(dict(type='Conv2dd')), "type='Conv2dd' is not in the registry of mmengine for model"),
        (
            asks_for('accuracy'),
            "save_best='acc' (did you mean 'accuracy'?): the validation gives accuracy",
        ),
        (
            lambda: OPTIMIZERS.build(dict(type='SGD', params=[nn.Parameter(torch.ones(1))], lr='abc', momentum=0.5)),
            "optimizer.type='SGD' refuses its arguments (lr='abc', momentum=0.5, ",
        ),
        (
            lambda: OPTIMIZERS.build(dict(type='FusedAdamW', params=[nn.Parameter(torch.ones(1))], lr=-1.0)),
            "optimizer.type='FusedAdamW' refuses its arguments (lr=-1.0, ",
        ),
        # no argument is wrong
        (lambda: OPTIMIZERS.build(dict(type='SGD', params=[], lr=0.1)), None),
        # errors of the user's own
        (lambda: PickySGD([nn.Parameter(torch.ones(1))], lr=0.1), None),
        (lambda: Picky(None), None),
        (fails('cat is not in the word registry'), None),
        (fails('cat is not in the model registry'), None),
        (fails('acc'), None),
        (wrong_argument_inside, None),
    ],
)
def test_errors_of_mmengine(work: Callable[[], Any], text: str | None) -> None:
    cfg = Config(dict(default_hooks=dict(checkpoint=dict(type='CheckpointHook', save_best='acc'))))
    with pytest.raises(Exception) as caught, config_errors.typed(cfg):
        work()
    assert isinstance(caught.value, AmpConfigError) == (text is not None), caught.value
    assert text is None or (text in str(caught.value) and '\n' not in str(caught.value))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.ones(1))
        self.embed = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize('wrapped', [False, True])
@pytest.mark.parametrize(
    ('keys', 'constructor', 'told'),
    [
        (['head', 'embed.weight', '.cls_token', 'head.weight'], {}, 0),
        (['haed'], {}, 1),
        (['haed'], {'constructor': 'DefaultOptimWrapperConstructor'}, 1),
        (['haed'], {'constructor': 'Another'}, 0),
        # which a model of the same family may have
        (['absolute_pos_embed', 'relative_position_bias_table'], {}, 0),
    ],
)
def test_misspelt_keys(keys: list[str], constructor: dict[str, str], told: int, wrapped: bool) -> None:
    lines: list[str] = []
    model: nn.Module = Model()
    if wrapped:
        inner, model = model, nn.Module()
        model.module = inner
    paramwise = dict(custom_keys={key: dict(lr_mult=2.0) for key in keys})
    for wrapper in (
        dict(type='AmpOptimWrapper', optimizer=dict(type='SGD'), paramwise_cfg=paramwise, **constructor),
        dict(**constructor, part=dict(type='AmpOptimWrapper', optimizer=dict(type='SGD'), paramwise_cfg=paramwise)),
    ):
        lines.clear()
        runner = SimpleNamespace(model=model, logger=SimpleNamespace(warning=lines.append))
        config_errors.say_misspelt_keys(runner, Config(dict(optim_wrapper=wrapper)))
        assert len(lines) == told, lines
        assert all("(did you mean 'head'?)" in line for line in lines)
    # of a FlexibleRunner, which builds its model later
    runner.model = Config(dict(a=1))
    config_errors.say_misspelt_keys(runner, Config(dict(optim_wrapper=wrapper)))
