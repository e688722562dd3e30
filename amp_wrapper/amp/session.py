"""The session that one call of ``amp.initialize`` makes, or ``amp.init`` for an optimizer: its ``step`` calls an engine.

Nothing that outlives a step may hold an engine; hooks in the graph of a loss would, since scripts keep old losses.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..casting import hugging_face, region
from ..casting.calls import start_casts
from ..casting.sharding import Sharding
from ..engine import Engine, attach_together, new_scalers, take_step
from ..engine.attach import join_models
from ..engine.flags import LateRead
from ..engine.optimizers import check_owners, inside, put_in_front
from ..errors import AmpUsageError
from ..policy import Policy, resolve
from ..torch_internals import note_step
from .registry import registry
from .scaling import Watch, is_capturing, scale_loss


class Session:
    """Models that were cast together, and one engine for each of their optimizers, which share the loss scales.

    Args:
        policy: The configuration; enabled.
        models: Not wrapped. Without any, the optimizers step models of earlier sessions, or parameters that nobody casts.
        optimizers: Not in any session.
        sharding: How the models are sharded first; None for as they are.

    Raises:
        AmpAttachError: A model or optimizer that cannot be taken. Nothing has been changed.
    """

    def __init__(
        self, policy: Policy, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], sharding: Sharding | None
    ) -> None:
        check_owners(optimizers, models, registry.stepped(), registry.known(), policy.casts_model)
        self.policy = policy
        self.scalers = new_scalers(policy)
        self.engines = [Engine(policy, ref(optimizer), self.scalers) for optimizer in optimizers]
        # infos of steps that nobody waited for
        self._unread: list[tuple[Engine, LateRead]] = []
        #: The thread that used this session last.
        self.thread = threading.get_ident()
        # before masters stand in the place of their weights
        theirs = list(registry.models_of(optimizers)) if not models else []
        self.casts = attach_together(self.engines, models, policy, sharding)
        hugging_face.watch()
        held = set(map(id, (*registry.stepped(), *self.weights())))
        #: Trainable parameters of the models that no optimizer has yet.
        self.unheld = [p for model in models for p in model.parameters() if p.requires_grad and id(p) not in held]
        for index, (optimizer, engine) in enumerate(zip(optimizers, self.engines)):
            join_models(engine, theirs)
            engine.label = f'optimizer {index}' if len(optimizers) > 1 else ''
            if policy.verbosity >= 1 and not engine.is_plain:
                engine.observers.append(Watch(engine))
            # the methods of this one object lead through the engine, and the object holds the session
            inner = inside(optimizer)
            for each in (*inner, optimizer):
                put_in_front(each, 'step', functools.partial(self._step, engine, each is optimizer and bool(inner)))
            put_in_front(optimizer, 'zero_grad', functools.partial(self._zero_grad, engine))
        registry.add(optimizers, self, models)

    def engine(self, optimizer: Optimizer) -> Engine:
        """Find the engine of one of the optimizers."""
        return next(engine for engine in self.engines if engine.optimizer is optimizer)

    def weights(self) -> list[Tensor]:
        """List the weights that the optimizers step."""
        return [weight for engine in self.engines for weight in engine.weights()]

    def _zero_grad(self, engine: Engine, own: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        words = {'set_to_none': args[0]} if args else {}
        # a second one without a name is for the method to refuse
        engine.zero_grad(functools.partial(own, *args[1:]), **words, **kwargs)

    def _step(self, engine: Engine, holds: bool, own: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Take a step: the optimizer's own ``step``, or that of one inside of it, was called.

        Args:
            engine: Of the outer one.
            holds: Whether there are some inside.
            own: Its own method.
            *args: Of the call.
            **kwargs: Of the call.
        """
        # whatever else optimizers of third parties take there
        first = args[0] if args else kwargs.get('closure')
        closure = first if callable(first) else None
        runs_before = closure is not None and not engine.is_plain
        if engine.in_own_step or (runs_before and holds):
            # an outer one may want the closure in the middle, at other weights: the inner one's step is the one that counts
            return own(*args, **kwargs)
        optimizer = engine.optimizer
        assert optimizer is not None
        result: list[Any] = []
        if closure is not None and runs_before:
            # what it brings is scaled, or has masters: it runs before the step, as all optimizers but LBFGS have it
            with torch.enable_grad():
                result.append(closure())
            args, kwargs = ((None, *args[1:]), kwargs) if args else ((), {**kwargs, 'closure': None})
        registry.refuse_scaled([engine])
        # a skipped step is a step to schedulers, which would warn otherwise
        note_step(optimizer)

        def bare_step(**_: Any) -> None:
            # every argument as it came: the engine has to know of closures alone
            try:
                result.append(own(*args, **kwargs))
            except Exception as error:
                if runs_before and (isinstance(error, (AssertionError, TypeError)) or 'closure' in str(error).lower()):
                    raise AmpUsageError(
                        f'{type(optimizer).__name__}.step(closure) calls the closure in the middle of a step, where no scale '
                        f'follows: write its parts out, each after an amp.scale_loss block, or keep to O0.'
                    ) from error
                raise

        # optimizers compute in FP32: what is cast for models is not cast here
        casts = nullcontext() if self.policy.autocast_dtype is None else region.suspended()
        with casts:
            outcome = take_step(engine, None, bare_step, closure=None if runs_before else closure)
        if outcome.skipped is None and outcome.info is not None and not is_capturing():
            self._unread.append((engine, LateRead(outcome.info)))
            self.read(wait=False)
        return result[0] if result else None

    def read(self, wait: bool = True) -> None:
        """Report the steps that were skipped up to now, as far as the host knows of them.

        Args:
            wait: Whether to wait for those that it does not know of yet. Syncs.
        """
        while self._unread and (wait or self._unread[0][1].is_there):
            engine, info = self._unread.pop(0)
            engine.review([info.wait()])


class AmpHandle:
    """``amp.init()``, apex's oldest interface: casts as at O1 are on, on this thread, for everything, until ``_deactivate()``.

    ```python
    amp_handle = amp.init()
    optimizer = amp_handle.wrap_optimizer(optimizer)
    with optimizer.scale_loss(loss) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    ```

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
        return self.scale_loss(loss, held, sum(registry.engines_of(held)[0].flags.used) if self.is_active() else 0)

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
        return scale_loss(loss, optimizer, loss_id)


#: As a function of apex is named.
init = AmpHandle
