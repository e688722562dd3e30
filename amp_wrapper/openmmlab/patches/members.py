"""What mmengine offers no seam for. Every patch is the identity where none of our wrappers is attached.

* ``BaseAveragedModel.__init__``: a deep copy of a cast model becomes FP32 again, from the masters.
* ``BaseAveragedModel.update_parameters``: averages see masters in FP32, never rounded weights.
* ``EMAHook._swap_ema_parameters``: swaps masters, not weights, so that everything comes back bit for bit.
* ``EMAHook.after_load_checkpoint`` and ``before_run``: FlexibleRunner loads before the hook has a model to load into.
* ``OptimWrapperDict.initialize_count_status``: does nothing in mmengine; ours attach here, all before the first forward.
* ``OptimWrapperDict.__init__``: remembers its members' siblings, for those who attach without a runner.
* ``Runner._maybe_compile`` and the strategies' ``build_optim_wrapper``: what is not supported yet is refused with one of
  our wrappers, ``torch.compile`` and strategies that shard.
* ``register_deepspeed_optimizers``: raises where the name ``FusedAdam`` is taken; with DeepSpeed's strategy it is DeepSpeed's.
* ``torch.serialization.add_safe_globals``: the classes that mmengine's own checkpoints need under
  ``torch.load(weights_only=True)``, and no more.
* Saving and resuming: :mod:`amp_wrapper.openmmlab.patches.saving` and :mod:`amp_wrapper.openmmlab.patches.resuming`, put in
  place from here.
* Schedules: :mod:`amp_wrapper.openmmlab.patches.schedules`, likewise.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import logging
import pathlib
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import mmengine
import numpy as np
import torch
from mmengine._strategy import BaseStrategy, SingleDeviceStrategy, deepspeed
from mmengine._strategy.fsdp import FSDPStrategy
from mmengine.config import ConfigDict
from mmengine.hooks import EMAHook
from mmengine.logging import HistoryBuffer, print_log
from mmengine.model import BaseAveragedModel, is_model_wrapper
from mmengine.optim import OptimWrapperDict
from mmengine.registry import OPTIMIZERS
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from mmengine.utils import digit_version
from torch import Tensor, nn

from ...casting import fp32_values as twins
from ...casting import roots as scope
from ...casting.find_hooks import is_cast
from ...casting.state_dict_hooks import restore_fp32_copy
from ...checkpoint import names as model_names
from ...engine import averages
from ...engine.buffers import snapshots as buffer_snapshots
from ...errors import AmpAttachError, AmpConfigError, AmpUsageError
from ...optim import FusedAdam
from ...policy.nested import HALF_TYPES, map_tensors
from . import resuming as mmengine_resuming
from . import saving as mmengine_saving
from . import schedules as mmengine_schedules

#: The versions these patches were read against.
TESTED = ('0.10.0', '0.11.0')


def _patch_averaged_model() -> None:
    original_init = BaseAveragedModel.__init__
    original_update = BaseAveragedModel.update_parameters

    @functools.wraps(original_init)
    def init(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        original_init(self, model, *args, **kwargs)
        if restore_fp32_copy(self.module, model) and self.update_buffers:
            # these were live references into the copy before it became FP32
            self.avg_parameters = self.module.state_dict()

    @functools.wraps(original_update)
    def update_parameters(self: Any, model: nn.Module) -> None:
        with buffer_snapshots.averaging(self.module, model):
            original_update(self, averages.Fp32View(model) if is_cast(model) else model)

    BaseAveragedModel.__init__ = init
    BaseAveragedModel.update_parameters = update_parameters


def _patch_ema_swap() -> None:
    original = EMAHook._swap_ema_parameters

    @functools.wraps(original)
    def swap(self: Any) -> None:
        if is_cast(self.src_model):
            _swap_with_masters(self)
        else:
            original(self)

    EMAHook._swap_ema_parameters = swap


@torch.no_grad()
def _swap_with_masters(hook: Any) -> None:
    average, source = hook.ema_model.module, hook.src_model
    both = hook.ema_model.update_buffers
    averages = itertools.chain(average.parameters(), average.buffers() if both else ())
    sources = itertools.chain(source.parameters(), source.buffers() if both else ())
    # where no single tensor holds the exact average, it waits here until the swap back
    waiting: dict[int, Tensor] | None = hook.__dict__.pop('_amp_exact_averages', None)
    coming_back = waiting is not None
    stash: dict[int, Tensor] = {} if waiting is None else waiting
    for index, (mean, weight) in enumerate(zip(averages, sources)):
        # an edit of the weight that nobody announced belongs to the master first
        twins.agree_on_host(weight)
        exact = twins.fp32_value(weight)
        if exact is not None:
            before = mean.detach().clone()
            mean.data.copy_(exact)
            twins.write_fp32(weight, before)
            if twins.remainder_of(weight) is not None:
                # not every average can be split
                if coming_back:
                    mean.data.copy_(stash[index])
                else:
                    stash[index] = before
        elif mean.dtype == weight.dtype:
            before = mean.detach().clone()
            mean.data.copy_(weight.data)
            weight.data.copy_(before)
        elif coming_back:
            weight.data.copy_(mean.data)
            mean.data.copy_(stash[index])
        else:
            stash[index] = mean.detach().clone()
            mean.data.copy_(weight.data)
            weight.data.copy_(stash[index])
    if not coming_back:
        hook._amp_exact_averages = stash


def _patch_wrapper_dict() -> None:
    original = OptimWrapperDict.initialize_count_status

    @functools.wraps(original)
    def initialize_count_status(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, model, *args, **kwargs)
        attach_members(self, model)

    original_init = OptimWrapperDict.__init__

    @functools.wraps(original_init)
    def init(self: Any, **members: Any) -> None:
        original_init(self, **members)
        for name, member in members.items():
            _dicts[member] = weakref.ref(self)
            if _ours(member):
                member.member_name = name
                member.join([other for other in members.values() if other is not member])
                _warn_of_strangers(member, members)
                _tell_of_missing_scales(member, members)

    OptimWrapperDict.initialize_count_status = initialize_count_status
    OptimWrapperDict.__init__ = init


def _warn_of_strangers(member: Any, members: dict[str, Any]) -> None:
    """Our wrappers put what their losses bring to others on the right scale; backward of others knows of no scale."""
    strangers = [name for name, other in members.items() if not _ours(other)]
    if strangers and member.policy.verbosity >= 1 and not all(scaler.is_one for scaler in member.loss_scalers):
        print_log(
            f"amp: {strangers[0]} is mmengine's {type(members[strangers[0]]).__name__}: gradients that its loss brings to the "
            f'parameters of {member.member_name} are not on their loss scale. Detach them, or use AmpOptimWrapper with '
            f"opt_level='O0' in its place.",
            logger='current',
            level=logging.WARNING,
        )


def _tell_of_missing_scales(member: Any, members: dict[str, Any]) -> None:
    """A loss without a scale loses small gradients, and may overflow unseen, on its way through float16 modules of others."""
    half = [
        name
        for name, other in members.items()
        if other is not member
        and _ours(other)
        and torch.float16 in (other.policy.cast_model_type, other.policy.autocast_dtype)
    ]
    if (
        half
        and member.policy.enabled
        and member.policy.verbosity >= 1
        and all(scaler.is_one for scaler in member.loss_scalers)
    ):
        print_log(
            f'amp: {member.member_name} has no loss scale: if its loss flows back through {half[0]}, which computes in '
            f"float16, write loss_scale='dynamic' for {member.member_name}, too",
            logger='current',
            level=logging.INFO,
        )


def _patch_ema_order() -> None:
    original_load = EMAHook.after_load_checkpoint
    original_before = EMAHook.before_run

    @functools.wraps(original_load)
    def after_load_checkpoint(self: Any, runner: Any, checkpoint: dict[str, Any]) -> None:
        if hasattr(self, 'ema_model'):
            if mmengine_saving.wrappers_of(runner):
                _name_for_average(checkpoint, self.ema_model.module, runner._resume)
            original_load(self, runner, checkpoint)
            return
        # FlexibleRunner loads before before_run: the average waits until there is a model to hold it
        if 'ema_state_dict' in checkpoint and runner._resume:
            self._swap_ema_state_dict(checkpoint)
            self._amp_waiting = dict(checkpoint['ema_state_dict'])
        else:
            self._amp_waiting = {f'module.{key}': value for key, value in checkpoint['state_dict'].items()}

    @functools.wraps(original_before)
    def before_run(self: Any, runner: Any) -> None:
        if hasattr(runner, 'strategy') and is_model_wrapper(runner.model) and _ours(runner.optim_wrapper):
            raise AmpUsageError(
                f'EMAHook under {type(runner.strategy).__name__}: mmengine saves such a model under other names than its '
                f'average, and fails at the first checkpoint. Use Runner (no strategy) with several processes.'
            )
        original_before(self, runner)
        waiting = self.__dict__.pop('_amp_waiting', None)
        if waiting is not None:
            self.ema_model.load_state_dict(waiting, strict=False)

    EMAHook.after_load_checkpoint = after_load_checkpoint
    EMAHook.before_run = before_run


def _name_for_average(checkpoint: dict[str, Any], average: nn.Module, resumes: bool) -> None:
    """The names of a file, plain or not, become those of an averaged model that was copied with wrappers inside or not."""
    read = model_names.reader(average, checkpoint['state_dict'])
    checkpoint['state_dict'] = {read(key): value for key, value in checkpoint['state_dict'].items()}
    if 'ema_state_dict' not in checkpoint or not resumes:
        return
    wanted = {plain: key for key, plain in model_names.plain_names(average).items()}

    def name(plain: str) -> str:
        return wanted.get(plain, plain)

    checkpoint['ema_state_dict'] = {
        f'module.{name(read(key[len("module.") :]))}' if key.startswith('module.') else key: value
        for key, value in checkpoint['ema_state_dict'].items()
    }
    # the hook swaps the two by name; mmengine's loader takes the wrappers off again
    checkpoint['state_dict'] = {name(key): value for key, value in checkpoint['state_dict'].items()}


def _refuse_unsupported() -> None:
    original_compile = Runner._maybe_compile

    @functools.wraps(original_compile)
    def maybe_compile(self: Any, target: str) -> None:
        if self.cfg.get('compile'):
            for wrapper in _ours(self.optim_wrapper):
                if wrapper.policy.runs_16_bit:
                    raise AmpConfigError(
                        [
                            f'compile={self.cfg.compile!r}: torch.compile is not supported yet at {wrapper.opt_level}, which '
                            f'computes in 16-bit. Drop it from the config, or use opt_level="O0".'
                        ]
                    )
        original_compile(self, target)

    Runner._maybe_compile = maybe_compile
    for strategy in (BaseStrategy, FSDPStrategy):
        if 'build_optim_wrapper' in vars(strategy):
            strategy.build_optim_wrapper = _guarded(strategy.build_optim_wrapper)


def _guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    def check(strategy: Any, wrapper: Any) -> None:
        # DDPStrategy is a SingleDeviceStrategy, and FSDPStrategy a DDPStrategy
        supported = isinstance(strategy, SingleDeviceStrategy) and not isinstance(strategy, FSDPStrategy)
        if not supported and _ours(wrapper):
            raise AmpAttachError(
                f'{type(strategy).__name__} shards or casts the model itself and is not supported yet: use DDPStrategy or '
                f'SingleDeviceStrategy with {type(_ours(wrapper)[0]).__name__}.'
            )

    @functools.wraps(original)
    def build_optim_wrapper(self: Any, optim_wrapper: Any, model: Any = None) -> Any:
        check(self, optim_wrapper)
        wrapper = original(self, optim_wrapper, model)
        check(self, wrapper)
        # the strategies compile first, and then everything that the model's step calls
        if isinstance(model, nn.Module) and any(member.policy.runs_16_bit for member in _ours(wrapper)):
            scope.check_compiled(model)
        return wrapper

    return build_optim_wrapper


def _leave_deepspeed_its_names() -> None:
    original = deepspeed.register_deepspeed_optimizers

    @functools.wraps(original)
    def register() -> list[str]:
        ours = OPTIMIZERS.module_dict.get('FusedAdam')
        if ours is not FusedAdam:
            return original()
        del OPTIMIZERS.module_dict['FusedAdam']
        try:
            return original()
        finally:
            OPTIMIZERS.module_dict.setdefault('FusedAdam', ours)

    deepspeed.register_deepspeed_optimizers = register


def _ours(wrapper: Any) -> list[Any]:
    """The wrappers of this package among the members, or the wrapper itself."""
    members = list(wrapper.values()) if isinstance(wrapper, OptimWrapperDict) else [wrapper]
    return [member for member in members if hasattr(member, 'policy') and hasattr(member, 'opt_level')]


def attach_members(wrappers: OptimWrapperDict, model: nn.Module) -> None:
    """Attach every member whose parameters ``model`` holds, telling each what the others own."""
    members = list(wrappers.values())
    owned = [[p for group in member.optimizer.param_groups for p in group['params']] for member in members]
    inside = {id(parameter) for parameter in model.parameters()}
    for index, member in enumerate(members):
        attach = getattr(member, 'attach', None)
        if attach is not None and inside.issuperset(map(id, owned[index])):
            foreign = [p for other, parameters in enumerate(owned) if other != index for p in parameters]
            attach(model, foreign=foreign)


# wrapper -> the OptimWrapperDict it is a member of
_dicts: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def attach_siblings(wrapper: Any, model: nn.Module) -> None:
    """Attach a member of an ``OptimWrapperDict`` together with its siblings; nothing for a wrapper on its own."""
    reference = _dicts.get(wrapper)
    together = None if reference is None else reference()
    if together is not None:
        attach_members(together, model)


def cast_data_element(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Cast 16-bit tensors inside mmengine's data elements, field by field and in place; labels stay what they are.

    Args:
        function: The cast.
        value: Any object; what is no data element is returned as it is.
    """
    if isinstance(value, BaseDataElement):

        def cast(tensor: Tensor) -> Tensor:
            return function(tensor) if tensor.dtype in HALF_TYPES else tensor

        for name, field in list(value.items()):
            new = map_tensors(cast, field, cast_data_element)
            if new is not field:
                setattr(value, name, new)
    return value


def _restricted_getattr(owner: Any, name: str) -> Any:
    """``getattr`` for unpickling HistoryBuffer's statistics, and for nothing else."""
    if owner is HistoryBuffer and name in ('min', 'max', 'mean', 'current'):
        return getattr(owner, name)
    raise pickle.UnpicklingError(
        f"this checkpoint asks for getattr({owner!r}, {name!r}), which only HistoryBuffer's statistics may: "
        f'it was tampered with, or written by something other than mmengine.'
    )


def _allow_checkpoint_classes() -> None:
    reconstruct = np.zeros(1).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    allowed: list[Any] = [
        HistoryBuffer,
        # containers that find their way into meta and message hub, and run nothing
        ConfigDict,
        datetime.datetime,
        datetime.date,
        datetime.timedelta,
        pathlib.PosixPath,
        pathlib.WindowsPath,
        pathlib.PurePosixPath,
        slice,
        range,
        (_restricted_getattr, 'builtins.getattr'),
        np.ndarray,
        np.dtype,
        (reconstruct, 'numpy.core.multiarray._reconstruct'),
        (reconstruct, 'numpy._core.multiarray._reconstruct'),
        (scalar, 'numpy.core.multiarray.scalar'),
        (scalar, 'numpy._core.multiarray.scalar'),
    ]
    kinds = (
        np.str_,
        np.float16,
        np.float32,
        np.float64,
        np.int8,
        np.int16,
        np.int32,
        np.int64,
        np.uint8,
        np.uint32,
        np.uint64,
        np.bool_,
    )
    allowed += sorted({type(np.dtype(kind)) for kind in kinds}, key=lambda cls: cls.__name__)
    # each with its name: ``torch.serialization.safe_globals``, in which onedl-mmengine reads its files, takes out at its end
    # what it was given, and would take out our entry if it were the same
    named: list[Any] = [
        each if isinstance(each, tuple) else (each, f'{each.__module__}.{each.__qualname__}') for each in allowed
    ]
    torch.serialization.add_safe_globals(named)


class _ToMMEngine(logging.Handler):
    """Sends the lines of the floors below to mmengine's logger, which knows ranks and files."""

    def emit(self, record: logging.LogRecord) -> None:
        print_log(record.getMessage(), logger='current', level=record.levelno)


def _forward_log_lines() -> None:
    ours = logging.getLogger('amp_wrapper')
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)
    ours.addHandler(_ToMMEngine())
    ours.propagate = False


_applied = False


def apply() -> None:
    """Put the patches in place, once a process."""
    global _applied
    if _applied:
        return
    _applied = True
    version = digit_version(mmengine.__version__)
    if not digit_version(TESTED[0]) <= version < digit_version(TESTED[1]):
        print_log(
            f'amp_wrapper was tested with mmengine {TESTED[0]} to {TESTED[1]} (excluded); this is {mmengine.__version__}. '
            f'EMAHook and OptimWrapperDict are patched all the same: compare a short run with opt_level="O0".',
            logger='current',
            level=logging.WARNING,
        )
    _patch_averaged_model()
    _patch_ema_swap()
    _patch_ema_order()
    _patch_wrapper_dict()
    _refuse_unsupported()
    _leave_deepspeed_its_names()
    mmengine_saving.patch()
    mmengine_resuming.patch()
    mmengine_schedules.patch()
    _allow_checkpoint_classes()
    _forward_log_lines()
