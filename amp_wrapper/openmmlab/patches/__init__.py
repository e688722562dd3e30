"""Patches mmengine where it has no official hook: one table of patched attributes, installed once a process.

Every replacement is called with the original first, and does what the original does where no wrapper of this package trains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mmengine
import mmengine.runner
import mmengine.runner.checkpoint
import mmengine.runner.runner
from mmengine._strategy import BaseStrategy, SingleDeviceStrategy, deepspeed
from mmengine._strategy.fsdp import FSDPStrategy
from mmengine.hooks import CheckpointHook, EMAHook, ParamSchedulerHook
from mmengine.logging import MMLogger
from mmengine.model import BaseAveragedModel
from mmengine.optim import OptimWrapperDict
from mmengine.runner import CheckpointLoader, FlexibleRunner, Runner
from mmengine.utils import digit_version

from ..log import follow_runners, warn
from . import ema, resuming, runner_hook, safe_globals, saving, schedules, strategies, wrapper_dict

#: The versions these patches were read against.
TESTED = ('0.10.0', '0.11.0')


def _replaced(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return patched


_RUNNERS = (Runner, FlexibleRunner)
# each has a name of its own for the function
_WRITERS = (mmengine.runner, mmengine.runner.checkpoint, mmengine.runner.runner)
#: Classes or modules, the attribute of theirs that is replaced, and what takes its place; above each, what mmengine lacks.
PATCHES: tuple[tuple[tuple[Any, ...], str, Callable[..., Any]], ...] = (
    # all that a method of mmengine's hooks suffices for is done by one hook, which is registered here
    (_RUNNERS, 'register_hooks', runner_hook.register_hooks),
    # a deep copy of a cast model becomes FP32 again, from the masters
    ((BaseAveragedModel,), '__init__', ema.copy_in_fp32),
    # averages see masters in FP32, never rounded weights
    ((BaseAveragedModel,), 'update_parameters', ema.update_parameters),
    # swaps masters, not weights, so that everything comes back bit for bit
    ((EMAHook,), '_swap_ema_parameters', ema.swap_parameters),
    # copies the model anew before each test, which a sharded one does not allow
    ((EMAHook,), 'before_run', ema.before_run),
    # FlexibleRunner loads before there is an average; wrappers inside a model change its names
    ((EMAHook,), 'after_load_checkpoint', ema.after_load_checkpoint),
    # members know of each other, also those that attach without a runner
    ((OptimWrapperDict,), '__init__', wrapper_dict.introduce_members),
    # does nothing in mmengine; ours attach here, all before the first forward
    ((OptimWrapperDict,), 'initialize_count_status', wrapper_dict.initialize_count_status),
    # compiles train_step, with the optimizer's step in it; no hook comes after the model was cast and before it is called
    ((Runner,), '_maybe_compile', strategies.maybe_compile),
    # compiles before there is an optimizer wrapper
    ((BaseStrategy,), 'compile_model', strategies.compile_model),
    # strategies that shard are refused before anything is changed, and what is compiled is known here at the earliest
    ((BaseStrategy, FSDPStrategy), 'build_optim_wrapper', strategies.build_optim_wrapper),
    # raises where the name FusedAdam is taken; with DeepSpeed's strategy it is DeepSpeed's
    ((deepspeed,), 'register_deepspeed_optimizers', strategies.register_deepspeed_optimizers),
    # overwrites what is there; a file backend of ours would be given all bytes, twice in memory
    (_WRITERS, 'save_checkpoint', saving.write_whole_file),
    # FlexibleRunner overwrites the epoch it is given
    (_RUNNERS, 'save_checkpoint', saving.save_checkpoint),
    # deletes the old before it writes the new; saves on rank 0 alone, where states of all ranks are wanted
    ((CheckpointHook,), '_save_checkpoint_with_step', saving.save_with_step),
    # deletes the old before it writes the new, too
    ((CheckpointHook,), '_save_best_checkpoint', saving.save_best),
    # published files are written whole, too
    ((CheckpointHook,), '_publish_model', saving.publish_model),
    # takes what last_checkpoint names, complete or not, there or not
    (_RUNNERS, 'load_or_resume', runner_hook.load_or_resume),
    # applies the parts one after the other, and fails somewhere in between
    (_RUNNERS, 'resume', resuming.resume),
    # compares no checksums; takes "module_" from "module_list"
    (_RUNNERS, 'load_checkpoint', resuming.load_checkpoint),
    # FlexibleRunner resumes through it; takes "module_" from "module_list"
    ((SingleDeviceStrategy,), 'load_checkpoint', resuming.load_through_strategy),
    # moves schedules of iterations at skipped steps, too
    ((ParamSchedulerHook,), 'after_train_iter', schedules.after_train_iter),
)


@functools.cache
def install() -> None:
    """Put the patches in place, once a process, and what mmengine lets us register."""
    version = digit_version(mmengine.__version__)
    if not digit_version(TESTED[0]) <= version < digit_version(TESTED[1]):
        warn(
            f'amp_wrapper was tested with mmengine {TESTED[0]} to {TESTED[1]} (excluded); this is {mmengine.__version__}. '
            f'EMAHook and OptimWrapperDict are patched all the same: compare a short run with opt_level="O0".'
        )
    for targets, name, replacement in PATCHES:
        for target in targets:
            setattr(target, name, _replaced(getattr(target, name), replacement))
    local = _replaced(CheckpointLoader._get_checkpoint_loader('/'), resuming.load_local_file)
    CheckpointLoader.register_scheme(prefixes='', loader=local, force=True)
    safe_globals.allow()
    if MMLogger.get_current_instance().instance_name != 'mmengine':
        # that is the name where no runner was built before
        follow_runners()
