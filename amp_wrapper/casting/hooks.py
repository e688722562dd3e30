"""The hooks of this package on modules: of state dicts, of computed weights, of the engine. They survive copies and pickle."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from .. import torch_internals


class AmpHook:
    """Marks the hooks of this package, so that they can be found and taken off."""

    #: Whether a deep copy of the module goes without this hook, since its weights are FP32.
    stays_behind = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.stays_behind:
            return StayedBehind()
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        # an unpickled model belongs to no optimizer: its deep copies keep its types
        return {name: value for name, value in self.__dict__.items() if name != 'stays_behind'}


class StayedBehind:
    """Takes the place of a hook in a deep copy of a module, and does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


def strip_hooks(root: nn.Module) -> None:
    """Take every hook of this package off ``root`` and its submodules; the tensors stay as they are."""
    for module in root.modules():
        for hooks, key, hook in list(_hooks_of(module)):
            if isinstance(hook, (AmpHook, StayedBehind)):
                del hooks[key]
        torch_internals.drop_hook_flags(module)


def drop_in_copies(roots: Iterable[nn.Module]) -> None:
    """From now on, deep copies of these models go without the hooks that they have now."""
    for root in roots:
        for module in root.modules():
            for _, _, hook in _hooks_of(module):
                if isinstance(hook, AmpHook):
                    hook.stays_behind = True


def _hooks_of(module: nn.Module) -> Iterator[tuple[dict[int, Any], int, Any]]:
    """Where each hook is, its key, and itself: torch wraps load pre-hooks, and those of ours are bound methods."""
    for hooks in torch_internals.hooks_of(module):
        for key, hook in hooks.items():
            inner = getattr(hook, 'hook', hook)
            owner = getattr(inner, '__self__', None)
            yield hooks, key, owner if isinstance(owner, (AmpHook, StayedBehind)) else inner
