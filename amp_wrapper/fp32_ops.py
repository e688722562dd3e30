"""Makes the functions of :mod:`amp_wrapper.fp32_registry` run in FP32 while a model of ours is at work.

During a forward pass, and during the backward pass (where checkpointed segments are recomputed), each member is replaced
by a stand-in in the module or class that owns it and in every module that imported it. The stand-in casts inputs up,
switches autocast off, and gives results back as the registry says; on threads that run no model of ours it calls the
original. Between passes nothing is replaced, so code that has nothing to do with us never meets a stand-in, and
functions keep their identity (pickle, ``torch.jit.script``). Functions that are not members are never touched.

An :class:`torch.autograd.Function` is caught at its ``forward`` method, which nobody keeps a reference to; its
``backward`` is wrapped once and for all, because a graph may outlive the pass, and only acts on graphs made here.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .fp32_registry import (
    CALLER,
    FLOAT32,
    FP32_METHODS,
    FP32_OPS,
    METHOD_REASON,
    Fp32Op,
    find,
    is_function_class,
    is_module_class,
    owner,
)
from .nested import CASTABLE, HALF_TYPES, cast_tensors, map_tensors

_MARK = '_amp_wrapper_fp32'


# -- one call --------------------------------------------------------------------------------------------------------


class _Inputs:
    """What the tensors of one call are like."""

    def __init__(self, op: Fp32Op) -> None:
        self._op = op
        self.first: torch.dtype | None = None
        self.devices: list[str] = []
        self.narrow = False

    def __call__(self, tensor: Tensor) -> Tensor:
        device = tensor.device.type
        if device not in self.devices:
            self.devices.append(device)
        if tensor.dtype in CASTABLE:
            self.first = self.first or tensor.dtype
            self.narrow = self.narrow or tensor.dtype in self._op.avoids(device)
        return tensor


def _look(op: Fp32Op, args: Any, kwargs: Any) -> _Inputs:
    seen = _Inputs(op)
    map_tensors(seen, args)
    if kwargs:
        map_tensors(seen, kwargs)
    return seen


def _widen_types(values: Any, avoided: frozenset[torch.dtype]) -> Any:
    """dtype arguments ask for tensors of that type: they widen like the tensors."""
    if isinstance(values, dict):
        return {k: torch.float32 if isinstance(v, torch.dtype) and v in avoided else v for k, v in values.items()}
    return tuple(torch.float32 if isinstance(v, torch.dtype) and v in avoided else v for v in values)


def call(op: Fp32Op, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``function`` in FP32.

    Args:
        op: Says which types to avoid, and what becomes of the results.
        function: The original.
        args: Any nesting of tensors in them is cast; differentiable.
        kwargs: The same.

    Returns:
        The result, floating tensors in the type that ``op.output`` asks for.
    """
    seen = _look(op, args, kwargs)
    with _without_autocast(op, seen.devices):
        avoided = op.avoids(seen.devices[0] if seen.devices else 'cpu')
        if seen.narrow:
            args, kwargs = (
                cast_tensors(args, torch.float32, HALF_TYPES),
                cast_tensors(kwargs, torch.float32, HALF_TYPES),
            )
        args, kwargs = _widen_types(args, avoided), _widen_types(kwargs, avoided)
        result = function(*args, **kwargs)
    if op.output == CALLER and seen.narrow and seen.first in HALF_TYPES:
        assert seen.first is not None
        result = cast_tensors(result, seen.first, frozenset({torch.float32}))
    return result


def _without_autocast(op: Fp32Op, devices: list[str]) -> ExitStack:
    """Switches autocast off where it is on, with a type that ``op`` avoids."""
    stack = ExitStack()
    for device in devices:
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) in op.avoids(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


# -- stand-ins -------------------------------------------------------------------------------------------------------


class _Member:
    """An object that runs in FP32 while any of its names is active: 'mmcv.ops.nms' is 'mmcv.ops.nms.nms' too."""

    def __init__(self, op: Fp32Op) -> None:
        self.op = op
        self.names = {op.name}

    def is_active(self) -> bool:
        """On this thread, or in a backward pass."""
        return any(not self.names.isdisjoint(names) for names in (*_thread.passes, *_backward_passes))


def _stand_in(member: _Member, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def in_fp32(*args: Any, **kwargs: Any) -> Any:
        return call(member.op, function, args, kwargs) if member.is_active() else function(*args, **kwargs)

    return in_fp32


def _forward_stand_in(member: _Member, forward: Callable[..., Any], with_context: bool) -> Callable[..., Any]:
    """For ``Function.forward``, inside which autograd records nothing: results are cast without a trace."""

    @functools.wraps(forward)
    def in_fp32(*args: Any, **kwargs: Any) -> Any:
        if not member.is_active():
            return forward(*args, **kwargs)
        op = member.op
        seen = _look(op, args, kwargs)
        with _without_autocast(op, seen.devices):
            if not seen.narrow:
                return forward(*args, **kwargs)
            wide = cast_tensors(args, torch.float32, HALF_TYPES)
            result = forward(*wide, **cast_tensors(kwargs, torch.float32, HALF_TYPES))
        narrowed = result
        if op.output == CALLER and seen.first in HALF_TYPES:
            assert seen.first is not None
            narrowed = cast_tensors(result, seen.first, frozenset({torch.float32}))
        if with_context:
            context = args[0]
            setattr(context, _MARK, True)
            _mark_again(context, result, narrowed)
        return narrowed

    return in_fp32


def _mark_again(context: Any, before: Any, after: Any) -> None:
    """``mark_non_differentiable`` was told of tensors that a cast has replaced since."""
    marked = {id(tensor) for tensor in context.non_differentiable or ()}
    if marked and before is not after:
        pairs = zip(before, after) if isinstance(before, tuple) else [(before, after)]
        context.mark_non_differentiable(*(new for old, new in pairs if id(old) in marked))


def _setup_stand_in(member: _Member, setup: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(setup)
    def in_fp32(ctx: Any, inputs: Any, output: Any) -> Any:
        if member.is_active():
            seen = _look(member.op, inputs, {})
            if seen.narrow:
                setattr(ctx, _MARK, True)
                inputs = cast_tensors(inputs, torch.float32, HALF_TYPES)
                output = cast_tensors(output, torch.float32, HALF_TYPES)
        return setup(ctx, inputs, output)

    return in_fp32


def _backward_stand_in(backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def in_fp32(ctx: Any, *gradients: Any) -> Any:
        if getattr(ctx, _MARK, False):
            gradients = cast_tensors(gradients, torch.float32, HALF_TYPES)
        # autograd casts what comes back to the types of the inputs
        return backward(ctx, *gradients)

    return in_fp32


# -- where members live ----------------------------------------------------------------------------------------------


class _Site:
    """One attribute that holds a member: of the class or module that owns it, or of a module that imported it."""

    def __init__(self, holder: Any, name: str, stand_in: Any, member: _Member) -> None:
        self.member = member
        self._holder, self._name, self._stand_in = holder, name, stand_in
        self._own = name in vars(holder)
        self._before = vars(holder).get(name)

    def install(self) -> None:
        if self._own:
            self._before = vars(self._holder).get(self._name)
        setattr(self._holder, self._name, self._stand_in)

    def remove(self) -> None:
        if vars(self._holder).get(self._name) is not self._stand_in:
            return  # somebody put something else there meanwhile: it is theirs now
        if self._own:
            setattr(self._holder, self._name, self._before)
        else:
            delattr(self._holder, self._name)


class _Members:
    """The members that were found so far, their sites, and whether the stand-ins are in place. One per process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users = 0
        self.known: dict[str, Fp32Op] = dict(FP32_OPS)
        self._unresolved: set[str] = set(FP32_OPS)
        # (id of the holder, attribute); sites keep their holders, so that an id stays its own
        self._sites: dict[tuple[int, str], _Site] = {}
        # id of an original -> original, stand-in, member
        self._stand_ins: dict[int, tuple[Any, Any, _Member]] = {}
        self._scanned: set[str] = set()
        self._modules = 0

    def add(self, ops: Iterable[Fp32Op]) -> None:
        """Take further members in; known names keep their entry."""
        with self.lock:
            for op in ops:
                if op.name not in self.known:
                    self.known[op.name] = op
                    self._unresolved.add(op.name)
                    self._modules = 0

    def add_method(self, op: Fp32Op, cls: type, name: str) -> None:
        """Take in a method of a class at hand, which may be a local one that no dotted name finds."""
        with self.lock:
            self.known.setdefault(op.name, op)
            before = len(self._sites)
            self._add_attribute(_Member(op), cls, name, getattr(cls, name))
            for site in list(self._sites.values())[before:] if self.users else ():
                site.install()

    def acquire(self) -> None:
        with self.lock:
            if self.users == 0 or len(sys.modules) != self._modules:
                fresh = self._look_around()
                for site in self._sites.values() if self.users == 0 else fresh:
                    site.install()
            self.users += 1

    def release(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                for site in self._sites.values():
                    site.remove()

    def _look_around(self) -> list[_Site]:
        """Find what became importable, and who imported it, since the last time."""
        if len(sys.modules) == self._modules:
            return []
        before = len(self._sites)
        known = len(self._stand_ins)
        for name in sorted(self._unresolved):
            value = find(name, load=False)
            if value is not None:
                self._unresolved.discard(name)
                self._resolve(self.known[name], value)
        if len(self._stand_ins) != known:
            self._scanned.clear()
        for name, module in list(sys.modules.items()):
            if name not in self._scanned:
                self._scanned.add(name)
                self._scan(module)
        self._modules = len(sys.modules)
        return list(self._sites.values())[before:]

    def _resolve(self, op: Fp32Op, value: Any) -> None:
        if is_module_class(value):
            return  # the business of casting
        known = self._stand_ins.get(id(value))
        if known is not None:
            known[2].names.add(op.name)
            return
        member = _Member(op)
        bound = getattr(value, '__self__', None)
        if is_function_class(bound) and getattr(value, '__name__', '') == 'apply':
            value = bound
        if is_function_class(value):
            self._resolve_function_class(member, value)
            return
        holder, name = owner(op.name)
        stand_in = self._add_attribute(member, holder, name, value)
        if not isinstance(holder, type) and stand_in is not None:
            self._stand_ins[id(value)] = (value, stand_in, member)

    def _add_attribute(self, member: _Member, holder: Any, name: str, value: Any) -> Any:
        raw = next((vars(base)[name] for base in getattr(holder, '__mro__', ()) if name in vars(base)), value)
        if isinstance(raw, (staticmethod, classmethod)):
            stand_in: Any = type(raw)(_stand_in(member, raw.__func__))
        else:
            stand_in = _stand_in(member, value)
        return stand_in if self._add_site(holder, name, stand_in, member) else None

    def _resolve_function_class(self, member: _Member, cls: Any) -> None:
        modern = cls.setup_context is not torch.autograd.Function.setup_context
        forward = staticmethod(_forward_stand_in(member, cls.forward, with_context=not modern))
        if not self._add_site(cls, 'forward', forward, member):
            return
        if modern:
            self._add_site(cls, 'setup_context', staticmethod(_setup_stand_in(member, cls.setup_context)), member)
        # for good: see the module's docstring
        cls.backward = staticmethod(_backward_stand_in(cls.backward))

    def _add_site(self, holder: Any, name: str, stand_in: Any, member: _Member) -> bool:
        """Whether the site is new; the names of a known one are joined."""
        known = self._sites.get((id(holder), name))
        if known is not None:
            known.member.names |= member.names
            return False
        self._sites[id(holder), name] = _Site(holder, name, stand_in, member)
        return True

    def _scan(self, module: Any) -> None:
        space = getattr(module, '__dict__', None)
        if not isinstance(space, dict):
            return
        for name, value in list(space.items()):
            known = self._stand_ins.get(id(value))
            if known is not None and known[0] is value:
                self._add_site(module, name, known[1], known[2])


_members = _Members()


# -- when they are active --------------------------------------------------------------------------------------------


class _Thread(threading.local):
    """The names that are active on this thread, one set for each model of ours in its forward pass."""

    def __init__(self) -> None:
        self.passes: list[frozenset[str]] = []


_thread = _Thread()
# autograd runs backward passes on threads of its own
_backward_passes: list[frozenset[str]] = []


@functools.lru_cache(maxsize=64)
def _extra(names: tuple[str, ...]) -> tuple[Fp32Op, ...]:
    return tuple(FP32_OPS.get(name, Fp32Op(name)) for name in names)


def _method(name: str) -> Fp32Op:
    return Fp32Op(name, FLOAT32, reason=METHOD_REASON)


_default_names = frozenset(FP32_OPS)


class OpSet:
    """The members for one model: the registry, the configuration's names, and the methods of the model's own classes.

    Args:
        extra: Dotted names beyond the registry; checked by :func:`amp_wrapper.fp32_registry.problems_of` before.
        classes: Classes of the model's modules; those that have one of ``FP32_METHODS`` run it in FP32.
    """

    def __init__(self, extra: tuple[str, ...] = (), classes: Iterable[type] = ()) -> None:
        self.extra = tuple(extra)
        methods = set()
        for cls in classes:
            for name in FP32_METHODS:
                if callable(getattr(cls, name, None)):
                    op = _method(f'{cls.__module__}.{cls.__qualname__}.{name}')
                    _members.add_method(op, cls, name)
                    methods.add(op.name)
        self.methods = frozenset(methods)
        self._join()

    def _join(self) -> None:
        _members.add(_extra(self.extra))
        _members.add(_method(name) for name in self.methods)
        self.names = _default_names | frozenset(self.extra) | self.methods

    def __getstate__(self) -> dict[str, Any]:
        return {'extra': self.extra, 'methods': self.methods}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.extra, self.methods = tuple(state['extra']), frozenset(state['methods'])
        self._join()


def enter(ops: OpSet) -> None:
    """A model's forward pass begins on this thread."""
    _members.acquire()
    _thread.passes.append(ops.names)


def leave() -> None:
    """A model's forward pass ends on this thread, by returning or by an exception."""
    if _thread.passes:
        _thread.passes.pop()
        _members.release()


def depth() -> int:
    """The number of forward passes under way on this thread."""
    return len(_thread.passes)


def unwind(to: int) -> None:
    """Leave down to ``to`` passes; for exceptions such as KeyboardInterrupt, after which torch runs no hooks."""
    while depth() > to:
        leave()


@contextmanager
def in_backward(ops: OpSet) -> Iterator[None]:
    """Around a backward pass: what is recomputed in it sees the same types as in the forward pass, on any thread."""
    _members.acquire()
    _backward_passes.append(ops.names)
    try:
        yield
    finally:
        _backward_passes.remove(ops.names)
        _members.release()


def is_installed() -> bool:
    """Whether the stand-ins are in place."""
    return _members.users > 0


def module_classes(extra: tuple[str, ...], dtype: torch.dtype, device_type: str) -> tuple[type[nn.Module], ...]:
    """The module classes among the members that avoid ``dtype`` there.

    Args:
        extra: Dotted names beyond the registry.
        dtype: The 16-bit type of the model or of autocast.
        device_type: Such as 'cpu'.
    """
    ops = {**FP32_OPS, **{op.name: op for op in _extra(extra)}}
    found = (find(name, load=False) for name, op in ops.items() if dtype in op.avoids(device_type))
    return tuple(value for value in found if is_module_class(value))
