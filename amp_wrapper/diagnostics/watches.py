"""Watches which module of a model runs, and what modules are given and give."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..casting.cast_module import Watcher
from ..casting.modules import class_name
from ..policy.nested import MapTensor, map_tensors
from ..shards import local
from ..torch_internals import current_node, graph_task_id

FORWARD, BACKWARD = 'forward', 'backward'
#: Names the module in the ``metadata`` of a node of the graph.
LABEL = 'amp_wrapper.module'


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers, dataclasses, and objects with ``all_items()`` (mmengine's), in their order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    def enter(function: MapTensor, value: Any) -> Any:
        for _, item in value.all_items() if hasattr(type(value), 'all_items') else ():
            map_tensors(function, item, enter)
        return value

    map_tensors(note, value, enter)
    return found


def outputs_of(value: Any) -> list[Tensor]:
    """Return the floating tensors in what a model gave, in their order."""
    return [tensor for tensor in tensors_of(value) if tensor.is_floating_point()]


def numbers(value: Any) -> list[Tensor]:
    """Return the dense floating and complex tensors in nested containers that have elements, and types torch computes in."""
    dense = [t for t in tensors_of(value) if t.layout is torch.strided and not t.is_nested and t.dtype.itemsize > 1]
    return [tensor for tensor in dense if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel()]


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def storage_key(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which its views share; the id of a tensor without memory of its own."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except Exception:
        # sparse tensors and those of subclasses
        return id(tensor)


def is_bad(tensor: Tensor) -> bool:
    """Return whether a tensor has infinities or NaN. Syncs."""
    return not bool((tensor.coalesce().values() if tensor.is_sparse else tensor).isfinite().all())


class Places:
    """Knows which module of a model runs: by its calls, and in a backward pass by labels of the nodes of the graph.

    torch's ``ModuleTracker`` does not know when the backward pass of a module ends whose inputs need no gradients.

    Args:
        model: Left as it was by :meth:`remove`.
        see: Called with the name of a module, the module, its arguments or what it gave, and whether these are arguments. Those
            are told of calls from outside of any other call.
    """

    def __init__(self, model: nn.Module, see: Callable[[str, nn.Module, Any, bool], object] | None = None) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self.stack = ['']
        self._see = see
        self._watcher = Watcher(self._enter, self._leave)
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._watcher.watch(module)

    def remove(self) -> None:
        """Watch no longer."""
        self._watcher.remove()

    def here(self) -> tuple[str, str, str]:
        """Return the phase, the module and, in a backward pass, the node of the graph that run now."""
        # checkpointed segments run again inside of a backward pass, and their modules are called again
        if graph_task_id() == -1 or len(self.stack) > 1:
            return FORWARD, self.stack[-1], ''
        node = current_node()
        return (BACKWARD, '', '') if node is None else (BACKWARD, node.metadata.get(LABEL, ''), node.name())

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # made in the module around this one
        _label((args, kwargs), self.stack[-1])
        if self._see is not None and len(self.stack) == 1:
            self._see(self._names[id(module)], module, (args, kwargs), True)
        self.stack.append(self._names[id(module)])

    def _leave(self, module: nn.Module, output: Any) -> None:
        name = self._names[id(module)]
        # a call that has failed leaves those inside of it open
        while len(self.stack) > 1 and self.stack.pop() != name:
            pass
        _label(output, name)
        if self._see is not None:
            self._see(name, module, output, False)


def _label(tensors: Any, name: str) -> None:
    """Note the module in the nodes of a graph that no module inside of it has made."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors_of(tensors)]
    while waiting:
        here = waiting.pop()
        if here is not None and LABEL not in here.metadata:
            here.metadata[LABEL] = name
            waiting += [following for following, _ in here.next_functions]


class Maximum(NamedTuple):
    """The largest absolute number that a module was given or gave: infinite or NaN where one of the numbers is.

    The module has a name, '' for the model itself, and a class; ``is_input`` is whether a script gave it the number.
    """

    name: str
    kind: str
    is_input: bool
    dtype: torch.dtype
    largest: float


class NonfiniteWatch:
    """Watches what a model is given and the outputs of all its modules for infinities and NaN.

    That is one small reduction for each on the device, which is read by :meth:`first` and :meth:`take` alone.

    Args:
        model: Any module, cast or not, not wrapped. :meth:`remove` ends the watch.
    """

    def __init__(self, model: nn.Module) -> None:
        self._entries: list[tuple[str, str, bool, torch.dtype, Tensor]] = []
        self.places = Places(model, self._see)

    def first(self) -> str | None:
        """Return the earliest place since the last call, such as ``'head.fc (Linear)'``; None where all was finite. Syncs.

        Modules are told in the order in which they end, so the innermost one comes first.
        """
        bad = next((each for each in self.take() if not math.isfinite(each.largest)), None)
        if bad is None:
            return None
        return "the model's input" if bad.is_input else f'{bad.name or "the model"} ({bad.kind})'

    def take(self) -> list[Maximum]:
        """Return all that was seen since the last call, in its order. Syncs."""
        entries, self._entries = self._entries, []
        found = torch.stack([each[-1].to(entries[0][-1].device) for each in entries]).tolist() if entries else []
        return [Maximum(*each[:4], largest) for each, largest in zip(entries, found)]

    def remove(self) -> None:
        """Watch no longer."""
        self.places.remove()

    @torch.no_grad()
    def _see(self, name: str, module: nn.Module, value: Any, is_input: bool) -> None:
        for tensor in numbers(value):
            largest = local([tensor.detach()])[0].abs().amax().float()
            self._entries.append((name, class_name(module), is_input, tensor.dtype, largest))


@contextmanager
def nonfinite_watch(model: nn.Module) -> Iterator[NonfiniteWatch]:
    """Begin a :class:`NonfiniteWatch` that ends with the block, by an exception too.

    Args:
        model: Any module.

    Examples:
        >>> import torch
        >>> from amp_wrapper import nonfinite_watch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> with nonfinite_watch(model) as watch:
        ...     _ = model(torch.tensor([[1.0, float('nan')]]))
        ...     print(watch.first())
        the model's input
    """
    watch = NonfiniteWatch(model)
    try:
        yield watch
    finally:
        watch.remove()
