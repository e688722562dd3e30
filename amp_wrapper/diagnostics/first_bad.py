"""Finds the first op of a step that gives infinities or NaN."""

from __future__ import annotations

import dataclasses
import linecache
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..torch_internals import TorchDispatchMode, writes_in_place
from .watches import FORWARD, Places, named_tensors, numbers, storage_key

#: The worst that is in a tensor: minus infinity alone is what masks have.
FINITE, MASK, INFINITE, NAN = range(4)
#: Ops that write infinities because they are told to; that write over what was there; that write no values yet.
_FILLS = 'full fill masked_fill scalar_tensor new_full full_like where index_put constant_pad_nd'
_WRITES_OVER = 'copy fill zero normal uniform bernoulli random exponential geometric log_normal cauchy'
_EMPTY = 'empty empty_like empty_strided new_empty new_empty_strided resize set'
#: What gives NaN where infinities come in, and which argument of an op is a divisor.
_OF_INFINITIES = {
    'mul': '0 times infinity',
    'div': 'infinity divided by infinity',
    **dict.fromkeys(('_softmax', '_log_softmax'), 'a softmax of nothing but infinities'),
    **dict.fromkeys(('add', 'sub', 'rsub', 'sum', 'mean', 'cumsum'), 'infinity minus infinity'),
}
_DIVISORS = {'div': 1, 'remainder': 1, 'fmod': 1, 'reciprocal': 0, 'rsqrt': 0, 'pow': 0}
_TORCH, _OURS = (f'{Path(path).parent}{os.sep}' for path in (torch.__file__, Path(__file__).parent))
_RUNNER = str(Path(__file__).with_name('step.py'))


def kind_of(tensor: Tensor) -> tuple[int, float]:
    """Return the worst that is in a tensor of :func:`numbers`, and the largest absolute value. Syncs."""
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    low, high = map(float, torch.aminmax(tensor))
    kind = NAN if high != high else INFINITE if high == math.inf else MASK if low == -math.inf else FINITE
    return kind, max(abs(low), abs(high))


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
        dtype: Of the result; of what it was given, before casts, where there is a reason.
        strength: 0 for infinities that somebody asked for, as masks are; 1 for minus infinity alone, which may be one; 2 else.
        order: How many were found before it.
        origin: 'op', or 'input' or 'weight' for what came in with NaN.
        largest: The largest number that it was given; None where not all were finite.
        reason: What was done that gives no number, such as a division by zero; '' for an overflow.
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
    largest: float | None = None
    reason: str = ''


class _Writer(NamedTuple):
    """The op that wrote to some memory last."""

    op: str
    module: str
    line: tuple[str, int, str]
    dtype: torch.dtype | None


class FirstBad(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the op in which infinities and NaN begin. Syncs after each op, so it is slow.

    The memory of each tensor that is not finite has an origin: the op itself where its result is worse than all it was given,
    else the strongest origin among what it was given.

    Args:
        model: The copy that runs.
        inputs: What it is called with.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = Places(model)
        self._origins: dict[int, BadOp] = {}
        self._writers: dict[int, _Writer] = {}
        self._given = {storage_key(tensor): ('input', f'input {index}') for index, tensor in enumerate(inputs)}
        self._given |= {storage_key(tensor): ('weight', name) for name, tensor in named_tensors(model)}
        self._found: list[BadOp] = []

    def remove(self) -> None:
        """Watch no longer."""
        self._places.remove()

    def begin(self, tensors: Sequence[Tensor]) -> BadOp | None:
        """Return the op in which what is wrong with some tensors begins. Syncs."""
        origins = [self._origin_of(t, kind) for t in numbers(tensors) if (kind := kind_of(t)[0]) != FINITE]
        return min(origins, key=_rank, default=None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, in_place = func.overloadpacket.__name__, writes_in_place(func)
        bare = name.rstrip('_') if in_place else name
        given = numbers((args, {key: value for key, value in kwargs.items() if key != 'out'}))
        given = given[in_place and bare in _WRITES_OVER.split() :]
        # afterwards it is gone; batch norm writes its statistics, and does not say so
        writes = in_place or 'batch_norm' in name
        before = [(tensor, *kind_of(tensor)) for tensor in given] if writes else []
        output = func(*args, **kwargs)
        keys = set(map(storage_key, given))
        for tensor in numbers(output):
            key = storage_key(tensor)
            if key in keys and not in_place:
                # a view
                continue
            kind = FINITE if bare in _EMPTY.split() else kind_of(tensor)[0]
            if kind != FINITE:
                seen = before or [(each, *kind_of(each)) for each in given]
                self._origins[key] = self._judge(f'aten.{name}', bare, tensor, kind, seen, (*args, *kwargs.values()))
            elif tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
                self._origins.pop(key, None)
            cast = self._writers.get(storage_key(given[0])) if bare == '_to_copy' and given else None
            # a cast goes on as what it was made of
            writer = cast and cast._replace(dtype=cast.dtype or given[0].dtype)
            self._writers[key] = writer or _Writer(f'aten.{name}', self._places.here()[1], line_outside(_OURS), None)
        return output

    def _judge(
        self,
        name: str,
        bare: str,
        tensor: Tensor,
        kind: int,
        given: Sequence[tuple[Tensor, int, float]],
        args: Sequence[Any],
    ) -> BadOp:
        """Return the origin of a result that is not finite."""
        worst = max((each for _, each, _ in given), default=FINITE)
        # NaN comes from NaN, where there is one
        bad = [(t, each) for t, each, _ in given if each != FINITE and (each == NAN or kind != NAN or worst != NAN)]
        found = min((self._origin_of(t, each) for t, each in bad), key=_rank, default=None)
        if found is None or (not found.strength and kind > worst):
            largest = max((size for *_, size in given), default=0.0)
            is_asked_for = (
                kind != NAN and bare in _FILLS.split() and not torch.finfo(tensor.dtype).max < largest < math.inf
            )
            found = self._describe(name, tensor, kind, 0 if is_asked_for else 1 if kind == MASK else 2)
            found.largest = largest if given and worst == FINITE else None
            found.reason = _reason(bare, args, kind == NAN, worst != FINITE)
            if found.reason:
                # what it was given was rounded before
                writers = [self._writers.get(storage_key(each)) for each, *_ in given]
                found.dtype = next((writer.dtype for writer in writers if writer and writer.dtype), found.dtype)
        return found

    def _describe(self, op: str, tensor: Tensor, kind: int, strength: int) -> BadOp:
        phase, module, node = self._places.here()
        source = _text(line_outside(_OURS)) if phase == FORWARD else ''
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
                found.op, found.strength = f'{name}, which wrote into the result of {writer.op}', 2
                found.module, found.source = writer.module, _text(writer.line)
            self._origins[key] = found
        return self._origins[key]


def _rank(found: BadOp) -> tuple[int, int]:
    return -found.strength, found.order


def _reason(op: str, args: Sequence[Any], has_nan: bool, had_infinities: bool) -> str:
    """Say what was done that gives no number, whatever the type has room for; '' where that is not known. Syncs."""
    if any(isinstance(each, float) and not math.isfinite(each) for each in args):
        return 'a number that is not finite'
    if had_infinities:
        return _OF_INFINITIES.get(op, '') if has_nan else ''
    if op in ('log', 'log2', 'log10', 'log1p'):
        return 'the logarithm of a negative number' if has_nan else 'the logarithm of zero'
    if op in ('sqrt', 'rsqrt', 'pow') and has_nan:
        return 'a root of a negative number'
    place = len(args) if op == 'pow' and not _is_negative(args[1]) else _DIVISORS.get(op, len(args))
    if place < len(args) and bool((torch.as_tensor(args[place]) == 0).any()):
        return 'division of zero by zero' if has_nan else 'division by zero'
    return ''


def _is_negative(exponent: Any) -> bool:
    return bool((torch.as_tensor(exponent) < 0).any())


def line_outside(*folders: str) -> tuple[str, int, str]:
    """Return file, line and function of the innermost Python code outside of torch, and of some other folders.

    Where there is none in the step that runs, they are empty.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, '<', *folders)):
        if frame.f_code.co_filename == _RUNNER:
            return '', 0, ''
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


def _text(line: tuple[str, int, str]) -> str:
    path, number, function = line
    if not path:
        return ''
    place = os.sep.join(Path(path).parts[-2:])
    return f'{place}:{number} in {function}: {linecache.getline(path, number).strip()}'
