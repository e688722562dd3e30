"""The oldest interface: ``amp.init()``, its handle, and the optimizers that it wraps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from bits import same
from torch import Tensor, nn
from torch.nn import functional as F
from toy_amp import network

from amp_wrapper import AmpAttachError, AmpConfigError, AmpUsageError, amp
from amp_wrapper.amp.legacy import AmpHandle, NoOpHandle, OptimWrapper


@pytest.fixture
def handle() -> Iterator[AmpHandle]:
    made = amp.init()
    assert isinstance(made, AmpHandle)
    yield made
    made._deactivate()


def trained() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = network()
    return model, torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)


def loss_of(model: nn.Module, factor: float = 1.0) -> Tensor:
    return model(torch.tensor([[1.0, 2.0]])).float().sum() * factor


def reference(factors: list[list[float]]) -> list[Tensor]:
    """FP32 training; each step sums the gradients of its losses."""
    model, optimizer = trained()
    for losses in factors:
        optimizer.zero_grad()
        for factor in losses:
            loss_of(model, factor).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_casts_are_on_from_init_to_deactivate() -> None:
    x, weight = torch.ones(2, 2), torch.ones(2, 2)
    handle = amp.init()
    try:
        assert handle.is_active() and F.linear(x, weight).dtype is torch.float16
        assert torch.softmax(x.half(), 0).dtype is torch.float32
        with amp.disable_casts():
            assert F.linear(x, weight).dtype is torch.float32 and not handle.is_active()
        with handle._disable_casts():
            assert F.linear(x, weight).dtype is torch.float32
        assert F.linear(x, weight).dtype is torch.float16
    finally:
        handle._deactivate()
    handle._deactivate()
    assert not handle.is_active() and F.linear(x, weight).dtype is torch.float32
    assert not torch.is_autocast_enabled('cpu')


def test_disable_casts_ends_with_an_exception(handle: AmpHandle) -> None:
    x = torch.ones(2, 2)
    with pytest.raises(KeyError), amp.disable_casts():
        raise KeyError
    assert F.linear(x, x).dtype is torch.float16
    with pytest.raises(KeyError), handle._disable_casts():
        raise KeyError
    assert F.linear(x, x).dtype is torch.float16


@pytest.mark.parametrize('num_loss', [1, np.int64(3)])
def test_a_wrapped_optimizer_trains_as_in_fp32(handle: AmpHandle, num_loss: int) -> None:
    factors = [[1.0, 0.5, -2.0][:num_loss], [0.25, 2.0, 4.0][:num_loss]]
    model, plain = trained()
    optimizer = handle.wrap_optimizer(plain, num_loss)
    assert type(optimizer._num_loss) is int
    for losses in factors:
        # 2 ** 16 overflows at once: a loss that is small enough for float16 gradients keeps the test exact
        optimizer.zero_grad()
        for factor in losses:
            with optimizer.scale_loss(loss_of(model, factor * 2.0**-12)) as scaled:
                scaled.backward()
        optimizer.step()
    assert same(list(model.parameters()), reference([[factor * 2.0**-12 for factor in losses] for losses in factors]))


@pytest.mark.parametrize('bad', [0, 1, 2])
def test_overflow_of_any_loss_skips_the_step_and_lowers_its_scale(handle: AmpHandle, bad: int) -> None:
    model, plain = trained()
    optimizer = handle.wrap_optimizer(plain, 3)
    before = [p.detach().clone() for p in model.parameters()]
    for index in range(3):
        with optimizer.scale_loss(loss_of(model, float('inf') if index == bad else 2.0**-12)) as scaled:
            scaled.backward()
    optimizer.step()
    assert same(list(model.parameters()), before)
    scales = [state['loss_scale'] for state in amp.state_dict().values()]
    assert scales == [2.0**15 if index == bad else 2.0**16 for index in range(3)]
    optimizer.zero_grad()
    for _ in range(3):
        with optimizer.scale_loss(loss_of(model, 2.0**-12)) as scaled:
            scaled.backward()
    optimizer.step()
    assert not same(list(model.parameters()), before)


def test_a_loss_too_many_is_refused(handle: AmpHandle) -> None:
    model, plain = trained()
    optimizer = handle.wrap_optimizer(plain)
    with optimizer.scale_loss(loss_of(model, 2.0**-12)) as scaled:
        scaled.backward()
    kept = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.raises(AmpUsageError, match='num_loss=2'), optimizer.scale_loss(loss_of(model)) as scaled:
        scaled.backward()
    assert [torch.equal(p.grad, k) for p, k in zip(model.parameters(), kept)] == [True, True]
    optimizer.step()
    with optimizer.scale_loss(loss_of(model, 2.0**-12)) as scaled:
        scaled.backward()


def test_a_pass_that_failed_does_not_count(handle: AmpHandle) -> None:
    model, plain = trained()
    optimizer = handle.wrap_optimizer(plain)

    def fail() -> None:
        with optimizer.scale_loss(loss_of(model, 2.0**-12)) as scaled:
            scaled.backward()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert all(p.grad is None for p in model.parameters())
    with optimizer.scale_loss(loss_of(model, 2.0**-12)) as scaled:
        scaled.backward()
    optimizer.step()
    assert same(list(model.parameters()), reference([[2.0**-12]]))


def test_the_handle_scales_for_optimizers_that_are_not_wrapped() -> None:
    handle = amp.init(loss_scale='128')
    try:
        model, optimizer = trained()
        for factor in (1.0, float('nan'), 0.5):
            optimizer.zero_grad()
            with handle.scale_loss(loss_of(model, factor), optimizer) as scaled:
                assert torch.equal(scaled.detach(), loss_of(model, factor * 128).detach()) or factor != factor
                scaled.backward()
            optimizer.step()
        assert same(list(model.parameters()), reference([[1.0], [0.5]]))
        handle.wrap_optimizer(trained()[1])
        with pytest.raises(AmpUsageError, match=r'optimizer\.scale_loss'), handle.scale_loss(loss_of(model), optimizer):
            pass
    finally:
        handle._deactivate()


def test_nothing_is_scaled_where_it_is_not_enabled() -> None:
    handle = amp.init(enabled=False)
    assert isinstance(handle, NoOpHandle) and not handle.is_active() and not handle.has_cache
    model, plain = trained()
    optimizer = handle.wrap_optimizer(plain)
    loss = loss_of(model)
    with optimizer.scale_loss(loss) as scaled:
        assert scaled is loss
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = loss_of(model, 0.5)
    with handle.scale_loss(loss, plain) as scaled:
        assert scaled is loss
        scaled.backward()
    plain.step()
    assert same(list(model.parameters()), reference([[1.0], [0.5]]))
    assert F.linear(torch.ones(1, 2), model.weight).dtype is torch.float32
    handle._deactivate()


def test_after_deactivate_losses_are_not_scaled() -> None:
    handle = amp.init()
    model, plain = trained()
    optimizer = handle.wrap_optimizer(plain)
    handle._deactivate()
    loss = loss_of(model)
    with optimizer.scale_loss(loss) as scaled:
        assert scaled is loss
        scaled.backward()
    optimizer.step()
    assert same(list(model.parameters()), reference([[1.0]]))


def test_a_weight_that_changed_is_seen_by_the_next_cast(handle: AmpHandle) -> None:
    """apex kept 16-bit copies of weights past ``load_state_dict`` and evaluation."""
    model, plain = trained()
    optimizer = handle.wrap_optimizer(plain)
    x = torch.tensor([[1.0, 2.0]])
    with torch.no_grad():
        model(x)
    with optimizer.scale_loss(loss_of(model, 2.0**-12)) as scaled:
        scaled.backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    assert torch.equal(model(x).float(), F.linear(x.half(), model.weight.half(), model.bias.half()).float())
    model.load_state_dict({'weight': torch.tensor([[2.0, 4.0]]), 'bias': torch.tensor([1.0])})
    assert model(x).item() == 11.0


def test_the_wrapper_hands_on_what_it_does_not_know(handle: AmpHandle) -> None:
    _, plain = trained()
    optimizer = handle.wrap_optimizer(plain)
    assert isinstance(optimizer, OptimWrapper) and optimizer.param_groups is plain.param_groups
    assert repr(optimizer) == repr(plain) and optimizer.state_dict() == plain.state_dict()
    optimizer.add_param_group({'params': [nn.Parameter(torch.ones(1))]})
    assert len(plain.param_groups) == 2
    with pytest.raises(AttributeError):
        _ = optimizer.no_such_name
    assert pickle.loads(pickle.dumps(plain)).param_groups[0]['lr'] == 0.25
    assert copy.deepcopy(plain).param_groups[0]['lr'] == 0.25


def test_closures_and_their_losses(handle: AmpHandle) -> None:
    model, plain = trained()
    optimizer = handle.wrap_optimizer(plain)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 2.0**-12)
        with optimizer.scale_loss(loss) as scaled:
            scaled.backward()
        return loss

    assert optimizer.step(closure).item() == loss_of(trained()[0], 2.0**-12).item()
    assert same(list(model.parameters()), reference([[2.0**-12]]))


def test_bad_words_are_refused_before_anything_is_turned_on(handle: AmpHandle) -> None:
    with pytest.raises(AmpConfigError, match='loss_scale=-1'):
        amp.init(loss_scale=-1)
    handle._deactivate()
    with pytest.raises(AmpConfigError, match='loss_scale=0'):
        amp.init(loss_scale=0)
    assert not torch.is_autocast_enabled('cpu')
    plain = trained()[1]
    with pytest.raises(AmpConfigError, match='num_loss=0'):
        handle.wrap_optimizer(plain, 0)
    handle.wrap_optimizer(plain)
    with pytest.raises(AmpAttachError, match='initialised already'):
        handle.wrap_optimizer(plain)
