"""Settings that may make a step finite, tried on the very step."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable

import torch

from ..policy import Policy
from ..policy.fp32_registry import CALLER, FLOAT32, Fp32Op
from ..policy.levels import IN_BFLOAT16, LEVEL_TABLE, LossScaleConfig
from .recorder import StepRecord
from .replay import Replay, replay
from .sandbox import Attach
from .trace import BadOp

#: Modules that are kept in FP32 at most, to make a step finite.
MOST_KEPT = 4


@dataclasses.dataclass(frozen=True)
class Remedy:
    """One setting, and what became of the step with it.

    Attributes:
        kind: 'keep_fp32', 'fp32_ops', 'bfloat16', 'loss_scale' or 'fp32'.
        setting: As it is written in a configuration.
        finite: Whether the step was finite with it; None where it could not be tried.
        note: What else there is to say.
        forward_only: Whether the forward pass alone could be tried.
    """

    kind: str
    setting: str
    finite: bool | None
    note: str = ''
    forward_only: bool = False


class Trials:
    """Replays of one step at other settings.

    Args:
        step: What was recorded.
        run: Runs it: :func:`~amp_wrapper.diagnostics.replay.replay`, with all but policy, factor and the switches filled in.
        policy: The level of the training.
        scale: The largest loss scale of the step.
        several: Whether the model stands for several that were initialised together.
    """

    def __init__(
        self,
        step: StepRecord,
        run: Callable[..., Replay],
        policy: Policy,
        scale: float,
        judges_losses: bool = True,
        several: bool = False,
    ) -> None:
        self._run = functools.partial(run, judges_losses=judges_losses)
        self._policy = policy
        self._scale = scale
        self._several = several
        self.step = step

    def fp32(self) -> Replay:
        """The step in FP32, without a loss scale."""
        return self._run(LEVEL_TABLE['O0'], factor=1 / self._scale)

    def keep(self, module: str) -> Remedy | None:
        """The step with a module in FP32, and as many more as it takes up to :data:`MOST_KEPT`; None without a name."""
        names: list[str] = []
        found = Replay()
        while module and module not in names and len(names) < MOST_KEPT:
            names.append(module)
            policy = dataclasses.replace(self._policy, keep_fp32=(*self._policy.keep_fp32, *map(self._within, names)))
            found = self._run(policy, traced=True)
            if found.is_finite or found.refused:
                break
            place = found.forward or found.backward
            module = '' if place is None else place.module
            if module in names:
                # what is around it computes with what it gives
                module = module.rpartition('.')[0]
        if not names:
            return None
        setting = f'keep_fp32={[*map(_named, self._policy.keep_fp32), *map(self._within, names)]}'
        return _remedy('keep_fp32', setting, found)

    def _within(self, module: str) -> str:
        """The name that ``keep_fp32`` knows a module by."""
        place, _, rest = module.partition('.')
        return f'models[{place}].{rest}' if self._several and rest else module

    def functions(self, place: BadOp) -> Remedy | None:
        """The step with an op in FP32; where that does not help, with those before it as well, whose results stay FP32.

        None where the op is no function of torch.
        """
        found: Remedy | None = None
        made_by = [place.op, *place.makers]
        if place.node:
            # the function whose backward it is: 'LogSoftmaxBackward0' is that of log_softmax
            made_by = [re.sub('(?<=[a-z0-9])(?=[A-Z])', '_', place.node.rpartition('Backward')[0]).lower()]
        for ops, output in ((made_by[:1], CALLER), (made_by, FLOAT32)):
            names = [name for op in dict.fromkeys(ops) for name in _functions_of(op)]
            found = self._in_fp32(names, output) if names else found
            if found is None or not found.finite:
                continue
            for name in tuple(names):
                # the model may not call this one
                fewer = [each for each in names if each != name]
                without = self._in_fp32(fewer, output)
                if fewer and without.finite:
                    names, found = fewer, without
            break
        return found

    def _in_fp32(self, names: list[str], output: str) -> Remedy:
        ops = tuple(Fp32Op(name, output=output) for name in names)
        found = self._run(dataclasses.replace(self._policy, fp32_ops=(*self._policy.fp32_ops, *ops)))
        shown = names if output == CALLER else [{'name': name, 'output': output} for name in names]
        return _remedy('fp32_ops', f'fp32_ops={shown}', found)

    def bfloat16(self) -> Remedy | None:
        """The step in bfloat16, without a loss scale; None where it is at such a level already."""
        policy = in_bfloat16(self._policy)
        if policy is None:
            return None
        found = self._run(policy, factor=1 / self._scale)
        setting = "dtype='bfloat16'" if self._policy.opt_level == 'O3' else f"opt_level='{policy.opt_level}'"
        return _remedy('bfloat16', setting, found)

    def without_scale(self) -> Replay:
        """The step at its level, with a loss scale of 1."""
        return self._run(self._policy, factor=1 / self._scale)

    def lower_scale(self) -> Remedy:
        """The largest loss scale, a power of two below that of the step, with which the step is finite."""
        lowest = self.without_scale()
        if lowest.refused or not lowest.is_finite:
            return Remedy('loss_scale', 'loss_scale=1.0', None if lowest.refused else False, _note(lowest))
        powers = range(math.ceil(math.log2(self._scale)) - 1, 0, -1)
        fits = (power for power in powers if self._run(self._policy, factor=2.0**power / self._scale).is_finite)
        return Remedy('loss_scale', f'loss_scale={2.0 ** next(fits, 0):g}', True, 'the largest power of two that does')


def _functions_of(op: str) -> list[str]:
    """What an op may be called by: names that ``fp32_ops`` takes."""
    bare = op.removeprefix('aten.').strip('_')
    owners = (('torch', torch), ('torch.Tensor', torch.Tensor), ('torch.nn.functional', torch.nn.functional))
    names = [f'{title}.{bare}' for title, owner in owners if hasattr(owner, bare)]
    operator = '__truediv__' if bare == 'div' else f'__{bare}__'
    return [*names, f'torch.Tensor.{operator}'] if hasattr(torch.Tensor, operator) else names


def _named(item: str | type) -> str:
    return item if isinstance(item, str) else item.__name__


def _remedy(kind: str, setting: str, found: Replay) -> Remedy:
    finite = None if found.refused else found.is_finite
    return Remedy(kind, setting, finite, _note(found), bool(finite) and not found.gradients_known)


def _note(found: Replay) -> str:
    if found.refused:
        return f'not tried: {found.refused}'
    if found.is_finite and not found.gradients_known:
        return 'the forward pass is finite; the loss is computed outside of the model, so its gradients are not known'
    return ''


def in_bfloat16(policy: Policy) -> Policy | None:
    """The same configuration in bfloat16, with a loss scale of 1; None where nothing in it is float16."""
    if torch.float16 not in (policy.cast_model_type, policy.autocast_dtype):
        return None
    return dataclasses.replace(
        policy,
        opt_level=IN_BFLOAT16.get(policy.opt_level, policy.opt_level),
        cast_model_type=torch.bfloat16 if policy.cast_model_type is torch.float16 else policy.cast_model_type,
        autocast_dtype=torch.bfloat16 if policy.autocast_dtype is torch.float16 else None,
        loss_scale=LossScaleConfig(dynamic=False, init_scale=1.0),
        split_masters=False,
    )


def trials_of(step: StepRecord, model: torch.nn.Module, policy: Policy, attach: Attach, judges_losses: bool) -> Trials:
    """Those of a recorded step.

    Args:
        step: What was recorded.
        model: With the weights that it had in the step.
        policy: The level of the training.
        attach: Attaches a copy.
        judges_losses: As for :func:`~amp_wrapper.diagnostics.replay.replay`.
    """

    def run(policy: Policy, **options: object) -> Replay:
        return replay(step, model, policy, attach, **options)  # type: ignore[arg-type]

    scales = [float(loss.scale) for loss in step.losses if loss.scale is not None]
    several = isinstance(model, torch.nn.ModuleList)
    return Trials(step, run, policy, max(scales, default=1.0), judges_losses, several)
