"""Refuses strategies of mmengine and ``torch.compile`` where they are not supported, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmengine._strategy import SingleDeviceStrategy
from mmengine._strategy.fsdp import FSDPStrategy
from mmengine.registry import OPTIMIZERS
from torch import nn

from ...casting import roots
from ...errors import AmpAttachError, AmpConfigError
from ...optim import FusedAdam
from ..wrappers import amp_wrappers, wrappers_of


def maybe_compile(original: Callable[..., None], runner: Any, target: str) -> None:
    """Replaces ``Runner._maybe_compile``: refuses ``torch.compile`` at the levels that compute in 16-bit."""
    for wrapper in wrappers_of(runner).values() if runner.cfg.get('compile') else ():
        if wrapper.policy.runs_16_bit:
            raise AmpConfigError(
                [
                    f'compile={runner.cfg.compile!r}: torch.compile is not supported yet at {wrapper.opt_level}, which '
                    f'computes in 16-bit. Drop it from the config, or use opt_level="O0".'
                ]
            )
    original(runner, target)


def build_optim_wrapper(original: Callable[..., Any], strategy: Any, optim_wrapper: Any, model: Any = None) -> Any:
    """Replaces ``build_optim_wrapper`` of strategies: refuses those that shard, and compiled models."""
    _check_strategy(strategy, optim_wrapper)
    wrapper = original(strategy, optim_wrapper, model)
    _check_strategy(strategy, wrapper)
    # the strategies compile first, and then everything that the model's step calls
    if isinstance(model, nn.Module) and any(member.policy.runs_16_bit for member in amp_wrappers(wrapper).values()):
        roots.check_compiled(model)
    return wrapper


def _check_strategy(strategy: Any, wrapper: Any) -> None:
    # DDPStrategy is a SingleDeviceStrategy, and FSDPStrategy a DDPStrategy
    supported = isinstance(strategy, SingleDeviceStrategy) and not isinstance(strategy, FSDPStrategy)
    for member in () if supported else amp_wrappers(wrapper).values():
        raise AmpAttachError(
            f'{type(strategy).__name__} shards or casts the model itself and is not supported yet: use DDPStrategy or '
            f'SingleDeviceStrategy with {type(member).__name__}.'
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
