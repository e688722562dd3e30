"""Watches which module and op of a model runs, and what they are given and give: where infinities and NaN begin."""

from __future__ import annotations

import copy
import dataclasses
import linecache
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..casting.cast_module import Watcher
from ..casting.modules import class_name
from ..policy.nested import MapTensor, map_tensors, tensors_in
from ..shards import local
from ..torch_internals import TorchDispatchMode, current_node, graph_task_id, writes_in_place

FORWARD, BACKWARD = 'forward', 'backward'
#: Names the module in the ``metadata`` of a node of the graph.
LABEL = 'amp_wrapper.module'
#: The worst that is in a tensor: minus infinity alone is what masks have.
FINITE, MASK, INFINITE, NAN = range(4)
#: Ops that write infinities because they are told to; that write over what was there; that write no values yet.
_FILLS = 'full fill masked_fill scalar_tensor new_full full_like where index_put constant_pad_nd'
_WRITES_OVER = 'copy fill zero normal uniform bernoulli random exponential geometric log_normal cauchy'
_EMPTY = 'empty empty_like empty_strided new_empty new_empty_strided resize set'
_TORCH, _OURS = (f'{Path(path).parent}{os.sep}' for path in (torch.__file__, Path(__file__).parent))
_RUNNER = str(Path(__file__).with_name('sandbox.py'))


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers, dataclasses, and objects with ``all_items()`` (mmengine's), in their order."""
    return tensors_in(value, _enter)


def _enter(function: MapTensor, value: Any) -> Any:
    for _, item in value.all_items() if hasattr(type(value), 'all_items') else ():
        map_tensors(function, item, _enter)
    return value


def copied_batch(value: Any, cuts: bool = False) -> Any:
    """Copy what a model is given, with its tensors: models may write to it. What Python cannot copy is the same object.

    Args:
        value: A batch, or arguments.
        cuts: Whether tensors with a graph alone take gradients in the copy: leaves are weights.
    """
    memo: dict[int, Any] = {}
    for each in tensors_of(value):
        memo[id(each)] = each.detach().clone().requires_grad_(each.requires_grad and not (cuts and each.is_leaf))
    try:
        return copy.deepcopy(value, dict(memo))
    except Exception:
        return map_tensors(lambda tensor: memo.get(id(tensor), tensor), value)


def called(model: nn.Module, name: str) -> str:
    """Return the name of a module with its class, ``'blocks.1 (Attention)'``; ``'the model itself'`` for that."""
    return f'{name} ({class_name(model.get_submodule(name))})' if name else 'the model itself'


def numbers(value: Any) -> list[Tensor]:
    """Return the dense floating and complex tensors in nested containers that have elements, and types torch computes in."""
    dense = [t for t in tensors_of(value) if t.layout is torch.strided and not t.is_nested and t.dtype.itemsize > 1]
    return [tensor for tensor in dense if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel()]


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def storage_key(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which its views share; the id of a tensor without memory of its own."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except Exception:
        # sparse tensors and those of subclasses
        return id(tensor)


def is_bad(tensor: Tensor) -> bool:
    """Return whether a tensor has infinities or NaN. Syncs."""
    tensor = tensor.detach()
    return not bool((tensor.coalesce().values() if tensor.is_sparse else tensor).isfinite().all())


class Places:
    """Knows which module of a model runs: by its calls, and in a backward pass by labels of the nodes of the graph.

    torch's ``ModuleTracker`` does not know when the backward pass of a module ends whose inputs need no gradients.

    Args:
        model: Left as it was by :meth:`remove`.
        see: Called with the name of a module, the module, its arguments or what it gave, and whether these are arguments. Those
            are told of calls from outside of any other call.
    """

    def __init__(self, model: nn.Module, see: Callable[[str, nn.Module, Any, bool], object] | None = None) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self.stack = ['']
        self._see = see
        self._watcher = Watcher(self._enter, self._leave)
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._watcher.watch(module)

    def remove(self) -> None:
        """Watch no longer."""
        self._watcher.remove()

    def here(self) -> tuple[str, str, str]:
        """Return the phase, the module and, in a backward pass, the node of the graph that run now."""
        # checkpointed segments run again inside of a backward pass, and their modules are called again
        if graph_task_id() == -1 or len(self.stack) > 1:
            return FORWARD, self.stack[-1], ''
        node = current_node()
        return (BACKWARD, '', '') if node is None else (BACKWARD, node.metadata.get(LABEL, ''), node.name())

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # made in the module around this one
        _label((args, kwargs), self.stack[-1])
        if self._see is not None and len(self.stack) == 1:
            self._see(self._names[id(module)], module, (args, kwargs), True)
        self.stack.append(self._names[id(module)])

    def _leave(self, module: nn.Module, output: Any) -> None:
        name = self._names[id(module)]
        # a call that has failed leaves those inside of it open
        while len(self.stack) > 1 and self.stack.pop() != name:
            pass
        _label(output, name)
        if self._see is not None:
            self._see(name, module, output, False)


def _label(tensors: Any, name: str) -> None:
    """Note the module in the nodes of a graph that no module inside of it has made."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors_of(tensors)]
    while waiting:
        here = waiting.pop()
        if here is not None and LABEL not in here.metadata:
            here.metadata[LABEL] = name
            waiting += [following for following, _ in here.next_functions]


class Maximum(NamedTuple):
    """The largest absolute number that a module was given or gave: infinite or NaN where one of the numbers is.

    The module has a name, '' for the model itself, and a class; ``is_input`` is whether a script gave it the number.
    """

    name: str
    kind: str
    is_input: bool
    dtype: torch.dtype
    largest: float


class NonfiniteWatch:
    """Watches what a model is given and the outputs of all its modules for infinities and NaN.

    That is one small reduction for each on the device, which is read by :meth:`first` and :meth:`take` alone.

    Args:
        model: Any module, cast or not, not wrapped. :meth:`remove` ends the watch.
    """

    def __init__(self, model: nn.Module) -> None:
        self._entries: list[tuple[str, str, bool, torch.dtype, Tensor]] = []
        self.places = Places(model, self._see)

    def first(self) -> str | None:
        """Return the earliest place since the last call, such as ``'head.fc (Linear)'``; None where all was finite. Syncs.

        Modules are told in the order in which they end, so the innermost one comes first.
        """
        bad = next((each for each in self.take() if not math.isfinite(each.largest)), None)
        if bad is None:
            return None
        return "the model's input" if bad.is_input else f'{bad.name or "the model"} ({bad.kind})'

    def take(self) -> list[Maximum]:
        """Return all that was seen since the last call, in its order. Syncs."""
        entries, self._entries = self._entries, []
        found = torch.stack([each[-1].to(entries[0][-1].device) for each in entries]).tolist() if entries else []
        return [Maximum(*each[:4], largest) for each, largest in zip(entries, found)]

    def remove(self) -> None:
        """Watch no longer."""
        self.places.remove()

    @torch.no_grad()
    def _see(self, name: str, module: nn.Module, value: Any, is_input: bool) -> None:
        for tensor in numbers(value):
            largest = local([tensor.detach()])[0].abs().amax().float()
            self._entries.append((name, class_name(module), is_input, tensor.dtype, largest))


@contextmanager
def nonfinite_watch(model: nn.Module) -> Iterator[NonfiniteWatch]:
    """Begin a :class:`NonfiniteWatch` that ends with the block, by an exception too.

    Args:
        model: Any module.

    Examples:
        >>> import torch
        >>> from amp_wrapper import nonfinite_watch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> with nonfinite_watch(model) as watch:
        ...     _ = model(torch.tensor([[1.0, float('nan')]]))
        ...     print(watch.first())
        the model's input
    """
    watch = NonfiniteWatch(model)
    try:
        yield watch
    finally:
        watch.remove()


# -- ops ---------------------------------------------------------------------------------------------------------------


class Range(NamedTuple):
    """The worst that is in a tensor, and its least and its greatest number."""

    kind: int
    least: float
    greatest: float


def range_of(tensor: Tensor) -> Range:
    """Return the range of a tensor of :func:`numbers`. Syncs."""
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    # no negative zeros
    low, high = (float(each) + 0.0 for each in torch.aminmax(tensor))
    kind = NAN if high != high else INFINITE if high == math.inf else MASK if low == -math.inf else FINITE
    return Range(kind, low, high)


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
