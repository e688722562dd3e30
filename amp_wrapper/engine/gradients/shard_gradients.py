"""Keeps the gradients of FP32 shards in the 16-bit type in which FSDP2 has averaged them: half the memory, the same numbers."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...fsdp_internals import ShardGroup
from ...policy.nested import HALF_TYPES

#: Whether a gradient may have another type than its parameter. torch 2.13 has ``Tensor.grad_dtype``, torch 2.6 has not.
CAN_DIFFER = hasattr(Tensor, 'grad_dtype')


class ShardGradients:
    """The gradients of one optimizer's shards, which FSDP2 gives in the type of the shards.

    The first backward pass after a step leaves 16-bit gradients. Before a further one adds to them, they become FP32 again, and
    so does the sum: FSDP2 adds in place.

    Args:
        groups: Of the model.
        stepped: The parameters, by id, of an optimizer that takes gradients of another type.
    """

    def __init__(self, groups: Iterable[ShardGroup], stepped: Container[int]) -> None:
        self._parameters: list[nn.Parameter] = []
        self._handles: list[RemovableHandle] = []
        self._is_first = False
        for group in groups if CAN_DIFFER else ():
            averaged_in = group.reduce_dtype or group.param_dtype
            if averaged_in not in HALF_TYPES:
                continue
            for parameter in group.parameters:
                if id(parameter) in stepped and parameter.requires_grad and parameter.dtype is torch.float32:
                    # any type may be assigned
                    parameter.grad_dtype = None
                    arrived = functools.partial(self._arrived, averaged_in)
                    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
                    self._handles.append(handle)
                    self._parameters.append(parameter)

    def begin(self, is_own: bool = True) -> None:
        """A backward pass is about to begin.

        Args:
            is_own: Whether all of its gradients are meant for this optimizer.
        """
        self._is_first = not self.widen() and is_own

    def widen(self) -> bool:
        """Make gradients FP32 that are there. Returns whether any are."""
        waiting = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        for parameter, gradient in waiting:
            if gradient.dtype is not parameter.dtype:
                parameter.grad = gradient.to(parameter.dtype)
        return bool(waiting)

    def end(self) -> None:
        """The backward pass is over."""
        self._is_first = False

    def remove(self) -> None:
        """Gradients are of the parameters' type from now on."""
        self.end()
        self.widen()
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters:
            parameter.grad_dtype = parameter.dtype
        self._handles, self._parameters = [], []

    def _arrived(self, dtype: torch.dtype, parameter: Tensor) -> None:
        if self._is_first and parameter.grad is not None:
            parameter.grad = parameter.grad.to(dtype)
