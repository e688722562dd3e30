"""Wrong arguments: what the wrappers of mmengine and apex raise for one, our error is one of these too.

The stock classes are really called, with every argument and a list of values. apex cannot be installed any more, so what its
``amp.initialize`` raised is a table.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mmengine.optim import AmpOptimWrapper as StockAmp
from mmengine.optim import ApexOptimWrapper as StockApex
from mmengine.optim import OptimWrapper
from mmengine.optim.optimizer import amp_optimizer_wrapper, apex_optimizer_wrapper
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
#: The kinds of error that say "this argument is wrong"; others are accidents, such as an attribute that is not there.
MEANT = (TypeError, AssertionError, ValueError, RuntimeError)


def outcome(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def built(cls: type, argument: str, value: Any) -> Exception | None:
    """The error of a wrapper; a dict is one of its own, from which the stock classes pop."""
    words = {argument: dict(value) if isinstance(value, dict) else value}
    return outcome(lambda: cls(**{'optimizer': SGD([nn.Parameter(torch.ones(2))], lr=0.1), **words}))


#: A class of mmengine, ours that takes its place, and arguments of which it refuses something.
PAIRS: list[tuple[type, type, set[str]]] = [
    (StockAmp, AmpOptimWrapper, {'loss_scale', 'dtype'}),
    (StockApex, ApexOptimWrapper, set()),
    (OptimWrapper, AmpOptimWrapper, set()),
]


def test_errors_are_of_the_kinds_of_mmengine(monkeypatch: pytest.MonkeyPatch) -> None:
    # the stock classes ask for a GPU and for apex; what they do with their arguments needs neither
    monkeypatch.setattr(amp_optimizer_wrapper, 'is_cuda_available', lambda: True)
    monkeypatch.setattr(amp_optimizer_wrapper, 'GradScaler', lambda **words: torch.amp.GradScaler('cpu', **words))
    monkeypatch.setattr(apex_optimizer_wrapper, 'apex_amp', object())
    for stock, ours, checked in PAIRS:
        names = [
            name for cls in (stock, OptimWrapper) for name in inspect.signature(cls).parameters if name != 'kwargs'
        ]
        wrong: list[Any] = []
        refused = set()
        for argument, value in itertools.product(dict.fromkeys([*names, 'unknown_argument']), VALUES):
            theirs, mine = built(stock, argument, value), built(ours, argument, value)
            if mine is not None and not isinstance(mine, AmpError):
                wrong.append((argument, value, mine))
            # integers as loss_scale, torch's types: accepted here, where stock refuses
            if mine is None or not isinstance(theirs, MEANT):
                continue
            if not isinstance(mine, next(kind for kind in MEANT if isinstance(theirs, kind))):
                wrong.append((argument, value, theirs, mine))
            refused.add(argument)
        assert wrong == [] and refused >= checked | {'accumulative_counts', 'clip_grad', 'unknown_argument'}, stock


def test_configuration_error_is_of_every_kind() -> None:
    error = built(AmpOptimWrapper, 'loss_scale', 'unknown')
    assert isinstance(error, AmpConfigError) and all(isinstance(error, kind) for kind in MEANT)
    for cls in (OptimWrapper, AmpOptimWrapper, ApexOptimWrapper):
        with pytest.raises(TypeError, match='optimizer'):
            cls()


#: What apex's ``amp.initialize`` raised for an argument: documented behaviour of its last release.
APEX: list[tuple[dict[str, Any], type[Exception]]] = [
    *[({'opt_level': value}, RuntimeError) for value in ('O9', 'o1', '', 1, None)],
    *[({'opt_level': value}, TypeError) for value in ([], {})],
    *[({'opt_level': 'O2', 'keep_batchnorm_fp32': value}, AssertionError) for value in ('yes', 1.5, 'true', [])],
    ({'opt_level': 'O1', 'keep_batchnorm_fp32': True}, RuntimeError),
    ({'opt_level': 'O1', 'master_weights': True}, RuntimeError),
    ({'opt_level': 'O1', 'cast_model_type': torch.float16}, RuntimeError),
    *[({'opt_level': level, 'patch_torch_functions': True}, RuntimeError) for level in ('O0', 'O2', 'O3')],
    *[({'loss_scale': value}, ValueError) for value in ('unknown', '')],
    *[({'loss_scale': value}, TypeError) for value in ([], object())],
    *[({'num_losses': value}, TypeError) for value in ('2', 1.5, [])],
    *[({'models': value}, TypeError) for value in (5, None, 'model', {})],
    *[({'optimizers': value}, TypeError) for value in (5, 'SGD', {}, object())],
    ({'models': lambda: nn.Linear(2, 2).half()}, RuntimeError),
    ({'models': lambda: nn.DataParallel(nn.Linear(2, 2))}, RuntimeError),
]


def test_errors_are_of_the_kinds_of_apex() -> None:
    wrong = []
    for words, kind in APEX:
        model = nn.Linear(2, 2)
        given = {'models': model, 'optimizers': SGD(model.parameters(), lr=0.1), 'verbosity': 0, **words}
        found = outcome(
            functools.partial(amp.initialize, **{k: v() if inspect.isfunction(v) else v for k, v in given.items()})
        )
        if not isinstance(found, kind):
            wrong.append((words, found))
    assert wrong == []


def test_argument_is_taken_or_refused_with_its_name_and_nothing_changed() -> None:
    wrong = []
    for argument, value in itertools.product([*inspect.signature(amp.initialize).parameters][2:], VALUES):
        model = nn.Linear(2, 2)
        words = {'verbosity': 0, argument: value}
        error = outcome(functools.partial(amp.initialize, model, SGD(model.parameters(), lr=0.1), **words))
        named = isinstance(error, AmpError) and argument in str(error) and model.weight.dtype is torch.float32
        if error is not None and not named:
            wrong.append((argument, value, error))
    assert wrong == []
