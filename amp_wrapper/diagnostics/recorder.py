"""Records what is needed to run the passes of the present step again: references to arguments and gradients, not copies."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..casting import region
from ..casting.cast_module import Watcher
from ..checkpoint import random_state
from ..engine import Engine
from ..policy.nested import map_tensors
from .watches import is_bad, outputs_of, tensors_of

#: Forward calls of one step that are kept, the last ones.
MOST_CALLS = 32


@dataclasses.dataclass
class LossRecord:
    """One loss that was scaled: its value without its graph, a copy of its scale (None for 1), what computed it."""

    loss_id: int
    value: Tensor
    scale: Tensor | None
    made_by: str


@dataclasses.dataclass
class CallRecord:
    """One forward call of a model, from outside of any other.

    Attributes:
        name: Of the model, where there are several; else ''.
        given: Its ``args`` and ``kwargs`` as they came, before any cast.
        states: Of the random generators before the call.
        versions: Version counters of the tensors among the arguments.
        surrounds: Whether the engine surrounded it, as mmengine's wrapper does.
        gradients: The scaled gradient of each floating tensor of the outputs, by its place among them; a sum where several
            losses gave one.
        losses: The places of these losses in the step.
    """

    name: str
    given: tuple[tuple[Any, ...], dict[str, Any]]
    states: dict[str, Any]
    versions: tuple[int, ...]
    surrounds: bool
    gradients: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    losses: set[int] = dataclasses.field(default_factory=set)

    @property
    def is_unchanged(self) -> bool:
        """Whether nobody has written to the arguments since."""
        return _versions_of(self.given) == self.versions

    @property
    def has_bad_gradients(self) -> bool:
        """Whether a gradient that came back is not finite. Syncs."""
        return any(map(is_bad, self.gradients.values()))


@dataclasses.dataclass
class StepRecord:
    """The forward calls and losses since the last step.

    Attributes:
        calls: In their order.
        losses: In the order of their backward passes.
        dropped: Forward calls before the last :data:`MOST_CALLS`.
    """

    calls: list[CallRecord] = dataclasses.field(default_factory=list)
    losses: list[LossRecord] = dataclasses.field(default_factory=list)
    dropped: int = 0

    @property
    def scale(self) -> float:
        """The largest loss scale. Syncs."""
        return max((float(loss.scale) for loss in self.losses if loss.scale is not None), default=1.0)

    def clear(self) -> None:
        """Let go of all tensors. Hooks in the graph of a loss that somebody keeps still hold the calls."""
        for call in self.calls:
            call.given, call.gradients = ((), {}), {}
        self.calls.clear()
        self.losses.clear()


class Recorder:
    """Records the calls of models with gradients, until it is removed.

    Under ``torch.compile`` nothing is recorded of calls that are part of a graph.

    Args:
        models: Not wrapped, by the names that their calls get.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self.step = StepRecord()
        self._depth = threading.local()
        self._watchers = [Watcher(partial(self._enter, name), self._leave).watch(models[name]) for name in models]

    def remove(self) -> None:
        """Watch no longer."""
        for watcher in self._watchers:
            watcher.remove()
        # they hold each other
        self._watchers, self.step = [], StepRecord()

    def next_step(self) -> StepRecord:
        """Return what was recorded since the last step; a new one begins."""
        done, self.step = self.step, StepRecord()
        return done

    def see_loss(self, engine: Engine, loss: Tensor, loss_id: int) -> None:
        """Record a loss that is about to be scaled, for a backward pass."""
        scale = engine.scales.pinned(loss_id)
        made_by = '' if loss.grad_fn is None else loss.grad_fn.name()
        self.step.losses.append(LossRecord(loss_id, loss.detach(), None if scale is None else scale.clone(), made_by))

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth.value = getattr(self._depth, 'value', 0) + 1
        if self._depth.value == 1 and torch.is_grad_enabled():
            # models change the dicts and lists that they are given
            given = _same_tensors((args, kwargs))
            call = CallRecord(name, given, random_state.capture(), _versions_of(given), region.is_open())
            self.step.dropped += len(self.step.calls) == MOST_CALLS
            self.step.calls[:] = [*self.step.calls[1 - MOST_CALLS :], call]

    def _leave(self, module: nn.Module, output: Any) -> None:
        # an exception may have left others open
        self._depth.value = max(getattr(self._depth, 'value', 0) - 1, 0)
        if self._depth.value or not torch.is_grad_enabled() or not self.step.calls:
            return
        call, outputs = self.step.calls[-1], outputs_of(output)
        if not any(tensor.requires_grad for tensor in outputs):
            # such as a preprocessor: no gradient comes from it
            self.step.calls.pop()
        for place, tensor in enumerate(outputs):
            # hooks of leaves would stay
            if tensor.requires_grad and not tensor.is_leaf:
                # it holds no engine, since scripts keep their losses
                tensor.register_hook(partial(_keep, self.step, call, place))  # type: ignore[no-untyped-call]


def _keep(step: StepRecord, call: CallRecord, place: int, gradient: Tensor) -> None:
    """Keep the gradient of an output."""
    # without a loss it is of one of other optimizers
    if step.losses:
        call.losses.add(len(step.losses) - 1)
        known = call.gradients.get(place)
        call.gradients[place] = gradient if known is None else known + gradient


def _same_tensors(value: Any) -> Any:
    """Return new lists, tuples and dicts, with the same things in them."""
    if type(value) in (list, tuple):
        return type(value)(map(_same_tensors, value))
    return {key: _same_tensors(item) for key, item in value.items()} if type(value) is dict else value


def _versions_of(value: Any) -> tuple[int, ...]:
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors_of(value))


def copied_batch(value: Any, cuts: bool = False) -> Any:
    """Copy what a model is given, with its tensors: models may write to it. What Python cannot copy is the same object.

    Args:
        value: A batch, or arguments.
        cuts: Whether tensors with a graph alone take gradients in the copy: leaves are weights.
    """
    memo: dict[int, Any] = {}
    for each in tensors_of(value):
        memo[id(each)] = each.detach().clone().requires_grad_(each.requires_grad and not (cuts and each.is_leaf))
    try:
        return copy.deepcopy(value, dict(memo))
    except Exception:
        return map_tensors(lambda tensor: memo.get(id(tensor), tensor), value)
