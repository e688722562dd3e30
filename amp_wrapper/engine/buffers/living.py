"""All buffer snapshots of the process, and what they are told together: losses of one optimizer go through models of others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .copies import is_tracked
from .tracked import TrackedBuffers
from .users import User


class Snapshots(Protocol):
    """:class:`amp_wrapper.engine.buffers.snapshots.BufferSnapshots`, which has these methods."""

    tracked: TrackedBuffers

    def owners(self) -> tuple[Iterable[Tensor], Iterable[Tensor]]:
        """The parameters that the optimizer steps, and those of others."""

    def collect_again(self) -> None:
        """Buffers may belong to others now."""

    def restore(self, flag: Tensor | None) -> None:
        """The step of the optimizer itself is taken or skipped: where ``flag`` is up, buffers become what they were."""

    def decide(self, user: User, flag: Tensor | None) -> None:
        """The step of another optimizer is taken or skipped."""

    def settle(self) -> None:
        """Somebody is about to read the buffers."""

    def average(self, average: nn.Module, model: nn.Module) -> None:
        """An average of the buffers is about to be updated."""

    def averaged(self, average: nn.Module) -> None:
        """It was updated."""


#: One for each optimizer whose skipped steps give buffers back.
living: set[ReferenceType[Snapshots]] = set()
_listens = False


def everything() -> list[Snapshots]:
    """Those whose optimizers live."""
    # references go whenever garbage is collected
    found = [reference() for reference in living.copy()]
    return [snapshots for snapshots in found if snapshots is not None]


def collect_again() -> None:
    """An optimizer came or went."""
    for snapshots in everything():
        snapshots.collect_again()


def listen() -> None:
    """Notice buffers that come and go."""
    global _listens
    if not _listens:
        _listens = True
        torch_module.register_module_module_registration_hook(_on_registration)
        torch_module.register_module_buffer_registration_hook(_on_registration)


def _on_registration(parent: nn.Module, name: str, new: nn.Module | Tensor | None) -> None:
    if torch.compiler.is_dynamo_compiling():
        # a wrapper that is made in a graph, and thrown away
        return
    for snapshots in everything():
        if id(parent) in snapshots.tracked.module_ids and not is_tracked(parent._buffers.get(name)):
            snapshots.collect_again()


@contextmanager
def averaging(average: nn.Module, model: nn.Module) -> Iterator[None]:
    """Around the update of an average of a model.

    Args:
        average: A copy of the model.
        model: The model, or a wrapper of the same structure that the copy was made from.
    """
    found = everything()
    for snapshots in found:
        snapshots.average(average, model)
    yield
    for snapshots in found:
        snapshots.averaged(average)


def settle_step(user: User, own: Snapshots | None, flag: Tensor | None) -> None:
    """An optimizer takes a step or skips it: what its losses did to buffers, of its modules or of others, is settled.

    Args:
        user: Whose step it is.
        own: Its snapshots, if it has some.
        flag: As for :meth:`Snapshots.restore`.
    """
    if own is not None:
        own.restore(flag)
    if len(living) > (own is not None):
        for snapshots in everything():
            snapshots.decide(user, flag)


def settle() -> None:
    """Somebody is about to save models: :meth:`Snapshots.settle` for all."""
    for snapshots in everything():
        snapshots.settle()
