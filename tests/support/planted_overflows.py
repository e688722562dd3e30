"""Faults that are planted in known places of a small model, and what the diagnosis has to name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_overflow import (
    Deep,
    Fault,
    ScaleGradient,
    WriteBlindly,
    WriteOutside,
    batches,
    examine,
    in_range_of_fp32,
    nan_input,
    square,
)

from amp_wrapper.diagnostics.diagnosis import Diagnosis

ALL = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')
FLOAT16 = ('O1', 'O2', 'O3')
DEEP = 'blocks.2.place'


class RatioLoss(nn.Module):
    """0 divided by 0."""

    def forward(self, output: Tensor) -> Tensor:
        nothing = (output * 0).sum()
        return square(output) + nothing / nothing


def huge_gradient(x: Tensor) -> Tensor:
    return ScaleGradient.apply(x, 1e25)


def root_at_zero(x: Tensor) -> Tensor:
    return x + (x * 0).sqrt()


def root_below_zero(x: Tensor) -> Tensor:
    return x + (x * 0 - 1).sqrt()


def written_outside(x: Tensor) -> Tensor:
    return WriteOutside.apply(x, False)


def written_outside_in_16bit(x: Tensor) -> Tensor:
    return WriteOutside.apply(x, True)


def written_if_bad(x: Tensor) -> Tensor:
    return WriteBlindly.apply(x) if not x.isfinite().all() else x


def all_masked(x: Tensor) -> Tensor:
    return x * x.masked_fill(torch.ones_like(x, dtype=torch.bool), -torch.inf).softmax(-1)


def partly_masked_and_huge(x: Tensor) -> Tensor:
    mask = torch.zeros_like(x).index_fill(-1, torch.tensor([0]), -torch.inf)
    return in_range_of_fp32(x) * (x + mask).softmax(-1)


@dataclasses.dataclass(frozen=True)
class Planted:
    """One fault: where it is planted, and what has to be named."""

    name: str
    levels: tuple[str, ...]
    cause: str
    module: str = ''
    act: Callable[[Tensor], Tensor] | None = None
    spoil: Callable[[Tensor], Tensor] = lambda x: x
    phase: str = ''
    op: str = ''
    checkpointed: str = ''
    loss: type[nn.Module] | None = None
    loss_fn: Callable[[Any], Tensor] = square
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


TABLE = [
    Planted('nan in the input', ALL, 'input', spoil=nan_input),
    Planted('input out of range', FLOAT16, 'input_range', spoil=lambda x: x * 1e6),
    Planted('forward out of range', FLOAT16, 'forward_range', DEEP, in_range_of_fp32, phase='forward'),
    Planted('forward nan', ALL, 'forward_nan', DEEP, root_below_zero, phase='forward'),
    Planted('an op outside of torch', ('O1', 'O2', 'O5'), 'forward_nan', DEEP, written_outside, phase='forward'),
    Planted('one in 16-bit alone', ('O2', 'O5'), 'forward_range', DEEP, written_outside_in_16bit, phase='forward'),
    Planted('before an op outside of torch', ('O1', 'O2'), 'forward_range', f'{DEEP}.0', in_range_of_fp32, phase='forward'),
    Planted('everything masked', ('O1', 'O2', 'O5'), 'forward_nan', DEEP, all_masked, phase='forward', op='softmax'),
    Planted('a mask beside it', ('O1', 'O2'), 'forward_range', DEEP, partly_masked_and_huge, phase='forward'),
    Planted('loss in the model', ALL, 'loss', 'loss', loss=RatioLoss, phase='forward'),
    Planted('loss outside', ALL, 'loss', loss_fn=lambda output: square(output) * torch.nan),
    Planted('gradient of a loss outside', ('O2', 'O5'), 'loss', loss_fn=lambda output: square(root_at_zero(output.float()))),
    Planted('gradient out of range', FLOAT16, 'gradient_range', DEEP, huge_gradient, phase='backward'),
    Planted('gradient nan', ALL, 'gradient_nan', DEEP, root_at_zero, phase='backward'),
    Planted(
        'loss scale too large', ('O1', 'O2', 'O3'), 'gradient_scale', DEEP, lambda x: ScaleGradient.apply(x, 2.0**10),
        phase='backward', options={'loss_scale': 2.0**11},
    ),
    *(
        Planted(
            f'forward out of range, {kind}', ('O1', 'O2'), 'forward_range', DEEP, in_range_of_fp32, phase='forward',
            checkpointed=kind,
        )
        for kind in ('reentrant', 'not reentrant')
    ),
    *(
        Planted(
            f'gradient out of range, {kind}', ('O1', 'O2'), 'gradient_range', DEEP, huge_gradient, phase='backward',
            checkpointed=kind,
        )
        for kind in ('reentrant', 'not reentrant')
    ),
]  # fmt: skip
CASES = [pytest.param(each, level, id=f'{each.name}, {level}') for each in TABLE for level in each.levels]


def plant(each: Planted) -> Deep:
    torch.manual_seed(0)
    model = Deep(each.checkpointed, loss=None if each.loss is None else each.loss())
    if each.act is not None:
        fault = Fault(each.act)
        model.blocks[2].place = fault if not each.module.endswith('.0') else nn.Sequential(fault, Fault(written_if_bad))
    return model


def train(each: Planted, level: str) -> list[Diagnosis]:
    loss_fn = (lambda output: output) if each.loss is not None else each.loss_fn
    inputs = [each.spoil(x) for x in batches(1)]
    return examine(plant(each), level, inputs, loss_fn, **each.options)


def place_of(each: Planted, level: str) -> str:
    # without a cast of the whole model, the first module casts its input
    return 'stem' if (each.cause, level) == ('input_range', 'O1') else each.module


def named_as_planted(each: Planted, level: str, found: Diagnosis) -> bool:
    place = place_of(each, level)
    return (found.cause, found.module, found.phase) == (each.cause, place, each.phase or found.phase)
