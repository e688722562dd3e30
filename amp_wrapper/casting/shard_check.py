"""Checks how FSDP2 (``fully_shard``) has sharded a model against the level: the type in which each parameter is gathered."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from ..errors import AmpAttachError, some
from ..fsdp_internals import ShardGroup, shard_groups
from ..policy.levels import Policy, dtype_name
from ..policy.nested import CASTABLE
from ..shards import is_sharded
from .modules import class_name

#: Why there are no split masters of shards.
NO_SPLIT_SHARDS = 'FP32 shards are the masters already, and nothing is kept twice: leave master_weights out.'


def has_16bit_shards(policy: Policy) -> bool:
    """Whether sharded weights are 16-bit themselves: without masters. Otherwise the FP32 shards are the masters."""
    return policy.casts_model and not policy.master_weights


def check_shards(
    roots: Sequence[tuple[str, nn.Module]],
    policy: Policy,
    casts: Collection[int],
    within: Sequence[nn.Module],
    leave: tuple[type, ...] = (),
) -> None:
    """Refuse a model whose groups gather parameters in another type than the level computes with.

    Args:
        roots: (qualified name, module) pairs.
        policy: The configuration; enabled.
        casts: The parameters, by id, that the level computes with in 16-bit.
        within: The models that the roots are, or are parts of.
        leave: Module classes that the level has no say in.

    Raises:
        AmpAttachError: Names the first parameter of each group that does not fit. Nothing has been changed.
    """
    owners = {
        id(parameter): group for model in within for group in shard_groups(model) for parameter in group.parameters
    }
    problems: dict[int, str] = {}
    for prefix, root in roots:
        left = {id(p) for module in root.modules() if isinstance(module, leave) for p in module.parameters()}
        for name, parameter in root.named_parameters(prefix=prefix):
            if not is_sharded(parameter) or not parameter.is_floating_point() or id(parameter) in left:
                continue
            if policy.split_masters:
                raise AmpAttachError(f"master_weights='split' conflicts with the sharded {name}: {NO_SPLIT_SHARDS}")
            group = owners.get(id(parameter))
            problem = _conflict(name, parameter, group, policy, id(parameter) in casts)
            if problem:
                problems.setdefault(id(group), problem)
    if problems:
        rows = ''.join(f'\n  {problem}' for problem in problems.values())
        raise AmpAttachError(
            f'the model was sharded in a way that {policy.opt_level} cannot keep:{rows}\nWrite amp_wrapper.fully_shard(model, '
            f'{policy.opt_level!r}, mesh=mesh) for the FP32 model, or give the groups the types in brackets.'
        )


def _conflict(name: str, parameter: nn.Parameter, group: ShardGroup | None, policy: Policy, is_cast: bool) -> str:
    """What the group of a parameter does and the level does otherwise; empty where they agree."""
    own, half = parameter.dtype, policy.cast_model_type
    if group is None:
        alone = 'sharded by something else than fully_shard, and nothing gathers it'
        return f'{name} is {alone} in {dtype_name(half)}' if policy.casts_model and half is not None else ''
    computed = half if is_cast and half is not None else own
    stepped = computed if is_cast and has_16bit_shards(policy) else torch.float32
    averaged = group.reduce_dtype or own
    summed = torch.float32 if is_cast and policy.accumulate_in_fp32 else averaged
    for does, found, needs, wanted, option in (
        ('holds shards in', own, 'steps', stepped if parameter.requires_grad and own in CASTABLE else own, 'dtype'),
        ('gathers in', group.param_dtype or own, 'computes', computed, 'param_dtype'),
        ('averages in', averaged, 'with accumulate_in_fp32=True sums', summed, 'reduce_dtype'),
    ):
        if found is not wanted:
            modules, level = some(list(map(class_name, group.modules)), 3), policy.opt_level
            rest = f'and {level} {needs} {name} in {dtype_name(wanted)} ({option}={wanted})'
            return f'{modules} {does} {dtype_name(found)}, {rest}'
    return ''
