"""The oldest interface of ``apex.amp``: a handle that turns the casts of O1 on for everything, and scales losses.

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
from ..errors import AmpConfigError, AmpUsageError
from ..policy import resolve
from ..policy.options import is_count
from . import session as amp_session
from .scaling import scaled
from .session import Session


class NoOpHandle:
    """What ``amp.init(enabled=False)`` returns: nothing is cast, and nothing is scaled."""

    #: What ``enable_caching`` and ``verbose`` were.
    has_cache = False
    verbose = False

    def is_active(self) -> bool:
        """Whether casts are on and losses are scaled."""
        return False

    def _deactivate(self) -> None:
        """Turn the casts off for good; losses of wrapped optimizers are not scaled any more. May be called again."""

    def _clear_cache(self) -> None:
        """Does nothing: there is no copy of a weight to forget."""

    def _disable_casts(self) -> AbstractContextManager[None]:
        """As ``amp.disable_casts()``."""
        return nullcontext()

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Wrap an optimizer, whose losses are scaled from now on where the handle is active.

        Args:
            optimizer: A torch optimizer over FP32 parameters.
            num_loss: How many backward passes there are between two steps; each has a scale of its own, in their order.

        Raises:
            AmpAttachError: An optimizer that cannot be wrapped, or was initialised already.
            AmpConfigError: ``num_loss`` below 1.
        """
        return OptimWrapper(optimizer, self, num_loss)

    @contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Optimizer) -> Iterator[Tensor]:
        """Around ``backward()``, for an optimizer that was not wrapped; its next step is skipped after an overflow.

        Args:
            loss: Floating tensor.
            optimizer: A torch optimizer over FP32 parameters.

        Yields:
            The loss times its scale; the loss itself where the handle is not active.

        Raises:
            AmpUsageError: After :meth:`wrap_optimizer`: the wrapper scales.
        """
        yield loss


class AmpHandle(NoOpHandle):
    """What :func:`amp_wrapper.amp.init` returns: casts are on, on this thread, from its making to :meth:`_deactivate`.

    Args:
        loss_scale: 'dynamic', a positive number, or a dict in ``GradScaler``'s words; of each optimizer alone.
        enable_caching: Accepted. Weights are cast at each use, so that no copy of one can outlive a change of it.
        verbose: Accepted.
        allow_banned: Whether nothing is said about ``binary_cross_entropy`` of 16-bit probabilities, which runs in FP32.

    Raises:
        AmpConfigError: An impossible loss scale.
    """

    def __init__(
        self,
        loss_scale: float | str | Mapping[str, Any] = 'dynamic',
        enable_caching: bool = True,
        verbose: bool = False,
        allow_banned: bool = False,
    ) -> None:
        # checked before anything is turned on
        self._policy = resolve('O1', loss_scale=loss_scale)
        self.has_cache = enable_caching
        self.verbose = verbose
        self._active = True
        self._wrapped = False
        self._casts = start_casts(allow_banned)

    def is_active(self) -> bool:
        return self._active and not region.is_suspended()

    def _deactivate(self) -> None:
        self._active = False
        self._casts.close()

    def _disable_casts(self) -> AbstractContextManager[None]:
        return region.suspended()

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        if not is_count(num_loss):
            raise AmpConfigError([f'num_loss={num_loss!r} must be a whole number of at least 1.'])
        self._initialize(optimizer, int(num_loss))
        self._wrapped = True
        return super().wrap_optimizer(optimizer, int(num_loss))

    def _initialize(self, optimizer: Optimizer, num_losses: int) -> None:
        amp_session.check_new([optimizer])
        Session(dataclasses.replace(self._policy, num_losses=num_losses), [], [optimizer], tells=False)

    @contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Optimizer) -> Iterator[Tensor]:
        if not self.is_active():
            yield loss
            return
        if self._wrapped:
            raise AmpUsageError(
                'handle.scale_loss() after handle.wrap_optimizer(): write "with optimizer.scale_loss(loss) as scaled_loss:" '
                'with what wrap_optimizer() returned.'
            )
        if amp_session.session_of(optimizer) is None:
            self._initialize(optimizer, 1)
        with scaled(loss, amp_session.engines_of(optimizer), 0) as result:
            yield result


class OptimWrapper:
    """An optimizer of the oldest interface: scales its losses, and passes every other call on to the optimizer.

    Args:
        optimizer: The optimizer.
        handle: Says whether anything is scaled.
        num_loss: Backward passes between two steps.
    """

    def __init__(self, optimizer: Optimizer, handle: NoOpHandle, num_loss: int) -> None:
        self._optimizer = optimizer
        self._handle = handle
        self._num_loss = num_loss
        self._next = 0

    @contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Around ``backward()`` of the next loss.

        Args:
            loss: Floating tensor.

        Yields:
            The loss times its scale; the loss itself where the handle is not active.

        Raises:
            AmpUsageError: More passes than ``num_loss`` since the last step.
        """
        if not self._handle.is_active():
            yield loss
            return
        if self._next >= self._num_loss:
            raise AmpUsageError(
                f'scale_loss() for the {self._next + 1}. time since the last step, with num_loss={self._num_loss}: say '
                f'wrap_optimizer(optimizer, num_loss={self._next + 1}), or add the losses up.'
            )
        with scaled(loss, amp_session.engines_of(self._optimizer), self._next) as result:
            yield result
        self._next += 1

    def step(self, closure: Any = None) -> Any:
        """One step, left out where a gradient is non-finite.

        Args:
            closure: As of the optimizer.
        """
        self._next = 0
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        if name == '_optimizer':
            # while it is unpickled
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return repr(self._optimizer)
