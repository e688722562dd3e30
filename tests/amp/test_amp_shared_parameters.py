"""Parameters of two optimizers, parameters that come and go, and losses that reach another session.

Everything is held, bit for bit, against plain FP32 training that leaves the skipped steps out.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from bits import differing
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from toy_amp import (
    HALF,
    LEVELS,
    MASTERS,
    Net,
    backward,
    check_rounded,
    data,
    scales,
    set_scales,
    sgd,
    values,
    zero,
)

from amp_wrapper import amp

INF = math.inf


@pytest.mark.parametrize('level', LEVELS)
def test_one_model_of_two_optimizers(level: str, device: torch.device) -> None:
    """Each steps some of its parameters; every loss reaches all of them."""

    def train(at: str | None) -> tuple[Net, list[Optimizer]]:
        net = Net().to(device)
        optimizers: list[Optimizer] = [SGD([net.fc.weight], 0.25, 0.5), SGD([net.bn.weight], 0.5, 0.5)]
        if at is not None:
            amp.initialize(net, optimizers, opt_level=at, loss_scale='dynamic', verbosity=0, num_losses=2)
            set_scales(optimizers[0], 4.0, 16.0)
        for index in range(3):
            zero('model', optimizers, [net])
            for loss_id in range(2):
                loss = net(data(index + loss_id, device))
                if at is None:
                    loss.backward()
                else:
                    backward(loss, optimizers, loss_id)
            for optimizer in optimizers:
                optimizer.step()
        return net, optimizers

    (plain, theirs), (run, ours) = train(None), train(level)
    check_rounded([run], level)
    wanted, found = values([plain], theirs), values([run], ours)
    assert [key for key in differing(wanted, found) if level not in MASTERS or 'net' not in key] == []


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('way', ['joint', 'apart'])
def test_parameters_of_two_optimizers(level: str, way: str, device: torch.device) -> None:
    """Both step the same weights: gradients arrive once, whichever of the two a pass is meant for."""

    def train(at: str | None) -> tuple[Net, list[Optimizer]]:
        net, own = Net().to(device), Net(2).to(device)
        optimizers: list[Optimizer] = [sgd([net]), sgd([net, own])]
        if at is not None:
            amp.initialize([net, own], optimizers, opt_level=at, loss_scale='dynamic', verbosity=0)
            set_scales(optimizers[0], 4.0)
        for index in range(3):
            zero('optimizer', optimizers, [])
            for each in range(2):
                loss = net(data(index + each, device)) + own(data(index, device))
                if at is None:
                    loss.backward()
                else:
                    backward(loss, optimizers if way == 'joint' else optimizers[each])
            for optimizer in optimizers:
                optimizer.step()
        return net, optimizers

    (plain, theirs), (run, ours) = train(None), train(level)
    check_rounded([run], level)
    wanted, found = values([plain], theirs), values([run], ours)
    assert [key for key in differing(wanted, found) if level not in MASTERS or 'net' not in key] == []


@pytest.mark.parametrize('first', [0, 1])
@pytest.mark.parametrize('level', LEVELS)
def test_overflows_at_parameters_of_two_optimizers(level: str, first: int, device: torch.device) -> None:
    """A pass for one of them voids what the other one would step as well; only its own scale learns."""
    net, own = Net().to(device), Net(2).to(device)
    optimizers: list[Optimizer] = [sgd([net]), sgd([net, own])]
    amp.initialize([net, own], optimizers, opt_level=level, loss_scale='dynamic', verbosity=0, num_losses=2)
    set_scales(optimizers[0], 4.0, 16.0)
    before = values([net, own], optimizers)
    for place in (first, 1 - first):
        if place == 0:
            backward(net(data(0, device)), optimizers[0], 0, net.fc.weight)
        else:
            backward(net(data(1, device)) + own(data(1, device)), optimizers[1], 1)
    for optimizer in reversed(optimizers):
        optimizer.step()
    assert differing(before, values([net, own], optimizers)) == []
    assert scales(optimizers[0]) == [2.0, 16.0]


@pytest.mark.parametrize('level', LEVELS)
def test_parameters_that_come_and_go(level: str, device: torch.device) -> None:
    """Without a gradient, frozen at the start, frozen and unfrozen between steps."""

    def train(at: str | None) -> tuple[list[Net], Optimizer]:
        nets = [Net().to(device), Net(2).to(device), Net(3).to(device)]
        nets[1].requires_grad_(False)
        optimizer = sgd(nets)
        if at is not None:
            amp.initialize(nets, optimizer, opt_level=at, loss_scale='dynamic', verbosity=0)
            set_scales(optimizer, 4.0)
        for index in range(5):
            if index == 2:
                nets[1].requires_grad_(True)
            if index == 3:
                nets[0].fc.requires_grad_(False)
            optimizer.zero_grad()
            loss = nets[0](data(index, device)) + nets[1](data(index, device))
            if at is None:
                loss.backward()
            else:
                backward(loss, optimizer)
            optimizer.step()
        return nets, optimizer

    (plain, theirs), (run, ours) = train(None), train(level)
    wanted, found = values(plain, [theirs]), values(run, [ours])
    check_rounded(run, level)
    assert [key for key in differing(wanted, found) if level not in MASTERS or 'net' not in key] == []
    assert all(p.grad is None for p in run[2].parameters())


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('how', ['optimizer', 'model', 'none'])
def test_sparse_embeddings(level: str, how: str, device: torch.device) -> None:
    """Rows that occur twice are summed; an infinity in one is found."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(6, 2, sparse=True)
            with torch.no_grad():
                self.rows.weight.copy_(torch.arange(12.0).view(6, 2) / 4)

        def forward(self, index: Tensor, x: Tensor) -> Tensor:
            return (self.rows(index).float() * x).sum()

    def train(at: str | None) -> tuple[Words, Optimizer]:
        model = Words().to(device)
        optimizer = SGD(model.parameters(), 0.25)
        if at is not None:
            amp.initialize(model, optimizer, opt_level=at, loss_scale='dynamic', verbosity=0, num_losses=2)
            set_scales(optimizer, 4.0, 16.0)
        for index in range(4):
            zero(how, [optimizer], [model])
            for each in range(2):
                x = data(index, device)
                loss = model(torch.tensor([each, 2, 2, index], device=device), x)
                if at is None:
                    loss.backward()
                elif index == 1 and each == 0:
                    with amp.scale_loss(loss, optimizer, each) as scaled:
                        scaled.backward()
                        assert model.rows.weight.grad is not None
                        model.rows.weight.grad._values()[1, 0] = INF
                else:
                    backward(loss, optimizer, each)
            grads = [p.grad for p in amp.master_params(optimizer)]
            assert all(grad is not None and grad.is_sparse for grad in grads)
            if at is not None or index != 1:
                optimizer.step()
        return model, optimizer

    (_, theirs), (run, ours) = train(None), train(level)
    (wanted,), (found,) = theirs.param_groups[0]['params'], amp.master_params(ours)
    assert torch.equal(wanted, found.float())
    assert run.rows.weight.dtype is HALF.get(level, torch.float32)
    assert scales(ours) == [2.0, 16.0]


# -- several sessions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('levels', list(itertools.product(LEVELS, LEVELS)))
def test_two_sessions(levels: tuple[str, str], device: torch.device) -> None:
    """Other levels and other scales, losses of their own, and one that is meant for optimizers of both."""

    def train(at: tuple[str, str] | None) -> tuple[list[Net], list[Optimizer]]:
        nets = [Net().to(device), Net(2).to(device)]
        optimizers = [sgd([net]) for net in nets]
        if at is not None:
            for place in range(2):
                amp.initialize(nets[place], optimizers[place], opt_level=at[place], loss_scale='dynamic', verbosity=0)
                set_scales(optimizers[place], 4.0 * 4**place)
        for index in range(5):
            zero(('optimizer', 'model')[index % 2], optimizers, nets)
            x = data(index, device)
            if at is None:
                (nets[0](x) + nets[1](x)).backward()
                (nets[0](x * 2) + nets[1](x)).backward()
            else:
                backward(nets[0](x), optimizers[0], 0, nets[0].bn.weight if index == 1 else None)
                backward(nets[1](x), optimizers[1])
                # the scale of the first one holds, and learns
                hit = {2: nets[0].fc.weight, 3: nets[1].bn.weight}.get(index)
                backward(nets[0](x * 2) + nets[1](x), optimizers, poisoned=hit)
            for place, optimizer in enumerate(optimizers):
                if at is not None or not (index in (2, 3) or (index == 1 and place == 0)):
                    optimizer.step()
        return nets, optimizers

    (plain, theirs), (run, ours) = train(None), train(levels)
    for place, level in enumerate(levels):
        wanted, found = (values([nets[place]], [opts[place]]) for nets, opts in ((plain, theirs), (run, ours)))
        assert [key for key in differing(wanted, found) if level not in MASTERS or 'net' not in key] == []
        check_rounded([run[place]], level)
    assert scales(ours[0]) == [0.5] and scales(ours[1]) == [16.0]


@pytest.mark.parametrize('cleared', [True, False])
@pytest.mark.parametrize('levels', [('O2', 'O2'), ('O1', 'O2'), ('O2', 'O1'), ('O5', 'O0'), ('O3', 'O4')])
def test_losses_that_reach_another_session(levels: tuple[str, str], cleared: bool, device: torch.device) -> None:
    """A generator and a discriminator that were initialised apart: gradients carry no foreign scale."""

    def train(at: tuple[str, str] | None) -> tuple[list[Net], list[Optimizer]]:
        nets = [Net().to(device), Net(2).to(device)]
        optimizers = [sgd([net]) for net in nets]
        for place in range(2 if at is not None else 0):
            assert at is not None
            amp.initialize(nets[place], optimizers[place], opt_level=at[place], loss_scale='dynamic', verbosity=0)
            set_scales(optimizers[place], 4.0 * 4**place)
        for index in range(3):
            zero('optimizer', optimizers, nets)
            x = data(index, device)
            losses = [nets[0](x) + nets[1](x), nets[1](x * 2)]
            for place, loss in enumerate(losses):
                if at is None:
                    loss.backward()
                else:
                    backward(loss, optimizers[place])
                if cleared and place == 0:
                    optimizers[1].zero_grad()
            for optimizer in optimizers:
                optimizer.step()
        return nets, optimizers

    (plain, theirs), (run, ours) = train(None), train(levels)
    wanted, found = values(plain, theirs), values(run, ours)
    assert [key for key in differing(wanted, found) if 'net' not in key] == []
    assert scales(ours[0]) == [4.0] and scales(ours[1]) == [16.0]
