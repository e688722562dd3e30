"""Walks through lists of tensors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from ..shards import is_sharded
from ..torch_internals import is_traceable_wrapper_subclass

#: ``.grad`` and torch's version counter of a tensor, for ``map``: lists of them without a call of Python for each.
GRADIENT, VERSION = operator.attrgetter('grad'), operator.attrgetter('_version')


def places(tensors: Sequence[Tensor]) -> list[Any]:
    """Where the memory of each tensor begins; and how each lies there, where not all are contiguous."""
    found: list[Any] = list(map(Tensor.data_ptr, tensors))
    if not all(map(Tensor.is_contiguous, tensors)):
        found += [(tensor.shape, tensor.stride()) for tensor in tensors]
    return found


def gradients(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """``.grad`` of each tensor."""
    return list(map(GRADIENT, tensors))


def set_gradients(tensors: Sequence[Tensor], found: Sequence[Tensor | None] | None) -> None:
    """Set ``.grad`` of each tensor.

    Args:
        tensors: Leaves of the graph.
        found: One of its shape, dtype and device for each, or None; None in place of all clears all.
    """
    for tensor, gradient in zip(tensors, repeat(None) if found is None else found):
        tensor.grad = gradient


def float32_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A dense float32 tensor like each, whose memory nobody has written to."""
    return [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]


# -- layouts -----------------------------------------------------------------------------------------------------------


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of a tensor fill its memory, in whatever order; of a sharded one, those of this rank."""
    is_plain = is_sharded(tensor) or not is_traceable_wrapper_subclass(tensor)
    return is_plain and (tensor.is_contiguous() or torch.empty_like(tensor).stride() == tensor.stride())


def are_strided(tensors: Sequence[Tensor]) -> bool:
    """Whether no tensor is sparse."""
    return set(map(operator.attrgetter('layout'), tensors)) <= {torch.strided}


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """A tensor of its shape that lies where another one does, with the same strides; a copy where it does not."""
    if tensor.shape != other.shape or (tensor.device, tensor.stride()) == (other.device, other.stride()):
        return tensor
    return torch.empty_like(other, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
