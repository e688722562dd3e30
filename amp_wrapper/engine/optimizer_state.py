"""The state of optimizers that step 16-bit weights, and its types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..policy.nested import parameters_of


def cast_state_to_parameters(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Give the optimizer state of 16-bit parameters their type, as ``Optimizer.load_state_dict`` would have.

    State that was loaded while the parameters were still FP32 is FP32; without masters (O3), training goes on in
    16-bit, so the state must be what it was when it was saved. ``step`` counters keep their type.

    Args:
        optimizer: Its state is changed in place.
        parameters: 16-bit parameters that the optimizer steps itself.
    """
    for parameter in parameters:
        state = optimizer.state.get(parameter) or {}
        for key, value in state.items():
            # counters and running products keep their type; only what has an entry per element follows the parameter
            is_moment = isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape
            if is_moment and key != 'step':
                state[key] = value.to(parameter.dtype)


def keep_scalar_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give scalar state of 16-bit parameters back the type it was saved in, which torch casts while loading.

    Args:
        optimizer: Has just loaded ``saved``.
        saved: The state dict.
    """
    keys = [key for group in saved['param_groups'] for key in group['params']]
    for key, parameter in zip(keys, parameters_of(optimizer)):
        # ZeroRedundancyOptimizer has None for what other ranks step
        state = optimizer.state.get(parameter) or {}
        for name, value in saved['state'].get(key, {}).items():
            now, is_scalar = state.get(name), isinstance(value, Tensor) and value.shape != parameter.shape
            if is_scalar and isinstance(now, Tensor) and now.dtype != value.dtype:
                state[name] = value.detach().to(now.device, copy=True)
