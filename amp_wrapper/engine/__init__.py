"""One optimizer's step in mixed precision: :class:`Engine` has its state; forward, backward and step are what happens to it.

An engine serves one optimizer and the modules it trains. It knows no framework: the functional API and the integrations call
it.
"""

from .attach import attach as attach
from .attach import attach_together as attach_together
from .attach import detach as detach
from .engine import Engine as Engine
from .flags import StepResult as StepResult
from .loss_scale import new_scalers as new_scalers
from .passes import backward as backward
from .passes import before_forward as before_forward
from .passes import forward_context as forward_context
from .passes import receiving as receiving
from .passes import scale as scale
from .step import refuse_direct_steps as refuse_direct_steps
from .step import take_step as take_step
