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
import logging
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
from .errors import AmpAttachError, AmpCheckpointError, AmpConfigError, AmpError, AmpUsageError, OverflowStreakError
from .gradients import GradientClip
from .late_read import LateRead, flagged, has_pre_hooks, late_gradients, takes_flag
from .loss_scaler import LossScaler
from .master_weights import MasterWeights, cast_state_to_parameters, keep_scalar_state, warn_of_lost_eps
from .model_wrappers import Reducers, check_unknown_listeners
from .nested import HALF_TYPES, EnterObject
from .optim.fused import FusedOptimizer, Update
from .policy import Policy, dtype_name
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

    Raises:
        AmpAttachError: An optimizer that cannot be wrapped.
    """

    def __init__(self, policy: Policy, optimizer: Optimizer | None) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.stage = Stage.DETACHED
        #: What log lines call this engine, where there are several.
        self.label = ''
        self.scalers = [self._new_scaler() for _ in range(policy.num_losses)]
        self._handle: casting.CastHandle | None = None
        self._ops: fp32_ops.OpSet | None = None
        self._seen_ops: set[frozenset[str]] = set()
        self._masters: MasterWeights | SplitWeights | None = None
        self._names: dict[int, str] = {}
        self._reducers = Reducers(None, self.weights)
        self._sums = Fp32Sums() if policy.sums_in_fp32 else None
        self._others: tuple[AmpEngine | foreign_gradients.OtherOptimizer, ...] = ()
        self._flags = StepFlags(policy.num_losses)
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

    def _new_scaler(self) -> LossScaler:
        config = self.policy.loss_scale
        if not self.policy.enabled:
            config = dataclasses.replace(config, enabled=False)
        return LossScaler(config, self.policy.skip_nonfinite)

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
            if self.optimizer is not None and self.policy.split_masters:
                assert self.policy.cast_model_type is not None
                self._masters = SplitWeights(self.optimizer, plan.parameters, self.policy.cast_model_type)
            elif self.optimizer is not None and self.policy.master_weights:
                self._masters = MasterWeights(self.optimizer, plan.parameters, twins.pair, twins.fp32_twin)
            self._handle = plan.apply()
            self._ops = plan.ops
            if self._masters is not None:
                # the cast rounded each weight; copying again settles the version counters
                self._masters.copy_to_weights()
            elif self.optimizer is not None and not isinstance(self.optimizer, FusedOptimizer):
                # ours compute in FP32, and keep their state in the type they were given
                cast_state_to_parameters(self.optimizer, [*plan.parameters.values(), *shared_weights])
                if plan.parameters and self.policy.verbosity >= 1 and self.policy.cast_model_type is not None:
                    warn_of_lost_eps(self.optimizer, self.policy.cast_model_type)
            self._reducers = reducers
            reducers.rebuild(plan.parameters.values())
            reducers.record()
            if self.policy.verbosity >= 2 and self.policy.casts_model:
                self._log_casts(plan)
        self._device = self._gradient_device(model)
        self._kept_sides = None
        self._flags.to(self._device)
        for scaler in self.scalers:
            scaler.to(self._device)
        self.stage = Stage.READY
        pending, self._pending = self._pending, None
        if pending is not None:
            self._restore_window(pending)

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

    def _log_casts(self, plan: casting.CastPlan) -> None:
        assert self.policy.cast_model_type is not None
        for name in plan.parameters:
            logger.info(f'amp: {name} is {dtype_name(self.policy.cast_model_type)} now')

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

    def scale(self, loss: Tensor, loss_id: int = 0) -> Tensor:
        """``loss`` times the scale of ``loss_id``, in float32; ``loss`` itself where nothing is scaled.

        Raises:
            AmpUsageError: No such loss.
        """
        return self._scaler(loss_id).scale(loss)

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
        self._forget_cleared()
        averaged = self._reducers.begin_backward()
        if self.policy.num_losses > 1 and self.policy.enabled and not averaged:
            raise AmpUsageError(
                f'backward() with num_losses={self.policy.num_losses} under no_sync: unscaling each loss on arrival would '
                f'keep its gradients from the other ranks. Use accumulative_counts=1, or one loss.'
            )
        shares = self._shares()
        if self._sums is not None:
            self._sums.give_back(self._reducers.about_to_average())
        averaged_ones = self._reducers.about_to_average(everywhere=True) if shares else frozenset()
        with foreign_gradients.converted([share for _, share in shares], self._scale_of(loss_id), averaged_ones):
            # checkpointed segments are recomputed in there
            with nullcontext() if self._ops is None else fp32_ops.in_backward(self._ops, self._seen_ops):
                if self.policy.num_losses > 1 and self.policy.enabled:
                    self._backward_on_arrival(scaled, loss_id, kwargs)
                else:
                    scaled.backward(**kwargs)  # type: ignore[no-untyped-call]
        self._reducers.end_backward()
        if self._sums is not None:
            self._sums.take(self.weights())
        for other, share in shares:
            self._hand_over(other, share, loss_id)
        self._flags.used[loss_id] = True
        self.stage = Stage.ACCUMULATING

    def _scale_of(self, loss_id: int) -> Tensor | None:
        scaler = self._scaler(loss_id)
        return None if scaler.is_one else scaler.current_scale

    def _shares(self) -> list[tuple[AmpEngine | foreign_gradients.OtherOptimizer, foreign_gradients.Share]]:
        """What the coming backward pass may bring to other optimizers."""
        if not self._others:
            return []
        mine = {id(weight) for weight in self.weights()}
        shares: list[tuple[AmpEngine | foreign_gradients.OtherOptimizer, foreign_gradients.Share]] = []
        seen: set[int] = set()
        for other in self._others:
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
        unscaled = self.policy.num_losses > 1 and self.policy.enabled
        return foreign_gradients.Share(
            beyond, lambda: None if unscaled else self._scale_of(0), self.scalers[0].checks and self.attached
        )

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
        if self._flags.has_received and not self.in_own_window and not self._has_gradient(self.weights()):
            self._flags.forget_received()

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
        if self.policy.num_losses > 1 and self.policy.enabled:
            gradients.accumulate_unscaled(self._pairs(), [], {}, None, None)
        elif self._sums is not None:
            self._sums.take(self.weights())
        # this engine's own pass may average the gradients themselves, but not the flag
        self._flags.receive(found_inf, self._reducers.is_local())
        if self.attached:
            self.stage = Stage.ACCUMULATING

    def _backward_on_arrival(self, scaled: Tensor, loss_id: int, kwargs: dict[str, Any]) -> None:
        """Several scales must never mix in one gradient: each pass is unscaled alone, and the sums are FP32."""
        own = self._own_parameters()
        # copies: DDP may have moved them into its buckets, which this pass overwrites
        before = {id(p): p.grad.clone() for p in own if p.grad is not None}
        for parameter in own:
            parameter.grad = None
        try:
            scaled.backward(**kwargs)  # type: ignore[no-untyped-call]
            if self._reducers.is_unfinished():
                raise AmpUsageError(
                    f'backward() with num_losses={self.policy.num_losses} reached only some of the parameters that the forward '
                    f'pass used, and DistributedDataParallel waits for the others before it averages: run the model once for '
                    f'each loss, with find_unused_parameters=True, or add the losses up.'
                )
        except BaseException:
            for parameter in own:
                parameter.grad = before.get(id(parameter))
            for weight, _ in self._pairs():
                weight.grad = None
            raise
        scaler = self._scaler(loss_id)
        found = self._flags.found(loss_id) if scaler.checks else None
        gradients.accumulate_unscaled(self._pairs(), own, before, scaler.inverse_scale(), found)

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
        if kwargs.get('closure') is not None:
            # its backward passes run inside the optimizer: there is nothing to unscale, and nobody to check
            norm = None if clip is None else clip.apply(self._parameters())
            self.optimizer.step(**kwargs)
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

    def _step_fused(
        self, clip: GradientClip | None, sides: _Sides, gradients: Sequence[Tensor | None], kwargs: dict[str, Any]
    ) -> StepResult:
        """One pass for norm and flag, one for everything else, and a decision between them, all on the device."""
        assert isinstance(self.optimizer, FusedOptimizer)
        waits = self.scalers[0].checks and self._watch.must_wait
        update = Update(gradients, sides.partners, lambda found: self._prologue(clip, found))
        with self.optimizer.updating(update):
            self.optimizer.step(**kwargs)
        decision = update.decision
        assert decision is not None
        norm = None if clip is None or clip.kind == 'value' else decision[GRAD_NORM]
        if self._masters is not None:
            self._masters.settle()
        if self._sums is not None:
            self._sums.clear()
        if self.policy.num_losses > 1:
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
        # with several losses each was unscaled into the masters as it arrived
        several = self.policy.num_losses > 1
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
        # with several losses, each was unscaled and looked at as it arrived
        several = self.policy.num_losses > 1
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
            late = LateRead(torch.cat([skip.double().reshape(1), self.scalers[0].counts[1:].double()]))
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
                self.optimizer.step(**kwargs)
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
            decision = decision_of(skip, norm, scaler.current_scale, scaler.counts)
        return StepResult(skipped, decision, tuple(shows))

    def review(self, decisions: Iterable[Sequence[float]]) -> None:
        """Take notice of steps that nobody waited for: says what was skipped, and finds rows of skips.

        Args:
            decisions: :attr:`StepResult.decision` of all steps since the last one known, in order, on the host.
        """
        self._watch.review(decisions, self._scales, len(self.scalers) == 1, self.label)

    def _check_step(self, kwargs: Mapping[str, Any]) -> None:
        scaler = self.scalers[0]
        plain = scaler.is_one and not scaler.checks and self._masters is None
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
        if self.policy.num_losses > 1:
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
        for index, scaler in enumerate(self.scalers):
            # a step is skipped for all losses; a scale moves only for a loss that took part
            if self._flags.used[index] and scaler.checks:
                scaler.update(self._flags.learned(index), skipped)
            else:
                scaler.count_step(skipped)
        self._flags.clear()

    def _scales(self) -> str:
        """The loss scales as text. Syncs."""
        if len(self.scalers) == 1:
            return f'{self.scalers[0].get_scale():g}'
        return ', '.join(f'loss {index}: {scaler.get_scale():g}' for index, scaler in enumerate(self.scalers))

    def _raise_streak(self, streak: int) -> None:
        """The limit of skips in a row is reached; the gradients are still there. Syncs."""
        named = [(self._name(p), p) for p in (*self._own_parameters(), *(master for _, master in self._pairs()))]
        # after a fused step they lie where backward put them
        named += [(self._name(weight), weight) for weight, master in self._pairs() if master.grad is None]
        names = gradients.nonfinite_names(named)
        shown = ', '.join(names[:8]) + (f' and {len(names) - 8} more' if len(names) > 8 else '')
        scale = self.scalers[0].get_scale()
        self.zero_grad()
        raise OverflowStreakError(
            f'{streak} optimizer steps in a row had non-finite gradients (max_consecutive_skips='
            f'{self.policy.max_consecutive_skips}); the loss scale is {scale:g}. Non-finite now: {shown}. Weights and '
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
        self.optimizer.zero_grad(**kwargs)
        for weight, master in self._pairs():
            if kwargs.get('set_to_none', True):
                weight.grad = None
            elif weight.grad is not None:
                weight.grad.zero_()
            # a master's gradient is made anew at each step: keeping zeros would only cost memory
            master.grad = None
        if self._sums is not None:
            self._sums.clear()
        self._flags.clear()
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
            self.policy.num_losses > 1,
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


def _state_to_fp32(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dtype in HALF_TYPES:
                state[key] = value.float()


__all__: Sequence[str] = ('AmpEngine', 'Stage', 'StepResult')
