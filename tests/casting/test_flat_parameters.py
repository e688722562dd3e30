"""Optimizers over one flat parameter that shares memory with a model's weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from toy_amp import LEVELS

from amp_wrapper import AmpAttachError, AmpOptimWrapper, amp

CASTS = ('O2', 'O3', 'O5')


def network(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(device)


def flatten(net: nn.Module, spare: int = 0) -> nn.Parameter:
    """One parameter of all weights, and some more elements; weights and their gradients become views of it."""
    weights = list(net.parameters())
    flat = nn.Parameter(torch.cat([w.data.flatten() for w in weights] + [weights[0].new_ones(spare)]))
    flat.grad = torch.zeros_like(flat)
    start = 0
    for weight in weights:
        end = start + weight.numel()
        weight.data, weight.grad = flat.data[start:end].view_as(weight), flat.grad[start:end].view_as(weight)
        start = end
    return flat


def take(api: str, net: nn.Module, optimizer: Optimizer, level: str) -> Any:
    if api == 'amp':
        return amp.initialize(net, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=optimizer, verbosity=0, loss_scale=1.0)
    wrapper.attach(net)
    return wrapper


def losses(net: nn.Module, optimizer: Optimizer, wrapper: Any = None) -> list[float]:
    found = []
    for index in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(index)).to(next(net.parameters()).device)
        optimizer.zero_grad(set_to_none=False)
        loss: Tensor = net(x).float().square().mean()
        found.append(float(loss.detach()))
        if wrapper is None:
            loss.backward()
            optimizer.step()
        elif isinstance(wrapper, AmpOptimWrapper):
            wrapper.backward(loss)
            wrapper.step()
        else:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
    return found


@pytest.mark.parametrize('level', CASTS)
@pytest.mark.parametrize('api', ['amp', 'wrapper'])
@pytest.mark.parametrize('of', ['the model', 'its first layer'])
def test_refused_where_the_cast_breaks_the_sharing(of: str, api: str, level: str, device: torch.device) -> None:
    net = network(device)
    flat = flatten(net if of == 'the model' else net[0])
    optimizer: Optimizer = SGD([flat, *(net[1].parameters() if of != 'the model' else ())], lr=0.1)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(AmpAttachError, match=r'share memory with weights of the model.*model\.parameters\(\).*O4'):
        take(api, net, optimizer, level)
    now = net.state_dict()
    assert all(torch.equal(value, now[name]) and now[name].dtype is torch.float32 for name, value in before.items())
    assert optimizer.param_groups[0]['params'][0] is flat and flat.data_ptr() == net[0].weight.data_ptr()
    # and goes on in FP32
    first, *_, last = losses(net, optimizer)
    assert last < first


@pytest.mark.parametrize('level', [level for level in LEVELS if level not in CASTS])
def test_trained_where_weights_are_not_cast(level: str, device: torch.device) -> None:
    net, plain = network(device), network(device)
    optimizer, theirs = SGD([flatten(net)], lr=0.1), SGD([flatten(plain)], lr=0.1)
    session = take('amp', net, optimizer, level)
    ours, expected = losses(net, optimizer, session), losses(plain, theirs)
    assert ours == pytest.approx(expected, rel=0.05) and ours[-1] < ours[0]


@pytest.mark.parametrize('level', CASTS)
@pytest.mark.parametrize('api', ['amp', 'wrapper'])
@pytest.mark.parametrize('kind', ['tied', 'views of one memory', 'tied by .data', 'neighbours in one memory'])
def test_what_holds_the_weights_is_never_refused(kind: str, api: str, level: str, device: torch.device) -> None:
    net = network(device)
    extra: list[nn.Parameter] = []
    if kind == 'tied':
        net.append(nn.Linear(2, 4)).append(nn.Linear(4, 4))
        net[3].weight = net[0].weight
    elif kind == 'tied by .data':
        net.append(nn.Linear(2, 4)).append(nn.Linear(4, 4))
        net[3].weight.data = net[0].weight.data
    else:
        flat = flatten(net, spare=3)
        for weight in net.parameters():
            weight.grad = None
        if kind != 'views of one memory':
            extra = [nn.Parameter(flat.data[-3:])]
    net.to(device)
    # beside a neighbour, weights that nobody steps
    held = net[1] if extra else net
    optimizer = SGD([*held.parameters(), *extra], lr=0.1)
    take(api, net, optimizer, level)
    assert net[1].weight.dtype is (torch.bfloat16 if level == 'O5' else torch.float16)
