"""A model becomes one of an engine: casts, masters, DDP; and what surrounds its forward pass."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..autocast import regions
from ..casting import fp32_values as twins
from ..casting import given_weights, ownership
from ..casting import plan as casting
from ..casting import roots as scope
from ..casting.find_hooks import copies_are_fp32
from ..casting.masters import MasterWeights, cast_state_to_parameters, warn_of_lost_eps
from ..casting.modules import module_device
from ..casting.region_hooks import autocast_context
from ..casting.split_masters import SplitWeights
from ..errors import AmpAttachError, AmpError, AmpUsageError
from ..optim.fused import FusedOptimizer
from ..policy.nested import HALF_TYPES, EnterObject
from ..policy.policy import Policy, dtype_name
from . import averages, forward_entry
from .base import EngineBase, Stage
from .buffers.snapshots import BufferSnapshots
from .ddp.reducers import Reducers, check_unknown_listeners
from .gradients import cross_optimizer as foreign_gradients
from .state import Saving

#: Doors decide where these lines go.
logger = logging.getLogger('amp_wrapper')


class Attaching(Saving):
    """Attaches models and lets go of them."""

    def attach(
        self,
        model: nn.Module | None,
        leave: tuple[type, ...] = (),
        average: tuple[type, ...] = (),
        foreign: Iterable[Tensor] = (),
        enter: EnterObject | None = None,
    ) -> None:
        """Cast the model, make masters and take them into the optimizer. Does nothing when attached already.

        The weights must be FP32 and final: initialised or loaded. With an optimizer that owns only some of the
        trainable parameters (one wrapper of several), only modules whose every parameter it owns are cast. Modules that
        another optimizer's engine has cast to the same type are shared with it, masters included.

        Args:
            model: The model, wrapped in DDP (every rank calls this then) or not; None where only gradients are scaled (O0,
                O1, O4).
            leave: Module classes to leave alone.
            average: Classes of averaged models, which stay FP32.
            foreign: Parameters that other optimizers step.
            enter: Casts tensors inside output objects of a framework's own kind.

        Raises:
            AmpAttachError: The optimizer steps nothing of the model; the model is 16-bit already or beyond float16's range,
                cast already by somebody else, compiled, sharded, or in a DDP that cannot be carried over. Nothing has been
                changed.
            AmpConfigError: A ``keep_fp32`` pattern that matches nothing. Nothing has been changed.
        """
        if self.attached:
            return
        if not self.policy.enabled:
            self.stage = Stage.READY
            return
        if model is None:
            if self.policy.casts_model:
                raise AmpUsageError(
                    f'{self.policy.opt_level} casts the model, but no model was handed over before the first backward: '
                    f'run the forward pass under "with optim_wrapper.optim_context(model):".'
                )
        else:
            if self.policy.runs_16_bit:
                scope.check_compiled(model)
            inner = scope.unwrap(model)
            self._names = {id(parameter): name for name, parameter in inner.named_parameters()}
            reducers = Reducers(model, self.weights, inner.named_parameters(), self.policy.verbosity >= 1)
            if self.policy.casts_model and not reducers.ddps:
                check_unknown_listeners(inner)
            reducers.check(not self.is_plain, self.policy.casts_model)
            self._check_shared()
            foreign = list(foreign)
            if self.optimizer is not None:
                theirs = [weight for other in self._others for weight in other.weights()]
                ownership.check_owners([self.optimizer], [inner], [*foreign, *theirs])
            done, shared_weights = self._cast_by_others()
            roots = scope.find_roots(inner, self.optimizer, foreign, done)
            plan = casting.CastPlan(roots, self.policy, leave, average, enter)
            self._make_masters(plan)
            self._handle = plan.apply()
            self._take_cast(plan, shared_weights)
            given_weights.say_rounded(plan.rounded, self.policy)
            given_weights.say_infinite(plan.infinite, self.policy)
            self._watch_buffers([('', inner)], leave, foreign)
            self._reducers = reducers
            reducers.rebuild([*plan.parameters.values(), *plan.raised])
            reducers.record()
            if self.optimizer is not None and self.policy.casts_model:
                copies_are_fp32([root for _, root in plan.roots])
            if self.policy.verbosity >= 2 and self.policy.casts_model:
                log_casts(plan)
        self._begin(self._gradient_device(model))
        pending, self._pending = self._pending, None
        if pending is not None:
            self._restore_window(pending)

    def _make_masters(self, plan: casting.CastPlan) -> None:
        """From the weights before they are rounded."""
        if self.optimizer is not None and self.policy.split_masters:
            assert self.policy.cast_model_type is not None
            self._masters = SplitWeights(self.optimizer, plan.parameters, self.policy.cast_model_type)
        elif self.optimizer is not None and self.policy.master_weights:
            self._masters = MasterWeights(self.optimizer, plan.parameters, twins.pair, twins.master_of)

    def _take_cast(self, plan: casting.CastPlan, shared_weights: Iterable[Tensor] = ()) -> None:
        """After the cast."""
        self._ops = plan.ops
        if plan.rounded and self.optimizer is not None and (self._masters is not None or plan.raised):
            # of weights that are FP32 from now on, here or as masters
            _state_to_fp32(self.optimizer)
        averages.patch_loaded()
        self._follow_at_entry([root for _, root in plan.roots])
        if self._masters is not None:
            # the cast rounded each weight; copying again settles the version counters
            self._masters.copy_to_weights()
        elif self.optimizer is not None and not isinstance(self.optimizer, FusedOptimizer):
            # ours compute in FP32, and keep their state in the type they were given
            cast_state_to_parameters(self.optimizer, [*plan.parameters.values(), *shared_weights])
            if plan.parameters and self.policy.verbosity >= 1 and self.policy.cast_model_type is not None:
                warn_of_lost_eps(self.optimizer, self.policy.cast_model_type)

    def _watch_buffers(
        self, roots: Sequence[tuple[str, nn.Module]], leave: tuple[type, ...] = (), foreign: Iterable[Tensor] = ()
    ) -> None:
        """Where steps may be skipped, their forward passes' changes of buffers are given back."""
        if self.optimizer is None or not self.scalers[0].checks or not self.policy.restore_buffers_on_skip:
            return
        strangers = list(foreign)

        def owners() -> tuple[Iterable[Tensor], Iterable[Tensor]]:
            return self.weights(), [*strangers, *(weight for other in self._others for weight in other.weights())]

        self._buffers = BufferSnapshots(roots, owners, leave, self)

    def _follow_at_entry(self, roots: Sequence[nn.Module]) -> None:
        if isinstance(self._masters, MasterWeights):
            forward_entry.watch(roots, self._masters)

    def _begin(self, device: torch.device) -> None:
        self._device = device
        self._kept_sides = None
        self._flags.to(device)
        for scaler in (*self.scalers, self._tally):
            scaler.to(device)
        self.stage = Stage.READY

    def join(self, others: Iterable[EngineBase | foreign_gradients.OtherOptimizer]) -> None:
        """Say whose parameters the losses of this engine may reach as well, before attaching.

        Args:
            others: The engines and plain optimizers of one training, without this one.

        Raises:
            AmpAttachError: A parameter that two optimizers step, at levels that cannot share it.
        """
        self._others = tuple(others)
        self._check_shared()

    def _check_shared(self) -> None:
        mine = {id(weight): weight for weight in self.weights()}
        for other in self._others:
            theirs = other.policy if isinstance(other, EngineBase) else None
            both = [mine[id(weight)] for weight in other.weights() if id(weight) in mine]
            casts = self.policy.casts_model or (theirs is not None and theirs.casts_model)
            same = theirs is not None and (
                (theirs.casts_model, theirs.cast_model_type, theirs.master_weights, theirs.split_masters)
                == (
                    self.policy.casts_model,
                    self.policy.cast_model_type,
                    self.policy.master_weights,
                    self.policy.split_masters,
                )
            )
            if both and casts and not same:
                names = [self._names.get(id(weight), f'of shape {tuple(weight.shape)}') for weight in both[:5]]
                raise AmpAttachError(
                    f'{len(both)} parameters are stepped by two optimizers ({", ".join(names)}), at '
                    f'{self.policy.opt_level} and {theirs.opt_level if theirs else "without this package"}: they cannot be '
                    f'16-bit for one and something else for the other. Give both the same level, or each parameter one '
                    f'optimizer: losses of the others reach it all the same.'
                )

    def _cast_by_others(self) -> tuple[set[int], list[nn.Parameter]]:
        """The modules that other engines have cast, by id, and those of their weights that this optimizer steps too."""
        engines = [other for other in self._others if isinstance(other, EngineBase) and other._handle is not None]
        # at O0 inputs and outputs are cast
        casting_ones = [engine for engine in engines if engine.policy.cast_model_type is not None]
        handles = [engine._handle for engine in casting_ones if engine._handle is not None]
        modules = {id(module) for handle in handles for root in handle.roots for module in root.modules()}
        cast = {id(weight) for handle in handles for weight in handle.parameters.values()}
        return modules, [weight for weight in self.weights() if id(weight) in cast]

    def _gradient_device(self, model: nn.Module | None) -> torch.device:
        if self.optimizer is not None:
            for parameter in self._parameters():
                return parameter.device
        return torch.device('cpu') if model is None else module_device(model)

    def detach(self) -> None:
        """Take the hooks off, give the model FP32 weights (the masters) and the optimizer its own parameters back.

        DDP modules average FP32 gradients again; every rank calls this.

        Raises:
            AmpUsageError: Gradients are waiting for a step; a weight and its master that were both written to.
        """
        if not self.attached:
            return
        if self.stage is Stage.ACCUMULATING and self.policy.enabled:
            raise AmpUsageError(
                'detach() in the middle of an accumulation window would lose its gradients: step() first.'
            )
        # what an interrupted forward pass left open
        regions.unwind_stale()
        if self._masters is not None:
            self._masters.synchronise()
            self._masters.refresh()
            for _ in self._masters.release():
                pass
        if self._handle is not None:
            self._handle.remove()
            self._reducers.rebuild(self._handle.parameters.values())
        self._reducers = Reducers(None, self.weights)
        if self._masters is None and self.optimizer is not None and self.casts:
            _state_to_fp32(self.optimizer)
        if self._buffers is not None:
            self._buffers.remove()
        self._buffers = None
        self._masters = None
        self._kept_sides = None
        self._handle = None
        self._ops = None
        self.stage = Stage.DETACHED

    def before_forward(self, model: nn.Module) -> None:
        """Weights follow masters that somebody wrote to, and the other way round. DDP modules take notice of parameters that
        were frozen, unfrozen or added since the last forward pass.

        Every rank calls this, before it enters ``no_sync``.

        Args:
            model: What is about to run.

        Raises:
            AmpAttachError: ``torch.compile`` has wrapped the model meanwhile.
            AmpUsageError: A change of ``requires_grad`` that DDP cannot follow, or ranks with another number of steps; a weight
                and its master that were both written to.
        """
        if not self.policy.enabled:
            return
        for engine in (self, *(other for other in self._others if isinstance(other, EngineBase))):
            engine.synchronise()
        if self.policy.runs_16_bit and hasattr(model, '_orig_mod'):
            scope.check_compiled(model)
        if self._reducers.joins() and not self.is_plain:
            raise AmpUsageError(
                'DistributedDataParallel.join(): ranks that take more steps than others would move their loss scale and '
                'masters alone. Give every rank the same number of iterations, or use O0.'
            )
        self._reducers.follow(model, self._is_waiting)

    def _is_waiting(self, ids: Iterable[int]) -> bool:
        """Whether any of these parameters has a gradient in an open window of this engine."""
        if self.stage is not Stage.ACCUMULATING:
            return False
        chosen = set(ids)
        return self._has_gradient(weight for weight in self.weights() if id(weight) in chosen)

    @contextmanager
    def forward_context(self, model: nn.Module) -> Iterator[None]:
        """What surrounds a training forward pass: autocast at O1 and O4, nothing at the levels that cast.

        Args:
            model: Says on which device autocast works.
        """
        dtype = self.policy.autocast_dtype if self.policy.enabled else None
        context = autocast_context(module_device(model).type, dtype)
        if torch.compiler.is_compiling():
            with context or nullcontext():
                yield
            return
        # what an interrupted validation left open
        regions.unwind_stale()
        before = regions.count()
        try:
            if self._ops is not None or context is not None:
                # for models whose train_step does not call them
                regions.enter(None if self._ops is None else self._ops.keys, autocast=context)
            yield
        except RuntimeError as error:
            self._explain(error, model)
            raise
        finally:
            regions.unwind(before)

    def _explain(self, error: RuntimeError, model: nn.Module) -> None:
        """A module list that changed behind torch's registration hooks shows as an error about types."""
        if isinstance(error, AmpError) or not self.casts:
            return
        new = [name for name, p in scope.unwrap(model).named_parameters() if id(p) not in self._names]
        if new:
            raise AmpUsageError(
                f'the model has parameters that it did not have when it was cast ({", ".join(new[:5])}): they are in '
                f'FP32, without masters, and the optimizer may not know them. Call optim_wrapper.detach(), change the '
                f'model, give its parameters to the optimizer, and attach again.'
            ) from error


def attach_together(engines: Sequence[Attaching], models: Sequence[nn.Module], policy: Policy) -> casting.CastHandle:
    """Cast models as wholes, and make masters for all that the engines' optimizers step of them.

    Unlike :meth:`AmpEngine.attach`, it does not matter which optimizer owns what, nor whether any does. Losses of each engine
    may reach the parameters of the others.

    Args:
        engines: Not attached; with ``policy``.
        models: FP32, not wrapped.
        policy: The configuration.

    Returns:
        The handle that takes the casts off.

    Raises:
        AmpAttachError: As :meth:`AmpEngine.attach`. Nothing has been changed.
    """
    roots = named_roots(models)
    for model in models:
        if policy.runs_16_bit:
            scope.check_compiled(model)
        scope.unwrap(model)
        if policy.casts_model:
            check_unknown_listeners(model)
    names = {id(parameter): key for name, model in roots for key, parameter in model.named_parameters(prefix=name)}
    for engine in engines:
        check_once(engine, names)
    for engine in engines:
        engine._names = names
        first = next((each for each in engines if each._arrivals.is_shared), engines[0])
        engine._arrivals.share(first._arrivals)
        engine._reducers = Reducers(
            None,
            engine.weights,
            [(names[id(p)], p) for p in engine.weights() if id(p) in names],
            policy.verbosity >= 1,
        )
        engine.join([other for other in engines if other is not engine])
    plan = casting.CastPlan(roots, policy, covers_forward=True)
    for engine in engines:
        engine._make_masters(plan)
    handle = plan.apply()
    given_weights.say_rounded(plan.rounded, policy)
    given_weights.say_infinite(plan.infinite, policy)
    for engine in engines:
        engine._take_cast(plan)
        if roots:
            engine._watch_buffers(roots)
        engine._reducers.watch(models)
        engine._begin(engine._gradient_device(models[0] if models else None))
    if engines and policy.casts_model:
        copies_are_fp32(models)
    return handle


def named_roots(models: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """(what comes before the names in it, model), for messages and files."""
    several = len(models) > 1
    return [(f'models[{index}]' if several else '', model) for index, model in enumerate(models)]


def check_once(engine: EngineBase, names: Mapping[int, str]) -> None:
    """Refuse an optimizer that has a parameter twice: its gradient would be unscaled twice, and have two masters.

    Raises:
        AmpAttachError: Names the parameters. Nothing has been changed.
    """
    seen: set[int] = set()
    twice = []
    for weight in () if engine.is_plain else engine.weights():
        if id(weight) in seen:
            twice.append(names.get(id(weight), f'one of shape {tuple(weight.shape)}'))
        seen.add(id(weight))
    if twice:
        shown = ', '.join(twice[:5]) + (f' and {len(twice) - 5} more' if len(twice) > 5 else '')
        raise AmpAttachError(
            f'{type(engine.optimizer).__name__} has parameters twice ({shown}): give it each of them once, such as '
            f'{{id(p): p for p in parameters}}.values().'
        )


def log_casts(plan: casting.CastPlan) -> None:
    """A line for each parameter."""
    assert plan.policy.cast_model_type is not None
    for name in plan.parameters:
        logger.info(f'amp: {name} is {dtype_name(plan.policy.cast_model_type)} now')


def _state_to_fp32(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dtype in HALF_TYPES:
                state[key] = value.float()
