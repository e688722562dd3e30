"""Finds the hooks of this package on a model, and takes them off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from .. import torch_internals
from .cast_hooks import AmpHook, CastInputs, Fp32Inputs, StayedBehind


def has_hook(module: nn.Module, kind: type) -> bool:
    """Whether a hook of this kind is on ``module``."""
    return any(isinstance(hook, kind) for hooks in torch_internals.hooks_of(module)[:3] for hook in hooks.values())


def is_cast(module: nn.Module) -> bool:
    """Whether any module below carries hooks of this package."""
    return any(has_hook(child, AmpHook) for child in module.modules())


def holds_casts(module: nn.Module) -> bool:
    """Whether ``module`` or one below has casts of a wrapper. Those of O0, O1 and O4 do not count: another wrapper replaces
    them."""
    return any(
        isinstance(hook, CastInputs) and not isinstance(hook, Fp32Inputs)
        for part in module.modules()
        for hook in torch_internals.forward_pre_hooks(part).values()
    )


def strip_hooks(root: nn.Module) -> None:
    """Take every hook of this package off ``root`` and its submodules; the tensors stay as they are."""
    for module in root.modules():
        drop_hooks(module, lambda hook: isinstance(hook, (AmpHook, StayedBehind)))


def copies_are_fp32(roots: Iterable[nn.Module]) -> None:
    """From now on, deep copies of cast models are plain FP32 models: with the values of the masters, where there are any.

    Args:
        roots: Cast models, with all their hooks on.
    """
    for root in roots:
        for module in root.modules():
            for _, _, hook in _hooks_of(module):
                if isinstance(hook, AmpHook):
                    hook.stays_behind = True


def drop_hooks(module: nn.Module, is_meant: Callable[[Any], bool]) -> None:
    """Take hooks off one module.

    Args:
        module: Where they are.
        is_meant: Whether a hook is to go.
    """
    for hooks, key, hook in list(_hooks_of(module)):
        if is_meant(hook):
            del hooks[key]
    torch_internals.drop_hook_flags(module)


def _hooks_of(module: nn.Module) -> Iterator[tuple[dict[int, Any], int, Any]]:
    """Where each hook is, its key, and itself: torch wraps load pre-hooks, and those of ours are bound methods."""
    for hooks in torch_internals.hooks_of(module):
        for key, hook in hooks.items():
            inner = getattr(hook, 'hook', hook)
            owner = getattr(inner, '__self__', None)
            yield hooks, key, owner if isinstance(owner, (AmpHook, StayedBehind)) else inner
