"""The hooks below a model at O1 and O4 rest inside of its forward, and act everywhere else."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_wrapper import amp
from amp_wrapper.casting.quiet_hooks import QuietHooks

HALF = {'O1': torch.float16, 'O4': torch.bfloat16}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.last = nn.Linear(2, 2)
        self.seen: list[tuple[bool, bool]] = []
        self.types: list[torch.dtype] = []

    def forward(self, x: Tensor, again: int = 0) -> Tensor:
        self.seen.append((bool(self.fc._forward_pre_hooks), bool(self.fc._forward_hooks)))
        y = self.fc(x)
        self.types.append(y.dtype)
        return self(y, again - 1) if again else self.last(y)


@pytest.fixture(params=sorted(HALF))
def nets(request: pytest.FixtureRequest, device: torch.device) -> tuple[Net, nn.Module, torch.dtype]:
    inner = Net().to(device)
    model = amp.initialize(nn.Sequential(inner), opt_level=request.param, verbosity=0)
    return inner, model, HALF[request.param]


@pytest.mark.skipif(
    torch.__version__ < (2, 13), reason='before torch 2.13 a hook cannot tell whether compiled code calls it, and acts'
)
def test_they_rest_inside_of_a_forward_alone(nets: Any, device: torch.device) -> None:
    inner, model, half = nets
    x = torch.ones(1, 2, device=device)
    assert model(x).dtype is torch.float32
    assert inner.seen == [(False, False)]
    assert inner.types == [half]
    assert bool(inner.fc._forward_pre_hooks)
    assert bool(inner.fc._forward_hooks)
    found: list[torch.dtype] = []
    inner.fc.register_forward_hook(lambda module, args, output: found.append(output.dtype), prepend=True)
    assert inner.fc(x).dtype is torch.float32
    assert found == [half]


@pytest.mark.parametrize('again', [1, 2])
def test_a_module_that_calls_itself(again: int, nets: Any, device: torch.device) -> None:
    inner, model, half = nets
    x = torch.ones(1, 2, device=device)
    for called in (inner, model):
        inner.types.clear()
        assert called(x, again).dtype is torch.float32 if called is inner else called(x).dtype is torch.float32
        assert set(inner.types) == {half}
    assert not torch.is_autocast_enabled(device.type)


def test_hooks_of_others_are_called_and_can_be_removed(device: torch.device) -> None:
    inner = Net().to(device)
    calls: list[str] = []

    def note(name: str) -> Any:
        return lambda *_: calls.append(name)

    before = [inner.fc.register_forward_pre_hook(note('pre, before')), inner.fc.register_forward_hook(note('before'))]
    model = amp.initialize(nn.Sequential(inner), opt_level='O4', verbosity=0)
    assert not isinstance(inner.fc._forward_hooks, QuietHooks)
    assert isinstance(inner.last._forward_hooks, QuietHooks)
    after = [inner.last.register_forward_pre_hook(note('pre, after')), inner.last.register_forward_hook(note('after'))]
    x = torch.ones(1, 2, device=device)
    for called in (model, inner):
        calls.clear()
        called(x)
        assert calls == ['pre, before', 'before', 'pre, after', 'after']
    for handle in before + after:
        handle.remove()
    calls.clear()
    assert model(x).dtype is torch.float32
    assert calls == []
    assert inner.last(x).dtype is torch.float32
    for module in (inner.fc, inner.last):
        assert (len(module._forward_pre_hooks), len(module._forward_hooks)) == (1, 1)


def test_copies_and_pickles_have_their_own(nets: Any, device: torch.device) -> None:
    _, model, half = nets
    x = torch.ones(1, 2, device=device)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        inner = other[0]
        assert isinstance(inner.fc._forward_pre_hooks, QuietHooks)
        assert torch.equal(other(x), model(x))
        assert inner.seen[-1] == (False, False)
        assert inner(x).dtype is torch.float32
        assert set(inner.types) == {half}
        assert torch.equal(inner.fc(x), model[0].fc(x))


def test_another_thread_has_its_own_regions(nets: Any, device: torch.device) -> None:
    inner, model, _ = nets
    x = torch.ones(1, 2, device=device)
    found: list[Any] = []

    def elsewhere(*_: Any) -> None:
        def call() -> None:
            found.append(
                (bool(inner.last._forward_pre_hooks), inner.last(x).dtype, torch.is_autocast_enabled(device.type))
            )

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    inner.fc.register_forward_hook(elsewhere)
    model(x)
    assert found == [(True, torch.float32, False)]


def test_a_change_of_grad_mode_is_noticed(nets: Any, device: torch.device) -> None:
    """A copy of a weight that was made without gradients does not serve a forward that needs them."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.fc(x)
            return (self.fc(x) - 2 * target).sum()

    model = amp.initialize(Twice().to(device), opt_level='O4', verbosity=0)
    model(torch.ones(1, 2, device=device)).backward()
    assert model.fc.weight.grad is not None
