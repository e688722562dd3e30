"""Accumulations of backward passes under DistributedDataParallel, in a group of one process: what waits, and on which scale."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from toy_amp import network

from amp_wrapper import amp
from amp_wrapper.casting.param_pairs import ParamPairs
from amp_wrapper.engine.gradients.per_backward import UnscaledGradients

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason='this torch was built without torch.distributed'
)
LEVELS = ('O1', 'O2', 'O4', 'O5')


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.25)


def passed(model: nn.Module, optimizers: object, factor: float) -> None:
    loss = model(torch.tensor([[1.0, 2.0]])).sum() * factor
    with amp.scale_loss(loss, optimizers) as scaled:  # type: ignore[arg-type]
        scaled.backward()


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in amp.master_params(optimizer)]


def are(found: list[Tensor | None], factor: float) -> bool:
    wanted = [torch.tensor([[factor, 2 * factor]]), torch.tensor([factor])]
    return all(a is not None and torch.equal(a, b) for a, b in zip(found, wanted))


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('views', [False, True])
def test_a_sum_does_not_lie_in_the_buckets_of_the_next_pass(group: None, level: str, views: bool) -> None:
    model = network()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=views)
    for count, factor in enumerate((1.0, 0.5, 2.0)):
        passed(ddp, optimizer, factor)
        assert are(gradients(optimizer), (1.0, 1.5, 3.5)[count])
    with pytest.raises(KeyError), amp.scale_loss(ddp(torch.ones(1, 2)).sum(), optimizer) as scaled:
        _fail_after(scaled)
    assert are(gradients(optimizer), 3.5)


def _fail_after(scaled: Tensor) -> None:
    scaled.backward()
    raise KeyError


@pytest.mark.parametrize('level', ('O1', 'O2'))
def test_what_is_held_keeps_its_scale_while_another_step_moves_it(group: None, level: str) -> None:
    first, second = network(), network()
    optimizers = [sgd(first), sgd(second)]
    start = dict(init_scale=64.0)
    amp.initialize([first, second], optimizers, opt_level=level, loss_scale=start, verbosity=0)
    ddp = DistributedDataParallel(first)
    with ddp.no_sync():
        passed(ddp, optimizers[0], 1.0)
    passed(second, optimizers[1], float('inf'))
    optimizers[1].step()
    assert amp.state_dict()['loss_scaler0']['loss_scale'] == 32.0
    loss = ddp(torch.tensor([[1.0, 2.0]])).sum() * 0.5
    with amp.scale_loss(loss, optimizers[0]) as scaled:
        assert scaled.item() == loss.item() * 64.0
        scaled.backward()
    assert are(gradients(optimizers[0]), 1.5)
    optimizers[0].step()
    optimizers[0].zero_grad()
    passed(ddp, optimizers[0], 0.25)
    assert are(gradients(optimizers[0]), 0.25)


def test_clearing_inside_the_pass_that_averages_clears_what_was_held() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([64.0])
    arrivals = UnscaledGradients(keeps=True)

    def arrive(value: float, averaged: bool, clears: bool = False) -> None:
        scale = torch.tensor(4.0)
        with arrivals.unscaling([], [parameter], 0, scale, averaged, None, lambda: None):
            if clears:
                arrivals.clear(ParamPairs(None))
                parameter.grad = None
            arrived = torch.tensor([value])
            parameter.grad = arrived if parameter.grad is None else parameter.grad + arrived

    arrive(8.0, averaged=False)
    assert arrivals.held is not None and parameter.grad.item() == 8.0
    arrive(4.0, averaged=True, clears=True)
    # of the 64 from before the accumulation and the 8 inside of it nothing is left
    assert arrivals.held is None and parameter.grad.item() == 1.0


@pytest.mark.parametrize('level', LEVELS)
def test_an_optimizer_that_is_named_twice_is_named_once(level: str) -> None:
    model = network()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    for factor in (1.0, float('nan'), 0.5):
        optimizer.zero_grad()
        passed(model, [optimizer, optimizer], factor)
        optimizer.step()
    assert model.weight.tolist() == [[0.5 - 0.375, -1.0 - 0.75]]


def test_an_optimizer_that_is_named_twice_holds_its_gradients_once(group: None) -> None:
    model = network()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level='O2', loss_scale=8.0, verbosity=0)
    ddp = DistributedDataParallel(model)
    with ddp.no_sync():
        passed(ddp, [optimizer, optimizer], 1.0)
    passed(ddp, [optimizer, optimizer], 0.5)
    assert are(gradients(optimizer), 1.5)
