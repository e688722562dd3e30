"""Patches ``OptimWrapperDict`` so that its members know each other's parameters, and attach to a model together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from mmengine.optim import OptimWrapperDict
from torch import nn

from ...policy.nested import parameters_of
from ..log import log
from ..wrappers import amp_wrappers

# wrapper -> the OptimWrapperDict it is a member of
_dicts: weakref.WeakKeyDictionary[Any, weakref.ref[OptimWrapperDict]] = weakref.WeakKeyDictionary()


def introduce_members(original: Callable[..., None], wrappers: Any, **members: Any) -> None:
    """Replaces ``OptimWrapperDict.__init__``: each member of this package is given its name and the other members."""
    original(wrappers, **members)
    for member in members.values():
        _dicts[member] = weakref.ref(wrappers)
    for name, member in amp_wrappers(wrappers).items():
        others = {key: other for key, other in members.items() if other is not member}
        member.member_name = name
        member.join(others.values())
        if member.policy.verbosity >= 1:
            _log_scale_problems(name, member, others)


def _log_scale_problems(name: str, member: Any, others: Mapping[str, Any]) -> None:
    """Say where gradients will carry another loss scale than the optimizer expects, or none that they need."""
    ours = {key: other for key, other in others.items() if amp_wrappers(other)}
    half = [
        key
        for key, other in ours.items()
        if torch.float16 in (other.policy.cast_model_type, other.policy.autocast_dtype)
    ]
    has_scale = not all(scaler.is_one for scaler in member.loss_scalers)
    if half and not has_scale and member.policy.enabled:
        # small gradients are lost, and overflows unseen, on their way through float16 modules of others
        log(
            f'{name} has no loss scale: if its loss flows back through {half[0]}, which computes in '
            f"float16, write loss_scale='dynamic' for {name}, too"
        )


def initialize_count_status(
    original: Callable[..., None], wrappers: Any, model: nn.Module, *args: Any, **kwargs: Any
) -> None:
    """Replaces ``OptimWrapperDict.initialize_count_status``: attaches all members to the model."""
    original(wrappers, model, *args, **kwargs)
    attach_members(wrappers, model)


def attach_members(wrappers: OptimWrapperDict, model: nn.Module) -> None:
    """Attach every member whose parameters ``model`` holds; each is given the parameters that the others step.

    Args:
        wrappers: With members of this package, of mmengine, or both.
        model: Wrapped or not.
    """
    stepped = {name: parameters_of(member.optimizer) for name, member in wrappers.items()}
    inside = {id(parameter) for parameter in model.parameters()}
    for name, member in amp_wrappers(wrappers).items():
        if inside.issuperset(map(id, stepped[name])):
            foreign = [p for other, parameters in stepped.items() if other != name for p in parameters]
            member.attach(model, foreign=foreign)


def attach_siblings(wrapper: Any, model: nn.Module) -> None:
    """Attach a member of an ``OptimWrapperDict`` together with its siblings; nothing for a wrapper on its own.

    Args:
        wrapper: Of this package.
        model: Wrapped or not.
    """
    reference = _dicts.get(wrapper)
    together = None if reference is None else reference()
    if together is not None:
        attach_members(together, model)
