"""``zero_grad(set_to_none=False)``: what got a gradient before is stepped with zeros from then on, as in FP32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import same_bits
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from toy_amp import LEVELS, backward

from amp_wrapper import AmpOptimWrapper, FusedAdamW, FusedSGD, amp

MASTERS = ('O2', 'O5')
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    'SGD': lambda parameters: SGD(parameters, lr=0.125, momentum=0.5, weight_decay=0.25),
    'AdamW': lambda parameters: AdamW(parameters, lr=0.125, weight_decay=0.25),
    'FusedSGD': lambda parameters: FusedSGD(parameters, lr=0.125, momentum=0.5, weight_decay=0.25),
    'FusedAdamW': lambda parameters: FusedAdamW(parameters, lr=0.125, weight_decay=0.25),
}
WRAPPERS: dict[str, dict[str, Any]] = {
    'one loss': {},
    'sums in FP32': dict(accumulate_in_fp32=True),
    'two losses': dict(num_losses=2),
}
#: Which of three heads gets a gradient; None for a step that clears to None before it.
STEPS: tuple[int | None, ...] = (0, 1, 0, 1, None, 0, 0, 1, 0)


def heads(device: torch.device) -> nn.ModuleList:
    torch.manual_seed(0)
    made = nn.ModuleList(nn.Linear(2, 2) for _ in range(3)).to(device)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(64).round_().div_(64)
    return made


def run(make: Callable[[Any], Optimizer], device: torch.device, by: str, level: str | None = None, **words: Any) -> Any:
    """The FP32 values after each step."""
    net = heads(device)
    optimizer = make(net.parameters())
    wrapper = None
    if by == 'wrapper':
        scale = words.pop('loss_scale', 8.0)
        wrapper = AmpOptimWrapper(opt_level=level, optimizer=optimizer, verbosity=0, loss_scale=scale, **words)
        wrapper.attach(net)
    elif level is not None:
        amp.initialize(net, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)
    x, found = torch.ones(1, 2, device=device), []
    for chosen in STEPS:
        clear: Any = net if by == 'model' else wrapper or optimizer
        clear.zero_grad(set_to_none=chosen is None)
        loss = net[chosen or 0](x).float().sum()
        if wrapper is not None:
            wrapper.backward(loss)
            wrapper.step()
        elif level is not None:
            backward(loss, optimizer)
            optimizer.step()
        else:
            loss.backward()
            optimizer.step()
        found.append({name: value.float().clone() for name, value in net.state_dict().items()})
    return found


def same(ours: Any, expected: Any) -> bool:
    return all(same_bits(mine[name], theirs[name]) for mine, theirs in zip(ours, expected) for name in theirs)


@pytest.mark.parametrize('level', [level for level in LEVELS if level != 'O3'])
@pytest.mark.parametrize('by', ['optimizer', 'model'])
@pytest.mark.parametrize('kind', OPTIMIZERS)
def test_in_scripts(kind: str, by: str, level: str, device: torch.device) -> None:
    make = OPTIMIZERS[kind]
    assert same(run(make, device, by, level), run(make, device, 'optimizer'))


@pytest.mark.parametrize('level', MASTERS)
@pytest.mark.parametrize('way', WRAPPERS)
@pytest.mark.parametrize('kind', OPTIMIZERS)
def test_in_wrappers(kind: str, way: str, level: str, device: torch.device) -> None:
    make = OPTIMIZERS[kind]
    assert same(run(make, device, 'wrapper', level, **WRAPPERS[way]), run(make, device, 'optimizer'))


@pytest.mark.parametrize('level', MASTERS)
@pytest.mark.parametrize('sums', [False, True])
@pytest.mark.parametrize('kind', ['FusedSGD', 'FusedAdamW'])
def test_of_split_masters(kind: str, sums: bool, level: str, device: torch.device) -> None:
    make = OPTIMIZERS[kind]
    words = dict(master_weights='split', accumulate_in_fp32=sums)
    # within a unit of float16's remainders
    for mine, theirs in zip(run(make, device, 'wrapper', level, **words), run(make, device, 'optimizer')):
        assert all(torch.allclose(mine[name], theirs[name], rtol=2e-6, atol=1e-6) for name in theirs)


@pytest.mark.parametrize('level', MASTERS)
def test_zeros_are_where_scripts_look(level: str, device: torch.device) -> None:
    net = heads(device)
    optimizer = OPTIMIZERS['SGD'](net.parameters())
    amp.initialize(net, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)
    backward(net[0](torch.ones(1, 2, device=device)).sum(), optimizer)
    optimizer.zero_grad(set_to_none=False)
    masters = list(amp.master_params(optimizer))
    for tensors in (masters, list(net.parameters())):
        grads = [tensor.grad for tensor in tensors]
        assert [grad is None for grad in grads] == [False] * 2 + [True] * 4
        assert not any(bool(grad.any()) for grad in grads if grad is not None)


@pytest.mark.parametrize('level', LEVELS)
def test_a_gradient_without_a_scale_is_stepped_though_the_next_block_does_not_reach_it(
    level: str, device: torch.device
) -> None:
    net, x = heads(device), torch.ones(1, 2, device=device)
    optimizer = SGD(net.parameters(), lr=0.125)
    amp.initialize(net, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)
    before = net.state_dict()['0.bias'].clone()
    net[0](x).sum().backward()
    backward(net[1](x).sum(), optimizer)
    optimizer.step()
    assert torch.equal(net.state_dict()['0.bias'], before - 0.125)
