"""Patches mmengine's averaged models to average FP32 masters, and ``EMAHook`` to swap and restore them bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from mmengine.hooks import EMAHook
from mmengine.model import is_model_wrapper
from torch import Tensor, nn

from ... import distributed_internals
from ...casting import fp32_values
from ...casting.cast_module import is_cast, take_off
from ...checkpoint import names
from ...engine import averages
from ...errors import AmpUsageError
from ...shards import any_sharded
from .. import sharded_states
from ..wrappers import inner_model, wrappers_of


def copy_in_fp32(original: Callable[..., None], average: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Replaces ``BaseAveragedModel.__init__``: the copy of a cast model becomes FP32, with the values of the masters."""
    original(average, model, *args, **kwargs)
    # what is trained with 16-bit weights has FP32 copies
    for module in average.module.modules():
        take_off(module)


def update_parameters(original: Callable[..., None], average: Any, model: nn.Module) -> None:
    """Replaces ``BaseAveragedModel.update_parameters``: averages the FP32 values of a cast model."""
    distributed_internals.reshard(model)
    original(average, averages.Fp32View(model) if is_cast(model) else model)


@torch.no_grad()
def swap_parameters(original: Callable[..., None], hook: Any) -> None:
    """Replaces ``EMAHook._swap_ema_parameters``: swaps the average with the masters, so that both come back bit for bit."""
    average, source = hook.ema_model.module, hook.src_model
    # a validation leaves some modules with gathered parameters
    distributed_internals.reshard(source)
    if not is_cast(source):
        original(hook)
        return
    with_buffers = hook.ema_model.update_buffers
    means = itertools.chain(average.parameters(), average.buffers() if with_buffers else ())
    sources = itertools.chain(source.parameters(), source.buffers() if with_buffers else ())
    # where the model cannot hold the exact average, it waits here until the swap back
    waiting: dict[int, Tensor] = hook.__dict__.pop('_amp_exact_averages', {})
    kept: dict[int, Tensor] = {}
    for index, (mean, weight) in enumerate(zip(means, sources)):
        pair, before = fp32_values.pair_of(weight), mean.detach().clone()
        mean.data.copy_(fp32_values.in_fp32(weight))
        if pair is None:
            weight.data.copy_(before)
        else:
            fp32_values.write_fp32(weight, before)
        # not every average can be split
        is_rounded = weight.dtype != mean.dtype if pair is None else pair.is_split
        if index in waiting:
            mean.data.copy_(waiting[index])
        elif is_rounded:
            kept[index] = before
    hook._amp_exact_averages = kept


def check_runner(runner: Any) -> None:
    """Refuse an ``EMAHook`` that mmengine could not save.

    Args:
        runner: About to run.

    Raises:
        AmpUsageError: Says what to use instead.
    """
    wrapped = hasattr(runner, 'strategy') and is_model_wrapper(runner.model) and wrappers_of(runner)
    if wrapped and any(isinstance(hook, EMAHook) for hook in runner.hooks):
        raise AmpUsageError(
            f'EMAHook under {type(runner.strategy).__name__}: mmengine saves such a model under other names than its '
            f'average, and fails at the first checkpoint. Use Runner (no strategy) with several processes.'
        )


def before_run(original: Callable[..., None], hook: Any, runner: Any) -> None:
    """Replaces ``EMAHook.before_run``: an average that is there becomes a copy of a sharded model, which cannot be copied."""
    known = getattr(hook, 'ema_model', None)
    model = inner_model(runner.model)
    if known is None or not any_sharded(model.parameters()):
        original(hook, runner)
        return
    distributed_internals.reshard(model)
    with torch.no_grad():
        for mean, value in zip(known.module.state_dict().values(), model.state_dict().values()):
            mean.copy_(value)
        known.steps.zero_()


def after_load_checkpoint(original: Callable[..., None], hook: Any, runner: Any, checkpoint: dict[str, Any]) -> None:
    """Replaces ``EMAHook.after_load_checkpoint``: makes an average that is missing, and gives the weights its names."""
    if not hasattr(hook, 'ema_model'):
        # FlexibleRunner loads before it calls before_run, which would make the average anew
        check_runner(runner)
        hook.before_run(runner)
        hook.before_run = lambda runner: hook.__dict__.pop('before_run')
    if wrappers_of(runner):
        _name_for_average(checkpoint, hook.ema_model.module, runner._resume)
    if any_sharded(hook.src_model.parameters()):
        checkpoint['state_dict'] = sharded_states.shard_states(hook.src_model, checkpoint['state_dict'])
        if 'ema_state_dict' in checkpoint:
            checkpoint['ema_state_dict'] = sharded_states.shard_states(hook.ema_model, checkpoint['ema_state_dict'])
    original(hook, runner, checkpoint)


def _name_for_average(checkpoint: dict[str, Any], average: nn.Module, resumes: bool) -> None:
    """The names of a file, plain or not, become those of an averaged model that was copied with wrappers inside or not."""
    read = names.reader(average, checkpoint['state_dict'])
    checkpoint['state_dict'] = names.renamed(checkpoint['state_dict'], read)
    if 'ema_state_dict' not in checkpoint or not resumes:
        return
    wanted = {plain: key for key, plain in names.plain_names(average).items()}

    def name(plain: str) -> str:
        return wanted.get(plain, plain)

    checkpoint['ema_state_dict'] = names.renamed(
        checkpoint['ema_state_dict'],
        lambda key: f'module.{name(read(key[len("module.") :]))}' if key.startswith('module.') else key,
    )
    # the hook swaps the two by name; ours makes them plain again
    checkpoint['state_dict'] = names.renamed(checkpoint['state_dict'], name)
