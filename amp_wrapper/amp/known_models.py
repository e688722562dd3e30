"""Remembers the parameters of models given to ``amp.initialize``, and checks other optimizers that step them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ..casting import fp32_values
from ..engine import Engine
from ..errors import AmpAttachError, AmpUsageError
from ..policy.levels import Policy
from ..policy.nested import parameters_of
from ..torch_internals import is_traceable_wrapper_subclass

logger = logging.getLogger('amp_wrapper')

# parameter -> the configuration of its model
_policies: MutableMapping[Tensor, Policy] = WeakTensorKeyDictionary()
_alive: WeakSet[nn.Module] = WeakSet()
# optimizers that were checked -> how many parameters they had, and how many were known
_seen: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()
_warned: WeakSet[Optimizer] = WeakSet()
# what they step, and no initialised optimizer does
_foreign: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
# gradients of scaled losses that no block unscales, and their versions when they came
_scaled: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()


def remember(models: Iterable[nn.Module], policy: Policy) -> None:
    """Note the parameters of initialised models.

    Args:
        models: As they are now, with their casts.
        policy: Their configuration.
    """
    for model in models:
        _alive.add(model)
        for parameter in model.parameters():
            _policies[parameter] = policy


@functools.cache
def check_others(is_ours: Callable[[Optimizer], bool], stepped: Callable[[], Iterable[Tensor]]) -> None:
    """From now on, check every optimizer that was not initialised before its steps.

    Args:
        is_ours: Whether an optimizer was handed to ``amp.initialize``.
        stepped: The weights that those optimizers step which were.
    """

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _policies and not is_ours(optimizer):
            _check_step(optimizer, stepped)

    check.sees_no_gradient = True  # type: ignore[attr-defined]
    register_optimizer_step_pre_hook(check)


@contextmanager
def noting_scaled(weights: Iterable[Tensor], beyond: Iterable[Tensor], foreign: bool) -> Iterator[None]:
    """Around a block: note which gradients carry its scale and are not unscaled by it.

    Args:
        weights: Whose gradients ``torch.autograd.grad`` may take, for a script that puts them into ``.grad`` later.
        beyond: Where a loss may leave gradients that no optimizer of the block steps.
        foreign: Whether to look at what other optimizers step as well.
    """
    leaves = [*(_foreign if foreign else ()), *beyond]
    before = [(leaf, leaf.grad, leaf.grad is not None and leaf.grad._version) for leaf in leaves]
    with ExitStack() as hooks:
        for weight in weights:
            if weight.requires_grad:
                hooks.callback(weight.register_hook(_note).remove)  # type: ignore[no-untyped-call]
        yield
    for leaf, grad, version in before:
        if leaf.grad is not None and (leaf.grad is not grad or leaf.grad._version != version):
            _note(leaf.grad)


def _note(gradient: Tensor) -> None:
    _scaled[gradient] = gradient._version


def refuse_scaled(engines: Iterable[Engine]) -> None:
    """Refuse gradients of a scaled loss that no block has unscaled.

    Raises:
        AmpUsageError: A gradient carries its loss scale.
    """
    if _scaled and any(_carries_scale(weight.grad) for engine in engines for weight in engine.weights()):
        raise AmpUsageError(
            'gradients that carry a loss scale lie where they would be taken for unscaled ones. What '
            'torch.autograd.grad(scaled_loss, ...) gives goes into .grad inside of the block, or is divided by '
            'amp.loss_scale(optimizer). Gradients that a loss brings to parameters which no optimizer of its amp.initialize() '
            'call steps are cleared (zero_grad) before these are trained; models that train together belong in one call: '
            'amp.initialize([model0, model1], [optimizer0, optimizer1]).'
        )


def _carries_scale(gradient: Tensor | None) -> bool:
    """Whether a gradient was noted, and nobody has written to it."""
    return bool(_scaled) and gradient is not None and _scaled.get(gradient) == gradient._version


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
    count = len(parameters), len(_policies)
    carrying = [p for p in parameters if _carries_scale(p.grad)] if optimizer not in _warned else []
    heard = [p for p in carrying if p not in _policies or _policies[p].verbosity >= 1]
    scaled = {id(p): 'parameters that a scaled loss reaches' for p in heard}
    if _seen.get(optimizer) == count and not scaled:
        return
    name = type(optimizer).__name__
    for parameter in parameters:
        pair = fp32_values.pair_of(parameter)
        if pair is not None and not pair.is_split:
            raise AmpUsageError(
                f'{name}.step() of an optimizer that was not initialised, on 16-bit weights that have FP32 masters, with '
                f'gradients that carry a loss scale: hand it over, by amp.initialize([], optimizer), before its first '
                f'step; it then steps the masters, which stay what they are.'
            )
        policy = _policies.get(parameter)
        if policy is not None and policy.verbosity >= 1 and _is_scaled(policy):
            scaled[id(parameter)] = f'parameters of a model at {policy.opt_level}'
    _seen[optimizer] = count
    # torch moves a sharded parameter by swapping it, which it does to none that is weakly referenced
    _foreign.update((p, None) for p in parameters if not is_traceable_wrapper_subclass(p))
    # gradients of what initialised optimizers step are in order; an optimizer around another one shares its parameters
    for tensor in (*stepped(), *fp32_values.masters()):
        _foreign.pop(tensor, None)
        scaled.pop(id(tensor), None)
    if scaled and optimizer not in _warned:
        _warned.add(optimizer)
        logger.warning(
            f'amp: {name}, which was not initialised, steps {next(iter(scaled.values()))}: gradients that amp.scale_loss '
            f'brings to them still carry the loss scale, and an overflow does not skip its steps. Hand it over, by '
            f'amp.initialize([], optimizer), and name it: amp.scale_loss(loss, [optimizer0, optimizer1]).'
        )


def _is_scaled(policy: Policy) -> bool:
    scale = policy.loss_scale
    return scale.enabled and (scale.dynamic or scale.init_scale != 1.0)
