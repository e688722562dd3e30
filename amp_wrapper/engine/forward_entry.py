"""Before every forward call, 16-bit weights and their FP32 masters take over what was written to the other of the two.

Whatever goes through ``optimizer.param_groups`` writes to FP32 masters: SAM, schedulefree, Lookahead, a clamp, the swap of an
average. The 16-bit weights follow before a model computes with them, whoever calls it, in training and evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn

from ..autocast import state
from ..autocast.call import untraced
from ..casting import fp32_values as twins
from ..casting.cast_hooks import AmpHook
from ..casting.masters import Fp32Masters
from . import averages


class FollowMasters(AmpHook):
    """Forward pre-hook of a model: all its weights agree with their masters from here on. No host read.

    Knows the masters by weak references, which neither copies nor pickled models have. Pickling synchronises too, before the
    modules below are written.
    """

    def __init__(self) -> None:
        self.followed: list[ReferenceType[Fp32Masters]] = []

    @untraced
    def __call__(self, module: nn.Module, args: Any) -> None:
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
                masters.synchronise()

    def __getstate__(self) -> dict[str, Any]:
        self.synchronise()
        return {'followed': []}


class FollowOwn(AmpHook):
    """Forward pre-hook of a module with weights of its own: does the same for these where somebody calls it directly.

    Inside a forward call of a model it costs two tests.
    """

    def __call__(self, module: nn.Module, args: Any) -> None:
        # what torch.compile traces is inside of a call of the model, or compiled apart from it
        if torch.compiler.is_compiling():
            return
        regions = state.thread.regions
        if not regions or not regions[-1].depth:
            # with those below, which some modules use without calling them
            twins.synchronise(module.parameters())


def watch(roots: Iterable[nn.Module], masters: Fp32Masters) -> None:
    """Let the weights of models follow masters before every forward call.

    Args:
        roots: Cast models.
        masters: Those of one optimizer.
    """
    for root in roots:
        hook = next((hook for hook in root._forward_pre_hooks.values() if isinstance(hook, FollowMasters)), None)
        if hook is None:
            hook = FollowMasters()
            # before anything is opened that an error would leave open
            root.register_forward_pre_hook(hook, prepend=True)
        hook.followed.append(ref(masters))
        for module in root.modules():
            own = module.parameters(recurse=False)
            known = any(isinstance(hook, FollowOwn) for hook in module._forward_pre_hooks.values())
            if not known and any(twins.master_of(weight) is not None for weight in own):
                module.register_forward_pre_hook(FollowOwn(), prepend=True)
