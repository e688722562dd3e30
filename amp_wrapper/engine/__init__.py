"""The order of a training step, written once.

One engine serves one optimizer and the modules it steps. It composes the owners (casts, masters, scalers, gradients)
and knows no framework; the doors above it translate words.

The path of one update:

1. ``scale``: the loss times the loss scale, which does not move from here to 7;
2. ``backward``: gradients arrive on the model weights, 16-bit where the weights are, and are averaged over the ranks;
3. ``step`` looks for weights that somebody else changed (they win over their masters),
4. finds out whether any gradient element is non-finite, and how long the gradient is,
5. decides, the same on every rank,
6. unscales, clips, steps the optimizer and brings masters to the model weights; or skips all of it,
7. moves the loss scale.

With the optimizers of :mod:`amp_wrapper.optim` 4 is one pass over the gradients, 5 and 7 are one small kernel, 6 is one pass
over everything, and the host reads nothing (``_step_fused``). With any other one, unscaling comes first, together with 4, and
each of the rest is a pass of its own (``_step_any``). Several losses, and engines that share their scales, are unscaled at the
end of 2 (:mod:`amp_wrapper.engine.gradients.per_backward`).

``base`` holds the state, ``attaching`` casts, ``receiving`` is 1 and 2, ``stepping`` is 3 to 7, ``saving`` is for checkpoints.
"""

from __future__ import annotations

from .attach import attach_together
from .base import Stage, new_scalers
from .step import Stepping
from .step_result import StepResult


class AmpEngine(Stepping):
    """Mixed precision for one optimizer.

    Args:
        policy: The configuration.
        optimizer: Any :class:`torch.optim.Optimizer` whose ``step`` needs no closure, or None for inference.
        scalers: The loss scales, where several engines share them; one for each loss. Gradients are unscaled as they arrive
            then, so that none depends on when another engine steps. None: scales of its own.

    Raises:
        AmpAttachError: An optimizer that cannot be wrapped.
    """


__all__ = ('AmpEngine', 'Stage', 'StepResult', 'attach_together', 'new_scalers')
