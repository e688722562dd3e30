"""Refuses strategies of mmengine that are not supported, before anything is changed, and chooses what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmengine._strategy import SingleDeviceStrategy
from mmengine._strategy.fsdp import FSDPStrategy
from mmengine.registry import OPTIMIZERS
from torch import nn

from ...errors import AmpAttachError
from ...optim import FusedAdam
from .. import compiling
from ..wrappers import amp_wrappers, wrappers_of


def maybe_compile(original: Callable[..., None], runner: Any, target: str) -> None:
    """Replaces ``Runner._maybe_compile``: compiles the forward call, where mmengine compiles the whole ``train_step``."""
    if not any(wrapper.policy.enabled for wrapper in wrappers_of(runner).values()):
        original(runner, target)
        return
    options = compiling.options_of(runner.cfg.get('compile'))
    # Runner asks before each training, validation and test
    if options is not None and vars(runner).get('_amp_wrapper_compiled') != (runner.model, options):
        runner._amp_wrapper_compiled = runner.model, options
        compiling.compile_model(runner.model, options)


def compile_model(
    original: Callable[..., nn.Module], strategy: Any, model: nn.Module, compile: Any = False
) -> nn.Module:
    """Replaces ``compile_model`` of strategies, which comes before there is an optimizer wrapper: remembers what to compile."""
    strategy._amp_wrapper_compile = None if compile is False else {} if compile is True else dict(compile)
    # mmengine takes ``target`` out of the dict
    return original(strategy, model, compile if isinstance(compile, bool) else dict(compile))


def build_optim_wrapper(original: Callable[..., Any], strategy: Any, optim_wrapper: Any, model: Any = None) -> Any:
    """Replaces ``build_optim_wrapper`` of strategies: refuses those that shard, and compiles as :func:`maybe_compile` does."""
    _check_strategy(strategy, optim_wrapper)
    wrapper = original(strategy, optim_wrapper, model)
    _check_strategy(strategy, wrapper)
    options = vars(strategy).pop('_amp_wrapper_compile', None)
    ours = any(member.policy.enabled for member in amp_wrappers(wrapper).values())
    if options is not None and ours and isinstance(model, nn.Module):
        target = options.pop('target', 'train_step')
        if target in ('train_step', 'val_step', 'forward'):
            compiling.decompile(model, target)
            compiling.compile_model(model, options)
    return wrapper


def _check_strategy(strategy: Any, wrapper: Any) -> None:
    # DDPStrategy is a SingleDeviceStrategy, and FSDPStrategy a DDPStrategy
    supported = isinstance(strategy, SingleDeviceStrategy) and not isinstance(strategy, FSDPStrategy)
    for member in () if supported else amp_wrappers(wrapper).values():
        raise AmpAttachError(
            f'{type(strategy).__name__} shards or casts the model itself: with {type(member).__name__}, write '
            f"strategy=dict(type='amp_wrapper.FullyShardStrategy'), which shards by FSDP2, or DDPStrategy."
        )


def register_deepspeed_optimizers(original: Callable[[], list[str]]) -> list[str]:
    """Replaces mmengine's function of that name, which fails where ``FusedAdam`` is registered: takes ours out meanwhile."""
    ours = OPTIMIZERS.module_dict.get('FusedAdam')
    if ours is not FusedAdam:
        return original()
    del OPTIMIZERS.module_dict['FusedAdam']
    try:
        return original()
    finally:
        OPTIMIZERS.module_dict.setdefault('FusedAdam', ours)
