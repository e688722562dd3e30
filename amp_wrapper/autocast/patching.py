"""Patches the functions of :mod:`amp_wrapper.policy.fp32_registry` while an attached model runs, so that they run in FP32.

While a region is open on any thread, or a backward pass runs, each function of the registry is replaced by a patched one, in
the module or class that owns it and in every module that imported it. A patched function asks :mod:`.state` whether it acts,
and calls what it found in its place otherwise. When the last region is closed, everything is put back, so that functions keep
their identity for pickle, ``torch.jit.script`` and other people's patches. What is not in the registry is never touched.

``forward`` of autograd Functions, which nobody keeps a reference to, is wrapped once and for all, and is the identity at rest.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from .. import compiler_internals
from ..policy.fp32_registry import FP32_OPS, RANGE_OPS, Fp32Op
from ..policy.lookup import find, is_function_class, is_module_class, parent_of
from . import autograd_functions, queries, state
from .call import CallRule
from .patched_function import PatchedFunction, is_python, leads_to, original_of

_ABSENT = object()


class Target:
    """One attribute that is patched: of the class or module that owns a function, or of a module that imported it.

    Args:
        patched: The function.
        holder: The class or module.
        name: Of the attribute.
        imported: The original, where the attribute is not the function's own. Such a name may hold something else one day, a
            variable of a notebook for one, which is left alone then.
    """

    def __init__(self, patched: PatchedFunction, holder: Any, name: str, imported: Any = None) -> None:
        self.patched = patched
        self._imported = imported
        self._holder, self._name = holder, name
        # what is there at rest: nothing, where the attribute is inherited
        self.at_rest: Any = _ABSENT
        self._before: Any = None
        # what is put there
        self.patch: Any = None

    def prepare(self) -> bool:
        """Wrap what is there at rest: the original, or what somebody else put there.

        Returns:
            Whether the attribute is to be patched.
        """
        current = vars(self._holder).get(self._name, _ABSENT)
        # in place, over what is inherited
        if self.patch is not None and current is self.patch and self.at_rest is _ABSENT:
            return True
        if self._imported is not None and not leads_to(current, self._imported):
            return False
        # a patched function may be left there by somebody who saved it while it was in place
        self.at_rest = _ABSENT if current is _ABSENT else original_of(current)
        found = original_of(getattr(self._holder, self._name)) if current is _ABSENT else self.at_rest
        if found is not self._before or self.patch is None:
            self._before = found
            self.patch = self.patched.around(found, isinstance(self._holder, type))
        return True


class _Namespace:
    """The targets of one module or class, all of which are patched and put back at once."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self.space: Any = vars(holder)
        # classes notice what is set on them, and modules of a class of their own may
        self.is_plain = type(holder) is ModuleType
        self.targets: dict[str, Target] = {}
        # by name: what is put there, what is there at rest, and which is inherited then
        self.patches: dict[str, Any] = {}
        self.rests: dict[str, Any] = {}
        self.inherited: list[str] = []
        # those that stay patched
        self.kept: set[str] = set()

    def keep(self) -> None:
        """Leave those patched from now on that do not come to function modes."""
        self.kept = {name for name, target in self.targets.items() if target.patched.is_python}

    def look(self) -> None:
        """Find out what is there at rest."""
        self.patches, self.rests, self.inherited = {}, {}, []
        for name in self.targets:
            self.prepare(name)

    def prepare(self, name: str) -> bool:
        """Find out what is there under one name; False where it is not to be patched."""
        target = self.targets[name]
        if not target.prepare():
            return False
        self.patches[name] = target.patch
        if name in self.kept:
            self.rests[name] = target.patch
        elif target.at_rest is _ABSENT:
            self.inherited.append(name)
        else:
            self.rests[name] = target.at_rest
        return True


class Patches:
    """The functions that were found so far, where they are patched, and whether they are now. One per process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._users = 0
        self._wanted: dict[str, Fp32Op] = {**FP32_OPS, **RANGE_OPS}
        self._keys: set[str] = set(self._wanted)
        # (id of the holder, attribute); namespaces keep their holders, so that an id stays its own
        self.targets: dict[tuple[int, str], Target] = {}
        self._namespaces: dict[int, _Namespace] = {}
        # id of an original -> itself, its patched function
        self._originals: dict[int, tuple[Any, PatchedFunction]] = {}
        # whether functions that do not come to function modes stay patched
        self._keeps = False
        self._function_classes: dict[int, tuple[Any, PatchedFunction]] = {}
        self._scanned: set[str] = set()
        self._fingerprint: tuple[Any, ...] = ()

    @property
    def in_place(self) -> bool:
        """Whether functions are patched now."""
        return self._users > 0

    def add(self, ops: Mapping[str, Fp32Op]) -> None:
        """Take further functions in, by key."""
        with self._lock:
            for key, op in ops.items():
                if key not in self._keys:
                    self._keys.add(key)
                    self._wanted[key] = op
                    self._fingerprint = ()

    def add_rule(self, holder: Any, name: str, rule: CallRule) -> None:
        """Let an attribute be called by a rule of the user, from now on; in place of an earlier one."""
        with self._lock:
            value = original_of(getattr(holder, name))
            of_class = isinstance(holder, type)
            target = self.targets.get((id(holder), name))
            known = None if of_class else self._originals.get(id(value))
            if target is None:
                # under all of its names, as functions of the registry are
                target = self._add_target(
                    PatchedFunction(is_python(value)) if known is None else known[1], holder, name
                )
                if known is None and not of_class:
                    self._originals[id(value)] = (value, target.patched)
                    self._scanned.clear()
                    self._fingerprint = ()
                if self._users:
                    self._look_around()
            target.patched.rule = rule
            target.patched.comes_for(value)

    def keep(self) -> bool:
        """Leave functions patched that do not come to function modes: graphs are made of their calls, and have to find them.

        Returns:
            Whether one was not patched before.
        """
        with self._lock:
            if not self._keeps:
                self._keeps = True
                self._fingerprint = ()
            return self._look_around()

    def stop_keeping(self) -> None:
        """The counterpart of :meth:`keep`: there are no graphs any more."""
        with self._lock:
            if self._keeps:
                self._keeps = False
                for names in self._namespaces.values():
                    names.kept.clear()
                    names.look()
                if not self._users:
                    self._remove()

    def acquire(self) -> None:
        """Patch, until :meth:`release` is called as often."""
        with self._lock:
            self._look_around()
            if not self._users:
                try:
                    self._install()
                except BaseException:
                    self._remove()
                    raise
            self._users += 1

    def release(self) -> None:
        """The counterpart of :meth:`acquire`."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._remove()
                if self._now() != self._fingerprint:
                    self._clean_new_modules()

    def refresh(self) -> None:
        """Patch in modules that came since the outermost region was opened."""
        if self._now() != self._fingerprint:
            with self._lock:
                self._look_around()

    def _install(self) -> None:
        """Patch. Of a plain module that is as it was the last time, that takes two walks through a dict in C."""
        for names in self._namespaces.values():
            space = names.space
            as_before = len(names.patches) == len(names.targets) and names.rests.items() <= space.items()
            if not (as_before and space.keys().isdisjoint(names.inherited)):
                names.look()
            if names.is_plain:
                space.update(names.patches)
            else:
                for name, patch in names.patches.items():
                    setattr(names.holder, name, patch)

    def _remove(self) -> None:
        """Put back what was there, but for what somebody has replaced."""
        for names in self._namespaces.values():
            space, patches = names.space, names.patches
            if names.is_plain and not names.inherited and patches.items() <= space.items():
                space.update(names.rests)
                continue
            for name, patch in patches.items():
                if space.get(name) is patch and name not in names.kept:
                    if name in names.rests:
                        setattr(names.holder, name, names.rests[name])
                    else:
                        delattr(names.holder, name)

    @staticmethod
    def _now() -> tuple[Any, ...]:
        """Changes when modules come, and when names are bound in an interactive session."""
        return len(sys.modules), next(reversed(sys.modules), ''), len(vars(sys.modules['__main__']))

    def _look_around(self) -> bool:
        """Find what became importable, and who imported it, since the last time; patch it where the others are patched.

        Returns:
            Whether something stays patched now that was not patched before.
        """
        now = self._now()
        if now == self._fingerprint:
            return False
        known = len(self._originals)
        for key in sorted(self._wanted):
            value = find(self._wanted[key].name)
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
        return self._keeps and self._put_kept()

    def _put_kept(self) -> bool:
        """Patch what stays patched; gives whether anything was not."""
        changed = False
        for names in self._namespaces.values():
            names.keep()
            names.look()
            for name in names.kept & names.patches.keys():
                if names.space.get(name) is not names.patches[name]:
                    setattr(names.holder, name, names.patches[name])
                    changed = True
        return changed

    def _clean_new_modules(self) -> None:
        """A module that was imported while functions were patched holds patched ones: it gets the originals."""
        for name, module in list(sys.modules.items()):
            if name not in self._scanned and isinstance(getattr(module, '__dict__', None), dict):
                for key, value in list(vars(module).items()):
                    if original_of(value) is not value:
                        setattr(module, key, original_of(value))

    def _resolve(self, key: str, op: Fp32Op, value: Any) -> None:
        if is_module_class(value):
            return  # the business of casting
        value = original_of(value)
        bound = getattr(value, '__self__', None)
        if is_function_class(bound) and getattr(value, '__name__', '') == 'apply':
            value = bound
        if is_function_class(value):
            self._function_class(value).ops[key] = op
            return
        holder, name = parent_of(op.name)
        known = self._originals.get(id(value))
        target = self.targets.get((id(holder), name))
        if known is not None:
            known[1].ops[key] = op
            if target is None:
                self._add_target(known[1], holder, name)
            return
        target = target or self._add_target(PatchedFunction(is_python(value)), holder, name)
        target.patched.ops[key] = op
        target.patched.comes_for(value)
        if not isinstance(holder, type):
            self._originals[id(value)] = (value, target.patched)

    def _function_class(self, cls: Any) -> PatchedFunction:
        known = self._function_classes.get(id(cls))
        if known is None:
            known = self._function_classes[id(cls)] = (cls, PatchedFunction())
            autograd_functions.patch(cls, known[1].active_in_function)
        return known[1]

    def _add_target(self, patched: PatchedFunction, holder: Any, name: str, imported: Any = None) -> Target:
        target = self.targets[id(holder), name] = Target(patched, holder, name, imported)
        names = self._namespaces.setdefault(id(holder), _Namespace(holder))
        names.targets[name] = target
        if self._users and names.prepare(name):
            setattr(holder, name, target.patch)
        return target

    def _scan(self, module: Any) -> None:
        space = getattr(module, '__dict__', None)
        # compiled modules of torch import nothing: what they call they call in C++
        if not isinstance(space, dict) or str(space.get('__name__')).startswith('torch._C.'):
            return
        for name, value in list(space.items()):
            known = self._originals.get(id(value))
            if known is not None and known[0] is value and (id(module), name) not in self.targets:
                self._add_target(known[1], module, name, value)


patches = Patches()


def forget_graphs() -> None:
    """The hooks of models change: what was compiled with the old ones is compiled anew.

    Copies that are tried run without graphs, and those of the training stay as they are.
    """
    if compiler_internals.is_eager():
        return
    compiler_internals.forget_graphs()
    graphs_are_gone()


def graphs_are_gone() -> None:
    """Nothing is compiled any more: torch's functions are as they were."""
    patches.stop_keeping()
    queries.remove()


@contextmanager
def in_backward(keys: frozenset[str]) -> Iterator[None]:
    """Around a backward pass: a forward that is recomputed in it by hand sees the same types as before, on any thread.

    While it lasts, functions of the registry run in FP32 on unrelated threads, too. Segments of torch's checkpointing know by
    themselves what they ran in: see :mod:`.recompute`.

    Args:
        keys: What is active in the forwards of the model.
    """
    patches.acquire()
    state.backward_passes.append(keys)
    try:
        yield
    finally:
        state.backward_passes.remove(keys)
        patches.release()
