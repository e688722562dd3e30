"""The loss scales of one engine: one for each loss, its own or shared with other engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import AmpUsageError
from ..policy import Policy
from ..policy.loss_scale import LossScaleConfig
from .loss_scale import LossScaler
from .overflow import Overflow


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
        # scales of several engines do not count the steps of one
        self.steps = first if shared is None else LossScaler(LossScaleConfig(False, 1.0), first.checks)
        # the losses that the last update was for
        self._updated: tuple[int, ...] = ()

    def of(self, loss_id: int) -> LossScaler:
        """The scale of a loss.

        Raises:
            AmpUsageError: No such loss.
        """
        if not isinstance(loss_id, int) or not 0 <= loss_id < len(self.scalers):
            raise AmpUsageError(
                f'loss_id={loss_id!r} is not below num_losses={len(self.scalers)}: raise num_losses in the configuration.'
            )
        return self.scalers[loss_id]

    def current(self, loss_id: int) -> Tensor | None:
        """The present scale of a loss, a float32 scalar; a live tensor. None for 1."""
        scaler = self.of(loss_id)
        return None if scaler.is_one else scaler.current_scale

    def pinned(self, loss_id: int) -> Tensor | None:
        """As :meth:`current`, for a backward pass: another engine may step before it is through, and move a shared scale."""
        scale = self.current(loss_id)
        return scale.clone() if scale is not None and self.are_shared else scale

    def to(self, device: torch.device) -> None:
        """Move the state to ``device``."""
        for scaler in (*self.scalers, self.steps):
            scaler.to(device)

    def update(self, overflow: Overflow, device: torch.device, is_counted: bool = False) -> None:
        """After a step, taken or skipped: move the scales of the losses that took part, and count the step.

        Args:
            overflow: The flags of the step; cleared.
            device: Where they are.
            is_counted: Whether :attr:`steps` has counted it already.
        """
        worst = overflow.skipped()
        skipped = torch.zeros((), device=device) if worst is None else worst
        self._updated = tuple(index for index, used in enumerate(overflow.used) if used)
        for index in self._updated:
            # a step is skipped for all losses; a scale moves only for a loss that took part
            scaler = self.scalers[index]
            if scaler.is_dynamic:
                scaler.move(overflow.learned(index).to(scaler.current_scale.device))
        # scales of several engines count only their own steps
        counting = [self.scalers[index] for index in self._updated] if self.are_shared else list(self.scalers)
        if self.are_shared:
            counting.append(self.steps)
        for scaler in counting:
            if scaler.checks and not (is_counted and scaler is self.steps):
                scaler.count_step(skipped.to(scaler.counts.device))
        overflow.clear()

    def describe(self) -> str:
        """The loss scales as text. Syncs."""
        if len(self.scalers) == 1:
            return f'{self.scalers[0].get_scale():g}'
        chosen = (self.are_shared and self._updated) or range(len(self.scalers))
        return ', '.join(f'loss {index}: {self.scalers[index].get_scale():g}' for index in chosen)

    def load(self, states: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[str], list[float]]:
        """Take over the states of saved scales.

        Args:
            states: One for each saved loss.

        Returns:
            The scales that were taken over, a phrase for each thing that was not, and the scales that begin anew.
        """
        dropped: list[str] = []
        scales: list[float] = []
        for index, (scaler, state) in enumerate(zip(self.scalers, states)):
            label = f'loss {index}: ' if len(self.scalers) > 1 else ''
            dropped += [label + note for note in scaler.load_state_dict(state)]
            if scaler.is_dynamic and state.get('dynamic', True) and state:
                scales.append(scaler.get_scale())
        further = [f'{state["scale"]:g}' for state in states[len(self.scalers) :] if state]
        if further:
            dropped.append(f'the loss scales {", ".join(further)} of further losses, for which none is configured')
        new = [scaler.get_scale() for scaler in self.scalers[len(states) :] if scaler.is_dynamic]
        return scales, dropped, new


def new_scalers(policy: Policy) -> list[LossScaler]:
    """One for each loss."""
    config = policy.loss_scale if policy.enabled else dataclasses.replace(policy.loss_scale, enabled=False)
    return [LossScaler(config, policy.skip_nonfinite) for _ in range(policy.num_losses)]
