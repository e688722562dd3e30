"""What the trace of infinities asks of the tensors that an op is given and gives. Most of it reads the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .recorder import tensors_of


def elements(shape: Sequence[int]) -> int:
    """How many a tensor of this shape has, and 1 for an empty one."""
    total = 1
    for size in shape:
        total *= size
    return max(total, 1)


def is_bad(tensor: Tensor) -> bool:
    """Whether it has infinities or NaN. Syncs."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return is_number and tensor.layout is torch.strided and not bool(tensor.isfinite().all())


def nonfinite(tensor: Tensor) -> int:
    """How many infinities and NaN it has. Syncs."""
    return int((~tensor.isfinite()).sum())


def is_measured(tensor: Tensor) -> bool:
    """Whether its ranges can be told."""
    return tensor.is_floating_point() and tensor.layout is torch.strided and tensor.numel() > 0


def is_part(tensor: Tensor) -> bool:
    """Whether its memory is larger than it: what stands beside it stays."""
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def numbers(value: Any) -> list[Tensor]:
    """The floating and complex tensors in nested containers."""
    return [tensor for tensor in tensors_of(value) if tensor.is_floating_point() or tensor.is_complex()]


def memory_of(tensor: Tensor) -> int:
    """The address of its storage, which views share; the id of a tensor without one."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except Exception:
        # sparse tensors, and those of subclasses, have no storage
        return id(tensor)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers."""
    yield from model.named_parameters()
    yield from model.named_buffers()
