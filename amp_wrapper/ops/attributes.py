"""Walks through lists of tensors: cheap enough to be made several times in a step, for hundreds of tensors.

The compiled library makes them in a tenth of the time, wherever all tensors are plain ones; a subclass may have attributes of
its own.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import repeat, starmap
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import loader

_R = TypeVar('_R')

#: What each of some dicts held under a name.
Column = tuple[Sequence[Mapping[str, Any]], str, Sequence[Any]]


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects in the same order. ``==`` of tensors would compare numbers, and read them."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def unchanged(pairs: Iterable[tuple[Sequence[Any], Sequence[Any]]], columns: Iterable[Column] = ()) -> bool:
    """Whether lists hold the same objects, and dicts still have them.

    Args:
        pairs: Lists as they were, and as they are.
        columns: Dicts, a name, and what they had under it.
    """
    compiled = loader.library().module
    if compiled is None:
        held = (([state.get(name) for state in states], values) for states, name, values in columns)
        return all(same(one, other) for one, other in (*pairs, *held))
    # without a frame of Python for each
    return all(starmap(compiled.same, pairs)) and all(starmap(compiled.holds, columns))


def _walk(name: str, in_python: Callable[..., _R], *lists: Any) -> _R:
    compiled = loader.library().module
    if compiled is not None:
        try:
            return getattr(compiled, name)(*lists)  # type: ignore[no-any-return]
        except NotImplementedError:
            pass
    return in_python(*lists)


def fingerprints(*lists: Sequence[Tensor | None]) -> tuple[Hashable, ...]:
    """Shape, dtype, layout and device of each tensor of each list, and which are missing, to be compared with ``==``."""
    return tuple(_walk('fingerprint', _fingerprint, tensors) for tensors in lists)


def _fingerprint(tensors: Sequence[Tensor | None]) -> Hashable:
    return tuple(None if t is None else (t.shape, t.dtype, t.layout, t.device) for t in tensors)


def versions(tensors: Sequence[Tensor | None]) -> bytes:
    """torch's version counter of each tensor, -1 for None: eight bytes each, to be compared, or read by :func:`numbers_of`."""
    return _walk('versions', _versions, tensors)


def _versions(tensors: Sequence[Tensor | None]) -> bytes:
    return array('q', [-1 if tensor is None else tensor._version for tensor in tensors]).tobytes()


def addresses(tensors: Sequence[Tensor]) -> bytes:
    """Where the memory of each tensor begins, as :func:`versions` gives numbers."""
    return _walk('addresses', _addresses, tensors)


def _addresses(tensors: Sequence[Tensor]) -> bytes:
    return array('q', map(Tensor.data_ptr, tensors)).tobytes()


def numbers_of(told: bytes) -> Sequence[int]:
    """The numbers of :func:`versions` and :func:`addresses`."""
    return memoryview(told).cast('q')


def gradients(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """``.grad`` of each tensor."""
    return _walk('gradients', _gradients, tensors)


def _gradients(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    return [tensor.grad for tensor in tensors]


def set_gradients(tensors: Sequence[Tensor], found: Sequence[Tensor | None] | None = None) -> None:
    """Set ``.grad`` of each tensor.

    Args:
        tensors: Leaves of the graph.
        found: One of its shape, dtype and device for each, or None; None clears all of them.
    """
    _walk('set_gradients', _set_gradients, tensors, found)


def _set_gradients(tensors: Sequence[Tensor], found: Sequence[Tensor | None] | None) -> None:
    for tensor, gradient in zip(tensors, repeat(None) if found is None else found):
        tensor.grad = gradient


def any_requires_grad(tensors: Sequence[Tensor | None]) -> bool:
    """Whether one of them can be differentiated."""
    return _walk('any_requires_grad', _any_requires_grad, tensors)


def _any_requires_grad(tensors: Sequence[Tensor | None]) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def float32_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A float32 tensor like each, whose memory nobody has written to."""
    return _walk('float32_like', _float32_like, tensors)


def _float32_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
