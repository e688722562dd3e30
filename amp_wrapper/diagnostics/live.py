"""Watches the modules of a model while it trains, for models of which no copy can be run: sharded ones, say."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..casting.cast_hooks import AmpHook, StayedBehind
from ..casting.modules import class_name
from ..engine.parts import EngineParts
from ..shards import local
from .diagnosis import Diagnosis, complete
from .recorder import StepRecord, outputs_of, tensors_of


@dataclasses.dataclass(frozen=True)
class Seen:
    """The largest number at one place: infinite or NaN where one of them is.

    Attributes:
        name: Of the module; '' for the model itself.
        kind: Its class.
        largest: Absolute.
    """

    name: str
    kind: str
    largest: float

    @property
    def title(self) -> str:
        """The module, for a sentence."""
        return f'{self.name or "the model itself"} ({self.kind})'

    @property
    def is_finite(self) -> bool:
        """Whether all numbers were."""
        return math.isfinite(self.largest)


class LiveWatch:
    """Notes the largest number in each output of each module, and in the gradient of each, until it is removed.

    That is one reduction for each, and the device is read by :meth:`take` alone.

    Args:
        model: Not wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._inputs: list[tuple[str, str, Tensor]] = []
        self._outputs: list[tuple[str, str, Tensor]] = []
        self._gradients: list[tuple[str, str, Tensor]] = []
        self._handles = [model.register_forward_pre_hook(_AtInput(self), with_kwargs=True)]
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._handles.append(module.register_forward_hook(_AtOutput(self, name, class_name(module))))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def take(self) -> tuple[list[Seen], list[Seen], list[Seen]]:
        """What was seen since the last call: inputs of the model, outputs in the order of the forward pass, gradients of
        outputs in the order of the backward pass. Syncs."""
        found = tuple(_read(entries) for entries in (self._inputs, self._outputs, self._gradients))
        self._inputs, self._outputs, self._gradients = [], [], []
        return found  # type: ignore[return-value]

    def see_inputs(self, value: Any) -> None:
        """The model is called."""
        self._inputs += [('', '', _largest(tensor)) for tensor in tensors_of(value) if _counts(tensor)]

    def see_output(self, name: str, kind: str, output: Any) -> None:
        """A module has given something."""
        for tensor in outputs_of(output):
            if _counts(tensor):
                self._outputs.append((name, kind, _largest(tensor)))
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(_AtGradient(self._gradients, name, kind))  # type: ignore[no-untyped-call]


class _AtGradient:
    """Tensor hook; it holds a list alone, since scripts keep their losses."""

    def __init__(self, entries: list[tuple[str, str, Tensor]], name: str, kind: str) -> None:
        self._entries, self._name, self._kind = entries, name, kind

    def __call__(self, gradient: Tensor) -> None:
        if _counts(gradient):
            self._entries.append((self._name, self._kind, _largest(gradient)))


class _WatchHook(AmpHook):
    stays_behind = True

    def __reduce__(self) -> tuple[type[StayedBehind], tuple[()]]:
        return StayedBehind, ()


class _AtInput(_WatchHook):
    def __init__(self, watch: LiveWatch) -> None:
        self._watch = watch

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._watch.see_inputs((args, kwargs))


class _AtOutput(_WatchHook):
    def __init__(self, watch: LiveWatch, name: str, kind: str) -> None:
        self._watch, self._name, self._kind = watch, name, kind

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._watch.see_output(self._name, self._kind, output)


def _counts(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.layout is torch.strided and tensor.numel() > 0


@torch.no_grad()
def _largest(tensor: Tensor) -> Tensor:
    return local([tensor.detach()])[0].abs().amax().float()


def _read(entries: list[tuple[str, str, Tensor]]) -> list[Seen]:
    if not entries:
        return []
    device = entries[0][2].device
    numbers = torch.stack([largest.to(device) for _, _, largest in entries]).tolist()
    return [Seen(name, kind, number) for (name, kind, _), number in zip(entries, numbers)]


def judge_watched(
    seen: tuple[Sequence[Seen], Sequence[Seen], Sequence[Seen]],
    step: StepRecord,
    parts: EngineParts,
    several_ranks: bool,
) -> Diagnosis:
    """Why a step was not finite, from what was seen of its modules while it ran. Nothing is tried.

    Args:
        seen: Of :meth:`LiveWatch.take`.
        step: What was recorded.
        parts: Of the engine.
        several_ranks: Whether gradients are averaged over several ranks.
    """
    inputs, outputs, gradients = seen
    first = next((place for place, each in enumerate(outputs) if not each.is_finite), None)
    last = next((place for place, each in enumerate(gradients) if not each.is_finite), None)
    if any(math.isnan(each.largest) for each in inputs):
        found = Diagnosis('input', 'What the model was given holds NaN.')
    elif first is not None:
        place = outputs[first]
        before = max((each.largest for each in outputs[:first]), default=0.0)
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
    complete(found, step, parts.policy)
    return found
