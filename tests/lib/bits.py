"""The one comparison of bits: of tensors, and of whatever holds some."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor, any_nan: bool = False) -> Tensor:
    """The elements as integers of their width, on the CPU.

    Args:
        tensor: Complex numbers become two integers each.
        any_nan: Give all NaN the same bits: which of two NaN a sum has, processors choose differently.
    """
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.contiguous()
    if any_nan and tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def same_bits(left: Tensor, right: Tensor, any_nan: bool = False) -> bool:
    """Whether two tensors are equal in type, shape, device, layout and every bit; NaN too."""

    def form(tensor: Tensor) -> tuple[Any, ...]:
        return tensor.dtype, tensor.shape, tensor.device, tensor.layout

    if form(left) != form(right):
        return False
    if left.is_sparse:
        left, right = left.coalesce(), right.coalesce()
        return same_bits(left.indices(), right.indices()) and same_bits(left.values(), right.values(), any_nan)
    return torch.equal(bits(left, any_nan), bits(right, any_nan))


def differences(left: Any, right: Any, path: str = '', *, ordered: bool = False, any_nan: bool = False) -> list[str]:
    """Where two nested structures differ, a line for each place; tensors, arrays and floats by their bits.

    Args:
        left: Dicts, sequences, dataclasses and plain objects are gone through. A tuple may be a list, and a parameter a tensor.
        right: What it is held against.
        path: The place of both, for the lines.
        ordered: Also the order of keys in dicts, where their types may differ.
        any_nan: One NaN is as good as another.
    """

    def inner(a: Any, b: Any, more: str) -> list[str]:
        return differences(a, b, path + more, ordered=ordered, any_nan=any_nan)

    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return [] if same_bits(left, right, any_nan) else [f'{path}: {_shown(left)} against {_shown(right)}']
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        if ordered and list(left) != list(right):
            return [f'{path}: keys {list(left)} against {list(right)}']
        apart = sorted(map(str, left.keys() ^ right.keys()))
        rows = [f'{path}: keys {apart} on one side'] if apart else []
        return rows + [row for key in left if key in right for row in inner(left[key], right[key], f'[{key!r}]')]
    if isinstance(left, (list, tuple, deque)) and isinstance(right, (list, tuple, deque)):
        if len(left) != len(right):
            return [f'{path}: {len(left)} against {len(right)} items']
        return [row for index, pair in enumerate(zip(left, right)) for row in inner(*pair, f'[{index}]')]
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        equal = left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
        return [] if equal else [f'{path}: {left} against {right}']
    if left is right:
        return []
    if type(left) is type(right) and _has_attributes_alone(left):
        # what is saved of them: mmengine's HistoryBuffer leaves something out
        return inner(left.__reduce_ex__(2)[2], right.__reduce_ex__(2)[2], '.state')
    if isinstance(left, float) and isinstance(right, float):
        same = struct.pack('<d', left) == struct.pack('<d', right) or (any_nan and left != left and right != right)
    else:
        same = type(left) is type(right) and bool(left == right)
    return [] if same else [f'{path}: {left!r} against {right!r}']


def same(left: Any, right: Any, *, ordered: bool = False, any_nan: bool = False) -> bool:
    """Whether two nested structures are equal bit for bit; see :func:`differences`."""
    return not differences(left, right, ordered=ordered, any_nan=any_nan)


def differing(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """The names that only one has, or whose values differ by a bit."""
    return sorted((left.keys() ^ right.keys()) | {k for k in left.keys() & right.keys() if not same(left[k], right[k])})


def _has_attributes_alone(value: Any) -> bool:
    """Whether an object is what its attributes are: a dataclass, or one without an equality of its own."""
    if callable(value) or not getattr(value, '__dict__', None):
        return False
    return dataclasses.is_dataclass(value) or type(value).__eq__ is object.__eq__


def _shown(tensor: Tensor) -> str:
    values = (
        f' {tensor.tolist()}' if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() <= 16 else ''
    )
    return f'{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}{values}'
