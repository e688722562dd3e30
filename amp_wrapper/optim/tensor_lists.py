"""What a fused optimizer gathers for a step, and keeps for the next one as long as nothing that it came from has changed."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

_PARAMS = operator.itemgetter('params')


def same(one: Collection[Any], other: Collection[Any]) -> bool:
    """The same objects in the same order. ``==`` of tensors would compare numbers, and read them."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def fingerprint(tensors: Sequence[Tensor | None]) -> list[Any]:
    """What of some tensors an op cares for, beside their numbers and where they lie."""
    return [None if t is None else (t.shape, t.dtype, t.device, t.layout) for t in tensors]


def parameters_of(groups: Iterable[Mapping[str, Any]]) -> list[Tensor]:
    """The parameters of all groups, in their order."""
    return list(chain.from_iterable(map(_PARAMS, groups)))


@dataclasses.dataclass(eq=False)
class Bucket:
    """Parameters of one device that one call steps.

    Attributes:
        group: The one parameter group that torch steps itself; None for a bucket of the fused ops, which take many.
        indices: Positions among the parameters that have a gradient.
        params: The parameters.
        states: Their state dicts; empty where they need none.
        columns: What stood there when this was gathered, by name; ``step`` among it.
        steps: Their step counters.
        partners: Empty, or one for each.
        rows: What the prologue writes for them.
    """

    group: int | None
    indices: list[int]
    params: list[Tensor]
    states: list[dict[str, Any]]
    columns: dict[str, list[Tensor]]
    steps: list[Tensor]
    partners: list[Tensor]
    rows: Tensor

    def column(self, name: str) -> list[Tensor]:
        """The state of one name; empty where there is none."""
        return self.columns.get(name, [])

    def pick(self, gradients: list[Tensor]) -> list[Tensor]:
        """Those of this bucket."""
        return list(map(gradients.__getitem__, self.indices))


@dataclasses.dataclass(eq=False)
class DeviceBucket:
    """What lies on one device.

    Attributes:
        device: The device.
        fused: Buckets of the fused ops.
        by_torch: Buckets of float64 and complex parameters.
        rows: What the prologue writes, for all fused buckets in turn.
        steps: The step counters of ``rows``.
        groups: int64 on the CPU: the group of each of ``rows``.
        decision: What the prologue decides.
    """

    device: torch.device
    fused: list[Bucket]
    by_torch: list[Bucket]
    rows: Tensor
    steps: list[Tensor]
    groups: Tensor
    decision: Tensor


@dataclasses.dataclass(eq=False)
class TensorLists:
    """The lists of a step, and what they were gathered from.

    Attributes:
        lengths: Parameters in each group.
        names: The state that each group needs.
        options: What of each group tells ``names`` and the hyper-parameters beside lr.
        parameters: Fingerprint of all parameters.
        gradients: Fingerprint of their gradients.
        partners: Of all parameters, as an :class:`~amp_wrapper.optim.fused.Update` gave them; None without one.
        devices: The lists, device by device.
        begun: (parameter, its state dict, what comes into it) of those whose state is begun or corrected by this step.
        objects: All parameters and all that the optimizer's state holds of them, as it was after the step.
    """

    lengths: list[int]
    names: list[tuple[str, ...]]
    options: list[Any]
    parameters: list[Any]
    gradients: list[Any]
    partners: Sequence[Tensor | None] | None
    devices: list[DeviceBucket]
    begun: list[tuple[Tensor, dict[str, Any], dict[str, Tensor]]]
    objects: list[Any] = dataclasses.field(default_factory=list)

    @property
    def is_on_host(self) -> bool:
        """Whether all that is stepped is on the CPU."""
        return all(place.device.type == 'cpu' for place in self.devices)

    def objects_of(self, parameters: list[Tensor], state: Mapping[Tensor, Any]) -> list[Any]:
        """All parameters and all that an optimizer's state holds of them.

        Raises:
            KeyError: A state has lost an entry.
        """
        found: list[Any] = [*parameters, *state, *state.values()]
        for place in self.devices:
            for bucket in (*place.fused, *place.by_torch):
                for name in bucket.columns:
                    found += map(operator.itemgetter(name), bucket.states)
        return found

    def is_current(
        self,
        groups: list[dict[str, Any]],
        parameters: list[Tensor],
        state: Mapping[Tensor, Any],
        gradients: Sequence[Tensor | None],
        partners: Sequence[Tensor | None] | None,
    ) -> bool:
        """Whether everything is what it was, but for the numbers in it."""
        try:
            objects = self.objects_of(parameters, state)
        except KeyError:
            return False
        return (
            same(self.objects, objects)
            and self.lengths == [len(group['params']) for group in groups]
            and self.parameters == fingerprint(parameters)
            and self.gradients == fingerprint(gradients)
            and (
                self.partners is partners
                or (self.partners is not None and partners is not None and same(self.partners, partners))
            )
        )
