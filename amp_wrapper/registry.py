"""The child registry: ``type='amp_wrapper.AmpOptimWrapper'`` works without any import in a config.

mmengine imports ``<scope>.registry`` by itself when it meets a scope, and then the modules in ``locations``.
"""

from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.registry import OPTIM_WRAPPERS as MMENGINE_OPTIM_WRAPPERS
from mmengine.registry import Registry

OPTIM_WRAPPERS = Registry(
    'optim wrapper', parent=MMENGINE_OPTIM_WRAPPERS, scope='amp_wrapper', locations=['amp_wrapper.optim_wrapper']
)
HOOKS = Registry(
    'hook',
    parent=MMENGINE_HOOKS,
    scope='amp_wrapper',
    locations=['amp_wrapper.hooks', 'amp_wrapper.exact_resume', 'amp_wrapper.preemption'],
)
