"""What is done before a call of a model: weights follow masters, and buffers are copied, in graphs too.

Whatever goes through ``optimizer.param_groups`` writes to FP32 masters: SAM, schedulefree, Lookahead, a clamp, the swap of an
average. The 16-bit weights follow before a model computes with them, whoever calls it, in training and evaluation.

No graph of torch.compile has that in it. Once a call has been traced, it is done for all models before whatever is compiled is
called: torch shares graphs between models of one class, and nobody sees which graphs a call will run.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

import torch
from torch import nn

from ..casting.cast_module import link_of
from ..casting.masters import Masters
from ..casting.rule import rule_of
from ..compiler_internals import before_compiled_calls, constant_when_traced, never_compiled, untraced
from ..policy.nested import HALF_TYPES
from . import averages
from .buffer_snapshot import BufferSnapshot


class BeforeCalls:
    """Is told of the calls of a model that come from outside. It lives as long as the model.

    Attributes:
        masters: The masters that the weights of the model agree with before a call.
        snapshots: The copies of its buffers that a call may begin.
    """

    def __init__(self) -> None:
        self.masters: WeakSet[Masters] = WeakSet()
        self.snapshots: WeakSet[BufferSnapshot] = WeakSet()
        _all.add(self)

    def before_call(self) -> None:
        """A call begins, which may be becoming part of a graph."""
        if torch.compiler.is_dynamo_compiling():
            self.is_traced()
        else:
            self.before_graph()

    never_compiled(before_call, with_callees=True)

    @constant_when_traced
    def is_traced(self) -> bool:
        """The call is becoming part of a graph."""
        before_compiled_calls(_before_graphs)
        self.before_graph()
        return True

    def before_graph(self) -> None:
        """Before a call, in a graph or not. No host read.

        Raises:
            AmpUsageError: A weight and its master were both written to. Nothing has been changed.
        """
        # packages that were imported since the last call
        averages.patch_loaded()
        self.synchronise()
        for snapshot in self.snapshots:
            snapshot.begin()

    def synchronise(self) -> None:
        """Of each weight and its master, the one that was written to last is copied to the other."""
        for masters in self.masters:
            masters.synchronise()

    def before_load(self) -> None:
        """Numbers are about to be loaded: weights that have joined an optimizer get their FP32 values."""
        for masters in self.masters:
            masters.adopt()

    def after_load(self, module: nn.Module, keys: Iterable[str]) -> None:
        """A module has loaded some of its buffers."""
        for snapshot in self.snapshots:
            snapshot.note_loaded(module, keys)


_all: WeakSet[BeforeCalls] = WeakSet()


@untraced
def _before_graphs() -> None:
    for each in list(_all):
        each.before_graph()


def before_calls(model: nn.Module) -> list[BeforeCalls]:
    """Those of the parts of a model that are cast by themselves; mostly one, which is made where there is none yet.

    They are told of calls of the model, and of its modules that open regions, or have buffers or 16-bit weights: somebody may
    call or load them alone.
    """
    made, found = BeforeCalls(), []
    for module in model.modules():
        rule, weights = rule_of(module), module.parameters(recurse=False)
        has_own = module._buffers or any(weight.dtype in HALF_TYPES for weight in weights)
        # inside of a region nothing is told
        if rule is not None and (has_own or rule.opens or module is model):
            link = link_of(module)
            link.listener = link.listener or made
            found.append(link.listener)
    return list(dict.fromkeys(found))
