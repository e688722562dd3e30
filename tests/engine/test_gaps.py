"""What planted faults (``planted_faults.py``) showed that no other test would notice."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from amp_wrapper import AmpOptimWrapper, FusedSGD, amp
from amp_wrapper.engine.buffers import snapshots as buffer_snapshots

TINY = torch.finfo(torch.float32).tiny


def test_the_scale_never_reaches_zero_in_a_fused_step(device: torch.device) -> None:
    """Without a floor the smallest scale is the smallest normal number, whoever takes the step."""
    model = nn.Linear(2, 2).to(device)
    wrapper = AmpOptimWrapper(
        opt_level='O2',
        optimizer=FusedSGD(model.parameters(), lr=0.1),
        loss_scale=dict(init_scale=4 * TINY),
        max_consecutive_skips=None,
        verbosity=0,
    )
    scales = []
    for _ in range(4):
        with wrapper.optim_context(model):
            loss = model(torch.full((1, 2), math.inf, device=device)).sum()
        wrapper.update_params(loss)
        scales.append(wrapper.loss_scaler.get_scale())
    assert scales == [2 * TINY, TINY, TINY, TINY]


class Large(nn.Module):
    """A buffer so large that it is not copied at each step."""

    total: Tensor

    def __init__(self, beside: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer('total', torch.zeros(buffer_snapshots.LARGE // 4 + 1))
        if beside:
            # the small ones of a module share the fate of its large ones
            self.register_buffer('seen', torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.total += x.detach().sum()
            for buffer in self.buffers():
                if buffer is not self.total:
                    buffer += 1
        return x * self.weight


@pytest.mark.parametrize('beside', [False, True])
def test_nan_in_a_large_buffer_is_taken_back(beside: bool, device: torch.device) -> None:
    model = Large(beside).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level='O1', verbosity=0, loss_scale=dict(init_scale=1.0))
    for _ in range(2):
        with amp.scale_loss(model(torch.ones(1, 3, device=device)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    before = [buffer.clone() for buffer in model.buffers()]
    # a pass from which no step comes
    model(torch.full((1, 3), math.nan, device=device))
    assert model.total.isnan().all()
    model(torch.ones(1, 3, device=device))
    assert model.total.equal(before[0] + 3)
    assert [buffer.item() for buffer in list(model.buffers())[1:]] == [buffer.item() + 1 for buffer in before[1:]]


@pytest.mark.parametrize('optimizer', [FusedSGD, torch.optim.SGD])
@pytest.mark.parametrize('level', ['O1', 'O2'])
def test_a_scale_counts_the_steps_of_its_own_loss(
    level: str, optimizer: type[torch.optim.Optimizer], device: torch.device
) -> None:
    """A loss that had no backward pass since the last step has shown nothing about its scale."""
    model = nn.Linear(2, 2).to(device)
    wrapper = AmpOptimWrapper(
        opt_level=level,
        optimizer=optimizer(model.parameters(), lr=0.1),  # type: ignore[call-arg]
        loss_scale=dict(init_scale=4.0, growth_interval=3),
        num_losses=2,
        verbosity=0,
    )
    for loss_id in (0, 0, 1, 0, 1):
        with wrapper.optim_context(model):
            loss = model(torch.ones(1, 2, device=device)).sum()
        wrapper.update_params(loss, loss_id=loss_id)
    states = [scaler.state_dict() for scaler in wrapper.loss_scalers]
    assert [(state['scale'], state['_growth_tracker'], state['steps']) for state in states] == [
        (8.0, 0, 5),
        (4.0, 2, 5),
    ]


def test_momentum_that_a_skipped_step_made_is_not_saved(device: torch.device) -> None:
    """torch's SGD would take its zeros for a momentum that was begun, and dampen the first gradient."""
    weight = nn.Parameter(torch.ones(3, device=device))
    mine = FusedSGD([weight], lr=0.5, momentum=0.5, dampening=0.5)
    weight.grad = torch.full_like(weight, math.inf)
    mine.found_inf = torch.ones((), device=device)  # type: ignore[attr-defined]
    mine.step()
    assert mine.state_dict()['state'] == {}
    theirs = torch.optim.SGD([weight], lr=0.5, momentum=0.5, dampening=0.5)
    theirs.load_state_dict(mine.state_dict())
    weight.grad = torch.ones_like(weight)
    theirs.step()
    assert weight.tolist() == [0.5, 0.5, 0.5]
