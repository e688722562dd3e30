"""The set of patched functions and cast ops in the forwards of one model, and methods that enter a model without a call.

These methods (:data:`FP32_METHODS` and :data:`ENTRY_METHODS`) are wrapped in their class once, and are the identity where their
module belongs to no attached model and no forward pass is under way.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..compiler_internals import never_compiled, untraced
from ..policy import said_once
from ..policy.fp32_registry import CAST_OPS, FLOAT32, FP32_METHODS, FP32_OPS, METHOD_REASON, RANGE_OPS, Fp32Op
from . import graph_region, recompute, regions, state
from .call import call, call_in_graph
from .patching import patches

#: Methods by which users and frameworks enter a model or a part of it without calling it: a region is opened there too.
ENTRY_METHODS: tuple[str, ...] = ('loss', 'predict', 'extract_feat', 'inference', *FP32_METHODS)

_METHOD_OP = Fp32Op('*', FLOAT32, reason=METHOD_REASON)
_WRAPPED = '_amp_wrapper_entry'
# marks attached modules with such methods, for graphs
_ENTERS = '_amp_wrapper_enters'
_DEFAULT_KEYS = frozenset((*FP32_OPS, *RANGE_OPS))


def _cast_key(name: str) -> str:
    """The entry of a name where O1 and O4 cast op by op."""
    return f'casts:{name}'


def _config_key(op: Fp32Op) -> str:
    """A name from a configuration may say more than the registry's entry of the same name."""
    return f'config:{op.output}:{op.name}'


class OpSet:
    """The registry, the names of a configuration, and the methods of a model's own classes.

    Args:
        extra: Functions beyond the registry, or their dotted names; checked by
            :func:`amp_wrapper.policy.lookup.problem_of` before.
        classes: Classes of the model's modules. Their ``FP32_METHODS`` run in FP32, their ``ENTRY_METHODS`` open a region.
        marks: What else is active in its regions: see :func:`amp_wrapper.autocast.state.marks`. Of several models' marks, those
            of O1 and O4 count.

    Attributes:
        keys: What is active, for :func:`amp_wrapper.autocast.regions.enter`.
    """

    def __init__(
        self,
        extra: Iterable[Fp32Op | str] = (),
        classes: Iterable[type] = (),
        marks: frozenset[str] = state.marks(),
    ) -> None:
        self.extra = tuple(dict.fromkeys(Fp32Op(op) if isinstance(op, str) else op for op in extra))
        self.classes = tuple(cls for cls in classes if any(hasattr(cls, name) for name in ENTRY_METHODS))
        self.marks = marks
        recompute.install()
        patches.add({_config_key(op): op for op in self.extra})
        self.keys = _DEFAULT_KEYS | marks | {_config_key(op) for op in self.extra}
        if state.CASTS in marks:
            patches.add({_cast_key(name): op for name, op in CAST_OPS.items()})
            self.keys = (self.keys - set(CAST_OPS)) | {_cast_key(name) for name in CAST_OPS}
        for cls in self.classes:
            for name in ENTRY_METHODS:
                _wrap_method(cls, name)

    def __or__(self, other: OpSet) -> OpSet:
        classes = dict.fromkeys((*self.classes, *other.classes))
        return OpSet((*self.extra, *other.extra), classes, self.marks | other.marks)

    def __reduce__(self) -> tuple[Any, ...]:
        # another process has to know its names and wrap its methods, too
        return OpSet, (self.extra, self.classes, self.marks)


# module of an attached model -> its set. Copies are not in it: they open regions at their root's hooks.
_attached: WeakKeyDictionary[nn.Module, OpSet] = WeakKeyDictionary()


def attach(modules: Iterable[nn.Module], ops: OpSet) -> None:
    """Let the ``ENTRY_METHODS`` of these modules open a region, when they are called outside of any forward pass.

    Args:
        modules: Of one model.
        ops: What is active in it.
    """
    if state.SPEAKS in ops.marks:
        said_once.begin()
    for module in modules:
        known = _attached.get(module)
        _attached[module] = ops if known is None else known | ops
        if any(hasattr(type(module), name) for name in ENTRY_METHODS):
            vars(module)[_ENTERS] = True


def release(modules: Iterable[nn.Module]) -> None:
    """The counterpart of :func:`attach`."""
    for module in modules:
        _attached.pop(module, None)
        vars(module).pop(_ENTERS, None)


def _wrap_method(cls: type, name: str) -> None:
    owner_class = next((base for base in cls.__mro__ if name in vars(base)), None)
    method = None if owner_class is None else vars(owner_class)[name]
    # properties, static and class methods have no instance to ask
    if not isinstance(method, FunctionType) or hasattr(method, _WRAPPED):
        return
    in_fp32 = name in FP32_METHODS

    @functools.wraps(method)
    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            region = graph_region.innermost()
            if region is not None and in_fp32:
                return call_in_graph(region, _METHOD_OP, method, (self, *args), kwargs, 1)
            if region is not None or not getattr(self, _ENTERS, False):
                return method(self, *args, **kwargs)
            # what is to be active is not known to a graph, which breaks here
            return outside(self, *args, **kwargs)
        if state.depth():
            return call(_METHOD_OP, method, (self, *args), kwargs, 1) if in_fp32 else method(self, *args, **kwargs)
        ops = _attached.get(self)
        if ops is None:
            return method(self, *args, **kwargs)
        with regions.opened(ops.keys):
            return entry(self, *args, **kwargs)

    never_compiled(entry)
    outside = untraced(entry)
    setattr(entry, _WRAPPED, True)
    setattr(owner_class, name, entry)
