"""amp.state_dict and amp.load_state_dict, resuming at any level, and which calls of amp.initialize count."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import differences, same
from exact_scripts import LEVELS, MASTERS, backward, scales, set_scales
from pairs import pairs
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils.checkpoint import checkpoint

from amp_wrapper import AmpAttachError, AmpUsageError, FusedAdamW, amp

#: The levels whose weights are FP32 at all times.
UNCAST = ('O0', 'O1', 'O4')


class Net(nn.Module):
    """BatchNorm, dropout, and a segment that is computed again in the backward pass: its graph holds the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn, self.last, self.drop = (
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.Linear(4, 2),
            nn.Dropout(0.25),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda z: self.bn(self.first(z)).relu(), x, use_reentrant=False)
        return self.last(self.drop(y))


def make(kind: Any = SGD) -> tuple[Net, Optimizer]:
    torch.manual_seed(3)
    model = Net()
    words: dict[str, Any] = {Adam: dict(lr=2.0**-5, eps=2.0**-10), SGD: dict(lr=0.1, momentum=0.9)}.get(
        kind, dict(lr=0.1)
    )
    return model, kind(model.parameters(), **words)


def initialised(level: str, kind: Any = SGD, **options: Any) -> tuple[Net, Optimizer]:
    model, optimizer = make(kind)
    amp.initialize(model, optimizer, opt_level=level, **{'verbosity': 0, **options})
    return model, optimizer


def step(model: Net, optimizer: Optimizer, index: int, losses: int = 1) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(index))
    torch.manual_seed(100 + index)
    optimizer.zero_grad()
    for loss_id in range(losses):
        output = model(x)
        backward(output.float().square().mean() / (1 + loss_id), optimizer, loss_id)
    optimizer.step()
    return output.detach().clone()


def everything(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """All that training goes on from, in its own types."""
    masters = [p.detach().clone() for p in amp.master_params(optimizer)]
    weights = {name: p.detach().clone() for name, p in [*model.named_parameters(), *model.named_buffers()]}
    return copy.deepcopy([weights, masters, optimizer.state_dict(), amp.state_dict(optimizers=optimizer)])


def saved(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    names = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), amp=amp.state_dict(optimizers=optimizer))
    return copy.deepcopy(names)


def load(state: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    model.load_state_dict(state['model'])
    optimizer.load_state_dict(state['optimizer'])


# -- resuming -----------------------------------------------------------------------------------------------------------


@pairs(level=LEVELS, to=LEVELS, initialize_first=[True, False])
def test_restored_at_any_level_beside_the_training_that_was_saved(level: str, to: str, initialize_first: bool) -> None:
    """Every bit that the level holds; at the same level both go on alike."""
    model, optimizer = initialised(level)
    for index in range(3):
        step(model, optimizer, index)
    state = saved(model, optimizer)
    before = copy.deepcopy(state)
    assert all(value.dtype is torch.float32 for key, value in state['model'].items() if 'num_batches' not in key)
    restored, other = make()
    if not initialize_first:
        load(state, restored, other)
    amp.initialize(restored, other, opt_level=to, verbosity=0)
    if initialize_first:
        load(state, restored, other)
    amp.load_state_dict(state['amp'], optimizers=other)
    rounds = torch.float16 if to == 'O3' else torch.float32
    wanted = {
        key: value.to(rounds).float() if value.is_floating_point() else value for key, value in state['model'].items()
    }
    assert same(dict(restored.state_dict()), wanted)
    for key, entry in other.state_dict()['state'].items():
        assert same(entry['momentum_buffer'], state['optimizer']['state'][key]['momentum_buffer'].to(rounds))
    if (level in ('O1', 'O2')) == (to in ('O1', 'O2')):
        assert amp.state_dict(optimizers=other) == state['amp']
    # training the one has no part in the other, and the dicts are nobody's, but for moments, which torch does not copy
    outputs = [step(restored, other, index) for index in (3, 4)]
    assert same(saved(model, optimizer), before) and same(
        [state['model'], state['amp']], [before['model'], before['amp']]
    )
    if level == to:
        assert same(outputs, [step(model, optimizer, index) for index in (3, 4)])
        assert differences(everything(model, optimizer), everything(restored, other)) == []


@pytest.mark.parametrize('level', LEVELS)
def test_plain_model_reads_the_weights_and_gives_them_back_unrounded(level: str) -> None:
    model, optimizer = initialised(level)
    for index in range(2):
        step(model, optimizer, index)
    plain, theirs = make()
    load(saved(model, optimizer), plain, theirs)
    masters = list(amp.master_params(optimizer))
    assert all(torch.equal(p, master.float()) for p, master in zip(plain.parameters(), masters))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1 + 2.0**-20)
    model.load_state_dict(plain.state_dict())
    for parameter, master, weight in zip(plain.parameters(), masters, model.parameters()):
        assert torch.equal(master, parameter.to(master.dtype)) and torch.equal(weight, parameter.to(weight.dtype))


@pytest.mark.parametrize('level', MASTERS)
def test_loading_in_the_middle_of_training_with_gradients_waiting(level: str) -> None:
    model, optimizer = initialised(level)
    for index in range(3):
        step(model, optimizer, index)
    state = saved(model, optimizer)
    wanted = [step(model, optimizer, index) for index in (3, 4)]
    backward(model(torch.ones(8, 4)).float().sum(), optimizer)
    load(state, model, optimizer)
    model.last.load_state_dict({key[5:]: value for key, value in state['model'].items() if key.startswith('last.')})
    amp.load_state_dict(state['amp'], optimizers=optimizer)
    assert same([step(model, optimizer, index) for index in (3, 4)], wanted)


# -- loss scales --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
def test_state_has_the_form_of_apex(level: str) -> None:
    _, optimizer = initialised(level, num_losses=3)
    state = amp.state_dict(optimizers=optimizer)
    scale = 2.0**16 if level in ('O1', 'O2') else 1.0
    assert list(state) == ['loss_scaler0', 'loss_scaler1', 'loss_scaler2'] and type(state) is dict
    for entry in state.values():
        assert type(entry) is dict and list(entry.items()) == [('loss_scale', scale), ('unskipped', 0)]
        assert [type(value) for value in entry.values()] == [float, int]
    mine: dict[str, Any] = {'epoch': 3}
    assert amp.state_dict(mine, optimizers=optimizer) is mine and mine == {'epoch': 3, **state}
    assert amp.state_dict(destination={}, optimizers=optimizer) == state


@pytest.mark.parametrize('count', [0, 1, 3, 4])
def test_another_number_of_scales_is_taken_as_far_as_it_goes_with_a_warning(count: int, log: list[str]) -> None:
    _, optimizer = initialised('O2', num_losses=3, verbosity=1)
    log.clear()
    state = {f'loss_scaler{i}': {'loss_scale': 2.0 ** (i + 3), 'unskipped': 7} for i in range(count)}
    amp.load_state_dict(state, optimizers=optimizer)
    assert scales(optimizer, 3) == [2.0**3, 2.0**4, 2.0**5][:count] + [2.0**16] * (3 - count)
    wanted = {0: ['the state is empty'], 3: []}.get(count, [f'holds {count} loss scales, and 3 are configured'])
    assert len(log) == len(wanted) and all(word in line for word, line in zip(wanted, log))


@pytest.mark.parametrize('level', ['O0', 'O3', 'O4', 'O5'])
def test_static_scale_stays_with_a_warning(level: str, log: list[str]) -> None:
    _, optimizer = initialised(level, verbosity=1)
    log.clear()
    amp.load_state_dict({'loss_scaler0': {'loss_scale': 512.0, 'unskipped': 3}}, optimizers=optimizer)
    assert scales(optimizer) == [1.0]
    assert len(log) == 1 and '512' in log[0]


def test_scale_of_1_and_hysteresis_survive_a_file() -> None:
    """A moving scale of 1 looks static to readers of apex's files, which know of no hysteresis either."""
    rule = dict(init_scale=2.0, growth_interval=8, hysteresis=2)

    def run(optimizer: Optimizer, model: nn.Module, hits: str) -> list[float]:
        found = []
        for hit in hits:
            optimizer.zero_grad()
            backward(model(torch.ones(8, 4)).float().mean() * (float('inf') if hit == '!' else 1.0), optimizer)
            optimizer.step()
            found += scales(optimizer)
        return found

    model, optimizer = initialised('O2', loss_scale=rule)
    before = run(optimizer, model, '.!!..!')
    assert before[-1] == 1.0 or before[-2] == 1.0
    state = amp.state_dict(optimizers=optimizer)
    restored, other = initialised('O2', loss_scale=rule)
    amp.load_state_dict(state, optimizers=other)
    assert amp.state_dict(optimizers=other) == state
    assert run(optimizer, model, '!........!') == run(other, restored, '!........!')


def test_sessions_are_numbered_in_the_order_of_their_calls() -> None:
    gc.collect()
    pairs_of = [initialised('O1'), initialised('O2', num_losses=2)]
    # inference has no scale
    amp.initialize(Net(), opt_level='O2', verbosity=0)
    pairs_of.append(initialised('O5'))
    set_scales(pairs_of[1][1], 4.0, 8.0)
    assert scale_list() == [2.0**16, 4.0, 8.0, 1.0]
    del pairs_of[0]
    assert scale_list() == [4.0, 8.0, 1.0]
    amp.load_state_dict({f'loss_scaler{i}': {'loss_scale': 2.0 ** (i + 1), 'unskipped': 0} for i in range(3)})
    assert [scales(pairs_of[0][1], 2), scales(pairs_of[1][1])] == [[2.0, 4.0], [1.0]]


# -- which sessions count -----------------------------------------------------------------------------------------------


def scale_list(**options: Any) -> list[float]:
    return [entry['loss_scale'] for entry in amp.state_dict(**options).values()]


@pairs(
    level=LEVELS, kind=[SGD, FusedAdamW], kept=['output', 'scaled loss', 'node', 'model', 'everything'], losses=[1, 2]
)
def test_session_ends_with_its_optimizer_whatever_is_left_of_a_training(
    level: str, kind: Any, kept: str, losses: int
) -> None:
    """The cell of a notebook that is run again, where outputs and losses of the first run are still there."""
    gc.collect()
    model, optimizer = initialised(level, kind, num_losses=losses, loss_scale=2.0**5)
    output = model(torch.ones(3, 4))
    loss = output.float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward(retain_graph=True)
    optimizer.step()
    found: Any = {'output': output, 'loss': loss, 'scaled loss': scaled, 'node': loss.grad_fn, 'model': model}
    found = found if kept == 'everything' else found[kept]
    gone = weakref.ref(optimizer)
    del output, loss, scaled, model, optimizer
    both = initialised(level, kind, loss_scale=2.0**3)
    assert scale_list() == [2.0**3] and gone() is None and found is not None
    amp.load_state_dict({'loss_scaler0': {'loss_scale': 2.0**3, 'unskipped': 0}})
    assert scales(both[1]) == [2.0**3]


def in_block(model: nn.Module, optimizer: Optimizer) -> None:
    with amp.scale_loss(model(torch.ones(3, 4)).float().sum(), optimizer) as scaled:
        scaled.backward()
        raise ValueError


def in_backward(model: nn.Module, optimizer: Optimizer) -> None:
    loss = model(torch.ones(3, 4)).float().sum()
    loss.register_hook(lambda gradient: 1 / 0)
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()


def in_forward(model: nn.Module, optimizer: Optimizer) -> None:
    model(torch.ones(3, 5))


@pairs(fails=[in_block, in_backward, in_forward], level=LEVELS)
def test_error_that_was_handled_holds_no_session(level: str, fails: Callable[[nn.Module, Optimizer], None]) -> None:
    gc.collect()
    both = initialised(level, loss_scale=2.0**5)
    gone = weakref.ref(both[1])
    with contextlib.suppress(ValueError, ZeroDivisionError, RuntimeError):
        fails(*both)
    both = initialised(level, loss_scale=2.0**3)
    assert scale_list() == [2.0**3] and gone() is None


def test_optimizers_says_which_session_is_meant_where_another_is_alive(log: list[str]) -> None:
    gc.collect()
    older = initialised('O2', loss_scale=2.0**5)
    model, optimizer = initialised('O2', verbosity=1, loss_scale=dict(init_scale=2.0**3))
    log.clear()
    assert scale_list() == [2.0**5, 2.0**3]
    assert scale_list(optimizers=optimizer) == scale_list(optimizers=[optimizer]) == [2.0**3]
    state = {'loss_scaler0': {'loss_scale': 2.0**4, 'unskipped': 7}}
    amp.load_state_dict(state, optimizers=optimizer)
    assert scales(optimizer) == [2.0**4] and log == []
    amp.load_state_dict(state)
    assert scales(optimizer) == [2.0**4] and any('of 2 calls of amp.initialize()' in line for line in log)
    with pytest.raises(AmpUsageError, match='was not initialised'):
        amp.state_dict(optimizers=SGD(model.parameters(), lr=0.1))
    del older
    assert scale_list() == [2.0**4]


@pairs(first=LEVELS, second=LEVELS)
def test_model_whose_weights_were_not_cast_can_be_initialised_again(first: str, second: str) -> None:
    """A run at O0 to compare with, and then one at another level; casts of weights are protected."""
    model, optimizer = initialised(first)
    del optimizer
    again = SGD(model.parameters(), lr=0.1)
    if first not in UNCAST:
        with pytest.raises(AmpAttachError, match='already'):
            amp.initialize(model, again, opt_level=second, verbosity=0)
        return
    amp.initialize(model, again, opt_level=second, verbosity=0)
    fresh, _ = initialised(second)
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in fresh.parameters()]
    x = torch.randn(8, 4)
    assert same(model.eval()(x), fresh.eval()(x))
