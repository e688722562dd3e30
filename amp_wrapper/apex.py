"""apex's names over this package and torch: ``from amp_wrapper.apex import amp``, or ``import amp_wrapper.apex as apex``.

Names that have a counterpart take apex's arguments, as keywords behind the first two. A call of a name that has none, or with
an argument that would change the result, raises an error that says what to write. :func:`install` lets ``import apex`` find
this module in code that cannot be edited.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from . import amp as _amp
from . import optim as _optim
from .errors import AmpConfigError, AmpUsageError

_CAST = "model, optimizer = amp.initialize(model, optimizer, opt_level='O2'), with a model in FP32, and amp.scale_loss"
#: What to write for names that have no counterpart, by the module that has them.
_ADVICE: dict[str, dict[str, str]] = {
    'apex.amp': {
        '_amp_state': "amp.state_dict()['loss_scaler0']['loss_scale'], or amp.master_params(optimizer) for the masters",
        'lists opt scaler utils wrap': 'a public name of amp, such as amp.register_half_function(module, name)',
    },
    'apex.parallel': {
        'LARC': 'LARC of apex itself, and give amp the optimizer inside of it',
        'Reducer': 'torch.nn.parallel.DistributedDataParallel, with no_sync() until the last backward pass',
        'create_syncbn_process_group': 'torch.distributed.new_group(ranks) for the ranks of each group',
        'multiproc': 'torchrun --nproc-per-node=N script.py, which sets LOCAL_RANK in the environment',
    },
    'apex.optimizers': {
        'FusedLAMB FusedMixedPrecisionLamb FusedNovoGrad': 'amp_wrapper.FusedAdamW, which is the nearest',
        'FusedAdagrad': 'torch.optim.Adagrad',
        'FP16_Optimizer': _CAST,
    },
    'apex.fp16_utils': {
        'FP16_Optimizer FP16_Module FP16Model network_to_half BN_convert_float convert_network convert_module '
        'tofp16 fp32_to_fp16 fp16_to_fp32': _CAST,
        'prep_param_lists model_grads_to_master_grads master_params_to_model_params': (
            "amp.initialize(..., opt_level='O2'), which keeps the masters: amp.master_params(optimizer)"
        ),
        'LossScaler DynamicLossScaler': "amp.initialize(..., loss_scale='dynamic'), or a number, and amp.scale_loss",
        'clip_grad_norm': 'torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)',
        'to_python_float': 'tensor.item()',
    },
    'apex.multi_tensor_apply': {'multi_tensor_applier': 'torch._foreach_* functions, or leave it to the optimizer'},
}
ADVICE = {f'{module}.{name}': rows[key] for module, rows in _ADVICE.items() for key in rows for name in key.split()}
#: Arguments that would change the result: the value that does not, and what to write in place of others.
REFUSED: dict[str, tuple[bool, str]] = {
    'apex.parallel.DistributedDataParallel.gradient_average': (True, 'loss * world_size, since torch averages'),
    'apex.parallel.DistributedDataParallel.allreduce_always_fp32': (False, "opt_level='O4', whose gradients are FP32"),
    'apex.optimizers.FusedAdam.bias_correction': (True, 'FusedAdam without it, and let the learning rate warm up'),
    'apex.optimizers.FusedAdam.master_weights': (False, "amp.initialize(..., opt_level='O2'), which keeps the masters"),
    'apex.optimizers.FusedSGD.wd_after_momentum': (False, 'FusedSGD without it: decay comes first'),
}
#: Arguments that change nothing here, by the module of what takes them.
_IGNORED = {
    'apex.parallel': 'shared_param allreduce_trigger_params retain_allreduce_buffers num_allreduce_streams prof '
    'allreduce_communicators gradient_predivide_factor gradient_average_split_factor',
    'apex.optimizers': 'capturable set_grad_none materialize_master_grads',
}


def advice(name: str) -> str:
    """Return what to write for a name such as ``apex.parallel.LARC``."""
    # apex.parallel.distributed.Reducer is apex.parallel.Reducer
    short = '.'.join([*name.split('.')[:2], *name.split('.')[3:]])
    known = [ADVICE[each] for each in ADVICE for full in (name, short) if f'{full}.'.startswith(f'{each}.')]
    instead = known[0] if known else "torch's own in its place; apex itself still has contrib and transformer"
    return f'{name} is not part of amp_wrapper: write {instead}.'


def problems(name: str, options: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each argument that a function such as ``apex.optimizers.FusedAdam`` refuses."""
    found = []
    for option, value in options.items():
        usual, instead = REFUSED.get(f'{name}.{option}', (value, ''))
        if value != usual:
            found.append(f'{option}={value!r} of {name} has no counterpart: write {instead}.')
    return found


def _for_torch(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that the counterpart of a name takes.

    Raises:
        AmpConfigError: Some are refused.
    """
    if found := problems(name, options):
        raise AmpConfigError(found)
    ignored = _IGNORED[name.rpartition('.')[0]].split()
    return {key: options[key] for key in options if key not in ignored and f'{name}.{key}' not in REFUSED}


class MissingModule(AmpUsageError, ModuleNotFoundError):
    """An import of a module of apex that has no counterpart."""


class MissingName:
    """A name of apex without a counterpart, which may be imported, and tried with ``isinstance``.

    Raises:
        AmpUsageError: It is called, or a class that extends it.
    """

    _name: str

    def __new__(cls, *_: Any, **__: Any) -> MissingName:
        raise AmpUsageError(advice(cls._name))


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's class, around what ``amp.initialize`` returned. Ranks keep their own buffers, as in apex.

    ``delay_allreduce=True``, with which parameters may lack gradients in apex, is ``find_unused_parameters=True``.

    Raises:
        AmpConfigError: ``gradient_average=False``, ``allreduce_always_fp32=True``.
    """

    def __init__(self, module: nn.Module, message_size: int = 0, delay_allreduce: bool = False, **options: Any) -> None:
        own = {'find_unused_parameters': delay_allreduce, 'broadcast_buffers': False}
        super().__init__(module, **{**own, **_for_torch('apex.parallel.DistributedDataParallel', options)})


def FusedAdam(params: ParamsT, lr: float = 1e-3, *, adam_w_mode: bool = True, **options: Any) -> Optimizer:
    """Make an ``amp_wrapper.FusedAdamW``, or with ``adam_w_mode=False`` an ``amp_wrapper.FusedAdam``.

    Args:
        params: Parameters, or dicts of groups.
        lr: Learning rate.
        adam_w_mode: Whether weights decay apart from the gradient.
        **options: ``betas``, ``eps``, ``weight_decay`` (0 by default, as in apex), ``amsgrad``.

    Raises:
        AmpConfigError: ``bias_correction=False``, ``master_weights=True``.
    """
    kind = _optim.FusedAdamW if adam_w_mode else _optim.FusedAdam
    return kind(params, lr, **{'weight_decay': 0.0, **_for_torch('apex.optimizers.FusedAdam', options)})


def FusedSGD(params: ParamsT, lr: float, momentum: float = 0.0, **options: Any) -> Optimizer:
    """Make an ``amp_wrapper.FusedSGD``, with its arguments; raises ``AmpConfigError`` for ``wd_after_momentum=True``."""
    return _optim.FusedSGD(params, lr, momentum, **_for_torch('apex.optimizers.FusedSGD', options))


class FusedLayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm``; ``memory_efficient`` is accepted."""

    def __init__(self, *args: Any, memory_efficient: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)


class FusedRMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` with apex's ``eps``; ``memory_efficient`` is accepted."""

    def __init__(self, *args: Any, memory_efficient: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.eps = 1e-5 if self.eps is None else self.eps


class LossScale(float):
    """One of ``amp._amp_state.loss_scalers``, to be read."""

    def loss_scale(self) -> float:
        """Return the present scale."""
        return float(self)


class AmpState:
    """``amp._amp_state``, as far as scripts read the loss scale from it."""

    @property
    def loss_scalers(self) -> list[LossScale]:
        """The loss scales of all ``amp.initialize`` calls. Syncs."""
        return [LossScale(state['loss_scale']) for state in _amp.state_dict().values()]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(advice(f'apex.amp._amp_state.{name}'))


class _Adviser(MetaPathFinder):
    """Says what to write where a module of apex is imported that nobody has found."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Raise for modules below this one, whatever it is called."""
        for root in (__name__, 'apex'):
            if fullname.startswith(f'{root}.') and sys.modules.get(root) is sys.modules[__name__]:
                raise MissingModule(advice(fullname.removeprefix('amp_wrapper.')))


def _make_module(name: str, homes: str, **names: object) -> ModuleType:
    """Make a module below this one.

    Args:
        name: Its name.
        homes: Modules below it, where old scripts import its names from.
        **names: What is in it, besides the names that :data:`ADVICE` has.
    """
    module = module_from_spec(ModuleSpec(f'{__name__}.{name}', None, is_package=True))
    missing = [path.rpartition('.')[2] for path in ADVICE if path.startswith(f'apex.{name}.')]
    vars(module).update({short: type(short, (MissingName,), {'_name': f'apex.{name}.{short}'}) for short in missing})
    vars(module).update(dict.fromkeys(homes.split(), module), **names)
    sys.modules.update({f'{module.__name__}.{home}'.rstrip('.'): module for home in ('', *homes.split())})
    return module


#: As a package has it: Python looks for modules below this one.
__path__: list[str] = []
_own = {name: value for name, value in vars(_amp).items() if callable(value) and not name.startswith('_')}
amp = _make_module('amp', 'amp frontend handle _amp_state', **{**_own, '_amp_state': AmpState()})
parallel = _make_module(
    'parallel',
    'distributed sync_batchnorm optimized_sync_batchnorm',
    DistributedDataParallel=DistributedDataParallel,
    SyncBatchNorm=nn.SyncBatchNorm,
    convert_syncbn_model=nn.SyncBatchNorm.convert_sync_batchnorm,
)
optimizers = _make_module('optimizers', 'fused_adam fused_sgd fused_lamb', FusedAdam=FusedAdam, FusedSGD=FusedSGD)
_norms = {f'{kind}{norm.__name__}': norm for kind in ('', 'Mixed') for norm in (FusedLayerNorm, FusedRMSNorm)}
normalization = _make_module('normalization', 'fused_layer_norm', **_norms)
fp16_utils = _make_module('fp16_utils', 'fp16_optimizer fp16util loss_scaler')
multi_tensor_apply = _make_module('multi_tensor_apply', '')
sys.meta_path.append(_Adviser())


def __getattr__(name: str) -> Any:
    raise AttributeError(advice(f'apex.{name}'))


def install() -> None:
    """Let ``import apex`` find this module from here on, in code that cannot be edited.

    Raises:
        AmpUsageError: Another apex has been imported.
    """
    this, other = sys.modules[__name__], sys.modules.get('apex')
    if other not in (None, this):
        raise AmpUsageError(f'{other} is imported already: call amp_wrapper.apex.install() before that.')
    parts = {name: part for name, part in sys.modules.items() if f'{name}.'.startswith(f'{__name__}.')}
    sys.modules.update({name.removeprefix('amp_wrapper.'): part for name, part in parts.items()})
