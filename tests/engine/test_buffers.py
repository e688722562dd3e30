"""A skipped step restores the buffers to what they were before the forward passes that led to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import differing
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mmengine.optim import OptimWrapperDict
from pairs import pairs
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from toy_training import LEVELS, Training

from amp_wrapper import AmpOptimWrapper, FusedAdamW, amp

NAN = math.nan
#: More than what is copied at each step: 1 MiB.
LARGE = 300_000


class Probe(nn.Module):
    """Buffers of many kinds, changed in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('mean', torch.zeros(3))
        self.register_buffer('count', torch.tensor(0))
        self.register_buffer('small', torch.zeros(2, dtype=torch.int8))
        self.register_buffer('flag', torch.tensor(False))
        self.register_buffer('wide', torch.zeros(2, dtype=torch.float64))
        self.register_buffer('narrow', torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer('replaced', torch.ones(3))
        self.register_buffer('through_data', torch.ones(3))
        self.register_buffer('passing', torch.zeros(1), persistent=False)
        self.register_buffer('channels_last', torch.zeros(1, 2, 3, 3).contiguous(memory_format=torch.channels_last))
        self.register_buffer('part', self.mean[1:])
        self.register_buffer('again', self.count)
        self.register_buffer('strided', torch.zeros(6)[::2])
        self.register_buffer('constant', torch.arange(4.0))
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
            self.narrow += value
            self.replaced = self.replaced * 0.5 + value
            self.through_data.data.add_(value)
            self.passing.fill_(value)
            self.channels_last[:, 1] += value
            self.strided.add_(value)
        return x


class Around(nn.Module):
    """A module with buffers, and a weight that trains."""

    def __init__(self, part: nn.Module, *more: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.part = part
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        # what is in x reaches the loss whatever the part does
        return (self.part(x, *self.more).float().sum() + x.float().sum()) * self.scale.float().sum()


#: Modules with buffers -> how to make one, the shape of its input, and what else it takes.
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[Tensor, ...]]] = {
    'BatchNorm1d': (lambda: nn.BatchNorm1d(3), (4, 3), ()),
    'BatchNorm2d': (lambda: nn.BatchNorm2d(3), (2, 3, 4, 4), ()),
    'BatchNorm2d, cumulative': (lambda: nn.BatchNorm2d(3, momentum=None), (2, 3, 4, 4), ()),
    'SyncBatchNorm': (lambda: nn.SyncBatchNorm(3), (2, 3, 4, 4), ()),
    'InstanceNorm2d': (lambda: nn.InstanceNorm2d(3, track_running_stats=True), (2, 3, 4, 4), ()),
    'frozen BatchNorm': (lambda: nn.Sequential(nn.BatchNorm1d(3)).requires_grad_(False), (4, 3), ()),
    'weighted loss': (lambda: nn.CrossEntropyLoss(weight=torch.ones(3)), (4, 3), (torch.tensor([0, 2, 1, 1]),)),
    'spectral_norm': (lambda: parametrizations.spectral_norm(nn.Linear(3, 3)), (4, 3), ()),
    'old spectral_norm': (lambda: nn.utils.spectral_norm(nn.Linear(3, 3)), (4, 3), ()),
    'observer': (lambda: torch.ao.quantization.MovingAverageMinMaxObserver(), (4, 3), ()),
    'all kinds': (Probe, (4, 3), ()),
}


class Everything(nn.Module):
    """All of :data:`MODULES`, each with an input of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Around(make(), *more) for make, _, more in MODULES.values()])

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.stack([part(x) for part, x in zip(self.parts, inputs)]).sum()


def batch(shape: tuple[int, ...] = (4, 3), bad: bool = False, seed: int = 0) -> Tensor:
    x = torch.rand(shape, generator=torch.Generator(torch.get_default_device()).manual_seed(seed)) + 0.25 + seed
    if bad:
        x.view(-1)[0] = NAN
    return x


def inputs(bad: bool = False, seed: int = 0) -> tuple[Tensor, ...]:
    return tuple(batch(shape, bad, seed) for _, shape, _ in MODULES.values())


def scripted(level: str, model: nn.Module, door: str = 'wrapper', make: Any = SGD, **options: Any) -> Training:
    options = {'loss_scale': dict(init_scale=1.0), **options}
    if door == 'wrapper':
        options = {'skip_nonfinite': True, **options}
    return Training(level, door, lambda parameters: make(parameters, lr=2.0**-6), model, **options)


def step(run: Training, *batches: Tensor, call: Callable[..., Tensor] | None = None) -> None:
    """One step over some batches."""
    for x in batches:
        run.backward(run.forward(x, call=call))
    run.step()
    run.clear()


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers(remove_duplicate=False)}


def changed(before: dict[str, Tensor], model: nn.Module) -> list[str]:
    return differing(before, snapshot(model))


DOORS = ('wrapper', 'amp')


@pairs(level=LEVELS, door=DOORS, restores=(True, False))
def test_skipped_step_restores_buffers_of_every_module(level: str, door: str, restores: bool) -> None:
    model = Everything()
    run = scripted(level, model, door, FusedAdamW if level in ('O2', 'O4') else SGD, restore_buffers_on_skip=restores)
    names, moved = list(MODULES), set[str]()
    for bad in (False, True, False):
        before = snapshot(model)
        weight = model.parts[0].scale.detach().clone()
        run.backward(run.forward(*inputs(bad)))
        run.backward(run.forward(*inputs(seed=1)))
        run.step()
        run.clear()
        assert torch.equal(model.parts[0].scale, weight) == bad
        if bad and restores:
            assert changed(before, model) == []
        moved |= {names[int(name.split('.')[1])] for name in changed(before, model)}
        if restores:
            assert not any(buffer.isnan().any() for buffer in model.buffers() if buffer.is_floating_point())
    assert moved == set(MODULES) - {'weighted loss'}


def test_buffers_stay_where_no_step_is_skipped() -> None:
    for options in (dict(enabled=False), dict(level='O0'), dict(level='O5', skip_nonfinite=False)):
        model = Around(nn.BatchNorm1d(3))
        run = scripted(model=model, **{'level': 'O2', 'skip_nonfinite': None, 'loss_scale': None, **options})  # type: ignore[arg-type]
        step(run, batch(bad=True))
        assert model.part.running_mean.isnan().any() and model.part.num_batches_tracked == 1


# -- ways to run a forward pass --------------------------------------------------------------------------------------------


class Inside(nn.Module):
    """Runs its part in segments, or as a teacher without gradients."""

    def __init__(self, part: nn.Sequential, way: str) -> None:
        super().__init__()
        self.inner, self.way = part, way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == 'no_grad inside':
            with torch.no_grad():
                return self.inner(x)
        return checkpoint(self.inner, x.clone().requires_grad_(), use_reentrant=self.way == 'reentrant')


@pairs(door=DOORS, way=('siamese', 'functional', 'part', 'layer', 'reentrant', 'not reentrant', 'no_grad inside'))
def test_every_way_to_run_a_model_is_restored(door: str, way: str) -> None:
    for level in LEVELS:
        inner: Any = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), Probe())
        model = Around(Inside(inner, way) if way in ('reentrant', 'not reentrant', 'no_grad inside') else inner)

        def call(x: Tensor, model: Any = model) -> Tensor:
            scale = model.scale.float().sum()
            if way == 'siamese':
                return model(x) + model(x * 2)
            if way == 'functional':
                # which has buffers of its own
                of_its_own = {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
                return model(x) + torch.func.functional_call(model, of_its_own, (x,)) * 0
            if way == 'part':
                return model.part(x).float().sum() * scale
            if way == 'layer':
                return model.part[1](model.part[0][1](x)).float().sum() * scale
            return model(x)

        run = scripted(level, model, door)
        step(run, batch(), call=call)
        counted = int(inner[1].count)
        assert counted == (2 if way in ('siamese', 'reentrant') else 1)
        before = snapshot(model)
        step(run, batch(bad=True), batch(), call=call)
        assert changed(before, model) == [], level
        step(run, batch(), call=call)
        assert int(inner[1].count) == 2 * counted  # type: ignore[arg-type]


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('table', torch.zeros(LARGE))
        self.moves = False

    def forward(self, x: Tensor) -> Tensor:
        if self.moves:
            # at the address of one that is gone, perhaps
            self.table = self.table + x.detach().sum()
        return x


def test_a_large_table_is_restored_once_it_has_begun_to_change() -> None:
    model = Around(Table())
    run = scripted('O1', model)
    step(run, batch())
    model.part.moves = True
    step(run, batch())
    for _ in range(20):
        before = snapshot(model)
        step(run, batch(bad=True))
        assert changed(before, model) == []
        step(run, batch())
        assert changed(before, model) != []


# -- several optimizers ------------------------------------------------------------------------------------------------------


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).float()


class Pair:
    """A generator g and a discriminator d, in one session or with two wrappers."""

    def __init__(self, level: str, api: str) -> None:
        self.model: Any = nn.ModuleDict(dict(g=Half(), d=Half()))
        self.optimizers: Any = {name: SGD(self.model[name].parameters(), lr=0.01) for name in 'gd'}
        self.wrappers: Any = None
        words: dict[str, Any] = dict(opt_level=level, verbosity=0, loss_scale=dict(init_scale=1.0))
        if api != 'one session':
            made = {n: AmpOptimWrapper(optimizer=self.optimizers[n], skip_nonfinite=True, **words) for n in 'gd'}
            for name in 'gd' if api == 'attached before' else '':
                made[name].attach(self.model[name])
            self.wrappers = OptimWrapperDict(**made)
            self.wrappers.initialize_count_status(self.model, 0, 100)
        else:
            amp.initialize([*self.model.values()], [*self.optimizers.values()], num_losses=2, **words)

    def backward(self, name: str, loss: Tensor) -> None:
        if self.wrappers is not None:
            self.wrappers[name].backward(loss)
            return
        with amp.scale_loss(loss, self.optimizers[name], loss_id='gd'.index(name)) as scaled:
            scaled.backward()

    def step(self, name: str) -> None:
        (self.wrappers or self.optimizers)[name].step()
        (self.wrappers or self.optimizers)[name].zero_grad()

    def judge(self, x: Tensor) -> Tensor:
        return self.model['d'](x).square().mean()

    def count(self, name: str) -> int:
        return int(self.model[name].norm.num_batches_tracked)


@settings(max_examples=40, deadline=None)
@given(
    level=st.sampled_from(['O1', 'O2', 'O5']),
    api=st.sampled_from(['wrapper', 'one session']),
    freezes=st.booleans(),
    acts=st.lists(
        st.tuples(st.sampled_from(['g', 'd', 'picture', 'held', 'G', 'D']), st.booleans()), min_size=1, max_size=10
    ),
)
# the first call of all is one of the other model
@example(level='O1', api='one session', freezes=False, acts=[('d', False), ('g', True), ('D', False)])
@example(
    level='O2', api='wrapper', freezes=True, acts=[('g', False), ('d', False), ('D', False), ('d', True), ('G', False)]
)
def test_no_nan_is_left_when_all_stepped(level: str, api: str, freezes: bool, acts: list[tuple[str, bool]]) -> None:
    """GAN losses with detached and stored pictures, in every order, with NaN in any of them."""
    pair = Pair(level, api)
    generator, discriminator = pair.model['g'], pair.model['d']
    waiting: set[str] = set()
    held = []
    for index, (act, bad) in enumerate([*acts, ('G', False), ('D', False), ('g', False), ('G', False)]):
        x, other = batch(bad=bad, seed=index), batch(seed=index + 1)
        if act == 'g':
            discriminator.requires_grad_(not freezes)
            pair.backward('g', pair.judge(generator(x)))
            discriminator.requires_grad_(True)
            waiting.add('g')
        elif act in ('d', 'picture', 'held'):
            fake = x if act == 'd' else generator(x)
            if act == 'held':
                held.append(fake)
            pair.backward('d', pair.judge(other) + pair.judge(fake.detach()))
            waiting.add('d')
        elif act.lower() in waiting:
            pair.step(act.lower())
            waiting.discard(act.lower())
        if not waiting:
            assert all(buffer.isfinite().all() for buffer in pair.model.buffers()), (act, index)
    assert all(parameter.isfinite().all() for parameter in pair.model.parameters())


@pytest.mark.parametrize(('order', 'left'), [('gd', 0), ('dg', 1)])
@pytest.mark.parametrize('api', ['wrapper', 'attached before', 'one session'])
def test_any_skipped_step_restores_all_buffers_of_the_session(api: str, order: str, left: int) -> None:
    """Since the step before it, of whichever optimizer."""
    pair = Pair('O1', api)
    for name, factor in (('g', math.inf), ('d', 1.0)):
        pair.backward(name, pair.model[name](batch()).square().mean() * factor)
    for name in order:
        pair.step(name)
    assert (pair.count('g'), pair.count('d')) == (left, left)


def test_step_with_a_closure_ends_what_its_calls_have_begun() -> None:
    model = Around(nn.BatchNorm1d(3))
    run = scripted('O4', model, loss_scale=None)
    run.wrapper.step(closure=lambda: run.backward(run.forward(batch())))
    step(run, batch(bad=True))
    assert model.part.num_batches_tracked == 1 and model.part.running_mean.isfinite().all()


class Marked(nn.Module):
    """Buffers that hold what is not finite on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('mask', torch.zeros(3))
        self.register_buffer('slots', torch.full((3,), NAN))

    def forward(self, x: Tensor) -> Tensor:
        self.mask.copy_(torch.tensor([0.0, -math.inf, math.inf]))
        self.slots[0] = x.detach().float().mean()
        return x


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.marked = Half(), Marked()
        self.unused = nn.ModuleList([nn.BatchNorm1d(3), nn.InstanceNorm1d(4, track_running_stats=True)])
        self.table = Table()
        self.table.moves = True

    def forward(self, x: Tensor, bad: bool) -> Tensor:
        for norm in self.unused:
            norm(x * math.inf)
        self.table(x * NAN if bad else x)
        return self.marked(self.part(x)).square().mean()


@pytest.mark.parametrize('level', ['O1', 'O2', 'O4', 'O5'])
def test_nan_in_a_branch_without_a_loss_goes_at_the_step(level: str) -> None:
    """The step is taken; what is not finite on purpose stays."""
    model = Branches()
    optimizer = SGD(model.part.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=dict(init_scale=1.0))
    for index in range(3):
        with amp.scale_loss(model(batch(seed=index), index == 2), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.part.norm.num_batches_tracked == 3
    assert all(buffer.isfinite().all() for buffer in (*model.unused.buffers(), model.table.table))
    assert model.marked.mask.tolist() == [0.0, -math.inf, math.inf]
    assert model.marked.slots.isnan().tolist() == [False, True, True]
