"""Runs ``forward`` of autograd Functions in the FP32 registry in FP32; autograd records nothing inside of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import torch_internals
from ..errors import AmpUsageError
from ..policy.copies import Copies
from ..policy.fp32_registry import Fp32Op
from ..policy.nested import HALF_TYPES, cast_tensors
from .call import autocast_off, devices_of, is_narrow, narrowed, tensors_in

_MARK = '_amp_wrapper_fp32'
_WRAPPED = '_amp_wrapper_backward'

#: Returns the rule by which a function runs in FP32 at this moment; None where it does not.
ActiveOp = Callable[[], 'Fp32Op | None']


def patch(cls: Any, active: ActiveOp) -> None:
    """Let ``cls`` run in FP32 wherever ``active`` says so; once and for all, since nobody keeps a reference to ``forward``.

    Args:
        cls: A subclass of :class:`torch.autograd.Function`.
        active: The rule, or None where it does not hold.
    """
    modern = cls.setup_context is not torch.autograd.Function.setup_context
    cls.forward = staticmethod(_fp32_forward(active, cls.forward, with_context=not modern))
    if modern:
        cls.setup_context = staticmethod(_fp32_setup(active, cls.setup_context))


def _fp32_forward(active: ActiveOp, forward: Callable[..., Any], with_context: bool) -> Callable[..., Any]:
    @functools.wraps(forward)
    def in_fp32(*args: Any, **kwargs: Any) -> Any:
        op = active()
        if op is None:
            return forward(*args, **kwargs)
        tensors = tensors_in(args, kwargs)
        copies = Copies(torch.float32, HALF_TYPES)
        with autocast_off(op, devices_of(tensors), forward):
            if not is_narrow(op, tensors):
                return forward(*args, **kwargs)
            result = forward(*copies.cast(args), **copies.cast(kwargs))
        given = narrowed(op, tensors, copies.write_back(result))
        if with_context:
            context = args[0]
            _mark(context)
            if context.dirty_tensors:
                context.mark_dirty(*copies.originals(tuple(context.dirty_tensors)))
            _mark_non_differentiable(context, result, given)
        return given

    return in_fp32


def _fp32_setup(active: ActiveOp, setup: Callable[..., Any]) -> Callable[..., Any]:
    """For ``setup_context``, the second half of a forward that takes no ``ctx``."""

    @functools.wraps(setup)
    def in_fp32(ctx: Any, inputs: Any, output: Any) -> Any:
        op = active()
        if op is None or not is_narrow(op, tensors_in(inputs, {})):
            return setup(ctx, inputs, output)
        _mark(ctx)
        wide = cast_tensors(output, torch.float32, HALF_TYPES)
        result = setup(ctx, cast_tensors(inputs, torch.float32, HALF_TYPES), wide)
        _mark_non_differentiable(ctx, wide, output)
        return result

    return in_fp32


def _mark_non_differentiable(context: Any, before: Any, after: Any) -> None:
    """Call ``mark_non_differentiable`` again, for the casts that have replaced marked tensors."""
    marked = {id(tensor) for tensor in context.non_differentiable or ()}
    if marked and before is not after:
        pairs = zip(before, after) if isinstance(before, tuple) else [(before, after)]
        context.mark_non_differentiable(*(new for old, new in pairs if id(old) in marked))


def _mark(context: Any) -> None:
    """Let gradients meet FP32 in this graph. ``backward`` stays wrapped, since a graph may outlive every forward pass."""
    setattr(context, _MARK, True)
    cls = torch_internals.function_of(context)
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
