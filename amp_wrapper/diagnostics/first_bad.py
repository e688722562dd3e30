"""Finds the first op of a step that gives infinities or NaN."""

from __future__ import annotations

import dataclasses
import linecache
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..torch_internals import TorchDispatchMode, writes_in_place
from .watches import FORWARD, NonfiniteWatch, named_tensors, numbers, storage_key

#: The worst that is in a tensor: minus infinity alone is what masks have.
FINITE, MASK, INFINITE, NAN = range(4)
#: Ops that write infinities because they are told to; that write over what was there; that write no values yet.
_FILLS = 'full fill masked_fill scalar_tensor new_full full_like where index_put constant_pad_nd'
_WRITES_OVER = 'copy fill zero normal uniform bernoulli random exponential geometric log_normal cauchy'
_EMPTY = 'empty empty_like empty_strided new_empty new_empty_strided resize set'
_TORCH, _OURS = (f'{Path(path).parent}{os.sep}' for path in (torch.__file__, Path(__file__).parent))
_RUNNER = str(Path(__file__).with_name('step.py'))


class Range(NamedTuple):
    """The worst that is in a tensor, and its least and its greatest number."""

    kind: int
    least: float
    greatest: float


def range_of(tensor: Tensor) -> Range:
    """Return the range of a tensor of :func:`numbers`. Syncs."""
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    low, high = map(float, torch.aminmax(tensor))
    return Range(
        NAN if high != high else INFINITE if high == math.inf else MASK if low == -math.inf else FINITE, low, high
    )


@dataclasses.dataclass(eq=False)
class BadOp:
    """An op whose result is worse than all that it was given, or what came in with NaN.

    Attributes:
        op: Such as 'aten.mm', or words for what is no op of torch.
        phase: 'forward' or 'backward'.
        module: The name of the innermost module that it ran in; '' for the model itself.
        node: Of a backward pass: the node of the graph, such as 'MmBackward0'.
        source: 'model/file.py:12 in forward: y = x @ w', of the innermost line outside of torch; '' where there is none.
        kind: The worst in its result.
        counts: How many infinities and NaN are in the result, and how many elements it has.
        dtype: Of the result.
        strength: 0 for infinities that somebody asked for, as masks are; 1 for minus infinity alone, which may be one; 2 else.
        order: How many were found before it.
        origin: 'op', or 'input' or 'weight' for what came in with NaN.
        given: The least and the greatest number that it was given; None where not all were finite.
    """

    op: str
    phase: str
    module: str
    node: str
    source: str
    kind: int
    counts: tuple[int, int]
    dtype: torch.dtype
    strength: int
    order: int
    origin: str = 'op'
    given: tuple[float, float] | None = None


class FirstBad(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the op in which infinities and NaN begin. Syncs around each op, so it is slow.

    The memory of each tensor that is not finite has an origin: the op itself where its result is worse than all it was given,
    else the strongest origin among what it was given.

    Args:
        model: The copy that runs.
        inputs: What it is called with.

    Attributes:
        modules: Watches the numbers that modules give.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = NonfiniteWatch(model)
        self._origins: dict[int, BadOp] = {}
        # what wrote to some memory last: the op, its module and its line
        self._writers: dict[int, tuple[str, str, str]] = {}
        self._given = {storage_key(tensor): ('input', f'input {index}') for index, tensor in enumerate(inputs)}
        self._given |= {storage_key(tensor): ('weight', name) for name, tensor in named_tensors(model)}
        self._found: list[BadOp] = []

    def begin(self, tensors: Sequence[Tensor]) -> BadOp | None:
        """Return the op in which what is wrong with some tensors begins. Syncs."""
        origins = [self._origin_of(t, kind) for t in numbers(tensors) if (kind := range_of(t).kind) != FINITE]
        return min(origins, key=_rank, default=None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, in_place = func.overloadpacket.__name__, writes_in_place(func)
        bare = name.rstrip('_') if in_place else name
        given = numbers((args, {key: value for key, value in kwargs.items() if key != 'out'}))
        # afterwards it may be gone: batch norm writes its statistics, and does not say so
        before = [(tensor, range_of(tensor)) for tensor in given[in_place and bare in _WRITES_OVER.split() :]]
        output = func(*args, **kwargs)
        keys = {storage_key(tensor) for tensor, _ in before}
        for tensor in numbers(output):
            key = storage_key(tensor)
            if key in keys and not in_place:
                # a view
                continue
            kind = FINITE if bare in _EMPTY.split() else range_of(tensor).kind
            if kind != FINITE:
                self._origins[key] = self._judge(name, bare, tensor, kind, before)
            elif tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
                self._origins.pop(key, None)
            self._writers[key] = f'aten.{name}', self.modules.places.here()[1], source_of(frame_outside(_OURS))
        return output

    def _judge(self, name: str, bare: str, tensor: Tensor, kind: int, given: Sequence[tuple[Tensor, Range]]) -> BadOp:
        """Return the origin of a result that is not finite."""
        worst = max((each.kind for _, each in given), default=FINITE)
        # NaN comes from NaN, where there is one
        bad = [(t, each.kind) for t, each in given if each.kind == NAN or (each.kind and (kind != NAN or worst != NAN))]
        found = min((self._origin_of(t, each) for t, each in bad), key=_rank, default=None)
        if found is None or (not found.strength and kind > worst):
            low = min((each.least for _, each in given), default=0.0)
            high = max((each.greatest for _, each in given), default=0.0)
            is_rounded = torch.finfo(tensor.dtype).max < max(-low, high) < math.inf
            is_asked_for = kind != NAN and bare in _FILLS.split() and not is_rounded
            found = self._describe(f'aten.{name}', tensor, kind, 0 if is_asked_for else 1 if kind == MASK else 2)
            found.given = (low, high) if given and worst == FINITE else None
        return found

    def _describe(self, op: str, tensor: Tensor, kind: int, strength: int) -> BadOp:
        phase, module, node = self.modules.places.here()
        source = source_of(frame_outside(_OURS)) if phase == FORWARD else ''
        counts = int((~tensor.isfinite()).sum()), tensor.numel()
        found = BadOp(op, phase, module, node, source, kind, counts, tensor.dtype, strength, len(self._found))
        self._found.append(found)
        return found

    def _origin_of(self, tensor: Tensor, kind: int) -> BadOp:
        """Return what is known of a tensor that is not finite."""
        key = storage_key(tensor)
        if key not in self._origins:
            origin, name = self._given.get(key, ('op', 'code outside of torch'))
            writer = self._writers.get(key) if origin == 'op' else None
            # nobody tells what code outside of torch has read: the first overflow before it, where there was one
            earlier = [each for each in self._found if each.strength == 2] if writer is not None else []
            # infinities that a model holds are masks; what it is given may be
            strength = 2 if kind == NAN else int(kind == INFINITE and origin == 'input')
            found = min(earlier, key=_rank, default=None) or self._describe(name, tensor, kind, strength)
            if origin != 'op':
                found.origin, found.module, found.source = origin, '', ''
            elif writer is not None and not earlier:
                op, found.module, found.source = writer
                found.op, found.strength = f'{name}, which wrote into the result of {op}', 2
            self._origins[key] = found
        return self._origins[key]


def _rank(found: BadOp) -> tuple[int, int]:
    return -found.strength, found.order


def frame_outside(*folders: str) -> FrameType | None:
    """Return the innermost Python frame outside of torch, and of some other folders; None in no line of the step that runs."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, '<', *folders)):
        frame = None if frame.f_code.co_filename == _RUNNER else frame.f_back
    return frame


def source_of(frame: FrameType | None) -> str:
    """Return the line that runs in a frame, with its place, in words; '' for none."""
    if frame is None:
        return ''
    path, number = frame.f_code.co_filename, frame.f_lineno
    place = os.sep.join(Path(path).parts[-2:])
    return f'{place}:{number} in {frame.f_code.co_name}: {linecache.getline(path, number).strip()}'
