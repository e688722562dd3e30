"""The reference implementation of the counts over powers of two, in plain torch. No host read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import check_apart, check_distinct, check_floating, check_lists, check_own, check_table, check_tensor
from .norms import in_memory_order
from .reference import real_parts
from .schemas import EXPONENTS

#: Bits of a float32: those besides the sign, those of infinity, and how many lie behind the exponent.
_MAGNITUDE, _INFINITY, _MANTISSA = 0x7FFFFFFF, 0x7F800000, 23
#: The column of zeros; the others are what stands in the exponent field of a float32.
_ZERO = EXPONENTS - 1
#: How many elements are converted to float32 at a time.
_PIECE = 2**20


@torch.no_grad()
def multi_tensor_exponents(tensors: Sequence[Tensor], counts: Tensor, largest: Tensor) -> None:
    """Count the numbers of each tensor by their power of two, and find the largest finite magnitude.

    Column ``n`` of ``counts`` from 1 to 254 counts ``2 ** (n - 127) <= abs(x) < 2 ** (n - 126)``; ``n`` is what stands in
    the exponent field of the float32. Column 0 counts numbers that are subnormal in float32, 255 infinities and NaN, 256
    zeros of either sign. Other types are counted by their values as float32: float16 and bfloat16 have each of theirs
    there, float64 is rounded. A complex number counts as two.

    The counts are integers, so they are the same on every device and with any number of threads.

    Args:
        tensors: Dense floating or complex tensors of any shape and dtype, on one device; the list may be empty.
        counts: int64 (tensors, 257), contiguous, on that device. What is counted is added to it, in place.
        largest: float32 (tensors,), contiguous, on that device, numbers of at least 0.0: each becomes the maximum of itself
            and the finite magnitudes of its tensor, in place.

    Raises:
        ValueError: A sparse or integer tensor, several devices, ``counts`` or ``largest`` of another shape or dtype, or memory
            that is written and shared. Nothing is written then.
    """
    check_exponents(tensors, counts, largest)
    most = torch.full((len(tensors),), torch.iinfo(torch.int32).min, dtype=torch.int32, device=largest.device)
    filled = [index for index, tensor in enumerate(tensors) if tensor.numel()]
    for index, tensor in zip(filled, real_parts([tensors[i] for i in filled])):
        flat = in_memory_order(tensor.detach().resolve_neg())
        for piece in torch.split(flat, _PIECE):
            # by their bits: arithmetic may take subnormal numbers for zeros
            magnitude = piece.float().view(torch.int32) & _MAGNITUDE
            column = torch.where(magnitude == 0, _ZERO, magnitude >> _MANTISSA).long()
            counts[index].scatter_add_(0, column, torch.ones_like(column[:1]).expand_as(column))
            finite = torch.where(magnitude < _INFINITY, magnitude, 0).amax()
            most[index] = torch.maximum(most[index], finite)
    if filled:
        # floats that are not negative have the order of their bits
        largest.copy_(torch.maximum(largest.view(torch.int32), most).view(torch.float32))


def check_exponents(tensors: Sequence[Tensor], counts: Tensor, largest: Tensor) -> None:
    """The arguments of :func:`multi_tensor_exponents`.

    Raises:
        TypeError: Something is no tensor.
        ValueError: Says what is wrong with which argument.
    """
    read = ('tensors', tensors)
    written = {'counts': counts, 'largest': largest}
    check_lists([read], [])
    check_floating(read)
    for (name, table), shape, dtype in zip(
        written.items(), ((len(tensors), EXPONENTS), (len(tensors),)), (torch.int64, torch.float32)
    ):
        check_tensor(name, table)
        check_table(name, table, shape, dtype)
        if not torch.compiler.is_compiling() and table.is_neg():
            raise ValueError(f'{name} has its negative bit set: give {name}.resolve_neg().')
        check_own(name, table, written=True)
    # torch.compile of torch 2.6 traces no | of dicts
    named = {**{f'tensors[{index}]': tensor for index, tensor in enumerate(tensors)}, **written}
    first = next(iter(named))
    for name, tensor in named.items():
        if tensor.device != named[first].device:
            raise ValueError(
                f'{name} is on {tensor.device} and {first} on {named[first].device}: they belong on one device.'
            )
    check_distinct(written, {})
    check_apart([], [read], **written)
