"""The gradients that are there before a step, for whoever looks at them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..parts import EngineParts


def gradients_at_hand(parts: EngineParts) -> list[tuple[str, Tensor, Tensor, bool]]:
    """The gradients before a step.

    Args:
        parts: Of the engine.

    Returns:
        (name of the weight, weight of the model, gradient, whether the loss scale has been taken out of it), for those weights
        that have a gradient.
    """
    unscaled = parts.gradients.unscaled
    sums = parts.gradients.sums
    found: list[tuple[str, Tensor, Tensor, bool]] = []
    stepped: Sequence[Tensor] = parts.params.parameters()
    for weight, target in zip(parts.weights(), stepped):
        grad = target.grad if unscaled else weight.grad
        if grad is None and not unscaled and sums is not None:
            grad = sums.get(weight)
        if grad is not None:
            found.append((parts.name(weight), weight, grad, unscaled))
    return found
