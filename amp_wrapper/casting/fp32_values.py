"""The table of FP32 values behind 16-bit weights: reads and writes them, and keeps weights and masters in agreement.

There are two kinds. A *master* is an FP32 tensor of its own, which the optimizer steps in place of the weight. A *remainder*
is what its weight lacks of an exact FP32 master (:mod:`amp_wrapper.ops.split`): the optimizer steps both together. Code that
saves, loads, averages or copies a model goes through :func:`fp32_value` and :func:`write_fp32`, for both kinds alike.

The table of FP32 values has weak keys. A copied weight is not in it: the copy of a model has no masters.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import ops
from ..errors import AmpUsageError, some
from ..ops.split import join, split
from ..policy.nested import HALF_TYPES


class Master:
    """An FP32 master, and torch's version counters of the weight and the master when they last agreed.

    If somebody else has written to one of the two since then, the other takes its value. After this package itself has written
    to both, it calls :meth:`settle`, so these writes do not count. Writes through ``.data`` do not move the counters; only
    ``.data`` that was replaced as a whole is recognised, by its address.

    Args:
        weight: 16-bit, or about to be.
        tensor: The master: float32, of the shape and on the device of ``weight``.
        name: What messages call the weight.
    """

    __slots__ = ('dtype', 'name', 'settled', 'tensor')

    def __init__(self, weight: Tensor, tensor: Tensor, name: str = '') -> None:
        self.tensor = tensor
        self.name = name or f'<parameter of shape {tuple(weight.shape)}>'
        #: When both agreed: the version and the address of the weight, and those of the master.
        self.settled = (0, 0, 0, 0)
        #: The type of the weight when both agreed last.
        self.dtype = weight.dtype
        self.settle(weight)

    def settle(self, weight: Tensor) -> None:
        """Weight and master agree now."""
        self.settled = (weight._version, weight.data_ptr(), self.tensor._version, self.tensor.data_ptr())

    def moved(self) -> bool:
        """Whether somebody wrote to the master since both agreed. No device read."""
        return (self.tensor._version, self.tensor.data_ptr()) != self.settled[2:]

    def weight_moved(self, weight: Tensor) -> bool:
        """Whether somebody wrote to the weight since both agreed. No device read."""
        return (weight._version, weight.data_ptr()) != self.settled[:2]


class Remainder:
    """What a 16-bit weight lacks of its FP32 master, and the state of the weight that it belongs to.

    The old value of a weight is not kept. So an edit is recognised by the weight's version counter alone, and resets the
    remainder to 0: the weight as it is becomes the master.

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


# weight -> its master, or its remainder
_fp32_of: MutableMapping[Tensor, Master | Remainder] = WeakTensorKeyDictionary()


class _Pairs:
    """How many pairs were made so far: where it has not changed, no weight has got an FP32 value."""

    made = 0


pairs = _Pairs()


def pair(weight: Tensor, record: Master | Remainder) -> None:
    """Enter the FP32 value of ``weight`` into the table: it is saved in place of the weight, and loaded values reach it.

    Args:
        weight: A parameter, 16-bit or about to be.
        record: Its master or its remainder.
    """
    pairs.made += 1
    _fp32_of[weight] = record


def unpair(weight: Tensor) -> None:
    """Remove ``weight`` from the table."""
    _fp32_of.pop(weight, None)


def master_tensor(weight: Tensor) -> Tensor | None:
    """The FP32 master of a cast parameter: float32, same shape and device; None where there is no such tensor."""
    found = master_of(weight)
    return None if found is None else found.tensor


def master_of(weight: Tensor) -> Master | None:
    """The record of a weight's master; None where there is no such tensor."""
    found = _fp32_of.get(weight)
    return found if isinstance(found, Master) else None


def has_fp32_value(weight: Tensor) -> bool:
    """Whether ``weight`` has an FP32 value beside its own, of either kind."""
    return weight in _fp32_of


def masters() -> list[Tensor]:
    """Every FP32 master that there is."""
    return [found.tensor for found in _fp32_of.values() if isinstance(found, Master)]


def remainder_of(weight: Tensor) -> Remainder | None:
    """The remainder of a split weight; None where there is none."""
    found = _fp32_of.get(weight)
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
    """Move the master or remainder of a weight to the device that the weight was moved to."""
    found = _fp32_of.get(weight)
    if isinstance(found, Remainder):
        found.bits = found.bits.to(weight.device)
        # a move is no edit
        found.version = weight._version
    elif found is not None:
        # another address is no write; where only that of the weight is new, both are compared
        moved = found.moved()
        found.tensor.data = found.tensor.data.to(weight.device)
        if moved:
            found.settled = (found.settled[0], weight.data_ptr(), *found.settled[2:])
        else:
            found.settled = (*found.settled[:2], found.tensor._version, found.tensor.data_ptr())


def fp32_value(weight: Tensor) -> Tensor | None:
    """The FP32 value of a cast parameter, without its graph: float32, same shape and device; None where there is none.

    Returns:
        The master itself, or, where the weight is split, a new tensor, made after :func:`agree`.
    """
    found = _fp32_of.get(weight)
    if isinstance(found, Remainder):
        agree(weight)
        return join(weight, found.bits)
    return None if found is None else found.tensor.detach()


@torch.no_grad()
def write_fp32(weight: Tensor, value: Tensor) -> None:
    """Give a weight an FP32 value: its master or remainder takes it unrounded, the weight rounded.

    Args:
        weight: 16-bit; one without an FP32 value takes the rounded value alone.
        value: Of the same shape; any floating type, on any device.
    """
    found = _fp32_of.get(weight)
    if isinstance(found, Remainder):
        near, bits = split(value.to(weight.device, torch.float32), weight.dtype)
        weight.copy_(near)
        found.bits.copy_(bits)
        found.version = weight._version
        return
    if found is not None:
        found.tensor.copy_(value)
    weight.copy_(value)
    if found is not None:
        found.settle(weight)


def agree(weight: Tensor) -> Tensor | bool:
    """Copy between ``weight`` and its master, from the one that somebody else wrote to since they last agreed. No host read.

    torch's version counters show which one that is. Where they show neither, the two are compared: a master takes the elements
    of the weight that are not its own, rounded, since an edit of the weight through ``.data`` leaves no other trace. A
    remainder is dropped as a whole, where the version counter shows an edit.

    Returns:
        Whether the weight had been changed, as a flag on the device for masters; False without an FP32 value.

    Raises:
        AmpUsageError: Weight and master were both written to.
    """
    found = _fp32_of.get(weight)
    if found is None:
        return False
    if isinstance(found, Remainder):
        stale = found.is_stale(weight)
        if stale:
            found.drop(weight)
        return stale
    if found.moved():
        bring_together([(weight, found)])
        return False
    return take_weights([(weight, found)])[0]


def take_weight(weight: Tensor) -> None:
    """Let the FP32 value of ``weight`` be that of the weight, whatever was written to its master. No host read."""
    found = _fp32_of.get(weight)
    if isinstance(found, Remainder):
        if found.is_stale(weight):
            found.drop(weight)
    elif found is not None:
        take_weights([(weight, found)])


@torch.no_grad()
def take_weights(pairs: Sequence[tuple[Tensor, Master]]) -> Tensor:
    """Each master takes what differs from it rounded, bit for bit; whether anything did, as flags on the device."""
    flags = ops.multi_tensor_refresh([weight for weight, _ in pairs], [master.tensor for _, master in pairs])
    for weight, master in pairs:
        master.settle(weight)
    return flags


def synchronise(weights: Iterable[Tensor]) -> None:
    """Before these weights are computed with: as :func:`bring_together`, for those that have masters.

    Raises:
        AmpUsageError: A weight and its master were both written to. Nothing has been changed.
    """
    found = ((weight, _fp32_of.get(weight)) for weight in weights if weight.dtype in HALF_TYPES)
    bring_together([(weight, master) for weight, master in found if isinstance(master, Master)])


def bring_together(pairs: Iterable[tuple[Tensor, Master]], refuses: bool = True) -> bool:
    """Copy within each pair of weight and master, from the one that somebody else wrote to, to the other. No host read.

    Args:
        pairs: 16-bit weights and their masters.
        refuses: Whether it is an error if both were written to; such a pair is left alone otherwise.

    Returns:
        Whether all agree now.

    Raises:
        AmpUsageError: A weight and its master were both written to. Nothing has been changed.
    """
    weights: list[tuple[Tensor, Master]] = []
    masters: list[tuple[Tensor, Master]] = []
    both: list[str] = []
    for weight, master in pairs:
        edited = master.weight_moved(weight)
        if master.moved():
            if edited:
                both.append(master.name)
            else:
                masters.append((weight, master))
        elif edited:
            weights.append((weight, master))
    if both and refuses:
        raise AmpUsageError(
            f'both sides of {some(both)} were written to since they last agreed: the 16-bit weight in the model, and the '
            f'FP32 master that the optimizer steps (amp.master_params, optimizer.param_groups). One would be lost. Write to '
            f'one side only, or say which one counts: weights_changed([model.fc.weight]) or masters_changed([its master]).'
        )
    if masters:
        copy_masters(masters)
    if weights:
        take_weights(weights)
    return not both


@torch.no_grad()
def round_again(pairs: Iterable[tuple[Tensor, Master]]) -> None:
    """Make weights 16-bit again whose ``.data`` was replaced by numbers of another type; their masters take them unrounded."""
    for weight, master in pairs:
        # what another optimizer shared is FP32 once that one was detached
        if weight.dtype is not master.dtype and has_fp32_value(weight):
            master.tensor.copy_(weight)
            weight.data = weight.data.to(master.dtype)
            master.settle(weight)


@torch.no_grad()
def fingerprint(weight: Tensor) -> Tensor:
    """A number of the bits of a 16-bit tensor and of their places: int64 scalar on its device. No host read."""
    bits = weight.detach().view(torch.int16).flatten()
    # odd factors: no bit gets lost where the product wraps
    return (bits * torch.arange(bits.numel(), dtype=torch.int32, device=bits.device).mul_(2).add_(1)).sum()


@torch.no_grad()
def copy_masters(pairs: Sequence[tuple[Tensor, Master]]) -> None:
    """Each weight = its master, rounded to nearest-even."""
    ops.multi_tensor_copy([master.tensor for _, master in pairs], [weight for weight, _ in pairs])
    for weight, master in pairs:
        master.settle(weight)
