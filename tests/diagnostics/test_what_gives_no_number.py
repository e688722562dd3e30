"""The diagnosis of a division by zero, a logarithm of zero and the like says so, and tries the function in FP32."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_overflow import batches

from amp_wrapper import AmpOptimWrapper, amp
from amp_wrapper.diagnostics.diagnosis import CAUSES, Diagnosis

Act = Callable[[Tensor], Tensor]
INF = float('inf')
#: What FP32 cannot do either, and what the diagnosis calls it.
ALWAYS: dict[str, tuple[Act, str]] = {
    'log': (lambda x: torch.log(x * 0), 'The logarithm of zero'),
    'log in place': (lambda x: (x * 0).log_(), 'The logarithm of zero'),
    'log of less': (lambda x: (-1 - x.abs()).log2(), 'The logarithm of a negative number'),
    'root': (lambda x: (x * 0 - 1).sqrt(), 'A root of a negative number'),
    '0/0': (lambda x: (x * 0) / (x * 0), 'Division of zero by zero'),
    '1/0': (lambda x: 1 / (x * 0), 'Division by zero'),
    'x/0': (lambda x: (x * 0 + 1).div_(0), 'Division by zero'),
    '0 to the -1': (lambda x: (x * 0) ** -1.5, 'Division by zero'),
    '0*inf': (lambda x: x * 0 * torch.full_like(x, INF), '0 times infinity'),
    'inf-inf': (lambda x: torch.full_like(x, INF) + x * 0 - torch.full_like(x, INF), 'Infinity minus infinity'),
    'inf': (lambda x: x * 0 + INF, 'A number that is not finite'),
}
#: What float16 alone cannot do: numbers that are zero in it. What mends it is one function with FP32 results. No gradient goes
#: through it, which would be out of range.
IN_FLOAT16: dict[str, tuple[Act, str]] = {
    'log of an eps': (lambda x: x + (x.detach() * 0 + 1e-8).log(), 'The logarithm of zero'),
    '0 over an eps': (lambda x: x + x.detach() * 0 / (x.detach().abs() * 0 + 1e-8), 'Division of zero by zero'),
    'root of an eps': (lambda x: x + (x.detach() * 0).add(1e-9).rsqrt() * 1e-3, 'Division by zero'),
}


class Net(nn.Module):
    """Does something between two layers."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 8), act, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)))


def diagnosed(act: Act, level: str, **options: Any) -> list[Diagnosis]:
    torch.manual_seed(0)
    model: nn.Module = Net(act)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    with amp.monitor(optimizer) as watch:
        with amp.scale_loss(model(batches(1)[0]).float().square().mean(), optimizer) as loss:
            loss.backward()
        optimizer.step()
    return watch.diagnoses


@pytest.mark.parametrize('level', ['O1', 'O2', 'O3', 'O4', 'O5'])
@pytest.mark.parametrize('name', ALWAYS)
def test_it_says_what_happened(name: str, level: str) -> None:
    act, words = ALWAYS[name]
    (found,) = diagnosed(act, level)
    assert found.cause == 'forward_nan'
    assert found.text.startswith(f'{words} in ')
    assert 'no matter of precision' in found.text and 'overflow' not in found.text


@pytest.mark.parametrize('level', ['O1', 'O2', 'O3'])
@pytest.mark.parametrize('name', IN_FLOAT16)
def test_where_fp32_has_a_number_the_function_in_fp32_is_a_way_out(name: str, level: str) -> None:
    act, words = IN_FLOAT16[name]
    (found,) = diagnosed(act, level)
    said = f'{found.text} {CAUSES[found.cause]} {found.advice}'
    assert found.text.startswith(f'{words} in float16')
    assert 'What is zero there is a number too small for float16.' in found.text
    assert 'too large' not in said and 'overflow' not in said
    tried = {each.kind: each for each in found.remedies}
    assert tried['fp32_ops'].finite and tried['fp32_ops'].setting in found.advice
    setting = ast.literal_eval(tried['fp32_ops'].setting.removeprefix('fp32_ops='))
    assert len(setting) == 1
    # both interfaces take it, and with it the step is finite
    assert diagnosed(act, level, fp32_ops=setting) == []
    AmpOptimWrapper(opt_level=level, fp32_ops=setting, optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))


def test_an_overflow_is_still_one() -> None:
    (found,) = diagnosed(lambda x: (x * 0 + 15).exp() * 1e-3, 'O2')
    assert found.cause == 'forward_range' and found.text.startswith('float16 overflow in ')
    assert {each.kind for each in found.remedies} == {'fp32_ops', 'bfloat16'}


def test_in_the_backward_pass() -> None:
    (found,) = diagnosed(lambda x: ((x * 1e-5).square().sum(-1, keepdim=True) + 1e-12).sqrt() * x, 'O2')
    assert found.cause == 'gradient_16bit' and found.text.startswith('Division by zero in float16 in the backward pass')
    assert 'too large' not in found.text + CAUSES[found.cause]
    (found,) = diagnosed(lambda x: (x * 0).sqrt(), 'O5')
    assert found.cause == 'gradient_nan' and found.text.startswith('Division by zero in bfloat16')
