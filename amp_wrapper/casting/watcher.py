"""Watches the calls of modules from outside of their casts, for diagnosis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch import nn

from . import cast_module


class Watcher:
    """Is told of the calls of a module, outside of its casts: what it is given, and what its caller gets. Not in graphs.

    Args:
        enter: Called with the module, ``args`` and ``kwargs`` before a call.
        leave: Called with the module and the output; None after an exception.
    """

    def __init__(
        self, enter: Callable[[nn.Module, Any, Any], object], leave: Callable[[nn.Module, Any], object]
    ) -> None:
        self.enter, self.leave = enter, leave
        # a module holds this, and must not wait for the garbage collector
        self._modules: WeakSet[nn.Module] = WeakSet()

    def watch(self, module: nn.Module) -> Watcher:
        """Be told of calls of a module from now on; no ScriptModule."""
        if not isinstance(module, cast_module.CastModule):
            module.__class__ = cast_module.class_for(type(module))
        vars(module)['_amp_watchers'] = (*vars(module).get('_amp_watchers', ()), self)
        self._modules.add(module)
        return self

    def remove(self) -> None:
        """Be told no longer."""
        for module in self._modules:
            others = tuple(each for each in vars(module).pop('_amp_watchers', ()) if each is not self)
            if others:
                vars(module)['_amp_watchers'] = others
            elif cast_module.rule_of(module) is None:
                cast_module.take_off(module)
        self._modules.clear()
