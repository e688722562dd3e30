"""Hooks of models that torch.compile has made part of a graph: what they do before a forward call is done before the graph.

A hook at the beginning of a forward call may copy masters to weights, or buffers aside. No graph has that in it. Where a hook
is traced, it is remembered together with what was compiled, and called whenever that is called from then on.
"""

from __future__ import annotations

import threading
from typing import Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

from ..compiler_internals import before_compiled_calls, untraced


class GraphHook(Protocol):
    """A hook that may be traced."""

    def before_graph(self) -> None:
        """A graph is about to run that the hook is part of."""


class _Thread(threading.local):
    def __init__(self) -> None:
        # what was called last of all that is compiled
        self.compiler: object | None = None


_thread = _Thread()
_hooks: WeakKeyDictionary[object, set[ReferenceType[GraphHook]]] = WeakKeyDictionary()
_listens = False


def traced(hook: GraphHook) -> None:
    """A hook is being traced. It is called now, before the graph runs for the first time, and before all later calls."""
    global _listens
    if not _listens:
        _listens = True
        before_compiled_calls(_before)
    found = _hooks.setdefault(_thread.compiler, set()) if _thread.compiler is not None else _any
    known = ref(hook, found.discard)
    if known not in found:
        found.add(known)
        hook.before_graph()


#: Hooks that were traced before it was known what is compiled: called before everything that is.
_any: set[ReferenceType[GraphHook]] = set()


@untraced
def _before(compiler: object) -> None:
    _thread.compiler = compiler
    for reference in (*_any, *_hooks.get(compiler, ())):
        hook = reference()
        if hook is not None:
            hook.before_graph()
