"""Every argument of the wrappers and of ``amp.initialize`` takes a value, or refuses it by its name with nothing changed."""

from __future__ import annotations

import inspect
import itertools
import math
from typing import Any

import pytest
import torch
from mmengine.optim import AmpOptimWrapper as StockAmp
from mmengine.optim import ApexOptimWrapper as StockApex
from mmengine.optim import OptimWrapper
from torch import nn
from torch.optim import SGD

from amp_wrapper import AmpConfigError, AmpError, AmpOptimWrapper, ApexOptimWrapper, amp

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 0.0, 1.0, -2.5, math.nan, math.inf, 1e60, '', 'unknown', 'dynamic', 'O1', 'O9', '1', 'True',
    'float16', 'int8', [], ['x'], (), {}, {'max_norm': 1.0}, {'max_norm': 'x'}, {'type': 'norm'}, {'type': 'value'},
    {'type': 'other', 'max_norm': 1.0}, {'unknown': 1}, {'init_scale': 4.0}, {'init_scale': 'x'}, {'growth_factor': 0.5},
    {'backoff_factor': 2.0}, {'growth_interval': 0.5}, object(), int, torch.float16, torch.int8, torch.ones(()),
    nn.Linear(1, 1),
]  # fmt: skip


def names(*functions: Any) -> list[str]:
    found = (name for function in functions for name in inspect.signature(function).parameters)
    return [name for name in dict.fromkeys(found) if name not in ('self', 'kwargs', 'models', 'optimizers')]


def wrap(cls: Any, words: dict[str, Any]) -> None:
    # a dict is one of its own: classes of mmengine pop from it
    words = {name: dict(value) if isinstance(value, dict) else value for name, value in words.items()}
    cls(**{'optimizer': SGD([nn.Parameter(torch.ones(2))], lr=0.1), **words})


def initialize(_: Any, words: dict[str, Any]) -> None:
    model = nn.Linear(2, 2)
    try:
        amp.initialize(model, SGD(model.parameters(), lr=0.1), **{'verbosity': 0, **words})
    except AmpError:
        assert model.weight.dtype is torch.float32
        raise


#: What is called, the names of arguments, and those of them that refuse some value.
CALLED: dict[str, tuple[Any, Any, list[str], set[str]]] = {
    'AmpOptimWrapper': (wrap, AmpOptimWrapper, names(StockAmp, OptimWrapper), {'loss_scale', 'dtype', 'clip_grad'}),
    'ApexOptimWrapper': (
        wrap,
        ApexOptimWrapper,
        names(StockApex, OptimWrapper),
        {'opt_level', 'loss_scale', 'clip_grad'},
    ),
    'amp.initialize': (initialize, None, names(amp.initialize), {'opt_level', 'num_losses', 'verbosity'}),
}


@pytest.mark.parametrize('called', CALLED)
def test_argument_is_taken_or_refused_by_its_name(called: str) -> None:
    """By an error of every kind that apex and mmengine raise for a wrong argument."""
    call, cls, arguments, checked = CALLED[called]
    wrong: list[Any] = []
    refused = set()
    for argument, value in itertools.product([*arguments, 'unknown_argument'], VALUES):
        try:
            call(cls, {argument: value})
        except Exception as error:
            kinds = (
                (TypeError,)
                if argument == 'unknown_argument'
                else (TypeError, AssertionError, ValueError, RuntimeError)
            )
            if not all(isinstance(error, kind) for kind in kinds) or argument not in str(error):
                wrong.append((argument, value, error))
            refused.add(argument)
    assert wrong == [] and refused >= checked | {'unknown_argument'}


def test_all_wrong_arguments_come_in_one_error() -> None:
    with pytest.raises(AmpConfigError, match='2 conflicts') as caught:
        wrap(AmpOptimWrapper, {'loss_scale': 'unknown', 'clip_grad': []})
    assert len(caught.value.problems) == 2
    for cls in (OptimWrapper, AmpOptimWrapper, ApexOptimWrapper):
        with pytest.raises(TypeError, match='optimizer'):
            cls()
