"""The FP32 values of 16-bit weights: reads and writes them, and keeps both in agreement.

An FP32 value is of one of two kinds. A *master* is a float32 tensor of its own, which the optimizer steps in place of the
weight. A *remainder* is what its weight lacks of an exact master (:mod:`amp_wrapper.ops.split`), in int16: the optimizer steps
both together. Code that saves, loads, averages or copies a model goes through :func:`in_fp32` and :func:`write_fp32`.

A copied weight has no FP32 value: the copy of a model has no masters.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .. import ops
from ..errors import AmpUsageError, some
from ..ops.split import join, split
from ..policy.nested import HALF_TYPES
from ..torch_internals import after_zero_grad


@dataclasses.dataclass(eq=False, slots=True)
class Pair:
    """The other half of a 16-bit weight, and the state of both when they agreed last.

    If somebody else has written to one side since then, the other takes its value. Version counters and addresses show that;
    writes through ``.data`` move no counter, and show only where ``.data`` was replaced. The old value of a weight is not kept,
    so an edit of one with a remainder resets all of the remainder to 0.

    A pair does not hold its weight: the table of all pairs would keep alive what it finds them by.

    Attributes:
        name: What messages call the weight.
        partner: Its float32 master or int16 remainder, of its shape, on its device.
        dtype: The 16-bit type of the weight.
        is_split: Whether the partner is a remainder.
        agreed: When both agreed: version and address of the weight, and of the partner.
    """

    name: str
    partner: nn.Parameter
    dtype: torch.dtype
    is_split: bool
    agreed: tuple[int, ...] = ()

    def edited(self, weight: Tensor) -> tuple[bool, bool]:
        """Whether somebody wrote to the weight since both agreed, and whether to its master. No device read."""
        now = self.state(weight)
        return now[:2] != self.agreed[:2], now[2:] != self.agreed[2:] and not self.is_split

    def state(self, weight: Tensor) -> tuple[int, ...]:
        """What :attr:`agreed` keeps, as it is now."""
        return weight._version, weight.data_ptr(), self.partner._version, self.partner.data_ptr()


#: What belongs to each weight that has an FP32 value beside its own.
pairs: MutableMapping[Tensor, Pair] = WeakTensorKeyDictionary()
#: How many pairs were made so far: where it has not changed, no weight has got an FP32 value.
pairs_made = 0


def make_pair(weight: nn.Parameter, name: str, dtype: torch.dtype, splits: bool) -> Pair:
    """Give a weight an FP32 value: it is saved in place of the weight, and loaded values reach it.

    Args:
        weight: 16-bit or about to be; its cast replaces the storage of an FP32 weight, which a master takes over.
        name: What messages call it.
        dtype: The 16-bit type.
        splits: Whether the weight is taken apart, in place, rather than given a master.
    """
    global pairs_made
    pairs_made += 1
    value = weight.data.float()
    if splits:
        near, value = split(value, dtype)
        if weight.dtype is not dtype:
            replace_data(weight, near)
    after_zero_grad(_clear_masters)
    partner = nn.Parameter(value, requires_grad=weight.requires_grad and not splits)
    pair = pairs[weight] = Pair(name, partner, dtype, splits)
    pair.agreed = pair.state(weight)
    return pair


def _clear_masters(module: nn.Module, set_to_none: bool) -> None:
    """``zero_grad()`` of a module has cleared its weights: scripts know no masters."""
    for _, pair in paired(module.parameters()):
        if pair.partner.grad is not None:
            pair.partner.grad = None if set_to_none else pair.partner.grad.zero_()


def paired(weights: Iterable[Tensor]) -> list[tuple[Tensor, Pair]]:
    """Those weights that have a pair and are 16-bit: a user may have replaced ``.data`` by numbers of another type."""
    found = ((weight, pairs.get(weight)) for weight in weights if weight.dtype in HALF_TYPES)
    return [(weight, pair) for weight, pair in found if pair is not None]


def masters() -> list[nn.Parameter]:
    """Every FP32 master that there is."""
    return [pair.partner for pair in pairs.values() if not pair.is_split]


def unpair(weight: Tensor) -> None:
    """Forget the FP32 value of a weight."""
    pairs.pop(weight, None)


def fp32_value(tensor: Tensor) -> Tensor:
    """The FP32 value of a floating tensor, without its graph, and without a look at what somebody wrote.

    Returns:
        The master itself; for a weight with a remainder, and a 16-bit tensor without an FP32 value, a new tensor.
    """
    pair = pairs.get(tensor)
    if pair is None:
        return tensor.detach().float()
    return join(tensor, pair.partner) if pair.is_split else pair.partner.detach()


def in_fp32(tensor: Any) -> Any:
    """As :func:`fp32_value` of a 16-bit tensor, after edits of any kind were taken up; anything else itself. No host read.

    Raises:
        AmpUsageError: A weight and its master were both written to.
    """
    if not isinstance(tensor, Tensor) or tensor.dtype not in HALF_TYPES:
        return tensor
    weights_win(agree([tensor]))
    return fp32_value(tensor)


@torch.no_grad()
def write_fp32(tensor: Tensor, value: Tensor) -> None:
    """Give a weight an FP32 value: its master or remainder takes it unrounded, the weight rounded.

    Args:
        tensor: A 16-bit weight that has one.
        value: Of the same shape; any floating type, on any device.
    """
    pair = pairs[tensor]
    near = exact = value.to(tensor.device, torch.float32)
    if pair.is_split:
        near, exact = split(exact, pair.dtype)
    tensor.copy_(near)
    pair.partner.copy_(exact)
    pair.agreed = pair.state(tensor)


def agree(weights: Iterable[Tensor]) -> list[Tensor]:
    """Copy between each weight and its FP32 value, from the side that somebody wrote to. No host read.

    A weight whose ``.data`` was replaced by numbers of another type becomes 16-bit again; its FP32 value takes them as they
    were.

    Args:
        weights: Those without an FP32 value are passed over.

    Returns:
        The weights with masters that nobody seems to have written to. Edits through ``.data`` leave no trace but that they
        :func:`differ`; :func:`weights_win` takes these up, too.

    Raises:
        AmpUsageError: Both sides were written to. Nothing has been changed.
    """
    # by what was written to, the weight and its master; and those of another type
    written: defaultdict[Any, list[Tensor]] = defaultdict(list)
    for weight in weights:
        pair = pairs.get(weight)
        if pair is not None:
            written[pair.edited(weight) if weight.dtype is pair.dtype else 'type'].append(weight)
    if written[True, True]:
        names = some([pairs[weight].name for weight in written[True, True]])
        raise AmpUsageError(
            f'both sides of {names} were written to since they last agreed, the 16-bit weight and its FP32 master. Say which '
            f'one counts: weights_changed([model.fc.weight]), or masters_changed([...]) with what amp.master_params gives.'
        )
    for weight in written['type']:
        value = weight.data
        replace_data(weight, value.to(pairs[weight].dtype))
        write_fp32(weight, value)
    masters_win(written[False, True])
    weights_win(written[True, False])
    return [weight for weight in written[False, False] if not pairs[weight].is_split]


@torch.no_grad()
def weights_win(weights: Iterable[Tensor]) -> None:
    """Masters take what differs from them rounded, bit for bit; remainders become 0. No host read.

    Args:
        weights: Those that are not 16-bit, or have no FP32 value, are passed over.
    """
    found = paired(weights)
    ops.refresh_masters([(weight, pair.partner) for weight, pair in found if not pair.is_split])
    for weight, pair in found:
        if pair.is_split:
            pair.partner.zero_()
        pair.agreed = pair.state(weight)


@torch.no_grad()
def masters_win(weights: Iterable[Tensor]) -> None:
    """Each weight takes its master, rounded to nearest-even. No host read.

    Args:
        weights: With masters; those that are not 16-bit are passed over.
    """
    found = paired(weights)
    ops.multi_tensor_copy([pair.partner for _, pair in found], [weight for weight, _ in found])
    for weight, pair in found:
        pair.agreed = pair.state(weight)


def differ(weight: Tensor) -> bool:
    """Whether a weight is not its master, rounded; of one with a remainder nothing tells, so True. Syncs."""
    pair = pairs[weight]
    return pair.is_split or bool(ops.differ(weight.detach(), pair.partner.detach()).any())


def follow_device(weight: Tensor) -> None:
    """Move the master or remainder to the device that its weight was moved to; both agreed before."""
    pair = pairs.get(weight)
    if pair is not None:
        pair.partner.data = pair.partner.data.to(weight.device)
        pair.agreed = pair.state(weight)


def replace_data(tensor: Tensor, data: Tensor) -> None:
    """Replace the numbers of a tensor by those of another type, which its gradient takes on.

    Through ``.data``, so that the optimizer, DDP and tied modules keep the very object they hold.
    """
    grad, tensor.grad = tensor.grad, None
    tensor.data = data
    tensor.grad = None if grad is None else grad.to(data.dtype)
