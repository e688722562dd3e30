"""A forward pre-hook that makes 16-bit weights and their FP32 masters agree before every forward call.

Whatever goes through ``optimizer.param_groups`` writes to FP32 masters: SAM, schedulefree, Lookahead, a clamp, the swap of an
average. The 16-bit weights follow before a model computes with them, whoever calls it, in training and evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn

from ..casting.cast_module import CastModule
from ..casting.masters import Masters
from ..compiler_internals import constant_when_traced, never_compiled
from ..torch_internals import first_pre_hook, forward_pre_hooks
from . import averages, graph_calls


class FollowMasters:
    """Forward pre-hook of a model: all its weights agree with their masters from here on. No host read.

    Knows the masters by weak references, which neither copies nor pickled models have. Pickling synchronises too, before the
    modules below are written.
    """

    def __init__(self) -> None:
        self.followed: list[ReferenceType[Masters]] = []

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            self.is_traced()
        else:
            self.before_graph()

    never_compiled(__call__, with_callees=True)

    @constant_when_traced
    def is_traced(self) -> bool:
        """The hook is becoming part of a graph."""
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
        for reference in self.followed:
            masters = reference()
            if masters is not None:
                masters.before_forward(trains=torch.is_grad_enabled())

    def __deepcopy__(self, memo: dict[int, Any]) -> FollowMasters:
        return FollowMasters()

    def __reduce__(self) -> tuple[type[FollowMasters], tuple[()]]:
        self.synchronise()
        return FollowMasters, ()


def watch(roots: Iterable[nn.Module], masters: Masters) -> None:
    """Let the weights of models follow masters before every forward call.

    Args:
        roots: Cast models.
        masters: Those of one optimizer.
    """
    with_master = {id(weight) for weight, _ in masters.pairs}
    for root in roots:
        hook = next((hook for hook in forward_pre_hooks(root).values() if isinstance(hook, FollowMasters)), None)
        if hook is None:
            hook = FollowMasters()
            # before anything is opened that an error would leave open
            first_pre_hook(root, hook)
        hook.followed.append(ref(masters))
        for module in root.modules():
            has_masters = any(id(weight) in with_master for weight in module.parameters(recurse=False))
            if has_masters and isinstance(module, CastModule):
                # where somebody calls the module directly
                vars(module)['_amp_follower'] = ref(hook)
