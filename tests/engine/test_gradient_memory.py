"""Bytes for each parameter at O2 and O5, counted: what a gradient costs beside weights, masters and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from amp_wrapper import FusedAdam, FusedAdamW, FusedSGD, amp, ops
from amp_wrapper.engine import AmpEngine
from amp_wrapper.policy import LEVELS, resolve
from benchmarks.step_counting import allocations

WITH_MASTERS = [level for level in LEVELS if resolve(level).master_weights]
SIDE = 256
#: Optimizer, and the bytes of its state for each parameter.
KINDS: dict[str, tuple[Callable[[Iterable[nn.Parameter]], Optimizer], int]] = {
    'FusedAdamW': (lambda parameters: FusedAdamW(parameters, lr=1e-3), 8),
    'FusedAdam': (lambda parameters: FusedAdam(parameters, lr=1e-3), 8),
    'FusedSGD': (lambda parameters: FusedSGD(parameters, lr=1e-3, momentum=0.9), 4),
    'AdamW': (lambda parameters: AdamW(parameters, lr=1e-3, foreach=False), 8),
    'SGD': (lambda parameters: SGD(parameters, lr=1e-3, momentum=0.9, foreach=False), 4),
    'SGD without momentum': (lambda parameters: SGD(parameters, lr=1e-3, foreach=False), 0),
}


def resident(model: nn.Module, optimizer: Optimizer) -> float:
    """Bytes for each parameter, of weights, masters, state and all gradients; what shares memory counts once."""
    stepped = list(amp.master_params(optimizer))
    tensors: list[Tensor | None] = [*model.parameters(), *stepped]
    tensors += [parameter.grad for parameter in (*model.parameters(), *stepped)]
    tensors += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(sizes.values()) / sum(p.numel() for p in model.parameters())


def near(value: float, wanted: float) -> bool:
    # scalars, such as step counts
    return wanted <= value < wanted + 0.05


def build(kind: str, device: torch.device) -> tuple[nn.Module, Optimizer, Tensor]:
    model = nn.Sequential(nn.Linear(SIDE, SIDE, bias=False), nn.Linear(SIDE, SIDE, bias=False)).to(device)
    return model, KINDS[kind][0](model.parameters()), torch.ones(2, SIDE, device=device)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('level', WITH_MASTERS)
def test_functional(level: str, kind: str, device: torch.device) -> None:
    """Between the block and the step both gradients are there: what scripts clip, and what they find on the model."""
    model, optimizer, x = build(kind, device)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    state = KINDS[kind][1]
    for index in range(2):
        optimizer.zero_grad()
        if index:
            assert near(resident(model, optimizer), 2 + 4 + state)
        with amp.scale_loss(model(x).float().mean(), optimizer) as scaled:
            scaled.backward()
        assert near(resident(model, optimizer), 2 + 4 + (state if index else 0) + 4 + 2)
        assert {p.grad.dtype for p in amp.master_params(optimizer) if p.grad is not None} == {torch.float32}
        if index and kind.startswith('Fused'):
            # nothing on top in the step
            assert allocations(optimizer.step, device)[1] < 0.05 * sum(p.numel() for p in model.parameters())
        else:
            optimizer.step()


@pytest.mark.usefixtures('with_and_without_ops')
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('level', WITH_MASTERS)
def test_wrapper(level: str, kind: str, device: torch.device) -> None:
    """The step unscales by itself: with optimizers of this package, the 16-bit gradient is the only one that ever is."""
    model, optimizer, x = build(kind, device)
    engine = AmpEngine(resolve(level, loss_scale=8.0), optimizer)
    engine.attach(model)
    state = KINDS[kind][1]
    for index in range(2):
        engine.backward(model(x).float().mean())
        assert near(resident_of(engine, model, optimizer), 2 + 4 + (state if index else 0) + 2)
        if not index:
            engine.step()
        else:
            _, peak = allocations(engine.step, device)
            count = sum(p.numel() for p in model.parameters())
            fused = kind.startswith('Fused')
            # torch's functions take FP32 gradients, which are gone after the step
            served = fused and device.type in ops.compiled_devices()
            assert peak < 0.05 * count if served else peak >= 4 * count
            # any other optimizer reads FP32 gradients, which are there until they are cleared
            assert near(resident_of(engine, model, optimizer), 2 + 4 + state + 2 + (0 if fused else 4))
        engine.zero_grad()
        assert near(resident_of(engine, model, optimizer), 2 + 4 + state)


def resident_of(engine: AmpEngine, model: nn.Module, optimizer: Optimizer) -> float:
    assert {id(p) for p in engine.master_params()} == {id(p) for g in optimizer.param_groups for p in g['params']}
    return resident(model, optimizer)


@pytest.mark.parametrize('level', WITH_MASTERS)
def test_what_both_gradients_are_for(level: str, device: torch.device) -> None:
    """apex's contract: the master's can be clipped, the model's is what ``model.zero_grad()`` clears, and tells that it did."""
    model, optimizer, x = build('FusedAdamW', device)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    masters = list(amp.master_params(optimizer))
    for _ in range(2):
        with amp.scale_loss(model(x).float().mean(), optimizer) as scaled:
            scaled.backward()
        for weight, master in zip(model.parameters(), masters):
            assert weight.grad is not None and master.grad is not None
            assert torch.equal(weight.grad.float(), master.grad * 8.0)
        norm = torch.nn.utils.clip_grad_norm_(masters, 1e-3)
        assert norm > 1e-3 and torch.cat([m.grad.flatten() for m in masters if m.grad is not None]).norm() <= 1.001e-3
        model.zero_grad()
        with amp.scale_loss(model(x).float().mean() * 0, optimizer) as scaled:
            scaled.backward()
        assert not any(bool(m.grad.any()) for m in masters if m.grad is not None)
        optimizer.zero_grad()
