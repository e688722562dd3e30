"""Walks through lists of tensors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects in the same order. ``==`` would compare the tensors' values, and sync."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def versions(tensors: Sequence[Tensor | None]) -> list[int]:
    """torch's version counter of each tensor, -1 for None."""
    return [-1 if tensor is None else tensor._version for tensor in tensors]


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Where the memory of each tensor begins."""
    return list(map(Tensor.data_ptr, tensors))


def gradients(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """``.grad`` of each tensor."""
    return [tensor.grad for tensor in tensors]


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
