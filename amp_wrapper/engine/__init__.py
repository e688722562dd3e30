"""One optimizer's step in mixed precision; :class:`AmpEngine` has its order.

An engine serves one optimizer and the modules it trains. It knows no framework: the functional API and the integrations call
it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..casting.plan import CastPlan
from ..casting.sharding import Sharding
from ..policy import Policy
from . import attach
from .engine import AmpEngine
from .loss_scale import new_scalers
from .overflow import StepResult
from .parts import Stage


def attach_together(
    engines: Sequence[AmpEngine], models: Sequence[nn.Module], policy: Policy, sharding: Sharding | None = None
) -> CastPlan:
    """Cast models as wholes, and make masters for all that the engines' optimizers step of them.

    Unlike :meth:`AmpEngine.attach`, it does not matter which optimizer owns what, nor whether any does. Losses of each engine
    may reach the parameters of the others.

    Args:
        engines: Not attached; with ``policy``.
        models: FP32, not wrapped.
        policy: The configuration.
        sharding: How the models are sharded first; None for as they are.

    Returns:
        The plan of the casts, which takes them off.

    Raises:
        AmpAttachError: As :meth:`AmpEngine.attach`. Nothing has been changed.
    """
    return attach.attach_parts([engine.parts for engine in engines], models, policy, sharding)


__all__ = ['AmpEngine', 'Stage', 'StepResult', 'attach_together', 'new_scalers']
