"""Non-finite gradients: the flags of one step, its result, which the host reads late, and the count of skipped steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..errors import logger
from ..policy.levels import IN_BFLOAT16, Policy

#: Where the numbers of a step's info stand (:data:`amp_wrapper.ops.DECISION`).
SKIP, GRAD_NORM, LOSS_SCALE, SKIPS, STREAK = 0, 4, 5, 6, 7
#: The same for what :attr:`StepResult.shows`.
COLUMNS = {'grad_norm': GRAD_NORM, 'loss_scale': LOSS_SCALE, 'skips': SKIPS}


class Flags:
    """What was non-finite since the last step of one optimizer: float32 scalars, 0.0 or 1.0, made when they are first needed.

    One flag for each of its losses, whose scale falls where it is up, and one for all else: losses of other optimizers, and
    gradients without a scale. Any of them makes the step be skipped.

    Args:
        losses: Number of losses with a scale of their own.
        device: Where flags are made.

    Attributes:
        used: Whether each loss has had a backward pass since the last step.
        has_arrived: Whether a backward pass has left gradients here since the last step.
        only_by_others: Whether one for other optimizers alone has.
    """

    def __init__(self, losses: int, device: torch.device) -> None:
        self._losses, self._device = losses, device
        self.clear()

    def clear(self) -> None:
        """After a step, and when gradients are cleared."""
        self.used = [False] * self._losses
        self.has_arrived = self.only_by_others = False
        # of each loss, and of all else
        self._flags: list[Tensor | None] = [None] * (self._losses + 1)

    def new(self) -> Tensor:
        """A flag that is down."""
        return torch.zeros((), dtype=torch.float32, device=self._device)

    def of(self, loss_id: int) -> Tensor:
        """The flag of a loss; a live tensor."""
        found = self._flags[loss_id]
        if found is None:
            found = self._flags[loss_id] = self.new()
        return found

    def add(self, found_inf: Tensor, loss_id: int | None = None) -> None:
        """Gradients of a loss have come, or of none of this optimizer's own."""
        place = self._losses if loss_id is None else loss_id
        before, found_inf = self._flags[place], found_inf.to(self._device)
        self._flags[place] = found_inf if before is None else torch.maximum(before, found_inf)

    @property
    def is_clear(self) -> bool:
        """Whether nothing has come since the last step."""
        return not any(self.used) and all(flag is None for flag in self._flags)

    def skipped(self, but: int | None = None) -> Tensor | None:
        """1.0 where any flag is up; None where nothing was checked.

        Args:
            but: A loss whose flag does not count.
        """
        flags = [flag for place, flag in enumerate(self._flags) if flag is not None and place != but]
        if len(flags) < 2:
            return flags[0] if flags else None
        return torch.stack(flags).max()

    def all(self) -> Tensor:
        """All flags, float32, one-dimensional, for an exchange with other ranks: as many on each of them."""
        return torch.stack([self.new() if flag is None else flag for flag in self._flags])

    def take(self, flags: Tensor) -> None:
        """Go on with what the ranks have agreed on.

        Args:
            flags: As :meth:`all` gives them.
        """
        self._flags = list(flags.unbind())

    def state(self) -> tuple[list[float], float | None]:
        """The flags of this optimizer's losses, and of all else (None without any). Syncs."""
        *found, others = [None if flag is None else float(flag) for flag in self._flags]
        return [flag or 0.0 for flag in found], others

    def restore(self, used: Iterable[bool], found: Sequence[float], others: float | None) -> None:
        """Set the flags to what :meth:`state` returned."""
        self.clear()
        self.used = list(used)
        for place, value in enumerate([*found, others]):
            if value is not None and (place == self._losses or self.used[place]):
                self._flags[place] = torch.full((), float(value), device=self._device)


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        skipped: Whether the step was left out because a gradient was non-finite; None where the host has not asked:
            :meth:`was_skipped` does.
        info: float32 tensor of eight on the device, as :data:`amp_wrapper.ops.DECISION` lists them; None where nothing was
            scaled, checked or clipped.
        shows: Which of the :data:`COLUMNS` of ``info`` mean something: ``grad_norm``, before clipping (NaN at a skipped step),
            ``loss_scale`` after the step, ``skips`` so far.
    """

    skipped: bool | None
    info: Tensor | None = None
    shows: tuple[str, ...] = ()

    def was_skipped(self) -> bool:
        """Whether the step was left out. Syncs, where ``skipped`` is None."""
        return bool(self.info[SKIP] > 0) if self.skipped is None and self.info is not None else bool(self.skipped)


class LateRead:
    """Numbers on their way to the host, which goes on working until it needs them.

    Args:
        numbers: One-dimensional tensor on any device.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._event: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(numbers.device))  # type: ignore[no-untyped-call]

    @property
    def is_there(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> list[float]:
        """The numbers. Syncs with what was under way when the read began, and with nothing after it."""
        if self._event is not None:
            self._event.synchronize()  # type: ignore[no-untyped-call]
        return self._numbers.tolist()  # type: ignore[no-any-return]


def info_of(norm: Tensor | None, scale: Tensor, counts: Tensor) -> Tensor:
    """The info of a step, in the form of the op's decision, for other steps.

    Args:
        norm: Scalar of any floating type, or None.
        scale: float32 scalar after the step.
        counts: int64 (3,) after the step.

    Returns:
        float32 (8,) on their device.
    """
    nothing, one = torch.full_like(scale, torch.nan), torch.ones_like(scale)
    streak = counts[2].float()
    skipped = streak.clamp(max=1)
    shown = nothing if norm is None else torch.where(skipped > 0, nothing, norm.detach().to(nothing))
    return torch.stack([skipped, one, one, one * torch.inf, shown, scale, counts[1].float(), streak])


def what_to_try(policy: Policy) -> list[str]:
    """What may end a row of skipped steps, for an error message: only what changes something at this level.

    Args:
        policy: Of the training.
    """
    scale, level = policy.loss_scale, IN_BFLOAT16.get(policy.opt_level)
    is_static = scale.enabled and not scale.dynamic and scale.init_scale > 1
    is_float16 = policy.enabled and torch.float16 in (policy.cast_model_type, policy.autocast_dtype)
    in_bfloat16 = "cast_model_type='bfloat16'" if level is None else f'opt_level={level!r}'
    remedies = {
        'look for NaN in the data and the loss': True,
        'lower the learning rate or add clip_grad': True,
        "lower loss_scale, or write loss_scale='dynamic'": is_static,
        'keep the named modules in FP32 (keep_fp32=[...])': policy.runs_16_bit,
        f'use bfloat16, which has the range of FP32 ({in_bfloat16})': is_float16,
        "compare with opt_level='O0', for bfloat16 overflows where FP32 does": policy.runs_16_bit and not is_float16,
    }
    return [remedy for remedy, helps in remedies.items() if helps]


class SkipMonitor:
    """Follows skipped steps from the step infos that the host gets to see, some of them late.

    A step that nobody waits for leaves its info on the device. Integrations read it together with the log values and hand it
    over. A row of skips that may reach the limit with the next one makes that step wait, so that the error comes while the
    gradients that caused it are there.

    Args:
        policy: Says how many skips in a row end the training, and whether skipped steps are logged.
        scales: Gives what to say of the present loss scales.
    """

    def __init__(self, policy: Policy, scales: Callable[[], str]) -> None:
        self._policy, self._limit, self._scales = policy, policy.max_consecutive_skips, scales
        self.start(0)

    @property
    def must_wait(self) -> bool:
        """Whether the next step could be the one too many, as far as the host knows.

        Where nobody hands infos over, that is so once in ``limit`` steps.
        """
        return self._limit is not None and self._streak + self.unseen + 1 >= self._limit

    def start(self, streak: int) -> None:
        """Begin with so many skips in a row: after a state was loaded."""
        self._streak = streak
        #: Steps since then whose info the host has not seen.
        self.unseen = 0

    def record(self, skips: int, streak: int, label: str = '', scale: str = '') -> bool:
        """Take notice of one step, the latest so far, and say so where it was skipped.

        Args:
            skips: In all, with this one.
            streak: In a row, with this one; 0 where it was taken.
            label: What to call the engine.
            scale: What to say of the loss scale after it, where that is not the present one.

        Returns:
            Whether the limit is reached.
        """
        self.start(streak)
        if self._limit is not None and streak >= self._limit:
            return True
        # rare enough to read, often enough to see a collapse coming: the first few, then at every doubling
        if streak and self._policy.verbosity >= 1 and (skips <= 5 or skips & (skips - 1) == 0):
            # a dynamic scale begins too high, so that the first skips are no fault
            is_start = self._policy.loss_scale.dynamic and skips == streak <= 5
            usual = ', as is usual until a dynamic loss scale fits' if is_start else ''
            text = f'amp: {label + ": " if label else ""}non-finite gradients{usual}: optimizer step skipped'
            log = logger.info if is_start else logger.warning
            log(f'{text} ({skips} so far, {streak} in a row); loss scale now {scale or self._scales()}')
        return False

    def review(self, infos: Iterable[Sequence[float]], label: str = '') -> None:
        """Take notice of steps that nobody waited for.

        Args:
            infos: The first of those that were not seen, in order, as numbers.
            label: What to call the engine.
        """
        streak, unseen = self._streak, self.unseen
        for count, info in enumerate(infos, 1):
            # NaN where nothing is scaled; it tells the scale of the first loss
            has_scale = self._policy.num_losses == 1 and not math.isnan(info[LOSS_SCALE])
            self.record(int(info[SKIPS]), int(info[STREAK]), label, f'{info[LOSS_SCALE]:g}' if has_scale else '')
            self.unseen = unseen - count
        if not unseen:
            # a later step was waited for
            self.start(streak)
