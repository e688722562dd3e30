"""Prepares a training forward call, and surrounds it with a region and autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from ..casting import region
from ..casting.modules import module_device
from ..compiler_internals import eager_block, untraced
from ..errors import AmpUsageError
from ..policy import said_once
from .engine import Engine


@untraced
def before_forward(engine: Engine, model: nn.Module) -> None:
    """Let weights follow masters that somebody wrote to, and the other way round, and DDP the parameters that train.

    Every rank calls this, before it enters ``no_sync``.

    Args:
        engine: Of the optimizer that will step.
        model: What is about to run.

    Raises:
        AmpUsageError: A change of ``requires_grad`` that DDP cannot follow, or ranks with another number of steps; a weight
            and its master that were both written to.
    """
    if not engine.policy.enabled:
        return
    for each in (engine, *engine.others):
        each.params.synchronise()
    # parts that are called inside of the context are not told of. DDP broadcasts buffers in its call, which comes first
    for snapshot in () if engine.ddp.ddps else engine.snapshots:
        snapshot.begin()
    if engine.ddp.joins() and not engine.is_plain:
        raise AmpUsageError(
            'DistributedDataParallel.join(): ranks that take more steps than others would move their loss scale and '
            'masters alone. Give every rank the same number of iterations, or use O0.'
        )
    engine.ddp.follow(model, engine.has_waiting)


@eager_block
@contextmanager
def forward_context(engine: Engine, model: nn.Module) -> Iterator[None]:
    """What surrounds a training forward call: a region, and autocast at O1 and O4.

    Args:
        engine: Of the optimizer that will step.
        model: Says on which device autocast works.
    """
    policy = engine.policy
    kind = region.AS_AROUND
    if policy.runs_16_bit:
        kind = region.OPERANDS if policy.casts_model else region.REGISTRY
    before = said_once.speaks(policy.verbosity >= 1)
    try:
        dtype = policy.autocast_dtype if policy.enabled else None
        casts: AbstractContextManager[Any] = nullcontext()
        if dtype is not None:
            casts = region.autocast(module_device(model).type, dtype)
        # for models whose train_step does not call them
        with region.spare(kind), region.operands(kind), casts:
            yield
    finally:
        said_once.speaks(before)
