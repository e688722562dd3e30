"""The parts that an engine is composed of (masters, loss scales, flags, gradients, DDP), and what involves several of them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import ops
from ..casting import kept, plan
from ..casting.masters import Masters, StepLists
from ..checkpoint.format import SavedAmp
from ..ops import attributes
from ..policy import Policy
from ..shards import local
from . import optimizers
from .block_watch import BlockWatch
from .buffer_snapshot import BufferSnapshot
from .clipping import ShardNorm
from .ddp import Ddp
from .gradients.cross_optimizer import OtherOptimizer, RescaleTarget, Rescaling
from .gradients.per_backward import UnscaledGradients
from .gradients.store import Fp32Sums, ScaledGradients
from .loss_scale import LossScaler, LossScales
from .overflow import Overflow, OverflowMonitor, StepResult
from .pass_watch import PassWatch


class Stage(enum.Enum):
    """Where an engine stands between two optimizer steps."""

    DETACHED = 'not attached to a model'
    READY = 'attached, no gradients'
    ACCUMULATING = 'gradients of one or more backward passes'


class StepObserver(Protocol):
    """Is told of losses and steps, as they come. It changes nothing; an engine without one calls nothing."""

    def see_loss(self, parts: EngineParts, loss: Tensor, loss_id: int) -> None:
        """A loss is about to be scaled by the scale of ``parts``, for a backward pass."""
        return

    def before_step(self, parts: EngineParts) -> None:
        """A step is about to be taken, or skipped; ``gradients_at_hand`` finds the gradients."""

    def after_step(self, parts: EngineParts, result: StepResult) -> None:
        """A step was taken or skipped. Gradients have not been cleared yet; they may be unscaled or clipped by now."""

    def explain_streak(self, parts: EngineParts) -> str:
        """Too many steps in a row were skipped: what to add to the error, or an empty string."""
        return ''


class EngineParts:
    """What an :class:`~amp_wrapper.engine.AmpEngine` is composed of.

    Args:
        policy: The configuration.
        optimizer: Whose step it is; None for inference.
        scalers: Loss scales that several engines share; None for scales of its own.

    Attributes:
        params: What the optimizer steps, and what the model computes with.
        scales: The loss scales.
        overflow: The flags of the present step.
        monitor: What the host knows of skipped steps.
        gradients: Where gradients wait for the step.
        ddp, shard_groups: The DDP modules that average them, and the groups of FSDP2 that do.
        snapshots: The buffers as they were before the forward calls of the present step; none where no step is skipped.
        others: Whose parameters the losses of this engine may reach as well.
        pass_watch, block_watch: Warn of gradients that did not come from ``amp.scale_loss``, or are clipped before; or None.
        casts: The plan of the casts of the model, which takes them off; None without.
        kept: The modules that the cast keeps in FP32, by id, with the reasons.
        label, observers: What log lines call this engine, where there are several; what watches its steps.
    """

    def __init__(self, policy: Policy, optimizer: Optimizer | None, scalers: Sequence[LossScaler] | None) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.stage = Stage.DETACHED
        self.label = ''
        self.observers: list[StepObserver] = []
        self.device = torch.device('cpu')
        self.names: dict[int, str] = {}
        self.params = Masters(optimizer)
        self.scales = LossScales(policy, scalers)
        # several scales must never mix in one gradient
        unscaled = policy.enabled and (policy.num_losses > 1 or self.scales.are_shared)
        self.gradients: ScaledGradients = (
            UnscaledGradients(keeps=self.scales.are_shared, speaks=policy.verbosity >= 1)
            if unscaled
            else ScaledGradients(Fp32Sums() if policy.accumulate_in_fp32 and policy.casts_model else None)
        )
        self.overflow = Overflow(policy.num_losses, unscaled)
        self.monitor = OverflowMonitor(policy.max_consecutive_skips, policy.verbosity, policy.loss_scale.dynamic)
        self.ddp = Ddp(self.weights)
        self.shard_groups: list[Any] = []
        self.snapshots: tuple[BufferSnapshot, ...] = ()
        self.others: tuple[EngineParts | OtherOptimizer, ...] = ()
        self.pass_watch: PassWatch | None = None
        self.block_watch: BlockWatch | None = None
        self.casts: plan.CastPlan | None = None
        self.kept: Mapping[int, kept.Kept] = {}
        #: Read from a checkpoint before there was a model to put it into.
        self.pending: SavedAmp | None = None
        #: Backward passes of other optimizers' losses that are under way, and their gradients at our parameters.
        self.rescalings: list[tuple[Rescaling, RescaleTarget]] = []
        #: The call of ``backward()`` that the last backward pass was a part of.
        self.call = -1
        #: Whether the optimizer's own ``step`` runs, and what stands for its methods where somebody is in front of them.
        self.steps = False
        self.own_methods: Mapping[str, Callable[..., Any]] = {}
        if policy.enabled and optimizer is not None:
            optimizers.check_optimizer(optimizer)
            if policy.split_masters:
                optimizers.check_steps_split(optimizer)

    def reset(self) -> None:
        """The model was let go."""
        self.ddp = Ddp(self.weights)
        self.shard_groups = []
        self.params = Masters(self.optimizer)
        self.casts = None
        self.snapshots = ()
        self.stage = Stage.DETACHED

    def __repr__(self) -> str:
        # reads the device
        scale = f', loss scale {self.scales.describe()}' if self.policy.enabled and not self.scales.is_one else ''
        return f'amp: {self.policy.describe()}{scale}; {self.stage.value}'

    # -- what there is -----------------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether a model was attached, or none is needed."""
        return self.stage is not Stage.DETACHED

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients have come since the last step."""
        return self.stage is Stage.ACCUMULATING

    @property
    def awaits_step(self) -> bool:
        """Whether there are gradients that only ``step`` of the engine puts right: scaled ones, and such as masters lack."""
        if not self.policy.enabled:
            return False
        waits = not self.scales.is_one or (bool(self.params.pairs) and not self.gradients.unscaled)
        if self.stage is Stage.ACCUMULATING and waits:
            return True
        return any(master.grad is None and weight.grad is not None for weight, master in self.params.pairs)

    @property
    def is_plain(self) -> bool:
        """Whether gradients go from backward to the optimizer untouched and unchecked."""
        return not self.policy.enabled or (self.scales.is_one and not self.scales.check and not self.policy.casts_model)

    def weights(self) -> list[nn.Parameter]:
        """The model's parameters that the optimizer steps: the weights behind masters, and those without a master."""
        return self.params.weights()

    def lists(self) -> StepLists:
        """What the optimizer steps, and the model weights behind it."""
        return self.params.lists()

    def name(self, parameter: nn.Parameter) -> str:
        """The qualified name of a weight, or of the weight behind a master."""
        weight = self.params.weight_of(parameter)
        return self.names.get(id(weight), f'<parameter of shape {tuple(weight.shape)}>')

    @property
    def in_own_step(self) -> bool:
        """Whether the optimizer's own ``step`` runs, or is about to."""
        return 'step' in self.own_methods

    @contextmanager
    def behind(self, **methods: Callable[..., Any]) -> Iterator[None]:
        """Inside, these are the optimizer's own methods: the caller stands in front of it.

        Args:
            **methods: ``step`` or ``zero_grad``, which take their arguments by name.
        """
        before, self.own_methods = self.own_methods, methods
        try:
            yield
        finally:
            self.own_methods = before

    def own(self, method: str) -> Callable[..., Any]:
        """``step`` or ``zero_grad`` of the optimizer itself."""
        found: Callable[..., Any] = self.own_methods.get(method) or getattr(self.optimizer, method)
        return found

    def own_step(self, kwargs: Mapping[str, Any]) -> None:
        """Call the optimizer's own ``step``."""
        self.steps = True
        try:
            self.own('step')(**kwargs)
        finally:
            self.steps = False

    def settle_buffers(self, flag: Tensor | None) -> None:
        """The step is taken, or skipped where ``flag`` is up: what forward calls did to buffers stays, or is undone.

        Those of all models of the training: losses may have gone through each.
        """
        engines = (self, *(other for other in self.others if isinstance(other, EngineParts)))
        for snapshot in dict.fromkeys(snapshot for engine in engines for snapshot in engine.snapshots):
            snapshot.settle(flag)

    def stepped(self, result: StepResult) -> None:
        """A step was taken, or skipped."""
        self.stage = Stage.READY
        if self.pass_watch is not None:
            self.pass_watch.note_step(self.params.parameters())
        for observer in self.observers:
            observer.after_step(self, result)

    def has_gradient(self, weights: Iterable[nn.Parameter]) -> bool:
        """Whether any of ``weights`` has one waiting, as ``.grad``, as a sum beside it, or on its master."""
        chosen, busy = {id(weight) for weight in weights}, self.gradients.busy
        return any(
            weight.grad is not None or stepped.grad is not None or weight in busy
            for weight, stepped in zip(self.weights(), self.params.parameters())
            if id(weight) in chosen
        )

    # -- gradients come and go ---------------------------------------------------------------------------------------

    def add_of_others(self, found_inf: Tensor) -> None:
        """Add the flag of gradients that do not come from losses of this engine."""
        self.overflow.add_of_others(found_inf, self.ddp.is_local())

    def agree(self, norm: ShardNorm | None = None) -> Tensor | None:
        """Exchange the overflow flags where the ranks' gradients may differ. Collective.

        Where parameters are sharded, flags and norm are one exchange.

        Args:
            norm: This rank's part of the norm of sharded gradients.

        Returns:
            The norm of all of them, a float32 scalar; None without ``norm``.
        """
        layout, checks = self.params.layout, self.scales.check
        if not layout.groups:
            if checks and self.ddp.ddps:
                self.overflow.agree(self.ddp.groups())
            return None
        if not checks and norm is None:
            return None
        flags = self.overflow.flags() if checks else torch.empty(0, device=self.device)
        numbers = [flags.double(), *([] if norm is None else [norm.power.to(self.device).reshape(1)])]
        found = layout.exchange(torch.cat(numbers), greatest=norm is not None and norm.is_greatest)
        if checks:
            # a sum of flags is no flag
            self.overflow.take(found[: len(flags)].clamp(max=1).float())
        return None if norm is None else norm.of_all(found[-1])

    def take_up(self, makes_room: bool) -> None:
        """Masters follow what happened to the gradients of their weights since the last backward pass.

        Args:
            makes_room: Whether a backward pass is about to begin.
        """
        if not isinstance(self.gradients, UnscaledGradients):
            return
        plain = self.gradients.take_up(self.params.pairs, makes_room)
        if plain:
            flag = self.overflow.new() if self.scales.check else None
            self.gradients.add(plain, flag)
            if flag is not None:
                self.add_of_others(flag)

    def note_clipped(self, gradients: set[int], writes: int) -> None:
        """Gradients are about to be clipped, by id: perhaps those of weights, which masters do not follow."""
        self.gradients.note_clipped([weight for weight, _ in self.params.pairs if id(weight.grad) in gradients], writes)

    def check_rest(self) -> None:
        """Check once per step the gradients that were there before the first scaled backward pass."""
        if not self.scales.are_shared or self.overflow.checked_before or not self.scales.check:
            return
        # forgotten again where gradients are cleared
        self.overflow.checked_before, self.overflow.is_clear = True, False
        found = attributes.gradients(self.params.parameters())
        values = [grad.coalesce()._values() if grad.is_sparse else grad for grad in found if grad is not None]
        if values:
            flag = self.overflow.new()
            ops.multi_tensor_isnonfinite(local(values), flag)
            self.add_of_others(flag)

    def receive(self, found_inf: Tensor, at: Sequence[Tensor]) -> None:
        """Gradients of another engine's loss are there at some of our weights, converted to our scale.

        Args:
            found_inf: float32 scalar, 1.0 where one of them is non-finite.
            at: The weights that the loss could reach.
        """
        gradients = self.gradients
        if isinstance(gradients, UnscaledGradients):
            if gradients.held is None and not gradients.in_backward:
                reached = {id(weight) for weight in at if weight.grad is not None}
                gradients.add([pair for pair in self.params.pairs if id(pair[0]) in reached], None)
        else:
            gradients.collect(self.weights())
        self.overflow.reached_by_others = True
        # this engine's own pass may average the gradients themselves, but not the flag
        self.add_of_others(found_inf)
        if self.attached:
            self.stage = Stage.ACCUMULATING

    def rescale_target(self, beyond: Sequence[Tensor]) -> RescaleTarget:
        """How gradients of another engine's loss have to look for this one.

        Args:
            beyond: Those of :meth:`weights` that the other one does not step.
        """
        gradients = self.gradients
        if isinstance(gradients, UnscaledGradients):
            # at once, but for those that wait for the end of a backward pass
            return RescaleTarget(beyond, lambda: gradients.pending_scale, self.scales.check)
        theirs = set(map(id, beyond))
        masters = [master for weight, master in self.params.pairs if id(weight) in theirs]
        return RescaleTarget([*beyond, *masters], lambda: self.scales.current(0), self.scales.check and self.attached)

    def end_rescalings(self) -> None:
        """Gradients of other optimizers' losses carry their scales: convert those that are there by now to ours."""
        for rescaling, target in self.rescalings:
            rescaling.close(target)

    def forget_cleared(self) -> None:
        """Forget flags and held gradients where the model's own ``zero_grad()`` has cleared the gradients."""
        gradients, overflow = self.gradients, self.overflow
        gradients.begin()
        if gradients.unscaled and not gradients.in_backward:
            if (
                gradients.held is not None
                and not self.shard_groups
                and not any(weight.grad is not None for weight in self.weights())
            ):
                gradients.held = None
                for _, master in self.params.pairs:
                    master.grad = None
            if gradients.held is None:
                self.take_up(makes_room=True)
        used = overflow.is_used
        if (self.scales.are_shared if used else overflow.has_others) and not self.has_gradient(self.weights()):
            if used:
                self.drop()
            overflow.forget_others()

    def drop(self) -> None:
        """Gradients are cleared without a step: loss scales are updated by what was found in them all the same."""
        overflow, named = self.overflow, self.overflow.named
        if self.scales.are_shared and overflow.is_used and self.gradients.held is None and not self.ddp.is_local():
            if self.params.layout.groups:
                self.agree()
            self.scales.update(overflow, self.device)
        if self.pass_watch is not None:
            self.pass_watch.note_clear(named)
        overflow.clear()

    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients of the optimizer's parameters and of the model weights behind its masters.

        Args:
            **kwargs: For ``Optimizer.zero_grad`` (``set_to_none``).
        """
        if not self.overflow.is_clear or self.pass_watch is not None:
            self.drop()
        self.gradients.clear(self.params)
        for rescaling, target in self.rescalings:
            rescaling.forget(target)
        self.own('zero_grad')(**kwargs)
        if kwargs.get('set_to_none', True):
            attributes.set_gradients(list(chain.from_iterable(self.params.pairs)), None)
            if self.gradients.sums is not None:
                self.gradients.sums.cleared.clear()
        else:
            for weight, _ in self.params.pairs:
                if weight.grad is not None:
                    weight.grad.zero_()
            self.gradients.zeroed(self.params.pairs)
        if self.stage is not Stage.DETACHED:
            self.stage = Stage.READY
