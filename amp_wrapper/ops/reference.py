"""The meaning of every op, written in plain torch. No function here reads the device from the host."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..policy.nested import HALF_TYPES
from .checks import check_apart, check_floating, check_lists, check_refresh_types, check_scalar, is_direct

_TINY = torch.finfo(torch.float32).tiny
_MOST = torch.iinfo(torch.int32).max

#: The order of sums of squares, as in ``csrc/common/planner.h``: rows of lanes make a block, blocks are summed in pairs.
LANES, ROWS = 64, 16
BLOCK = LANES * ROWS
#: How many elements are brought to FP32 at a time.
_PIECE = 2**22


def device_of(tensors: Sequence[Tensor], otherwise: Tensor | None = None) -> torch.device:
    """Where the tensors are; the device of ``otherwise``, or the CPU, where there are none."""
    if tensors:
        return tensors[0].device
    return torch.device('cpu') if otherwise is None else otherwise.device


def _groups(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        groups[tensor.device, tensor.dtype].append(index)
    return groups


def _batches(*lists: Sequence[Tensor]) -> list[tuple[list[Tensor], ...]]:
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


def _raise_flag(found_inf: Tensor, bad: Tensor) -> None:
    # maximum, never a sum: the flag stays exactly 0 or 1 over any number of groups and devices
    torch.maximum(found_inf, bad.to(found_inf).view_as(found_inf), out=found_inf)


def _factor(scalar: Tensor, device: torch.device) -> Tensor:
    # one element of any shape is allowed, and torch's lists take those without dimensions only
    return scalar.to(device).reshape(())


@torch.no_grad()
def multi_tensor_isnonfinite(tensors: Sequence[Tensor], found_inf: Tensor) -> None:
    """Set ``found_inf`` to 1.0 where any element of any tensor is infinite or NaN; leave it alone otherwise.

    Elements are judged, not sums: the maximum norm of finite elements is finite, so there are no false alarms.

    Args:
        tensors: Dense floating or complex tensors of any shape, dtype and device; the list may be empty.
        found_inf: float32 scalar (0.0 or 1.0), in place.

    Raises:
        ValueError: A sparse tensor, or a flag of another shape or dtype.
    """
    check_lists([('tensors', tensors)])
    check_floating(('tensors', tensors))
    check_scalar('found_inf', found_inf, written=True)
    check_apart([('tensors', tensors)], [], found_inf=found_inf)
    for indices in _groups(tensors).values():
        filled = _real([tensors[i] for i in indices if tensors[i].numel() > 0])
        if filled:
            norms = torch._foreach_norm(filled, math.inf)
            _raise_flag(found_inf, torch.stack([norm.isfinite() for norm in norms]).all().logical_not())


def _real(tensors: Sequence[Tensor]) -> list[Tensor]:
    # a complex number's modulus can overflow where its parts are finite
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]


@torch.no_grad()
def multi_tensor_scale(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
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
    _check_scale(sources, targets, scale, found_inf)
    if found_inf is not None:
        multi_tensor_isnonfinite(sources, found_inf)
    for some_sources, some_targets in _batches(sources, targets):
        _scale(some_sources, some_targets, scale)


def _check_scale(
    sources: Sequence[Tensor], targets: Sequence[Tensor], scale: Tensor | None, found_inf: Tensor | None
) -> None:
    check_lists([('sources', sources)], [('targets', targets)])
    check_floating(('sources', sources), ('targets', targets))
    check_scalar('scale', scale)
    check_scalar('found_inf', found_inf, written=True)
    check_apart([('sources', sources)], [('targets', targets)], scale=scale, found_inf=found_inf)


def _scale(sources: Sequence[Tensor], targets: Sequence[Tensor], scale: Tensor | None) -> None:
    if scale is None:
        _copy(sources, targets)
        return
    # into a 16-bit type: the product is rounded, and not the factor before it
    narrowing = [i for i, target in enumerate(targets) if target.dtype in HALF_TYPES]
    for i in narrowing:
        targets[i].copy_(sources[i].float() * _factor(scale, sources[i].device))
    rest = sorted(set(range(len(sources))).difference(narrowing))
    _copy([sources[i] for i in rest], [targets[i] for i in rest])
    for (device, dtype), indices in _groups([targets[i] for i in rest]).items():
        factor = _factor(scale, device)
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
        check_x: Whether the flag speaks of the xs.
        check_y: Whether it speaks of the ys.

    Raises:
        ValueError: The lists do not pair up, or memory that is written is shared. Nothing is written then.
    """
    check_lists([('xs', xs), ('ys', ys)], [('targets', targets)])
    check_floating(('xs', xs), ('ys', ys), ('targets', targets))
    check_scalar('a', a)
    check_scalar('b', b)
    check_scalar('found_inf', found_inf, written=True)
    check_apart([('xs', xs), ('ys', ys)], [('targets', targets)], a=a, b=b, found_inf=found_inf)
    if found_inf is not None:
        multi_tensor_isnonfinite([*(xs if check_x else ()), *(ys if check_y else ())], found_inf)
    for some_xs, some_ys, some_targets in _batches(xs, ys, targets):
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
            left = list(torch._foreach_mul(left, _factor(a, device)))
        if b is not None:
            right = list(torch._foreach_mul(right, _factor(b, device)))
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
    check_lists([('sources', sources)], [('targets', targets)])
    # said before copies are made of what has gaps
    pairs = [(source, target) for source, target in zip(sources, targets) if source is not target]
    if pairs:
        for batch in _batches(*zip(*pairs)):
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


def _pairs(values: Tensor) -> Tensor:
    """Sums over the last dimension: neighbours, then pairs of them, and so on; a missing one counts as zero."""
    while values.shape[-1] > 1:
        if values.shape[-1] % 2:
            values = F.pad(values, (0, 1))
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def _block_sums(flat: Tensor) -> Tensor:
    """One sum of squares for each block of a vector whose length is a multiple of :data:`BLOCK`."""
    squares = (flat * flat).view(-1, ROWS, LANES)
    sums = squares[:, 0]
    for row in range(1, ROWS):
        sums = sums + squares[:, row]
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def _in_memory_order(tensor: Tensor) -> Tensor:
    """A vector of the elements: as they lie in memory where there are no gaps, and otherwise the last dimension first."""
    if not tensor.is_contiguous() and is_direct((tensor,)) and not tensor.is_neg():
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: strides[dim], reverse=True))
    return tensor.reshape(-1)


def _sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """One sum for each tensor, in the order of ``csrc/common/planner.h``; all of one real dtype, on one device, none empty."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    blocks: list[Tensor] = []
    waiting: list[Tensor] = []
    for index, tensor in enumerate(tensors):
        flat = _in_memory_order(tensor).to(dtype)
        waiting.append(F.pad(flat, (0, -len(flat) % BLOCK)))
        # many small tensors at once, large ones piece by piece
        if index + 1 == len(tensors) or sum(map(len, waiting)) >= _PIECE:
            joined = torch.cat(waiting)
            sums = torch.cat([_block_sums(piece) for piece in torch.split(joined, _PIECE)])
            blocks += torch.split(sums, [len(part) // BLOCK for part in waiting])
            waiting = []
    # those of about one size together: a tree with more zeros has the same sum
    trees: dict[int, list[int]] = defaultdict(list)
    for index, sums in enumerate(blocks):
        trees[1 << max(len(sums) - 1, 0).bit_length()].append(index)
    result = torch.zeros(len(tensors), dtype=dtype, device=tensors[0].device)
    for size, indices in trees.items():
        result[indices] = _pairs(torch.stack([F.pad(blocks[i], (0, size - len(blocks[i]))) for i in indices]))
    return result


@torch.no_grad()
def multi_tensor_l2norm(
    tensors: Sequence[Tensor],
    inverse_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    per_tensor: bool = False,
) -> tuple[Tensor, Tensor]:
    """The Euclidean norm over all elements, ``sqrt(sum(x * x)) * inverse_scale``, in float32.

    The order of the sum depends on shapes alone (and on strides, where a tensor without gaps is not contiguous), so the
    result is the same on every device, with any number of threads and however the work is grouped. It is told in
    ``csrc/common/planner.h``. Squares are not scaled: finite elements
    above 1.8e19 give infinity, and those below 1e-23 count as zero, as in torch.

    Args:
        tensors: Dense floating tensors of any dtype; the list may be empty.
        inverse_scale: float32 scalar, or None for 1.
        found_inf: float32 scalar set to 1.0 where an element is non-finite, in place; None to skip the check.
        per_tensor: Whether each tensor's own norm is asked for.

    Returns:
        (float32 scalar, float32 tensor with one norm for each tensor, or none), on the device of the first tensor.

    Raises:
        ValueError: A sparse tensor, or a scalar of another shape or dtype.
    """
    device = _check_norm(tensors, inverse_scale, found_inf)
    sums = torch.zeros(len(tensors), dtype=torch.float32, device=device)
    for indices in _groups(tensors).values():
        filled = [i for i in indices if tensors[i].numel()]
        if filled:
            sums[filled] = _sums_of_squares(_real([tensors[i] for i in filled])).to(sums)
    total = _pairs(sums) if len(sums) else torch.zeros((), dtype=torch.float32, device=device)
    return _norms(_root(total), _root(sums) if per_tensor else sums[:0], inverse_scale)


def _root(sums: Tensor) -> Tensor:
    # torch's float32 root on a CPU can be one unit off; that of float64, rounded, is the right one
    return sums.double().sqrt().float()


@torch.no_grad()
def multi_tensor_maxnorm(
    tensors: Sequence[Tensor],
    inverse_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    per_tensor: bool = False,
) -> tuple[Tensor, Tensor]:
    """The largest magnitude of all elements, ``max(abs(x)) * inverse_scale``; NaN where one is NaN.

    Args:
        tensors: Dense floating tensors of any dtype; the list may be empty, which gives 0.
        inverse_scale: float32 scalar, or None for 1.
        found_inf: float32 scalar set to 1.0 where an element is non-finite, in place; None to skip the check.
        per_tensor: Whether each tensor's own norm is asked for.

    Returns:
        (float32 scalar, float32 tensor with one norm for each tensor, or none), on the device of the first tensor.

    Raises:
        ValueError: A sparse tensor, or a scalar of another shape or dtype.
    """
    device = _check_norm(tensors, inverse_scale, found_inf)
    most = torch.zeros(len(tensors), dtype=torch.float32, device=device)
    for indices in _groups(tensors).values():
        filled = [i for i in indices if tensors[i].numel()]
        if filled:
            norms = torch._foreach_norm(_real([tensors[i] for i in filled]), math.inf)
            most[filled] = torch.stack(norms).float().to(device)
    total = most.max() if len(most) else torch.zeros((), dtype=torch.float32, device=device)
    return _norms(total, most if per_tensor else most[:0], inverse_scale)


@torch.no_grad()
def multi_tensor_scale_l2norm(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """:func:`multi_tensor_scale` and :func:`multi_tensor_l2norm` of the sources in one pass, with the bits of both.

    Args:
        sources: Dense floating tensors of any dtype; the list may be empty.
        targets: Tensors of the same shapes; may be the sources themselves.
        scale: float32 scalar, or None for 1.
        found_inf: float32 scalar set to 1.0 where a *source* element is non-finite, in place; None to skip the check.

    Returns:
        float32 scalar on the device of the first source, ``sqrt(sum(source * source)) * scale``.

    Raises:
        ValueError: The lists do not pair up, or memory that is written is shared. Nothing is written then.
    """
    _check_scale(sources, targets, scale, found_inf)
    norm, _ = multi_tensor_l2norm(sources, scale, found_inf)
    for some_sources, some_targets in _batches(sources, targets):
        _scale(some_sources, some_targets, scale)
    return norm


def _check_norm(tensors: Sequence[Tensor], inverse_scale: Tensor | None, found_inf: Tensor | None) -> torch.device:
    check_lists([('tensors', tensors)])
    check_floating(('tensors', tensors))
    check_scalar('inverse_scale', inverse_scale)
    check_scalar('found_inf', found_inf, written=True)
    if found_inf is not None:
        multi_tensor_isnonfinite(tensors, found_inf)
    return device_of(tensors, found_inf)


def _norms(total: Tensor, each: Tensor, inverse_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    if inverse_scale is None:
        return total, each
    factor = _factor(inverse_scale, total.device)
    return total * factor, each * factor


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
    """One step of the dynamic loss scale, in place; the rule is told in :class:`~amp_wrapper.engine.loss_scale.LossScaler`.

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
