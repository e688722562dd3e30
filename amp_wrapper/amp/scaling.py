"""The body of ``amp.scale_loss``: the loss times its scale, and gradients that are unscaled after the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from ..compiler_internals import eager_block
from ..engine import Engine, receiving, scale
from ..errors import AmpUsageError
from .registry import registry
from .watch import ScaledLoss, Watch


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
    looked_at = [weight for watch, engine in watches if is_scaled and watch.looks for weight in engine.weights()]
    noting = registry.noting_scaled(first, looked_at, bool(watches)) if is_scaled else nullcontext()
    try:
        with receiving(first, loss_id, rest) as came, noting:
            yield result
    finally:
        block.is_open = False
    for watch, engine in watches:
        watch.see_block(engine, engine in came, block.has_run or not is_scaled)
