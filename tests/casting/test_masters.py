"""A 16-bit weight and its FP32 value, a master or a remainder: where they come from, and whose write counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import same, same_bits
from mmengine.runner.checkpoint import load_state_dict
from pairs import pairs
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.optim import SGD
from toy_training import LEVELS, MASTERED, Net, Training, batch

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


@pytest.mark.parametrize('level', ['O0', 'O2', 'O3', 'O5'])
def test_16_bit_weights_stay_where_nothing_is_cast(level: str) -> None:
    """As apex's own tests have models; at O2 and O5 they get masters."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.Linear(2, 1, bias=False).half())
    model[1].forward = Tensor.half
    optimizer = SGD(model.parameters(), lr=0.25)
    amp.initialize(model, optimizer, True, level, cast_model_type=False, from_16bit=True, loss_scale=1.0, verbosity=0)
    start = model.state_dict()['2.weight'].float().clone()
    for _ in range(3):
        with amp.scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer) as loss:
            loss.backward()
        optimizer.step()
    kept, saved = F32 if level in MASTERED else torch.float16, model.state_dict()
    assert [p.dtype for p in amp.master_params(optimizer)] == [F32, F32, kept]
    assert model[2].weight.dtype is torch.float16 and saved['0.weight'].dtype is F32 and saved['2.weight'].dtype is kept
    assert not torch.equal(saved['2.weight'].float(), start) and copy.deepcopy(model)[2].weight.dtype is kept


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


@pairs(level=MASTERED, frozen=[False, True])
def test_load_into_a_weight_that_has_just_joined_the_optimizer_is_not_rounded(level: str, frozen: bool) -> None:
    run = trained(level, 'amp', lambda parameters: still(list(parameters)[1:]))
    run.weight().requires_grad_(not frozen)
    run.optimizer.add_param_group({'params': [run.weight()]})
    load(run.model)
    run.train(0)
    assert torch.equal(run.model.state_dict()['fc.weight'], FINE)


# -- who wrote last --------------------------------------------------------------------------------------------------------


quietly = torch.no_grad()


def load(model: Any, loader: Any = nn.Module.load_state_dict, **words: Any) -> None:
    loader(model, {**model.state_dict(), 'fc.weight': FINE.clone()}, **words)


def prune_half(model: Any) -> None:
    prune.l1_unstructured(model.fc, 'weight', amount=64)
    prune.remove(model.fc, 'weight')


EDITS: dict[str, dict[str, Callable[[Any], Any]]] = {
    # arrive unrounded
    'loads': {
        'load': load,
        'assign': lambda model: load(model, assign=True),
        'part': lambda model: model.fc.load_state_dict({'weight': FINE, 'bias': model.fc.bias.float()}, assign=True),
        'mmengine': lambda model: load(model, load_state_dict),
        'FP32 data =': lambda model: setattr(model.fc.weight, 'data', FINE.clone()),
    },
    # are 16-bit, and version counters show them
    'in place': {
        'copy_': quietly(lambda model: model.fc.weight.copy_(FINE)),
        'clamp_': quietly(lambda model: model.fc.weight.mul_(2).clamp_(-0.3, 0.3)),
        'view': quietly(lambda model: model.fc.weight[0].mul_(2.0)),
        'and moved': quietly(lambda model: (model.fc.weight.copy_(FINE), model.share_memory())),
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
        'one element': lambda model: model.fc.weight.data.view(-1)[3:4].fill_(0.5),
    },
}


@pairs(
    edit=[f'{kind}: {name}' for kind, edits in EDITS.items() for name in edits],
    level=MASTERED,
    door=('amp', 'wrapper', 'split'),
    steps=(0, 1),
    then=('step', 'save', 'save and step'),
)
def test_edit_of_a_weight_counts(edit: str, level: str, door: str, steps: int, then: str) -> None:
    kind, name = edit.split(': ')
    split = door == 'split'
    run = trained(level, door)
    run.train(*range(steps))
    weight, exact = run.weight(), run.model.state_dict()['fc.weight'].clone()
    old = weight.detach().clone()
    EDITS[kind][name](run.model)
    assert run.weight() is weight or name == 'pruned'
    new = weight.detach().clone()
    # before the first step and in a file, hidden edits are seen; a remainder does not tell of them
    seen = kind != 'hidden' or (not split and ('save' in then or steps == 0))
    if not seen:
        assert announce(run, 'weights_changed', weight) == ['fc.weight']
    if 'save' in then:
        run.model.state_dict()
    if 'step' in then:
        run.train(7)
    expected = new.float() if split else torch.where(new == old, exact, new.float())
    if kind == 'loads':
        expected = FINE
    assert torch.equal(run.weight(), expected.to(weight.dtype)) or split
    assert torch.equal(run.model.state_dict()['fc.weight'], expected)


@pytest.mark.parametrize('level', [level for level in LEVELS if level not in MASTERED])
def test_edit_of_a_weight_without_a_master_counts(level: str) -> None:
    run = trained(level, 'wrapper')
    for index, edit in enumerate((*EDITS['in place'].values(), *EDITS['hidden'].values())):
        edit(run.model)
        edited = run.weight().detach().clone()
        run.train(index)
        assert same_bits(run.weight().detach(), edited)
        assert run.wrapper.weights_changed() == []


@pairs(level=MASTERED, door=('amp', 'wrapper'), way=('in place', 'both by .data', 'evaluated'))
def test_master_that_is_written_to_before_the_first_step_keeps_all_digits(level: str, door: str, way: str) -> None:
    """Scripts of apex copy saved weights and saved masters, both through ``.data``."""
    run = trained(level, door)
    weight, master = run.weight(), masters(run)[0]
    if way == 'both by .data':
        weight.data.copy_(FINE)
        master.data.copy_(FINE)
    else:
        with torch.no_grad():
            master.copy_(FINE)
    with torch.set_grad_enabled(way != 'evaluated'):
        run.forward(batch(0)[0])
    assert torch.equal(weight, FINE.to(weight.dtype))
    run.train(0)
    assert torch.equal(run.model.state_dict()['fc.weight'], FINE)


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
        with pytest.raises(AmpUsageError, match=rf'{call}\(\) does not tell .* fc\.weight counts.*{other}_changed\(\['):
            announce(run, call, tensor)
    with torch.no_grad():
        weight.fill_(0.25)
        master.fill_(0.75)
    for call in ('weights_changed', 'masters_changed'):
        with pytest.raises(AmpUsageError, match=rf'{call}\(\) does not tell .* fc\.weight counts: .* written to'):
            announce(run, call)
    assert bool((weight == 0.25).all()) and bool((master == 0.75).all())
    with pytest.raises(AmpUsageError, match=r"weights_changed\(\) .*master_weights='split'.*Name what"):
        announce(trained(level, 'split'), 'weights_changed')


LOOKS: dict[str, Callable[[Training], Any]] = {
    'forward': lambda run: run.forward(batch(0)[0]),
    'part': lambda run: run.model.fc(batch(0)[0]),
    'save': lambda run: run.model.state_dict(),
    'copy': lambda run: copy.deepcopy(run.model),
    'step': lambda run: run.step(),
}


@pairs(level=MASTERED, door=('amp', 'wrapper'), look=LOOKS, right=('weight', 'master'))
def test_writes_to_both_sides_are_refused_until_one_is_named(level: str, door: str, look: str, right: str) -> None:
    run = trained(level, door)
    run.passes(0)
    sides = {'weight': run.weight(), 'master': masters(run)[0]}
    with torch.no_grad():
        sides['weight'].fill_(0.25)
        sides['master'].fill_(0.75)
    with pytest.raises(AmpUsageError, match=r'both sides of fc\.weight'):
        LOOKS[look](run)
    assert [side.unique().tolist() for side in sides.values()] == [[0.25], [0.75]]
    announce(run, f'{right}s_changed', sides[right])
    # from here on the later write counts
    for value in (0.25 if right == 'weight' else 0.75, 2.0):
        LOOKS[look](run)
        assert [side.unique().tolist() for side in sides.values()] == [[value]] * 2
        look = look.replace('step', 'save')
        with torch.no_grad():
            sides[right].fill_(2.0)
