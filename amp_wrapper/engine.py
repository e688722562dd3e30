"""The order of a training step, written once.

One engine serves one optimizer and the modules it steps. It composes the owners (casts, masters, scalers, gradients)
and knows no framework; the doors above it translate words.

The path of one update:

1. ``scale``: the loss times the loss scale, which does not move from here to 7;
2. ``backward``: gradients arrive on the model weights, 16-bit where the weights are, and are averaged over the ranks;
3. ``step`` looks for weights that somebody else changed (they win over their masters),
4. finds out whether any gradient element is non-finite, and how long the gradient is,
5. decides, the same on every rank,
6. unscales, clips, steps the optimizer and brings masters to the model weights; or skips all of it,
7. moves the loss scale.

With the optimizers of :mod:`amp_wrapper.optim` 4 is one pass over the gradients, 5 and 7 are one small kernel, 6 is one pass
over everything, and the host reads nothing (``_step_fused``). With any other one, unscaling comes first, together with 4, and
each of the rest is a pass of its own (``_step_any``).
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import logging
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import (
    casting,
    checkpoint,
    checkpoint_judge,
    checkpoint_transfer,
    foreign_gradients,
    forward_hooks,
    fp32_ops,
    gradients,
    open_window,
    ops,
    scope,
    split_weights,
    twins,
)
from .accumulation import Fp32Sums
from .arrival import Arrivals
from .errors import AmpAttachError, AmpCheckpointError, AmpConfigError, AmpError, AmpUsageError, OverflowStreakError
from .gradients import GradientClip
from .late_read import LateRead, flagged, has_pre_hooks, late_gradients, takes_flag
from .loss_scaler import LossScaler
from .master_weights import MasterWeights, cast_state_to_parameters, keep_scalar_state, warn_of_lost_eps
from .model_wrappers import Reducers, check_unknown_listeners
from .nested import HALF_TYPES, EnterObject
from .optim.fused import FusedOptimizer, Update
from .policy import Policy, dtype_name
from .scale_config import LossScaleConfig
from .skip_watch import SkipWatch
from .split_weights import SplitWeights
from .step_flags import StepFlags
from .step_result import GRAD_NORM, SKIP, SKIPS, STREAK, StepResult, decision_of

#: Doors decide where these lines go.
logger = logging.getLogger('amp_wrapper')


class Stage(enum.Enum):
    """Where an engine stands between two optimizer steps."""

    DETACHED = 'not attached to a model'
    READY = 'attached, no gradients'
    ACCUMULATING = 'gradients of one or more backward passes'


class _Sides:
    """Both sides of what an optimizer steps, in the order of its groups.

    Attributes:
        parameters: What it steps.
        weights: What the model computes with, and gradients arrive at.
        partners: What a fused update writes beside each parameter, or None.
        together: Whether all are on one device.
    """

    def __init__(
        self, parameters: list[nn.Parameter], masters: MasterWeights | SplitWeights | None, device: torch.device
    ) -> None:
        self.parameters = parameters
        self.weights = parameters if masters is None else [masters.weight_of(p) for p in parameters]
        self.partners = [None if masters is None else masters.partner_of(p) for p in parameters]
        self.together = all(weight.device == device for weight in self.weights)
        self._types = [weight.dtype for weight in self.weights]

    def are_of(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether these parameters are still the same objects, and of the same kinds."""
        return (
            len(parameters) == len(self.parameters)
            and all(map(operator.is_, parameters, self.parameters))
            and self._types == [weight.dtype for weight in self.weights]
        )


class AmpEngine:
    """Mixed precision for one optimizer.

    Args:
        policy: The configuration.
        optimizer: Any :class:`torch.optim.Optimizer` whose ``step`` needs no closure, or None for inference.
        scalers: The loss scales, where several engines share them; one for each loss. Gradients are unscaled as they arrive
            then, so that none depends on when another engine steps. None: scales of its own.

    Raises:
        AmpAttachError: An optimizer that cannot be wrapped.
    """

    def __init__(
        self, policy: Policy, optimizer: Optimizer | None, scalers: Sequence[LossScaler] | None = None
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.stage = Stage.DETACHED
        #: What log lines call this engine, where there are several.
        self.label = ''
        self._shared = scalers is not None
        self.scalers = new_scalers(policy) if scalers is None else list(scalers)
        # scales of several engines do not count the steps of one
        self._tally = (
            LossScaler(LossScaleConfig(False, 1.0), self.scalers[0].checks) if self._shared else self.scalers[0]
        )
        # several scales must never mix in one gradient
        self._on_arrival = policy.enabled and (policy.num_losses > 1 or self._shared)
        self._arrivals = Arrivals(keeps=self._shared)
        # ends what a pass for other optimizers, which is under way, brings here
        self._lent: list[Callable[[], None]] = []
        self._learning: tuple[int, ...] = ()
        # those of the optimizer, where somebody stands in front of them
        self._own_methods: dict[str, Callable[..., Any]] = {}
        self._handle: casting.CastHandle | None = None
        self._ops: fp32_ops.OpSet | None = None
        self._seen_ops: set[frozenset[str]] = set()
        self._masters: MasterWeights | SplitWeights | None = None
        self._names: dict[int, str] = {}
        self._reducers = Reducers(None, self.weights)
        self._sums = Fp32Sums() if policy.sums_in_fp32 else None
        self._others: tuple[AmpEngine | foreign_gradients.OtherOptimizer, ...] = ()
        self._flags = StepFlags(policy.num_losses, self._on_arrival)
        self._kept_sides: _Sides | None = None
        self._watch = SkipWatch(policy.max_consecutive_skips, policy.verbosity)
        self._device = torch.device('cpu')
        self._pending: checkpoint.SavedAmp | None = None
        if policy.enabled and optimizer is not None:
            scope.check_optimizer(optimizer)
            if policy.split_masters:
                split_weights.check_optimizer(optimizer)

    def __deepcopy__(self, memo: dict[int, Any]) -> AmpEngine:
        if self.attached and self.policy.enabled:
            raise AmpUsageError(
                'a deep copy of an attached wrapper would know neither the copied weights nor their masters: copy before the '
                'first forward pass, or copy the model alone and build a wrapper for it.'
            )
        copied = AmpEngine.__new__(AmpEngine)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    @contextmanager
    def behind(self, **methods: Callable[..., Any]) -> Iterator[None]:
        """Inside, these are the optimizer's own methods: the caller stands in front of it.

        Args:
            **methods: ``step`` or ``zero_grad``, which take their arguments by name.
        """
        before, self._own_methods = self._own_methods, methods
        try:
            yield
        finally:
            self._own_methods = before

    def _own(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = self._own_methods.get(name) or getattr(self.optimizer, name)
        return found

    @property
    def is_plain(self) -> bool:
        """Whether gradients go from backward to the optimizer untouched and unchecked."""
        return self._is_plain()

    # -- attaching ---------------------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether :meth:`attach` has run."""
        return self.stage is not Stage.DETACHED

    @property
    def in_own_window(self) -> bool:
        """Whether a loss of this engine has had a backward pass since the last step."""
        return any(self._flags.used)

    @property
    def casts(self) -> bool:
        """Whether any parameter changed its type."""
        return self._handle is not None and self._handle.casts

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
            AmpAttachError: The model is 16-bit already, cast already by somebody else, compiled, sharded, or in a DDP
                that cannot be carried over. Nothing has been changed.
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
            reducers = Reducers(model, self.weights, inner.named_parameters())
            if self.policy.casts_model and not reducers.ddps:
                check_unknown_listeners(inner)
            reducers.check(not self._is_plain(), self.policy.casts_model)
            self._check_shared()
            done, shared_weights = self._cast_by_others()
            roots = scope.find_roots(inner, self.optimizer, foreign, done)
            plan = casting.CastPlan(roots, self.policy, leave, average, enter)
            self._make_masters(plan)
            self._handle = plan.apply()
            self._take_cast(plan, shared_weights)
            self._reducers = reducers
            reducers.rebuild(plan.parameters.values())
            reducers.record()
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
            self._masters = MasterWeights(self.optimizer, plan.parameters, twins.pair, twins.fp32_twin)

    def _take_cast(self, plan: casting.CastPlan, shared_weights: Iterable[Tensor] = ()) -> None:
        """After the cast."""
        self._ops = plan.ops
        if self._masters is not None:
            # the cast rounded each weight; copying again settles the version counters
            self._masters.copy_to_weights()
        elif self.optimizer is not None and not isinstance(self.optimizer, FusedOptimizer):
            # ours compute in FP32, and keep their state in the type they were given
            cast_state_to_parameters(self.optimizer, [*plan.parameters.values(), *shared_weights])
            if plan.parameters and self.policy.verbosity >= 1 and self.policy.cast_model_type is not None:
                warn_of_lost_eps(self.optimizer, self.policy.cast_model_type)

    def _begin(self, device: torch.device) -> None:
        self._device = device
        self._kept_sides = None
        self._flags.to(device)
        for scaler in (*self.scalers, self._tally):
            scaler.to(device)
        self.stage = Stage.READY

    def join(self, others: Iterable[AmpEngine | foreign_gradients.OtherOptimizer]) -> None:
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
            theirs = other.policy if isinstance(other, AmpEngine) else None
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
        engines = [other for other in self._others if isinstance(other, AmpEngine) and other._handle is not None]
        # at O0 inputs and outputs are cast
        casting_ones = [engine for engine in engines if engine.policy.cast_model_type is not None]
        handles = [engine._handle for engine in casting_ones if engine._handle is not None]
        modules = {id(module) for handle in handles for root in handle.roots for module in root.modules()}
        cast = {id(weight) for handle in handles for weight in handle.parameters.values()}
        return modules, [weight for weight in self.weights() if id(weight) in cast]

    def _is_plain(self) -> bool:
        """Whether gradients go from backward to the optimizer untouched."""
        scaler = self.scalers[0]
        return not self.policy.enabled or (scaler.is_one and not scaler.checks and not self.policy.casts_model)

    def _gradient_device(self, model: nn.Module | None) -> torch.device:
        if self.optimizer is not None:
            for parameter in self._parameters():
                return parameter.device
        return torch.device('cpu') if model is None else forward_hooks.module_device(model)

    def detach(self) -> None:
        """Take the hooks off, give the model FP32 weights (the masters) and the optimizer its own parameters back.

        DDP modules average FP32 gradients again; every rank calls this.

        Raises:
            AmpUsageError: Gradients are waiting for a step.
        """
        if not self.attached:
            return
        if self.stage is Stage.ACCUMULATING and self.policy.enabled:
            raise AmpUsageError(
                'detach() in the middle of an accumulation window would lose its gradients: step() first.'
            )
        if not fp32_ops.in_forward():
            forward_hooks.unwind()
        if self._masters is not None:
            self._masters.refresh()
            for _ in self._masters.release():
                pass
        if self._handle is not None:
            self._handle.remove()
            self._reducers.rebuild(self._handle.parameters.values())
        self._reducers = Reducers(None, self.weights)
        if self._masters is None and self.optimizer is not None and self.casts:
            _state_to_fp32(self.optimizer)
        self._masters = None
        self._kept_sides = None
        self._handle = None
        self._ops = None
        self.stage = Stage.DETACHED

    # -- forward -----------------------------------------------------------------------------------------------------

    def before_forward(self, model: nn.Module) -> None:
        """DDP modules take notice of parameters that were frozen, unfrozen or added since the last forward pass.

        Every rank calls this, before it enters ``no_sync``.

        Args:
            model: What is about to run.

        Raises:
            AmpAttachError: ``torch.compile`` has wrapped the model meanwhile.
            AmpUsageError: A change of ``requires_grad`` that DDP cannot follow, or ranks with another number of steps.
        """
        if not self.policy.enabled:
            return
        if self.policy.runs_16_bit and hasattr(model, '_orig_mod'):
            scope.check_compiled(model)
        if self._reducers.joins() and not self._is_plain():
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
        context = forward_hooks.autocast_context(forward_hooks.module_device(model).type, dtype)
        if torch.compiler.is_compiling():
            with context:
                yield
            return
        if not fp32_ops.in_forward():
            # what an interrupted validation left open
            forward_hooks.unwind()
        before = forward_hooks.open_contexts()
        try:
            with fp32_ops.recording(self._seen_ops), context:
                if self._ops is not None:
                    # for models whose train_step does not call them
                    fp32_ops.enter(self._ops)
                yield
        except RuntimeError as error:
            self._explain(error, model)
            raise
        finally:
            forward_hooks.unwind(before)

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

    # -- backward ----------------------------------------------------------------------------------------------------

    def scale(self, loss: Tensor, loss_id: int = 0, together: Sequence[AmpEngine] = ()) -> Tensor:
        """``loss`` times the scale of ``loss_id``, in float32; ``loss`` itself where nothing is scaled.

        Args:
            loss: Floating tensor of any shape.
            loss_id: Which scaler; below ``num_losses``.
            together: As in :meth:`receiving`.

        Raises:
            AmpUsageError: No such loss.
        """
        scaler = self._scaler(loss_id)
        return scaler.scale(loss, None if scaler.is_one else self._pass_scale(loss_id, together))

    def backward(self, loss: Tensor, loss_id: int = 0, **kwargs: Any) -> None:
        """Scale the loss and run its backward pass.

        Args:
            loss: Scalar.
            loss_id: Which scaler; below ``num_losses``.
            **kwargs: For :meth:`torch.Tensor.backward`.

        Raises:
            AmpUsageError: No such loss, or several losses under ``no_sync``.
        """
        scaled = self.scale(loss, loss_id)
        if not self.attached:
            self.attach(None)
        with self.receiving(loss_id):
            scaled.backward(**kwargs)  # type: ignore[no-untyped-call]

    @contextmanager
    def receiving(self, loss_id: int = 0, together: Sequence[AmpEngine] = ()) -> Iterator[None]:
        """Around one backward pass of a loss that :meth:`scale` has scaled, whoever runs it.

        Args:
            loss_id: Which scaler; below ``num_losses``.
            together: Further engines that the pass is meant for. This one's scale holds for all, and learns; where a gradient
                of any is non-finite, all skip their next step.

        Raises:
            AmpUsageError: As :meth:`backward`; inside another pass of the same engine. All gradients are as before, and so they
                are after any exception inside, where gradients are unscaled as they arrive.
        """
        engines = (self, *together)
        self._scaler(loss_id)
        scale = self._pass_scale(loss_id, together)
        for engine in engines:
            if engine._arrivals.open:
                raise AmpUsageError(
                    'a backward pass inside another one that is meant for the same optimizer: leave the first '
                    '"with amp.scale_loss(...)" block before the second begins, or add the losses up.'
                )
        averaged = [engine._begin_pass() for engine in engines]
        shares = self._shares(together)
        if self._sums is not None:
            self._sums.give_back(self._reducers.about_to_average())
        averaged_ones = self._reducers.about_to_average(everywhere=True) if shares else frozenset()
        flags = [engine._flags.new() if engine.scalers[0].checks else None for engine in engines]
        with ExitStack() as stack:
            # checkpointed segments are recomputed in there
            stack.enter_context(self._lending(shares, scale, averaged_ones, loss_id))
            if self._ops is not None:
                stack.enter_context(fp32_ops.in_backward(self._ops, self._seen_ops))
            for engine, over_ranks, flag in zip(engines, averaged, flags):
                if engine._on_arrival:
                    stack.enter_context(engine._arriving(loss_id, scale, over_ranks, flag))
            yield
        for engine in engines:
            engine._reducers.end_backward()
        if self._sums is not None:
            self._sums.take(self.weights())
        if self._on_arrival:
            self._tell(loss_id, together, flags)
        self._flags.used[loss_id] = True
        for engine in engines:
            engine.stage = Stage.ACCUMULATING

    @contextmanager
    def _lending(
        self,
        shares: Sequence[tuple[AmpEngine | foreign_gradients.OtherOptimizer, foreign_gradients.Share]],
        scale: Tensor | None,
        averaged: Container[int],
        loss_id: int,
    ) -> Iterator[None]:
        """What the pass brings to other optimizers is put on their scales when it ends, or when a pass of theirs begins."""
        conversion = foreign_gradients.Conversion([share for _, share in shares], scale, averaged)

        def close(other: AmpEngine, share: foreign_gradients.Share) -> None:
            if conversion.close(share):
                self._hand_over(other, share, loss_id)

        lent: list[tuple[AmpEngine, Callable[[], None]]] = []
        for other, share in shares:
            if isinstance(other, AmpEngine):
                lent.append((other, functools.partial(close, other, share)))
        closed: set[int] = set()
        with conversion:
            for other, end in lent:
                other._lent.append(end)
            try:
                yield
            finally:
                for other, end in lent:
                    if end in other._lent:
                        other._lent.remove(end)
                    else:
                        closed.add(id(other))
        for other, share in shares:
            if id(other) not in closed:
                self._hand_over(other, share, loss_id)

    def _begin_pass(self) -> bool:
        """Returns whether the coming pass is averaged over the ranks; True without several."""
        while self._lent:
            # a pass that is meant for another optimizer is under way; what it brought here so far carries its scale
            self._lent.pop()()
        self._forget_cleared()
        averaged = self._reducers.begin_backward()
        if self._on_arrival and not averaged and not self._shared:
            raise AmpUsageError(
                f'backward() with num_losses={self.policy.num_losses} under no_sync: unscaling each loss on arrival would '
                f'keep its gradients from the other ranks. Use accumulative_counts=1, or one loss.'
            )
        return averaged

    def _arriving(
        self, loss_id: int, scale: Tensor | None, averaged: bool, flag: Tensor | None
    ) -> AbstractContextManager[None]:
        on_device = None if scale is None else scale.to(self._device)
        return self._arrivals.arriving(
            self._pairs(), self._own_parameters(), loss_id, on_device, averaged, flag, self._check_finished
        )

    def _check_finished(self) -> None:
        if self._reducers.is_unfinished():
            raise AmpUsageError(
                f'backward() with num_losses={self.policy.num_losses} reached only some of the parameters that the forward '
                f'pass used, and DistributedDataParallel waits for the others before it averages: run the model once for '
                f'each loss, with find_unused_parameters=True, or add the losses up.'
            )

    def _tell(self, loss_id: int, together: Sequence[AmpEngine], flags: Sequence[Tensor | None]) -> None:
        """Each engine of a pass learns what any of them found; the scale of the pass learns once."""
        found = [flag for flag in flags if flag is not None]
        if not found:
            return
        worst = found[0] if len(found) == 1 else torch.stack([flag.to(self._device) for flag in found]).max()
        self._flags.find(loss_id, worst)
        for engine in together:
            engine._flags.receive(worst, engine._reducers.is_local())

    def _pass_scale(self, loss_id: int, together: Sequence[AmpEngine] = ()) -> Tensor | None:
        """The scale of the coming pass: that of the gradients which wait for it, or the present one."""
        for engine in (self, *together):
            held = engine._arrivals.held
            if held is not None and held.loss_id == loss_id:
                # the scale may have moved since, where engines share it
                return held.scale
        return self._scale_of(loss_id)

    def _scale_of(self, loss_id: int) -> Tensor | None:
        scaler = self._scaler(loss_id)
        return None if scaler.is_one else scaler.current_scale

    def _shares(
        self, together: Sequence[AmpEngine] = ()
    ) -> list[tuple[AmpEngine | foreign_gradients.OtherOptimizer, foreign_gradients.Share]]:
        """What the coming backward pass may bring to optimizers that it is not meant for."""
        others = [other for other in self._others if not any(other is engine for engine in together)]
        if not others:
            return []
        mine = {id(weight) for engine in (self, *together) for weight in engine.weights()}
        shares: list[tuple[AmpEngine | foreign_gradients.OtherOptimizer, foreign_gradients.Share]] = []
        seen: set[int] = set()
        for other in others:
            if isinstance(other, AmpEngine):
                other._forget_cleared()
            theirs = other.weights()
            both = [weight for weight in theirs if id(weight) in mine]
            if (
                both
                and isinstance(other, AmpEngine)
                and other.stage is Stage.ACCUMULATING
                and other._has_gradient(both)
            ):
                raise AmpUsageError(
                    'backward() of one wrapper while another one, which steps the same parameters, has gradients waiting: '
                    'two losses would be mixed that carry different scales. Finish one window before the other begins.'
                )
            share = other.share([weight for weight in theirs if id(weight) not in mine])
            again = [weight for weight in share.parameters if id(weight) in seen]
            seen.update(map(id, share.parameters))
            if again:
                share.parameters = [weight for weight in share.parameters if not any(weight is w for w in again)]
                # without any scale it does not matter who takes them
                if share.scale() is not None or any(s.scale() is not None for _, s in shares):
                    share.contested = again
            shares.append((other, share))
        return shares

    def share(self, beyond: Sequence[Tensor]) -> foreign_gradients.Share:
        """How gradients of another engine's loss have to look for this one.

        Args:
            beyond: Those of :meth:`weights` that the other one does not step.
        """
        if self._on_arrival:
            # unscaled as they arrive, but not those that wait for the end of a pass
            return foreign_gradients.Share(beyond, lambda: self._arrivals.pending_scale, self.scalers[0].checks)
        return foreign_gradients.Share(beyond, lambda: self._scale_of(0), self.scalers[0].checks and self.attached)

    def _has_gradient(self, weights: Iterable[nn.Parameter]) -> bool:
        """Whether any of ``weights`` has one waiting, as ``.grad``, as a sum beside it, or on its master."""
        chosen = {id(weight) for weight in weights}
        return any(
            weight.grad is not None or stepped.grad is not None or (self._sums is not None and weight in self._sums)
            for weight, stepped in zip(self.weights(), self._parameters())
            if id(weight) in chosen
        )

    def _forget_cleared(self) -> None:
        """The model's own ``zero_grad()`` clears gradients, and nobody tells whose loss they came from."""
        if self._on_arrival and not self._arrivals.open:
            if self._arrivals.held is not None and not any(weight.grad is not None for weight in self.weights()):
                self._arrivals.held = None
                for _, master in self._pairs():
                    master.grad = None
            if self._arrivals.held is None:
                self._take_up(makes_room=True)
        received = self._flags.has_received and not self.in_own_window
        if (received or (self._shared and self.in_own_window)) and not self._has_gradient(self.weights()):
            if self.in_own_window:
                self._drop()
            self._flags.forget_received()

    def _take_up(self, makes_room: bool) -> None:
        """Masters follow what happened to the gradients of their weights."""
        plain = self._arrivals.take_up(self._pairs(), makes_room)
        if plain:
            flag = self._flags.new() if self.scalers[0].checks else None
            self._arrivals.add(plain, flag)
            if flag is not None:
                self._flags.receive(flag, self._reducers.is_local())

    def _drop(self) -> None:
        """Gradients are cleared before anybody stepped: what their scales were too large for, they learn all the same."""
        if self._shared and self.in_own_window and self._arrivals.held is None and not self._reducers.is_local():
            self._update_scalers()
        self._flags.clear()

    def _hand_over(
        self,
        other: AmpEngine | foreign_gradients.OtherOptimizer,
        share: foreign_gradients.Share,
        loss_id: int,
    ) -> None:
        if not share.arrived or share.found_inf is None:
            return
        if self.scalers[0].checks:
            # the scale of this loss was too large there: it is the one that has to learn
            self._flags.bring(loss_id, share.found_inf)
        if isinstance(other, AmpEngine):
            other._receive(share.found_inf)

    def _receive(self, found_inf: Tensor) -> None:
        """Gradients of another engine's loss have arrived, on our scale."""
        if self._on_arrival:
            if self._arrivals.held is None and not self._arrivals.open:
                self._arrivals.add([pair for pair in self._pairs() if pair[0].grad is not None], None)
        elif self._sums is not None:
            self._sums.take(self.weights())
        # this engine's own pass may average the gradients themselves, but not the flag
        self._flags.receive(found_inf, self._reducers.is_local())
        if self.attached:
            self.stage = Stage.ACCUMULATING

    # -- step --------------------------------------------------------------------------------------------------------

    def step(self, clip: GradientClip | None = None, **kwargs: Any) -> StepResult:
        """One optimizer step from the gradients at hand: taken, or skipped as a whole.

        With an optimizer of :mod:`amp_wrapper.optim` it takes two passes over memory, and the host never waits: what happened
        stays on the device until somebody reads the result (:meth:`review`). Optimizers that follow GradScaler's protocol, as
        torch's fused ones do, learn of a skip from a flag on the device; before all others steps, the host reads it.

        Syncs once where an optimizer cannot read the flag itself, with ``error_if_nonfinite``, and where the step may be one
        skip too many.

        Args:
            clip: How to clip, after unscaling.
            **kwargs: For the optimizer's ``step``. A closure is possible where there is no scale and no master; its
                gradients are not checked.

        Returns:
            What happened. A skipped step leaves weights, masters and optimizer state as they were, bit for bit.

        Raises:
            AmpUsageError: No backward since the last step, or a closure under a loss scale.
            OverflowStreakError: ``max_consecutive_skips`` steps in a row were non-finite.
        """
        assert self.optimizer is not None
        self._check_step(kwargs)
        if self._on_arrival:
            self._finish_arrivals()
        if kwargs.get('closure') is not None:
            # its backward passes run inside the optimizer: there is nothing to unscale, and nobody to check
            norm = None if clip is None else clip.apply(self._parameters())
            self._own('step')(**kwargs)
            self.stage = Stage.READY
            return self._result(False, None, norm)
        sides = self._sides()
        if self._masters is not None:
            self._masters.refresh(self._masters.edited())
            self._masters.follow_idle(self._sums or ())
        gradients = self._fused_gradients(clip, sides)
        if gradients is not None:
            result = self._step_fused(clip, sides, gradients, kwargs)
        else:
            result = self._step_any(clip, kwargs)
        self.stage = Stage.READY
        return result

    def _finish_arrivals(self) -> None:
        """Everything that the optimizer is about to step is unscaled, and was looked at."""
        held = self._arrivals.held
        checks = self.scalers[0].checks
        if held is not None:
            flag = self._flags.found(held.loss_id) if checks else None
            self._arrivals.release(self._pairs(), self._own_parameters(), flag)
        self._take_up(makes_room=False)
        if self._shared and checks and not self.in_own_window and not self._flags.has_received:
            # nobody scaled them, or they were stepped before
            found = [parameter.grad for parameter in self._parameters() if parameter.grad is not None]
            values = [grad.coalesce()._values() if grad.is_sparse else grad for grad in found]
            if values:
                flag = self._flags.new()
                ops.multi_tensor_isnonfinite(values, flag)
                self._flags.receive(flag, self._reducers.is_local())

    def _step_fused(
        self, clip: GradientClip | None, sides: _Sides, gradients: Sequence[Tensor | None], kwargs: dict[str, Any]
    ) -> StepResult:
        """One pass for norm and flag, one for everything else, and a decision between them, all on the device."""
        assert isinstance(self.optimizer, FusedOptimizer)
        waits = self.scalers[0].checks and self._watch.must_wait
        update = Update(gradients, sides.partners, lambda found: self._prologue(clip, found))
        with self.optimizer.updating(update):
            self._own('step')(**kwargs)
        decision = update.decision
        assert decision is not None
        norm = None if clip is None or clip.kind == 'value' else decision[GRAD_NORM]
        if self._masters is not None:
            self._masters.settle()
        if self._sums is not None:
            self._sums.clear()
        if self._on_arrival:
            skip = self._flags.skipped()
            self._update_scalers()
            result = self._result(None, None, norm, skip)
        else:
            self._flags.clear()
            result = self._result(None, decision, norm)
        if not self.scalers[0].checks:
            return dataclasses.replace(result, skipped=False)
        if not waits:
            self._watch.pass_unseen()
            return result
        assert result.decision is not None
        numbers = result.decision.tolist()
        self._see(numbers[SKIP] > 0, int(numbers[SKIPS]), int(numbers[STREAK]))
        return dataclasses.replace(result, skipped=numbers[SKIP] > 0)

    def _fused_gradients(self, clip: GradientClip | None, sides: _Sides) -> list[Tensor | None] | None:
        """The scaled gradients of all that the optimizer steps; None where the fused step cannot do it all."""
        optimizer = self.optimizer
        if not self.policy.enabled or not isinstance(optimizer, FusedOptimizer):
            return None
        fits = clip is None or clip.fits_prologue
        # nothing else can step them: what the fused step cannot do is refused
        split = self.policy.split_masters
        if split and clip is not None and not fits:
            raise AmpConfigError([clip.not_in_prologue])
        if split and has_pre_hooks(optimizer):
            raise AmpUsageError(
                "master_weights='split' with hooks before optimizer.step() (register_step_pre_hook): they would see scaled "
                '16-bit gradients, and what they write to them would come too late. Remove the hooks, or use '
                'master_weights=True.'
            )
        if not split and (not fits or has_pre_hooks(optimizer)):
            return None
        if not split and not sides.together:
            return None
        # unscaled into the masters as they arrived
        several = self._on_arrival
        found = [parameter.grad for parameter in (sides.parameters if several else sides.weights)]
        if self._sums is not None and len(self._sums) and not several:
            found = [ops.add_gradients(self._sums.get(weight), grad) for weight, grad in zip(sides.weights, found)]
        frozen = clip is not None and any(
            grad is not None and not weight.requires_grad for weight, grad in zip(sides.weights, found)
        )
        if not split and (frozen or all(grad is None for grad in found)):
            return None
        return found

    def _sides(self) -> _Sides:
        """Both sides of what the optimizer steps. Kept from step to step, and made anew where anything changed."""
        parameters = self._parameters()
        sides = self._kept_sides
        if sides is None or not sides.are_of(parameters):
            if self._masters is not None:
                self._masters.adopt()
                parameters = self._parameters()
            sides = self._kept_sides = _Sides(parameters, self._masters, self._device)
        return sides

    def _prologue(self, clip: GradientClip | None, found: Sequence[Tensor]) -> dict[str, Any]:
        """The first pass, and what the decision is made from."""
        scaler = self.scalers[0]
        # unscaled and looked at as they arrived
        several = self._on_arrival
        flag = self._flags.found(0) if scaler.checks and not several else None
        words: dict[str, Any] = {} if several else scaler.prologue(self._flags.used[0])
        if clip is not None:
            words |= clip.prologue()
        if clip is not None and clip.kind == 'norm':
            words['norm'] = clip.norm(found, flag)
        elif flag is not None:
            ops.multi_tensor_isnonfinite(found, flag)
        if scaler.checks:
            self._agree()
            words['found_inf'] = self._flags.skipped()
            if not several and not self._flags.are_own:
                words['learned'] = self._flags.learned(0)
        if clip is not None and clip.raises_on_nonfinite and 'norm' in words:
            clip.refuse_nonfinite(words['norm'], words.get('found_inf'), scaler.is_dynamic)
        return words

    def _step_any(self, clip: GradientClip | None, kwargs: dict[str, Any]) -> StepResult:
        """Unscale, find out, clip, step, copy: each in its turn, for optimizers that know nothing of us."""
        assert self.optimizer is not None
        checks = self.scalers[0].checks
        waits = checks and self._watch.must_wait
        raises = clip is not None and clip.raises_on_nonfinite
        # where no master is, sums stay in torch's order: O1 clips with the bits of mmengine's wrapper
        known = self._unscale(clip is not None and clip.is_euclidean and bool(self._pairs()))
        if checks:
            self._agree()
        skip = self._flags.skipped() if checks else None
        by_flag = skip is not None and not waits and not raises and takes_flag(self.optimizer)
        late = None
        if skip is not None and not by_flag:
            late = LateRead(torch.cat([skip.double().reshape(1), self._tally.counts[1:].double()]))
        norm = None
        if clip is not None and not waits and not raises:
            # goes on while the flag is on its way; where somebody may ask for names, gradients stay as they are
            norm = clip.apply(self._parameters(), known)
        found, skips, streak = late.wait() if late is not None else (0.0, 0.0, 0.0)
        skipped = found > 0
        if raises and skipped and not self.scalers[0].is_dynamic:
            # asked for by the user, and no dynamic scale is there that would learn from the overflow
            assert clip is not None
            clip.apply(self._parameters())
            raise RuntimeError('The total norm of gradients is non-finite on another rank, so it cannot be clipped.')
        if not skipped:
            if clip is not None and norm is None:
                norm = clip.apply(self._parameters(), known)
            skipping = flagged(self.optimizer, skip) if by_flag and skip is not None else nullcontext()
            with late_gradients(self.optimizer), skipping:
                self._own('step')(**kwargs)
            if self._masters is not None:
                self._masters.copy_to_weights()
        self._update_scalers()
        if by_flag:
            self._watch.pass_unseen()
            return self._result(None, None, norm, skip)
        if late is not None:
            self._see(skipped, int(skips) + skipped, (int(streak) + 1) * skipped)
        return self._result(skipped, None, norm, skip)

    def _agree(self) -> None:
        self._flags.agree(self._reducers.groups_to_ask(self._flags.received_locally))

    def _see(self, skipped: bool, skips: int, streak: int) -> None:
        """The host knows what this step did."""
        if self._watch.see(skipped, skips, streak, self._scales, self.label):
            self._raise_streak(streak)

    def _result(
        self, skipped: bool | None, decision: Tensor | None, norm: Tensor | None, skip: Tensor | None = None
    ) -> StepResult:
        scaler = self.scalers[0]
        shows = [
            *(['grad_norm'] if norm is not None else []),
            *(['loss_scale'] if scaler.checks and scaler.is_dynamic else []),
            *(['skips'] if scaler.checks else []),
        ]
        if not shows:
            return StepResult(skipped)
        if decision is None:
            decision = decision_of(skip, norm, scaler.current_scale, self._tally.counts)
        return StepResult(skipped, decision, tuple(shows))

    def review(self, decisions: Iterable[Sequence[float]]) -> None:
        """Take notice of steps that nobody waited for: says what was skipped, and finds rows of skips.

        Args:
            decisions: :attr:`StepResult.decision` of all steps since the last one known, in order, on the host.
        """
        self._watch.review(decisions, self._scales, len(self.scalers) == 1, self.label)

    def _check_step(self, kwargs: Mapping[str, Any]) -> None:
        scaler = self.scalers[0]
        if self._arrivals.open:
            raise AmpUsageError(
                'step() inside the "with amp.scale_loss(...)" block of the same optimizer: its gradients are still scaled. '
                'Step after the block.'
            )
        plain = self._shared or (scaler.is_one and not scaler.checks and self._masters is None)
        if kwargs.get('closure') is not None:
            if scaler.is_one and self._masters is None:
                return
            raise AmpUsageError(
                f'step(closure=...) at {self.policy.opt_level}: a closure would run backward passes that nobody unscales. '
                f"Call update_params(loss) or backward() and step(), or use a level without scale and masters ('O0', 'O4')."
            )
        if self.stage is not Stage.ACCUMULATING and not plain:
            raise AmpUsageError(
                'step() without a backward() of this wrapper since the last step: gradients of loss.backward() carry no '
                'loss scale, and unscaling twice is wrong. Call optim_wrapper.backward(loss), or update_params(loss).'
            )

    def _unscale(self, norm: bool) -> Tensor | None:
        """Gradients where the optimizer looks for them; their Euclidean norm, where it came with the same pass."""
        if self._on_arrival:
            return None  # done as each backward arrived
        scaler = self.scalers[0]
        found = gradients.unscale_to_masters(
            self._pairs(),
            self._own_parameters(),
            scaler.inverse_scale(),
            self._flags.found(0) if scaler.checks else None,
            (lambda weight: None) if self._sums is None else self._sums.get,
            norm,
        )
        if self._sums is not None:
            # they are the masters' gradients now
            self._sums.clear()
        return found

    def _update_scalers(self) -> None:
        worst = self._flags.skipped()
        skipped = torch.zeros((), device=self._device) if worst is None else worst
        self._learning = tuple(index for index, used in enumerate(self._flags.used) if used)
        for index, scaler in enumerate(self.scalers):
            # a step is skipped for all losses; a scale moves only for a loss that took part
            if index in self._learning and scaler.checks:
                device = scaler.current_scale.device
                scaler.update(self._flags.learned(index).to(device), skipped.to(device))
            elif not self._shared:
                scaler.count_step(skipped)
        if self._shared:
            self._tally.count_step(skipped)
        self._flags.clear()

    def _scales(self) -> str:
        """The loss scales as text. Syncs."""
        if len(self.scalers) == 1:
            return f'{self.scalers[0].get_scale():g}'
        chosen = (self._shared and self._learning) or range(len(self.scalers))
        return ', '.join(f'loss {index}: {self.scalers[index].get_scale():g}' for index in chosen)

    def _raise_streak(self, streak: int) -> None:
        """The limit of skips in a row is reached; the gradients are still there. Syncs."""
        named = [(self._name(p), p) for p in (*self._own_parameters(), *(master for _, master in self._pairs()))]
        # after a fused step they lie where backward put them
        named += [(self._name(weight), weight) for weight, master in self._pairs() if master.grad is None]
        names = gradients.nonfinite_names(named)
        shown = ', '.join(names[:8]) + (f' and {len(names) - 8} more' if len(names) > 8 else '')
        scale = self._scales()
        self.zero_grad()
        raise OverflowStreakError(
            f'{streak} optimizer steps in a row had non-finite gradients (max_consecutive_skips='
            f'{self.policy.max_consecutive_skips}); the loss scale is {scale}. Non-finite now: {shown}. Weights and '
            f'optimizer state are those of the last clean step. What to try: look for NaN in the data and the loss; lower the '
            f'learning rate or add clip_grad; keep the named modules in FP32 (keep_fp32=[...]); use bfloat16 '
            f"(dtype='bfloat16')."
        )

    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients of the optimizer's parameters and of the model weights behind its masters.

        Args:
            **kwargs: For ``Optimizer.zero_grad`` (``set_to_none``).
        """
        assert self.optimizer is not None
        self._drop()
        self._arrivals.clear()
        self._own('zero_grad')(**kwargs)
        for weight, master in self._pairs():
            if kwargs.get('set_to_none', True):
                weight.grad = None
            elif weight.grad is not None:
                weight.grad.zero_()
            # a master's gradient is made anew at each step: keeping zeros would only cost memory
            master.grad = None
        if self._sums is not None:
            self._sums.clear()
        if self.attached:
            self.stage = Stage.READY

    # -- what the optimizer steps ------------------------------------------------------------------------------------

    def master_params(self) -> Iterator[Tensor]:
        """Every tensor that the optimizer steps: FP32 masters, 16-bit weights that are split, and FP32 parameters."""
        if self._masters is not None:
            self._masters.adopt()
        yield from self._parameters()

    def weights_changed(self, tensors: Iterable[Tensor] | None = None) -> list[str]:
        """Say that model weights were edited, through ``.data`` too: the masters follow the weights. Syncs.

        Args:
            tensors: The edited parameters; all of them by default, but split weights have to be named.

        Returns:
            The names of the weights that differed from their masters, or that are split.

        Raises:
            AmpUsageError: No ``tensors``, and the weights are split.
        """
        return [] if self._masters is None else self._masters.changed(tensors)

    def weights(self) -> list[nn.Parameter]:
        """The model's side of what the optimizer steps: the weights behind masters, and parameters that are their own."""
        if self.optimizer is None:
            return []
        parameters = self._parameters()
        return parameters if self._masters is None else [self._masters.weight_of(p) for p in parameters]

    def _parameters(self) -> list[nn.Parameter]:
        assert self.optimizer is not None
        return [parameter for group in self.optimizer.param_groups for parameter in group['params']]

    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        # split weights are stepped themselves
        return list(self._masters.pairs) if isinstance(self._masters, MasterWeights) else []

    def _own_parameters(self) -> list[nn.Parameter]:
        masters = self._masters
        return [p for p in self._parameters() if masters is None or not masters.is_master(p)]

    def _name(self, parameter: Tensor) -> str:
        if self._masters is not None and isinstance(parameter, nn.Parameter):
            parameter = self._masters.weight_of(parameter)
        return self._names.get(id(parameter), f'<parameter of shape {tuple(parameter.shape)}>')

    def _scaler(self, loss_id: int) -> LossScaler:
        if not isinstance(loss_id, int) or not 0 <= loss_id < len(self.scalers):
            raise AmpUsageError(
                f'loss_id={loss_id!r} is not below num_losses={len(self.scalers)}: raise num_losses in the configuration.'
            )
        return self.scalers[loss_id]

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state dict and, unless disabled, what :mod:`amp_wrapper.checkpoint` adds to it. Syncs."""
        assert self.optimizer is not None
        state: dict[str, Any] = self.optimizer.state_dict()
        if not self.policy.enabled:
            return state
        stock_shaped = self.policy.opt_level in ('O1', 'O4') and len(self.scalers) == 1
        return checkpoint.write(
            state,
            self.policy.to_dict(),
            [scaler.state_dict() for scaler in self.scalers],
            self._open_window(),
            stock_shaped,
        )

    def _open_window(self) -> checkpoint.Window | None:
        if self.stage is not Stage.ACCUMULATING:
            return None
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed and torch.distributed.get_world_size() > 1 and not self._reducers.same_everywhere():
            logger.warning(
                'amp: saved inside an accumulation window of several processes: the gradients of the open window are '
                'not in the checkpoint. Save at the end of a window for an exact resume.',
            )
            return None
        return open_window.save(
            list(zip(self.weights(), self._parameters())),
            self._sums,
            self._on_arrival,
            self._flags,
        )

    def check_state_dict(self, state: Mapping[str, Any]) -> checkpoint.SavedAmp:
        """Judge whether a state dict can be taken over, applying nothing.

        Args:
            state: As for :meth:`load_state_dict`.

        Raises:
            AmpCheckpointError: Names the key and what was expected.
        """
        assert self.optimizer is not None
        saved = checkpoint.read(state)
        checkpoint.check_optimizer_state(saved, self.optimizer)
        checkpoint_judge.check_optimizer(saved.optimizer, self.optimizer, checkpoint.PARAMETER_SHAPED)
        return saved

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Take over a state dict; before or after :meth:`attach`.

        Args:
            state: From :meth:`state_dict`, from mmengine's stock wrappers, from apex or from a bare optimizer. Not changed, and
                not aliased.

        Returns:
            At most one line each for what was kept, converted, dropped, and begun anew.

        Raises:
            AmpCheckpointError: Nothing has been applied.
        """
        assert self.optimizer is not None
        saved = self.check_state_dict(state)
        try:
            # torch aliases tensors of the right type: without a copy, training would write into the caller's dict
            self.optimizer.load_state_dict(copy.deepcopy(saved.optimizer))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise AmpCheckpointError(
                f'the optimizer state does not fit {type(self.optimizer).__name__}: {error}'
            ) from error
        if not self.policy.enabled:
            dropped = [] if saved.kind == 'plain' else ['the loss scale, for mixed precision is off']
            return checkpoint_transfer.describe(saved, self.policy, [], dropped)
        keep_scalar_state(self.optimizer, saved.optimizer)
        self._pending = None
        if self.attached:
            self.zero_grad()
        scales, dropped = self._load_scalers(saved)
        self._watch.start(int(self.scalers[0].counts[2]))
        if saved.window is not None:
            if not checkpoint_transfer.window_fits(saved, self.policy):
                dropped.append('the gradients of the open accumulation window, which belong to another configuration')
            elif self.attached:
                self._restore_window(saved)
            else:
                # the window alone: a second copy of the optimizer state would wait in memory for nothing
                self._pending = dataclasses.replace(saved, optimizer={}, window=copy.deepcopy(saved.window))
        new = [scaler.get_scale() for scaler in self.scalers[len(saved.loss_scalers) :] if scaler.is_dynamic]
        return checkpoint_transfer.describe(saved, self.policy, scales, dropped, new)

    def _load_scalers(self, saved: checkpoint.SavedAmp) -> tuple[list[float], list[str]]:
        """Returns the scales that were taken over, and a phrase for each thing that was not."""
        dropped: list[str] = []
        scales: list[float] = []
        for index, (scaler, state) in enumerate(zip(self.scalers, saved.loss_scalers)):
            label = f'loss {index}: ' if len(self.scalers) > 1 else ''
            dropped += [label + note for note in scaler.load_state_dict(state)]
            if scaler.is_dynamic and state.get('dynamic', True) and state:
                scales.append(scaler.get_scale())
        further = [f'{state["scale"]:g}' for state in saved.loss_scalers[len(self.scalers) :] if state]
        if further:
            dropped.append(f'the loss scales {", ".join(further)} of further losses, for which none is configured')
        return scales, dropped

    def _restore_window(self, saved: checkpoint.SavedAmp) -> None:
        window = saved.window
        assert window is not None
        open_window.restore(window, list(zip(self.weights(), self._parameters())), self._sums)
        self._flags.restore(window.used, window.found_inf, window.foreign_found_inf)
        self.stage = Stage.ACCUMULATING
        logger.info(
            'amp: the gradients of the open accumulation window were in the checkpoint and are back: nothing of it is lost',
        )


def attach_together(engines: Sequence[AmpEngine], models: Sequence[nn.Module], policy: Policy) -> casting.CastHandle:
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
    several = len(models) > 1
    roots = [(f'models[{index}]' if several else '', model) for index, model in enumerate(models)]
    for model in models:
        if policy.runs_16_bit:
            scope.check_compiled(model)
        scope.unwrap(model)
        if policy.casts_model:
            check_unknown_listeners(model)
    names = {id(parameter): key for name, model in roots for key, parameter in model.named_parameters(prefix=name)}
    for engine in engines:
        engine._names = names
        engine._reducers = Reducers(
            None, engine.weights, [(names[id(p)], p) for p in engine.weights() if id(p) in names]
        )
        engine.join([other for other in engines if other is not engine])
    plan = casting.CastPlan(roots, policy, covers_forward=True)
    for engine in engines:
        engine._make_masters(plan)
    handle = plan.apply()
    for engine in engines:
        engine._take_cast(plan)
        engine._reducers.watch(models)
        engine._begin(engine._gradient_device(models[0] if models else None))
    return handle


def new_scalers(policy: Policy) -> list[LossScaler]:
    """One for each loss."""
    config = policy.loss_scale if policy.enabled else dataclasses.replace(policy.loss_scale, enabled=False)
    return [LossScaler(config, policy.skip_nonfinite) for _ in range(policy.num_losses)]


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


__all__: Sequence[str] = ('AmpEngine', 'Stage', 'StepResult')
