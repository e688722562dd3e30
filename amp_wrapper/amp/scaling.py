"""The body of ``amp.scale_loss``: the loss times its scale, and gradients that are unscaled after the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from ..compiler_internals import eager_block
from ..engine import AmpEngine
from ..errors import AmpUsageError
from . import known_models
from . import session as amp_session


@eager_block
@contextmanager
def scaled(
    loss: Tensor, engines: Sequence[AmpEngine], loss_id: int, beyond: Sequence[AmpEngine] = ()
) -> Iterator[Tensor]:
    """Scale a loss; on leaving, unscale the gradients of its backward pass.

    Args:
        loss: Floating tensor of any shape.
        engines: Those of the named optimizers; the scale of the first holds. Without any, the loss is yielded as it is.
        loss_id: Which scale.
        beyond: Engines of other sessions, whose parameters may get gradients too.

    Yields:
        float32 tensor of the loss's shape (float64 for a float64 loss).

    Raises:
        AmpUsageError: No floating tensor, no such loss, or a block inside another one for the same optimizer. After any
            exception inside the block, gradients are what they were before it.
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
    result = first.scale(loss, loss_id, rest)
    if all(engine.is_plain for engine in engines):
        yield result
        return
    watches = [(watch, engine) for engine in engines if (watch := engine.parts.block_watch) is not None]
    with first.receiving(loss_id, rest, beyond) as begins, ExitStack() as watching:
        ran: list[bool] = []
        passes = [(engine.parts.pass_watch, engine) for engine in engines if engine.parts.pass_watch is not None]
        if any(each.warns for each, _ in passes):
            watching.enter_context(known_models.watching(result, amp_session.stepped))
        for watch, engine in watches:
            watching.enter_context(watch.watching(result, engine.weights))

        def begin(gradient: Tensor) -> None:
            # blocks of several optimizers may be open: gradients belong to the loss whose backward() runs
            begins()
            ran.append(True)
            for each, engine in passes:
                each.see_pass(engine.weights(), watching)

        hook = None
        if result.requires_grad and result is not loss:
            hook = result.register_hook(begin)  # type: ignore[no-untyped-call]
        waits = any(engine.parts.gradients.held is not None for engine in engines)
        for each, _ in passes:
            each.blocks += 1
        try:
            yield result
        finally:
            for each, _ in passes:
                each.blocks -= 1
            if hook is not None:
                # scripts keep the scaled loss: its hook would keep the engine, and with it the optimizer
                hook.remove()
        if not ran and result is not loss:
            for each, engine in passes:
                each.see_block(result, () if waits else engine.weights())
