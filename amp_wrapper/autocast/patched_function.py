"""What takes the place of a function of the FP32 registry, or of one with a rule of the user, and decides how it is called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from ..compiler_internals import never_compiled, untraced
from ..policy.fp32_registry import CALLER, FLOAT32, MODEL, Fp32Op
from . import graph, graph_region, state
from .call import (
    CallRule,
    call,
    call_by_rule,
    call_by_rule_in_graph,
    call_in_graph,
    rule_applies,
    rule_in_graph,
    tensors_in,
)
from .graph_region import GraphRegion

_ORIGINAL = '_amp_wrapper_original'


class PatchedFunction:
    """A function that runs in FP32 while any of its names is active: 'mmcv.ops.nms' is 'mmcv.ops.nms.nms' too.

    Or by a rule of the user, where O1 and O4 cast op by op.

    Args:
        is_python: Whether its calls do not come to function modes (:func:`is_python`).
    """

    def __init__(self, is_python: bool = False) -> None:
        self.ops: dict[str, Fp32Op] = {}
        self.rule: CallRule | None = None
        self.is_python = is_python
        # graphs find it by its place, which is a constant to them
        self.place = len(graph_region.patched)
        graph_region.patched.append(self)

    def comes_for(self, function: Any) -> None:
        """Let graphs find this by the function that it stands for."""
        graph_region.places.setdefault(id(function), (function, self.place))

    def active_in_function(self) -> Fp32Op | None:
        """:meth:`active`, for the ``forward`` of an autograd Function, which is traced as it is where that is in a graph."""
        if not torch.compiler.is_dynamo_compiling():
            return self.active()
        region = graph_region.innermost()
        found = None if region is None else self._active_in(region)
        if found is not None:
            # autocast is turned off for the function: that is left to eager code
            graph.break_graph()
        return found

    def active(self) -> Fp32Op | None:
        """What holds for this thread now."""
        active = [op for key, op in self.ops.items() if state.is_active(key)]
        return functools.reduce(_joined, active) if active else None

    def _active_in(self, region: GraphRegion) -> Fp32Op | None:
        """What holds in a region of a graph."""
        active = [op for key, op in self.ops.items() if region.has(key)]
        return functools.reduce(_join, active) if active else None

    @untraced
    def _wanted(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], held: int
    ) -> tuple[CallRule | None, Fp32Op | None, list[torch.Tensor]]:
        """The rule of the user that applies to a call, or else the rule of the registry; and its tensors for the former."""
        rule = self.rule
        if rule is not None and state.casts_on():
            tensors = tensors_in(args[held:], kwargs)
            if rule_applies(tensors):
                return rule, None, tensors
        return None, self.active(), []

    def run_in_graph(
        self,
        region: GraphRegion,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        held: int = 0,
    ) -> Any:
        """Call ``function`` as a region wants it, where a graph is traced."""
        if self.rule is not None:
            tensors = tensors_in(args[held:], kwargs)
            if rule_in_graph(self.rule, region, tensors):
                return call_by_rule_in_graph(region, self.rule, function, tensors, args, kwargs, held)
        found = self._active_in(region)
        if found is not None:
            return call_in_graph(region, found, function, args, kwargs, held)
        return function(*args, **kwargs) if self.is_python else region.run(function, args, kwargs)

    def around(self, original: Any, of_class: bool) -> Any:
        """What is put in the place of ``original``: a function, or the descriptor around one.

        Args:
            original: What is there.
            of_class: Whether the place is an attribute of a class.
        """
        function = _function(original)
        place, is_python = self.place, self.is_python
        is_method = of_class and isinstance(original, (FunctionType, classmethod))

        @functools.wraps(function)
        def in_fp32(*args: Any, **kwargs: Any) -> Any:
            # the ``self`` of a method that is no tensor must not be replaced by a copy
            held = 1 if is_method and args and not isinstance(args[0], torch.Tensor) else 0
            if torch.compiler.is_dynamo_compiling():
                region = graph_region.innermost()
                if region is not None and is_python:
                    return graph_region.patched[place].run_in_graph(region, function, args, kwargs, held)
                # functions of torch come to the region by themselves; without a region, those that stay patched are plain
                if region is not None or is_python:
                    return function(*args, **kwargs)
            rule, op, tensors = self._wanted(args, kwargs, held)
            if rule is not None:
                return call_by_rule(rule, function, tensors, args, kwargs, held)
            return function(*args, **kwargs) if op is None else call(op, function, args, kwargs, held)

        never_compiled(in_fp32)
        setattr(in_fp32, _ORIGINAL, original)
        if of_class:
            graph_region.note_stand_in(in_fp32, function)
        return type(original)(in_fp32) if isinstance(original, (staticmethod, classmethod)) else in_fp32


def _join(left: Fp32Op, right: Fp32Op) -> Fp32Op:
    outputs = (left.output, right.output)
    output = next((rule for rule in (FLOAT32, MODEL) if rule in outputs), CALLER)
    return Fp32Op(
        left.name, output, left.cpu | right.cpu, left.cuda | right.cuda, left.reason, left.warning or right.warning
    )


_joined = functools.lru_cache(maxsize=1024)(_join)


def _function(value: Any) -> Any:
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def is_python(value: Any) -> bool:
    """Whether calls of a function do not come to function modes: it is written in Python, and no op of torch."""
    function = _function(value)
    name = function.__module__ or '' if isinstance(function, FunctionType) else 'torch'
    return name.partition('.')[0] != 'torch' or name.startswith('torch.nn.utils.')


def original_of(value: Any) -> Any:
    """What a patched function stands for; anything else is its own."""
    function = _function(value)
    # by the dict, since mocks have every attribute
    return vars(function).get(_ORIGINAL, value) if isinstance(function, FunctionType) else value


def leads_to(value: Any, original: Any) -> bool:
    """Whether ``value`` is ``original``, or was made around it by :func:`functools.wraps`."""
    value = original_of(value)
    while value is not original and isinstance(value, FunctionType) and '__wrapped__' in vars(value):
        value = value.__wrapped__  # type: ignore[attr-defined]
    return value is original
