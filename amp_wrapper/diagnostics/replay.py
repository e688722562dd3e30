"""Runs a recorded step again on a copy of the model, at its own level, and at settings that may make it finite."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import random_state
from ..errors import AmpError
from ..policy import Policy
from ..policy.fp32_registry import CALLER, FLOAT32, Fp32Op
from ..policy.levels import IN_BFLOAT16, LEVEL_TABLE
from ..policy.nested import HALF_TYPES, cast_tensors
from .first_bad import BadOp, FirstBad
from .recorder import CallRecord, StepRecord, copied_batch
from .sandbox import Attach, Sandbox, sandbox
from .step import Pass, run_step
from .watches import FORWARD, Maximum, NonfiniteWatch, is_bad, outputs_of, tensors_of

#: Modules that are kept in FP32 at most, to make a step finite.
MOST_KEPT = 4


@dataclasses.dataclass
class Replay:
    """What one replay of a step has shown.

    Attributes:
        refused: Why there is none; '' where it ran.
        calls: Of each forward call: '' where all was finite, else 'outputs', 'gradients' (of parameters) or 'loss' (what came
            from the loss, or from another call).
        gradients_known: Whether the backward passes ran with the gradients that the losses gave.
        parameters: The parameters with non-finite gradients, in the order of the model.
        sums: Of each parameter the sum of its gradients.
        losses: The losses, by their ``loss_id``, whose passes have something that is not finite.
        first: Where that begins; None where nothing was traced.
        first_gradient: The first op of a backward pass with a result that is not finite.
        outputs: The largest numbers that modules gave, in the order in which they ended, where it was traced.
    """

    refused: str = ''
    calls: list[str] = dataclasses.field(default_factory=list)
    gradients_known: bool = True
    parameters: list[str] = dataclasses.field(default_factory=list)
    sums: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    losses: set[int] = dataclasses.field(default_factory=set)
    first: BadOp | None = None
    first_gradient: BadOp | None = None
    outputs: list[Maximum] = dataclasses.field(default_factory=list)

    @property
    def bad_sums(self) -> list[str]:
        """The parameters whose gradients are finite in each pass, and not in their sum."""
        return [] if any(self.calls) else [name for name, total in self.sums.items() if is_bad(total)]

    @property
    def is_finite(self) -> bool:
        """Whether all that ran was finite."""
        return not self.refused and not any(self.calls) and not self.bad_sums


@dataclasses.dataclass(frozen=True)
class Remedy:
    """One setting, and what became of the step with it.

    Attributes:
        kind: 'keep_fp32', 'fp32_ops', 'bfloat16', 'loss_scale', 'accumulate_in_fp32' or 'fp32'.
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
        model: With the weights that it had in the step; it is left as it is. Several models are an ``nn.ModuleList``.
        policy: The level of the training.
        attach: Attaches a copy.
        judges_losses: Whether non-finite gradients of the losses count. Where the outputs of the model were not finite, those
            of losses outside of it are not either, and say nothing of a level that gives other outputs.
    """

    step: StepRecord
    model: nn.Module
    policy: Policy
    attach: Attach
    judges_losses: bool = True

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
                    found.calls.append(self._run_call(box, call, factor, traced, found))
        except torch.OutOfMemoryError as error:
            found.refused = f'there was no memory for a copy of the model ({str(error).splitlines()[0]})'
        except AmpError as error:
            found.refused = str(error)
        except Exception as error:
            # whatever a copy of a model does, the training goes on
            found.refused = f'a copy of the model could not be run ({type(error).__name__}: {error})'
        return found

    def _run_call(self, box: Sandbox, call: CallRecord, factor: float, traced: bool, found: Replay) -> str:
        """Run one call with its backward passes; returns an entry of :attr:`Replay.calls`."""
        # a part that a script calls is given what another one gave at its level
        half = box.engine.policy.half_type or torch.float32
        args, kwargs = cast_tensors(copied_batch(call.given, cuts=True), half, HALF_TYPES)
        bad: dict[int, Tensor] = {}
        wrong = {key for key, kept in call.gradients.items() if any(map(is_bad, kept.values()))}
        keys = [key for key in call.gradients if key not in wrong]

        def run(copied: nn.Module) -> list[Pass]:
            random_state.restore(call.states)
            outputs = outputs_of(copied.get_submodule(call.name)(*args, **kwargs))
            bad.update((place, tensor) for place, tensor in enumerate(outputs) if is_bad(tensor))
            passes = [_pairs(call.gradients[key], outputs, factor) for key in keys]
            found.gradients_known &= bool(keys) and all(len(p) == len(call.gradients[k]) for p, k in zip(passes, keys))
            return [] if bad else passes

        trace = FirstBad(box.model, tensors_of((args, kwargs))) if traced else None
        modules = NonfiniteWatch(box.model) if traced else None
        step = run_step(box, run, [] if trace is None else [trace], surrounds=call.surrounds, updates=False)
        for key, gradients in zip(keys, step.gradients):
            named = [name for name, gradient in gradients.items() if is_bad(gradient)]
            if named:
                wrong.add(key)
                if trace is not None and not bad:
                    found.first = found.first or trace.begin([gradients[name] for name in named])
            found.parameters += [name for name in named if name not in found.parameters]
            for name, gradient in gradients.items():
                found.sums[name] = gradient if name not in found.sums else found.sums[name] + gradient
        if trace is not None and modules is not None:
            found.outputs = [each for each in modules.take() if each.phase == FORWARD]
            found.first = found.first or trace.begin(list(bad.values()))
            found.first_gradient = found.first_gradient or trace.first_gradient
            # the copy is thrown away, but it may hold them
            trace.remove()
            modules.remove()
        if bad:
            # the passes that these outputs have reached
            wrong = {key for key, kept in call.gradients.items() if bad.keys() & kept.keys()} or set(call.gradients)
        elif not self.judges_losses:
            found.gradients_known &= len(keys) == len(call.gradients)
            wrong &= set(keys)
        found.losses |= {self.step.losses[key].loss_id for key in wrong if key < len(self.step.losses)}
        return 'outputs' if bad else 'gradients' if wrong.intersection(keys) else 'loss' if wrong else ''

    # -- settings that may help --------------------------------------------------------------------------------------

    def in_fp32(self) -> Replay:
        """Replay in FP32, without a loss scale."""
        return self.run(LEVEL_TABLE['O0'], factor=1 / self.step.scale)

    def without_scale(self) -> Remedy:
        """Try a loss scale of 1."""
        return _remedy('loss_scale', 'loss_scale=1.0', self.run(factor=1 / self.step.scale))

    def _again(self, policy: Policy, traced: bool = False) -> Replay:
        """Replay at another level; without a dynamic loss scale, which falls by itself."""
        return self.run(policy, 1 / self.step.scale if policy.loss_scale.dynamic else 1.0, traced)

    def keep(self, module: str) -> Remedy | None:
        """Try a module in FP32, and with it up to :data:`MOST_KEPT` that compute with what it gives; None without a name."""
        found: Remedy | None = None
        names: list[str] = []
        while module and module not in names and len(names) < MOST_KEPT and not (found and found.finite):
            names.append(module)
            several = isinstance(self.model, nn.ModuleList)
            kept = [
                *self.policy.keep_fp32,
                *(named_in_list(each) if several and '.' in each else each for each in names),
            ]
            again = self._again(dataclasses.replace(self.policy, keep_fp32=tuple(kept)), traced=True)
            shown = [item if isinstance(item, str) else item.__name__ for item in kept]
            found = _remedy('keep_fp32', f'keep_fp32={shown}', again)
            module = '' if again.first is None else again.first.module
            # what is around it has no room for what it gives
            module = module.rpartition('.')[0] if module in names else module
        return found

    def functions(self, place: BadOp) -> Remedy | None:
        """Try an op in FP32; where that does not help, those before it as well, whose results stay FP32.

        None where the op is no function of torch.
        """
        found: Remedy | None = None
        made_by = [place.op, *place.makers]
        if place.node:
            # the function whose backward it is: 'LogSoftmaxBackward0' is that of log_softmax
            made_by = [re.sub('(?<=[a-z0-9])(?=[A-Z])', '_', place.node.rpartition('Backward')[0]).lower()]
        for ops, output in ((made_by[:1], CALLER), (made_by, FLOAT32)):
            names = [name for op in dict.fromkeys(ops) for name in _functions_of(op)]
            found = self._with_functions(names, output) if names and not (found and found.finite) else found
            for name in tuple(names) if found and found.finite else ():
                # the model may not call this one
                fewer = [each for each in names if each != name]
                if fewer and (without := self._with_functions(fewer, output)).finite:
                    names, found = fewer, without
        return found

    def _with_functions(self, names: Sequence[str], output: str) -> Remedy:
        ops = tuple(Fp32Op(name, output=output) for name in names)
        found = self._again(dataclasses.replace(self.policy, fp32_ops=(*self.policy.fp32_ops, *ops)))
        listed = list(names) if output == CALLER else [{'name': name, 'output': output} for name in names]
        return _remedy('fp32_ops', f'fp32_ops={listed}', found)

    def in_bfloat16(self) -> Remedy | None:
        """Try bfloat16, without a loss scale; None where nothing is float16."""
        if self.policy.half_type is not torch.float16:
            return None
        level = IN_BFLOAT16.get(self.policy.opt_level, self.policy.opt_level)
        kind = 'cast_model_type' if self.policy.casts_model else 'autocast_dtype'
        changes: dict[str, Any] = {'opt_level': level, kind: torch.bfloat16, 'split_masters': False}
        found = self.run(dataclasses.replace(self.policy, **changes), factor=1 / self.step.scale)
        setting = "dtype='bfloat16'" if level == self.policy.opt_level else f"opt_level='{level}'"
        return _remedy('bfloat16', setting, found)


def named_in_list(name: str) -> str:
    """Return ``'models[0].fc'`` for ``'0.fc'``: the name of a module in one of several models."""
    place, _, rest = name.partition('.')
    return f'models[{place}].{rest}'.rstrip('.') if place.isdigit() else name


def _pairs(gradients: dict[int, Tensor], outputs: Sequence[Tensor], factor: float) -> Pass:
    found = [(outputs[place], gradient) for place, gradient in gradients.items() if place < len(outputs)]
    fit = [(tensor, each) for tensor, each in found if tensor.requires_grad and tensor.shape == each.shape]
    wide = [(tensor, each.to(torch.promote_types(each.dtype, torch.float32))) for tensor, each in fit]
    return [(tensor, (each * factor).to(tensor.dtype)) for tensor, each in wide]


def _remedy(kind: str, setting: str, found: Replay) -> Remedy:
    finite = None if found.refused else found.is_finite
    return Remedy(kind, setting, finite, bool(finite) and not found.gradients_known)


def _functions_of(op: str) -> list[str]:
    """Return what an op may be called by: names that ``fp32_ops`` takes."""
    bare = op.removeprefix('aten.').strip('_')
    owners = {'torch': torch, 'torch.Tensor': torch.Tensor, 'torch.nn.functional': nn.functional}
    names = [f'{title}.{bare}' for title, owner in owners.items() if hasattr(owner, bare)]
    operator = '__truediv__' if bare == 'div' else f'__{bare}__'
    return [*names, f'torch.Tensor.{operator}'] if hasattr(torch.Tensor, operator) else names
