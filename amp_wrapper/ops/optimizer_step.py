"""The reference implementation of the updates of Adam and SGD, in plain torch. No host read.

The same arithmetic is in ``csrc/common/optimizer_update.h``, which the compiled ops use; both give the same bits. A
product and a sum are rounded once where torch's own fused optimizers round once (:func:`multiply_add`), so that theirs and ours
agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..policy.nested import HALF_TYPES
from .checks import check_apart, check_lists, check_step_tables
from .split import join, split

#: States of which an empty list stands for none.
_OPTIONAL = ('max_exp_avg_sqs', 'momentum_buffers')
_PARAMETERS = (torch.float32, *HALF_TYPES)


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c``, rounded once to float32.

    Args:
        a: float32 tensor.
        b: float32 tensor.
        c: float32 tensor.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    # the error of the sum, exactly; where there is one, the last bit is made odd, which the second rounding sees
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    outward = torch.where((error > 0) == (total > 0), 1, -1)
    inexact = (error != 0) & total.isfinite() & (bits & 1 == 0)
    return torch.where(inexact, bits + outward, bits).view(torch.float64).float()


def check_partners(params: Sequence[Tensor], partners: Sequence[Tensor]) -> None:
    """What stands beside each parameter.

    Raises:
        ValueError: It has a dtype that cannot stand there.
    """
    for index, (param, other) in enumerate(zip(params, partners)):
        if other is param:
            continue
        kind = param.dtype
        if other.dtype is torch.int16:
            fits = kind in HALF_TYPES
        else:
            fits = other.dtype is kind or (other.dtype in HALF_TYPES and kind is torch.float32)
        if not fits:
            raise ValueError(
                f'partners[{index}] has dtype {other.dtype} beside a parameter of {kind}: a copy of the same type, a '
                'float16 or bfloat16 copy of a float32 parameter, or the int16 remainder of a 16-bit one, is expected.'
            )


def _check_update(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    states: dict[str, Sequence[Tensor]],
    partners: Sequence[Tensor],
    rows: Tensor,
    decision: Tensor,
) -> None:
    check_step_tables(decision, rows, len(params), False)
    kept = [(name, tensors) for name, tensors in states.items() if tensors or name not in _OPTIONAL]
    written = [('params', params), *kept]
    everything = [*written, ('partners', partners)] if partners else written
    check_lists([('grads', grads)], everything)
    check_partners(params, partners)
    for name, tensors in (('grads', grads), *written):
        for index, tensor in enumerate(tensors):
            if tensor.dtype not in _PARAMETERS:
                wanted = 'float32, float16 or bfloat16' if tensor.dtype is torch.float64 else 'a real floating tensor'
                raise ValueError(f'{name}[{index}] has dtype {tensor.dtype}: {wanted} is expected.')
    for name, tensors in (('grads', grads), *everything):
        for index, tensor in enumerate(tensors):
            if tensor.device != decision.device:
                raise ValueError(f'{name}[{index}] is on {tensor.device} and decision on {decision.device}.')
    check_apart([('grads', grads)], everything, decision=decision, rows=rows)


def _gradient(grad: Tensor, row: Tensor, decision: Tensor) -> Tensor:
    value = grad.float() * decision[1] * decision[2]
    return value.clamp(-decision[3], decision[3]) * row[0]


def value_of(param: Tensor, partner: Tensor | None) -> Tensor:
    """The float32 value of a parameter, together with the int16 remainder beside it where there is one."""
    if partner is not None and partner.dtype is torch.int16:
        return join(param, partner)
    return param.float()


def write_value(value: Tensor, param: Tensor, partner: Tensor | None, taken: Tensor) -> None:
    """Write a float32 value to a parameter and to what stands beside it, where the bool scalar ``taken`` is true."""
    if partner is not None and partner.dtype is torch.int16:
        weight, remainder = split(value, param.dtype)
        partner.copy_(torch.where(taken, remainder, partner))
        param.copy_(torch.where(taken, weight, param))
        return
    param.copy_(torch.where(taken, value.to(param.dtype), param))
    if partner is not None:
        partner.copy_(torch.where(taken, value.to(partner.dtype), partner))


def _partner(partners: Sequence[Tensor], params: Sequence[Tensor], index: int) -> Tensor | None:
    return None if not partners or partners[index] is params[index] else partners[index]


@torch.no_grad()
def fused_adam(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    partners: Sequence[Tensor],
    rows: Tensor,
    decision: Tensor,
) -> None:
    """One step of Adam or AdamW, as the prologue decided: one pass over gradient, weight and state.

    The formulas are those of :class:`torch.optim.Adam` in its order of operations. All arithmetic is float32, whatever the
    tensors are.

    Args:
        grads: Scaled gradients, float32, float16 or bfloat16 each.
        params: Of the same shapes, in place.
        exp_avgs: First moments, of any of these types, in place.
        exp_avg_sqs: Second moments, in place.
        max_exp_avg_sqs: Their maxima (amsgrad), in place; empty for none.
        partners: Empty, or one for each parameter: the parameter itself for none; a copy of the same type, or the 16-bit copy
            of a float32 parameter, which receives the new value; or the int16 remainder of a 16-bit one, whose exact float32
            value both hold together (:mod:`amp_wrapper.ops.split`).
        rows: float32 (parameters, 12), from :func:`~amp_wrapper.ops.prologue.step_prologue`.
        decision: float32 (8,), from the prologue.

    Raises:
        ValueError: Lists that do not pair up, dtypes that do not, shared memory, or several devices. Nothing is written then.
    """
    states = dict(exp_avgs=exp_avgs, exp_avg_sqs=exp_avg_sqs, max_exp_avg_sqs=max_exp_avg_sqs)
    _check_update(grads, params, states, partners, rows, decision)
    taken = decision[0] == 0
    for i, (grad, param) in enumerate(zip(grads, params)):
        row = rows[i]
        _, decay, weight, beta2, rest, root, eps, rate, decoupled = row[:9].unbind()
        partner = _partner(partners, params, i)
        g, w = _gradient(grad, row, decision), value_of(param, partner)
        is_decoupled, decays = decoupled != 0, decay != 0
        g = torch.where(~is_decoupled & decays, multiply_add(w, decay, g), g)
        w = torch.where(is_decoupled, w * decay, w)
        m, v = exp_avgs[i].float(), exp_avg_sqs[i].float()
        near = weight < 0.5
        m = multiply_add(torch.where(near, weight, weight - 1), g - m, torch.where(near, m, g))
        v = multiply_add(rest * g, g, beta2 * v)
        largest = v
        if max_exp_avg_sqs:
            largest = torch.maximum(max_exp_avg_sqs[i].float(), v)
        top = largest.double().sqrt().float()
        w = w + (rate * m) / (top / root + eps)
        exp_avgs[i].copy_(torch.where(taken, m.to(exp_avgs[i].dtype), exp_avgs[i]))
        exp_avg_sqs[i].copy_(torch.where(taken, v.to(exp_avg_sqs[i].dtype), exp_avg_sqs[i]))
        if max_exp_avg_sqs:
            kept = max_exp_avg_sqs[i]
            kept.copy_(torch.where(taken, largest.to(kept.dtype), kept))
        write_value(w, param, partner, taken)


@torch.no_grad()
def fused_sgd(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    partners: Sequence[Tensor],
    rows: Tensor,
    decision: Tensor,
) -> None:
    """One step of SGD, as the prologue decided: one pass over gradient, weight and momentum.

    The formulas are those of :class:`torch.optim.SGD` in its order of operations: the first gradient of a parameter becomes its
    momentum without dampening.

    Args:
        grads: Scaled gradients, float32, float16 or bfloat16 each.
        params: Of the same shapes, in place.
        momentum_buffers: Of any of these types, in place; empty where there is no momentum.
        partners: As for :func:`fused_adam`.
        rows: float32 (parameters, 12), from :func:`~amp_wrapper.ops.prologue.step_prologue`.
        decision: float32 (8,), from the prologue.

    Raises:
        ValueError: Lists that do not pair up, dtypes that do not, shared memory, or several devices. Nothing is written then.
    """
    _check_update(grads, params, dict(momentum_buffers=momentum_buffers), partners, rows, decision)
    taken = decision[0] == 0
    for i, (grad, param) in enumerate(zip(grads, params)):
        row = rows[i]
        _, decay, momentum, rest, nesterov, rate, first = row[:7].unbind()
        partner = _partner(partners, params, i)
        g, w = _gradient(grad, row, decision), value_of(param, partner)
        g = torch.where(decay != 0, multiply_add(w, decay, g), g)
        if momentum_buffers:
            buffer = momentum_buffers[i]
            moved = multiply_add(rest, g, buffer.float() * momentum)
            moved = torch.where(first != 0, g, moved)
            buffer.copy_(torch.where(taken, moved.to(buffer.dtype), buffer))
            g = torch.where(nesterov != 0, multiply_add(momentum, moved, g), moved)
        write_value(multiply_add(rate, g, w), param, partner, taken)
