"""Kernels of the dispatcher: for the FP32 registry and operands of unlike types in regions, and for the tables of O1 and O4.

An op is found under each of its names, in functions of Python and C++, kept references and graphs. Other ops do not notice.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from .. import torch_internals
from ..compiler_internals import constant_when_traced, never_compiled
from ..policy import said_once
from ..policy.autocast_lists import CPU_ONLY, HALF, OP_RULES, PROMOTE
from ..policy.fp32_registry import FLOAT32, MODEL, RANGE_OPS, Fp32Op
from ..policy.nested import CASTABLE, HALF_TYPES, cast_tensors, tensors_in
from ..torch_internals import writes_in_place
from . import region
from .copies import Copies

_KEYS = {'cpu': 'AutocastCPU', 'cuda': 'AutocastCUDA', 'xpu': 'AutocastXPU', 'mps': 'AutocastMPS'}
_PRODUCTS = """
    mm addmm bmm baddbmm addbmm mv addmv addr dot vdot tensordot linalg_multi_dot chain_matmul convolution
    conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding
    conv_transpose1d conv_transpose2d.input conv_transpose3d.input scaled_dot_product_attention
"""
#: Refuse to write another type than that of their first argument.
_WRITES = """
    index_put index_copy index_add index_reduce masked_scatter put scatter.src scatter_add scatter_reduce.two
    addbmm_ addmm_ addmv_ addr_ baddbmm_ index_add_ index_copy_ index_put_ index_reduce_ lerp_.Scalar lerp_.Tensor
    masked_scatter_ put_ scatter_.src scatter_.reduce scatter_add_ scatter_reduce_.two
"""

# AutocastCPU is the lowest of the keys of autocast
_below_autocast = torch_internals.keys_below('AutocastCPU')
_below_regions = torch_internals.keys_below(region.KEY)
#: By dispatch key; torch takes kernels out when their library dies.
_libraries: dict[str, Library] = {}


def overloads_of(name: str) -> list[Any]:
    """All overloads of the op behind a function of torch, but for those that write into ``out``.

    Args:
        name: Such as 'torch.linalg.inv' or 'torch.Tensor.cholesky'.
    """
    aten = ('linalg_' if name.startswith('torch.linalg.') else 'fft_' if name.startswith('torch.fft.') else '') + (
        name.rpartition('.')[2]
    )
    packet = getattr(torch.ops.aten, aten, None)
    return [] if packet is None else [getattr(packet, each) for each in packet.overloads() if 'out' not in each]


def overload_of(name: str) -> Any:
    """The overload of an op of torch by a name such as 'softmax.int'; None where this torch has none."""
    packet, _, overload = name.partition('.')
    return getattr(getattr(torch.ops.aten, packet, None), overload or 'default', None)


def _put(key: str, overload: Any, kernel: Callable[..., Any], with_keyset: bool = True) -> None:
    if key not in _libraries:
        _libraries[key] = Library('aten', 'IMPL')  # type: ignore[no-untyped-call]
    never_compiled(kernel, with_callees=True)
    _libraries[key].impl(overload, kernel, key, with_keyset=with_keyset)  # type: ignore[no-untyped-call]


# -- types -------------------------------------------------------------------------------------------------------------------


def cast(value: Any, dtype: torch.dtype, sources: frozenset[torch.dtype] = CASTABLE) -> Any:
    """One argument of an op in another type: a tensor, a list of tensors, or anything else as it is."""
    if isinstance(value, Tensor):
        return value if value.dtype is dtype or value.dtype not in sources else value.to(dtype)
    # the weights of an RNN, the operands of einsum
    return [cast(item, dtype, sources) for item in value] if isinstance(value, (list, tuple)) else value


def widest(tensors: Iterable[Tensor]) -> torch.dtype:
    """The type in which tensors of unlike types meet, where none of them says in which."""
    types = {tensor.dtype for tensor in tensors if tensor.dtype in CASTABLE}
    return types.pop() if len(types) == 1 else torch.float32


# -- FP32 --------------------------------------------------------------------------------------------------------------------


def is_narrow(op: Fp32Op, tensors: Iterable[Tensor]) -> bool:
    """Whether any of the tensors has a type that ``op`` avoids."""
    return any(tensor.dtype in op.types for tensor in tensors)


def call_in_fp32(op: Fp32Op, run: Any, args: Any, kwargs: Any, copies: Copies | None = None) -> Any:
    """Call a function by an entry of the registry, in FP32 where it would compute in a type that the entry avoids.

    Args:
        op: Says which types to avoid, and what becomes of the result.
        run: Calls it.
        args: Its arguments. Those that ask for 16-bit tensors ask for FP32 ones.
        kwargs: The same.
        copies: Cast the arguments, and let what is written to them reach the caller's; by default nothing writes.

    Returns:
        The result, floating tensors in the type that ``op.output`` asks for.
    """
    tensors = tensors_in((args, kwargs))
    on = _autocast_device(op, tensors)
    narrow = is_narrow(op, tensors)
    if narrow:
        if op.warning and tensors[0].dtype in HALF_TYPES:
            said_once.warn_once(op.warning)
        args = [_in_fp32(value, copies) for value in args]
        kwargs = {name: _in_fp32(value, copies) for name, value in kwargs.items()}
    with region.autocast(on, None) if on else nullcontext():
        result = run(*args, **kwargs)
    if not narrow:
        return result
    if copies is not None:
        result = copies.write_back(result)
    types = [tensor.dtype for tensor in tensors if tensor.dtype in CASTABLE]
    stays = op.output == FLOAT32 or (op.output == MODEL and on)
    return result if stays or types[0] not in HALF_TYPES else cast_tensors(result, types[0], frozenset({torch.float32}))


def _in_fp32(value: Any, copies: Copies | None) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float32 if value in HALF_TYPES else value
    return cast(value, torch.float32, HALF_TYPES) if copies is None else copies.cast(value)


def _autocast_device(op: Fp32Op, tensors: Iterable[Tensor]) -> str:
    """The type of device of a call for which autocast is on, with a type that ``op`` avoids; '' for none."""
    # what is handed no tensors finds some in its modules
    devices = dict.fromkeys(tensor.device.type for tensor in tensors) or _KEYS
    for device in devices:
        if region.autocast_is_on(device) and torch.get_autocast_dtype(device) in op.types:
            return device
    # torch 2.6 traces no next() with a default
    return ''


# -- in regions --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _SpareKernel:
    """What one overload of an op does in a region.

    Attributes:
        overload: The overload.
        op: Its entry in the registry; None where it has none.
        follows: Whether what is written takes the type of what it is written into.
        clamps: Whether numbers beyond the range of its 16-bit tensors become the largest of the type.
    """

    overload: Any
    op: Fp32Op | None = None
    follows: bool = False
    clamps: bool = False

    def run(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Is called by the dispatcher, with the dispatch keys and the arguments of a call."""
        overload = self.overload
        if self.clamps:
            args, kwargs = _in_range(overload, args, kwargs)
        # torch refuses other types where integers or float64 are written; what is not in place O1 and O4 promote
        if self.follows and args[0].dtype in CASTABLE and (writes_in_place(overload) or not region.casts_ops()):
            args = (args[0], *(cast(value, args[0].dtype) for value in args[1:]))
        if self.op is None:
            return overload.redispatch(keys & _below_regions, *args, **kwargs)
        # the keys of this call have those of autocast, whatever is turned off
        run = functools.partial(overload.redispatch, keys & _below_autocast)
        return call_in_fp32(self.op, run, args, kwargs)


@functools.cache
def _spare_kernel(overload: Any) -> _SpareKernel:
    kernel = _SpareKernel(overload)
    _put(region.KEY, overload, kernel.run)
    return kernel


def add(op: Fp32Op) -> bool:
    """Let the op behind a function of torch run in FP32 in regions. Whether there is such an op."""
    overloads = overloads_of(op.name) if op.name.startswith('torch.') else []
    for overload in overloads:
        _spare_kernel(overload).op = op
    return bool(overloads)


def install() -> None:
    """Put the kernels of regions in place, but for those of the registry."""
    region.reach()
    for name in RANGE_OPS.split():
        for overload in overloads_of(name):
            # what torch makes relu of takes a number that fits
            if overload not in (torch.ops.aten.clamp_min.default, torch.ops.aten.clamp_max.default):
                _spare_kernel(overload).clamps = True
    for overload in filter(None, map(overload_of, _WRITES.split())):
        _spare_kernel(overload).follows = True
    for overload in filter(None, map(overload_of, _PRODUCTS.split())):
        _put(region.OPERANDS_KEY, overload, _product(overload), with_keyset=False)


def _in_range(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Finite numbers among the arguments that the 16-bit type of a call cannot hold become its largest."""
    values = (*args, *kwargs.values())
    # tensors of one number have no say in the type of the result
    types = [v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim()]
    dtype = kwargs.get('dtype') or (types[0] if types else None)
    if dtype not in HALF_TYPES:
        return args, kwargs
    limit = torch.finfo(dtype).max

    def limited(value: Any) -> Any:
        if isinstance(value, Tensor) and not value.dim() and value.dtype in (torch.float32, torch.float64):
            return torch.where(value.isinf(), value, value.clamp(-limit, limit))
        if type(value) in (int, float) and limit < abs(value) < math.inf:
            said_once.warn_clamped(op.overloadpacket.__name__, dtype)
            return math.copysign(limit, value)
        return value

    return tuple(map(limited, args)), {name: limited(value) for name, value in kwargs.items()}


def _product(overload: Any) -> Callable[..., Any]:
    """16-bit and FP32 operands of a product meet in 16-bit."""
    run = _without_schema(overload)
    include = torch_internals.include_key(region.OPERANDS_KEY)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # what the op calls has operands of one type
        include(False)
        try:
            # a mask of attention, the fourth argument, may be FP32
            given = args[0] if isinstance(args[0], (list, tuple)) else args[:3]
            types = dict.fromkeys(value.dtype for value in given if isinstance(value, Tensor))
            if len(types) > 1 and not HALF_TYPES.isdisjoint(types):
                half = next(dtype for dtype in types if dtype in HALF_TYPES)
                args = (*cast(args[:3], half), *args[3:])
            return run(*args, **kwargs)
        finally:
            include(True)

    return kernel


def _without_schema(op: Any) -> Callable[..., Any]:
    """The function of ``torch`` for an op, which reads its arguments faster than the op itself; the op where there is none."""
    name = op.overloadpacket.__name__
    # the binding refuses None among indices, which slices before a tensor become
    found = None if name == 'index_put' else torch_internals.variable_function(name)
    return op if found is None else found


# -- the tables of O1 and O4 -------------------------------------------------------------------------------------------------


@constant_when_traced
def install_tables(device: str) -> bool:
    """Put kernels in place for the ops that torch's own list for a device lacks; once in a process.

    They act in regions with tables alone. Does nothing for types of devices without autocast. What it returns means nothing.
    """
    key = _KEYS.get(device, '')
    if key and key not in _libraries:
        for op, rule in OP_RULES.items():
            overload = None if op in CPU_ONLY and device != 'cpu' else overload_of(op)
            if overload is not None and not torch_internals.has_kernel(f'aten::{op}', key):
                _put(key, overload, _by_rule(overload, rule, device, torch_internals.keys_below(key)))
    return True


def _by_rule(overload: Any, rule: str, device: str, below: Any) -> Callable[..., Any]:
    run = _without_schema(overload)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        # a call may say by itself in which type to compute, as ``x.sum(dtype=torch.float16)`` does; autocast obeys
        if kwargs.get('dtype') is not None or not region.casts_ops():
            return overload.redispatch(keys & below, *args, **kwargs)
        target = torch.float32
        if rule == HALF:
            target = torch.get_autocast_dtype(device)
        elif rule == PROMOTE:
            target = widest(tensors_in((args, kwargs)))
        new = [cast(value, target) for value in args]
        words = {name: cast(value, target) for name, value in kwargs.items()} if kwargs else kwargs
        # composite ops call others, which have to see what the outer one was given
        torch.set_autocast_enabled(device, False)
        try:
            return run(*new, **words)
        finally:
            torch.set_autocast_enabled(device, True)

    return kernel
