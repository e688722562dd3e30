"""What scripts see of the functional API: shapes, errors, prints, closures, schedulers, hooks, copies, and how it all ends."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import itertools
import math
import pickle
import warnings
import weakref
from collections import namedtuple
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from amp_toy import (
    HALF,
    LEVELS,
    MASTERS,
    Net,
    backward,
    check_rounded,
    data,
    differing,
    gradients,
    logged,
    quick_collections,  # noqa: F401  (a fixture)
    same,
    scales,
    set_scales,
    sgd,
    unskipped,
    values,
)
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import LBFGS, SGD, Adam, Optimizer
from torch.optim import lr_scheduler as schedulers

from amp_wrapper import FusedSGD, amp
from amp_wrapper.autocast import regions
from amp_wrapper.autocast.patching import patches
from amp_wrapper.errors import AmpAttachError, AmpConfigError, AmpUsageError, OverflowStreakError

F16, F32 = torch.float16, torch.float32


def make(level: str | None, device: torch.device, momentum: float = 0.5, **options: Any) -> tuple[Net, Optimizer]:
    net = Net().to(device)
    optimizer = sgd([net], momentum=momentum)
    if level is not None:
        amp.initialize(net, optimizer, opt_level=level, **{'loss_scale': 'dynamic', 'verbosity': 0, **options})
        if options.get('loss_scale', 'dynamic') == 'dynamic':
            set_scales(optimizer, *[8.0] * options.get('num_losses', 1))
    return net, optimizer


def agree(ours: tuple[Net, Optimizer], theirs: tuple[Net, Optimizer], level: str) -> None:
    """Bit for bit, but for weights that are rounded masters."""
    check_rounded([ours[0]], level)
    wrong = differing(values([ours[0]], [ours[1]]), values([theirs[0]], [theirs[1]]))
    assert [key for key in wrong if level not in MASTERS or 'net' not in key] == []


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


# -- scale_loss ---------------------------------------------------------------------------------------------------------


def test_misuse_of_scale_loss(device: torch.device) -> None:
    net, optimizer = make('O2', device, num_losses=2)
    loss = net(data(0, device))
    stranger, off = sgd([Net()]), sgd([Net()])
    amp.initialize(Net(), off, enabled=False)
    for arguments, match in (
        ((loss, stranger), 'was not initialised'),
        ((loss, [optimizer, stranger]), 'was not initialised'),
        ((loss, copy.copy(optimizer)), 'was not initialised'),
        ((loss, []), 'empty'),
        ((loss, net), 'Net'),
        ((loss, None), 'NoneType'),
        ((loss, [optimizer, off]), 'enabled=False'),
        ((loss, optimizer, 2), 'loss_id=2 is not below num_losses=2'),
        ((loss, optimizer, -1), 'loss_id=-1'),
        ((loss, optimizer, '0'), "loss_id='0'"),
        ((loss, optimizer, None), 'loss_id=None'),
        ((3.5, optimizer), 'float'),
        ((None, optimizer), 'NoneType'),
        ((torch.ones((), dtype=torch.int64), optimizer), 'int64'),
        (((loss, loss), optimizer), 'tuple'),
    ):
        before = gradients([optimizer])
        with pytest.raises(AmpUsageError, match=match):
            amp.scale_loss(*arguments).__enter__()
        assert same(before, gradients([optimizer]))
    # and all is well afterwards
    backward(loss, optimizer)
    optimizer.step()
    assert scales(optimizer) == [8.0, 8.0]


def test_before_initialize() -> None:
    net = Net()
    gc.collect()
    with mock.patch.object(amp.amp_session, '_disabled', weakref.WeakSet()), \
         mock.patch.object(amp.amp_session, '_sessions', []):  # fmt: skip
        with pytest.raises(AmpUsageError, match='has been initialised'):
            amp.scale_loss(net(data(0)), sgd([net])).__enter__()
    # what an optimizer steps is known of any
    assert list(amp.master_params(sgd([net]))) == net.trained


@pytest.mark.parametrize('level', LEVELS)
def test_step_within_the_block(level: str, device: torch.device) -> None:
    net, optimizer = make(level, device)
    before = values([net], [optimizer])

    def script() -> None:
        with amp.scale_loss(net(data(0, device)), optimizer) as scaled:
            scaled.backward()
            optimizer.step()

    with pytest.raises(AmpUsageError, match='Step after the block'):
        script()
    assert differing(before, values([net], [optimizer])) == [] and gradients([optimizer]) == [None, None]


@pytest.mark.parametrize('level', LEVELS)
def test_blocks_within_blocks_of_one_optimizer(level: str, device: torch.device) -> None:
    ours, theirs = make(level, device), make(None, device)
    net, optimizer = ours

    def script() -> None:
        with amp.scale_loss(net(data(0, device)), optimizer) as outer:
            with amp.scale_loss(outer, optimizer) as inner:
                inner.backward()

    with pytest.raises(AmpUsageError, match='inside another one'):
        script()
    assert gradients([optimizer]) == [None, None]
    backward(net(data(0, device)), optimizer)
    theirs[0](data(0, device)).backward()
    for _, each in (ours, theirs):
        each.step()
    agree(ours, theirs, level)


@pytest.mark.parametrize('order', ['inner first', 'outer first', 'outer last', 'twice', 'by turns'])
@pytest.mark.parametrize('sessions', [1, 2])
@pytest.mark.parametrize('level', LEVELS)
def test_blocks_within_blocks_of_two_optimizers(level: str, sessions: int, order: str, device: torch.device) -> None:
    """Each loss has a scale of its own; the outer one may reach the models of both, as whoever calls backward() last."""

    def train(at: str | None) -> tuple[list[Net], list[Optimizer]]:
        nets = [Net().to(device), Net(2).to(device)]
        optimizers = [sgd([net]) for net in nets]
        words: dict[str, Any] = dict(opt_level=at or 'O0', loss_scale='dynamic', verbosity=0)
        if at is not None and sessions == 1:
            amp.initialize(nets, optimizers, num_losses=2, **words)
            set_scales(optimizers[0], 4.0, 16.0)
        elif at is not None:
            for place in range(2):
                amp.initialize(nets[place], optimizers[place], **words)
                set_scales(optimizers[place], (4.0, 16.0)[place])
        for index in range(3):
            for optimizer in optimizers:
                if index != 1:
                    optimizer.zero_grad()
            x = data(index, device)
            losses = [nets[0](x) + nets[1](x), nets[1](x * 2)]
            if at is None:
                for loss in losses:
                    loss.backward(retain_graph=True)
                if order in ('twice', 'by turns'):
                    losses[0].backward(retain_graph=True)
                if order == 'by turns':
                    losses[1].backward()
            else:
                inner_id = 1 if sessions == 1 else 0
                with amp.scale_loss(losses[0], optimizers[0]) as outer:
                    if order in ('outer first', 'twice'):
                        outer.backward(retain_graph=True)
                    with amp.scale_loss(losses[1], optimizers[1], inner_id) as inner:
                        inner.backward(retain_graph=True)
                        if order in ('inner first', 'by turns'):
                            outer.backward(retain_graph=True)
                        if order == 'by turns':
                            inner.backward(retain_graph=True)
                            outer.backward(retain_graph=True)
                    if order in ('outer last', 'twice'):
                        outer.backward()
            for optimizer in optimizers:
                optimizer.step()
        return nets, optimizers

    (plain, theirs), (run, ours) = train(None), train(level)
    wrong = differing(values(run, ours), values(plain, theirs))
    check_rounded(run, level)
    assert [key for key in wrong if level not in MASTERS or 'net' not in key] == []


@pytest.mark.parametrize('sessions', [1, 2])
@pytest.mark.parametrize('level', LEVELS)
def test_one_backward_of_two_blocks(level: str, sessions: int, device: torch.device) -> None:
    """Whose scale a gradient carries cannot be known: refused, and gradients are as before."""
    nets = [Net().to(device), Net(2).to(device)]
    optimizers = [sgd([net]) for net in nets]
    words: dict[str, Any] = dict(opt_level=level, loss_scale=16.0, verbosity=0)
    if sessions == 1:
        amp.initialize(nets, optimizers, **words)
    else:
        for net, optimizer in zip(nets, optimizers):
            amp.initialize(net, optimizer, **words)
    x = data(0, device)

    def script() -> None:
        with amp.scale_loss(nets[0](x), optimizers[0]) as first, amp.scale_loss(nets[1](x), optimizers[1]) as second:
            (first + second).backward()

    with pytest.raises(AmpUsageError, match='two scaled losses'):
        script()
    assert gradients(optimizers) == [None] * 4 and nets[0].fc.weight.grad is None
    with amp.scale_loss(nets[0](x), optimizers[0]) as first, amp.scale_loss(nets[1](x), optimizers[1]) as second:
        first.backward()
        second.backward()
    wanted = [Net(), Net(2)]
    for net in wanted:
        net(data(0)).backward()
    for ours, theirs in zip(gradients(optimizers), [p.grad for net in wanted for p in net.trained]):
        assert ours is not None and theirs is not None and torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize('place', ['before', 'in', 'after'])
@pytest.mark.parametrize('level', LEVELS)
def test_exceptions_within_the_block(level: str, place: str, error: type[BaseException], device: torch.device) -> None:
    """Gradients, flags and all that is global are as before; what follows is as if the pass had not been."""
    ours, theirs = make(level, device), make(None, device)
    net, optimizer = ours
    for index, how in enumerate(('optimizer', 'model', 'model')):
        for model, each in (ours, theirs):
            each.zero_grad() if how == 'optimizer' else model.zero_grad()
        backward(net(data(index, device)), optimizer)
        theirs[0](data(index, device)).backward()
        before = gradients([optimizer]), [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        state = [scaler.state_dict() for scaler in amp.amp_session.session_of(optimizer).scalers]

        def broken(index: int = index) -> None:
            loss = net(data(index, device)) * math.inf
            if place == 'in':
                # some gradients have arrived by then
                net.fc.weight.register_hook(lambda grad: (_ for _ in ()).throw(error()))
            with amp.scale_loss(loss, optimizer) as scaled:
                if place == 'before':
                    raise error
                scaled.backward()
                raise error

        with pytest.raises((error, RuntimeError) if error is ValueError else error):
            broken()
        net.fc.weight._backward_hooks = None
        after = gradients([optimizer]), [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        assert same(before, after)
        assert [scaler.state_dict() for scaler in amp.amp_session.session_of(optimizer).scalers] == state
        assert not torch.is_autocast_enabled() and not torch.is_autocast_enabled('cpu')
        assert regions.count() == 0 and not patches.in_place
        assert torch.is_grad_enabled()
        if index == 1:
            # clear by the model what was left after the exception, and begin again
            for model, _ in (ours, theirs):
                model.zero_grad()
            backward(net(data(3, device)), optimizer)
            theirs[0](data(3, device)).backward()
        for _, each in (ours, theirs):
            each.step()
    agree(ours, theirs, level)
    assert scales(optimizer) == [8.0]


def test_exceptions_leave_no_pass_of_others_open(device: torch.device) -> None:
    """Gradients that had been set aside at an optimizer that the pass was not meant for."""
    nets = [Net().to(device), Net(2).to(device)]
    optimizers = [sgd([net]) for net in nets]
    amp.initialize(nets, optimizers, opt_level='O2', loss_scale=8.0, verbosity=0)
    for loss, optimizer in zip([net(data(0, device)) for net in nets], optimizers):
        backward(loss, optimizer)
    before = gradients(optimizers), [p.grad for net in nets for p in net.parameters()]
    before = copy.deepcopy(before)

    def broken() -> None:
        with amp.scale_loss(nets[0](data(1, device)) + nets[1](data(1, device)), optimizers[0]) as scaled:
            scaled.backward()
            raise ValueError

    with pytest.raises(ValueError):
        broken()
    assert same(before, (gradients(optimizers), [p.grad for net in nets for p in net.parameters()]))
    nets[1].zero_grad()
    backward(nets[1](data(0, device)), optimizers[1])
    assert same(gradients([optimizers[1]]), before[0][2:])


@pytest.mark.parametrize('level', LEVELS)
def test_the_loss_keeps_its_form(level: str, device: torch.device) -> None:
    """Any shape; float64 stays; 16-bit losses are scaled in FP32."""
    _, optimizer = make(level, device)
    for dtype, shape in itertools.product((F16, F32, torch.float64), ((), (1,), (2, 3))):
        loss = torch.full(shape, 3.0, dtype=dtype, device=device, requires_grad=True)
        with amp.scale_loss(loss, optimizer) as scaled:
            assert scaled.shape == shape and scaled.dtype is (torch.float64 if dtype is torch.float64 else F32)
            assert torch.equal(scaled.float(), torch.full(shape, 24.0, device=device))
    # without a graph too
    with amp.scale_loss(torch.tensor(2.0, device=device), optimizer) as scaled:
        assert float(scaled) == 16.0


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
    # the options are judged all the same
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


@pytest.mark.parametrize('way', ['place', 'name'])
@pytest.mark.parametrize('dynamic', [True, False])
@pytest.mark.parametrize('level', LEVELS)
def test_closures(level: str, dynamic: bool, way: str, device: torch.device) -> None:
    """With scale_loss inside: what plain torch gives, the loss that step() returns included."""
    ours = make(level, device, loss_scale='dynamic' if dynamic else None)
    theirs = make(None, device)
    if not dynamic and level in ('O1', 'O2'):
        set_scales(ours[1], 8.0)
    for index in range(3):

        def closure(index: int = index) -> Tensor:
            ours[1].zero_grad()
            loss = ours[0](data(index, device))
            with amp.scale_loss(loss, ours[1]) as scaled:
                scaled.backward()
            return loss

        def plain(index: int = index) -> Tensor:
            theirs[1].zero_grad()
            loss = theirs[0](data(index, device))
            loss.backward()
            return loss

        with torch.no_grad():
            found = ours[1].step(closure) if way == 'place' else ours[1].step(closure=closure)
        wanted = theirs[1].step(plain)
        assert isinstance(found, Tensor) and found.requires_grad
        if level not in MASTERS:
            assert torch.equal(found, wanted)
    agree(ours, theirs, level)
    assert ours[1].step() is None


@pytest.mark.parametrize('level', LEVELS)
def test_a_closure_that_overflows_or_fails(level: str, device: torch.device) -> None:
    net, optimizer = make(level, device)
    before = values([net], [optimizer])

    def overflows() -> Tensor:
        loss = net(data(0, device))
        backward(loss, optimizer, poisoned=net.fc.weight)
        return loss

    def fails() -> Tensor:
        raise ValueError

    assert float(optimizer.step(overflows)) == float(net(data(0, device)))  # type: ignore[arg-type]
    assert differing(before, values([net], [optimizer])) == [] and scales(optimizer) == [4.0]
    with pytest.raises(ValueError):
        optimizer.step(fails)
    assert differing(before, values([net], [optimizer])) == [] and scales(optimizer) == [4.0]


@pytest.mark.parametrize('level', LEVELS)
def test_plain_backward(level: str, device: torch.device) -> None:
    """loss.backward() without scale_loss is a pass at scale 1; it adds to scaled ones, and its infinities are seen."""
    ours, theirs = make(level, device), make(None, device)
    for index in range(4):
        for _, each in (ours, theirs):
            each.zero_grad()
        ours[0](data(index, device)).backward()
        theirs[0](data(index, device)).backward()
        if index == 2:
            backward(ours[0](data(3, device)), ours[1])
            theirs[0](data(3, device)).backward()
        if index == 1:
            ours[0].fc.weight.grad[0, 0] = math.inf  # type: ignore[index]
        else:
            theirs[1].step()
        ours[1].step()
    agree(ours, theirs, level)
    # nobody scaled: no scale has to learn
    assert scales(ours[1]) == [8.0]


@pytest.mark.parametrize('level', LEVELS)
def test_plain_backward_in_a_second_pass(level: str, device: torch.device) -> None:
    """After a scaled one, onto the same weights; the sum cannot be told apart there, which a warning says."""
    net, optimizer = make(level, device, verbosity=1)
    backward(net(data(0, device)), optimizer)
    with logged() as lines:
        net(data(0, device)).backward()
        optimizer.step()
    assert any('outside' in line for line in lines) == (level in MASTERS)


@pytest.mark.parametrize('level', LEVELS)
def test_steps_without_a_pass(level: str, device: torch.device) -> None:
    """Once more with the same gradients, and with none: as in torch. A skipped step's infinities stay out."""
    ours, theirs = make(level, device), make(None, device)
    for _, each in (ours, theirs):
        each.step()
    backward(ours[0](data(0, device)), ours[1])
    theirs[0](data(0, device)).backward()
    for _, each in (ours, theirs):
        each.step()
        each.step()
        each.zero_grad()
        each.step()
    agree(ours, theirs, level)
    backward(ours[0](data(0, device)), ours[1], poisoned=ours[0].bn.weight)
    ours[1].step()
    ours[1].step()
    agree(ours, theirs, level)
    assert scales(ours[1]) == [4.0]


@pytest.mark.parametrize('fused', [True, False])
@pytest.mark.parametrize('level', LEVELS)
def test_infinities_that_nobody_clears(level: str, fused: bool, device: torch.device) -> None:
    """After a skipped step the gradients are still there: what is added to them must not bring them into the weights."""
    net = Net().to(device)
    optimizer = FusedSGD(net.trained, 0.25, momentum=0.5) if fused else sgd([net])
    amp.initialize(net, optimizer, opt_level=level, loss_scale='dynamic', verbosity=0)
    set_scales(optimizer, 8.0)

    def stepped() -> dict[str, Tensor]:
        # ours begins its state before it knows whether to step
        return {key: value for key, value in values([net], [optimizer]).items() if len(key.split()) != 5}

    before = stepped()
    backward(net(data(0, device)), optimizer, poisoned=net.fc.weight)
    optimizer.step()
    for index in range(3):
        if index == 2:
            net(data(1, device)).backward()
        elif index:
            backward(net(data(index, device)), optimizer)
        optimizer.step()
        assert differing(before, stepped()) == []
    # the pass in between was clean
    assert scales(optimizer) == [4.0] and unskipped(optimizer) == [1]
    net.zero_grad()
    backward(net(data(0, device)), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert differing(before, stepped()) != []
    assert all(bool(value.isfinite().all()) for value in stepped().values())


@pytest.mark.parametrize('level', LEVELS)
def test_scripts_that_leave_out_the_step(level: str, device: torch.device) -> None:
    """ESPnet's way: where the norm is not finite, the gradients are cleared. The scale falls all the same."""
    for clear in ('optimizer', 'model', 'none', 'zeros'):
        ours, theirs = make(level, device), make(None, device)
        net, optimizer = ours
        for index in range(4):
            broken = index in (1, 2)
            backward(net(data(index, device)), optimizer, poisoned=net.fc.weight if broken else None)
            norm = torch.nn.utils.clip_grad_norm_(list(amp.master_params(optimizer)), 1e9)
            assert bool(norm.isfinite()) is not broken
            if norm.isfinite():
                optimizer.step()
                theirs[0](data(index, device)).backward()
                theirs[1].step()
                theirs[1].zero_grad()
            if clear == 'optimizer':
                optimizer.zero_grad()
            elif clear == 'zeros':
                optimizer.zero_grad(set_to_none=False)
            elif clear == 'model':
                net.zero_grad()
            else:
                for parameter in net.parameters():
                    parameter.grad = None
        backward(net(data(0, device)), optimizer)
        assert scales(optimizer) == [2.0], clear
        assert unskipped(optimizer) == [1], clear
        optimizer.zero_grad()
        agree(ours, theirs, level)


@pytest.mark.parametrize('kind', ['norm', 'value'])
@pytest.mark.parametrize('level', LEVELS)
def test_clipping(level: str, kind: str, device: torch.device) -> None:
    """What master_params() gives is what is stepped."""
    ours, theirs = make(level, device), make(None, device)
    for index in range(3):
        for _, each in (ours, theirs):
            each.zero_grad()
        backward(ours[0](data(index, device)), ours[1])
        theirs[0](data(index, device)).backward()
        for _, each in (ours, theirs):
            if kind == 'value':
                torch.nn.utils.clip_grad_value_(list(amp.master_params(each)), 0.5)
            else:
                norm = torch.nn.utils.clip_grad_norm_(list(amp.master_params(each)), 1.0)
        for _, each in (ours, theirs):
            each.step()
    if kind == 'value' or level != 'O3':
        # O3 rounds the clipped gradients
        agree(ours, theirs, level)
    else:
        assert norm.isfinite()


# -- overflow -----------------------------------------------------------------------------------------------------------


def test_the_message(device: torch.device) -> None:
    net, optimizer = make('O2', device, num_losses=3, verbosity=1)
    with logged() as lines:
        for loss_id in (0, 2):
            optimizer.zero_grad()
            backward(net(data(0, device)), optimizer, 0)
            backward(net(data(0, device)), optimizer, loss_id, net.fc.weight)
            optimizer.step()
        amp.amp_session.session_of(optimizer).read_all()
    assert len(lines) == 2
    assert 'step skipped (1 so far, 1 in a row)' in lines[0] and 'loss 0: 4' in lines[0]
    assert 'loss 2: 4' in lines[1] and 'loss 1' not in lines[1]


@pytest.mark.parametrize('fused', [True, False])
@pytest.mark.parametrize('level', ['O1', 'O2', 'O5'])
def test_a_row_of_skips_ends(level: str, fused: bool, device: torch.device) -> None:
    """After 50, with names; the scale is never 0, and weights are those of the last clean step."""
    net = Net().to(device)
    optimizer = FusedSGD(net.trained, 0.25) if fused else sgd([net])
    amp.initialize(net, optimizer, opt_level=level, loss_scale='dynamic', verbosity=0)
    before = values([net], [])
    steps = 0

    def train() -> None:
        nonlocal steps
        for _ in range(200):
            optimizer.zero_grad()
            backward(net(data(0, device)), optimizer, poisoned=net.fc.weight)
            optimizer.step()
            steps += 1

    with pytest.raises(OverflowStreakError, match=r'(?s)50 optimizer steps.*fc.weight'):
        train()
    assert steps == 49 and differing(before, values([net], [])) == []
    (scale,) = scales(optimizer)
    assert scale == 2.0 ** (16 - 50) > 0
    for _ in range(3):
        optimizer.zero_grad()
        set_scales(optimizer, torch.finfo(F32).tiny)
        backward(net(data(0, device)), optimizer, poisoned=net.fc.weight)
        with mock.patch.object(amp.amp_session.session_of(optimizer).engine(optimizer).parts.monitor, '_limit', None):
            optimizer.step()
        assert scales(optimizer) == [torch.finfo(F32).tiny]


# -- schedulers and hooks -----------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    'StepLR': lambda o: schedulers.StepLR(o, 2, 0.5),
    'LambdaLR': lambda o: schedulers.LambdaLR(o, lambda step: 0.5**step),
    'OneCycleLR': lambda o: schedulers.OneCycleLR(o, 0.5, total_steps=10),
    'CyclicLR': lambda o: schedulers.CyclicLR(o, 0.125, 0.5, step_size_up=2),
    'Sequential': lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.5, 2), schedulers.StepLR(o, 1, 0.5)], [2]
    ),
}


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('first', [True, False], ids=['built before', 'built after'])
@pytest.mark.parametrize('name', SCHEDULERS)
def test_schedulers(name: str, first: bool, level: str, device: torch.device) -> None:
    """The same rates as without, and no warning; not even where the first step was skipped."""
    for broken in (None, 0):
        nets = [Net().to(device), Net().to(device)]
        optimizers = [SGD(net.trained, 0.25, momentum=0.5) for net in nets]
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            # torch 2.6's own, of SequentialLR
            warnings.filterwarnings('ignore', 'The epoch parameter in `scheduler.step')
            made = [SCHEDULERS[name](optimizer) for optimizer in optimizers[: 2 if first else 1]]
            amp.initialize(nets[1], optimizers[1], opt_level=level, loss_scale='dynamic', verbosity=0)
            set_scales(optimizers[1], 8.0)
            if not first:
                made.append(SCHEDULERS[name](optimizers[1]))
            rates: list[list[Any]] = [[], []]
            for index in range(5):
                for place in range(2):
                    optimizers[place].zero_grad()
                    loss = nets[place](data(index, device))
                    if place == 0:
                        loss.backward()
                        if index == broken:
                            optimizers[0].zero_grad()
                    else:
                        backward(loss, optimizers[1], poisoned=nets[1].fc.weight if index == broken else None)
                    optimizers[place].step()
                    made[place].step()
                    group = optimizers[place].param_groups[0]
                    rates[place].append((made[place].get_last_lr(), group['lr'], group['momentum']))
        assert rates[0] == rates[1]
        ours, theirs = (values([nets[p]], [optimizers[p]]) for p in (1, 0))
        if level != 'O3':
            # rates that are no dyadic numbers round in 16-bit weights
            assert [key for key in differing(ours, theirs) if level not in MASTERS or 'net' not in key] == []


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('fused', [True, False])
def test_optimizer_hooks(level: str, fused: bool, device: torch.device) -> None:
    """Registered before and after; they see unscaled gradients in FP32, once a step, and what they change counts."""
    net = Net().to(device)
    make_it = (lambda: FusedSGD(net.trained, 0.25, momentum=0.5)) if fused else (lambda: sgd([net]))
    optimizer = make_it()
    told: list[Any] = []

    def before(who: Optimizer, args: Any, kwargs: Any) -> None:
        assert who is optimizer
        told.append(('pre', gradients([who])))
        for group in who.param_groups:
            for parameter in group['params']:
                if parameter.grad is not None:
                    parameter.grad.mul_(2)

    def after(who: Optimizer, args: Any, kwargs: Any) -> None:
        told.append(('post',))

    optimizer.register_step_pre_hook(before)
    optimizer.register_state_dict_post_hook(lambda who, state: {**state, 'mark': 1})
    amp.initialize(net, optimizer, opt_level=level, loss_scale='dynamic', verbosity=0)
    set_scales(optimizer, 8.0)
    optimizer.register_step_post_hook(after)
    optimizer.register_load_state_dict_pre_hook(
        lambda who, state: {key: value for key, value in state.items() if key != 'mark'}
    )
    theirs = make(None, device)
    theirs[0](data(0, device) * 2).backward()
    theirs[1].step()
    backward(net(data(0, device)), optimizer)
    optimizer.step()
    wanted = Net()
    wanted(data(0)).backward()
    assert [entry[0] for entry in told] == ['pre', 'post']
    assert same([g.cpu() for g in told[0][1]], [p.grad for p in wanted.trained])
    if not fused:
        agree((net, optimizer), theirs, level)
    state = optimizer.state_dict()
    assert state['mark'] == 1
    optimizer.load_state_dict(state)
    # a step that is skipped on the host is no step
    told.clear()
    backward(net(data(0, device)), optimizer, poisoned=net.fc.weight)
    weights = values([net], [optimizer])
    optimizer.step()
    assert fused or told == []
    assert differing(weights, values([net], [optimizer])) == []


# -- copies -------------------------------------------------------------------------------------------------------------


def _through_torch(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    'deepcopy': copy.deepcopy,
    'pickle': lambda value: pickle.loads(pickle.dumps(value)),
    'torch.save': _through_torch,
}


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('way', COPIES)
def test_copies(way: str, level: str, device: torch.device) -> None:
    """Of model and optimizer, before and after steps: on their own, with weights of their own."""
    net, optimizer = make(level, device)
    for index in range(2):
        model, stepper = COPIES[way]((net, optimizer))
        assert type(stepper) is SGD and 'step' not in stepper.__dict__ and 'zero_grad' not in stepper.__dict__
        assert same(stepper.state_dict(), optimizer.state_dict())
        x = data(index, device)
        before = net(x)
        assert torch.equal(model(x), before) and model(x).dtype is before.dtype
        # the copy computes with its own weights, and has no part in the training
        with torch.no_grad():
            model.fc.weight.zero_()
            model.bn.weight.zero_()
        assert float(model(x)) == 0 and torch.equal(net(x), before)
        weights = values([net], [optimizer])
        model(x).backward()
        stepper.step()
        stepper.zero_grad()
        assert differing(weights, values([net], [optimizer])) == []
        backward(net(x), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert type(optimizer) is SGD
    plain = make(None, device)
    for index in range(2):
        plain[0](data(index, device)).backward()
        plain[1].step()
        plain[1].zero_grad()
    agree((net, optimizer), plain, level)


@pytest.mark.parametrize('level', LEVELS)
def test_a_copy_that_is_trained_by_itself(level: str, device: torch.device) -> None:
    """The copy is FP32; at O0 and at the levels that cast ops, it has hooks that make way for new ones."""
    net, _ = make(level, device)
    copied = copy.deepcopy(net)
    ours = copied, sgd([copied])
    amp.initialize(*ours, opt_level=level, loss_scale='dynamic', verbosity=0)
    set_scales(ours[1], 8.0)
    theirs = make(None, device)
    backward(copied(data(0, device)), ours[1])
    theirs[0](data(0, device)).backward()
    for _, each in (ours, theirs):
        each.step()
    agree(ours, theirs, level)


# -- the end ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
def test_sessions_die_with_their_optimizers(level: str, device: torch.device) -> None:
    net, optimizer = make(level, device)
    backward(net(data(0, device)), optimizer)
    optimizer.step()
    session = weakref.ref(amp.amp_session.session_of(optimizer))
    weight = weakref.ref(net.fc.weight)
    living = len(amp.state_dict())
    del optimizer
    gc.collect()
    assert session() is None
    other = make('O1', device)
    assert len(amp.state_dict()) == living
    # the model goes on without it
    assert net(data(0, device)).dtype is F32
    del net
    gc.collect()
    assert weight() is None
    del other


@pytest.mark.parametrize('level', ['O1', 'O4', 'O2'])
def test_gradient_penalty(level: str, device: torch.device) -> None:
    """Double backward: the penalty's own graph goes through the gradients of a first one, unscaled."""

    def train(at: str | None) -> tuple[nn.Linear, Optimizer]:
        model = nn.Linear(2, 1, bias=False).to(device)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[0.5, -1.0]]))
        optimizer = SGD(model.parameters(), 0.25)
        if at is not None:
            amp.initialize(model, optimizer, opt_level=at, loss_scale=16.0, verbosity=0)
        for index in range(3):
            optimizer.zero_grad()
            x = data(index, device).requires_grad_(True)
            output = model(x).sum()
            (slope,) = torch.autograd.grad(output, x, create_graph=True)
            loss = output + slope.square().sum() / 4
            if at is None:
                loss.backward()
            else:
                backward(loss, optimizer)
            optimizer.step()
        return model, optimizer

    plain, run = train(None), train(level)
    wanted, found = (next(iter(amp.master_params(o))) for _, o in (plain, run))
    if level == 'O2':
        assert torch.allclose(wanted, found, rtol=2e-3)
    else:
        assert torch.allclose(wanted, found, rtol=2e-3 if level == 'O1' else 2e-2)
    assert found.dtype is F32 and not torch.equal(found, plain[0].weight * 0)


@pytest.mark.parametrize('level', LEVELS)
def test_inference(level: str, device: torch.device) -> None:
    """Models alone: cast, and no optimizer needed; evaluation and no_grad are covered."""
    net = amp.initialize(Net().to(device), opt_level=level, verbosity=0)
    assert net.fc.weight.dtype is HALF.get(level, F32)
    with torch.no_grad():
        for dtype in (F16, F32):
            output = net.eval()(data(0, device).to(dtype))
            assert output.dtype is F32 and float(output) == float(Net().eval()(data(0)))
