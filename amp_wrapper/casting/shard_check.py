"""Checks how FSDP2 (``fully_shard``) has sharded a model against the level: the type in which each parameter is gathered."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from ..distributed_internals import parameters_of_group, shard_groups, types_of_group
from ..errors import AmpAttachError
from ..policy.levels import Policy
from ..policy.nested import CASTABLE
from ..shards import is_sharded


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
        group, own, is_cast = groups.get(id(parameter)), parameter.dtype, id(parameter) in casts
        if not is_sharded(parameter) or not own.is_floating_point:
            continue
        needs = ['a group of fully_shard, which gathers it'] if group is None and policy.casts_model else []
        if policy.split_masters:
            needs = ['no master: FP32 shards are masters, and nothing is kept twice. Leave master_weights out']
        elif group is not None:
            held = torch.float32 if parameter.requires_grad and own in CASTABLE else own
            gathered, averaged = (dtype or own for dtype in types_of_group(group))
            half = policy.cast_model_type if is_cast else None
            wanted = {
                'dtype': (own, half if half and has_16bit_shards(policy) else held),
                'param_dtype': (gathered, half or own),
                'reduce_dtype': (averaged, torch.float32 if is_cast and policy.accumulate_in_fp32 else averaged),
            }
            needs = [f'{option}={needed}, not {has}' for option, (has, needed) in wanted.items() if has is not needed]
        if needs:
            raise AmpAttachError(
                f'the model was sharded in a way that {policy.opt_level} cannot keep: {name} needs {" and ".join(needs)}. '
                f'Write amp_wrapper.fully_shard(model, {policy.opt_level!r}, mesh=mesh) for the FP32 model.'
            )
