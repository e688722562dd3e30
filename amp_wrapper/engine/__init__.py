"""One optimizer's step in mixed precision: :class:`Engine` has its state; forward, backward and step are what happens to it.

An engine serves one optimizer and the modules it trains. It knows no framework: the functional API and the integrations call
it.
"""

from .attach import attach, attach_together, detach
from .backward import backward, receiving, scale
from .engine import Engine, Stage
from .flags import StepResult
from .forward import before_forward, forward_context
from .loss_scale import new_scalers
from .step import take_step

__all__ = [
    'Engine',
    'Stage',
    'StepResult',
    'attach',
    'attach_together',
    'backward',
    'before_forward',
    'detach',
    'forward_context',
    'new_scalers',
    'receiving',
    'scale',
    'take_step',
]
