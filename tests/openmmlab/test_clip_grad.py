"""``clip_grad`` of the wrapper: changed between steps, and as an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bits import same
from torch import Tensor, nn

from amp_wrapper import AmpOptimWrapper, FusedSGD

LEVELS = ('O0', 'O2', 'O4', 'O5')
OPTIMIZERS = {'fused': FusedSGD, 'torch': torch.optim.SGD}


def wrapper(level: str, optimizer: str, device: torch.device, **words: Any) -> tuple[AmpOptimWrapper, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(device)
    made = OPTIMIZERS[optimizer](model.parameters(), lr=1.0)
    return AmpOptimWrapper(opt_level=level, optimizer=made, verbosity=0, **words), model


def update(wrapped: AmpOptimWrapper, model: nn.Module, value: float, device: torch.device) -> None:
    with wrapped.optim_context(model):
        loss = model(torch.full((2, 4), value, device=device)).float().sum()
    wrapped.update_params(loss)


def values(wrapped: AmpOptimWrapper) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in wrapped.master_params()]


@pytest.mark.parametrize('change', [dict(max_norm=5.0), dict(norm_type=1.0), dict(norm_type='inf')], ids=str)
@pytest.mark.parametrize('optimizer', OPTIMIZERS)
@pytest.mark.parametrize('level', LEVELS)
def test_what_changes_in_the_dict_counts_from_the_next_step(
    level: str, optimizer: str, change: dict[str, Any], device: torch.device
) -> None:
    """Hooks change ``clip_grad_kwargs`` in place, and so do schedules of the limit."""
    words = {} if level == 'O0' else dict(loss_scale=8.0)
    changed, model = wrapper(level, optimizer, device, clip_grad=dict(max_norm=0.01), **words)
    fresh, unchanged = wrapper(level, optimizer, device, clip_grad=dict(max_norm=0.01), **words)
    for each, module in ((changed, model), (fresh, unchanged)):
        update(each, module, 1.0, device)
    changed.clip_grad_kwargs.update(change)
    update(changed, model, 2.0, device)
    update(fresh, unchanged, 2.0, device)
    assert not same(values(changed), values(fresh))
    # a dict of its own in its place does the same
    replaced, third = wrapper(level, optimizer, device, clip_grad=dict(max_norm=0.01), **words)
    update(replaced, third, 1.0, device)
    replaced.clip_grad_kwargs = {**replaced.clip_grad_kwargs, **change}
    update(replaced, third, 2.0, device)
    assert same(values(changed), values(replaced))


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
@pytest.mark.parametrize('level', LEVELS)
def test_error_if_nonfinite_is_turned_on_later(level: str, optimizer: str, device: torch.device) -> None:
    words = {} if level == 'O0' else dict(loss_scale=1.0)
    wrapped, model = wrapper(level, optimizer, device, clip_grad=dict(max_norm=1.0), **words)
    update(wrapped, model, 1.0, device)
    wrapped.clip_grad_kwargs['error_if_nonfinite'] = True
    with pytest.raises(RuntimeError, match='non-finite'):
        update(wrapped, model, torch.nan, device)


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
@pytest.mark.parametrize('level', LEVELS)
def test_training_goes_on_after_the_error(level: str, optimizer: str, device: torch.device) -> None:
    """Also where the very first step raises; nothing is written then."""
    words = {} if level == 'O0' else dict(loss_scale=8.0)
    clip = dict(max_norm=1.0, error_if_nonfinite=True)
    wrapped, model = wrapper(level, optimizer, device, clip_grad=clip, **words)
    fresh, other = wrapper(level, optimizer, device, clip_grad=clip, **words)
    with pytest.raises(RuntimeError, match='non-finite'):
        update(wrapped, model, torch.nan, device)
    wrapped.zero_grad()
    for each, module in ((wrapped, model), (fresh, other)):
        update(each, module, 1.0, device)
        update(each, module, 2.0, device)
    assert same(values(wrapped), values(fresh))
