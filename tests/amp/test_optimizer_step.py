"""The step of an initialised optimizer: closures, hooks, schedulers, skipped steps, copies, and optimizers around others."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import itertools
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import same
from exact_scripts import LEVELS, MASTERS, Curved, backward, initialise, scales, start, state, unlike_fp32
from pairs import pairs
from play import EXACT_LEVELS, Part, data, fused_sgd, sgd
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as schedulers

from amp_wrapper import AmpUsageError, FusedSGD, OverflowStreakError, amp


@pytest.mark.parametrize('kind', [SGD, Adam, FusedSGD])
def test_class_and_signatures_stay(kind: Any) -> None:
    for level in LEVELS:
        net = Part()
        optimizer, plain = kind(net.parameters(), lr=0.25), kind(Part().parameters(), lr=0.25)
        amp.initialize(net, optimizer, opt_level=level, verbosity=0)
        assert type(optimizer) is kind and repr(optimizer) == repr(plain)
        for name in ('step', 'zero_grad'):
            ours = getattr(optimizer, name)
            assert inspect.signature(ours) == inspect.signature(getattr(plain, name))
            assert ours.__name__ == name
            with pytest.raises(TypeError):
                ours(1, 2)
        optimizer.zero_grad(True)
        optimizer.zero_grad(set_to_none=False)
        assert optimizer.step(None) is None


# -- closures -----------------------------------------------------------------------------------------------------------


class OwnStep(SGD):
    """More arguments, and another name for the closure."""

    received: Any = None

    def step(self, fn: Any = None, rate: float = 1.0, *, flag: bool = False) -> Any:  # type: ignore[override]
        self.received = rate, flag
        return super().step(fn)


#: The optimizer, the call, and what arrived beside the closure.
CLOSURES: dict[str, tuple[type[Optimizer], Callable[[Any, Any], Any], Any]] = {
    'by position': (SGD, lambda o, closure: o.step(closure), None),
    'by name': (SGD, lambda o, closure: o.step(closure=closure), None),
    'with more arguments': (OwnStep, lambda o, closure: o.step(closure, 0.5, flag=True), (0.5, True)),
}


@pytest.mark.parametrize('way', CLOSURES)
def test_closure(way: str) -> None:
    """The second step is skipped."""
    kind, call, received = CLOSURES[way]

    def train(at: str | None) -> Any:
        net = Part()
        optimizer = kind(net.trained, lr=0.25, momentum=0.5)  # type: ignore[call-arg]
        initialise([net], [optimizer], at, 8.0)
        losses = []
        for index in range(3):

            def closure(index: int = index) -> Tensor:
                optimizer.zero_grad()
                loss = net(data(index))
                backward(loss, optimizer, hit=net.fc.weight if index == 1 else None, level=at)
                return loss

            with torch.no_grad():
                losses.append(torch.enable_grad()(closure)() if at is None else call(optimizer, closure))
            if at is None and index != 1:
                optimizer.step()
        assert at is None or getattr(optimizer, 'received', None) == received
        return state([net], [optimizer], buffers=False), [loss.item() for loss in losses]

    wanted, expected = train(None)
    for level in EXACT_LEVELS:
        found, losses = train(level)
        # what the weights are rounded to differs from FP32 at the levels that cast them
        assert found == wanted and (level in MASTERS or losses == expected), level


class ClosureInTheMiddle(SGD):
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        return super().step()


def test_optimizer_that_calls_its_closure_in_the_middle_of_a_step_is_refused() -> None:
    for level in ('O1', 'O2', 'O5'):
        net = Part()
        optimizer = ClosureInTheMiddle(net.trained, lr=0.25)
        initialise([net], [optimizer], level, 4.0)
        before = state([net], [], buffers=False)
        with pytest.raises(AmpUsageError, match=r'ClosureInTheMiddle\.step\(closure\)'):
            optimizer.step(lambda net=net, optimizer=optimizer: backward(net(data(0)), optimizer))
        assert state([net], [], buffers=False) == before, level


# -- skipped steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('make', [sgd, fused_sgd])
def test_each_skip_is_logged_with_the_losses_that_overflowed(make: Any, log: list[str]) -> None:
    net = Part()
    optimizer = make([{'params': net.trained}])
    amp.initialize(net, optimizer, opt_level='O2', num_losses=3, loss_scale=dict(init_scale=8.0))
    for loss_id in (0, 2):
        optimizer.zero_grad()
        backward(net(data(0)), optimizer)
        backward(net(data(0)), optimizer, loss_id, net.fc.weight)
        optimizer.step()
    amp.state_dict()
    first, second = log
    assert 'step skipped (1 so far, 1 in a row)' in first and 'loss 0: 4' in first
    assert 'loss 2: 4' in second and 'loss 1' not in second


@pytest.mark.parametrize(('level', 'make'), [('O1', fused_sgd), ('O2', sgd), ('O2', fused_sgd), ('O5', sgd)])
def test_fifty_skips_in_a_row_end_the_training(level: str, make: Any) -> None:
    """With the names of parameters; weights are those of the last clean step, and the scale never is 0."""
    net = Part()
    optimizer = make([{'params': net.trained}])
    amp.initialize(net, optimizer, opt_level=level, loss_scale='dynamic', verbosity=0)
    before = state([net], [])
    for step in range(50):
        optimizer.zero_grad()
        backward(net(data(0)), optimizer, hit=net.fc.weight)
        if step < 49:
            optimizer.step()
    with pytest.raises(OverflowStreakError, match=r'(?s)50 optimizer steps.*fc.weight'):
        optimizer.step()
    assert state([net], []) == before and scales(optimizer) == [2.0 ** (16 - 50)]


@pytest.mark.parametrize('before', ['block', 'failed block', 'nothing'])
@pytest.mark.parametrize('cleared_by', ['optimizer', 'model'])
def test_infinite_gradients_written_by_hand_skip_the_step(before: str, cleared_by: str) -> None:
    """Whatever was checked before belongs to gradients that are gone."""
    for level, scale in (('O1', '1'), ('O1', '8'), ('O3', None), ('O4', None), ('O5', None)):
        net, optimizer = start(level, scale)
        if before != 'nothing':
            with contextlib.suppress(RuntimeError), amp.scale_loss(net(data(0)), optimizer) as loss:
                if before == 'failed block':
                    raise RuntimeError
                loss.backward()
        optimizer.zero_grad()
        if cleared_by == 'model':
            net.zero_grad()
        known = state([net], [], buffers=False)
        for parameter in net.trained:
            parameter.grad = torch.full_like(parameter, torch.inf)
        optimizer.step()
        assert state([net], [], buffers=False) == known, level


# -- schedulers and hooks -----------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    'StepLR': lambda o: schedulers.StepLR(o, 2, 0.5),
    'OneCycleLR': lambda o: schedulers.OneCycleLR(o, 0.5, total_steps=10),
    'CyclicLR': lambda o: schedulers.CyclicLR(o, 0.125, 0.5, step_size_up=2),
    'Sequential': lambda o: schedulers.SequentialLR(o, [schedulers.ConstantLR(o, 0.5, 2), schedulers.StepLR(o, 1, 0.5)], [2]),
}  # fmt: skip


@pairs(name=SCHEDULERS, built=['before', 'after'])
def test_schedulers_give_the_same_rates_without_a_warning(name: str, built: str) -> None:
    """Also where the first step was skipped."""

    def train(at: str | None, broken: int | None) -> Any:
        net = Part()
        optimizer = SGD(net.trained, 0.25, momentum=0.5)
        early = SCHEDULERS[name](optimizer) if built == 'before' else None
        initialise([net], [optimizer], at, 8.0)
        scheduler = early or SCHEDULERS[name](optimizer)
        rates = []
        for index in range(5):
            optimizer.zero_grad()
            if at is not None or index != broken:
                backward(net(data(index)), optimizer, hit=net.fc.weight if index == broken else None, level=at)
            optimizer.step()
            scheduler.step()
            group = optimizer.param_groups[0]
            rates.append((scheduler.get_last_lr(), group['lr'], group['momentum']))
        return rates, state([net], [optimizer], buffers=False)

    with warnings.catch_warnings():
        warnings.simplefilter('error')
        # torch 2.6's own, of SequentialLR
        warnings.filterwarnings('ignore', 'The epoch parameter in `scheduler.step')
        for broken in (None, 0):
            assert unlike_fp32(functools.partial(train, broken=broken)) == []


@pytest.mark.parametrize('make', [sgd, fused_sgd])
def test_hooks_of_the_optimizer_see_unscaled_gradients_and_may_change_them(make: Any) -> None:
    """The host knows of a skip before the step of torch's optimizers, which is not called then."""

    def double(optimizer: Optimizer, *_: Any) -> None:
        for parameter in amp.master_params(optimizer):
            seen.append(parameter.grad.tolist())  # type: ignore[union-attr]
            parameter.grad.mul_(2)  # type: ignore[union-attr]

    def train(at: str | None) -> Any:
        net = Part()
        optimizer = make([{'params': net.trained, 'lr': 0.25}])
        optimizer.register_step_pre_hook(double)
        optimizer.register_state_dict_post_hook(lambda who, saved: {**saved, 'mark': 1})
        optimizer.register_load_state_dict_pre_hook(lambda who, saved: {k: v for k, v in saved.items() if k != 'mark'})
        initialise([net], [optimizer], at, 8.0)
        optimizer.register_step_post_hook(lambda *_: seen.append('after'))
        seen.clear()
        backward(net(data(0)), optimizer, level=at)
        optimizer.step()
        found = seen[:]
        if at is not None:
            optimizer.zero_grad()
            backward(net(data(0)), optimizer, hit=net.fc.weight)
            optimizer.step()
            assert make is fused_sgd or seen == found
        assert optimizer.state_dict()['mark'] == 1
        optimizer.load_state_dict(optimizer.state_dict())
        return found, state([net], [optimizer], buffers=False)

    seen: list[Any] = []
    assert unlike_fp32(train) == []


# -- copies -------------------------------------------------------------------------------------------------------------


def through_torch(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    'deepcopy': copy.deepcopy,
    'pickle': lambda value: pickle.loads(pickle.dumps(value)),
    'torch.save': through_torch,
}


@pytest.mark.parametrize('way', COPIES)
def test_copies_of_model_and_optimizer_are_plain_and_apart(way: str) -> None:
    """Before the first step and after it."""
    for level, steps in itertools.product(EXACT_LEVELS, range(2)):
        net, optimizer = start(level)
        for index in range(steps):
            backward(net(data(index)), optimizer)
            optimizer.step()
        model, stepper = COPIES[way]((net, optimizer))
        x, before = data(2), state([net], [optimizer])
        assert type(stepper) is SGD and same(stepper.state_dict(), optimizer.state_dict())
        assert torch.equal(model.eval()(x), net.eval()(x)) and model(x).dtype is torch.float32
        with torch.no_grad():
            model.fc.weight.zero_()
            model.norm.weight.zero_()
        assert model(x).item() == 0
        model(x).backward()
        stepper.step()
        assert state([net], [optimizer]) == before, level


# -- optimizers around others -------------------------------------------------------------------------------------------


class Sharp(Optimizer):
    """SAM as its packages write it: two backward passes a step, the second at weights that the first has moved."""

    def __init__(self, params: Any, **words: Any) -> None:
        super().__init__(params, words)
        self.base_optimizer = SGD(self.param_groups, **words)
        self.param_groups, self.state = self.base_optimizer.param_groups, self.base_optimizer.state

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.param_groups[0]['params']:
            self.state[p]['old'] = p.clone()
            p.add_(p.grad, alpha=0.5)

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]['params']:
            p.copy_(self.state[p].pop('old'))
        self.base_optimizer.step()

    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        self.first_step()
        closure()
        self.second_step()


def sharp_step(level: str | None, by_closure: bool) -> list[float]:
    net = Curved()
    optimizer = Sharp(net.parameters(), lr=0.5, momentum=0.5)
    initialise([net], [optimizer], level, 8.0)

    def run() -> None:
        optimizer.zero_grad()
        backward(net(torch.tensor([0.5, 1.0])), optimizer, level=level)

    run()
    # the method of the class calls the parts itself
    step = optimizer.step if by_closure else functools.partial(Sharp.step, optimizer)
    step(run)
    return net.state_dict()['weight'].tolist()


def test_second_pass_of_sam_sees_the_weights_that_the_first_has_moved() -> None:
    """By a closure, and in two calls."""
    assert unlike_fp32(functools.partial(sharp_step, by_closure=True)) == []
    assert unlike_fp32(functools.partial(sharp_step, by_closure=False)) == []


@pytest.mark.parametrize('writes', [False, True])
def test_used_gradients_of_masters_are_dropped_unless_a_script_has_written_to_them(writes: bool) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = SGD(model.parameters(), 0.5)
    amp.initialize(model, optimizer, opt_level='O2', loss_scale=4.0, verbosity=0)
    (master,) = amp.master_params(optimizer)
    for _ in range(2):
        # a script that clears the gradients of the model's weights alone
        model.weight.grad = None
        with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
            scaled.backward()
        found = master.grad.clone()
        optimizer.step()
        if writes:
            master.grad.fill_(2.0)
    assert found.tolist() == [[3.0, 3.0] if writes else [1.0, 1.0]]
    used, master.grad = weakref.ref(master.grad), None
    assert used() is None, 'the memory of used gradients is kept'
