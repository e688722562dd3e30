"""Forward hooks that call the buffer snapshots when forward calls begin and end."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Container, Iterable
from types import CodeType, FrameType
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint
from torch.utils.hooks import RemovableHandle

from ... import torch_internals
from ...compiler_internals import constant_when_traced, never_compiled


@dataclasses.dataclass(slots=True)
class Call:
    """A forward call that is under way on a thread, from outside of any other that covers it.

    Attributes:
        module: What was called.
        covers: The ids of the modules below, whose calls are parts of this one; None for all.
        counts: Whether what it writes is given back by a skipped step.
        depth: How often the module has called itself.
    """

    module: nn.Module
    covers: Container[int] | None
    counts: bool
    depth: int = 0


class Calls(threading.local):
    """Those of one thread, innermost last."""

    def __init__(self) -> None:
        self.open: list[Call] = []


class Listener(Protocol):
    """The object that the hooks call: :class:`amp_wrapper.engine.buffers.snapshots.BufferSnapshots`."""

    calls: Calls
    #: Whether calls so far had no graph, so that calls inside of them may be the first that lead to a step.
    expects_graph: bool

    def enter(self, module: nn.Module) -> None:
        """A module is called."""

    def leave(self, module: nn.Module, output: Any) -> None:
        """The call ends."""

    def settle(self) -> None:
        """Somebody is about to read the buffers."""

    def traced(self) -> None:
        """A forward call is becoming part of a graph."""


class BufferHook:
    """Base of the hooks, which call a listener. Copies of a model, in memory or in a file, have hooks without one.

    Args:
        listener: What to call; not kept alive.
    """

    def __init__(self, listener: Listener | None = None) -> None:
        self._listener: Callable[[], Listener | None] = _nobody if listener is None else ref(listener)

    def __deepcopy__(self, memo: dict[int, Any]) -> BufferHook:
        return type(self)()

    def __reduce__(self) -> tuple[type[BufferHook], tuple[()]]:
        return type(self), ()


def _nobody() -> None:
    """Stands for the listener of a copied or unpickled hook."""


class BeforeStateDict(BufferHook):
    """Hook of a model, called before its state dict is made."""

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        listener = self._listener()
        if listener is not None:
            listener.settle()


class EnterPart(BufferHook):
    """Forward pre-hook of modules that own buffers, and of what scripts mostly call. Inside of another call it ends at once."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            self.is_traced()
            return
        listener = self._listener()
        if listener is None:
            return
        calls = listener.calls.open
        if (
            not calls
            or calls[-1].module is module
            or (calls[-1].covers is not None and id(module) not in calls[-1].covers)
            or listener.expects_graph
        ):
            listener.enter(module)

    never_compiled(__call__)

    @constant_when_traced
    def is_traced(self) -> bool:
        """The call is becoming part of a graph."""
        listener = self._listener()
        if listener is not None:
            listener.traced()
        return True


class LeavePart(BufferHook):
    """Forward hook, called after exceptions too: the counterpart of :class:`EnterPart`."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        listener = self._listener()
        if listener is not None:
            listener.leave(module, output)

    never_compiled(__call__)


class HookedModules:
    """The modules that have hooks for one listener.

    Args:
        listener: What the hooks call.
        models: Those of the modules that scripts call mostly, and save.
    """

    def __init__(self, listener: Listener, models: Iterable[nn.Module]) -> None:
        self._listener = ref(listener)
        self._models = set(map(id, models))
        self._handles: dict[int, list[RemovableHandle]] = {}
        # of the hooks at the end of a call: parts get one as they are first called by themselves
        self._ends: dict[int, int] = {}

    def __contains__(self, module: nn.Module) -> bool:
        return id(module) in self._handles

    def hook(self, modules: Iterable[nn.Module], keeps: bool = False) -> None:
        """Put hooks on modules, and take those of all others off unless ``keeps`` is set."""
        wanted = {id(module): module for module in modules}
        for key in [] if keeps else self._handles.keys() - wanted.keys():
            self._ends.pop(key, None)
            for handle in self._handles.pop(key):
                handle.remove()
        for key, module in wanted.items():
            if key in self._handles:
                continue
            is_model = key in self._models
            enter = EnterPart(self._listener())
            self._handles[key] = [module.register_forward_pre_hook(enter, prepend=True)]
            if is_model:
                before = BeforeStateDict(self._listener())
                self._handles[key].append(module.register_state_dict_pre_hook(before))  # type: ignore[no-untyped-call]
                self.hook_end(module)

    def hook_end(self, module: nn.Module) -> None:
        """A call begins: put the hook for its end behind all others, since what these write belongs to the call."""
        key = id(module)
        if key not in self._handles:
            # a replica
            return
        if key not in self._ends:
            leave = LeavePart(self._listener())
            self._handles[key].append(module.register_forward_hook(leave, always_call=True))
            self._ends[key] = self._handles[key][-1].id
        elif next(reversed(module._forward_hooks)) != self._ends[key]:
            module._forward_hooks.move_to_end(self._ends[key])  # type: ignore[attr-defined]


def _calling(is_wanted: Callable[[CodeType], bool]) -> FrameType | None:
    """The innermost caller with such a code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_wanted(frame.f_code):
        frame = frame.f_back
    return frame


def is_checkpointed() -> bool:
    """Whether the caller is a reentrant checkpoint, in its first run of a segment, which is without gradients."""
    return _calling(lambda code: code.co_name == 'forward' and code.co_filename == checkpoint.__file__) is not None


def is_broadcast() -> bool:
    """Whether the caller is a forward call of DDP that has broadcast the buffers, and this torch counts that as a write.

    What somebody else has written between two calls cannot be distinguished from the broadcast then.
    """
    if not torch_internals.COUNTS_BROADCASTS:
        return False
    frame = _calling(lambda code: code is DistributedDataParallel.forward.__code__)
    ddp = None if frame is None else frame.f_locals.get('self')
    return isinstance(ddp, DistributedDataParallel) and bool(ddp.will_sync_module_buffers())  # type: ignore[no-untyped-call]
