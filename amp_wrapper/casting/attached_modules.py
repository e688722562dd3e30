"""Watches attached models: conversions to another type are refused, and losses that join later get the hooks of the others.

``half()``, ``float()``, ``to(dtype)`` and their like all go through ``nn.Module._apply``, for which torch has no hook: it is
wrapped once, when the first model is attached, and calls the original for all other models. A conversion would change the
weights without their masters, or the parts that have to stay FP32, so it is refused before anything is changed. Moves to
another device are allowed, and masters are moved with the weights.

Recipes switch losses in the middle of a training. A loss that joins a model that runs in 16-bit gets the hooks that it would
have got.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..autocast import state
from ..errors import AmpUsageError
from ..policy.levels import Policy, dtype_name
from ..policy.nested import CASTABLE
from ..torch_internals import wrap_apply
from . import fp32_values
from .cast_hooks import CastInputs
from .find_hooks import has_hook
from .modules import is_batchnorm, is_loss
from .region_hooks import FP32, region_on, run_in_fp32

logger = logging.getLogger('amp_wrapper')

_attached: WeakKeyDictionary[nn.Module, Policy] = WeakKeyDictionary()
# those among them that joined the model after it was attached: their type is not checked
_late: WeakSet[nn.Module] = WeakSet()
_installed = False


def watch(modules: Iterable[nn.Module], policy: Policy) -> None:
    """Watch the modules of an attached model from now on.

    Args:
        modules: All of them.
        policy: The configuration of the model.
    """
    global _installed
    if not _installed:
        _installed = True
        wrap_apply(_wrapped)
        register_module_module_registration_hook(_treat_new_losses)
    for module in modules:
        _attached[module] = policy


def release(modules: Iterable[nn.Module], roots: Iterable[nn.Module]) -> None:
    """The counterpart of :func:`watch`.

    Args:
        modules: What was watched.
        roots: Models; modules that joined them later are released as well.
    """
    late = [module for root in roots for module in root.modules() if module in _late]
    for module in (*modules, *late):
        _attached.pop(module, None)
        _late.discard(module)


# -- new losses --------------------------------------------------------------------------------------------------------


def _treat_new_losses(parent: nn.Module, name: str, new: nn.Module | None) -> None:
    """Called by torch before a module becomes a child of another."""
    if torch.compiler.is_dynamo_compiling():
        # a wrapper that is made in a graph, and thrown away
        return
    policy = _attached.get(parent)
    if policy is None or not policy.runs_16_bit or new is None or new in _attached:
        return
    trains = any(weight.dtype is torch.float32 and weight.requires_grad for weight in new.parameters())
    if policy.casts_model and policy.verbosity >= 1 and trains and not is_loss(new) and not is_batchnorm(new):
        logger.warning(
            f'amp: {name} ({type(new).__name__}) joins a model at {policy.opt_level} that was initialised before: its weights '
            f'stay FP32. To cast it as the rest, initialise it by itself before it joins: '
            f'layer = amp.initialize(layer, opt_level={policy.opt_level!r}).'
        )
    for module in new.modules():
        if module in _attached:
            continue
        _attached[module] = policy
        _late.add(module)
        if not is_loss(module):
            continue
        if policy.casts_model:
            if not has_hook(module, CastInputs):
                CastInputs(torch.float32).put(module)
        elif region_on(module, FP32) is None:
            run_in_fp32(module, gives_back=False)


def joined_later(module: nn.Module) -> bool:
    """Whether a module became part of a model after mixed precision was attached to that."""
    return module in _late


# -- conversions -------------------------------------------------------------------------------------------------------


def _wrapped(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    @functools.wraps(apply)
    def checked_apply(self: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        if not _attached or state.thread.in_apply:
            return apply(self, fn, *args, **kwargs)
        found = [module for module in self.modules() if module in _attached and module not in _late]
        if not found:
            return apply(self, fn, *args, **kwargs)
        _check(found, fn)
        # children are converted by the same function, which has been checked
        state.thread.in_apply = True
        try:
            result = apply(self, fn, *args, **kwargs)
        finally:
            state.thread.in_apply = False
        for module in found:
            for weight in module.parameters(recurse=False):
                fp32_values.follow_device(weight)
        return result

    return checked_apply


def _check(modules: Iterable[nn.Module], fn: Callable[[Tensor], Tensor]) -> None:
    """Call ``fn`` with an empty tensor of each kind in the model, and refuse it if it changes a floating type."""
    seen: set[tuple[torch.dtype, torch.device]] = set()
    for module in modules:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            kind = (tensor.dtype, tensor.device)
            if tensor.dtype not in CASTABLE or kind in seen:
                continue
            seen.add(kind)
            try:
                with torch.no_grad():
                    made = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            except Exception:
                # the conversion itself raises this error
                return
            if isinstance(made, Tensor) and made.dtype is not tensor.dtype:
                level = _attached[module].opt_level
                raise AmpUsageError(
                    f'{type(module).__name__} is part of a model that mixed precision is attached to, at '
                    f'{level}: half(), float(), bfloat16(), double(), type() and to(dtype) would turn its '
                    f'{dtype_name(tensor.dtype)} tensors into {dtype_name(made.dtype)} behind the optimizer, its masters and '
                    f'the casts. The level decides the types. For a model of another type load model.state_dict(), whose '
                    f'values are FP32, into a new one; with AmpOptimWrapper, detach() gives the FP32 model back. Moves to a '
                    f'device and memory formats go on.'
                )
