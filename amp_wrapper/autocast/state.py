"""What is at work on this thread: forward passes, the casts of O1 and O4, and what suspends them.

The passes themselves are begun and ended by :mod:`amp_wrapper.autocast.patching`. This is the one place that answers "does a
cast apply here, now?", and it holds nothing but what is open.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch

from .. import torch_internals
from . import interrupts

#: The device types that are asked whether autocast is on.
AUTOCAST_DEVICES = ('cpu', 'cuda', 'xpu', 'mps')
#: Active in a pass of a model whose forwards the functional API casts op by op.
CASTS = '@casts'


class _Thread(threading.local):
    def __init__(self) -> None:
        # the passes that are open, in order, with the keys of the members that are active in them
        self.passes: dict[object, frozenset[str]] = {}
        # what a backward pass will need to know: the keys of every pass inside the present forward context
        self.recorders: list[set[frozenset[str]]] = []
        # the casts that a handle turned on outside of any model; the newest counts
        self.global_casts: dict[object, frozenset[str]] = {}
        # open disable_casts()
        self.suspended = 0
        # the devices whose autocast the outermost of them turned off
        self.switched_off: set[str] | None = None
        # open calls whose user-given rule stands above the FP32 registry
        self.overruled = 0
        # open segments that run again
        self.resumed = 0


_thread = _Thread()
_backward_passes: list[frozenset[str]] = []


class CastSession:
    """Keeps "a model at O1 or O4 is alive" true for as long as somebody holds it. See :func:`session_opened`."""


_sessions: WeakSet[CastSession] = WeakSet()


def begin(token: object, keys: frozenset[str]) -> object:
    """Note a pass.

    Args:
        token: Names it for :func:`end`; anything hashable.
        keys: What is active in it; nothing, in a pass that only keeps the casts of others out.

    Returns:
        The token, wrapped where a pass of that name is open already: a model that calls itself.
    """
    while token in _thread.passes:
        token = (token,)
    interrupts.begin()
    _thread.passes[token] = keys
    for recorder in _thread.recorders:
        recorder.add(keys)
    return token


def end(token: object | None) -> frozenset[str]:
    """Forget the innermost pass.

    Args:
        token: Its name; None for whichever it is.

    Returns:
        What was active in it; nothing where the innermost is another one, or there is none.
    """
    if not _thread.passes:
        return frozenset()
    last = next(reversed(_thread.passes))
    innermost = last
    while token is not None and innermost != token and isinstance(innermost, tuple) and len(innermost) == 1:
        (innermost,) = innermost
    if token is not None and innermost != token:
        return frozenset()
    keys = _thread.passes.pop(last)
    interrupts.end()
    return keys


def depth() -> int:
    """The number of passes under way on this thread."""
    return len(_thread.passes)


def is_active(key: str) -> bool:
    """Whether a member of the FP32 registry is active on this thread."""
    if _thread.overruled:
        return False
    return (
        any(key in keys for keys in _thread.passes.values())
        or any(key in keys for keys in _thread.global_casts.values())
        or any(key in keys for keys in _backward_passes)
    )


@contextmanager
def recording(seen: set[frozenset[str]]) -> Iterator[None]:
    """Note in ``seen`` what the passes inside make active, for the backward pass that follows."""
    _thread.recorders.append(seen)
    try:
        yield
    finally:
        _thread.recorders.pop()


def in_forward() -> bool:
    """Whether a forward context is open on this thread."""
    return bool(_thread.recorders)


def backward_begins(keys: frozenset[str]) -> None:
    """Note a backward pass, whose recomputed segments may run on any thread."""
    _backward_passes.append(keys)


def backward_ends(keys: frozenset[str]) -> None:
    """The counterpart of :func:`backward_begins`."""
    _backward_passes.remove(keys)


@contextmanager
def overruling() -> Iterator[None]:
    """Inside, no member of the FP32 registry is active on this thread."""
    _thread.overruled += 1
    try:
        yield
    finally:
        _thread.overruled -= 1


# -- the casts of O1 and O4 --------------------------------------------------------------------------------------------


def session_opened() -> CastSession:
    """A model at O1 or O4 is attached by the functional API.

    Returns:
        To be held by the session: decorated functions act outside of models while any such object is alive.
    """
    session = CastSession()
    _sessions.add(session)
    return session


def session_closed(session: CastSession) -> None:
    """The session is over before its object is; may be called twice."""
    _sessions.discard(session)


def casts_on() -> bool:
    """Whether the tables of O1 and O4 and the registered functions act on this thread, where autocast is on."""
    thread = _thread
    if thread.suspended:
        return False
    if thread.passes:
        return CASTS in thread.passes[next(reversed(thread.passes))]
    if thread.global_casts:
        return True
    # a backward pass may use threads of autograd's own; other threads are no business of it
    return in_graph_task() and any(CASTS in keys for keys in _backward_passes)


@dataclasses.dataclass(frozen=True)
class State:
    """What is open on a thread, in order, and whether casts are suspended. See :func:`snapshot`."""

    keys: tuple[frozenset[str], ...]
    suspended: bool


def snapshot() -> State:
    """What a segment that runs again has to find as it is now."""
    return State((*_thread.global_casts.values(), *_thread.passes.values()), _thread.suspended > 0)


@contextmanager
def resumed(state: State) -> Iterator[None]:
    """Inside, the passes of a snapshot are open on this thread, on top of what is. The stand-ins are the caller's."""
    tokens = [object() for _ in state.keys]
    before = _thread.suspended
    # where nothing was open, a module that is called directly opens what it needs, as it did then
    resumes = bool(tokens)
    _thread.resumed += resumes
    try:
        for token, keys in zip(tokens, state.keys):
            begin(token, keys)
        # autocast is as the caller has it
        _thread.suspended = int(state.suspended)
        yield
    finally:
        _thread.suspended = before
        for token in reversed(tokens):
            end(token)
        _thread.resumed -= resumes


def is_resumed() -> bool:
    """Whether a segment runs again on this thread."""
    return _thread.resumed > 0


def in_graph_task() -> bool:
    """Whether autograd runs a backward pass on this thread right now."""
    return torch_internals.graph_task_id() != -1


def casts_alive() -> bool:
    """Whether decorated functions act outside of any pass of this thread."""
    return not _thread.suspended and not _thread.passes and bool(_thread.global_casts or _sessions)


def is_suspended() -> bool:
    """Whether :func:`suspended` is open on this thread."""
    return _thread.suspended > 0


@contextmanager
def suspended() -> Iterator[None]:
    """Inside, on this thread, nothing that O1 and O4 cast is cast: neither autocast's lists nor ours. Nests."""
    devices = {device for device in AUTOCAST_DEVICES if torch.is_autocast_enabled(device)}
    outermost = _thread.switched_off is None
    if outermost:
        _thread.switched_off = devices
    _thread.suspended += 1
    try:
        for device in devices:
            torch.set_autocast_enabled(device, False)
        yield
    finally:
        for device in devices:
            torch.set_autocast_enabled(device, True)
        if outermost:
            _thread.switched_off = None
        _thread.suspended -= 1


def autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on for a device type on this thread, or will be when :func:`suspended` ends."""
    off = _thread.switched_off
    return torch.is_autocast_enabled(device_type) if off is None else device_type in off


def set_autocast_enabled(device_type: str, enabled: bool) -> None:
    """Turn autocast on or off for a device type on this thread; inside of :func:`suspended`, from its end on."""
    off = _thread.switched_off
    if off is None:
        torch.set_autocast_enabled(device_type, enabled)
    elif enabled:
        off.add(device_type)
    else:
        off.discard(device_type)


def global_casts_begin(token: object, keys: frozenset[str]) -> None:
    """Turn the casts of this thread on outside of any model."""
    _thread.global_casts[token] = keys


def global_casts_end(token: object) -> None:
    """The counterpart of :func:`global_casts_begin`."""
    del _thread.global_casts[token]


def global_casts_open() -> bool:
    """Whether any are on, on this thread."""
    return bool(_thread.global_casts)
