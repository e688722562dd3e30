"""Looks inside mmengine's wrappers: for the optimizer wrappers of this package, and for the model inside DDP."""

from __future__ import annotations

from typing import Any

from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapperDict
from torch import nn

from ..policy.policy import Policy


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


def inner_model(model: Any) -> nn.Module:
    """The model without the wrapper around it, such as DDP.

    Args:
        model: Wrapped or not.
    """
    inner: nn.Module = model.module if is_model_wrapper(model) else model
    return inner
