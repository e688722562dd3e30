"""Dicts of forward hooks in which the hooks of modules below a model rest: they cost next to nothing where they do nothing."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..autocast import regions, state
from ..torch_internals import FORWARD_HOOKS, forward_hooks, forward_pre_hooks


class QuietHooks(OrderedDict[int, Callable[..., Any]]):
    """The forward hooks, or pre-hooks, of one module: false, as an empty dict is, where only ours is in it and rests.

    torch takes a slower way through each module that has hooks at all, and that is most of what they cost. Everything else sees
    the hooks as they are. torch.compile takes no length of such a dict: once something is compiled, hooks are in plain ones.

    Attributes:
        ours: The key of the hook of ours; -1 before there is one.
    """

    ours = -1

    def __bool__(self) -> bool:
        # of all threads: what rests does nothing
        if torch.compiler.is_compiling():
            return True
        if len(self) != 1 or self.ours not in self:
            return len(self) > 0
        open_regions = state.thread.regions
        cover = open_regions[-1].cover if open_regions else None
        return (
            cover is None
            # a module that is called by itself has to close what it opened, also where it calls itself
            or forward_pre_hooks(cover.module) is self
            or forward_hooks(cover.module) is self
        )


_quiet: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@regions.when_compiling
def _make_plain() -> None:
    for module in tuple(_quiet):
        for name in FORWARD_HOOKS:
            hooks = vars(module)[name]
            if isinstance(hooks, QuietHooks) and not weakref.getweakrefcount(hooks):
                vars(module)[name] = OrderedDict(hooks)
    _quiet.clear()


def make_quiet(module: nn.Module) -> None:
    """Let the hooks that come to a module rest, where it has none and nothing is compiled in the process."""
    for name in FORWARD_HOOKS if not regions.has_compiled() else ():
        hooks = vars(module)[name]
        # the handles of hooks that somebody registered know the dict that these were in
        if type(hooks) is OrderedDict and not hooks and not weakref.getweakrefcount(hooks):
            vars(module)[name] = QuietHooks()
            _quiet.add(module)
