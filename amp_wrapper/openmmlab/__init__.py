"""Everything that imports mmengine: the optimizer wrappers, the hooks, and the changes to mmengine.

Importing it registers the names in mmengine, and patches mmengine.
"""

from . import apex_optim_wrapper as apex_optim_wrapper
from . import hooks as hooks
