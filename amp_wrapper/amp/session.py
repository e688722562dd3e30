"""The session that one call of ``amp.initialize`` makes: one engine for each optimizer, whose ``step`` calls the engine.

The tables below, and those of ``known_models``, hold weak references: a session lives as long as one of its optimizers.
Nothing that outlives a step may hold an engine; hooks in the graph of a loss would, since scripts keep old losses.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..casting import hugging_face, region
from ..casting.sharding import Sharding
from ..engine import Engine, attach_together, new_scalers, own_methods, take_step
from ..engine.attach import join_models
from ..engine.host_read import LateRead
from ..engine.optimizers import check_owners
from ..engine.own_methods import put_in_front
from ..errors import AmpAttachError, AmpUsageError, short
from ..policy.levels import Policy
from ..policy.nested import parameters_of
from ..torch_internals import note_step
from . import functions, known_models
from .watch import Watch

_sessions: list[ReferenceType[Session]] = []
_session_of: WeakKeyDictionary[Optimizer, ReferenceType[Session]] = WeakKeyDictionary()
#: Optimizers that were initialised with ``enabled=False``.
_disabled: WeakSet[Optimizer] = WeakSet()
_NEVER = (
    'no optimizer has been initialised: call "model, optimizer = amp.initialize(model, optimizer, opt_level=...)" first, once, '
    'before training.'
)
_TWO_PARTS = (
    '{name}.step(closure) calls the closure itself, in the middle of a step, where loss scaling and skipped steps cannot '
    'follow. Write the parts of the step out, each after an amp.scale_loss block of its own, or train at '
    "opt_level='O0' or with enabled=False. One that holds the optimizer which steps for it as an attribute, as SAM does, works."
)


class Session:
    """Models that were cast together, and one engine for each of their optimizers, which share the loss scales.

    Args:
        policy: The configuration; enabled.
        models: Not wrapped. Without any, the optimizers step models of earlier sessions, or parameters that nobody casts.
        optimizers: Not in any session.
        tells: Whether to warn of gradients that did not come from scaled losses.
        sharding: How the models are sharded first; None for as they are.

    Raises:
        AmpAttachError: A model or optimizer that cannot be taken. Nothing has been changed.
    """

    def __init__(
        self,
        policy: Policy,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        tells: bool = True,
        sharding: Sharding | None = None,
    ) -> None:
        known_models.check_no_masters(optimizers)
        check_owners(optimizers, models, stepped(), known_models.is_known, policy.casts_model)
        self.policy = policy
        self.scalers = new_scalers(policy)
        self.engines = [Engine(policy, ref(optimizer), self.scalers) for optimizer in optimizers]
        self._unread: dict[int, list[LateRead]] = {}
        #: The thread that used this session last.
        self.thread = threading.get_ident()
        if len(optimizers) > 1:
            for index, engine in enumerate(self.engines):
                engine.label = f'optimizer {index}'
        # before masters stand in the place of their weights
        theirs = known_models.models_of(optimizers) if not models else []
        self.casts = attach_together(self.engines, models, policy, sharding)
        for engine in self.engines:
            join_models(engine, theirs)
            if tells and policy.verbosity >= 1 and not engine.is_plain:
                name = type(engine.optimizer).__name__ + (f' ({engine.label})' if engine.label else '')
                engine.observers.append(Watch(name, not engine.scales.is_one))
        hugging_face.watch()
        known_models.remember(models, policy)
        known_models.check_others(_session_of.__contains__, stepped)
        if policy.autocast_dtype is not None:
            for model in models:
                functions.cast_models.add(model)
        held = set(map(id, stepped())) | {id(weight) for engine in self.engines for weight in engine.weights()}
        #: Trainable parameters of the models that no optimizer has yet.
        self.unheld = [p for model in models for p in model.parameters() if p.requires_grad and id(p) not in held]
        for optimizer, engine in zip(optimizers, self.engines):
            self._stand_in_front(optimizer, engine)
            _session_of[optimizer] = ref(self)
        if optimizers:
            _sessions[:] = [ref(session) for session in (*_alive(), self)]

    def __repr__(self) -> str:
        return '\n'.join(repr(engine) for engine in self.engines)

    def engine(self, optimizer: Optimizer) -> Engine:
        """The engine of one of the optimizers."""
        return next(engine for engine in self.engines if engine.optimizer is optimizer)

    def _stand_in_front(self, optimizer: Optimizer, engine: Engine) -> None:
        """``step`` and ``zero_grad`` of this one object lead through the engine, and the object holds the session."""
        inner = own_methods.inside(optimizer)
        for each in inner:
            put_in_front(each, 'step', functools.partial(self._step, engine, False))
        put_in_front(optimizer, 'step', functools.partial(self._step, engine, bool(inner)))
        put_in_front(optimizer, 'zero_grad', functools.partial(self._zero_grad, engine))

    def _zero_grad(
        self, engine: Engine, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.thread = threading.get_ident()
        engine.zero_grad(own, **_named('set_to_none', args, kwargs))

    def _step(
        self, engine: Engine, holds: bool, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of ``step`` of an optimizer, or of one inside of it.

        Args:
            engine: Of the outer one.
            holds: Whether there are some inside.
            own: Its own method.
            args: Of the call.
            kwargs: Of the call.
        """
        self.thread = threading.get_ident()
        # whatever else optimizers of third parties take there
        closure: Any = args[0] if args else kwargs.get('closure')
        runs_before = callable(closure) and not engine.is_plain
        if engine.in_own_step or (runs_before and holds):
            # an outer one may want the closure in the middle, at other weights: the inner one's step is the one that counts
            return own(*args, **kwargs)
        optimizer = engine.optimizer
        assert optimizer is not None
        result: list[Any] = []
        if runs_before:
            # what it brings is scaled, or has masters: it runs before the step, as all optimizers but LBFGS have it
            with torch.enable_grad():
                result.append(closure())
            args, kwargs = ((None, *args[1:]), kwargs) if args else ((), {**kwargs, 'closure': None})
        known_models.refuse_scaled([engine])
        # a skipped step is a step to schedulers, which would warn otherwise
        note_step(optimizer)

        def bare_step(**_: Any) -> None:
            # every argument as it came: the engine has to know of closures alone
            try:
                result.append(own(*args, **kwargs))
            except Exception as error:
                if runs_before and (isinstance(error, (AssertionError, TypeError)) or 'closure' in str(error).lower()):
                    raise AmpUsageError(_TWO_PARTS.format(name=type(optimizer).__name__)) from error
                raise

        # optimizers compute in FP32: what is cast for models is not cast here
        casts = nullcontext() if self.policy.autocast_dtype is None else region.suspended()
        words = {'closure': closure} if callable(closure) and not runs_before else {}
        with casts:
            outcome = take_step(engine, None, bare_step, **words)
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if outcome.skipped is None and outcome.info is not None and not capturing:
            self._unread.setdefault(id(engine), []).append(LateRead(outcome.info))
            self._read(engine, wait=False)
        return result[0] if result else None

    def _read(self, engine: Engine, wait: bool) -> None:
        """Look at the infos of steps that nobody waited for, as far as they have reached the host."""
        unread = self._unread.get(id(engine), [])
        while unread and (wait or unread[0].is_there):
            engine.review([unread.pop(0).wait()])

    def read_all(self) -> None:
        """Say what was skipped up to now. Syncs."""
        for engine in self.engines:
            self._read(engine, wait=True)


def _named(first: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, where at most one came by place."""
    if len(args) > 1 or (args and first in kwargs):
        raise TypeError(f'at most one argument without a name was expected ({first}), but {len(args)} were given.')
    return {first: args[0], **kwargs} if args else dict(kwargs)


def check_new(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that are in a session, or twice in the list.

    Raises:
        AmpAttachError: Names the optimizer.
    """
    seen: set[int] = set()
    for optimizer in optimizers:
        if optimizer in _session_of or id(optimizer) in seen:
            raise AmpAttachError(
                f'{type(optimizer).__name__} was initialised already: amp.initialize() takes an optimizer once. Hand over all '
                f'models and optimizers in one call, as lists, or use a new optimizer for other models; a new one for the same '
                f'model comes without it, amp.initialize([], optimizer).'
            )
        seen.add(id(optimizer))


def disable(optimizers: Iterable[Optimizer]) -> None:
    """These were initialised with ``enabled=False``."""
    _disabled.update(optimizers)


def is_disabled(optimizer: Optimizer) -> bool:
    """Whether an optimizer was initialised with ``enabled=False``."""
    return optimizer in _disabled and optimizer not in _session_of


def session_of(optimizer: Optimizer) -> Session | None:
    """The session of an optimizer; None where it was never initialised, or is disabled."""
    found = _session_of.get(optimizer)
    return None if found is None else found()


def engines_of(optimizers: Any) -> list[Engine]:
    """The engines of one optimizer or several; none for those of ``enabled=False``.

    Args:
        optimizers: One, or a list or tuple of them.

    Raises:
        AmpUsageError: Not an optimizer, or one that was never initialised; some enabled and some not.
    """
    given = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    if not given:
        raise AmpUsageError('optimizers=[] is empty: name every optimizer for which the backward pass makes gradients.')
    engines: list[Engine] = []
    off = 0
    for optimizer in given:
        if not isinstance(optimizer, Optimizer):
            raise AmpUsageError(
                f'optimizers={short(optimizers)} must be a torch optimizer or several, but holds {type(optimizer).__name__}.'
            )
        session = session_of(optimizer)
        if session is not None:
            session.thread = threading.get_ident()
            engine = session.engine(optimizer)
            if engine not in engines:
                engines.append(engine)
        elif is_disabled(optimizer):
            off += 1
        elif _sessions or _disabled:
            raise AmpUsageError(
                f'{type(optimizer).__name__} was not initialised (a copy of an initialised optimizer is a plain one): hand it '
                f'over to amp.initialize() and use what that returns; in place of another one, or beside it, for an '
                f'initialised model: amp.initialize([], optimizer).'
            )
        else:
            raise AmpUsageError(_NEVER)
    if engines and off:
        raise AmpUsageError(
            'some of these optimizers were initialised with enabled=False and some not: scale their losses apart.'
        )
    return engines


def weights_beyond(engine: Engine) -> list[Tensor]:
    """Where a loss of ``engine`` may leave gradients that no block of its session unscales.

    Those are the weights that optimizers of other sessions step, but for sessions that another thread uses, whose gradients may
    be under way now; and parameters of its own models that no optimizer has yet.
    """
    found: list[Tensor] = []
    for session in _alive():
        if engine in session.engines:
            found += session.unheld
        elif session.thread == threading.get_ident():
            found += [weight for each in session.engines for weight in each.weights()]
    mine = {id(weight) for each in (engine, *engine.others) for weight in each.weights()} if found else ()
    return [weight for weight in found if id(weight) not in mine]


def _alive() -> list[Session]:
    """Those of which somebody holds an optimizer."""
    found = [session for session in (reference() for reference in _sessions) if session is not None]
    return [session for session in found if any(engine.optimizer is not None for engine in session.engines)]


def stepped() -> list[Tensor]:
    """The weights that initialised optimizers step."""
    return [weight for session in _alive() for engine in session.engines for weight in engine.weights()]


def sessions(optimizers: Any = None) -> list[Session]:
    """The sessions that have an optimizer which somebody holds, in the order in which they were made.

    Args:
        optimizers: Only the sessions of these: one, or a list or tuple of them. All by default.

    Raises:
        AmpUsageError: ``amp.initialize`` was never called; one of ``optimizers`` was not initialised.
    """
    if optimizers is not None:
        chosen = {id(engine) for engine in engines_of(optimizers)}
        return [session for session in _alive() if any(id(engine) in chosen for engine in session.engines)]
    alive = _alive()
    if not alive and not _disabled:
        raise AmpUsageError(_NEVER)
    return alive


def master_params_of(optimizer: Optimizer) -> Iterable[Tensor]:
    """What an optimizer steps, initialised or not."""
    session = session_of(optimizer)
    if session is None:
        return parameters_of(optimizer)
    return session.engine(optimizer).master_params()
