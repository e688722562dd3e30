"""Compiled models, whole or in parts: copies of them run as they were written, and the original is as before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from toy_compiled import fresh

from amp_wrapper import amp

EAGER = dict(backend='aot_eager')


class Layer(nn.Linear):
    """torch compiles no module of its own alone."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Layer(16, 32), Layer(32, 32), Layer(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.c(self.b(self.a(x)))
        return found


def whole(model: Net) -> nn.Module:
    model.compile(**EAGER)
    return model


def parts(model: Net) -> nn.Module:
    for module in (model.a, model.b, model.c):
        module.compile(**EAGER)
    return model


def forward(model: Net) -> nn.Module:
    model.forward = torch.compile(model.forward, **EAGER)  # type: ignore[method-assign, call-overload]
    return model


def inner_wrapper(model: Net) -> nn.Module:
    model.b = torch.compile(model.b, **EAGER)  # type: ignore[assignment, call-overload]
    return model


def wrapper(model: Net) -> nn.Module:
    made: nn.Module = torch.compile(model, **EAGER)  # type: ignore[call-overload]
    return made


WAYS = [whole, parts, forward, inner_wrapper, wrapper]


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> Iterator[None]:
    torch.manual_seed(0)
    with fresh():
        yield


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, 16), torch.randint(0, 3, (8,))) for _ in range(count)]


def graphs() -> int:
    return int(counters['stats']['unique_graphs'])


def tried(way: Callable[[Net], nn.Module], look: Callable[[nn.Module, Any], Any], caplog: Any) -> Any:
    """Look at a compiled model; nothing is compiled or logged for it, and it goes on with the graphs that it has."""
    model, data = way(Net()), batches()
    wanted = loss_fn(model, data[0]).detach()
    made = graphs()
    assert made
    calls = [module._compiled_call_impl for module in model.modules()]
    with caplog.at_level(logging.WARNING, logger='torch._dynamo'):
        found = look(model, data)
    assert graphs() == made and not counters['graph_break']
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [module._compiled_call_impl for module in model.modules()] == calls
    assert torch.equal(loss_fn(model, data[0]).detach(), wanted) and graphs() == made
    # it is what was compiled that runs: another type of input needs another graph
    model.double()
    loss_fn(model, (data[0][0].double(), data[0][1]))
    assert graphs() > made
    return found


@pytest.mark.parametrize('way', WAYS)
def test_suggest_level(way: Callable[[Net], nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    found = tried(
        way,
        lambda model, data: amp.suggest_level(
            model, loss_fn, data, levels=['O0', 'O2', 'O5'], steps=4, max_trials=0, progress=False
        ),
        caplog,
    )
    assert [note for note in found.data['notes'] if 'without torch.compile' in note]


@pytest.mark.parametrize('way', WAYS)
def test_report(way: Callable[[Net], nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    found = tried(way, lambda model, data: amp.report(model, data[0], loss_fn=loss_fn, opt_level='O2'), caplog)
    assert found.data['compiled'] and 'training, without torch.compile' in str(found)


def test_nothing_is_said_of_a_model_that_is_not_compiled() -> None:
    model = Net()
    model.forward = torch.compiler.disable(model.forward)  # type: ignore[method-assign]
    data = batches()
    found = amp.suggest_level(model, loss_fn, data, levels=['O0', 'O5'], steps=4, max_trials=0, progress=False)
    assert not [note for note in found.data['notes'] if 'torch.compile' in note]
    assert 'torch.compile' not in str(amp.report(model, data[0], loss_fn=loss_fn, opt_level='O2'))


@pytest.mark.parametrize('way', [whole, parts])
def test_diagnosis(way: Callable[[Net], nn.Module]) -> None:
    model: Any = Net()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level='O2', verbosity=0)
    way(model)
    made = []
    with amp.monitor(optimizer, diagnose_overflow=True) as watch:
        for index, (x, y) in enumerate(batches(6)):
            if index == 3:
                x[0, 0] = torch.nan
            optimizer.zero_grad()
            loss = loss_fn(model, (x, y))
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            made.append(graphs())
    assert len(watch.diagnoses) == 1
    assert made[1:] == made[1:2] * 5
