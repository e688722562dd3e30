"""Functions of Python that run by a rule in regions: of the FP32 registry, of a configuration, or of the user.

A function gets a new body, once and for good, and stays the same object under every name that somebody kept; outside of regions
it does what it did. What is written in C has no body: a function of Python takes its place where it is defined. Functions of
torch that the registry names are kernels: see :mod:`.kernels`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ..compiler_internals import constant_when_traced, never_compiled, never_compiled_alone
from ..errors import AmpConfigError, AmpUsageError
from ..policy.fp32_registry import FLOAT32, FP32_OPS, METHOD_REASON, Fp32Op
from ..policy.levels import Policy
from ..policy.lookup import find, is_class, parent_of
from ..policy.nested import HALF_TYPES, cast_tensors, tensors_in
from . import kernels, region
from .copies import Copies

#: Of methods that run in FP32 by their name.
METHOD_OP = Fp32Op('*', METHOD_REASON, FLOAT32)


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
        op: By the registry or configurations, of several the newest; None where there is none.
        rule: By the user.
    """

    def __init__(self, rule: CallRule | None = None) -> None:
        self.op: Fp32Op | None = None
        self.rule = rule
        self._ops: list[Fp32Op] = []

    def add(self, op: Fp32Op, policy: Policy | None) -> None:
        """Take up an entry; that of a configuration, as long as a rule holds it."""
        self._ops.append(op)
        self.op = op
        if policy is not None:
            weakref.finalize(policy, self._remove, op).atexit = False

    def _remove(self, op: Fp32Op) -> None:
        self._ops.remove(op)
        self.op = self._ops[-1] if self._ops else None

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, as it was, by the rule that holds here."""
        if region.is_open():
            tensors = tensors_in((args, kwargs)) if self.rule is not None and region.casts_ops() else ()
            if self.rule is not None and any(region.autocast_is_on(tensor.device.type) for tensor in tensors):
                return call_by_rule(self.rule, function, args, kwargs)
            if self.op is not None:
                return call_in_fp32(self.op, function, args, kwargs)
        return function(*args, **kwargs)


def call_in_fp32(op: Fp32Op, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of Python in FP32; see :func:`.kernels.call_in_fp32`. Its arguments may be any nesting of tensors."""
    return kernels.call_in_fp32(op, function, args, kwargs, Copies(torch.float32, HALF_TYPES))


def call_by_rule(rule: CallRule, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function by a rule of the user.

    A function of torch is the op that the rule is about: autocast and the FP32 registry have no say in it. Other functions of
    Python may use weights, too: inside one with a 16-bit rule autocast has that type, inside one with the FP32 rule it is off,
    and the promote rule leaves it as it is.

    Returns:
        The result as it comes. What the function wrote into its arguments reaches the caller's tensors.
    """
    tensors, is_op = tensors_in((args, kwargs)), _is_op(function)
    device = region.device_of(tensors)
    block: AbstractContextManager[None] = nullcontext()
    if is_op or rule.dtype is torch.float32:
        block = region.autocast(device, None)
    elif rule.dtype is not None and region.has_autocast(device):
        block = torch.autocast(device, dtype=rule.dtype)
    copies = Copies(rule.dtype or kernels.widest(tensors))
    with region.spare(region.NOTHING if is_op else region.AS_AROUND), block:
        result = function(*copies.cast(args), **copies.cast(kwargs))
    return copies.write_back(result)


@constant_when_traced
def _is_op(function: Any) -> bool:
    """Whether a callable is one op: compiled, or a function of torch. What is written in Python may use weights."""
    if isinstance(function, (nn.Module, MethodType)):
        return False
    kind = function if isinstance(function, FunctionType) else type(function)
    return (kind.__module__ or '').partition('.')[0] in ('builtins', 'torch')


# -- which functions have rules ------------------------------------------------------------------------------------------------

_lock = threading.RLock()
_RULES = '_amp_wrapper_rules'
#: Entries whose functions are not there yet, since nobody has imported their package.
_waiting: dict[str, Fp32Op] = {}
_modules: tuple[int, str] = (0, '')


def add(op: Fp32Op, policy: Policy | None = None) -> None:
    """Let the function behind a name run in FP32 in regions; later, where its package is not imported yet.

    Args:
        op: The entry. Classes of modules are left to the casts of modules.
        policy: The configuration that names it: it acts as long as that object lives. None for the registry.
    """
    value = find(op.name)
    if value is None:
        _waiting[op.name] = op
        return
    bound = getattr(value, '__self__', None)
    if is_class(bound, torch.autograd.Function) and getattr(value, '__name__', '') == 'apply':
        value = bound
    if is_class(value, torch.autograd.Function):
        _rules_of_class(value).add(op, policy)
    # with a warning is what torch refuses under the autocast of a GPU, whose kernels come first
    elif not is_class(value, nn.Module) and (
        policy is not None or not kernels.add(op) or (op.warning and isinstance(value, FunctionType))
    ):
        rules_of(*parent_of(op.name)).add(op, policy)


@functools.cache
def install() -> None:
    """Take up the FP32 registry; once in a process."""
    kernels.install()
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
            for op in [_waiting.pop(name) for name in list(_waiting)]:
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
        found: Rules | None = getattr(function, '__dict__', {}).get(_RULES)
        if found is None:
            found = Rules()
            if isinstance(function, FunctionType):
                _replace_body(function, found)
            else:
                _replace_attribute(holder, name, found)
        return found


def _replace_body(function: FunctionType, rules: Rules) -> None:
    code = function.__code__
    original = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    original.__kwdefaults__, original.__module__ = function.__kwdefaults__, function.__module__
    original.__qualname__ = function.__qualname__

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return rules.call(original, args, kwargs)

    signature = inspect.signature(function)
    # other threads may call it meanwhile
    function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), '_amp_wrapper_run': run}
    # where it stands is what tools look for that read sources, such as torch.jit.script; its closure has to fit
    function.__code__ = _entry.__code__.replace(
        co_name=code.co_name,
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
        co_freevars=code.co_freevars,
    )
    function.__signature__ = signature  # type: ignore[attr-defined]
    setattr(function, _RULES, rules)


def _entry(*args: Any, _amp_wrapper_run: Any, **kwargs: Any) -> Any:
    return _amp_wrapper_run(args, kwargs)


def _replace_attribute(holder: Any, name: str, rules: Rules) -> None:
    value = getattr(holder, name)

    @functools.wraps(value)
    def call(*args: Any, **kwargs: Any) -> Any:
        return rules.call(value, args, kwargs)

    setattr(call, _RULES, rules)
    never_compiled(call, with_callees=True)
    # the original's own name may be that of a private class, by which pickle does not find this one
    if isinstance(holder, type):
        call.__module__, call.__qualname__ = holder.__module__, f'{holder.__qualname__}.{name}'
    else:
        call.__module__, call.__qualname__ = getattr(holder, '__name__', call.__module__), name
    setattr(holder, name, call)


# -- autograd Functions ------------------------------------------------------------------------------------------------------

_IN_FP32 = '_amp_wrapper_fp32'


def _rules_of_class(cls: Any) -> Rules:
    """The rules of a class of :class:`torch.autograd.Function`, whose methods follow them: nobody keeps a reference to those.

    Gradients meet FP32 where the forward pass ran in FP32; for good, since a graph may outlive every forward pass.

    Raises:
        AmpConfigError: It has ``setup_context``, of whose arguments there are no FP32 copies.
    """
    found: Rules | None = vars(cls).get(_RULES)
    if found is not None:
        return found
    name = f'{cls.__module__}.{cls.__qualname__}'
    if cls.setup_context is not torch.autograd.Function.setup_context:
        problem = 'a Function with setup_context() cannot be given FP32 copies of its arguments'
        raise AmpConfigError([f"fp32_ops='{name}': {problem}. Name the function that calls its apply()."])
    forward, backward, rules = cls.forward, cls.backward, Rules()

    @functools.wraps(forward)
    def forward_by_rules(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if rules.op is not None and region.is_open() and kernels.is_narrow(rules.op, tensors_in((args, kwargs))):
            setattr(ctx, _IN_FP32, True)
        return rules.call(forward, (ctx, *args), kwargs)

    @functools.wraps(backward)
    def backward_in_fp32(ctx: Any, *gradients: Any) -> Any:
        if getattr(ctx, _IN_FP32, False):
            if torch.is_grad_enabled():
                raise AmpUsageError(
                    f'backward(create_graph=True) through {name}, which runs in FP32 with copies of its 16-bit inputs: its '
                    f'second derivative would be lost. Cast its inputs with .float() before calling it, or keep the module '
                    f'that calls it in FP32 (keep_fp32=[...]).'
                )
            gradients = cast_tensors(gradients, torch.float32, HALF_TYPES)
        # autograd casts what comes back to the types of the inputs
        return backward(ctx, *gradients)

    cls.forward, cls.backward = staticmethod(forward_by_rules), staticmethod(backward_in_fp32)
    setattr(cls, _RULES, rules)
    return rules


# between two graphs they run as they are
never_compiled_alone(globals())
