"""What the tensors of a step have to be: for the compiled ops, and for the fused steps of ``torch.optim``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..errors import AmpUsageError
from ..ops.attributes import is_dense, like
from ..policy.nested import HALF_TYPES

_DTYPES = frozenset((torch.float32, *HALF_TYPES))
# devices for which torch.optim has fused steps
_TORCH_FUSES = frozenset(('cpu', 'cuda', 'mps', 'xpu'))


def served_by_ops(params: Sequence[Tensor]) -> bool:
    """Return whether the compiled ops step parameters: dense, of one device, and of types that they know."""
    devices = {parameter.device for parameter in params}
    known = all(parameter.dtype in _DTYPES and is_dense(parameter) for parameter in params)
    return known and len(devices) == 1 and ops.serves(devices.pop())


def served_by_torch(params: Sequence[Tensor]) -> bool:
    """Return whether torch's fused steps take parameters. Those of 16 bits on CPUs it steps wrong, seen in 2.6 to 2.13."""
    kinds = {(parameter.dtype, parameter.device.type) for parameter in params}
    known = all(dtype.is_floating_point and device in _TORCH_FUSES for dtype, device in kinds)
    on_cpus = any(dtype in HALF_TYPES and device == 'cpu' for dtype, device in kinds)
    return known and not on_cpus and all(map(is_dense, params))


def lay_out(state: dict[Any, dict[str, Any]], params: Sequence[Tensor], moments: Sequence[str], is_fused: bool) -> None:
    """Give moments the types and layouts of their parameters, as torch's steps take them, and fused ones their counts.

    Args:
        state: Of the optimizer, in place.
        params: Of one group.
        moments: Names in the state.
        is_fused: Whether the step is.

    Raises:
        AmpUsageError: A moment of another shape.
    """
    for parameter in params:
        own = state.get(parameter, {})
        for name in [name for name in moments if own.get(name) is not None]:
            if own[name].shape != parameter.shape:
                shapes = f'{tuple(own[name].shape)} beside a parameter of shape {tuple(parameter.shape)}'
                raise AmpUsageError(f'state[{name!r}] has shape {shapes}: remove state that does not fit.')
            own[name] = like(own[name].to(parameter.dtype), parameter)
        if is_fused and 'step' in own:
            own['step'] = count_of(own['step'], parameter)


def count_of(value: Any, parameter: Tensor, copy: bool = False) -> Tensor:
    """Return a number of steps as the ops take it: a float32 scalar on the device of the parameter."""
    found = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
    return found.reshape(()).to(parameter.device, torch.float32, copy=copy)
