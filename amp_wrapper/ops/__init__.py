"""The operations of a training step on lists of tensors: the one place through which all else reaches them.

Lists are served by the compiled library (``csrc/``) where it has kernels for their device and their types, and by torch's own
list functions otherwise. The optimizer steps (:func:`fused_adam`, :func:`fused_sgd`) are the library's alone: without it,
optimizers take the steps of ``torch.optim``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from . import lists, loader
from .lists import add_gradients, differ, multi_tensor_copy, multi_tensor_maxnorm, refresh_masters, update_scale

#: Elements of a decision, the numbers that hold for a step as a whole: skip (0 or 1), inverse scale, clip coefficient,
#: clip value, gradient norm (NaN where the step is skipped or there is none), loss scale after the step (NaN without one),
#: skipped steps so far, and in a row.
DECISION = 8


def serves(device: torch.device | str) -> bool:
    """Return whether the compiled library has kernels for a device.

    Args:
        device: Such as ``torch.device('cuda', 0)`` or 'cpu'.
    """
    return torch.device(device).type in loader.library().devices


def backend() -> str:
    """Return what serves the ops, for logs."""
    served = sorted(loader.library().devices)
    return f'compiled for {" and ".join(kind.upper() for kind in served)}' if served else "torch's own"


def _call(name: str, tensors: Sequence[Tensor], *rest: Any) -> Any:
    """Call the compiled op, or torch's functions where it does not take the tensors: before anything is written, it says so."""
    if tensors and tensors[0].device.type in loader.library().devices:
        with suppress(ValueError, NotImplementedError):
            return getattr(torch.ops.amp_wrapper, name).default(tensors, *rest)
    with torch.no_grad():
        return getattr(lists, name)(tensors, *rest)


def multi_tensor_scale(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Write ``target = source * scale``, with a non-finite flag. This is where gradients are unscaled and checked.

    The product is rounded to float32 (float64 stays), then to the target.

    Args:
        sources: Dense floating tensors of any dtype and device.
        targets: Tensors of the same shapes and devices; may be the sources themselves.
        scale: float32 scalar, or None for 1.
        found_inf: float32 scalar set to 1.0 where a *source* element is non-finite, in place; None to skip the check.
    """
    _call('multi_tensor_scale', sources, targets, scale, found_inf)


def multi_tensor_axpby(
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    a: Tensor | None = None,
    b: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Write ``y = a * x + b * y``, with a non-finite flag of the xs.

    Args:
        xs: Dense floating tensors of any dtype and device.
        ys: Tensors of the same shapes and devices, in place.
        a: float32 scalar, or None for 1.
        b: float32 scalar, or None for 1.
        found_inf: float32 scalar set to 1.0 where an element of the xs is non-finite, in place; None to skip the check.
    """
    _call('multi_tensor_axpby', xs, ys, a, b, found_inf)


def multi_tensor_isnonfinite(tensors: Sequence[Tensor], found_inf: Tensor) -> None:
    """Raise a flag where an element is non-finite.

    Args:
        tensors: Dense floating tensors of any dtype and device; not changed.
        found_inf: float32 scalar set to 1.0 where one is, in place.
    """
    _call('multi_tensor_isnonfinite', tensors, found_inf)


def multi_tensor_l2norm(
    tensors: Sequence[Tensor], inverse_scale: Tensor | None = None, found_inf: Tensor | None = None
) -> Tensor:
    """Return the Euclidean norm of all elements, in one pass with a non-finite flag. The same bits on one machine, always.

    Args:
        tensors: Dense floating tensors of any dtype and device; not changed.
        inverse_scale: float32 scalar that the norm is multiplied by; None for 1.
        found_inf: float32 scalar set to 1.0 where an element is non-finite, in place; None to skip the check. Where there is no
            library, torch's functions raise it also where the sum of squares leaves float32.

    Returns:
        float32 scalar on the device of the first tensor.
    """
    norm: Tensor = _call('multi_tensor_l2norm', tensors, inverse_scale, found_inf)
    return norm


def _step(name: str, *arguments: Any, **given: Any) -> None:
    """Call a compiled step. What the dispatcher has no kernel for is refused as the kernels refuse what does not fit."""
    try:
        getattr(torch.ops.amp_wrapper, name).default(*arguments, **given)
    except (AttributeError, NotImplementedError) as error:
        raise ValueError(
            f'{name} takes dense tensors of one device that the library serves: one is sparse, or lies elsewhere, or there is '
            f'no library (ops: {backend()}).'
        ) from error


def fused_adam(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    partners: Sequence[Tensor],
    decision: Tensor,
    hyper: Tensor,
    groups: Tensor,
    rates: Sequence[Tensor] = (),
    rated: Sequence[int] = (),
    **given: Any,
) -> None:
    """Decide on one step of Adam or AdamW on the device, and take it: one pass over gradient, weight and state.

    It decides whether the step is skipped, how it clips, and what each parameter needs. Where the step is taken, each of
    ``steps`` grows by one. The loss scale moves by the rule of :class:`~amp_wrapper.engine.loss_scale.LossScaler`; what is
    unscaled with is its reciprocal before that. Bias corrections are ``1 - beta ** step``, from the count and never as running
    products: a resumed run goes on with the same bits. The clip coefficient is that of
    :func:`torch.nn.utils.clip_grad_norm_`, ``min(1, max_norm / (norm + 1e-6))``.

    The formulas are those of :class:`torch.optim.Adam` in its order of operations. All arithmetic on elements is float32,
    whatever the tensors are.

    Args:
        grads: Scaled gradients, float32, float16 or bfloat16 each, laid out as the parameters are.
        params: Dense, of these types, in place.
        exp_avgs: First moments, of any of these types, in place.
        exp_avg_sqs: Second moments, in place.
        max_exp_avg_sqs: Their maxima (amsgrad), in place; empty for none.
        steps: One float32 scalar for each parameter, in place: steps taken so far.
        partners: Empty, or one for each parameter: the parameter itself for none; a copy of the same type, or the 16-bit copy
            of a float32 parameter, which receives the new value; or the int16 remainder of a 16-bit one, whose exact float32
            value both hold together (:mod:`amp_wrapper.ops.split`).
        decision: float32 (8,), written: see :data:`DECISION`.
        hyper: float64 (groups, 7) on the CPU: lr, beta1, beta2, eps, weight_decay, maximize, decoupled weight decay.
        groups: int64 (parameters,) on the CPU: the row of ``hyper`` of each parameter.
        rates: float32 scalars on the device that stand in for the lr of some groups.
        rated: These groups.
        **given: ``found_inf``, float32 scalar: the step is skipped where it is above 0, None for never; ``learned``: the same
            for the scale, which falls where it is above 0, None for ``found_inf``; ``norm``, float32 scalar: the norm of the
            gradients as they are, which is multiplied by the inverse scale; ``scale``, float32 scalar: the loss scale, None
            for 1; ``growth_tracker``, ``hysteresis_tracker``: int32 scalars; ``counts``, int64 (3,): steps decided on, steps
            skipped, skips in a row; ``rule``: growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale,
            empty for a scale that stays; ``max_norm``, ``clip_value``: limits, or None. What a rule moves is written, and
            ``counts``.

    Raises:
        ValueError: Lists that do not pair up; types, shapes, layouts or devices that do not fit. Nothing is written then.
    """
    state = exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps
    _step('fused_adam', grads, params, *state, partners, decision, hyper, groups, rates, rated, **given)


def fused_sgd(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    partners: Sequence[Tensor],
    decision: Tensor,
    hyper: Tensor,
    groups: Tensor,
    rates: Sequence[Tensor] = (),
    rated: Sequence[int] = (),
    **given: Any,
) -> None:
    """Decide on one step of SGD on the device, and take it: one pass over gradient, weight and momentum.

    The formulas are those of :class:`torch.optim.SGD` in its order of operations. A momentum of zeros has not begun: without
    dampening, the first gradient becomes the momentum.

    Args:
        grads: As of :func:`fused_adam`.
        params: As there.
        momentum_buffers: Of any of these types, in place; empty where there is no momentum.
        partners: As there, and so all others but for the columns of ``hyper``.
        decision: As there.
        hyper: lr, momentum, dampening, nesterov, weight_decay, maximize, 0.
        groups: As there.
        rates: As there.
        rated: As there.
        **given: As there.

    Raises:
        ValueError: As :func:`fused_adam`.
    """
    rest = decision, hyper, groups, rates, rated
    _step('fused_sgd', grads, params, momentum_buffers, partners, *rest, **given)


__all__ = ['DECISION', 'add_gradients', 'backend', 'differ', 'fused_adam', 'fused_sgd', 'multi_tensor_axpby']
__all__ += ['multi_tensor_copy', 'multi_tensor_isnonfinite', 'multi_tensor_l2norm', 'multi_tensor_maxnorm']
__all__ += ['multi_tensor_scale', 'refresh_masters', 'serves', 'update_scale']
