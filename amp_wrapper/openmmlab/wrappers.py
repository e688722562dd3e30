"""Looks inside mmengine's wrappers: for the optimizer wrappers of this package, and for the model inside DDP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapperDict
from mmengine.registry import OPTIM_WRAPPERS
from torch import nn

from ..policy.levels import Policy


def amp_wrappers(wrapper: Any) -> dict[str, Any]:
    """Those of this package among the members of an ``OptimWrapperDict``, by name; under '' a single wrapper.

    Args:
        wrapper: An optimizer wrapper, or what it is built from.
    """
    members = dict(wrapper.items()) if isinstance(wrapper, OptimWrapperDict) else {'': wrapper}
    return {name: member for name, member in members.items() if isinstance(getattr(member, 'policy', None), Policy)}


def wrappers_of(runner: Any) -> dict[str, Any]:
    """:func:`amp_wrappers` of what a runner trains with.

    Args:
        runner: Whose wrapper is built or not.
    """
    return amp_wrappers(getattr(runner, 'optim_wrapper', None))


def is_built_here(wrapper: Any) -> bool:
    """Whether an optimizer wrapper is one of this package, or will be.

    Args:
        wrapper: A wrapper, or the config that it is built from.
    """
    if not isinstance(wrapper, Mapping):
        return bool(amp_wrappers(wrapper))
    kind = wrapper.get('type', 'OptimWrapper')
    kind = OPTIM_WRAPPERS.get(kind) if isinstance(kind, str) else kind
    return any(base.__module__.startswith('amp_wrapper.') for base in getattr(kind, '__mro__', ()))


def inner_model(model: Any) -> nn.Module:
    """The model without the wrapper around it, such as DDP.

    Args:
        model: Wrapped or not.
    """
    inner: nn.Module = model.module if is_model_wrapper(model) else model
    return inner
