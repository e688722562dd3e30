"""Mixed precision for one optimizer: the order of a training step, written once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.format import SavedAmp
from ..compiler_internals import untraced
from ..errors import AmpUsageError
from ..policy import Policy
from ..policy.nested import EnterObject
from . import attach, forward
from .backward import BackwardPass, backward_pass, scale_of
from .clipping import GradientClip
from .gradients.cross_optimizer import OtherOptimizer
from .gradients.unscale import NO_GRAPH
from .loss_scale import LossScaler
from .overflow import StepResult
from .parts import EngineParts, Stage
from .state import check_state, load_state, restore_accumulation, state_of
from .step import EagerStep, FusedStep, StepChecks, finish_gradients, step_with_closure


class AmpEngine:
    """Mixed precision for one optimizer.

    The path of one update:

    1. :meth:`scale`: the loss times the loss scale, which does not change before 7;
    2. :meth:`backward`: gradients arrive on the model weights, 16-bit where these are, and are averaged over the ranks;
    3. :meth:`step` looks for weights that somebody else changed (they win over their masters),
    4. finds out whether any gradient element is non-finite, and how long the gradient is,
    5. decides, the same on every rank,
    6. unscales, clips, steps the optimizer and copies masters to the model weights, or skips all of this,
    7. moves the loss scale.

    With the optimizers of :mod:`amp_wrapper.optim` 4 is one pass over the gradients, 5 and 7 are one small kernel, 6 is one
    pass over everything, and the host reads nothing (:class:`~amp_wrapper.engine.step.FusedStep`). With any other one,
    unscaling comes first, together with 4, and each of the rest is a pass of its own
    (:class:`~amp_wrapper.engine.step.EagerStep`).
    Gradients of several losses, and of engines that share their scales, are unscaled at the end of 2 (``UnscaledGradients``).

    Args:
        policy: The configuration.
        optimizer: Any :class:`torch.optim.Optimizer` whose ``step`` needs no closure, or None for inference.
        scalers: The loss scales, where several engines share them; one for each loss. Gradients are unscaled at each backward
            pass then, so that none depends on when another engine steps. None: scales of its own.

    Raises:
        AmpAttachError: An optimizer that cannot be wrapped.

    Attributes:
        parts: What it is composed of.
    """

    def __init__(
        self, policy: Policy, optimizer: Optimizer | None, scalers: Sequence[LossScaler] | None = None
    ) -> None:
        self.parts = EngineParts(policy, optimizer, scalers)
        self._fused = FusedStep(self.parts)
        self._eager = EagerStep(self.parts)
        self._checks = StepChecks(self.parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> AmpEngine:
        if self.attached and self.policy.enabled:
            raise AmpUsageError(
                'a deep copy of an attached wrapper would know neither the copied weights nor their masters: copy before the '
                'first forward pass, or copy the model alone and build a wrapper for it.'
            )
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    # -- what it is --------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The configuration."""
        return self.parts.policy

    @property
    def optimizer(self) -> Optimizer | None:
        """Whose step it is."""
        return self.parts.optimizer

    @property
    def stage(self) -> Stage:
        """Where it stands between two optimizer steps."""
        return self.parts.stage

    @property
    def scalers(self) -> list[LossScaler]:
        """The loss scales, one for each loss."""
        return self.parts.scales.scalers

    @property
    def attached(self) -> bool:
        """Whether :meth:`attach` has run."""
        return self.parts.attached

    @property
    def is_plain(self) -> bool:
        """Whether gradients go from backward to the optimizer untouched and unchecked."""
        return self.parts.is_plain

    # -- weights and masters -----------------------------------------------------------------------------------------

    def weights(self) -> list[nn.Parameter]:
        """The model's parameters that the optimizer steps: the weights behind masters, and those without a master."""
        return self.parts.weights()

    def master_params(self) -> Iterator[Tensor]:
        """Every tensor that the optimizer steps: FP32 masters, 16-bit weights that are split, and FP32 parameters.

        Masters of weights that somebody wrote to have the new values."""
        params = self.parts.params
        params.adopt()
        with suppress(AmpUsageError):
            # where weight and master were both written to, the error comes when one of them would be lost
            params.synchronise()
        yield from params.parameters()

    def weights_changed(self, tensors: Iterable[Tensor] | None = None) -> list[str]:
        """Say that model weights were edited, through ``.data`` too: the masters follow the weights. Syncs.

        Args:
            tensors: The edited parameters; all of them by default, but split weights have to be named.

        Returns:
            The names of the weights that differed from their masters, or that are split.

        Raises:
            AmpUsageError: No ``tensors``, and the weights are split, or a master was written to as well; a master among them.
        """
        return self.parts.params.changed('weight', tensors)

    def masters_changed(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Say that FP32 masters were edited, through ``.data`` too: the weights follow the masters. No host read.

        Args:
            tensors: The edited masters; all of them by default. Split weights are their own, and have to be named.

        Raises:
            AmpUsageError: No ``tensors``, and the weights are split, or a weight was written to as well; a weight among them.
        """
        self.parts.params.changed('master', tensors)

    # -- attaching ---------------------------------------------------------------------------------------------------

    def join(self, others: Iterable[AmpEngine | OtherOptimizer]) -> None:
        """Say whose parameters the losses of this engine may reach as well, before attaching.

        Args:
            others: The engines and plain optimizers of one training, without this one.

        Raises:
            AmpAttachError: A parameter that two optimizers step, at levels that cannot share it.
        """
        attach.join(self.parts, [other.parts if isinstance(other, AmpEngine) else other for other in others])

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
        parts = self.parts
        if parts.attached:
            return
        if not parts.policy.enabled:
            parts.stage = Stage.READY
            return
        if model is not None:
            attach.attach_model(parts, model, leave, average, foreign, enter)
        elif parts.policy.casts_model:
            raise AmpUsageError(
                f'{parts.policy.opt_level} casts the model, but no model was handed over before the first backward: '
                f'run the forward pass under "with optim_wrapper.optim_context(model):".'
            )
        attach.begin(parts, model)
        pending, parts.pending = parts.pending, None
        if pending is not None and pending.window is not None:
            restore_accumulation(parts, pending.window)

    def detach(self) -> None:
        """Take the hooks off, give the model FP32 weights (the masters) and the optimizer its own parameters back.

        DDP modules average FP32 gradients again; every rank calls this.

        Raises:
            AmpUsageError: Gradients are waiting for a step; a weight and its master that were both written to.
        """
        if self.parts.attached:
            attach.detach_model(self.parts)

    # -- a training step ---------------------------------------------------------------------------------------------

    @untraced
    def before_forward(self, model: nn.Module) -> None:
        """Weights follow masters that somebody wrote to, and the other way round. DDP modules take notice of parameters that
        were frozen, unfrozen or added since the last forward call. Every rank calls this, before it enters ``no_sync``.

        Args:
            model: What is about to run.

        Raises:
            AmpUsageError: A change of ``requires_grad`` that DDP cannot follow, or ranks with another number of steps; a weight
                and its master that were both written to.
        """
        if self.policy.enabled:
            forward.prepare(self.parts, model)

    def forward_context(self, model: nn.Module) -> AbstractContextManager[None]:
        """What surrounds a training forward call: autocast at O1 and O4, nothing at the levels that cast.

        Args:
            model: Says on which device autocast works.
        """
        return forward.surround(self.parts, model)

    def scale(self, loss: Tensor, loss_id: int = 0, together: Sequence[AmpEngine] = ()) -> Tensor:
        """``loss`` times the scale of ``loss_id``, in float32; ``loss`` itself where nothing is scaled.

        Args:
            loss: Floating tensor of any shape.
            loss_id: Which scaler; below ``num_losses``.
            together: As in :meth:`receiving`.

        Raises:
            AmpUsageError: No such loss.
        """
        scaler = self.parts.scales.of(loss_id)
        all_parts = [self.parts, *(engine.parts for engine in together)]
        for observer in [observer for parts in all_parts for observer in parts.observers]:
            observer.see_loss(self.parts, loss, loss_id)
        return scaler.scale(loss, scale_of(all_parts, loss_id) if self.parts.gradients.unscaled else None)

    @untraced
    def backward(self, loss: Tensor, loss_id: int = 0, **kwargs: Any) -> None:
        """Scale the loss and run its backward pass.

        Args:
            loss: Scalar.
            loss_id: Which scaler; below ``num_losses``.
            **kwargs: For :meth:`torch.Tensor.backward`.

        Raises:
            AmpUsageError: No such loss, several losses under ``no_sync``, or ``create_graph=True`` with a scale or masters.
        """
        parts = self.parts
        scaled = self.scale(loss, loss_id)
        if parts.stage is Stage.DETACHED:
            self.attach(None)
        if kwargs.get('create_graph') and (parts.params.have_fp32_values or not parts.scales.of(loss_id).is_one):
            raise AmpUsageError(NO_GRAPH)
        with backward_pass(parts, loss_id):
            scaled.backward(**kwargs)  # type: ignore[no-untyped-call]

    def receiving(
        self, loss_id: int = 0, together: Sequence[AmpEngine] = (), beyond: Sequence[AmpEngine] = ()
    ) -> AbstractContextManager[Callable[[], None]]:
        """Around one backward pass of a loss that :meth:`scale` has scaled, whoever runs it.

        Args:
            loss_id: Which scaler.
            together: Further engines that will step with its gradients. This one's scale holds for all, and is updated; where
                a gradient of any is non-finite, all skip their next step.
            beyond: Further engines whose parameters may get gradients, as those of :meth:`join`.

        Returns:
            A context; it gives what to call where the pass begins inside, if passes for others may be under way by then.

        Raises:
            AmpUsageError: As :meth:`backward`; inside another pass of the same engine. All gradients are as before, and so they
                are after any exception inside, where gradients are unscaled at each backward pass.
        """
        engines = [self.parts, *(engine.parts for engine in together)]
        return BackwardPass(engines, loss_id, [engine.parts for engine in beyond])

    @untraced
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
            AmpUsageError: No backward since the last step, or a closure under a loss scale; a weight and its master that were
                both written to by others.
            OverflowStreakError: ``max_consecutive_skips`` steps in a row were non-finite.
        """
        parts = self.parts
        assert parts.optimizer is not None
        self._checks.run(kwargs)
        if parts.gradients.unscaled:
            finish_gradients(parts)
        if kwargs.get('closure') is not None:
            return step_with_closure(parts, clip, kwargs)
        parts.params.before_step(parts.gradients.busy)
        lists = parts.lists()
        for observer in parts.observers:
            observer.before_step(parts)
        gradients = self._fused.gradients(clip, lists)
        if gradients is not None:
            result = self._fused.run(clip, gradients, lists.copies, kwargs)
        else:
            result = self._eager.run(clip, kwargs)
        parts.stepped(result)
        return result

    def review(self, infos: Iterable[Sequence[float]]) -> None:
        """Take notice of steps that nobody waited for: says what was skipped, and finds rows of skips.

        Args:
            infos: :attr:`StepResult.info` of all steps since the last one known, in order, on the host.
        """
        parts = self.parts
        parts.monitor.review(infos, parts.scales.describe, len(self.scalers) == 1, parts.label)

    @untraced
    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients of the optimizer's parameters and of the model weights behind its masters.

        Args:
            **kwargs: For ``Optimizer.zero_grad`` (``set_to_none``).
        """
        self.parts.zero_grad(**kwargs)

    # -- state dicts -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state dict and, unless disabled, what :mod:`amp_wrapper.checkpoint` adds to it. Syncs."""
        return state_of(self.parts)

    def check_state_dict(self, state: Mapping[str, Any]) -> SavedAmp:
        """Whether a state dict can be taken over, applying nothing.

        Args:
            state: As for :meth:`load_state_dict`.

        Raises:
            AmpCheckpointError: Names the key and what was expected.
        """
        return check_state(self.parts, state)

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Take over a state dict; before or after :meth:`attach`.

        Args:
            state: From :meth:`state_dict`, from mmengine's own wrappers, from apex or from a bare optimizer. Not
                changed, and not aliased.

        Returns:
            At most one line each for what was kept, converted, dropped, and begun anew.

        Raises:
            AmpCheckpointError: Nothing has been applied.
        """
        return load_state(self.parts, state)
