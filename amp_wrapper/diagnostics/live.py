"""Watches the modules of a model while it trains, for models of which no copy can be run: sharded ones, say."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..casting.cast_module import Watcher
from ..casting.modules import class_name
from ..engine import Engine
from ..shards import local
from .diagnosis import Diagnosis, complete
from .monitor import low_precision
from .op_tensors import is_measured
from .recorder import StepRecord, outputs_of, tensors_of


@dataclasses.dataclass(frozen=True)
class Seen:
    """The largest number at one place: infinite or NaN where one of them is.

    Attributes:
        name: Of the module; '' for the model itself.
        kind: Its class.
        largest: Absolute.
        is_input: Whether it is what a script gave the module; otherwise it is what the module gave.
    """

    name: str
    kind: str
    largest: float
    is_input: bool = False

    @property
    def title(self) -> str:
        """The module, for a sentence."""
        return f'{self.name or "the model itself"} ({self.kind})'

    @property
    def is_nan(self) -> bool:
        """Whether one of the numbers was NaN."""
        return math.isnan(self.largest)

    @property
    def is_finite(self) -> bool:
        """Whether all numbers were."""
        return math.isfinite(self.largest)


#: Name and class of a module, the largest number on its device, and whether the module was given it.
_Entry = tuple[str, str, Tensor, bool]


class LiveWatch:
    """Notes the largest number in what scripts give, in each output of each module, and in the gradient of each, until removed.

    That is one reduction for each, and the device is read by :meth:`take` alone. A script gives something where it calls the
    model, or a part of it outside of any other call: ``model.forward_features(x)`` calls the parts one by one.

    Args:
        model: Not wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._forward: list[_Entry] = []
        self._gradients: list[_Entry] = []
        self._depth = 0
        self._weights = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._watcher = Watcher(self._begin, self._end)
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._watcher.watch(module)

    def remove(self) -> None:
        """Watch no longer."""
        self._watcher.remove()

    def take(self) -> tuple[list[Seen], list[Seen]]:
        """What was seen since the last call, in the order in which it came: of the forward pass, what scripts gave and the
        outputs of modules; of the backward pass, gradients of outputs. Syncs."""
        found = _read(self._forward), _read(self._gradients)
        self._forward, self._gradients, self._depth = [], [], 0
        return found

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called."""
        if torch.is_grad_enabled():
            if not self._depth:
                given = [t for t in tensors_of((args, kwargs)) if is_measured(t) and id(t) not in self._weights]
                self._forward += [(*self._called(module), _largest(tensor), True) for tensor in given]
            self._depth += 1

    def _end(self, module: nn.Module, output: Any) -> None:
        """A call of a module has ended, by an error or not."""
        if torch.is_grad_enabled():
            self._depth = max(self._depth - 1, 0)
            for tensor in outputs_of(output):
                if is_measured(tensor):
                    self._forward.append((*self._called(module), _largest(tensor), False))
                    if tensor.requires_grad and not tensor.is_leaf:
                        tensor.register_hook(_AtGradient(self._gradients, *self._called(module)))  # type: ignore[no-untyped-call]

    def _called(self, module: nn.Module) -> tuple[str, str]:
        return self._names[id(module)], class_name(module)


class _AtGradient:
    """Tensor hook; it holds a list alone, since scripts keep their losses."""

    def __init__(self, entries: list[_Entry], name: str, kind: str) -> None:
        self._entries, self._name, self._kind = entries, name, kind

    def __call__(self, gradient: Tensor) -> None:
        if is_measured(gradient):
            self._entries.append((self._name, self._kind, _largest(gradient), False))


@torch.no_grad()
def _largest(tensor: Tensor) -> Tensor:
    return local([tensor.detach()])[0].abs().amax().float()


def _read(entries: list[_Entry]) -> list[Seen]:
    if not entries:
        return []
    device = entries[0][2].device
    numbers = torch.stack([largest.to(device) for _, _, largest, _ in entries]).tolist()
    return [Seen(name, kind, number, given) for (name, kind, _, given), number in zip(entries, numbers)]


def _limit(engine: Engine) -> float:
    """The largest number of the type that the level computes in."""
    dtype = low_precision(engine.policy)
    return math.inf if dtype is None else torch.finfo(dtype).max


def judge_watched(
    seen: tuple[Sequence[Seen], Sequence[Seen]],
    step: StepRecord,
    engine: Engine,
    several_ranks: bool,
) -> Diagnosis:
    """Why a step was not finite, from what was seen of its modules while it ran. Nothing is tried.

    Args:
        seen: Of :meth:`LiveWatch.take`.
        step: What was recorded.
        engine: Of the optimizer.
        several_ranks: Whether gradients are averaged over several ranks.
    """
    forward, gradients = seen
    # infinities that a script gives are masks, NaN is not
    first = next(
        (place for place, each in enumerate(forward) if not each.is_finite and (not each.is_input or each.is_nan)), None
    )
    last = next((place for place, each in enumerate(gradients) if not each.is_finite), None)
    if first is not None and forward[first].is_input:
        found = Diagnosis('input', 'What the model was given holds NaN.')
    elif first is not None:
        place = forward[first]
        finite = [each for each in forward[:first] if each.is_finite]
        largest = max(finite, key=lambda each: each.largest, default=None)
        limit = _limit(engine)
        if largest is not None and largest.is_input and largest.largest > limit:
            numbers = f'numbers up to {largest.largest:.3g}, and the type of the level ends at {limit:.5g}'
            text = f'What the model was given is too large: {numbers}.'
            found = Diagnosis('input_range', text, place.name, place.kind, 'forward')
        else:
            before = 0.0 if largest is None else largest.largest
            text = f'The first output that is not finite is that of {place.title}, after numbers up to {before:.3g}.'
            found = Diagnosis('forward', text, place.name, place.kind, 'forward')
    elif last is not None:
        place = gradients[last]
        before = max((each.largest for each in gradients[:last]), default=0.0)
        text = f'The first gradient that is not finite is that of the output of {place.title}, after ones up to {before:.3g}.'
        found = Diagnosis('gradient', text, place.name, place.kind, 'backward')
        found.first_gradient = place.title
    elif several_ranks:
        found = Diagnosis('other_rank', 'The outputs of all modules and their gradients are finite on this rank.')
    else:
        text = 'The outputs of all modules and their gradients are finite: what is not are gradients of parameters.'
        found = Diagnosis('gradient', text, phase='backward')
    complete(found, step, engine.policy)
    return found
