"""What ran without gradients first, in the same context, is trained all the same; torch before 2.11 kept copies of weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_wrapper import AmpOptimWrapper, amp

MODES = {'no_grad': torch.no_grad, 'inference_mode': torch.inference_mode}


class Net(nn.Module):
    def __init__(self, first: str, mode: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.body, self.head, self.first, self.mode = nn.Linear(8, 8), nn.Linear(8, 4), first, mode

    def by_function(self, x: Tensor) -> Tensor:
        return F.linear(x, self.body.weight, self.body.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            with self.mode():
                (self.body if self.first == 'module' else self.by_function)(x)
        return self.head(self.body(x)).square().mean()


def train(first: str, mode: str, level: str, api: str) -> list[Tensor]:
    """The weights after a step, of a model whose forward (or a forward before it, in one block) has no gradients at first."""
    torch.manual_seed(0)
    evaluates = first == 'evaluation'
    model, x = Net('' if evaluates else first, MODES[mode]), torch.randn(16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if api == 'wrapper':
        wrapper = AmpOptimWrapper(opt_level=level, optimizer=optimizer, verbosity=0, loss_scale=1.0)
        with wrapper.optim_context(model):
            if evaluates:
                with MODES[mode]():
                    model.eval()(x)
            loss = model.train()(x)
        wrapper.update_params(loss)
    else:
        prepared: Any
        prepared, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
        if evaluates:
            with MODES[mode]():
                prepared.eval()(x)
        with amp.scale_loss(prepared.train()(x), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('first', ['module', 'function', 'evaluation'])
@pytest.mark.parametrize('level', ['O0', 'O1', 'O2', 'O4', 'O5'])
@pytest.mark.parametrize('api', ['wrapper', 'amp'])
def test_it_is_trained_as_without(api: str, level: str, first: str, mode: str) -> None:
    for found, expected in zip(train(first, mode, level, api), train('', mode, level, api)):
        assert torch.equal(found, expected)
