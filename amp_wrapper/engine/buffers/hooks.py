"""The forward hooks that tell snapshots of buffers when forward passes begin and end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint

from ... import torch_internals
from ...autocast.call import untraced

_CHECKPOINT_FILE = checkpoint.__file__


class Passes(Protocol):
    """Who is told; :class:`amp_wrapper.engine.buffers.snapshots.BufferSnapshots`."""

    def enter(self, module: nn.Module, has_step: bool = True) -> None:
        """A forward pass begins; without a graph, no step comes of it."""

    def leave(self, module: nn.Module, output: Any) -> None:
        """It ends."""

    def settle(self) -> None:
        """Somebody is about to read the buffers."""


def _is_checkpointed() -> bool:
    """Whether the caller is a reentrant checkpoint, in its first run of a segment."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == 'forward' and frame.f_code.co_filename == _CHECKPOINT_FILE:
            return True
        frame = frame.f_back
    return False


def is_broadcast() -> bool:
    """Whether the caller is a forward pass of DDP that has broadcast the buffers, and this torch counts that as a write.

    What somebody has written between two passes cannot be told from it then.
    """
    if not torch_internals.COUNTS_BROADCASTS:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is DistributedDataParallel.forward.__code__:
            ddp = frame.f_locals.get('self')
            return isinstance(ddp, DistributedDataParallel) and bool(ddp.will_sync_module_buffers())  # type: ignore[no-untyped-call]
        frame = frame.f_back
    return False


def _nobody() -> None:
    """Stands for the snapshots of a copied or unpickled hook."""


class BufferHook:
    """A forward hook that tells snapshots of passes. Copies of a model, in memory or in a file, tell nobody.

    Args:
        snapshots: Whom to tell; not kept alive.
    """

    def __init__(self, snapshots: Passes | None = None) -> None:
        self._snapshots: Callable[[], Passes | None] = _nobody if snapshots is None else ref(snapshots)

    def __deepcopy__(self, memo: dict[int, Any]) -> BufferHook:
        return type(self)()

    def __reduce__(self) -> tuple[type[BufferHook], tuple[()]]:
        return type(self), ()


class EnterBuffers(BufferHook):
    """Forward pre-hook of modules that own buffers, and of what scripts mostly call."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            _enter(self._snapshots(), module)


class LeaveBuffers(BufferHook):
    """Forward hook, called after exceptions too: the counterpart of :class:`EnterBuffers`."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            _leave(self._snapshots(), module, output)


class EnterModelBuffers(BufferHook):
    """:class:`EnterBuffers` of a model: where torch.compile traces it, the graph breaks here."""

    @untraced
    def __call__(self, module: nn.Module, args: Any) -> None:
        _enter(self._snapshots(), module)


class LeaveModelBuffers(BufferHook):
    """The counterpart of :class:`EnterModelBuffers`."""

    @untraced
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        _leave(self._snapshots(), module, output)


class SaveBuffers(BufferHook):
    """Hook of a model, called before its state dict is made."""

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        snapshots = self._snapshots()
        if snapshots is not None:
            snapshots.settle()


def _enter(snapshots: Passes | None, module: nn.Module) -> None:
    if snapshots is None:
        return
    # reentrant checkpointing runs a segment without gradients at first
    if torch.is_grad_enabled() or (module.training and _is_checkpointed()):
        snapshots.enter(module)
    elif module.training:
        snapshots.enter(module, has_step=False)
    else:
        snapshots.settle()


def _leave(snapshots: Passes | None, module: nn.Module, output: Any) -> None:
    if snapshots is not None:
        snapshots.leave(module, output)


__all__ = ['BufferHook', 'EnterBuffers', 'EnterModelBuffers', 'LeaveBuffers', 'LeaveModelBuffers', 'SaveBuffers']
