"""Operations on lists of tensors by torch's own list functions, which serve where there is no compiled library."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..policy.nested import HALF_TYPES

Tensors = Sequence[Tensor]
# the largest int32
_MOST = 2**31 - 1
# about how many elements are compared together
_BATCH = 2**22


def _check(lists: Mapping[str, Tensors], **scalars: Tensor | None) -> None:
    """Raise ValueError where lists do not pair up, or a scalar is none: torch's functions would write until they notice."""
    (name, first), *others = lists.items()
    for other, tensors in others:
        if len(tensors) != len(first):
            raise ValueError(f'{name} has {len(first)} tensors and {other} {len(tensors)}: the lists must pair up.')
        for index, (one, two) in enumerate(zip(first, tensors)):
            if one.shape != two.shape:
                raise ValueError(
                    f'{name}[{index}] has shape {tuple(one.shape)} and {other}[{index}] {tuple(two.shape)}.'
                )
    for scalar, value in scalars.items():
        if value is not None and (value.numel() != 1 or value.dtype is not torch.float32):
            raise ValueError(
                f'{scalar} has shape {tuple(value.shape)} and dtype {value.dtype}: one float32 number is expected.'
            )


def multi_tensor_scale(sources: Tensors, targets: Tensors, scale: Tensor | None, found_inf: Tensor | None) -> None:
    """See :func:`amp_wrapper.ops.multi_tensor_scale`."""
    _check({'sources': sources, 'targets': targets}, scale=scale, found_inf=found_inf)
    # finite elements may be too large for a narrower type until they are multiplied
    kinds = [torch.promote_types(source.dtype, target.dtype) for source, target in zip(sources, targets)]
    worked = [t if t.dtype is kind else torch.empty_like(t, dtype=kind) for t, kind in zip(targets, kinds)]
    multi_tensor_copy(sources, worked)
    if scale is not None or found_inf is not None:
        for values, flag, factor in _by_device(worked, found_inf, scale):
            torch._amp_foreach_non_finite_check_and_unscale_(values, flag, factor)
            # which it leaves out
            torch.autograd.graph.increment_version(values)
    multi_tensor_copy(worked, targets)


def multi_tensor_axpby(xs: Tensors, ys: Tensors, a: Tensor | None, b: Tensor | None, found_inf: Tensor | None) -> None:
    """See :func:`amp_wrapper.ops.multi_tensor_axpby`."""
    _check({'xs': xs, 'ys': ys}, a=a, b=b, found_inf=found_inf)
    kinds = [torch.promote_types(y.dtype, torch.float32) for y in ys]
    products = [torch.empty_like(y, dtype=kind) for y, kind in zip(ys, kinds)]
    # a sum in 16 bits would be rounded twice, and its terms could overflow
    sums = [y if y.dtype is kind else torch.empty_like(y, dtype=kind) for y, kind in zip(ys, kinds)]
    multi_tensor_scale(xs, products, a, found_inf)
    multi_tensor_scale(ys, sums, b, None)
    if sums:
        torch._foreach_add_(sums, products)
    multi_tensor_copy(sums, ys)


def multi_tensor_isnonfinite(tensors: Tensors, found_inf: Tensor) -> None:
    """See :func:`amp_wrapper.ops.multi_tensor_isnonfinite`."""
    _check({'tensors': tensors}, found_inf=found_inf)
    for values, flag, _ in _by_device(tensors, found_inf, None):
        flag.masked_fill_(~_norms(values, math.inf).isfinite().all(), 1.0)


def multi_tensor_l2norm(tensors: Tensors, inverse_scale: Tensor | None, found_inf: Tensor | None) -> Tensor:
    """See :func:`amp_wrapper.ops.multi_tensor_l2norm`."""
    return _norm(tensors, 2.0, inverse_scale, found_inf)


@torch.no_grad()
def multi_tensor_maxnorm(
    tensors: Tensors, inverse_scale: Tensor | None = None, found_inf: Tensor | None = None
) -> Tensor:
    """Return the largest magnitude of all elements; all else is as in :func:`amp_wrapper.ops.multi_tensor_l2norm`."""
    return _norm(tensors, math.inf, inverse_scale, found_inf)


def _norm(tensors: Tensors, order: float, inverse_scale: Tensor | None, found_inf: Tensor | None) -> Tensor:
    _check({'tensors': tensors}, inverse_scale=inverse_scale, found_inf=found_inf)
    device = tensors[0].device if tensors else None
    parts = [_norms(values, order).to(device) for values, _, _ in _by_device(tensors, None, None)]
    total = torch.linalg.vector_norm(torch.cat(parts), order).float() if parts else torch.zeros((), device=device)
    if found_inf is not None:
        found_inf.masked_fill_(~total.isfinite().to(found_inf.device), 1.0)
    return total if inverse_scale is None else total * inverse_scale.reshape(()).to(total.device)


def _norms(tensors: Tensors, order: float) -> Tensor:
    """Return the norm of each tensor of one device; at least one number, whatever is empty."""
    kinds: dict[torch.dtype | None, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            # a norm in 16 bits could overflow
            kinds[torch.float32 if tensor.dtype in HALF_TYPES else None].append(tensor)
    found = [norm for kind, chosen in kinds.items() for norm in torch._foreach_norm(chosen, order, dtype=kind)]
    return torch.stack(found) if found else torch.zeros(1, device=tensors[0].device)


def _by_device(
    tensors: Tensors, flag: Tensor | None, factor: Tensor | None
) -> Iterator[tuple[list[Tensor], Tensor, Tensor]]:
    """Yield the tensors of each device, as real numbers, with a flag and a factor there; ``flag`` is raised where one is."""
    places: dict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        # a lazy conjugation does not matter here
        plain = tensor.conj() if tensor.is_conj() else tensor
        places[tensor.device].append(torch.view_as_real(plain) if tensor.is_complex() else plain)
    for device, values in places.items():
        is_here = flag is not None and flag.device == device
        here = flag.reshape(()) if flag is not None and is_here else torch.zeros((), device=device)
        yield values, here, torch.ones_like(here) if factor is None else factor.reshape(()).to(device)
        if flag is not None and not is_here:
            flag.copy_(torch.maximum(flag, here.to(flag.device).view_as(flag)))


@torch.no_grad()
def multi_tensor_copy(sources: Tensors, targets: Tensors) -> None:
    """Write each source, rounded to nearest-even where the target is narrower; a target that is its source is left alone.

    Args:
        sources: Tensors of any dtype and device.
        targets: Tensors of the same shapes.

    Raises:
        ValueError: Lists that do not pair up. Nothing is written then.
    """
    _check({'sources': sources, 'targets': targets})
    pairs = [(source, target) for source, target in zip(sources, targets) if source is not target]
    if pairs:
        torch._foreach_copy_([target for _, target in pairs], [source for source, _ in pairs])


def differ(weight: Tensor, master: Tensor) -> Tensor:
    """Return where a 16-bit weight is not its float32 master rounded, bit for bit. Any NaN is another one, rounded.

    Args:
        weight: float16 or bfloat16.
        master: float32, of the same shape and device.

    Returns:
        bool tensor of the same shape.
    """
    rounded = master.to(weight.dtype)
    return (rounded.view(torch.int16) != weight.view(torch.int16)) & ~(rounded.isnan() & weight.isnan())


@torch.no_grad()
def refresh_masters(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write into each master the elements of its weight that are not the master rounded. No host read.

    Args:
        pairs: A weight, and its master; as for :func:`differ`.
    """
    batches: dict[tuple[torch.device, torch.dtype, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    count = 0
    for weight, master in pairs:
        # together in a few operations, with room for some of them alone
        count += weight.numel()
        batches[weight.device, weight.dtype, count // _BATCH].append((weight, master))
    for batch in batches.values():
        here, there = (torch.cat([tensor.reshape(-1) for tensor in tensors]) for tensors in zip(*batch))
        values = torch.split(torch.where(differ(here, there), here.float(), there), [w.numel() for w, _ in batch])
        torch._foreach_copy_([m for _, m in batch], [value.view(m.shape) for value, (_, m) in zip(values, batch)])


def add_gradients(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients, sparse or dense, in the wider of their types; None stands for "no gradient".

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
def update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: float,
    hysteresis: float,
    min_scale: float,
    max_scale: float,
) -> None:
    """Move a loss scale and its trackers after a step, by the rule of :class:`~amp_wrapper.engine.loss_scale.LossScaler`.

    No host read. ``csrc/common/functors.h`` has the same rule for fused steps.

    Args:
        scale: float32 scalar, in place.
        growth_tracker: int32 scalar, in place: clean steps since the scale moved.
        hysteresis_tracker: int32 scalar, in place: overflows that are left until the scale falls.
        found_inf: float32 scalar, above 0 after an overflow.
        growth_factor: The scale is multiplied by this after ``growth_interval`` clean steps in a row.
        backoff_factor: The same after an overflow.
        growth_interval: See there.
        hysteresis: How many overflows since a clean step make the scale fall.
        min_scale: Not below this, but for a scale that is lower already.
        max_scale: Not above this, and never infinite.
    """
    overflow = found_inf > 0
    left = (hysteresis_tracker - 1).clamp_(min=0)
    lowered = torch.minimum((scale * backoff_factor).clamp_(min=min_scale), scale)
    lowered = torch.where(left > 0, scale, lowered)
    # compared before the addition, which could pass the largest integer
    due = growth_tracker >= min(growth_interval, _MOST) - 1
    raised = torch.maximum((scale * growth_factor).clamp_(max=max_scale), scale)
    raised = torch.where(raised.isfinite(), raised, scale)
    scale.copy_(torch.where(overflow, lowered, torch.where(due, raised, scale)))
    growth_tracker.add_(1).masked_fill_(overflow | due, 0)
    hysteresis_tracker.copy_(torch.where(overflow, left, int(min(hysteresis, _MOST))))
