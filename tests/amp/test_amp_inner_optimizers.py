"""Optimizers around another one, which do their work around its step: SAM, Lookahead; and second derivatives of gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from toy_amp import LEVELS, MASTERS, Net, data, scales, set_scales

from amp_wrapper import AmpOptimWrapper, amp
from amp_wrapper.errors import AmpCheckpointError, AmpUsageError
from amp_wrapper.policy import resolve


class Sharp(Optimizer):
    """SAM as its packages write it: two backward passes a step, the second at weights that the first has moved."""

    def __init__(self, params: Any, rho: float = 0.5, **kwargs: Any) -> None:
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = SGD(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.state = self.base_optimizer.state

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group['params']:
                if p.grad is not None:
                    self.state[p]['old_p'] = p.clone()
                    p.add_(p.grad, alpha=group['rho'])
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group['params']:
                if 'old_p' in self.state[p]:
                    p.copy_(self.state[p].pop('old_p'))
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if closure is None:
            raise RuntimeError('SAM requires closure.')
        self.first_step(zero_grad=True)
        with torch.enable_grad():
            closure()
        self.second_step()


class Slow(Optimizer):
    """Lookahead: every second step the weights go half of the way back."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = self.optimizer.step(closure)
        self.count += 1
        for group in self.param_groups:
            for p in group['params']:
                slow = self.state[p].setdefault('slow', torch.zeros_like(p))
                if self.count % 2 == 0:
                    slow.add_(p - slow, alpha=0.5)
                    p.copy_(slow)
        return loss


class Curved(nn.Module):
    """A loss whose gradient depends on the weight: 0.5 * sum(w * w * x), exact in 16-bit for small dyadic numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (0.5 * self.weight * self.weight * x).float().sum()


def train(level: str | None, parts: bool, device: torch.device, steps: int = 3, spoil: int | None = None) -> Tensor:
    """What two-part steps make of the weights."""
    torch.manual_seed(0)
    net = Curved().to(device)
    optimizer = Sharp(net.parameters(), lr=0.5, momentum=0.5)
    if level is not None:
        net, optimizer = amp.initialize(net, optimizer, opt_level=level, loss_scale=8, verbosity=0)

    def run(index: int, x: Tensor) -> None:
        optimizer.zero_grad()
        loss = net(x)
        if level is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()

    for index in range(steps):
        x = torch.tensor([0.5, 1.0], device=device) * (float('inf') if index == spoil else 1)
        run(index, x)
        if parts:
            optimizer.first_step(zero_grad=True)
            run(index, x)
            optimizer.second_step(zero_grad=True)
        else:
            optimizer.step(lambda x=x, index=index: run(index, x))
    return net.state_dict()['weight'].float().clone()


@pytest.mark.parametrize('parts', [True, False], ids=['parts', 'closure'])
@pytest.mark.parametrize('level', [level for level in LEVELS if level != 'O3'])
def test_two_part_steps(level: str, parts: bool, device: torch.device) -> None:
    """One step is exact at every level: the second pass sees the weights that the first one has moved."""
    assert torch.equal(train(level, parts, device, 1), train(None, parts, device, 1))
    assert not torch.equal(train(None, parts, device, 1), Curved().weight.detach().to(device))
    assert (train(level, parts, device) - train(None, parts, device)).abs().max() < 0.02


@pytest.mark.parametrize('parts', [True, False], ids=['parts', 'closure'])
@pytest.mark.parametrize('level', [level for level in LEVELS if level not in ('O0', 'O3')])
def test_an_overflow_skips_the_inner_step(level: str, parts: bool, device: torch.device) -> None:
    """Weights are what they would be without the batch, though the first part had moved them to NaN."""
    assert torch.equal(train(level, parts, device, 2, spoil=1), train(level, parts, device, 1))


@pytest.mark.parametrize('level', ['O1', 'O2'])
def test_the_scale_follows_inner_steps(level: str) -> None:
    """It learns from both passes: from the first when ``zero_grad`` drops its gradients, as with any that are not stepped."""
    net = Curved()
    optimizer = Sharp(net.parameters(), lr=0.5)
    scale = dict(init_scale=8.0, growth_interval=2)
    net, optimizer = amp.initialize(net, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
    found = []
    for x in (1.0, 1.0, float('inf'), 1.0):
        for part in (optimizer.first_step, optimizer.second_step):
            with amp.scale_loss(net(torch.tensor([x, x])), optimizer) as scaled:
                scaled.backward()
            part(zero_grad=True)
        found += scales(optimizer)
    assert found == [16.0, 32.0, 8.0, 16.0]


@pytest.mark.parametrize('level', [level for level in LEVELS if level != 'O3'])
def test_an_optimizer_around_another_steps_once(level: str) -> None:
    """The inner step of Lookahead's own is part of it: taken once, left out with it, counter and all."""

    def run(level: str | None) -> tuple[Tensor, int]:
        net = Net()
        inner = SGD(net.trained, lr=0.25, momentum=0.5)
        optimizer = Slow(inner)
        if level is not None:
            net, optimizer = amp.initialize(net, optimizer, opt_level=level, loss_scale=8, verbosity=0)
        for index in range(5):
            optimizer.zero_grad()
            loss = net(data(index))
            if index == 3:
                # left out at every level but O0, where nobody looks
                if level in (None, 'O0'):
                    continue
                loss = loss * float('inf')
            if level is None:
                loss.backward()
            else:
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            optimizer.step()
        return net.state_dict()['fc.weight'].clone(), optimizer.count

    expected, count = run(None)
    found, counted = run(level)
    assert torch.equal(found, expected) and counted == count == 4


def test_copies_and_pickles_are_plain() -> None:
    net = Curved()
    optimizer = Sharp(net.parameters(), lr=0.5)
    amp.initialize(net, optimizer, opt_level='O1', verbosity=0)
    assert 'step' in vars(optimizer.base_optimizer)
    assert 'step' not in optimizer.base_optimizer.__getstate__()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).float().square().mean()


@pytest.mark.parametrize('api', ['functional', 'mmengine'])
@pytest.mark.parametrize('level', LEVELS)
def test_gradients_with_a_graph(level: str, api: str, device: torch.device) -> None:
    """Refused where the graph would be that of other numbers, and nothing has changed; else second derivatives are right."""
    net = Twice().to(device)
    optimizer = SGD(net.parameters(), lr=0.5)
    policy = resolve(level)
    refused = bool(policy.master_weights) or level == 'O1'
    scale = 8 if level in ('O1', 'O2') else None
    x = torch.ones(2, 4, device=device)
    if api == 'functional':
        net, optimizer = amp.initialize(net, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
    else:
        wrapper = AmpOptimWrapper(scale, optimizer=optimizer, opt_level=level)
        wrapper.initialize_count_status(net, 0, 10)

    def backward(**kwargs: Any) -> None:
        if api == 'functional':
            with amp.scale_loss(net(x), optimizer) as scaled:
                scaled.backward(**kwargs)
        else:
            with wrapper.optim_context(net):
                loss = net(x)
            wrapper.backward(loss, **kwargs)

    if refused:
        with pytest.raises(AmpUsageError, match='create_graph') as error:
            backward(create_graph=True)
        assert "opt_level='O4'" in str(error.value) and 'autograd.grad' in str(error.value)
        assert all(p.grad is None for p in [*net.parameters(), *amp.master_params(optimizer)])
        backward()
        optimizer.step() if api == 'functional' else wrapper.step()
        return
    backward(create_graph=True)
    weight = net.fc.weight
    (second,) = torch.autograd.grad(weight.grad.float().sum(), weight)
    expected = Twice().to(device)
    expected.load_state_dict(net.state_dict())
    (gradient,) = torch.autograd.grad(expected(x), expected.fc.weight, create_graph=True)
    (wanted,) = torch.autograd.grad(gradient.sum(), expected.fc.weight)
    assert torch.allclose(second.float(), wanted, rtol=0.02)


@pytest.mark.parametrize('level', MASTERS)
def test_what_only_looks_like_an_optimizer(level: str) -> None:
    """schedulefree's wrapper, for one: the way out is to initialize what it is built around."""

    class Around:
        def __init__(self, base: Optimizer) -> None:
            self.base, self.param_groups = base, base.param_groups

        def step(self) -> None:
            self.base.step()

    net = Net()
    inner = SGD(net.trained, lr=0.25)
    with pytest.raises(TypeError, match='initialize the optimizer that it is built around'):
        amp.initialize(net, Around(inner), opt_level=level, verbosity=0)
    net, inner = amp.initialize(net, inner, opt_level=level, verbosity=0)
    set_scales(inner, 1.0)
    around = Around(inner)
    before = net.state_dict()['fc.weight'].clone()
    with amp.scale_loss(net(data(0)), inner) as scaled:
        scaled.backward()
    around.step()
    assert not torch.equal(net.state_dict()['fc.weight'], before)


class OwnForm(Slow):
    """Its file is not of torch's form, as that of pytorch_optimizer's Lookahead."""

    def state_dict(self) -> dict[str, Any]:
        return {
            'slow': [dict(s) for s in self.state.values()],
            'count': self.count,
            'base': self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state['base'])
        self.state, self.count = self.optimizer.state, state['count']


@pytest.mark.parametrize('level', LEVELS)
def test_resuming_an_optimizer_whose_file_has_a_form_of_its_own(level: str) -> None:
    """Through mmengine's wrapper: bit for bit, and what is missing is named."""

    def start() -> tuple[Net, AmpOptimWrapper]:
        net = Net()
        scale = 8.0 if level in ('O1', 'O2') else None
        wrapper = AmpOptimWrapper(scale, optimizer=OwnForm(SGD(net.trained, lr=0.25, momentum=0.5)), opt_level=level)
        wrapper.initialize_count_status(net, 0, 10)
        return net, wrapper

    def step(net: Net, wrapper: AmpOptimWrapper, index: int) -> None:
        with wrapper.optim_context(net):
            loss = net(data(index))
        wrapper.update_params(loss)

    net, wrapper = start()
    for index in range(3):
        step(net, wrapper, index)
    weights, state = copy.deepcopy(net.state_dict()), copy.deepcopy(wrapper.state_dict())
    step(net, wrapper, 3)
    again, other = start()
    again.load_state_dict(weights)
    other.load_state_dict(state)
    step(again, other, 3)
    assert other.optimizer.count == 4
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in net.state_dict().items())
    with pytest.raises(AmpCheckpointError, match="no key 'base'"):
        other.load_state_dict({key: value for key, value in state.items() if key != 'base'})


@pytest.mark.parametrize('level', LEVELS)
def test_a_graph_that_waits_while_another_optimizer_steps(level: str, device: torch.device) -> None:
    """The step of a discriminator leaves the graph of the generator, BatchNorm in it, as it is."""
    generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).to(device)
    critic = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).to(device)
    optimizers = SGD(generator.parameters(), lr=0.01), SGD(critic.parameters(), lr=0.01)
    (generator, critic), (own, other) = amp.initialize((generator, critic), optimizers, opt_level=level, verbosity=0)
    for _ in range(2):
        samples = generator(torch.randn(16, 4, device=device))
        other.zero_grad()
        with amp.scale_loss(critic(samples.detach()).mean(), other) as scaled:
            scaled.backward()
        other.step()
        own.zero_grad()
        with amp.scale_loss(critic(samples).square().mean(), own) as scaled:
            scaled.backward()
        own.step()
    assert all(torch.isfinite(parameter).all() for parameter in generator.parameters())
