"""What is lost when numbers are rounded to a 16-bit type, and sums of ranges and losses over many tensors, on the device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..policy import dtype_name
from .ranges import NONFINITE, ZERO, Ranges, added, count_on_device

#: The types that numbers are held against.
TYPES = (torch.float16, torch.bfloat16)
# the least normal float32 is two to the power of minus this
_LEAST = 126
# numbers that are looked at together: their copies take memory
_CHUNK = 2**24


@dataclasses.dataclass(frozen=True)
class Rounding:
    """What rounding to a type (to nearest, ties to even) does to finite elements, as the cast itself does it.

    The relative error of an element ``x`` that becomes ``y`` is ``abs(y - x) / abs(x)``. It counts where both are finite and
    not zero: subnormal results are among them, elements that overflow or become zero are not.

    Attributes:
        overflow: How many elements become infinite.
        underflow: How many are not zero, and become zero.
        subnormal: How many are below the normal numbers of the type, and do not become zero.
        taken: How many have a relative error.
        inexact: How many of those change.
        squares: The sum of the squares of the relative errors.
        largest: The largest relative error.
    """

    overflow: int = 0
    underflow: int = 0
    subnormal: int = 0
    taken: int = 0
    inexact: int = 0
    squares: float = 0.0
    largest: float = 0.0

    @property
    def rms(self) -> float:
        """The root of the mean of the squares of the relative errors; 0.0 of none."""
        return math.sqrt(self.squares / self.taken) if self.taken else 0.0

    def __add__(self, other: Rounding) -> Rounding:
        mine, others = dataclasses.astuple(self), dataclasses.astuple(other)
        sums = [left + right for left, right in zip(mine[:-1], others[:-1])]
        return Rounding(*[*sums, max(self.largest, other.largest)])


_NUMBERS = len(dataclasses.fields(Rounding))


def rounding_on_device(tensor: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """:class:`Rounding` without a host read.

    Args:
        tensor: Floating, of any shape and device.
        dtype: float16 or bfloat16.
        scale: What elements are multiplied with before, in float32 (float64 where they are that).

    Returns:
        float64 (7,) on its device: the attributes in their order.
    """
    total = torch.zeros(_NUMBERS, dtype=torch.float64, device=tensor.device)
    tiny = torch.finfo(dtype).tiny
    for part in tensor.detach().reshape(-1).split(_CHUNK):  # type: ignore[no-untyped-call]
        if not part.numel():
            continue
        exact = part if part.dtype is torch.float64 else part.float()
        counts = exact.isfinite() & (exact != 0)
        if scale != 1.0:
            exact = exact * scale
        rounded = exact.to(dtype).to(exact.dtype)
        becomes_zero, stays = rounded == 0, rounded.isfinite()
        taken = counts & stays & ~becomes_zero
        error = torch.where(taken, ((rounded - exact) / exact).abs(), torch.zeros_like(exact))
        found = (counts & ~stays, counts & becomes_zero, taken & (exact.abs() < tiny), taken, error > 0)
        total[:5] += torch.stack([each.sum() for each in found])
        total[5] += error.double().square().sum()
        total[6] = torch.maximum(total[6], error.max().double())
    return total


@dataclasses.dataclass(frozen=True)
class Measured:
    """The ranges of some tensors, and what rounding does to them.

    Attributes:
        ranges: Their numbers over powers of two.
        rounding: For each of :data:`TYPES`; empty where it was not asked for.
        scaled: The same after they were multiplied with the scale of :class:`Gathering`.
        below: Number ``n`` is how many elements that are not zero have a magnitude of at most ``2 ** (n - 126)``; empty where
            rounding was not asked for.
    """

    ranges: Ranges
    rounding: dict[torch.dtype, Rounding]
    scaled: dict[torch.dtype, Rounding] = dataclasses.field(default_factory=dict)
    below: tuple[int, ...] = ()

    def plain(self) -> dict[str, Any]:
        """As numbers, strings and dicts, for JSON: the ranges, and for each type the shares that are lost."""
        found = self.ranges.plain()
        for dtype, lost in self.rounding.items():
            found[dtype_name(dtype)] = {
                **self.shares(lost),
                'inexact': self.ranges.share(lost.inexact),
                'largest_error': lost.largest,
                'rms_error': lost.rms,
            }
        return found

    def shares(self, lost: Rounding) -> dict[str, float]:
        """What of all elements is lost, for JSON."""
        return {key: self.ranges.share(getattr(lost, key)) for key in ('overflow', 'underflow', 'subnormal')}

    def at_most(self, power: int) -> int:
        """How many elements that are not zero have a magnitude of at most ``2 ** power``.

        0 for powers below -126, where float32 is subnormal.

        Args:
            power: At most 127.
        """
        return self.below[power + _LEAST] if power >= -_LEAST else 0

    @staticmethod
    def added(parts: Iterable[Measured]) -> Measured:
        """Those of several tensors together."""
        listed = list(parts)

        def summed(dicts: Sequence[Mapping[torch.dtype, Rounding]]) -> dict[torch.dtype, Rounding]:
            return {dtype: sum((each[dtype] for each in dicts), Rounding()) for dtype in (dicts[0] if dicts else ())}

        return Measured(
            added(each.ranges for each in listed),
            summed([each.rounding for each in listed]),
            summed([each.scaled for each in listed]),
            tuple(map(sum, zip(*(each.below for each in listed)))),
        )


def _in_float32(tensor: Tensor) -> Tensor:
    """Numbers as powers of two are counted: those of float64 rounded towards zero, so that none reaches the next power, and
    without becoming zero."""
    if tensor.dtype is not torch.float64:
        return tensor
    sizes = tensor.detach().abs()
    rounded = sizes.float()
    zero = torch.zeros_like(rounded)
    lower = torch.where((rounded > sizes) & rounded.isfinite(), torch.nextafter(rounded, zero), rounded)
    return torch.where((lower == 0) & (sizes > 0), torch.nextafter(zero, zero + 1), lower)


def _largest_below(tensor: Tensor) -> Tensor:
    """For each number the largest float32 that is smaller in magnitude."""
    sizes = tensor.detach().abs()
    rounded = sizes.float()
    return torch.where(rounded < sizes, rounded, torch.nextafter(rounded, torch.zeros_like(rounded)))


class Gathering:
    """Adds tensors up, without a host read until :meth:`read`.

    Args:
        rounds: Whether rounding is measured, too.
        scale: Rounding is also measured after a multiplication with this, such as a loss scale; None for no such thing.
    """

    def __init__(self, rounds: bool = True, scale: float | None = None) -> None:
        types = TYPES if rounds else ()
        self._casts = [(dtype, 1.0) for dtype in types] + [(dtype, scale) for dtype in types if scale is not None]
        self._parts: dict[torch.device, _OnDevice] = {}
        self._seen: dict[tuple[Any, ...], StorageWeakRef] = {}

    def add(self, tensors: Sequence[Tensor], total: Gathering | None = None) -> None:
        """Add floating tensors; those of other types, and sparse ones, are left out.

        Args:
            tensors: Of any shape, type and device.
            total: Gets those that it has not seen yet, too. It was made with the same arguments.
        """
        for tensor in tensors:
            if not tensor.is_floating_point() or tensor.layout is not torch.strided or not tensor.numel():
                continue
            found = self._measured(tensor)
            self._put(tensor.device, found)
            if total is not None and total._is_new(tensor):
                total._put(tensor.device, found)

    def _measured(self, tensor: Tensor) -> _OnDevice:
        held = _in_float32(tensor)
        # each power of two counts with the numbers below it there
        below = [_largest_below(tensor)] if self._casts else []
        counts, largest = count_on_device([held, *below])
        lost = [rounding_on_device(tensor, dtype, scale) for dtype, scale in self._casts]
        return _OnDevice(counts, largest[:1], torch.stack(lost) if lost else None)

    def _put(self, device: torch.device, found: _OnDevice) -> None:
        known = self._parts.get(device)
        self._parts[device] = found if known is None else known.plus(found)

    def _is_new(self, tensor: Tensor) -> bool:
        """Whether these very numbers are told for the first time: a container hands on what the last module in it gave."""
        held = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        key = (held.cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key in self._seen:
            return False
        # as long as it is held, no other storage gets its address
        self._seen[key] = held
        return True

    def read(self) -> Measured | None:
        """What came together; None where nothing did. Syncs, once for each number of each device."""
        if not self._parts:
            return None
        return Measured.added(self._read(part) for part in self._parts.values())

    def _read(self, part: _OnDevice) -> Measured:
        counts = part.counts.tolist()
        ranges = Ranges(tuple(counts[0]), float(part.largest))
        if part.lost is None:
            return Measured(ranges, {})
        lost = [Rounding(*map(int, row[:5]), *row[5:]) for row in part.lost.tolist()]
        found = [dict(zip(TYPES, lost[place : place + len(TYPES)])) for place in range(0, len(lost), len(TYPES))]
        # the smallest float32 became zero
        vanished = counts[1][ZERO] - counts[0][ZERO]
        below = accumulate(counts[1][:NONFINITE], initial=vanished)
        return Measured(ranges, found[0], found[1] if len(found) > 1 else {}, tuple(below)[1:])


@dataclasses.dataclass(frozen=True)
class _OnDevice:
    """What is gathered on a device: counts of the tensors and of the numbers below theirs, largest values, rounding."""

    counts: Tensor
    largest: Tensor
    lost: Tensor | None

    def plus(self, other: _OnDevice) -> _OnDevice:
        lost = self.lost
        if lost is not None and other.lost is not None:
            lost = lost + other.lost
            lost[:, -1] = torch.maximum(self.lost[:, -1], other.lost[:, -1])  # type: ignore[index]
        return _OnDevice(self.counts + other.counts, torch.maximum(self.largest, other.largest), lost)
