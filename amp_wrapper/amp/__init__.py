"""``from amp_wrapper import amp``: the functional interface of ``apex.amp``, over the engine of the mmengine wrapper.

```python
from amp_wrapper import amp

model, optimizer = amp.initialize(model, optimizer, opt_level='O2')
for inputs, target in loader:
    optimizer.zero_grad()
    loss = criterion(model(inputs), target)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
```
"""

from ..diagnostics.report import report as report
from ..diagnostics.suggest import suggest_level as suggest_level
from .accessors import last_step_skipped as last_step_skipped
from .accessors import load_state_dict as load_state_dict
from .accessors import loss_scale as loss_scale
from .accessors import master_params as master_params
from .accessors import masters_changed as masters_changed
from .accessors import monitor as monitor
from .accessors import skipped_steps as skipped_steps
from .accessors import state_dict as state_dict
from .accessors import weights_changed as weights_changed
from .functions import bfloat16_function as bfloat16_function
from .functions import disable_casts as disable_casts
from .functions import float_function as float_function
from .functions import half_function as half_function
from .functions import promote_function as promote_function
from .functions import register_bfloat16_function as register_bfloat16_function
from .functions import register_float_function as register_float_function
from .functions import register_half_function as register_half_function
from .functions import register_promote_function as register_promote_function
from .initialization import initialize as initialize
from .scaling import scale_loss as scale_loss
from .session import init as init
