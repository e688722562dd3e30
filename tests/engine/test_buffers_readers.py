"""Who reads buffers between a skipped step and the next pass: evaluations, state dicts, files, averages, resumed runs."""

from __future__ import annotations

import copy
import gc
import io
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import differences
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mmengine.model import ExponentialMovingAverage, MomentumAnnealingEMA
from mmengine.optim import OptimWrapperDict
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from amp_wrapper import AmpOptimWrapper, amp
from amp_wrapper.engine.buffers import averages as buffer_averages
from amp_wrapper.policy import LEVELS

NAN = math.nan


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).float() * self.scale.float() + x.float()


class Players(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = Part(), Part()


def evaluates(game: Players, x: Tensor) -> Tensor:
    game.eval()
    with torch.no_grad():
        result = game.discriminator(x)
    game.train()
    return result


def evaluates_the_layer(game: Players, x: Tensor) -> Tensor:
    game.eval()
    with torch.no_grad():
        result: Tensor = game.discriminator.norm(x)
    game.train()
    return result


def makes_a_state_dict(game: Players, x: Tensor) -> Tensor:
    state = game.state_dict()
    return torch.cat([value.double().reshape(-1) for name, value in state.items() if name.startswith('discriminator')])


def averages(game: Players, x: Tensor) -> Tensor:
    mean = AveragedModel(Players().to(x.device), use_buffers=True)
    mean.update_parameters(game)
    return torch.cat([value.double().reshape(-1) for value in mean.module.discriminator.buffers()])


@pytest.mark.parametrize('reads', [evaluates, evaluates_the_layer, makes_a_state_dict, averages])
@pytest.mark.parametrize('api', ['wrapper', 'functional'])
@pytest.mark.parametrize('level', LEVELS)
def test_what_a_skipped_step_of_the_generator_left_in_the_discriminator(
    level: str, api: str, reads: Callable[[Players, Tensor], Tensor], device: torch.device
) -> None:
    """The loss of one optimizer went through the modules of the other, and these do not run again before they are read."""
    game = Players().to(device)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (game.generator, game.discriminator)]
    words = dict(opt_level=level, loss_scale=dict(init_scale=1.0), verbosity=0)
    if api == 'wrapper':
        names = ('generator', 'discriminator')
        wrappers = OptimWrapperDict(
            **{
                name: AmpOptimWrapper(optimizer=optimizer, **words, skip_nonfinite=True)
                for name, optimizer in zip(names, optimizers)
            }
        )
        wrappers.initialize_count_status(game, 0, 10)
    else:
        amp.initialize([game.generator, game.discriminator], optimizers, num_losses=2, **words)
    x = torch.randn(4, 3, device=device)

    def play(which: int, loss: Callable[[], Tensor]) -> None:
        if api == 'wrapper':
            wrapper = wrappers[names[which]]
            with wrapper.optim_context(game):
                result = loss()
            wrapper.update_params(result)
        else:
            with amp.scale_loss(loss(), optimizers[which], loss_id=which) as scaled:
                scaled.backward()
            optimizers[which].step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    play(1, lambda: game.discriminator(x).square().mean())
    before = {name: value.clone() for name, value in game.discriminator.named_buffers()}
    play(0, lambda: game.discriminator(game.generator(x * NAN)).square().mean())
    assert reads(game, x).isfinite().all()
    for name, value in game.discriminator.named_buffers():
        assert value.equal(before[name]), name


def _averaged(kind: str, model: nn.Module) -> Any:
    if kind == 'torch':
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    if kind == 'annealed':
        return MomentumAnnealingEMA(model, momentum=0.25, gamma=3, interval=2, update_buffers=True)
    return ExponentialMovingAverage(model, momentum=0.5, update_buffers=True)


class _Training:
    """Accumulations of three batches, averages after each."""

    def __init__(self, level: str, kinds: tuple[str, ...], device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = Part().to(device)
        self.wrapper = AmpOptimWrapper(
            opt_level=level,
            optimizer=torch.optim.SGD(self.model.parameters(), lr=0.1),
            accumulative_counts=3,
            skip_nonfinite=True,
            loss_scale=dict(init_scale=1.0),
            verbosity=0,
        )
        self.wrapper.attach(self.model)
        self.wrapper.initialize_count_status(self.model, 0, 9)
        self.averages = [_averaged(kind, self.model) for kind in kinds]

    def run(self, iterations: range, bad: int, device: torch.device) -> None:
        for iteration in iterations:
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(iteration)).to(device)
            with self.wrapper.optim_context(self.model):
                loss = self.model(x * NAN if iteration == bad else x).square().mean()
            self.wrapper.update_params(loss)
            for average in self.averages:
                average.update_parameters(self.model)

    def states(self) -> dict[str, Tensor]:
        owners = {'model': self.model, **{f'average {index}': mean for index, mean in enumerate(self.averages)}}
        return {f'{key}: {name}': value for key, owner in owners.items() for name, value in owner.state_dict().items()}


@pytest.mark.parametrize('kinds', [('mean',), ('torch',), ('annealed', 'mean'), ('mean', 'torch')])
@pytest.mark.parametrize('level', ['O0', 'O1', 'O2', 'O5'])
def test_exact_resume_of_averages_during_accumulation(
    level: str, kinds: tuple[str, ...], device: torch.device, tmp_path: Path
) -> None:
    """Saved after each batch of an accumulation, with the NaN in each batch of it or none."""
    for bad in (-1, 3, 4, 5):
        whole = _Training(level, kinds, device)
        whole.run(range(9), bad, device)
        assert all(value.isfinite().all() for value in whole.states().values())
        for stop in (4, 5, 6):
            first = _Training(level, kinds, device)
            first.run(range(stop), bad, device)
            parts = [first.model, first.wrapper, *first.averages]
            torch.save([part.state_dict() for part in parts], tmp_path / 'state.pth')
            second = _Training(level, kinds, device)
            saved = torch.load(tmp_path / 'state.pth', map_location=device, weights_only=False)
            for part, state in zip([second.model, second.wrapper, *second.averages], saved):
                part.load_state_dict(state)
            second.wrapper.initialize_count_status(second.model, stop, 9)
            second.run(range(stop, 9), bad, device)
            assert differences(whole.states(), second.states()) == [], (bad, stop)


def test_accumulation_saved_twice_in_a_row_keeps_what_averages_were(device: torch.device) -> None:
    """Saved again right after the resume, before any average was updated."""
    whole = _Training('O2', ('mean',), device)
    whole.run(range(9), 4, device)
    states: Any = None
    training = _Training('O2', ('mean',), device)
    training.run(range(5), 4, device)
    for _ in range(2):
        states = copy.deepcopy([part.state_dict() for part in (training.model, training.wrapper, *training.averages)])
        training = _Training('O2', ('mean',), device)
        for part, state in zip((training.model, training.wrapper, *training.averages), states):
            part.load_state_dict(state)
        training.wrapper.initialize_count_status(training.model, 5, 9)
    training.run(range(5, 9), 4, device)
    assert differences(whole.states(), training.states()) == []


def test_damaged_averages_of_an_accumulation_are_refused(device: torch.device) -> None:
    training = _Training('O2', ('mean',), device)
    training.run(range(4), -1, device)
    state = training.wrapper.state_dict()
    assert [set(entry) for entry in state['amp']['window']['averages']] == [{'before', 'now'}]
    before = copy.deepcopy(training.states())
    for damage in (
        'x',
        [1],
        [{'before': {}}],
        [{'before': {}, 'now': {'x': 1}}],
        [{'before': {1: torch.ones(1)}, 'now': {}}],
    ):
        broken = copy.deepcopy(state)
        broken['amp']['window']['averages'] = damage
        with pytest.raises(Exception, match=r"amp\['window'\]\['averages'\] must be a list of dicts"):
            training.wrapper.load_state_dict(broken)
        assert differences(before, training.states()) == []


def test_a_wrapper_that_nobody_holds_goes_although_its_numbers_stay_in_the_log(device: torch.device) -> None:
    """Message hubs live as long as the process."""
    training = _Training('O2', (), device)
    training.run(range(6), -1, device)
    hub = training.wrapper.message_hub
    assert 'train/amp_scale' in hub.log_scalars
    gone = [weakref.ref(training.wrapper), weakref.ref(training.wrapper.optimizer), weakref.ref(training.model)]
    del training
    gc.collect()
    assert [reference() for reference in gone] == [None, None, None]
    assert hub.log_scalars['train/amp_scale'].current() == 1.0


def copies(game: Players, x: Tensor) -> Tensor:
    return copy.deepcopy(game.discriminator.norm).running_var


def pickles(game: Players, x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(game.discriminator, file)
    file.seek(0)
    read: Tensor = torch.load(file, weights_only=False).norm.running_var
    return read


def _nothing(game: Players, x: Tensor) -> Tensor:
    return x


READERS = [_nothing, evaluates, evaluates_the_layer, makes_a_state_dict, averages, copies, pickles]


class Both:
    """Two models, each with an optimizer, in one session or two, or with two wrappers."""

    def __init__(self, level: str, api: str, device: torch.device) -> None:
        self.game = Players().to(device)
        parts = (self.game.generator, self.game.discriminator)
        self.optimizers = [torch.optim.SGD(part.parameters(), lr=2.0**-8) for part in parts]
        self.wrappers: Any = None
        words: dict[str, Any] = dict(opt_level=level, verbosity=0)
        if api == 'wrapper':
            self.wrappers = OptimWrapperDict(
                **{
                    name: AmpOptimWrapper(
                        optimizer=optimizer, **words, loss_scale=dict(init_scale=1.0), skip_nonfinite=True
                    )
                    for name, optimizer in zip('gd', self.optimizers)
                }
            )
            self.wrappers.initialize_count_status(self.game, 0, 10)
        elif api == 'one session':
            amp.initialize(list(parts), self.optimizers, num_losses=2, loss_scale=dict(init_scale=1.0), **words)
        else:
            for part, optimizer in zip(parts, self.optimizers):
                amp.initialize(part, optimizer, loss_scale=dict(init_scale=1.0), **words)
        self.one = api == 'one session'

    def backward(self, which: int, loss: Tensor) -> None:
        if self.wrappers is not None:
            self.wrappers['gd'[which]].backward(loss)
            return
        with amp.scale_loss(loss, self.optimizers[which], loss_id=which if self.one else 0) as scaled:
            scaled.backward()

    def step(self, which: int) -> None:
        stepped = self.optimizers[which] if self.wrappers is None else self.wrappers['gd'[which]]
        stepped.step()
        stepped.zero_grad()

    def counts(self) -> tuple[int, int]:
        return tuple(int(part.norm.num_batches_tracked) for part in (self.game.generator, self.game.discriminator))  # type: ignore[return-value]


APIS = ['wrapper', 'one session', 'two sessions']


@pytest.mark.parametrize('reads', READERS)
@pytest.mark.parametrize('api', APIS)
@pytest.mark.parametrize('level', LEVELS)
def test_two_models_by_turns(
    level: str, api: str, reads: Callable[[Players, Tensor], Tensor], device: torch.device
) -> None:
    """Both forward passes, then a step of each: as in mutual learning. Neither decides on the other, whoever reads then."""
    both = Both(level, api, device)
    x = torch.randn(4, 3, device=device)
    expected = [0, 0]
    for bad in ((), (1,), (0,), (0, 1), ()):
        parts = (both.game.generator, both.game.discriminator)
        losses = [part(x * NAN if which in bad else x).square().mean() for which, part in enumerate(parts)]
        for which, loss in enumerate(losses):
            both.backward(which, loss)
            both.step(which)
            reads(both.game, x)
            expected[which] += which not in bad
        assert all(buffer.isfinite().all() for buffer in both.game.buffers()), bad
        # who reads while a step is skipped and a loss is due may cost that loss its statistics
        if reads in (_nothing, copies, pickles) or 0 not in bad:
            assert both.counts() == tuple(expected), bad
        expected = list(both.counts())


ORDERS = ['gG dD', 'dD gG', 'g d G D', 'g d D G', 'd g D G', 'd g G D', 'd gG dD', 'g dD G']


@pytest.mark.parametrize('order', ORDERS)
@pytest.mark.parametrize('freezes', [False, True])
@pytest.mark.parametrize('api', APIS)
@pytest.mark.parametrize('level', LEVELS)
def test_a_discriminator_that_is_frozen_meanwhile(
    level: str, api: str, freezes: bool, order: str, device: torch.device
) -> None:
    """Backward passes (g, d) and steps (G, D) in many orders, with a NaN in what the generator alone sees."""
    both = Both(level, api, device)
    generator, discriminator = both.game.generator, both.game.discriminator
    x = torch.randn(4, 3, device=device)
    for bad in (False, True, False):
        for letter in order.replace(' ', ''):
            if letter == 'd':
                fake = generator(x).detach()
                both.backward(1, discriminator(x).square().mean() + discriminator(fake).square().mean())
            elif letter == 'g':
                discriminator.requires_grad_(not freezes)
                both.backward(0, discriminator(generator(x * NAN if bad else x)).square().mean())
                discriminator.requires_grad_(True)
            else:
                both.step('GD'.index(letter))
        assert all(buffer.isfinite().all() for buffer in both.game.buffers()), bad
        assert all(p.isfinite().all() for o in both.optimizers for g in o.param_groups for p in g['params'])
    assert min(both.counts()) > 0


@settings(max_examples=60, deadline=None)
@given(
    level=st.sampled_from(['O1', 'O2']),
    api=st.sampled_from(APIS),
    freezes=st.booleans(),
    letters=st.lists(st.sampled_from('gGdDnm'), min_size=2, max_size=9),
)
@example(level='O2', api='wrapper', freezes=True, letters=list('gdDmGD'))
@example(level='O2', api='two sessions', freezes=False, letters=list('gdDmGD'))
def test_orders_of_any_length(level: str, api: str, freezes: bool, letters: list[str], device: torch.device) -> None:
    """Gradients may wait over steps of the other; n and m are g and d with a NaN. When all have stepped, none is left."""
    both = Both(level, api, device)
    generator, discriminator = both.game.generator, both.game.discriminator
    x = torch.randn(4, 3, device=device)
    waiting: set[str] = set()
    for letter in [*letters, 'G', 'D']:
        bad = x * NAN if letter in 'nm' else x
        if letter in 'dm':
            both.backward(1, discriminator(bad).square().mean())
            waiting.add('D')
        elif letter in 'gn':
            discriminator.requires_grad_(not freezes)
            both.backward(0, discriminator(generator(bad)).square().mean())
            discriminator.requires_grad_(True)
            waiting.add('G')
        elif letter in waiting:
            both.step('GD'.index(letter))
            waiting.discard(letter)
    assert all(buffer.isfinite().all() for buffer in both.game.buffers())
    assert all(p.isfinite().all() for o in both.optimizers for g in o.param_groups for p in g['params'])


@pytest.mark.parametrize('level', LEVELS)
def test_what_somebody_writes_into_an_average_stays(level: str, device: torch.device) -> None:
    """Loaded, or estimated anew, between two batches of an accumulation whose step is skipped."""
    training = _Training(level, ('torch',), device)
    training.run(range(4), -1, device)
    average = training.averages[0].module
    with torch.no_grad():
        for buffer in average.buffers():
            buffer.fill_(3)
    training.run(range(4, 6), 4, device)
    # the NaN of the batch is gone, and so is what came before it, but not this
    assert average.norm.num_batches_tracked in (3, training.model.norm.num_batches_tracked)
    assert (average.norm.running_var > 1.5).all() and average.norm.running_mean.isfinite().all()


def test_an_average_that_was_not_saved_is_compared_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    training = _Training('O2', ('torch',), device)
    training.run(range(5), -1, device)
    states = copy.deepcopy([training.model.state_dict(), training.wrapper.state_dict()])
    training.run(range(5, 6), -1, device)
    again = _Training('O2', ('torch',), device)
    again.model.load_state_dict(states[0])
    again.wrapper.load_state_dict(states[1])
    again.wrapper.initialize_count_status(again.model, 5, 9)
    again.averages = [_averaged('torch', again.model)]
    reads: list[int] = []
    monkeypatch.setattr(buffer_averages, 'same_bits', lambda copy, tensor: bool(reads.append(1)))
    again.run(range(5, 6), -1, device)
    assert reads
    reads.clear()
    again.run(range(6, 9), -1, device)
    assert not reads


@pytest.mark.parametrize('level', LEVELS)
def test_saved_again_before_the_first_forward_pass(level: str, device: torch.device) -> None:
    """The wrapper's state is loaded before the model's, and both are saved at once."""
    whole = _Training(level, ('mean',), device)
    whole.run(range(9), 5, device)
    training = _Training(level, ('mean',), device)
    training.run(range(4), 5, device)
    for _ in range(2):
        parts = (training.model, training.wrapper, *training.averages)
        model, wrapper, *means = copy.deepcopy([part.state_dict() for part in parts])
        training = _Training(level, ('mean',), device)
        training.wrapper.initialize_count_status(training.model, 4, 9)
        training.wrapper.load_state_dict(wrapper)
        training.model.load_state_dict(model)
        for average, state in zip(training.averages, means):
            average.load_state_dict(state)
    training.run(range(4, 9), 5, device)
    assert differences(whole.states(), training.states()) == []
