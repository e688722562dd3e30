"""The gradients of an open accumulation window, on their way into a checkpoint and out of it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ...checkpoint.format import Window
from ...policy.nested import HALF_TYPES
from ..buffers.snapshots import BufferSnapshots
from ..step_flags import StepFlags
from .fp32_sums import Fp32Sums


def save(
    parameters: Sequence[tuple[nn.Parameter, nn.Parameter]],
    sums: Fp32Sums | None,
    unscaled: bool,
    flags: StepFlags,
    buffers: BufferSnapshots | None = None,
) -> Window:
    """Copy the gradients of a window. Syncs.

    Args:
        parameters: (weight, what the optimizer steps for it) in the order of the optimizer's groups.
        sums: FP32 sums beside ``.grad``, if the window is summed so.
        unscaled: Whether gradients lie with what the optimizer steps, unscaled already (several losses).
        flags: What was found, and which losses took part.
        buffers: What buffers were before the window, if steps give them back.
    """
    saved: list[Tensor | None] = []
    for weight, stepped in parameters:
        gradient = stepped.grad if unscaled else weight.grad
        if sums is not None and gradient is None:
            gradient = sums.get(weight)
        saved.append(None if gradient is None else gradient.detach().clone())
    found, foreign = flags.state()
    before = {} if buffers is None else buffers.state()
    averages = [] if buffers is None else buffers.averages()
    return Window(saved, unscaled, list(flags.used), found, foreign, before, averages)


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
