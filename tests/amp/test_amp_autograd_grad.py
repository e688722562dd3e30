"""Gradients that torch.autograd.grad takes of a scaled loss: right inside of the block, warned of where they come after it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from toy_amp import LEVELS, Net, data, logged, scaled, zero

from amp_wrapper import amp


def put(net: Net, gradients: list[Tensor]) -> None:
    for parameter, gradient in zip(net.trained, gradients, strict=True):
        parameter.grad = gradient


def step(net: Net, optimizer: Optimizer, way: str, index: int = 0) -> None:
    zero('optimizer', [optimizer], [net])
    device = net.fc.weight.device
    x = data(index, device).requires_grad_()
    with amp.scale_loss(net(x), optimizer) as scaled_loss:
        if way == 'backward':
            scaled_loss.backward(inputs=net.trained)
        elif way == 'of an input':
            torch.autograd.grad(scaled_loss, x, retain_graph=True)
            scaled_loss.backward()
        else:
            found = list(torch.autograd.grad(scaled_loss, net.trained))
            if way == 'inside':
                put(net, found)
    if way == 'divided':
        put(net, [gradient / 8 for gradient in found])
    elif way == 'divided in place':
        put(net, [gradient.div_(8) for gradient in found])
    elif way == 'after':
        put(net, found)
    optimizer.step()


@pytest.mark.parametrize('level', LEVELS)
def test_one_warning_where_they_are_put_there_after_the_block(level: str, device: torch.device) -> None:
    net, optimizer = scaled(level, device)
    with logged() as lines:
        for index in range(3):
            step(net, optimizer, 'after', index)
    assert len(lines) == 1 and 'inside of the block, or divide' in lines[0] and 'torch.autograd.grad' in lines[0]


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('way', ['inside', 'divided', 'divided in place', 'backward', 'of an input'])
def test_what_is_right_is_not_warned_of(way: str, level: str, device: torch.device) -> None:
    net, optimizer = scaled(level, device)
    plain, theirs = Net().to(device), None
    theirs = torch.optim.SGD(plain.trained, lr=0.25, momentum=0.5)
    with logged() as lines:
        for index in range(3):
            step(net, optimizer, way, index)
            theirs.zero_grad()
            plain(data(index, device)).backward()
            theirs.step()
    assert lines == []
    for ours, expected in zip(amp.master_params(optimizer), plain.trained, strict=True):
        assert torch.equal(ours.float(), expected)


@pytest.mark.parametrize('level', LEVELS)
def test_no_warning_without_a_scale_or_in_silence(level: str, device: torch.device) -> None:
    for verbosity, scale in ((1, 1.0), (0, 8.0)):
        net, optimizer = scaled(level, device, verbosity, scale)
        with logged() as lines:
            step(net, optimizer, 'after')
        assert lines == []
