"""Buffers of averages that are updated while gradients accumulate: a skipped step gives them back, too.

An average that is updated after each iteration, as mmengine's EMAHook does it, takes up what a batch with NaN has left in the
model's buffers before the step comes that is skipped. The model's buffers return then; a mean that was NaN once stays NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .buffer_copies import is_tracked, selected


class AveragedBuffers:
    """Copies of an average's buffers, from before its first update in a window of accumulated batches."""

    def __init__(self) -> None:
        # by id: the buffer and its copy
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def hold(self, mean: Tensor) -> None:
        """Copy a buffer that is about to be averaged, unless an earlier update of the window has copied it.

        Args:
            mean: Of any type, on any device.
        """
        if id(mean) not in self._held and is_tracked(mean):
            self._held[id(mean)] = (mean, mean.detach().clone())

    @torch.no_grad()
    def release(self, flag: Tensor | None) -> None:
        """The window ends: where ``flag`` is up, the buffers become what they were. No host read.

        Args:
            flag: float32 scalar on any device; None for a step that is taken.
        """
        held, self._held = self._held, {}
        if flag is None:
            return
        for mean, copy in held.values():
            if mean.shape == copy.shape and mean.dtype == copy.dtype and mean.device == copy.device:
                mean.data.copy_(selected(copy, mean, flag))


__all__ = ['AveragedBuffers']
