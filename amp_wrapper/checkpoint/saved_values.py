"""What a number, a switch or a list of numbers in a checkpoint may be: types and shapes, whoever wrote them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..policy.options import is_number

#: What to do with a file that training cannot go on from.
WEIGHTS_ONLY = 'load the weights alone (load_from, resume=False)'


def plain(value: Any) -> Any:
    """The number inside a tensor or an array of one element; anything else as it is. Syncs for a tensor on a device."""
    if isinstance(value, Tensor):
        single = value.numel() == 1 and value.layout is torch.strided and not value.is_meta and not value.is_complex()
        return value.item() if single else value
    return value.item() if isinstance(value, np.ndarray) and value.size == 1 else value


def is_real(value: Any) -> bool:
    """A real number, plain or in a tensor or array of one element; it may be infinite, but is neither NaN nor a boolean."""
    value = plain(value)
    try:
        return is_number(value) and not math.isnan(value)
    except OverflowError:
        # a whole number beyond float64
        return False


def is_setting(value: Any) -> bool:
    """A real number that float32 can hold, and the device's whole numbers where it is whole."""
    value = plain(value)
    return is_real(value) and abs(value) < (2**63 if isinstance(value, int) else 3e38)


def is_whole(value: Any, least: int) -> bool:
    """A whole number of at least ``least``, of any type."""
    value = plain(value)
    return is_real(value) and math.isfinite(value) and float(value).is_integer() and value >= least


def is_switch(value: Any) -> bool:
    """True, False or None."""
    return value is None or isinstance(value, (bool, np.bool_))


def some(keys: Sequence[Any]) -> str:
    """The first few of many keys, for a message."""
    shown = ', '.join(repr(key) for key in keys[:4])
    return shown + (f' and {len(keys) - 4} more' if len(keys) > 4 else '')
