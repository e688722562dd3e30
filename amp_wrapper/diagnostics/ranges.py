"""How large the numbers of tensors are: counts over powers of two, and what float16 and bfloat16 would make of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import AmpUsageError

#: Counts of one tensor: 0 the numbers that are subnormal in float32; 1 to 254 those of a float32 exponent, so that ``n`` counts
#: 2 ** (n - 127) <= abs(x) < 2 ** (n - 126); 255 infinities and NaN; 256 zeros.
BINS, NONFINITE, ZERO = 257, 255, 256
_BIAS = 127
#: Elements that are counted at a time.
_PIECE = 2**20


def exponent_of(number: float) -> int:
    """The power of two at or below a positive finite number: ``2 ** e <= number < 2 ** (e + 1)``."""
    return math.frexp(number)[1] - 1


@dataclasses.dataclass(frozen=True)
class TypeRange:
    """The range of a 16-bit type, in powers of two.

    Attributes:
        dtype: float16 or bfloat16 (float32, too).
        top: Numbers of at least ``2 ** top`` become infinite.
        normal: Numbers below ``2 ** normal`` lose digits.
        bottom: The smallest number above zero is ``2 ** bottom``; those below half of it become zero.
        largest: The largest finite number.
    """

    dtype: torch.dtype
    top: int
    normal: int
    bottom: int
    largest: float


def range_of(dtype: torch.dtype) -> TypeRange:
    """The range of a floating type.

    Args:
        dtype: float16, bfloat16 or float32.
    """
    info = torch.finfo(dtype)
    digits = round(-math.log2(info.eps))
    normal = exponent_of(info.tiny)
    return TypeRange(dtype, exponent_of(info.max) + 1, normal, normal - digits, float(info.max))


@dataclasses.dataclass(frozen=True)
class Ranges:
    """How many numbers of some tensors lie between each two powers of two.

    Attributes:
        counts: As many as :data:`BINS`.
        largest: The largest finite absolute value; 0.0 where there is none.
    """

    counts: tuple[int, ...]
    largest: float

    @property
    def total(self) -> int:
        """All elements."""
        return sum(self.counts)

    @property
    def zeros(self) -> int:
        """Elements that are zero."""
        return self.counts[ZERO]

    @property
    def nonfinite(self) -> int:
        """Elements that are infinite or NaN."""
        return self.counts[NONFINITE]

    def between(self, low: int | None, high: int | None) -> int:
        """The number of finite elements above zero with ``2 ** low <= abs(x) < 2 ** high``.

        Args:
            low: A power of two; None for no limit.
            high: A power of two; None for no limit.
        """
        first = 0 if low is None else max(low + _BIAS, 0)
        last = NONFINITE if high is None else min(max(high + _BIAS, 0), NONFINITE)
        return sum(self.counts[first:last])

    def share(self, count: int) -> float:
        """A count as a share of all elements; 0.0 of none."""
        total = self.total
        return count / total if total else 0.0

    def powers(self) -> dict[int, int]:
        """Power of two to the number of elements from it up to the next one, where there are any."""
        return {index - _BIAS: count for index, count in enumerate(self.counts[:NONFINITE]) if count}

    def plain(self) -> dict[str, Any]:
        """All of it as numbers, strings and dicts, for JSON."""
        return {
            'elements': self.total,
            'largest': self.largest,
            'zeros': self.zeros,
            'nonfinite': self.nonfinite,
            'powers': {str(power): count for power, count in self.powers().items()},
        }


def added(ranges: Iterable[Ranges]) -> Ranges:
    """Those of several tensors together."""
    listed = list(ranges)
    if not listed:
        return Ranges((0,) * BINS, 0.0)
    return Ranges(tuple(map(sum, zip(*(each.counts for each in listed)))), max(each.largest for each in listed))


def count_on_device(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Counts and largest values of tensors of one device, without a host read.

    Args:
        tensors: Floating tensors of any shape and type, all on one device.

    Returns:
        int64 (tensors, BINS) and float32 (tensors,), on that device.
    """
    if not tensors:
        raise AmpUsageError('tensors=[] is empty: there is nothing to count.')
    device = tensors[0].device
    counts = torch.zeros((len(tensors), BINS), dtype=torch.int64, device=device)
    largest = torch.zeros(len(tensors), dtype=torch.float32, device=device)
    for row, most, tensor in zip(counts, largest, tensors):
        # indices need eight bytes an element
        for piece in torch.split(tensor.detach().reshape(-1), _PIECE) if tensor.numel() else ():
            # by their bits: arithmetic may take subnormal numbers for zeros
            magnitude = piece.float().view(torch.int32) & 0x7FFFFFFF
            powers = magnitude >> 23
            column = torch.where(magnitude == 0, ZERO, powers).long()
            row.scatter_add_(0, column, torch.ones_like(column[:1]).expand_as(column))
            # floats that are not negative have the order of their bits
            most.copy_(torch.maximum(most, torch.where(powers == NONFINITE, 0, magnitude).amax().view(torch.float32)))
    return counts, largest


def measure(tensors: Mapping[str, Tensor]) -> dict[str, Ranges]:
    """The ranges of named tensors. Syncs, once for each device.

    Args:
        tensors: Name to tensor of any device; what is not floating is left out.
    """
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.is_sparse:
            by_device.setdefault(tensor.device, []).append(name)
    found: dict[str, Ranges] = {}
    for names in by_device.values():
        counts, largest = count_on_device([tensors[name] for name in names])
        for name, row, most in zip(names, counts.tolist(), largest.tolist()):
            found[name] = Ranges(tuple(row), most)
    return {name: found[name] for name in tensors if name in found}


def measure_one(tensor: Tensor) -> Ranges:
    """The ranges of one floating tensor. Syncs."""
    return measure({'': tensor})['']
