"""Checks models and optimizers before a cast: 16-bit weights, weights that nobody would train, numbers that a cast loses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from .. import shards
from ..errors import AmpAttachError, AmpUsageError, logger, some
from ..policy.levels import Policy, dtype_name
from ..policy.nested import CASTABLE, HALF_TYPES
from .modules import own_tensors

#: From here on a float32 rounds to infinity in float16.
_FLOAT16_LIMIT = 65520.0


def rounded_before(
    named: Iterable[tuple[str, nn.Parameter]], policy: Policy, left: Collection[int] = ()
) -> dict[str, nn.Parameter]:
    """Find the trainable weights that are 16-bit already, by name. Frozen ones lose nothing: nothing is ever added to them.

    Args:
        named: The parameters of a model, with their names.
        policy: Says whether they are taken.
        left: Parameters, by id, that nobody casts.

    Raises:
        AmpAttachError: There are some, and the policy does not take them; or a parameter without a shape.
    """
    parameters = dict(named)
    lazy = [key for key, p in parameters.items() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise AmpAttachError(
            f'parameters without a shape yet: {some(lazy)}. Run one forward pass through the lazy modules first.'
        )
    half = {k: p for k, p in parameters.items() if p.dtype in HALF_TYPES and p.requires_grad and id(p) not in left}
    if half and not policy.from_16bit:
        shown = [f'{key} ({dtype_name(parameter.dtype)})' for key, parameter in half.items()]
        raise AmpAttachError(
            f'the model is 16-bit already: {some(shown)}. Hand over the FP32 model (drop .half() and .bfloat16()). Where there '
            f'is none, as of a published 16-bit checkpoint, write from_16bit=True: FP32 values then begin with the rounded '
            f'ones. Weights that are not trained need neither: freeze them first, by requires_grad_(False).'
        )
    return half


def check_range(weights: Mapping[str, Tensor]) -> None:
    """Refuse finite weights that would become infinite in float16. Syncs, once. Collective where some are sharded.

    Args:
        weights: Those about to be cast, by name.

    Raises:
        AmpAttachError: Names the weights.
    """
    named = {n: t for n, t in weights.items() if t.dtype is not torch.float16 and t.numel() and not t.is_meta}
    if not named:
        return
    tensors = list(named.values())
    with torch.no_grad():
        largest = torch.stack([_largest(part).to(tensors[0].device) for part in shards.local(tensors)])
        # shards are different on each rank, and all of them have to know
        found = shards.Layout(tensors).exchange(largest, greatest=True).tolist()
    beyond = {name: value for name, value in zip(named, found) if value >= _FLOAT16_LIMIT}
    if beyond:
        modules = list(dict.fromkeys(name.rpartition('.')[0] for name in beyond))
        remedy = f'keep their modules in FP32 (keep_fp32={modules})'
        if '' in modules:
            # keep_fp32 names modules, and the model itself would be all of it
            remedy = 'move those that the model itself holds into a module of their own, for keep_fp32'
        raise AmpAttachError(
            f'weights beyond the range of float16, which ends at 65504, would become infinite: {some(list(beyond))}, up to '
            f"{max(beyond.values()):g}: {remedy}, or use bfloat16 (opt_level='O5')."
        )


def _largest(tensor: Tensor) -> Tensor:
    """The largest finite magnitude, a float64 scalar; 0 without any. What is infinite or NaN before is so afterwards."""
    if not tensor.numel():
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    return tensor.detach().abs().nan_to_num(0, 0, 0).max().double()


def is_too_fine(buffer: Tensor, dtype: torch.dtype) -> bool:
    """Whether a buffer is a table that a 16-bit type cannot hold. Syncs.

    Such a table has finite numbers beyond the range of the type, or rises or falls along a dimension and would have equal
    neighbours.
    """
    if buffer.is_meta or buffer.dtype is dtype:
        return False
    rounded = buffer.to(dtype).float()
    loses = (rounded.isinf() & buffer.isfinite()).any()
    for dim in range(buffer.dim()):
        steps = buffer.diff(dim=dim)
        loses |= ((steps > 0).all() | (steps < 0).all()) & (rounded.diff(dim=dim) == 0).any()
    return bool(loses)


def warn(rounded: Collection[str], momentum: Collection[str], policy: Policy) -> None:
    """Warn of weights that were rounded before the cast, and name the networks that it has left.

    Args:
        rounded: The names of the weights that :func:`rounded_before` found.
        momentum: The names of the parts that stay FP32 since they follow others.
        policy: Says whether there are warnings, and whether the weights have FP32 values.
    """
    has_fp32 = policy.master_weights or not (policy.casts_model or policy.keeps_types)
    now = 'their FP32 values begin with the rounded ones' if has_fp32 else 'they are stepped without masters'
    for level, names, what, text in (
        (logging.WARNING, rounded, 'trainable weights were 16-bit before', now),
        (logging.INFO, momentum, 'networks stay FP32', 'they are frozen, and may follow a part that trains'),
    ):
        if names and policy.verbosity >= 1:
            logger.log(level, f'amp: {len(names)} {what} ({some(names)}): {text}.')


def refuse_conversion(module: nn.Module, fn: Callable[[Tensor], Tensor], level: str) -> None:
    """Call ``fn`` with an empty tensor of each kind that the module has, and refuse it if it changes a floating type.

    Every module of a cast model that has tensors does so before its own are changed.
    """
    for dtype, device in {(t.dtype, t.device) for _, t in own_tensors(module) if t.dtype in CASTABLE}:
        try:
            with torch.no_grad():
                made = fn(torch.empty(0, dtype=dtype, device=device))
        except Exception:
            # the conversion itself raises this error
            return
        if isinstance(made, Tensor) and made.dtype is not dtype:
            raise AmpUsageError(
                f'{type(module).__name__} is part of a model that mixed precision is attached to, at {level}: half(), '
                f'float(), bfloat16(), double(), type() and to(dtype) would turn its {dtype_name(dtype)} tensors into '
                f'{dtype_name(made.dtype)} behind the optimizer, its masters and the casts. The level decides the types. For a '
                f'model of another type load model.state_dict(), whose values are FP32, into a new one; with AmpOptimWrapper, '
                f'detach() gives the FP32 model back. Moves to a device and memory formats go on.'
            )
