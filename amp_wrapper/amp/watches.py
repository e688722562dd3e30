"""What warns scripts of gradients that were not scaled, are not unscaled yet, or are clipped where it has no effect."""

from __future__ import annotations

from collections.abc import Iterable

from ..engine import AmpEngine
from ..engine.block_watch import BlockWatch, note_clips_of
from ..engine.pass_watch import PassWatch
from ..policy import Policy


def add(engines: Iterable[AmpEngine], policy: Policy) -> None:
    """Have the optimizers of a session watched, where there is something to get wrong.

    Args:
        engines: Those of the session; they share their loss scales.
        policy: The configuration.
    """
    speaks = policy.verbosity >= 1
    for engine in engines:
        parts = engine.parts
        name = type(parts.optimizer).__name__ + (f' ({parts.label})' if parts.label else '')
        if policy.master_weights:
            note_clips_of(parts)
        scales = not engine.scalers[0].is_one
        if scales:
            parts.pass_watch = PassWatch(name, speaks)
        if speaks and (scales or policy.master_weights):
            parts.block_watch = BlockWatch(name, scales, policy.master_weights)
