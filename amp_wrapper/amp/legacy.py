"""``amp.init``, apex's oldest interface: a handle that turns the casts of O1 on for everything, and scales losses.

```python
amp_handle = amp.init()
optimizer = amp_handle.wrap_optimizer(optimizer)
with optimizer.scale_loss(loss) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
```
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor
from torch.optim import Optimizer

from ..casting import region
from ..casting.calls import start_casts
from ..policy import resolve
from .registry import registry
from .scaling import scaled
from .session import Session


class AmpHandle:
    """The handle that ``amp.init()`` gives: casts as at O1 are on, on this thread, for everything, until ``_deactivate()``.

    New scripts use :func:`amp_wrapper.amp.initialize`, whose casts end with the forward pass of the model.

    Args:
        enabled: False casts and scales nothing.
        loss_scale: 'dynamic', a positive number, or a dict in ``GradScaler``'s words; of each optimizer alone.
        enable_caching: Accepted. Weights are cast at each use, so that no copy of one can outlive a change of it.
        verbose: Accepted.
        allow_banned: Whether nothing is said about ``binary_cross_entropy`` of 16-bit probabilities, which runs in FP32.

    Raises:
        AmpConfigError: An impossible loss scale.
        AmpUsageError: In a block of ``disable_casts()`` or of autocast, or while another handle is active.
    """

    def __init__(
        self,
        enabled: bool = True,
        loss_scale: float | str | Mapping[str, Any] = 'dynamic',
        enable_caching: bool = True,
        verbose: bool = False,
        allow_banned: bool = False,
    ) -> None:
        # checked before anything is turned on
        resolve('O1', loss_scale=loss_scale)
        self._loss_scale = loss_scale
        self._casts = start_casts(allow_banned) if enabled else None

    def is_active(self) -> bool:
        """Return whether casts are on and losses are scaled."""
        return self._casts is not None and not region.is_suspended()

    def _deactivate(self) -> None:
        """Turn the casts off for good; losses of wrapped optimizers are not scaled any more. May be called again."""
        if self._casts is not None:
            self._casts.close()
        self._casts = None

    #: As :func:`amp_wrapper.amp.disable_casts`.
    _disable_casts = staticmethod(region.suspended)

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> Any:
        """Give an optimizer a method ``scale_loss(loss)``, which scales its next loss where the handle is active.

        Args:
            optimizer: A torch optimizer over FP32 parameters.
            num_loss: How many backward passes there are between two steps; each has a scale of its own, in their order.

        Returns:
            The optimizer. Its steps are left out where a gradient is non-finite.

        Raises:
            AmpAttachError: An optimizer that cannot be wrapped, or was initialised already.
            AmpConfigError: ``num_loss`` below 1.
        """
        policy = resolve('O1', loss_scale=self._loss_scale, num_losses=num_loss)
        if self._casts is not None:
            registry.check_new([optimizer])
            # scripts of that time step other gradients as well, unscaled
            Session(policy, [], [optimizer], None).engines[0].observers.clear()
        # it lies in the optimizer, and keeps it not alive
        vars(optimizer)['scale_loss'] = functools.partial(self._scale_next, ref(optimizer))
        return optimizer

    def _scale_next(self, optimizer: ReferenceType[Optimizer], loss: Tensor) -> AbstractContextManager[Tensor]:
        held: Any = optimizer()
        session = registry.session_of(held)
        return self.scale_loss(loss, held, 0 if session is None else sum(session.engine(held).flags.used))

    def scale_loss(self, loss: Tensor, optimizer: Optimizer, loss_id: int = 0) -> AbstractContextManager[Tensor]:
        """Scale a loss around ``backward()``; the optimizer, which need not be wrapped, skips its next step after an overflow.

        Args:
            loss: Floating tensor.
            optimizer: A torch optimizer over FP32 parameters.
            loss_id: Which of the ``num_loss`` scales, from 0.

        Returns:
            A block that has the loss times its scale; the loss itself where the handle is not active.
        """
        if not self.is_active():
            return nullcontext(loss)
        if registry.session_of(optimizer) is None:
            self.wrap_optimizer(optimizer)
        return scaled(loss, registry.engines_of(optimizer), loss_id)


#: As a function of apex is named.
init = AmpHandle
