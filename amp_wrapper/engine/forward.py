"""Prepares a training forward call, and surrounds it with a region and autocast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

from torch import nn

from ..casting import region
from ..casting.modules import module_device
from ..compiler_internals import eager_block
from ..errors import AmpUsageError
from ..policy import said_once
from .parts import EngineParts


def prepare(parts: EngineParts, model: nn.Module) -> None:
    """Before a forward call; see :meth:`AmpEngine.before_forward`."""
    parts.params.synchronise()
    # parts that are called inside of the context are not told of. DDP broadcasts buffers in its call, which comes first
    for snapshot in () if parts.ddp.ddps else parts.snapshots:
        snapshot.begin()
    for other in parts.others:
        if isinstance(other, EngineParts):
            other.params.synchronise()
    if parts.ddp.joins() and not parts.is_plain:
        raise AmpUsageError(
            'DistributedDataParallel.join(): ranks that take more steps than others would move their loss scale and '
            'masters alone. Give every rank the same number of iterations, or use O0.'
        )

    def waits(ids: Iterable[int]) -> bool:
        chosen = set(ids)
        return parts.is_accumulating and parts.has_gradient(w for w in parts.weights() if id(w) in chosen)

    parts.ddp.follow(model, waits)


@eager_block
@contextmanager
def surround(parts: EngineParts, model: nn.Module) -> Iterator[None]:
    """Around a forward call; see :meth:`AmpEngine.forward_context`."""
    policy = parts.policy
    kind = region.AS_AROUND
    if policy.runs_16_bit:
        kind = region.OPERANDS if policy.casts_model else region.REGISTRY
    before = said_once.speaks(policy.verbosity >= 1)
    try:
        dtype = policy.autocast_dtype if policy.enabled else None
        casts = nullcontext() if dtype is None else region.autocast(module_device(model).type, dtype)
        # for models whose train_step does not call them
        with region.spare(kind), region.operands(kind), casts:
            yield
    finally:
        said_once.speaks(before)
