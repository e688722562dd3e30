"""Keeps the gradients of FP32 shards in the 16-bit type in which FSDP2 has averaged them: half the memory, the same numbers."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...compiler_internals import untraced
from ...distributed_internals import is_fully_sharded, parameters_of_group, shard_groups, types_of_group
from ...policy.nested import HALF_TYPES, map_tensors

#: Whether a gradient may have another type than its parameter. torch 2.13 has ``Tensor.grad_dtype``, torch 2.9 has not.
CAN_DIFFER = hasattr(Tensor, 'grad_dtype')


class ShardGradients:
    """The gradients of one optimizer's shards, which FSDP2 gives in the type of the shards.

    The first backward pass after a step leaves 16-bit gradients. Before anything adds to them, they become FP32 again, for
    FSDP2 and autograd add in place: a further pass, also one that this package does not know of, or a loss that uses the
    sharded parameters themselves, such as a penalty on their size.

    Args:
        models: Sharded as far as they will be.
        stepped: The parameters, by id, of an optimizer that takes gradients of another type.
    """

    def __init__(self, models: Iterable[nn.Module], stepped: Container[int]) -> None:
        self._parameters: list[nn.Parameter] = []
        self._handles: list[RemovableHandle] = []
        # a backward pass is under way that was announced, and is the first since the gradients were cleared
        self._is_known = self._is_first = False
        # those of this pass that autograd itself has brought a gradient to, by id
        self._direct: set[int] = set()
        for model in models if CAN_DIFFER else ():
            found = self._watch_parameters(model, stepped)
            for module in filter(is_fully_sharded, model.modules()) if found else ():
                self._handles.append(module.register_forward_hook(functools.partial(_watch_outputs, ref(self))))

    def _watch_parameters(self, model: nn.Module, stepped: Container[int]) -> Sequence[nn.Parameter]:
        before = len(self._parameters)
        for group in shard_groups([model]):
            _, averaged_in = types_of_group(group)
            if averaged_in is None or averaged_in not in HALF_TYPES:
                continue
            for parameter in parameters_of_group(group):
                on_cpu = parameter.device.type == 'cpu' != parameter.device_mesh.device_type  # type: ignore[attr-defined]
                # copies to the CPU may be under way when a hook looks
                if id(parameter) not in stepped or on_cpu or not parameter.requires_grad:
                    continue
                if parameter.dtype is torch.float32:
                    self._watch(parameter, averaged_in)
        return self._parameters[before:]

    def _watch(self, parameter: nn.Parameter, averaged_in: torch.dtype) -> None:
        # any type may be assigned
        parameter.grad_dtype = None
        arrived = functools.partial(_arrived, ref(self), averaged_in)
        comes = functools.partial(_comes, ref(self), ref(parameter))
        self._handles.append(parameter.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call]
        self._handles.append(parameter.register_hook(comes))  # type: ignore[no-untyped-call]
        self._parameters.append(parameter)

    def begin(self, is_own: bool = True) -> None:
        """A backward pass is about to begin.

        Args:
            is_own: Whether all of its gradients are meant for this optimizer.
        """
        self._direct.clear()
        self._is_known, self._is_first = True, not self.widen() and is_own

    def widen(self) -> bool:
        """Make gradients FP32 that are there. Returns whether any are."""
        waiting = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        for parameter, gradient in waiting:
            if gradient.dtype is not parameter.dtype:
                parameter.grad = gradient.to(parameter.dtype)
        return bool(waiting)

    def end(self) -> None:
        """The backward pass is over."""
        self._is_known = self._is_first = False

    def remove(self) -> None:
        """Gradients are of the parameters' type from now on."""
        self.end()
        self.widen()
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters:
            parameter.grad_dtype = parameter.dtype
        self._handles, self._parameters = [], []

    def narrow(self, parameter: Tensor, dtype: torch.dtype) -> None:
        """A gradient has arrived: by FSDP2, or by autograd."""
        if self._is_first and parameter.grad is not None and id(parameter) not in self._direct:
            parameter.grad = parameter.grad.to(dtype)

    def expect(self, parameter: Tensor) -> None:
        """Autograd is about to add a gradient of the sharded parameter itself."""
        self._direct.add(id(parameter))
        if parameter.grad is not None and parameter.grad.dtype is not parameter.dtype:
            parameter.grad = parameter.grad.to(parameter.dtype)

    def starts(self) -> None:
        """A backward pass comes through a module; perhaps nobody has announced it."""
        if not self._is_known:
            self.widen()


def _arrived(gradients: ReferenceType[ShardGradients], dtype: torch.dtype, parameter: Tensor) -> None:
    found = gradients()
    if found is not None:
        found.narrow(parameter, dtype)


def _comes(gradients: ReferenceType[ShardGradients], weight: ReferenceType[nn.Parameter], gradient: Tensor) -> None:
    found, parameter = gradients(), weight()
    if found is not None and parameter is not None:
        found.expect(parameter)


def _starts(gradients: ReferenceType[ShardGradients], gradient: Tensor) -> None:
    found = gradients()
    if found is not None:
        found.starts()


@untraced
def _watch_outputs(gradients: ReferenceType[ShardGradients], module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook: the backward pass begins at what a module gives."""
    if not torch.is_grad_enabled():
        return

    def watch(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(functools.partial(_starts, gradients))  # type: ignore[no-untyped-call]
        return tensor

    map_tensors(watch, output)
