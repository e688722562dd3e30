"""Casts act in the forward passes of a model alone, whatever is called, raised, copied or interrupted there."""

from __future__ import annotations

import asyncio
import copy
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from bits import same_bits
from forwards import CAST, DOORS, HALF, LEVELS, PER_OP, Inside, prepared
from pairs import pairs
from torch import Tensor, nn

from amp_wrapper import AmpAttachError, AmpUsageError, amp

F32 = torch.float32
ERRORS = [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError]
HERE_BEFORE = F.mse_loss


def initialized(model: nn.Module, level: str = 'O1', **options: Any) -> Any:
    return amp.initialize(model, opt_level=level, verbosity=0, **options)


class Net(nn.Module):
    """Writes down the types that it sees, and calls ``between`` in the middle of its forward."""

    def __init__(self, between: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.dec = nn.Linear(4, 4)
        self.between = between
        self.types: list[torch.dtype] = []

    def encode(self, x: Tensor) -> Tensor:
        return self.enc(x).exp()

    def forward(self, x: Tensor) -> Tensor:
        first = self.enc[0](x).dtype
        self.between()
        hidden = self.enc[0](x)
        wide = hidden.softmax(-1)
        self.types = [first, hidden.dtype, wide.dtype, F.mse_loss(hidden, hidden).dtype]
        return self.dec(wide)


X = torch.linspace(-1, 1, 8).reshape(2, 4)


@pytest.mark.parametrize('level', LEVELS)
def test_types_in_training_and_in_evaluation(level: str) -> None:
    half = HALF.get(level, F32)
    for training in (True, False):
        model = initialized(Net().train(training), level)
        out = model(X)
        assert model.types == [half, half, half if level in CAST else F32, F32] and out.dtype is F32
        out.sum().backward()
        assert model.dec.weight.grad is not None
        # a part that is called directly computes in the same types; at O1 and O4 its outputs are those of a model
        seen: list[torch.dtype] = []
        model.enc[0].register_forward_hook(
            lambda module, args, output, seen=seen: seen.append(output.dtype), prepend=True
        )
        for call in (model.encode, model.enc, model.enc[0], model.dec):
            assert call(X.to(half) if level in CAST else X).dtype is (half if level in CAST else F32)
        assert seen == [half] * 3


@pytest.mark.parametrize('level', PER_OP)
def test_direct_call_of_a_part_has_its_own_type_in_an_autocast_of_the_script(level: str) -> None:
    model = initialized(Net(), level)
    expected, half = model.dec(X), HALF[level]
    assert same_bits(expected, F.linear(*(t.to(half) for t in (X, model.dec.weight, model.dec.bias))).float())
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast('cpu', dtype):
            assert same_bits(model.dec(X), expected) and model.enc(X).dtype is F32
            assert torch.get_autocast_dtype('cpu') is dtype and torch.is_autocast_enabled('cpu')


@pytest.mark.parametrize('level', PER_OP)
def test_outputs_kept_parts_and_devices_without_autocast(level: str) -> None:
    model = initialized(Net(), level, cast_model_outputs='bfloat16')
    assert model(X).dtype is model.dec(X).dtype is torch.bfloat16
    kept = initialized(Net(), level, keep_fp32=['dec'])
    assert same_bits(kept.dec(X), F.linear(X, kept.dec.weight, kept.dec.bias))
    with torch.device('meta'):
        meta = initialized(Net(), level)
        assert meta(torch.ones(2, 4)).shape == (2, 4) and meta.enc(torch.ones(2, 4)).dtype is F32


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
@pytest.mark.parametrize('make', [torch.jit.script, lambda m: torch.jit.trace(m, X)], ids=['script', 'trace'])
def test_scripted_modules_are_refused_but_below_o1(make: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), make(nn.Sequential(nn.Linear(4, 4))))
    for level, wrong, name in (
        *((lv, model, '1') for lv in CAST),
        ('O0', model[1], 'the model'),
        ('O1', model[1], 'the model'),
    ):
        with pytest.raises(AmpAttachError, match=rf'{name} .*torch\.jit'):
            initialized(wrong, level)
    assert all(p.dtype is F32 for p in model.parameters())
    out = initialized(model)(X)
    assert out.dtype is F32 and same_bits(out, out.half().float()) and model[1](X).dtype is F32


# -- several models, threads ---------------------------------------------------------------------------------------------


@pairs(outer=PER_OP, inner=LEVELS)
def test_casts_of_a_model_end_where_another_begins(outer: str, inner: str) -> None:
    """And no 16-bit copy of a weight that both have reaches the other."""
    below = initialized(Net(), inner)
    model = Net(between=lambda: below(X))
    if inner not in CAST:
        model.enc[0].weight = below.enc[0].weight
    initialized(model, outer)(X).sum().backward()
    assert below.types[:2] == [HALF.get(inner, F32)] * 2 and model.types == [HALF[outer], HALF[outer], F32, F32]
    assert model.enc[0].weight.grad is not None


@pytest.mark.parametrize('order', [('O1', 'O4'), ('O4', 'O1')])
def test_part_of_two_models_has_the_casts_of_the_later(order: tuple[str, str]) -> None:
    part, types = nn.Linear(4, 4), []
    first, second = (initialized(nn.Sequential(part), level) for level in order)
    part.register_forward_hook(lambda module, args, output: types.append(output.dtype), prepend=True)
    assert {model(X).dtype for model in (part, first, second)} == {F32}
    assert types == [HALF[order[1]], HALF[order[0]], HALF[order[1]]]


class Tree(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.types: list[torch.dtype] = []

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth:
            self(x, depth - 1)
        y = self.fc(x)
        self.types.append(y.dtype)
        return y


@pytest.mark.parametrize('level', HALF)
def test_module_that_calls_itself(level: str) -> None:
    for model in (Tree(), nn.Sequential(Tree())):
        assert initialized(model, level)(X).dtype is F32
        tree = model if isinstance(model, Tree) else model[0]
        assert tree.types == [HALF[level]] * 3


def on_another_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize('level', HALF)
def test_functions_are_the_original_outside_and_on_other_threads(level: str) -> None:
    half = torch.ones(3, dtype=HALF[level])

    def types() -> tuple[torch.dtype, ...]:
        return F.mse_loss(half, half).dtype, half.sum().dtype, torch.nn.functional.linear(X, X).dtype

    other = initialized(Inside(lambda x: types()), level)
    threads = types, lambda: other(X)
    model = initialized(Inside(lambda x: (types(), *map(on_another_thread, threads), types())), level)
    model(X)
    inside = (F32, HALF[level] if level in CAST else F32, F32 if level in CAST else HALF[level])
    assert model.seen == (inside, (HALF[level], HALF[level], F32), inside, inside)
    assert types() == (HALF[level], HALF[level], F32) and F.mse_loss is HERE_BEFORE
    assert pickle.loads(pickle.dumps(F.mse_loss)) is F.mse_loss and 'numpy' not in vars(Tensor)


@pytest.mark.parametrize('level', PER_OP)
def test_disable_casts_in_a_forward(level: str) -> None:
    def types() -> tuple[torch.dtype, torch.dtype]:
        return F.linear(X, X).dtype, torch.ones(2, dtype=HALF[level]).sum().dtype

    def body(x: Tensor) -> list[Any]:
        found = [types()]
        with amp.disable_casts():
            found.append(types())
            with amp.disable_casts():
                found.append(types())
            found.append(types())
        with pytest.raises(KeyError), amp.disable_casts():
            raise KeyError
        return [*found, types()]

    model = initialized(Inside(body), level)
    model(X)
    on, off = (HALF[level], F32), (F32, HALF[level])
    assert model.seen == [on, off, off, off, on]


def test_casts_for_everything_are_of_their_thread_and_end_in_any_order() -> None:
    half = torch.ones(2, dtype=torch.float16)

    def types() -> tuple[torch.dtype, torch.dtype]:
        return F.linear(X, X).dtype, half.sum().dtype

    def stop() -> None:
        with pytest.raises(AmpUsageError):
            handles[0]._deactivate()

    on, off = (torch.float16, F32), (F32, torch.float16)
    for first in (0, 1):
        handles = [amp.init(), amp.init()]
        assert types() == on and on_another_thread(types) == off
        on_another_thread(stop)
        handles[first]._deactivate()
        assert types() == on
        with amp.disable_casts():
            handles[1 - first]._deactivate()
        assert types() == off and not torch.is_autocast_enabled('cpu')
    with torch.autocast('cpu', torch.bfloat16):
        with amp.disable_casts():
            handle = amp.init()
        assert types() == on
        handle._deactivate()
        assert torch.get_autocast_dtype('cpu') is torch.bfloat16 and torch.is_autocast_cache_enabled()
        late = amp.init()
    late._deactivate()
    assert not torch.is_autocast_enabled('cpu')


def test_patch_of_a_function_by_somebody_else_stays_while_it_lasts() -> None:
    original, model = F.huber_loss, initialized(Inside(lambda x: F.huber_loss(x, x)), 'O5')
    for _ in range(2):
        with mock.patch.object(F, 'huber_loss', return_value=-1):
            model(X)
            assert model.seen == -1 == F.huber_loss(X, X)
        model(X)
        assert model.seen.dtype is F32 and F.huber_loss is original


borrowed: Any = None


@pytest.mark.xfail(strict=True, reason='casting')
def test_name_that_is_bound_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, where a name holds a function of the registry later."""
    model = initialized(Inside(lambda x: borrowed and borrowed(x)), 'O5')
    model(X.repeat(2, 1))
    monkeypatch.setattr(sys.modules[__name__], 'borrowed', torch.linalg.inv)
    with torch.no_grad():
        model.layer.weight.copy_(torch.eye(4))
    model(torch.eye(4))
    assert model.seen.dtype is torch.bfloat16


@pytest.mark.xfail(strict=True, reason='casting')
def test_function_that_was_compiled_for_a_plain_model_casts_another() -> None:
    call = torch.compile(lambda model, x: model(x), backend='eager')
    plain, model = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    initialized(model, 'O4')
    call(plain, X)
    assert same_bits(call(model, X), model(X))


def test_casts_survive_copies_and_pickle() -> None:
    for level in HALF:
        model = initialized(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), level)
        expected = model(X)
        duplicates = [pickle.loads(pickle.dumps(model))] + ([copy.deepcopy(model)] if level in PER_OP else [])
        for duplicate in duplicates:
            assert same_bits(duplicate(X), expected)
            with torch.no_grad():
                duplicate[0].weight.zero_()
                duplicate[0].bias.fill_(3.0)
            assert duplicate[0](X).eq(3).all() and same_bits(model(X), expected)


# -- copies of weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', PER_OP)
def test_no_copy_of_a_weight_outlives_the_forward(level: str) -> None:
    model, x = initialized(nn.Linear(2, 2, bias=False), level), torch.ones(1, 2)
    with torch.autocast('cpu', HALF[level]):
        for value in (2.0, 3.0):
            with torch.no_grad():
                model(x)
                model.weight.fill_(value)
            assert model(x).tolist() == [[2 * value] * 2]
    handle = amp.init()
    try:
        layer = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            layer(x)
        layer.load_state_dict({'weight': torch.full((2, 2), 2.0)})
        assert layer(x).tolist() == [[4.0] * 2] and layer(x).requires_grad
    finally:
        handle._deactivate()


MODES = {'no_grad': torch.no_grad, 'inference_mode': torch.inference_mode}


class Twice(nn.Module):
    """Runs a part without gradients first, by its module or by a function."""

    def __init__(self, first: str, mode: str) -> None:
        super().__init__()
        self.body, self.head, self.first, self.mode = nn.Linear(4, 4), nn.Linear(4, 4), first, mode

    def forward(self, x: Tensor) -> Tensor:
        if self.first in ('module', 'function'):
            with MODES[self.mode]():
                self.body(x) if self.first == 'module' else F.linear(x, self.body.weight, self.body.bias)
        return self.head(self.body(x)).square().mean()


def gradients(first: str, mode: str, level: str, door: str) -> list[Any]:
    torch.manual_seed(0)
    model = Twice(first, mode)
    call = prepared(model, level, door)
    if first == 'evaluation':
        model.eval()
        with MODES[mode]():
            call(X)
    call(X).backward()
    return [p.grad for p in model.parameters()]


@pairs(first=['module', 'function', 'evaluation'], mode=MODES, level=[lv for lv in LEVELS if lv != 'O3'], door=DOORS)
def test_forward_without_gradients_before_one_with(first: str, mode: str, level: str, door: str) -> None:
    """torch before 2.11 kept the copies of weights that it had made without gradients."""
    found, expected = gradients(first, mode, level, door), gradients('', mode, level, door)
    assert len(found) == 4 and all(same_bits(a, b) for a, b in zip(found, expected))


# -- however a forward ends ----------------------------------------------------------------------------------------------


def left_open() -> tuple[Any, ...]:
    """What a forward may change for whoever comes after it."""
    half = torch.ones(2, dtype=torch.float16)
    return (
        [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ('cpu', 'cuda')],
        torch.is_autocast_cache_enabled(),
        (F.mse_loss, torch.linalg.inv, Tensor.numpy, 'numpy' in vars(Tensor), torch.Tensor.masked_fill),
        hasattr(nn.modules.module, 'Exception'),
        (F.mse_loss(half, half).dtype, F.linear(X, X).dtype, half.exp().dtype),
    )


@pytest.mark.parametrize('level', LEVELS)
def test_forward_that_is_a_generator_is_refused(level: str) -> None:
    """It runs when the call is over, and with it the casts."""

    class Yields(nn.Linear):
        def forward(self, x: Tensor) -> Iterator[Tensor]:
            yield super().forward(x)

    model = nn.Sequential(Yields(4, 4))
    if level == 'O0':
        initialized(model, level)
        return
    with pytest.raises(AmpAttachError, match=r'0 \(Yields\) is a generator'):
        initialized(model, level)
    assert model[0].weight.dtype is F32


@pairs(where=['forward', 'pre-hook', 'hook', 'loss'], error=ERRORS, level=LEVELS, door=DOORS)
def test_interrupt(where: str, error: type[BaseException], level: str, door: str) -> None:
    def fail(*_: Any) -> None:
        raise error

    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.criterion = nn.Linear(4, 4), nn.MSELoss()

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            if where == 'forward' and not self.training:
                fail()
            return self.criterion(y, y)

    model = Scored()
    call = prepared(model, level, door)
    call(X)
    part = {'loss': model.criterion}.get(where, model.fc)
    if where != 'forward':
        (part.register_forward_pre_hook if where == 'pre-hook' else part.register_forward_hook)(fail)
    model.eval()
    before = left_open()
    for called in (call, model.fc) if part is model.fc and where != 'forward' else (call,):
        with pytest.raises(error):
            called(X if called is call else X.to(model.fc.weight.dtype))
        assert left_open() == before

        def survive(called: Callable[..., Any] = called) -> None:
            with pytest.raises(error):
                called(X.to(model.fc.weight.dtype))

        # and a model that catches it goes on in its own types
        outer = initialized(Net(between=survive))
        outer(X)
        assert outer.types == [torch.float16, torch.float16, F32, F32] and left_open() == before


@pytest.mark.parametrize('level', LEVELS)
def test_result_that_is_a_generator_runs_between_forwards(level: str) -> None:
    model, before = initialized(Inside(lambda x: (F.mse_loss(y, y) for y in x)), level), left_open()
    other = initialized(Net(), 'O1')
    for value in model(X.repeat(2, 1)):
        assert value == 0 and left_open() == before
        other(X)
        break
    assert left_open() == before and other.types == [torch.float16, torch.float16, F32, F32]
