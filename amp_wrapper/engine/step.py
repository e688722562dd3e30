"""One optimizer step: taken, or skipped as a whole. Two ways through it, with the same results."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import repeat
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import ops
from ..casting import fp32_values
from ..casting.masters import StepLists
from ..errors import AmpConfigError, AmpUsageError, OverflowStreakError, some
from ..optim.fused import FusedOptimizer, Update
from ..shards import local
from .clipping import GradientClip, ShardNorm
from .gradients.unscale import nonfinite_names
from .host_read import LateRead, flagged, has_pre_hooks, takes_flag
from .overflow import GRAD_NORM, LOSS_SCALE, SKIP, SKIPS, STREAK, StepResult, info_of, what_to_try
from .parts import EngineParts, Stage

_requires_grad: Callable[[Tensor], bool] = operator.attrgetter('requires_grad')


class FusedStep:
    """The step of an optimizer of :mod:`amp_wrapper.optim`: two passes over memory, and the host reads nothing.

    Args:
        parts: Of the engine.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    def run(
        self,
        clip: GradientClip | None,
        gradients: Sequence[Tensor | None],
        copies: Sequence[Tensor | None],
        kwargs: dict[str, Any],
    ) -> StepResult:
        """One pass for norm and flag, one for everything else, and a decision between them, all on the device.

        Args:
            clip: How to clip.
            gradients: As the optimizer takes them: scaled, or unscaled at each backward pass.
            copies: What is written beside each parameter, or None.
            kwargs: For the optimizer's ``step``.
        """
        parts = self._parts
        optimizer = parts.optimizer
        assert isinstance(optimizer, FusedOptimizer)
        waits = parts.scales.check and parts.monitor.must_wait
        update = Update(gradients, copies, lambda found: self._decide(clip, gradients, found), parts.params.settle)
        with optimizer.updating(update):
            parts.own_step(kwargs)
        info = update.decision
        assert info is not None
        result = result_of(parts, None, info, None if clip is None or clip.kind == 'value' else info[GRAD_NORM])
        if parts.gradients.unscaled:
            parts.scales.update(parts.overflow, parts.device, is_counted=True)
            # the prologue was given no scale, for the gradients carry none
            info[LOSS_SCALE] = parts.scales.first.current_scale
        else:
            if parts.gradients.sums is not None:
                parts.gradients.clear(parts.params)
            parts.overflow.clear()
        if not parts.scales.check:
            return dataclasses.replace(result, skipped=False)
        if not waits:
            parts.monitor.pass_unseen()
            return result
        assert result.info is not None
        numbers = result.info.tolist()
        record(parts, numbers[SKIP] > 0, int(numbers[SKIPS]), int(numbers[STREAK]))
        return dataclasses.replace(result, skipped=numbers[SKIP] > 0)

    def _decide(
        self, clip: GradientClip | None, gradients: Sequence[Tensor | None], found: Sequence[Tensor]
    ) -> dict[str, Any]:
        """Read the gradients once, for norm and flag; returns the prologue's arguments, from which it decides."""
        parts = self._parts
        scales, overflow = parts.scales, parts.overflow
        # unscaled at each backward pass, and checked there
        done = parts.gradients.unscaled
        flag = overflow.found(0) if scales.check and not done else None
        words: dict[str, Any]
        if done:
            words = {'counts': scales.steps.counts} if scales.check else {}
        else:
            words = scales.first.prologue(overflow.used[0])
        if clip is not None:
            words |= clip.prologue()
        norm = None
        if clip is not None and clip.kind == 'norm':
            if parts.params.layout.groups:
                norm = ShardNorm(clip, found, _present(parts.params.layout.replicas, gradients), flag)
            else:
                words['norm'] = clip.norm(found, flag)
        elif flag is not None:
            ops.multi_tensor_isnonfinite(found, flag)
        total = parts.agree(norm)
        if total is not None:
            words['norm'] = total
        if scales.check:
            words['found_inf'] = overflow.skipped()
            parts.settle_buffers(words['found_inf'])
            if not done and not overflow.is_own:
                words['learned'] = overflow.learned(0)
        return words

    def gradients(self, clip: GradientClip | None, lists: StepLists) -> list[Tensor | None] | None:
        """What the optimizer would step with; None where this way cannot do it all.

        Args:
            clip: How to clip.
            lists: What is stepped.

        Raises:
            AmpConfigError: A clipping that split masters cannot have.
            AmpUsageError: Hooks before the step that split masters cannot have.
        """
        parts = self._parts
        optimizer = parts.optimizer
        if not parts.policy.enabled or not isinstance(optimizer, FusedOptimizer):
            return None
        fits = clip is None or clip.fits_prologue
        split = parts.policy.split_masters
        # nothing else can step split masters: what the fused step cannot do is refused
        if split and clip is not None and not fits:
            raise AmpConfigError([clip.not_in_prologue])
        hooked = has_pre_hooks(optimizer)
        if split and hooked:
            raise AmpUsageError(
                "master_weights='split' with hooks before optimizer.step() (register_step_pre_hook): they would see scaled "
                '16-bit gradients, and what they write to them would come too late. Remove the hooks, or use '
                'master_weights=True.'
            )
        if not split and (not fits or hooked or not lists.devices <= {parts.device}):
            return None
        found = parts.gradients.to_step(lists)
        if not split and (_clips_frozen(clip, lists.weights, found) or all(map(operator.is_, found, repeat(None)))):
            return None
        return found


def _present(values: Sequence[int], gradients: Sequence[Tensor | None]) -> list[int]:
    return [value for value, gradient in zip(values, gradients) if gradient is not None]


def _clips_frozen(clip: GradientClip | None, weights: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> bool:
    """Whether a frozen weight has a gradient, which torch's clipping leaves out."""
    if clip is None or all(map(_requires_grad, weights)):
        return False
    return any(grad is not None and not weight.requires_grad for weight, grad in zip(weights, gradients))


class EagerStep:
    """The step of any other optimizer: unscale, find out, clip, step, copy, each in its turn.

    Optimizers that follow GradScaler's protocol, as torch's fused ones do, learn of a skip from a flag on the device; before
    all others step, the host reads it.

    Args:
        parts: Of the engine.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    def run(self, clip: GradientClip | None, kwargs: dict[str, Any]) -> StepResult:
        """Take the step. Syncs once, where the optimizer cannot read the flag itself.

        Args:
            clip: How to clip.
            kwargs: For the optimizer's ``step``.
        """
        parts = self._parts
        optimizer, scales = parts.optimizer, parts.scales
        assert optimizer is not None
        raises = clip is not None and clip.raises_on_nonfinite
        waits = scales.check and parts.monitor.must_wait
        if not parts.gradients.unscaled:
            flag = parts.overflow.found(0) if scales.check else None
            parts.gradients.unscale(parts.params, scales.first.inverse_scale(), flag)
        known = parts.agree(self._shard_norm(clip))
        skip = parts.overflow.skipped() if scales.check else None
        parts.settle_buffers(skip)
        by_flag = skip is not None and not waits and not raises and takes_flag(optimizer)
        late = None
        if skip is not None and not by_flag:
            late = LateRead(torch.cat([skip.double().reshape(1), scales.steps.counts[1:].double()]))
        norm = None
        if clip is not None and not waits and not raises:
            # goes on while the flag is on its way; where somebody may ask for names, gradients stay as they are
            norm = clip.apply(parts.params.parameters(), known)
        found, skips, streak = late.wait() if late is not None else (0.0, 0.0, 0.0)
        skipped = found > 0
        # a dynamic scale learns from the overflow
        if raises and (not scales.is_dynamic if skipped else known is not None and not known.isfinite()):
            raise RuntimeError(
                'The total norm of gradients is non-finite, here or on another rank, so it cannot be clipped. '
                'error_if_nonfinite=False skips such steps where gradients are checked.'
            )
        if not skipped:
            if clip is not None and norm is None:
                norm = clip.apply(parts.params.parameters(), known)
            with flagged(optimizer, skip) if by_flag and skip is not None else nullcontext():
                parts.own_step(kwargs)
            if parts.params.have_fp32_values:
                parts.params.write_weights()
        scales.update(parts.overflow, parts.device)
        if by_flag:
            parts.monitor.pass_unseen()
            return result_of(parts, None, None, norm, skip)
        if late is not None:
            record(parts, skipped, int(skips) + skipped, (int(streak) + 1) * skipped)
        return result_of(parts, skipped, None, norm, skip)

    def _shard_norm(self, clip: GradientClip | None) -> ShardNorm | None:
        """This rank's part of the norm of sharded gradients, which are unscaled by now; None where torch finds the norm."""
        layout = self._parts.params.layout
        if clip is None or clip.kind != 'norm' or not clip.is_simple or not layout.groups:
            return None
        chosen = [
            (p.grad, count)
            for p, count in zip(self._parts.params.parameters(), layout.replicas)
            if p.grad is not None and p.requires_grad
        ]
        return ShardNorm(clip, local([grad for grad, _ in chosen]), [count for _, count in chosen], None)


class StepChecks:
    """Refuses steps whose gradients are not in order.

    Args:
        parts: Of the engine.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        # how many pairs there were when this was last looked for
        self._known = -1

    def run(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse a step.

        Args:
            kwargs: Of the step.

        Raises:
            AmpUsageError: Inside of a backward pass; no backward pass since the last step; a closure under a loss scale;
                weights that another optimizer has given FP32 values after this one was attached without any.
        """
        parts = self._parts
        scales, params = parts.scales, parts.params
        # an evaluation since the backward pass leaves gathered weights, which a step does not reach
        for group in parts.shard_groups:
            group.reshard()
        if parts.gradients.in_backward:
            raise AmpUsageError(
                'step() inside the "with amp.scale_loss(...)" block of the same optimizer: its gradients are still scaled. '
                'Step after the block.'
            )
        if fp32_values.pairs_made != self._known and not params.have_fp32_values:
            self._check_late_masters()
        if kwargs.get('closure') is not None:
            if scales.is_one and not params.have_fp32_values:
                return
            raise AmpUsageError(
                f'step(closure=...) at {parts.policy.opt_level}: a closure would run backward passes that nobody unscales. '
                f"Call update_params(loss) or backward() and step(), or use a level without scale and masters ('O0', 'O4')."
            )
        plain = scales.are_shared or (scales.is_one and not scales.check and not params.have_fp32_values)
        if parts.stage is not Stage.ACCUMULATING and not plain:
            raise AmpUsageError(
                'step() without a backward() of this wrapper since the last step: gradients of loss.backward() carry no '
                'loss scale, and unscaling twice is wrong. Call optim_wrapper.backward(loss), or update_params(loss).'
            )

    def _check_late_masters(self) -> None:
        if any(fp32_values.pair_of(parameter) is not None for parameter in self._parts.params.parameters()):
            raise AmpUsageError(
                f'step() at {self._parts.policy.opt_level}: the weights are 16-bit by now, with FP32 masters that another '
                f'optimizer steps, since the model was initialised again at another level. This one would round what it does '
                f'to them. Step the later optimizer, and make a new one where two are wanted: amp.initialize([], optimizer).'
            )
        self._known = fp32_values.pairs_made


def step_with_closure(parts: EngineParts, clip: GradientClip | None, kwargs: Mapping[str, Any]) -> StepResult:
    """A step whose backward passes run inside the optimizer: there is nothing to unscale, and nobody to check."""
    norm = None if clip is None else clip.apply(parts.params.parameters())
    parts.own_step(kwargs)
    parts.settle_buffers(None)
    parts.stage = Stage.READY
    return result_of(parts, False, None, norm)


def finish_gradients(parts: EngineParts) -> None:
    """Before a step, where gradients are unscaled at each backward pass: unscale and check those that were not yet."""
    gradients, overflow = parts.gradients, parts.overflow
    held = gradients.held
    if held is not None:
        gradients.release(parts.params, overflow.found(held.loss_id) if parts.scales.check else None)
    if parts.pass_watch is not None:
        parts.pass_watch.see_taken(parts.weights())
    parts.take_up(makes_room=False)
    if parts.pass_watch is not None:
        parts.pass_watch.see_step(parts.params.parameters(), overflow.named, overflow.reached_by_others)
    parts.check_rest()


def result_of(
    parts: EngineParts, skipped: bool | None, info: Tensor | None, norm: Tensor | None, skip: Tensor | None = None
) -> StepResult:
    """What a step did.

    Args:
        parts: Of the engine.
        skipped: None where the host does not know.
        info: Of the prologue; None where it is put together here.
        norm: Scalar, or None.
        skip: float32 scalar, where there is no ``info``.
    """
    scales = parts.scales
    shows = [
        *(['grad_norm'] if norm is not None else []),
        *(['loss_scale'] if scales.check and scales.is_dynamic else []),
        *(['skips'] if scales.check else []),
    ]
    if not shows:
        return StepResult(skipped)
    if info is None:
        info = info_of(skip, norm, scales.first.current_scale, scales.steps.counts)
    return StepResult(skipped, info, tuple(shows))


def record(parts: EngineParts, skipped: bool, skips: int, streak: int) -> None:
    """The host knows what this step did.

    Raises:
        OverflowStreakError: The limit of skips in a row is reached.
    """
    if parts.monitor.record(skipped, skips, streak, parts.scales.describe, parts.label):
        _raise_streak(parts, streak)


def _raise_streak(parts: EngineParts, streak: int) -> NoReturn:
    """The gradients are still there. Syncs."""
    name, params = parts.name, parts.params
    named = [(name(p), p) for p in (*params.without_master(), *(master for _, master in params.pairs))]
    # after a fused step they lie where backward put them
    named += [(name(weight), weight) for weight, _ in params.pairs]
    shown = some(list(dict.fromkeys(nonfinite_names(named))), 8)
    scale = parts.scales.describe()
    found = ''.join(f' {text}' for text in (observer.explain_streak(parts) for observer in parts.observers) if text)
    parts.zero_grad()
    raise OverflowStreakError(
        f'{streak} optimizer steps in a row had non-finite gradients (max_consecutive_skips='
        f'{parts.policy.max_consecutive_skips}); the loss scale is {scale}. Non-finite now: {shown}. Weights and '
        f'optimizer state are those of the last clean step. What to try: {"; ".join(what_to_try(parts.policy))}.{found}'
    )
