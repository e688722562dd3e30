"""Mixed precision for one optimizer: all its state, forward passes, and what happens between backward passes and step."""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeAlias
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import ops
from ..casting import kept, plan
from ..casting.masters import Masters
from ..checkpoint.format import SavedAmp
from ..compiler_internals import untraced
from ..distributed_internals import hold_back
from ..errors import AmpAttachError, AmpUsageError, some
from ..policy import Policy
from .buffer_snapshot import BufferSnapshot
from .clipping import GradientClip
from .ddp import Ddp
from .flags import Flags, SkipMonitor, StepResult
from .gradients import Gradients, have_any, values_of
from .loss_scale import LossScaler, LossScales
from .optimizers import check_optimizer

#: An optimizer, one that somebody else keeps alive, or none, for inference.
Held: TypeAlias = Optimizer | ReferenceType[Optimizer] | None


class StepObserver:
    """Watches losses and steps, as they come, and changes nothing. An engine without one calls nothing."""

    def see_loss(self, engine: Engine, loss: Tensor, loss_id: int) -> None:
        """A loss is about to be scaled by the scale of ``engine``, for a backward pass."""

    def before_step(self, engine: Engine) -> None:
        """A step is about to be taken, or skipped; :meth:`Engine.gradients_at_hand` finds the gradients."""

    def after_step(self, engine: Engine, result: StepResult) -> None:
        """A step was taken or skipped. Gradients have not been cleared yet; they may be unscaled or clipped by now."""

    def explain_streak(self, engine: Engine) -> str:
        """Too many steps in a row were skipped: what to add to the error, or an empty string."""
        return ''


class Engine:
    """Mixed precision for one optimizer.

    The path of one update:

    1. :func:`~amp_wrapper.engine.passes.scale`: the loss times the loss scale, which does not change before 7;
    2. :func:`~amp_wrapper.engine.passes.backward`: gradients arrive on the model weights, 16-bit where these are, and are
       averaged over the ranks;
    3. :func:`~amp_wrapper.engine.step.take_step` looks for weights that somebody else changed (they win over their masters),
    4. finds out whether any gradient element is non-finite, and how long the gradient is,
    5. decides, the same on every rank,
    6. unscales, clips, steps the optimizer and copies masters to the model weights, or skips all of this,
    7. moves the loss scale.

    With the optimizers of :mod:`amp_wrapper.optim` 4 is one pass over the gradients, 5 and 7 are one small kernel, 6 is one
    pass over everything, and the host reads nothing. With any other one, unscaling comes first, together with 4, and each of
    the rest is a pass of its own. Gradients of several losses or optimizers are unscaled and checked at the end of 2.

    Args:
        policy: The configuration.
        optimizer: Any :class:`torch.optim.Optimizer` whose ``step`` needs no closure, or None for inference. As a weak
            reference where the optimizer holds the engine.
        scalers: The loss scales, where several engines share them; one for each loss. None: scales of its own.

    Raises:
        AmpAttachError: An optimizer that cannot be wrapped.

    Attributes:
        policy: As given.
        attached: Whether a model was attached, or none is needed.
        is_accumulating: Whether gradients have come since the last step.
        params: What the optimizer steps, and what the model computes with.
        scales: The loss scales.
        flags, monitor: What was non-finite since the last step; what the host knows of skipped steps.
        gradients: Where gradients wait for the step.
        ddp, shard_groups: The DDP modules that average them, and the groups of FSDP2 that do.
        find_optimizer: Returns the optimizer, as :attr:`optimizer` does.
        snapshots: The buffers as they were before the forward calls of the present step; none where no step is skipped.
        others: Whose parameters the losses of this engine may reach as well.
        casts: The plan of the casts of the model, which takes them off; None without.
        kept: The modules that the cast keeps in FP32, by id, with the reasons.
        names: The qualified names of the model's parameters, by id.
        label, observers: What log lines call this engine, where there are several; what watches its steps.
        in_own_step, has_ranks: Whether the optimizer's own ``step`` runs; whether the last step was one of several processes.
        pending: Read from a checkpoint before there was a model to put it into.
        pairs_checked: How many pairs of weight and master there were in the process when a step last looked for late ones.
    """

    def __init__(self, policy: Policy, optimizer: Held, scalers: Sequence[LossScaler] | None = None) -> None:
        self.policy = policy
        self.label = ''
        self.observers: list[StepObserver] = []
        self.device = torch.device('cpu')
        self.names: dict[int, str] = {}
        self.others: tuple[Engine, ...] = ()
        self.scales = LossScales(policy, scalers)
        self.flags = Flags(policy.num_losses, self.device)
        self.monitor = SkipMonitor(policy, self.scales.describe)
        self.kept: Mapping[int, kept.Kept] = {}
        self.pending: SavedAmp | None = None
        self.in_own_step = self.has_ranks = False
        self.pairs_checked = -1
        # no method of its own, which would be a cycle
        kept = functools.partial(operator.itemgetter(0), (optimizer,))
        self.find_optimizer = optimizer if isinstance(optimizer, ReferenceType) else kept
        self.reset()
        if policy.enabled and self.optimizer is not None:
            check_optimizer(self.optimizer, policy.split_masters)

    def reset(self) -> None:
        """Let go of the model."""
        self.use_params()
        self.ddp = Ddp(self.params, [], {}, False)
        self.shard_groups: list[Any] = []
        self.snapshots: tuple[BufferSnapshot, ...] = ()
        self.casts: plan.CastPlan | None = None
        self.attached = self.is_accumulating = False

    def use_params(self, weights: Mapping[str, nn.Parameter] | None = None) -> None:
        """Step the optimizer's parameters from now on; no gradient waits.

        Args:
            weights: Those that get FP32 values, by name, while they are unrounded; None for no FP32 values.
        """
        policy = self.policy
        kind: Literal['none', 'split', 'whole'] = 'split' if policy.split_masters else 'whole'
        kind = 'none' if weights is None else kind
        self.params = Masters(self.find_optimizer, weights, kind, policy.cast_model_type)
        sums = policy.accumulate_in_fp32 and policy.casts_model
        several = policy.num_losses > 1 or self.scales.are_shared
        self.gradients = Gradients(self.params, bool(self.others) or (policy.enabled and (sums or several)))

    def join(self, others: Iterable[Engine]) -> None:
        """Say whose parameters the losses of this engine may reach as well, before attaching.

        Args:
            others: The engines of one training, without this one.

        Raises:
            AmpAttachError: A parameter that is stepped twice; split masters.
        """
        others = tuple(others)
        if others and self.policy.split_masters:
            raise AmpAttachError("master_weights='split' beside other optimizers would round gradients: write True.")
        stepped: list[nn.Parameter] = []
        for each in (self, *others):
            # torch takes an optimizer that has a parameter twice, and warns
            stepped += dict.fromkeys(each.weights()) if each.is_plain else each.weights()
        twice = [self.name(weight) for weight, count in Counter(stepped).items() if count > 1]
        if twice:
            # which of two loss scales their gradients carry could not be known; in one, they would be unscaled twice
            raise AmpAttachError(
                f'{len(twice)} parameters are stepped by two optimizers, or twice by one ({some(twice)}): give each once, '
                f'{{id(p): p for p in parameters}}.values(), to one optimizer; losses of the others reach it all the same.'
            )
        self.others = others
        self.gradients.after_each_pass |= bool(others)

    def __repr__(self) -> str:
        # reads the device
        scale = f', loss scale {self.scales.describe()}' if self.policy.enabled and not self.scales.is_one else ''
        return f'amp: {self.policy.describe()}{scale}; {"" if self.attached else "not "}attached to a model'

    def __getstate__(self) -> dict[str, Any]:
        # of copies
        if self.attached and self.policy.enabled:
            raise AmpUsageError('an attached wrapper cannot be copied: copy the model, and build one for the copy.')
        return vars(self)

    # -- what there is -----------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer | None:
        """Whose step it is; None for inference, and where nobody holds it any more."""
        return self.find_optimizer()

    @property
    def awaits_step(self) -> bool:
        """Whether there are gradients that only ``take_step`` puts right: scaled ones, and such as masters lack."""
        waits = not self.scales.is_one or (bool(self.params.masters) and not self.gradients.after_each_pass)
        return self.policy.enabled and ((self.is_accumulating and waits) or self.gradients.has_plain)

    @property
    def is_plain(self) -> bool:
        """Whether gradients go from backward to the optimizer untouched and unchecked."""
        return not self.policy.enabled or (self.scales.is_one and not self.scales.check and not self.policy.casts_model)

    def weights(self) -> list[nn.Parameter]:
        """The model's parameters that the optimizer steps: the weights behind masters, and those without a master."""
        return self.params.weights()

    def name(self, parameter: nn.Parameter) -> str:
        """The qualified name of a weight, or of the weight behind a master."""
        weight = self.params.weight_of(parameter)
        return self.names.get(id(weight), f'<parameter of shape {tuple(weight.shape)}>')

    def gradients_at_hand(self) -> list[tuple[str, Tensor, Tensor, bool]]:
        """The gradients before a step, for whoever looks at them.

        Returns:
            (name of the weight, weight of the model, gradient, whether the loss scale has been taken out of it), for those
            weights that have a gradient.
        """
        lists, unscaled = self.params.lists(), self.gradients.after_each_pass
        found = zip(lists.weights, self.gradients.to_step(lists))
        return [(self.name(weight), weight, grad, unscaled) for weight, grad in found if grad is not None]

    def master_params(self) -> Iterator[Tensor]:
        """Every tensor that the optimizer steps: FP32 masters, 16-bit weights that are split, and FP32 parameters.

        Masters of weights that somebody wrote to have the new values."""
        params = self.params
        params.adopt()
        with suppress(AmpUsageError):
            # where weight and master were both written to, the error comes when one of them would be lost
            params.synchronise()
        yield from params.parameters()

    # -- between passes and step -------------------------------------------------------------------------------------

    def tidy_up(self) -> None:
        """Put in order what waits, before a backward pass adds to it."""
        # parameters that add_param_group has added get their masters
        self.params.lists()
        self.gradients.drop_stepped()
        self.check_rest()
        is_kept = self.gradients.kept_by_fsdp is not None or (self.shard_groups and hold_back(self.shard_groups))
        if self.flags.has_arrived and not is_kept and not self.gradients.is_there():
            # the model's own zero_grad() has cleared the gradients, or the script
            self.drop_flags()

    def check_rest(self) -> None:
        """Bring gradients without a scale, which lie on weights, to their masters, and check what no pass has checked."""
        stepped = self.params.parameters()
        is_unchecked = self.flags.is_clear and have_any(stepped)
        if not is_unchecked and not self.gradients.has_plain:
            return
        flag = self.flags.new() if self.scales.check else None
        self.gradients.add_plain(flag, bool(self.ddp.groups()))
        if flag is not None:
            if is_unchecked:
                ops.multi_tensor_isnonfinite(values_of(stepped), flag)
            self.flags.add(flag)

    def agree(self, clip: GradientClip | None = None, power: Tensor | None = None) -> Tensor | None:
        """Exchange the overflow flags, so that every rank decides the same. Collective, where there are several ranks.

        Where parameters are sharded, flags and norm are one exchange.

        Args:
            clip: How to clip by the norm of sharded gradients.
            power: This rank's part of it, of :meth:`GradientClip.power`; None for none.

        Returns:
            The norm of all of them, a float32 scalar; None without ``power``.
        """
        layout, checks = self.params.layout, self.scales.check
        if layout.groups and (checks or power is not None):
            flags = self.flags.all()
            numbers = [flags.double()] if power is None else [flags.double(), power.to(self.device)]
            is_greatest = clip is not None and clip.norm_type == math.inf
            found = layout.exchange(torch.cat(numbers), is_greatest)
            # a sum of flags is no flag
            self.flags.take(found[: len(flags)].clamp(max=1).float())
            return None if power is None else (found[-1] if is_greatest else found[-1].sqrt()).float()
        for group in self.ddp.groups() if checks and not layout.groups else ():
            flags = self.flags.all()
            torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, group=group)
            self.flags.take(flags)
        return None

    def settle_buffers(self, flag: Tensor | None) -> None:
        """The step is taken, or skipped where ``flag`` is up: what forward calls did to buffers stays, or is undone.

        Those of all models of the training: losses may have gone through each.
        """
        for snapshot in dict.fromkeys(snapshot for each in (self, *self.others) for snapshot in each.snapshots):
            snapshot.settle(flag)

    def review(self, infos: Iterable[Sequence[float]]) -> None:
        """Take notice of steps that nobody waited for: says what was skipped, and finds rows of skips.

        Args:
            infos: :attr:`StepResult.info` of all steps since the last one known, in order, on the host.
        """
        self.monitor.review(infos, self.label)

    def has_waiting(self, ids: Container[int]) -> bool:
        """Whether any of these weights, by id, has a gradient that waits for a step."""
        pairs = zip(self.weights(), self.params.parameters())
        return self.is_accumulating and have_any([p for pair in pairs if id(pair[0]) in ids for p in pair])

    # -- clearing ----------------------------------------------------------------------------------------------------

    @untraced
    def zero_grad(self, own: Callable[..., Any] | None = None, **kwargs: Any) -> None:
        """Clear the gradients of the optimizer's parameters and of the model weights behind its masters.

        Args:
            own: The optimizer's own ``zero_grad``, where another stands in front of it.
            **kwargs: For it (``set_to_none``).
        """
        assert self.optimizer is not None
        self.drop_flags()
        (own or self.optimizer.zero_grad)(**kwargs)
        self.gradients.clear(kwargs.get('set_to_none', True))
        self.is_accumulating = False

    def drop_flags(self) -> None:
        """Forget flags: gradients are cleared without a step. Shared loss scales learn from them all the same."""
        learns = self.scales.are_shared and any(self.flags.used) and self.gradients.kept_by_fsdp is None
        if learns and not self.ddp.is_local():
            if self.params.layout.groups:
                self.agree()
            self.scales.update(self.flags)
        self.flags.clear()
