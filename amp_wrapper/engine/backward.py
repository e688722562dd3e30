"""Surrounds the backward pass of a scaled loss: rescales, unscales and collects gradients, and sets the overflow flags."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from types import TracebackType

import torch
from torch import Tensor

from .. import torch_internals
from ..distributed_internals import hold_back
from ..errors import AmpUsageError
from .ddp import Ddp, _averages
from .gradients.cross_optimizer import OtherOptimizer, RescaleTarget, Rescaling
from .gradients.per_backward import UnscaledGradients
from .parts import EngineParts, Stage

_in_backward: Callable[[EngineParts], bool] = operator.attrgetter('gradients.in_backward')


class BackwardPass:
    """The backward pass of one loss, whoever runs it. It alone touches several engines, where there are several.

    Args:
        engines: The engines that will step with its gradients. The scale of the first holds for all, and is updated; where a
            gradient of any is non-finite, all skip their next step.
        loss_id: Which scale.
        beyond: Further engines whose parameters may get gradients, as those of :meth:`~amp_wrapper.engine.AmpEngine.join`.

    Raises:
        AmpUsageError: No such loss.
    """

    def __init__(self, engines: Sequence[EngineParts], loss_id: int, beyond: Sequence[EngineParts] = ()) -> None:
        self.engines = engines
        self.first = engines[0]
        self.loss_id = loss_id
        self.scale = scale_of(engines, loss_id)
        self.others = [
            other for other in (*self.first.others, *beyond) if not any(other is engine for engine in engines)
        ]
        self._other_engines = [other for other in self.others if isinstance(other, EngineParts)]
        # the other optimizers whose parameters may get gradients
        self._targets: list[tuple[EngineParts | OtherOptimizer, RescaleTarget]] = []
        self._flags: list[Tensor | None] = []
        self._rescaling: Rescaling | None = None

    def __enter__(self) -> Callable[[], None]:
        """The backward pass is about to begin.

        Returns:
            What to call where the pass begins inside, if passes for other optimizers may be under way by then.

        Raises:
            AmpUsageError: A pass inside another one of the same engine; several losses under ``no_sync``. All gradients are as
                before, and so they are after any exception inside, where gradients are unscaled at each backward pass.
        """
        if any(map(_in_backward, self.engines)):
            raise AmpUsageError(
                'a backward pass inside another one that is meant for the same optimizer: leave the first '
                '"with amp.scale_loss(...)" block before the second begins, or add the losses up.'
            )
        with ExitStack() as stack:
            self._begin(stack)
            self._stack = stack.pop_all()
        return self.begins

    def _begin(self, stack: ExitStack) -> None:
        for engine in (*self.engines, *self._other_engines):
            if engine.gradients.unscaled:
                stack.callback(engine.gradients.put_back, engine.params)
        averaged = [self._prepare(engine) for engine in self.engines]
        if self.others:
            self._rescaling = self._rescale_elsewhere(stack)
        self._flags = [engine.overflow.new() if engine.scales.check else None for engine in self.engines]
        self._unscale_on_exit(stack, averaged)

    def begins(self) -> None:
        """The pass begins; those of other losses may have come in between."""
        with torch.no_grad():
            self._check_alone()
            for engine in self.engines:
                engine.end_rescalings()
            if self._rescaling is not None:
                self._take_up_rescaling(self._rescaling)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # it holds this pass, and with it tensors that would wait for the garbage collector
        self._rescaling = None
        if kind is not None:
            self._stack.__exit__(kind, error, trace)
            return
        with self._stack:
            for engine in self.engines:
                # gradients of other backward passes that are still under way carry other scales than this one's
                engine.end_rescalings()
        self._finish()

    # -- before ------------------------------------------------------------------------------------------------------

    def _prepare(self, engine: EngineParts) -> bool:
        """Returns whether the gradients of the pass are averaged over the ranks; True without several ranks."""
        engine.end_rescalings()
        if engine.gradients.unscaled:
            # parameters that add_param_group has added get their masters
            engine.lists()
        engine.forget_cleared()
        averaged = engine.ddp.averages() and not hold_back(engine.shard_groups)
        engine.check_rest()
        if engine.gradients.unscaled and not averaged and not engine.scales.are_shared:
            raise AmpUsageError(
                f'backward() with num_losses={engine.policy.num_losses} under no_sync (set_requires_gradient_sync(False)): '
                f'unscaling each loss on arrival would '
                f'keep its gradients from the other ranks. Use accumulative_counts=1, or one loss.'
            )
        return averaged

    def _unscale_on_exit(self, stack: ExitStack, averaged: Sequence[bool]) -> None:
        taken: set[int] = set()
        for engine, over_ranks, flag in zip(self.engines, averaged, self._flags):
            if not isinstance(engine.gradients, UnscaledGradients):
                engine.gradients.before_backward(_averaged_now(engine.ddp))
                continue
            if not over_ranks and taken and any(id(weight) in taken for weight in engine.weights()):
                raise AmpUsageError(
                    'a backward pass under no_sync that is meant for two optimizers of the same parameters: which of them '
                    'holds the gradients until they are averaged cannot be known. Leave no_sync out, or list one optimizer '
                    'of each parameter.'
                )
            stack.enter_context(
                engine.gradients.unscaling(
                    [pair for pair in engine.params.pairs if not taken or id(pair[0]) not in taken],
                    [p for p in engine.params.without_master() if not taken or id(p) not in taken],
                    self.loss_id,
                    None if self.scale is None else self.scale.to(engine.device),
                    over_ranks,
                    flag,
                    in_buckets=bool(engine.ddp.ddps),
                )
            )
            if len(self.engines) > 1:
                taken.update(map(id, engine.weights()))

    # -- parameters of others ----------------------------------------------------------------------------------------

    def _rescale_elsewhere(self, stack: ExitStack) -> Rescaling:
        """What the pass brings to parameters of others is put on their scales."""
        self._targets = self._find_targets()
        averaged: Container[int] = _averaged_now(self.first.ddp) if self._targets else ()
        others = {target: other for other, target in self._targets}
        rescaling = stack.enter_context(
            Rescaling(list(others), self.scale, averaged, lambda target: self._hand_over(others[target], target))
        )
        for other, target in self._targets:
            if isinstance(other, EngineParts):
                other.rescalings.append((rescaling, target))
                stack.callback(other.rescalings.remove, (rescaling, target))
        return rescaling

    def _find_targets(self) -> list[tuple[EngineParts | OtherOptimizer, RescaleTarget]]:
        mine = {id(weight) for engine in self.engines for weight in engine.weights()}
        targets: list[tuple[EngineParts | OtherOptimizer, RescaleTarget]] = []
        seen: set[int] = set()
        for other in self.others:
            if isinstance(other, EngineParts):
                other.forget_cleared()
            theirs = other.weights()
            if isinstance(other, EngineParts):
                _check_not_mixed(other, [weight for weight in theirs if id(weight) in mine])
            target = other.rescale_target([weight for weight in theirs if id(weight) not in mine])
            again = [weight for weight in target.parameters if id(weight) in seen]
            seen.update(map(id, target.parameters))
            if again:
                target.parameters = [weight for weight in target.parameters if not any(weight is w for w in again)]
                # without any scale it does not matter who takes them
                if target.scale() is not None or any(s.scale() is not None for _, s in targets):
                    target.contested = again
            targets.append((other, target))
        return targets

    def _take_up_rescaling(self, rescaling: Rescaling) -> None:
        """This pass goes on where another one may have come in between."""
        for other, target in self._targets:
            if not rescaling.is_open(target):
                if isinstance(other, EngineParts):
                    other.forget_cleared()
                rescaling.open(target)

    def _hand_over(self, other: EngineParts | OtherOptimizer, target: RescaleTarget) -> None:
        if not target.arrived or target.found_inf is None:
            return
        if self.first.scales.check and not self.first.scales.are_shared:
            # the scale of this loss was too large there, so it has to fall. Scripts name the optimizers that step; gradients
            # elsewhere are mostly thrown away, and do not count
            self.first.overflow.add_elsewhere(self.loss_id, target.found_inf)
        if isinstance(other, EngineParts):
            other.receive(target.found_inf, target.parameters)

    def _check_alone(self) -> None:
        """Within a backward() call: another block's loss may be a part of what it differentiates."""
        call = torch_internals.graph_task_id()
        for engine in self.engines:
            engine.call = call
        if any(other.gradients.in_backward and other.call == call for other in self._other_engines):
            raise AmpUsageError(
                'one backward() of two scaled losses, each of a "with amp.scale_loss(...)" block of its own: which of the two '
                'scales a gradient carries cannot be known. Call backward() for each, or scale the sum: '
                'amp.scale_loss(loss0 + loss1, [optimizer0, optimizer1]).'
            )

    # -- after -------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        if self.first.gradients.sums is not None:
            self.first.gradients.collect(self.first.weights())
        if self.first.gradients.unscaled:
            self._tell_flags()
        self.first.overflow.use(self.loss_id)
        for engine in self.engines:
            engine.overflow.named = True
            engine.stage = Stage.ACCUMULATING

    def _tell_flags(self) -> None:
        """Set the overflow flag of every engine if any has found one; the loss scale is updated by the first alone."""
        found = [flag for flag in self._flags if flag is not None]
        if not found:
            return
        device = self.first.device
        worst = found[0] if len(found) == 1 else torch.stack([flag.to(device) for flag in found]).max()
        self.first.overflow.add(self.loss_id, worst)
        others = [other for other in self._other_engines if other.gradients.unscaled]
        mine = {id(weight) for engine in self.engines for weight in engine.weights()} if others else set()
        sharing = [other for other in others if mine.intersection(map(id, other.weights()))]
        for engine in (*self.engines[1:], *sharing):
            engine.add_of_others(worst)


def scale_of(engines: Sequence[EngineParts], loss_id: int) -> Tensor | None:
    """The scale of the coming pass: that of the gradients which wait for it, or the present one; None for 1.

    Args:
        engines: Those that the pass is meant for.
        loss_id: Which scale of the first.

    Raises:
        AmpUsageError: No such loss.
    """
    for engine in engines:
        held = engine.gradients.held
        if held is not None and held.loss_id == loss_id:
            # the scale may have moved since, where engines share it
            return held.scale
    return engines[0].scales.pinned(loss_id)


def _check_not_mixed(other: EngineParts, both: Sequence[Tensor]) -> None:
    # unscaled at each backward pass, the gradients of both may be added up
    if both and not other.gradients.unscaled and other.is_accumulating and other.has_gradient(both):  # type: ignore[arg-type]
        raise AmpUsageError(
            'backward() of one wrapper while another one, which steps the same parameters, has gradients waiting: '
            'two losses would be mixed that carry different scales. Finish one accumulation before the other begins.'
        )


def _averaged_now(ddp: Ddp) -> frozenset[int]:
    """Temporary, until what waits carries one scale: the parameters, by id, that the coming pass averages over the ranks."""
    return frozenset(
        id(parameter)
        for each in ddp.ddps
        if each.process_group.size() > 1 and _averages(each)
        for parameter in each.module.parameters()
    )


class SimplePass:
    """The backward pass of an engine that has one loss, no DDP and no other optimizer beside it: there is little to do.

    Args:
        engine: Whose loss it is.
    """

    __slots__ = ('_engine',)

    def __init__(self, engine: EngineParts) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._engine.gradients.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            engine = self._engine
            if engine.gradients.sums is not None:
                engine.gradients.collect(engine.weights())
            engine.overflow.use(0)
            engine.overflow.named = True
            engine.stage = Stage.ACCUMULATING


def backward_pass(engine: EngineParts, loss_id: int) -> BackwardPass | SimplePass:
    """What surrounds the backward pass of a loss that is meant for one engine.

    Args:
        engine: Whose loss it is.
        loss_id: Which scale.

    Raises:
        AmpUsageError: No such loss.
    """
    simple = not (
        engine.others or engine.rescalings or engine.gradients.unscaled or engine.ddp.ddps or engine.overflow.has_others
    )
    return SimplePass(engine) if simple else BackwardPass([engine], loss_id)
