"""Loss scales of several losses and of fused steps: which steps count for a scale, and how small it becomes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from amp_wrapper import AmpOptimWrapper, FusedSGD

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
