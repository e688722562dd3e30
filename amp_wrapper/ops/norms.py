"""The reference implementation of the norms, in plain torch, with sums in one fixed order."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .checks import check_call, is_direct
from .reference import batches_of, device_of, factor_on, groups_of, multi_tensor_isnonfinite, real_parts, scale_batch

#: The order of sums of squares, as in ``csrc/common/planner.h``: rows of lanes make a block, blocks are summed in pairs.
LANES, ROWS = 64, 16
BLOCK = LANES * ROWS
#: How many elements are converted to FP32 at a time.
_PIECE = 2**22


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


def in_memory_order(tensor: Tensor) -> Tensor:
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
        flat = in_memory_order(tensor).to(dtype)
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
    result is the same on every device, with any number of threads and however the work is grouped;
    ``csrc/common/planner.h`` describes it. Squares are not scaled: finite elements above 1.8e19 give infinity, and those
    below 1e-23 count as zero, as in torch.

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
    sums = _of_each('multi_tensor_l2norm', tensors, inverse_scale, found_inf, _sums_of_squares)
    total = _pairs(sums) if len(sums) else sums.new_zeros(())
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
    most = _of_each('multi_tensor_maxnorm', tensors, inverse_scale, found_inf, _maxima)
    total = most.max() if len(most) else most.new_zeros(())
    return _norms(total, most if per_tensor else most[:0], inverse_scale)


def _maxima(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(list(tensors), math.inf))


@torch.no_grad()
def multi_tensor_scale_l2norm(
    sources: Sequence[Tensor], targets: Sequence[Tensor], scale: Tensor | None = None, found_inf: Tensor | None = None
) -> Tensor:
    """``target = source * scale`` and the Euclidean norm of the sources in one pass, with the bits of the two ops apart.

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
    check_call('multi_tensor_scale_l2norm', sources=sources, targets=targets, scale=scale, found_inf=found_inf)
    norm, _ = multi_tensor_l2norm(sources, scale, found_inf)
    for some_sources, some_targets in batches_of(sources, targets):
        scale_batch(some_sources, some_targets, scale)
    return norm


def _of_each(
    op: str,
    tensors: Sequence[Tensor],
    inverse_scale: Tensor | None,
    found_inf: Tensor | None,
    compute: Callable[[Sequence[Tensor]], Tensor],
) -> Tensor:
    """Check the arguments and raise the flag; returns a number for each tensor, 0 for empty ones.

    Args:
        op: Whose arguments these are.
        tensors: All of them.
        inverse_scale: Checked alone.
        found_inf: The flag.
        compute: Gives the numbers of real tensors of one dtype, on one device, none empty.
    """
    check_call(op, tensors=tensors, inverse_scale=inverse_scale, found_inf=found_inf)
    if found_inf is not None:
        multi_tensor_isnonfinite(tensors, found_inf)
    numbers = torch.zeros(len(tensors), dtype=torch.float32, device=device_of(tensors, found_inf))
    for indices in groups_of(tensors).values():
        filled = [i for i in indices if tensors[i].numel()]
        if filled:
            numbers[filled] = compute(real_parts([tensors[i] for i in filled])).to(numbers)
    return numbers


def _norms(total: Tensor, each: Tensor, inverse_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    if inverse_scale is None:
        return total, each
    factor = factor_on(inverse_scale, total.device)
    return total * factor, each * factor
