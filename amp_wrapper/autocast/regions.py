"""Opens and closes the regions of a thread: one stack, for forward passes, parts of them and blocks of code.

A *region* says what is active inside of it: entries of the FP32 registry, the casts of O1 and O4, autocast. Forward hooks open
and close them (:mod:`amp_wrapper.casting.region_hooks`), and so do ``optim_context``, methods of heads, decorated functions,
and checkpointed segments that run again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from ..compiler_internals import (
    before_compiled_calls,
    is_loaded,
    load_compiler_tables,
    may_be_called_by_compiled_code,
    untraced,
)
from . import graph, operands, state
from .patching import patches
from .state import Region, thread

_lock = threading.Lock()
# threads with open regions
_covered = 0
_listens = False
_has_compiled = False
_when_compiling: list[Callable[[], None]] = []


@untraced
def enter(
    keys: frozenset[str] | None,
    module: nn.Module | None = None,
    autocast: AbstractContextManager[Any] | None = None,
    covers: bool = False,
    dtype: torch.dtype | None = None,
) -> Region:
    """Open a region on this thread.

    Args:
        keys: What it makes active; nothing, in one that only keeps the casts of others out; None leaves that as it is.
        module: From whose hook this is called; by it the region is found again. None for a block.
        autocast: Entered now, and left when the region is closed.
        covers: Whether copies of weights that autocast keeps end at its borders, unless they are of the same type.
        dtype: Of a region that covers: the type of its autocast.

    Returns:
        The region.
    """
    regions = thread.regions
    outer = regions[-1] if regions else None
    region = Region(module, keys, outer)
    if module is not None:
        region.frame = _calling_frame()
    if outer is None and not _listens:
        listen()
    if keys and outer is not None and outer.patched:
        patches.refresh()
    elif keys:
        patches.acquire()
        region.acquired = region.patched = True
    if outer is None:
        _cover_interrupts(1)
    regions.append(region)
    if covers:
        region.cover, region.dtype = region, dtype
        if region.around is not None and region.around.dtype is not dtype:
            torch.clear_autocast_cache()
    if autocast is not None:
        autocast.__enter__()
        region.autocast = autocast
    if keys is not None:
        region.operands = operands.begin(keys)
    if region.agrees or may_be_called_by_compiled_code():
        compiling()
        region.agrees = True
        graph.agree()
    return region


def when_compiling(function: Callable[[], None]) -> Callable[[], None]:
    """Decorator: the function is called once, when torch.compile is found to be in use."""
    _when_compiling.append(function)
    return function


def has_compiled() -> bool:
    """Whether torch.compile was found to be in use."""
    return _has_compiled


def compiling() -> bool:
    """Something is being compiled, or what was compiled is called.

    Returns:
        Whether it was the first that is known.
    """
    global _has_compiled
    if _has_compiled:
        return False
    _has_compiled = True
    for function in _when_compiling:
        function()
    return True


def listen() -> None:
    """Once torch.compile may be in use, what it compiles is told what is open around it."""
    global _listens
    if not _listens and is_loaded():
        _listens = True
        # before anything is patched
        load_compiler_tables()
        before_compiled_calls(_before_compiled_call)


@untraced
def _before_compiled_call() -> None:
    compiling()
    # what an error in a graph, or while it was made, has left
    thread.graph_casts = None
    for region in thread.regions:
        region.agrees = True
    # also casts that are on, or suspended, outside of any region
    graph.agree()


@untraced
def leave() -> None:
    """Close the innermost region. Does nothing where none is open."""
    if not thread.regions:
        return
    region = thread.regions.pop()
    try:
        if region.autocast is not None:
            region.autocast.__exit__(None, None, None)
    finally:
        if region.operands is not None:
            operands.end(region.operands)
        if region.agrees:
            graph.agree()
        if region.acquired:
            patches.release()
        if not thread.regions:
            _cover_interrupts(-1)
            if not _listens:
                # activation checkpointing imports torch._dynamo in a forward
                listen()
    # an autocast around the model would keep copies of weights past a change of these
    if region.cover is region and (region.around is None or region.around.dtype is not region.dtype):
        torch.clear_autocast_cache()
    # no cycle keeps what the call has in its frame
    region.cover = region.frame = None


def _cover_interrupts(change: int) -> None:
    """While a region is open on any thread, torch calls hooks with ``always_call=True`` after every exception.

    ``nn.Module.__call__`` calls them after an ``Exception`` only, so KeyboardInterrupt, SystemExit, or the cancellation of a
    task would leave regions open. Its handler looks ``Exception`` up in its own module: there it finds ``BaseException``.
    """
    global _covered
    with _lock:
        _covered += change
        if _covered:
            vars(nn_module)['Exception'] = BaseException
        else:
            vars(nn_module).pop('Exception', None)


def is_innermost(module: nn.Module) -> bool:
    """Whether the innermost region is that of ``module``: a hook that failed before its own has opened nothing."""
    regions = thread.regions
    if regions and regions[-1].module is not module and any(region.module is module for region in regions):
        # what an interrupt has left open inside
        unwind_stale()
    return bool(regions) and regions[-1].module is module


def count() -> int:
    """The number of regions that are open on this thread."""
    return len(thread.regions)


@untraced
def unwind(to: int = 0) -> None:
    """Close down to ``to`` regions.

    A function that ``torch.compile`` compiles, and that has a block with a region, calls this when its graph is broken there;
    torch 2.15 fails over the end of an autocast.
    """
    while len(thread.regions) > to:
        leave()


@untraced
def unwind_stale() -> None:
    """Close what calls left that are no longer under way: a signal may end a forward pass in the middle of one of our hooks.

    May be called at any time; does nothing to what is under way on this thread.
    """
    regions = thread.regions
    if not regions:
        return
    alive = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        alive.add(frame)
        frame = frame.f_back
    for place, region in enumerate(regions):
        if region.frame is not None and region.frame not in alive:
            unwind(place)
            break


def _calling_frame() -> FrameType | None:
    """The frame of ``nn.Module.__call__`` above a hook."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != nn_module.__file__:
        frame = frame.f_back
    return frame


@contextmanager
def opened(keys: frozenset[str] | None, autocast: AbstractContextManager[Any] | None = None) -> Iterator[None]:
    """A region around a block, at whose end everything is closed that was opened inside."""
    before = count()
    try:
        enter(keys, autocast=autocast)
        yield
    finally:
        unwind(before)


@contextmanager
def resumed(before: state.Snapshot) -> Iterator[None]:
    """Inside, what a snapshot has is active on this thread, on top of what is. Autocast is the caller's business."""
    suspended, opens = thread.suspended, before.keys is not None
    # where nothing was open, a module that is called directly opens what it needs, as it did then
    thread.resumed += opens
    depth = count()
    try:
        if opens:
            enter(before.keys)
        thread.suspended = int(before.suspended)
        yield
    finally:
        thread.suspended = suspended
        unwind(depth)
        thread.resumed -= opens


def global_casts_begin(token: object, keys: frozenset[str]) -> None:
    """Turn the casts of this thread on outside of any model, without an end in sight."""
    patches.acquire()
    thread.global_casts[token] = keys


def global_casts_end(token: object) -> None:
    """The counterpart of :func:`global_casts_begin`."""
    del thread.global_casts[token]
    patches.release()
