"""Questions about one module: its own tensors, its device, what its weights are computed from, whether it is a loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..torch_internals import BatchNorm, Loss


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of the module itself, by name; absent ones left out."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def module_device(module: nn.Module) -> torch.device:
    """The device of the first parameter or buffer; the CPU for a module without any."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next((tensor.device for tensor in tensors), torch.device('cpu'))


def class_name(module: nn.Module) -> str:
    """The name of the class of ``module``. ``fully_shard`` makes a class of its own of each, ``FSDPLinear`` of ``Linear``."""
    kind = type(module)
    return (kind.__mro__[2] if kind.__mro__[1].__name__ == 'FSDPModule' else kind).__name__


def is_loss(module: nn.Module) -> bool:
    """Whether ``module`` is a loss, by its class or by its name."""
    return isinstance(module, Loss) or class_name(module).endswith('Loss')


def is_table(module: nn.Module) -> bool:
    """Whether ``module`` holds buffers of its own and nothing else: frequencies, positions, constants of a normalisation."""
    own = sum(1 for _ in module.buffers(recurse=False))
    alone = own == sum(1 for _ in module.buffers()) and not any(True for _ in module.parameters())
    # those of torch want buffers in the type of their input
    return own > 0 and alone and not type(module).__module__.startswith('torch.nn.')


def is_batchnorm(module: nn.Module) -> bool:
    """Whether ``module`` normalises over batches."""
    # mmcv's SyncBatchNorm is no subclass of torch's
    return isinstance(module, BatchNorm) or class_name(module) == 'SyncBatchNorm'


def weight_hooks(module: nn.Module) -> list[WeightNorm | SpectralNorm]:
    """The hooks of ``torch.nn.utils.weight_norm`` and ``spectral_norm``, which compute weights anew before each forward.

    Weights that :mod:`torch.nn.utils.parametrize` computes belong to a module of their own, which the FP32 registry names.
    """
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, (WeightNorm, SpectralNorm))]


def weight_sources(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers that such weights are computed from: they stay in FP32, and so does the computation."""
    for hook in weight_hooks(module):
        for ending in ('_g', '_v') if isinstance(hook, WeightNorm) else ('_orig', '_u', '_v'):
            yield getattr(module, hook.name + ending)
