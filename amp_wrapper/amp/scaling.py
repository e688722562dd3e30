"""The body of ``amp.scale_loss``, and what scripts forget about it: each is warned of once, or refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from ..compiler_internals import eager_block
from ..engine import Engine, StepResult, receiving, scale
from ..engine.engine import StepObserver
from ..engine.unscale import values_of
from ..errors import AmpUsageError
from ..ops import attributes
from .registry import registry

logger = logging.getLogger('amp_wrapper')

_UNSCALED = (
    'steps gradients that no amp.scale_loss block brought: they leave out the loss scale, and small ones are 0 in float16. '
    'Write "with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()".'
)
_UNNAMED = (
    'steps gradients that amp.scale_loss brought for another optimizer: they are in order, but an overflow among them does not '
    'lower the loss scale. Name it too: amp.scale_loss(loss, [optimizer0, optimizer1]).'
)
_NOT_THE_SCALED = (
    'got gradients inside of a "with amp.scale_loss(...) as scaled_loss" block that did not come from scaled_loss: they were '
    'divided by a scale that they do not carry. Call scaled_loss.backward(), not loss.backward().'
)
_CLIPPED = (
    'steps FP32 masters, and after the last "with amp.scale_loss(...)" block only gradients of FP32 weights were written to, '
    'as by clipping model.parameters(): the 16-bit weights have none there. Clip amp.master_params(optimizer).'
)


class ScaledLoss:
    """Hook of a scaled loss: sees its backward pass. Scripts keep old losses, so it holds no engine.

    Attributes:
        is_open: Whether the block goes on.
        has_run: Whether there was a backward pass.
    """

    def __init__(self) -> None:
        self.is_open, self.has_run = True, False

    def __call__(self, gradient: Tensor) -> None:
        if not self.is_open:
            raise AmpUsageError(
                'a backward pass of scaled_loss, or torch.autograd.grad of it, after the end of its "with amp.scale_loss(...) '
                'as scaled_loss" block: gradients of it would keep the loss scale. Call it inside of the block.'
            )
        self.has_run = True


class Watch(StepObserver):
    """Warns about the gradients of one optimizer.

    Args:
        label: What to call it.
        scales: Whether there is a loss scale other than 1.
    """

    def __init__(self, label: str, scales: bool) -> None:
        self._label = label
        #: Whether no block has brought gradients yet: the script takes them by torch.autograd.grad, perhaps.
        self.looks = True
        self._open = {_UNSCALED, _UNNAMED, _NOT_THE_SCALED, _CLIPPED} if scales else {_CLIPPED}
        # whether a block has named the optimizer since its last step
        self._is_named = False
        # a gradient that was there when the last step was over, and its version
        self._stepped: tuple[ReferenceType[Tensor], int] | None = None
        # of FP32 weights and of masters when the last block was over
        self._versions: tuple[bytes, bytes] | None = None

    def see_loss(self, engine: Engine, loss: Tensor, loss_id: int) -> None:
        """A block names the optimizer."""
        self._is_named = True

    def see_block(self, engine: Engine, has_come: bool, has_run: bool) -> None:
        """A block is over.

        Args:
            engine: Of the optimizer.
            has_come: Whether gradients have come.
            has_run: Whether there was a backward pass of the scaled loss.
        """
        self._versions = _versions_of(engine)
        self.looks = self.looks and not has_come
        if has_come and not has_run:
            self._warn(_NOT_THE_SCALED)

    def before_step(self, engine: Engine) -> None:
        """Look at the gradients. Syncs only where no block has added to them, and some are there."""
        before, now = self._versions, _versions_of(engine)
        if self._is_named:
            is_clipped = before is not None and before[0] != now[0] and before[1] == now[1]
            if is_clipped and engine.params.masters and not engine.flags.only_by_others:
                self._warn(_CLIPPED)
        elif engine.flags.only_by_others:
            self._warn(_UNNAMED)
        elif _UNSCALED in self._open and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            found = [grad for grad in attributes.gradients(engine.params.parameters()) if grad is not None]
            # cleared ones are zero
            if found and not self._is_old(found[0]) and _any_nonzero(values_of(engine.params.parameters())):
                self._warn(_UNSCALED)

    def after_step(self, engine: Engine, result: StepResult) -> None:
        """Gradients that are still there need no warning."""
        self._is_named, self._versions = False, None
        grad = next((p.grad for p in engine.params.parameters() if p.grad is not None), None)
        self._stepped = None if grad is None else (ref(grad), grad._version)

    def _is_old(self, grad: Tensor) -> bool:
        return self._stepped is not None and self._stepped[0]() is grad and self._stepped[1] == grad._version

    def _warn(self, text: str) -> None:
        if text in self._open:
            self._open.discard(text)
            logger.warning(f'amp: {self._label} {text}')


def _versions_of(engine: Engine) -> tuple[bytes, bytes]:
    own, masters = engine.params.without_master(), engine.params.masters
    return attributes.versions(attributes.gradients(own)), attributes.versions(attributes.gradients(masters))


def _any_nonzero(values: Sequence[Tensor]) -> bool:
    home = values[0].device
    return bool(torch.stack([value.any().to(home) for value in values]).any())


@eager_block
@contextmanager
def scaled(loss: Tensor, engines: Sequence[Engine], loss_id: int) -> Iterator[Tensor]:
    """Scale a loss; on leaving, unscale the gradients of its backward pass.

    Args:
        loss: Floating tensor of any shape.
        engines: Those of the named optimizers; the scale of the first holds. Without any, the loss is yielded as it is.
        loss_id: Which scale.

    Yields:
        float32 tensor of the loss's shape (float64 for a float64 loss).

    Raises:
        AmpUsageError: No floating tensor, no such loss, or a block inside another one. After an exception inside the block,
            what has come by then is there, unscaled.
    """
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        kind = str(loss.dtype) if isinstance(loss, Tensor) else type(loss).__name__
        raise AmpUsageError(f'loss must be a floating tensor, but is {kind}: hand over what the criterion returned.')
    if not engines:
        yield loss
        return
    if loss.dtype in (torch.float16, torch.bfloat16):
        loss = loss.float()
    first, *rest = engines
    result = scale(first, loss, loss_id, rest)
    if all(engine.is_plain for engine in engines):
        yield result
        return
    watches = [(each, engine) for engine in engines for each in engine.observers if isinstance(each, Watch)]
    is_scaled = result is not loss
    block = ScaledLoss()
    if is_scaled and result.requires_grad:
        result.register_hook(block)  # type: ignore[no-untyped-call]
    registry.refuse_scaled(engines)
    looked_at = [weight for watch, engine in watches if is_scaled and watch.looks for weight in engine.weights()]
    noting = registry.noting_scaled(first, looked_at, bool(watches)) if is_scaled else nullcontext()
    try:
        with receiving(first, loss_id, rest) as came, noting:
            yield result
    finally:
        block.is_open = False
    for watch, engine in watches:
        watch.see_block(engine, engine in came, block.has_run or not is_scaled)
