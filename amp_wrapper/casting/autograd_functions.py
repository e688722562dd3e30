"""Runs ``forward`` of autograd Functions of the FP32 registry in FP32; autograd records nothing inside of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from .. import torch_internals
from ..errors import AmpConfigError, AmpUsageError
from ..policy.copies import Copies
from ..policy.fp32_registry import Fp32Op
from ..policy.nested import HALF_TYPES, cast_tensors, tensors_in
from . import kernels, listening, region

_IN_FP32 = '_amp_wrapper_fp32'


def wrap(cls: Any, active: Callable[[], Fp32Op | None]) -> None:
    """Let ``cls`` run by an entry of the registry in regions, once and for good: nobody keeps a reference to ``forward``.

    Args:
        cls: A subclass of :class:`torch.autograd.Function`.
        active: Gives the entry by which it runs now; None where there is none.

    Raises:
        AmpConfigError: It has ``setup_context``, of whose arguments there are no FP32 copies.
    """
    if cls.setup_context is not torch.autograd.Function.setup_context:
        raise AmpConfigError(
            [
                f"fp32_ops='{cls.__module__}.{cls.__qualname__}': a Function with setup_context() cannot be given FP32 copies "
                f'of its arguments. Name the function that calls its apply().'
            ]
        )
    forward = cls.forward

    @functools.wraps(forward)
    def in_fp32(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        op = active()
        if op is None or not region.is_open():
            return forward(ctx, *args, **kwargs)
        tensors = tensors_in((args, kwargs))
        on, narrow = kernels.autocast_devices(op, tensors), kernels.is_narrow(op, tensors)
        copies = Copies(torch.float32, HALF_TYPES)
        if narrow:
            args, kwargs = copies.cast(args), copies.cast(kwargs)
            setattr(ctx, _IN_FP32, True)
            found = torch_internals.function_of(ctx)
            if found is not cls and found is not None:
                _wrap_backward(found)
        with listening.told(op, forward), region.autocast(on[0], None) if on else nullcontext():
            result = forward(ctx, *args, **kwargs)
        if not narrow:
            return result
        given = kernels.narrowed(op, tensors, copies.write_back(result), bool(on))
        _mark_again(ctx, copies, result, given)
        return given

    cls.forward = staticmethod(in_fp32)
    _wrap_backward(cls)


def _mark_again(ctx: Any, copies: Copies, result: Any, given: Any) -> None:
    """Call ``mark_dirty`` and ``mark_non_differentiable`` again, for the tensors in the place of copies and of FP32 results."""
    if ctx.dirty_tensors:
        ctx.mark_dirty(*map(copies.original, ctx.dirty_tensors))
    marked = {id(tensor) for tensor in ctx.non_differentiable or ()}
    if marked and given is not result:
        pairs = zip(result, given) if isinstance(result, tuple) else [(result, given)]
        ctx.mark_non_differentiable(*(new for old, new in pairs if id(old) in marked))


def _wrap_backward(cls: Any) -> None:
    """Let gradients meet FP32 where the forward pass ran in FP32; for good, since a graph may outlive every forward pass."""
    backward = cls.backward
    if hasattr(backward, _IN_FP32):
        return

    @functools.wraps(backward)
    def in_fp32(ctx: Any, *gradients: Any) -> Any:
        if getattr(ctx, _IN_FP32, False):
            if torch.is_grad_enabled():
                raise AmpUsageError(
                    f'backward(create_graph=True) through {cls.__module__}.{cls.__qualname__}, which runs in FP32 with '
                    f'copies of its 16-bit inputs: its second derivative would be lost. Cast its inputs with .float() '
                    f'before calling it, or keep the module that calls it in FP32 (keep_fp32=[...]).'
                )
            gradients = cast_tensors(gradients, torch.float32, HALF_TYPES)
        # autograd casts what comes back to the types of the inputs
        return backward(ctx, *gradients)

    setattr(in_fp32, _IN_FP32, True)
    cls.backward = staticmethod(in_fp32)
