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

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

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

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Wrap an optimizer, whose losses are scaled from now on where the handle is active.

        Args:
            optimizer: A torch optimizer over FP32 parameters.
            num_loss: How many backward passes there are between two steps; each has a scale of its own, in their order.

        Raises:
            AmpAttachError: An optimizer that cannot be wrapped, or was initialised already.
            AmpConfigError: ``num_loss`` below 1.
        """
        policy = resolve('O1', loss_scale=self._loss_scale, num_losses=num_loss)
        if self._casts is not None:
            registry.check_new([optimizer])
            Session(policy, [], [optimizer], tells=False)
        return OptimWrapper(optimizer, self)

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


@dataclasses.dataclass(eq=False)
class OptimWrapper:
    """An optimizer of the oldest interface: scales its losses, and passes every other call on to the optimizer."""

    _optimizer: Optimizer
    _handle: AmpHandle
    _next: int = 0

    @contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Scale the next loss around its ``backward()``.

        Args:
            loss: Floating tensor.

        Yields:
            The loss times its scale; the loss itself where the handle is not active.

        Raises:
            AmpUsageError: More losses than ``num_loss`` since the last step.
        """
        with self._handle.scale_loss(loss, self._optimizer, self._next) as result:
            yield result
        self._next += self._handle.is_active()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Take one step, as the optimizer does; it is left out where a gradient is non-finite."""
        self._next = 0
        return self._optimizer.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # a copy has no optimizer while it is made
        return getattr(vars(self).get('_optimizer'), name)


#: As a function of apex is named.
init = AmpHandle
