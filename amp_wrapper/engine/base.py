"""What an engine holds, and what it steps."""

from __future__ import annotations

import copy
import dataclasses
import enum
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..autocast.op_set import OpSet
from ..casting import plan as casting
from ..casting import roots as scope
from ..casting import split_masters as split_weights
from ..casting.masters import MasterWeights
from ..casting.split_masters import SplitWeights
from ..checkpoint import format as checkpoint
from ..errors import AmpUsageError
from ..policy.loss_scale import LossScaleConfig
from ..policy.policy import Policy
from .buffers.snapshots import BufferSnapshots
from .ddp.reducers import Reducers
from .gradients import cross_optimizer as foreign_gradients
from .gradients.fp32_sums import Fp32Sums
from .gradients.per_backward import Arrivals
from .loss_scale import LossScaler
from .pass_watch import PassWatch
from .skip_watch import SkipWatch
from .step_flags import StepFlags


class Stage(enum.Enum):
    """Where an engine stands between two optimizer steps."""

    DETACHED = 'not attached to a model'
    READY = 'attached, no gradients'
    ACCUMULATING = 'gradients of one or more backward passes'


class Sides:
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


class EngineBase:
    """What an :class:`~amp_wrapper.engine.AmpEngine` holds, and what the parts of it share."""

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
        self._arrivals = Arrivals(keeps=self._shared, speaks=policy.verbosity >= 1)
        # passes for other optimizers that are under way, and what they may bring here
        self._lenders: list[tuple[foreign_gradients.Lending, foreign_gradients.Share]] = []
        # of backward(), of which the last pass was a part
        self._call = -1
        self._learning: tuple[int, ...] = ()
        # of the optimizer's groups, when masters were last looked for
        self._lengths: list[int] = []
        # those of the optimizer, where somebody stands in front of them
        self._own_methods: dict[str, Callable[..., Any]] = {}
        # of twins, when somebody last looked whether another optimizer has given some to the weights
        self._pairs_made = -1
        # while its own step runs
        self._steps = False
        self._handle: casting.CastHandle | None = None
        self._ops: OpSet | None = None
        self._masters: MasterWeights | SplitWeights | None = None
        self._names: dict[int, str] = {}
        self._reducers = Reducers(None, self.weights)
        self._sums = Fp32Sums() if policy.sums_in_fp32 else None
        self._others: tuple[EngineBase | foreign_gradients.OtherOptimizer, ...] = ()
        self._flags = StepFlags(policy.num_losses, self._on_arrival)
        #: What the model's buffers were before the forward passes of the present step.
        self._buffers: BufferSnapshots | None = None
        self._kept_sides: Sides | None = None
        self._watch = SkipWatch(policy.max_consecutive_skips, policy.verbosity)
        #: What a script is told; None where a scaled backward pass is the only way here.
        self.pass_watch: PassWatch | None = None
        self._device = torch.device('cpu')
        self._pending: checkpoint.SavedAmp | None = None
        if policy.enabled and optimizer is not None:
            scope.check_optimizer(optimizer)
            if policy.split_masters:
                split_weights.check_optimizer(optimizer)

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineBase:
        if self.attached and self.policy.enabled:
            raise AmpUsageError(
                'a deep copy of an attached wrapper would know neither the copied weights nor their masters: copy before the '
                'first forward pass, or copy the model alone and build a wrapper for it.'
            )
        copied = type(self).__new__(type(self))
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

    def _own_step(self, kwargs: Mapping[str, Any]) -> None:
        self._steps = True
        try:
            self._own('step')(**kwargs)
        finally:
            self._steps = False

    @property
    def awaits_step(self) -> bool:
        """Whether there are gradients that only ``step`` of this engine puts right: scaled ones, and such as masters lack.

        False while the optimizer's own ``step`` runs for it. No device read.
        """
        if self._steps or not self.policy.enabled:
            return False
        if self.stage is Stage.ACCUMULATING and not self.scalers[0].is_one:
            return True
        return any(master.grad is None and weight.grad is not None for weight, master in self._pairs())

    @property
    def in_own_step(self) -> bool:
        """Whether the optimizer's own ``step`` runs, or is about to."""
        return 'step' in self._own_methods

    @property
    def attached(self) -> bool:
        """Whether :meth:`attach` has run."""
        return self.stage is not Stage.DETACHED

    @property
    def in_own_window(self) -> bool:
        """Whether a loss of this engine has had a backward pass since the last step."""
        return any(self._flags.used)

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients have come since the last step."""
        return self.stage is Stage.ACCUMULATING

    @property
    def waits_for_average(self) -> bool:
        """Whether gradients are held, scaled, until DDP averages them."""
        return self._arrivals.held is not None

    @property
    def casts(self) -> bool:
        """Whether any parameter changed its type."""
        return self._handle is not None and self._handle.casts

    @property
    def is_plain(self) -> bool:
        """Whether gradients go from backward to the optimizer untouched and unchecked."""
        scaler = self.scalers[0]
        return not self.policy.enabled or (scaler.is_one and not scaler.checks and not self.policy.casts_model)

    def master_params(self) -> Iterator[Tensor]:
        """Every tensor that the optimizer steps: FP32 masters, 16-bit weights that are split, and FP32 parameters.

        Masters of weights that somebody wrote to have the new values.
        """
        if self._masters is not None:
            self._masters.adopt()
            # a pair that was written to on both sides is refused where one of them would be lost
            self._masters.synchronise(refuses=False)
        yield from self._parameters()

    def weights_changed(self, tensors: Iterable[Tensor] | None = None) -> list[str]:
        """Say that model weights were edited, through ``.data`` too: the masters follow the weights. Syncs.

        Args:
            tensors: The edited parameters; all of them by default, but split weights have to be named.

        Returns:
            The names of the weights that differed from their masters, or that are split.

        Raises:
            AmpUsageError: No ``tensors``, and the weights are split, or a master was written to as well; a master among them.
        """
        return [] if self._masters is None else self._masters.changed(tensors)

    def masters_changed(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Say that FP32 masters were edited, through ``.data`` too: the weights follow the masters. No host read.

        Args:
            tensors: The edited masters; all of them by default. Split weights are their own, and have to be named.

        Raises:
            AmpUsageError: No ``tensors``, and the weights are split, or a weight was written to as well; a weight among them.
        """
        if self._masters is not None:
            self._masters.masters_changed(tensors)

    def synchronise(self) -> None:
        """Before a forward pass: weights follow masters that somebody wrote to, and the other way round. No host read.

        Raises:
            AmpUsageError: A weight and its master were both written to. Nothing has been changed.
        """
        if self._masters is not None:
            self._masters.synchronise()

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

    def _scale_of(self, loss_id: int) -> Tensor | None:
        scaler = self._scaler(loss_id)
        return None if scaler.is_one else scaler.current_scale

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

    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients of the optimizer's parameters and of the model weights behind its masters.

        Args:
            **kwargs: For ``Optimizer.zero_grad`` (``set_to_none``).
        """
        assert self.optimizer is not None
        self._drop()
        self._arrivals.clear(self._pairs())
        for lending, share in self._lenders:
            lending.forget(share)
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

    def _drop(self) -> None:
        """Gradients are cleared before anybody stepped: what their scales were too large for, they learn all the same."""
        named = self._flags.named
        if self._shared and self.in_own_window and self._arrivals.held is None and not self._reducers.is_local():
            self._update_scalers()
        if self.pass_watch is not None:
            self.pass_watch.note_clear(named)
        self._flags.clear()

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


def new_scalers(policy: Policy) -> list[LossScaler]:
    """One for each loss."""
    config = policy.loss_scale if policy.enabled else dataclasses.replace(policy.loss_scale, enabled=False)
    return [LossScaler(config, policy.skip_nonfinite) for _ in range(policy.num_losses)]
