"""Makes 16-bit weights and their FP32 masters agree before every forward call.

Whatever goes through ``optimizer.param_groups`` writes to FP32 masters: SAM, schedulefree, Lookahead, a clamp, the swap of an
average. The 16-bit weights follow before a model computes with them, whoever calls it, in training and evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ReferenceType, ref

import torch
from torch import nn

from ..casting.cast_module import link_of
from ..casting.masters import Masters
from ..casting.rule import rule_of
from ..compiler_internals import constant_when_traced, never_compiled
from ..policy.nested import HALF_TYPES
from . import averages, graph_calls


class FollowMasters:
    """Lets all weights of a model agree with their masters when a call comes from outside. No host read.

    Knows the masters by weak references: it lives as long as the model.
    """

    def __init__(self) -> None:
        self.followed: list[ReferenceType[Masters]] = []

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
        graph_calls.traced(self)
        return True

    def before_graph(self) -> None:
        """Before a forward call, in a graph or not."""
        # packages that were imported since the last call
        averages.patch_loaded()
        self.synchronise()

    def synchronise(self) -> None:
        """Of each weight and its master, the one that was written to last is copied to the other.

        Raises:
            AmpUsageError: A weight and its master were both written to. Nothing has been changed.
        """
        for masters in self._masters():
            masters.synchronise()

    def adopt(self) -> None:
        """Weights that have joined an optimizer get their FP32 values: numbers are about to be loaded."""
        for masters in self._masters():
            masters.adopt()

    def _masters(self) -> list[Masters]:
        return [masters for masters in (reference() for reference in self.followed) if masters is not None]


def watch(roots: Iterable[nn.Module], masters: Masters) -> None:
    """Let the weights of models follow masters before every forward call.

    Args:
        roots: Cast models.
        masters: Those of one optimizer.
    """
    for root in roots:
        follower = link_of(root).follower or FollowMasters()
        follower.followed.append(ref(masters))
        link_of(root).follower = follower
        for module in root.modules():
            # where somebody calls the module directly, or loads it
            has_weights = any(weight.dtype in HALF_TYPES for weight in module.parameters(recurse=False))
            if has_weights and rule_of(module) is not None:
                link_of(module).follower = follower
