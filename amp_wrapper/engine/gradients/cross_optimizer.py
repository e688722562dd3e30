"""What one backward pass brings to parameters that other optimizers step, such as a discriminator's through which a
generator's loss flows. It carries the scale of this loss, and the other optimizer would divide by its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ... import ops
from ...errors import AmpUsageError


@dataclasses.dataclass(eq=False)
class Share:
    """One other optimizer.

    Attributes:
        parameters: What it steps, on the model's side (weights, not masters), without what this optimizer steps too, and
            without what stands in another share.
        scale: Tells its own loss scale, a float32 scalar; None for 1. Asked only where gradients arrived.
        checks: Whether it looks for non-finite gradients itself.
        contested: Those of ``parameters`` that a third optimizer steps as well, on another scale for all we know.
        arrived: Set afterwards: whether any gradient arrived there.
        found_inf: Set afterwards: float32 scalar, 1.0 where one of them was non-finite; None where none arrived.
    """

    parameters: Sequence[Tensor]
    scale: Callable[[], Tensor | None]
    checks: bool
    arrived: bool = False
    found_inf: Tensor | None = None
    contested: Sequence[Tensor] = ()


class OtherOptimizer:
    """An optimizer that no engine of ours steps.

    Args:
        optimizer: The optimizer.
        scale: Tells the loss scale that it expects in its gradients; None for 1.
        checks: Whether somebody looks for non-finite gradients before it steps.
    """

    def __init__(
        self, optimizer: Optimizer, scale: Callable[[], Tensor | None] = lambda: None, checks: bool = False
    ) -> None:
        self._optimizer = optimizer
        self._scale = scale
        self._checks = checks

    def weights(self) -> list[nn.Parameter]:
        """What it steps."""
        return [parameter for group in self._optimizer.param_groups for parameter in group['params']]

    def share(self, beyond: Sequence[Tensor]) -> Share:
        """As of an engine."""
        return Share(beyond, self._scale, self._checks)


class Rescaling:
    """Around one backward pass: gradients that arrive elsewhere are put on the scale that is expected there.

    Each gradient is multiplied by the ratio of the two scales, in float32, and rounded to its own type: exact for powers
    of two within the type's range. One that is non-finite voids what this pass brought to an optimizer that checks nothing;
    others skip their step, as the optimizer of this pass does. After an exception inside, all gradients are as before.

    Passes for several optimizers may be under way at once; then each ends what it lends (:meth:`close`) where another one goes
    on, and takes it up again (:meth:`open`) where it goes on itself.

    Args:
        shares: The other optimizers; their fields ``arrived`` and ``found_inf`` are set.
        scale: The scale of this pass, a float32 scalar; None for 1.
        averaged: Parameters, by id, that DDP averages in this pass. Where gradients wait there, it must find some.
        hand_over: Called with each share that is complete.

    Raises:
        AmpUsageError: On leaving: a gradient arrived at a parameter that two of the others step.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        scale: Tensor | None,
        averaged: Container[int],
        hand_over: Callable[[Share], None],
    ) -> None:
        self.shares = list(shares)
        self._scale = scale
        self._averaged = averaged
        self._hand_over = hand_over
        # open shares: their parameters, and what waited there
        self._waiting: dict[Share, list[tuple[Tensor, Tensor | None]]] = {}

    def __enter__(self) -> Rescaling:
        for share in self.shares:
            self.open(share)
        return self

    def open(self, share: Share) -> None:
        """What arrives from now on comes from this pass."""
        if share not in self._waiting:
            share.arrived, share.found_inf = False, None
            self._waiting[share] = [(p, _set_aside(p, id(p) in self._averaged)) for p in share.parameters]

    def is_open(self, share: Share) -> bool:
        """Whether what arrives comes from this pass."""
        return share in self._waiting

    def close(self, share: Share) -> None:
        """What arrives from now on does not come from this pass."""
        if share in self._waiting:
            self._finish([share])

    def forget(self, share: Share) -> None:
        """The gradients there were cleared, those that wait too."""
        if share in self._waiting:
            self._waiting[share] = [(parameter, None) for parameter, _ in self._waiting[share]]

    def _finish(self, shares: Sequence[Share]) -> None:
        for share in shares:
            _convert(share, self._scale)
        waiting = [pair for share in shares for pair in self._waiting[share]]
        sums = [(parameter, ops.add_gradients(gradient, parameter.grad)) for parameter, gradient in waiting]
        for parameter, gradient in sums:
            parameter.grad = gradient
        for share in shares:
            del self._waiting[share]
            self._hand_over(share)

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
def _convert(share: Share, scale: Tensor | None) -> None:
    if any(parameter.grad is not None for parameter in share.contested):
        raise AmpUsageError(
            'backward() brought gradients to parameters that two other wrappers step, each on its own loss scale: which of '
            'the two would step them cannot be known. Freeze or detach them in this loss, or give them to one optimizer.'
        )
    arrived = []
    for parameter in share.parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            arrived.append(parameter.grad._values())
        else:
            arrived.append(parameter.grad)
    if not arrived:
        return
    share.arrived = True
    device = arrived[0].device
    share.found_inf = torch.zeros((), dtype=torch.float32, device=device)
    theirs = share.scale()
    ratio = None if scale is None else scale.to(device).double().reciprocal()
    if theirs is not None:
        ratio = theirs.to(device).double() * (1 if ratio is None else ratio)
    ops.multi_tensor_scale(arrived, arrived, None if ratio is None else ratio.float(), share.found_inf)
    if not share.checks:
        void = share.found_inf.bool()
        for gradient in arrived:
            gradient.masked_fill_(void.to(gradient.device), 0)
