"""Kernels of the dispatcher: for the FP32 registry and operands of unlike types in regions, and for the tables of O1 and O4.

An op is found under each of its names, in functions of Python and C++, kept references and graphs. Other ops do not notice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from .. import torch_internals
from ..compiler_internals import constant_when_traced, never_compiled
from ..policy import said_once
from ..policy.autocast_lists import FLOAT32 as IN_FLOAT32
from ..policy.autocast_lists import FOLLOW, HALF, OP_RULES, PROMOTE, WRITE, OpRule
from ..policy.fp32_registry import FLOAT32, MODEL, RANGE_OPS, Fp32Op
from ..policy.nested import CASTABLE, HALF_TYPES, cast_tensors, tensors_in
from . import listening, region

_KEYS = {'cpu': 'AutocastCPU', 'cuda': 'AutocastCUDA', 'xpu': 'AutocastXPU', 'mps': 'AutocastMPS'}
_PRODUCTS = """
    mm addmm bmm baddbmm addbmm mv addmv addr dot vdot tensordot linalg_multi_dot chain_matmul convolution
    conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding
    conv_transpose1d conv_transpose2d.input conv_transpose3d.input scaled_dot_product_attention
"""
_WRITES = 'index_put index_copy index_add index_reduce masked_scatter put scatter.src scatter_add scatter_reduce.two'
_ONLY_FLOAT32 = frozenset({torch.float32})


def overload_of(name: str) -> Any:
    """The overload of an op of torch by a name such as 'softmax.int'; None where this torch has none."""
    packet, _, overload = name.partition('.')
    return getattr(getattr(torch.ops.aten, packet, None), overload or 'default', None)


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


# -- in regions --------------------------------------------------------------------------------------------------------------


#: AutocastCPU is the lowest of the keys of autocast.
_below_autocast = torch_internals.keys_below('AutocastCPU')


class _SpareKernel:
    """What one overload of an op does in a region.

    Attributes:
        op: Its entry in the registry; None where it has none.
        follows: Whether what is written takes the type of what it is written into.
        clamps: Whether numbers beyond the range of its 16-bit tensors become the largest of the type.
    """

    def __init__(self, overload: Any) -> None:
        self.op: Fp32Op | None = None
        self.follows = False
        self.clamps = False
        self._overload = overload
        self._below = torch_internals.keys_below(region.KEY)

    def run(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Is called by the dispatcher, with the dispatch keys and the arguments of a call."""
        if self.clamps:
            args, kwargs = in_range(self._overload, args, kwargs)
        if self.follows and not region.casts_ops() and args[0].dtype in CASTABLE:
            args = (args[0], *(_cast(value, args[0].dtype) for value in args[1:]))
        if self.op is None:
            return self._overload.redispatch(keys & self._below, *args, **kwargs)
        return self._in_fp32(self.op, keys, args, kwargs)

    def _in_fp32(self, op: Fp32Op, keys: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((args, kwargs))
        narrow = is_narrow(op, tensors)
        if narrow:
            warn(op, tensors)
            args, kwargs = cast_tensors((args, kwargs), torch.float32, HALF_TYPES)
            kwargs = {name: torch.float32 if value in HALF_TYPES else value for name, value in kwargs.items()}
        on = autocast_devices(op, tensors)
        # the keys of this call have those of autocast, whatever is turned off
        keys &= _below_autocast if on else self._below
        with AutocastOff(on), listening.told(op, self._overload):
            result = self._overload.redispatch(keys, *args, **kwargs)
        return narrowed(op, tensors, result, bool(on)) if narrow else result


class AutocastOff:
    """Inside, autocast is off for some devices, for which it is on around it. No new block: copies of weights stay."""

    __slots__ = ('_devices',)

    def __init__(self, devices: Iterable[str]) -> None:
        self._devices = devices

    def __enter__(self) -> None:
        for device in self._devices:
            torch.set_autocast_enabled(device, False)

    def __exit__(self, *_: object) -> None:
        for device in self._devices:
            torch.set_autocast_enabled(device, True)


_libraries: dict[str, Library] = {}
_spare: dict[Any, _SpareKernel] = {}


def _spare_kernel(overload: Any) -> _SpareKernel:
    if overload not in _spare:
        kernel = _spare[overload] = _SpareKernel(overload)
        never_compiled(kernel.run, with_callees=True)
        _library(region.KEY).impl(overload, kernel.run, region.KEY, with_keyset=True)  # type: ignore[no-untyped-call]
    return _spare[overload]


def _library(key: str) -> Library:
    """That of a dispatch key; torch takes kernels out when their library dies."""
    if key not in _libraries:
        _libraries[key] = Library('aten', 'IMPL')  # type: ignore[no-untyped-call]
    return _libraries[key]


@functools.cache
def install_registry() -> None:
    """Put the kernels of regions in place; once in a process."""
    region.reach()
    for name in RANGE_OPS.split():
        for overload in overloads_of(name):
            # what torch makes relu of takes a number that fits
            if overload not in (torch.ops.aten.clamp_min.default, torch.ops.aten.clamp_max.default):
                _spare_kernel(overload).clamps = True
    follow = [rule.op for rule in OP_RULES.values() if rule.rule == FOLLOW]
    for name in (*follow, *_WRITES.split()):
        overload = overload_of(name)
        if overload is not None:
            _spare_kernel(overload).follows = True
    for name in _PRODUCTS.split():
        overload = overload_of(name)
        if overload is not None:
            _library(region.OPERANDS_KEY).impl(overload, _product(overload), region.OPERANDS_KEY)  # type: ignore[no-untyped-call]


def add(op: Fp32Op) -> bool:
    """Let the op behind a function of torch run in FP32 in regions. Whether there is such an op."""
    overloads = overloads_of(op.name) if op.name.startswith('torch.') else []
    for overload in overloads:
        _spare_kernel(overload).op = op
    return bool(overloads)


def is_narrow(op: Fp32Op, tensors: Iterable[Tensor]) -> bool:
    """Whether any of the tensors has a type that ``op`` avoids."""
    return any(tensor.dtype in op.types for tensor in tensors)


def warn(op: Fp32Op, tensors: list[Tensor]) -> None:
    """Give the warning of ``op``, if it has one, where the first tensor is 16-bit."""
    if op.warning and tensors[0].dtype in HALF_TYPES:
        said_once.warn_once(op.warning)


def autocast_devices(op: Fp32Op, tensors: Iterable[Tensor]) -> list[str]:
    """The devices of the tensors for which autocast is on, with a type that ``op`` avoids."""
    devices = dict.fromkeys(tensor.device.type for tensor in tensors)
    return [d for d in devices if region.autocast_is_on(d) and torch.get_autocast_dtype(d) in op.types]


def narrowed(op: Fp32Op, tensors: Iterable[Tensor], result: Any, under_autocast: bool) -> Any:
    """The FP32 result of a call in the type that the rule of its entry asks for.

    Args:
        op: The entry.
        tensors: What the call was handed.
        result: Its result.
        under_autocast: Whether autocast was on around it.
    """
    types = [tensor.dtype for tensor in tensors if tensor.dtype in CASTABLE]
    stays = op.output == FLOAT32 or (op.output == MODEL and under_autocast)
    return result if stays or types[0] not in HALF_TYPES else cast_tensors(result, types[0], _ONLY_FLOAT32)


def in_range(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Finite numbers among the arguments that the 16-bit type of a call cannot hold become its largest.

    Args:
        op: The overload, for the warning.
        args: Tensors of one number have no say in the type of the result.
        kwargs: The same.
    """
    values = (*args, *kwargs.values())
    types = [v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim()]
    dtype = kwargs.get('dtype') or (types[0] if types else None)
    if dtype not in HALF_TYPES:
        return args, kwargs
    limit = torch.finfo(dtype).max
    beyond = next((value for value in values if _is_beyond(value, limit)), None)
    if beyond is not None:
        said_once.warn_clamped(op.overloadpacket.__name__, beyond, dtype)
    return tuple(_limited(v, limit) for v in args), {name: _limited(v, limit) for name, v in kwargs.items()}


def _is_beyond(value: Any, limit: float) -> bool:
    return type(value) in (int, float) and limit < abs(value) < math.inf


def _limited(value: Any, limit: float) -> Any:
    if isinstance(value, Tensor) and not value.dim() and value.dtype in (torch.float32, torch.float64):
        return torch.where(value.isinf(), value, value.clamp(-limit, limit))
    return math.copysign(limit, value) if _is_beyond(value, limit) else value


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
            dtype = _half_of(given)
            if dtype is None:
                return run(*args, **kwargs)
            operands = [_cast(value, dtype) for value in given]
            return run(operands) if given is args[0] else run(*operands, *args[3:], **kwargs)
        finally:
            include(True)

    never_compiled(kernel, with_callees=True)
    return kernel


def _half_of(operands: Iterable[Any]) -> torch.dtype | None:
    """The 16-bit type among operands of unlike types; None where their types agree."""
    first: torch.dtype | None = None
    for value in operands:
        if isinstance(value, Tensor) and value.dtype is not first:
            if first is not None:
                return first if first in HALF_TYPES else value.dtype if value.dtype in HALF_TYPES else None
            first = value.dtype
    return None


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype in CASTABLE else value


def _without_schema(op: Any) -> Callable[..., Any]:
    """The function of ``torch`` for an op, which reads its arguments faster than the op itself; the op where there is none."""
    name = op.overloadpacket.__name__
    # the binding refuses None among indices, which slices before a tensor become
    found = None if name.startswith('index_put') else torch_internals.variable_function(name)
    return op if found is None else found


# -- the tables of O1 and O4 -------------------------------------------------------------------------------------------------


@constant_when_traced
def install_tables(device: str) -> bool:
    """Put kernels in place for the ops that torch's own list for a device lacks; once in a process.

    They act in regions with tables alone. Does nothing for types of devices without autocast. What it returns means nothing.
    """
    key = _KEYS.get(device)
    if key is not None and key not in _libraries:
        for rule in missing(device):
            overload = overload_of(rule.op)
            kernel = _by_rule(overload, rule, device, torch_internals.keys_below(key))
            _library(key).impl(overload, kernel, key, with_keyset=True)  # type: ignore[no-untyped-call]
    return True


def missing(device: str) -> Iterator[OpRule]:
    """The rules whose ops this torch has and its own list for the device lacks."""
    for rule in OP_RULES.values():
        wanted = overload_of(rule.op) is not None and (device == 'cpu' or not rule.cpu_only)
        if wanted and not torch_internals.has_kernel(f'aten::{rule.op}', _KEYS[device]):
            yield rule


def _by_rule(overload: Any, rule: OpRule, device: str, below: Any) -> Callable[..., Any]:
    run = _without_schema(overload)
    fixed = torch.float32 if rule.rule in (IN_FLOAT32, WRITE) else None

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        # a call may say by itself in which type to compute, as ``x.sum(dtype=torch.float16)`` does; autocast obeys. What is
        # written into integers, or into float64, stays what it is: torch refuses other types there
        follows_other = rule.rule == FOLLOW and args[0].dtype not in CASTABLE
        if follows_other or kwargs.get('dtype') is not None or not region.casts_ops():
            return overload.redispatch(keys & below, *args, **kwargs)
        target = fixed or _target(rule, device, args, kwargs)
        new = [_to(value, target, device) for value in args]
        words = {name: _to(value, target, device) for name, value in kwargs.items()} if kwargs else kwargs
        # composite ops call others, which have to see what the outer one was given
        torch.set_autocast_enabled(device, False)
        try:
            with listening.told(rule, overload):
                result = run(*new, **words)
            return args[0].copy_(result) if rule.rule == WRITE and new[0] is not args[0] else result
        finally:
            torch.set_autocast_enabled(device, True)

    never_compiled(kernel, with_callees=True)
    return kernel


def _to(value: Any, dtype: torch.dtype, device: str) -> Any:
    if isinstance(value, Tensor):
        is_other = value.dtype is not dtype and value.dtype in CASTABLE and value.device.type == device
        return value.to(dtype) if is_other else value
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        # the weights of an RNN, the operands of einsum
        return [_to(item, dtype, device) for item in value]
    return value


def _target(rule: OpRule, device: str, args: Any, kwargs: Any) -> torch.dtype:
    if rule.rule == HALF:
        return torch.get_autocast_dtype(device)
    if rule.rule == PROMOTE:
        types = {t.dtype for t in tensors_in((args, kwargs)) if t.dtype in CASTABLE and t.device.type == device}
        return types.pop() if len(types) == 1 else torch.float32
    written: torch.dtype = args[0].dtype
    return written
