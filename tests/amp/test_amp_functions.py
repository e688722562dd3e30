"""Functions whose casts the user chooses: decorated, or registered by the object that holds them."""

from __future__ import annotations

import dataclasses
import functools
import gc
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import softmin as by_name

from amp_wrapper.amp import functions
from amp_wrapper.amp.functions import (
    bfloat16_function,
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from amp_wrapper.autocast import kernels, state
from amp_wrapper.autocast.global_autocast import GlobalCasts
from amp_wrapper.autocast.patching import patches
from amp_wrapper.casting.plan import CastPlan
from amp_wrapper.errors import AmpConfigError
from amp_wrapper.policy import resolve

H, B, S, D = torch.float16, torch.bfloat16, torch.float32, torch.float64
REGISTER = {
    H: register_half_function,
    B: register_bfloat16_function,
    S: register_float_function,
    None: register_promote_function,
}


@pytest.fixture(autouse=True)
def registry_as_it_was() -> Iterator[None]:
    """Rules stay for the life of a process; here each test has its own."""
    yield
    for site in patches.targets.values():
        site.patched.rule = None
    assert state.depth() == 0
    assert not patches.in_place
    assert not torch.is_autocast_enabled('cpu')


@pytest.fixture
def casts() -> Iterator[GlobalCasts]:
    handle = GlobalCasts()
    handle.start()
    yield handle
    handle.stop()


@pytest.fixture
def alive() -> Iterator[state.CastSession]:
    session = state.session_opened()
    yield session
    state.session_closed(session)


def library() -> Any:
    """A module of somebody else."""
    module = types.ModuleType('somebodys')
    exec(
        'def double(x, *others, **named):\n'
        '    seen.append([x.dtype, *(o.dtype for o in others)])\n'
        '    return x + x\n'
        'def total(tensors):\n'
        '    seen.append([t.dtype for t in tensors])\n'
        '    return sum(tensors)\n'
        'def add_(x, y):\n'
        '    seen.append([x.dtype, y.dtype])\n'
        '    return x.add_(y)\n'
        'seen = []\n',
        vars(module),
    )
    return module


def ones(dtype: torch.dtype) -> Tensor:
    return torch.ones(2, 2, dtype=dtype)


# -- registered --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('rule', [H, B, S])
def test_named_types(rule: torch.dtype, casts: GlobalCasts) -> None:
    module = library()
    REGISTER[rule](module, 'double')
    for dtype in (H, B, S):
        assert module.double(ones(dtype)).dtype is rule
    assert module.double(ones(D)).dtype is D
    assert module.double(torch.ones(2, dtype=torch.int64)).dtype is torch.int64


def test_promote(casts: GlobalCasts) -> None:
    module = library()
    register_promote_function(module, 'double')
    register_promote_function(module, 'total')
    register_promote_function(module, 'add_')
    for left, right, widest in ((H, S, S), (S, H, S), (H, H, H), (H, B, S)):
        module.double(ones(left), ones(right))
        assert module.seen.pop() == [widest, widest]
        module.total([ones(left), ones(right)])
        assert module.seen.pop() == [widest, widest]
    x = ones(H)
    assert module.add_(x, ones(S)) is x
    assert module.seen.pop() == [H, H]
    assert x.eq(2).all()


@pytest.mark.parametrize(
    ('holder', 'name', 'rule', 'call', 'expected'),
    [
        (torch, 'mm', S, lambda x: torch.mm(x, x), S),
        (torch, 'mm', None, lambda x: torch.mm(x, x), S),
        (torch, 'mm', B, lambda x: torch.mm(x, x), B),
        (torch, 'softmax', H, lambda x: torch.softmax(x, 0), H),
        (F, 'softmax', H, lambda x: F.softmax(x, 0), H),
        (F, 'cross_entropy', H, lambda x: F.cross_entropy(x, torch.tensor([0, 1])), H),
        (F, 'linear', S, lambda x: nn.Linear(2, 2)(x), S),
        (torch.Tensor, 'sum', H, lambda x: x.sum(), H),
        (torch.Tensor, '__matmul__', S, lambda x: x @ x, S),
        (torch, 'sigmoid', S, lambda x: torch.sigmoid(x.half()), S),
        (torch, 'lstm', S, lambda x: nn.LSTM(2, 2)(x[None])[0], H),
    ],
    ids=lambda value: getattr(value, '__name__', None) if isinstance(value, type(torch)) else None,
)
def test_lists_of_torch_and_ours_give_way(
    holder: Any, name: str, rule: torch.dtype | None, call: Callable[[Tensor], Tensor], expected: torch.dtype
) -> None:
    original = getattr(holder, name)
    handle = GlobalCasts()
    handle.start()
    before = call(torch.eye(2)).dtype
    REGISTER[rule](holder, name)
    after = call(torch.eye(2)).dtype
    handle.stop()
    assert after is expected
    if name != 'lstm':
        assert before is not after
    assert getattr(holder, name) is original
    assert call(torch.eye(2)).dtype in (S, H)


def test_the_last_registration_counts(casts: GlobalCasts) -> None:
    module = library()
    for rule in (H, H, S, B, S):
        REGISTER[rule](module, 'double')
        assert module.double(ones(H)).dtype is rule
    casts.stop()
    assert module.double(ones(H)).dtype is H


@pytest.mark.parametrize('before', [True, False])
def test_before_and_after_casts_begin(before: bool) -> None:
    module, handle = library(), GlobalCasts()
    original = module.double
    if before:
        register_half_function(module, 'double')
        assert module.double is original
    handle.start()
    if not before:
        register_half_function(module, 'double')
    assert module.double(ones(S)).dtype is H
    handle.stop()
    assert module.double is original
    handle.start()
    assert module.double(ones(S)).dtype is H
    handle.stop()


def test_imports_by_name_are_found(casts: GlobalCasts) -> None:
    register_half_function(F, 'softmin')
    assert F.softmin(ones(S), 0).dtype is H
    assert globals()['by_name'](ones(S), 0).dtype is H
    casts.stop()
    assert by_name is F.softmin


def test_methods_and_objects(casts: GlobalCasts) -> None:
    @dataclasses.dataclass
    class Scaler:
        factor: Tensor

        def run(self, x: Tensor) -> Tensor:
            assert self.factor.dtype is S
            return x * 2

        @staticmethod
        def twice(x: Tensor) -> Tensor:
            return x * 2

        @classmethod
        def thrice(cls, x: Tensor) -> Tensor:
            return x * 3

    for name in ('run', 'twice', 'thrice'):
        register_half_function(Scaler, name)
        assert getattr(Scaler(ones(S)), name)(ones(S)).dtype is H
    one, other = types.SimpleNamespace(f=lambda x: x), types.SimpleNamespace(f=lambda x: x)
    register_half_function(one, 'f')
    assert (one.f(ones(S)).dtype, other.f(ones(S)).dtype) == (H, S)
    assert Scaler.twice(ones(S)).dtype is H


def test_functions_of_python_may_use_weights(casts: GlobalCasts) -> None:
    layer, module = nn.Linear(2, 2), library()
    module.project = lambda x: layer(x)
    register_bfloat16_function(module, 'project')
    assert module.project(ones(S)).dtype is B
    register_float_function(module, 'project')
    assert module.project(ones(H)).dtype is S


@pytest.mark.parametrize(
    ('module', 'name', 'words'),
    [
        (torch, 'sofmax', ["'torch'", "'sofmax'", "'softmax'"]),
        (F, 'lineer', ['torch.nn.functional', "'linear'"]),
        (torch.Tensor, 'summ', ['Tensor', "'sum'"]),
        (torch.nn, 'Linear', ['torch.nn.Linear', 'a class']),
        (torch, 'pi', ['torch.pi', 'a float']),
        (int, 'bit_length', ['int.bit_length', 'replaced']),
        (torch, 3, ['name=3', 'string']),
    ],
)
def test_errors_name_what_is_wrong(module: Any, name: Any, words: list[str]) -> None:
    for register in REGISTER.values():
        with pytest.raises(ValueError) as caught:
            register(module, name)
        assert isinstance(caught.value, AmpConfigError)
        for word in words:
            assert word.strip("'") in str(caught.value)


def test_gradients_pass(casts: GlobalCasts) -> None:
    module = library()
    for rule, register in REGISTER.items():
        register(module, 'double')
        x = ones(S).requires_grad_()
        y = ones(H).requires_grad_()
        module.double(x, y).float().sum().backward()
        assert x.grad is not None
        assert x.grad.dtype is S
        assert x.grad.eq(2).all(), rule


def test_in_place_functions_write_to_the_callers_tensor(casts: GlobalCasts) -> None:
    register_float_function(torch.Tensor, 'mul_')
    x = torch.full((2,), 2.0, dtype=H)
    assert x.mul_(torch.tensor(3.0)) is x
    assert (x.dtype, x.tolist()) == (H, [6.0, 6.0])


# -- inside models -----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], keep: bool = False) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(2, 2), function
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.function(self.fc(x))
        self.seen.append(x.dtype)
        return x


def attach(model: nn.Module, level: str, covers: bool = True, **words: Any) -> Any:
    return CastPlan([('', model)], resolve(opt_level=level, **words), covers_forward=covers).apply()


@pytest.mark.parametrize('decorated', [True, False])
@pytest.mark.parametrize('level', ['O0', 'O1', 'O2', 'O3', 'O4', 'O5'])
def test_levels(level: str, decorated: bool, alive: state.CastSession) -> None:
    module = library()
    if decorated:
        module.double = bfloat16_function(module.double)
    else:
        register_bfloat16_function(module, 'double')
    model = Net(lambda x: module.double(x))
    attach(model, level)
    model(ones(S))
    assert model.seen == [B if level in ('O1', 'O4', 'O5') else S if level == 'O0' else H]
    # O5 is bfloat16 by itself
    assert module.seen == [[model.seen[0]]]


def test_a_plan_that_does_not_cover_forwards_knows_no_registrations(alive: state.CastSession) -> None:
    module = library()
    register_bfloat16_function(module, 'double')
    module.total = half_function(module.total)
    model = Net(lambda x: module.total([module.double(x)]).softmax(0))
    handle = attach(model, 'O1', covers=False)
    with torch.autocast('cpu', H):
        model(ones(S))
    assert model.seen == [H]
    assert module.seen == [[H], [H]]
    handle.remove()


def test_modules_kept_in_fp32_are_left_alone() -> None:
    module = library()
    register_half_function(module, 'double')
    model = nn.Sequential(nn.Linear(2, 2), Net(lambda x: module.double(x)))
    attach(model, 'O1', keep_fp32=['1'])
    model(ones(S))
    assert module.seen == [[S]]


def test_disable_casts_inside_a_model() -> None:
    module = library()
    register_bfloat16_function(module, 'double')

    def function(x: Tensor) -> Tensor:
        with disable_casts():
            first = module.double(x)
            assert F.linear(ones(S), ones(S)).dtype is S
            assert x.softmax(0).dtype is H
        with pytest.raises(KeyError), disable_casts():
            raise KeyError
        return module.double(first)

    model = Net(function)
    attach(model, 'O1')
    model(ones(S))
    assert module.seen == [[H], [B]]
    with disable_casts():
        assert model.fc(ones(S)).equal(F.linear(ones(S), model.fc.weight, model.fc.bias))


# -- decorated ---------------------------------------------------------------------------------------------------------

DECORATE = {H: half_function, B: bfloat16_function, S: float_function}


@pytest.mark.parametrize('rule', [H, B, S])
def test_decorated_functions_act_while_a_session_is_alive(rule: torch.dtype) -> None:
    # a session of an earlier test ends when Python finds its model
    gc.collect()
    layer = nn.Linear(2, 2)

    @DECORATE[rule]
    def project(x: Tensor, by: dict[str, list[Tensor]]) -> Tensor:
        """Words."""
        assert x.dtype is by['more'][0].dtype
        return layer(x) + by['more'][0]

    def call() -> torch.dtype:
        return project(ones(S), by={'more': [ones(S)]}).dtype

    assert (project.__name__, project.__doc__) == ('project', 'Words.')
    assert call() is S
    session = state.session_opened()
    assert call() is rule
    with disable_casts():
        assert call() is S
    state.session_closed(session)
    assert call() is S
    assert not torch.is_autocast_enabled('cpu')


def test_decorated_functions_bring_the_tables(alive: state.CastSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any model has run."""
    asked: list[str] = []
    monkeypatch.setattr(kernels, 'install', asked.append)

    @bfloat16_function
    def weights(x: Tensor) -> Tensor:
        return x

    weights(ones(S))
    assert asked == ['cpu']


def test_decorated_promote(alive: state.CastSession) -> None:
    @promote_function
    def both(x: Tensor, y: Tensor) -> tuple[torch.dtype, torch.dtype]:
        return x.dtype, y.dtype

    assert both(ones(H), ones(S)) == (S, S)
    assert both(ones(H), ones(H)) == (H, H)
    assert both(ones(H), ones(D)) == (H, D)


def test_decorated_methods(alive: state.CastSession) -> None:
    @dataclasses.dataclass
    class Scaler:
        factor: Tensor

        @half_function
        def run(self, x: Tensor) -> tuple[torch.dtype, torch.dtype]:
            return x.dtype, self.factor.dtype

        @half_function
        @staticmethod
        def static(x: Tensor) -> torch.dtype:
            return x.dtype

    assert Scaler(ones(S)).run(ones(S)) == (H, S)
    assert Scaler.static(ones(S)) is H


def test_decorated_callables_of_python_may_use_weights(alive: state.CastSession) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    class Project:
        def __init__(self) -> None:
            self.block = Block()

        def __call__(self, x: Tensor) -> Tensor:
            return self.block(x)

    block, project = Block(), Project()
    for function in (
        block,
        block.fc,
        block.forward,
        project,
        functools.partial(block.forward),
        functools.partial(project),
    ):
        assert half_function(function)(ones(S)).dtype is H
        assert float_function(function)(ones(H)).dtype is S
    # what is compiled is one op, however it is wrapped
    for op in (torch.mm, functools.partial(torch.mm, ones(S)), torch.ops.aten.mm):
        words = (ones(S),) if isinstance(op, functools.partial) else (ones(S), ones(S))
        assert float_function(op)(*words).dtype is S


def test_decorators_refuse_what_is_no_function() -> None:
    for value in (nn.Linear, 3):
        with pytest.raises(ValueError, match='cannot be decorated'):
            half_function(value)  # type: ignore[type-var]


@half_function
def at_module_level(x: Tensor) -> Tensor:
    return x


def test_decorated_functions_can_be_pickled_and_wrapped(alive: state.CastSession) -> None:
    assert pickle.loads(pickle.dumps(at_module_level)) is at_module_level
    assert functools.partial(at_module_level)(ones(S)).dtype is H


def test_an_exception_inside_leaves_nothing_open(alive: state.CastSession) -> None:
    @half_function
    def fails(x: Tensor) -> Tensor:
        assert x.dtype is H
        raise KeyError

    with pytest.raises(KeyError):
        fails(ones(S))
    assert state.depth() == 0
    module = library()
    module.fails = fails
    register_float_function(torch, 'mm')
    handle = GlobalCasts()
    handle.start()
    with pytest.raises(RuntimeError):
        torch.mm(ones(S), torch.ones(3, 3))
    assert torch.is_autocast_enabled('cpu')
    assert F.mse_loss(ones(H), ones(H)).dtype is S
    handle.stop()


def test_every_public_name_says_what_it_does() -> None:
    for name in ('half', 'bfloat16', 'float', 'promote'):
        assert getattr(functions, f'{name}_function').__doc__
        assert getattr(functions, f'register_{name}_function').__doc__
