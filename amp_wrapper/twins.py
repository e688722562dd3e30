"""The FP32 value behind each 16-bit weight: which weights have one, how it is read, and how it is written.

There are two kinds. A *master* is an FP32 tensor of its own, which the optimizer steps in place of the weight. A *remainder*
is what its weight lacks of an exact FP32 master (:mod:`amp_wrapper.ops.split`): the optimizer steps both together. Who saves,
loads, averages or copies a model goes through :func:`fp32_value` and :func:`write_fp32`, and need not know which it is.

The table has weak keys: a copied weight has no twin, so a copied model always speaks for itself.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from . import ops
from .ops.split import join, split


class Remainder:
    """What a 16-bit weight lacks of its FP32 master, and the state of the weight that it belongs to.

    Nobody keeps the old value of a weight. So an edit is told by the weight's version counter alone, and leaves nothing of the
    remainder: the weight as it is becomes the master.

    Args:
        weight: 16-bit.
        bits: int16, of the shape and on the device of ``weight``.
    """

    __slots__ = ('bits', 'version')

    def __init__(self, weight: Tensor, bits: Tensor) -> None:
        self.bits = bits
        self.version = weight._version

    def is_stale(self, weight: Tensor) -> bool:
        """Whether the weight was written to by somebody who does not know of remainders. ``.data`` leaves no trace."""
        return weight._version != self.version

    def drop(self, weight: Tensor) -> None:
        """Let the weight as it is be the master."""
        with torch.no_grad():
            self.bits.zero_()
        self.version = weight._version


# weight -> FP32 tensor that the optimizer steps for it, or its remainder. The only table of the package that outlives a call.
_twins: MutableMapping[Tensor, Tensor | Remainder] = WeakTensorKeyDictionary()


def pair(weight: Tensor, twin: Tensor | Remainder) -> None:
    """Let ``twin`` tell what is saved for ``weight``, and receive loaded values unrounded.

    Args:
        weight: A parameter, 16-bit or about to be.
        twin: An FP32 master, or a remainder.
    """
    _twins[weight] = twin


def unpair(weight: Tensor) -> None:
    """Forget the twin of ``weight``."""
    _twins.pop(weight, None)


def fp32_twin(weight: Tensor) -> Tensor | None:
    """The FP32 master of a cast parameter: float32, same shape and device; None where there is no such tensor."""
    found = _twins.get(weight)
    return found if isinstance(found, Tensor) else None


def has_twin(weight: Tensor) -> bool:
    """Whether ``weight`` has an FP32 value beside its own, of either kind."""
    return weight in _twins


def masters() -> list[Tensor]:
    """Every FP32 master that there is."""
    return [found for found in _twins.values() if isinstance(found, Tensor)]


def remainder_of(weight: Tensor) -> Remainder | None:
    """The remainder of a split weight; None where there is none."""
    found = _twins.get(weight)
    return found if isinstance(found, Remainder) else None


def take_apart(weight: Tensor, dtype: torch.dtype) -> Remainder:
    """Turn an FP32 parameter into a 16-bit one with a remainder, which together are what it was.

    Args:
        weight: float32, or 16-bit; changed in place, its gradient is cast.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
    """
    grad, weight.grad = weight.grad, None
    # through .data, so that the optimizer, DDP and tied modules keep the very object they hold
    weight.data, bits = split(weight.data.float(), dtype)
    weight.grad = None if grad is None else grad.to(dtype)
    remainder = Remainder(weight, bits)
    pair(weight, remainder)
    return remainder


@torch.no_grad()
def follow_device(weight: Tensor) -> None:
    """Bring what stands behind a weight to where the weight was moved."""
    found = _twins.get(weight)
    if isinstance(found, Remainder):
        found.bits = found.bits.to(weight.device)
        # a move is no edit
        found.version = weight._version
    elif found is not None and found.device != weight.device:
        found.data = found.data.to(weight.device)


def fp32_value(weight: Tensor) -> Tensor | None:
    """The FP32 value of a cast parameter, without its graph: float32, same shape and device; None without a twin.

    Returns:
        The master itself, or, where the weight is split, a new tensor, made after :func:`take_up_edits`.
    """
    found = _twins.get(weight)
    if isinstance(found, Remainder):
        take_up_edits(weight)
        return join(weight, found.bits)
    return None if found is None else found.detach()


@torch.no_grad()
def write_fp32(weight: Tensor, value: Tensor) -> None:
    """Give a weight an FP32 value: its twin takes it unrounded, the weight rounded.

    Args:
        weight: 16-bit; one without a twin is rounded, and that is all.
        value: Of the same shape; any floating type, on any device.
    """
    found = _twins.get(weight)
    if isinstance(found, Remainder):
        near, bits = split(value.to(weight.device, torch.float32), weight.dtype)
        weight.copy_(near)
        found.bits.copy_(bits)
        found.version = weight._version
        return
    if found is not None:
        found.copy_(value)
    weight.copy_(value)


def take_up_edits(weight: Tensor) -> Tensor | bool:
    """Let the FP32 value of ``weight`` follow it where somebody else changed it. No host read.

    A master follows wherever the two differ by more than rounding; a remainder is dropped as a whole, and only where torch's
    version counter tells of an edit.

    Returns:
        Whether anything differed, as a flag on the device for masters; False without a twin.
    """
    found = _twins.get(weight)
    if found is None:
        return False
    if isinstance(found, Remainder):
        stale = found.is_stale(weight)
        if stale:
            found.drop(weight)
        return stale
    with torch.no_grad():
        return ops.multi_tensor_refresh([weight], [found])[0]


def follow_weight(weight: Tensor) -> bool:
    """As :func:`take_up_edits`. Syncs where there is a master."""
    return bool(take_up_edits(weight))
