"""Keeps gradients between backward pass and step where one loss scale is enough: scaled, with FP32 sums where asked for."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import repeat

import torch
from torch import Tensor, nn

from ... import ops
from ...casting.masters import Masters, StepLists
from ...ops import attributes
from ...policy.nested import HALF_TYPES
from ...shards import fitted, is_sharded
from .unscale import unscale_to_masters


@dataclasses.dataclass(eq=False)
class Held:
    """Gradients of backward passes that were not averaged over the ranks: scaled, in ``.grad``, until one averages them all.

    Attributes:
        loss_id: Whose scale they carry.
        scale: float32 scalar, or None for 1. A copy: it may move in the meantime, where several optimizers share it.
        before: Unscaled sums of parameters without masters, set aside meanwhile, by ``id``.
    """

    loss_id: int
    scale: Tensor | None
    before: dict[int, Tensor]


class ScaledGradients:
    """Gradients stay scaled in ``.grad`` of the model's weights until the step unscales them: one loss, one optimizer.

    Those of losses that contain masters themselves stay in the masters' ``.grad``, scaled as well, and the step adds them.

    Args:
        sums: FP32 sums beside 16-bit gradients, for ``accumulate_in_fp32``; None for sums in the type of the weights.
    """

    #: Whether gradients are unscaled at each backward pass; they lie where the optimizer looks for them then.
    unscaled = False
    #: Whether a backward pass is under way that unscales what it brings.
    in_backward = False
    #: What waits for a backward pass that is averaged over the ranks.
    held: Held | None = None
    #: Whether other engines know of the same gradients.
    is_shared = False

    def __init__(self, sums: Fp32Sums | None = None) -> None:
        self.sums = sums
        #: Weights whose gradient lies elsewhere than in ``.grad``.
        self.busy: Container[Tensor] = () if sums is None else sums
        # masters whose .grad is that of a step, unscaled, and what it was before
        self._before_step: list[tuple[nn.Parameter, Tensor | None]] = []

    def share(self, other: ScaledGradients) -> None:
        """What is left on the weights is known to both; nothing is."""

    def take_over(self, pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Masters may have gradients of an optimizer that nobody has any more; only what is unscaled there counts."""

    def note_clipped(self, weights: Sequence[nn.Parameter], writes: int) -> None:
        """The gradients of these weights are about to be clipped. They are what the step takes."""

    def begin(self) -> None:
        """Gradients are about to be added to: where a step has left unscaled ones at masters, scaled ones take their place."""
        if self._before_step:
            attributes.set_gradients(*zip(*self._before_step))
            self._before_step = []

    def before_backward(self, averaged: Container[int]) -> None:
        """A backward pass begins.

        Args:
            averaged: The weights, by id, whose gradients it averages over the ranks.
        """
        if self.sums is not None:
            self.sums.give_back(averaged)

    def collect(self, weights: Iterable[nn.Parameter]) -> None:
        """A backward pass has left gradients at these weights."""
        if self.sums is not None:
            self.sums.take(weights)

    def clear(self, params: Masters) -> None:
        """Gradients were cleared, of weights and masters."""
        self._before_step = []
        if self.sums is not None:
            self.sums.clear()

    def zeroed(self, pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Gradients were cleared, and those in ``.grad`` are zeros: so is what lay elsewhere, and the next step takes it."""
        for weight in () if self.sums is None else self.sums.cleared.values():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        for weight, master in pairs:
            # made anew at each step: keeping zeros would only cost memory
            if weight.grad is not None:
                master.grad = None

    def put_back(self, params: Masters) -> None:
        """A backward pass has ended, however it did."""

    def release(self, params: Masters, found_inf: Tensor | None) -> None:
        """Unscale what waits for a backward pass that is averaged; nothing waits."""

    def to_step(self, lists: StepLists) -> list[Tensor | None]:
        """The gradient of each parameter for a fused step; scaled, of any floating type; None for none."""
        found = attributes.gradients(lists.weights)
        beside = self._beside(lists.pairs)
        if beside is None:
            return found
        return [ops.add_gradients(beside(weight), grad) for weight, grad in zip(lists.weights, found)]

    def _beside(self, pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> Callable[[Tensor], Tensor | None] | None:
        """Gives the FP32 gradient of a weight that lies elsewhere than in its ``.grad``: its sum, and its master's. None: no
        weight has one."""
        sums = self.sums if self.sums else Fp32Sums()
        found = attributes.gradients([master for _, master in pairs])
        if all(map(operator.is_, found, repeat(None))):
            return sums.get if sums else None
        direct = {id(weight): grad for (weight, _), grad in zip(pairs, found)}
        return lambda weight: ops.add_gradients(sums.get(weight), direct.get(id(weight)))

    def unscale(self, params: Masters, inverse_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Bring unscaled gradients to where the optimizer looks for them.

        Args:
            params: What it steps.
            inverse_scale: float32 scalar, or None for 1.
            found_inf: float32 scalar set to 1.0 where an element is non-finite, in place; None for no check.
        """
        beside = self._beside(params.pairs)
        # unscaled in place where the weight has none
        masters = [master for _, master in params.pairs]
        before = [None if grad is None else grad.clone() for grad in attributes.gradients(masters)]
        unscale_to_masters(params.pairs, params.without_master(), inverse_scale, found_inf, beside)
        self._before_step = list(zip(masters, before))
        if self.sums is not None:
            # they are the masters' gradients now
            self.sums.clear()

    def save(self, lists: StepLists) -> list[Tensor | None]:
        """Copies of the gradients of an open accumulation, in the order of the groups, for a checkpoint."""
        return [None if gradient is None else gradient.detach().clone() for gradient in self.to_step(lists)]

    def restore(self, gradients: Sequence[Tensor | None], lists: StepLists) -> None:
        """Put back what :meth:`save` gave; not changed, and not aliased."""
        for weight, stepped, gradient in zip(lists.weights, lists.parameters, gradients):
            weight.grad = None
            if gradient is not None and self.sums is not None and weight.dtype in HALF_TYPES:
                self.sums.put(weight, gradient)
            elif gradient is not None:
                # that of a master itself is FP32, and would be rounded at the weight
                target = weight if gradient.dtype in HALF_TYPES else stepped
                target.grad = fitted(gradient, target)


class Fp32Sums:
    """FP32 sums of 16-bit gradients over the micro-batches of one step.

    After each backward pass the gradient of every 16-bit weight is added to its sum and freed, so that an accumulation costs
    4 bytes per weight between two backward passes, where ``.grad`` would cost 2. Sums are still multiplied by the loss
    scale. FP32 weights need none: their ``.grad`` is a sum in FP32 already.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[nn.Parameter, Tensor]] = {}
        #: Weights that had one, by id: ``zero_grad(set_to_none=False)`` leaves zeros there.
        self.cleared: dict[int, nn.Parameter] = {}

    def __len__(self) -> int:
        return len(self._sums)

    def __contains__(self, weight: object) -> bool:
        return id(weight) in self._sums

    def get(self, weight: Tensor) -> Tensor | None:
        """The sum of ``weight``: float32, of its shape; a live tensor. None without one."""
        found = self._sums.get(id(weight))
        return None if found is None else found[1]

    def put(self, weight: nn.Parameter, gradient: Tensor) -> None:
        """Let ``gradient`` (any floating type) be the sum of ``weight``."""
        wide = fitted(gradient.float(), weight.detach().float()) if is_sharded(weight) else gradient
        self._sums[id(weight)] = (weight, wide.to(weight.device, torch.float32, copy=True))

    @torch.no_grad()
    def take(self, weights: Iterable[nn.Parameter]) -> None:
        """Move gradients into the sums.

        Args:
            weights: Those that are not 16-bit, or have no gradient, are passed over.
        """
        for weight in weights:
            gradient = weight.grad
            if gradient is None or weight.dtype not in HALF_TYPES:
                continue
            before, wide = self.get(weight), gradient.float()
            if before is None or before.is_sparse != wide.is_sparse:
                total = ops.add_gradients(before, wide)
                assert total is not None
            else:
                total = before.add_(wide)
            self._sums[id(weight)] = (weight, total)
            weight.grad = None

    @torch.no_grad()
    def give_back(self, ids: Container[int]) -> None:
        """Put sums, rounded, where DDP looks for gradients: what stayed here would stay on its rank.

        Args:
            ids: The weights, by id, whose gradients are about to be averaged.
        """
        for key in [key for key in self._sums if key in ids]:
            weight, total = self._sums.pop(key)
            weight.grad = ops.add_gradients(total.to(weight.dtype), weight.grad)

    def clear(self) -> None:
        """Forget every sum, but not whose they were."""
        self.cleared.update((key, weight) for key, (weight, _) in self._sums.items())
        self._sums.clear()
