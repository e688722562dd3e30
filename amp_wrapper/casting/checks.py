"""Checks models and optimizers before a cast: 16-bit weights, weights that nobody would train, numbers that a cast loses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress

import torch
from torch import Tensor, nn

from .. import ops, shards
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
        raise AmpAttachError(f'{some(lazy)} have no shape yet: run one forward pass through the lazy modules first.')
    half = {k: p for k, p in parameters.items() if p.dtype in HALF_TYPES and p.requires_grad and id(p) not in left}
    if half and not policy.from_16bit:
        raise AmpAttachError(
            f'the model is 16-bit already: {some(half)}. Hand over the FP32 model (drop .half() and .bfloat16()), or write '
            f'from_16bit=True for FP32 values that begin with the rounded ones; freeze what is not trained before.'
        )
    return half


def check_range(weights: Mapping[str, Tensor]) -> None:
    """Refuse finite weights that would become infinite in float16. Syncs, once. Collective where some are sharded.

    Args:
        weights: Those about to be cast, by name.

    Raises:
        AmpAttachError: Names the weights.
    """
    named = {n: t for n, t in weights.items() if t.dtype is not torch.float16 and not t.is_meta}
    if not named:
        return
    tensors = list(named.values())
    with torch.no_grad():
        # what is infinite or NaN before is so afterwards
        largest = [ops.multi_tensor_maxnorm([part.nan_to_num(0, 0, 0)]) for part in shards.local(tensors)]
        numbers = torch.stack([each.to(tensors[0].device) for each in largest]).double()
        # shards are different on each rank, and all of them have to know
        found = shards.Layout(tensors).exchange(numbers, greatest=True).tolist()
    beyond = {name: value for name, value in zip(named, found) if value >= _FLOAT16_LIMIT}
    if beyond:
        modules = list(dict.fromkeys(name.rpartition('.')[0] for name in beyond if '.' in name))
        # those that the model itself holds have no module that could be named
        keeps = f'keep their modules in FP32 (keep_fp32={modules}), or ' if modules else ''
        raise AmpAttachError(
            f'weights beyond the range of float16, which ends at 65504, would become infinite: {some(beyond)}, up to '
            f"{max(beyond.values()):g}: {keeps}use bfloat16 (opt_level='O5')."
        )


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
        policy: Says whether there are warnings.
    """
    if rounded and policy.verbosity >= 1:
        text = 'training begins with the rounded values'
        logger.warning(f'amp: {len(rounded)} trainable weights were 16-bit before ({some(rounded)}): {text}.')
    if momentum and policy.verbosity >= 1:
        text = 'they are frozen, and may follow a part that trains'
        logger.info(f'amp: {len(momentum)} networks stay FP32 ({some(momentum)}): {text}.')


def refuse_conversion(module: nn.Module, fn: Callable[[Tensor], Tensor], level: str) -> None:
    """Call ``fn`` with an empty tensor of each kind that the module has, and refuse it if it changes a floating type.

    Every module of a cast model that has tensors does so before its own are changed.
    """
    for dtype, device in {(t.dtype, t.device) for _, t in own_tensors(module) if t.dtype in CASTABLE}:
        made = torch.empty(0, dtype=dtype, device=device)
        # what fails here fails once more when it is called for the module
        with torch.no_grad(), suppress(Exception):
            made = fn(made)
        if isinstance(made, Tensor) and made.dtype is not dtype:
            raise AmpUsageError(
                f'{type(module).__name__} is part of a model that mixed precision is attached to, at {level}: half(), float(), '
                f'to(dtype) and their like would turn {dtype_name(dtype)} into {dtype_name(made.dtype)} behind the optimizer '
                f'and its masters. Load model.state_dict(), which is FP32, into a new model, or detach() the AmpOptimWrapper.'
            )
