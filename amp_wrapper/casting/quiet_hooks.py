"""Hooks that cost nothing where they have nothing to do.

At O1 and O4 of the functional API every module below a model has a pair of hooks, so that calling it directly is cast as
calling the model. Inside of an open region they do nothing, but torch takes a slower way through each module that has hooks at
all, and that is most of what they cost. So there the dict that holds them says that it is empty.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .cast_hooks import EnterCastsBelow, LeaveCastsBelow, innermost_region


class QuietHooks(OrderedDict[int, Callable[..., Any]]):
    """The forward hooks, or pre-hooks, of one module: false, as an empty dict is, where only ours is in it and rests.

    Everything else sees the hooks as they are.

    Attributes:
        ours: The key of the hook of ours; -1 before there is one.
    """

    ours = -1

    def __bool__(self) -> bool:
        if len(self) != 1 or self.ours not in self:
            return len(self) > 0
        region = innermost_region()
        return (
            region is None
            # a module that is called by itself has to close what it opened, also where it calls itself
            or region.pre_hooks is self
            or region.hooks is self
            # the hook has to see to copies of weights that were made in the other mode
            or region.grad is not torch.is_grad_enabled()
        )


def cover_below(module: nn.Module, enter: EnterCastsBelow, leave: LeaveCastsBelow) -> None:
    """Put the pair on a module below a model."""
    _make_quiet(module, '_forward_pre_hooks')
    _make_quiet(module, '_forward_hooks')
    for hooks, handle in (
        (module._forward_pre_hooks, module.register_forward_pre_hook(enter, prepend=True)),
        (module._forward_hooks, module.register_forward_hook(leave, always_call=True)),
    ):
        if isinstance(hooks, QuietHooks):
            hooks.ours = handle.id


def _make_quiet(module: nn.Module, name: str) -> None:
    hooks = vars(module)[name]
    # the handles of hooks that somebody registered know the dict that these were in
    if type(hooks) is OrderedDict and not hooks and not weakref.getweakrefcount(hooks):
        vars(module)[name] = QuietHooks()
