"""Trains copies of a model at a level, and finds modules to keep in FP32 where it overflows."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..casting.modules import class_name
from ..errors import AmpAttachError, AmpConfigError, AmpUsageError, one_line
from ..policy import OptLevel, Policy
from .sandbox import Sandbox, Step, Task, check_loss, run_step, sandbox
from .watches import BACKWARD, BadOp, FirstBad, called, copied_batch, is_bad

#: Steps whose time does not count.
WARM_UP = 2
#: By what a dynamic loss scale is divided until the first gradients are finite, and how often.
BACKOFF, MOST_BACKOFFS = 2.0**4, 8
#: Modules, or classes of modules, that are kept in FP32 at most, and skipped steps in a row at the end that are no accident.
MOST_KEPT, MOST_SKIPPED = 8, 3


@dataclasses.dataclass
class Tried:
    """What one level did in some steps of training, and why it does not suit.

    Attributes:
        policy: With its overrides; None where there is none.
        keep_fp32: Modules that were kept beside those of the overrides.
        losses: Of each step; ``seconds`` are of those that count.
        memory: The bytes that a step held at most.
        skips: Skipped steps, and falls of the loss scale before them.
        loss_scale: The last one; None without one.
        gradients: The first ones, unscaled, by name; float32.
        overflow: Where what is not finite begins, if they or their loss are at no loss scale.
        reasons: Why it does not suit, each with its kind: 'cannot', 'hardware', 'forward', 'scale', 'vanished', 'gradients',
            'loss' or 'slow'.
        time, memory_ratio, loss_off: Of a step, its bytes and the last losses, beside FP32; None where that is not known.
        error: How far the gradients are from those of FP32: relative, the root mean square over the modules that own
            parameters, each at most 1. So small gradients count as much as large ones.
    """

    level: OptLevel
    policy: Policy | None = None
    keep_fp32: tuple[str, ...] = ()
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    memory: int = 0
    skips: int = 0
    loss_scale: float | None = None
    gradients: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    overflow: BadOp | None = None
    reasons: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    time: float | None = None
    memory_ratio: float | None = None
    loss_off: float | None = None
    error: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether enough is known to judge: it failed, or one of its steps was timed."""
        return bool(self.seconds or self.reasons)


@dataclasses.dataclass(frozen=True)
class Training:
    """Some steps of training, on copies.

    Attributes:
        task: What is trained, and how.
        loss_fn: From model and batch to the loss.
        batches: Step ``n`` takes number ``n`` modulo their number, and the random numbers of ``seed + n``.
        seed: As above.
        steps: Of each level.
    """

    task: Task
    loss_fn: Callable[[nn.Module, Any], Tensor]
    batches: Sequence[Any]
    seed: int
    steps: int

    def try_level(self, tried: Tried) -> None:
        """Train a copy at a level, and note why that is not possible, where it is not. Syncs."""
        if tried.policy is None:
            return
        policy = dataclasses.replace(tried.policy, keep_fp32=(*tried.policy.keep_fp32, *tried.keep_fp32))
        begin = functools.partial(sandbox, self.task.model, policy, self.task.make_optimizer, self.task.attach)
        try:
            with begin() as box:
                is_finite = self._find_gradients(box, tried)
                if is_finite:
                    self._take_steps(box, tried)
            if not is_finite:
                # in a copy whose statistics no pass has spoilt
                with begin() as box:
                    self._find_overflow(box, tried)
        except torch.OutOfMemoryError:
            tried.reasons.append(('cannot', 'there is not enough memory'))
        except Exception as error:
            # FP32 is the user's own code: its errors are theirs. A level may lack an op, say
            is_ours = isinstance(error, (AmpAttachError, AmpConfigError))
            if isinstance(error, AmpUsageError) or (tried.level == 'O0' and not is_ours):
                raise
            tried.reasons.append(('cannot', str(error) if is_ours else one_line(error)))

    def _find_gradients(self, box: Sandbox, tried: Tried) -> bool:
        """Find the gradients at the first weights, without a step. Dropout does nothing, and a dynamic loss scale falls.

        Returns:
            Whether they and their loss are finite in the end.
        """
        box.model.train()
        for module in box.model.modules():
            module.train(module.training and 'Drop' not in class_name(module))
        scaler = box.engine.scales.scalers[0]
        for _ in range(MOST_BACKOFFS if scaler.is_dynamic else 1):
            done, loss = self._step(box, tried, 0, updates=False)
            is_finite = not any(map(is_bad, [loss, *done.gradients.values()]))
            if is_finite or is_bad(loss):
                break
            tried.skips += 1
            scaler.current_scale.div_(BACKOFF)
        tried.loss_scale = None if scaler.is_one else done.scale
        tried.gradients = {name: g.detach().to_dense().float() / done.scale for name, g in done.gradients.items()}
        if not tried.gradients:
            raise AmpUsageError('the loss of loss_fn gives the model no gradient: it has to call the model given.')
        box.model.train()
        return is_finite

    def _find_overflow(self, box: Sandbox, tried: Tried) -> None:
        """Find where what is not finite begins."""
        box.engine.scales.scalers[0].current_scale.fill_(tried.loss_scale or 1.0)
        trace = FirstBad(box.model.train())
        done, loss = self._step(box, tried, 0, updates=False, watches=[trace])
        trace.modules.remove()
        tried.overflow = trace.begin([loss]) or trace.begin(list(done.gradients.values()))
        kind, what = 'scale', f'the first gradients are not finite at {scale_of(tried)}'
        if (bad := tried.overflow) is not None:
            if bad.phase != BACKWARD:
                kind, what = 'forward', 'overflow in the forward pass'
            what += f', in {called(self.task.model, bad.module)}: {bad.op} {bad.source}'.rstrip()
        tried.reasons.append((kind, what))

    def _take_steps(self, box: Sandbox, tried: Tried) -> None:
        in_a_row = 0
        for step in range(self.steps):
            done, loss = self._step(box, tried, step, clip=self.task.clip, counts=not step)
            tried.losses.append(float(loss))
            tried.memory = tried.memory or done.memory
            tried.skips += done.skipped
            in_a_row = in_a_row + 1 if done.skipped else 0
            if step >= WARM_UP and not done.skipped:
                tried.seconds.append(done.seconds)
            if is_bad(loss):
                tried.reasons.append(('loss', f'the loss at step {step + 1} was {float(loss)}'))
                return
        scaler = box.engine.scales.scalers[0]
        tried.loss_scale = None if scaler.is_one else scaler.get_scale()
        if in_a_row >= MOST_SKIPPED:
            tried.reasons.append(('scale', f'the last {in_a_row} steps were skipped, down to {scale_of(tried)}'))
        elif scaler.is_dynamic and scaler.get_scale() < 1:
            tried.reasons.append(('scale', f'gradients overflow even unscaled, down to {scale_of(tried)}'))

    def _step(self, box: Sandbox, tried: Tried, number: int, **words: Any) -> tuple[Step, Tensor]:
        """Run one step of a copy; returns it and its loss."""
        losses: list[Tensor] = []

        def run(copied: nn.Module) -> list[tuple[Tensor, None]]:
            seed = (self.seed + number) % 2**32
            random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
            losses.append(check_loss(self.loss_fn(copied, copied_batch(self.batches[number % len(self.batches)]))))
            if tried.level == 'O0' and is_bad(losses[0]):
                text = f'the loss at step {number + 1} is {float(losses[0])} in FP32: no level can mend that.'
                raise AmpUsageError(f'{text} Look at the data, the weights and the learning rate first.')
            return [(losses[0], None)] if losses[0].requires_grad else []

        return run_step(box, run, surrounds=self.task.surrounds, **words), losses[0].detach()


def scale_of(tried: Tried) -> str:
    """Return the loss scale of a level in words."""
    return 'no loss scale' if tried.loss_scale is None else f'a loss scale of {tried.loss_scale:g}'


def keep_what_overflows(training: Training, tried: Tried) -> Tried | None:
    """Try a level with modules in FP32 until its first step is finite: where it overflows in the forward pass, what is around
    that, and with the second module of a class all of that class. Returns None where no few ones do."""
    names = {name: class_name(module) for name, module in training.task.model.named_modules()}
    keep: list[str] = []
    while tried.overflow is not None and tried.overflow.phase != BACKWARD and len(keep) < MOST_KEPT:
        name = tried.overflow.module
        while any(f'{name}.'.startswith(f'{kept}.') for kept in keep) or names.get(name) in keep:
            # what is kept gives back more than the type of the model has room for
            name = name.rpartition('.')[0]
        if not name:
            return None
        # what lies inside of another one is kept with it
        keep = [kept for kept in keep if not kept.startswith(f'{name}.')]
        others = [kept for kept in keep if names.get(kept) != names[name]]
        keep = [*keep, name] if len(others) == len(keep) else [*others, names[name]]
        tried = Tried(tried.level, tried.policy, tuple(keep))
        training.try_level(tried)
    return tried if keep and tried.overflow is None else None
