"""The gradients that are there before a step, for whoever looks at them."""

from __future__ import annotations

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
    lists, unscaled = parts.lists(), parts.gradients.unscaled
    found = zip(lists.weights, parts.gradients.to_step(lists))
    return [(parts.name(weight), weight, grad, unscaled) for weight, grad in found if grad is not None]
