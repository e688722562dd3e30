"""Losses that contain FP32 masters: their gradients there are unscaled once, and added to those that come through the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bits import differing
from torch import Tensor
from torch.optim import Optimizer
from toy_amp import LEVELS, Net, backward, data, gradients, make, poison, set_scales, sgd, values

from amp_wrapper import amp


def penalty(optimizer: Optimizer) -> Tensor:
    return sum((p.square().sum() for p in amp.master_params(optimizer)), torch.zeros(())) / 2


def loss(way: str, net: Net, optimizer: Optimizer, index: int) -> Tensor:
    device = net.fc.weight.device
    through = net(data(index, device))
    return {
        'masters': penalty(optimizer).to(device),
        'model': through,
        'both': penalty(optimizer).to(device) + through,
    }[way]


WAYS: dict[str, list[str]] = {
    'masters alone': ['masters'],
    'in one loss': ['both'],
    'one after the other': ['model', 'masters'],
    'and the other way round': ['masters', 'both', 'model'],
}


@pytest.mark.parametrize('level', [level for level in LEVELS if level != 'O3'])
@pytest.mark.parametrize('way', WAYS)
def test_as_fp32_does_in_bits(way: str, level: str, device: torch.device) -> None:
    ours, theirs = make(level, device, loss_scale=256.0), make(None, device)
    for _ in range(2):
        for _, optimizer in (ours, theirs):
            optimizer.zero_grad()
        for index, part in enumerate(WAYS[way]):
            backward(loss(part, *ours, index), ours[1])
            loss(part, *theirs, index).backward()
        for mine, other in zip(gradients([ours[1]]), gradients([theirs[1]]), strict=True):
            assert (mine is None) == (other is None)
            assert mine is None or other is None or torch.equal(mine, other)
        for _, optimizer in (ours, theirs):
            optimizer.step()
    wrong = differing(values([], [ours[1]]), values([], [theirs[1]]))
    assert wrong == []


@pytest.mark.parametrize('level', ['O2', 'O5'])
def test_several_optimizers_and_losses(level: str, device: torch.device) -> None:
    nets = [Net().to(device), Net(2).to(device)]
    optimizers = [sgd([net]) for net in nets]
    plain = [Net().to(device), Net(2).to(device)]
    theirs = [sgd([net]) for net in plain]
    amp.initialize(nets, optimizers, opt_level=level, verbosity=0, num_losses=2)
    set_scales(optimizers[0], 8.0, 256.0)
    for loss_id in (0, 1, 0):
        backward(sum(loss('both', n, o, loss_id) for n, o in zip(nets, optimizers)), optimizers, loss_id)
        sum(loss('both', n, o, loss_id) for n, o in zip(plain, theirs)).backward()  # type: ignore[union-attr]
    for mine, other in zip(gradients(optimizers), gradients(theirs), strict=True):
        assert mine is not None and other is not None and torch.equal(mine, other)


@pytest.mark.parametrize('level', ['O2', 'O5'])
@pytest.mark.parametrize('fails', ['inside', 'create_graph'])
def test_after_an_exception_gradients_are_what_they_were(fails: str, level: str, device: torch.device) -> None:
    net, optimizer = make(level, device, loss_scale=256.0)
    backward(loss('both', net, optimizer, 0), optimizer)
    before: list[Any] = gradients([optimizer])

    def fail() -> None:
        with amp.scale_loss(loss('both', net, optimizer, 1), optimizer) as scaled:
            scaled.backward(create_graph=fails == 'create_graph')
            if fails == 'inside':
                raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    for now, then in zip(gradients([optimizer]), before, strict=True):
        assert torch.equal(now, then)  # type: ignore[arg-type]


@pytest.mark.parametrize('level', ['O2', 'O5'])
def test_gradients_cleared_inside_a_block_are_gone(level: str, device: torch.device) -> None:
    net, optimizer = make(level, device, loss_scale=256.0)
    backward(loss('both', net, optimizer, 0), optimizer)
    with amp.scale_loss(loss('both', net, optimizer, 1), optimizer) as scaled:
        optimizer.zero_grad()
        scaled.backward()
    plain, theirs = make(None, device)
    loss('both', plain, theirs, 1).backward()
    for mine, other in zip(gradients([optimizer]), gradients([theirs]), strict=True):
        assert mine is not None and other is not None and torch.equal(mine, other)


@pytest.mark.parametrize('level', ['O2', 'O5'])
def test_an_overflow_there_skips_the_step(level: str, device: torch.device) -> None:
    net, optimizer = make(level, device)
    before = values([net], [optimizer])
    master = next(amp.master_params(optimizer))
    with amp.scale_loss(loss('masters', net, optimizer, 0), optimizer) as scaled:
        scaled.backward()
        poison(master)
    optimizer.step()
    assert differing(before, values([net], [optimizer])) == [] and amp.loss_scale(optimizer) == 4.0
