"""Whole training steps as ``torch.cuda.graph`` takes them: captured once, and run again without any Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import differences
from captured import captured
from torch import Tensor, nn

from amp_wrapper import AmpOptimWrapper, FusedAdamW, FusedSGD, amp

LEVELS = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')


class Net(nn.Module):
    """With statistics, which a skipped step gives back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x)))).float().square().mean()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    'FusedAdamW': lambda parameters: FusedAdamW(parameters, lr=0.01),
    'FusedSGD': lambda parameters: FusedSGD(parameters, lr=0.01, momentum=0.9),
    'AdamW of torch': lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    'a rate on the device': lambda parameters: FusedAdamW(parameters, lr=torch.tensor(0.01)),
}


def batches(device: torch.device) -> list[Tensor]:
    """Nine, of which one overflows in 16-bit, and one has NaN."""
    torch.manual_seed(1)
    found = [torch.randn(6, 4) for _ in range(9)]
    found[4] = found[4] * 1e30
    found[6][0, 0] = float('nan')
    return [x.to(device) for x in found]


def trained(
    api: str, level: str, optimizer: str, device: torch.device, captures: bool, clip: float | None
) -> dict[str, Any]:
    """The state after all batches: the first two steps as they are, the third captured, the others replayed."""
    torch.manual_seed(0)
    model = Net().to(device)
    made = OPTIMIZERS[optimizer](model.parameters())
    scale = dict(init_scale=256.0, growth_interval=2) if level in ('O1', 'O2', 'O3') else None
    wrapper: Any = None
    if api == 'wrapper':
        wrapper = AmpOptimWrapper(
            opt_level=level,
            optimizer=made,
            loss_scale=scale,
            verbosity=0,
            skip_nonfinite=True,
            clip_grad=None if clip is None else dict(max_norm=clip),
        )
        wrapper.initialize_count_status(model, 0, 100)
    else:
        amp.initialize(model, made, opt_level=level, loss_scale=scale, verbosity=0)
    x = torch.zeros(6, 4, device=device)
    rate = made.param_groups[0]['lr']

    def step() -> None:
        if wrapper is not None:
            with wrapper.optim_context(model):
                loss = model(x)
            wrapper.update_params(loss)
        else:
            with amp.scale_loss(model(x), made) as scaled:
                scaled.backward()
            made.step()
            made.zero_grad()

    graph: Any = None
    for number, data in enumerate(batches(device)):
        x.copy_(data)
        if isinstance(rate, Tensor):
            # a schedule that writes to where the graph reads
            rate.fill_(0.01 / (1 + number))
        if captures and graph is None and number == 2:
            with captured() as graph:
                step()
        elif graph is not None:
            graph.replay()
        else:
            step()
    found: dict[str, Any] = {f'model.{name}': tensor for name, tensor in model.state_dict().items()}
    steps = wrapper._engine if wrapper is not None else None
    for place, state in enumerate(made.state.values()):
        found |= {f'{name}.{place}': value for name, value in state.items() if isinstance(value, Tensor)}
    scaler = steps.scalers[0] if steps is not None else None
    if scaler is not None:
        found['scale'] = scaler.current_scale
    else:
        found |= {f'amp.{key}': value for key, value in amp.state_dict().items() if key == 'loss_scaler0'}
    return found


@pytest.mark.parametrize('clip', [None, 0.05])
@pytest.mark.parametrize('optimizer', OPTIMIZERS)
@pytest.mark.parametrize('level', LEVELS)
def test_replayed_steps_are_those_of_eager_training(
    level: str, optimizer: str, clip: float | None, device: torch.device
) -> None:
    """Bit for bit: dynamic scaling, skips, clipping, statistics that are given back, a schedule on the device."""
    eager = trained('wrapper', level, optimizer, device, False, clip)
    replayed = trained('wrapper', level, optimizer, device, True, clip)
    assert differences(eager, replayed) == []
    if level == 'O2':
        # one growth, and two batches that were left out
        assert eager['scale'].item() == 256.0 * 2**3 / 4


@pytest.mark.parametrize('optimizer', ['FusedAdamW', 'AdamW of torch'])
@pytest.mark.parametrize('level', LEVELS)
def test_replayed_steps_of_a_script(level: str, optimizer: str, device: torch.device) -> None:
    """As above, with ``amp.scale_loss``: gradients are unscaled at each backward pass."""
    eager = trained('script', level, optimizer, device, False, None)
    replayed = trained('script', level, optimizer, device, True, None)
    assert differences(eager, replayed) == []


def test_an_optimizer_that_has_to_wait_is_noticed(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that reads no flag from the device makes the host wait, which no graph can have in it."""
    monkeypatch.setitem(OPTIMIZERS, 'FusedSGD', lambda parameters: torch.optim.SGD(parameters, lr=0.01, foreach=True))
    with pytest.raises(AssertionError, match='the host reads the device'):
        trained('wrapper', 'O2', 'FusedSGD', device, True, None)
