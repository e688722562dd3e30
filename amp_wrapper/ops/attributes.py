"""Walks through lists of tensors: cheap enough to be made several times in a step, for hundreds of tensors."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

_SHAPE, _DTYPE, _DEVICE = map(operator.attrgetter, ('shape', 'dtype', 'device'))
#: What each of some dicts held under a name.
Column = tuple[Sequence[Mapping[str, Any]], str, Sequence[Any]]


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects in the same order. ``==`` would compare the tensors' values, and sync."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def unchanged(pairs: Iterable[tuple[Sequence[Any], Sequence[Any]]], columns: Iterable[Column] = ()) -> bool:
    """Whether lists hold the same objects, and dicts still have them.

    Args:
        pairs: Lists as they were, and as they are.
        columns: Dicts, a name, and what they had under it.
    """
    held = ((list(map(operator.itemgetter(name), states)), values) for states, name, values in columns)
    try:
        return all(same(one, other) for one, other in chain(pairs, held))
    except KeyError:
        return False


def fingerprints(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], are_own: bool) -> tuple[Any, ...]:
    """Shape, dtype, layout and device of each tensor, and which are missing, to be compared with ``==``.

    Args:
        tensors: Tensors.
        gradients: One for each, or None.
        are_own: Whether they are the ``.grad`` of each. Only half of it is taken: torch has seen to it
            that both have one shape, one dtype and one device.
    """
    layouts = [None if gradient is None else gradient.layout for gradient in gradients]
    there = [gradient for gradient in gradients if gradient is not None]
    if are_own:
        # numbers of devices are compared in half the time
        return _values(tensors, _SHAPE, Tensor.get_device), _values(there, _DTYPE), layouts
    return *(_values(each, _SHAPE, _DTYPE, _DEVICE) for each in (tensors, there)), layouts


def _values(tensors: Sequence[Tensor], *attributes: Callable[[Any], Any]) -> list[list[Any]]:
    # one attribute of all in turn: all of one tensor in turn take twice as long
    return [list(map(attribute, tensors)) for attribute in attributes]


def versions(tensors: Sequence[Tensor | None]) -> bytes:
    """torch's version counter of each tensor, -1 for None: eight bytes each, to be compared, or read by :func:`numbers_of`."""
    return array('q', [-1 if tensor is None else tensor._version for tensor in tensors]).tobytes()


def addresses(tensors: Sequence[Tensor | None]) -> bytes:
    """Where the memory of each tensor begins, as :func:`versions` gives numbers."""
    return array('q', [-1 if tensor is None else tensor.data_ptr() for tensor in tensors]).tobytes()


def numbers_of(values: bytes) -> Sequence[int]:
    """The numbers of :func:`versions` and :func:`addresses`."""
    return memoryview(values).cast('q')


def gradients(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """``.grad`` of each tensor."""
    return [tensor.grad for tensor in tensors]


def set_gradients(tensors: Sequence[Tensor], found: Sequence[Tensor | None] | None) -> None:
    """Set ``.grad`` of each tensor.

    Args:
        tensors: Leaves of the graph.
        found: One of its shape, dtype and device for each, or None; None in place of all clears all.

    Raises:
        ValueError: Another number of gradients; nothing is set then.
    """
    if found is not None and len(found) != len(tensors):
        raise ValueError(f'{len(found)} gradients for {len(tensors)} tensors.')
    for tensor, gradient in zip(tensors, repeat(None) if found is None else found):
        tensor.grad = gradient


def any_requires_grad(tensors: Sequence[Tensor | None]) -> bool:
    """Whether one of them can be differentiated."""
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def float32_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A dense float32 tensor like each, whose memory nobody has written to."""
    return [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
