"""amp.initialize: what comes back, what is refused, what is printed, and enabled=False."""

from __future__ import annotations

import gc
import inspect
import itertools
import math
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from bits import same
from exact_scripts import LEVELS, backward, sgd, start, state
from mmengine.optim import AmpOptimWrapper as StockAmp
from mmengine.optim import ApexOptimWrapper as StockApex
from mmengine.optim import OptimWrapper
from play import WEIGHT_TYPES, Part, data
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

from amp_wrapper import AmpAttachError, AmpConfigError, AmpError, AmpOptimWrapper, AmpUsageError, ApexOptimWrapper, amp

Pair = namedtuple('Pair', 'a b')
SHAPES: dict[str, Callable[..., Any]] = {
    'one': lambda *x: x[0],
    'a list': lambda *x: list(x),
    'a tuple': lambda *x: x,
    'a named tuple': lambda *x: Pair(*x),
    'a list of one': lambda *x: [x[0]],
}


@pytest.mark.parametrize('shape', SHAPES)
def test_same_objects_come_back_in_what_they_came_in(shape: str) -> None:
    for level, enabled in itertools.product(LEVELS, [True, False]):
        words: dict[str, Any] = dict(opt_level=level, enabled=enabled, verbosity=0)
        nets = [Part(), Part()]
        given = SHAPES[shape](*nets), SHAPES[shape](*[sgd([net]) for net in nets])
        found = amp.initialize(*given, **words)
        assert type(found) is tuple and len(found) == 2
        models = SHAPES[shape](Part(), Part())
        for result, wanted in (*zip(found, given), (amp.initialize(models, **words), models)):
            assert type(result) is type(wanted)
            if shape == 'one':
                assert result is wanted
            else:
                assert len(result) == len(wanted) and all(a is b for a, b in zip(result, wanted))
        assert amp.initialize([], [], **words) == ([], [])


def test_models_alone_are_cast_for_inference() -> None:
    for level, dtype in itertools.product(LEVELS, [torch.float16, torch.float32]):
        net = amp.initialize(Part(), opt_level=level, verbosity=0)
        assert net.fc.weight.dtype is WEIGHT_TYPES.get(level, torch.float32)
        with torch.no_grad():
            output = net.eval()(data(0).to(dtype))
        assert output.dtype is torch.float32 and float(output) == float(Part().eval()(data(0))), level


# -- what is refused ----------------------------------------------------------------------------------------------------


def ddp() -> nn.Module:
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = Part()
    return wrapper


def of_a_cast_model() -> tuple[Part, Optimizer]:
    net = start('O2')[0]
    return net, sgd([net])


#: Makes models and optimizers -> options, the error and words in it.
REFUSED: dict[str, tuple[Callable[[], tuple[Any, Any]], dict[str, Any], type[Exception], str]] = {
    'a model that is none': (lambda: (3, None), {}, TypeError, r'models=3 must be a torch.nn.Module'),
    'no model in a list': (lambda: ([Part(), 3], None), {}, TypeError, r'models\[1\]=3'),
    'a generator': (lambda: ((n for n in [Part()]), None), {}, TypeError, 'generator'),
    'an optimizer that is none': (lambda: (Part(), 'SGD'), {}, TypeError, "optimizers='SGD'"),
    'an object around an optimizer': (
        lambda: (Part(), SimpleNamespace(step=lambda: None, param_groups=[])), {}, TypeError, 'that it is built around'),
    'a scheduler': (lambda: (Part(), [StepLR(sgd([Part()]), 1)]), {}, TypeError, r'optimizers\[0\]'),
    'DDP': (lambda: (ddp(), None), {}, AmpAttachError, r'(?s)DistributedDataParallel.*order.*initialize.*then'),
    'DataParallel': (lambda: (DataParallel(Part()), None), {}, AmpAttachError, r'(?s)DataParallel.*order'),
    'DDP in a list': (lambda: ([Part(), ddp()], None), {}, AmpAttachError, r'models\[1\]'),
    'an optimizer again': (lambda: (Part(), start('O1')[1]), {}, AmpAttachError, 'SGD was initialised already'),
    'an optimizer twice': (lambda: (Part(), [sgd([Part()])] * 2), {}, AmpAttachError, 'SGD was initialised already'),
    'a model twice': (lambda: ([Part()] * 2, None), {}, AmpAttachError, r'models\[1\] is in the list twice'),
    'a cast model again': (of_a_cast_model, {'opt_level': 'O2'}, AmpAttachError, r'amp\.initialize\(\[\], optimizer\)'),
    'LBFGS': (lambda: (Part(), LBFGS(Part().parameters())), {}, AmpAttachError, 'LBFGS'),
    'LBFGS behind another': (
        lambda: (net := Part(), [sgd([net]), LBFGS(Part().parameters())]), {'opt_level': 'O2'}, AmpAttachError, 'LBFGS'),
    'a 16-bit model': (lambda: (Part().half(), None), {'opt_level': 'O1'}, AmpAttachError, 'fc.weight'),
    'a 16-bit model at O2': (lambda: (Part().half(), None), {'opt_level': 'O2'}, AmpAttachError, 'fc.weight'),
    'a zero in place of the letter': (lambda: (Part(), None), {'opt_level': '01'}, AmpConfigError, "did you mean 'O1'"),
    'a level as third argument': (lambda: (Part(), None), {'enabled': 'O2'}, AmpConfigError, "opt_level='O2'"),
    'models one by one': (
        lambda: (Part(), None), {'enabled': Part()}, AmpConfigError, r'enabled=Part.*several models go in a list'),
    'split masters': (lambda: (Part(), None), {'opt_level': 'O2', 'master_weights': 'split'}, AmpConfigError, 'split'),
}  # fmt: skip


def look(models: Any, optimizers: Any) -> list[Any]:
    """Types, values and classes of models, and what optimizers hold."""
    listed = [m for m in (models if isinstance(models, (list, tuple)) else [models]) if isinstance(m, nn.Module)]
    steppers = [o for o in (optimizers if isinstance(optimizers, list) else [optimizers]) if isinstance(o, Optimizer)]
    return [
        *([(name, p.detach().clone()) for name, p in m.state_dict().items()] for m in listed),
        *([type(module) for module in m.modules()] for m in listed),
        *((list(vars(o)), [id(p) for group in o.param_groups for p in group['params']]) for o in steppers),
    ]


@pytest.mark.parametrize('name', REFUSED)
def test_refused_with_nothing_changed(name: str) -> None:
    build, words, error, match = REFUSED[name]
    models, optimizers = build()
    before = look(models, optimizers)
    with pytest.raises(error, match=match):
        amp.initialize(models, optimizers, verbosity=0, **words)
    assert same(before, look(models, optimizers))


# -- each argument ------------------------------------------------------------------------------------------------------

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


# -- what is printed ----------------------------------------------------------------------------------------------------


PRINTED = [
    'enabled : True', 'opt_level : O2', 'cast_model_type : float16', 'patch_torch_functions : False',
    'keep_batchnorm_fp32 : True', 'master_weights : True', 'loss_scale : 128.0',
]  # fmt: skip


@pytest.mark.parametrize('verbosity', [0, 1, 2])
def test_options_are_printed(verbosity: int, capsys: pytest.CaptureFixture[str], log: list[str]) -> None:
    start('O2', '128', verbosity=verbosity)
    out, err = capsys.readouterr()
    lines = [' '.join(line.split()) for line in out.splitlines()]
    assert err == '' and log == [] and (verbosity > 0 or lines == [])
    assert [line for line in PRINTED if line in lines] == (PRINTED if verbosity else [])
    assert ('amp: fc.weight is float16 now' in lines) == (verbosity == 2)


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str], log: list[str]) -> None:
    with (
        mock.patch('torch.distributed.is_initialized', return_value=True),
        mock.patch('torch.distributed.get_rank', return_value=1),
        mock.patch('torch.distributed.get_world_size', return_value=1),
    ):
        net, optimizer = start('O2', verbosity=2)
        backward(net(data(0)) * math.inf, optimizer)
        optimizer.step()
    assert capsys.readouterr().out == '' and log == []


# -- nothing initialised, nothing enabled -------------------------------------------------------------------------------


def test_calls_before_initialize_say_so() -> None:
    gc.collect()
    for call in (amp.state_dict, lambda: amp.load_state_dict({'loss_scaler0': {'loss_scale': 4.0, 'unskipped': 1}})):
        with pytest.raises(AmpUsageError, match='initialize'):
            call()  # type: ignore[operator]


def test_disabled_trains_prints_and_saves_as_without_it(capsys: pytest.CaptureFixture[str], log: list[str]) -> None:
    gc.collect()
    net = Part()
    optimizer = sgd([net])
    before = look(net, optimizer)
    result = amp.initialize(net, optimizer, enabled=False, opt_level='O2', num_losses=3, verbosity=2)
    assert result == (net, optimizer) and same(before, look(net, optimizer))
    loss = net(data(0))
    with amp.scale_loss(loss, optimizer, loss_id=2, delay_unscale=True) as scaled:
        assert scaled is loss
        scaled.backward()
    backward(net(data(1)), [optimizer])
    assert list(amp.master_params(optimizer)) == net.trained
    optimizer.step()
    plain, theirs = start(None)
    for index in range(2):
        plain(data(index)).backward()
    theirs.step()
    assert state([net], [optimizer]) == state([plain], [theirs])
    for accessor, value in ((amp.loss_scale, 1.0), (amp.skipped_steps, 0), (amp.last_step_skipped, False)):
        assert accessor(optimizer) == value
    with amp.monitor(optimizer) as watch:
        assert watch.read() == {}
    assert amp.state_dict() == {} and amp.state_dict({'a': 1}) == {'a': 1}
    amp.load_state_dict({})
    assert log == [] and capsys.readouterr().out == ''
    amp.load_state_dict({'loss_scaler0': {'loss_scale': 4.0, 'unskipped': 0}})
    assert len(log) == 1 and 'not enabled' in log[0]
    # options are checked all the same
    with pytest.raises(AmpConfigError):
        amp.initialize(Part(), enabled=False, opt_level='O7')
