"""Mixed-precision opt levels (O0 to O5) for the OpenMMLab world.

``from amp_wrapper import AmpOptimWrapper``, or in any mmengine config::

    optim_wrapper = dict(type='AmpOptimWrapper', opt_level='O2', optimizer=...)

Without mmengine: ``from amp_wrapper import amp``, the functional interface of ``apex.amp``.

Importing the package takes over the names ``AmpOptimWrapper`` and ``ApexOptimWrapper`` in mmengine's registry, and registers
the optimizers ``FusedAdam``, ``FusedAdamW`` and ``FusedSGD`` there. Without
mmengine, everything below the mmengine integration, and the functional interface, can be imported.
"""

import sys as _sys
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING, Any

from . import amp
from .casting.nonfinite import NonfiniteWatch, nonfinite_watch
from .casting.sharding import fully_shard
from .errors import (
    AmpAttachError,
    AmpCheckpointError,
    AmpConfigError,
    AmpError,
    AmpUsageError,
    CheckpointWriteError,
    NonfiniteError,
    OverflowStreakError,
)
from .optim import FusedAdam, FusedAdamW, FusedSGD

__version__ = '0.1.0'

if TYPE_CHECKING:
    from .openmmlab.apex_optim_wrapper import ApexOptimWrapper
    from .openmmlab.optim_wrapper import AmpOptimWrapper, TorchAmpOptimWrapper

_INTEGRATIONS = ('AmpOptimWrapper', 'ApexOptimWrapper', 'TorchAmpOptimWrapper')

# python is about to run amp_wrapper.info, which reports what is there, and builds nothing from a config
_reports = _sys.argv[:1] == ['-m'] and f'{__name__}.info' in _sys.orig_argv

if _find_spec('mmengine') is not None and not _reports:
    from .openmmlab.apex_optim_wrapper import ApexOptimWrapper
    from .openmmlab.hooks import AmpInferenceHook as _AmpInferenceHook  # noqa: F401
    from .openmmlab.optim_wrapper import AmpOptimWrapper, TorchAmpOptimWrapper


def __getattr__(name: str) -> Any:
    if name in _INTEGRATIONS:
        raise ImportError(
            f'amp_wrapper.{name} needs mmengine, which is not installed: pip install mmengine==0.10.7 (and mmcv-lite==2.1.0).'
        )
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


__all__ = [
    'AmpAttachError',
    'AmpCheckpointError',
    'AmpConfigError',
    'AmpError',
    'AmpOptimWrapper',
    'AmpUsageError',
    'ApexOptimWrapper',
    'CheckpointWriteError',
    'FusedAdam',
    'FusedAdamW',
    'FusedSGD',
    'NonfiniteError',
    'NonfiniteWatch',
    'OverflowStreakError',
    'TorchAmpOptimWrapper',
    'amp',
    'fully_shard',
    'nonfinite_watch',
]
