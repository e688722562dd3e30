"""Remembers what ``amp.initialize`` was given, and checks other optimizers that step parameters of its models.

All references are weak: a session lives as long as one of its optimizers.
"""

from __future__ import annotations

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
from ..compiler_internals import compiled_module
from ..engine import Engine
from ..engine.loss_scale import is_one
from ..errors import AmpAttachError, AmpConfigError, AmpUsageError, logger, short, some
from ..policy.levels import Policy
from ..policy.nested import parameters_of
from ..torch_internals import after_zero_grad, is_traceable_wrapper_subclass
from .functions import cast_models

#: Of :mod:`.session`, which knows this file.
Session: TypeAlias = Any
#: One or several.
Optimizers: TypeAlias = Optimizer | Sequence[Optimizer]


def listed(value: Any, kind: type, name: str) -> list[Any]:
    """List one object or several; of what ``torch.compile(model)`` made, the model inside, which either call runs.

    Args:
        value: An instance of ``kind``, or a list or tuple of them.
        kind: ``nn.Module`` or ``Optimizer``.
        name: Of the argument.

    Raises:
        AmpConfigError: Something else; a ``TypeError`` as well.
    """
    is_list = isinstance(value, (list, tuple))
    items = list(value) if is_list else [value]
    for index, item in enumerate(items):
        if not isinstance(item, kind):
            word, remedy = 'nn.Module' if kind is nn.Module else 'optim.Optimizer', ''
            if isinstance(item, (nn.Module, Optimizer)):
                remedy = ' The model comes first: amp.initialize(model, optimizer).'
            elif hasattr(item, 'param_groups'):
                remedy = ' Initialize the optimizer that it is built around, and then build it around that.'
            label = f'{name}[{index}]' if is_list else name
            raise AmpConfigError([f'{label}={short(item)} must be a torch.{word} or a list or tuple of them.{remedy}'])
    return [compiled_module(item) or item for item in items]


class Registry:
    """Remembers sessions, models and gradients that carry a loss scale. There is one, :data:`registry`."""

    def __init__(self) -> None:
        # None with enabled=False
        self._sessions: WeakKeyDictionary[Optimizer, ReferenceType[Session] | None] = WeakKeyDictionary()
        self._models: WeakKeyDictionary[nn.Module, Policy] = WeakKeyDictionary()
        self._checks_steps = False
        # optimizers that were checked -> how many parameters they had, and how many models there were
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
            self._models[model] = session.policy
            if session.policy.autocast_dtype is not None:
                cast_models.add(model)
        if not self._checks_steps:
            self._checks_steps = True
            register_optimizer_step_pre_hook(self._check_step)
            after_zero_grad(self._note_zeros)

    def session_of(self, optimizer: Optimizer) -> Session | None:
        """Find the session of an optimizer; None where it was never initialised, or is disabled."""
        found = self._sessions.get(optimizer)
        return None if found is None else found()

    def engines_of(self, optimizers: Any) -> list[Engine]:
        """Find the engines of one optimizer or several; none for those of ``enabled=False``.

        Args:
            optimizers: One, or a list or tuple of them.

        Raises:
            AmpConfigError: Not an optimizer.
            AmpUsageError: None, or one that was never initialised; some enabled and some not.
        """
        given = listed(optimizers, Optimizer, 'optimizers')
        unknown = [type(optimizer).__name__ for optimizer in given if optimizer not in self._sessions]
        if unknown or not given:
            text = f'{some(unknown) or "an empty list of optimizers"} was not initialised, as no copy is'
            raise AmpUsageError(f'{text}: call amp.initialize(model, optimizer), or amp.initialize([], optimizer).')
        engines: list[Engine] = []
        for optimizer in given:
            session = self.session_of(optimizer)
            if session is not None:
                session.thread = threading.get_ident()
                engines.append(session.engine(optimizer))
        if 0 < len(engines) < len(given):
            raise AmpUsageError('optimizers with enabled=False beside enabled ones: scale their losses apart.')
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

    def known(self) -> dict[int, Policy]:
        """Find the parameters of the initialised models, by id, with the configurations of the models."""
        return {id(p): policy for model, policy in self._models.items() for p in model.parameters()}

    def stepped(self) -> list[Tensor]:
        """List the weights that initialised optimizers step."""
        return [weight for session in self._alive() for weight in session.weights()]

    def models_of(self, optimizers: Iterable[Optimizer]) -> dict[nn.Module, Policy]:
        """Find the initialised models whose parameters these optimizers hold, with their configurations."""
        held = set(map(id, parameters_of(*optimizers)))
        return {m: policy for m, policy in self._models.items() if not held.isdisjoint(map(id, m.parameters()))}

    def check_new(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse optimizers that are in a session, or twice in the list, or were made from the masters of another one.

        Raises:
            AmpAttachError: Names the optimizer.
        """
        masters = set(map(id, fp32_values.masters()))
        for index, optimizer in enumerate(optimizers):
            name = type(optimizer).__name__
            if self.session_of(optimizer) is not None or optimizer in optimizers[:index]:
                raise AmpAttachError(f'{name} was initialised already: hand over each once, or make a new one.')
            if not masters.isdisjoint(map(id, parameters_of(optimizer))):
                raise AmpAttachError(f'{name} was made from FP32 masters: make it from model.parameters().')

    # -- gradients that carry a loss scale -------------------------------------------------------------------------------

    @contextmanager
    def noting_scaled(self, engine: Engine, looked_at: Iterable[Tensor], foreign: bool) -> Iterator[None]:
        """Around a block: note which gradients carry its scale and are not unscaled by it.

        Args:
            engine: Whose scale it is.
            looked_at: Weights whose gradients ``torch.autograd.grad`` may take, to be put into ``.grad`` later.
            foreign: Whether to look at what other optimizers step as well.
        """
        # where no block of its session unscales: other sessions, of which one that another thread uses may have gradients under
        # way, and parameters of its own models that no optimizer has yet
        found: list[Tensor] = [*self._foreign] if foreign else []
        for session in self._alive():
            if engine in session.engines:
                found += session.unheld
            elif session.thread == threading.get_ident():
                found += session.weights()
        mine = {id(weight) for each in (engine, *engine.others) for weight in each.weights()} if found else ()
        before = [(p, p.grad, p.grad is not None and p.grad._version) for p in found if id(p) not in mine]
        with ExitStack() as hooks:
            for weight in [weight for weight in looked_at if weight.requires_grad]:
                hooks.callback(weight.register_hook(self._note).remove)  # type: ignore[no-untyped-call]
            yield
        for leaf, grad, version in before:
            if leaf.grad is not None and (leaf.grad is not grad or leaf.grad._version != version):
                self._note(leaf.grad)

    def _note_zeros(self, module: nn.Module, set_to_none: bool) -> None:
        """Forget what was non-finite, where ``module.zero_grad(set_to_none=False)`` has made zeros of all gradients."""
        cleared = set() if set_to_none else set(map(id, module.parameters()))
        for engine in [each for session in self._alive() for each in session.engines] if cleared else ():
            if cleared.issuperset(map(id, engine.weights())):
                engine.drop_flags()

    def _note(self, gradient: Tensor) -> None:
        self._scaled[gradient] = gradient._version

    def refuse_scaled(self, engines: Iterable[Engine]) -> None:
        """Refuse gradients of a scaled loss that no block has unscaled.

        Raises:
            AmpUsageError: A gradient carries its loss scale.
        """
        if self._scaled and any(self.carries_scale(engine.weights()) for engine in engines):
            raise AmpUsageError(
                'gradients that carry a loss scale lie where unscaled ones belong: put those of autograd.grad() into '
                '.grad in the block; zero_grad() models of other calls, or name all: amp.initialize([m0, m1], [o0, o1]).'
            )

    def carries_scale(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """List those whose gradients were noted, and nobody has written to since."""
        return [p for p in parameters if p.grad is not None and self._scaled.get(p.grad) == p.grad._version]

    # -- optimizers that were not initialised ----------------------------------------------------------------------------

    def _check_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Check one that is about to step; again only where parameters or models were added."""
        if not self._models or self.session_of(optimizer) is not None:
            return
        parameters, name = parameters_of(optimizer), type(optimizer).__name__
        count = len(parameters), len(self._models)
        scaled = self.carries_scale(parameters) if self._scaled and optimizer not in self._warned else []
        if self._checked.get(optimizer) == count and not scaled:
            return
        if not all(pair.is_split for _, pair in fp32_values.paired(parameters)):
            raise AmpUsageError(f'{name} steps weights that have masters: call amp.initialize([], optimizer) first.')
        self._checked[optimizer] = count
        # gradients of what initialised optimizers step are in order; an optimizer around another one shares its parameters
        held, known = set(map(id, (*self.stepped(), *fp32_values.masters()))), self.known()
        foreign = [p for p in parameters if id(p) not in held]
        # torch moves a sharded parameter by swapping it, which it does to none that is weakly referenced
        self._foreign.update((p, None) for p in foreign if not is_traceable_wrapper_subclass(p))
        reached = [known.get(id(p)) for p in scaled if id(p) not in held]
        reached += [known[id(p)] for p in foreign if id(p) in known and not is_one(known[id(p)].loss_scale)]
        if any(policy is None or policy.verbosity >= 1 for policy in reached) and optimizer not in self._warned:
            self._warned.add(optimizer)
            logger.warning(
                f'amp: {name}, which was not initialised, steps parameters that a scaled loss reaches, with its scale. '
                f'Call amp.initialize([], optimizer), and name it: amp.scale_loss(loss, [optimizer0, optimizer1]).'
            )

    _check_step.sees_no_gradient = True  # type: ignore[attr-defined]


registry = Registry()
