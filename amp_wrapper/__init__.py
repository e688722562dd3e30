"""Mixed-precision opt levels (O0 to O5) for the OpenMMLab world.

``from amp_wrapper import AmpOptimWrapper``, or in any mmengine config::

    optim_wrapper = dict(type='AmpOptimWrapper', opt_level='O2', optimizer=...)

Without mmengine: ``from amp_wrapper import amp``, the functional interface of ``apex.amp``.

Importing the package takes over the names ``AmpOptimWrapper`` and ``ApexOptimWrapper`` in mmengine's registry, and registers
the optimizers ``FusedAdam``, ``FusedAdamW`` and ``FusedSGD`` there. Without
mmengine, everything below the mmengine integration, and the functional interface, can be imported.
"""

from importlib import import_module as _import_module
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

if TYPE_CHECKING:
    from .amp.monitoring import TrainingMonitor
    from .diagnostics.diagnosis import Diagnosis
    from .diagnostics.plots import plot_runs
    from .diagnostics.precision_report import PrecisionReport
    from .diagnostics.ranges import Ranges
    from .diagnostics.suggestion import LevelSuggestion
    from .engine.loss_scale import LossScaler
    from .openmmlab.hooks import AmpInferenceHook, NonfiniteHook
    from .openmmlab.monitor_hook import AmpMonitorHook
    from .openmmlab.resume.exact_resume import ExactResumeHook
    from .openmmlab.resume.preemption import PreemptionHook
    from .openmmlab.sharding import FullyShardStrategy, MMFullyShard
    from .policy import OptLevel, Policy, resolve

#: Where the names are that are imported when somebody asks for them; those in openmmlab need mmengine.
_LATE = {
    'AmpInferenceHook': 'openmmlab.hooks',
    'AmpMonitorHook': 'openmmlab.monitor_hook',
    'Diagnosis': 'diagnostics.diagnosis',
    'ExactResumeHook': 'openmmlab.resume.exact_resume',
    'FullyShardStrategy': 'openmmlab.sharding',
    'LevelSuggestion': 'diagnostics.suggestion',
    'LossScaler': 'engine.loss_scale',
    'MMFullyShard': 'openmmlab.sharding',
    'NonfiniteHook': 'openmmlab.hooks',
    'OptLevel': 'policy',
    'Policy': 'policy',
    'PrecisionReport': 'diagnostics.precision_report',
    'PreemptionHook': 'openmmlab.resume.preemption',
    'Ranges': 'diagnostics.ranges',
    'TrainingMonitor': 'amp.monitoring',
    'plot_runs': 'diagnostics.plots',
    'resolve': 'policy',
}
_INTEGRATIONS = (
    'AmpOptimWrapper',
    'ApexOptimWrapper',
    'TorchAmpOptimWrapper',
    *(name for name, module in _LATE.items() if module.startswith('openmmlab.')),
)

if TYPE_CHECKING or (not _incomplete and _find_spec('mmengine') is not None):
    # registers the hooks in it
    from .openmmlab import hooks as _hooks  # noqa: F401
    from .openmmlab.apex_optim_wrapper import ApexOptimWrapper
    from .openmmlab.optim_wrapper import AmpOptimWrapper, TorchAmpOptimWrapper


def _complete() -> None:
    """Import what a command of the package has left out, with the registrations in mmengine; else nothing."""
    if _incomplete:
        _reload(_modules[__name__])


def __getattr__(name: str) -> Any:
    if _incomplete and name in __all__:
        _complete()
        return getattr(_modules[__name__], name)
    if name in _INTEGRATIONS and _find_spec('mmengine') is None:
        raise ImportError(
            f'amp_wrapper.{name} needs mmengine, which is not installed: pip install mmengine==0.10.7 (and mmcv-lite==2.1.0).'
        )
    if name in _LATE:
        value = getattr(_import_module(f'.{_LATE[name]}', __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    'AmpAttachError',
    'AmpCheckpointError',
    'AmpConfigError',
    'AmpError',
    'AmpInferenceHook',
    'AmpMonitorHook',
    'AmpOptimWrapper',
    'AmpUsageError',
    'ApexOptimWrapper',
    'CheckpointWriteError',
    'Diagnosis',
    'ExactResumeHook',
    'FullyShardStrategy',
    'FusedAdam',
    'FusedAdamW',
    'FusedSGD',
    'LevelSuggestion',
    'LossScaler',
    'MMFullyShard',
    'NonfiniteError',
    'NonfiniteHook',
    'NonfiniteWatch',
    'OptLevel',
    'OverflowStreakError',
    'Policy',
    'PrecisionReport',
    'PreemptionHook',
    'Ranges',
    'TorchAmpOptimWrapper',
    'TrainingMonitor',
    'amp',
    'fully_shard',
    'nonfinite_watch',
    'plot_runs',
    'resolve',
]
