"""Mixed-precision opt levels (O0 to O5) for the OpenMMLab world.

``from amp_wrapper import AmpOptimWrapper``, or in any mmengine config::

    optim_wrapper = dict(type='AmpOptimWrapper', opt_level='O2', optimizer=...)

Without mmengine: ``from amp_wrapper import amp``, the functional interface of ``apex.amp``.

The package takes over the names ``AmpOptimWrapper`` and ``ApexOptimWrapper`` in mmengine's registry, and registers the
optimizers ``FusedAdam``, ``FusedAdamW`` and ``FusedSGD`` there, as soon as both packages are imported, whichever comes first.
It does not import mmengine until a name that needs it is asked for. Without mmengine, those names are not offered.
"""

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from sys import meta_path as _meta_path
from sys import modules as _modules
from typing import TYPE_CHECKING, Any

from . import late_names as _late
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

# a command of the package leaves out what takes seconds, until it asks for a name below
if TYPE_CHECKING or not _start.COMMAND:
    from . import amp
    from .casting.sharding import fully_shard
    from .diagnostics.nonfinite import NonfiniteWatch, nonfinite_watch
    from .optim import FusedAdam, FusedAdamW, FusedSGD

if TYPE_CHECKING:
    from .amp.monitoring import TrainingMonitor
    from .diagnostics.diagnosis import Diagnosis
    from .diagnostics.plots import plot_runs
    from .diagnostics.precision_report import PrecisionReport
    from .diagnostics.ranges import Ranges
    from .diagnostics.suggestion import LevelSuggestion
    from .engine.loss_scale import LossScaler
    from .openmmlab.apex_optim_wrapper import ApexOptimWrapper
    from .openmmlab.hooks import AmpInferenceHook, NonfiniteHook
    from .openmmlab.monitor_hook import AmpMonitorHook
    from .openmmlab.optim_wrapper import AmpOptimWrapper, TorchAmpOptimWrapper
    from .openmmlab.resume.exact_resume import ExactResumeHook
    from .openmmlab.resume.preemption import PreemptionHook
    from .openmmlab.sharding import FullyShardStrategy, MMFullyShard
    from .policy import OptLevel, Policy, resolve

#: Where the names are that are imported when somebody asks for them; those in openmmlab need mmengine.
_LATE = {
    'AmpInferenceHook': 'openmmlab.hooks',
    'AmpMonitorHook': 'openmmlab.monitor_hook',
    'AmpOptimWrapper': 'openmmlab.optim_wrapper',
    'ApexOptimWrapper': 'openmmlab.apex_optim_wrapper',
    'Diagnosis': 'diagnostics.diagnosis',
    'ExactResumeHook': 'openmmlab.resume.exact_resume',
    'FullyShardStrategy': 'openmmlab.sharding',
    'FusedAdam': 'optim',
    'FusedAdamW': 'optim',
    'FusedSGD': 'optim',
    'LevelSuggestion': 'diagnostics.suggestion',
    'LossScaler': 'engine.loss_scale',
    'MMFullyShard': 'openmmlab.sharding',
    'NonfiniteHook': 'openmmlab.hooks',
    'NonfiniteWatch': 'diagnostics.nonfinite',
    'OptLevel': 'policy',
    'Policy': 'policy',
    'PrecisionReport': 'diagnostics.precision_report',
    'PreemptionHook': 'openmmlab.resume.preemption',
    'Ranges': 'diagnostics.ranges',
    'TorchAmpOptimWrapper': 'openmmlab.optim_wrapper',
    'TrainingMonitor': 'amp.monitoring',
    'fully_shard': 'casting.sharding',
    'nonfinite_watch': 'diagnostics.nonfinite',
    'plot_runs': 'diagnostics.plots',
    'resolve': 'policy',
}
_NEED_MMENGINE = frozenset(name for name, module in _LATE.items() if module.startswith('openmmlab.'))


def _register() -> None:
    """Register the names in mmengine, and patch it; nothing where it is not installed."""
    if _find_spec('mmengine') is not None:
        _import_module('.openmmlab', __name__)


def __getattr__(name: str) -> Any:
    if name == 'amp':
        return _import_module('.amp', __name__)
    if name not in _LATE:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    if name in _NEED_MMENGINE and _find_spec('mmengine') is None:
        raise AttributeError(_late.needs_mmengine(name))
    value = getattr(_import_module(f'.{_LATE[name]}', __name__), name)
    globals()[name] = value
    return value


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

if _find_spec('mmengine') is None:
    __all__ = [_name for _name in __all__ if _name not in _NEED_MMENGINE]
if _modules.get('mmengine') is not None:
    _register()
elif not _start.COMMAND:
    _meta_path.insert(0, _late.Finder(_register, _NEED_MMENGINE))
