"""Remembers what ``amp.initialize`` was given, and checks other optimizers that step parameters of its models.

All references are weak: a session lives as long as one of its optimizers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ..casting import fp32_values
from ..engine import Engine
from ..errors import AmpAttachError, AmpUsageError, short
from ..policy.levels import Policy
from ..policy.nested import parameters_of
from ..torch_internals import is_traceable_wrapper_subclass
from .functions import cast_models

#: Of :mod:`.session`, which knows this file.
Session: TypeAlias = Any
logger = logging.getLogger('amp_wrapper')


class Registry:
    """Remembers sessions, models and gradients that carry a loss scale. There is one, :data:`registry`."""

    def __init__(self) -> None:
        # None with enabled=False
        self._sessions: WeakKeyDictionary[Optimizer, ReferenceType[Session] | None] = WeakKeyDictionary()
        self._models: WeakSet[nn.Module] = WeakSet()
        # parameter -> the configuration of its model
        self._policies: MutableMapping[Tensor, Policy] = WeakTensorKeyDictionary()
        self._checks_steps = False
        # optimizers that were checked -> how many parameters they had, and how many were known
        self._checked: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()
        self._warned: WeakSet[Optimizer] = WeakSet()
        # what they step, and no initialised optimizer does
        self._foreign: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        # gradients of scaled losses that no block unscales, and their versions when they came
        self._scaled: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()

    # -- sessions --------------------------------------------------------------------------------------------------------

    def add(self, optimizers: Iterable[Optimizer], session: Session | None, models: Iterable[nn.Module] = ()) -> None:
        """Remember what one call was given.

        Args:
            optimizers: All of them.
            session: Theirs; None with ``enabled=False``.
            models: As they are now, with their casts.
        """
        for optimizer in optimizers:
            # at the end, where it was disabled before
            self._sessions.pop(optimizer, None)
            self._sessions[optimizer] = None if session is None else ref(session)
        if session is None:
            return
        for model in models:
            self._models.add(model)
            self._policies.update((parameter, session.policy) for parameter in model.parameters())
            if session.policy.autocast_dtype is not None:
                cast_models.add(model)
        if not self._checks_steps:
            self._checks_steps = True
            register_optimizer_step_pre_hook(self._check_step)

    def session_of(self, optimizer: Optimizer) -> Session | None:
        """Find the session of an optimizer; None where it was never initialised, or is disabled."""
        found = self._sessions.get(optimizer)
        return None if found is None else found()

    def engines_of(self, optimizers: Any) -> list[Engine]:
        """Find the engines of one optimizer or several; none for those of ``enabled=False``.

        Args:
            optimizers: One, or a list or tuple of them.

        Raises:
            AmpUsageError: Not an optimizer, or one that was never initialised; some enabled and some not.
        """
        given = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        if not given:
            raise AmpUsageError(
                'optimizers=[] is empty: name every optimizer for which the backward pass makes gradients.'
            )
        engines: list[Engine] = []
        for optimizer in given:
            name = type(optimizer).__name__
            if not isinstance(optimizer, Optimizer):
                raise AmpUsageError(
                    f'optimizers={short(optimizers)} must be a torch optimizer or several, but holds {name}.'
                )
            if optimizer not in self._sessions:
                raise AmpUsageError(
                    f'{name} was not initialised (a copy of an initialised optimizer is a plain one): first hand it over, '
                    f'model, optimizer = amp.initialize(model, optimizer); for an initialised model, '
                    f'amp.initialize([], optimizer).'
                )
            session = self.session_of(optimizer)
            if session is not None:
                session.thread = threading.get_ident()
                engines.append(session.engine(optimizer))
        if 0 < len(engines) < len(given):
            raise AmpUsageError(
                'some of these optimizers were initialised with enabled=False and some not: scale their losses apart.'
            )
        return list(dict.fromkeys(engines))

    def sessions(self, optimizers: Any = None) -> list[Session]:
        """Find the sessions that have an optimizer which somebody holds, in the order in which they were made.

        Args:
            optimizers: Only the sessions of these: one, or a list or tuple of them. All by default.

        Raises:
            AmpUsageError: ``amp.initialize`` was never called; one of ``optimizers`` was not initialised.
        """
        if optimizers is None and not self._sessions:
            raise AmpUsageError('no optimizer was initialised: model, optimizer = amp.initialize(model, optimizer).')
        chosen = None if optimizers is None else set(self.engines_of(optimizers))
        return [each for each in self._alive() if chosen is None or not chosen.isdisjoint(each.engines)]

    def _alive(self) -> list[Session]:
        # other threads may add to the table meanwhile
        optimizers = [reference() for reference in self._sessions.keyrefs()]
        found = [self.session_of(optimizer) for optimizer in optimizers if optimizer is not None]
        return list(dict.fromkeys(session for session in found if session is not None))

    # -- parameters ------------------------------------------------------------------------------------------------------

    def is_known(self, parameter: Tensor) -> bool:
        """Say whether a parameter belongs to a model that was initialised."""
        return parameter in self._policies

    def stepped(self) -> list[Tensor]:
        """List the weights that initialised optimizers step."""
        return [weight for session in self._alive() for weight in session.weights()]

    def models_of(self, optimizers: Iterable[Optimizer]) -> list[nn.Module]:
        """Find the initialised models whose parameters these optimizers hold."""
        held = set(map(id, parameters_of(*optimizers)))
        return [model for model in self._models if not held.isdisjoint(map(id, model.parameters()))]

    def policies_of(self, optimizers: Iterable[Optimizer]) -> list[Policy]:
        """Find the different configurations of the models whose parameters these optimizers hold, in their order."""
        found: dict[tuple[Any, ...], Policy] = {}
        for policy in [self._policies[p] for p in parameters_of(*optimizers) if p in self._policies]:
            types = (policy.cast_model_type, policy.autocast_dtype, policy.master_weights)
            found.setdefault((policy.opt_level, *types), policy)
        return list(found.values())

    def check_new(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse optimizers that are in a session, or twice in the list, or were made from the masters of another one.

        Raises:
            AmpAttachError: Names the optimizer.
        """
        masters = set(map(id, fp32_values.masters()))
        for index, optimizer in enumerate(optimizers):
            name = type(optimizer).__name__
            if self.session_of(optimizer) is not None or optimizer in optimizers[:index]:
                raise AmpAttachError(
                    f'{name} was initialised already: amp.initialize() takes an optimizer once. Hand over all models and '
                    f'optimizers in one call, as lists, or use a new optimizer for other models; a new one for the same '
                    f'model comes without it, amp.initialize([], optimizer).'
                )
            if not masters.isdisjoint(map(id, parameters_of(optimizer))):
                raise AmpAttachError(
                    f'{name} was made from FP32 masters (amp.master_params of another optimizer), at which no gradients '
                    f'arrive: make it from model.parameters(), and amp.initialize([], optimizer) finds the masters.'
                )

    # -- gradients that carry a loss scale -------------------------------------------------------------------------------

    @contextmanager
    def noting_scaled(self, engine: Engine, looked_at: Iterable[Tensor], foreign: bool) -> Iterator[None]:
        """Around a block: note which gradients carry its scale and are not unscaled by it.

        Args:
            engine: Whose scale it is.
            looked_at: Weights whose gradients ``torch.autograd.grad`` may take, to be put into ``.grad`` later.
            foreign: Whether to look at what other optimizers step as well.
        """
        leaves = [*(self._foreign if foreign else ()), *self._weights_beyond(engine)]
        before = [(leaf, leaf.grad, leaf.grad is not None and leaf.grad._version) for leaf in leaves]
        with ExitStack() as hooks:
            for weight in looked_at:
                if weight.requires_grad:
                    hooks.callback(weight.register_hook(self._note).remove)  # type: ignore[no-untyped-call]
            yield
        for leaf, grad, version in before:
            if leaf.grad is not None and (leaf.grad is not grad or leaf.grad._version != version):
                self._note(leaf.grad)

    def _weights_beyond(self, engine: Engine) -> list[Tensor]:
        """Find where a loss of ``engine`` may leave gradients that no block of its session unscales.

        Those are the weights that optimizers of other sessions step, but for sessions that another thread uses, whose gradients
        may be under way now; and parameters of its own models that no optimizer has yet.
        """
        found: list[Tensor] = []
        for session in self._alive():
            if engine in session.engines:
                found += session.unheld
            elif session.thread == threading.get_ident():
                found += session.weights()
        mine = {id(weight) for each in (engine, *engine.others) for weight in each.weights()} if found else ()
        return [weight for weight in found if id(weight) not in mine]

    def _note(self, gradient: Tensor) -> None:
        self._scaled[gradient] = gradient._version

    def refuse_scaled(self, engines: Iterable[Engine]) -> None:
        """Refuse gradients of a scaled loss that no block has unscaled.

        Raises:
            AmpUsageError: A gradient carries its loss scale.
        """
        if self._scaled and any(self.carries_scale(engine.weights()) for engine in engines):
            raise AmpUsageError(
                'gradients that carry a loss scale lie where they would be taken for unscaled ones. What '
                'torch.autograd.grad(scaled_loss, ...) gives goes into .grad inside of the block, or is divided by '
                'amp.loss_scale(optimizer). Gradients that a loss brings to parameters which no optimizer of its '
                'amp.initialize() call steps are cleared (zero_grad) before these are trained; models that train together '
                'belong in one call: amp.initialize([model0, model1], [optimizer0, optimizer1]).'
            )

    def carries_scale(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """List those whose gradients were noted, and nobody has written to since."""
        if not self._scaled:
            return []
        return [p for p in parameters if p.grad is not None and self._scaled.get(p.grad) == p.grad._version]

    # -- optimizers that were not initialised ----------------------------------------------------------------------------

    def _check_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Check one that is about to step; again only where parameters or models were added."""
        if not self._policies or self.session_of(optimizer) is not None:
            return
        parameters = parameters_of(optimizer)
        count = len(parameters), len(self._policies)
        carrying = [] if optimizer in self._warned else self.carries_scale(parameters)
        heard = [p for p in carrying if p not in self._policies or self._policies[p].verbosity >= 1]
        scaled = {id(p): 'parameters that a scaled loss reaches' for p in heard}
        if self._checked.get(optimizer) == count and not scaled:
            return
        name = type(optimizer).__name__
        for parameter in parameters:
            pair = fp32_values.pair_of(parameter)
            if pair is not None and not pair.is_split:
                raise AmpUsageError(
                    f'{name}.step() of an optimizer that was not initialised, on 16-bit weights that have FP32 masters, with '
                    f'gradients that carry a loss scale: hand it over, by amp.initialize([], optimizer), before its first '
                    f'step; it then steps the masters, which stay what they are.'
                )
            policy = self._policies.get(parameter)
            if policy is not None and policy.verbosity >= 1:
                scale = policy.loss_scale
                if scale.enabled and (scale.dynamic or scale.init_scale != 1.0):
                    scaled[id(parameter)] = f'parameters of a model at {policy.opt_level}'
        self._checked[optimizer] = count
        # torch moves a sharded parameter by swapping it, which it does to none that is weakly referenced
        self._foreign.update((p, None) for p in parameters if not is_traceable_wrapper_subclass(p))
        # gradients of what initialised optimizers step are in order; an optimizer around another one shares its parameters
        for tensor in (*self.stepped(), *fp32_values.masters()):
            self._foreign.pop(tensor, None)
            scaled.pop(id(tensor), None)
        if scaled and optimizer not in self._warned:
            self._warned.add(optimizer)
            logger.warning(
                f'amp: {name}, which was not initialised, steps {next(iter(scaled.values()))}: gradients that amp.scale_loss '
                f'brings to them still carry the loss scale, and an overflow does not skip its steps. Hand it over, by '
                f'amp.initialize([], optimizer), and name it: amp.scale_loss(loss, [optimizer0, optimizer1]).'
            )

    _check_step.sees_no_gradient = True  # type: ignore[attr-defined]


registry = Registry()
