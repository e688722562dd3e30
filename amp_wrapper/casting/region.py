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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from .. import compiler_internals, torch_internals
from ..compiler_internals import constant_when_traced, never_compiled_alone
from ..errors import AmpAttachError

#: The kinds of device, and the dispatch keys of two of them.
KINDS = SPARE, OPERANDS_SPARE, SUSPENDED_SPARE = 'ipu', 'hpu', 'xla'
KEY, OPERANDS_KEY = 'AutocastIPU', 'AutocastHPU'
#: What a region lets act: nothing, so that casts of others end; the registry; the registry and unlike operands; the registry
#: and the tables. :data:`AS_AROUND` opens none.
AS_AROUND, NOTHING, REGISTRY, OPERANDS, TABLES = '', 'nothing', 'registry', 'operands', 'tables'

_ACTS, _WITH_TABLES = torch.bfloat16, torch.float16
#: The types of the kinds of device in each of these; None is off.
_STATES: dict[str, dict[str, torch.dtype | None]] = {
    NOTHING: {SPARE: None, OPERANDS_SPARE: None},
    REGISTRY: {SPARE: _ACTS, OPERANDS_SPARE: None},
    OPERANDS: {SPARE: _ACTS, OPERANDS_SPARE: _ACTS},
    TABLES: {SPARE: _WITH_TABLES, OPERANDS_SPARE: None},
}
_reaches = [torch_internals.include_key(key) for key in (KEY, OPERANDS_KEY)]
_has_autocast = functools.cache(torch.amp.is_autocast_available)


class _Around:
    """What is open around code that is compiled: an attribute, which torch.compile looks at before it takes a graph.

    It does so where the code calls a cast module or a function with rules. Since some version between 2.6 and 2.13 it looks at
    the autocast of all kinds of devices by itself.
    """

    state = 0


_around = _Around()


def _note() -> None:
    """Before each call of what is compiled, on any thread."""
    for include in _reaches:
        include(True)
    _around.state = casts_ops() + 2 * is_open() + 4 * torch.is_autocast_enabled(OPERANDS_SPARE) + 8 * is_suspended()


@functools.cache
def _prepare(may_compile: bool) -> None:
    for key in () if may_compile else (KEY, OPERANDS_KEY):
        torch_internals.fall_through(key)
    if may_compile:
        compiler_internals.before_compiled_calls(_note)


@constant_when_traced
def reach() -> bool:
    """Let ops of this thread come to the keys; outside of regions they are excluded. What it returns means nothing."""
    _prepare(False)
    if compiler_internals.is_loaded():
        _prepare(True)
    for include in _reaches:
        include(True)
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
    return bool(_has_autocast(device))


def autocast_is_on(device: str) -> bool:
    """Whether autocast is on for a type of device; False for types that have none."""
    return has_autocast(device) and torch.is_autocast_enabled(device)


def device_of(tensors: Iterable[Tensor]) -> str:
    """The type of the device of the first tensor; 'cpu' without any."""
    for tensor in tensors:
        return tensor.device.type
    return 'cpu'


def spare(kind: str) -> AbstractContextManager[None]:
    """The first of the two blocks that make a region."""
    if not kind:
        return nullcontext()
    states = _STATES[REGISTRY if kind == TABLES and is_suspended() else kind]
    if torch.compiler.is_compiling():
        return torch.autocast(SPARE, dtype=states[SPARE] or _ACTS, enabled=states[SPARE] is not None)
    return _Switch(states)


def operands(kind: str) -> AbstractContextManager[None]:
    """The second one, which is part of the first outside of graphs."""
    if not kind or not torch.compiler.is_compiling():
        return nullcontext()
    if kind != OPERANDS and not torch.is_autocast_enabled(OPERANDS_SPARE):
        return nullcontext()
    return torch.autocast(OPERANDS_SPARE, dtype=_ACTS, enabled=kind == OPERANDS)


def autocast(device: str, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """:class:`torch.autocast` of a type, off for None. Nothing where that changes nothing, and where casts are suspended.

    Raises:
        AmpAttachError: bfloat16 on a GPU that has none.
    """
    if not has_autocast(device) or (dtype is None and not torch.is_autocast_enabled(device)):
        return nullcontext()
    if dtype is None:
        return torch.autocast(device, enabled=False)
    if is_suspended():
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


class _Switch:
    """A block in which autocast of some kinds of devices is on, with a type, or off. Blocks of torch's take five times as long.

    They drop the 16-bit copies that autocast keeps of weights, too, which stay here.
    """

    __slots__ = ('_before', '_to')

    def __init__(self, to: dict[str, torch.dtype | None]) -> None:
        self._to = to

    def __enter__(self) -> None:
        self._before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in self._to]
        for kind, dtype in self._to.items():
            torch.set_autocast_enabled(kind, dtype is not None)
            if dtype is not None:
                torch.set_autocast_dtype(kind, dtype)

    def __exit__(self, *_: object) -> None:
        for kind, is_on, dtype in self._before:
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, dtype)


def without_autocast(devices: Sequence[str]) -> AbstractContextManager[None]:
    """A block in which autocast is off for some types of devices, for which it is on around it."""
    if torch.compiler.is_dynamo_compiling():
        return autocast(devices[0], None) if devices else nullcontext()
    return _Switch(dict.fromkeys(devices))


@contextmanager
def opened(kind: str, device: str = 'cpu', dtype: torch.dtype | None = None) -> Iterator[None]:
    """A region around a block, with autocast of ``dtype`` for a device; None leaves autocast as it is around."""
    reach()
    with spare(kind), operands(kind), nullcontext() if dtype is None else autocast(device, dtype):
        yield


@contextmanager
def outside() -> Iterator[None]:
    """Inside, on this thread, no region is open, and casts are not suspended."""
    spare, operands, suspended = (torch.autocast(kind, enabled=False) for kind in KINDS)
    with spare, operands, suspended:
        yield


@contextmanager
def suspended() -> Iterator[None]:
    """Inside, on this thread, O1 and O4 cast nothing; losses compute in FP32 all the same. Nests."""
    reach()
    with torch.autocast(SPARE, dtype=_ACTS, enabled=is_open()), torch.autocast(SUSPENDED_SPARE, dtype=_ACTS):
        with autocast('cpu', None), autocast('cuda', None), autocast('xpu', None), autocast('mps', None):
            yield


# between two graphs they run as they are
never_compiled_alone(globals())
