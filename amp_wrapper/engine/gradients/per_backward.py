"""Unscales gradients after each backward pass, and adds them in FP32 to those of earlier ones.

Scales of several losses must never mix in one gradient, and the sums have to be there, unscaled, between the end of a backward
pass and the optimizer's step, where people clip them.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ... import ops
from ...casting.masters import Masters, StepLists
from ...errors import AmpUsageError
from ...ops import attributes
from ...shards import fitted
from .added import AddedGradients
from .store import Held, ScaledGradients
from .unscale import accumulate_unscaled, check_no_graph

logger = logging.getLogger('amp_wrapper')

#: (model weight, master)
Pair = tuple[nn.Parameter, nn.Parameter]

_FIRST, _SECOND = operator.itemgetter(0), operator.itemgetter(1)


class UnscaledGradients(ScaledGradients):
    """The gradients of one engine where they are unscaled after each backward pass: several losses, or shared loss scales.

    The sums lie where the optimizer looks for them: in the ``.grad`` of masters, and of parameters that have none.

    Args:
        keeps: Whether model weights keep the (scaled) gradient of the last pass. Scripts clear gradients by
            ``model.zero_grad()``, which knows no masters: where a weight has lost its gradient, its master's is cleared too.
        speaks: Whether to warn of gradients that have no effect.
    """

    unscaled = True

    def __init__(self, keeps: bool, speaks: bool = True) -> None:
        super().__init__()
        self._keeps = keeps
        self.added = AddedGradients()
        # those that a pass under way has taken off their weights, by id
        self.aside: dict[int, Tensor] = {}
        self._warned = not speaks
        self._scale: Tensor | None = None
        # what the pass under way adds to, by id
        self._waiting: dict[int, Tensor] = {}

    @property
    def pending_scale(self) -> Tensor | None:
        """The scale of gradients that are not unscaled yet, a float32 scalar: of the backward pass under way, or held. None
        for 1."""
        if self.in_backward:
            return self._scale
        return None if self.held is None else self.held.scale

    def share(self, other: ScaledGradients) -> None:
        """What is left on the weights is known to both: the other engine steps some of them too.

        Args:
            other: Whose notes hold from now on.
        """
        assert isinstance(other, UnscaledGradients)
        self.added, self.aside = other.added, other.aside
        self.is_shared = True

    def take_over(self, pairs: Iterable[Pair]) -> None:
        """Masters that are older than this object may have gradients, of an optimizer that nobody has any more.

        What lies on a weight was added to its master's by then; where nothing lies there, it was cleared.

        Args:
            pairs: All of them.
        """
        for weight, master in pairs:
            if master.grad is None or self.added.get(weight) is not None:
                continue
            if weight.grad is None:
                master.grad = None
            else:
                self._note_added([weight])

    def note_clipped(self, weights: Sequence[nn.Parameter], writes: int) -> None:
        """The gradients of these weights are about to be clipped; those of masters stay as they are."""
        self.added.note_clipped(weights, writes)

    def clear(self, params: Masters) -> None:
        """Gradients were cleared, of weights and masters."""
        weights = _weights_of(params.pairs)
        self.added.forget(weights)
        for weight in weights if self.aside else ():
            self.aside.pop(id(weight), None)
        self._waiting.clear()
        if self.held is not None:
            # a pass may be under way that averages it
            self.held.before.clear()
        self.held = None

    def zeroed(self, pairs: Iterable[Pair]) -> None:
        """Gradients were cleared: those of masters are zeros by now, those of weights count as gradients without a scale."""

    def take_up(self, pairs: Sequence[Pair], makes_room: bool) -> list[Pair]:
        """Before a backward pass or a step: apply to the masters' gradients what was done to those of their weights.

        Where a weight has lost its gradient, so does its master. Syncs where a gradient was written to, or replaced.

        Args:
            pairs: All of them.
            makes_room: Whether the weights' gradients are set aside, for a backward pass is about to begin. :meth:`put_back`
                comes after it.

        Returns:
            The pairs whose weight has a gradient that came from elsewhere, without a scale.
        """
        if not self.added:
            found = attributes.gradients(_weights_of(pairs))
            return [pair for pair, gradient in zip(pairs, found) if gradient is not None]
        if not makes_room and self.added.are_as_noted(_weights_of(pairs)):
            return []
        self._recognise(pairs)
        plain: list[Pair] = []
        written: list[Pair] = []
        for pair in pairs:
            weight, master = pair
            added = self.added.get(weight)
            if added is not None and self.added.has(weight):
                if makes_room:
                    self.aside[id(weight)], weight.grad = added[0], None
                    self.added.forget([weight])
                continue
            self.added.forget([weight])
            if added is None:
                if weight.grad is not None:
                    plain.append(pair)
            elif weight.grad is added[0]:
                written.append(pair)
            else:
                # cleared; perhaps another one has come
                master.grad = None
                if weight.grad is not None:
                    plain.append(pair)
        if written:
            self._take_up_written(written, makes_room)
        return plain

    def _recognise(self, pairs: Sequence[Pair]) -> None:
        """What was added may lie in another tensor now. Syncs where any does.

        DDP with ``gradient_as_bucket_view`` moves gradients when it builds its buckets anew, before its second forward pass.
        """
        moved: list[nn.Parameter] = []
        same: list[Tensor] = []
        for weight, _ in pairs:
            added, grad = self.added.get(weight), weight.grad
            if added is None or grad is None or grad is added[0] or grad.is_sparse or added[0].is_sparse:
                continue
            moved.append(weight)
            same.append(((grad == added[0]) | (grad.isnan() & added[0].isnan())).all())
        are_same = torch.stack(same).tolist() if same else []
        self.added.note([weight for weight, is_same in zip(moved, are_same) if is_same])

    def put_back(self, params: Masters) -> None:
        """After a pass, however it ended: weights that got no gradient have the one that was left there before."""
        if self.in_backward or self.held is not None or not self.aside:
            # what lies on the weights will be unscaled, all of it
            return
        for weight, _ in params.pairs:
            gradient = self.aside.pop(id(weight), None)
            if gradient is not None and weight.grad is None:
                weight.grad = gradient
                self.added.note([weight])

    def _take_up_written(self, pairs: Sequence[Pair], makes_room: bool) -> None:
        """``zero_grad(set_to_none=False)``, or somebody who does not know of masters. Syncs.

        Zeros are of the former, unless ``torch.nn.utils`` has clipped: the norm of gradients that carry the loss scale is
        often infinite in float16, and the factor 0.
        """
        given = [(weight.grad.coalesce()._values() if weight.grad.is_sparse else weight.grad) for weight, _ in pairs
                 if weight.grad is not None]  # fmt: skip
        zero = torch.stack([~gradient.any() for gradient in given]).tolist()
        zero = [is_zero and not self.added.was_clipped(weight) for is_zero, (weight, _) in zip(zero, pairs)]
        for (weight, master), cleared in zip(pairs, zero):
            if cleared and master.grad is not None:
                master.grad = None if master.grad.is_sparse else torch.zeros_like(master.grad)
            if makes_room and weight.grad is not None:
                self.aside[id(weight)], weight.grad = weight.grad, None
        self._note_added(_weights_of(pairs))
        if not all(zero) and not self._warned:
            self._warned = True
            logger.warning(
                f'amp: the gradients of {zero.count(False)} 16-bit model weights were written to after scale_loss(), by a '
                f'backward() outside of it or by clipping them. That has no effect on them: the optimizer steps their FP32 '
                f'masters. (FP32 weights, such as those of BatchNorm, were clipped too, by the norm of scaled gradients.) Clip '
                f'amp.master_params(optimizer), and scale every loss.'
            )

    def _note_added(self, weights: Sequence[nn.Parameter]) -> None:
        """The weights' gradients have been added to the masters'."""
        if self._keeps:
            self.added.note(weights)
            return
        attributes.set_gradients(weights, None)

    def add(self, pairs: Sequence[Pair], found_inf: Tensor | None) -> None:
        """Add gradients of weights that carry no scale.

        Args:
            pairs: Those with such a gradient.
            found_inf: As in :func:`~amp_wrapper.engine.gradients.unscale.unscale_to_masters`.
        """
        accumulate_unscaled(pairs, [], {}, None, found_inf)
        self._note_added(_weights_of(pairs))

    @contextmanager
    def unscaling(
        self,
        pairs: Sequence[Pair],
        own: Sequence[nn.Parameter],
        loss_id: int,
        scale: Tensor | None,
        averaged: bool,
        found_inf: Tensor | None,
        in_buckets: bool = True,
    ) -> Iterator[None]:
        """Around one backward pass. After an exception inside, all gradients are what they were before.

        Args:
            pairs: After :meth:`take_up`, unless something is held.
            own: Parameters without masters.
            loss_id: Whose scale the pass carries.
            scale: float32 scalar, or None for 1.
            averaged: Whether the pass is averaged over the ranks; if not, its gradients are held.
            found_inf: As in :func:`~amp_wrapper.engine.gradients.unscale.unscale_to_masters`.
            in_buckets: Whether DDP may have moved gradients into its buckets, which this pass overwrites.

        Raises:
            AmpUsageError: Gradients of another loss are held; a pass with ``create_graph=True``, where a scale or masters are.
        """
        held = self.held
        if held is not None and held.loss_id != loss_id:
            raise AmpUsageError(
                f'backward() of loss {loss_id} while gradients of loss {held.loss_id} wait for DistributedDataParallel to '
                f'average them (no_sync): their scales would mix. Finish the accumulation of one loss before the next, or use '
                f'one loss_id for both.'
            )
        weights, masters = _weights_of(pairs), list(map(_SECOND, pairs))
        everything = [*own, *weights]
        # this pass adds to what is held, where it is averaged
        copies = in_buckets if held is None else averaged
        found = zip(everything, attributes.gradients(everything))
        waiting = {id(p): grad.clone() if copies else grad for p, grad in found if grad is not None}
        if waiting and (held is None or not averaged):
            attributes.set_gradients(everything, None)
        # a loss may contain masters themselves
        waiting.update((id(p), grad) for p, grad in zip(masters, attributes.gradients(masters)) if grad is not None)
        attributes.set_gradients(masters, None)
        self.in_backward, self._scale, self._waiting = True, scale, waiting
        try:
            yield
            check_no_graph(weights if scale is None else everything)
            self._add_direct(masters, waiting, scale, found_inf)
            if averaged:
                before = waiting if held is None else held.before
                self._unscale(pairs, own, before, scale, found_inf)
        except BaseException:
            for parameter in (*everything, *masters):
                parameter.grad = waiting.get(id(parameter))
            raise
        finally:
            # another dict: what is held goes on with this one
            self.in_backward, self._scale, self._waiting = False, None, {}
        if averaged:
            self.held = None
        elif self.held is None:
            self.held = Held(loss_id, None if scale is None else scale.clone(), waiting)
        else:
            for parameter in everything:
                parameter.grad = ops.add_gradients(waiting.get(id(parameter)), parameter.grad)

    def _add_direct(
        self, masters: Sequence[nn.Parameter], before: dict[int, Tensor], scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Unscale what a pass has brought to masters themselves, and add it to the sums that were there."""
        reached = [p for p, grad in zip(masters, attributes.gradients(masters)) if grad is not None]
        if reached:
            accumulate_unscaled([], reached, before, None if scale is None else scale.reciprocal(), found_inf)
        for master in masters:
            if master.grad is None:
                master.grad = before.get(id(master))

    def release(self, params: Masters, found_inf: Tensor | None) -> None:
        """Unscale what is held: a step does not wait for a pass that averages it."""
        held, self.held = self.held, None
        if held is not None:
            self._unscale(params.pairs, params.without_master(), held.before, held.scale, found_inf)
            self.put_back(params)

    def _unscale(
        self,
        pairs: Sequence[Pair],
        own: Sequence[nn.Parameter],
        before: dict[int, Tensor],
        scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        # rounded once
        inverse = None if scale is None else scale.reciprocal()
        accumulate_unscaled(pairs, own, before, inverse, found_inf)
        self._note_added(_weights_of(pairs))

    # -- methods of ScaledGradients ----------------------------------------------------------------------------------

    def to_step(self, lists: StepLists) -> list[Tensor | None]:
        """The unscaled gradient of each parameter, for a fused step."""
        return attributes.gradients(lists.parameters)

    def unscale(self, params: Masters, inverse_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Nothing: done at each backward pass."""

    def restore(self, gradients: Sequence[Tensor | None], lists: StepLists) -> None:
        """Put back what :meth:`save` gave; not changed, and not aliased."""
        for parameter, gradient in zip(lists.parameters, gradients):
            parameter.grad = None if gradient is None else fitted(gradient, parameter)


def _weights_of(pairs: Iterable[Pair]) -> list[nn.Parameter]:
    return list(map(_FIRST, pairs))
