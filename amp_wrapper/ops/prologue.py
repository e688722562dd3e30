"""The prologue of an optimizer step, in plain torch: whether the step is taken, and what each parameter needs. No host read.

The same arithmetic is in ``csrc/common/step_prologue.h``, which the compiled ops use; both give the same bits.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import (
    check_apart,
    check_device,
    check_distinct,
    check_lists,
    check_own,
    check_scalar,
    check_step_tables,
    check_table,
)
from .reference import update_scale
from .schemas import ADAM, HYPER, ROW, SGD

#: 1 as a fraction of 62 bits: powers of the betas are integers, the same on every device.
_ONE = 1 << 62
_LOW = (1 << 31) - 1
_MOST = torch.iinfo(torch.int32).max


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Of two fractions of 62 bits, cut off."""
    a_high, a_low, b_high, b_low = a >> 31, a & _LOW, b >> 31, b & _LOW
    return a_high * b_high + ((a_high * b_low + a_low * b_high + (a_low * b_low >> 31)) >> 31)


def _power(base: Tensor, exponent: Tensor) -> Tensor:
    """``base ** exponent`` of fractions of 62 bits, by squaring; exponents are below 2^32."""
    result = torch.full_like(base, _ONE)
    for bit in range(32):
        result = torch.where((exponent >> bit) & 1 == 1, _product(result, base), result)
        base = _product(base, base)
    return result


def _corrections(betas: Tensor, counts: Tensor) -> Tensor:
    """``1 - beta ** count`` as float64: what is lost when float32 is subtracted from 1 is kept here."""
    # betas that no constructor takes give something rather than wrap
    bases = (betas.nan_to_num(0.0).clamp(0.0, 1.0) * 2.0**62).to(torch.int64)
    powers = _power(bases, counts)
    return (_ONE - powers).double() * 2.0**-62


def _root(values: Tensor) -> Tensor:
    """The root of float64 values, rounded once to float32, whatever root the device has."""
    root = values.sqrt().float()
    above = torch.nextafter(root, torch.full_like(root, torch.inf))
    middle = (root.double() + above.double()) * 0.5
    root = torch.where(values > middle * middle, above, root)
    below = torch.nextafter(root, torch.zeros_like(root))
    middle = (root.double() + below.double()) * 0.5
    return torch.where(values < middle * middle, below, root)


def _check_groups(groups: Tensor, rated: Sequence[int], count: int) -> None:
    # what is traced has no values, and reading a tensor of the CPU is no read of the device
    traced = torch.compiler.is_compiling() or type(groups) is not Tensor
    for name, numbers in (('groups', () if traced else groups.tolist()), ('rated', rated)):
        for index, group in enumerate(numbers):
            if not 0 <= group < count:
                raise ValueError(f'{name}[{index}] is {group}, and hyper has {count} rows.')


@torch.no_grad()
def step_prologue(
    decision: Tensor,
    rows: Tensor,
    steps: Sequence[Tensor],
    hyper: Tensor,
    groups: Tensor,
    kind: int,
    rates: Sequence[Tensor] = (),
    rated: Sequence[int] = (),
    found_inf: Tensor | None = None,
    learned: Tensor | None = None,
    norm: Tensor | None = None,
    scale: Tensor | None = None,
    growth_tracker: Tensor | None = None,
    hysteresis_tracker: Tensor | None = None,
    counts: Tensor | None = None,
    rule: Sequence[float] = (),
    max_norm: float | None = None,
    clip_value: float | None = None,
) -> None:
    """Decide on one optimizer step, on the device: whether it is skipped, how it clips, and what each parameter needs.

    Where the step is taken, each of ``steps`` grows by one. The loss scale moves by the rule of
    :class:`~amp_wrapper.engine.loss_scale.LossScaler`; what is unscaled with is its reciprocal before that.

    Bias corrections are ``1 - beta ** step``, from the count and never as running products: a resumed run goes on with the same
    bits. The clip coefficient is that of :func:`torch.nn.utils.clip_grad_norm_`, ``min(1, max_norm / (norm + 1e-6))``.

    Args:
        decision: float32 (8,), written: skip (0 or 1), inverse scale, clip coefficient, clip value, norm (NaN where the step is
            skipped or none is given), loss scale after the step (NaN without one), skipped steps so far and in a row (0 without
            ``counts``).
        rows: float32 (parameters, 12), written: what :func:`~amp_wrapper.ops.optimizer_step.fused_adam` and
            :func:`~amp_wrapper.ops.optimizer_step.fused_sgd` read.
        steps: One float32 scalar for each parameter, in place: steps taken so far.
        hyper: float64 (groups, 7) on the CPU. Adam: lr, beta1, beta2, eps, weight_decay, maximize, decoupled weight decay (0 or
            1). SGD: lr, momentum, dampening, nesterov, weight_decay, maximize, 0.
        groups: int64 (parameters,) on the CPU: the row of ``hyper`` of each parameter.
        kind: 0 for Adam, 1 for SGD.
        rates: float32 scalars on the device that stand in for the lr of some groups.
        rated: The groups that ``rates`` belong to.
        found_inf: float32 scalar: the step is skipped where it is above 0. None for never.
        learned: Likewise, whether the scale was too large; None for ``found_inf``.
        norm: float32 scalar: the norm of the gradients as they are, which is multiplied by the inverse scale here.
        scale: float32 scalar: the loss scale; None for 1. In place where there is a ``rule``.
        growth_tracker: int32 scalar, in place where there is a ``rule``.
        hysteresis_tracker: int32 scalar, in place where there is a ``rule``.
        counts: int64 (3,), in place: steps decided on, steps skipped, skips in a row. None to count nothing.
        rule: growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale; empty for a scale that
            stays. None of them NaN, and the third and fourth finite.
        max_norm: Limit of the norm, or None. Not NaN, as the next.
        clip_value: Limit of each element, or None.

    Raises:
        ValueError: A tensor of another shape or dtype, or on another device; what is written shares memory with anything
            else; a number that is NaN or infinite where it must not be. Nothing is written then.
    """
    device = decision.device
    check_step_tables(decision, rows, len(steps), True)
    if hyper.dim() != 2 or groups.dim() != 1:
        raise ValueError('hyper must have two dimensions and groups one.')
    check_table('hyper', hyper, (hyper.shape[0], HYPER), torch.float64)
    check_table('groups', groups, (len(steps),), torch.int64)
    if hyper.device.type != 'cpu' or groups.device.type != 'cpu':
        raise ValueError('hyper and groups belong on the CPU.')
    if kind not in (ADAM, SGD):
        raise ValueError(f'kind={kind}: 0 (Adam) or 1 (SGD) is expected.')
    if len(rates) != len(rated):
        raise ValueError(f'rates has {len(rates)} tensors and rated {len(rated)} groups: they must pair up.')
    check_own('hyper', hyper, False)
    check_own('groups', groups, False)
    _check_groups(groups, rated, hyper.shape[0])
    if rule and len(rule) != 6:
        raise ValueError(f'rule has {len(rule)} numbers: 6 or none are expected.')
    if rule and (scale is None or growth_tracker is None or hysteresis_tracker is None):
        raise ValueError('rule needs scale, growth_tracker and hysteresis_tracker.')
    if max_norm is not None and norm is None:
        raise ValueError('max_norm needs norm.')
    for index, number in enumerate(rule):
        if math.isnan(number) or (index in (2, 3) and math.isinf(number)):
            raise ValueError(f'rule[{index}] is not a number, or not a finite one where steps are counted.')
    for name, limit in (('max_norm', max_norm), ('clip_value', clip_value)):
        if limit is not None and math.isnan(limit):
            raise ValueError(f'{name} is not a number.')
    check_lists([('steps', steps)], [('steps', steps)])
    moves = bool(rule)
    # tensor, type, and whether it is written
    scalars: dict[str, tuple[Tensor | None, torch.dtype, bool]] = {
        'scale': (scale, torch.float32, moves),
        'growth_tracker': (growth_tracker, torch.int32, moves),
        'hysteresis_tracker': (hysteresis_tracker, torch.int32, moves),
        'found_inf': (found_inf, torch.float32, False),
        'learned': (learned, torch.float32, False),
        'norm': (norm, torch.float32, False),
        **{f'rates[{index}]': (rate, torch.float32, False) for index, rate in enumerate(rates)},
    }
    counters = {f'steps[{index}]': (step, torch.float32, True) for index, step in enumerate(steps)}
    for name, (scalar, dtype, written) in {**counters, **scalars}.items():
        if scalar is not None:
            check_scalar(name, scalar, dtype, written)
            check_device(name, scalar, decision)
    if counts is not None:
        check_table('counts', counts, (3,), torch.int64)
        check_own('counts', counts, True)
        check_device('counts', counts, decision)
    apart = {name: scalar for name, (scalar, _, _) in scalars.items()} | {'counts': counts}
    changed: dict[str, Tensor | None] = {'decision': decision, 'rows': rows}
    check_apart([], [('decision', [decision]), ('rows', [rows]), ('steps', steps)], **apart)
    check_apart([], [('steps', steps)], **changed)
    changed |= {name: scalar for name, (scalar, _, written) in scalars.items() if written}
    check_distinct(changed | {'counts': counts}, apart)

    one = torch.ones((), dtype=torch.float32, device=device)
    skip = torch.zeros_like(one) if found_inf is None else (found_inf.view(()) > 0).float()
    taken = skip == 0
    inverse = one if scale is None else scale.view(()).reciprocal()
    length = one if norm is None else norm.view(()) * inverse
    coefficient = one
    if norm is not None and max_norm is not None:
        coefficient = ((length + 1e-6).reciprocal() * _float(max_norm)).clamp(max=1.0)
    _fill_rows(rows, steps, hyper, groups, kind, rates, rated, taken)
    if rule and scale is not None and growth_tracker is not None and hysteresis_tracker is not None:
        signal = skip if learned is None else learned
        _move(scale, growth_tracker, hysteresis_tracker, signal, rule)
    if counts is not None:
        left_out = skip.to(torch.int64)
        counts[0] += 1
        counts[1] += left_out
        counts[2] = (counts[2] + 1) * left_out
    nothing = torch.full_like(one, torch.nan)
    shown = [
        skip,
        inverse,
        coefficient,
        torch.full_like(one, torch.inf if clip_value is None else _float(clip_value)),
        nothing if norm is None else torch.where(taken, length, nothing),
        nothing if scale is None else scale.view(()),
        torch.zeros_like(one) if counts is None else counts[1].float(),
        torch.zeros_like(one) if counts is None else counts[2].float(),
    ]
    decision.copy_(torch.stack(shown))


def _float(number: float) -> float:
    """The nearest float32, which may be infinite."""
    return ctypes.c_float(number).value


def _whole(number: float) -> int:
    return int(min(max(number, -_MOST), _MOST))


def _move(scale: Tensor, growth: Tensor, hysteresis: Tensor, signal: Tensor, rule: Sequence[float]) -> None:
    factor, backoff, interval, refill, least, most = rule
    numbers = (_float(factor), _float(backoff), _whole(interval), _whole(refill), _float(least), _float(most))
    update_scale(scale, growth, hysteresis, signal, *numbers)


def _fill_rows(
    rows: Tensor,
    steps: Sequence[Tensor],
    hyper: Tensor,
    groups: Tensor,
    kind: int,
    rates: Sequence[Tensor],
    rated: Sequence[int],
    taken: Tensor,
) -> None:
    if not steps:
        return
    device = rows.device
    before = torch.stack([step.view(()) for step in steps])
    # a list of it: one tensor for all would be read by the host
    torch._foreach_add_([step.view(()) for step in steps], [taken.float()] * len(steps))
    table = hyper.to(device).clone()
    for group, rate in zip(rated, rates):
        # an assignment would read a scalar of the CPU
        table[group, 0].copy_(rate.view(()))
    columns = table[groups.to(device)].unbind(1)
    lr = columns[0]
    counts = (before + taken.float()).nan_to_num(0.0).clamp(0, 2.0**32 - 256).to(torch.int64)
    zeros = torch.zeros_like(lr)
    if kind == ADAM:
        _, beta1, beta2, eps, decay, maximize, decoupled = columns
        first, second = _corrections(torch.stack([beta1, beta2]), torch.stack([counts, counts])).unbind(0)
        decay = torch.where(decoupled != 0, 1 - lr * decay, decay)
        filled = [1 - beta1, beta2, 1 - beta2, _root(second).double(), eps, -(lr / first), decoupled]
    else:
        _, momentum, dampening, nesterov, decay, maximize, _ = columns
        filled = [momentum, 1 - dampening, nesterov, -lr, (before == 0).double()]
    sign = torch.where(maximize != 0, -1.0, 1.0).double()
    filled = [sign, decay, *filled]
    filled += [zeros] * (ROW - len(filled))
    rows.copy_(torch.stack(filled, 1))
