"""What the tensors of a step have to be: for the compiled ops, and for the fused steps of ``torch.optim``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..policy.nested import HALF_TYPES
from ..shards import is_sharded
from ..torch_internals import is_traceable_wrapper_subclass

_DTYPES = frozenset((torch.float32, *HALF_TYPES))
# devices for which torch.optim has fused steps
_TORCH_FUSES = frozenset(('cpu', 'cuda', 'mps', 'xpu'))


def served_by_ops(params: Sequence[Tensor]) -> bool:
    """Return whether the compiled ops step parameters: dense, of one device, and of types that they know."""
    devices = {parameter.device for parameter in params}
    known = all(parameter.dtype in _DTYPES and _is_dense(parameter) for parameter in params)
    return known and len(devices) == 1 and ops.serves(devices.pop())


def served_by_torch(params: Sequence[Tensor]) -> bool | None:
    """Return whether parameters that torch's fused steps take are contiguous; None for others.

    16-bit ones on CPUs are among these: torch steps them wrong, seen in 2.6 to 2.13.
    """
    kinds = {(parameter.dtype, parameter.device.type) for parameter in params}
    known = all(dtype.is_floating_point and device in _TORCH_FUSES for dtype, device in kinds)
    on_cpus = any(dtype in HALF_TYPES and device == 'cpu' for dtype, device in kinds)
    return all(map(Tensor.is_contiguous, params)) if known and not on_cpus else None


def are_dense(grads: Sequence[Tensor]) -> bool:
    """Return whether no gradient is sparse."""
    return {grad.layout for grad in grads} <= {torch.strided}


def count_of(value: Any, parameter: Tensor, copy: bool = False) -> Tensor:
    """Return a number of steps as the ops take it: a float32 scalar on the device of the parameter."""
    found = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
    return found.reshape(()).to(parameter.device, torch.float32, copy=copy)


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a tensor of its shape that lies where a parameter does, with the same strides; a copy where it does not."""
    if tensor.shape != parameter.shape or (tensor.device, tensor.stride()) == (parameter.device, parameter.stride()):
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def _is_dense(parameter: Tensor) -> bool:
    """Return whether the ops can walk through the memory of a parameter, in whatever order its elements are."""
    is_plain = is_sharded(parameter) or not is_traceable_wrapper_subclass(parameter)
    return is_plain and (parameter.is_contiguous() or torch.empty_like(parameter).stride() == parameter.stride())
