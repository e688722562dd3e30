"""However a forward ends: nothing of it is left on the thread."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_wrapper import AmpAttachError, AmpOptimWrapper, amp
from amp_wrapper.autocast import regions, state
from amp_wrapper.autocast.patching import patches
from amp_wrapper.policy import LEVELS

HALF = {'O1': torch.float16, 'O2': torch.float16, 'O3': torch.float16, 'O4': torch.bfloat16, 'O5': torch.bfloat16}
ERRORS = [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError]


def left_open() -> tuple[Any, ...]:
    """What a forward may change for whoever comes after it."""
    devices = state.AUTOCAST_DEVICES
    return (
        regions.count(),
        state.snapshot(),
        patches.in_place,
        tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices),
        torch.is_autocast_cache_enabled(),
        (F.mse_loss, torch.linalg.inv, torch.Tensor.numpy, 'numpy' in vars(torch.Tensor)),
        hasattr(nn.modules.module, 'Exception'),
    )


@pytest.mark.parametrize('level', LEVELS)
def test_a_forward_that_is_a_generator_is_refused(level: str) -> None:
    """It runs when the call is over, and with it the casts."""

    class Yields(nn.Linear):
        def forward(self, x: Tensor) -> Iterator[Tensor]:
            yield super().forward(x)

    model = nn.Sequential(Yields(4, 4))
    if level == 'O0':
        amp.initialize(model, opt_level=level, verbosity=0)
        return
    with pytest.raises(AmpAttachError, match=r'0 \(Yields\) is a generator'):
        amp.initialize(model, opt_level=level, verbosity=0)
    assert model[0].weight.dtype is torch.float32


class Part(nn.Module):
    """Does what its plan says: calls parts, fails, catches, waits in the middle."""

    def __init__(self, plan: tuple[Any, ...]) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.error: type[BaseException] | None = plan[0]
        self.catches: bool = plan[1]
        self.yields: bool = plan[2]
        self.parts = nn.ModuleList(Part(part) for part in plan[3])

    def walk(self, x: Tensor) -> Iterator[Tensor]:
        y = self.fc(x)
        yield y
        for part in self.parts:
            try:
                found = part(y)
                for value in found if part.yields else [found]:
                    yield value
                    if value.sum() > 0.5:
                        break
            except GeneratorExit:
                raise
            except BaseException:
                if not self.catches:
                    raise
        if self.error is not None:
            raise self.error
        yield F.mse_loss(y, y)

    def forward(self, x: Tensor) -> Any:
        if self.yields:
            return self.walk(x)
        *_, last = self.walk(x)
        return last


def plans(depth: int) -> st.SearchStrategy[Any]:
    errors = st.one_of(st.none(), st.sampled_from(ERRORS[:3]))
    below = st.just(()) if depth == 0 else st.lists(plans(depth - 1), max_size=2).map(tuple)
    return st.tuples(errors, st.booleans(), st.booleans(), below)


@settings(max_examples=20, deadline=None)
@given(
    plan=plans(2),
    levels=st.tuples(st.sampled_from(LEVELS), st.sampled_from(LEVELS)),
    through_wrapper=st.booleans(),
    taken=st.integers(0, 4),
    direct=st.booleans(),
)
def test_nothing_is_left_of_any_forward(
    plan: Any, levels: tuple[str, str], through_wrapper: bool, taken: int, direct: bool
) -> None:
    torch.manual_seed(0)
    x = torch.ones(1, 2)
    before = left_open()
    model = Part(plan)
    if through_wrapper:
        wrapper = AmpOptimWrapper(optimizer=torch.optim.SGD(model.parameters(), 0.1), opt_level=levels[0])
        wrapper.attach(model)
        context: Callable[[], Any] = lambda: wrapper.optim_context(model)  # noqa: E731
    else:
        model = amp.initialize(model, opt_level=levels[0], verbosity=0)
        context = amp.disable_casts if direct else torch.enable_grad
    other = amp.initialize(Part((None, False, False, ())), opt_level=levels[1], verbosity=0)
    called = model.parts[0] if direct and len(model.parts) else model
    for error in (None, KeyboardInterrupt):
        if error is not None:
            other.fc.register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        found: Any = None
        try:
            with context():
                found = called(x)
        except BaseException:
            pass
        assert left_open() == before
        try:
            for _, _ in zip(range(taken), found if called.yields and found is not None else ()):
                assert left_open() == before
                other(x)
        except BaseException:
            pass
        assert left_open() == before
        del found
        gc.collect()
        assert left_open() == before


@pytest.mark.parametrize('error', ERRORS)
@pytest.mark.parametrize('where', ['forward', 'pre-hook', 'hook', 'loss'])
@pytest.mark.parametrize('level', LEVELS)
def test_interrupts(level: str, where: str, error: type[BaseException], device: torch.device) -> None:
    def fail(*_: Any) -> None:
        raise error

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.criterion = nn.MSELoss()

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            if where == 'forward':
                fail()
            return self.criterion(y, y)

    model = amp.initialize(Net().to(device), opt_level=level, verbosity=0)
    part = {'loss': model.criterion}.get(where, model.fc)
    if where == 'pre-hook':
        part.register_forward_pre_hook(fail)
    elif where != 'forward':
        part.register_forward_hook(fail)
    before = left_open()
    for called in (model, model.fc) if where != 'forward' else (model,):
        if called is model.fc and part is not called:
            continue
        with pytest.raises(error):
            called(torch.ones(1, 2, device=device))
        assert left_open() == before
