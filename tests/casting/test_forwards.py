"""Casts act in the forward passes of a model alone, whatever is called, raised, copied or interrupted there."""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bits import same_bits
from forwards import CAST, DOORS, HALF, LEVELS, PER_OP, Inside, prepared
from pairs import pairs
from torch import Tensor, nn

from amp_wrapper import AmpAttachError, AmpUsageError, amp

F32 = torch.float32
X = torch.linspace(-1, 1, 8).reshape(2, 4)


def initialized(model: nn.Module, level: str = 'O1', **options: Any) -> Any:
    return amp.initialize(model, opt_level=level, verbosity=0, **options)


def types(half: torch.dtype = torch.float16) -> tuple[torch.dtype, ...]:
    """Of a loss, of a sum, and of a product of FP32 tensors: (16-bit, 16-bit, FP32) where nothing is cast."""
    x = torch.ones(3, dtype=half)
    return F.mse_loss(x, x).dtype, x.sum().dtype, torch.nn.functional.linear(X, X).dtype


class Net(nn.Module):
    """Writes down the types that it sees, and calls ``between`` in the middle of its forward."""

    def __init__(self, between: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.dec = nn.Linear(4, 4)
        self.between = between
        self.types: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        first = self.enc[0](x).dtype
        self.between()
        hidden = self.enc[0](x)
        wide = hidden.softmax(-1)
        self.types = [first, hidden.dtype, wide.dtype, F.mse_loss(hidden, hidden).dtype]
        return self.dec(wide)


@pytest.mark.parametrize('level', PER_OP)
def test_direct_calls_kept_parts_outputs_and_devices_without_autocast(level: str) -> None:
    model = initialized(Net(), level)
    assert model(X).dtype is F32
    expected, half = model.dec(X), HALF[level]
    assert same_bits(expected, F.linear(*(t.to(half) for t in (X, model.dec.weight, model.dec.bias))).float())
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast('cpu', dtype):
            assert same_bits(model.dec(X), expected) and model.enc(X).dtype is F32
            assert torch.get_autocast_dtype('cpu') is dtype and torch.is_autocast_enabled('cpu')
    kept = initialized(Net(), level, keep_fp32=['dec'])
    assert same_bits(kept.dec(X), F.linear(X, kept.dec.weight, kept.dec.bias))
    model = initialized(Net(), level, cast_model_outputs='bfloat16')
    assert model(X).dtype is model.dec(X).dtype is torch.bfloat16
    with torch.device('meta'):
        meta = initialized(Net(), level)
        assert meta(torch.ones(2, 4)).shape == (2, 4) and meta.enc(torch.ones(2, 4)).dtype is F32


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
@pytest.mark.parametrize('make', [torch.jit.script, lambda m: torch.jit.trace(m, X)], ids=['script', 'trace'])
def test_scripted_modules_are_refused_but_below_o1(make: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), make(nn.Sequential(nn.Linear(4, 4))))
    wrong = [(level, model, '1') for level in CAST] + [(level, model[1], 'the model') for level in ('O0', 'O1')]
    for level, refused, name in wrong:
        with pytest.raises(AmpAttachError, match=rf'{name} .*torch\.jit'):
            initialized(refused, level)
    assert all(p.dtype is F32 for p in model.parameters())
    out = initialized(model)(X)
    assert out.dtype is F32 and same_bits(out, out.half().float()) and model[1](X).dtype is F32


# -- several models, threads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize('outer', PER_OP)
def test_casts_of_a_model_end_where_another_begins(outer: str) -> None:
    """And no 16-bit copy of a weight that both have reaches the other."""
    for inner in LEVELS:
        below = initialized(Net(), inner)
        model = Net(between=lambda below=below: below(X))
        if inner not in CAST:
            model.enc[0].weight = below.enc[0].weight
        initialized(model, outer)(X).sum().backward()
        assert below.types[:2] == [HALF.get(inner, F32)] * 2, inner
        assert model.types == [HALF[outer], HALF[outer], F32, F32], inner
        assert model.enc[0].weight.grad is not None


def test_module_that_calls_itself() -> None:
    for level, half in HALF.items():
        model = Net()
        inner = iter([lambda model=model: model(X), lambda: None])
        model.between = lambda inner=inner: next(inner)()
        assert initialized(model, level)(X).dtype is F32
        assert model.types[:2] == [half, half], level


def on_another_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize('level', HALF)
def test_functions_are_the_original_outside_and_on_other_threads(level: str) -> None:
    half = HALF[level]
    other = initialized(Inside(lambda x: types(half)), level)
    threads = lambda: types(half), lambda: other(X)
    model = initialized(Inside(lambda x: (types(half), *map(on_another_thread, threads), types(half))), level)
    model(X)
    inside = (F32, half, F32) if level in CAST else (F32, F32, half)
    assert model.seen == (inside, (half, half, F32), inside, inside)
    assert types(half) == (half, half, F32)


def test_disable_casts_in_a_forward() -> None:
    def body(x: Tensor) -> list[Any]:
        found = [types()[1:]]
        with contextlib.suppress(KeyError), amp.disable_casts():
            found.append(types()[1:])
            with amp.disable_casts():
                found.append(types()[1:])
            found.append(types()[1:])
            raise KeyError
        return [*found, types()[1:]]

    for level in PER_OP:
        model = initialized(Inside(body), level)
        model(X)
        on, off = (F32, HALF[level]), (torch.float16, F32)
        assert model.seen == [on, off, off, off, on]


def test_casts_for_everything_are_of_their_thread() -> None:
    on, off = (F32, F32, torch.float16), (torch.float16, torch.float16, F32)
    handle = amp.init()
    assert types() == on and on_another_thread(types) == off
    with pytest.raises(AmpUsageError, match='another handle'):
        amp.init()
    handle._deactivate()
    assert not torch.is_autocast_enabled('cpu') and types() == off and torch.is_autocast_cache_enabled()
    for block in (amp.disable_casts(), torch.autocast('cpu', torch.bfloat16)):
        with block, pytest.raises(AmpUsageError, match=r'disable_casts\(\) or of torch\.autocast'):
            amp.init()


borrowed: Any = None


def test_functions_can_be_pickled_in_a_forward_and_bound_to_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, where a name holds a function of the registry later."""
    model = initialized(Inside(lambda x: borrowed and pickle.loads(pickle.dumps((F.normalize, borrowed)))), 'O5')
    model(X)
    monkeypatch.setattr(sys.modules[__name__], 'borrowed', torch.linalg.inv)
    model(X)
    assert model.seen == (F.normalize, torch.linalg.inv)
    model.body = lambda x: borrowed(torch.eye(4).to(x))
    model(torch.eye(4))
    assert model.seen.dtype is torch.bfloat16


# -- copies of weights ---------------------------------------------------------------------------------------------------


def test_no_copy_of_a_weight_outlives_the_forward() -> None:
    def check(model: Any) -> None:
        for value in (2.0, 3.0):
            with torch.no_grad():
                model(torch.ones(1, 2))
                model.weight.fill_(value)
            result = model(torch.ones(1, 2))
            assert result.tolist() == [[2 * value] * 2] and result.requires_grad

    for level in PER_OP:
        with torch.autocast('cpu', HALF[level]):
            check(initialized(nn.Linear(2, 2, bias=False), level))
    handle = amp.init()
    try:
        check(nn.Linear(2, 2, bias=False))
    finally:
        handle._deactivate()


class Twice(nn.Linear):
    """Computes first without gradients."""

    def forward(self, x: Tensor, mode: Any = torch.enable_grad) -> Tensor:
        with mode():
            super().forward(x)
        return super().forward(x).square().mean()


@pairs(within=[True, False], mode=[torch.no_grad, torch.inference_mode], level=['O1', 'O2', 'O4'], door=DOORS)
def test_forward_without_gradients_before_one_with(within: bool, mode: Any, level: str, door: str) -> None:
    """torch before 2.11 kept the copies of weights that it had made without gradients."""
    model = Twice(4, 4)
    call = prepared(model, level, door)
    call(X).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    if within:
        call(X, mode).backward()
    else:
        with mode():
            model.eval()
            call(X)
        call(X).backward()
    assert len(expected) == 2 and all(same_bits(p.grad, b) for p, b in zip(model.parameters(), expected))


# -- however a forward ends ----------------------------------------------------------------------------------------------


def test_generators_are_refused_as_forwards() -> None:
    """One runs when the call is over, and with it the casts."""

    class Yields(nn.Linear):
        def forward(self, x: Tensor) -> Iterator[Tensor]:
            yield super().forward(x)

    for level in HALF:
        model = nn.Sequential(Yields(4, 4))
        with pytest.raises(AmpAttachError, match=r'0 \(Yields\) is a generator'):
            initialized(model, level)
        assert model[0].weight.dtype is F32


@pairs(error=[ValueError, KeyboardInterrupt, GeneratorExit], level=['O0', 'O1', 'O2', 'O5'], door=DOORS)
def test_interrupt(error: type[BaseException], level: str, door: str) -> None:
    """In a part of a model, which is called with it and by itself."""

    def fail(*_: Any) -> None:
        raise error

    model = Inside(lambda x: F.mse_loss(x, x))
    call = prepared(model, level, door)
    call(X)
    model.layer.register_forward_hook(fail)
    before, other = types(), Net()
    initialized(other)
    for called in (call, model.layer):

        def survive(called: Callable[..., Any] = called) -> None:
            with pytest.raises(error):
                called(X.to(model.layer.weight.dtype))

        survive()
        assert types() == before and not torch.is_autocast_enabled('cpu')
        # and a model that catches it goes on in its own types
        other.between = survive
        other(X)
        assert types() == before and other.types == [torch.float16, torch.float16, F32, F32]
