"""What is lost when numbers are rounded to a 16-bit type, and sums of ranges and losses over many tensors, on the device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..policy import dtype_name
from .ranges import BINS, Ranges, count_on_device

#: The types that numbers are held against.
TYPES = (torch.float16, torch.bfloat16)
# numbers that are looked at together: their copies take memory
_CHUNK = 2**24


@dataclasses.dataclass(frozen=True)
class Rounding:
    """What rounding to a type does to those elements that are finite and not zero, before and after it.

    So elements that overflow or become zero do not count here; subnormal ones do. The relative error of an element ``x`` that
    becomes ``y`` (to nearest, ties to even) is ``abs(y - x) / abs(x)``.

    Attributes:
        taken: How many elements that are.
        inexact: How many of them change.
        largest: The largest relative error.
        squares: The sum of the squares of the relative errors.
    """

    taken: int = 0
    inexact: int = 0
    largest: float = 0.0
    squares: float = 0.0

    @property
    def rms(self) -> float:
        """The root of the mean of the squares of the relative errors; 0.0 of none."""
        return math.sqrt(self.squares / self.taken) if self.taken else 0.0


def rounding_on_device(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """:class:`Rounding` without a host read.

    Args:
        tensor: Floating, of any shape and device.
        dtype: float16 or bfloat16.

    Returns:
        float64 (4,) on its device: the attributes in their order.
    """
    total = torch.zeros(4, dtype=torch.float64, device=tensor.device)
    for part in tensor.detach().reshape(-1).split(_CHUNK):  # type: ignore[no-untyped-call]
        if not part.numel():
            continue
        exact = part if part.dtype is torch.float64 else part.float()
        rounded = exact.to(dtype).to(exact.dtype)
        taken = exact.isfinite() & (exact != 0) & rounded.isfinite() & (rounded != 0)
        error = torch.where(taken, ((rounded - exact) / exact).abs(), torch.zeros_like(exact))
        total[0] += taken.sum()
        total[1] += (error > 0).sum()
        total[2] = torch.maximum(total[2], error.max().double())
        total[3] += error.double().square().sum()
    return total


@dataclasses.dataclass(frozen=True)
class Measured:
    """The ranges of some tensors, and what rounding does to them.

    Attributes:
        ranges: Their numbers over powers of two.
        rounding: For each of :data:`TYPES`; empty where it was not asked for.
    """

    ranges: Ranges
    rounding: dict[torch.dtype, Rounding]

    def plain(self) -> dict[str, Any]:
        """As numbers, strings and dicts, for JSON: the ranges, and for each type the shares that are lost."""
        found = self.ranges.plain()
        for dtype, lost in self.rounding.items():
            found[dtype_name(dtype)] = {
                'overflow': self.ranges.overflow(dtype),
                'underflow': self.ranges.underflow(dtype),
                'subnormal': self.ranges.subnormal(dtype),
                'inexact': self.ranges.share(lost.inexact),
                'largest_error': lost.largest,
                'rms_error': lost.rms,
            }
        return found


class Gathering:
    """Adds tensors up, without a host read until :meth:`read`.

    Args:
        rounds: Whether rounding is measured, too.
    """

    def __init__(self, rounds: bool = True) -> None:
        self._types = TYPES if rounds else ()
        self._parts: dict[torch.device, list[Tensor]] = {}

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Add floating tensors; those of other types, and sparse ones, are left out."""
        for tensor in tensors:
            if not tensor.is_floating_point() or tensor.layout is not torch.strided or not tensor.numel():
                continue
            counts, largest = count_on_device([tensor])
            found = [counts[0], largest, *(rounding_on_device(tensor, dtype) for dtype in self._types)]
            known = self._parts.get(tensor.device)
            if known is None:
                self._parts[tensor.device] = found
                continue
            known[0] += found[0]
            known[1] = torch.maximum(known[1], found[1])
            for place in range(2, len(found)):
                most = torch.maximum(known[place][2], found[place][2])
                known[place] += found[place]
                known[place][2] = most

    def read(self) -> Measured | None:
        """What came together; None where nothing did. Syncs, once for each number of each device."""
        if not self._parts:
            return None
        counts, largest = [0] * BINS, 0.0
        losses = {dtype: Rounding() for dtype in self._types}
        for parts in self._parts.values():
            counts = [left + right for left, right in zip(counts, parts[0].tolist())]
            largest = max(largest, float(parts[1]))
            for dtype, row in zip(self._types, parts[2:]):
                taken, inexact, most, squares = row.tolist()
                old = losses[dtype]
                losses[dtype] = Rounding(
                    old.taken + int(taken), old.inexact + int(inexact), max(old.largest, most), old.squares + squares
                )
        return Measured(Ranges(tuple(counts), largest), losses)
