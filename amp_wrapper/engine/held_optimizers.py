"""Refuses direct calls of ``optimizer.step()`` where a wrapper has the optimizer and its gradients are still scaled."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import AmpUsageError
from . import inner_optimizers
from .host_read import mark_harmless


class Holder(Protocol):
    """What steps an optimizer; :class:`amp_wrapper.engine.parts.EngineParts`."""

    #: Whether it calls the optimizer's ``step`` itself now.
    steps: bool

    @property
    def awaits_step(self) -> bool:
        """Whether there are gradients that only its own step unscales."""


_held: WeakKeyDictionary[Optimizer, ReferenceType[Holder]] = WeakKeyDictionary()
_installed = False


def hold(optimizer: Optimizer, holder: Holder) -> None:
    """Refuse calls of ``optimizer.step()`` from now on, while ``holder`` awaits its own step.

    Args:
        optimizer: Those inside of it, which step the same groups, are included.
        holder: Not kept alive.
    """
    global _installed
    for each in (optimizer, *inner_optimizers.inside(optimizer)):
        _held[each] = ref(holder)
    if not _installed:
        _installed = True
        register_optimizer_step_pre_hook(mark_harmless(_check))


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    reference = _held.get(optimizer)
    holder = None if reference is None else reference()
    if holder is not None and not holder.steps and holder.awaits_step:
        raise AmpUsageError(
            f'{type(optimizer).__name__}.step() beside the wrapper that holds the optimizer: the gradients of its backward() '
            f'carry the loss scale, or have not come to the FP32 masters yet. Call optim_wrapper.step() or '
            f'optim_wrapper.update_params(loss). Optimizers whose steps have parts of their own, as first_step() and '
            f'second_step() of SAM, train through amp.initialize(model, optimizer) and amp.scale_loss.'
        )
