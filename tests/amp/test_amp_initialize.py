"""amp.initialize: shapes that come back, what is refused, what is printed, and the levels that do nothing."""

from __future__ import annotations

import gc
import inspect
import math
import weakref
from collections import namedtuple
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from bits import differing, same
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import LBFGS, SGD, Adam, Optimizer
from torch.optim import lr_scheduler as schedulers
from toy_amp import (
    HALF,
    LEVELS,
    Net,
    backward,
    data,
    logged,
    make,
    scaled,
    sgd,
    values,
)

from amp_wrapper import FusedSGD, amp
from amp_wrapper.errors import AmpAttachError, AmpConfigError, AmpUsageError

F16, F32 = torch.float16, torch.float32


# -- initialize ---------------------------------------------------------------------------------------------------------

Pair = namedtuple('Pair', 'a b')


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('enabled', [True, False])
def test_return_shapes(enabled: bool, level: str) -> None:
    """The same objects, in what they came in."""
    words: dict[str, Any] = dict(opt_level=level, enabled=enabled, verbosity=0)
    for shape in (lambda *x: x[0], lambda *x: list(x), lambda *x: x, lambda *x: Pair(*x), lambda *x: [x[0]]):
        nets = [Net(), Net()]
        optimizers = [sgd([net]) for net in nets]
        models, steppers = shape(*nets), shape(*optimizers)
        found = amp.initialize(models, steppers, **words)
        assert type(found) is tuple and len(found) == 2
        for result, given in zip(found, (models, steppers)):
            assert type(result) is type(given)
            if isinstance(given, (list, tuple)):
                assert all(a is b for a, b in zip(result, given)) and len(result) == len(given)
            else:
                assert result is given
        models = shape(*[Net(), Net()])
        alone = amp.initialize(models, **words)
        assert type(alone) is type(models) and (isinstance(models, (list, tuple)) or alone is models)
    assert amp.initialize([], [], **words) == ([], [])


def _ddp() -> DistributedDataParallel:
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = Net()
    return wrapper


def _stepped_twice() -> Any:
    return Net(), make('O1', torch.device('cpu'))[1]


def _initialized_model(level: str) -> Any:
    net, _ = make(level, torch.device('cpu'))
    return net, sgd([net])


NET, BAD = Net, object()
REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    'a model that is none': (lambda: (BAD, sgd([Net()])), {}, TypeError, r'models=.*must be a torch.nn.Module'),
    'a model in a list': (lambda: ([Net(), 3], None), {}, TypeError, r'models\[1\]=3'),
    'a generator': (lambda: ((n for n in [Net()]), None), {}, TypeError, 'generator'),
    'a ModuleList': (lambda: (nn.ModuleList([Net()]), None), {}, None, ''),  # type: ignore[dict-item]
    'an optimizer that is none': (lambda: (Net(), 'SGD'), {}, TypeError, "optimizers='SGD'"),
    'a scheduler': (
        lambda: (Net(), [schedulers.StepLR(sgd([Net()]), 1)]), {}, TypeError, r'optimizers\[0\]'),
    'DDP': (lambda: (_ddp(), None), {}, AmpAttachError, r'(?s)DistributedDataParallel.*order.*initialize.*then'),
    'DataParallel': (lambda: (DataParallel(Net()), None), {}, AmpAttachError, r'(?s)DataParallel.*order'),
    'DDP in a list': (lambda: ([Net(), _ddp()], None), {}, AmpAttachError, r'models\[1\]'),
    'an optimizer again': (_stepped_twice, {}, AmpAttachError, 'SGD was initialised already'),
    'an optimizer twice': (lambda: (Net(), [sgd([Net()])] * 2), {}, AmpAttachError, 'SGD was initialised already'),
    'a model twice': (lambda: ([NET()] * 2, None), {}, AmpAttachError, r'models\[1\] is in the list twice'),
    'a cast model again': (lambda: _initialized_model('O2'), {'opt_level': 'O2'}, AmpAttachError, ''),
    'a half model': (lambda: (Net().half(), None), {'opt_level': 'O2'}, AmpAttachError, 'fc.weight'),
    'a bfloat16 model': (lambda: (Net().bfloat16(), None), {'opt_level': 'O1'}, AmpAttachError, 'fc.weight'),
    'a half model at O3': (lambda: (Net().half(), None), {'opt_level': 'O3'}, AmpAttachError, 'fc.weight'),
    'a half model at O0': (lambda: (Net().half(), None), {'opt_level': 'O0'}, AmpAttachError, 'fc.weight'),
    'LBFGS': (lambda: (Net(), LBFGS(Net().parameters())), {}, AmpAttachError, 'LBFGS'),
    'no level': (lambda: (Net(), None), {'opt_level': 'o2'}, AmpConfigError, 'o2'),
    'a level as third argument': (lambda: (Net(), None), {'enabled': 'O2'}, AmpConfigError, "opt_level='O2'"),
    'models one by one': (
        lambda: (Net(), None), {'enabled': NET()}, AmpConfigError, r'enabled=Net.*several models go in a list'),
    'a zero': (lambda: (Net(), None), {'opt_level': '01'}, AmpConfigError, 'letter O'),
    'a number': (lambda: (Net(), None), {'opt_level': 1}, AmpConfigError, '1'),
    'a scale': (lambda: (Net(), None), {'loss_scale': 0.0}, AmpConfigError, 'loss_scale'),
    'a word': (lambda: (Net(), None), {'loss_scale': 'auto'}, AmpConfigError, 'auto'),
    'a floor above': (
        lambda: (Net(), None), {'min_loss_scale': 4.0, 'max_loss_scale': 2.0}, AmpConfigError, 'min_loss_scale'),
    'losses': (lambda: (Net(), None), {'num_losses': 0}, AmpConfigError, 'num_losses'),
    'split': (lambda: (Net(), None), {'opt_level': 'O2', 'master_weights': 'split'}, AmpConfigError, 'split'),
    'BatchNorm': (
        lambda: (Net(), None), {'opt_level': 'O2', 'keep_batchnorm_fp32': 'yes'}, AmpConfigError, 'keep_batchnorm_fp32'),
    'outputs': (lambda: (Net(), None), {'cast_model_outputs': 'float'}, None, ''),  # type: ignore[dict-item]
    'outputs of ints': (lambda: (Net(), None), {'cast_model_outputs': 'int8'}, AmpConfigError, 'int8'),
    'casts at O1': (
        lambda: (Net(), None), {'opt_level': 'O1', 'cast_model_type': F16}, AmpConfigError, 'cast_model_type'),
    'patching at O2': (
        lambda: (Net(), None), {'opt_level': 'O2', 'patch_torch_functions': True}, AmpConfigError, 'patch_torch'),
}  # fmt: skip


@pytest.mark.parametrize('name', REFUSED)
def test_refused(name: str) -> None:
    """Typed, with name, value and remedy; models, optimizers and all that is global are as before."""
    build, words, error, match = REFUSED[name]
    models, optimizers = build()
    if error is None:
        amp.initialize(models, optimizers, verbosity=0, **words)
        return
    listed = models if isinstance(models, (list, tuple)) else [models]
    parts = [m for m in listed if isinstance(m, nn.Module)]
    steppers = optimizers if isinstance(optimizers, list) else [optimizers]
    before = [_look(part) for part in parts], [dict(o.__dict__) for o in steppers if isinstance(o, Optimizer)]
    sessions = len(amp.amp_session._sessions)
    with pytest.raises(error, match=match):
        amp.initialize(models, optimizers, verbosity=0, **words)
    after = [_look(part) for part in parts], [dict(o.__dict__) for o in steppers if isinstance(o, Optimizer)]
    assert same(before[0], after[0])
    assert [d.keys() for d in before[1]] == [d.keys() for d in after[1]]
    assert len(amp.amp_session._sessions) == sessions


def _look(model: nn.Module) -> list[Any]:
    """Types, values and hooks of a model."""
    found: list[Any] = [(name, p.dtype, p.detach().clone()) for name, p in model.named_parameters()]
    for name, module in model.named_modules():
        found.append((name, len(module._forward_hooks), len(module._forward_pre_hooks), sorted(module.__dict__)))
    return found


def test_a_bad_optimizer_behind_a_good_one_changes_nothing() -> None:
    """The first had been prepared by then."""
    net, other = Net(), Net()
    good, bad = sgd([net]), LBFGS(other.parameters())
    before = _look(net), good.param_groups[0]['params'][0]
    with pytest.raises(AmpAttachError, match='LBFGS'):
        amp.initialize([net, other], [good, bad], opt_level='O2', verbosity=0)
    assert same(before[0], _look(net)) and good.param_groups[0]['params'][0] is before[1]
    assert 'step' not in good.__dict__
    amp.initialize([net, other], good, opt_level='O2', verbosity=0)


def test_all_conflicts_in_one_error() -> None:
    with pytest.raises(AmpConfigError) as caught:
        amp.initialize(Net(), opt_level='O1', cast_model_type=F16, keep_batchnorm_fp32=True, master_weights=True,
                       loss_scale=-1.0, num_losses=0)  # fmt: skip
    text = str(caught.value)
    for word in ('cast_model_type', 'keep_batchnorm_fp32', 'master_weights', 'loss_scale', 'num_losses'):
        assert word in text
    assert len(caught.value.problems) == 5


def test_options_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for verbosity in (0, 1, 2):
        net = Net()
        with logged() as lines:
            amp.initialize(net, sgd([net]), opt_level='O2', loss_scale=128.0, verbosity=verbosity)
        out, err = capsys.readouterr()
        assert err == '' and lines == []
        if verbosity == 0:
            assert out == ''
            continue
        assert 'loss_scale=128.0' in out
        for name, value in {
            'enabled': True, 'opt_level': 'O2', 'cast_model_type': 'float16', 'patch_torch_functions': False,
            'keep_batchnorm_fp32': True, 'master_weights': True, 'loss_scale': 128.0,
        }.items():  # fmt: skip
            assert f'    {name:<22}: {value}\n' in out
        casts = [line for line in out.splitlines() if line.endswith('is float16 now')]
        assert casts == (['amp: fc.weight is float16 now'] if verbosity == 2 else [])


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str], device: torch.device) -> None:
    with (
        mock.patch('torch.distributed.is_initialized', return_value=True),
        mock.patch('torch.distributed.get_rank', return_value=1),
        mock.patch('torch.distributed.get_world_size', return_value=1),
        logged() as lines,
    ):
        net = Net().to(device)
        optimizer = sgd([net])
        amp.initialize(net, optimizer, opt_level='O2', verbosity=2)
        backward(net(data(0, device)) * math.inf, optimizer)
        optimizer.step()
    assert capsys.readouterr().out == '' and lines == []


def test_before_initialize() -> None:
    net = Net()
    gc.collect()
    with mock.patch.object(amp.amp_session, '_disabled', weakref.WeakSet()), \
         mock.patch.object(amp.amp_session, '_sessions', []):  # fmt: skip
        with pytest.raises(AmpUsageError, match='has been initialised'):
            amp.scale_loss(net(data(0)), sgd([net])).__enter__()
    # what an optimizer steps is known of any
    assert list(amp.master_params(sgd([net]))) == net.trained


def test_something_else_than_an_optimizer_is_named_in_a_line(device: torch.device) -> None:
    """A model has a line for each layer."""
    make('O2', device)
    deep = nn.Sequential(*(nn.Linear(2, 2) for _ in range(60)))
    for call in (amp.loss_scale, amp.skipped_steps, amp.monitor, lambda model: list(amp.master_params(model))):
        with pytest.raises(AmpUsageError, match=r'optimizer.*=Sequential.*Sequential') as caught:
            call(deep)
        assert '\n' not in str(caught.value) and len(str(caught.value)) < 250
    with pytest.raises(AmpUsageError, match='optimizers=Sequential') as caught:
        amp.scale_loss(torch.ones(()), deep).__enter__()
    assert '\n' not in str(caught.value)


def test_an_empty_state_is_told(device: torch.device) -> None:
    """It is what amp.state_dict() gives at enabled=False; apex goes on as well."""
    _, optimizer = scaled('O2', device)
    before = amp.state_dict(optimizers=optimizer)
    with logged() as lines:
        amp.load_state_dict({}, optimizers=optimizer)
    assert amp.state_dict(optimizers=optimizer) == before
    assert len(lines) == 1 and 'the state is empty' in lines[0]


# -- enabled=False ------------------------------------------------------------------------------------------------------


def test_disabled_is_nothing(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts run, print and save as if the package were absent."""
    net, optimizer = Net().to(device), None
    optimizer = sgd([net])
    before = _look(net), dict(optimizer.__dict__)
    gc.collect()
    with mock.patch.object(amp.amp_session, '_sessions', []), logged() as lines:
        result = amp.initialize(net, optimizer, enabled=False, opt_level='O2', num_losses=3, verbosity=2)
        assert result == (net, optimizer) and same(before[0], _look(net)) and optimizer.__dict__ == before[1]
        loss = net(data(0, device))
        with amp.scale_loss(loss, optimizer, loss_id=2, delay_unscale=True) as scaled:
            assert scaled is loss
            scaled.backward()
        with amp.scale_loss(net(data(1, device)), [optimizer]) as scaled:
            scaled.backward()
        assert list(amp.master_params(optimizer)) == net.trained
        optimizer.step()
        assert amp.state_dict() == {} and amp.state_dict({'a': 1}) == {'a': 1}
        amp.load_state_dict({})
        assert lines == [] and capsys.readouterr().out == ''
        amp.load_state_dict({'loss_scaler0': {'loss_scale': 4.0, 'unskipped': 0}})
        assert len(lines) == 1 and 'not enabled' in lines[0]
    plain = make(None, device)
    for index in range(2):
        plain[0](data(index, device)).backward()
    plain[1].step()
    assert differing(values([net], [optimizer]), values([plain[0]], [plain[1]])) == []
    assert optimizer.state_dict().keys() == plain[1].state_dict().keys()
    # the options are checked all the same
    with pytest.raises(AmpConfigError):
        amp.initialize(Net(), enabled=False, opt_level='O7')


# -- step and zero_grad -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('kind', [SGD, Adam, FusedSGD])
def test_signatures(kind: type[Optimizer], level: str, device: torch.device) -> None:
    net = Net().to(device)
    optimizer = kind(net.parameters(), lr=0.25)  # type: ignore[call-arg]
    plain = kind(Net().parameters(), lr=0.25)  # type: ignore[call-arg]
    amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    assert type(optimizer) is kind and isinstance(optimizer, Optimizer)
    for name in ('step', 'zero_grad'):
        assert inspect.signature(getattr(optimizer, name)) == inspect.signature(getattr(plain, name))
        assert getattr(optimizer, name).__name__ == getattr(plain, name).__name__
        assert inspect.ismethod(getattr(optimizer, name))
    assert repr(optimizer) == repr(plain)
    for bad in ((1, 2),):
        with pytest.raises(TypeError):
            optimizer.step(*bad)  # type: ignore[arg-type, call-arg]
        with pytest.raises(TypeError):
            optimizer.zero_grad(*bad)  # type: ignore[arg-type, call-arg]
    optimizer.zero_grad(True)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step(None)


@pytest.mark.parametrize('level', LEVELS)
def test_inference(level: str, device: torch.device) -> None:
    """Models alone: cast, and no optimizer needed; evaluation and no_grad are covered."""
    net = amp.initialize(Net().to(device), opt_level=level, verbosity=0)
    assert net.fc.weight.dtype is HALF.get(level, F32)
    with torch.no_grad():
        for dtype in (F16, F32):
            output = net.eval()(data(0, device).to(dtype))
            assert output.dtype is F32 and float(output) == float(Net().eval()(data(0)))
