"""A skipped step leaves the buffers as they were before the forward passes that led to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops_models import NoHostRead
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import update_bn
from toy_buffers import APIS, Around, Probe, Scripted, batch, changed, hooks_of, snapshot

from amp_wrapper import AmpConfigError, AmpOptimWrapper
from amp_wrapper.amp import session
from amp_wrapper.engine.buffers import hooks
from amp_wrapper.optim import FusedAdamW
from amp_wrapper.policy import LEVELS, resolve


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
    assert not any(isinstance(hook, hooks.BufferHook) for m in model.modules() for hook in hooks_of(m))


@pytest.mark.parametrize(
    'words', [dict(enabled=False), dict(opt_level='O0'), dict(opt_level='O5', skip_nonfinite=False)]
)
def test_nothing_where_nothing_is_skipped(words: dict[str, Any], device: torch.device) -> None:
    model = Around(nn.BatchNorm1d(3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = AmpOptimWrapper(optimizer=optimizer, verbosity=0, **words)
    wrapper.attach(model)
    assert not any(isinstance(hook, hooks.BufferHook) for m in model.modules() for hook in hooks_of(m))
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
    """The accumulation goes on: buffers return to what they were before the first pass since the last step."""
    model = Around(nn.BatchNorm1d(3)).to(device)
    run = Scripted('wrapper', level, model)
    run.train(batch((4, 3), device))
    before = snapshot(model)
    run.backward(run.forward(batch((4, 3), device)))
    run.wrapper.zero_grad()
    run.train(batch((4, 3), device, bad=True))
    assert changed(before, model) == []


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
        session.session_of(run.optimizer)._read = lambda *_, **__: None
    with NoHostRead():
        run.train(*batches)
    assert changed(before, model) == []
