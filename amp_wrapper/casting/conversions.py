"""What happens when a model that is attached is converted: ``half()``, ``float()``, ``to(dtype)`` and their like.

They all go through ``nn.Module._apply``, for which torch has no hook: it is wrapped once, when the first model is attached, and
hands on whatever concerns no attached model. A conversion would turn the weights without their masters, or the parts that have
to stay FP32, so it is refused before anything moves. Moves to a device go on, and masters follow.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import AmpUsageError
from ..policy.nested import CASTABLE
from ..policy.policy import dtype_name
from . import fp32_values as twins

# modules of attached models -> the level
_guarded: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_installed = False


class _UnderWay(threading.local):
    """Whether this thread converts a model, whose children come by again."""

    inside = False


_under_way = _UnderWay()


def guard(modules: Iterable[nn.Module], level: str) -> None:
    """Refuse conversions of these modules from now on.

    Args:
        modules: All of an attached model.
        level: For the message.
    """
    global _installed
    if not _installed:
        _installed = True
        nn.Module._apply = _wrapped(nn.Module._apply)  # type: ignore[method-assign]
    for module in modules:
        _guarded[module] = level


def release(modules: Iterable[nn.Module]) -> None:
    """The counterpart of :func:`guard`."""
    for module in modules:
        _guarded.pop(module, None)


def _wrapped(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    @functools.wraps(apply)
    def guarded_apply(self: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        if not _guarded or _under_way.inside:
            return apply(self, fn, *args, **kwargs)
        found = [module for module in self.modules() if module in _guarded]
        if not found:
            return apply(self, fn, *args, **kwargs)
        _check(found, fn)
        # children are converted by the same function: what it does to them is known
        _under_way.inside = True
        try:
            result = apply(self, fn, *args, **kwargs)
        finally:
            _under_way.inside = False
        for module in found:
            for weight in module.parameters(recurse=False):
                twins.follow_device(weight)
        return result

    return guarded_apply


def _check(modules: Iterable[nn.Module], fn: Callable[[Tensor], Tensor]) -> None:
    """What ``fn`` makes of an empty tensor of each kind tells what it would make of the model."""
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
                # it says itself what it minds
                return
            if isinstance(made, Tensor) and made.dtype is not tensor.dtype:
                raise AmpUsageError(
                    f'{type(module).__name__} is part of a model that mixed precision is attached to, at '
                    f'{_guarded[module]}: half(), float(), bfloat16(), double(), type() and to(dtype) would turn its '
                    f'{dtype_name(tensor.dtype)} tensors into {dtype_name(made.dtype)} behind the optimizer, its masters and '
                    f'the casts. The level decides the types. For a model of another type load model.state_dict(), whose '
                    f'values are FP32, into a new one; with AmpOptimWrapper, detach() gives the FP32 model back. Moves to a '
                    f'device and memory formats go on.'
                )
