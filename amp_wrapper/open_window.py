"""The gradients of an open accumulation window, on their way into a checkpoint and out of it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from .accumulation import Fp32Sums
from .checkpoint import Window
from .nested import HALF_TYPES


def save(
    parameters: Sequence[tuple[nn.Parameter, nn.Parameter]],
    sums: Fp32Sums | None,
    unscaled: bool,
    used: Sequence[bool],
    found_inf: Sequence[Tensor | None],
    foreign_found_inf: Tensor | None,
) -> Window:
    """Copy the gradients of a window. Syncs.

    Args:
        parameters: (weight, what the optimizer steps for it) in the order of the optimizer's groups.
        sums: FP32 sums beside ``.grad``, if the window is summed so.
        unscaled: Whether gradients lie with what the optimizer steps, unscaled already (several losses).
        used: Whether each loss took part.
        found_inf: The flag of each loss.
        foreign_found_inf: The flag of what losses of other optimizers brought; None where they brought nothing.
    """
    saved: list[Tensor | None] = []
    for weight, stepped in parameters:
        gradient = stepped.grad if unscaled else weight.grad
        if sums is not None and gradient is None:
            gradient = sums.get(weight)
        saved.append(None if gradient is None else gradient.detach().clone())
    found = [0.0 if flag is None else float(flag) for flag in found_inf]
    foreign = None if foreign_found_inf is None else float(foreign_found_inf)
    return Window(saved, unscaled, list(used), found, foreign)


def restore(window: Window, parameters: Sequence[tuple[nn.Parameter, nn.Parameter]], sums: Fp32Sums | None) -> None:
    """Put the gradients of a window back.

    Args:
        window: From :func:`save`; not changed, and not aliased.
        parameters: As for :func:`save`.
        sums: As for :func:`save`; filled.
    """
    for (weight, stepped), gradient in zip(parameters, window.gradients):
        target = stepped if window.unscaled else weight
        target.grad = None
        if gradient is None:
            continue
        if sums is not None and not window.unscaled and weight.dtype in HALF_TYPES:
            sums.put(weight, gradient)
        else:
            target.grad = gradient.to(target.device, target.dtype, copy=True)
