"""How large the numbers of tensors are: counts over powers of two."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: Counts of one tensor: 0 the numbers that are subnormal in float32; 1 to 254 those of a float32 exponent, so that ``n`` counts
#: 2 ** (n - 127) <= abs(x) < 2 ** (n - 126); 255 infinities and NaN; 256 zeros.
BINS, NONFINITE, ZERO, BIAS = 257, 255, 256, 127
#: Elements that are counted at a time: they need some twenty bytes each.
_PIECE = 2**20


@dataclasses.dataclass(frozen=True)
class Ranges:
    """How many numbers of a tensor lie between each two powers of two.

    Attributes:
        counts: As many as :data:`BINS`.
        largest: The largest finite absolute value; 0.0 where there is none.
    """

    counts: tuple[int, ...]
    largest: float

    @classmethod
    def of(cls, tensor: Tensor) -> Ranges:
        """Count the elements of a floating tensor. Syncs."""
        return cls.read(count([tensor])[0].tolist())

    @classmethod
    def read(cls, row: Sequence[float]) -> Ranges:
        """Make it of a row of :func:`count` on the host."""
        return cls(tuple(map(int, row[:BINS])), row[BINS])

    def plain(self) -> dict[str, Any]:
        """Return all of it as numbers, strings and dicts, for JSON."""
        powers = {str(index - BIAS): count for index, count in enumerate(self.counts[:NONFINITE]) if count}
        known = {'zeros': self.counts[ZERO], 'nonfinite': self.counts[NONFINITE], 'powers': powers}
        return {'elements': sum(self.counts), 'largest': self.largest, **known}


@torch.no_grad()
def count(tensors: Sequence[Tensor]) -> Tensor:
    """Count the elements of floating tensors of one device by powers of two, without a host read.

    Args:
        tensors: Of any shape and floating type.

    Returns:
        float64 (tensors, BINS + 1) on their device: the counts, and the largest finite absolute value.
    """
    rows = torch.zeros(len(tensors), BINS + 1, dtype=torch.float64, device=tensors[0].device)
    for row, tensor in zip(rows, tensors):
        for piece in torch.split(tensor.detach().reshape(-1), _PIECE) if tensor.numel() else ():
            # by their bits: arithmetic may take subnormal numbers for zeros
            bits = piece.float().view(torch.int32) & 0x7FFFFFFF
            powers = bits >> 23
            # bincount would read the device
            row.scatter_add_(0, torch.where(bits == 0, ZERO, powers).long(), torch.ones_like(piece, dtype=row.dtype))
            # floats that are not negative have the order of their bits
            largest = torch.where(powers == NONFINITE, 0, bits).amax().view(torch.float32)
            row[BINS] = torch.maximum(row[BINS], largest)
    return rows
