"""Questions about one module: its own tensors, its device, whether it is a loss or a BatchNorm."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..torch_internals import BatchNorm, Loss


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of the module itself, by name; absent ones left out."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def module_device(module: nn.Module) -> torch.device:
    """The device of the first parameter or buffer; the CPU for a module without any."""
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        return tensor.device
    return torch.device('cpu')


def is_loss(module: nn.Module) -> bool:
    """Whether ``module`` is a loss, by its class or by its name."""
    return isinstance(module, Loss) or type(module).__name__.endswith('Loss')


def is_batchnorm(module: nn.Module) -> bool:
    """Whether ``module`` normalises over batches."""
    # mmcv's SyncBatchNorm is no subclass of torch's
    return isinstance(module, BatchNorm) or type(module).__name__ == 'SyncBatchNorm'
