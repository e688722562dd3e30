"""A 16-bit weight and its FP32 value, a master or a remainder: where they come from, and whose write counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import same, same_bits
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mmengine.model import ExponentialMovingAverage
from mmengine.runner.checkpoint import load_state_dict
from pairs import pairs
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.optim import SGD, AdamW
from toy_training import CAST, LEVELS, MASTERED, Net, Training, batch

from amp_wrapper import AmpUsageError, FusedAdamW, FusedSGD, amp

F32 = torch.float32
#: No 16-bit type holds these numbers.
FINE = 0.1 + torch.arange(128.0).reshape(32, 4) / 7


def still(parameters: Any) -> FusedSGD:
    """An optimizer whose steps change nothing."""
    return FusedSGD(parameters, lr=0.0)


SPLIT: tuple[dict[str, Any], ...] = ({}, {'master_weights': 'split'})


def trained(level: str, door: str, make: Callable[[Any], Any] = still, **options: Any) -> Training:
    """Behind a door; 'split' is the wrapper with split masters."""
    more = SPLIT[door == 'split']
    return Training(level, door.replace('split', 'wrapper'), make, loss_scale=8.0, **more, **options)


def masters(run: Training) -> list[Tensor]:
    """What the optimizer steps; ``master_params`` would bring weights and masters together."""
    return [parameter for group in run.optimizer.param_groups for parameter in group['params']]


def announce(run: Training, call: str, *tensors: Tensor) -> Any:
    if run.wrapper is not None:
        return getattr(run.wrapper, call)(tensors or None)
    return getattr(amp, call)(run.optimizer, tensors or None)


# -- where masters come from ----------------------------------------------------------------------------------------------


@pairs(level=LEVELS, door=('amp', 'wrapper', 'split'))
def test_masters_are_the_unrounded_weights_with_their_state(level: str, door: str) -> None:
    """State that was there before, the groups that schedulers hold, and frozen weights."""
    door = door if level in MASTERED else door.replace('split', 'wrapper')
    model = Net()
    model.out.bias.requires_grad_(False)
    optimizer = FusedAdamW(model.parameters())
    model(batch(0)[0]).sum().backward()
    optimizer.step()
    weights, groups = list(model.parameters()), list(optimizer.param_groups)
    before = [(p.detach().clone(), copy.copy(optimizer.state.get(p, {}))) for p in weights]
    run = Training(level, door.replace('split', 'wrapper'), lambda _: optimizer, model, **SPLIT[door == 'split'])
    assert all(now is then for now, then in zip(optimizer.param_groups, groups, strict=True))
    saved = model.state_dict()
    for (name, weight), master, (value, state) in zip(model.named_parameters(), masters(run), before, strict=True):
        is_kept = weight.dtype is F32 or level == 'O3' or door == 'split'
        assert (master is weight) is is_kept and master.requires_grad is weight.requires_grad
        assert is_kept or same_bits(master.detach(), value)
        assert same_bits(saved[name], value.to(weight.dtype).float() if level == 'O3' else value)
        assert same(optimizer.state.get(master, {}), state)


# -- who wrote last --------------------------------------------------------------------------------------------------------


def by_hand(change: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    def edit(model: Any) -> None:
        with torch.no_grad():
            change(model.fc.weight)

    return edit


def load(model: Any, loader: Any = nn.Module.load_state_dict, **words: Any) -> None:
    loader(model, {**model.state_dict(), 'fc.weight': FINE.clone()}, **words)


def load_average(model: Any) -> None:
    """What scripts without mmengine's hook do with an average."""
    average = ExponentialMovingAverage(model)
    with torch.no_grad():
        average.module.fc.weight.copy_(FINE)
    model.load_state_dict(average.module.state_dict())


def prune_half(model: Any) -> None:
    prune.l1_unstructured(model.fc, 'weight', amount=64)
    prune.remove(model.fc, 'weight')


EDITS: dict[str, dict[str, Callable[[Any], Any]]] = {
    # arrive unrounded
    'loads': {
        'load': load,
        'assign': lambda model: load(model, assign=True),
        'some': lambda model: model.load_state_dict({'fc.weight': FINE}, strict=False),
        'part': lambda model: model.fc.load_state_dict({'weight': FINE, 'bias': model.fc.bias.float()}, assign=True),
        'mmengine': lambda model: load(model, load_state_dict),
        'average': load_average,
        'FP32 data =': lambda model: setattr(model.fc.weight, 'data', FINE.clone()),
    },
    # are 16-bit, and version counters show them
    'in place': {
        'copy_': by_hand(lambda weight: weight.copy_(FINE)),
        'clamp_': by_hand(lambda weight: weight.mul_(2).clamp_(-0.3, 0.3)),
        'init': lambda model: nn.init.constant_(model.fc.weight, 0.3),
        'view': by_hand(lambda weight: weight[0].mul_(2.0)),
    },
    # have another address
    'replaced': {
        'data =': lambda model: setattr(model.fc.weight, 'data', FINE.to(model.fc.weight.dtype)),
        'data = its copy': lambda model: setattr(model.fc.weight, 'data', model.fc.weight.data.clone()),
        'vector': lambda model: vector_to_parameters(
            parameters_to_vector(model.fc.parameters()).detach() * 0.25, model.fc.parameters()
        ),
        'pruned': prune_half,
    },
    # leave no trace
    'hidden': {
        'data.copy_': lambda model: model.fc.weight.data.copy_(FINE),
        'data.clamp_': lambda model: model.fc.weight.data.clamp_(-0.01, 0.01),
        'flip': lambda model: model.fc.weight.data.copy_(model.fc.weight.data.flip(0)),
        'one element': lambda model: model.fc.weight.data.view(-1)[3:4].fill_(0.5),
    },
}


@pairs(
    edit=[f'{kind}: {name}' for kind, edits in EDITS.items() for name in edits],
    level=[*MASTERED, *LEVELS],
    door=('amp', 'wrapper', 'split'),
    steps=(0, 1),
    then=('step', 'save', 'save and step'),
)
def test_edit_of_a_weight_counts(edit: str, level: str, door: str, steps: int, then: str) -> None:
    kind, name = edit.split(': ')
    has_masters = level in MASTERED
    split = door == 'split' and has_masters and name != 'FP32 data ='
    run = trained(level, door if split else door.replace('split', 'wrapper'))
    run.train(*range(steps))
    weight, exact = run.weight(), run.model.state_dict()['fc.weight'].clone()
    old = weight.detach().clone()
    EDITS[kind][name](run.model)
    assert run.weight() is weight or name in ('pruned', 'assign', 'part')
    new = weight.detach().clone()
    # before the first step and in a file, hidden edits are seen; a remainder does not tell of them there
    seen = kind in ('loads', 'in place') or (then == 'step' and steps == 0)
    seen = seen or (not split and (kind == 'replaced' or 'save' in then))
    if not seen:
        assert announce(run, 'weights_changed', weight) == (['fc.weight'] if has_masters else [])
    if 'save' in then:
        run.model.state_dict()
    if 'step' in then:
        run.train(7)
    expected = new.float() if split or not has_masters else torch.where(new == old, exact, new.float())
    if kind == 'loads' and (has_masters or level not in CAST):
        expected = FINE
    assert torch.equal(run.weight(), expected.to(weight.dtype)) or split
    assert torch.equal(run.model.state_dict()['fc.weight'], expected)


@pairs(
    level=MASTERED, door=('amp', 'wrapper'), way=('data', 'in place', 'both sides', 'data after a forward', 'evaluated')
)
def test_master_that_is_written_to_before_the_first_step_keeps_all_digits(level: str, door: str, way: str) -> None:
    run = trained(level, door)
    weight, master = run.weight(), masters(run)[0]
    if way == 'both sides':
        weight.data.fill_(0.5)
    if way == 'data after a forward':
        run.loss()
    if 'data' in way or way == 'evaluated':
        master.data.copy_(FINE)
    else:
        with torch.no_grad():
            master.copy_(FINE)
    if way != 'data after a forward':
        with torch.set_grad_enabled(way != 'evaluated'):
            run.forward(batch(0)[0])
        assert torch.equal(weight, FINE.to(weight.dtype))
    if way == 'evaluated':
        master.data.mul_(1.2345)
    run.train(0)
    assert torch.equal(run.model.state_dict()['fc.weight'], FINE * (1.2345 if way == 'evaluated' else 1))


@pytest.mark.parametrize('level', MASTERED)
def test_average_that_is_evaluated_before_the_first_step_is_taken_out_again(level: str) -> None:
    run = trained(level, 'wrapper')
    exact, own = run.model.state_dict()['fc.weight'].clone(), run.weight().detach().clone()
    run.weight().data.copy_(own * 0.5)
    with torch.no_grad():
        halved = [run.model.eval()(batch(0)[0]) for _ in range(2)]
    assert torch.equal(*halved) and torch.equal(run.weight(), own * 0.5)
    run.weight().data.copy_(own)
    run.model.train()
    run.train(0)
    assert torch.equal(run.model.state_dict()['fc.weight'], exact)


@pytest.mark.parametrize('level', MASTERED)
def test_weights_that_get_no_gradient_may_move_by_themselves(level: str) -> None:
    """A key encoder that follows through ``.data``: steps of the others leave it alone; a master that is written to stands."""
    run = trained(level, 'wrapper', lambda parameters: SGD(parameters, lr=0.1))
    run.weight().requires_grad_(False)
    expected = run.weight().detach().clone()
    for index in range(3):
        run.train(index)
        run.weight().data.mul_(0.5).add_(0.25)
        expected = expected * 0.5 + 0.25
    run.train(3)
    assert torch.equal(run.weight(), expected) and torch.equal(run.model.state_dict()['fc.weight'], expected.float())
    with torch.no_grad():
        masters(run)[0].copy_(FINE)
    run.train(4)
    assert torch.equal(run.model.state_dict()['fc.weight'], FINE)


@pairs(level=MASTERED, door=('amp', 'wrapper'))
def test_calls_name_the_side_that_was_written(level: str, door: str) -> None:
    run = trained(level, door)
    weight, master = run.weight(), masters(run)[0]
    master.data.fill_(0.5)
    announce(run, 'masters_changed')
    assert bool((weight == 0.5).all())
    for call, tensor, other in (('weights_changed', master, 'masters'), ('masters_changed', weight, 'weights')):
        with pytest.raises(AmpUsageError, match=f'{other}_changed'):
            announce(run, call, tensor)
    with torch.no_grad():
        weight.fill_(0.25)
        master.fill_(0.75)
    for call in ('weights_changed', 'masters_changed'):
        with pytest.raises(AmpUsageError, match=r'without names, but the .* of fc\.weight'):
            announce(run, call)
    assert bool((weight == 0.25).all()) and bool((master == 0.75).all())
    with pytest.raises(AmpUsageError, match=r"weights_changed\(None\) with master_weights='split'.*name those"):
        announce(trained(level, 'split'), 'weights_changed')


# -- any order of writes and of those who look ------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    'SGD': lambda parameters: SGD(parameters, lr=0.03125, momentum=0.5),
    'AdamW': lambda parameters: AdamW(parameters, lr=0.01),
    'FusedAdamW': lambda parameters: FusedAdamW(parameters, lr=0.01),
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    'mul_': lambda p: p.mul_(0.75),
    'clamp_': lambda p: p.clamp_(-0.25, 0.25),
    'view': lambda p: p[0].fill_(0.3),
    'lerp_': lambda p: p.lerp_(torch.full_like(p, 0.1), 0.5),
    'foreach': lambda p: torch._foreach_add_([p], 0.0625),
    'detach': lambda p: p.detach().mul_(1.5),
}
LOOKS = ('forward', 'evaluation', 'part', 'save', 'copy', 'step', 'skip')
SIDES = st.sampled_from(['weight', 'master'])
WRITE = st.tuples(SIDES, st.sampled_from(list(WRITES)), st.integers(0, 3))
LOAD = st.tuples(st.sampled_from(['load', 'assign']), st.just(''), st.integers(0, 3))
# some writes, and then somebody who looks
SCENES = st.lists(
    st.tuples(st.lists(WRITE | WRITE | LOAD, min_size=1, max_size=3), st.sampled_from(LOOKS), SIDES),
    min_size=4,
    max_size=8,
)


class Play:
    """A training, and beside it the FP32 values, the weights, and the sides of each that were written to since they agreed."""

    def __init__(self, level: str, door: str, optimizer: str) -> None:
        self.split = door == 'split'
        self.run = trained(level, door, OPTIMIZERS[optimizer], model=Net(norm=False))
        self.names = [name for name, _ in self.run.model.named_parameters()]
        self.values = [nn.Parameter(value.clone()) for value in self.run.model.state_dict().values()]
        self.weights = [self.near(value) for value in self.values]
        self.written: list[set[str]] = [set() for _ in self.values]
        self.optimizer = OPTIMIZERS[optimizer](self.values)

    def near(self, value: Tensor) -> Tensor:
        """The weight of an FP32 value; that of a split one in bfloat16 is rounded away from zero where two are as near."""
        dtype = self.run.weight().dtype
        if self.split and dtype is torch.bfloat16:
            return ((value.detach().view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(dtype)
        return value.detach().to(dtype, copy=True)

    @torch.no_grad()
    def write(self, kind: str, name: str, index: int) -> None:
        if kind in ('weight', 'master'):
            side = 'weight' if self.split else kind
            ours = list(self.run.model.parameters()) if side == 'weight' else masters(self.run)
            for tensor in (ours[index], (self.weights if side == 'weight' else self.values)[index].detach()):
                WRITES[name](tensor)
            self.written[index].add(side)
            return
        value = torch.randn_like(self.values[index])
        self.run.model.load_state_dict({self.names[index]: value}, strict=False, assign=kind == 'assign')
        self.values[index].copy_(value)
        self.weights[index] = self.near(value)
        self.written[index].clear()

    @torch.no_grad()
    def agree(self) -> None:
        for index, (value, weight, written) in enumerate(zip(self.values, self.weights, self.written)):
            if written == {'weight'}:
                keeps = (weight == self.near(value)) & (not self.split)
                value.copy_(value.where(keeps, weight.float()))
            elif written == {'master'}:
                self.weights[index] = self.near(value)
            written.clear()

    def look(self, kind: str, right: str) -> None:
        run, ours = self.run, [*self.run.model.parameters(), *masters(self.run)]
        both = [index for index, written in enumerate(self.written) if len(written) == 2]
        if both:
            before = [tensor.detach().clone() for tensor in ours]
            with pytest.raises(AmpUsageError, match='both sides of .*' + self.names[both[0]]):
                self.act(kind)
            assert all(torch.equal(ours[i], before[i]) for index in both for i in (index, index + len(self.names)))
            run.clear()
            for index in both:
                announce(run, f'{right}s_changed', ours[index + len(self.names) * (right == 'master')])
                self.written[index] = {right}
        self.agree()
        self.act(kind)
        if kind == 'step':
            for value in self.values:
                value.grad = torch.full_like(value, 0.5)
            self.optimizer.step()
            self.weights = [self.near(value) for value in self.values]
        assert all(map(torch.equal, run.model.parameters(), self.weights))
        assert self.split or all(map(torch.equal, masters(run), self.values))

    def act(self, kind: str) -> None:
        model, x = self.run.model, batch(0)[0]
        if kind == 'forward':
            self.run.forward(x)
        elif kind == 'evaluation':
            with torch.no_grad():
                model.eval()(x)
        elif kind == 'part':
            model.fc(x)
            assert torch.equal(model.fc.weight, self.weights[0])
            model(x)
        elif kind == 'save':
            assert all(map(torch.equal, model.state_dict().values(), self.values))
        elif kind == 'copy':
            assert all(map(torch.equal, copy.deepcopy(model).parameters(), self.values))
        else:
            # gradients of 0.5 in every element
            factor = torch.inf if kind == 'skip' else 0.5
            self.run.backward(sum((weight.float() * factor).sum() for weight in model.parameters()))
            self.run.step()
            self.run.clear()


@pairs(level=MASTERED, door=('amp', 'wrapper', 'split'), optimizer=OPTIMIZERS)
def test_the_later_write_counts_whoever_looks_next(level: str, door: str, optimizer: str) -> None:
    @settings(max_examples=25, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(SCENES)
    def play(scenes: list[Any]) -> None:
        training = Play(level, door, 'FusedAdamW' if door == 'split' else optimizer)
        for writes, look, right in [*scenes, ([], 'forward', 'weight'), ([], 'save', 'weight')]:
            for write in writes:
                training.write(*write)
            training.look(look, right)

    play()
