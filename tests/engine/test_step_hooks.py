"""What hooks behind ``optimizer.step()`` write, to masters or to weights, is written last and stays."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from toy_masters import MASTERED, OPTIMIZERS, Ours

LIMIT = 0.0625  # exact in every type
#: Only fused optimizers step split weights.
WAYS = [
    *itertools.product(MASTERED, ('amp', 'wrapper'), OPTIMIZERS),
    *itertools.product(MASTERED, ('split',), ('FusedAdamW',)),
]


@torch.no_grad()
def clamp(tensors: Any) -> None:
    for tensor in tensors:
        tensor.clamp_(-LIMIT, LIMIT)


def per_object(ours: Ours, hook: Callable[..., None]) -> Any:
    return ours.optimizer.register_step_post_hook(hook)


def for_all(ours: Ours, hook: Callable[..., None]) -> Any:
    return register_optimizer_step_post_hook(hook)


@pytest.mark.parametrize('register', [per_object, for_all])
@pytest.mark.parametrize('side', ['masters', 'weights'])
@pytest.mark.parametrize(('level', 'interface', 'optimizer'), WAYS)
def test_hooks_behind_a_step_write_last(
    level: str, interface: str, optimizer: str, side: str, register: Any, device: torch.device
) -> None:
    ours = Ours(level, interface, optimizer, device)
    seen: list[bool] = []

    def hook(stepped: Any, args: Any, kwargs: Any) -> None:
        # the weights are those of this step already, and so is what the hook writes
        seen.append(all(torch.equal(w, m.to(w.dtype)) for w, m in zip(ours.weights, ours.masters)))
        clamp(getattr(ours, side))

    handle = register(ours, hook)
    try:
        for _ in range(2):
            ours.forward()
            ours.backward()
            ours.step()
    finally:
        handle.remove()
    assert seen == [True, True]
    assert not ours.optimizer._optimizer_step_post_hooks
    ours.forward()
    sides: list[Tensor] = [*ours.weights, *ours.masters]
    assert all(side.abs().max() <= LIMIT for side in sides)
    assert all(torch.equal(weight, master.to(weight.dtype)) for weight, master in zip(ours.weights, ours.masters))
