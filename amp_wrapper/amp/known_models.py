"""Remembers the parameters of models given to ``amp.initialize``, and checks other optimizers that step them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ..casting import fp32_values
from ..engine.host_read import mark_harmless
from ..errors import AmpAttachError, AmpUsageError
from ..policy.nested import parameters_of
from ..policy.policy import Policy

logger = logging.getLogger('amp_wrapper')

# parameter -> the configuration of its model
_policies: MutableMapping[Tensor, Policy] = WeakTensorKeyDictionary()
# optimizers that were checked -> how many parameters they had, and how many models were known
_seen: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()
_models = 0
_alive: WeakSet[nn.Module] = WeakSet()
_installed = False


def remember(
    models: Iterable[nn.Module],
    policy: Policy,
    is_ours: Callable[[Optimizer], bool],
    stepped: Callable[[], Iterable[Tensor]],
) -> None:
    """Note the parameters of initialised models; from the first on, every other optimizer is checked before its steps.

    Args:
        models: As they are now, with their casts.
        policy: Their configuration.
        is_ours: Whether an optimizer was handed to ``amp.initialize``.
        stepped: The weights that those optimizers step which were.
    """
    global _models, _installed
    for model in models:
        _models += 1
        _alive.add(model)
        for parameter in model.parameters():
            _policies[parameter] = policy
    if not _installed and _models:
        _installed = True

        def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not is_ours(optimizer):
                _check_step(optimizer, stepped)

        register_optimizer_step_pre_hook(mark_harmless(check))


def is_known(parameter: Tensor) -> bool:
    """Whether a parameter belongs to a model that was initialised."""
    return parameter in _policies


def models_of(optimizers: Iterable[Optimizer]) -> list[nn.Module]:
    """The initialised models whose parameters these optimizers hold."""
    held = set(map(id, parameters_of(*optimizers)))
    return [model for model in _alive if any(id(parameter) in held for parameter in model.parameters())]


def check_no_masters(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that were made from the masters of another one.

    Raises:
        AmpAttachError: Names the optimizer.
    """
    masters = {id(master) for master in fp32_values.masters()}
    for optimizer in optimizers if masters else ():
        if masters.intersection(map(id, parameters_of(optimizer))):
            raise AmpAttachError(
                f'{type(optimizer).__name__} was made from FP32 masters (amp.master_params of another optimizer), at which no '
                f'gradients arrive: make it from model.parameters(), and amp.initialize([], optimizer) finds the masters.'
            )


def policies_of(optimizers: Iterable[Optimizer]) -> list[Policy]:
    """The different configurations of the models whose parameters these optimizers hold, in their order."""
    found: dict[tuple[Any, ...], Policy] = {}
    for parameter in parameters_of(*optimizers):
        policy = _policies.get(parameter)
        if policy is not None:
            types = (policy.cast_model_type, policy.autocast_dtype, policy.master_weights)
            found.setdefault((policy.opt_level, *types), policy)
    return list(found.values())


def _check_step(optimizer: Optimizer, stepped: Callable[[], Iterable[Tensor]]) -> None:
    """Check an optimizer that was not initialised and is about to step; again only where parameters or models were added."""
    parameters = parameters_of(optimizer)
    count = len(parameters), _models
    if _seen.get(optimizer) == count:
        return
    name = type(optimizer).__name__
    scaled: dict[int, Policy] = {}
    for parameter in parameters:
        if fp32_values.master_tensor(parameter) is not None:
            raise AmpUsageError(
                f'{name}.step() of an optimizer that was not initialised, on 16-bit weights that have FP32 masters, with '
                f'gradients that carry a loss scale: hand it over, by amp.initialize([], optimizer), before its first '
                f'step; it then steps the masters, which stay what they are.'
            )
        policy = _policies.get(parameter)
        if policy is not None and policy.verbosity >= 1 and _is_scaled(policy):
            scaled[id(parameter)] = policy
    _seen[optimizer] = count
    # gradients of what initialised optimizers step are in order; an optimizer around another one shares its parameters
    for weight in stepped() if scaled else ():
        scaled.pop(id(weight), None)
    if scaled:
        level = next(iter(scaled.values())).opt_level
        logger.warning(
            f'amp: {name}, which was not initialised, steps parameters of a model at {level}: gradients that '
            f'amp.scale_loss brings to them still carry the loss scale, and an overflow does not skip its steps. Hand it '
            f'over: amp.initialize([], optimizer).'
        )


def _is_scaled(policy: Policy) -> bool:
    scale = policy.loss_scale
    return scale.enabled and (scale.dynamic or scale.init_scale != 1.0)
