"""A region: a part of a run in which the FP32 registry acts, and at O1 and O4 of the functional API the tables of ops.

It is :class:`torch.autocast` of kinds of device that no tensor has. So torch keeps it for this package: it is of one thread,
ends with its block whatever happens, is part of graphs, and is guarded by ``torch.compile``. The kernels of :mod:`.kernels` lie
at the dispatch keys of two kinds:

- 'ipu' is on in a region. Its type says what acts: bfloat16 the registry, float16 the tables as well.
- 'hpu' is on where products of 16-bit and FP32 operands compute in 16-bit.

And 'xla' is on in ``disable_casts()``. ``torch.compile`` compares types of what is on alone: a type could not say so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import compiler_internals, torch_internals
from ..compiler_internals import constant_when_traced, never_compiled_alone
from ..errors import AmpAttachError
from . import copies

#: The kinds of device, and the dispatch keys of two of them.
KINDS = SPARE, OPERANDS_SPARE, SUSPENDED_SPARE = 'ipu', 'hpu', 'xla'
KEY, OPERANDS_KEY = 'AutocastIPU', 'AutocastHPU'
#: What a region lets act: nothing, so that casts of others end; the registry; the registry and unlike operands; the registry
#: and the tables. :data:`AS_AROUND` opens none.
AS_AROUND, NOTHING, REGISTRY, OPERANDS, TABLES = '', 'nothing', 'registry', 'operands', 'tables'

_ACTS, _WITH_TABLES = torch.bfloat16, torch.float16
#: The type of the first kind of device in each of these; None is off.
_TYPES = {NOTHING: None, REGISTRY: _ACTS, OPERANDS: _ACTS, TABLES: _WITH_TABLES}
_reaches = {key: torch_internals.include_key(key) for key in (KEY, OPERANDS_KEY)}


class _Around:
    """What is open around code that is compiled: an attribute, which torch.compile looks at before it takes a graph.

    It does so where the code calls a cast module or a function with rules. Since some version between 2.6 and 2.13 it looks at
    the autocast of all kinds of devices by itself.
    """

    state = 0


_around = _Around()


def _note() -> None:
    """Before each call of what is compiled, on any thread."""
    for include in _reaches.values():
        include(True)
    _around.state = casts_ops() + 2 * is_open() + 4 * torch.is_autocast_enabled(OPERANDS_SPARE) + 8 * is_suspended()


@functools.cache
def _watch_compiled_calls() -> None:
    compiler_internals.before_compiled_calls(_note)


@constant_when_traced
def reach() -> bool:
    """Let ops of this thread come to the keys; outside of regions they are excluded. What it returns means nothing."""
    for key, include in _reaches.items():
        torch_internals.fall_through(key)
        include(True)
    if compiler_internals.is_loaded():
        _watch_compiled_calls()
    return True


def is_open() -> bool:
    """Whether a region is open on this thread."""
    return _around.state >= 0 and torch.is_autocast_enabled(SPARE)


def casts_ops() -> bool:
    """Whether the tables of O1 and O4, and the functions that the user registered, act on this thread where autocast is on."""
    return torch.is_autocast_enabled(SPARE) and torch.get_autocast_dtype(SPARE) is _WITH_TABLES


def is_suspended() -> bool:
    """Whether a block of :func:`suspended` is open on this thread."""
    return torch.is_autocast_enabled(SUSPENDED_SPARE)


@constant_when_traced
def has_autocast(device: str) -> bool:
    """Whether a type of device has autocast; 'meta' has none."""
    return torch.amp.is_autocast_available(device)


def autocast_is_on(device: str) -> bool:
    """Whether autocast is on for a type of device; False for types that have none."""
    return has_autocast(device) and torch.is_autocast_enabled(device)


def device_of(tensors: Iterable[Tensor]) -> str:
    """The type of the device of the first tensor; 'cpu' without any."""
    for tensor in tensors:
        return tensor.device.type
    return 'cpu'


class _Switch:
    """A block in which autocast of a kind of device is on, with a type, or off. Blocks of torch's take twice as long.

    They drop the 16-bit copies that autocast keeps of weights, too, which stay here.
    """

    __slots__ = ('_before', '_kind', '_to')

    def __init__(self, kind: str, to: torch.dtype | None) -> None:
        self._kind, self._to = kind, to

    def __enter__(self) -> None:
        kind, to = self._kind, self._to
        self._before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        torch.set_autocast_enabled(kind, to is not None)
        if to is not None and to is not self._before[1]:
            torch.set_autocast_dtype(kind, to)

    def __exit__(self, *_: object) -> None:
        is_on, dtype = self._before
        torch.set_autocast_enabled(self._kind, is_on)
        # of what is off, nobody asks for the type
        if is_on:
            torch.set_autocast_dtype(self._kind, dtype)


def _switched(kind: str, to: torch.dtype | None) -> AbstractContextManager[None]:
    if torch.compiler.is_compiling():
        return torch.autocast(kind, dtype=to or _ACTS, enabled=to is not None)
    return _Switch(kind, to)


def spare(kind: str) -> AbstractContextManager[None]:
    """The first of the two blocks that make a region."""
    if not kind:
        return nullcontext()
    reach()
    return _switched(SPARE, _TYPES[REGISTRY if kind == TABLES and is_suspended() else kind])


def operands(kind: str) -> AbstractContextManager[None]:
    """The second one."""
    acts = kind == OPERANDS
    if not kind or acts == torch.is_autocast_enabled(OPERANDS_SPARE):
        return nullcontext()
    return _switched(OPERANDS_SPARE, _ACTS if acts else None)


def autocast(device: str, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """:class:`torch.autocast` of a type, off for None. Nothing where that changes nothing, and where casts are suspended.

    Raises:
        AmpAttachError: bfloat16 on a GPU that has none.
    """
    if dtype is None:
        return _switched(device, None) if autocast_is_on(device) else nullcontext()
    if is_suspended() or not has_autocast(device):
        return nullcontext()
    _check_bfloat16(device, dtype)
    # Before 2.11, copies of weights that were made without gradients served forward passes that need them. A block around this
    # one would keep copies for longer than weights stay the same, and its own may be of another type.
    keeps = torch_internals.VERSION >= (2, 11) and not torch.is_autocast_enabled(device)
    return torch.autocast(device, dtype=dtype, cache_enabled=None if keeps else False)


@constant_when_traced
def _check_bfloat16(device: str, dtype: torch.dtype) -> bool:
    # torch says by default that a GPU without bfloat16 has it, which is emulated there
    if device == 'cuda' and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(False):
        raise AmpAttachError("this GPU has no bfloat16: write opt_level='O1' (float16) instead of 'O4'.")
    # as eager code does; torch's default makes backward passes of graphs under the autocast of their forward passes
    compiler_internals.backward_without_autocast()
    return True


@contextmanager
def suspended() -> Iterator[None]:
    """Inside, on this thread, O1 and O4 cast nothing; losses compute in FP32 all the same. Nests."""
    with torch.autocast(SPARE, dtype=_ACTS, enabled=is_open()), torch.autocast(SUSPENDED_SPARE, dtype=_ACTS):
        with autocast('cpu', None), autocast('cuda', None), autocast('xpu', None), autocast('mps', None):
            yield


def _in_its_region(segment: Callable[..., Any]) -> Callable[..., Any]:
    """A function that finds, wherever it is called, the region in which this one was called."""
    states = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in KINDS]
    originals: list[Any] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        reach()
        if not originals:
            originals.extend(copies.original_of(value) for value in args)
        for value, original in zip(args, originals):
            # it runs again with detached arguments
            if original is not None and original is not value:
                copies.keep_original(value, original)
        spare, operands, suspended = (torch.autocast(kind, dtype=dtype, enabled=on) for kind, dtype, on in states)
        with spare, operands, suspended:
            return segment(*args, **kwargs)

    return run


@functools.cache
def install() -> None:
    """Let segments that torch.utils.checkpoint runs again find the region of their forward pass; once in a process."""
    torch_internals.wrap_segments(_in_its_region)


# between two graphs they run as they are
never_compiled_alone(globals())
