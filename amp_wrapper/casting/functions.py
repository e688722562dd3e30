"""Functions of Python that run by a rule in regions: of the FP32 registry, of a configuration, or of the user.

A function gets a new body, once and for good, and stays the same object under every name that somebody kept; outside of regions
it does what it did. What is written in C has no body: a function of Python takes its place where it is defined, and where
others have imported it by then. Functions of torch that the registry names are kernels: see :mod:`.kernels`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..compiler_internals import constant_when_traced, never_compiled
from ..errors import AmpUsageError
from ..policy.copies import Copies
from ..policy.fp32_registry import CALLER, FLOAT32, FP32_OPS, METHOD_REASON, MODEL, Fp32Op
from ..policy.lookup import find, is_function_class, is_module_class, parent_of
from ..policy.nested import CASTABLE, HALF_TYPES, tensors_in
from . import autograd_functions, kernels, listening, region

#: Of methods that run in FP32 by their name.
METHOD_OP = Fp32Op('*', FLOAT32, reason=METHOD_REASON)
# x.add_(y), x += y
_WRITES = re.compile(r'(?:.*[^_]_|__i(?:add|sub|mul|div|truediv|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift)__)')


@dataclasses.dataclass(frozen=True)
class CallRule:
    """What becomes of the floating arguments of a call, as the user chose.

    Attributes:
        dtype: float16, bfloat16 or float32; None for the widest type among them.
    """

    dtype: torch.dtype | None


class Rules:
    """The rules of one function.

    Attributes:
        op: By the registry or configurations; None where there is none.
        rule: By the user.
    """

    def __init__(self) -> None:
        self.op: Fp32Op | None = None
        self.rule: CallRule | None = None
        self._ops: list[Fp32Op] = []

    def entry(self) -> Fp32Op | None:
        """The entry of the registry or of configurations that holds now."""
        return self.op

    def add(self, op: Fp32Op, model: nn.Module | None) -> None:
        """Take up an entry; that of a configuration, as long as its model is alive."""
        self._ops.append(op)
        self.op = functools.reduce(_join, self._ops)
        if model is not None:
            weakref.finalize(model, self._remove, op).atexit = False

    def _remove(self, op: Fp32Op) -> None:
        self._ops.remove(op)
        self.op = functools.reduce(_join, self._ops) if self._ops else None

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], skip: int) -> Any:
        """Call a function by the rule that holds here.

        Args:
            function: As it was.
            args: Its arguments.
            kwargs: The same.
            skip: How many of the first arguments are handed on as they are: 1 for the ``self`` of a method.
        """
        if not region.is_open():
            return function(*args, **kwargs)
        if self.rule is not None and region.casts_ops():
            tensors = tensors_in((args[skip:], kwargs))
            if any(region.autocast_is_on(tensor.device.type) for tensor in tensors):
                return call_by_rule(self.rule, function, args, kwargs, skip)
        if self.op is None:
            return function(*args, **kwargs)
        return call_in_fp32(self.op, function, args, kwargs, skip)


def _join(left: Fp32Op, right: Fp32Op) -> Fp32Op:
    """What holds where two entries name one function."""
    outputs = (left.output, right.output)
    output = next((rule for rule in (FLOAT32, MODEL) if rule in outputs), CALLER)
    warning = left.warning or right.warning
    return dataclasses.replace(left, output=output, types=left.types | right.types, warning=warning)


def call_in_fp32(op: Fp32Op, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], skip: int = 0) -> Any:
    """Call a function in FP32.

    Args:
        op: Says which types to avoid, and what becomes of the results.
        function: The original.
        args: Any nesting of tensors in them is cast; differentiable. Iterators pass as they are.
        kwargs: The same.
        skip: As in :meth:`Rules.call`.

    Returns:
        The result, floating tensors in the type that ``op.output`` asks for.

    Raises:
        AmpUsageError: The function has written into a 16-bit argument, of which it got a copy.
    """
    tensors = tensors_in((args[skip:], kwargs))
    modules = [value for value in args if isinstance(value, nn.Module)]
    # what is handed a module may find its tensors there
    on = kernels.autocast_devices(op, tensors or [weight for module in modules for weight in module.parameters()])
    if not kernels.is_narrow(op, tensors):
        with listening.told(op, function), _autocast_off(on):
            return function(*args, **kwargs)
    kernels.warn(op, tensors)
    copies = Copies(torch.float32, HALF_TYPES)
    wide = [*args[:skip], *(_wide_type(value) for value in copies.cast(args[skip:]))]
    words = {name: _wide_type(value) for name, value in copies.cast(kwargs).items()}
    with listening.told(op, function), _autocast_off(on):
        result = function(*wide, **words)
    if torch.compiler.is_dynamo_compiling():
        # an error would only break the graph
        return kernels.narrowed(op, tensors, copies.write_back(result), bool(on))
    if copies.written():
        raise AmpUsageError(
            f'{_name(function)} has written into a 16-bit argument, and runs in FP32 with a copy of it: the copy was written. '
            f'Call it with a new tensor, or leave it out of fp32_ops.'
        )
    return kernels.narrowed(op, tensors, result, bool(on))


def _wide_type(value: Any) -> Any:
    """An argument that asks for 16-bit tensors asks for FP32 ones."""
    return torch.float32 if isinstance(value, torch.dtype) and value in HALF_TYPES else value


def _autocast_off(devices: list[str]) -> AbstractContextManager[None]:
    return region.autocast(devices[0], None) if devices else nullcontext()


def call_by_rule(rule: CallRule, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], skip: int = 0) -> Any:
    """Call a function by a rule of the user.

    A function of torch is the op that the rule is about: autocast and the FP32 registry have no say in it. Other functions of
    Python may use weights, too: inside one with a 16-bit rule autocast has that type, inside one with the FP32 rule it is off,
    and the promote rule leaves it as it is.

    Returns:
        The result as it comes. What the function wrote into its arguments reaches the caller's tensors.
    """
    tensors, is_op = tensors_in((args[skip:], kwargs)), _is_op(function)
    device = region.device_of(tensors)
    block: AbstractContextManager[None] = nullcontext()
    if is_op or rule.dtype is torch.float32:
        block = region.autocast(device, None)
    elif rule.dtype is not None and region.has_autocast(device):
        block = torch.autocast(device, dtype=rule.dtype)
    target = rule.dtype or _widest(function, tensors, kwargs)
    with listening.told(rule, function), region.spare(region.NOTHING if is_op else region.AS_AROUND), block:
        if target is None:
            return function(*args, **kwargs)
        copies = Copies(target)
        result = function(*args[:skip], *copies.cast(args[skip:]), **copies.cast(kwargs))
    return copies.write_back(result)


def _widest(function: Callable[..., Any], tensors: list[Tensor], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The type that the promote rule casts to; None where there is nothing to cast."""
    written = kwargs.get('out')
    if written is None and tensors and _writes(function):
        written = tensors[0]
    if isinstance(written, Tensor):
        # what is written to keeps its type, and the others follow it
        return written.dtype if written.dtype in CASTABLE else None
    types = {tensor.dtype for tensor in tensors if tensor.dtype in CASTABLE}
    return torch.float32 if len(types) > 1 else next(iter(types), None)


@constant_when_traced
def _writes(function: Callable[..., Any]) -> bool:
    return _WRITES.fullmatch(getattr(function, '__name__', '')) is not None


@constant_when_traced
def _name(function: Callable[..., Any]) -> str:
    return getattr(function, '__qualname__', repr(function))


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


# -- which functions have rules ------------------------------------------------------------------------------------------------

_lock = threading.RLock()
_RULES = '_amp_wrapper_rules'
#: Entries whose functions are not there yet, since nobody has imported their package.
_waiting: dict[str, Fp32Op] = {}
_modules: tuple[int, str] = (0, '')


def add(op: Fp32Op, model: nn.Module | None = None) -> None:
    """Let the function behind a name run in FP32 in regions; later, where its package is not imported yet.

    Args:
        op: The entry. Classes of modules are left to the casts of modules.
        model: Of a configuration, which acts as long as this model is alive; None for the registry.
    """
    value = find(op.name)
    if value is None:
        _waiting[op.name] = op
        return
    if is_module_class(value):
        return
    bound = getattr(value, '__self__', None)
    if is_function_class(bound) and getattr(value, '__name__', '') == 'apply':
        value = bound
    if is_function_class(value):
        rules_of_class(value).add(op, model)
    elif op.name == 'torch.Tensor.numpy':
        _replace_numpy()
    # with a warning is what torch refuses under the autocast of a GPU, whose kernels come first
    elif model is not None or not kernels.add(op) or (op.warning and isinstance(value, FunctionType)):
        rules_of(*parent_of(op.name)).add(op, model)


@functools.cache
def install() -> None:
    """Take up the FP32 registry; once in a process."""
    kernels.install_registry()
    for op in FP32_OPS.values():
        add(op)


@constant_when_traced
def look_around() -> bool:
    """Take up functions of packages that were imported since the last time. What it returns means nothing."""
    global _modules
    now = len(sys.modules), next(reversed(sys.modules))
    if now != _modules:
        with _lock:
            _modules = now
            waiting = dict(_waiting)
            _waiting.clear()
            for op in waiting.values():
                add(op)
    return True


def rules_of(holder: Any, name: str) -> Rules:
    """The rules of a function, which gets them where it has none.

    Args:
        holder: The module, class or object whose attribute it is.
        name: Of the attribute.
    """
    with _lock:
        value = inspect.getattr_static(holder, name)
        function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        is_method = isinstance(holder, type) and not isinstance(value, staticmethod)
        while isinstance(function, FunctionType):
            found: Rules | None = vars(function).get(_RULES)
            if found is not None:
                return found
            if not function.__closure__:
                return _replace_body(function, int(is_method))
            if '__wrapped__' not in vars(function):
                break
            function = function.__wrapped__  # type: ignore[attr-defined]
        if isinstance(value, (staticmethod, classmethod)):
            return _replace_attribute(holder, name, function, int(is_method), type(value))
        return _replace_attribute(holder, name, getattr(holder, name), int(is_method))


def _replace_body(function: FunctionType, skip: int) -> Rules:
    code, rules = function.__code__, Rules()
    original = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__, original.__module__ = function.__kwdefaults__, function.__module__
    original.__qualname__ = function.__qualname__

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # the ``self`` of a method that is no tensor must not be replaced by a copy
        return rules.call(original, args, kwargs, skip if args and not isinstance(args[0], Tensor) else 0)

    signature = inspect.signature(function)
    # other threads may call it meanwhile
    function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), '_amp_wrapper_run': run}
    # where it stands is what tools look for that read sources, such as torch.jit.script
    function.__code__ = _entry.__code__.replace(
        co_name=code.co_name, co_filename=code.co_filename, co_firstlineno=code.co_firstlineno
    )
    function.__signature__ = signature  # type: ignore[attr-defined]
    setattr(function, _RULES, rules)
    return rules


def _entry(*args: Any, _amp_wrapper_run: Any, **kwargs: Any) -> Any:
    return _amp_wrapper_run(args, kwargs)


def _replace_attribute(holder: Any, name: str, value: Any, skip: int, kind: Any = None) -> Rules:
    rules = Rules()

    @functools.wraps(value)
    def call(*args: Any, **kwargs: Any) -> Any:
        return rules.call(value, args, kwargs, skip if args and not isinstance(args[0], Tensor) else 0)

    setattr(call, _RULES, rules)
    # the original's own name may be that of a private class, by which pickle does not find this one
    if isinstance(holder, (type, ModuleType)):
        inside = [holder.__module__, holder.__qualname__] if isinstance(holder, type) else [holder.__name__]
        call.__module__, call.__qualname__ = inside[0], '.'.join([*inside[1:], name])
    setattr(holder, name, call if kind is None else kind(call))
    if not isinstance(holder, type):
        for module in list(sys.modules.values()):
            space = getattr(module, '__dict__', None)
            # compiled modules of torch import nothing: what they call they call in C++
            if isinstance(space, dict) and not str(space.get('__name__')).startswith('torch._C.'):
                for key in [key for key, each in space.items() if each is value]:
                    setattr(module, key, call)
    return rules


@functools.cache
def _replace_numpy() -> None:
    """Let arrays of 16-bit tensors be FP32 in regions. Graphs make arrays by this method: it is never part of one."""
    numpy = Tensor.numpy

    @functools.wraps(numpy)
    def wide(self: Tensor, **options: Any) -> Any:
        return numpy(self.float() if region.is_open() and self.dtype in HALF_TYPES else self, **options)

    never_compiled(wide, with_callees=True)
    Tensor.numpy = wide  # type: ignore[method-assign, assignment]


def rules_of_class(cls: Any) -> Rules:
    """The rules of the ``forward`` of a class of :class:`torch.autograd.Function`."""
    found: Rules | None = vars(cls).get(_RULES)
    if found is None:
        found = Rules()
        setattr(cls, _RULES, found)
        autograd_functions.wrap(cls, found.entry)
    return found
