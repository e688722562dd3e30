"""The private names of torch that tell about a graph of ``torch.compile``: while it is made, and when it runs as it is.

As in :mod:`amp_wrapper.compiler_internals`, nothing here loads ``torch._dynamo`` before something is compiled.
"""

from __future__ import annotations

import dataclasses
from types import FrameType
from typing import Any

import torch
from torch import Tensor

# where torch.fx runs a graph: code that it has made, and its interpreter
_GRAPH_FILES = ('torch/fx/_lazy_graph_module.py', 'torch/fx/graph_module.py', 'torch/fx/interpreter.py')


def runs_a_graph(frame: FrameType | None) -> bool:
    """Whether a frame, or one that it was called from, runs a graph of ``torch.fx``, as the backend 'eager' does.

    ``torch.fx`` gives the code that it makes a file of this name. In every version since 1.8.
    """
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith('<eval_with_key>') or name.endswith(_GRAPH_FILES):
            return True
        frame = frame.f_back
    return False


# what writes to its first argument: x[...] = y, x += y
_WRITING = frozenset(
    (
        'setitem',
        'iadd',
        'isub',
        'imul',
        'itruediv',
        'ifloordiv',
        'imod',
        'ipow',
        'iand',
        'ior',
        'ixor',
        'imatmul',
        'ilshift',
    )
)


@dataclasses.dataclass(frozen=True)
class TracedTensors:
    """The tensors of a graph that is being traced, as they are at one moment; they have storages, and no memory.

    Attributes:
        size: The number of nodes of the graph.
        versions: Each tensor that counts what is written to it, and its count.
        storages: Of all of them.
    """

    size: int
    versions: list[tuple[Tensor, int]]
    storages: set[int]


def _traced_nodes() -> list[Any]:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return list(InstructionTranslator.current_tx().output.graph.nodes)


def traced_tensors() -> TracedTensors:
    """The tensors of the graph that is being traced. In every version since 2.1."""
    nodes = _traced_nodes()
    tensors = [value for node in nodes if isinstance(value := node.meta.get('example_value'), Tensor)]
    versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
    return TracedTensors(len(nodes), versions, {tensor.untyped_storage()._cdata for tensor in tensors})


def were_written(before: TracedTensors) -> bool:
    """Whether the graph that is being traced has written to one of its tensors since then, by itself or by a view of it.

    Args:
        before: From :func:`traced_tensors`.
    """
    if any(tensor._version != version for tensor, version in before.versions):
        return True
    # lists, what is detached, and tensors of inference mode do not count
    for node in _traced_nodes()[before.size :]:
        name = node.target if isinstance(node.target, str) else getattr(node.target, '__name__', '')
        written = [node.kwargs.get('out')]
        if (name.endswith('_') and not name.endswith('__')) or name in _WRITING or node.kwargs.get('inplace'):
            written.append(node.args[:1])
        targets: list[Any] = []
        torch.fx.node.map_arg(written, targets.append)
        values = [target.meta.get('example_value') for target in targets]
        if any(isinstance(value, Tensor) and value.untyped_storage()._cdata in before.storages for value in values):
            return True
    return False


def tracing_context() -> object | None:
    """What stands for the graph that is made on this thread, by any part of ``torch.compile``. In every version since 2.0."""
    return torch._guards.TracingContext.try_get()
