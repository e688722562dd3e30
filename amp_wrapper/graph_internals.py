"""The private names of torch that tell about a graph of ``torch.compile`` while it is made.

As in :mod:`amp_wrapper.compiler_internals`, nothing here loads ``torch._dynamo`` before something is compiled.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

# what writes to its first argument: x[...] = y, x += y
_IN_PLACE = 'add sub mul truediv floordiv mod pow and or xor matmul lshift rshift'
_WRITING = frozenset(['setitem', *('i' + name for name in _IN_PLACE.split(' '))])


def _storage(value: Any) -> int | None:
    """What tells the storage of a tensor from others; None of what has none."""
    return value.untyped_storage()._cdata if isinstance(value, Tensor) and value.layout is torch.strided else None


def _traced_nodes() -> list[Any]:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return list(InstructionTranslator.current_tx().output.graph.nodes)


def _written_by(node: Any) -> set[int | None]:
    """The storages that a node writes to, by what it calls."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, '__name__', '')
    written = [node.kwargs.get('out')]
    if (name.endswith('_') and not name.endswith('__')) or name in _WRITING or node.kwargs.get('inplace'):
        written.append(node.args[:1])
    targets: list[Any] = []
    torch.fx.node.map_arg(written, targets.append)
    return {_storage(target.meta.get('example_value')) for target in targets}


_COPY = 'amp_wrapper_copy'
_numbers = itertools.count()


def mark_last_tensor() -> int:
    """Give the last tensor of the graph that is being traced a number. In every version since 2.1."""
    number = next(_numbers)
    node = next(node for node in reversed(_traced_nodes()) if isinstance(node.meta.get('example_value'), Tensor))
    node.meta[_COPY] = number
    return number


def was_written(number: int) -> bool:
    """Whether the graph that is being traced has written to the tensor with a number of :func:`mark_last_tensor`."""
    nodes = _traced_nodes()
    for place, node in enumerate(nodes):
        if node.meta.get(_COPY) == number:
            made = node.meta['example_value']
            if not made.is_inference() and made._version > 0:
                return True
            # lists, what is detached, and tensors of inference mode do not count
            return any(_storage(made) in _written_by(each) for each in nodes[place + 1 :])
    # not found in the graph of a part of it, such as the forward of an autograd Function
    return False
