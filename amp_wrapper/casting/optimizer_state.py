"""The state of optimizers that step 16-bit weights: its types, and settings that 16-bit cannot hold."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import AmpAttachError
from ..policy.levels import dtype_name
from ..policy.nested import HALF_TYPES, parameters_of
from ..policy.options import is_number

logger = logging.getLogger('amp_wrapper')


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
            if (
                isinstance(value, Tensor)
                and value.is_floating_point()
                and value.shape == parameter.shape
                and key != 'step'
            ):
                state[key] = value.to(parameter.dtype)


def warn_of_lost_eps(optimizer: Optimizer, dtype: torch.dtype) -> None:
    """float16 has no 1e-8: Adam's default eps is 0 there, and the first update divides by zero.

    Args:
        optimizer: Steps weights of type ``dtype`` without masters.
        dtype: A 16-bit type.
    """
    lost = {
        float(group['eps'])
        for group in optimizer.param_groups
        if is_number(group.get('eps'))
        and group['eps'] > 0
        and dtype in HALF_TYPES
        and float(torch.tensor(group['eps'], dtype=dtype)) == 0
    }
    if lost:
        logger.warning(
            f'amp: {type(optimizer).__name__} steps {dtype_name(dtype)} weights without masters, and eps={min(lost):g} is 0 '
            f'in that type: the weights will become NaN. Write eps=1e-4, or use O2.'
        )


def keep_scalar_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give scalar state of 16-bit parameters back the type it was saved in, which torch casts while loading.

    Args:
        optimizer: Has just loaded ``saved``.
        saved: The state dict.
    """
    keys = [key for group in saved['param_groups'] for key in group['params']]
    for key, parameter in zip(keys, parameters_of(optimizer)):
        for name, value in saved['state'].get(key, {}).items():
            if isinstance(value, Tensor) and value.shape != parameter.shape:
                # ZeroRedundancyOptimizer has None for what other ranks step
                loaded = (optimizer.state.get(parameter) or {}).get(name)
                if isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                    optimizer.state[parameter][name] = value.detach().to(loaded.device, copy=True)


def check_steps_split(optimizer: Optimizer) -> None:
    """Refuse optimizers that would step 16-bit weights without their remainders.

    Raises:
        AmpAttachError: Not one of this package's fused optimizers.
    """
    if not getattr(type(optimizer), 'supports_split_weights', False):
        raise AmpAttachError(
            f"master_weights='split' with {type(optimizer).__name__}: only FusedAdam, FusedAdamW and FusedSGD of amp_wrapper "
            f'step a weight and its remainder together. Use one of them, or master_weights=True.'
        )
