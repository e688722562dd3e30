"""Follows infinities and NaN through every op of a forward and a backward pass, to the op in which they begin."""

from __future__ import annotations

import dataclasses
import linecache
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..casting.cast_module import Watcher
from ..casting.modules import class_name
from ..torch_internals import TorchDispatchMode, current_node, graph_task_id, writes_in_place
from .op_tensors import (
    LOGS,
    elements,
    is_bad,
    is_measured,
    is_part,
    memory_of,
    named_tensors,
    nonfinite,
    numbers,
    reason_of,
)
from .ranges import Ranges, added, measure_one
from .recorder import outputs_of, tensors_of

FORWARD, BACKWARD = 'forward', 'backward'
#: Ops that write infinities because they are told to: masks.
_FILLS = (
    'full',
    'fill',
    'masked_fill',
    'scalar_tensor',
    'new_full',
    'full_like',
    'where',
    'index_put',
    'constant_pad_nd',
)
#: Ops that hand on what they are given, so that theirs is never the place where a number went out of range.
_MOVES = ('_to_copy', 'copy_', 'clone', 'detach', 'view', 'reshape', 'cat', 'stack', 'expand')
#: Ops in which each number of the result comes from many of the input, so that what they are given is no mask.
_MIXES = frozenset(
    {
        *('mm', 'addmm', 'bmm', 'baddbmm', 'addbmm', 'mv', 'addmv', 'dot', 'linear', 'matmul', 'convolution', 'cumsum'),
        *(
            'native_layer_norm',
            'native_group_norm',
            'native_batch_norm',
            '_native_batch_norm_legit',
            'cudnn_batch_norm',
        ),
        *('sum', 'mean', 'var', 'std', 'var_mean', 'linalg_vector_norm'),
    }
)
_KEY = 'amp_wrapper.module'
#: What is written without values first.
_EMPTY = ('empty', 'empty_like', 'empty_strided', 'new_empty', 'new_empty_strided')
_FOLDERS = tuple(
    str(Path(path).parent) + os.sep for path in (torch.__file__, Path(__file__).parents[1] / '__init__.py')
)


@dataclasses.dataclass
class BadOp:
    """An op that gave an infinity or NaN.

    Attributes:
        op: Such as 'aten.mm', or words for what is no op of torch.
        phase: 'forward' or 'backward'.
        module: The qualified name of the innermost module that it ran in; '' for the model itself.
        node: Of a backward pass: the node of the graph, such as 'MmBackward0'.
        source: 'file.py:12 in forward: y = x @ w', of the innermost frame outside of torch; '' where there is none.
        has_nan: Whether it gave NaN.
        nonfinite: How many elements of its output are not finite.
        shape: Of the output.
        dtype: Of the output; of what it was given, before casts, where there is a reason.
        came_in: The earlier ones whose results it was given.
        inputs: The ranges of its floating inputs, where all of them were finite.
        dtypes_in: Types of its floating inputs.
        origin: 'op'; or 'input', 'weight' for what came in with a NaN.
        is_mask: Whether its infinities were asked for.
        log: The logarithm of zero that its infinities come from, where they may be a mask.
        reads: Which input of the model its first argument is; '' for none.
        reason: What was done that gives no number; '' for an overflow.
        makers: The ops that gave its floating inputs.
        order: How many others came before it.
    """

    op: str
    phase: str
    module: str
    node: str
    source: str
    has_nan: bool
    nonfinite: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    came_in: list[BadOp] = dataclasses.field(default_factory=list)
    inputs: list[Ranges] = dataclasses.field(default_factory=list)
    dtypes_in: list[torch.dtype] = dataclasses.field(default_factory=list)
    origin: str = 'op'
    is_mask: bool = False
    log: BadOp | None = None
    reads: str = ''
    reason: str = ''
    makers: list[str] = dataclasses.field(default_factory=list)
    order: int = 0

    @property
    def largest_in(self) -> float:
        """The largest finite number that came in; 0.0 where that is not known."""
        return max((each.largest for each in self.inputs), default=0.0)

    def begins(self) -> BadOp:
        """The op in which what is wrong with this one's result begins.

        NaN is followed to NaN, and where none came in, to infinities that nobody asked for. A mask of infinities is followed to
        the op that made NaN of it.
        """
        if self.is_mask and self.log is not None:
            return self.log
        here, seen = self, {id(self)}
        while True:
            bad = [each for each in here.came_in if id(each) not in seen]
            if here.has_nan and any(each.has_nan for each in bad):
                bad = [each for each in bad if each.has_nan]
            else:
                # a sum of logarithms of zero, say: they are no mask that was added, which has the shape of the result
                logs = [
                    each.log
                    for each in bad
                    if each.log is not None and (each.shape != here.shape or _bare(here.op) in _MIXES)
                ]
                bad = [each for each in bad if not each.is_mask] or [each for each in logs if each is not None]
            if not bad:
                return here
            here = min(bad, key=lambda each: each.order)
            seen.add(id(here))


@dataclasses.dataclass(frozen=True)
class ModuleOutput:
    """What one call of a module gave.

    Attributes:
        name: Of the module; '' for the model.
        kind: Its class.
        dtype: Of its first floating output.
        largest: The largest finite number in its outputs.
        nonfinite: How many infinities and NaN are in them.
    """

    name: str
    kind: str
    dtype: torch.dtype
    largest: float
    nonfinite: int


@dataclasses.dataclass
class _Known:
    """What is known of a piece of memory."""

    bad: BadOp | None
    module: str
    op: str
    source: str
    cast_from: torch.dtype | None = None


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs around forward and backward passes of a copy of a model. It reads the device after each op, so it is slow.

    Args:
        model: The copy. Its modules are named in what is found.
        inputs: What the model is called with.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bad: list[BadOp] = []
        self.outputs: list[ModuleOutput] = []
        self._stack: list[str] = ['']
        self._memory: dict[int, _Known] = {}
        # what was wrong with the inputs of the last call of each module
        self._given: dict[str, list[BadOp]] = {}
        self._origins = {memory_of(tensor): f'input {index}' for index, tensor in enumerate(inputs)}
        self._origins |= {memory_of(tensor): name for name, tensor in named_tensors(model)}
        self._weights = {memory_of(tensor) for _, tensor in named_tensors(model)}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._watcher = Watcher(self._enter, self._leave)
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._watcher.watch(module)

    def remove(self) -> None:
        """Watch no longer."""
        self._watcher.remove()

    def bad_of(self, tensor: Tensor) -> BadOp | None:
        """What gave a tensor its infinities or NaN; None where it has none."""
        if not is_bad(tensor):
            return None
        return self._source_of(tensor, FORWARD if graph_task_id() == -1 else BACKWARD)

    # -- modules -----------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name, tensors = self._names[id(module)], tensors_of((args, kwargs))
        for tensor in tensors:
            # made in the module around this one
            _label(tensor.grad_fn, self._stack[-1])
        self._given[name] = [bad for tensor in tensors if (bad := self.bad_of(tensor)) is not None]
        self._stack.append(name)

    def _leave(self, module: nn.Module, output: Any) -> None:
        name = self._names[id(module)]
        while len(self._stack) > 1 and self._stack.pop() != name:
            pass
        found = outputs_of(output)
        for tensor in found:
            _label(tensor.grad_fn, name)
        ranges = added(measure_one(tensor) for tensor in found if tensor.layout is torch.strided)
        if found:
            kind = class_name(module)
            self.outputs.append(ModuleOutput(name, kind, found[0].dtype, ranges.largest, ranges.nonfinite))

    def _module_here(self) -> tuple[str, str, str]:
        """Phase, module and node of what runs now."""
        # checkpointed segments are recomputed inside of a backward pass, with modules entered again
        if graph_task_id() == -1 or len(self._stack) > 1:
            return FORWARD, self._stack[-1], ''
        node = current_node()
        return (BACKWARD, '', '') if node is None else (BACKWARD, node.metadata.get(_KEY, ''), node.name())

    # -- ops ---------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        written = [tensor for tensor in numbers(output) if tensor.layout is torch.strided and tensor.numel()]
        if not written:
            return output
        given = {memory_of(tensor) for tensor in tensors_of((args, kwargs))}
        in_place = writes_in_place(func)
        # without the name of the overload
        name = '.'.join(str(func).split('.')[:2])
        phase, module, node = self._module_here()
        for tensor in written:
            key = memory_of(tensor)
            made = self._memory.get(memory_of(args[0])) if name == 'aten._to_copy' else None
            if made is not None and not is_bad(tensor):
                # a cast goes on as what it was made of
                self._memory[key] = dataclasses.replace(made, cast_from=args[0].dtype)
                continue
            if _bare(name) in _EMPTY or not is_bad(tensor):
                if not (key in given and (not in_place or is_part(tensor))):
                    self._memory[key] = _Known(None, module, name, _source())
                continue
            if key in given and not in_place:
                # a view: what is bad in it is bad in what it shows
                continue
            found = self._describe(name, phase, module, node, tensor)
            before = numbers((args, kwargs))
            if in_place and before and memory_of(before[0]) == key:
                # what it held before is gone, or is part of the result: its record is all that is left of it
                known = self._memory.get(key)
                rest = [each for each in before[1:] if memory_of(each) != key]
                found.came_in = [known.bad] if known is not None and known.bad is not None and not _fills(name) else []
            else:
                rest = before
            shares = [each.nonfinite / elements(each.shape) for each in found.came_in]
            bad = [each for each in rest if is_bad(each)]
            # of what came in itself: a part of a mask may have more of them than the whole of it
            shares += [nonfinite(each) / each.numel() for each in bad]
            found.came_in += [self._source_of(each, phase) for each in bad]
            found.dtypes_in = [each.dtype for each in before]
            found.reason = reason_of(_bare(name), (*args, *(kwargs or {}).values()), found.has_nan, bool(found.came_in))
            makers = [known for each in before if (known := self._memory.get(memory_of(each))) is not None]
            found.makers = [known.op for known in makers]
            if found.reason:
                # what it was given was rounded before
                found.dtype = next((known.cast_from for known in makers if known.cast_from), found.dtype)
            if before and memory_of(before[0]) not in self._weights:
                found.reads = self._origins.get(memory_of(before[0]), '')
            if not found.came_in:
                found.inputs = [measure_one(each) for each in rest if is_measured(each)]
            found.is_mask = _is_mask(name, found, tensor, shares)
            if found.is_mask:
                found.log = found if not found.came_in and _bare(name) in LOGS else _log_of(found.came_in)
            self.bad.append(found)
            self._memory[key] = _Known(found, module, name, found.source)
        return output

    def _describe(self, name: str, phase: str, module: str, node: str, tensor: Tensor) -> BadOp:
        return BadOp(
            name,
            phase,
            module,
            node,
            _source() if phase == FORWARD else '',
            bool(tensor.isnan().any()),
            nonfinite(tensor),
            tuple(tensor.shape),
            tensor.dtype,
            order=len(self.bad),
        )

    def _source_of(self, tensor: Tensor, phase: str) -> BadOp:
        """What is known of a tensor that has infinities or NaN."""
        key = memory_of(tensor)
        known = self._memory.get(key)
        if known is not None and known.bad is not None:
            return known.bad
        where = self._origins.get(key)
        if where is not None and (known is None or known.bad is None):
            found = self._describe(where, phase, '', '', tensor)
            found.origin = 'weight' if key in self._weights else 'input'
            # infinities in what the model is given, or holds, are masks
            found.is_mask = not found.has_nan
        else:
            found = self._describe('code outside of torch', phase, '', '', tensor)
            # what was there before the model was called
            found.is_mask = known is None and not found.has_nan
            if known is not None:
                found.module, found.source = known.module, known.source
                found.op = f'code outside of torch, which wrote into the result of {known.op}'
                # nobody tells what it has read: what its module was given
                found.came_in = list(self._given.get(known.module, ()))
        self.bad.append(found)
        self._memory[key] = _Known(found, found.module, found.op, found.source)
        return found


def _is_mask(name: str, found: BadOp, tensor: Tensor, shares: Sequence[float]) -> bool:
    """Whether the infinities of a result were asked for: filled in, or those of a mask that was filled in.

    ``shares`` are those of infinities in what came in.
    """
    if found.has_nan:
        return False
    if not found.came_in:
        return (_fills(name) and not found.largest_in > torch.finfo(tensor.dtype).max) or _bare(name) in LOGS
    if not all(each.is_mask for each in found.came_in):
        return False
    # as many as a mask, stretched to the shape of the result, brings along
    return found.nonfinite / elements(found.shape) <= max(shares) * (1 + 1e-12) or _fills(name)


def _log_of(came_in: Sequence[BadOp]) -> BadOp | None:
    return next((each.log for each in came_in if each.log is not None), None)


def _bare(name: str) -> str:
    return name.removeprefix('aten.').removesuffix('_')


def _fills(name: str) -> bool:
    return _bare(name) in _FILLS


def moves_only(name: str) -> bool:
    """Whether an op hands its input on, in another type at most."""
    return name.removeprefix('aten.') in _MOVES


def _label(node: Any, name: str) -> None:
    """Note the module that the nodes of a graph were made in, those alone that no module inside of it has made."""
    waiting = [node]
    while waiting:
        here = waiting.pop()
        if here is None or _KEY in here.metadata:
            continue
        here.metadata[_KEY] = name
        waiting += [following for following, _ in here.next_functions]


def _source() -> str:
    """The innermost line of Python outside of torch and of this folder that leads to the op."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_FOLDERS) and not path.startswith('<'):
            line = linecache.getline(path, frame.f_lineno).strip()
            folder, file = os.path.split(path)
            return f'{os.path.basename(folder)}/{file}:{frame.f_lineno} in {frame.f_code.co_name}: {line}'
        frame = frame.f_back
    return ''
