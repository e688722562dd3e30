"""From the loss to gradients that a step can find: scaled, run backward, and put in their places."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops, torch_internals
from ..autocast import regions
from ..errors import AmpUsageError
from .attach import Attaching, named_roots
from .base import EngineBase, Stage
from .buffers import users as buffer_users
from .gradients import cross_optimizer as foreign_gradients
from .gradients import unscale as gradients


class Receiving(Attaching):
    """Scales losses and receives what their backward passes bring."""

    def scale(self, loss: Tensor, loss_id: int = 0, together: Sequence[Receiving] = ()) -> Tensor:
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
            AmpUsageError: No such loss, several losses under ``no_sync``, or ``create_graph=True`` with a scale or masters.
        """
        scaled = self.scale(loss, loss_id)
        if not self.attached:
            self.attach(None)
        if kwargs.get('create_graph') and (self._masters is not None or not self._scaler(loss_id).is_one):
            raise AmpUsageError(gradients.NO_GRAPH)
        with self.receiving(loss_id):
            scaled.backward(**kwargs)  # type: ignore[no-untyped-call]

    @contextmanager
    def receiving(
        self, loss_id: int = 0, together: Sequence[Receiving] = (), beyond: Sequence[Receiving] = ()
    ) -> Iterator[Callable[[], None]]:
        """Around one backward pass of a loss that :meth:`scale` has scaled, whoever runs it.

        Args:
            loss_id: Which scaler; below ``num_losses``.
            together: Further engines that the pass is meant for. This one's scale holds for all, and learns; where a gradient
                of any is non-finite, all skip their next step.
            beyond: Further engines that the pass may reach, as those told to :meth:`join`.

        Yields:
            What to call where the pass begins inside, if passes for other optimizers may be under way by then.

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
        others = [other for other in (*self._others, *beyond) if not any(other is engine for engine in engines)]
        with ExitStack() as stack:
            for each in (*engines, *others):
                if isinstance(each, Receiving):
                    stack.callback(each._end_pass)
            averaged = [engine._begin_pass() for engine in engines]
            shares = self._shares(engines, others)
            if self._sums is not None:
                self._sums.give_back(self._reducers.about_to_average())
            averaged_ones = self._reducers.about_to_average(everywhere=True) if shares else frozenset()
            flags = [engine._flags.new() if engine.scalers[0].checks else None for engine in engines]
            lending = self._lend(shares, scale, averaged_ones, loss_id, stack)
            if self._ops is not None:
                # checkpointed segments are recomputed in there
                stack.enter_context(regions.in_backward(self._ops.keys))
            taken: set[int] = set()
            for engine, over_ranks, flag in zip(engines, averaged, flags):
                if engine._on_arrival:
                    stack.enter_context(engine._arriving(loss_id, scale, over_ranks, flag, taken))
                    taken.update(map(id, engine.weights()))

            first = stack.enter_context(buffer_users.backward(engines))

            @torch.no_grad()
            def begins() -> None:
                self._check_alone(engines, others)
                first()
                for engine in engines:
                    engine._end_loans()
                for other, share in shares:
                    if not lending.is_open(share):
                        if isinstance(other, Receiving):
                            other._forget_cleared()
                        lending.open(share)

            yield begins
            for engine in engines:
                # what passes that are still under way brought here is not to be unscaled by this one's scale
                engine._end_loans()
        for engine in engines:
            engine._reducers.end_backward()
        if self._sums is not None:
            self._sums.take(self.weights())
        if self._on_arrival:
            self._tell(loss_id, [*together, *self._steppers_of(engines, others)], flags)
        self._flags.used[loss_id] = True
        for engine in engines:
            engine._flags.named = True
            engine.stage = Stage.ACCUMULATING
            if engine._buffers is not None:
                engine._buffers.used_by(engines)
        for other, share in shares:
            # through modules whose outputs were not used, but what hooks have taken from inside of them
            if share.arrived and isinstance(other, EngineBase) and other._buffers is not None:
                other._buffers.used_by(engines)

    def follow(self, earlier: Sequence[EngineBase]) -> None:
        """Before attaching: what earlier optimizers of the same weights have left there is known to this one too.

        Args:
            earlier: Engines that are attached.
        """
        mine = {id(weight) for weight in self.weights()}
        for engine in earlier:
            if mine.intersection(map(id, engine.weights())):
                self._arrivals.share(engine._arrivals)
                return

    def take_over(self, models: Sequence[nn.Module]) -> None:
        """After attaching: gradients that masters have from before are no news.

        Args:
            models: Those of earlier optimizers, whose weights this one steps.
        """
        self._follow_at_entry(models)
        if models:
            self._watch_buffers(named_roots(models))
        self._arrivals.take_over(self._pairs())

    def _begin_pass(self) -> bool:
        """Returns whether the coming pass is averaged over the ranks; True without several."""
        self._end_loans()
        self._adopt_late()
        self._forget_cleared()
        averaged = self._reducers.begin_backward()
        self._look_at_rest()
        if self._on_arrival and not averaged and not self._shared:
            raise AmpUsageError(
                f'backward() with num_losses={self.policy.num_losses} under no_sync: unscaling each loss on arrival would '
                f'keep its gradients from the other ranks. Use accumulative_counts=1, or one loss.'
            )
        return averaged

    @staticmethod
    def _check_alone(
        engines: Sequence[Receiving], others: Sequence[EngineBase | foreign_gradients.OtherOptimizer]
    ) -> None:
        """Within a backward() call: another block's loss may be a part of what it differentiates."""
        call = torch_internals.graph_task_id()
        for engine in engines:
            engine._call = call
        if any(isinstance(other, Receiving) and other._arrivals.open and other._call == call for other in others):
            raise AmpUsageError(
                'one backward() of two scaled losses, each of a "with amp.scale_loss(...)" block of its own: which of the two '
                'scales a gradient carries cannot be known. Call backward() for each, or scale the sum: '
                'amp.scale_loss(loss0 + loss1, [optimizer0, optimizer1]).'
            )

    def _look_at_rest(self) -> None:
        """Each pass looks at what it brings. What nobody scaled, or what was stepped before, is looked at here, once."""
        if not self._shared or self._flags.looked or not self.scalers[0].checks:
            return
        self._flags.looked = True
        found = [parameter.grad for parameter in self._parameters() if parameter.grad is not None]
        values = [grad.coalesce()._values() if grad.is_sparse else grad for grad in found]
        if values:
            flag = self._flags.new()
            ops.multi_tensor_isnonfinite(values, flag)
            self._flags.receive(flag, self._reducers.is_local())

    def _end_pass(self) -> None:
        self._arrivals.put_back(list(self._pairs()))

    @staticmethod
    def _steppers_of(
        engines: Sequence[Receiving], others: Sequence[EngineBase | foreign_gradients.OtherOptimizer]
    ) -> list[Receiving]:
        """Those others that step a parameter of the engines as well."""
        theirs = [other for other in others if isinstance(other, Receiving) and other._on_arrival]
        if not theirs:
            return []
        mine = {id(weight) for engine in engines for weight in engine.weights()}
        return [other for other in theirs if mine.intersection(map(id, other.weights()))]

    def _lend(
        self,
        shares: Sequence[tuple[EngineBase | foreign_gradients.OtherOptimizer, foreign_gradients.Share]],
        scale: Tensor | None,
        averaged: Container[int],
        loss_id: int,
        stack: ExitStack,
    ) -> foreign_gradients.Lending:
        others = {share: other for other, share in shares}
        lending = foreign_gradients.Lending(
            list(others), scale, averaged, lambda share: self._hand_over(others[share], share, loss_id)
        )
        stack.enter_context(lending)
        for other, share in shares:
            if isinstance(other, Receiving):
                other._lenders.append((lending, share))
                stack.callback(other._lenders.remove, (lending, share))
        return lending

    def _adopt_late(self) -> None:
        """Masters for what ``add_param_group`` brought, before gradients arrive."""
        if self._masters is not None and self._on_arrival:
            lengths = [len(group['params']) for group in self.optimizer.param_groups] if self.optimizer else []
            if lengths != self._lengths or self._masters.has_unfrozen:
                self._lengths = lengths
                self._masters.adopt()

    def _end_loans(self) -> None:
        """Passes that are meant for other optimizers may be under way: what they brought here so far carries their scale."""
        for lending, share in self._lenders:
            lending.close(share)

    def _arriving(
        self, loss_id: int, scale: Tensor | None, averaged: bool, flag: Tensor | None, taken: Container[int]
    ) -> AbstractContextManager[None]:
        on_device = None if scale is None else scale.to(self._device)
        pairs = [pair for pair in self._pairs() if id(pair[0]) not in taken]
        own = [parameter for parameter in self._own_parameters() if id(parameter) not in taken]
        if not averaged and any(id(weight) in taken for weight in self.weights()):
            raise AmpUsageError(
                'a backward pass under no_sync that is meant for two optimizers of the same parameters: which of them holds '
                'the gradients until they are averaged cannot be known. Leave no_sync out, or list one optimizer of each '
                'parameter.'
            )
        return self._arrivals.arriving(
            pairs,
            own,
            loss_id,
            on_device,
            averaged,
            flag,
            self._check_finished,
            in_buckets=bool(self._reducers.ddps),
        )

    def _check_finished(self) -> None:
        if self._reducers.is_unfinished():
            raise AmpUsageError(
                f'backward() with num_losses={self.policy.num_losses} reached only some of the parameters that the forward '
                f'pass used, and DistributedDataParallel waits for the others before it averages: run the model once for '
                f'each loss, with find_unused_parameters=True, or add the losses up.'
            )

    def _tell(self, loss_id: int, together: Sequence[Receiving], flags: Sequence[Tensor | None]) -> None:
        """Each engine of a pass learns what any of them found; the scale of the pass learns once."""
        found = [flag for flag in flags if flag is not None]
        if not found:
            return
        worst = found[0] if len(found) == 1 else torch.stack([flag.to(self._device) for flag in found]).max()
        self._flags.find(loss_id, worst)
        for engine in together:
            engine._flags.receive(worst, engine._reducers.is_local())

    def _pass_scale(self, loss_id: int, together: Sequence[Receiving] = ()) -> Tensor | None:
        """The scale of the coming pass: that of the gradients which wait for it, or the present one."""
        for engine in (self, *together):
            held = engine._arrivals.held
            if held is not None and held.loss_id == loss_id:
                # the scale may have moved since, where engines share it
                return held.scale
        scale = self._scale_of(loss_id)
        # another engine may step before this pass is through, and move it
        return scale.clone() if scale is not None and self._shared else scale

    def _shares(
        self, engines: Sequence[Receiving], others: Sequence[EngineBase | foreign_gradients.OtherOptimizer]
    ) -> list[tuple[EngineBase | foreign_gradients.OtherOptimizer, foreign_gradients.Share]]:
        """What the coming backward pass of ``engines`` may bring to others, which it is not meant for."""
        if not others:
            return []
        mine = {id(weight) for engine in engines for weight in engine.weights()}
        shares: list[tuple[EngineBase | foreign_gradients.OtherOptimizer, foreign_gradients.Share]] = []
        seen: set[int] = set()
        for other in others:
            if isinstance(other, Receiving):
                other._forget_cleared()
            theirs = other.weights()
            both = [weight for weight in theirs if id(weight) in mine]
            if (
                both
                and isinstance(other, Receiving)
                # unscaled as they arrive, the gradients of both may be added up
                and not other._on_arrival
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

    def _hand_over(
        self,
        other: EngineBase | foreign_gradients.OtherOptimizer,
        share: foreign_gradients.Share,
        loss_id: int,
    ) -> None:
        if not share.arrived or share.found_inf is None:
            return
        if self.scalers[0].checks and not self._shared:
            # the scale of this loss was too large there: it is the one that has to learn. A script says which optimizers a pass
            # is meant for; what arrives elsewhere is mostly thrown away
            self._flags.bring(loss_id, share.found_inf)
        if isinstance(other, Receiving):
            other._receive(share.found_inf, share.parameters)

    def _receive(self, found_inf: Tensor, at: Sequence[Tensor]) -> None:
        """Gradients of another engine's loss have arrived at some of our weights, on our scale."""
        if self._on_arrival:
            if self._arrivals.held is None and not self._arrivals.open:
                reached = {id(weight) for weight in at if weight.grad is not None}
                self._arrivals.add([pair for pair in self._pairs() if id(pair[0]) in reached], None)
        elif self._sums is not None:
            self._sums.take(self.weights())
        self._flags.lent = True
        # this engine's own pass may average the gradients themselves, but not the flag
        self._flags.receive(found_inf, self._reducers.is_local())
        if self.attached:
            self.stage = Stage.ACCUMULATING
