"""The child registry: ``type='amp_wrapper.AmpOptimWrapper'`` works without any import in a config.

mmengine imports ``<scope>.registry`` by itself when it meets a scope, and then the modules in ``locations``.
"""

from importlib import import_module

from mmengine import registry as mmengine_registry
from mmengine.registry import Registry

from .optim import FusedAdam, FusedAdamW, FusedSGD


def _child(parent: Registry, *locations: str) -> Registry:
    """A registry of this package, with the name of its parent in mmengine.

    Args:
        parent: Of mmengine.
        *locations: Modules of this package that register something there.
    """
    places = [f'amp_wrapper.{location}' for location in locations]
    return Registry(parent.name, parent=parent, scope='amp_wrapper', locations=places)


OPTIM_WRAPPERS = _child(mmengine_registry.OPTIM_WRAPPERS, 'openmmlab.optim_wrapper', 'openmmlab.apex_optim_wrapper')
HOOKS = _child(mmengine_registry.HOOKS, 'openmmlab.hooks', 'openmmlab.exact_resume')
MODEL_WRAPPERS = _child(mmengine_registry.MODEL_WRAPPERS, 'openmmlab.sharding')
OPTIMIZERS = _child(mmengine_registry.OPTIMIZERS, 'optim')

# here, since the optimizers know nothing of mmengine
for _optimizer in (FusedAdam, FusedAdamW, FusedSGD):
    OPTIMIZERS.register_module(module=_optimizer)
    if _optimizer is not FusedAdam:
        # that name is DeepSpeed's in mmengine
        mmengine_registry.OPTIMIZERS.register_module(module=_optimizer, force=True)

# where this module is imported first, and mmengine by it
import_module('.openmmlab', __package__)
