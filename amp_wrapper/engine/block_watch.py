"""Warns, once, of gradients that are clipped or read inside of an ``amp.scale_loss`` block, where they are not unscaled yet.

Behind a block, those of 16-bit weights that have FP32 masters are clipped without an effect: their gradients are noted, so that
a factor of 0 is not taken for ``zero_grad``.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..torch_internals import watch_clipping

logger = logging.getLogger('amp_wrapper')

_CLIPPED = (
    'had gradients clipped, or their norm taken, inside of a "with amp.scale_loss(...)" block. There they are multiplied by '
    'the loss scale. Clip after the block: torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm).'
)
_READ = (
    'was asked for amp.master_params() inside of a "with amp.scale_loss(...)" block, after the backward pass. FP32 masters '
    'have their gradients when the block has ended: clip and read them after it.'
)


class _OpenBlocks(threading.local):
    """The blocks that are open on a thread. One may end on another thread, or before those that began later: generators."""

    def __init__(self) -> None:
        self.all: list[Callable[[Sequence[Tensor]], None]] = []


class _HasMasters(Protocol):
    """What has 16-bit weights with FP32 masters."""

    def note_clipped(self, gradients: set[int], writes: int) -> None:
        """Gradients are about to be clipped, by id; each is written to so often."""


_open = _OpenBlocks()
_with_masters: WeakSet[_HasMasters] = WeakSet()


def _see(gradients: Sequence[Tensor], writes: int) -> None:
    for block in tuple(_open.all):
        block(gradients)
    clipped = {id(gradient) for gradient in gradients if gradient.dtype is not torch.float32} if writes else set()
    for parts in tuple(_with_masters) if clipped else ():
        parts.note_clipped(clipped, writes)


def note_clips_of(parts: _HasMasters) -> None:
    """From now on, tell what has masters when gradients are clipped that are not FP32.

    Args:
        parts: Those of an engine; not kept alive.
    """
    _watch()
    _with_masters.add(parts)


@functools.cache
def _watch() -> None:
    """Once in a process; it costs a look into an empty list for each clipping outside of blocks."""
    watch_clipping(_see)


class BlockWatch:
    """Watches the blocks of one optimizer.

    Args:
        label: What to call it.
        scales: Whether gradients carry a scale other than 1.
        masters: Whether there are FP32 masters.
    """

    def __init__(self, label: str, scales: bool, masters: bool) -> None:
        self._label, self._scales, self._masters = label, scales, masters
        self._is_on, self._has_run = True, False
        if scales:
            _watch()

    @contextmanager
    def watching(self, loss: Tensor, weights: Callable[[], Sequence[nn.Parameter]]) -> Iterator[None]:
        """Around a block.

        Args:
            loss: What the block gives.
            weights: Gives the model's parameters that the optimizer steps.
        """
        self._has_run = False
        if not self._is_on or not loss.requires_grad:
            yield
            return

        def begin(gradient: Tensor) -> None:
            self._has_run = True

        def see(gradients: Sequence[Tensor]) -> None:
            if not self._has_run or not self._scales or not self._is_on:
                return
            clipped = set(map(id, gradients))
            if any(id(weight.grad) in clipped for weight in weights() if weight.grad is not None):
                self._warn(_CLIPPED)

        hook = loss.register_hook(begin)  # type: ignore[no-untyped-call]
        blocks = _open.all
        blocks.append(see)
        try:
            yield
        finally:
            blocks.remove(see)
            hook.remove()
            self._has_run = False

    def see_masters(self) -> None:
        """Somebody reads what the optimizer steps."""
        if self._has_run and self._masters:
            self._warn(_READ)

    def _warn(self, text: str) -> None:
        if self._is_on:
            self._is_on = False
            logger.warning(f'amp: {self._label} {text}')
