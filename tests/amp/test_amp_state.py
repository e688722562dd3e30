"""amp.state_dict and amp.load_state_dict, resuming at any level, and which calls of amp.initialize count."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bits import differences, same
from exact_scripts import KINDS, LEVELS, MASTERS, backward, scales, set_scales
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint

from amp_wrapper import AmpAttachError, AmpOptimWrapper, AmpUsageError, FusedAdamW, amp


class Net(nn.Module):
    """BatchNorm, dropout, and a segment that is computed again in the backward pass: its graph holds the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda z: self.bn(self.first(z)).relu(), x, use_reentrant=False)
        return self.last(nn.functional.dropout(y, 0.25, self.training))


def make(kind: Any = SGD) -> tuple[Net, Optimizer]:
    torch.manual_seed(3)
    model = Net()
    return model, kind(model.parameters(), lr=0.1, **({'momentum': 0.9} if kind is SGD else {}))


def initialised(level: str, kind: Any = SGD, **options: Any) -> tuple[Net, Optimizer]:
    model, optimizer = make(kind)
    amp.initialize(model, optimizer, opt_level=level, **{'verbosity': 0, **options})
    return model, optimizer


def step(model: Net, optimizer: Optimizer, index: int, factor: float = 1.0) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator(torch.get_default_device()).manual_seed(index))
    torch.manual_seed(100 + index)
    optimizer.zero_grad()
    output = model(x)
    backward(output.float().square().mean() * factor, optimizer)
    optimizer.step()
    return output.detach().clone()


def saved(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    names = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), amp=amp.state_dict(optimizers=optimizer))
    return copy.deepcopy(names)


def load(state: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    model.load_state_dict(state['model'])
    optimizer.load_state_dict(state['optimizer'])


def scale_list(**options: Any) -> list[float]:
    return [entry['loss_scale'] for entry in amp.state_dict(**options).values()]


# -- resuming -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
def test_restored_at_any_level_beside_the_training_that_was_saved(level: str) -> None:
    """Every bit that the level holds; at the same level both go on alike."""
    for place, to in enumerate(LEVELS):
        initialize_first = (place + int(level[1])) % 2 == 0
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
        wanted = {key: v.to(rounds).float() if v.is_floating_point() else v for key, v in state['model'].items()}
        assert same(dict(restored.state_dict()), wanted), to
        for key, entry in other.state_dict()['state'].items():
            assert same(entry['momentum_buffer'], state['optimizer']['state'][key]['momentum_buffer'].to(rounds))
        if (level in ('O1', 'O2')) == (to in ('O1', 'O2')):
            assert amp.state_dict(optimizers=other) == state['amp']
        # training the one has no part in the other, and the dicts are nobody's, but for moments, which torch does not copy
        outputs = [step(restored, other, index) for index in (3, 4)]
        assert same(saved(model, optimizer), before), to
        assert same([state['model'], state['amp']], [before['model'], before['amp']]), to
        if level == to:
            assert same(outputs, [step(model, optimizer, index) for index in (3, 4)])
            held = [[*m.parameters(), *amp.master_params(o)] for m, o in ((model, optimizer), (restored, other))]
            assert same(*held) and differences(saved(model, optimizer), saved(restored, other)) == []


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


def test_state_has_the_form_of_apex() -> None:
    for level in LEVELS:
        _, optimizer = initialised(level, num_losses=3)
        state = amp.state_dict(optimizers=optimizer)
        scale = 2.0**16 if level in ('O1', 'O2') else 1.0
        assert state == {f'loss_scaler{index}': {'loss_scale': scale, 'unskipped': 0} for index in range(3)}
        assert type(state) is dict and type(state['loss_scaler0']) is dict
        assert [type(value) for value in state['loss_scaler0'].values()] == [float, int]
        mine: dict[str, Any] = {'epoch': 3}
        assert amp.state_dict(mine, optimizers=optimizer) is mine and mine == {'epoch': 3, **state}
        assert amp.state_dict(destination={}, optimizers=optimizer) == state


def test_another_number_of_scales_is_taken_as_far_as_it_goes_with_a_warning(log: list[str]) -> None:
    for count in (0, 1, 3, 4):
        _, optimizer = initialised('O2', num_losses=3, verbosity=1)
        log.clear()
        state = {f'loss_scaler{i}': {'loss_scale': 2.0 ** (i + 3), 'unskipped': 7} for i in range(count)}
        amp.load_state_dict(state, optimizers=optimizer)
        assert scales(optimizer, 3) == [2.0**3, 2.0**4, 2.0**5][:count] + [2.0**16] * (3 - count)
        wanted = [] if count == 3 else [True]
        assert [f'{count} loss scales were saved, and 3 are configured' in line for line in log] == wanted
    for level in ('O0', 'O3', 'O4', 'O5'):
        _, optimizer = initialised(level, verbosity=1)
        log.clear()
        amp.load_state_dict({'loss_scaler0': {'loss_scale': 512.0, 'unskipped': 3}}, optimizers=optimizer)
        assert scales(optimizer) == [1.0] and len(log) == 1 and '512' in log[0], level


def test_scale_of_1_and_hysteresis_survive_a_file() -> None:
    """A moving scale of 1 looks static to readers of apex's files, which know of no hysteresis either."""
    rule = dict(init_scale=2.0, growth_interval=8, hysteresis=2)

    def run(model: Net, optimizer: Optimizer, hits: str) -> list[float]:
        found = []
        for index, hit in enumerate(hits):
            step(model, optimizer, index, math.inf if hit == '!' else 1.0)
            found += scales(optimizer)
        return found

    first, second = (initialised('O2', loss_scale=rule) for _ in range(2))
    assert 1.0 in run(*first, '.!!..!')[-2:]
    state = amp.state_dict(optimizers=first[1])
    amp.load_state_dict(state, optimizers=second[1])
    assert amp.state_dict(optimizers=second[1]) == state
    assert run(*first, '!........!') == run(*second, '!........!')


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Nothing is collected, and nobody asks for it."""
    gc.collect()
    gc.disable()
    asked: list[Any] = []

    def note(phase: str, info: Any) -> None:
        asked.append((phase, info))

    gc.callbacks.append(note)
    yield
    gc.callbacks.remove(note)
    gc.enable()
    assert asked == []


@pytest.mark.usefixtures('no_collection')
def test_sessions_are_numbered_in_the_order_of_their_calls() -> None:
    runs = [initialised('O1'), initialised('O2', num_losses=2)]
    # inference has no scale
    amp.initialize(Net(), opt_level='O2', verbosity=0)
    runs.append(initialised('O5'))
    set_scales(runs[1][1], 4.0, 8.0)
    assert scale_list() == [2.0**16, 4.0, 8.0, 1.0]
    del runs[0]
    assert scale_list() == [4.0, 8.0, 1.0]
    amp.load_state_dict({f'loss_scaler{i}': {'loss_scale': 2.0 ** (i + 1), 'unskipped': 0} for i in range(3)})
    assert [scales(runs[0][1], 2), scales(runs[1][1])] == [[2.0, 4.0], [1.0]]


# -- which sessions count, without any search for garbage -----------------------------------------------------------------


@pytest.mark.parametrize('kept', ['output', 'scaled loss', 'node', 'model', 'everything'])
@pytest.mark.usefixtures('no_collection')
def test_session_ends_with_its_optimizer_whatever_is_left_of_a_training(kept: str) -> None:
    """The cell of a notebook that is run again, where outputs and losses of the first run are still there."""
    for level, kind, losses in (
        ('O0', SGD, 2),
        ('O1', FusedAdamW, 1),
        ('O2', SGD, 1),
        ('O3', SGD, 2),
        ('O5', FusedAdamW, 2),
    ):
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
        assert scale_list() == [2.0**3] and gone() is None and found is not None, level
        amp.load_state_dict({'loss_scaler0': {'loss_scale': 2.0**3, 'unskipped': 0}})
        assert scales(both[1]) == [2.0**3]
        del both


@pytest.mark.usefixtures('no_collection')
@pytest.mark.parametrize('level', LEVELS)
def test_memory_of_a_training_is_freed_with_its_model_and_optimizer(level: str) -> None:
    """Weights and masters, also behind a monitor that is closed, and in a wrapper."""
    for door in ('amp', 'monitor', 'wrapper'):
        model, wrapper = Net(), None
        optimizer: Any = SGD(model.parameters(), lr=0.1)
        if door == 'wrapper':
            wrapper = AmpOptimWrapper(opt_level=level, optimizer=optimizer, verbosity=0)
            wrapper.attach(model)
            wrapper.update_params(model(torch.ones(3, 4)).float().sum())
        else:
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
            with amp.monitor(optimizer) if door == 'monitor' else contextlib.nullcontext():
                step(model, optimizer, 0, 1.0)
        left = [weakref.ref(model), weakref.ref(optimizer)]
        left += [weakref.ref(p) for p in (*model.parameters(), *amp.master_params(optimizer))]
        del model, optimizer, wrapper
        assert [reference() for reference in left if reference() is not None] == [], door


def in_block(model: nn.Module, optimizer: Optimizer) -> None:
    with amp.scale_loss(model(torch.ones(3, 4)).float().sum(), optimizer) as scaled:
        scaled.backward()
        raise ValueError


def in_backward(model: nn.Module, optimizer: Optimizer) -> None:
    loss = model(torch.ones(3, 4)).float().sum()
    loss.register_hook(lambda gradient: 1 / 0)
    backward(loss, optimizer)


def in_forward(model: nn.Module, optimizer: Optimizer) -> None:
    model(torch.ones(3, 5))


@pytest.mark.parametrize('fails', [in_block, in_backward, in_forward])
@pytest.mark.usefixtures('no_collection')
def test_error_that_was_handled_holds_no_session(fails: Callable[[nn.Module, Optimizer], None]) -> None:
    for level in KINDS:
        both = initialised(level, loss_scale=2.0**5)
        gone = weakref.ref(both[1])
        with contextlib.suppress(ValueError, ZeroDivisionError, RuntimeError):
            fails(*both)
        both = initialised(level, loss_scale=2.0**3)
        assert scale_list() == [2.0**3] and gone() is None, level
        del both


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


def test_model_whose_weights_were_not_cast_can_be_initialised_again() -> None:
    """A run at O0 to compare with, and then one at another level; casts of weights are protected."""
    x = torch.randn(8, 4)
    for first, second in itertools.product(LEVELS, LEVELS):
        model, optimizer = initialised(first)
        del optimizer
        again = SGD(model.parameters(), lr=0.1)
        if first not in ('O0', 'O1', 'O4'):
            with pytest.raises(AmpAttachError, match='already'):
                amp.initialize(model, again, opt_level=second, verbosity=0)
            continue
        amp.initialize(model, again, opt_level=second, verbosity=0)
        fresh, _ = initialised(second)
        assert [p.dtype for p in model.parameters()] == [p.dtype for p in fresh.parameters()], (first, second)
        assert same(model.eval()(x), fresh.eval()(x)), (first, second)
