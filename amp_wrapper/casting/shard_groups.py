"""Checks how FSDP2 (``fully_shard``) has sharded a model against the level: the type in which each parameter is gathered."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from .. import fsdp_internals
from ..errors import AmpAttachError, some
from ..policy.levels import Policy, dtype_name
from ..policy.nested import HALF_TYPES
from ..shards import is_sharded
from .modules import class_name


def has_16bit_shards(policy: Policy) -> bool:
    """Whether sharded weights are 16-bit themselves: without masters. Otherwise the FP32 shards are the masters."""
    return policy.casts_model and not policy.master_weights


@dataclasses.dataclass(frozen=True, eq=False)
class _Group:
    """A group of ``fully_shard``, and what it is called in messages."""

    group: fsdp_internals.ShardGroup
    names: Sequence[str]

    @property
    def label(self) -> str:
        kinds = [class_name(module) for module in self.group.modules]
        return some([f'{name} ({kind})' if name else kind for name, kind in zip(self.names, kinds)], 3)

    @property
    def argument(self) -> str:
        """What ``fully_shard`` was called with, as a user would write it."""
        shown = [_path(name) for name in self.names]
        return shown[0] if len(shown) == 1 else f'[{some(shown, 3)}]'


def _path(name: str) -> str:
    """How Python reaches a module: ``model.layers[0]`` for 'layers.0'."""
    parts = [f'[{part}]' if part.isdigit() else f'.{part}' for part in name.split('.') if part]
    return 'model' + ''.join(parts)


def check(
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
        AmpAttachError: Names each module, a parameter, and the line to write instead. Nothing has been changed.
    """
    problems: list[str] = []
    paths = {id(module): name for model in within for name, module in model.named_modules()}
    owner: dict[int, _Group] = {}
    for group in (group for model in within for group in fsdp_internals.shard_groups(model)):
        known = _Group(group, [paths.get(id(module), '') for module in group.modules])
        owner |= {id(parameter): known for parameter in group.parameters}
    for prefix, root in roots:
        left = {id(p) for module in root.modules() if isinstance(module, leave) for p in module.parameters()}
        sharded = {name: p for name, p in root.named_parameters(prefix=prefix) if is_sharded(p) and id(p) not in left}
        if not sharded:
            continue
        if policy.split_masters:
            raise AmpAttachError(
                f"master_weights='split' and sharded parameters ({some(list(sharded))}): FP32 shards are the masters already, "
                'and nothing is kept twice. Leave master_weights out.'
            )
        without = [name for name, parameter in sharded.items() if id(parameter) not in owner]
        if without and policy.casts_model:
            problems.append(
                f'{some(without)}: sharded by something else than fully_shard (distribute_tensor, parallelize_module), which '
                f'gathers nothing that could be 16-bit. Shard the model by torch.distributed.fsdp.fully_shard as well, or use '
                f'O1, O4 or O0.'
            )
        by_group: dict[_Group, dict[str, nn.Parameter]] = {}
        for name, parameter in sharded.items():
            if id(parameter) in owner:
                by_group.setdefault(owner[id(parameter)], {})[name] = parameter
        for known, parameters in by_group.items():
            problem = _conflict(known, parameters, policy, casts)
            if problem:
                problems.append(problem)
    if problems:
        rows = problems[0] if len(problems) == 1 else ''.join(f'\n  {problem}' for problem in problems)
        raise AmpAttachError(f'the model was sharded in a way that {policy.opt_level} cannot keep: {rows}')


def _conflict(known: _Group, parameters: Mapping[str, nn.Parameter], policy: Policy, casts: Collection[int]) -> str:
    """What is wrong with one group; empty where nothing is."""
    group = known.group
    half = policy.cast_model_type if policy.casts_model else None
    wrong_shards = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.requires_grad
        and parameter.dtype in (torch.float32, *HALF_TYPES)
        and parameter.dtype is not (half if has_16bit_shards(policy) and id(parameter) in casts else torch.float32)
    }
    if wrong_shards:
        name, parameter = next(iter(wrong_shards.items()))
        found = f'{known.label} has shards in {dtype_name(parameter.dtype)} ({some(list(wrong_shards))})'
        if has_16bit_shards(policy) and id(parameter) in casts:
            assert half is not None
            return (
                f'{found}, and without masters the optimizer steps {dtype_name(half)}: cast before sharding, '
                f'model.to({half}), or let amp.initialize(..., mesh=mesh) do both.'
            )
        return (
            f'{found}, and FP32 shards are what the optimizer steps: shard the FP32 model (drop .half(), .bfloat16()).'
        )
    # of each parameter: what it is computed with
    wanted = {name: half if id(p) in casts and half is not None else p.dtype for name, p in parameters.items()}
    wrong = {
        name: dtype for name, dtype in wanted.items() if (group.param_dtype or parameters[name].dtype) is not dtype
    }
    if not wrong:
        return _reduction(known, policy, any(dtype is half for dtype in wanted.values()))
    name, dtype = next(iter(wrong.items()))
    gathered = dtype_name(group.param_dtype or parameters[name].dtype)
    computes = f'{policy.opt_level} computes with {name} in {dtype_name(dtype)}'
    found = f'{known.label} gathers its parameters in {gathered}, and {computes}'
    if len(wrong) == len(wanted):
        line = (
            f'mp_policy=MixedPrecisionPolicy(param_dtype={dtype})'
            if dtype is half
            else 'no param_dtype in its mp_policy'
        )
        return f'{found}: fully_shard({known.argument}, ...) with {line}.'
    kept = sorted({other.rpartition('.')[0] for other, each in wanted.items() if each is not half})
    shown = some([_path(each) for each in kept], 3)
    return (
        f'{found}, but not all of the group ({len(wrong)} of {len(wanted)} parameters): give those that stay in FP32 a group '
        f'of their own before, fully_shard([{shown}], ...) without param_dtype, and the others '
        f'param_dtype={half}; or let amp.initialize(..., mesh=mesh) shard the model.'
    )


def _reduction(known: _Group, policy: Policy, is_half: bool) -> str:
    group = known.group
    averaged_in = group.reduce_dtype or group.parameters[0].dtype
    if is_half and policy.accumulate_in_fp32 and averaged_in is not torch.float32:
        return (
            f'accumulate_in_fp32=True, and {known.label} averages gradients in '
            f'{dtype_name(averaged_in)}: fully_shard({known.argument}, ...) with '
            f'mp_policy=MixedPrecisionPolicy(..., reduce_dtype=torch.float32).'
        )
    return ''
