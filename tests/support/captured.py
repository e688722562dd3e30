"""What a CUDA graph does, on any device: the operations of one step are noted, and run again on the same memory.

No Python of the package runs in a replay. So whatever a step decides on the host, or reads from it, stays as it was when the
step was captured; and whatever it allocates has the same address again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from amp_wrapper import ops
from amp_wrapper.engine.host_read import LateRead
from amp_wrapper.engine.overflow import Overflow
from amp_wrapper.ops.schemas import SCHEMAS


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _refused(*_: Any) -> Any:
    raise AssertionError('the host reads the device, which no graph can')


class Graph(TorchDispatchMode):
    """The operations of a block, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []
        self._depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, 'the host reads the device, which no graph can'
        return self.note(func, args, kwargs or {})

    def note(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a call, and note it, unless another one makes it."""
        self._depth += 1
        try:
            result = function(*args, **kwargs)
        finally:
            self._depth -= 1
        if not self._depth:
            given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
            made = _tensors(result)
            # views, and what was written in place, are there when it runs again
            fresh = [t if t.untyped_storage().data_ptr() not in given else None for t in made]
            self._calls.append((function, args, kwargs, fresh))  # type: ignore[arg-type]
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """All of them again, on the same memory. A graph writes to tensors, and does not move their version counters."""
        known = {id(t): t for function, args, kwargs, fresh in self._calls for t in _tensors((args, kwargs, fresh))}
        with ExitStack() as stack:
            for tensor in known.values():
                stack.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
            for function, args, kwargs, fresh in self._calls:
                for old, new in zip(fresh, _tensors(function(*args, **kwargs))):
                    if old is not None:
                        old.copy_(new)


@contextmanager
def captured() -> Iterator[Graph]:
    """Note the operations inside, with what torch.cuda.graph tells the package: that flags have to be lowered in the graph."""
    graph = Graph()
    names = [name for name in SCHEMAS if hasattr(ops, name)]
    before = {name: getattr(ops, name) for name in names}
    new, wait, is_there = Overflow.new, LateRead.wait, LateRead.is_there

    def noted(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: graph.note(before[name], args, kwargs)

    try:
        for name in names:
            setattr(ops, name, noted(name))
        Overflow.new = lambda self: torch.zeros((), dtype=torch.float32, device=self._device)  # type: ignore[method-assign]
        # on a CPU the numbers are there at once, and nothing shows that they are read
        LateRead.wait = _refused  # type: ignore[method-assign]
        LateRead.is_there = property(lambda self: False)  # type: ignore[assignment, method-assign]
        with graph:
            yield graph
    finally:
        Overflow.new, LateRead.wait, LateRead.is_there = new, wait, is_there  # type: ignore[method-assign]
        for name, function in before.items():
            setattr(ops, name, function)
