"""Trains copies of a model at a level, judges what they did beside FP32, and chooses a level."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..casting.modules import class_name, module_device
from ..errors import AmpAttachError, AmpConfigError, AmpUsageError, one_line
from ..policy import OptLevel, Policy
from .first_bad import BadOp, FirstBad
from .page import percent
from .sandbox import Sandbox, copied_batch, left_alone, sandbox
from .step import Step, Task, check_loss, run_step
from .watches import BACKWARD, is_bad

#: Steps whose time does not count.
WARM_UP = 2
#: Differences of time, memory and loss (of the first loss in FP32) that are none.
TIE, LEAST_LOSS = 0.1, 0.05
#: Errors of gradients: what does not matter, as two batches differ by more; what rules a level out.
LEAST_ERROR, MOST_ERROR = 0.1, 0.5
#: The share of a module's gradient, by its squares, that may become zero.
MOST_VANISHED = 0.1
#: By what a dynamic loss scale is divided until the first gradients are finite, and how often.
BACKOFF, MOST_BACKOFFS = 2.0**4, 8
#: Modules, or classes of modules, that are kept in FP32 at most, and skipped steps in a row at the end that are no accident.
MOST_KEPT, MOST_SKIPPED = 8, 3
#: Of levels that are as good as each other the first is taken: without a loss scale before with one.
PREFERRED = ('O5', 'O2', 'O4', 'O1', 'O3', 'O0')
_NO_GRADIENT = (
    'the loss of loss_fn(model, batch) gives the model no gradient: it has to call the model that it is given, a copy of '
    'yours, and not the one outside.'
)


@dataclasses.dataclass
class Tried:
    """What one level did in some steps of training, and why it does not suit.

    Attributes:
        policy: With its overrides; None where there is none.
        keep_fp32: Modules that were kept beside those of the overrides.
        losses: Of each step; ``seconds`` are of those that count.
        memory: Bytes by what they are for.
        skips, last_skips: Skipped steps, and those in a row at the end.
        loss_scale: The last one; None without one.
        gradients: The first ones, unscaled, by name; float32.
        is_finite: Whether they and their loss are finite at some loss scale.
        overflow: Where what is not finite begins.
        reasons: Why it does not suit, each with its kind: 'cannot', 'hardware', 'forward', 'scale', 'vanished', 'gradients',
            'loss' or 'slow'.
        remarks: What to know all the same.
        time, memory_ratio, loss_off: Of a step, its bytes and the last losses, beside FP32; None where that is not known.
        error: How far the gradients are from those of FP32: relative, the root mean square over the modules that own
            parameters, each at most 1. So small gradients count as much as large ones.
    """

    level: OptLevel
    policy: Policy | None = None
    keep_fp32: tuple[str, ...] = ()
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    skips: int = 0
    last_skips: int = 0
    loss_scale: float | None = None
    gradients: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    is_finite: bool = True
    overflow: BadOp | None = None
    reasons: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    remarks: list[str] = dataclasses.field(default_factory=list)
    time: float | None = None
    memory_ratio: float | None = None
    loss_off: float | None = None
    error: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether enough is known to judge: it failed, or one of its steps was timed."""
        return bool(self.seconds or self.reasons or not self.is_finite)

    @property
    def suits(self) -> bool:
        """Whether it may be recommended."""
        return self.is_known and not self.reasons


@dataclasses.dataclass(frozen=True)
class Training:
    """Some steps of training, on copies.

    Attributes:
        task: What is trained, and how.
        loss_fn: From model and batch to the loss.
        batches: Step ``n`` takes number ``n`` modulo their number, and the random numbers of ``seed + n``.
        seed: As above.
        steps: Of each level.
        tell: Called with words on what runs now.
    """

    task: Task
    loss_fn: Callable[[nn.Module, Any], Tensor]
    batches: Sequence[Any]
    seed: int
    steps: int
    tell: Callable[[str], object]

    def try_level(self, tried: Tried, only_gradients: bool = False) -> None:
        """Train a copy at a level, and note why that is not possible, where it is not. Syncs.

        Args:
            tried: Has what is known at any moment.
            only_gradients: Whether to take no steps.
        """
        try:
            if tried.policy is not None:
                keep_fp32 = (*tried.policy.keep_fp32, *tried.keep_fp32)
                policy = dataclasses.replace(tried.policy, keep_fp32=keep_fp32)
                with sandbox(self.task.model, policy, self.task.make_optimizer, self.task.attach) as box:
                    self._find_gradients(box, tried)
                    if tried.is_finite and not only_gradients:
                        self._take_steps(box, tried)
        except torch.OutOfMemoryError:
            tried.reasons.append(('cannot', 'there is not enough memory'))
        except Exception as error:
            # FP32 is the user's own code: its errors are theirs. A level may lack an op, say
            is_ours = isinstance(error, (AmpAttachError, AmpConfigError))
            if isinstance(error, AmpUsageError) or (tried.level == 'O0' and not is_ours):
                raise
            tried.reasons.append(('cannot', str(error) if is_ours else one_line(error)))

    def _find_gradients(self, box: Sandbox, tried: Tried) -> None:
        """Find the gradients at the first weights, without a step. Dropout does nothing, and a dynamic loss scale falls."""
        self.tell(f'{tried.level}: first gradients')
        box.model.train()
        for module in box.model.modules():
            module.train(module.training and 'Drop' not in class_name(module))
        scaler = box.engine.scales.scalers[0]
        # the original, which a loss_fn may run, and the statistics of the copy
        with left_alone(self.task.model), left_alone(box.model):
            for _ in range(MOST_BACKOFFS if scaler.is_dynamic else 1):
                done, loss = self._step(box, 0, updates=False)
                tried.is_finite = not any(map(is_bad, [loss, *done.gradients.values()]))
                if tried.is_finite or is_bad(loss):
                    break
                tried.skips += 1
                scaler.current_scale.div_(BACKOFF)
            tried.loss_scale = None if scaler.is_one else done.scale
            tried.gradients = {name: g.detach().to_dense().float() / done.scale for name, g in done.gradients.items()}
            if not tried.gradients:
                raise AmpUsageError(_NO_GRADIENT)
            self._check(tried, loss, 1)
        if not tried.is_finite:
            trace = FirstBad(box.model)
            done, loss = self._step(box, 0, updates=False, watches=[trace])
            trace.modules.remove()
            tried.overflow = trace.begin([loss]) or trace.begin(list(done.gradients.values()))
        box.model.train()

    def _take_steps(self, box: Sandbox, tried: Tried) -> None:
        for step in range(self.steps):
            self.tell(f'{tried.level}: step {step + 1} of {self.steps}')
            done, loss = self._step(box, step, clip=self.task.clip, counts=not step)
            tried.losses.append(float(loss))
            tried.memory = tried.memory or done.memory
            tried.skips += done.skipped
            tried.last_skips = tried.last_skips + 1 if done.skipped else 0
            if step >= WARM_UP and not done.skipped:
                tried.seconds.append(done.seconds)
            self._check(tried, loss, step + 1)
            if is_bad(loss):
                tried.reasons.append(('loss', f'the loss at step {step + 1} was {float(loss)}'))
                return
        scaler = box.engine.scales.scalers[0]
        tried.loss_scale = None if scaler.is_one else scaler.get_scale()

    def _check(self, tried: Tried, loss: Tensor, step: int) -> None:
        """Refuse a loss that is not finite in FP32.

        Raises:
            AmpUsageError: It is so.
        """
        if tried.level == 'O0' and is_bad(loss):
            text = f'the loss at step {step} is {float(loss)} in FP32: no level can mend that.'
            raise AmpUsageError(f'{text} Look at the data, the weights and the learning rate first.')

    def _step(self, box: Sandbox, number: int, **words: Any) -> tuple[Step, Tensor]:
        """Run one step of a copy; returns it and its loss."""
        losses: list[Tensor] = []

        def run(copied: nn.Module) -> list[tuple[Tensor, None]]:
            seed = (self.seed + number) % 2**32
            random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
            losses.append(check_loss(self.loss_fn(copied, copied_batch(self.batches[number % len(self.batches)]))))
            if not losses[0].requires_grad:
                raise AmpUsageError(_NO_GRADIENT)
            return [(losses[0], None)]

        return run_step(box, run, surrounds=self.task.surrounds, **words), losses[0].detach()


# -- judgement ---------------------------------------------------------------------------------------------------------


def distance(exact: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> tuple[float, str, float]:
    """Return the error of gradients, as :attr:`Tried.error`; and the module of whose gradient the largest part, by its squares,
    became zero, and that part. Syncs."""
    sums: dict[str, list[float]] = {}
    for name, reference in exact.items():
        a, b = reference.double(), other.get(name, torch.zeros_like(reference)).double()
        found = torch.stack([(a - b).square().sum(), a.square().sum(), a[b == 0].square().sum()]).tolist()
        owner = name.rpartition('.')[0]
        sums[owner] = [x + y for x, y in zip(sums.get(owner, [0.0] * 3), found)]
    known = {name: values for name, values in sums.items() if values[1] > 0}
    errors = [min(off / size, 1.0) if math.isfinite(off) else 1.0 for off, size, _ in known.values()]
    lost = {name: gone / size for name, (_, size, gone) in known.items()}
    worst = max(lost, key=lambda name: lost[name], default='')
    return math.sqrt(sum(errors) / max(len(errors), 1)), worst, lost.get(worst, 0.0)


def judge(tried: Tried, fp32: Tried, prefer: str, model: nn.Module) -> None:
    """Fill in ratios to FP32, reasons and remarks of a level.

    Args:
        tried: What it did.
        fp32: What FP32 did.
        prefer: 'speed' or 'memory'.
        model: What was trained.
    """
    device, half = module_device(model), None if tried.policy is None else tried.policy.half_type
    if tried.seconds and fp32.seconds:
        # other programs make steps longer, never shorter
        tried.time = float(np.quantile(tried.seconds, 0.25) / np.quantile(fp32.seconds, 0.25))
    if tried.memory and fp32.memory:
        kind = 'peak' if 'peak' in tried.memory else 'total'
        tried.memory_ratio = tried.memory[kind] / fp32.memory[kind]
    common = min(len(tried.losses), len(fp32.losses))
    if common > WARM_UP:
        # the mean of the last ones that both have
        ends = [np.mean(each.losses[max(common - 3, WARM_UP) : common]) for each in (tried, fp32)]
        tried.loss_off = float(abs(ends[0] - ends[1]))
    if half is None or tried.reasons:
        return
    lost, share = '', 0.0
    if tried.is_finite and fp32.gradients:
        tried.error, lost, share = distance(fp32.gradients, tried.gradients)
    error, off, slow, bad = tried.error or 0.0, tried.loss_off or 0.0, tried.time or 0.0, tried.overflow
    is_forward = bad is not None and bad.phase != BACKWARD
    source = f' at {bad.source}' if bad is not None and bad.source else ''
    place = '' if bad is None else f', in {_named(model, bad.module)}: {bad.op}{source}'
    scale = 'no loss scale' if tried.loss_scale is None else f'a loss scale of {tried.loss_scale:g}'
    falls = tried.policy is not None and tried.policy.loss_scale.dynamic and (tried.loss_scale or 1.0) < 1
    lacks = half is torch.bfloat16 and device.type == 'cuda' and not torch.cuda.is_bf16_supported(False)
    is_lost, is_off = (
        half is torch.float16 and share > MOST_VANISHED,
        off > LEAST_LOSS * abs(fp32.losses[0] if off else 0),
    )
    gradients = f'gradients are {percent(error)} off FP32'
    time = f'a step takes {slow:.2g} times as long as in FP32 on this device ({device.type})'
    reasons = [
        ('hardware', f'{device} has no bfloat16 arithmetic', lacks),
        ('forward', f'overflow in the forward pass{place}', not tried.is_finite and is_forward),
        ('scale', f'the first gradients are not finite at {scale}{place}', not tried.is_finite and not is_forward),
        ('scale', f'the last {tried.last_skips} steps were skipped, down to {scale}', tried.last_skips >= MOST_SKIPPED),
        ('scale', f'the loss scale fell to {scale}: gradients overflow even unscaled', tried.is_finite and falls),
        ('vanished', f'{percent(share)} of the gradient of {_named(model, lost)} becomes zero at {scale}', is_lost),
        ('gradients', gradients, error > MOST_ERROR and not is_lost),
        ('loss', f'after {common} steps the loss is {off:.3g} off that of FP32', is_off),
        ('slow', time, slow > 1 + TIE and prefer == 'speed'),
    ]
    tried.reasons += [(kind, text) for kind, text, holds in reasons if holds]
    remarks = [
        (f'{gradients}: compare the accuracy', error > LEAST_ERROR),
        (time, slow > 1 + TIE and prefer != 'speed'),
    ]
    tried.remarks += [text for text, holds in remarks if holds]


def _named(model: nn.Module, name: str) -> str:
    return f"'{name}' ({class_name(model.get_submodule(name))})" if name else f'the model itself ({class_name(model)})'


def choose(found: Sequence[Tried], prefer: str, allowed: Sequence[str]) -> Tried | None:
    """Return the level to take: of those that suit, the one with the least time or memory. Among those within ten per cent of
    it, those with accurate gradients come first, then those without ``keep_fp32``, then the first in :data:`PREFERRED`. O3 is
    taken only where it alone was asked for, and O0 where nothing else suits, or saves a tenth. None where nothing is known."""
    measured = [(each, each.time if prefer == 'speed' else each.memory_ratio) for each in found if each.suits]
    fp32 = next((each for each, _ in measured if each.level == 'O0'), None)
    # a few steps say nothing of the end of a training, when updates become too small for 16-bit weights
    others = set(allowed) - ({'O0'} if set(allowed) == {'O3'} else {'O0', 'O3'})
    most = 1 - TIE if 'O0' in allowed and fp32 is not None else math.inf
    good = [(each, ratio or math.inf) for each, ratio in measured if each.level in others]
    best = min((ratio for _, ratio in good if ratio <= most), default=0.0)
    equal = [each for each, ratio in good if ratio <= min(best * (1 + TIE), most)]
    accurate = {id(each): (each.error or 0.0) <= LEAST_ERROR for each in equal}
    return min(equal, key=lambda t: (not accurate[id(t)], bool(t.keep_fp32), PREFERRED.index(t.level)), default=fp32)


def keep_what_overflows(training: Training, tried: Tried) -> tuple[str, ...]:
    """Find modules to keep in FP32 so that the first step is finite: where it overflows in the forward pass, what is around
    that, and with the second module of a class all of that class. Returns nothing where no few ones do."""
    names = {name: class_name(module) for name, module in training.task.model.named_modules()}
    keep: list[str] = []
    while tried.overflow is not None and tried.overflow.phase != BACKWARD:
        name = tried.overflow.module
        while any(f'{name}.'.startswith(f'{kept}.') for kept in keep) or names.get(name) in keep:
            # what is kept gives back more than the type of the model has room for
            name = name.rpartition('.')[0]
        if not name or len(keep) == MOST_KEPT:
            return ()
        others = [kept for kept in keep if names.get(kept) != names[name]]
        keep = [*keep, name] if len(others) == len(keep) else [*others, names[name]]
        tried = Tried(tried.level, tried.policy, tuple(keep))
        training.try_level(tried, only_gradients=True)
    # what lies inside of another one is kept with it
    is_good = tried.is_finite and not tried.reasons
    return tuple(each for each in keep if is_good and not any(each.startswith(f'{other}.') for other in keep))
