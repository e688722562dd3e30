"""NaN that a forward pass leaves in buffers goes, whichever loss the pass was for, or none, and whoever steps first."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mmengine.optim import OptimWrapperDict
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.swa_utils import AveragedModel

from amp_wrapper import AmpOptimWrapper, amp
from amp_wrapper.engine.buffers import copies
from amp_wrapper.engine.buffers.tracked import TrackedBuffers

NAN = math.nan
WORDS: dict[str, Any] = dict(verbosity=0, loss_scale=dict(init_scale=1.0))


class WrittenNorm(nn.Module):
    """A norm in Python: its writes count as such, as those of detectron2's NaiveSyncBatchNorm do."""

    running_mean: Tensor
    num_batches_tracked: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('running_mean', torch.zeros(3))
        self.register_buffer('num_batches_tracked', torch.tensor(0))
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        mean = x.mean(0)
        if self.training:
            self.running_mean += 0.1 * (mean.detach() - self.running_mean)
            self.num_batches_tracked += 1
        return (x - mean) * self.weight


class Result:
    """An output that nobody can look into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Part(nn.Module):
    def __init__(self, kind: str = 'plain') -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm: nn.Module = WrittenNorm() if kind == 'written' else nn.BatchNorm1d(3)
        self.opaque = kind == 'opaque'

    def forward(self, x: Tensor) -> Any:
        x = self.norm(self.linear(x)).float()
        return Result(x) if self.opaque else x


def value(output: Any) -> Tensor:
    found: Tensor = output.value if isinstance(output, Result) else output
    return found


def batch(seed: int, device: torch.device, bad: bool = False) -> Tensor:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)).to(device)
    return x * NAN if bad else x


def count(part: nn.Module) -> int:
    return int(part.norm.num_batches_tracked)  # type: ignore[union-attr, arg-type]


class Pair:
    """A generator and a discriminator; in one session, in two, or with two wrappers."""

    def __init__(self, level: str, api: str, device: torch.device, kind: str = 'plain', counts: int = 1) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = nn.ModuleDict(dict(g=Part(kind), d=Part(kind))).to(device)
        self.optimizers = {name: SGD(self.model[name].parameters(), lr=0.01) for name in 'gd'}
        self.wrappers: Any = None
        self.api = api
        if api == 'wrapper':
            self.wrappers = OptimWrapperDict(
                **{
                    name: AmpOptimWrapper(
                        optimizer=self.optimizers[name],
                        opt_level=level,
                        skip_nonfinite=True,
                        accumulative_counts=counts if name == 'g' else 1,
                        **WORDS,
                    )
                    for name in 'gd'
                }
            )
            self.wrappers.initialize_count_status(self.model, 0, 100)
        elif api == 'one session':
            parts, optimizers = [self.model['g'], self.model['d']], [self.optimizers['g'], self.optimizers['d']]
            amp.initialize(parts, optimizers, opt_level=level, num_losses=2, **WORDS)
        elif api == 'two sessions':
            for name in 'gd':
                amp.initialize(self.model[name], self.optimizers[name], opt_level=level, **WORDS)

    def backward(self, name: str, loss: Tensor) -> None:
        if self.api == 'plain':
            loss.backward()
        elif self.wrappers is not None:
            self.wrappers[name].backward(loss)
        else:
            loss_id = 'gd'.index(name) if self.api == 'one session' else 0
            with amp.scale_loss(loss, self.optimizers[name], loss_id=loss_id) as scaled:
                scaled.backward()

    def step(self, name: str, clears: bool = True) -> None:
        stepped = self.optimizers[name] if self.wrappers is None else self.wrappers[name]
        stepped.step()
        if clears:
            stepped.zero_grad()

    def clear(self, name: str) -> None:
        (self.optimizers[name] if self.wrappers is None else self.wrappers[name]).zero_grad()

    def judge(self, x: Any) -> Tensor:
        return value(self.model['d'](value(x))).square().mean()


APIS = ['wrapper', 'one session', 'two sessions']


@settings(max_examples=100, deadline=None)
@given(
    level=st.sampled_from(['O1', 'O2', 'O5']),
    api=st.sampled_from(APIS),
    kind=st.sampled_from(['plain', 'written', 'opaque']),
    acts=st.lists(
        st.tuples(st.sampled_from(['g', 'd', 'picture', 'held', 'quiet', 'G', 'D', 'clear', 'look']), st.booleans()),
        min_size=1,
        max_size=10,
    ),
)
@example(level='O1', api='wrapper', kind='written', acts=[('g', False), ('quiet', True), ('G', False)])
# the first call of all is one of the other model
@example(level='O1', api='one session', kind='plain', acts=[('d', False), ('g', True), ('D', False)])
def test_no_nan_is_left_after_a_step(
    level: str, api: str, kind: str, acts: list[tuple[str, bool]], device: torch.device
) -> None:
    """Losses of both, with pictures that are detached, held, made without gradients, in any order."""
    pair = Pair(level, api, device, kind)
    generator = pair.model['g']
    waiting: set[str] = set()
    held: list[Any] = []
    for index, (act, bad) in enumerate([*acts, ('g', False), ('G', False), ('d', False), ('D', False)]):
        x, other = batch(index, device, bad), batch(index + 100, device)
        if act == 'g':
            pair.backward('g', pair.judge(generator(x)))
            waiting.add('g')
        elif act == 'd':
            pair.backward('d', pair.judge(x))
            waiting.add('d')
        elif act in ('picture', 'held', 'quiet'):
            with torch.set_grad_enabled(act != 'quiet'):
                fake = generator(x)
            if act == 'held':
                held.append(fake)
            pair.backward('d', pair.judge(other) + pair.judge(value(fake).detach()))
            waiting.add('d')
        elif act == 'clear':
            pair.clear('g' if bad else 'd')
            waiting.discard('g' if bad else 'd')
        elif act == 'look':
            pair.model.eval()
            with torch.no_grad():
                assert value(generator(other)).isfinite().all()
                assert value(pair.model['d'](other)).isfinite().all()
            pair.model.train()
        elif act.lower() in waiting:
            pair.step(act.lower())
            waiting.discard(act.lower())
            assert all(buffer.isfinite().all() for buffer in pair.model.buffers())
    assert all(parameter.isfinite().all() for parameter in pair.model.parameters())


@pytest.mark.parametrize('holds', [False, True])
@pytest.mark.parametrize('api', APIS)
def test_critics_that_step_often(api: str, holds: bool, device: torch.device) -> None:
    """As in WGAN: what a skipped step leaves is what a loop without the bad batch leaves, whether a picture is held or not."""

    def play(pair: Pair) -> list[int]:
        for index in range(10):
            if pair.api == 'plain' and index == 8:
                continue
            fake = pair.model['g'](batch(index, device, bad=index == 8))
            seen = fake.detach()
            if not holds:
                del fake
            pair.backward('d', pair.judge(batch(index + 30, device)) + pair.judge(seen))
            pair.step('d')
            if index % 5 == 4:
                pair.backward('g', pair.judge(pair.model['g'](batch(index + 60, device))))
                pair.step('g')
                pair.clear('d')
        return [count(pair.model[name]) for name in 'gd']

    assert play(Pair('O1', api, device)) == play(Pair('O1', 'plain', device)) == [11, 20]


@pytest.mark.parametrize('clears', [False, True])
def test_a_part_that_is_not_stepped_for_long(clears: bool, device: torch.device) -> None:
    """While the head alone is trained, one bad batch costs its own statistics, and not those of all steps so far."""
    body, head = Part().to(device), Part().to(device)
    optimizers = [SGD(part.parameters(), lr=0.01) for part in (body, head)]
    amp.initialize([body, head], optimizers, opt_level='O1', **WORDS)
    for index in range(8):
        loss = head(body(batch(index, device, bad=index in (5, 6)))).square().mean()
        with amp.scale_loss(loss, optimizers) as scaled:
            scaled.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        if clears:
            optimizers[0].zero_grad()
        expected = index + 1 - min(max(index - 4, 0), 2)
        assert (count(body), count(head)) == (expected, expected)
    if clears:
        # it is stepped again, with a batch of inf: what it saw in all steps of the head stays
        with amp.scale_loss(head(body(batch(9, device))).square().mean() * math.inf, optimizers) as scaled:
            scaled.backward()
        optimizers[0].step()
        optimizers[1].step()
        assert (count(body), count(head)) == (6, 6)


@pytest.mark.parametrize('level', ['O1', 'O2', 'O5'])
@pytest.mark.parametrize('holds', [False, True])
def test_an_optimizer_in_the_place_of_another(holds: bool, level: str, device: torch.device) -> None:
    model = Part().to(device)
    optimizer: Any = SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, **WORDS)
    kept = [optimizer] if holds else []

    def train(index: int, bad: bool) -> None:
        with amp.scale_loss(model(batch(index, device, bad)).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    train(0, False)
    optimizer = Adam(amp.master_params(optimizer) if level == 'O0' else model.parameters(), lr=0.1)
    amp.initialize([], optimizer, verbosity=0)
    for index, bad in enumerate([True, False, True]):
        train(index, bad)
        assert model.norm.running_mean.isfinite().all()  # type: ignore[union-attr]
        assert count(model) == 1 + (index > 0)
    assert len(kept) == holds


@pytest.mark.parametrize('level', ['O1', 'O2', 'O5'])
def test_an_optimizer_for_a_part_beside_another(level: str, device: torch.device) -> None:
    """A head that gets an optimizer of its own later: its skipped steps leave the statistics of the body alone."""
    model = nn.Sequential(Part(), Part()).to(device)
    body = SGD(model[0].parameters(), lr=0.01)
    amp.initialize(model, body, opt_level=level, **WORDS)
    head = SGD(model[1].parameters(), lr=0.01)
    amp.initialize([], head, verbosity=0)
    for optimizer in (body, head):
        for scale in (1.0, math.inf, 1.0):
            before = [count(part) for part in model]
            with amp.scale_loss(model(batch(0, device)).square().mean() * scale, [body, head]) as scaled:
                scaled.backward()
            optimizer.step()
            body.zero_grad()
            head.zero_grad()
            # whose step was skipped has its statistics back; the other one's gradients were thrown away
            mine = 0 if optimizer is body else 1
            assert count(model[mine]) == before[mine] + (scale == 1.0)
            assert count(model[1 - mine]) == before[1 - mine] + 1


@pytest.mark.parametrize('bad', [None, 2, 3])
def test_exact_resume_while_another_accumulates(bad: int | None, device: torch.device) -> None:
    def play(pair: Pair, index: int) -> None:
        model, wrappers = pair.model, pair.wrappers
        with wrappers['d'].optim_context(model):
            loss = pair.judge(batch(index + 30, device)) + pair.judge(model['g'](batch(index, device)).detach())
        wrappers['d'].update_params(loss)
        with wrappers['g'].optim_context(model):
            loss = pair.judge(model['g'](batch(index + 60, device, bad == index)))
        wrappers['g'].update_params(loss)
        wrappers['d'].zero_grad()

    whole = Pair('O1', 'wrapper', device, counts=2)
    for index in range(6):
        play(whole, index)
    first = Pair('O1', 'wrapper', device, counts=2)
    for index in range(3):
        play(first, index)
    saved = copy.deepcopy((first.model.state_dict(), first.wrappers.state_dict()))
    second = Pair('O1', 'wrapper', device, counts=2)
    second.model.load_state_dict(saved[0])
    second.wrappers.load_state_dict(saved[1])
    second.wrappers.initialize_count_status(second.model, 3, 100)
    for index in range(3, 6):
        play(second, index)
    for (name, mine), theirs in zip(whole.model.state_dict().items(), second.model.state_dict().values()):
        assert mine.equal(theirs), name
    assert all(buffer.isfinite().all() for buffer in whole.model.buffers())


# -- one model -----------------------------------------------------------------------------------------------------------


class Marked(nn.Module):
    """Buffers that hold what is not finite on purpose."""

    mask: Tensor
    slots: Tensor

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
        self.part, self.unused, self.marked = Part(), Part(), Marked()

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x * NAN)
        return self.marked(self.part(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize('level', ['O1', 'O2', 'O4', 'O5'])
def test_a_step_that_is_taken(level: str, device: torch.device) -> None:
    """NaN in a branch that no loss uses stays out of it, its module alone goes back, and what is meant to be there stays."""
    model = Branches().to(device)
    optimizer = SGD(model.part.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, **WORDS)
    for index in range(3):
        with amp.scale_loss(model(batch(index, device)).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (count(model.part), count(model.unused)) == (3, 0)
    assert model.unused.norm.running_var.equal(torch.ones(3, device=device))  # type: ignore[union-attr]
    assert model.marked.mask.tolist() == [0.0, -math.inf, math.inf]
    assert model.marked.slots.isnan().tolist() == [False, True, True]


class Kinds(nn.Module):
    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer('first', torch.ones(5, dtype=dtype))
        self.register_buffer('total', torch.zeros(size, dtype=dtype))
        self.register_buffer('seen', torch.tensor(0, dtype=torch.int32))
        self.register_buffer('flags', torch.zeros(2, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.total += x.detach().sum().to(self.total.dtype)  # type: ignore[operator]
            self.first += 1  # type: ignore[operator]
            self.seen += 1  # type: ignore[operator]
            self.flags.fill_(True)  # type: ignore[operator]
        return x * self.weight


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize('large', [False, True])
def test_buffers_of_all_kinds(large: bool, dtype: torch.dtype, device: torch.device) -> None:
    """What a pass without a step left is taken back before the next one; buffers of one module share their fate."""
    size = copies.LARGE // dtype.itemsize + 1 if large else 7
    model = nn.Sequential(Kinds(size, dtype), Kinds(3, dtype)).to(device)
    optimizer = SGD(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level='O1', **WORDS)

    def train(index: int) -> None:
        with amp.scale_loss(model(batch(index, device)).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    for index in range(2):
        train(index)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model[1].register_forward_pre_hook(lambda module, args: (args[0] * NAN,))
    loss = model(batch(2, device)).square().mean()
    del loss
    model.eval()
    with torch.no_grad():
        # somebody looks
        model[0](batch(3, device))
    for name, buffer in model.named_buffers():
        if name.startswith('1.'):
            assert buffer.equal(before[name]), name
        else:
            assert not buffer.equal(before[name]) or 'flags' in name, name


def test_a_step_of_another_while_a_pass_is_under_way(device: torch.device) -> None:
    models = [Part().to(device), Part().to(device)]
    optimizers = [SGD(model.parameters(), lr=0.01) for model in models]
    for model, optimizer in zip(models, optimizers):
        amp.initialize(model, optimizer, opt_level='O1', **WORDS)

    def backward(index: int, loss: Tensor) -> None:
        with amp.scale_loss(loss, optimizers[index]) as scaled:
            scaled.backward()

    backward(1, models[1](batch(0, device)).square().mean())
    # as from another thread
    handle = models[0].linear.register_forward_hook(lambda module, args, output: optimizers[1].step())  # type: ignore[union-attr]
    loss = models[0](batch(1, device, bad=True)).square().mean()
    handle.remove()
    backward(0, loss)
    optimizers[0].step()
    assert [count(model) for model in models] == [0, 1]
    assert all(buffer.isfinite().all() for model in models for buffer in model.buffers())


def test_averages_between(device: torch.device) -> None:
    pair = Pair('O2', 'one session', device)
    mean = AveragedModel(pair.model['g'], use_buffers=True)
    for index in range(5):
        fake = pair.model['g'](batch(index, device, bad=index == 2))
        pair.backward('d', pair.judge(fake.detach()))
        mean.update_parameters(pair.model['g'])
        pair.step('d')
        assert all(buffer.isfinite().all() for buffer in mean.buffers())


@pytest.mark.parametrize('level', ['O0', 'O1'])
def test_a_pass_without_gradients_between_is_looked_at_once(
    level: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pseudo-labels between two passes of a step: not once for each module, and an interrupt in them ends with the step."""
    model = nn.Sequential(Part(), Part(), Part()).to(device)
    wrapper = AmpOptimWrapper(optimizer=SGD(model.parameters(), lr=0.01), opt_level=level, skip_nonfinite=True, **WORDS)
    wrapper.attach(model)
    looks: list[None] = []
    write_back = TrackedBuffers.write_back

    def count_looks(self: TrackedBuffers, flag: Tensor | None) -> None:
        looks.append(None)
        write_back(self, flag)

    monkeypatch.setattr(TrackedBuffers, 'write_back', count_looks)

    def train(bad: bool = False, interrupt: bool = False) -> None:
        loss = model(batch(0, device, bad)).square().mean()
        looks.clear()
        with torch.no_grad():
            if interrupt:
                handle = model[1].linear.register_forward_pre_hook(_interrupt)
                with pytest.raises(KeyboardInterrupt):
                    model(batch(1, device))
                handle.remove()
            else:
                model(batch(1, device))
        assert len(looks) == 1
        loss = loss + model(batch(2, device)).square().mean()
        wrapper.update_params(loss)

    train()
    for interrupt in (False, True):
        train(bad=True, interrupt=interrupt)
        assert all(buffer.isfinite().all() for buffer in model.buffers())
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    wrapper.update_params(model(batch(3, device, bad=True)).square().mean())
    for name, buffer in model.named_buffers():
        assert buffer.equal(before[name]), name


def _interrupt(module: nn.Module, args: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize('level', ['O1', 'O2', 'O5'])
def test_what_is_written_without_gradients_stays(level: str, device: torch.device) -> None:
    """As by update_bn: the skipped step that follows gives back its own pass alone."""
    model = Part().to(device)
    optimizer = SGD(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, **WORDS)
    for bad in (False, True, False):
        with torch.no_grad():
            model(batch(0, device, bad))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with amp.scale_loss(model(batch(1, device)).square().mean() * math.inf, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert count(model) == 2
    for name, buffer in model.named_buffers():
        assert buffer.equal(before[name]), name


@pytest.mark.parametrize('api', APIS)
@pytest.mark.parametrize('kind', ['plain', 'opaque'])
def test_who_has_gradients_decides_alone(kind: str, api: str, device: torch.device) -> None:
    """A step of another optimizer in between neither takes statistics back nor settles them, though no graph can be seen."""
    pair = Pair('O1', api, device, kind)
    for bad in 'gd':
        for index, name in enumerate('gd'):
            loss = value(pair.model[name](batch(index, device))).square().mean()
            pair.backward(name, loss * (math.inf if name == bad else 1.0))
        before = {name: count(pair.model[name]) for name in 'gd'}
        pair.step('g')
        assert count(pair.model['d']) == before['d']
        pair.step('d')
        assert {name: count(pair.model[name]) for name in 'gd'} == {name: before[name] - (name == bad) for name in 'gd'}


class Large(nn.Module):
    """A buffer so large that it is not copied at each step."""

    total: Tensor

    def __init__(self, beside: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer('total', torch.zeros(copies.LARGE // 4 + 1))
        if beside:
            # the small ones of a module share the fate of its large ones
            self.register_buffer('seen', torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.total += x.detach().sum()
            for buffer in self.buffers():
                if buffer is not self.total:
                    buffer += 1
        return x * self.weight


@pytest.mark.parametrize('beside', [False, True])
def test_nan_in_a_large_buffer_is_taken_back(beside: bool, device: torch.device) -> None:
    model = Large(beside).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level='O1', verbosity=0, loss_scale=dict(init_scale=1.0))
    for _ in range(2):
        with amp.scale_loss(model(torch.ones(1, 3, device=device)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    before = [buffer.clone() for buffer in model.buffers()]
    # a pass from which no step comes
    model(torch.full((1, 3), math.nan, device=device))
    assert model.total.isnan().all()
    model(torch.ones(1, 3, device=device))
    assert model.total.equal(before[0] + 3)
    assert [buffer.item() for buffer in list(model.buffers())[1:]] == [buffer.item() + 1 for buffer in before[1:]]
