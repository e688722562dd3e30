"""A float32 number as a 16-bit weight and a 16-bit remainder, and back: exact masters in two bytes beside each weight.

bfloat16 shares float32's exponent, so the weight is the upper half, rounded half away from zero, and the remainder the lower
half as a signed integer: ``bits(master) = (bits(weight) << 16) + remainder``. Rounded to nearest-even, ties would be ambiguous.
Every finite number and both infinities come back bit for bit.

float16 is rounded to nearest-even, and the remainder is the distance. From 2^-14 on it counts units in the last place of the
master, at most 2^12 of them: exact. Below, where float16 is subnormal, it counts multiples of 2^-39, at most 2^14 of them:
exact down to 2^-16, and to within 2^-40 below that. From 65520 on the weight is infinite, and so is the master.

Any NaN comes back as the quiet one of its sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MAGNITUDE = 0x7FFFFFFF
#: Where float16 becomes subnormal, as bits of a float32.
_SMALL = 0x38800000
_WHOLE = 1.5 * 2.0**23


@torch.no_grad()
def split(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Take float32 numbers apart.

    Args:
        master: float32 tensor of any shape.
        dtype: ``torch.float16`` or ``torch.bfloat16``.

    Returns:
        (weight of ``dtype``, int16 remainder), both new, of the shape and strides of ``master``.
    """
    bits = master.detach().view(torch.int32)
    nan = master.isnan()
    if dtype is torch.bfloat16:
        # an int32 sum may wrap at the largest NaN only, which is replaced
        upper = (bits + 0x8000) >> 16
        quiet = torch.where(bits < 0, -0x40, 0x7FC0)
        weight = torch.where(nan, quiet, upper).to(torch.int16).view(torch.bfloat16)
        remainder = ((bits << 16) >> 16).to(torch.int16)
        return weight, remainder.masked_fill_(nan, 0)
    weight = torch.where(nan, torch.full_like(master, torch.nan).copysign(master), master).to(torch.float16)
    near = weight.float()
    # in magnitudes: a remainder below zero says that the master is nearer to zero than its weight
    distance = master.detach().abs() - near.abs()
    # a sum with 1.5 * 2^23 rounds to a whole number, ties to even
    units = (distance * 2.0**39 + _WHOLE) - _WHOLE
    small = (bits & _MAGNITUDE) < _SMALL
    delta = torch.where(small, units, (bits - near.view(torch.int32)).float())
    return weight, torch.where(near.isfinite(), delta, 0.0).to(torch.int16)


@torch.no_grad()
def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Put the float32 numbers together that :func:`split` took apart.

    Args:
        weight: float16 or bfloat16 tensor.
        remainder: int16 tensor of the same shape.

    Returns:
        New float32 tensor.
    """
    weight = weight.detach()
    near = weight.float()
    bits = near.view(torch.int32)
    if weight.dtype is torch.bfloat16:
        joined = (bits + remainder.to(torch.int32)).view(torch.float32)
        # of a NaN, or of a zero or infinity that somebody wrote beside the remainder of another number
        return torch.where(joined.isnan(), near, joined)
    magnitude = bits & _MAGNITUDE
    # 2^-14 itself is the weight of masters below and above it
    small = magnitude - (remainder < 0).to(torch.int32) < _SMALL
    joined = (bits + remainder.to(torch.int32)).view(torch.float32)
    joined = torch.where(small, (near.abs() + remainder.float() * 2.0**-39).copysign(near), joined)
    return torch.where(near.isfinite(), joined, near)
