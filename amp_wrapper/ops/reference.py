"""The reference implementation of the element-wise ops and of the loss scale's rule, in plain torch. No host read."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from ..policy.nested import HALF_TYPES
from .checks import check_call, check_lists, check_refresh_types, check_scalar, is_direct

_TINY = torch.finfo(torch.float32).tiny
_MOST = torch.iinfo(torch.int32).max


def device_of(tensors: Sequence[Tensor], otherwise: Tensor | None = None) -> torch.device:
    """Where the tensors are; the device of ``otherwise``, or the CPU, where there are none."""
    if tensors:
        return tensors[0].device
    return torch.device('cpu') if otherwise is None else otherwise.device


def groups_of(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """The indices of the tensors of each device and type."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        groups[tensor.device, tensor.dtype].append(index)
    return groups


def batches_of(*lists: Sequence[Tensor]) -> list[tuple[list[Tensor], ...]]:
    """The lists in the order of work: tensors that are worked on in place, then each of the others by itself.

    What the others read is read before anything is written.

    Args:
        *lists: Lists that pair up; the last of them is written, and keeps the tensors that it has.
    """
    direct = [is_direct(tensors) for tensors in zip(*lists)]
    if all(direct):
        return [tuple(list(tensors) for tensors in lists)]
    *read, written = lists
    first = [index for index, yes in enumerate(direct) if yes]
    batches = [tuple([tensors[i] for i in first] for tensors in lists)]
    for i, yes in enumerate(direct):
        if not yes:
            batches.append((*([tensors[i].clone()] for tensors in read), [written[i]]))
    return batches


def factor_on(scalar: Tensor, device: torch.device) -> Tensor:
    """A scalar argument on a device, without dimensions."""
    # one element of any shape is allowed, and torch's lists take those without dimensions only
    return scalar.to(device).reshape(())


@torch.no_grad()
def multi_tensor_isnonfinite(tensors: Sequence[Tensor], found_inf: Tensor) -> None:
    """Set ``found_inf`` to 1.0 where any element of any tensor is infinite or NaN; leave it alone otherwise.

    Each element is looked at, no sum that could overflow: large finite elements never raise the flag.

    Args:
        tensors: Dense floating or complex tensors of any shape, dtype and device; the list may be empty.
        found_inf: float32 scalar (0.0 or 1.0), in place.

    Raises:
        ValueError: A sparse tensor, or a flag of another shape or dtype.
    """
    check_call('multi_tensor_isnonfinite', tensors=tensors, found_inf=found_inf)
    for indices in groups_of(tensors).values():
        filled = real_parts([tensors[i] for i in indices if tensors[i].numel() > 0])
        if filled:
            norms = torch._foreach_norm(filled, math.inf)
            bad = torch.stack([norm.isfinite() for norm in norms]).all().logical_not()
            # maximum, never a sum: the flag stays exactly 0 or 1 over any number of groups and devices
            torch.maximum(found_inf, bad.to(found_inf).view_as(found_inf), out=found_inf)


def real_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Complex tensors as views of pairs of real numbers; others as they are."""
    # a complex number's modulus can overflow where its parts are finite
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]


@torch.no_grad()
def multi_tensor_scale(
    sources: Sequence[Tensor], targets: Sequence[Tensor], scale: Tensor | None = None, found_inf: Tensor | None = None
) -> None:
    """``target = source * scale``, with a non-finite flag.

    The product is taken in float32 (in a wider type where source or target has one), and rounded to the target.

    Args:
        sources: Dense floating tensors of any dtype and device.
        targets: Tensors of the same shapes; may be the sources themselves.
        scale: float32 scalar, or None for 1.
        found_inf: float32 scalar set to 1.0 where a *source* element is non-finite, in place; None to skip the check.

    Raises:
        ValueError: The lists do not pair up, or memory that is written is shared. Nothing is written then.
    """
    check_call('multi_tensor_scale', sources=sources, targets=targets, scale=scale, found_inf=found_inf)
    if found_inf is not None:
        multi_tensor_isnonfinite(sources, found_inf)
    for some_sources, some_targets in batches_of(sources, targets):
        scale_batch(some_sources, some_targets, scale)


def scale_batch(sources: Sequence[Tensor], targets: Sequence[Tensor], scale: Tensor | None) -> None:
    """:func:`multi_tensor_scale` of tensors that are worked on in place, or alone.

    Args:
        sources: As checked.
        targets: As checked.
        scale: float32 scalar, or None for 1.
    """
    if scale is None:
        _copy(sources, targets)
        return
    # into a 16-bit type: the product is rounded, and not the factor before it
    narrowing = [i for i, target in enumerate(targets) if target.dtype in HALF_TYPES]
    for i in narrowing:
        targets[i].copy_(sources[i].float() * factor_on(scale, sources[i].device))
    rest = sorted(set(range(len(sources))).difference(narrowing))
    _copy([sources[i] for i in rest], [targets[i] for i in rest])
    for (device, dtype), indices in groups_of([targets[i] for i in rest]).items():
        factor = factor_on(scale, device)
        if dtype is torch.float64:
            factor = factor.double()
        torch._foreach_mul_([targets[rest[i]] for i in indices], factor)


@torch.no_grad()
def multi_tensor_axpby(
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    targets: Sequence[Tensor],
    a: Tensor | None = None,
    b: Tensor | None = None,
    found_inf: Tensor | None = None,
    check_x: bool = True,
    check_y: bool = True,
) -> None:
    """``target = x * a + y * b``, with a non-finite flag.

    Two products and a sum, each rounded to float32 (to a wider type where one takes part), then rounded to the target.

    Args:
        xs: Dense floating tensors of any dtype and device.
        ys: Tensors of the same shapes.
        targets: Tensors of the same shapes; may be the xs or the ys themselves.
        a: float32 scalar, or None for 1.
        b: float32 scalar, or None for 1.
        found_inf: float32 scalar set to 1.0 where a checked element is non-finite, in place; None to skip the check.
        check_x: Whether the xs are checked.
        check_y: Whether the ys are.

    Raises:
        ValueError: The lists do not pair up, or memory that is written is shared. Nothing is written then.
    """
    check_call('multi_tensor_axpby', xs=xs, ys=ys, targets=targets, a=a, b=b, found_inf=found_inf)
    if found_inf is not None:
        multi_tensor_isnonfinite([*(xs if check_x else ()), *(ys if check_y else ())], found_inf)
    for some_xs, some_ys, some_targets in batches_of(xs, ys, targets):
        _axpby(some_xs, some_ys, some_targets, a, b)


def _axpby(
    xs: Sequence[Tensor], ys: Sequence[Tensor], targets: Sequence[Tensor], a: Tensor | None, b: Tensor | None
) -> None:
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, (x, y) in enumerate(zip(xs, ys)):
        groups[x.device, torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)].append(index)
    for (device, dtype), indices in groups.items():
        left = [xs[i].to(dtype) for i in indices]
        right = [ys[i].to(device=device, dtype=dtype) for i in indices]
        if a is not None:
            left = list(torch._foreach_mul(left, factor_on(a, device)))
        if b is not None:
            right = list(torch._foreach_mul(right, factor_on(b, device)))
        torch._foreach_copy_([targets[i] for i in indices], torch._foreach_add(left, right))


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
    # called for each parameter, mostly in vain: only a sum needs the guard
    with torch.no_grad():
        if left.is_sparse and right.is_sparse and left.dtype == right.dtype == torch.float16:
            # torch adds no sparse float16 on a CPU
            return (left.float() + right.float()).to(left.dtype)
        # dense plus sparse is known to torch in this order only
        return right + left if left.is_sparse and not right.is_sparse else left + right


@torch.no_grad()
def multi_tensor_copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """``target = source``, rounded to nearest-even where the target is narrower.

    Args:
        sources: Dense tensors of any dtype and device.
        targets: Tensors of the same shapes; a target that is its source is left alone.

    Raises:
        ValueError: The lists do not pair up, or memory that is written is shared. Nothing is written then.
    """
    check_call('multi_tensor_copy', floating=False, sources=sources, targets=targets)
    # said before copies are made of what has gaps
    pairs = [(source, target) for source, target in zip(sources, targets) if source is not target]
    if pairs:
        for batch in batches_of(*zip(*pairs)):
            _copy(*batch)


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    pairs = [(source, target) for source, target in zip(sources, targets) if source is not target]
    if pairs:
        torch._foreach_copy_([target for _, target in pairs], [source for source, _ in pairs])


@torch.no_grad()
def multi_tensor_refresh(weights: Sequence[Tensor], masters: Sequence[Tensor]) -> Tensor:
    """``master = weight`` wherever the weight is not the rounded master, bit for bit. Any NaN is the rounded other.

    Args:
        weights: float16 or bfloat16 tensors.
        masters: float32 tensors of the same shapes, in place.

    Returns:
        bool tensor with one element for each pair, on the device of the first: whether anything differed.

    Raises:
        ValueError: The lists do not pair up, have other dtypes, or share memory. Nothing is written then.
    """
    check_lists([('weights', weights)], [('masters', masters)])
    check_refresh_types(weights, masters)
    # what cannot be worked on in place is read before anything is written
    read = [weight if is_direct((weight, master)) else weight.clone() for weight, master in zip(weights, masters)]
    flags = []
    for weight, master in zip(read, masters):
        weight = weight.detach()
        differs = master.to(weight.dtype).view(torch.int16) != weight.view(torch.int16)
        # which of many NaN a rounding gives depends on the device, and on the instruction set
        differs &= ~(master.isnan() & weight.isnan())
        master.copy_(torch.where(differs, weight.float(), master))
        flags.append(differs.any())
    return torch.stack(flags) if flags else torch.zeros(0, dtype=torch.bool, device=device_of(weights))


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
    min_scale: float | None = None,
    max_scale: float | None = None,
) -> None:
    """One step of the dynamic loss scale, in place, by the rule of :class:`~amp_wrapper.engine.loss_scale.LossScaler`.

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

    Raises:
        ValueError: A tensor of another shape or dtype, or on another device. Nothing is written then.
    """
    check_scalar('scale', scale, written=True)
    check_scalar('growth_tracker', growth_tracker, torch.int32, written=True)
    check_scalar('hysteresis_tracker', hysteresis_tracker, torch.int32, written=True)
    check_scalar('found_inf', found_inf)
    others = (('growth_tracker', growth_tracker), ('hysteresis_tracker', hysteresis_tracker), ('found_inf', found_inf))
    for name, tensor in others:
        if tensor.device != scale.device:
            raise ValueError(f'{name} is on {tensor.device} and scale on {scale.device}: they belong on one device.')
    growth_interval, hysteresis = min(growth_interval, _MOST), min(hysteresis, _MOST)
    # one element of any shape each
    scale, growth_tracker, hysteresis_tracker, found_inf = (
        state.view(()) for state in (scale, growth_tracker, hysteresis_tracker, found_inf)
    )
    overflow = found_inf > 0
    left = (hysteresis_tracker - 1).clamp_(min=0)
    lowered = (scale * backoff_factor).clamp_(min=_TINY if min_scale is None else min_scale)
    # a floor above the present scale never raises it
    lowered = torch.where(left > 0, scale, torch.minimum(lowered, scale))
    # compared before the addition, which could pass the largest integer
    due = growth_tracker >= growth_interval - 1
    tracker = growth_tracker + 1
    raised = scale * growth_factor
    if max_scale is not None:
        raised.clamp_(max=max_scale)
    raised = torch.where(raised.isfinite(), torch.maximum(raised, scale), scale)
    scale.copy_(torch.where(overflow, lowered, torch.where(due, raised, scale)))
    growth_tracker.copy_(torch.where(overflow | due, torch.zeros_like(tracker), tracker))
    hysteresis_tracker.copy_(torch.where(overflow, left, torch.full_like(left, hysteresis)))
