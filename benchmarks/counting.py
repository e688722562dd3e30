"""Counts the cost of a call beside its time: bytes that its operations move, operations, host reads, memory, launches."""

from __future__ import annotations

import dataclasses
import gc
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

# arguments that a schema marks as written, and that are written without being read
_WRITTEN_ONLY = {
    'aten::copy_': ('self',),
    'aten::_foreach_copy_': ('self',),
    'aten::fill_': ('self',),
    'aten::zero_': ('self',),
    'aten::_foreach_zero_': ('self',),
    'amp_wrapper::multi_tensor_scale': ('targets',),
    'amp_wrapper::fused_adam': ('decision',),
    'amp_wrapper::fused_sgd': ('decision',),
}
_NO_TRAFFIC = ('aten::empty', 'aten::new_empty')


@dataclasses.dataclass
class Counts:
    """Counts of one call.

    Attributes:
        bytes: Bytes that its operations cannot avoid to move.
        operations: Operations that went through the dispatcher, views among them.
        reads: How often the host asked for the value of a tensor.
    """

    bytes: int = 0
    operations: int = 0
    reads: int = 0


class Counter(TorchDispatchMode):
    """Counts while it is entered.

    The rule: an operation reads each of its tensor arguments once, and writes each that its schema marks as written and each
    result that is no view of an argument: ``numel * itemsize`` bytes each, at most those of the storage. An argument that is
    written in place is read as well, but where the operation overwrites it (``copy_``, ``out=`` and the like). So a pass of an
    operation over a temporary of its own is not counted, and cache misses are not: the sum is what the sequence of operations
    cannot avoid, given that each of them goes through memory.

    Two operations do other things than their schemas say. torch's fused optimizers write gradients where they unscale
    them alone. Our fused ones leave a partner that is the parameter itself alone, only write a 16-bit one, and read and
    write a remainder.

    Args:
        host: Addresses of tensors that are on the host on every device, whose reads wait for nothing.
    """

    def __init__(self, host: Collection[int] = ()) -> None:
        super().__init__()
        self.counts = Counts()
        self._host = frozenset(host)
        self._lists = _ListReads(self)
        self.in_list = False

    def __enter__(self) -> Counter:
        self._lists.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._lists.__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name
        counts = self.counts
        counts.operations += 1
        if name == 'aten::_local_scalar_dense':
            self.read(args[0])
        elif name in ('aten::copy_', 'aten::_to_copy') and not self.in_list:
            target, source = (args[0], args[1]) if name == 'aten::copy_' else (result, args[0])
            if source.device.type != 'cpu' and target.device.type == 'cpu' and not _is_asynchronous(func, args, kwargs):
                self.read(source)
        counts.bytes += traffic(func, args, kwargs, result)
        return result

    def read(self, tensor: Tensor) -> None:
        """Count that the host asks for the value of a tensor."""
        if tensor.data_ptr() not in self._host:
            self.counts.reads += 1


class _ListReads(TorchFunctionMode):
    """Sees ``tolist`` of a tensor on the CPU, which goes past the dispatcher."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, '__name__', '') not in ('tolist', 'numpy', '__array__'):
            return func(*args, **(kwargs or {}))
        self._counter.read(args[0])
        self._counter.in_list = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._counter.in_list = False


def _is_asynchronous(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args)), **kwargs}.get('non_blocking', False))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _size(tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    # an expanded tensor has more elements than memory
    return min(size, tensor.untyped_storage().nbytes()) if tensor.layout is torch.strided else size


def traffic(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that one operation moves, by the rule of :class:`Counter`."""
    schema = func._schema
    name = schema.name
    if name.startswith(_NO_TRAFFIC):
        return 0
    values = {**dict(zip([argument.name for argument in schema.arguments], args)), **kwargs}
    marked = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    if not marked and schema.returns and all(value.alias_info is not None for value in schema.returns):
        return 0  # a view
    written = set(marked)
    only_written = set(_WRITTEN_ONLY.get(name, ())) | {a.name for a in schema.arguments if a.is_out}
    if name.startswith('aten::_fused_') and values.get('grad_scale') is None:
        written.discard('grads')
    read: dict[tuple[int, int], int] = {}
    total = 0
    for argument, value in values.items():
        if argument == 'partners' and name.startswith('amp_wrapper::'):
            total += sum(map(_partner, values['params'], value))
            continue
        for tensor in _tensors(value):
            if argument not in only_written:
                # the same tensor in two places is read once
                read[tensor.data_ptr(), tensor.numel()] = _size(tensor)
            if argument in written:
                total += _size(tensor)
    for place, value in zip(schema.returns, result if isinstance(result, tuple) else (result,)):
        if place.alias_info is None:
            total += sum(map(_size, _tensors(value)))
    return total + sum(read.values())


def _partner(param: Tensor, partner: Tensor) -> int:
    if partner.data_ptr() == param.data_ptr():
        return 0
    return _size(partner) * (1 if partner.is_floating_point() else 2)


def counts_of(call: Callable[[], object], host: Collection[int] = ()) -> Counts:
    """Count one call.

    Args:
        call: What to run.
        host: As for :class:`Counter`.
    """
    with Counter(host) as counter:
        call()
    return counter.counts


def allocations(call: Callable[[], object], device: str) -> tuple[int, int]:
    """Return the bytes that a call leaves allocated, and the most that it had allocated at any moment.

    As torch's allocator tells it, so the temporaries inside operations count too.

    Args:
        call: What to run.
        device: 'cpu' or 'cuda'.
    """
    if device == 'cuda':
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    # what an earlier call left behind in cycles must not be freed within this one
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            call()
    finally:
        gc.enable()
    now = peak = 0
    # the record itself has the order of time only within a thread
    events = [event for event in record.profiler.kineto_results.events() if event.name() == '[memory]']
    for event in sorted(events, key=_start):
        now += event.nbytes()
        peak = max(peak, now)
    return now, peak


def _start(event: Any) -> int:
    started: int = event.start_ns()
    return started


def launches(call: Callable[[], object]) -> int:
    """Return how many kernels, copies and fills a call launches on the current GPU."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
            call()
            torch.cuda.synchronize()
    return sum(event.device_type is DeviceType.CUDA for event in record.events())
