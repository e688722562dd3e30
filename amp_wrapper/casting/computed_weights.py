"""Weights that ``torch.nn.utils.weight_norm`` and ``spectral_norm`` compute anew before each forward, by a hook of the module.

What they are computed from stays in FP32, and so does the computation. Weights that :mod:`torch.nn.utils.parametrize` computes
belong to a module of their own, which the FP32 registry names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..policy.nested import CASTABLE
from ..torch_internals import forward_pre_hooks
from .hooks import AmpHook


def sources_of(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers that weights of a module are computed from."""
    for hook in forward_pre_hooks(module).values():
        if isinstance(hook, (WeightNorm, SpectralNorm)):
            for ending in ('_g', '_v') if isinstance(hook, WeightNorm) else ('_orig', '_u', '_v'):
                yield getattr(module, hook.name + ending)


def cast_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Let what is computed for a module become ``dtype`` from now on; differentiable."""
    hooks = forward_pre_hooks(module).values()
    names = [hook.name for hook in hooks if isinstance(hook, (WeightNorm, SpectralNorm))]
    if names:
        module.register_forward_pre_hook(_CastComputed(names, dtype))


class _CastComputed(AmpHook):
    """Forward pre-hook behind those of torch."""

    def __init__(self, names: list[str], dtype: torch.dtype) -> None:
        self._names, self._dtype = names, dtype

    def __call__(self, module: nn.Module, args: Any) -> None:
        for name in self._names:
            value = getattr(module, name, None)
            # a parameter again, once the normalisation is removed
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.dtype in CASTABLE:
                setattr(module, name, value.to(self._dtype))
