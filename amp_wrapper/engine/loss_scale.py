"""The loss scale: its state on the device, the rule by which it moves, and one for each loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..checkpoint.format import check_scaler_state
from ..errors import AmpUsageError
from ..policy import Policy
from ..policy.levels import LossScaleConfig
from ..policy.nested import HALF_TYPES
from ..policy.options import is_whole
from .flags import Flags

#: The floor of a scale that has none: the smallest normal number.
_TINY = torch.finfo(torch.float32).tiny
#: The names in files, GradScaler's where it has them: of the rule, which is not taken over, and of the counts.
_RULE, _COUNTS = ('growth_factor', 'backoff_factor', 'growth_interval'), ('steps', 'skips', 'consecutive_skips')


def is_one(config: LossScaleConfig) -> bool:
    """Whether a scale is 1 for good, so that scaling and unscaling can be left out."""
    return not config.enabled or (not config.dynamic and config.init_scale == 1.0)


class LossScaler:
    """One loss scale and its trackers.

    State, all on the device of the gradients: ``scale`` (float32), ``growth_tracker`` and ``hysteresis_tracker``
    (int32), and the counters of :attr:`counts` (int64). Methods that wait for the device say "Syncs.".

    The rule, once per optimizer step, after everything else of the step:

    * an overflow is a non-finite gradient element; the step is skipped, the growth tracker becomes 0, and the scale is
      multiplied by ``backoff_factor``, not below ``min_scale`` (None: the smallest normal float32; a floor above the
      present scale never raises it). With ``hysteresis`` h, the first h - 1 overflows since the last clean step only
      skip;
    * a clean step refills the hysteresis and adds one to the growth tracker; at ``growth_interval`` the scale is
      multiplied by ``growth_factor``, not above ``max_scale`` and never to infinity, and the tracker becomes 0.

    A static scale runs through the same calls and keeps its value. A disabled one (``config.enabled`` False) returns
    losses unchanged and never checks anything.

    Args:
        config: Start and rule.
        check: Whether gradients are checked; a dynamic scale always checks.
    """

    def __init__(self, config: LossScaleConfig, check: bool = True) -> None:
        self.config = config
        self.checks = config.enabled and (config.dynamic or check)
        start = config.init_scale if config.enabled else 1.0
        #: float32 scalar, a live tensor.
        self.current_scale = torch.tensor(start, dtype=torch.float32)
        self._growth_tracker = torch.zeros((), dtype=torch.int32)
        self._hysteresis_tracker = torch.tensor(config.hysteresis, dtype=torch.int32)
        #: int64 tensor of three: steps decided on, steps skipped, skips in a row up to now.
        self.counts = torch.zeros(3, dtype=torch.int64)
        floor = _TINY if config.min_scale is None else config.min_scale
        ceiling = math.inf if config.max_scale is None else config.max_scale
        self._rule = (*(getattr(config, key) for key in _RULE), config.hysteresis, floor, ceiling)
        #: Whether the scale is 1 for good. That is known on the host, and costs no multiplication anywhere.
        self.is_one = is_one(config)
        #: Whether the scale moves.
        self.is_dynamic = config.enabled and config.dynamic

    def get_scale(self) -> float:
        """Return the present scale as a number. Syncs."""
        return float(self.current_scale)

    def is_enabled(self) -> bool:
        """Return whether this scaler does anything."""
        return self.config.enabled

    def to(self, device: torch.device) -> None:
        """Move the state to ``device``."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))

    def scale(self, loss: Tensor, scale: Tensor | None = None) -> Tensor:
        """Multiply a loss by the scale.

        Args:
            loss: Floating tensor of any shape.
            scale: float32 scalar, where another one than the present has to be used.

        Returns:
            ``loss.float() * scale`` (float32; float64 stays), or ``loss.float()`` where the scale is 1 for good.
        """
        if loss.dtype in HALF_TYPES:
            # a 16-bit product would overflow before the gradients do
            loss = loss.float()
        return loss if self.is_one else loss * (self.current_scale if scale is None else scale).to(loss.device)

    def inverse_scale(self) -> Tensor | None:
        """Return the float32 scalar to multiply gradients with, rounded once; None where the scale is 1 for good."""
        return None if self.is_one else self.current_scale.reciprocal()

    def step_arguments(self, moves: bool) -> dict[str, Any]:
        """Return what :func:`~amp_wrapper.ops.fused_adam` is given to unscale by this scale, and to move it.

        Args:
            moves: Whether the step moves the scale, where it is dynamic.
        """
        words: dict[str, Any] = {} if self.is_one else {'scale': self.current_scale}
        if self.is_dynamic and moves:
            trackers = {'growth_tracker': self._growth_tracker, 'hysteresis_tracker': self._hysteresis_tracker}
            words |= {**trackers, 'rule': self._rule}
        return words

    def update(self, skipped: Tensor, overflowed: Tensor | None, counts: bool = True) -> None:
        """Count one optimizer step, taken or skipped, and move a dynamic scale and its trackers.

        Args:
            skipped: float32 scalar on any device: 1.0 where the step was skipped, for this loss or another.
            overflowed: Likewise, whether this loss overflowed; None where it took no part, so that the scale stays.
            counts: Whether the step is to be counted.
        """
        if overflowed is not None and self.is_dynamic:
            flag = overflowed.to(self.current_scale.device)
            ops.update_scale(self.current_scale, self._growth_tracker, self._hysteresis_tracker, flag, *self._rule)
        if counts and self.checks:
            left_out = skipped.to(self.counts)
            steps, skips, streak = self.counts.unbind()
            steps.add_(1)
            skips.add_(left_out)
            streak.add_(1).mul_(left_out)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in ``torch.amp.GradScaler``'s key names, and further keys that it ignores. Syncs.

        Returns:
            Plain numbers only; the hyper-parameters are there for ``GradScaler`` and for readers.
        """
        return {
            'scale': self.get_scale(),
            **{key: getattr(self.config, key) for key in _RULE},
            '_growth_tracker': int(self._growth_tracker),
            'hysteresis_tracker': int(self._hysteresis_tracker),
            'dynamic': self.config.dynamic,
            **dict(zip(_COUNTS, self.counts.tolist())),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Take over scale, trackers and counters; the rule stays that of the configuration.

        Args:
            state: From :meth:`state_dict` or from ``GradScaler.state_dict()``; not changed. An empty one (of a disabled
                ``GradScaler``) changes nothing.

        Returns:
            One sentence for each thing that was not taken over.

        Raises:
            AmpCheckpointError: A missing or impossible value; nothing has been applied.
        """
        check_scaler_state(state)
        if not state:
            return ['the saved loss scaler was disabled: the scale starts as configured']
        if not self.config.enabled:
            return ['the saved loss scale is not used: loss scaling is off in this configuration']
        saved, config, was_dynamic = state['scale'], self.config, state.get('dynamic', True)
        moves = config.dynamic and was_dynamic
        if moves:
            # torch takes no whole number beyond 64 bits, though float32 could hold it
            self.current_scale.fill_(float(saved))
            self._growth_tracker.fill_(state['_growth_tracker'])
            self._hysteresis_tracker.fill_(state.get('hysteresis_tracker', config.hysteresis))
        self.counts.copy_(torch.tensor([state.get(key, 0) for key in _COUNTS]))
        mine = {key: getattr(config, key) for key in _RULE}
        changed = [f'{key} {state[key]!r} -> {mine[key]!r}' for key in _RULE if state.get(key, mine[key]) != mine[key]]
        differs, start = saved != self.get_scale(), f'{config.init_scale:g}'
        is_static, is_unused = config.dynamic and not moves, not config.dynamic and (was_dynamic or differs)
        notes = {
            f'the saved loss scale {saved:g} was static: the dynamic one starts at {start}': is_static,
            f'the saved loss scale {saved:g} is not used: the configured one is {start}': is_unused,
            f'the rule of the loss scale follows the configuration: {", ".join(changed)}': config.dynamic and changed,
        }
        return [note for note, holds in notes.items() if holds]


class LossScales:
    """One loss scale for each loss.

    Args:
        policy: Their number and rule.
        shared: Those of several engines, which step independently; None for scales of its own.

    Attributes:
        scalers: One for each loss.
        first: That of the first loss.
        are_shared: Whether other engines have the same.
        steps: Counts the steps of this engine, in its ``counts``.
        check: Whether gradients are checked for non-finite values.
        is_dynamic: Whether they move.
        is_one: Whether they are 1 for good, so that scaling and unscaling can be left out.
    """

    def __init__(self, policy: Policy, shared: Sequence[LossScaler] | None = None) -> None:
        self.scalers = new_scalers(policy) if shared is None else list(shared)
        self.are_shared = shared is not None
        self.first = first = self.scalers[0]
        self.check, self.is_dynamic, self.is_one = first.checks, first.is_dynamic, first.is_one
        # the losses that the last update was for
        self._updated: list[int] = []
        # scales of several engines do not count the steps of one
        self.steps = first if shared is None else LossScaler(LossScaleConfig(False, 1.0), first.checks)

    def of(self, loss_id: int) -> LossScaler:
        """The scale of a loss.

        Raises:
            AmpUsageError: No such loss.
        """
        if not is_whole(loss_id, 0, len(self.scalers)):
            raise AmpUsageError(f'loss_id={loss_id!r} is not below num_losses={len(self.scalers)}: raise num_losses.')
        return self.scalers[loss_id]

    def pinned(self, loss_id: int) -> Tensor | None:
        """Return the scale of a loss for a backward pass, a float32 scalar; None for 1.

        It stays as it is where another engine steps before the pass is through, and moves a shared scale.
        """
        scaler = self.of(loss_id)
        scale = scaler.current_scale.clone() if self.are_shared else scaler.current_scale
        return None if scaler.is_one else scale

    def to(self, device: torch.device) -> None:
        """Move the state to ``device``."""
        for scaler in (*self.scalers, self.steps):
            scaler.to(device)

    def update(self, flags: Flags, is_counted: bool = False) -> None:
        """Move the scales of the losses that took part in a step, taken or skipped, and count it.

        Args:
            flags: The flags of the step; cleared.
            is_counted: Whether :attr:`steps` has counted it already.
        """
        self._updated = [index for index, used in enumerate(flags.used) if used or not self.are_shared]
        worst = flags.skipped()
        skipped = flags.new() if worst is None else worst
        for index, scaler in enumerate(self.scalers):
            # a step is skipped for all losses; a scale moves only for a loss that took part, and shared ones count for those
            used = flags.used[index]
            counts = not (is_counted and scaler is self.steps) and (used or not self.are_shared)
            scaler.update(skipped, flags.of(index) if used else None, counts)
        if self.are_shared:
            self.steps.update(skipped, None, not is_counted)
        flags.clear()

    def describe(self) -> str:
        """The loss scales as text. Syncs."""
        if len(self.scalers) == 1:
            return f'{self.first.get_scale():g}'
        chosen = self._updated or range(len(self.scalers))
        return ', '.join(f'loss {index}: {self.scalers[index].get_scale():g}' for index in chosen)

    def load(self, states: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[str]]:
        """Take over the states of saved scales.

        Args:
            states: One for each saved loss.

        Returns:
            The scales that were taken over, and a phrase for each thing that was not.
        """
        scales, dropped = list[float](), list[str]()
        for index, (scaler, state) in enumerate(zip(self.scalers, states)):
            label = f'loss {index}: ' if len(self.scalers) > 1 else ''
            dropped += [label + note for note in scaler.load_state_dict(state)]
            if scaler.is_dynamic and state.get('dynamic', True) and state:
                scales.append(scaler.get_scale())
        further = [f'{state["scale"]:g}' for state in states[len(self.scalers) :] if state]
        if further:
            dropped.append(f'the loss scales {", ".join(further)} of further losses, for which none is configured')
        new = [scaler.get_scale() for scaler in self.scalers[len(states) :] if scaler.is_dynamic]
        return scales, dropped + [f'no loss scale was saved: it starts at {scale:g}' for scale in new]


def new_scalers(policy: Policy) -> list[LossScaler]:
    """One for each loss."""
    config = policy.loss_scale if policy.enabled else dataclasses.replace(policy.loss_scale, enabled=False)
    return [LossScaler(config, policy.skip_nonfinite) for _ in range(policy.num_losses)]
