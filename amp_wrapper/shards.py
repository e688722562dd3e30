"""Sharded tensors (``DTensor``): the part of each that lies on this rank, which the operations on lists work on."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from .errors import AmpUsageError


def rank() -> int:
    """Give the rank of this process; 0 where it is alone."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if several else 0


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a ``DTensor``. Does not load ``torch.distributed.tensor``: before that there are none."""
    module = sys.modules.get('torch.distributed.tensor')
    return module is not None and isinstance(tensor, module.DTensor)


def any_sharded(tensors: Iterable[Any]) -> bool:
    """As :func:`is_sharded` of each; costs next to nothing."""
    module = sys.modules.get('torch.distributed.tensor')
    return module is not None and module.DTensor in set(map(type, tensors))


def local(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The local shard of each sharded tensor, which shares its memory; others as they are. Under ``torch.no_grad``."""
    if not any_sharded(tensors):
        return list(tensors)
    return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]


def local_part(tensor: Tensor | None) -> Tensor | None:
    """The local shard of a sharded tensor, which shares its memory; another one, and None, as it is."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[union-attr, no-any-return]


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """The shards of a whole tensor that every rank has, laid out as another one is. No communication.

    Args:
        value: Whole, of any type; not changed.
        like: Sharded, of the same shape.

    Returns:
        A sharded tensor of the type of ``value``, on the device of ``like``, with memory of its own.
    """
    module: Any = sys.modules['torch.distributed.tensor']
    mesh, placements = _layout_of(like)
    here = value.detach().to(like.device)
    repeated: Any = module.DTensor.from_local(here, mesh, [module.Replicate()] * mesh.ndim, run_check=False)
    # a part of the whole would keep all of it in memory
    return repeated.redistribute(placements=placements).clone()  # type: ignore[no-any-return]


def fitted(value: Tensor, like: Tensor) -> Tensor:
    """A copy of a gradient that was saved, of the type and device of what it belongs to, and laid out as that is.

    Args:
        value: Whole or sharded; not changed.
        like: Its parameter.
    """
    if is_sharded(like) and not is_sharded(value):
        return shard_like(value.to(like.dtype), like)
    return value.to(like.device, like.dtype, copy=True)


class Layout:
    """On which ranks the elements of some tensors lie, and how those ranks talk.

    Args:
        tensors: Sharded and not; what is not is taken to be the same on every rank.

    Raises:
        AmpUsageError: Meshes of which none has all ranks.

    Attributes:
        groups: Exchanging over each in turn reaches all ranks; one group, unless a mesh of several dimensions is only a part of
            all processes. Empty where nothing is sharded.
        replicas: Of each tensor: on how many of the ranks each of its elements lies.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.groups: list[ProcessGroup] = []
        self.replicas = [1] * len(tensors)
        if not any_sharded(tensors):
            return
        meshes = dict.fromkeys(each.device_mesh for each in tensors if is_sharded(each))  # type: ignore[attr-defined]
        widest: Any = max(meshes, key=lambda mesh: int(mesh.size()))
        self.replicas = [widest.size() // _count_parts(tensor) for tensor in tensors]
        for mesh in meshes:
            if not set(widest.mesh.flatten().tolist()).issuperset(mesh.mesh.flatten().tolist()):
                raise AmpUsageError(f'one optimizer needs one mesh, or parts of one, not {mesh} beside {widest}.')
        self._device = widest.device_type
        world = torch.distributed.group.WORLD
        self.groups = [world] if world is not None and world.size() == widest.size() else widest.get_all_groups()

    def exchange(self, numbers: Tensor, greatest: bool = False) -> Tensor:
        """The sums of numbers over the ranks. Collective, where there are any groups.

        Args:
            numbers: float64, one-dimensional; not changed.
            greatest: The largest of the ranks in place of the sum.

        Returns:
            On the device of ``numbers``; the same on every rank.
        """
        if not self.groups:
            return numbers
        found = numbers.to(self._device, copy=True)
        for group in self.groups:
            torch.distributed.all_reduce(found, ReduceOp.MAX if greatest else ReduceOp.SUM, group=group)
        return found.to(numbers.device)


def _count_parts(tensor: Tensor) -> int:
    """On how many ranks the parts of a tensor lie."""
    mesh, placements = _layout_of(tensor) or (None, ())
    # the strided shards of tensor parallelism below fully_shard say False to is_shard()
    sharded = [dim for dim, each in enumerate(placements) if not each.is_replicate() and not each.is_partial()]
    return math.prod(int(mesh.size(dim)) for dim in sharded)


def whole(tensor: Tensor) -> Tensor:
    """A tensor that every rank has: a sharded one is put together. Collective, for those of the mesh."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined, no-any-return]


def local_like(tensors: Sequence[Tensor], parameters: Sequence[Tensor], name: str) -> list[Tensor]:
    """The local shards of tensors that go with parameters, as :func:`local`.

    Args:
        tensors: Gradients, or moments.
        parameters: Of each.
        name: What they are, for the error.

    Raises:
        AmpUsageError: One is laid out otherwise than its parameter.
    """
    for index, layouts in enumerate(zip(map(_layout_of, tensors), map(_layout_of, parameters))):
        if layouts[0] != layouts[1]:
            shown = [f'laid out as {each[1]} over {each[0]}' if each else 'a plain tensor' for each in layouts]
            raise AmpUsageError(
                f'{name}[{index}] is {shown[0]}, and its parameter {shown[1]}: redistribute() makes them agree, and '
                f'set_optimizer_state_dict of torch.distributed.checkpoint.state_dict loads sharded state.'
            )
    return local(tensors)


def _layout_of(tensor: Any) -> tuple[Any, ...]:
    """The mesh and the placements of a sharded tensor; nothing of another one."""
    return (tensor.device_mesh, tuple(tensor.placements)) if is_sharded(tensor) else ()
