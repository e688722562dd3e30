"""Makes the members of :mod:`amp_wrapper.policy.fp32_registry` run in FP32 while a model of ours is at work.

A *pass* is a forward pass of a model of ours on one thread, or a backward pass, in which checkpointed segments run again on
threads of autograd's own. During a pass each function of the registry is replaced by a stand-in, in the module or class
that owns it and in every module that imported it; the stand-in acts where the pass's model names the function, and calls
what it found there otherwise. When the last pass ends, everything is put back, so that functions keep their identity for
pickle, ``torch.jit.script`` and other people's patches. Functions that are not members are never touched.

What nobody keeps a reference to is wrapped once and for all, and is the identity at rest: ``forward`` of autograd
Functions, and the methods by which other code enters modules of an attached model (:data:`FP32_METHODS` and
:data:`PASS_METHODS`).
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..policy.fp32_registry import (
    CALLER,
    CAST_OPS,
    FLOAT32,
    FP32_METHODS,
    FP32_OPS,
    METHOD_REASON,
    MODEL,
    REFUSED,
    Fp32Op,
)
from ..policy.lookup import find, is_function_class, is_module_class, parent_of
from . import recompute as segments
from . import rule_call
from . import state as passes
from .call import call, call_method, forward_stand_in, setup_stand_in
from .rule_call import CallRule

# part of what this module offers: a pass is begun here, and known there
from .state import depth as depth
from .state import in_forward as in_forward
from .state import recording as recording

#: Methods by which users and frameworks enter a model or a part of it without calling it: a pass begins there too.
PASS_METHODS: tuple[str, ...] = ('loss', 'predict', 'extract_feat', 'inference', *FP32_METHODS)

_METHOD_OP = Fp32Op('*', FLOAT32, reason=METHOD_REASON)
_STAND_IN = '_amp_wrapper_stand_in'
_VERB = '_amp_wrapper_verb'
_ABSENT = object()


def _cast_key(name: str) -> str:
    """The entry of a name where O1 and O4 cast op by op."""
    return f'casts:{name}'


def _config_key(op: Fp32Op) -> str:
    """A name from a configuration may say more than the registry's entry of the same name."""
    return f'config:{op.output}:{op.name}'


class _Member:
    """An object that runs in FP32 while any of its names is active: 'mmcv.ops.nms' is 'mmcv.ops.nms.nms' too.

    Or by a rule of the user, where O1 and O4 cast op by op.
    """

    def __init__(self) -> None:
        self.ops: dict[str, Fp32Op] = {}
        self.rule: CallRule | None = None

    def active(self) -> Fp32Op | None:
        """What holds for this thread now."""
        found: Fp32Op | None = None
        for key, op in self.ops.items():
            if passes.is_active(key):
                found = op if found is None else _joined(found, op)
        return found


@functools.lru_cache(maxsize=1024)
def _joined(left: Fp32Op, right: Fp32Op) -> Fp32Op:
    outputs = (left.output, right.output)
    output = next((rule for rule in (FLOAT32, MODEL) if rule in outputs), CALLER)
    return Fp32Op(left.name, output, left.cpu | right.cpu, left.cuda | right.cuda, left.reason)


class _Site:
    """One attribute that holds a member: of the class or module that owns it, or of a module that imported it.

    Args:
        member: What it holds.
        holder: The class or module.
        name: Of the attribute.
        imported: The member's object, where the attribute is not the member's own. Such a name may hold something else one
            day, a variable of a notebook for one, which is left alone then.
    """

    def __init__(self, member: _Member, holder: Any, name: str, imported: Any = None) -> None:
        self.member = member
        self._imported = imported
        self._holder, self._name = holder, name
        self._space: Mapping[str, Any] = vars(holder)
        # what is there between passes: nothing, where the attribute is inherited
        self.at_rest: Any = _ABSENT
        self._before: Any = None
        self.stand_in: Any = None

    def install(self) -> None:
        """Wrap what is there now: the original, or what somebody else put there."""
        current = self._space.get(self._name, _ABSENT)
        if self.stand_in is None or current is not self.at_rest:
            if self._imported is not None and not _leads_to(current, self._imported):
                self.stand_in = None
                return
            self._wrap(current)
        setattr(self._holder, self._name, self.stand_in)

    def _wrap(self, current: Any) -> None:
        # a stand-in may be left there by somebody who saved it in the middle of a pass
        self.at_rest = _ABSENT if current is _ABSENT else _original(current)
        found = _original(getattr(self._holder, self._name)) if current is _ABSENT else self.at_rest
        if found is not self._before or self.stand_in is None:
            self._before = found
            self.stand_in = _stand_in(self.member, found, isinstance(self._holder, type))

    def remove(self) -> None:
        """Put back what was there, unless somebody has replaced the stand-in."""
        if self.stand_in is None or self._space.get(self._name) is not self.stand_in:
            return
        if self.at_rest is _ABSENT:
            delattr(self._holder, self._name)
        else:
            setattr(self._holder, self._name, self.at_rest)


class _Holder:
    """The sites of one module or class. Of a plain module, all at once: two walks through a dict in C, each way."""

    def __init__(self, holder: Any) -> None:
        # classes notice what is set on them, and modules of a class of their own may
        self._space: dict[str, Any] | None = vars(holder) if type(holder) is ModuleType else None
        self.sites: dict[str, _Site] = {}
        self._at_rest: dict[str, Any] = {}
        self._stand_ins: dict[str, Any] = {}

    def install(self) -> None:
        """Put the stand-ins in place."""
        space = self._space
        if space is not None and self._at_rest and self._at_rest.items() <= space.items():
            space.update(self._stand_ins)
            return
        for site in self.sites.values():
            site.install()
        if space is not None and all(site.stand_in is not None for site in self.sites.values()):
            self._at_rest = {name: site.at_rest for name, site in self.sites.items()}
            self._stand_ins = {name: site.stand_in for name, site in self.sites.items()}

    def remove(self) -> None:
        """Put back what was there."""
        space = self._space
        if space is not None and self._stand_ins and self._stand_ins.items() <= space.items():
            space.update(self._at_rest)
            return
        for site in self.sites.values():
            site.remove()

    def add(self, site: _Site, name: str) -> None:
        """Take a further site in."""
        self.sites[name] = site
        self._at_rest, self._stand_ins = {}, {}


def _function(value: Any) -> Any:
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def _original(value: Any) -> Any:
    """What a stand-in stands for; anything else is its own."""
    function = _function(value)
    # by the dict, since mocks have every attribute
    return vars(function).get(_STAND_IN, value) if isinstance(function, FunctionType) else value


def _leads_to(value: Any, original: Any) -> bool:
    """Whether ``value`` is ``original``, or was made around it by :func:`functools.wraps`."""
    value = _original(value)
    while value is not original and isinstance(value, FunctionType) and '__wrapped__' in vars(value):
        value = value.__wrapped__  # type: ignore[attr-defined]
    return value is original


def _stand_in(member: _Member, original: Any, of_class: bool) -> Any:
    function = _function(original)
    run = call_method if of_class and isinstance(original, (FunctionType, classmethod)) else call

    @functools.wraps(function)
    def in_fp32(*args: Any, **kwargs: Any) -> Any:
        rule = member.rule
        if rule is not None and passes.casts_on():
            held = 1 if run is call_method and args and not isinstance(args[0], torch.Tensor) else 0
            seen = rule_call.look(args[held:], kwargs)
            if rule_call.applies(seen):
                return rule_call.run(rule, function, seen, args, kwargs, held)
        op = member.active()
        if op is None:
            return function(*args, **kwargs)
        how = call if args and isinstance(args[0], torch.Tensor) else run
        return how(op, function, args, kwargs)

    setattr(in_fp32, _STAND_IN, original)
    return type(original)(in_fp32) if isinstance(original, (staticmethod, classmethod)) else in_fp32


class _Members:
    """The members that were found so far, their sites, and whether the stand-ins are in place. One per process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users = 0
        self._keys: set[str] = set(FP32_OPS)
        self._wanted: dict[str, Fp32Op] = dict(FP32_OPS)
        # (id of the holder, attribute); sites keep their holders, so that an id stays its own
        self._sites: dict[tuple[int, str], _Site] = {}
        self._holders: dict[int, _Holder] = {}
        # id of an original -> itself, its member
        self._originals: dict[int, tuple[Any, _Member]] = {}
        self._function_classes: dict[int, tuple[Any, _Member]] = {}
        self._scanned: set[str] = set()
        self._fingerprint: tuple[Any, ...] = ()

    def add(self, ops: Mapping[str, Fp32Op]) -> None:
        """Take further members in, by key."""
        with self.lock:
            for key, op in ops.items():
                if key not in self._keys:
                    self._keys.add(key)
                    self._wanted[key] = op
                    self._fingerprint = ()

    def add_rule(self, holder: Any, name: str, rule: CallRule) -> None:
        """Let an attribute be called by a rule of the user, from now on; in place of an earlier one."""
        with self.lock:
            value = _original(getattr(holder, name))
            of_class = isinstance(holder, type)
            site = self._sites.get((id(holder), name))
            known = None if of_class else self._originals.get(id(value))
            if site is None:
                # under all of its names, as members of the registry are
                site = self._add_site(_Member() if known is None else known[1], holder, name)
                if known is None and not of_class:
                    self._originals[id(value)] = (value, site.member)
                    self._scanned.clear()
                    self._fingerprint = ()
                if self.users > 0:
                    for fresh in [site, *self._look_around()]:
                        fresh.install()
            site.member.rule = rule

    def acquire(self) -> None:
        """A pass begins."""
        with self.lock:
            fresh = self._look_around()
            try:
                for place in self._holders.values() if self.users == 0 else fresh:
                    place.install()
            except BaseException:
                if self.users == 0:
                    self._remove()
                raise
            self.users += 1

    def release(self) -> None:
        """A pass ends."""
        with self.lock:
            self.users -= 1
            if self.users == 0:
                self._remove()
                if self._now() != self._fingerprint:
                    self._clean_new_modules()

    @contextmanager
    def held(self) -> Iterator[None]:
        """The stand-ins are in place inside."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def _remove(self) -> None:
        for holder in self._holders.values():
            holder.remove()

    @staticmethod
    def _now() -> tuple[Any, ...]:
        """Changes when modules come, and when names are bound in an interactive session."""
        return len(sys.modules), next(reversed(sys.modules), ''), len(vars(sys.modules['__main__']))

    def _look_around(self) -> list[_Site]:
        """Find what became importable, and who imported it, since the last time."""
        now = self._now()
        if now == self._fingerprint:
            return []
        before, known = len(self._sites), len(self._originals)
        for key in sorted(self._wanted):
            value = find(self._wanted[key].name, load=False)
            if value is not None:
                self._resolve(key, self._wanted.pop(key), value)
        if len(self._originals) != known:
            self._scanned.clear()
        self._scanned.discard('__main__')
        for name, module in list(sys.modules.items()):
            if name not in self._scanned:
                self._scanned.add(name)
                self._scan(module)
        self._fingerprint = now
        return list(self._sites.values())[before:]

    def _clean_new_modules(self) -> None:
        """A module that was imported in the middle of a pass holds stand-ins: it gets the originals."""
        for name, module in list(sys.modules.items()):
            if name not in self._scanned and isinstance(getattr(module, '__dict__', None), dict):
                for key, value in list(vars(module).items()):
                    if _original(value) is not value:
                        setattr(module, key, _original(value))

    def _resolve(self, key: str, op: Fp32Op, value: Any) -> None:
        if is_module_class(value):
            return  # the business of casting
        value = _original(value)
        bound = getattr(value, '__self__', None)
        if is_function_class(bound) and getattr(value, '__name__', '') == 'apply':
            value = bound
        if is_function_class(value):
            self._function_class(value).ops[key] = op
            return
        known = self._originals.get(id(value))
        holder, name = parent_of(op.name)
        if known is None:
            site = self._sites.get((id(holder), name)) or self._add_site(_Member(), holder, name)
            site.member.ops[key] = op
            if not isinstance(holder, type):
                self._originals[id(value)] = (value, site.member)
        else:
            known[1].ops[key] = op
            self._sites.get((id(holder), name)) or self._add_site(known[1], holder, name)

    def _function_class(self, cls: Any) -> _Member:
        known = self._function_classes.get(id(cls))
        if known is not None:
            return known[1]
        member = _Member()
        self._function_classes[id(cls)] = (cls, member)
        modern = cls.setup_context is not torch.autograd.Function.setup_context
        cls.forward = staticmethod(forward_stand_in(member.active, cls.forward, with_context=not modern))
        if modern:
            cls.setup_context = staticmethod(setup_stand_in(member.active, cls.setup_context))
        return member

    def _add_site(self, member: _Member, holder: Any, name: str, imported: Any = None) -> _Site:
        site = self._sites[id(holder), name] = _Site(member, holder, name, imported)
        self._holders.setdefault(id(holder), _Holder(holder)).add(site, name)
        return site

    def _scan(self, module: Any) -> None:
        space = getattr(module, '__dict__', None)
        # compiled modules of torch import nothing: what they call they call in C++
        if not isinstance(space, dict) or str(space.get('__name__')).startswith('torch._C.'):
            return
        for name, value in list(space.items()):
            known = self._originals.get(id(value))
            if known is not None and known[0] is value and (id(module), name) not in self._sites:
                self._add_site(known[1], module, name, value)


_members = _Members()


# -- passes ------------------------------------------------------------------------------------------------------------


_default_keys = frozenset(FP32_OPS)


class OpSet:
    """The members for one model: the registry, the configuration's names, and the methods of the model's own classes.

    Args:
        extra: Members beyond the registry, or their dotted names; checked by
            :func:`amp_wrapper.policy.lookup.problems_of` before.
        classes: Classes of the model's modules. Their ``FP32_METHODS`` run in FP32, their ``PASS_METHODS`` begin a pass.
        casts: Whether the tables of O1 and O4 act in its passes, and what the user registered.
        allow_banned: Whether these run in FP32 what they refuse otherwise.
    """

    def __init__(
        self,
        extra: Iterable[Fp32Op | str] = (),
        classes: Iterable[type] = (),
        casts: bool = False,
        allow_banned: bool = False,
    ) -> None:
        self.extra = tuple(dict.fromkeys(Fp32Op(op) if isinstance(op, str) else op for op in extra))
        self.classes = tuple(cls for cls in classes if any(hasattr(cls, name) for name in PASS_METHODS))
        self.casts, self.allow_banned = casts, allow_banned
        self._join()

    def _join(self) -> None:
        segments.install(_members.held)
        _members.add({_config_key(op): op for op in self.extra})
        self.keys = _default_keys | {_config_key(op) for op in self.extra}
        if self.casts:
            _members.add({_cast_key(name): op for name, op in CAST_OPS.items()})
            changed = {n for n, op in CAST_OPS.items() if not (self.allow_banned and op.output == REFUSED)}
            self.keys = (self.keys - changed) | {_cast_key(name) for name in changed} | {passes.CASTS}
        for cls in self.classes:
            for name in PASS_METHODS:
                _wrap_verb(cls, name)

    def __or__(self, other: OpSet) -> OpSet:
        return OpSet(
            (*self.extra, *other.extra),
            dict.fromkeys((*self.classes, *other.classes)),
            self.casts or other.casts,
            self.allow_banned or other.allow_banned,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {'extra': self.extra, 'classes': self.classes, 'casts': self.casts, 'allow_banned': self.allow_banned}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.extra, self.classes = tuple(state['extra']), tuple(state['classes'])
        # models that were pickled whole before these existed have none
        self.casts, self.allow_banned = state.get('casts', False), state.get('allow_banned', False)
        self._join()


def enter(ops: OpSet, token: object | None = None) -> object:
    """A pass begins on this thread.

    Args:
        ops: What is active in it.
        token: Names the pass for :func:`leave`; anything hashable.

    Returns:
        The token.
    """
    _members.acquire()
    return passes.begin(object() if token is None else token, ops.keys)


def leave(token: object | None = None) -> None:
    """A pass ends on this thread, by returning or by an exception.

    Args:
        token: As given to :func:`enter`. Does nothing where the innermost pass is another one, or there is none.
    """
    if passes.end(token):
        _members.release()


def held() -> AbstractContextManager[None]:
    """A context in which the stand-ins are in place."""
    return _members.held()


def unwind(to: int) -> None:
    """Leave down to ``to`` passes: what a signal left open that came in the middle of a hook."""
    while passes.depth() > to:
        leave()


@contextmanager
def in_backward(ops: OpSet, seen: Iterable[frozenset[str]] = ()) -> Iterator[None]:
    """Around a backward pass: what is recomputed in it sees the same types as in the forward pass, on any thread.

    While it lasts, members called on unrelated threads run in FP32, too.

    Args:
        ops: The set of the model.
        seen: From :func:`recording`: the sets of other models in the same graph.
    """
    keys = ops.keys.union(*seen)
    _members.acquire()
    passes.backward_begins(keys)
    try:
        yield
    finally:
        passes.backward_ends(keys)
        _members.release()


def add_rule(holder: Any, name: str, rule: CallRule) -> None:
    """Let ``holder.name`` be called by ``rule`` wherever O1 and O4 cast op by op; see :mod:`amp_wrapper.autocast.rule_call`."""
    _members.add_rule(holder, name, rule)


def global_casts_begin(token: object, ops: OpSet) -> None:
    """A pass without an end in sight, outside of any model, on this thread."""
    _members.acquire()
    passes.global_casts_begin(token, ops.keys)


def global_casts_end(token: object) -> None:
    """The counterpart of :func:`global_casts_begin`."""
    passes.global_casts_end(token)
    _members.release()


def refuses_bce() -> bool:
    """Whether ``binary_cross_entropy`` is refused on 16-bit tensors here."""
    name = 'torch.nn.functional.binary_cross_entropy'
    return not passes.is_suspended() and passes.is_active(_cast_key(name)) and not passes.is_active(name)


def is_installed() -> bool:
    """Whether the stand-ins are in place."""
    return _members.users > 0


# -- methods of attached modules ---------------------------------------------------------------------------------------

# module of an attached model -> its set. Copies are not in it: they begin passes at their root's hooks.
_attached: WeakKeyDictionary[nn.Module, OpSet] = WeakKeyDictionary()


def attach(modules: Iterable[nn.Module], ops: OpSet) -> None:
    """Let the ``PASS_METHODS`` of these modules begin a pass, when they are called outside of one."""
    for module in modules:
        known = _attached.get(module)
        _attached[module] = ops if known is None else known | ops


def release(modules: Iterable[nn.Module]) -> None:
    """The counterpart of :func:`attach`."""
    for module in modules:
        _attached.pop(module, None)


def _wrap_verb(cls: type, name: str) -> None:
    owner_class = next((base for base in cls.__mro__ if name in vars(base)), None)
    method = None if owner_class is None else vars(owner_class)[name]
    # properties, static and class methods have no instance to ask
    if not isinstance(method, FunctionType) or hasattr(method, _VERB):
        return
    in_fp32 = name in FP32_METHODS

    @functools.wraps(method)
    def verb(self: Any, *args: Any, **kwargs: Any) -> Any:
        if passes.depth():
            return call_method(_METHOD_OP, method, (self, *args), kwargs) if in_fp32 else method(self, *args, **kwargs)
        # torch.compile would guard a plain model by the other models of its class that happen to be attached
        ops = None if torch.compiler.is_compiling() else _attached.get(self)
        if ops is None:
            return method(self, *args, **kwargs)
        token = enter(ops)
        try:
            return verb(self, *args, **kwargs)
        finally:
            leave(token)

    setattr(verb, _VERB, True)
    setattr(owner_class, name, verb)


def module_classes(extra: Iterable[Fp32Op], dtype: torch.dtype, device_type: str) -> tuple[type[nn.Module], ...]:
    """The module classes among the members that avoid ``dtype`` there.

    Args:
        extra: Members beyond the registry.
        dtype: The 16-bit type of the model or of autocast.
        device_type: Such as 'cpu'.
    """
    named = [op.name for op in FP32_OPS.values() if dtype in op.avoids(device_type)]
    found = (find(name, load=False) for name in (*named, *(op.name for op in extra)))
    return tuple(value for value in found if is_module_class(value))
