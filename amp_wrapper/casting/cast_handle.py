"""Takes a cast back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import cast_module, fp32_values, state_dicts
from .modules import own_tensors


class CastHandle:
    """Takes a cast back. Made by :meth:`CastPlan.apply`."""

    def __init__(self, roots: list[nn.Module], parameters: dict[str, nn.Parameter], buffers: list[Tensor]) -> None:
        self.roots = roots
        self.parameters = parameters
        self._buffers = buffers

    @property
    def casts(self) -> bool:
        """Whether any parameter changed its type."""
        return bool(self.parameters)

    def remove(self) -> None:
        """Take the casts off, and give the tensors FP32 values: those of their masters where there are any."""
        for root in self.roots:
            for module in root.modules():
                cast_module.take_off(module)
        for tensor in (*self.parameters.values(), *self._buffers):
            exact = fp32_values.fp32_value(tensor)
            if exact is None:
                cast_in_place(tensor, torch.float32)
            else:
                grad, tensor.grad = tensor.grad, None
                tensor.data = exact
                tensor.grad = None if grad is None else grad.float()
                fp32_values.unpair(tensor)


def cast_in_place(tensor: Tensor, dtype: torch.dtype) -> None:
    grad, tensor.grad = tensor.grad, None
    # through .data, so that the optimizer, DDP and tied modules keep the very object they hold
    tensor.data = tensor.data.to(dtype)
    tensor.grad = None if grad is None else grad.to(dtype)


def restore_fp32_copy(copied: nn.Module, original: nn.Module) -> bool:
    """Turn a deep copy of a cast model into a plain FP32 one that holds the original's masters.

    Args:
        copied: A deep copy of ``original``; changed in place, its parameters keep their identity.
        original: A model, cast or not.

    Returns:
        Whether there was anything to do.
    """
    was_cast = cast_module.is_cast(copied)
    for module, source in zip(copied.modules(), original.modules()):
        cast_module.take_off(module)
        if cast_module.rule_of(source) is not None:
            for (_, mine), (_, theirs) in zip(own_tensors(module), own_tensors(source)):
                state_dicts.become_fp32(mine, theirs)
    return was_cast
