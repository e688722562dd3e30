"""Dispatcher kernels for the ops that O1 and O4 cast and that torch's autocast does not; they act only in our regions.

torch's dispatcher asks the autocast key of a device first, while autocast is on. Where torch has no kernel for an op at that
key, one from here is registered: it casts in a region of the functional API (:func:`amp_wrapper.autocast.state.casts_on`) and
calls the op unchanged everywhere else. So an op is found under each of its names: ``x ** 2``, ``x.pow(2)``,
``torch.pow(x, 2)``, and from inside functions of Python and C++.

The kernels come when the first region asks for them and stay. With autocast off the dispatcher does not see them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from .. import torch_internals
from ..compiler_internals import constant_when_traced, never_compiled
from ..policy.autocast_lists import FLOAT32, FOLLOW, HALF, OP_RULES, PROMOTE, WRITE, OpRule
from ..policy.nested import CASTABLE
from . import listening, state
from .call import tensors_in

_KEYS = {'cpu': 'AutocastCPU', 'cuda': 'AutocastCUDA', 'xpu': 'AutocastXPU', 'mps': 'AutocastMPS'}

_lock = threading.Lock()
# device type -> the library that holds its kernels; torch takes them out when a library dies
_libraries: dict[str, Library] = {}


def install(device_type: str) -> None:
    """Put the kernels in place for a device type; once in a process. Does nothing for types that have no autocast."""
    if device_type in _libraries or device_type not in _KEYS:
        return
    with _lock:
        if device_type in _libraries:
            return
        key = _KEYS[device_type]
        library = Library('aten', 'IMPL')  # type: ignore[no-untyped-call]
        for rule in missing(device_type):
            op = overload_of(rule.op)
            library.impl(op, _kernel(op, rule, device_type, key), key, with_keyset=True)  # type: ignore[no-untyped-call]
        _libraries[device_type] = library


@constant_when_traced
def install_for_graph(device_type: str) -> bool:
    """:func:`install`, at the moment in which a graph is traced; what it returns means nothing."""
    install(device_type)
    return True


def missing(device_type: str) -> list[OpRule]:
    """The rules whose ops this torch has and its own list for the device lacks."""
    key = _KEYS[device_type]
    return [
        rule
        for rule in OP_RULES.values()
        if (device_type == 'cpu' or not rule.cpu_only)
        and overload_of(rule.op) is not None
        and not torch_internals.has_kernel(f'aten::{rule.op}', key)
    ]


def overload_of(name: str) -> Any:
    """The overload of an op of torch by a name such as 'softmax.int'; None where this torch has none."""
    packet, _, overload = name.partition('.')
    found = getattr(torch.ops.aten, packet, None)
    return None if found is None else getattr(found, overload or 'default', None)


def _kernel(op: Any, rule: OpRule, device_type: str, key: str) -> Callable[..., Any]:
    below = torch_internals.keys_below(key)
    name = rule.op.partition('.')[0]
    writes, follows = rule.rule == WRITE, rule.rule == FOLLOW
    fixed = torch.float32 if rule.rule in (FLOAT32, WRITE) else None
    run = without_schema(op)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        # a call may say by itself in which type to compute, as ``x.sum(dtype=torch.float16)`` does; autocast obeys. What is
        # written into integers, or into float64, stays what it is: torch refuses other types there
        if not state.casts_on() or kwargs.get('dtype') is not None or (follows and args[0].dtype not in CASTABLE):
            return op.redispatch(keyset & below, *args, **kwargs)
        target = fixed or _target(rule, device_type, args, kwargs)
        cast_args = list(args)
        for place, value in enumerate(args):
            if isinstance(value, (list, tuple)) or (isinstance(value, Tensor) and value.dtype is not target):
                cast_args[place] = _cast(value, target, device_type)
        for word, value in kwargs.items():
            kwargs[word] = _cast(value, target, device_type)
        # composite ops call others, which have to see what the outer one was given
        torch.set_autocast_enabled(device_type, False)
        told = listening.listener
        if told is not None:
            told.enters(rule, name)
        try:
            result = run(*cast_args, **kwargs)
            if writes and cast_args[0] is not args[0]:
                return args[0].copy_(result)
            return result
        finally:
            torch.set_autocast_enabled(device_type, True)
            if told is not None:
                told.leaves()

    kernel.__name__ = f'amp_{name}'
    never_compiled(kernel, with_callees=True)
    return kernel


def without_schema(op: Any) -> Callable[..., Any]:
    """The function of ``torch`` for an op, which reads its arguments faster than the op itself; the op where there is none.

    Both take the same arguments in the same order, and both end in the dispatcher.
    """
    name = op.overloadpacket.__name__
    # the binding refuses None among indices, which slices before a tensor become
    found = None if name.startswith('index_put') else torch_internals.variable_function(name)
    return op if found is None else found


def _target(rule: OpRule, device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    if rule.rule == HALF:
        return state.get_dtype(device_type)
    if rule.rule == PROMOTE:
        found = tensors_in(args, kwargs)
        types = {t.dtype for t in found if t.dtype in CASTABLE and t.device.type == device_type}
        return types.pop() if len(types) == 1 else torch.float32
    assert rule.rule == FOLLOW
    written: torch.dtype = args[0].dtype
    return written


def _cast(value: Any, dtype: torch.dtype, device_type: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in CASTABLE and value.device.type == device_type else value
    if isinstance(value, (list, tuple)):
        for item in value:
            # lists of tensors: the weights of an RNN, the operands of einsum
            if isinstance(item, Tensor):
                return [_cast(item, dtype, device_type) for item in value]
    return value
