"""The tensor lists of a fused step, which are kept for the next step as long as nothing that they came from has changed."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.attributes import Column, fingerprints, same, unchanged
from ..shards import differs, is_sharded, local

_PARAMS = operator.itemgetter('params')


@dataclasses.dataclass(eq=False)
class Bucket:
    """Parameters of one device that one call steps.

    Attributes:
        group: The number of their group, where torch's own functions step them: complex and float64 ones, and all where no
            compiled op serves the device. None for the fused ops, which take many groups at once.
        indices: Positions among the parameters that have a gradient; None for all of them.
        params: The parameters.
        states: Their state dicts; empty where they need none.
        columns: What stood there when this was gathered, by name; ``step`` among it.
        steps: The step counters that the prologue moves.
        partners: Empty, or one for each.
        rows: What the prologue writes for them.
        counts: The memory of all step counters, where torch's function leaves the counting to us.
        gradients_fit: Whether the gradients have the types of the parameters; None before the first step.
    """

    group: int | None
    indices: list[int] | None
    params: list[Tensor]
    states: list[dict[str, Any]]
    columns: dict[str, list[Tensor]]
    steps: list[Tensor]
    partners: list[Tensor]
    rows: Tensor
    counts: Tensor | None = None
    gradients_fit: bool | None = None

    def __post_init__(self) -> None:
        self._is_sharded = any(map(is_sharded, self.params))
        moments = [one for name, column in self.columns.items() if name != 'step' for one in column]
        dtypes = {one.dtype for one in (*self.params, *moments)}
        #: Whether torch's functions step contiguous parameters as they are: all is float32 or all float64, and moments are
        #: contiguous.
        self.is_wide = dtypes in ({torch.float32}, {torch.float64}) and all(map(Tensor.is_contiguous, moments))
        self._on_rank: Bucket | None = None

    @property
    def on_rank(self) -> Bucket:
        """The same, with the local shards of sharded parameters and moments. Asked for once everything is there."""
        if self._is_sharded and self._on_rank is None:
            columns = {name: local(column) for name, column in self.columns.items()}
            self._on_rank = dataclasses.replace(
                self, params=local(self.params), columns=columns, partners=local(self.partners)
            )
        return self._on_rank or self

    def pick(self, gradients: list[Tensor]) -> list[Tensor]:
        """Those of this bucket, of all that are there."""
        return gradients if self.indices is None else [gradients[index] for index in self.indices]


@dataclasses.dataclass(eq=False)
class DeviceBucket:
    """All that is stepped on one device.

    Attributes:
        device: The device.
        buckets: What is on it.
        rows: What the prologue writes, for all buckets of the fused ops in turn.
        steps: The step counters of ``rows``.
        groups: int64 on the CPU: the group of each of ``rows``.
        decision: What the prologue decides.
    """

    device: torch.device
    buckets: list[Bucket]
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
        options: The values in each group that decide ``names`` and the hyper-parameters beside lr.
        parameters: All parameters.
        fingerprints: Of all parameters, and of their gradients.
        partners: Of all parameters, as an :class:`~amp_wrapper.optim.fused.Update` gave them; None without one.
        devices: The lists, device by device.
        begun: (parameter, its state dict, what comes into it) of those whose state is begun or corrected by this step.
        is_on_host: Whether all that is stepped is on the CPU.
        shards: The local shards of all parameters, where one is sharded.
        columns: The state dicts of each bucket, and what they hold under each name.
        keys: Of the optimizer's state, as it was after the step.
        values: Its values.
    """

    lengths: list[int]
    names: list[tuple[str, ...]]
    options: list[Any]
    parameters: list[Tensor]
    fingerprints: tuple[Any, ...]
    partners: Sequence[Tensor | None] | None
    devices: list[DeviceBucket]
    begun: list[tuple[Tensor, dict[str, Any], dict[str, Tensor]]]
    is_on_host: bool = False
    shards: list[Tensor] = dataclasses.field(default_factory=list)
    columns: list[Column] = dataclasses.field(default_factory=list)
    keys: list[Any] = dataclasses.field(default_factory=list)
    values: list[Any] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.is_on_host = all(place.device.type == 'cpu' for place in self.devices)
        if any(map(is_sharded, self.parameters)):
            self.shards = local(self.parameters)
        for place in self.devices:
            for bucket in place.buckets:
                self.columns += [(bucket.states, name, column) for name, column in bucket.columns.items()]

    def present(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradients that are there, the local shards of sharded ones."""
        there = [gradient for gradient in gradients if gradient is not None]
        return local(there) if self.shards else there

    def is_current(
        self,
        groups: list[dict[str, Any]],
        parameters: list[Tensor],
        state: Mapping[Tensor, Any],
        gradients: Sequence[Tensor | None],
        partners: Sequence[Tensor | None] | None,
    ) -> bool:
        """Whether everything is what it was, but for the numbers in it."""
        if (self.partners is None) != (partners is None):
            return False
        pairs = [
            (self.parameters, parameters),
            (self.keys, list(state)),
            (self.values, list(state.values())),
            (self.partners or (), partners or ()),
        ]
        return (
            self.lengths == list(map(len, map(_PARAMS, groups)))
            and unchanged(pairs, self.columns)
            and (not self.shards or self._has_shards(parameters, gradients))
            and self.fingerprints == fingerprints(parameters, gradients, partners is None)
        )

    def _has_shards(self, parameters: list[Tensor], gradients: Sequence[Tensor | None]) -> bool:
        """Whether shards lie where they did, and gradients are laid out as they are: torch moves shards with the model."""
        laid_out = all(g is None or not differs(g, parameter) for g, parameter in zip(gradients, parameters))
        return laid_out and same(self.shards, local(parameters))
