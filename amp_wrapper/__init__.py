"""Mixed-precision opt levels (O0 to O5) for the OpenMMLab world.

``from amp_wrapper import AmpOptimWrapper``, or in any mmengine config::

    optim_wrapper = dict(type='AmpOptimWrapper', opt_level='O2', optimizer=...)

Without mmengine: ``from amp_wrapper import amp``, the functional interface of ``apex.amp``.

Importing the package takes over the names ``AmpOptimWrapper`` and ``ApexOptimWrapper`` in mmengine's registry, and registers
the optimizers ``FusedAdam``, ``FusedAdamW`` and ``FusedSGD`` there. Without
mmengine, everything below the mmengine integration, and the functional interface, can be imported.
"""

from importlib import reload as _reload
from importlib.util import find_spec as _find_spec
from sys import modules as _modules
from typing import TYPE_CHECKING, Any

from . import start as _start
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
from .version import __version__ as __version__

# a command of the package leaves out what takes seconds, until it asks for a name below; then _complete() runs this file again
_incomplete = bool(_start.COMMAND) and '_incomplete' not in globals()

if TYPE_CHECKING or not _incomplete:
    from . import amp
    from .casting.nonfinite import NonfiniteWatch, nonfinite_watch
    from .casting.sharding import fully_shard
    from .optim import FusedAdam, FusedAdamW, FusedSGD

_INTEGRATIONS = ('AmpOptimWrapper', 'ApexOptimWrapper', 'TorchAmpOptimWrapper')

if TYPE_CHECKING or (not _incomplete and _find_spec('mmengine') is not None):
    from .openmmlab.apex_optim_wrapper import ApexOptimWrapper
    from .openmmlab.hooks import AmpInferenceHook as _AmpInferenceHook  # noqa: F401
    from .openmmlab.optim_wrapper import AmpOptimWrapper, TorchAmpOptimWrapper


def _complete() -> None:
    """Import what a command of the package has left out, with the registrations in mmengine; else nothing."""
    if _incomplete:
        _reload(_modules[__name__])


def __getattr__(name: str) -> Any:
    if _incomplete and name in __all__:
        _complete()
        return getattr(_modules[__name__], name)
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
