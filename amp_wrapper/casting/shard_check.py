"""Checks how FSDP2 (``fully_shard``) has sharded a model against the level: the type in which each parameter is gathered."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from ..distributed_internals import parameters_of_group, shard_groups, types_of_group
from ..errors import AmpAttachError, some
from ..policy.levels import Policy
from ..policy.nested import CASTABLE
from ..shards import is_sharded
from .modules import class_name

#: Why there are no split masters of shards.
NO_SPLIT_SHARDS = 'FP32 shards are the masters already, and nothing is kept twice: leave master_weights out.'


def has_16bit_shards(policy: Policy) -> bool:
    """Whether sharded weights are 16-bit themselves: without masters. Otherwise the FP32 shards are the masters."""
    return policy.casts_model and not policy.master_weights


def check_shards(
    roots: Sequence[tuple[str, nn.Module]], policy: Policy, casts: Collection[int], within: Sequence[nn.Module]
) -> None:
    """Refuse a model whose groups gather parameters in another type than the level computes with.

    Args:
        roots: (qualified name, module) pairs.
        policy: The configuration; enabled.
        casts: The parameters, by id, that the level computes with in 16-bit.
        within: The models that the roots are, or are parts of.

    Raises:
        AmpAttachError: Names the first parameter that does not fit. Nothing has been changed.
    """
    groups = {id(parameter): group for group in shard_groups(within) for parameter in parameters_of_group(group)}
    for name, parameter in [each for prefix, root in roots for each in root.named_parameters(prefix=prefix)]:
        if not is_sharded(parameter) or not parameter.is_floating_point():
            continue
        if policy.split_masters:
            raise AmpAttachError(f"master_weights='split' conflicts with the sharded {name}: {NO_SPLIT_SHARDS}")
        problem = _conflict(parameter, groups.get(id(parameter)), policy, id(parameter) in casts)
        if problem:
            raise AmpAttachError(
                f'the model was sharded in a way that {policy.opt_level} cannot keep: {name} {problem}. Write amp_wrapper.'
                f'fully_shard(model, {policy.opt_level!r}, mesh=mesh) for the FP32 model, or give the groups these types.'
            )


def _conflict(parameter: nn.Parameter, group: Any, policy: Policy, is_cast: bool) -> str:
    """What the group of a parameter has and the level needs otherwise; empty where they agree."""
    own, half = parameter.dtype, policy.cast_model_type
    if group is None:
        return 'is sharded by something else, and nothing gathers it' if policy.casts_model else ''
    gathered, averaged = types_of_group(group)
    held = torch.float32 if parameter.requires_grad and own in CASTABLE else own
    wanted = [
        ('dtype', own, half if is_cast and has_16bit_shards(policy) else held),
        ('param_dtype', gathered or own, half if is_cast else own),
        ('reduce_dtype', averaged or own, torch.float32 if is_cast and policy.accumulate_in_fp32 else averaged or own),
    ]
    wrong = [f'{option}={needed}, not {has}' for option, has, needed in wanted if has is not needed]
    modules = some(list(map(class_name, group.modules)), 3)
    return f'of the group of {modules} needs {" and ".join(wrong)}' if wrong else ''
