"""Hooks of models that torch.compile has made part of a graph: what they do before a forward call is done before the graph.

A hook at the beginning of a forward call may copy masters to weights, or buffers aside. No graph has that in it. A hook that
was traced once is called before whatever is compiled is called from then on: torch shares graphs between all that is compiled
of one function, and nobody sees which graphs a call will run.
"""

from __future__ import annotations

from typing import Protocol
from weakref import ReferenceType, ref

from ..compiler_internals import before_compiled_calls, untraced


class GraphHook(Protocol):
    """A hook that may be traced."""

    def before_graph(self) -> None:
        """A graph is about to run that the hook may be part of."""


_hooks: set[ReferenceType[GraphHook]] = set()
_listens = False


def traced(hook: GraphHook) -> None:
    """A hook is being traced. It is called now, before the graph runs for the first time, and before all later calls."""
    global _listens
    if not _listens:
        _listens = True
        before_compiled_calls(_before)
    known = ref(hook, _hooks.discard)
    if known not in _hooks:
        _hooks.add(known)
        hook.before_graph()


@untraced
def _before() -> None:
    for reference in tuple(_hooks):
        hook = reference()
        if hook is not None:
            hook.before_graph()
