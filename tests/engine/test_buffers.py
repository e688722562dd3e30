"""A skipped step leaves the buffers as they were before the forward passes that led to it."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import toy
from mmengine.model import ExponentialMovingAverage
from mmengine.optim import OptimWrapperDict
from ops_models import NoHostRead
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

from amp_wrapper import AmpConfigError, AmpOptimWrapper, OverflowStreakError, amp
from amp_wrapper.amp import session as amp_session
from amp_wrapper.engine.buffers import hooks as buffer_hooks
from amp_wrapper.engine.buffers import snapshots as buffer_snapshots
from amp_wrapper.engine.buffers.copies import LargeBuffer
from amp_wrapper.optim import FusedAdamW
from amp_wrapper.policy import LEVELS, resolve

NAN = math.nan


class Probe(nn.Module):
    """Buffers of many kinds, changed in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('mean', torch.zeros(3))
        self.register_buffer('count', torch.tensor(0))
        self.register_buffer('small', torch.zeros(2, dtype=torch.int8))
        self.register_buffer('flag', torch.tensor(False))
        self.register_buffer('wide', torch.zeros(2, dtype=torch.float64))
        self.register_buffer('phase', torch.zeros(2, dtype=torch.complex64))
        self.register_buffer('phases', torch.zeros(2, dtype=torch.complex128))
        self.register_buffer('replaced', torch.ones(3))
        self.register_buffer('through_data', torch.ones(3))
        self.register_buffer('passing', torch.zeros(1), persistent=False)
        self.register_buffer('channels_last', torch.zeros(1, 2, 3, 3).contiguous(memory_format=torch.channels_last))
        self.register_buffer('part', self.mean[1:])
        self.register_buffer('again', self.count)
        self.register_buffer('strided', torch.zeros(6)[::2])
        self.register_buffer('constant', torch.arange(4.0))
        self.register_buffer('large', torch.zeros(buffer_snapshots.LARGE // 4 + 1))
        self.register_buffer('nothing', torch.zeros(0))
        self.register_buffer('absent', None)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            value = x.float().mean()
            self.mean.mul_(0.5).add_(value)
            self.count += 1
            self.small.add_(3)
            self.flag.logical_not_()
            self.wide[0] += value
            self.phase += 1j * value
            self.phases += value
            self.replaced = self.replaced * 0.5 + value
            self.through_data.data.add_(value)
            self.passing.fill_(value)
            self.channels_last[:, 1] += value
            self.strided.add_(value)
            self.large[0] += value
        return x


class Around(nn.Module):
    """A module with buffers among weights that train."""

    def __init__(self, part: nn.Module, *more: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.part = part
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        result = self.part(x, *(value.to(x.device) for value in self.more))
        if not isinstance(result, Tensor):
            result = result.loss
        # no channel goes around what the test puts into x
        return result.float().sum() * self.scale.float().sum() + x.float().sum() * self.scale.float().sum()


def fake_quantize() -> nn.Module:
    return torch.ao.quantization.FakeQuantize(torch.ao.quantization.MovingAverageMinMaxObserver)


#: Modules with buffers -> how to make one, the shape of its input, and what else it takes.
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[Tensor, ...]]] = {
    'BatchNorm1d': (lambda: nn.BatchNorm1d(3), (4, 3), ()),
    'BatchNorm2d': (lambda: nn.BatchNorm2d(3), (2, 3, 4, 4), ()),
    'BatchNorm3d': (lambda: nn.BatchNorm3d(3), (2, 3, 2, 2, 2), ()),
    'BatchNorm2d, cumulative': (lambda: nn.BatchNorm2d(3, momentum=None), (2, 3, 4, 4), ()),
    'BatchNorm2d, not affine': (lambda: nn.BatchNorm2d(3, affine=False), (2, 3, 4, 4), ()),
    'SyncBatchNorm': (lambda: nn.SyncBatchNorm(3), (2, 3, 4, 4), ()),
    'InstanceNorm1d': (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (2, 3, 8), ()),
    'InstanceNorm2d': (lambda: nn.InstanceNorm2d(3, track_running_stats=True), (2, 3, 4, 4), ()),
    'InstanceNorm3d': (lambda: nn.InstanceNorm3d(3, track_running_stats=True), (2, 3, 2, 2, 2), ()),
    'LazyBatchNorm1d': (lambda: shaped(nn.LazyBatchNorm1d(), (4, 3)), (4, 3), ()),
    'LazyBatchNorm2d': (lambda: shaped(nn.LazyBatchNorm2d(), (2, 3, 4, 4)), (2, 3, 4, 4), ()),
    'LazyBatchNorm3d': (lambda: shaped(nn.LazyBatchNorm3d(), (2, 3, 2, 2, 2)), (2, 3, 2, 2, 2), ()),
    'LazyInstanceNorm1d': (
        lambda: shaped(nn.LazyInstanceNorm1d(track_running_stats=True), (2, 3, 8)),
        (2, 3, 8),
        (),
    ),
    'LazyInstanceNorm2d': (
        lambda: shaped(nn.LazyInstanceNorm2d(track_running_stats=True), (2, 3, 4, 4)),
        (2, 3, 4, 4),
        (),
    ),
    'LazyInstanceNorm3d': (
        lambda: shaped(nn.LazyInstanceNorm3d(track_running_stats=True), (2, 3, 2, 2, 2)),
        (2, 3, 2, 2, 2),
        (),
    ),
    'AdaptiveLogSoftmaxWithLoss': (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(3, 8, [2]),
        (4, 3),
        (torch.tensor([0, 3, 1, 7]),),
    ),
    'NLLLoss': (lambda: nn.NLLLoss(weight=torch.ones(3)), (4, 3), (torch.tensor([0, 2, 1, 1]),)),
    'NLLLoss2d': (
        lambda: nn.modules.loss.NLLLoss2d(weight=torch.ones(3)),
        (2, 3, 2, 2),
        (torch.zeros(2, 2, 2, dtype=torch.int64),),
    ),
    'CrossEntropyLoss': (lambda: nn.CrossEntropyLoss(weight=torch.ones(3)), (4, 3), (torch.tensor([0, 2, 1, 1]),)),
    'MultiMarginLoss': (lambda: nn.MultiMarginLoss(weight=torch.ones(3)), (4, 3), (torch.tensor([0, 2, 1, 1]),)),
    'MultiLabelSoftMarginLoss': (
        lambda: nn.MultiLabelSoftMarginLoss(weight=torch.ones(3)),
        (4, 3),
        (torch.ones(4, 3),),
    ),
    'BCELoss': (
        lambda: nn.Sequential(nn.Sigmoid(), nn.Flatten(0), Against(nn.BCELoss(weight=torch.ones(12)))),
        (4, 3),
        (),
    ),
    'BCEWithLogitsLoss': (lambda: nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)), (4, 3), (torch.ones(4, 3),)),
    'FractionalMaxPool2d': (
        lambda: nn.FractionalMaxPool2d(2, 2, _random_samples=torch.rand(2, 3, 2)),
        (2, 3, 4, 4),
        (),
    ),
    'FractionalMaxPool3d': (
        lambda: nn.FractionalMaxPool3d(2, 2, _random_samples=torch.rand(2, 3, 3)),
        (2, 3, 4, 4, 4),
        (),
    ),
    'spectral_norm': (lambda: parametrizations.spectral_norm(nn.Linear(3, 3)), (4, 3), ()),
    'old spectral_norm': (lambda: nn.utils.spectral_norm(nn.Linear(3, 3)), (4, 3), ()),
    'FakeQuantize': (fake_quantize, (4, 3), ()),
    'MinMaxObserver': (lambda: torch.ao.quantization.MovingAverageMinMaxObserver(), (4, 3), ()),
    'own': (Probe, (4, 3), ()),
    'frozen': (lambda: nn.Sequential(nn.BatchNorm1d(3)).requires_grad_(False), (4, 3), ()),
}


class Against(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(x, torch.ones_like(x))


def shaped(module: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    with torch.no_grad():
        module.eval()(torch.zeros(shape))
    return module.train()


def test_no_module_of_torch_is_forgotten() -> None:
    with_buffers = set()
    for name in dir(nn.modules):
        cls = getattr(nn.modules, name)
        if inspect.isclass(cls) and issubclass(cls, nn.Module) and not name.startswith('_'):
            sources = [inspect.getsource(base) for base in cls.__mro__ if base not in (nn.Module, object)]
            if any('register_buffer(' in source or 'UninitializedBuffer(' in source for source in sources):
                with_buffers.add(name)
    # abstract, or with parameters alone where it is not one of those above
    nothing = {'Module', 'CosineEmbeddingLoss', 'LinearCrossEntropyLoss'}
    assert with_buffers - nothing <= set(MODULES), with_buffers - nothing - set(MODULES)
    assert len(with_buffers) >= 18


def bits(tensor: Tensor) -> Tensor:
    """The bits as bytes."""
    return tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: buffer.detach().clone() for name, buffer in model.named_buffers(remove_duplicate=False) if buffer.numel()
    }


def changed(before: dict[str, Tensor], model: nn.Module) -> list[str]:
    now = snapshot(model)
    assert now.keys() == before.keys()
    return [name for name in now if not torch.equal(bits(now[name]), bits(before[name]))]


class Scripted:
    """A wrapper and the functional API under one face."""

    def __init__(self, api: str, level: str, model: nn.Module, kind: Any = torch.optim.SGD, **words: Any) -> None:
        self.model = model
        self.optimizer = kind(model.parameters(), lr=2.0**-6)
        self.wrapper = None
        if api == 'wrapper':
            words = {'skip_nonfinite': True, 'loss_scale': dict(init_scale=1.0), **words}
            self.wrapper = AmpOptimWrapper(opt_level=level, optimizer=self.optimizer, verbosity=0, **words)
            self.wrapper.attach(model)
        else:
            # without a dynamic scale, O0 checks nothing
            words = {'loss_scale': dict(init_scale=1.0), **words}
            amp.initialize(model, self.optimizer, opt_level=level, verbosity=0, **words)

    def forward(self, x: Tensor | tuple[Tensor, ...], call: Callable[..., Tensor] | None = None) -> Tensor:
        call = self.model if call is None else call
        given = (x,) if isinstance(x, Tensor) else x
        if self.wrapper is None:
            return call(*given)
        with self.wrapper.optim_context(self.model):
            return call(*given)

    def backward(self, loss: Tensor) -> None:
        if self.wrapper is not None:
            self.wrapper.backward(loss)
            return
        with amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()

    def step(self) -> None:
        self.optimizer.step() if self.wrapper is None else self.wrapper.step()
        self.optimizer.zero_grad() if self.wrapper is None else self.wrapper.zero_grad()

    def train(
        self, *batches: Tensor | tuple[Tensor, ...], call: Callable[..., Tensor] | None = None, steps: bool = True
    ) -> None:
        """One step over some batches."""
        for x in batches:
            self.backward(self.forward(x, call).float().sum())
        if steps:
            self.step()


APIS = ('wrapper', 'functional')


def batch(shape: tuple[int, ...], device: torch.device, bad: bool = False, seed: int = 0) -> Tensor:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.25 + seed
    if bad:
        x.view(-1)[0] = NAN
    return x.to(device)


class Everything(nn.Module):
    """All of :data:`MODULES`, each with an input of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Around(make(), *more) for make, _, more in MODULES.values()])

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.stack([part(x) for part, x in zip(self.parts, inputs)]).sum()


def inputs(device: torch.device, bad: bool = False, seed: int = 0) -> tuple[Tensor, ...]:
    found = []
    for name, (_, shape, _) in MODULES.items():
        # BCELoss raises where a probability is NaN, and FakeQuantize of torch 2.6 where a bound is
        x = batch(shape, device, bad and name != 'BCELoss', seed)
        found.append(x.nan_to_num(1e4) if name == 'FakeQuantize' else x)
    return tuple(found)


@pytest.mark.parametrize('api', APIS)
@pytest.mark.parametrize('level', LEVELS)
def test_every_module_with_buffers(level: str, api: str, device: torch.device) -> None:
    expected = {'own', 'frozen', 'FakeQuantize', 'MinMaxObserver', 'spectral_norm', 'old spectral_norm'}
    names = list(MODULES)
    for restores in (True, False):
        model = Everything().to(device)
        kind = FusedAdamW if level in ('O2', 'O4') else torch.optim.SGD
        run = Scripted(api, level, model, kind, restore_buffers_on_skip=restores)
        run.train(inputs(device))
        before, weight = snapshot(model), model.parts[0].scale.detach().clone()
        run.train(inputs(device, bad=True), inputs(device, seed=1))
        assert torch.equal(model.parts[0].scale, weight), 'the step was not skipped'
        found = changed(before, model)
        if restores:
            assert found == []
            run.train(inputs(device, seed=1))
            assert not torch.equal(model.parts[0].scale, weight)
            assert not any(b.isnan().any() for b in model.buffers() if b.is_floating_point())
            found = changed(before, model)
        moved = {names[int(name.split('.')[1])] for name in found}
        assert moved == {name for name in MODULES if 'Norm' in name or name in expected}


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('api', APIS)
def test_the_first_step_of_all_and_many_skips(level: str, api: str, device: torch.device) -> None:
    model = Around(nn.Sequential(nn.BatchNorm1d(3), Probe())).to(device)
    run = Scripted(api, level, model)
    before = snapshot(model)
    for _ in range(3):
        run.train(batch((4, 3), device, bad=True))
        assert changed(before, model) == []


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('api', APIS)
def test_off(level: str, api: str, device: torch.device) -> None:
    model = Around(nn.BatchNorm1d(3)).to(device)
    run = Scripted(api, level, model, restore_buffers_on_skip=False)
    run.train(batch((4, 3), device, bad=True))
    assert model.part.running_mean.isnan().any() and model.part.num_batches_tracked == 1
    assert not any(isinstance(hook, buffer_hooks.BufferHook) for m in model.modules() for hook in hooks_of(m))


def hooks_of(module: nn.Module) -> list[Any]:
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


@pytest.mark.parametrize(
    'words', [dict(enabled=False), dict(opt_level='O0'), dict(opt_level='O5', skip_nonfinite=False)]
)
def test_nothing_where_nothing_is_skipped(words: dict[str, Any], device: torch.device) -> None:
    model = Around(nn.BatchNorm1d(3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = AmpOptimWrapper(optimizer=optimizer, verbosity=0, **words)
    wrapper.attach(model)
    assert not any(isinstance(hook, buffer_hooks.BufferHook) for m in model.modules() for hook in hooks_of(m))
    with wrapper.optim_context(model):
        loss = model(batch((4, 3), device, bad=True))
    wrapper.update_params(loss)
    assert model.part.running_mean.isnan().any()


def test_the_switch_is_part_of_the_policy() -> None:
    assert resolve('O2').to_dict()['restore_buffers_on_skip'] is True
    assert resolve('O2', restore_buffers_on_skip=False).to_dict()['restore_buffers_on_skip'] is False
    with pytest.raises(AmpConfigError, match='restore_buffers_on_skip=1 must be True or False'):
        resolve('O2', restore_buffers_on_skip=1)  # type: ignore[arg-type]


# -- what is not a forward pass --------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('api', APIS)
@pytest.mark.parametrize('when', ['before', 'between', 'after backward'])
def test_what_the_user_writes_stays(level: str, api: str, when: str, device: torch.device) -> None:
    model = Around(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))).to(device)
    run = Scripted(api, level, model)
    run.train(batch((4, 3), device))
    second = snapshot(model.part[1])

    def write() -> None:
        model.part[0].reset_running_stats()

    if when == 'before':
        write()
    run.backward(run.forward(batch((4, 3), device)))
    if when == 'between':
        write()
    loss = run.forward(batch((4, 3), device, bad=True))
    run.backward(loss)
    if when == 'after backward':
        write()
    run.step()
    fresh = snapshot(nn.BatchNorm1d(3).to(device))
    assert torch.equal(model.part[0].running_var.float(), fresh['running_var'])
    assert torch.equal(model.part[0].running_mean.float(), fresh['running_mean'])
    assert model.part[0].num_batches_tracked == 0
    assert changed(second, model.part[1]) == []


@pytest.mark.parametrize('level', LEVELS)
def test_loads_and_update_bn_stay(level: str, device: torch.device) -> None:
    for how in ('load', 'update_bn'):
        model = Around(nn.Sequential(nn.BatchNorm1d(3))).to(device)
        run = Scripted('wrapper', level, model)
        run.train(batch((4, 3), device))
        run.backward(run.forward(batch((4, 3), device, bad=True)))
        if how == 'load':
            saved = {name: torch.full_like(value, 3.0) for name, value in model.part[0].state_dict().items()}
            model.part[0].load_state_dict(saved)
        else:
            update_bn([batch((4, 3), device, seed=7)], model)
            # one batch, counted from zero
            assert model.part[0].num_batches_tracked == 1
        before = snapshot(model)
        run.step()
        assert changed(before, model) == []
        assert not model.part[0].running_mean.isnan().any()


def test_an_evaluation_between_changes_nothing(device: torch.device) -> None:
    model = Around(nn.BatchNorm1d(3)).to(device)
    run = Scripted('wrapper', 'O2', model)
    before = snapshot(model)
    run.backward(run.forward(batch((4, 3), device, bad=True)))
    model.eval()
    with torch.no_grad():
        model(batch((4, 3), device))
    model.train()
    run.step()
    assert changed(before, model) == []


@pytest.mark.parametrize('level', LEVELS)
def test_gradients_cleared_without_a_step(level: str, device: torch.device) -> None:
    """The window goes on: buffers return to what they were before the first pass since the last step."""
    model = Around(nn.BatchNorm1d(3)).to(device)
    run = Scripted('wrapper', level, model)
    run.train(batch((4, 3), device))
    before = snapshot(model)
    run.backward(run.forward(batch((4, 3), device)))
    run.wrapper.zero_grad()
    run.train(batch((4, 3), device, bad=True))
    assert changed(before, model) == []


# -- ways to run a forward pass --------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('api', APIS)
@pytest.mark.parametrize('way', ['siamese', 'part', 'layer', 'reentrant', 'not reentrant', 'no_grad inside'])
def test_ways_to_run(level: str, api: str, way: str, device: torch.device) -> None:
    inner = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), Probe())
    model = Around(inner).to(device)

    def call(x: Tensor) -> Tensor:
        scale = model.scale.float().sum()
        if way == 'siamese':
            return model(x) + model(x * 2)
        if way == 'part':
            return model.part(x).float().sum() * scale
        if way == 'layer':
            return model.part[1](model.part[0][1](x)).float().sum() * scale
        if way == 'no_grad inside':
            return run_inside(model, x) * scale
        x = x.clone().requires_grad_()
        return checkpoint(model.part, x, use_reentrant=way == 'reentrant').float().sum() * scale

    run = Scripted(api, level, model)
    run.train(batch((4, 3), device), call=call)
    counted = int(model.part[1].count)
    # torch stops a segment that runs again when it has what it needs
    assert counted == (2 if way in ('siamese', 'reentrant') else 1)
    before = snapshot(model)
    run.train(batch((4, 3), device, bad=True), batch((4, 3), device), call=call)
    assert changed(before, model) == []
    run.train(batch((4, 3), device), call=call)
    assert int(model.part[1].count) == 2 * counted


def run_inside(model: Around, x: Tensor) -> Tensor:
    """A teacher that runs without gradients inside of the model's pass."""

    class Teacher(nn.Module):
        def forward(self, outer: Around, x: Tensor) -> Tensor:
            with torch.no_grad():
                return outer.part(x).float().sum()

    original = model.forward
    try:
        model.forward = lambda x: Teacher()(model, x)  # type: ignore[method-assign]
        return model(x)
    finally:
        model.forward = original  # type: ignore[method-assign]


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.raises: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.raises is not None:
            raise self.raises
        return x


@pytest.mark.parametrize('kind', [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize('level', LEVELS)
def test_a_pass_that_ended_early(level: str, kind: type[BaseException], device: torch.device) -> None:
    model = Around(nn.Sequential(nn.BatchNorm1d(3), Interrupted())).to(device)
    run = Scripted('wrapper', level, model)
    run.train(batch((4, 3), device))
    before = snapshot(model)
    model.part[1].raises = kind
    with pytest.raises(kind):
        run.forward(batch((4, 3), device, bad=True))
    model.part[1].raises = None
    run.train(batch((4, 3), device, bad=True))
    assert changed(before, model) == []
    model.part[0].reset_running_stats()
    run.train(batch((4, 3), device, bad=True))
    assert model.part[0].num_batches_tracked == 0


@pytest.mark.parametrize('level', ['O0', 'O1', 'O2'])
def test_dataparallel_replicas_and_threads(level: str, device: torch.device) -> None:
    """Several passes at once, as DataParallel has them, are one."""
    import threading

    model = Around(nn.BatchNorm1d(3)).to(device)
    run = Scripted('wrapper', level, model)
    run.train(batch((4, 3), device))
    before = snapshot(model)
    first, second = threading.Event(), threading.Event()

    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            # the first one is inside while the second one begins and ends
            if threading.current_thread().name == 'outer':
                first.set()
                second.wait(10)
            return x

    part = model.part
    model.part = nn.Sequential(part, Gate(), part)
    thread = threading.Thread(target=lambda: model(batch((4, 3), device, bad=True)), name='outer')
    thread.start()
    first.wait(10)
    model(batch((4, 3), device))
    second.set()
    thread.join()
    model.part = part
    run.train(batch((4, 3), device, bad=True))
    assert changed(before, model) == []


@pytest.mark.parametrize('level', LEVELS)
def test_a_graph_that_waits_for_its_backward_pass(level: str, device: torch.device) -> None:
    """It holds the buffers, and a step in between may not spoil it."""
    # the step changes no weight that the graph holds
    model = Around(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).requires_grad_(False))).to(device)
    run = Scripted('wrapper', level, model)
    first, second = run.forward(batch((4, 3), device)), run.forward(batch((4, 3), device, seed=1))
    run.backward(first)
    run.step()
    run.backward(second)
    run.step()
    assert model.part[1].num_batches_tracked == 2


# -- buffers that come and go ----------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
def test_buffers_that_come_later(level: str, device: torch.device) -> None:
    model = Around(nn.Sequential(nn.BatchNorm1d(3), nn.Identity())).to(device)
    run = Scripted('wrapper', level, model)
    run.train(batch((4, 3), device))
    # a counter, a statistic in the place of None, a loss with a weight
    model.part[1].register_buffer('late', torch.tensor([5], device=device))
    model.part[1].register_forward_hook(lambda module, args, output: [module.late.add_(1), None][1])
    model.register_buffer('empty', None)
    run.train(batch((4, 3), device))
    model.empty = torch.zeros(2, device=device)
    model.register_forward_hook(lambda module, args, output: [module.empty.add_(1), None][1])
    model.loss = Weighted().to(device)
    run.train(batch((4, 3), device))
    before = snapshot(model)
    assert model.part[1].late == 7 and before['empty'].tolist() == [1, 1]
    run.train(batch((4, 3), device, bad=True), call=lambda x: model.loss(model(x)))
    assert changed(before, model) == []
    run.train(batch((4, 3), device), call=lambda x: model.loss(model(x)))
    assert model.loss.seen == 1 and model.part[1].late == 8


@pytest.mark.parametrize('level', LEVELS)
def test_a_loss_that_comes_later(level: str, device: torch.device) -> None:
    model = Around(nn.BatchNorm1d(3)).to(device)
    run = Scripted('wrapper', level, model)
    run.train(batch((4, 3), device))
    model.loss = Weighted().to(device)
    run.train(batch((4, 3), device, bad=True), call=lambda x: model.loss(model(x)))
    assert model.loss.seen == 0


class Weighted(nn.modules.loss._Loss):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('seen', torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x


@pytest.mark.parametrize('change', ['shape', 'dtype', 'none', 'inference'])
def test_a_buffer_that_became_another_kind_is_left_alone(change: str, device: torch.device) -> None:
    model = Around(Becoming(change)).to(device)
    run = Scripted('wrapper', 'O2', model)
    run.train(batch((4, 3), device, bad=True))
    # the others return
    assert model.part.count == 0
    found = model.part.value
    assert {'shape': lambda: found.shape == (5,), 'dtype': lambda: found.dtype is torch.int32}.get(
        change, lambda: found is None or found.is_inference()
    )()
    run.train(batch((4, 3), device))
    assert model.part.count == 1


class Becoming(nn.Module):
    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.register_buffer('value', torch.zeros(3))
        self.register_buffer('count', torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.change == 'shape':
            self.value = torch.zeros(5, device=x.device)
        elif self.change == 'dtype':
            self.value = torch.zeros(3, device=x.device, dtype=torch.int32)
        elif self.change == 'none':
            self.value = None
        else:
            with torch.inference_mode():
                self.value = torch.zeros(3, device=x.device)
        return x


def test_large_constants_are_not_kept_twice(device: torch.device) -> None:
    model = Around(nn.Sequential(Table(), Probe())).to(device)
    run = Scripted('wrapper', 'O1', model)
    run.train(batch((4, 3), device))
    snapshots = run.wrapper._engine.parts.buffers
    assert snapshots is not None
    copies = {name: snapshots._tracked._copies[place] for place, name in enumerate(snapshots._tracked.names)}
    large = {name: part for name, (part, _) in copies.items() if isinstance(part, LargeBuffer)}
    assert set(large) == {'part.0.table', 'part.1.large'}
    kept = {name for name, part in large.items() if part.copies[0] is not None}
    assert kept == {'part.1.large'}
    before = snapshot(model)
    run.train(batch((4, 3), device, bad=True))
    assert changed(before, model) == []
    # a table that begins to move is followed from the next step on
    model.part[0].moves = True
    run.train(batch((4, 3), device))
    before = snapshot(model)
    run.train(batch((4, 3), device, bad=True))
    assert changed(before, model) == []


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('table', torch.arange(buffer_snapshots.LARGE, dtype=torch.int64))
        self.moves = False

    def forward(self, x: Tensor) -> Tensor:
        if self.moves:
            self.table += 1
        return x


# -- several optimizers ----------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = Around(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Counter()))
        self.discriminator = Around(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Counter()))
        self.frozen = nn.BatchNorm1d(3).requires_grad_(False)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('count', torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x


class Game:
    """A generator and a discriminator, through either API."""

    def __init__(self, api: str, levels: tuple[str, str], device: torch.device) -> None:
        self.model = Pair().to(device)
        self.optimizers = {
            name: torch.optim.SGD(getattr(self.model, name).parameters(), lr=2.0**-8)
            for name in ('generator', 'discriminator')
        }
        self.wrappers = None
        if api == 'wrapper':
            members = {
                name: AmpOptimWrapper(
                    opt_level=level, optimizer=optimizer, verbosity=0, skip_nonfinite=True, loss_scale=1.0
                )
                for level, (name, optimizer) in zip(levels, self.optimizers.items())
            }
            self.wrappers = OptimWrapperDict(**members)
            self.wrappers.initialize_count_status(self.model, 0, 10)
        else:
            words = dict(opt_level=levels[0], verbosity=0, loss_scale=dict(init_scale=1.0))
            parts = [self.model.generator, self.model.discriminator]
            if api == 'one session':
                amp.initialize(parts, list(self.optimizers.values()), num_losses=2, **words)
            else:
                for part, optimizer in zip(parts, self.optimizers.values()):
                    amp.initialize(part, optimizer, **words)
        self.one = api == 'one session'

    @contextmanager
    def context(self, name: str) -> Iterator[None]:
        if self.wrappers is None:
            yield
            return
        with self.wrappers[name].optim_context(self.model):
            yield

    def update(self, name: str, loss: Tensor) -> None:
        if self.wrappers is not None:
            self.wrappers[name].update_params(loss)
            for wrapper in self.wrappers.values():
                # what the loss brought to the other one
                wrapper.zero_grad()
            return
        optimizer = self.optimizers[name]
        loss_id = int(name == 'discriminator') if self.one else 0
        with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
            scaled.backward()
        optimizer.step()
        for each in self.optimizers.values():
            each.zero_grad()

    def fake(self, x: Tensor) -> Tensor:
        return self.model.generator.part(x).float()

    def judge(self, x: Tensor) -> Tensor:
        return self.model.discriminator.part(x).float().square().sum() * self.model.discriminator.scale.float().sum()

    def counts(self) -> tuple[int, int]:
        return int(self.model.generator.part[2].count), int(self.model.discriminator.part[2].count)

    def play(self, x: Tensor, bad: str = '', again: bool = False) -> None:
        with self.context('discriminator'):
            fake = self.fake(x)
            loss = self.judge(x) + self.judge(fake.detach())
        self.update('discriminator', loss * (NAN if 'd' in bad else 1))
        with self.context('generator'):
            if again:
                # as long as somebody holds it, a loss may come
                del fake
                fake = self.fake(x)
            loss = self.judge(fake) * self.model.generator.scale.float().sum()
        self.update('generator', loss * (NAN if 'g' in bad else 1))


PLAYS = [
    ('wrapper', ('O1', 'O1')),
    ('wrapper', ('O2', 'O2')),
    ('wrapper', ('O5', 'O0')),
    ('wrapper', ('O3', 'O4')),
    ('one session', ('O0', 'O0')),
    ('one session', ('O1', 'O1')),
    ('one session', ('O2', 'O2')),
    ('one session', ('O5', 'O5')),
    ('two sessions', ('O2', 'O2')),
    ('two sessions', ('O4', 'O4')),
]


@pytest.mark.parametrize(('api', 'levels'), PLAYS)
@pytest.mark.parametrize('again', [False, True])
def test_a_game_of_two_optimizers(api: str, levels: tuple[str, str], again: bool, device: torch.device) -> None:
    """Each step gives back what its own passes did, those through the modules of the other included, and nothing else."""
    game = Game(api, levels, device)
    x = batch((4, 3), device)
    g, d = (2 if again else 1), 3
    game.play(x, again=again)
    assert game.counts() == (g, d)
    game.play(x, bad='d', again=again)
    # the passes for the discriminator's loss, and the generator's that was made anew
    first = game.counts()
    assert first == (2 * g - again, 2 * d - 2)
    game.play(x, bad='g', again=again)
    game.play(x, again=again)
    # of the bad game, what was done for the discriminator's loss is left
    second = (first[0] + again + g, first[1] + 2 + d)
    assert game.counts() == second
    game.play(x, bad='dg', again=again)
    game.play(x, again=again)
    assert game.counts() == (second[0] + g, second[1] + d)
    # NaN that comes through the generator itself
    game.play(batch((4, 3), device, bad=True), again=again)
    game.play(x, again=again)
    for buffer in game.model.buffers():
        assert not buffer.isnan().any()
    assert game.counts() == (second[0] + 2 * g, second[1] + 2 * d)


@pytest.mark.parametrize('api', ['wrapper', 'one session', 'two sessions'])
@pytest.mark.parametrize('level', LEVELS)
def test_a_skip_of_one_inside_the_window_of_the_other(level: str, api: str, device: torch.device) -> None:
    """Passes that a loss has made use of are for its own optimizer to give back."""
    game = Game(api, (level, level), device)
    x = batch((4, 3), device)
    discriminator, generator = game.optimizers['discriminator'], game.optimizers['generator']

    def backward(name: str, loss: Tensor) -> None:
        if game.wrappers is not None:
            game.wrappers[name].backward(loss)
            return
        loss_id = int(name == 'discriminator') if game.one else 0
        with amp.scale_loss(loss, game.optimizers[name], loss_id=loss_id) as scaled:
            scaled.backward()

    def step(name: str) -> None:
        owner = game.optimizers[name] if game.wrappers is None else game.wrappers[name]
        owner.step()
        owner.zero_grad()

    for _ in range(2):
        with game.context('discriminator'):
            loss = game.judge(x)
        backward('discriminator', loss)
        with game.context('generator'):
            # of the generator alone
            loss = game.fake(x).sum() * game.model.generator.scale.float().sum() * NAN
        backward('generator', loss)
        step('generator')
    assert game.counts() == (0, 2)
    step('discriminator')
    assert game.counts() == (0, 2)
    assert all(p.isfinite().all() for o in (discriminator, generator) for g in o.param_groups for p in g['params'])


@pytest.mark.parametrize('level', LEVELS)
def test_one_loss_and_two_optimizers(level: str, device: torch.device) -> None:
    model = Around(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Counter())).to(device)
    # the module's weights belong to one, the model's scale to the other
    optimizers = [torch.optim.SGD(model.part.parameters(), lr=0.01), torch.optim.SGD([model.scale], lr=0.01)]
    amp.initialize(model, optimizers, opt_level=level, loss_scale=dict(init_scale=1.0), verbosity=0)
    before = snapshot(model)
    for bad in (True, False, True):
        with amp.scale_loss(model(batch((4, 3), device, bad)), optimizers) as scaled:
            scaled.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if not bad:
            before = snapshot(model)
            assert model.part[2].count == 1
        assert changed(before, model) == []


@pytest.mark.parametrize('level', LEVELS)
def test_a_member_that_checks_nothing_is_left_alone(level: str, device: torch.device) -> None:
    model = Pair().to(device)
    wrappers = OptimWrapperDict(
        generator=AmpOptimWrapper(
            opt_level=level,
            optimizer=torch.optim.SGD(model.generator.parameters(), lr=0.01),
            verbosity=0,
            skip_nonfinite=True,
        ),
        discriminator=AmpOptimWrapper(
            opt_level='O0', optimizer=torch.optim.SGD(model.discriminator.parameters(), lr=0.01), verbosity=0
        ),
    )
    wrappers.initialize_count_status(model, 0, 10)
    with wrappers['generator'].optim_context(model):
        x = model.frozen(batch((4, 3), device, bad=True))
        loss = model.generator(x) + model.discriminator(x)
    wrappers['generator'].update_params(loss)
    assert model.generator.part[2].count == 0
    assert not model.generator.part[1].running_mean.isnan().any()
    # nobody steps its weights: it belongs to whoever steps any of the model
    assert model.frozen.num_batches_tracked == 0
    assert model.discriminator.part[2].count == 1


# -- what surrounds it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('api', APIS)
def test_no_host_read(level: str, api: str, device: torch.device) -> None:
    model = Around(nn.Sequential(nn.BatchNorm1d(3), Probe())).to(device)
    words = dict(max_consecutive_skips=None) if api == 'wrapper' else {}
    run = Scripted(api, level, model, FusedAdamW, **words)
    run.train(batch((4, 3), device))
    before = snapshot(model)
    batches = [batch((4, 3), device, bad=True), batch((4, 3), device)]
    if api == 'functional':
        # the session looks at a step that it did not wait for when the device has told
        amp_session.session_of(run.optimizer)._read = lambda *_, **__: None
    with NoHostRead():
        run.train(*batches)
    assert changed(before, model) == []


@pytest.mark.parametrize('kind', [torch.optim.SGD, torch.optim.AdamW, FusedAdamW, 'fused'])
@pytest.mark.parametrize('level', LEVELS)
def test_kinds_of_optimizers(level: str, kind: Any, device: torch.device) -> None:
    model = Around(nn.Sequential(nn.BatchNorm1d(3), Probe())).to(device)
    if kind == 'fused':
        if resolve(level).casts_model and not resolve(level).master_weights:
            pytest.skip('torch steps no 16-bit weights fused on every device')
        kind = functools.partial(torch.optim.AdamW, fused=True)
    if kind is not torch.optim.SGD:
        # float16 has no 1e-8
        kind = functools.partial(kind, eps=1e-4)
    run = Scripted('wrapper', level, model, kind, clip_grad=dict(max_norm=1.0))
    run.train(batch((4, 3), device))
    before = snapshot(model)
    run.train(batch((4, 3), device, bad=True))
    assert changed(before, model) == []
    run.train(batch((4, 3), device))
    assert model.part[1].count == 2


@pytest.mark.parametrize('level', LEVELS)
def test_errors_leave_nothing_behind(level: str, device: torch.device) -> None:
    model = Around(nn.BatchNorm1d(3)).to(device)
    run = Scripted('wrapper', level, model, max_consecutive_skips=2)
    before = snapshot(model)
    run.train(batch((4, 3), device, bad=True))
    with pytest.raises(OverflowStreakError):
        run.train(batch((4, 3), device, bad=True))
    assert changed(before, model) == []
    for kind in (torch.optim.SGD, FusedAdamW):
        model = Around(nn.BatchNorm1d(3)).to(device)
        clip = dict(max_norm=1.0, error_if_nonfinite=True)
        run = Scripted('wrapper', level, model, kind, loss_scale=1.0, clip_grad=clip)
        before = snapshot(model)
        with pytest.raises(RuntimeError, match='non-finite'):
            run.train(batch((4, 3), device, bad=True))
        assert changed(before, model) == []


@pytest.mark.parametrize('level', LEVELS)
def test_averages_see_what_was_restored(level: str, device: torch.device) -> None:
    model = Around(nn.BatchNorm1d(3)).to(device)
    averages = [
        ExponentialMovingAverage(model, momentum=0.5, update_buffers=True),
        AveragedModel(model, use_buffers=True) if not resolve(level).casts_model else None,
    ]
    run = Scripted('wrapper', level, model)
    for seed in range(4):
        run.train(batch((4, 3), device, bad=seed % 2 == 1, seed=seed))
        for average in averages:
            if average is not None:
                average.update_parameters(model)
    for average in averages:
        for buffer in () if average is None else average.buffers():
            assert buffer.isfinite().all()


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('attached', [False, True])
def test_exact_resume_inside_a_window(level: str, attached: bool, device: torch.device) -> None:
    """What buffers were before an open window is in the checkpoint: a skip at its end means the same."""
    ends = []
    for resumes in (False, True):
        torch.manual_seed(0)
        model = Around(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Probe())).to(device)
        run = Scripted('wrapper', level, model)
        run.train(batch((4, 3), device))
        run.backward(run.forward(batch((4, 3), device)))
        if resumes:
            states = copy.deepcopy((model.state_dict(), run.wrapper.state_dict()))
            passing = model.part[2].passing.clone()
            model = Around(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Probe())).to(device)
            run = Scripted('wrapper', level, model) if attached else None
            if run is None:
                optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
                wrapper = AmpOptimWrapper(
                    opt_level=level,
                    optimizer=optimizer,
                    verbosity=0,
                    skip_nonfinite=True,
                    loss_scale=dict(init_scale=1.0),
                )
                model.load_state_dict(states[0])
                wrapper.load_state_dict(states[1])
                wrapper.attach(model)
                run = Scripted.__new__(Scripted)
                run.model, run.optimizer, run.wrapper = model, optimizer, wrapper
            else:
                run.wrapper.load_state_dict(states[1])
                model.load_state_dict(states[0])
            model.part[2].passing.copy_(passing)
        run.train(batch((4, 3), device, bad=True))
        ends.append(snapshot(model))
        run.train(batch((4, 3), device))
        ends[-1] |= {f'then {name}': value for name, value in snapshot(model).items()}
    assert [name for name in ends[0] if not torch.equal(bits(ends[0][name]), bits(ends[1][name]))] == []


def test_a_file_without_the_buffers_of_its_window(device: torch.device) -> None:
    model = Around(nn.BatchNorm1d(3)).to(device)
    run = Scripted('wrapper', 'O2', model)
    run.backward(run.forward(batch((4, 3), device)))
    state = run.wrapper.state_dict()
    assert set(state['amp']['window']['buffers']) == {f'part.{name}' for name in model.part._buffers}
    for damage in (['x'], {1: torch.zeros(())}, {'x': 1}):
        broken = copy.deepcopy(state)
        broken['amp']['window']['buffers'] = damage
        with pytest.raises(Exception, match=r"amp\['window'\]\['buffers'\] must be a dict of tensors by name"):
            run.wrapper.load_state_dict(broken)
    # as older versions wrote it, and with names and shapes of another model
    for other in (None, {'gone': torch.zeros(1), 'part.running_mean': torch.zeros(7)}):
        older = copy.deepcopy(state)
        if other is None:
            del older['amp']['window']['buffers']
        else:
            older['amp']['window']['buffers'] = other
        run.wrapper.load_state_dict(older)
        before = snapshot(model)
        run.train(batch((4, 3), device, bad=True))
        assert changed(before, model) == []


@pytest.mark.parametrize('level', LEVELS)
def test_copies_and_files_of_the_model_speak_for_themselves(level: str, device: torch.device) -> None:
    model = Around(nn.BatchNorm1d(3)).to(device)
    run = Scripted('wrapper', level, model)
    run.train(batch((4, 3), device))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = snapshot(model)
        run.backward(run.forward(batch((4, 3), device, bad=True)))
        other(batch((4, 3), device))
        assert other.part.num_batches_tracked == 2
        run.step()
        assert changed(before, model) == []
        assert other.part.num_batches_tracked == 2


@pytest.mark.parametrize('level', LEVELS)
def test_detach_and_attach_again(level: str, device: torch.device) -> None:
    model = Around(nn.BatchNorm1d(3)).to(device)
    run = Scripted('wrapper', level, model)
    run.train(batch((4, 3), device))
    run.wrapper.detach()
    assert not any(hooks_of(module) for module in model.modules())
    run.wrapper.attach(model)
    before = snapshot(model)
    run.train(batch((4, 3), device, bad=True))
    assert changed(before, model) == []


@pytest.mark.parametrize('api', APIS)
def test_compiled(api: str, device: torch.device) -> None:
    model = Around(nn.Sequential(nn.BatchNorm1d(3), Counter())).to(device)
    run = Scripted(api, 'O0', model)
    compiled = torch.compile(model, backend='aot_eager')
    try:
        run.train(batch((4, 3), device), call=compiled)
        before = snapshot(model)
        assert model.part[1].count == 1
        run.train(batch((4, 3), device, bad=True), call=compiled)
        assert changed(before, model) == []
        run.train(batch((4, 3), device), call=compiled)
        assert model.part[1].count == 2
    finally:
        torch.compiler.reset()


def test_functional_calls_are_left_alone(device: torch.device) -> None:
    """Stand-ins of buffers come and go with the call; transforms of torch.func see nothing of this."""
    model = Around(nn.BatchNorm1d(3)).to(device)
    run = Scripted('wrapper', 'O1', model)
    run.train(batch((4, 3), device))
    before = snapshot(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    torch.func.functional_call(model, (parameters, buffers), (batch((4, 3), device),))
    model.eval()
    stacked = {name: torch.stack([value, value]) for name, value in parameters.items()}
    both = torch.func.vmap(
        lambda p: torch.func.functional_call(model, (p, buffers), (batch((4, 3), device),)), randomness='same'
    )
    assert both(stacked).shape == (2,)
    model.train()
    run.train(batch((4, 3), device, bad=True))
    assert changed(before, model) == []


@pytest.mark.slow
@pytest.mark.parametrize('level', LEVELS)
def test_a_run_of_mmengine(level: str, tmp_path: Any, device: torch.device) -> None:
    """The data preprocessor is left alone, and the rest runs through the runner."""
    runner = toy.run(
        tmp_path, dict(type='AmpOptimWrapper', opt_level=level, skip_nonfinite=True, optimizer=dict(type='SGD', lr=0.1))
    )
    snapshots = runner.optim_wrapper._engine.parts.buffers
    assert snapshots is not None
    assert not any(name.startswith('data_preprocessor') for name in snapshots._tracked.names)
