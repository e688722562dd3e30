"""``amp.scale_loss``, and what scripts forget about it: each is warned of once, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from ..compiler_internals import eager_block
from ..engine import Engine, StepResult, receiving, scale
from ..engine.engine import StepObserver
from ..engine.gradients import values_of
from ..errors import AmpUsageError, logger
from .registry import Optimizers, registry

_UNSCALED = 'steps gradients that no amp.scale_loss block brought: call scaled_loss.backward() in such a block.'
_UNNAMED = 'steps gradients of a block for another optimizer, whose scale sees no overflow of them. Name it too.'
_FOREIGN = 'got gradients in a block that are not of scaled_loss: call scaled_loss.backward(), not loss.backward().'
_CLIPPED = 'steps masters, and only gradients of FP32 weights were clipped: clip amp.master_params(optimizer).'


class Watch(StepObserver):
    """Warns about the gradients of one optimizer.

    Args:
        engine: Its engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._label = type(engine.optimizer).__name__ + (f' ({engine.label})' if engine.label else '')
        #: Whether no block has brought gradients yet: the script takes them by torch.autograd.grad, perhaps.
        self.looks = True
        self._open = {_CLIPPED} if engine.scales.is_one else {_UNSCALED, _UNNAMED, _FOREIGN, _CLIPPED}
        # whether a block has named the optimizer since its last step
        self._is_named = False
        # of the gradients of FP32 weights and of masters when the last block was over
        self._versions: list[list[int | None]] = []

    def see_loss(self, engine: Engine, loss: Tensor, loss_id: int) -> None:
        """Note that a block names the optimizer."""
        self._is_named = True

    def see_block(self, engine: Engine, has_come: bool, has_run: bool) -> None:
        """Note the end of a block.

        Args:
            engine: Of the optimizer.
            has_come: Whether gradients have come.
            has_run: Whether there was a backward pass of the scaled loss.
        """
        self._versions = _versions_of(engine) if engine.params.masters else []
        self.looks = self.looks and not has_come
        if has_come and not has_run:
            self._warn(_FOREIGN)

    def before_step(self, engine: Engine) -> None:
        """Look at the gradients. Syncs only where no block has added to them, and some are there."""
        by_others, before = engine.flags.only_by_others, self._versions
        if self._is_named:
            now = _versions_of(engine) if before and not by_others else before
            if now != before and now[1] == before[1]:
                self._warn(_CLIPPED)
        elif by_others:
            self._warn(_UNNAMED)
        elif _UNSCALED in self._open and not is_capturing():
            # cleared ones are zero
            found = [value.any().to(engine.device) for value in values_of(engine.params.parameters())]
            if found and bool(torch.stack(found).any()):
                self._warn(_UNSCALED)

    def after_step(self, engine: Engine, result: StepResult) -> None:
        """Wait for the next block."""
        self._is_named, self._versions = False, []

    def _warn(self, text: str) -> None:
        if text in self._open:
            self._open.discard(text)
            logger.warning(f'amp: {self._label} {text}')


def _versions_of(engine: Engine) -> list[list[int | None]]:
    both = engine.params.without_master(), engine.params.masters
    return [[None if p.grad is None else p.grad._version for p in each] for each in both]


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured, in which nothing can be read."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@eager_block
@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Optimizers,
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Give the loss times its scale for ``backward()``; on leaving, gradients are unscaled and checked. No host read.

    ```python
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    ```

    Each block adds to what is there, in FP32 where the optimizer has masters. Where a gradient of any of the optimizers is
    non-finite, the next ``step()`` of all of them is left out, and the scale of the loss falls with it.

    Args:
        loss: Floating tensor of any shape, mostly a scalar.
        optimizers: Every optimizer that will step with gradients of this backward pass. Gradients that reach parameters of
            others of the same ``amp.initialize`` are unscaled too.
        loss_id: Which of the ``num_losses`` scales, from 0. That of the first optimizer's ``amp.initialize`` holds.
        model: Not used, as in apex.
        delay_unscale: Accepted, and without effect: gradients are always unscaled on leaving.
        delay_overflow_check: Accepted, and without effect: whether a step is skipped is decided when it is taken, from all
            backward passes since the last one.

    Yields:
        float32 tensor of the loss's shape (float64 for a float64 loss); ``loss`` itself where mixed precision is not enabled.

    Raises:
        AmpConfigError: Something else than optimizers.
        AmpUsageError: No floating tensor; no such loss; an optimizer that was not initialised; a block inside another one; a
            backward pass of the scaled loss after its block. After an exception inside, what has come is there, unscaled.
    """
    engines = registry.engines_of(optimizers)
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        kind = str(loss.dtype) if isinstance(loss, Tensor) else type(loss).__name__
        raise AmpUsageError(f'loss must be a floating tensor, but is {kind}: hand over what the criterion returned.')
    if not engines:
        yield loss
        return
    first, *rest = engines
    result = scale(first, loss, loss_id, rest)
    if all(engine.is_plain for engine in engines):
        yield result
        return
    watches = [(each, engine) for engine in engines for each in engine.observers if isinstance(each, Watch)]
    is_scaled = not first.scales.is_one
    is_open, has_run = True, not is_scaled

    # scripts keep old losses, so it holds no engine
    def note_backward(gradient: Tensor) -> None:
        nonlocal has_run
        if not is_open:
            raise AmpUsageError('a backward pass of scaled_loss after its amp.scale_loss block: call it inside.')
        has_run = True

    if is_scaled and result.requires_grad:
        result.register_hook(note_backward)  # type: ignore[no-untyped-call]
    registry.refuse_scaled(engines)
    looked_at = [weight for watch, engine in watches if is_scaled and watch.looks for weight in engine.weights()]
    noting = registry.noting_scaled(first, looked_at, bool(watches)) if is_scaled else nullcontext()
    try:
        with receiving(first, loss_id, rest) as came, noting:
            yield result
    finally:
        is_open = False
    for watch, engine in watches:
        watch.see_block(engine, engine in came, has_run)
