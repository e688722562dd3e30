"""The child registry: ``type='amp_wrapper.AmpOptimWrapper'`` works without any import in a config.

mmengine imports ``<scope>.registry`` by itself when it meets a scope, and then the modules in ``locations``.
"""

from importlib import import_module

import mmengine.optim  # noqa: F401  registers DeepSpeed's FusedAdam, where that is installed, before ours takes the name
from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.registry import MODEL_WRAPPERS as MMENGINE_MODEL_WRAPPERS
from mmengine.registry import OPTIM_WRAPPERS as MMENGINE_OPTIM_WRAPPERS
from mmengine.registry import OPTIMIZERS as MMENGINE_OPTIMIZERS
from mmengine.registry import STRATEGIES as MMENGINE_STRATEGIES
from mmengine.registry import Registry

from .optim import FusedAdam, FusedAdamW, FusedSGD

OPTIM_WRAPPERS = Registry(
    'optim wrapper',
    parent=MMENGINE_OPTIM_WRAPPERS,
    scope='amp_wrapper',
    locations=['amp_wrapper.openmmlab.optim_wrapper', 'amp_wrapper.openmmlab.apex_optim_wrapper'],
)
HOOKS = Registry(
    'hook',
    parent=MMENGINE_HOOKS,
    scope='amp_wrapper',
    locations=[
        'amp_wrapper.openmmlab.hooks',
        'amp_wrapper.openmmlab.monitor_hook',
        'amp_wrapper.openmmlab.resume.exact_resume',
        'amp_wrapper.openmmlab.resume.preemption',
    ],
)
MODEL_WRAPPERS = Registry(
    'model wrapper', parent=MMENGINE_MODEL_WRAPPERS, scope='amp_wrapper', locations=['amp_wrapper.openmmlab.sharding']
)
STRATEGIES = Registry(
    'strategy', parent=MMENGINE_STRATEGIES, scope='amp_wrapper', locations=['amp_wrapper.openmmlab.sharding']
)
OPTIMIZERS = Registry('optimizer', parent=MMENGINE_OPTIMIZERS, scope='amp_wrapper', locations=['amp_wrapper.optim'])

# here, since the optimizers know nothing of mmengine
for _optimizer in (FusedAdam, FusedAdamW, FusedSGD):
    OPTIMIZERS.register_module(module=_optimizer)
    MMENGINE_OPTIMIZERS.register_module(module=_optimizer, force=True)

# where this module is imported first, and mmengine by it
import_module('.openmmlab', __package__)
