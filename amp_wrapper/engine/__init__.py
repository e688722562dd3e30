"""One optimizer's step in mixed precision; :class:`AmpEngine` has its order.

An engine serves one optimizer and the modules it trains. It knows no framework: the functional API and the integrations call
it.
"""

from .engine import AmpEngine
from .loss_scale import new_scalers
from .overflow import StepResult
from .parts import Stage

__all__ = ['AmpEngine', 'Stage', 'StepResult', 'new_scalers']
