"""Sharded tensors (``DTensor``): the part of each that lies on this rank, which the operations on lists work on."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a ``DTensor``. Does not load ``torch.distributed.tensor``: before that there are none."""
    module = sys.modules.get('torch.distributed.tensor')
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The local shard of each sharded tensor, which shares its memory; others as they are. Under ``torch.no_grad``."""
    return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """A tensor that every rank has: a sharded one is put together. Collective, for those of the mesh."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined, no-any-return]


def differs(tensor: Tensor, parameter: Tensor) -> str:
    """How a tensor that goes with a parameter is not laid out as that is; empty where it is.

    Args:
        tensor: Its gradient, or a moment.
        parameter: Sharded or not.
    """
    if is_sharded(tensor) is not is_sharded(parameter):
        kinds = {True: 'a DTensor', False: 'a plain tensor'}
        return f'is {kinds[is_sharded(tensor)]} and the parameter {kinds[is_sharded(parameter)]}'
    if not is_sharded(parameter):
        return ''
    mine: tuple[Any, Any] = (parameter.device_mesh, tuple(parameter.placements))  # type: ignore[attr-defined]
    theirs: tuple[Any, Any] = (tensor.device_mesh, tuple(tensor.placements))  # type: ignore[attr-defined]
    if mine == theirs:
        return ''
    return f'is laid out as {theirs[1]} over {theirs[0]}, and the parameter as {mine[1]} over {mine[0]}'
