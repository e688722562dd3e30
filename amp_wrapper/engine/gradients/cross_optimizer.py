"""Rescales gradients that a backward pass leaves at parameters of other optimizers.

A generator's loss flows through a discriminator, and leaves gradients there. They carry the scale of this loss, and the other
optimizer would divide by its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ... import ops
from ...errors import AmpUsageError
from ...policy.nested import parameters_of
from ...shards import local


@dataclasses.dataclass(eq=False)
class RescaleTarget:
    """The gradients of one backward pass at the parameters of one other optimizer.

    Attributes:
        parameters: The model's parameters that the other optimizer steps (weights, not masters), without those that this
            optimizer steps too, and without those in another ``RescaleTarget``.
        scale: Returns the other optimizer's loss scale, a float32 scalar; None for 1. Called only where there are gradients.
        checks: Whether the other optimizer looks for non-finite gradients itself.
        contested: Parameters that a third optimizer steps as well, perhaps on another scale.
        arrived: Set afterwards: whether the backward pass has left any gradient there.
        found_inf: Set afterwards: float32 scalar, 1.0 where one of them was non-finite; None without gradients.
    """

    parameters: Sequence[Tensor]
    scale: Callable[[], Tensor | None]
    checks: bool
    arrived: bool = False
    found_inf: Tensor | None = None
    contested: Sequence[Tensor] = ()


class OtherOptimizer:
    """An optimizer that is stepped by other code than this package's.

    Args:
        optimizer: The optimizer.
        scale: Returns the loss scale that its gradients are expected to carry; None for 1.
        checks: Whether gradients are checked for non-finite values before it steps.
    """

    def __init__(
        self, optimizer: Optimizer, scale: Callable[[], Tensor | None] = lambda: None, checks: bool = False
    ) -> None:
        self._optimizer = optimizer
        self._scale = scale
        self._checks = checks

    def weights(self) -> list[nn.Parameter]:
        """What it steps."""
        return parameters_of(self._optimizer)

    def rescale_target(self, beyond: Sequence[Tensor]) -> RescaleTarget:
        """As of an engine."""
        return RescaleTarget(beyond, self._scale, self._checks)


class Rescaling:
    """A context around one backward pass: gradients at parameters of other optimizers are converted to their loss scales.

    Gradients that were there before are set aside, and added again at the end. Each new one is multiplied by the ratio of the
    two scales, in float32, and rounded to its own type: exact for powers of two within the type's range. If one is non-finite,
    those for an optimizer that checks nothing become 0; other optimizers skip their step, as the optimizer of this loss does.
    After an exception inside, all gradients are as before.

    Backward passes for several optimizers may be under way at once: then the gradients of the one that ran are converted
    (:meth:`close`) where another one goes on, and new ones are waited for (:meth:`open`) where it goes on itself.

    Args:
        targets: The other optimizers; their fields ``arrived`` and ``found_inf`` are set.
        scale: The scale of this loss, a float32 scalar; None for 1.
        averaged: Parameters, by id, that DDP averages in this backward pass. Where gradients were set aside, it must find some.
        hand_over: Called with each target that is complete.

    Raises:
        AmpUsageError: On leaving: a parameter that two of the others step has got a gradient.
    """

    def __init__(
        self,
        targets: Sequence[RescaleTarget],
        scale: Tensor | None,
        averaged: Container[int],
        hand_over: Callable[[RescaleTarget], None],
    ) -> None:
        self.targets = list(targets)
        self._scale = scale
        self._averaged = averaged
        self._hand_over = hand_over
        # open targets: their parameters, and what waited there
        self._waiting: dict[RescaleTarget, list[tuple[Tensor, Tensor | None]]] = {}

    def __enter__(self) -> Rescaling:
        for target in self.targets:
            self.open(target)
        return self

    def open(self, target: RescaleTarget) -> None:
        """Set aside what is there: gradients that come from now on are those of this backward pass."""
        if target not in self._waiting:
            target.arrived, target.found_inf = False, None
            self._waiting[target] = [(p, _set_aside(p, id(p) in self._averaged)) for p in target.parameters]

    def is_open(self, target: RescaleTarget) -> bool:
        """Whether new gradients are counted as those of this backward pass."""
        return target in self._waiting

    def close(self, target: RescaleTarget) -> None:
        """Convert what has come; gradients that come from now on are those of another backward pass."""
        if target in self._waiting:
            self._finish([target])

    def forget(self, target: RescaleTarget) -> None:
        """The gradients there were cleared, and so are those that were set aside."""
        if target in self._waiting:
            self._waiting[target] = [(parameter, None) for parameter, _ in self._waiting[target]]

    def _finish(self, targets: Sequence[RescaleTarget]) -> None:
        for target in targets:
            _convert(target, self._scale)
        waiting = [pair for target in targets for pair in self._waiting[target]]
        sums = [(parameter, ops.add_gradients(gradient, parameter.grad)) for parameter, gradient in waiting]
        for parameter, gradient in sums:
            parameter.grad = gradient
        for target in targets:
            del self._waiting[target]
            self._hand_over(target)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if kind is None:
                self._finish(list(self._waiting))
        finally:
            for pairs in self._waiting.values():
                for parameter, gradient in pairs:
                    parameter.grad = gradient
            self._waiting.clear()


def _set_aside(parameter: Tensor, averaged: bool) -> Tensor | None:
    gradient, parameter.grad = parameter.grad, None
    if gradient is None:
        return None
    if averaged:
        parameter.grad = torch.zeros_like(gradient)
    # DDP's buckets, which it may lie in, are overwritten by the next reduction
    return gradient.clone()


@torch.no_grad()
def _convert(target: RescaleTarget, scale: Tensor | None) -> None:
    if any(parameter.grad is not None for parameter in target.contested):
        raise AmpUsageError(
            'backward() brought gradients to parameters that two other wrappers step, each on its own loss scale: which of '
            'the two would step them cannot be known. Freeze or detach them in this loss, or give them to one optimizer.'
        )
    arrived = []
    for parameter in target.parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            arrived.append(parameter.grad._values())
        else:
            arrived.append(parameter.grad)
    if not arrived:
        return
    target.arrived = True
    device = arrived[0].device
    target.found_inf = torch.zeros((), dtype=torch.float32, device=device)
    theirs = target.scale()
    ratio = None if scale is None else scale.to(device).double().reciprocal()
    if theirs is not None:
        ratio = theirs.to(device).double() * (1 if ratio is None else ratio)
    arrived = local(arrived)
    ops.multi_tensor_scale(arrived, arrived, None if ratio is None else ratio.float(), target.found_inf)
    if not target.checks:
        void = target.found_inf.bool()
        for gradient in arrived:
            gradient.masked_fill_(void.to(gradient.device), 0)
