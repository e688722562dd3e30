"""Weights that ``torch.nn.utils.weight_norm`` and ``spectral_norm`` compute anew before each forward, by a hook of the module.

What they are computed from stays in FP32, and so does the computation; the module gets the result in its own type. Weights
that :mod:`torch.nn.utils.parametrize` computes belong to a module of their own, which the FP32 registry names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..policy.nested import CASTABLE
from .cast_hooks import AmpHook

_SOURCES = {WeightNorm: ('_g', '_v'), SpectralNorm: ('_orig', '_u', '_v')}


def names(module: nn.Module) -> list[str]:
    """The attributes of ``module`` that hooks of torch compute."""
    return [hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, (WeightNorm, SpectralNorm))]


def sources(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers that they are computed from."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, (WeightNorm, SpectralNorm)):
            for ending in _SOURCES[WeightNorm if isinstance(hook, WeightNorm) else SpectralNorm]:
                yield getattr(module, hook.name + ending)


class CastComputed(AmpHook):
    """Forward pre-hook behind those of torch: what they computed becomes ``dtype``; differentiable.

    Args:
        names: The attributes.
        dtype: The type that the module computes in.
    """

    def __init__(self, names: list[str], dtype: torch.dtype) -> None:
        self.names = names
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any) -> None:
        for name in self.names:
            value = getattr(module, name, None)
            # a parameter again, once the normalisation is removed
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.dtype in CASTABLE:
                setattr(module, name, value.to(self.dtype))
