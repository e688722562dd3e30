"""Wrong arguments: what mmengine's own wrappers and apex raise for one, our error is one of these too.

The stock classes are really called, with every argument and a grid of values. apex cannot be installed any more, so what its
``amp.initialize`` raised is a table.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from mmengine.optim import AmpOptimWrapper as StockAmp
from mmengine.optim import ApexOptimWrapper as StockApex
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.optim.optimizer import amp_optimizer_wrapper, apex_optimizer_wrapper
from torch import nn
from torch.optim import SGD

from amp_wrapper import AmpOptimWrapper, ApexOptimWrapper, amp
from amp_wrapper.errors import AmpConfigError, AmpError

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


def optimizer() -> SGD:
    return SGD([nn.Parameter(torch.ones(2))], lr=0.1)


def built(cls: type, argument: str, value: Any) -> Callable[[], Any]:
    # a dict of its own: the stock classes pop from it
    words = {'optimizer': optimizer(), argument: dict(value) if isinstance(value, dict) else value}
    return lambda: cls(**words)


@pytest.fixture(scope='module', autouse=True)
def _the_stock_classes_run_here() -> Any:
    """They ask for a GPU and for apex; what they do with their arguments needs neither."""
    with mock.patch.object(amp_optimizer_wrapper, 'is_cuda_available', return_value=True), \
         mock.patch.object(amp_optimizer_wrapper, 'GradScaler', lambda **kw: torch.amp.GradScaler('cpu', **kw)), \
         mock.patch.object(apex_optimizer_wrapper, 'apex_amp', object()):  # fmt: skip
        yield


PAIRS = [(StockAmp, AmpOptimWrapper), (StockApex, ApexOptimWrapper), (OptimWrapper, AmpOptimWrapper)]


def arguments(stock: type) -> list[str]:
    found = [name for cls in (stock, OptimWrapper) for name in inspect.signature(cls).parameters]
    return [name for name in dict.fromkeys([*found, 'unknown_argument']) if name != 'kwargs']


CASES = [(stock, ours, name) for stock, ours in PAIRS for name in arguments(stock)]


@pytest.mark.parametrize(('stock', 'ours', 'argument'), CASES, ids=lambda value: getattr(value, '__name__', value))
def test_errors_of_mmengine(stock: type, ours: type, argument: str) -> None:
    seen = 0
    for value in VALUES:
        theirs, mine = outcome(built(stock, argument, value)), outcome(built(ours, argument, value))
        assert mine is None or isinstance(mine, AmpError), (value, mine)
        if mine is None or not isinstance(theirs, MEANT):
            continue  # accepted here, where stock refuses: integers as loss_scale, torch dtypes by their strings
        kind = next(kind for kind in MEANT if isinstance(theirs, kind))
        assert isinstance(mine, kind), (value, theirs, mine)
        seen += 1
    # an accident of which nothing is known is no proof
    refusing = {
        StockAmp: {'loss_scale', 'dtype'}, StockApex: set(), OptimWrapper: set()
    }[stock] | {'accumulative_counts', 'clip_grad', 'unknown_argument'}  # fmt: skip
    assert seen > 0 or argument not in refusing


@pytest.mark.parametrize(
    ('words', 'kind'),
    [
        ({'loss_scale': 'unknown'}, TypeError),
        ({'loss_scale': []}, TypeError),
        ({'dtype': 'int8'}, AssertionError),
        ({'dtype': 3}, AssertionError),
        ({'clip_grad': []}, AssertionError),
        ({'clip_grad': {}}, AssertionError),
        ({'clip_grad': {'type': 'norm'}}, AssertionError),
        ({'clip_grad': {'type': 'other', 'max_norm': 1.0}}, ValueError),
        ({'accumulative_counts': 0}, AssertionError),
        ({'accumulative_counts': 'x'}, TypeError),
        ({'no_such_argument': 1}, TypeError),
        ({'optimizer': 5}, TypeError),
        ({'optimizer': 'SGD'}, TypeError),
    ],
    ids=str,
)
def test_one_by_one(words: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        AmpOptimWrapper(**{'optimizer': optimizer(), **words})
    assert isinstance(caught.value, AmpError) and next(iter(words)) in str(caught.value)


def test_without_an_optimizer() -> None:
    for cls in (OptimWrapper, AmpOptimWrapper, ApexOptimWrapper):
        with pytest.raises(TypeError, match='optimizer'):
            cls()


def test_wrappers_in_a_dict() -> None:
    for value in VALUES:
        with pytest.raises(AssertionError):
            OptimWrapperDict(a=value)


def half() -> nn.Module:
    return nn.Linear(2, 2).half()


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
    ({'models': half}, RuntimeError),
    ({'models': lambda: nn.DataParallel(nn.Linear(2, 2))}, RuntimeError),
]


# not the values themselves: an id with an address in it differs from process to process, and workers share one list of tests
@pytest.mark.parametrize(
    ('words', 'kind'), APEX, ids=[f'{index}-{"-".join(words)}' for index, (words, _) in enumerate(APEX)]
)
def test_errors_of_apex(words: dict[str, Any], kind: type[Exception]) -> None:
    model = nn.Linear(2, 2)
    given = {'models': model, 'optimizers': SGD(model.parameters(), lr=0.1), 'verbosity': 0, **words}
    given = {key: value() if inspect.isfunction(value) else value for key, value in given.items()}
    with pytest.raises(kind):
        amp.initialize(**given)


@pytest.mark.parametrize('kind', [ValueError, TypeError, AssertionError, RuntimeError])
def test_a_configuration_error_is_each(kind: type[Exception]) -> None:
    with pytest.raises(kind, match='2 conflicts') as caught:
        AmpOptimWrapper(loss_scale='unknown', clip_grad=[], optimizer=optimizer())
    assert isinstance(caught.value, AmpConfigError) and len(caught.value.problems) == 2


@pytest.mark.parametrize('argument', [*itertools.islice(inspect.signature(amp.initialize).parameters, 2, None)])
def test_every_argument_of_initialize(argument: str) -> None:
    """Taken, or refused with an error of ours that changed nothing."""
    for value in VALUES:
        model = nn.Linear(2, 2)
        words = {'verbosity': 0, argument: value}
        error = outcome(functools.partial(amp.initialize, model, SGD(model.parameters(), lr=0.1), **words))
        assert error is None or isinstance(error, AmpError), (value, error)
        if error is not None:
            assert argument in str(error), (value, error)
            assert model.weight.dtype is torch.float32 and not model._forward_pre_hooks
