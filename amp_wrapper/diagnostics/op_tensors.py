"""What the trace of infinities asks of the tensors that an op is given and gives. Most of it reads the device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .recorder import tensors_of

#: Logarithms.
LOGS = ('log', 'log2', 'log10', 'log1p')
#: What gives NaN where infinities come in.
_OF_INFINITIES = {
    'mul': '0 times infinity',
    'div': 'infinity divided by infinity',
    '_softmax': 'a softmax of nothing but infinities',
    '_log_softmax': 'a softmax of nothing but infinities',
    **dict.fromkeys(('add', 'sub', 'rsub', 'sum', 'mean', 'cumsum'), 'infinity minus infinity'),
}


def elements(shape: Sequence[int]) -> int:
    """How many a tensor of this shape has, and 1 for an empty one."""
    total = 1
    for size in shape:
        total *= size
    return max(total, 1)


def is_bad(tensor: Tensor) -> bool:
    """Whether it has infinities or NaN. Syncs."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return is_number and tensor.layout is torch.strided and not bool(tensor.isfinite().all())


def nonfinite(tensor: Tensor) -> int:
    """How many infinities and NaN it has. Syncs."""
    return int((~tensor.isfinite()).sum())


def is_measured(tensor: Tensor) -> bool:
    """Whether its ranges can be told."""
    return tensor.is_floating_point() and tensor.layout is torch.strided and tensor.numel() > 0


def is_part(tensor: Tensor) -> bool:
    """Whether its memory is larger than it: what stands beside it stays."""
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def numbers(value: Any) -> list[Tensor]:
    """The floating and complex tensors in nested containers."""
    return [tensor for tensor in tensors_of(value) if tensor.is_floating_point() or tensor.is_complex()]


def memory_of(tensor: Tensor) -> int:
    """The address of its storage, which views share; the id of a tensor without one."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except Exception:
        # sparse tensors, and those of subclasses, have no storage
        return id(tensor)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def reason_of(op: str, given: Sequence[Any], has_nan: bool, has_infinities: bool) -> str:
    """What was done that gives no number, whatever the type has room for; '' where that is not known. Syncs."""
    if any(isinstance(each, float) and not math.isfinite(each) for each in given):
        return 'a number that is not finite'
    if has_infinities:
        return _OF_INFINITIES.get(op, '') if has_nan else ''
    if op in LOGS:
        return 'the logarithm of a negative number' if has_nan else 'the logarithm of zero'
    if op in ('sqrt', 'rsqrt', 'pow') and has_nan:
        return 'a root of a negative number'
    place = {'div': 1, 'remainder': 1, 'fmod': 1, 'reciprocal': 0, 'rsqrt': 0, 'pow': 0}.get(op, len(given))
    if place < len(given) and bool((torch.as_tensor(given[place]) == 0).any()):
        return 'division of zero by zero' if has_nan else 'division by zero'
    return ''
