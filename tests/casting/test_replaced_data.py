"""Weights whose ``.data`` was replaced, or written to between the cast and the first step: the next step goes on from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.optim import SGD

from amp_wrapper import AmpOptimWrapper, FusedSGD, amp

MASTERS = {'O2': torch.float16, 'O5': torch.bfloat16}
#: No number of 16 bits.
FINE = 1 / 3


class Run:
    """A model whose gradients are 1, with a learning rate of 0 where nothing else is said."""

    def __init__(self, api: str, level: str, device: torch.device, lr: float = 0.0, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(4, 4, bias=False).to(device)
        self.exact = self.net.weight.detach().clone()
        kind = FusedSGD if options else SGD
        self.optimizer = kind(self.net.parameters(), lr=lr)
        self.wrapper = None
        if api == 'amp':
            amp.initialize(self.net, self.optimizer, opt_level=level, verbosity=0, loss_scale=8.0)
        else:
            words = dict(opt_level=level, optimizer=self.optimizer, loss_scale=8.0, verbosity=0, **options)
            self.wrapper = AmpOptimWrapper(**words)
            self.wrapper.attach(self.net)

    def forward(self) -> Tensor:
        device = self.net.weight.device
        loss: Tensor = self.net(torch.ones(1, 4, device=device)).sum()
        return loss

    def step(self) -> None:
        if self.wrapper is not None:
            self.wrapper.update_params(self.forward())
            return
        self.optimizer.zero_grad()
        with amp.scale_loss(self.forward(), self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()

    @property
    def master(self) -> Tensor:
        master: Tensor = self.optimizer.param_groups[0]['params'][0]
        return master

    def check(self, expected: Tensor) -> None:
        """Of the master, to all of its bits."""
        assert torch.equal(self.net.state_dict()['weight'], expected)
        assert torch.equal(self.net.weight, expected.to(self.net.weight.dtype))


def by_vector(net: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(net.parameters()).detach() * 0.25, net.parameters())


def by_fp32_vector(net: nn.Module) -> None:
    vector_to_parameters(torch.full((16,), FINE, device=next(net.parameters()).device), net.parameters())


def by_pruning(net: nn.Module) -> None:
    prune.l1_unstructured(net, 'weight', amount=8)
    prune.remove(net, 'weight')


def by_data(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.data = torch.full_like(parameter, 0.5)


@pytest.mark.parametrize('level', MASTERS)
@pytest.mark.parametrize('api', ['amp', 'wrapper'])
@pytest.mark.parametrize('steps', [0, 1])
@pytest.mark.parametrize('replace', [by_vector, by_fp32_vector, by_pruning, by_data])
def test_replaced_data_is_stepped(
    replace: Callable[[nn.Module], None], steps: int, api: str, level: str, device: torch.device
) -> None:
    run = Run(api, level, device)
    for _ in range(steps):
        run.step()
    replace(run.net)
    values = run.net.weight.detach().float().clone()
    # elements that are what they were keep what their masters have beyond 16 bits
    same = values == run.exact.to(MASTERS[level]).float()
    run.step()
    assert run.net.weight.dtype is MASTERS[level]
    run.check(torch.where(same, run.exact, values))


@pytest.mark.parametrize('level', MASTERS)
@pytest.mark.parametrize('api', ['amp', 'wrapper'])
def test_replaced_data_is_saved(api: str, level: str, device: torch.device) -> None:
    run = Run(api, level, device)
    run.step()
    by_data(run.net)
    run.check(torch.full_like(run.exact, 0.5))


@pytest.mark.parametrize('level', MASTERS)
@pytest.mark.parametrize('api', ['amp', 'wrapper'])
def test_another_address_alone_is_no_edit(api: str, level: str, device: torch.device) -> None:
    run = Run(api, level, device)
    run.step()
    run.net.weight.data = run.net.weight.data.clone()
    run.step()
    run.check(run.exact)
    with torch.no_grad():
        run.master.mul_(2)
    # on a CPU the weights get other memory
    run.net.share_memory()
    run.step()
    run.check(run.exact * 2)


EDITS: dict[str, Callable[[Run], None]] = {
    'weight.data': lambda run: run.net.weight.data.fill_(0.5),
    'a permutation': lambda run: run.net.weight.data.copy_(run.net.weight.data.flip(0)),
    'one element': lambda run: run.net.weight.data.view(-1)[3:4].fill_(0.5),
    'loaded and weight.data': lambda run: (
        run.net.load_state_dict({'weight': run.exact * FINE}),
        run.net.weight.data.fill_(0.5),
    ),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize('level', MASTERS)
@pytest.mark.parametrize('api', ['amp', 'wrapper', 'fused', 'split'])
@pytest.mark.parametrize('edit', EDITS)
def test_weights_written_to_before_the_first_step(edit: str, api: str, level: str, device: torch.device) -> None:
    options = {'fused': dict(master_weights=True), 'split': dict(master_weights='split')}.get(api, {})
    run = Run(api, level, device, **options)
    EDITS[edit](run)
    values = run.net.weight.detach().float().clone()
    run.step()
    if edit == 'one element':
        # the rest is exact, but where masters are split: there an edit counts for the whole tensor
        values = torch.where(values == 0.5, values, values if api == 'split' else run.exact)
    if (edit, api) == ('loaded and weight.data', 'split'):
        # the remainder is that of the loaded numbers
        assert torch.equal(run.net.weight.float(), values)
    else:
        run.check(values)


@pytest.mark.parametrize('level', MASTERS)
@pytest.mark.parametrize('api', ['amp', 'wrapper', 'fused', 'split'])
@pytest.mark.parametrize('loads', [False, True])
def test_what_nobody_wrote_to_stays_exact(loads: bool, api: str, level: str, device: torch.device) -> None:
    options = {'fused': dict(master_weights=True), 'split': dict(master_weights='split')}.get(api, {})
    run = Run(api, level, device, **options)
    if loads:
        run.exact = run.exact * FINE * 8
        run.net.load_state_dict({'weight': run.exact})
    run.step()
    run.step()
    run.check(run.exact)


@pytest.mark.parametrize('level', MASTERS)
@pytest.mark.parametrize('api', ['amp', 'wrapper'])
@pytest.mark.parametrize('way', ['data', 'no_grad', 'both sides', 'data after a forward'])
def test_masters_written_to_before_the_first_step_keep_what_they_got(
    way: str, api: str, level: str, device: torch.device
) -> None:
    run = Run(api, level, device)
    if way == 'both sides':
        run.net.weight.data.fill_(0.5)
    if way == 'data after a forward':
        run.forward()
    if 'data' in way:
        run.master.data.fill_(FINE)
    else:
        with torch.no_grad():
            run.master.fill_(FINE)
    if way != 'data after a forward':
        run.forward()
        assert torch.equal(run.net.weight, torch.full_like(run.net.weight, FINE))
    run.step()
    run.check(torch.full_like(run.exact, FINE))


@pytest.mark.parametrize('level', MASTERS)
def test_graphs_from_before_the_first_call_of_the_model_stay_in_order(level: str, device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)).to(device)
    optimizer = SGD(net.parameters(), lr=0.5)
    amp.initialize(net, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)
    x = torch.ones(1, 2, device=device)
    # both hold weights or masters, which the first call compares
    part = net[1](x).sum() + sum(p.square().sum() for p in amp.master_params(optimizer))
    with amp.scale_loss(part + net(x).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert all(torch.equal(p, v.to(p.dtype)) for p, v in zip(net.parameters(), net.state_dict().values(), strict=True))
