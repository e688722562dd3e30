"""Regions inside of a graph that ``torch.compile`` traces: a mode of torch's functions, whose casts become part of the graph.

Outside of graphs a region is kept in state of the thread, and functions are patched while it is open. Neither can be part of a
graph. What ``torch.compile`` does trace, guard, and put right where a graph breaks, in every version since 2.6, is the stack of
function modes. So a region that is opened while a graph is traced is a :class:`GraphRegion` at the top of that stack: each
call of a function of torch comes to it, and is made as the region wants it. It is a matter of tracing alone; what runs later
is a graph of plain casts and calls.

A region that was opened outside, around code that is compiled, shows in the stack too: :func:`agree` puts a
:class:`GraphRegion` at its bottom that says what is open on the thread. It only hands calls on where nothing is traced.
"""

from __future__ import annotations

import functools

from torch.library import Library

from .. import compiler_internals, graph_internals
from ..compiler_internals import constant_when_traced, untraced
from . import queries, state
from .graph_region import GraphRegion, autocast_type, innermost
from .state import Snapshot


def enter(region: GraphRegion) -> None:
    """Open a region while a graph is traced."""
    _answer_queries()
    if region.outer is not None:
        # one region answers for all of them
        region.lifted = compiler_internals.function_mode_at(compiler_internals.function_modes() - 1) is region.outer
        if not region.lifted:
            # a mode of somebody else is in between: outside of graphs there is no such order
            break_graph()
        compiler_internals.pop_function_mode()
    compiler_internals.push_function_mode(region)


@constant_when_traced
def _answer_queries() -> bool:
    if queries.install():
        graph_internals.trace_anew('queries of autocast are answered in graphs')
    return True


@untraced
def break_graph() -> None:
    """Where this is traced, the graph ends, and the region is opened outside of graphs."""


def leave(region: GraphRegion) -> None:
    """The counterpart of :func:`enter`."""
    compiler_internals.pop_function_mode()
    if region.lifted:
        compiler_internals.push_function_mode(region.outer)


def suspend() -> GraphRegion:
    """From here on nothing that O1 and O4 cast is cast, where a graph is traced.

    Returns:
        To be handed to :func:`leave`. See :func:`amp_wrapper.autocast.state.suspended`.
    """
    outer = innermost()
    on = [device for device in state.AUTOCAST_DEVICES if autocast_type(outer, device) is not None]
    region = GraphRegion(outer, None, on[0] if on else None)
    region.casts, region.suspended = False, True
    enter(region)
    return region


# -- the tables of O1 and O4 -------------------------------------------------------------------------------------------

# a call of this op is part of the graph, so that no cache of compiled graphs takes one with these casts for one without
_library = Library('amp_wrapper_graph', 'DEF')  # type: ignore[no-untyped-call]
_library.define('casts(bool? on) -> ()')  # type: ignore[no-untyped-call]


def _casts(on: bool | None) -> None:
    state.thread.graph_casts = on
    state.thread.traced_in = graph_internals.tracing_context()


_library.impl('casts', _casts, 'CompositeImplicitAutograd')  # type: ignore[no-untyped-call]


# -- regions that are open around code that is compiled ------------------------------------------------------------------


def agree() -> None:
    """Make the stack of function modes, and torch.compile, say what is open on this thread."""
    compiler_internals.backward_without_autocast(any(region.autocast is not None for region in state.thread.regions))
    top = state.innermost()
    wanted = _outside(state.snapshot(), top is not None and top.cover is not None)
    count = compiler_internals.function_modes()
    modes = [compiler_internals.function_mode_at(place) for place in range(count)]
    present = next((mode for mode in modes if isinstance(mode, GraphRegion)), None)
    if wanted is present:
        return
    for _ in modes:
        compiler_internals.pop_function_mode()
    others = [mode for mode in modes if mode is not present]
    if wanted is not None:
        # torch wants the mode of torch.set_default_device to be the first
        others.insert(int(bool(others) and compiler_internals.is_default_device(others[0])), wanted)
    for mode in others:
        compiler_internals.push_function_mode(mode)


@functools.lru_cache(maxsize=1024)
def _outside(snapshot: Snapshot, covers: bool) -> GraphRegion | None:
    if snapshot.keys is None and not snapshot.suspended:
        return None
    region = GraphRegion(None, snapshot.keys)
    region.covers, region.suspended = covers, snapshot.suspended
    region.casts = region.casts and not snapshot.suspended
    return region
