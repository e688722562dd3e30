"""Which casts are active on this thread: regions of forward passes, casts outside of any model, and what suspends them.

Regions are opened and closed by :mod:`.regions`. This is the one place that answers "does a cast apply here, now?", and it
holds nothing but what is open.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from .. import compiler_internals, graph_internals, torch_internals
from ..policy.copies import Copies

#: The device types that are asked whether autocast is on.
AUTOCAST_DEVICES = ('cpu', 'cuda', 'xpu', 'mps')
#: Active in a region of a model whose forwards the functional API casts op by op.
CASTS = '@casts'
#: Active in a region of a model whose weights are 16-bit: products of unlike operands compute in 16-bit.
OPERANDS = '@operands'
#: Active in a region without CASTS: what is written into a tensor takes its type.
DESTINATIONS = '@destinations'
#: Active in a region of a model whose forwards may warn.
SPEAKS = '@speaks'
#: A kind of device that no tensor has: whether :mod:`.operands` acts is its autocast, and its type says what acts.
SPARE = 'ipu'


class Region:
    """What one forward, or one block, has opened on a thread.

    Attributes:
        module: Whose hook opened it; None for a block.
        keys: What it makes active of the FP32 registry; None where it leaves that to the regions around it.
        active: What is active inside: its own keys, and those of the regions around it.
        depth: The number of regions with keys, up to this one.
        casts: Whether the tables of O1 and O4 and the registered functions act inside.
        autocast: Left when the region is closed.
        frame: The call that opened it; None where its end is certain.
        cover: The innermost region, up to this one, that keeps casts of other models out; None where there is none.
        around: Of a region that is its own ``cover``: the one around it.
        dtype: Of a region that is its own ``cover``: the type of its autocast, None where that is off.
        caller: Of an FP32 region: the 16-bit type that the caller came with.
        copies: Of the same: the arguments that were cast.
        patched: Whether the functions of the registry are patched for it or for a region around it.
        acquired: Whether for itself.
        operands: What :func:`amp_wrapper.autocast.operands.end` restores; None where the region leaves that as it is.
        agrees: Whether the stack of function modes says what is open, since code inside of it is compiled.
    """

    def __init__(self, module: nn.Module | None, keys: frozenset[str] | None, outer: Region | None) -> None:
        self.module: Any = module
        self.keys = keys
        self.active: frozenset[str] = frozenset() if outer is None else outer.active
        self.depth: int = 0 if outer is None else outer.depth
        self.casts: bool = outer is not None and outer.casts
        if keys is not None:
            self.active = keys if outer is None else self.active | keys
            self.depth += 1
            self.casts = CASTS in keys
        self.cover: Region | None = None if outer is None else outer.cover
        self.around: Region | None = self.cover
        self.autocast: AbstractContextManager[Any] | None = None
        self.frame: FrameType | None = None
        self.dtype: torch.dtype | None = None
        self.caller: torch.dtype | None = None
        self.copies: Copies | None = None
        self.patched: bool = outer is not None and outer.patched
        self.acquired = False
        self.operands: tuple[bool, torch.dtype] | None = None
        self.agrees: bool = outer is not None and outer.agrees


def marks(casts: bool = False, operands: bool = False, speaks: bool = True) -> frozenset[str]:
    """What is active in the regions of a model beside the FP32 registry.

    Args:
        casts: Whether the tables of O1 and O4 act, and what the user registered.
        operands: Whether products of 16-bit and FP32 operands compute in 16-bit.
        speaks: Whether forwards may warn.
    """
    return frozenset([CASTS if casts else OPERANDS if operands else DESTINATIONS, *[SPEAKS] * speaks])


def operands_type(keys: frozenset[str]) -> torch.dtype | None:
    """The type of the autocast of :data:`SPARE` in a region with these keys; None for off."""
    if CASTS in keys:
        return None
    return torch.bfloat16 if OPERANDS in keys else torch.float16 if DESTINATIONS in keys else None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.regions: list[Region] = []
        # the casts that a handle turned on outside of any model; the newest counts
        self.global_casts: dict[object, frozenset[str]] = {}
        # the objects that did so and have not restored autocast yet, in order
        self.started: list[Any] = []
        # open disable_casts()
        self.suspended = 0
        # the devices whose autocast the outermost of them turned off
        self.switched_off: set[str] | None = None
        # open calls whose user-given rule stands above the FP32 registry
        self.overruled = 0
        # open segments that run again
        self.resumed = 0
        # modules whose inputs were cast, and their copies
        self.cast_calls: list[tuple[nn.Module, Copies | None]] = []
        # whether arguments of a module are being cast
        self.is_casting = False
        # whether nn.Module._apply of an attached model is under way, which calls it for the children
        self.in_apply = False
        # whether the tables of O1 and O4 act in the call that a graph is at, None between such calls; and which graph
        self.graph_casts: bool | None = None
        self.traced_in: object | None = None


thread = _Thread()
#: What is active, on every thread, in the backward passes that run: forwards may be recomputed in them.
backward_passes: list[frozenset[str]] = []


class CastSession:
    """Keeps "a model at O1 or O4 is alive" true for as long as somebody holds it. See :func:`session_opened`."""


_sessions: WeakSet[CastSession] = WeakSet()


class _Alive:
    """Whether there is any session: an attribute, which torch.compile looks at before it takes a graph."""

    def __init__(self) -> None:
        self.any = False

    def look(self) -> None:
        """One has come to its end."""
        # a set of weak references counts those that go at this moment
        self.any = any(True for _ in _sessions)


alive = _Alive()


def innermost() -> Region | None:
    """The region that was opened last on this thread."""
    regions = thread.regions
    return regions[-1] if regions else None


def depth() -> int:
    """The number of forward passes under way on this thread."""
    regions = thread.regions
    return regions[-1].depth if regions else 0


def is_active(key: str) -> bool:
    """Whether an entry of the FP32 registry, or one of the names above, is active on this thread."""
    if thread.overruled:
        return False
    regions = thread.regions
    return (
        (bool(regions) and key in regions[-1].active)
        or any(key in keys for keys in thread.global_casts.values())
        or any(key in keys for keys in backward_passes)
    )


@contextmanager
def overruling() -> Iterator[None]:
    """Inside, nothing of the FP32 registry is active on this thread."""
    thread.overruled += 1
    try:
        yield
    finally:
        thread.overruled -= 1


# -- the casts of O1 and O4 --------------------------------------------------------------------------------------------


def session_opened() -> CastSession:
    """A model at O1 or O4 is attached by the functional API.

    Returns:
        To be held by the session: decorated functions act outside of models while any such object is alive.
    """
    session = CastSession()
    _sessions.add(session)
    alive.any = True
    weakref.finalize(session, alive.look)
    return session


def session_closed(session: CastSession) -> None:
    """The session is over before its object is; may be called twice."""
    _sessions.discard(session)
    alive.look()


def _in_the_graph() -> bool:
    """Whether the mark is that of the graph that is made, or runs without being made: an error may have left it behind."""
    if thread.traced_in is not graph_internals.tracing_context():
        return False
    if thread.traced_in is not None or graph_internals.runs_a_graph(sys._getframe(1)):
        return True
    thread.graph_casts = None
    return False


def casts_on() -> bool:
    """Whether the tables of O1 and O4 and the registered functions act on this thread, where autocast is on."""
    in_graph = thread.graph_casts
    if in_graph is not None and _in_the_graph():
        return in_graph
    if thread.suspended:
        return False
    regions = thread.regions
    if regions and regions[-1].depth:
        return regions[-1].casts
    if thread.global_casts:
        return True
    # a backward pass may use threads of autograd's own; other threads are no business of it
    return (
        bool(backward_passes)
        and torch_internals.graph_task_id() != -1
        and any(CASTS in keys for keys in backward_passes)
    )


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a thread casts: see :func:`snapshot`.

    Attributes:
        keys: What is active of the FP32 registry, and of the casts of ops; None where nothing is open.
        suspended: Whether casts are suspended.
    """

    keys: frozenset[str] | None
    suspended: bool


def snapshot() -> Snapshot:
    """What a segment that runs again has to find as it is now."""
    top = innermost()
    keys = frozenset[str]().union(*thread.global_casts.values()) if thread.global_casts else None
    if top is not None and top.depth:
        # the casts of ops are those of the innermost
        keys = ((keys or frozenset()) | top.active) - {CASTS} | ({CASTS} if top.casts else frozenset())
    return Snapshot(keys, thread.suspended > 0)


def is_resumed() -> bool:
    """Whether a segment runs again on this thread."""
    return thread.resumed > 0


def casts_alive() -> bool:
    """Whether decorated functions act outside of any forward pass of this thread."""
    return not thread.suspended and not depth() and bool(thread.global_casts or _sessions)


def is_suspended() -> bool:
    """Whether :func:`suspended` is open on this thread."""
    return thread.suspended > 0


@contextmanager
def suspended() -> Iterator[None]:
    """Inside, on this thread, nothing that O1 and O4 cast is cast: neither autocast's lists nor ours. Nests."""
    devices = {device for device in AUTOCAST_DEVICES if _is_enabled(device)}
    outermost = thread.switched_off is None
    if outermost:
        thread.switched_off = devices
    thread.suspended += 1
    try:
        with AutocastOff(devices):
            yield
    finally:
        if outermost:
            thread.switched_off = None
        thread.suspended -= 1


# -- autocast ----------------------------------------------------------------------------------------------------------


class AutocastOff:
    """A context in which autocast is off for some device types, for which it is on around it.

    Cheaper than :class:`torch.autocast`: the cache of cast weights, which belongs to the block that turned autocast on, stays.

    Args:
        devices: Types for which autocast is on.
    """

    __slots__ = ('_devices',)

    def __init__(self, devices: Iterable[str]) -> None:
        self._devices = devices

    def __enter__(self) -> None:
        for device in self._devices:
            torch.set_autocast_enabled(device, False)

    def __exit__(self, *_: object) -> None:
        for device in self._devices:
            torch.set_autocast_enabled(device, True)


_has_autocast = functools.cache(torch.amp.is_autocast_available)
# themselves: where graphs are made, their names in torch stand for what :mod:`.queries` answers
_is_enabled, get_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype


@compiler_internals.constant_when_traced
def has_autocast(device: str) -> bool:
    """Whether a device type has autocast; 'meta' has none."""
    return _has_autocast(device)


def autocast_is_on(device: str) -> bool:
    """Whether autocast is on for a device type; False for types that have none, such as 'meta'."""
    return has_autocast(device) and _is_enabled(device)


def autocast_type(device: str) -> torch.dtype | None:
    """The type of autocast on a device type; None where it is off."""
    return get_dtype(device) if autocast_is_on(device) else None


def autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on for a device type on this thread, or will be when :func:`suspended` ends."""
    off = thread.switched_off
    return _is_enabled(device_type) if off is None else device_type in off


def set_autocast_enabled(device_type: str, enabled: bool) -> None:
    """Turn autocast on or off for a device type on this thread; inside of :func:`suspended`, from its end on."""
    off = thread.switched_off
    if off is None:
        torch.set_autocast_enabled(device_type, enabled)
    elif enabled:
        off.add(device_type)
    else:
        off.discard(device_type)
