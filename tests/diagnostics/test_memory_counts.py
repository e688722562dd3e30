"""Counted bytes of a training step, against what a reader would count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp_wrapper.diagnostics.memory import MemoryCount, SavedBytes, bytes_of, count_memory
from amp_wrapper.diagnostics.sandbox import sandbox
from amp_wrapper.optim import FusedAdamW
from amp_wrapper.policy import resolve

#: Of Linear(8, 4): 36 numbers; BatchNorm1d(4): 8 of parameters, 8 of statistics, and a counter of 8 bytes.
FC, NORM, STATISTICS, COUNTER = 36, 8, 8, 8


@pytest.mark.parametrize(
    ('level', 'options', 'weights', 'masters', 'state_each'),
    [
        ('O0', {}, 4 * (FC + NORM), 0, 4),
        ('O4', {}, 4 * (FC + NORM), 0, 4),
        ('O2', {}, 2 * FC + 4 * NORM, 4 * FC, 4),
        ('O5', {'master_weights': 'split'}, 2 * FC + 4 * NORM, 2 * FC, 4),
    ],
)
def test_a_step_at_each_kind_of_level(
    level: str, options: dict[str, Any], weights: int, masters: int, state_each: int, device: torch.device
) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).to(device)
    with sandbox(model, resolve(level, **options), lambda m: FusedAdamW(m.parameters(), lr=0.1)) as box:
        box.engine.backward(box.model(torch.ones(2, 8, device=device)).square().mean())
        box.engine.step()
        found = count_memory(box.model, box.engine, activations=100)
    assert found.weights == found.gradients == weights
    assert found.masters == masters
    assert found.buffers == 4 * STATISTICS + COUNTER
    # two moments of each number; the step counts are a few bytes
    assert 0 <= found.optimizer_state - 2 * state_each * (FC + NORM) <= 4 * 8
    assert found.total == sum(value for name, value in found.plain().items() if name != 'total')


def test_frozen_weights_have_no_gradient() -> None:
    model = nn.Linear(8, 4)
    model.bias.requires_grad_(False)
    assert count_memory(model) == MemoryCount(4 * 36, 0, 0, 0, 4 * 32, 0)


def test_what_is_kept_for_the_backward_pass_counts_once(device: torch.device) -> None:
    weight = nn.Linear(8, 8, bias=False).to(device)
    x = torch.randn(16, 8, device=device)
    with SavedBytes(weight) as saved:
        # keeps x, and not its weight; the product keeps its result, once; the sum keeps nothing
        out = weight(x)
        loss = (out * out).sum()
    assert saved.total == 2 * 16 * 8 * 4
    loss.backward()
    with SavedBytes(weight) as saved, torch.no_grad():
        F.relu(weight(x))
    assert saved.total == 0


def test_shared_memory_counts_once() -> None:
    x = torch.zeros(10)
    assert bytes_of([x, x, x[2:], x.view(5, 2), torch.zeros(3)]) == 52
