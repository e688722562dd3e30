"""Runs a recorded step again on a copy of the model, at its own level, and at settings that may make it finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import random_state
from ..errors import AmpError, one_line
from ..policy import Policy
from ..policy.levels import IN_BFLOAT16, LEVEL_TABLE
from ..policy.nested import HALF_TYPES, cast_tensors
from .first_bad import BadOp, FirstBad
from .recorder import CallRecord, StepRecord, copied_batch
from .sandbox import Attach, Sandbox, sandbox
from .step import Pass, run_step
from .watches import BACKWARD, Maximum, is_bad, outputs_of, tensors_of


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


@dataclasses.dataclass(frozen=True)
class Replayer:
    """Replays one step of a training, at its level and at others.

    Attributes:
        step: What was recorded.
        model: With the weights that it had in the step; it is left as it is. Several models are an ``nn.ModuleDict``.
        policy: The level of the training.
        attach: Attaches a copy.
    """

    step: StepRecord
    model: nn.Module
    policy: Policy
    attach: Attach

    def run(self, policy: Policy | None = None, factor: float = 1.0, traced: bool = False) -> Replay:
        """Run the forward calls again, and their backward passes from the gradients that the losses gave. Syncs.

        Args:
            policy: The level; that of the training by default.
            factor: The gradients of the losses are multiplied by it: another loss scale.
            traced: Whether to look for the place where infinities and NaN begin, which is slow.
        """
        found = Replay()
        try:
            with sandbox(self.model, policy or self.policy, attach=self.attach) as box:
                for call in self.step.calls:
                    _run_call(box, call, factor, traced, found)
        except Exception as error:
            # whatever a copy of a model does, the training goes on
            is_ours = isinstance(error, AmpError)
            found.refused = str(error) if is_ours else f'a copy of the model could not be run ({one_line(error)})'
        return found

    # -- settings that may help --------------------------------------------------------------------------------------

    def in_fp32(self) -> Replay:
        """Replay in FP32, without a loss scale."""
        return self.run(LEVEL_TABLE['O0'], 1 / self.step.scale, traced=True)

    def without_scale(self) -> Remedy:
        """Try a loss scale of 1."""
        return self._try('loss_scale', 'loss_scale=1.0', self.policy)

    def keep(self, module: str) -> Remedy:
        """Try a module in FP32; a dynamic loss scale, which falls by itself, is 1."""
        kept = (*self.policy.keep_fp32, module)
        shown = [item if isinstance(item, str) else item.__name__ for item in kept]
        policy = dataclasses.replace(self.policy, keep_fp32=kept)
        return self._try('keep_fp32', f'keep_fp32={shown}', policy, not policy.loss_scale.dynamic)

    def in_bfloat16(self) -> Remedy:
        """Try bfloat16 in place of float16, without a loss scale."""
        level = IN_BFLOAT16.get(self.policy.opt_level, self.policy.opt_level)
        kind = 'cast_model_type' if self.policy.casts_model else 'autocast_dtype'
        changes: dict[str, Any] = {'opt_level': level, kind: torch.bfloat16, 'split_masters': False}
        setting = "dtype='bfloat16'" if level == self.policy.opt_level else f"opt_level='{level}'"
        return self._try('bfloat16', setting, dataclasses.replace(self.policy, **changes))

    def _try(self, kind: str, setting: str, policy: Policy, is_scaled: bool = False) -> Remedy:
        found = self.run(policy, 1.0 if is_scaled else 1 / self.step.scale)
        finite = None if found.refused else found.is_finite
        return Remedy(kind, setting, finite, bool(finite) and not found.gradients_known)


def _run_call(box: Sandbox, call: CallRecord, factor: float, traced: bool, found: Replay) -> None:
    """Run one call with its backward passes, and note what it has shown."""
    # one model may be given what another one gave at its level
    half = box.engine.policy.half_type or torch.float32
    args, kwargs = cast_tensors(copied_batch(call.given, cuts=True), half, HALF_TYPES)
    bad: list[Tensor] = []

    def run(copied: nn.Module) -> Pass:
        random_state.restore(call.states)
        outputs = outputs_of(copied.get_submodule(call.name)(*args, **kwargs))
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
    found = [(outputs[place], gradient) for place, gradient in gradients.items() if place < len(outputs)]
    fit = [(tensor, each) for tensor, each in found if tensor.requires_grad and tensor.shape == each.shape]
    wide = [(tensor, each.to(torch.promote_types(each.dtype, torch.float32))) for tensor, each in fit]
    return [(tensor, (each * factor).to(tensor.dtype)) for tensor, each in wide]
