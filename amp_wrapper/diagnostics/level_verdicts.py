"""Says which of the levels that were tried suit a model, why the others do not, and which one to take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..policy import Policy, dtype_name
from .deviations import Deviation, ModuleDeviation
from .side_by_side import WARM_UP, LevelRun

#: An error of gradients that never matters, and the share of the difference between the gradients of two batches that does not:
#: rounding that is a tenth of it makes the variance of a gradient one per cent larger.
LEAST_ERROR, SHARE_OF_NOISE = 0.05, 0.1
#: Gradients that are as wrong as this rule a level out, unless the model is so sensitive that rounding its weights, in FP32,
#: does nearly as much: a level rounds activations and gradients, too.
MOST_ERROR, TIMES_SENSITIVITY = 0.5, 5.0
#: A loss that differs by less than this share of the first loss in FP32, or by less than this multiple of what another order of
#: the batches changes, is the same loss.
LEAST_LOSS, TIMES_NOISE = 0.05, 2.0
#: The share of a module's gradient, by its squares, that may become zero.
MOST_VANISHED = 0.1
#: The share of updates that may be lost without masters.
MOST_LOST = 0.01
#: Skipped steps in a row at the end that are no accident any more.
MOST_SKIPPED = 3
#: Differences of time and memory that are none.
TIE = 0.1
#: Of levels that are as good as each other the first is taken: without a loss scale before with one.
PREFERRED = ('O5', 'O2', 'O4', 'O1', 'O3', 'O0')
SPEED, MEMORY = 'speed', 'memory'


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a level does not suit.

    Attributes:
        kind: 'cannot' (it cannot be had, or does not run), 'hardware', 'forward' (overflow), 'scale', 'vanished', 'masters',
            'gradients', 'loss' or 'slow'.
        text: In words.
    """

    kind: str
    text: str

    @property
    def mendable(self) -> bool:
        """Whether modules in FP32 may help."""
        return self.kind in ('forward', 'gradients', 'loss')


@dataclasses.dataclass(frozen=True)
class Limits:
    """What deviations mean nothing.

    Attributes:
        gradient_noise: The error of the gradients of one batch, taken for those of another, in FP32; None with one batch.
        loss_noise: By how much the losses after training differ between two orders of the batches, in FP32; None if unknown.
        first_loss: The first loss in FP32.
        sensitivity: Type to the error of the gradients in FP32 after the weights were rounded to that type.
    """

    gradient_noise: float | None
    loss_noise: float | None
    first_loss: float
    sensitivity: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def gradient(self) -> float:
        """The error of gradients that is allowed."""
        return max(LEAST_ERROR, SHARE_OF_NOISE * (self.gradient_noise or 0.0))

    @property
    def loss(self) -> float:
        """The deviation of the loss after training that is allowed."""
        return max(LEAST_LOSS * abs(self.first_loss), TIMES_NOISE * (self.loss_noise or 0.0))

    def of(self, dtype: torch.dtype | None) -> tuple[float, float]:
        """For a level in a type: the error of gradients that is allowed, and what rounding the weights alone does."""
        sensitivity = 0.0 if dtype is None else self.sensitivity.get(dtype_name(dtype), 0.0)
        return max(self.gradient, sensitivity), sensitivity

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {**dataclasses.asdict(self), 'gradient': self.gradient, 'loss': self.loss}


@dataclasses.dataclass
class LevelFacts:
    """What is known of one level.

    Attributes:
        policy: With its overrides; None where there is none.
        level: 'O0' to 'O5'.
        keep_fp32: Modules that were kept beside those of the overrides.
        problem: Why it cannot be had, or did not run; empty where it did.
        deviation: From FP32 at the first weights.
        run: Its training.
        reasons: Why it does not suit; empty where it does, or where nothing is known.
        remarks: What to know all the same.
        time_ratio: Time of a step to that of FP32 in the same run.
        memory_ratio: Bytes to those of FP32.
        loss_after: Root mean square of the differences of the losses after training to those of FP32.
        accurate: Whether the error of its gradients means nothing.
    """

    level: str
    policy: Policy | None = None
    keep_fp32: tuple[str, ...] = ()
    problem: str = ''
    deviation: Deviation | None = None
    run: LevelRun | None = None
    reasons: list[Reason] = dataclasses.field(default_factory=list)
    remarks: list[str] = dataclasses.field(default_factory=list)
    time_ratio: float | None = None
    memory_ratio: float | None = None
    loss_after: float | None = None
    accurate: bool = True

    @property
    def tried(self) -> bool:
        """Whether enough is known to judge: it cannot be had, it failed, or at least one of its steps was timed."""
        run = self.run
        return bool(self.problem) or (run is not None and (run.done or bool(run.problem) or bool(run.seconds)))

    @property
    def suits(self) -> bool:
        """Whether it may be recommended."""
        return self.tried and not self.reasons and not self.problem

    def measure(self, prefer: str) -> float | None:
        """The ratio to FP32 that counts."""
        return self.time_ratio if prefer == SPEED else self.memory_ratio

    @property
    def in_16_bit(self) -> bool:
        """Whether anything of it is."""
        return self.policy is not None and self.policy.runs_16_bit


def compare_runs(facts: LevelFacts, reference: LevelRun) -> None:
    """Fill in the ratios to FP32."""
    run = facts.run
    if run is None:
        return
    facts.time_ratio = run.times(reference)
    if run.bytes and reference.bytes and not run.problem:
        facts.memory_ratio = run.bytes / reference.bytes
    facts.loss_after = difference(run.checked, reference.checked)
    if facts.loss_after is None and not run.problem:
        # interrupted: the steps that both have taken, but for the first ones, in which weights are still the same
        common = slice(WARM_UP, min(len(run.losses), len(reference.losses)))
        facts.loss_after = difference(run.losses[common], reference.losses[common])


def difference(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Root mean square of the differences of two lists of losses; None without any, infinity where one is not finite."""
    if not one or len(one) != len(other):
        return None
    squares = [(a - b) ** 2 for a, b in zip(one, other)]
    found = math.sqrt(sum(squares) / len(squares))
    return found if math.isfinite(found) else math.inf


def percent(share: float) -> str:
    """Such as '12 %', '0.34 %' and '0 %'."""
    return f'{100 * share:.2g} %' if share < 0.995 else f'{100 * share:.0f} %'


def times(ratio: float) -> str:
    """A ratio in words: '59 % of', '2.1 times'."""
    return f'{percent(ratio)} of' if ratio < 1.005 else f'{ratio:.3g} times'


def named(module: ModuleDeviation) -> str:
    """A module for a reader."""
    return f"'{module.name}' ({module.kind})" if module.name else f'the model itself ({module.kind})'


def judge(facts: LevelFacts, limits: Limits, lost: Mapping[str, float], prefer: str, device: torch.device) -> None:
    """Fill in the reasons and remarks of a level.

    Args:
        facts: With ratios.
        limits: Of this model.
        lost: Type to the share of updates that are lost without masters.
        prefer: 'speed' or 'memory'.
        device: Where it ran.
    """
    facts.reasons, facts.remarks = [], []
    if facts.problem:
        facts.reasons.append(Reason('cannot', facts.problem))
        return
    if not facts.in_16_bit:
        if facts.run is not None and facts.run.problem:
            facts.reasons.append(Reason('cannot', f'in FP32 itself {facts.run.problem}'))
        return
    _remark_on_masks(facts)
    _judge_hardware(facts, device)
    _judge_overflow(facts)
    _judge_gradients(facts, limits)
    _judge_masters(facts, lost)
    _judge_loss(facts, limits)
    ratio = facts.time_ratio
    if ratio is not None and ratio > 1 + TIE:
        text = f'a step takes {ratio:.2g} times as long as in FP32 on this device ({device.type})'
        if prefer == SPEED:
            facts.reasons.append(Reason('slow', text))
        else:
            facts.remarks.append(text)


def type_of(facts: LevelFacts) -> torch.dtype | None:
    """The 16-bit type of a level; None without one."""
    policy = facts.policy
    if policy is None or not policy.runs_16_bit:
        return None
    return policy.cast_model_type if policy.casts_model else policy.autocast_dtype


def _judge_hardware(facts: LevelFacts, device: torch.device) -> None:
    if device.type != 'cuda':
        return
    major, minor = torch.cuda.get_device_capability(device)
    dtype = type_of(facts)
    needed = {torch.bfloat16: (8, 0), torch.float16: (5, 3)}.get(dtype) if dtype is not None else None
    if dtype is not None and needed is not None and (major, minor) < needed:
        facts.reasons.append(
            Reason(
                'hardware',
                f'{torch.cuda.get_device_name(device)} (sm_{major}{minor}) has no {dtype_name(dtype)} arithmetic',
            )
        )


def _remark_on_masks(facts: LevelFacts) -> None:
    deviation = facts.deviation
    if deviation is None or not deviation.finite:
        return
    infinite = [module for module in deviation.modules.values() if not module.finite]
    if infinite:
        facts.remarks.append(
            f'numbers of {named(infinite[0])} become infinite, and loss and gradients stay finite: a mask does so'
        )


def _judge_overflow(facts: LevelFacts) -> None:
    deviation, run = facts.deviation, facts.run
    if deviation is not None and deviation.first_nonfinite is not None:
        module = deviation.modules[deviation.first_nonfinite]
        facts.reasons.append(
            Reason(
                'forward',
                f'overflow in the forward pass, in {named(module)}: its inputs are finite, its outputs are not',
            )
        )
    elif run is not None and run.problem:
        ran = not run.losses or all(math.isfinite(loss) for loss in run.losses)
        facts.reasons.append(
            Reason('scale' if ran and run.losses else 'forward' if run.losses else 'cannot', run.problem)
        )
    elif run is not None and run.skipped_at_end >= MOST_SKIPPED:
        facts.reasons.append(
            Reason(
                'scale',
                f'the last {run.skipped_at_end} steps were skipped, and the loss scale is at {run.scale or 1.0:g}',
            )
        )
    elif (
        run is not None
        and run.first_scale is not None
        and run.scale is not None
        and run.scale < min(1.0, run.first_scale)
    ):
        facts.reasons.append(
            Reason(
                'scale',
                f'the loss scale fell to {run.scale:g}: gradients are beyond the range of the type even unscaled',
            )
        )


def _judge_gradients(facts: LevelFacts, limits: Limits) -> None:
    deviation = facts.deviation
    if deviation is None or not deviation.finite:
        return
    # bfloat16 reaches as far down as FP32: what is zero there was lost to rounding before
    worst = deviation.worst_vanished if type_of(facts) is torch.float16 else None
    allowed, sensitivity = limits.of(type_of(facts))
    facts.accurate = deviation.error <= allowed
    if worst is not None and worst.gradient is not None and worst.gradient.vanished > MOST_VANISHED:
        share = percent(worst.gradient.vanished)
        facts.reasons.append(
            Reason(
                'vanished',
                f'{share} of the gradient of {named(worst)} becomes zero at a loss scale of {deviation.scale:g}',
            )
        )
    elif not facts.accurate:
        error = percent(deviation.error)
        text = f'gradients are {error} off FP32, more than the limit of {percent(allowed)}: compare the accuracy'
        if deviation.error > max(MOST_ERROR, TIMES_SENSITIVITY * sensitivity):
            facts.reasons.append(Reason('gradients', text))
        else:
            facts.remarks.append(text)


def _judge_masters(facts: LevelFacts, lost: Mapping[str, float]) -> None:
    policy, dtype = facts.policy, type_of(facts)
    if policy is None or dtype is None or not policy.casts_model or policy.master_weights:
        return
    share = lost.get(dtype_name(dtype))
    if share is not None and share > MOST_LOST:
        facts.reasons.append(
            Reason(
                'masters',
                f'{percent(share)} of the updates are too small for {dtype_name(dtype)} weights and would be lost',
            )
        )


def _judge_loss(facts: LevelFacts, limits: Limits) -> None:
    after = facts.loss_after
    if after is None or any(reason.kind in ('forward', 'scale') for reason in facts.reasons) or after <= limits.loss:
        return
    noise = '' if limits.loss_noise is None else f'; another order of the batches changes {limits.loss_noise:.3g}'
    facts.reasons.append(
        Reason(
            'loss',
            f'after training the loss is {after:.3g} off that of FP32, more than the {limits.loss:.3g} allowed{noise}',
        )
    )


def choose(facts: Sequence[LevelFacts], prefer: str, allowed: Sequence[str]) -> LevelFacts | None:
    """The level to take: of those that suit the one with the least time or memory. Among those within ten per cent of it, those
    with accurate gradients come first, then those without ``keep_fp32``, then the first in :data:`PREFERRED`. O3 is taken only
    where no other 16-bit level suits, and O0 where nothing else suits, or gains anything.

    Args:
        facts: All levels, FP32 among them.
        prefer: 'speed' or 'memory'.
        allowed: Levels that were asked for.

    Returns:
        None where nothing is known.
    """
    suited = [each for each in facts if each.suits]
    wanted = [each for each in suited if each.level in allowed]
    mended = {each.level for each in wanted if each.keep_fp32}
    candidates = [
        each for each in wanted if each.in_16_bit and (each.accurate or each.keep_fp32 or each.level not in mended)
    ]
    if any(each.level != 'O3' for each in candidates):
        # a few steps say nothing of the end of a training, when updates become small
        candidates = [each for each in candidates if each.level != 'O3']
    fp32 = next((each for each in suited if each.level == 'O0'), None)
    if fp32 is not None and 'O0' in allowed:
        candidates = [each for each in candidates if _measured(each, prefer) < 1 - TIE]
    if not candidates:
        return fp32
    best = min(_measured(each, prefer) for each in candidates)
    equal = [each for each in candidates if _measured(each, prefer) <= best * (1 + TIE)]
    return min(equal, key=lambda each: (not each.accurate, bool(each.keep_fp32), PREFERRED.index(each.level)))


def _measured(facts: LevelFacts, prefer: str) -> float:
    ratio = facts.measure(prefer)
    return math.inf if ratio is None else ratio
