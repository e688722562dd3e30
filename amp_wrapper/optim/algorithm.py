"""The base class for what differs between the fused optimizers, and the table of their hyper-parameters."""

from __future__ import annotations

import abc
import dataclasses
import operator
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import AmpUsageError
from .tensor_lists import Bucket

_LR = operator.itemgetter('lr')


class Algorithm(abc.ABC):
    """What one kind of optimizer computes, and the state and hyper-parameters that it needs for it."""

    #: Of :func:`amp_wrapper.ops.step_prologue`.
    kind: ClassVar[int]
    #: The class of ``torch.optim`` that is extended.
    torch_name: str
    #: The state with an entry for each element.
    moments: ClassVar[tuple[str, ...]]
    #: What a group of a saved state dict has to have.
    required: ClassVar[tuple[str, ...]]
    #: The keys of a group that decide the hyper-parameters beside lr, and the state that it needs.
    options: ClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The state that a parameter of the group needs."""

    @abc.abstractmethod
    def row(self, group: Mapping[str, Any]) -> list[Any]:
        """The hyper-parameters of a group, without lr, in the order of the ops."""

    @abc.abstractmethod
    def first_step(self, state: Mapping[str, Any]) -> float | None:
        """The step count of a parameter whose state has none; None where that is an error."""

    def kept(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """What of a parameter's state still counts."""
        return state

    @abc.abstractmethod
    def update(self, bucket: Bucket, gradients: list[Tensor], decision: Tensor) -> None:
        """Step a bucket of the fused ops."""

    def update_by_torch(
        self, bucket: Bucket, gradients: list[Tensor], decision: Tensor, group: Mapping[str, Any]
    ) -> None:
        """Step float64 or complex parameters of one group by the functions of ``torch.optim``.

        Those look for an overflow on the device too, and work on contiguous real tensors.

        Args:
            bucket: Of the parameters.
            gradients: Theirs, scaled; they stay as they are.
            decision: From the prologue.
            group: Of the parameters.
        """
        skip, inverse, coefficient, limit = decision[:4].unbind()
        columns = {name: column if name == 'step' else _plain(column) for name, column in bucket.columns.items()}
        plain = dataclasses.replace(bucket, params=_plain(bucket.params), columns=columns)
        grads = [
            (gradient.to(param.dtype) * inverse * coefficient).clamp(-limit, limit)
            for gradient, param in zip(_plain(gradients), plain.params)
        ]
        self._call_torch(plain, grads, group, skip)
        for name, column in (('params', bucket.params), *bucket.columns.items()):
            for tensor, worked_on in zip(column, plain.params if name == 'params' else columns[name]):
                if tensor.data_ptr() != worked_on.data_ptr():
                    (torch.view_as_real(tensor) if tensor.is_complex() else tensor).copy_(worked_on)
        for partner, parameter in zip(bucket.partners, bucket.params):
            if partner is not parameter:
                partner.copy_(parameter)

    @abc.abstractmethod
    def _call_torch(self, bucket: Bucket, grads: list[Tensor], group: Mapping[str, Any], skip: Tensor) -> None:
        """Step contiguous real tensors, and count the step, unless ``skip`` is 1 on the device."""


def _plain(tensors: list[Tensor]) -> list[Tensor]:
    """Tensors as contiguous real numbers: themselves or views where they are that, copies otherwise."""
    real = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    return [t.contiguous() for t in real]


@dataclasses.dataclass(eq=False)
class HyperParameters:
    """The hyper-parameters of all groups as a table, and the objects that they were read from.

    Attributes:
        rates: The lr of each group.
        options: The rest of each group.
        table: float64 (groups, :data:`amp_wrapper.ops.HYPER`) on the CPU.
        is_on_host: Whether all parameters are on the CPU, where an lr that is a tensor is read by the ops.
        reads: Whether the host read an lr.
        is_mutable: Whether others than lr may change in place, where no comparison of objects sees it.
        tensors: (group, lr) for each lr that is a tensor.
    """

    rates: list[Any]
    options: list[Any]
    table: Tensor
    is_on_host: bool
    reads: bool
    is_mutable: bool
    tensors: list[tuple[int, Tensor]]

    def rates_on(self, device: torch.device) -> tuple[list[Tensor], list[int]]:
        """The rates that the ops read on a device, and their groups."""
        found = [(rate, group) for group, rate in self.tensors if rate.device.type != 'cpu' or device.type == 'cpu']
        return [rate.detach().to(device, torch.float32) for rate, _ in found], [group for _, group in found]


def hyper_parameters(
    algorithm: Algorithm,
    groups: list[dict[str, Any]],
    options: list[Any],
    is_on_host: bool,
    known: HyperParameters | None,
) -> HyperParameters:
    """The table of the groups, the one of the last step where nothing changed.

    Args:
        algorithm: Of the optimizer.
        groups: Of the optimizer.
        options: Those of each group; the same object where they are known to be equal.
        is_on_host: Whether all parameters are on the CPU.
        known: Of the last step.

    Raises:
        AmpUsageError: Something is no number.
    """
    rates = list(map(_LR, groups))
    if known is not None and (known.is_mutable or known.is_on_host != is_on_host or known.options is not options):
        known = None
    if known is not None and not known.reads and all(map(operator.is_, known.rates, rates)):
        return known
    tensors = [(index, rate) for index, rate in enumerate(rates) if isinstance(rate, Tensor)]
    first = [_rate(index, rate, is_on_host) for index, rate in enumerate(rates)]
    if known is not None:
        # a new one: a copy of the old one may be under way
        table, is_mutable = known.table.clone(), known.is_mutable
        table[:, 0] = torch.tensor(first, dtype=torch.float64)
    else:
        rows = [[rate, *_numbers(index, group, algorithm)] for index, (rate, group) in enumerate(zip(first, groups))]
        table = torch.tensor(rows, dtype=torch.float64)
        is_mutable = any(not isinstance(value, (int, float, tuple)) for value in _flat(options))
    reads = not is_on_host and any(rate.device.type == 'cpu' for _, rate in tensors)
    return HyperParameters(rates, options, table, is_on_host, reads, is_mutable, tensors)


def _rate(index: int, rate: Any, is_on_host: bool) -> float:
    """The lr of a group as the table has it; 0 for one that stays on its device."""
    if isinstance(rate, Tensor):
        if rate.numel() != 1:
            raise AmpUsageError(
                f"param_groups[{index}]['lr'] is a tensor of shape {tuple(rate.shape)}: one number is expected."
            )
        return float(rate) if not is_on_host and rate.device.type == 'cpu' else 0.0
    try:
        return float(rate)
    except (TypeError, ValueError) as error:
        raise AmpUsageError(f"param_groups[{index}]['lr'] is {rate!r}: a number is expected.") from error


def _numbers(index: int, group: Mapping[str, Any], algorithm: Algorithm) -> list[float]:
    try:
        return [float(value) for value in algorithm.row(group)]
    except (TypeError, ValueError) as error:
        given = {key: group.get(key) for key in algorithm.options}
        raise AmpUsageError(f'param_groups[{index}] holds {given}: numbers are expected ({error}).') from error


def _flat(options: Iterable[Iterable[Any]]) -> Iterable[Any]:
    for row in options:
        for value in row:
            yield value
            if isinstance(value, tuple):
                yield from value
