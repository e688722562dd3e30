"""What one optimizer step did, on the device until somebody asks."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

#: Where the numbers of a decision stand (:func:`amp_wrapper.ops.step_prologue`).
SKIP, GRAD_NORM, LOSS_SCALE, SKIPS, STREAK = 0, 4, 5, 6, 7
#: The same for what :attr:`StepResult.shows`.
COLUMNS = {'grad_norm': GRAD_NORM, 'loss_scale': LOSS_SCALE, 'skips': SKIPS}


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        skipped: Whether the step was left out because a gradient was non-finite; None where the host has not asked:
            :meth:`was_skipped` does.
        decision: float32 tensor of eight on the device, of :func:`amp_wrapper.ops.step_prologue`; None where nothing was
            scaled, checked or clipped.
        shows: Which of ``grad_norm``, ``loss_scale`` and ``skips`` there are.
    """

    skipped: bool | None
    decision: Tensor | None = None
    shows: tuple[str, ...] = ()

    def was_skipped(self) -> bool:
        """Whether the step was left out. Syncs, where ``skipped`` is None."""
        if self.skipped is not None:
            return self.skipped
        return self.decision is not None and bool(self.decision[SKIP] > 0)

    def _number(self, name: str) -> Tensor | None:
        return None if self.decision is None or name not in self.shows else self.decision[COLUMNS[name]]

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm before clipping, a float32 scalar on the device; None without norm clipping and for a step that is known to
        be skipped, NaN for one that is not known to be."""
        return None if self.skipped else self._number('grad_norm')

    @property
    def loss_scale(self) -> Tensor | None:
        """The scale after the step, a float32 scalar on the device; None where it does not move."""
        return self._number('loss_scale')

    @property
    def skips(self) -> Tensor | None:
        """Steps skipped so far, a float32 scalar on the device; None where nothing is checked."""
        return self._number('skips')


def decision_of(skip: Tensor | None, norm: Tensor | None, scale: Tensor | None, counts: Tensor | None) -> Tensor:
    """The decision of a step that was put together from single parts, as the prologue would have told it.

    Args:
        skip: float32 scalar, or None for a step that is never skipped.
        norm: Scalar of any floating type, or None.
        scale: float32 scalar after the step, or None.
        counts: int64 (3,) after the step, or None.

    Returns:
        float32 (8,) on the device of the first that is there.
    """
    first = next(value for value in (skip, norm, scale, counts) if value is not None)
    one = torch.ones((), dtype=torch.float32, device=first.device)
    nothing = torch.full_like(one, torch.nan)
    zero = torch.zeros_like(one)
    shown = nothing if norm is None else norm.detach().to(one)
    if skip is not None:
        shown = torch.where(skip > 0, nothing, shown)
    return torch.stack(
        [
            zero if skip is None else skip,
            one,
            one,
            torch.full_like(one, torch.inf),
            shown,
            nothing if scale is None else scale,
            zero if counts is None else counts[1].float(),
            zero if counts is None else counts[2].float(),
        ]
    )


__all__ = ['COLUMNS', 'GRAD_NORM', 'LOSS_SCALE', 'SKIP', 'SKIPS', 'STREAK', 'StepResult', 'decision_of']
