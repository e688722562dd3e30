"""Checks a model's tensors before they are cast: 16-bit already, without a shape, beyond the range of float16."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from .. import shards
from ..errors import AmpAttachError, some
from ..policy.levels import Policy, dtype_name
from ..policy.nested import HALF_TYPES

logger = logging.getLogger('amp_wrapper')

#: From here on a float32 rounds to infinity in float16.
_FLOAT16_LIMIT = 65520.0


def rounded_before(
    named: Iterable[tuple[str, nn.Parameter]], policy: Policy, left: frozenset[int] = frozenset()
) -> dict[str, nn.Parameter]:
    """The trainable weights that are 16-bit already, by name.

    Frozen ones do not count: nothing is ever added to them, so they lose nothing.

    Args:
        named: The parameters of a model, with their names.
        policy: Says whether they are taken.
        left: Parameters, by id, that nobody casts.

    Raises:
        AmpAttachError: There are some, and the policy does not take them; or a parameter without a shape.
    """
    half: dict[str, nn.Parameter] = {}
    lazy = []
    for key, parameter in named:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            lazy.append(key)
        elif parameter.dtype in HALF_TYPES and parameter.requires_grad and id(parameter) not in left:
            half[key] = parameter
    if lazy:
        raise AmpAttachError(
            f'parameters without a shape yet: {some(lazy)}. Run one forward pass through the lazy modules first.'
        )
    if half and not policy.from_16bit:
        shown = [f'{key} ({dtype_name(parameter.dtype)})' for key, parameter in half.items()]
        raise AmpAttachError(
            f'the model is 16-bit already: {some(shown)}. Hand over the FP32 model (drop .half() and .bfloat16()): '
            f'weights that are rounded once have lost what FP32 updates are for. Where there is no FP32 model, such as with a '
            f'published 16-bit checkpoint, write from_16bit=True: FP32 values then begin with the rounded ones. Weights that '
            f'are not trained need neither: freeze them first, by requires_grad_(False).'
        )
    return half


def lose_steps(buffers: Mapping[str, Tensor], dtype: torch.dtype) -> list[str]:
    """The names of buffers that rise or fall along a dimension, and that have equal neighbours once they are cast. Syncs, once.

    Args:
        buffers: Those about to be cast, by name.
        dtype: The type they are cast to.
    """
    chosen = {name: t for name, t in buffers.items() if t.dtype is torch.float32 and t.numel() > 1 and not t.is_meta}
    if not chosen:
        return []
    home = next(iter(chosen.values())).device
    found = torch.stack([_steps_are_lost(tensor, dtype).to(home) for tensor in chosen.values()]).tolist()
    return [name for name, lost in zip(chosen, found) if lost]


def _steps_are_lost(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    lost = torch.zeros((), dtype=torch.bool, device=tensor.device)
    for dim in range(tensor.dim()):
        if tensor.shape[dim] > 1:
            steps, rounded = tensor.diff(dim=dim), tensor.to(dtype).float().diff(dim=dim)
            lost = lost | (((steps > 0).all() | (steps < 0).all()) & (rounded == 0).any())
    return lost


def warn(
    rounded: Collection[str],
    infinite: Collection[str],
    coarse: Collection[str],
    momentum: Collection[str],
    policy: Policy,
) -> None:
    """Warn of tensors that the cast has taken although numbers were or are lost, and name the networks that it has left.

    Args:
        rounded: The names of the weights that :func:`rounded_before` found.
        infinite: The names of the buffers that :func:`check_range` found.
        coarse: The names of the buffers that :func:`lose_steps` found.
        momentum: The names of the parts that stay FP32 since they follow others.
        policy: Says whether there are warnings, and where the FP32 values of the weights are.
    """
    if policy.verbosity < 1:
        return
    if rounded:
        if not policy.casts_model:
            now = 'they are FP32 now, from the rounded values'
        elif policy.master_weights:
            now = 'their FP32 masters begin with the rounded values'
        else:
            now = 'they are stepped without masters'
        logger.warning(f'amp: {len(rounded)} trainable weights were 16-bit before ({some(rounded)}): {now}.')
    if infinite:
        keep = _keep_fp32_of(infinite)
        remedy = f' Where they are more than a mask, keep their modules in FP32: {keep}.' if keep else ''
        logger.warning(
            f'amp: {len(infinite)} buffers have numbers beyond the range of float16, which become infinite: '
            f'{some(infinite)}.{remedy}'
        )
    if momentum:
        logger.info(
            f'amp: {some(momentum)} stay FP32: frozen, with the names and shapes of a part that trains, as networks have that '
            f'follow it in small steps.'
        )
    if coarse:
        keep = _keep_fp32_of(coarse)
        remedy = f'keep their modules in FP32: {keep}' if keep else 'move them into a module of their own'
        logger.warning(
            f'amp: {len(coarse)} buffers lose steps between neighbours in 16-bit: {some(coarse)}. Where they are tables of '
            f'numbers that are computed with, {remedy}.'
        )


def check_range(weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor], dtype: torch.dtype) -> list[str]:
    """Refuse finite weights that would become infinite. Syncs, once. Collective where some are sharded.

    Args:
        weights: Those about to be cast, by name.
        buffers: Those about to be cast, by name.
        dtype: The type they are cast to; only float16 has a range smaller than float32's.

    Returns:
        The names of buffers of which the same is true. They are taken all the same: masks hold such numbers on purpose.

    Raises:
        AmpAttachError: Names the weights.
    """
    chosen = [
        (name, tensor)
        for name, tensor in (*weights.items(), *buffers.items())
        if dtype is torch.float16 and tensor.dtype is not dtype and tensor.numel() and not tensor.is_meta
    ]
    if not chosen:
        return []
    home = chosen[0][1].device
    tensors = [tensor for _, tensor in chosen]
    with torch.no_grad():
        # what is infinite or NaN before is so afterwards
        largest = [_largest(tensor).to(home) for tensor in shards.local(tensors)]
        # shards are different on each rank, and all of them have to know
        found = shards.Layout(tensors).exchange(torch.stack(largest), greatest=True).tolist()
    beyond = {name: value for (name, _), value in zip(chosen, found) if value >= _FLOAT16_LIMIT}
    refused = [name for name in beyond if name in weights]
    if refused:
        keep = _keep_fp32_of(refused)
        # keep_fp32 names modules, and the model itself would be all of it
        remedy = 'The model itself holds them, in no submodule that keep_fp32 could name: use'
        if keep:
            remedy = f'Keep their modules in FP32 ({keep}), or use'
        raise AmpAttachError(
            f'weights beyond the range of float16, which ends at 65504, would become infinite: {some(refused)}, up to '
            f"{max(beyond[name] for name in refused):g}. {remedy} bfloat16 (opt_level='O5')."
        )
    return list(beyond)


def _largest(tensor: Tensor) -> Tensor:
    """The largest finite magnitude, a float64 scalar; 0 without any."""
    if not tensor.numel():
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    return tensor.detach().abs().nan_to_num(0, 0, 0).max().double()


def _keep_fp32_of(names: Collection[str]) -> str:
    """The setting that keeps the modules of tensors in FP32; '' where one of them belongs to the model itself."""
    modules = list(dict.fromkeys(name.rpartition('.')[0] for name in names))
    return '' if '' in modules else f'keep_fp32={modules}'
