"""amp.initialize: what comes back, what is refused, what is printed, and enabled=False."""

from __future__ import annotations

import gc
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
from pairs import pairs
from play import WEIGHT_TYPES, Part, data
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import StepLR

from amp_wrapper import AmpAttachError, AmpConfigError, AmpUsageError, amp

Pair = namedtuple('Pair', 'a b')
SHAPES: dict[str, Callable[..., Any]] = {
    'one': lambda *x: x[0],
    'a list': lambda *x: list(x),
    'a tuple': lambda *x: x,
    'a named tuple': lambda *x: Pair(*x),
    'a list of one': lambda *x: [x[0]],
}


@pairs(shape=SHAPES, level=LEVELS, enabled=[True, False])
def test_same_objects_come_back_in_what_they_came_in(shape: str, level: str, enabled: bool) -> None:
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


@pytest.mark.parametrize('level', LEVELS)
def test_models_alone_are_cast_for_inference(level: str) -> None:
    net = amp.initialize(Part(), opt_level=level, verbosity=0)
    assert net.fc.weight.dtype is WEIGHT_TYPES.get(level, torch.float32)
    with torch.no_grad():
        for dtype in (torch.float16, torch.float32):
            output = net.eval()(data(0).to(dtype))
            assert output.dtype is torch.float32 and float(output) == float(Part().eval()(data(0)))


# -- what is refused ----------------------------------------------------------------------------------------------------


def wrapped() -> nn.Module:
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = Part()
    return wrapper


def initialised(level: str = 'O1') -> tuple[Part, Optimizer]:
    return start(level)


def of_a_cast_model() -> tuple[Part, Optimizer]:
    net = initialised('O2')[0]
    return net, sgd([net])


def pair(models: Any = None, optimizers: Any = None) -> Callable[[], tuple[Any, Any]]:
    return lambda: (
        Part() if models is None else models() if callable(models) else models,
        optimizers() if optimizers else None,
    )


#: Models and optimizers, options, the error and words in it.
REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    'a model that is none': (pair(3), {}, TypeError, r'models=3 must be a torch.nn.Module'),
    'no model in a list': (pair(lambda: [Part(), 3]), {}, TypeError, r'models\[1\]=3'),
    'a generator': (pair(lambda: (n for n in [Part()])), {}, TypeError, 'generator'),
    'an optimizer that is none': (pair(None, lambda: 'SGD'), {}, TypeError, "optimizers='SGD'"),
    'an object around an optimizer': (
        pair(None, lambda: SimpleNamespace(step=lambda: None, param_groups=[])), {}, TypeError, 'that it is built around'),
    'a scheduler': (pair(None, lambda: [StepLR(sgd([Part()]), 1)]), {}, TypeError, r'optimizers\[0\]'),
    'DDP': (pair(wrapped), {}, AmpAttachError, r'(?s)DistributedDataParallel.*order.*initialize.*then'),
    'DataParallel': (pair(lambda: DataParallel(Part())), {}, AmpAttachError, r'(?s)DataParallel.*order'),
    'DDP in a list': (pair(lambda: [Part(), wrapped()]), {}, AmpAttachError, r'models\[1\]'),
    'an optimizer again': (lambda: (Part(), initialised()[1]), {}, AmpAttachError, 'SGD was initialised already'),
    'an optimizer twice': (pair(None, lambda: [sgd([Part()])] * 2), {}, AmpAttachError, 'SGD was initialised already'),
    'a model twice': (pair(lambda: [Part()] * 2), {}, AmpAttachError, r'models\[1\] is in the list twice'),
    'a cast model again': (of_a_cast_model, {'opt_level': 'O2'}, AmpAttachError, r'amp\.initialize\(\[\], optimizer\)'),
    'LBFGS': (pair(None, lambda: LBFGS(Part().parameters())), {}, AmpAttachError, 'LBFGS'),
    **{
        f'a 16-bit model at {level}': (pair(lambda: Part().half()), {'opt_level': level}, AmpAttachError, 'fc.weight')
        for level in LEVELS
    },
    'no level': (pair(), {'opt_level': 'o2'}, AmpConfigError, 'o2'),
    'a zero in place of the letter': (pair(), {'opt_level': '01'}, AmpConfigError, 'letter O'),
    'a level as third argument': (pair(), {'enabled': 'O2'}, AmpConfigError, "opt_level='O2'"),
    'models one by one': (pair(), {'enabled': Part()}, AmpConfigError, r'enabled=Part.*several models go in a list'),
    'no losses': (pair(), {'num_losses': 0}, AmpConfigError, 'num_losses'),
    'split masters': (pair(), {'opt_level': 'O2', 'master_weights': 'split'}, AmpConfigError, 'split'),
    'integers as output': (pair(), {'cast_model_outputs': 'int8'}, AmpConfigError, 'int8'),
    'patches at O2': (pair(), {'opt_level': 'O2', 'patch_torch_functions': True}, AmpConfigError, 'patch_torch'),
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


def test_bad_optimizer_behind_a_good_one_changes_nothing() -> None:
    nets = [Part(), Part()]
    good, bad = sgd(nets[:1]), LBFGS(nets[1].parameters())
    before = look(nets, [good, bad])
    with pytest.raises(AmpAttachError, match='LBFGS'):
        amp.initialize(nets, [good, bad], opt_level='O2', verbosity=0)
    assert same(before, look(nets, [good, bad]))
    amp.initialize(nets, good, opt_level='O2', verbosity=0)


def test_all_conflicts_come_in_one_error() -> None:
    words: dict[str, Any] = dict(
        cast_model_type=torch.float16, keep_batchnorm_fp32=True, master_weights=True, loss_scale=-1.0, num_losses=0
    )
    with pytest.raises(AmpConfigError) as caught:
        amp.initialize(Part(), opt_level='O1', **words)
    assert all(word in str(caught.value) for word in words) and len(caught.value.problems) == 5


# -- what is printed ----------------------------------------------------------------------------------------------------


PRINTED: dict[str, dict[str, Any]] = {
    'O1': dict(cast_model_type=None, patch_torch_functions=True, keep_batchnorm_fp32=None, master_weights=None),
    'O2': dict(cast_model_type='float16', patch_torch_functions=False, keep_batchnorm_fp32=True, master_weights=True),
}


@pairs(verbosity=[0, 1, 2], level=PRINTED)
def test_options_are_printed(verbosity: int, level: str, capsys: pytest.CaptureFixture[str], log: list[str]) -> None:
    net = Part()
    amp.initialize(net, sgd([net]), opt_level=level, loss_scale=128.0, verbosity=verbosity)
    out, err = capsys.readouterr()
    assert err == '' and log == [] and (verbosity > 0) == (out != '')
    lines = [' '.join(line.split()) for line in out.splitlines()]
    options = {'enabled': True, 'opt_level': level, 'loss_scale': 128.0, **PRINTED[level]}
    assert [
        f'{name} : {value}' for name, value in options.items() if f'{name} : {value}' not in lines and verbosity
    ] == []
    casts = ['amp: fc.weight is float16 now'] if (level, verbosity) == ('O2', 2) else []
    assert [line for line in lines if line.endswith('is float16 now')] == casts


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


def test_disabled_trains_prints_and_saves_as_without_the_package(
    capsys: pytest.CaptureFixture[str], log: list[str]
) -> None:
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
    with amp.scale_loss(net(data(1)), [optimizer]) as scaled:
        scaled.backward()
    assert list(amp.master_params(optimizer)) == net.trained
    optimizer.step()
    assert (amp.loss_scale(optimizer), amp.skipped_steps(optimizer), amp.last_step_skipped(optimizer)) == (
        1.0,
        0,
        False,
    )
    with amp.monitor(optimizer) as watch:
        assert watch.read() == {}
    assert amp.state_dict() == {} and amp.state_dict({'a': 1}) == {'a': 1}
    amp.load_state_dict({})
    assert log == [] and capsys.readouterr().out == ''
    amp.load_state_dict({'loss_scaler0': {'loss_scale': 4.0, 'unskipped': 0}})
    assert len(log) == 1 and 'not enabled' in log[0]
    plain, theirs = start(None)
    for index in range(2):
        plain(data(index)).backward()
    theirs.step()
    assert state([net], [optimizer]) == state([plain], [theirs])
    # options are checked all the same
    with pytest.raises(AmpConfigError):
        amp.initialize(Part(), enabled=False, opt_level='O7')
