"""Functions whose casts a script chooses, by decorators and registrations; and ``amp.init``, apex's oldest interface."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import math
import pickle
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from exact_scripts import state
from play import Part, data
from processes import python
from torch import Tensor, nn
from torch.nn.functional import softmin as by_name
from torch.optim import SGD, Optimizer

from amp_wrapper import AmpAttachError, AmpConfigError, AmpUsageError, amp

H, B, S, D = torch.float16, torch.bfloat16, torch.float32, torch.float64
REGISTER: dict[Any, Callable[[Any, str], None]] = {
    H: amp.register_half_function,
    B: amp.register_bfloat16_function,
    S: amp.register_float_function,
    None: amp.register_promote_function,
}
DECORATE: dict[Any, Any] = {H: amp.half_function, B: amp.bfloat16_function, S: amp.float_function}


@pytest.fixture
def handle() -> Iterator[Any]:
    """Casts are on for everything."""
    made = amp.init()
    yield made
    made._deactivate()


def library() -> Any:
    """Functions of somebody else, which write down the types that they get."""
    seen: list[list[torch.dtype]] = []

    def double(*tensors: Tensor) -> Tensor:
        return total(tensors) * 2

    def total(tensors: Iterable[Tensor]) -> Tensor:
        seen.append([t.dtype for t in tensors])
        return next(iter(tensors))

    return types.SimpleNamespace(double=double, total=total, seen=seen)


def ones(dtype: torch.dtype) -> Tensor:
    return torch.ones(2, 2, dtype=dtype)


# -- registered functions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(('rule', 'before'), [(H, True), (B, False), (S, True), (H, False)])
def test_registered_function_gets_its_type_while_casts_are_on(rule: torch.dtype, before: bool) -> None:
    module = library()
    if before:
        REGISTER[rule](module, 'double')
    handle = amp.init()
    if not before:
        REGISTER[rule](module, 'double')
    try:
        found = [module.double(ones(dtype)).dtype for dtype in (H, B, S, D, torch.int64)]
        assert found == [*[rule] * 3, D, torch.int64]
        x = ones(S).requires_grad_()
        module.double(x).float().sum().backward()
        assert x.grad is not None and x.grad.dtype is S and x.grad.eq(2).all()
    finally:
        handle._deactivate()
    assert module.double(ones(H)).dtype is H and module.double(ones(S)).dtype is S


def test_promoted_function_gets_the_widest_type(handle: Any) -> None:
    module = library()
    for name in ('double', 'total'):
        amp.register_promote_function(module, name)
    for left, right, widest in ((H, S, S), (S, H, S), (H, H, H), (H, B, S)):
        module.double(ones(left), ones(right))
        module.total([ones(left), ones(right)])
        assert module.seen[-2:] == [[widest, widest]] * 2


#: Module, name, and words of the error.
WRONG: list[tuple[Any, Any, list[str]]] = [
    (torch, 'sofmax', ['torch', 'sofmax', 'softmax']),
    (torch.Tensor, 'summ', ['Tensor', 'sum']),
    (torch.nn, 'Linear', ['torch.nn.Linear', 'a class']),
    (torch, 'pi', ['torch.pi', 'a float']),
    (int, 'bit_length', ['int.bit_length', 'replaced']),
    (torch, 3, ['name=3', 'string']),
]


def test_wrong_registration_is_named() -> None:
    for register, (module, name, words) in itertools.product(REGISTER.values(), WRONG):
        with pytest.raises(AmpConfigError) as caught:
            register(module, name)
        assert isinstance(caught.value, ValueError) and all(word in str(caught.value) for word in words)


#: Functions of torch, the rule, a call, and the type that comes of it.
OF_TORCH: list[tuple[Any, str, Any, Callable[[Tensor], Tensor], torch.dtype]] = [
    (torch, 'mm', S, lambda x: torch.mm(x, x), S),
    (torch, 'mm', B, lambda x: torch.mm(x, x), B),
    (torch, 'softmax', H, lambda x: torch.softmax(x, 0), H),
    (F, 'softmax', H, lambda x: F.softmax(x, 0), H),
    (F, 'softmin', H, lambda x: by_name(x, 0), H),
    (F, 'linear', S, lambda x: nn.Linear(2, 2)(x), S),
    (torch.Tensor, 'sum', H, lambda x: x.sum(), H),
    (torch.Tensor, '__matmul__', S, lambda x: x @ x, S),
]


def register_functions_of_torch() -> None:
    """What another process does, since registrations last as long as a process."""
    for holder, name, rule, call, expected in OF_TORCH:
        REGISTER[rule](holder, name)
        handle = amp.init()
        found = call(torch.eye(2)).dtype
        if name == 'mm':
            with pytest.raises(RuntimeError):
                torch.mm(ones(S), torch.ones(3, 3))
            assert torch.is_autocast_enabled('cpu') and F.mse_loss(ones(H), ones(H)).dtype is ones(H).exp().dtype is S
        handle._deactivate()
        assert found is expected, (name, rule, found)
        assert by_name is F.softmin and torch.mm(ones(S), ones(S)).dtype is S, name


def test_registrations_for_functions_of_torch_come_before_the_lists() -> None:
    code = 'import test_own_functions; test_own_functions.register_functions_of_torch()'
    done = python('-c', code, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr[-2000:]


# -- inside models ------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(2, 2), function
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.function(self.fc(x))
        self.seen.append(x.dtype)
        return x


@pytest.mark.parametrize('decorated', [True, False])
def test_rule_holds_where_a_level_casts_operations(decorated: bool) -> None:
    """Elsewhere functions get what there is; outside of forward passes decorated ones alone are cast."""
    for level, expected in {'O0': S, 'O1': B, 'O2': H, 'O3': H, 'O4': B, 'O5': B}.items():
        module = library()
        if decorated:
            module.double = amp.bfloat16_function(module.double)
        else:
            amp.register_bfloat16_function(module, 'double')
        model = Net(lambda x, module=module: module.double(x))  # type: ignore[misc]
        amp.initialize(model, opt_level=level, verbosity=0)
        model(ones(S))
        assert model.seen == [expected] and module.seen == [[expected]], level


# -- decorated functions ------------------------------------------------------------------------------------------------


@amp.half_function
def at_module_level(x: Tensor) -> Tensor:
    """Words."""
    return x


def test_decorated_function_casts_while_a_session_is_alive() -> None:
    gc.collect()
    layer = nn.Linear(2, 2)

    def project(x: Tensor, by: dict[str, list[Tensor]]) -> Tensor:
        assert x.dtype is by['more'][0].dtype
        return layer(x) + by['more'][0]

    def called() -> list[torch.dtype]:
        return [decorate(project)(ones(S), by={'more': [ones(S)]}).dtype for decorate in DECORATE.values()]

    assert called() == [S, S, S]
    both = amp.initialize(model := nn.Linear(2, 2), SGD(model.parameters(), 0.1), opt_level='O1', verbosity=0)
    assert called() == list(DECORATE)
    with amp.disable_casts():
        assert called() == [S, S, S]
    del both, model
    gc.collect()
    assert called() == [S, S, S] and not torch.is_autocast_enabled('cpu')


def test_what_can_be_decorated(handle: Any) -> None:
    @dataclasses.dataclass
    class Scaler:
        factor: Tensor

        @amp.half_function
        def run(self, x: Tensor) -> tuple[torch.dtype, torch.dtype]:
            return x.dtype, self.factor.dtype

        @amp.half_function
        @staticmethod
        def static(x: Tensor) -> torch.dtype:
            return x.dtype

    assert Scaler(ones(S)).run(ones(S)) == (H, S) and Scaler.static(ones(S)) is H
    block = Net(lambda x: x)
    for function in (block, block.fc, block.forward, functools.partial(block.forward)):
        assert amp.half_function(function)(ones(S)).dtype is H
        assert amp.float_function(function)(ones(H)).dtype is S
    for op in (functools.partial(torch.mm, ones(S)), functools.partial(torch.ops.aten.mm, ones(S))):
        assert amp.float_function(op)(ones(S)).dtype is S
    both = amp.promote_function(lambda x, y: (x.dtype, y.dtype))
    found = [both(ones(left), ones(right)) for left, right in ((H, S), (H, H), (H, D))]
    assert found == [(S, S), (H, H), (H, D)]
    assert pickle.loads(pickle.dumps(at_module_level)) is at_module_level
    assert (at_module_level.__name__, at_module_level.__doc__) == ('at_module_level', 'Words.')
    for value in (nn.Linear, 3):
        with pytest.raises(ValueError, match='cannot be decorated'):
            amp.half_function(value)  # type: ignore[type-var]


# -- amp.init -----------------------------------------------------------------------------------------------------------

#: Small enough for gradients in float16 at the first scale, 2**16.
SMALL = 2.0**-12


def trained() -> tuple[Part, Optimizer]:
    part = Part()
    return part, SGD(part.trained, lr=0.25, momentum=0.5)


def weights(model: nn.Module, optimizer: Optimizer) -> dict[Any, Any]:
    return state([model], [optimizer], buffers=False)


def reference(*factors: list[float]) -> dict[Any, Any]:
    """FP32 training; each step sums the gradients of its losses."""
    model, optimizer = trained()
    for losses in factors:
        optimizer.zero_grad()
        for factor in losses:
            (model(data(0)) * factor).backward()
        optimizer.step()
    return weights(model, optimizer)


def play(model: Part, optimizer: Any, scaling: Any, *factors: list[float]) -> dict[Any, Any]:
    """The same losses in blocks of ``scaling``, a wrapped optimizer's or a handle's."""
    for losses in factors:
        optimizer.zero_grad()
        for factor in losses:
            with scaling(model(data(0)) * factor) as scaled:
                scaled.backward()
        optimizer.step()
    return weights(model, optimizer)


@pytest.mark.parametrize('num_loss', [1, np.int64(3)])
def test_wrapped_optimizer_trains_as_fp32(handle: Any, num_loss: int) -> None:
    """An overflow of any loss skips the step, and lowers the scale of that loss alone; what failed does not count."""
    model, plain = trained()
    optimizer = handle.wrap_optimizer(plain, num_loss)
    with pytest.raises(KeyError), optimizer.scale_loss(model(data(0)) * SMALL):
        raise KeyError
    factors = [[SMALL, SMALL / 2, -2 * SMALL][:num_loss], [SMALL / 4, 2 * SMALL, 4 * SMALL][:num_loss]]
    wanted = reference(*factors)
    assert play(model, optimizer, optimizer.scale_loss, *factors) == wanted
    for bad in range(num_loss):
        losses = [math.inf if index == bad else SMALL for index in range(num_loss)]
        assert play(model, optimizer, optimizer.scale_loss, losses) == wanted
        assert amp.loss_scale(plain, loss_id=bad) == 2.0**15 and amp.skipped_steps(plain) == bad + 1
    with pytest.raises(AmpUsageError, match=f'num_losses={num_loss}'):
        play(model, optimizer, optimizer.scale_loss, [SMALL] * (num_loss + 1))


def test_handle_scales_for_optimizers_that_are_not_wrapped() -> None:
    handle: Any = amp.init(loss_scale='128')
    try:
        model, plain = trained()
        scaling = functools.partial(handle.scale_loss, optimizer=plain)
        assert play(model, plain, scaling, [1.0], [math.nan], [0.5]) == reference([1.0], [0.5])
    finally:
        handle._deactivate()


@pytest.mark.parametrize('enabled', [False, True])
def test_nothing_is_scaled_or_cast_where_amp_is_off(enabled: bool) -> None:
    handle: Any = amp.init(enabled=enabled)
    model, plain = trained()
    optimizer = handle.wrap_optimizer(plain)
    with handle._disable_casts():
        assert not handle.is_active() and F.linear(ones(S), ones(S)).dtype is S
    assert handle.is_active() is ('step' in vars(plain)) is enabled
    assert F.linear(ones(S), ones(S)).dtype is (H if enabled else S)
    for _ in range(2):
        handle._deactivate()
    loss = model(data(0))
    with optimizer.scale_loss(loss) as scaled:
        assert scaled is loss
    assert play(model, optimizer, optimizer.scale_loss, [1.0], [0.5]) == reference([1.0], [0.5])
    assert not handle.is_active() and F.linear(ones(S), ones(S)).dtype is S


def test_optimizers_compute_in_fp32_while_everything_is_cast(handle: Any) -> None:
    """As second-order ones do, which multiply matrices."""
    model, plain = trained()
    optimizer = handle.wrap_optimizer(plain)
    seen = []
    plain.register_step_pre_hook(lambda *_: seen.append((model.fc.weight @ model.fc.weight.t()).dtype))
    play(model, optimizer, optimizer.scale_loss, [SMALL])
    assert seen == [S]


def test_wrong_arguments_of_init_turn_nothing_on() -> None:
    for scale in (-1, 0):
        with pytest.raises(AmpConfigError, match=f'loss_scale={scale}'):
            amp.init(loss_scale=scale)
    assert not torch.is_autocast_enabled('cpu')


def test_wrong_optimizers_and_numbers_of_losses_are_named(handle: Any) -> None:
    plain = trained()[1]
    with pytest.raises(AmpConfigError, match='num_losses=0'):
        handle.wrap_optimizer(plain, 0)
    handle.wrap_optimizer(plain)
    with pytest.raises(AmpAttachError, match='initialised already'):
        handle.wrap_optimizer(plain)
