"""What a fused optimizer gathers for a step, and what fits together in one."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..policy.nested import HALF_TYPES
from ..policy.policy import dtype_name

REAL = (torch.float32, torch.float64, *HALF_TYPES)
COMPLEX = (torch.complex64, torch.complex128)
#: What is computed in float64.
WIDE = (torch.float64, torch.complex128)


def same(one: Collection[Any], other: Collection[Any]) -> bool:
    """The same objects in the same order. ``==`` of tensors would compare numbers, and read them."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


@dataclasses.dataclass(eq=False)
class Part:
    """What one call of an op takes.

    Attributes:
        names: The state that it writes, ``step`` among it; empty for none.
        indices: Positions among the parameters that have a gradient.
        params: The parameters.
        states: Their state dicts.
        columns: What stood there under each of ``names`` when this was gathered.
        steps: Their counts.
        partners: Empty, or one for each.
        twofold: Positions in this part of complex ones, which the ops take as pairs of real numbers.
        rows: What the prologue writes for them.
    """

    names: tuple[str, ...]
    indices: list[int]
    params: list[Tensor]
    states: list[dict[str, Any]]
    columns: dict[str, list[Tensor]]
    steps: list[Tensor]
    partners: list[Tensor]
    twofold: list[int]
    rows: Tensor

    def is_current(self) -> bool:
        """Whether the state is what it was."""
        try:
            return all(
                same(list(map(operator.itemgetter(name), self.states)), self.columns[name]) for name in self.names
            )
        except KeyError:
            return False

    def real(self, tensors: list[Tensor]) -> list[Tensor]:
        """Complex tensors as real ones: views, made anew each time, since the memory of a parameter may be exchanged."""
        if not self.twofold or not tensors:
            return tensors
        tensors = list(tensors)
        for index in self.twofold:
            tensors[index] = torch.view_as_real(tensors[index])
        return tensors

    def state(self, name: str) -> list[Tensor]:
        """The tensors of one name, as the ops take them; none where this part has no such state."""
        return self.real(self.columns[name]) if name in self.columns else []


@dataclasses.dataclass(eq=False)
class Place:
    """What lies on one device.

    Attributes:
        device: The device.
        parts: Those on it; the ones of float32 rows come first.
        rows: What the prologue writes, for all parts in turn.
        narrow: Rows of float32 beside ``rows`` of float64, where both are needed.
        groups: int64 on the CPU: the group of each parameter.
        decision: What the prologue decides.
    """

    device: torch.device
    parts: list[Part]
    rows: Tensor
    narrow: Tensor | None
    groups: Tensor
    decision: Tensor

    @property
    def steps(self) -> list[Tensor]:
        """The counts of all parameters, in the order of ``rows``."""
        return self.parts[0].steps if len(self.parts) == 1 else [step for part in self.parts for step in part.steps]


@dataclasses.dataclass(eq=False)
class Plan:
    """What was gathered, and all that it was gathered from."""

    decides: bool
    lengths: list[int]
    parameters: list[Tensor]
    given: list[bool]
    shapes: list[torch.Size]
    devices: list[int]
    dtypes: list[torch.dtype]
    layouts: list[torch.layout]
    stepped: list[Tensor]
    chosen: list[int]
    partners: Sequence[Tensor | None]
    names: list[tuple[str, ...]]
    rest: list[Any]
    places: list[Place]
    #: (parameter, its state dict, what comes into it) of those whose state is begun or corrected by this step.
    begun: list[tuple[Tensor, dict[str, Any], dict[str, Tensor]]]
    keys: list[Any] = dataclasses.field(default_factory=list)
    values: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Hyper:
    """The hyper-parameters of all groups, and the objects that they were read from."""

    rates: list[Any]
    rest: list[tuple[Any, ...]]
    table: Tensor
    #: Whether a parameter is elsewhere than on the CPU, so that an lr there is read by the host.
    on_host: bool
    #: Whether one was read so.
    read: bool
    #: Whether others than lr may change in place, where no comparison of objects sees it.
    mutable: bool
    #: (group, tensor) for each tensor lr.
    tensors: list[tuple[int, Tensor]]


def unfit(parameter: Tensor, gradient: Tensor, optimizer: str) -> str:
    """Why no step can be taken with a gradient; empty where one can.

    Args:
        parameter: What is stepped.
        gradient: Its gradient.
        optimizer: Name of the class in ``torch.optim`` that is extended.
    """
    if is_traceable_wrapper_subclass(parameter):
        kind = type(parameter).__name__
        return f'is a {kind}, and plain tensors are expected, no sharded ones. Use torch.optim.{optimizer}'
    if parameter.dtype not in REAL and parameter.dtype not in COMPLEX:
        return f'has dtype {dtype_name(parameter.dtype)}: {", ".join(map(dtype_name, (*REAL, *COMPLEX)))} fit'
    if gradient.layout is not torch.strided:
        other = 'SGD' if optimizer == 'SGD' else 'SparseAdam'
        return f'has a sparse gradient: use torch.optim.{other} for it, or sparse=False in its embedding'
    if gradient.shape != parameter.shape:
        return f'has shape {tuple(parameter.shape)} and its gradient {tuple(gradient.shape)}: they must agree'
    if gradient.device != parameter.device:
        return f'is on {parameter.device} and its gradient on {gradient.device}: move the gradient there'
    fitting = COMPLEX if parameter.is_complex() else REAL
    if gradient.dtype not in fitting:
        mine, theirs = dtype_name(parameter.dtype), dtype_name(gradient.dtype)
        return f'has dtype {mine} and its gradient {theirs}: {", ".join(map(dtype_name, fitting))} fit'
    return ''


def misfit(value: Any, parameter: Tensor) -> str:
    """What is wrong with a moment of a parameter; empty where nothing is."""
    if not isinstance(value, Tensor):
        return f'is a {type(value).__name__}, no tensor'
    if value.layout is not torch.strided:
        return 'is sparse'
    if value.shape != parameter.shape:
        return f'has shape {tuple(value.shape)} and the parameter {tuple(parameter.shape)}'
    fitting = COMPLEX if parameter.is_complex() else REAL
    if value.dtype not in fitting:
        return f'has dtype {dtype_name(value.dtype)}, and {", ".join(map(dtype_name, fitting))} fit'
    return ''


def flat(rest: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
    for row in rest:
        for value in row:
            yield value
            if isinstance(value, tuple):
                yield from value


def uncountable(step: Any) -> str:
    """What is wrong with a count of steps; empty where nothing is."""
    if step is None:
        return 'is missing, without which the moments mean nothing'
    if isinstance(step, Tensor):
        return '' if step.numel() == 1 else f'has shape {tuple(step.shape)}: one number is expected'
    return '' if isinstance(step, (int, float)) else f'is a {type(step).__name__}: one number is expected'
