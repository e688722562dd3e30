"""One optimizer's step in mixed precision: :class:`Engine` has its state; forward, backward and step are what happens to it.

An engine serves one optimizer and the modules it trains. It knows no framework: the functional API and the integrations call
it.
"""

from .attach import attach, attach_together, detach
from .engine import Engine
from .flags import StepResult
from .loss_scale import new_scalers
from .passes import backward, before_forward, forward_context, receiving, scale
from .step import refuse_direct_steps, take_step

__all__ = ['Engine', 'StepResult', 'attach', 'attach_together', 'backward', 'before_forward', 'detach']
__all__ += ['forward_context', 'new_scalers', 'receiving', 'refuse_direct_steps', 'scale', 'take_step']
