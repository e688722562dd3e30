"""Runs a recorded step again on a copy of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checkpoint import random_state
from ..policy.nested import HALF_TYPES, cast_tensors
from .sandbox import Pass, Sandbox, run_step
from .watches import BACKWARD, BadOp, FirstBad, Maximum, copied_batch, is_bad, numbers, tensors_of

#: Forward calls of one step that are kept, the last ones.
MOST_CALLS = 32


# -- a step, as it was recorded ----------------------------------------------------------------------------------------


class LossRecord(NamedTuple):
    """One loss that was scaled: its value without its graph, a copy of its scale (None for 1), what computed it."""

    loss_id: int
    value: Tensor
    scale: Tensor | None
    made_by: str


def versions_of(value: Any) -> list[int]:
    """Return the version counters of the tensors in a value; 0 for those of inference, which have none."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors_of(value)]


@dataclasses.dataclass
class CallRecord:
    """One forward call of a model, from outside of any other.

    Attributes:
        name: Of the model, where there are several; else ''.
        given: Its ``args`` and ``kwargs`` as they came, before any cast.
        states: Of the random generators before the call.
        surrounds: Whether the engine surrounded it, as mmengine's wrapper does.
        versions: Of the arguments, before the call: :func:`versions_of`.
        gradients: The scaled gradient of each tensor of numbers in the outputs, by its place among them; a sum where several
            losses gave one.
        losses: The places of these losses in the step.
    """

    name: str
    given: tuple[tuple[Any, ...], dict[str, Any]]
    states: dict[str, Any]
    surrounds: bool
    versions: list[int]
    gradients: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    losses: set[int] = dataclasses.field(default_factory=set)

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


# -- the step again ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Replay:
    """What one replay of a step has shown.

    Attributes:
        refused: Why there is none; '' where it ran.
        wrong: The calls whose outputs, or gradients of parameters, were not finite.
        gradients_known: Whether the backward passes ran with the gradients that the losses gave.
        sums: Of each parameter the sum of its gradients; ``parameters`` are those that are not finite in one pass.
        first: Where that begins, and ``call`` the call in which it does; None where nothing was traced.
        outputs: The largest numbers that modules gave in this call, in the order in which they ended.
    """

    refused: str = ''
    wrong: list[CallRecord] = dataclasses.field(default_factory=list)
    gradients_known: bool = True
    parameters: list[str] = dataclasses.field(default_factory=list)
    sums: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    first: BadOp | None = None
    call: CallRecord | None = None
    outputs: list[Maximum] = dataclasses.field(default_factory=list)

    @property
    def bad_sums(self) -> list[str]:
        """The parameters whose gradients are finite in each pass, and not in their sum."""
        return [] if self.wrong else [name for name, total in self.sums.items() if is_bad(total)]

    @property
    def is_finite(self) -> bool:
        """Whether all that ran was finite."""
        return not (self.refused or self.wrong or self.bad_sums)


@dataclasses.dataclass(frozen=True)
class Remedy:
    """One setting, and what became of the step with it.

    Attributes:
        kind: 'keep_fp32', 'bfloat16', 'loss_scale', 'accumulate_in_fp32' or 'fp32'.
        setting: As it is written in a configuration.
        finite: Whether the step was finite with it; None where it could not be tried.
        forward_only: Whether the forward pass alone could be tried, since the loss is computed outside of the model.
    """

    kind: str
    setting: str
    finite: bool | None
    forward_only: bool = False


def run_call(box: Sandbox, call: CallRecord, factor: float, traced: bool, found: Replay) -> None:
    """Run one call with its backward passes, and note what it has shown."""
    # one model may be given what another one gave at its level
    half = box.engine.policy.half_type or torch.float32
    args, kwargs = cast_tensors(copied_batch(call.given, cuts=True), half, HALF_TYPES)
    bad: list[Tensor] = []

    def run(copied: nn.Module) -> Pass:
        random_state.restore(call.states)
        outputs = numbers(copied.get_submodule(call.name)(*args, **kwargs))
        bad.extend(filter(is_bad, outputs))
        pairs = [] if bad or call.has_bad_gradients else _pairs(call.gradients, outputs, factor)
        found.gradients_known &= bool(pairs) and len(pairs) == len(call.gradients)
        return pairs

    trace = FirstBad(box.model, tensors_of((args, kwargs))) if traced else None
    step = run_step(box, run, [] if trace is None else [trace], surrounds=call.surrounds, updates=False)
    wrong = {name: gradient for name, gradient in step.gradients.items() if is_bad(gradient)}
    found.parameters += [name for name in wrong if name not in found.parameters]
    for name, gradient in step.gradients.items():
        found.sums[name] = gradient if name not in found.sums else found.sums[name] + gradient
    if bad or wrong:
        found.wrong.append(call)
    if trace is not None:
        # the copy is thrown away, but it may hold it
        trace.modules.remove()
        # what is wrong in one call goes on to the inputs of later ones, and to the gradients of earlier ones
        if (bad or wrong) and (found.first is None or found.first.phase == BACKWARD):
            found.first, found.call = trace.begin([*bad, *wrong.values()]), call
            found.outputs = [each for each in trace.modules.take() if not each.is_input]


def _pairs(gradients: dict[int, Tensor], outputs: Sequence[Tensor], factor: float) -> Pass:
    known = [(outputs[place], each) for place, each in gradients.items() if place < len(outputs)]
    fit = [(tensor, each) for tensor, each in known if tensor.requires_grad and tensor.shape == each.shape]
    # a product in 16 bits may overflow
    return [(tensor, (each.double() * factor).to(tensor.dtype)) for tensor, each in fit]
