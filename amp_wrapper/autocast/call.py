"""Calls one function by a rule of the FP32 registry or of the user: casts inputs, sets autocast, keeps in-place results."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..compiler_internals import constant_when_traced, untraced
from ..policy import said_once
from ..policy.copies import Copies
from ..policy.fp32_registry import BCE_WARNING, CLAMPED, FLOAT32, MODEL, WIDEST, Fp32Op
from ..policy.nested import CASTABLE, HALF_TYPES, cast_tensors, map_tensors
from . import graph, graph_region, listening, state
from .graph_region import GraphRegion
from .state import AutocastOff, autocast_is_on

_FLOAT32 = frozenset({torch.float32})
# x.add_(y), x += y
_WRITES = re.compile(r'(?:.*[^_]_|__i(?:add|sub|mul|div|truediv|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift)__)')


@dataclasses.dataclass(frozen=True)
class CallRule:
    """What becomes of the floating arguments of a call, as the user chose.

    Attributes:
        dtype: float16, bfloat16 or float32; None for the widest type among them.
    """

    dtype: torch.dtype | None


def tensors_in(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a call, in any nesting, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif value is not None and not isinstance(value, (bool, int, float, str)):
            map_tensors(note, value)
    return found


def _cast_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    held: int,
    target: torch.dtype,
    sources: frozenset[torch.dtype],
) -> Any:
    """Call ``function`` with copies of its arguments, but for the first ``held``."""
    copies = Copies(target, sources)
    result = function(*args[:held], *copies.cast(args[held:]), **copies.cast(kwargs))
    return copies.write_back(result)


# -- by the FP32 registry ----------------------------------------------------------------------------------------------


@untraced
def call(op: Fp32Op, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], held: int = 0) -> Any:
    """Call ``function`` in FP32.

    Args:
        op: Says which types to avoid, and what becomes of the results.
        function: The original.
        args: Any nesting of tensors in them is cast; differentiable. Iterators pass as they are.
        kwargs: The same.
        held: How many of the first arguments are handed on as they are: 1 for the ``self`` of a method.

    Returns:
        The result, floating tensors in the type that ``op.output`` asks for.
    """
    if op.output == CLAMPED:
        args, kwargs = _in_range(function, args, kwargs)
        return function(*args, **kwargs)
    tensors = tensors_in(args[held:], kwargs)
    narrow = is_narrow(op, tensors)
    _warn(op.warning, tensors)
    devices = devices_of(tensors) or _devices_of_modules(args[held:])
    args, kwargs = _wide_types(op, devices, args, kwargs)
    with autocast_off(op, devices, function):
        if not narrow:
            return function(*args, **kwargs)
        result = _cast_call(function, args, kwargs, held, torch.float32, HALF_TYPES)
    return narrowed(op, tensors, result)


def devices_of(tensors: Iterable[Tensor]) -> list[str]:
    """The types of the devices of tensors, in order."""
    return list(dict.fromkeys([tensor.device.type for tensor in tensors]))


def _devices_of_modules(values: Iterable[Any]) -> list[str]:
    """A method that is handed its module finds its tensors there."""
    return [t.device.type for m in values if isinstance(m, nn.Module) for t in list(m.parameters())[:1]]


def is_narrow(op: Fp32Op, tensors: Iterable[Tensor]) -> bool:
    """Whether any of the tensors has a type that ``op`` avoids."""
    return any(tensor.dtype in op.avoids(tensor.device.type) for tensor in tensors if tensor.dtype in HALF_TYPES)


def _speaks(region: GraphRegion | None) -> bool:
    return state.is_active(state.SPEAKS) if region is None else region.has(state.SPEAKS)


def _warn(text: str, tensors: list[Tensor], region: GraphRegion | None = None) -> None:
    if text and tensors and tensors[0].dtype in HALF_TYPES and _speaks(region):
        said_once.warn_once(text)


def warn_of_loss(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Warn of 16-bit probabilities that a loss is called with, before they are cast: its function sees FP32."""
    if isinstance(module, nn.BCELoss):
        region = graph_region.innermost() if torch.compiler.is_dynamo_compiling() else None
        _warn(BCE_WARNING, tensors_in(args, kwargs), region)


def _in_range(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], region: GraphRegion | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Finite numbers among the arguments that the 16-bit type of the call cannot hold become its largest."""
    values = (*args, *kwargs.values())
    # tensors of one number have no say in the type of the result
    types = [v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim()]
    dtype = kwargs.get('dtype') or (types[0] if types else None)
    if dtype not in HALF_TYPES:
        return args, kwargs
    limit = torch.finfo(dtype).max
    for value in values:
        if _is_beyond(value, limit) and _speaks(region):
            said_once.warn_clamped(_name(function), value, dtype)
            break
    return tuple([_limited(v, limit) for v in args]), {key: _limited(v, limit) for key, v in kwargs.items()}


def _is_beyond(value: Any, limit: float) -> bool:
    return type(value) in (int, float) and limit < abs(value) < math.inf


def _limited(value: Any, limit: float) -> Any:
    if isinstance(value, Tensor) and not value.dim() and value.dtype in (torch.float32, torch.float64):
        # what is under torch.where and torch.clamp, which lead here
        ops = torch.ops.aten
        return ops.where(value.isinf(), value, ops.clamp(value, -limit, limit))
    return math.copysign(limit, value) if _is_beyond(value, limit) else value


def autocast_off(op: Fp32Op, devices: list[str], function: Any) -> AutocastOff:
    """Switches autocast off where it is on, with a type that ``op`` avoids, for a call of ``function``."""
    off = [device for device in devices if state.autocast_type(device) in op.avoids(device)]
    told = listening.listener
    return AutocastOff(off) if told is None else listening.Told(told, op, function, off)


def _wide_types(
    op: Fp32Op, devices: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """dtype arguments ask for tensors of that type: they widen like the tensors."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.dtype) and value in op.avoids(devices[0] if devices else 'cpu'):
            args = tuple(torch.float32 if v is value else v for v in args)
            kwargs = {key: torch.float32 if v is value else v for key, v in kwargs.items()}
    return args, kwargs


def narrowed(op: Fp32Op, tensors: list[Tensor], result: Any, region: GraphRegion | None = None) -> Any:
    """``result`` in the type that the rule of the registry asks for.

    Args:
        op: The rule.
        tensors: Those that the call was handed.
        result: Its result in FP32.
        region: What is open where a graph is traced.
    """
    types = [tensor.dtype for tensor in tensors if tensor.dtype in CASTABLE]
    stays = op.output == FLOAT32 or (op.output == WIDEST and torch.float32 in types)
    if op.output == MODEL:
        stays = any(graph_region.autocast_type(region, device) is not None for device in devices_of(tensors))
    return result if stays or types[0] not in HALF_TYPES else cast_tensors(result, types[0], _FLOAT32)


def call_in_graph(
    region: GraphRegion,
    op: Fp32Op,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    held: int = 0,
) -> Any:
    """:func:`call`, where a graph is traced: the casts become part of it.

    Args:
        region: What is open.
        op: As for :func:`call`, as all that follow.
    """
    if op.output == CLAMPED:
        args, kwargs = _in_range(function, args, kwargs, region)
        return region.run(function, args, kwargs)
    tensors = tensors_in(args[held:], kwargs)
    narrow = is_narrow(op, tensors)
    _warn(op.warning, tensors, region)
    if narrow and _writes(function, kwargs):
        # what is written to stays the caller's tensor
        return call(op, function, args, kwargs, held)
    devices = devices_of(tensors) or _devices_of_modules(args[held:])
    args, kwargs = _wide_types(op, devices, args, kwargs)
    off = [device for device in devices if region.autocast_type(device) in op.avoids(device)]
    if not narrow:
        return _run(region, function, args, kwargs, off, None)
    copies = Copies(torch.float32, HALF_TYPES)
    wide = [*args[:held], *copies.cast(args[held:])]
    result = _run(region, function, wide, copies.cast(kwargs), off, None, copies)
    return narrowed(op, tensors, result, region)


def _run(
    region: GraphRegion,
    function: Callable[..., Any],
    args: Iterable[Any],
    kwargs: dict[str, Any],
    devices: list[str],
    dtype: torch.dtype | None,
    copies: Copies | None = None,
) -> Any:
    """Call a function in a graph with autocast of ``dtype``, None for off, on some devices; elsewhere as the region has it.

    What a function of Python writes to ``copies`` of its arguments reaches the caller's.
    """
    device = devices[0] if devices else None
    if not _is_op(function):
        # what is written in Python calls functions of torch, which come to the region by themselves
        if device is None:
            result = function(*args, **kwargs)
        else:
            inside = GraphRegion(region, None, device, dtype)
            graph.enter(inside)
            result = function(*args, **kwargs)
            graph.leave(inside)
        return result if copies is None else copies.write_back(result)
    if device is None:
        return region.run(function, tuple(args), kwargs)
    with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
        return function(*args, **kwargs)


def _writes(function: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    return kwargs.get('out') is not None or _WRITES.fullmatch(_name(function)) is not None


@constant_when_traced
def _name(function: Callable[..., Any]) -> str:
    return getattr(function, '__name__', '')


# -- by a rule of the user ---------------------------------------------------------------------------------------------


def rule_applies(tensors: list[Tensor]) -> bool:
    """Whether casts are on for these tensors: not in FP32 regions, where autocast is off."""
    return state.casts_on() and any(autocast_is_on(device) for device in devices_of(tensors))


@untraced
def call_by_rule(
    rule: CallRule,
    function: Callable[..., Any],
    tensors: list[Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    held: int = 0,
) -> Any:
    """Call ``function`` by the rule of the user.

    A function of torch is the op that the rule is about: autocast and the FP32 registry have no say in it. Other
    functions of Python may use weights, too: inside one with a 16-bit rule autocast has that type, inside one with the
    FP32 rule it is off, and the promote rule leaves it as it is.

    Args:
        rule: The type.
        function: The original.
        tensors: Those among its arguments, from :func:`tensors_in`.
        args: Floating tensors in any nesting are cast; differentiable. float64 is left alone.
        kwargs: The same.
        held: As in :func:`call`.

    Returns:
        The result as it comes. What the function wrote into its arguments reaches the caller's tensors.
    """
    target, is_op, devices = _target(rule, function, tensors, kwargs), _is_op(function), devices_of(tensors)
    with ExitStack() as stack:
        if listening.listener is not None:
            stack.enter_context(listening.Told(listening.listener, rule, function))
        if is_op:
            stack.enter_context(state.overruling())
        if is_op or rule.dtype is torch.float32:
            stack.enter_context(AutocastOff([device for device in devices if autocast_is_on(device)]))
        elif rule.dtype is not None:
            for device in filter(state.has_autocast, devices):
                stack.enter_context(torch.autocast(device, dtype=rule.dtype))
        if target is None:
            return function(*args, **kwargs)
        return _cast_call(function, args, kwargs, held, target, CASTABLE)


def rule_in_graph(rule: CallRule | None, region: GraphRegion, tensors: list[Tensor]) -> bool:
    """:func:`rule_applies`, where a graph is traced."""
    return rule is not None and region.casts and any(region.autocast_type(d) is not None for d in devices_of(tensors))


def call_by_rule_in_graph(
    region: GraphRegion,
    rule: CallRule,
    function: Callable[..., Any],
    tensors: list[Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    held: int = 0,
) -> Any:
    """:func:`call_by_rule`, where a graph is traced: the casts become part of it."""
    if _writes(function, kwargs):
        return call_by_rule(rule, function, tensors, args, kwargs, held)
    target, is_op, devices = _target(rule, function, tensors, kwargs), _is_op(function), devices_of(tensors)
    copies: Copies | None = None
    if target is not None and any(t.dtype in CASTABLE and t.dtype is not target for t in tensors):
        copies = Copies(target)
        args = (*args[:held], *copies.cast(args[held:]))
        kwargs = copies.cast(kwargs)
    if is_op or rule.dtype is torch.float32:
        on = [device for device in devices if region.autocast_type(device) is not None]
        return _run(region, function, args, kwargs, on, None, copies)
    if rule.dtype is None:
        return _run(region, function, args, kwargs, [], None, copies)
    return _run(region, function, args, kwargs, [d for d in devices if state.has_autocast(d)], rule.dtype, copies)


def _target(
    rule: CallRule, function: Callable[..., Any], tensors: list[Tensor], kwargs: dict[str, Any]
) -> torch.dtype | None:
    """The type to cast to; None where there is nothing to cast."""
    if rule.dtype is not None:
        return rule.dtype
    written = kwargs.get('out')
    if written is None and tensors and _WRITES.fullmatch(getattr(function, '__name__', '')):
        written = tensors[0]
    if isinstance(written, Tensor):
        # what is written to keeps its type, and the others follow it
        return written.dtype if written.dtype in CASTABLE else None
    types = {tensor.dtype for tensor in tensors if tensor.dtype in CASTABLE}
    return torch.float32 if len(types) > 1 else next(iter(types), None)


@constant_when_traced
def _is_op(function: Any) -> bool:
    """Whether a callable is one op: compiled, or a function of torch. What is written in Python may use weights."""
    while isinstance(function, (functools.partial, MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    if isinstance(function, nn.Module):
        return False
    kind = type(function)
    if kind is not FunctionType:
        return kind.__module__ == 'builtins' or kind.__module__.partition('.')[0] == 'torch'
    return (function.__module__ or '').partition('.')[0] == 'torch'
