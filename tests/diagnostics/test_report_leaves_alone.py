"""What a report must not touch: the model itself, batches of objects; and errors that belong to one level."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_wrapper import AmpConfigError, amp
from amp_wrapper.openmmlab import from_config


def test_optimizers_are_made_for_copies() -> None:
    model = nn.Linear(4, 2)
    seen: list[nn.Module] = []

    def make(given: nn.Module) -> torch.optim.Optimizer:
        seen.append(given)
        given.bias.requires_grad_(False)
        return torch.optim.SGD(given.parameters(), lr=0.1)

    found = amp.report(model, torch.ones(3, 4), 'O2', make_optimizer=make)
    assert seen
    assert not any(each is model for each in seen)
    assert model.bias.requires_grad
    assert 'SGD' in found.json()


def test_batches_that_are_objects_stay_as_they_are() -> None:
    batch = SimpleNamespace(x=torch.ones(3, 4))
    losses: list[float] = []

    def loss_fn(model: nn.Module, given: Any) -> Tensor:
        given.x.mul_(10)
        losses.append(float(given.x.sum()))
        return model(given.x).float().square().mean()

    amp.report(nn.Linear(4, 2), batch, 'O5', loss_fn)
    assert torch.equal(batch.x, torch.ones(3, 4))
    assert set(losses) == {120.0}


def test_an_error_of_the_model_at_another_level_is_a_row() -> None:
    class Asserts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.fc(x)
            assert x.dtype is torch.float32, 'only FP32'
            return x

    found = amp.report(Asserts(), torch.ones(3, 4), 'O0')
    assert 'only FP32' in found.json()


@pytest.mark.parametrize('device', ['foo', 'cuda:99'])
def test_a_device_that_is_not_there(device: str) -> None:
    with pytest.raises(AmpConfigError, match=f'device={device!r}'):
        from_config._device(device)
