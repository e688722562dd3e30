"""Warns, once, of gradients that are clipped or read inside of an ``amp.scale_loss`` block, where they are not unscaled yet."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from ..torch_internals import clipped_gradients

logger = logging.getLogger('amp_wrapper')

#: How many blocks are watched: what a loop does in its block, it does in the first ones.
BLOCKS = 64
_CLIPPED = (
    'had gradients clipped inside of a "with amp.scale_loss(...)" block. There they are multiplied by the loss scale, and so '
    'is their norm. Clip after the block: torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm).'
)
_READ = (
    'was asked for amp.master_params() inside of a "with amp.scale_loss(...)" block, after the backward pass. FP32 masters '
    'have their gradients when the block has ended: clip and read them after it.'
)


class BlockWatch:
    """Watches the blocks of one optimizer.

    Args:
        label: What to call it.
        scales: Whether gradients carry a scale other than 1.
        masters: Whether there are FP32 masters.
    """

    def __init__(self, label: str, scales: bool, masters: bool) -> None:
        self._label, self._scales, self._masters = label, scales, masters
        self._left = BLOCKS
        self._has_run = False

    @contextmanager
    def watching(self, loss: Tensor, weights: Sequence[nn.Parameter]) -> Iterator[None]:
        """Around a block.

        Args:
            loss: What the block gives.
            weights: The model's parameters that the optimizer steps.
        """
        self._has_run = False
        if not self._left or not loss.requires_grad:
            yield
            return
        self._left -= 1

        def begin(gradient: Tensor) -> None:
            self._has_run = True

        def see(gradients: Sequence[Tensor]) -> None:
            own = {id(weight.grad) for weight in weights if weight.grad is not None}
            if self._has_run and self._scales and any(id(gradient) in own for gradient in gradients):
                self._warn(_CLIPPED)

        hook = loss.register_hook(begin)  # type: ignore[no-untyped-call]
        try:
            with clipped_gradients(see):
                yield
        finally:
            hook.remove()
            self._has_run = False

    def see_masters(self) -> None:
        """Somebody reads what the optimizer steps."""
        if self._has_run and self._masters and self._left:
            self._warn(_READ)

    def _warn(self, text: str) -> None:
        if self._left:
            self._left = 0
            logger.warning(f'amp: {self._label} {text}')
