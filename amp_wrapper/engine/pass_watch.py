"""Warns, once for each cause, of gradients that did not come from ``amp.scale_loss`` of the optimizer that steps them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import ExitStack
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

logger = logging.getLogger('amp_wrapper')

_UNSCALED = (
    'steps gradients that no amp.scale_loss block brought: loss.backward() without it leaves out the loss scale, and small '
    'gradients are 0 in float16. Write "with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()".'
)
_UNNAMED = (
    'steps gradients that amp.scale_loss brought for another optimizer: they are in order, but an overflow among them does not '
    'lower the loss scale. Name it too: amp.scale_loss(loss, [optimizer0, optimizer1]).'
)
_NOT_THE_SCALED = (
    'got gradients inside of a "with amp.scale_loss(...) as scaled_loss" block, while the backward pass of scaled_loss itself '
    'did not run: they were divided by a scale that they do not carry. Call scaled_loss.backward(), not loss.backward().'
)
_LATE = (
    'saw a backward pass of scaled_loss after the end of its "with amp.scale_loss(...) as scaled_loss" block: gradients of it '
    'carry the loss scale. Call scaled_loss.backward() inside of the block.'
)
_TAKEN = (
    'steps gradients that torch.autograd.grad took of scaled_loss, and that were put into .grad after the block: they carry '
    'the loss scale. Put them there inside of the block, or divide them by amp.loss_scale(optimizer).'
)
# gradients of scaled losses that no block unscales, and their versions when they came
_scaled: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()


def note_scaled(gradient: Tensor) -> None:
    """Note that a gradient carries a loss scale, until somebody writes to it."""
    _scaled[gradient] = gradient._version


def is_scaled(gradient: Tensor | None) -> bool:
    """Whether a gradient was noted, and nobody has written to it."""
    return bool(_scaled) and gradient is not None and _scaled.get(gradient) == gradient._version


class PassWatch:
    """Warns about the gradients of one optimizer.

    Args:
        label: What to call it.
        warns: Whether there are warnings at all.
    """

    def __init__(self, label: str, warns: bool) -> None:
        self._label = label
        #: Whether there are warnings at all.
        self.warns = warns
        # whether no block has left gradients in .grad yet: the script takes them by torch.autograd.grad, perhaps
        self._looks = warns
        self._open = {_UNSCALED, _UNNAMED, _NOT_THE_SCALED, _LATE, _TAKEN} if warns else set()
        # a gradient that was there when the last step was over, and its version
        self._stepped: tuple[ReferenceType[Tensor], int] | None = None
        self._cleared = False
        #: How many blocks of the optimizer are open: what runs in one of them is unscaled at its end.
        self.blocks = 0

    def note_clear(self, named: bool) -> None:
        """Note that gradients are cleared: a script may have kept those of a block, to write back what it computes of them
        (PCGrad).

        Args:
            named: Whether a block that named the optimizer has added to them.
        """
        self._cleared = self._cleared or named

    def note_step(self, parameters: Iterable[Tensor]) -> None:
        """Note that a step is over: gradients that are still there need no warning."""
        self._cleared = False
        grad = next((p.grad for p in parameters if p.grad is not None), None)
        self._stepped = None if grad is None else (ref(grad), grad._version)

    def see_step(self, parameters: Sequence[Tensor], named: bool, by_others: bool) -> None:
        """Check the gradients before a step. Syncs only where no block has added to them, and some are there.

        Args:
            parameters: What the optimizer steps; their gradients are unscaled.
            named: Whether a block that named the optimizer has added gradients since the last step.
            by_others: Whether a block that did not name it has.
        """
        if named or self._cleared or not self._open:
            return
        if by_others:
            self._warn(_UNNAMED)
            return
        if _UNSCALED not in self._open or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return
        found = [p.grad for p in parameters if p.grad is not None]
        if not found or self._is_old(found[0]):
            return
        # cleared ones are zero
        home = found[0].device
        values = [grad.coalesce()._values() if grad.is_sparse else grad for grad in found]
        if torch.stack([value.any().to(home) for value in values]).any():
            self._warn(_UNSCALED)

    def _is_old(self, grad: Tensor) -> bool:
        return self._stepped is not None and self._stepped[0]() is grad and self._stepped[1] == grad._version

    def see_block(self, loss: Tensor, weights: Iterable[Tensor]) -> None:
        """Check the gradients at the end of a block whose scaled loss had no backward pass, and watch for a late one.

        Args:
            loss: The scaled loss. Its hook keeps this object, which knows no engine.
            weights: The model's weights that the optimizer steps; gradients from before the block are not in them.
        """
        if _NOT_THE_SCALED in self._open and any(weight.grad is not None for weight in weights):
            self._warn(_NOT_THE_SCALED)
        if loss.requires_grad:
            loss.register_hook(self._see_late)  # type: ignore[no-untyped-call]

    def see_pass(self, weights: Sequence[Tensor], block: ExitStack) -> None:
        """Look at the first backward passes of scaled losses as they begin: what torch.autograd.grad gives stays scaled.

        Args:
            weights: The model's weights that the optimizer steps.
            block: Closed at the end of the block.
        """
        for weight in weights if self._looks else ():
            if weight.requires_grad:
                block.callback(self._see_end, weight)
                block.callback(weight.register_hook(note_scaled).remove)  # type: ignore[no-untyped-call]

    def _see_end(self, weight: Tensor) -> None:
        """A block is over, which unscales what lies in ``.grad``."""
        if weight.grad is not None:
            _scaled.pop(weight.grad, None)
            self._looks = False

    def see_taken(self, weights: Iterable[Tensor]) -> None:
        """Check the gradients of weights before a step."""
        if any(is_scaled(weight.grad) for weight in weights):
            self._warn(_TAKEN)

    def _see_late(self, gradient: Tensor) -> None:
        """A scaled loss has a backward pass although its block is over."""
        if not self.blocks:
            self._warn(_LATE)

    def _warn(self, text: str) -> None:
        if text in self._open:
            self._open.discard(text)
            logger.warning(f'amp: {self._label} {text}')
