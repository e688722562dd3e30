"""Patches mmengine where it has no official hook: one table, installed once a process.

Every replacement is called with the original first, and does what the original does where no wrapper of this package trains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mmengine.runner.runner
import torch
from mmengine.hooks import EMAHook
from mmengine.model import BaseAveragedModel
from mmengine.optim import OptimWrapperDict
from mmengine.runner import Runner
from torch import nn

from .. import distributed_internals
from ..casting import fp32_values
from ..casting.cast_module import is_cast
from ..engine import averages
from ..policy.nested import parameters_of
from . import attaching, files, runner_hook, shard_files
from .log import follow_runners, log, warn


def update_parameters(original: Callable[..., None], average: Any, model: nn.Module) -> None:
    """Average the FP32 values of a cast model."""
    distributed_internals.reshard(model)
    original(average, averages.Fp32View(model) if is_cast(model) else model)


@torch.no_grad()
def swap_parameters(original: Callable[..., None], hook: Any) -> None:
    """Swap the average with the FP32 values of a cast model, so that both come back bit for bit."""
    average, source = hook.ema_model.module, hook.src_model
    # a validation leaves some modules with gathered parameters
    distributed_internals.reshard(source)
    if not is_cast(source):
        original(hook)
        return
    means, sources = list(average.parameters()), list(source.parameters())
    if hook.ema_model.update_buffers:
        means, sources = [*means, *average.buffers()], [*sources, *source.buffers()]
    # where 16-bit weights cannot hold the exact average, it waits here until the swap back
    waiting, hook._amp_exact_averages = getattr(hook, '_amp_exact_averages', {}), {}
    for index, (mean, weight) in enumerate(zip(means, sources)):
        pair, before = fp32_values.pairs.get(weight), mean.detach().clone()
        mean.data.copy_(waiting.get(index, fp32_values.in_fp32(weight)))
        if pair is None:
            weight.data.copy_(before)
        else:
            fp32_values.write_fp32(weight, before)
        if index not in waiting and (weight.dtype != mean.dtype if pair is None else pair.is_split):
            hook._amp_exact_averages[index] = before


def introduce_members(original: Callable[..., None], wrappers: Any, **members: Any) -> None:
    """Give each member of an ``OptimWrapperDict`` its name and the other members."""
    original(wrappers, **members)
    ours = attaching.amp_wrappers(wrappers)
    for name, member in ours.items():
        member.join([other for other in members.values() if other is not member], name)
    half = [name for name, member in ours.items() if member.policy.half_type is torch.float16]
    for name, member in ours.items():
        scaled = any(not scaler.is_one for scaler in member.loss_scalers)
        if not scaled and member.policy.enabled and member.policy.verbosity >= 1 and set(half) - {name}:
            # small gradients are lost, and overflows unseen, on their way through float16 modules of others
            log(f"{name} has no loss scale: if its loss flows through {half[0]} (float16), write loss_scale='dynamic'")


def attach_all(original: Callable[..., None], wrappers: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Attach all members of an ``OptimWrapperDict`` whose parameters the model holds, before the first forward."""
    original(wrappers, model, *args, **kwargs)
    inside = {id(parameter) for parameter in model.parameters()}
    for member in attaching.amp_wrappers(wrappers).values():
        if inside.issuperset(map(id, parameters_of(member.optimizer))):
            attaching.attach_members(member._engine, model)


#: Classes or modules, the attribute of theirs that is replaced, and what takes its place; above each, what mmengine lacks.
PATCHES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    # gives no hook a word between the wrapper and the checkpoint, and the package may be imported after the runner was made
    (Runner, 'load_or_resume', runner_hook.load_or_resume),
    # saves on rank 0 alone, where the shards of all ranks are wanted
    (Runner, 'save_checkpoint', shard_files.save_checkpoint),
    # the function that writes what was collected: a folder of shards is written here, after all hooks
    (mmengine.runner.runner, 'save_checkpoint', shard_files.write_checkpoint),
    # averages see FP32 values, never rounded weights
    (BaseAveragedModel, 'update_parameters', update_parameters),
    # swaps FP32 values, so that everything comes back bit for bit
    (EMAHook, '_swap_ema_parameters', swap_parameters),
    # members know of each other, also those that attach without a runner
    (OptimWrapperDict, '__init__', introduce_members),
    # does nothing in mmengine; ours attach here, all before the first forward
    (OptimWrapperDict, 'initialize_count_status', attach_all),
)


def _replaced(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return patched


@functools.cache
def install() -> None:
    """Put the patches in place, once a process, and what mmengine lets us register."""
    # the versions that these patches were read against, those of onedl-mmengine among them
    if not mmengine.__version__.startswith('0.10.'):
        warn(f"mmengine {mmengine.__version__} is patched, and untested: compare a short run with opt_level='O0'")
    for target, name, replacement in PATCHES:
        setattr(target, name, _replaced(getattr(target, name), replacement))
    follow_runners()
    files.register()
