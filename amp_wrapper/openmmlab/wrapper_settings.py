"""What a config's ``optim_wrapper`` says of the level."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from mmengine.optim import AmpOptimWrapper as TorchAmpOptimWrapper
from mmengine.optim import ApexOptimWrapper as StockApexOptimWrapper
from mmengine.optim import BaseOptimWrapper, OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS, OPTIMIZERS, Registry
from torch.nn.utils import clip_grad_value_
from torch.optim import Optimizer

from ..errors import AmpConfigError, nearest
from ..policy import OptLevel, Policy, resolve
from ..policy.options import is_count
from .wrappers import amp_wrappers

#: What to do where a config cannot be tried.
SCRIPT = 'use amp.report(...) and the like in a script that has the model and the loss'


@dataclasses.dataclass(frozen=True)
class WrapperSettings:
    """What a config's ``optim_wrapper`` says beside the optimizer.

    Attributes:
        opt_level: 'O0' for mmengine's plain ``OptimWrapper``.
        overrides: Options of :func:`amp_wrapper.policy.resolve`: what differs from the level itself.
        clip_grad: As mmengine's ``OptimWrapper`` takes it; None for none.
        accumulative_counts: Iterations to a step.
    """

    opt_level: str
    overrides: Mapping[str, Any]
    clip_grad: Mapping[str, Any] | None
    accumulative_counts: int

    def policy(self, opt_level: str | None = None) -> Policy:
        """The configuration at its own level, or at another one with the same overrides.

        Raises:
            AmpConfigError: Overrides that do not go with the level.
        """
        level: Any = opt_level or self.opt_level
        return resolve(level, **self.overrides)


def check_words(words: Any) -> None:
    """Refuse an ``optim_wrapper`` that nothing can be built from, inside of the scope of its config.

    Args:
        words: Not changed.

    Raises:
        AmpConfigError: There is none; it, or its optimizer, is no dict; it has several optimizers; a class that is not
            registered.
    """
    if isinstance(words, BaseOptimWrapper):
        raise AmpConfigError([f'optim_wrapper={type(words).__name__} is built already, {_OF_ONE_MODEL}'])
    if not words:
        raise AmpConfigError(['the config has no optim_wrapper: it trains nothing.'])
    if not isinstance(words, Mapping):
        raise AmpConfigError([f'optim_wrapper={type(words).__name__} must be a dict: {_SUCH_AS}.'])
    if 'optimizer' not in words:
        members = [str(key) for key, value in words.items() if isinstance(value, Mapping) and 'optimizer' in value]
        named = f' ({", ".join(members)})' if members else ''
        raise AmpConfigError(
            [f'optim_wrapper trains with several optimizers{named}, one after the other in a train_step: {SCRIPT}.']
        )
    optimizer, counts = words['optimizer'], words.get('accumulative_counts', 1)
    if isinstance(optimizer, Optimizer):
        raise AmpConfigError([f'optim_wrapper.optimizer={type(optimizer).__name__} is built already, {_OF_ONE_MODEL}'])
    if not isinstance(optimizer, Mapping):
        shown = repr(optimizer) if optimizer is None or isinstance(optimizer, str) else type(optimizer).__name__
        raise AmpConfigError([f'optim_wrapper.optimizer={shown} must be a dict: {_SUCH_AS}.'])
    if not is_count(counts):
        raise AmpConfigError([f'optim_wrapper.accumulative_counts={counts!r} must be a whole number of at least 1.'])
    _registered(OPTIM_WRAPPERS, words.get('type', 'OptimWrapper'), 'optim_wrapper.type')
    # what a constructor of its own makes of the word is its matter
    if words.get('constructor') is None:
        if optimizer.get('type') is None:
            raise AmpConfigError([f'optim_wrapper.optimizer={dict(optimizer)!r} has no type: {_SUCH_AS}.'])
        _registered(OPTIMIZERS, optimizer.get('type'), 'optim_wrapper.optimizer.type')


_SUCH_AS = "write optim_wrapper = dict(type='AmpOptimWrapper', optimizer=dict(type='SGD', lr=0.1))"
_OF_ONE_MODEL = (
    'with the parameters of one model, and copies of the model need optimizers of their own: write it as a dict, or '
    f'{SCRIPT}.'
)


def _registered(registry: Registry, kind: Any, key: str) -> Any:
    """The class of a name; what is no name, as it is."""
    if not isinstance(kind, str):
        return kind
    found = registry.get(kind)
    if found is None:
        # mmengine says that None is not callable
        raise AmpConfigError([f'{key}={kind!r} is not registered{nearest(kind, registry.module_dict)}.'])
    return found


def can_be_built(words: Mapping[str, Any]) -> bool:
    """Whether a wrapper can be built anywhere. mmengine's own for mixed precision ask for a GPU or for apex, and those of
    its strategies for theirs.

    Args:
        words: That passed :func:`check_words`.
    """
    kind = _registered(OPTIM_WRAPPERS, words.get('type', 'OptimWrapper'), 'optim_wrapper.type')
    return not isinstance(kind, type) or (issubclass(kind, OptimWrapper) and not issubclass(kind, _STOCK_AMP))


_STOCK_AMP = (TorchAmpOptimWrapper, StockApexOptimWrapper)


def optimizer_words(words: Mapping[str, Any]) -> dict[str, Any]:
    """What the optimizer is built from: for ``ZeroRedundancyOptimizer``, which divides its state among processes, the
    optimizer inside of it.

    Args:
        words: Of ``optim_wrapper.optimizer``, not changed.
    """
    found = copy.deepcopy(dict(words))
    kind = _registered(OPTIMIZERS, found.get('type'), 'optim_wrapper.optimizer.type')
    if getattr(kind, '__name__', '') == 'ZeroRedundancyOptimizer' and 'optimizer_type' in found:
        found['type'] = found.pop('optimizer_type')
        for name in ('process_group', 'parameters_as_bucket_view', 'overlap_with_ddp'):
            found.pop(name, None)
    return found


def settings_of(wrapper: OptimWrapper) -> WrapperSettings:
    """What a wrapper does, whoever has chosen it: the config or its class.

    Args:
        wrapper: Built.
    """
    clip = wrapper.clip_grad_kwargs
    if clip is not None:
        clip = {**({'type': 'value'} if wrapper.clip_func is clip_grad_value_ else {}), **clip}
    policy = next((each.policy for each in amp_wrappers(wrapper).values()), resolve('O0'))
    # mmengine divides each loss by it, and tells it in no other way
    counts = round(1 / float(wrapper.scale_loss(torch.ones(()))))
    return WrapperSettings(policy.opt_level, dict(policy.overrides), clip, counts)


def settings_of_words(words: Mapping[str, Any]) -> WrapperSettings:
    """What a wrapper does that cannot be built here: mmengine's own for mixed precision is O1, all others are O0.

    Args:
        words: That passed :func:`check_words`.

    Raises:
        AmpConfigError: A loss scale or a type that means nothing.
    """
    kind = _registered(OPTIM_WRAPPERS, words.get('type', 'OptimWrapper'), 'optim_wrapper.type')
    level: OptLevel = 'O0'
    given: dict[str, Any] = {}
    if issubclass(kind, _STOCK_AMP):
        # GradScaler has no ceiling
        level, given = 'O1', {name: words[name] for name in ('loss_scale', 'dtype') if name in words}
        given['max_loss_scale'] = None
    policy = resolve(level, **given)
    counts = int(words.get('accumulative_counts', 1))
    return WrapperSettings(policy.opt_level, dict(policy.overrides), words.get('clip_grad'), counts)
