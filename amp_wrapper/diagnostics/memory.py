"""Counts the bytes that a training step holds: weights, masters, optimizer state, gradients, and what a forward pass keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..engine import Engine


@dataclasses.dataclass(frozen=True)
class MemoryCount:
    """Bytes of one training step, by what they are for.

    Attributes:
        weights: The parameters that the model computes with.
        buffers: The buffers of the model.
        masters: What the optimizer steps beside them: FP32 masters, or the int16 remainders of split ones.
        optimizer_state: Moments and the like. Only what is there: most optimizers have none before their first step.
        gradients: One for each weight that is trained, in its type.
        activations: What the forward pass keeps for the backward pass (:class:`SavedBytes`).
    """

    weights: int
    buffers: int
    masters: int
    optimizer_state: int
    gradients: int
    activations: int

    @property
    def total(self) -> int:
        """All of it: about the peak of a step, which is reached when the backward pass begins to free activations."""
        return sum(dataclasses.astuple(self))

    def plain(self) -> dict[str, int]:
        """As a dict, with ``total``."""
        return {**dataclasses.asdict(self), 'total': self.total}


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The bytes of tensors; memory that several of them share counts once."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr(), tensor.device] = storage.nbytes()
    return sum(storages.values())


def count_memory(model: nn.Module, engine: Engine | None = None, activations: int = 0) -> MemoryCount:
    """Count what a model and its optimizer hold now. No host read.

    Args:
        model: Attached or not.
        engine: Its engine; None for a model without optimizer: masters and optimizer state are 0 then.
        activations: Bytes that a forward pass keeps, from :class:`SavedBytes`.
    """
    parameters = list(model.parameters())
    masters: list[Tensor] = []
    state: list[Tensor] = []
    if engine is not None and engine.optimizer is not None:
        weights = set(map(id, parameters))
        lists = engine.params.lists()
        for stepped, copy in zip(lists.parameters, lists.copies):
            if id(stepped) not in weights:
                masters.append(stepped)
            elif copy is not None and id(copy) not in weights:
                masters.append(copy)
        state = [
            value for each in engine.optimizer.state.values() for value in each.values() if isinstance(value, Tensor)
        ]
    return MemoryCount(
        weights=bytes_of(parameters),
        buffers=bytes_of(model.buffers()),
        masters=bytes_of(masters),
        optimizer_state=bytes_of(state),
        gradients=sum(p.numel() * p.element_size() for p in parameters if p.requires_grad),
        activations=activations,
    )


class SavedBytes:
    """Counts what forward passes inside of it keep for the backward pass. Memory that is kept twice counts once.

    Weights and buffers of the model do not count: they are there anyway. Casts of weights that autocast makes do.

    Args:
        model: Whose forward pass it is.

    Attributes:
        total: Bytes kept so far.
    """

    def __init__(self, model: nn.Module) -> None:
        self.total = 0
        self._seen = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
        # nobody else may get this memory while it counts
        self._held: list[torch.UntypedStorage] = []
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            key = _storage(tensor)
            if key not in self._seen:
                self._seen.add(key)
                storage = tensor.untyped_storage()
                self._held.append(storage)
                self.total += storage.nbytes()
        return tensor

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        self._held.clear()


def _storage(tensor: Tensor) -> tuple[int, torch.device]:
    return (
        (tensor.untyped_storage().data_ptr(), tensor.device) if tensor.layout is torch.strided else (0, tensor.device)
    )
