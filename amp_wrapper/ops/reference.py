"""The meaning of every op, written in plain torch. No function here reads the device from the host."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from ..nested import HALF_TYPES

_TINY = torch.finfo(torch.float32).tiny


def _check_lists(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    if len(sources) != len(targets):
        raise ValueError(f'sources has {len(sources)} tensors and targets {len(targets)}: the lists must pair up.')
    for index, (source, target) in enumerate(zip(sources, targets)):
        if source.shape != target.shape:
            raise ValueError(
                f'sources[{index}] has shape {tuple(source.shape)} and targets[{index}] {tuple(target.shape)}.'
            )


def _groups(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        groups[tensor.device, tensor.dtype].append(index)
    return groups


@torch.no_grad()
def multi_tensor_isnonfinite(tensors: Sequence[Tensor], found_inf: Tensor) -> None:
    """Set ``found_inf`` to 1.0 where any element of any tensor is infinite or NaN; leave it alone otherwise.

    Elements are judged, not sums: the maximum norm of finite elements is finite, so there are no false alarms.

    Args:
        tensors: Dense floating or complex tensors of any shape, dtype and device; the list may be empty.
        found_inf: float32 scalar (0.0 or 1.0), in place.
    """
    for indices in _groups(tensors).values():
        filled = [tensors[i] for i in indices if tensors[i].numel() > 0]
        if not filled:
            continue
        # a complex number's modulus can overflow where its parts are finite
        filled = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in filled]
        norms = torch._foreach_norm(filled, math.inf)
        bad = torch.stack([norm.isfinite() for norm in norms]).all().logical_not()
        # maximum, never a sum: the flag stays exactly 0 or 1 over any number of groups and devices
        torch.maximum(found_inf, bad.to(found_inf), out=found_inf)


@torch.no_grad()
def multi_tensor_scale(
    sources: Sequence[Tensor], targets: Sequence[Tensor], scale: Tensor | None, found_inf: Tensor | None
) -> None:
    """``target = source * scale``, rounded once, with a non-finite flag.

    Each product is taken in the wider of the two types, float32 at least where they differ.

    Args:
        sources: Dense floating tensors of any dtype and device.
        targets: Tensors of the same shapes; may be the sources themselves.
        scale: float32 scalar, or None for 1.
        found_inf: float32 scalar set to 1.0 where a *source* element is non-finite, in place; None to skip the check.

    Raises:
        ValueError: The lists do not pair up.
    """
    _check_lists(sources, targets)
    if found_inf is not None:
        multi_tensor_isnonfinite(sources, found_inf)
    if scale is None:
        multi_tensor_copy(sources, targets)
        return
    # into another 16-bit type: the product is rounded, not the factor
    narrowing = [i for i, (s, t) in enumerate(zip(sources, targets)) if t.dtype in HALF_TYPES and s.dtype != t.dtype]
    for i in narrowing:
        targets[i].copy_(sources[i].float() * scale.to(sources[i].device))
    rest = sorted(set(range(len(sources))).difference(narrowing))
    multi_tensor_copy([sources[i] for i in rest], [targets[i] for i in rest])
    for (device, _), indices in _groups([targets[i] for i in rest]).items():
        torch._foreach_mul_([targets[rest[i]] for i in indices], scale.to(device))


@torch.no_grad()
def add_gradients(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """The sum of two gradients, sparse or dense, in the wider of their types; None stands for "no gradient".

    Args:
        left: Not changed.
        right: Not changed; of the same shape.

    Returns:
        A new tensor, or the only one there is.
    """
    if left is None or right is None:
        return right if left is None else left
    # dense plus sparse is known to torch in this order only
    return right + left if left.is_sparse and not right.is_sparse else left + right


@torch.no_grad()
def multi_tensor_copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """``target = source``, rounded to nearest-even where the target is narrower.

    Args:
        sources: Tensors of any dtype and device.
        targets: Tensors of the same shapes; a target that is its source is left alone.

    Raises:
        ValueError: The lists do not pair up.
    """
    _check_lists(sources, targets)
    pairs = [(source, target) for source, target in zip(sources, targets) if source is not target]
    if pairs:
        torch._foreach_copy_([target for _, target in pairs], [source for source, _ in pairs])


@torch.no_grad()
def multi_tensor_refresh(weights: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Tensor]:
    """``master = weight`` wherever the weight is not the rounded master, bit for bit.

    Args:
        weights: float16 or bfloat16 tensors.
        masters: float32 tensors of the same shapes, in place.

    Returns:
        One boolean scalar on the device for each pair: whether anything differed.

    Raises:
        ValueError: The lists do not pair up.
    """
    _check_lists(weights, masters)
    flags = []
    for weight, master in zip(weights, masters):
        weight = weight.detach()
        differs = master.to(weight.dtype).view(torch.int16) != weight.view(torch.int16)
        master.copy_(torch.where(differs, weight.float(), master))
        flags.append(differs.any())
    return flags


@torch.no_grad()
def update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    min_scale: float | None,
    max_scale: float | None,
) -> None:
    """One step of the dynamic loss scale, in place; the rule is told in :class:`~amp_wrapper.loss_scaler.LossScaler`.

    Args:
        scale: float32 scalar.
        growth_tracker: int32 scalar, clean steps since the last change.
        hysteresis_tracker: int32 scalar, overflows that are left before the scale falls.
        found_inf: float32 scalar, 0.0 or 1.0, on the same device.
        growth_factor: Above 1.
        backoff_factor: Between 0 and 1.
        growth_interval: Clean steps in a row before growth.
        hysteresis: What a clean step refills ``hysteresis_tracker`` to.
        min_scale: Floor, or None for the smallest normal float32.
        max_scale: Ceiling, or None for none below infinity.
    """
    overflow = found_inf > 0
    left = (hysteresis_tracker - 1).clamp_(min=0)
    lowered = (scale * backoff_factor).clamp_(min=_TINY if min_scale is None else min_scale)
    # a floor above the present scale never raises it
    lowered = torch.where(left > 0, scale, torch.minimum(lowered, scale))
    tracker = growth_tracker + 1
    due = tracker >= growth_interval
    raised = scale * growth_factor
    if max_scale is not None:
        raised.clamp_(max=max_scale)
    raised = torch.where(raised.isfinite(), torch.maximum(raised, scale), scale)
    scale.copy_(torch.where(overflow, lowered, torch.where(due, raised, scale)))
    growth_tracker.copy_(torch.where(overflow | due, torch.zeros_like(tracker), tracker))
    hysteresis_tracker.copy_(torch.where(overflow, left, torch.full_like(left, hysteresis)))
