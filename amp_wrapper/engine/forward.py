"""Prepares a training forward call, and surrounds it with a region and autocast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from ..casting import region, roots
from ..casting.modules import module_device
from ..compiler_internals import eager_block
from ..errors import AmpError, AmpUsageError
from ..policy import said_once
from .parts import EngineParts


def prepare(parts: EngineParts, model: nn.Module) -> None:
    """Before a forward call; see :meth:`AmpEngine.before_forward`."""
    parts.params.synchronise()
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
        # for models whose train_step does not call them
        with region.opened(kind, module_device(model).type, policy.autocast_dtype if policy.enabled else None):
            yield
    except RuntimeError as error:
        _explain(parts, error, model)
        raise
    finally:
        said_once.speaks(before)


def _explain(parts: EngineParts, error: RuntimeError, model: nn.Module) -> None:
    """A module with weights that joined after the cast shows as an error about types."""
    if isinstance(error, AmpError) or parts.casts is None or not parts.casts.casts:
        return
    new = [name for name, p in roots.unwrap(model).named_parameters() if id(p) not in parts.names]
    if new:
        raise AmpUsageError(
            f'the model has parameters that it did not have when it was cast ({", ".join(new[:5])}): they are in '
            f'FP32, without masters, and the optimizer may not know them. Call optim_wrapper.detach(), change the '
            f'model, give its parameters to the optimizer, and attach again.'
        ) from error
