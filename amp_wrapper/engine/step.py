"""One optimizer step, in its order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..casting import fp32_values as twins
from ..errors import AmpConfigError, AmpUsageError, OverflowStreakError
from ..optim.fused import FusedOptimizer, Update
from .backward import Receiving
from .base import Sides, Stage
from .buffers import snapshots as buffer_snapshots
from .gradients import unscale as gradients
from .gradients.unscale import GradientClip
from .host_read import LateRead, before_post_hooks, flagged, has_pre_hooks, late_gradients, takes_flag
from .step_result import GRAD_NORM, SKIP, SKIPS, STREAK, StepResult, decision_of


class Stepping(Receiving):
    """Takes optimizer steps, or skips them as a whole."""

    def step(self, clip: GradientClip | None = None, **kwargs: Any) -> StepResult:
        """One optimizer step from the gradients at hand: taken, or skipped as a whole.

        With an optimizer of :mod:`amp_wrapper.optim` it takes two passes over memory, and the host never waits: what happened
        stays on the device until somebody reads the result (:meth:`review`). Optimizers that follow GradScaler's protocol, as
        torch's fused ones do, learn of a skip from a flag on the device; before all others steps, the host reads it.

        Syncs once where an optimizer cannot read the flag itself, with ``error_if_nonfinite``, and where the step may be one
        skip too many.

        Args:
            clip: How to clip, after unscaling.
            **kwargs: For the optimizer's ``step``. A closure is possible where there is no scale and no master; its
                gradients are not checked.

        Returns:
            What happened. A skipped step leaves weights, masters and optimizer state as they were, bit for bit.

        Raises:
            AmpUsageError: No backward since the last step, or a closure under a loss scale; a weight and its master that were
                both written to by others.
            OverflowStreakError: ``max_consecutive_skips`` steps in a row were non-finite.
        """
        assert self.optimizer is not None
        self._check_step(kwargs)
        if self._on_arrival:
            self._finish_arrivals()
        if kwargs.get('closure') is not None:
            # its backward passes run inside the optimizer: there is nothing to unscale, and nobody to check
            norm = None if clip is None else clip.apply(self._parameters())
            self._restore_buffers(None)
            self._own_step(kwargs)
            self.stage = Stage.READY
            return self._result(False, None, norm)
        sides = self._sides()
        if self._masters is not None:
            self._masters.synchronise()
            self._masters.follow_idle(self._sums or ())
        gradients = self._fused_gradients(clip, sides)
        if gradients is not None:
            result = self._step_fused(clip, sides, gradients, kwargs)
        else:
            result = self._step_any(clip, kwargs)
        self.stage = Stage.READY
        if self.pass_watch is not None:
            self.pass_watch.note_step(self._parameters())
        return result

    def _settle(self) -> None:
        if self._masters is not None:
            self._masters.settle()

    def _finish_arrivals(self) -> None:
        """Everything that the optimizer is about to step is unscaled, and was looked at."""
        held = self._arrivals.held
        checks = self.scalers[0].checks
        if held is not None:
            flag = self._flags.found(held.loss_id) if checks else None
            self._arrivals.release(self._pairs(), self._own_parameters(), flag)
        self._take_up(makes_room=False)
        if self.pass_watch is not None:
            flags = self._flags
            self.pass_watch.see_step(self._parameters(), flags.named, flags.lent)
        self._look_at_rest()

    def _step_fused(
        self, clip: GradientClip | None, sides: Sides, gradients: Sequence[Tensor | None], kwargs: dict[str, Any]
    ) -> StepResult:
        """One pass for norm and flag, one for everything else, and a decision between them, all on the device."""
        assert isinstance(self.optimizer, FusedOptimizer)
        waits = self.scalers[0].checks and self._watch.must_wait
        update = Update(gradients, sides.partners, lambda found: self._prologue(clip, found), self._settle)
        with self.optimizer.updating(update):
            self._own_step(kwargs)
        decision = update.decision
        assert decision is not None
        norm = None if clip is None or clip.kind == 'value' else decision[GRAD_NORM]
        if self._sums is not None:
            self._sums.clear()
        if self._on_arrival:
            skip = self._flags.skipped()
            self._update_scalers()
            result = self._result(None, None, norm, skip)
        else:
            self._flags.clear()
            result = self._result(None, decision, norm)
        if not self.scalers[0].checks:
            return dataclasses.replace(result, skipped=False)
        if not waits:
            self._watch.pass_unseen()
            return result
        assert result.decision is not None
        numbers = result.decision.tolist()
        self._see(numbers[SKIP] > 0, int(numbers[SKIPS]), int(numbers[STREAK]))
        return dataclasses.replace(result, skipped=numbers[SKIP] > 0)

    def _fused_gradients(self, clip: GradientClip | None, sides: Sides) -> list[Tensor | None] | None:
        """The scaled gradients of all that the optimizer steps; None where the fused step cannot do it all."""
        optimizer = self.optimizer
        if not self.policy.enabled or not isinstance(optimizer, FusedOptimizer):
            return None
        fits = clip is None or clip.fits_prologue
        # nothing else can step them: what the fused step cannot do is refused
        split = self.policy.split_masters
        if split and clip is not None and not fits:
            raise AmpConfigError([clip.not_in_prologue])
        if split and has_pre_hooks(optimizer):
            raise AmpUsageError(
                "master_weights='split' with hooks before optimizer.step() (register_step_pre_hook): they would see scaled "
                '16-bit gradients, and what they write to them would come too late. Remove the hooks, or use '
                'master_weights=True.'
            )
        if not split and (not fits or has_pre_hooks(optimizer)):
            return None
        if not split and not sides.together:
            return None
        # unscaled into the masters as they arrived
        several = self._on_arrival
        found = [parameter.grad for parameter in (sides.parameters if several else sides.weights)]
        if self._sums is not None and len(self._sums) and not several:
            found = [ops.add_gradients(self._sums.get(weight), grad) for weight, grad in zip(sides.weights, found)]
        frozen = clip is not None and any(
            grad is not None and not weight.requires_grad for weight, grad in zip(sides.weights, found)
        )
        if not split and (frozen or all(grad is None for grad in found)):
            return None
        return found

    def _sides(self) -> Sides:
        """Both sides of what the optimizer steps. Kept from step to step, and made anew where anything changed."""
        parameters = self._parameters()
        sides = self._kept_sides
        late = self._masters is not None and self._masters.has_unfrozen
        if sides is None or late or not sides.are_of(parameters):
            if self._masters is not None:
                self._masters.adopt()
                parameters = self._parameters()
            sides = self._kept_sides = Sides(parameters, self._masters, self._device)
        return sides

    def _prologue(self, clip: GradientClip | None, found: Sequence[Tensor]) -> dict[str, Any]:
        """The first pass, and what the decision is made from."""
        scaler = self.scalers[0]
        # unscaled and looked at as they arrived
        several = self._on_arrival
        flag = self._flags.found(0) if scaler.checks and not several else None
        words: dict[str, Any] = {} if several else scaler.prologue(self._flags.used[0])
        if clip is not None:
            words |= clip.prologue()
        if clip is not None and clip.kind == 'norm':
            words['norm'] = clip.norm(found, flag)
        elif flag is not None:
            ops.multi_tensor_isnonfinite(found, flag)
        if scaler.checks:
            self._agree()
            words['found_inf'] = self._flags.skipped()
            self._restore_buffers(words['found_inf'])
            if not several and not self._flags.are_own:
                words['learned'] = self._flags.learned(0)
        if clip is not None and clip.raises_on_nonfinite and 'norm' in words:
            clip.refuse_nonfinite(words['norm'], words.get('found_inf'), scaler.is_dynamic)
        return words

    def _step_any(self, clip: GradientClip | None, kwargs: dict[str, Any]) -> StepResult:
        """Unscale, find out, clip, step, copy: each in its turn, for optimizers that know nothing of us."""
        assert self.optimizer is not None
        checks = self.scalers[0].checks
        waits = checks and self._watch.must_wait
        raises = clip is not None and clip.raises_on_nonfinite
        # where no master is, sums stay in torch's order: O1 clips with the bits of mmengine's wrapper
        known = self._unscale(clip is not None and clip.is_euclidean and bool(self._pairs()))
        if checks:
            self._agree()
        skip = self._flags.skipped() if checks else None
        self._restore_buffers(skip)
        by_flag = skip is not None and not waits and not raises and takes_flag(self.optimizer)
        late = None
        if skip is not None and not by_flag:
            late = LateRead(torch.cat([skip.double().reshape(1), self._tally.counts[1:].double()]))
        norm = None
        if clip is not None and not waits and not raises:
            # goes on while the flag is on its way; where somebody may ask for names, gradients stay as they are
            norm = clip.apply(self._parameters(), known)
        found, skips, streak = late.wait() if late is not None else (0.0, 0.0, 0.0)
        skipped = found > 0
        if raises and skipped and not self.scalers[0].is_dynamic:
            # asked for by the user, and no dynamic scale is there that would learn from the overflow
            assert clip is not None
            clip.apply(self._parameters())
            raise RuntimeError('The total norm of gradients is non-finite on another rank, so it cannot be clipped.')
        if not skipped:
            if clip is not None and norm is None:
                norm = clip.apply(self._parameters(), known)
            skipping = flagged(self.optimizer, skip) if by_flag and skip is not None else nullcontext()
            copies = None if self._masters is None else self._masters.copy_to_weights
            with late_gradients(self.optimizer), skipping, before_post_hooks(self.optimizer, copies):
                self._own_step(kwargs)
        self._update_scalers()
        if by_flag:
            self._watch.pass_unseen()
            return self._result(None, None, norm, skip)
        if late is not None:
            self._see(skipped, int(skips) + skipped, (int(streak) + 1) * skipped)
        return self._result(skipped, None, norm, skip)

    def _restore_buffers(self, skip: Tensor | None) -> None:
        """What forward passes did to buffers since the last step is undone where the flag is up."""
        if self._buffers is not None:
            self._buffers.restore(skip)
        buffer_snapshots.decided(self, skip)

    def _agree(self) -> None:
        self._flags.agree(self._reducers.groups_to_ask(self._flags.received_locally))

    def _see(self, skipped: bool, skips: int, streak: int) -> None:
        """The host knows what this step did."""
        if self._watch.see(skipped, skips, streak, self._scales, self.label):
            self._raise_streak(streak)

    def _result(
        self, skipped: bool | None, decision: Tensor | None, norm: Tensor | None, skip: Tensor | None = None
    ) -> StepResult:
        scaler = self.scalers[0]
        shows = [
            *(['grad_norm'] if norm is not None else []),
            *(['loss_scale'] if scaler.checks and scaler.is_dynamic else []),
            *(['skips'] if scaler.checks else []),
        ]
        if not shows:
            return StepResult(skipped)
        if decision is None:
            decision = decision_of(skip, norm, scaler.current_scale, self._tally.counts)
        return StepResult(skipped, decision, tuple(shows))

    def review(self, decisions: Iterable[Sequence[float]]) -> None:
        """Take notice of steps that nobody waited for: says what was skipped, and finds rows of skips.

        Args:
            decisions: :attr:`StepResult.decision` of all steps since the last one known, in order, on the host.
        """
        self._watch.review(decisions, self._scales, len(self.scalers) == 1, self.label)

    def _check_step(self, kwargs: Mapping[str, Any]) -> None:
        scaler = self.scalers[0]
        if self._arrivals.open:
            raise AmpUsageError(
                'step() inside the "with amp.scale_loss(...)" block of the same optimizer: its gradients are still scaled. '
                'Step after the block.'
            )
        self._check_twins()
        plain = self._shared or (scaler.is_one and not scaler.checks and self._masters is None)
        if kwargs.get('closure') is not None:
            if scaler.is_one and self._masters is None:
                return
            raise AmpUsageError(
                f'step(closure=...) at {self.policy.opt_level}: a closure would run backward passes that nobody unscales. '
                f"Call update_params(loss) or backward() and step(), or use a level without scale and masters ('O0', 'O4')."
            )
        if self.stage is not Stage.ACCUMULATING and not plain:
            raise AmpUsageError(
                'step() without a backward() of this wrapper since the last step: gradients of loss.backward() carry no '
                'loss scale, and unscaling twice is wrong. Call optim_wrapper.backward(loss), or update_params(loss).'
            )

    def _check_twins(self) -> None:
        """Another optimizer may have brought the model to a level with masters since this one was attached without."""
        made = twins.pairs_made()
        if made == self._pairs_made or self._masters is not None:
            return
        taken = next((parameter for parameter in self._parameters() if twins.has_twin(parameter)), None)
        if taken is not None:
            raise AmpUsageError(
                f'step() at {self.policy.opt_level}: the weights are 16-bit by now, with FP32 masters that another optimizer '
                f'steps, since the model was initialised again at another level. This one would round what it does to them. '
                f'Step the later optimizer, and make a new one where two are wanted: amp.initialize([], optimizer).'
            )
        self._pairs_made = made

    def _unscale(self, norm: bool) -> Tensor | None:
        """Gradients where the optimizer looks for them; their Euclidean norm, where it came with the same pass."""
        if self._on_arrival:
            return None  # done as each backward arrived
        scaler = self.scalers[0]
        found = gradients.unscale_to_masters(
            self._pairs(),
            self._own_parameters(),
            scaler.inverse_scale(),
            self._flags.found(0) if scaler.checks else None,
            (lambda weight: None) if self._sums is None else self._sums.get,
            norm,
        )
        if self._sums is not None:
            # they are the masters' gradients now
            self._sums.clear()
        return found

    def _raise_streak(self, streak: int) -> None:
        """The limit of skips in a row is reached; the gradients are still there. Syncs."""
        named = [(self._name(p), p) for p in (*self._own_parameters(), *(master for _, master in self._pairs()))]
        # after a fused step they lie where backward put them
        named += [(self._name(weight), weight) for weight, master in self._pairs() if master.grad is None]
        names = gradients.nonfinite_names(named)
        shown = ', '.join(names[:8]) + (f' and {len(names) - 8} more' if len(names) > 8 else '')
        scale = self._scales()
        self.zero_grad()
        raise OverflowStreakError(
            f'{streak} optimizer steps in a row had non-finite gradients (max_consecutive_skips='
            f'{self.policy.max_consecutive_skips}); the loss scale is {scale}. Non-finite now: {shown}. Weights and '
            f'optimizer state are those of the last clean step. What to try: look for NaN in the data and the loss; lower the '
            f'learning rate or add clip_grad; keep the named modules in FP32 (keep_fp32=[...]); use bfloat16 '
            f"(dtype='bfloat16')."
        )
