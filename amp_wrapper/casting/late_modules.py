"""What happens when a module joins a model that is attached already.

A module with weights would stay out of the cast, the masters and the optimizer: an error before the change. A loss gets
the hooks that it would have got.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import AmpUsageError
from ..policy.nested import CASTABLE
from .cast_hooks import CastInputs, EnterFp32, has_hook, is_loss, run_in_fp32

# modules of attached models -> whether they are cast: what is put into one of them later finds no hooks of ours
_watched: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
_guard: Any = None


def watch(modules: Iterable[nn.Module], casts: bool) -> None:
    """Look after modules of an attached model.

    Args:
        modules: All of them.
        casts: Whether the model is cast; then modules with weights may not join it.
    """
    global _guard
    if _guard is None:
        _guard = nn.modules.module.register_module_module_registration_hook(_check_new_module)
    for module in modules:
        _watched[module] = casts


def unwatch(modules: Iterable[nn.Module]) -> None:
    """The counterpart of :func:`watch`."""
    for module in modules:
        _watched.pop(module, None)


def _check_new_module(parent: nn.Module, name: str, new: nn.Module | None) -> None:
    """Called by torch before a module becomes a child of another."""
    if parent not in _watched or new is None or new in _watched:
        return
    casts = _watched[parent]
    fresh = [module for module in new.modules() if module not in _watched]
    losses = [module for module in fresh if is_loss(module)]
    if casts:
        # a container of modules that are here already, or a converted layer with the same tensors, is no news
        known = {id(t) for module in list(_watched) for _, t in own_tensors(module)}
        known |= {id(t) for loss in losses for t in (*loss.parameters(), *loss.buffers())}
        foreign = [
            key
            for key, tensor in (*new.named_parameters(), *new.named_buffers())
            if tensor.dtype in CASTABLE and id(tensor) not in known
        ]
        if foreign:
            raise AmpUsageError(
                f'{type(parent).__name__}.{name} = {type(new).__name__}: the model was cast already, and a module that '
                f'comes later ({some(foreign)}) would stay out of the cast, the masters and the optimizer. Change the '
                f'model before amp.initialize(). With a wrapper, call optim_wrapper.detach(), change the model, give its '
                f'parameters to the optimizer, and attach again.'
            )
    for loss in losses:
        # recipes switch losses in the middle of a training: the new one runs in FP32 like the old one
        if casts and not has_hook(loss, CastInputs):
            loss.register_forward_pre_hook(CastInputs(torch.float32), with_kwargs=True)
        elif not casts and not has_hook(loss, EnterFp32):
            run_in_fp32(loss, gives_back=False)
    watch(fresh, casts)


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of the module itself, by name; absent ones left out."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield name, buffer


def some(names: Sequence[str]) -> str:
    """The first few of many names, for a message."""
    shown = ', '.join(names[:5])
    return f'{shown} and {len(names) - 5} more' if len(names) > 5 else shown
