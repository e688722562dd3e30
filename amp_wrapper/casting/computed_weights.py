"""Weights that ``torch.nn.utils.weight_norm`` and ``spectral_norm`` compute anew before each forward, by a hook of the module.

What they are computed from stays in FP32, and so does the computation. Weights that :mod:`torch.nn.utils.parametrize` computes
belong to a module of their own, which the FP32 registry names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..policy.nested import CASTABLE
from .rule import Rule, rule_of


def _computing(module: nn.Module) -> list[WeightNorm | SpectralNorm]:
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, (WeightNorm, SpectralNorm))]


def sources_of(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers that weights of a module are computed from."""
    for hook in _computing(module):
        for ending in ('_g', '_v') if isinstance(hook, WeightNorm) else ('_orig', '_u', '_v'):
            yield getattr(module, hook.name + ending)


def cast(module: nn.Module, args: Any) -> None:
    """Let what was computed take the type that a module computes in; differentiable. A hook behind those of torch."""
    rule = rule_of(module) or Rule()
    for hook in _computing(module) if rule.inputs is not None else ():
        value = getattr(module, hook.name, None)
        # a parameter again, once the normalisation is removed
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.dtype in CASTABLE:
            setattr(module, hook.name, value.to(rule.inputs))
