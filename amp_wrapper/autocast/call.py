"""One call in FP32: inputs are cast up, autocast is off, results go back, and what was written in place is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from .. import torch_internals
from ..errors import AmpUsageError, BannedOpError
from ..policy.fp32_registry import FLOAT32, MODEL, REFUSED, WIDEST, Fp32Op
from ..policy.nested import CASTABLE, HALF_TYPES, cast_tensors, map_tensors
from . import state as passes

_MARK = '_amp_wrapper_fp32'
_WRAPPED = '_amp_wrapper_backward'
_FLOAT32 = frozenset({torch.float32})

#: For what opens and closes regions: torch.compile does not trace it, but breaks its graph there, so that what it compiles in
#: between sees autocast and the stand-ins of the FP32 registry as they are.
untraced = torch_internals.untraced

#: Tells whether, and how, a member is to run in FP32 at this moment.
ActiveOp = Callable[[], 'Fp32Op | None']


class Copies:
    """The copies of one call in another type: one for each tensor, so that arguments that are one object stay one.

    Args:
        target: The type of the copies.
        sources: The types that are copied; everything else is left alone.
    """

    def __init__(self, target: torch.dtype, sources: frozenset[torch.dtype]) -> None:
        self._target, self._sources = target, sources
        # id of a tensor -> itself, its copy, the version of that copy
        self._copies: dict[int, tuple[Tensor, Tensor, int | None]] = {}

    def cast(self, tensor: Tensor) -> Tensor:
        """The copy of ``tensor``, or itself where it has the type already."""
        if tensor.dtype is self._target or tensor.dtype not in self._sources:
            return tensor
        known = self._copies.get(id(tensor))
        if known is None:
            copy = tensor.to(self._target)
            known = self._copies[id(tensor)] = (tensor, copy, _version(copy))
        return known[1]

    def write_back(self, result: Any) -> Any:
        """In-place changes reach the caller's tensors, and results that are arguments become the caller's objects."""
        changed = {
            id(copy): (tensor, copy)
            for tensor, copy, version in self._copies.values()
            if version is not None and _version(copy) != version
        }
        for tensor, copy in changed.values():
            if tensor.shape != copy.shape:
                # an empty tensor that was given as ``out``
                tensor.resize_(copy.shape)
            tensor.copy_(copy)
        return self.originals(result, changed) if changed else result

    def originals(self, result: Any, among: dict[int, tuple[Tensor, Tensor]] | None = None) -> Any:
        """``result`` with the caller's tensors in place of their copies."""
        if among is None:
            among = {id(copy): (tensor, copy) for tensor, copy, _ in self._copies.values()}
        return map_tensors(lambda t: among[id(t)][0] if id(t) in among else t, result)


class _Inputs(Copies):
    """What the tensors of one call are like; widens them."""

    def __init__(self, op: Fp32Op) -> None:
        super().__init__(torch.float32, HALF_TYPES)
        self._op = op
        self.first: torch.dtype | None = None
        self.devices: list[str] = []
        self.narrow = False
        self._has_float32 = False

    def look(self, tensor: Tensor) -> Tensor:
        device = tensor.device.type
        if device not in self.devices:
            self.devices.append(device)
        if tensor.dtype in CASTABLE:
            self.first = self.first or tensor.dtype
            self.narrow = self.narrow or tensor.dtype in self._op.avoids(device)
            self._has_float32 = self._has_float32 or tensor.dtype is torch.float32
        return tensor

    def narrowed(self, result: Any) -> Any:
        """``result`` in the type that the rule of the member asks for."""
        output = self._op.output
        keeps = output in (FLOAT32, REFUSED) or (output == WIDEST and self._has_float32)
        if output == MODEL:
            keeps = any(autocast_is_on(device) for device in self.devices)
        if keeps or self.first not in HALF_TYPES:
            return result
        assert self.first is not None
        return cast_tensors(result, self.first, _FLOAT32)


def _version(tensor: Tensor) -> int | None:
    # dynamo and inference tensors keep no count
    return None if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


def look(op: Fp32Op, args: Any, kwargs: Any) -> _Inputs:
    """What the tensors among the arguments are like."""
    seen = _Inputs(op)
    map_tensors(seen.look, args)
    if kwargs:
        map_tensors(seen.look, kwargs)
    return seen


def autocast_is_on(device: str) -> bool:
    """Whether autocast is on for a device type; False for types that have none, such as 'meta'."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _without_autocast(op: Fp32Op, devices: list[str]) -> ExitStack:
    """Switches autocast off where it is on, with a type that ``op`` avoids."""
    stack = ExitStack()
    for device in devices:
        if autocast_is_on(device) and torch.get_autocast_dtype(device) in op.avoids(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def _wide_types(values: Any, avoided: frozenset[torch.dtype]) -> Any:
    """dtype arguments ask for tensors of that type: they widen like the tensors."""
    if isinstance(values, dict):
        return {k: torch.float32 if isinstance(v, torch.dtype) and v in avoided else v for k, v in values.items()}
    return tuple(torch.float32 if isinstance(v, torch.dtype) and v in avoided else v for v in values)


def call(op: Fp32Op, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``function`` in FP32.

    Args:
        op: Says which types to avoid, and what becomes of the results.
        function: The original.
        args: Any nesting of tensors in them is cast; differentiable. Iterators pass as they are.
        kwargs: The same.

    Returns:
        The result, floating tensors in the type that ``op.output`` asks for.
    """
    # torch.compile runs it as it is: a break of its graph in the middle would leave autocast off where its compiler fails
    return (_untraced if torch.compiler.is_compiling() else _call)(op, function, args, kwargs)


def _call(op: Fp32Op, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    seen = look(op, args, kwargs)
    if op.output == REFUSED and seen.narrow and not passes.is_suspended():
        raise BannedOpError(function.__name__, op.reason)
    # a method that is handed its module finds its tensors there
    devices = seen.devices or [
        t.device.type for m in args if isinstance(m, nn.Module) for t in islice(m.parameters(), 1)
    ]
    with _without_autocast(op, devices):
        avoided = op.avoids(devices[0] if devices else 'cpu')
        args, kwargs = _wide_types(args, avoided), _wide_types(kwargs, avoided)
        if not seen.narrow:
            return function(*args, **kwargs)
        result = function(*map_tensors(seen.cast, args), **map_tensors(seen.cast, kwargs))
    return seen.narrowed(seen.write_back(result))


_untraced = untraced(_call)


def call_method(op: Fp32Op, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """:func:`call` for a method whose ``self`` is no tensor, and must not be replaced by a copy."""
    return call(op, functools.partial(function, args[0]), args[1:], kwargs)


# -- autograd Functions ------------------------------------------------------------------------------------------------


def forward_stand_in(active: ActiveOp, forward: Callable[..., Any], with_context: bool) -> Callable[..., Any]:
    """For ``Function.forward``, inside which autograd records nothing: results are cast without a trace.

    Args:
        active: The rule, or None while the member is at rest.
        forward: The original.
        with_context: Whether its first argument is ``ctx``.
    """

    @functools.wraps(forward)
    def in_fp32(*args: Any, **kwargs: Any) -> Any:
        op = active()
        if op is None:
            return forward(*args, **kwargs)
        seen = look(op, args, kwargs)
        with _without_autocast(op, seen.devices):
            if not seen.narrow:
                return forward(*args, **kwargs)
            wide = map_tensors(seen.cast, args)
            result = forward(*wide, **map_tensors(seen.cast, kwargs))
        narrowed = seen.narrowed(seen.write_back(result))
        if with_context:
            context = args[0]
            setattr(context, _MARK, True)
            wrap_backward(type(context)._forward_cls)
            if context.dirty_tensors:
                context.mark_dirty(*seen.originals(tuple(context.dirty_tensors)))
            _mark_again(context, result, narrowed)
        return narrowed

    return in_fp32


def setup_stand_in(active: ActiveOp, setup: Callable[..., Any]) -> Callable[..., Any]:
    """For ``Function.setup_context``, the second half of a forward that takes no ``ctx``."""

    @functools.wraps(setup)
    def in_fp32(ctx: Any, inputs: Any, output: Any) -> Any:
        op = active()
        if op is None or not look(op, inputs, {}).narrow:
            return setup(ctx, inputs, output)
        setattr(ctx, _MARK, True)
        wrap_backward(type(ctx)._forward_cls)
        wide = cast_tensors(output, torch.float32, HALF_TYPES)
        result = setup(ctx, cast_tensors(inputs, torch.float32, HALF_TYPES), wide)
        _mark_again(ctx, wide, output)
        return result

    return in_fp32


def _mark_again(context: Any, before: Any, after: Any) -> None:
    """``mark_non_differentiable`` was told of tensors that a cast has replaced since."""
    marked = {id(tensor) for tensor in context.non_differentiable or ()}
    if marked and before is not after:
        pairs = zip(before, after) if isinstance(before, tuple) else [(before, after)]
        context.mark_non_differentiable(*(new for old, new in pairs if id(old) in marked))


def wrap_backward(cls: Any) -> None:
    """Let gradients meet FP32 in the graphs that :func:`forward_stand_in` made; once and for all.

    A graph may outlive every pass, so this stays. It does nothing in other graphs.
    """
    backward = cls.backward
    if getattr(backward, _WRAPPED, False):
        return

    @functools.wraps(backward)
    def in_fp32(ctx: Any, *gradients: Any) -> Any:
        if getattr(ctx, _MARK, False):
            if torch.is_grad_enabled():
                raise AmpUsageError(
                    f'backward(create_graph=True) through {cls.__module__}.{cls.__qualname__}, which runs in FP32 with '
                    f'copies of its 16-bit inputs: its second derivative would be lost. Cast its inputs with .float() '
                    f'before calling it, or keep the module that calls it in FP32 (keep_fp32=[...]).'
                )
            gradients = cast_tensors(gradients, torch.float32, HALF_TYPES)
        # autograd casts what comes back to the types of the inputs
        return backward(ctx, *gradients)

    setattr(in_fp32, _WRAPPED, True)
    cls.backward = staticmethod(in_fp32)
