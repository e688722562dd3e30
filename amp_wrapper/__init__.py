"""Mixed-precision opt levels (O0 to O5) for the OpenMMLab world.

``from amp_wrapper import AmpOptimWrapper``, or in any mmengine config::

    optim_wrapper = dict(type='AmpOptimWrapper', opt_level='O2', optimizer=...)

Without mmengine: ``from amp_wrapper import amp``, the functional interface of ``apex.amp``.

The package takes over the names ``AmpOptimWrapper`` and ``ApexOptimWrapper`` in mmengine's registry, and registers the
optimizers ``FusedAdam``, ``FusedAdamW`` and ``FusedSGD`` there, as soon as both packages are imported, whichever comes first.
It does not import mmengine until a name that needs it is asked for. Without mmengine, those names are not offered.
"""

import sys as _sys
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING, Any

from . import late_names as _late
from .version import __version__ as __version__

# what type checkers read of the names below
if TYPE_CHECKING:
    from . import amp as amp
    from .casting.sharding import fully_shard as fully_shard
    from .diagnostics.overflow import Diagnosis as Diagnosis
    from .diagnostics.plot import plot_runs as plot_runs
    from .diagnostics.report import PrecisionReport as PrecisionReport
    from .diagnostics.suggest import LevelSuggestion as LevelSuggestion
    from .diagnostics.watch import TrainingWatch as TrainingWatch
    from .diagnostics.watches import NonfiniteWatch as NonfiniteWatch
    from .diagnostics.watches import nonfinite_watch as nonfinite_watch
    from .engine.loss_scale import LossScaler as LossScaler
    from .errors import AmpAttachError as AmpAttachError
    from .errors import AmpCheckpointError as AmpCheckpointError
    from .errors import AmpConfigError as AmpConfigError
    from .errors import AmpError as AmpError
    from .errors import AmpUsageError as AmpUsageError
    from .errors import CheckpointWriteError as CheckpointWriteError
    from .errors import NonfiniteError as NonfiniteError
    from .errors import OverflowStreakError as OverflowStreakError
    from .openmmlab.apex_optim_wrapper import ApexOptimWrapper as ApexOptimWrapper
    from .openmmlab.exact_resume import ExactResumeHook as ExactResumeHook
    from .openmmlab.hooks import AmpInferenceHook as AmpInferenceHook
    from .openmmlab.hooks import AmpMonitorHook as AmpMonitorHook
    from .openmmlab.hooks import NonfiniteHook as NonfiniteHook
    from .openmmlab.optim_wrapper import AmpOptimWrapper as AmpOptimWrapper
    from .openmmlab.optim_wrapper import TorchAmpOptimWrapper as TorchAmpOptimWrapper
    from .openmmlab.sharding import MMFullyShard as MMFullyShard
    from .optim import FusedAdam as FusedAdam
    from .optim import FusedAdamW as FusedAdamW
    from .optim import FusedSGD as FusedSGD
    from .policy import OptLevel as OptLevel
    from .policy import Policy as Policy
    from .policy import resolve as resolve

#: The names that each module has, which is imported when somebody asks for one; those in openmmlab need mmengine.
_NAMES = {
    'amp': 'amp',
    'casting.sharding': 'fully_shard',
    'diagnostics.overflow': 'Diagnosis',
    'diagnostics.watches': 'NonfiniteWatch nonfinite_watch',
    'diagnostics.plot': 'plot_runs',
    'diagnostics.report': 'PrecisionReport',
    'diagnostics.suggest': 'LevelSuggestion',
    'diagnostics.watch': 'TrainingWatch',
    'engine.loss_scale': 'LossScaler',
    'errors': 'AmpAttachError AmpCheckpointError AmpConfigError AmpError AmpUsageError CheckpointWriteError NonfiniteError '
    'OverflowStreakError',
    'openmmlab.apex_optim_wrapper': 'ApexOptimWrapper',
    'openmmlab.hooks': 'AmpInferenceHook AmpMonitorHook NonfiniteHook',
    'openmmlab.optim_wrapper': 'AmpOptimWrapper TorchAmpOptimWrapper',
    'openmmlab.exact_resume': 'ExactResumeHook',
    'openmmlab.sharding': 'MMFullyShard',
    'optim': 'FusedAdam FusedAdamW FusedSGD',
    'policy': 'OptLevel Policy resolve',
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
_NEED_MMENGINE = frozenset(name for name, module in _MODULES.items() if module.startswith('openmmlab.'))


def _register() -> None:
    """Register the names in mmengine, and patch it; nothing where it is not installed."""
    if _find_spec('mmengine') is not None:
        _import_module('.openmmlab', __name__)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    if name in _NEED_MMENGINE and _find_spec('mmengine') is None:
        raise AttributeError(_late.needs_mmengine(name))
    module = _import_module(f'.{_MODULES[name]}', __name__)
    globals()[name] = value = module if name == 'amp' else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = sorted(_MODULES.keys() if _find_spec('mmengine') is not None else _MODULES.keys() - _NEED_MMENGINE)
if _sys.modules.get('mmengine') is not None:
    _register()
else:
    _sys.meta_path.insert(0, _late.Finder(_register, _NEED_MMENGINE))
