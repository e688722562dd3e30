"""The base class for what differs between the fused optimizers, and the table of their hyper-parameters."""

from __future__ import annotations

import abc
import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import AmpUsageError
from ..ops.checks import check_lists, is_direct
from ..ops.optimizer_step import check_partners, value_of, write_value
from ..policy.nested import HALF_TYPES
from .tensor_lists import Bucket

Tensors = list[Tensor]
Columns = Mapping[str, Tensors]
_DTYPE = operator.attrgetter('dtype')
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
    #: Whether torch's own function counts the steps.
    torch_counts: ClassVar[bool] = True

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
        self, bucket: Bucket, gradients: Tensors, decision: Tensor, given: Mapping[str, Any], group: Mapping[str, Any]
    ) -> None:
        """Step parameters that no compiled op serves by the fused functions of ``torch.optim``. No host read.

        Those skip on the device, too. They take real tensors of 32 and 64 bits, of one type and one layout for a parameter and
        all that belongs to it: what is otherwise is copied for the step, and copied back.

        Args:
            bucket: Of parameters of one group.
            gradients: Theirs, scaled; they stay as they are.
            decision: From the prologue; not looked at where nothing is ``given``.
            given: What the prologue decided from.
            group: Of the parameters, with an lr as :meth:`HyperParameters.rate` gives it.
        """
        columns = {'params': bucket.params, **bucket.columns}
        steps, beside = columns.pop('step', []), bucket.partners or bucket.params
        held = worked = list(columns.values())
        is_plain = bucket.is_wide and all(map(Tensor.is_contiguous, bucket.params))
        if not is_plain:
            held = [list(map(_real, tensors)) for tensors in held]
            worked = list(map(list, zip(*map(_alike, beside, *held))))
            # those with a remainder are written together with it
            held[0] = [w if p.dtype is torch.int16 else h for p, h, w in zip(beside, held[0], worked[0])]
        params = worked[0]
        columns = dict(zip(columns, worked), step=steps)
        skip = None if given.get('found_inf') is None else decision[0]
        if bucket.gradients_fit is None:
            # with gradients of other types the lists are new
            bucket.gradients_fit = {*map(_DTYPE, gradients)} == {params[0].dtype}
        grads = _unscaled(gradients, params, is_plain and bucket.gradients_fit, decision, given)
        self._call_torch(columns, grads, group, skip)
        if bucket.counts is not None:
            bucket.counts += 1 if skip is None else 1 - skip
        copies = [] if worked is held else list(zip(chain(*held), chain(*worked)))
        for param, partner, value in zip(bucket.params, bucket.partners, params):
            if partner.dtype is torch.int16:
                write_value(value, param, partner, decision[0] == 0)
            elif partner is not param:
                copies.append((_real(partner), value))
        _copy(copies)

    @abc.abstractmethod
    def _call_torch(self, columns: Columns, grads: Tensors, group: Mapping[str, Any], skip: Tensor | None) -> None:
        """Step what stands under 'params', unless ``skip`` is 1 on the device."""


def check_bucket(bucket: Bucket, gradients: Tensors) -> None:
    """Refuse what compiled ops refuse, and torch's functions do not look for.

    Args:
        bucket: For :meth:`Algorithm.update_by_torch`.
        gradients: Of its parameters.

    Raises:
        ValueError: Memory that is written and shared, or a partner that cannot be.
    """
    moments = [(f'{name}s', column) for name, column in bucket.columns.items() if name != 'step']
    written = [('params', bucket.params), *moments, ('partners', bucket.partners or bucket.params)]
    check_lists([('grads', gradients)], written)
    check_partners(bucket.params, bucket.partners)


def _unscaled(gradients: Tensors, params: Tensors, fits: bool, decision: Tensor, given: Mapping[str, Any]) -> Tensors:
    """Gradients in the types and layouts of ``params``, unscaled and clipped; those that have to change are new.

    Args:
        gradients: Scaled.
        params: What is stepped.
        fits: Whether both have the same types, and ``params`` are contiguous.
        decision: From the prologue.
        given: What that decided from.
    """
    found, is_new = gradients, False
    if not fits or not all(map(Tensor.is_contiguous, gradients)) or any(map(Tensor.is_neg, gradients)):
        own = [_real(gradient).resolve_neg() for gradient in gradients]
        found = [g if g.dtype is p.dtype and is_direct((g, p)) else torch.empty_like(p) for g, p in zip(own, params)]
        is_new = all(map(operator.is_not, found, own))
        _copy(list(zip(found, own)))
    if given.get('scale') is not None or given.get('max_norm') is not None:
        multiply = torch._foreach_mul_ if is_new else torch._foreach_mul
        found = list(multiply(found, decision[1] * decision[2]) or found)
    limit = given.get('clip_value')
    if limit is not None:
        found = list(torch._foreach_clamp_min(torch._foreach_clamp_max(found, limit), -limit))
    return found


def _real(tensor: Tensor) -> Tensor:
    """Pairs of real numbers in place of complex ones, in the same memory but for a lazy conjugation."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _alike(partner: Tensor, param: Tensor, *moments: Tensor) -> Tensors:
    """A parameter and its moments in one type and layout: themselves, or copies."""
    value = value_of(param, partner) if param.dtype in HALF_TYPES else param
    tensors = [value, *(moment.to(value.dtype) for moment in moments)]
    return tensors if is_direct(tensors) else [tensor.contiguous() for tensor in tensors]


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair to the first, unless they are one."""
    pairs = [(target, source) for target, source in pairs if target is not source]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


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

    def rate(self, group: int, device: torch.device) -> float | Tensor:
        """The lr of a group as torch's functions take it, which read a tensor where it is."""
        rate = self.rates[group]
        if not isinstance(rate, Tensor):
            return float(rate)
        return rate if rate.device.type == 'cpu' else rate.detach().to(device, torch.float32)

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
