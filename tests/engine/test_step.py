"""A step: what it asks for before it begins, edits of weights between steps, FP32 masters, host reads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import differing, same
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.utils._python_dispatch import TorchDispatchMode
from toy_engine import Net, Run, batch, poisoned

from amp_wrapper import ops
from amp_wrapper.engine import AmpEngine
from amp_wrapper.engine.clipping import GradientClip
from amp_wrapper.errors import AmpUsageError
from amp_wrapper.policy import LEVELS, resolve

MASTER_LEVELS = {'O2': torch.float16, 'O5': torch.bfloat16}


# -- misuse -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS[1:])
def test_step_without_backward(level: str, device: torch.device) -> None:
    run = Run(level, device)
    for _ in range(2):
        with pytest.raises(AmpUsageError, match='without a backward'):
            run.engine.step()
        run.losses()[0].backward()
        with pytest.raises(AmpUsageError, match='without a backward'):
            run.engine.step()
        run.engine.zero_grad()
        run.train(0)


def test_step_of_foreign_gradients_is_fine_at_o0(device: torch.device) -> None:
    run = Run('O0', device)
    before = run.bits()
    run.losses()[0].backward()
    assert not run.engine.step().skipped
    assert 'weight fc.weight' in differing(before, run.bits())


@pytest.mark.parametrize('level', LEVELS)
def test_closure(level: str, device: torch.device) -> None:
    run, calls = Run(level, device), []

    def closure() -> Tensor:
        calls.append(1)
        return run.losses()[0]

    run.backward()
    if level in ('O0', 'O3', 'O4'):
        # no scale and no masters: the optimizer runs it, and nobody checks its gradients
        run.engine.step(closure=closure)
        assert calls == [1]
    else:
        before = run.bits()
        with pytest.raises(AmpUsageError, match='closure'):
            run.engine.step(closure=closure)
        assert calls == [] and differing(before, run.bits()) == []


@pytest.mark.parametrize('level', MASTER_LEVELS)
def test_weights_changed(level: str, device: torch.device) -> None:
    run = Run(level, device)
    fc, out = run.parameter('fc.bias'), run.parameter('out.bias')
    exact = [m.detach().clone() for m in run.engine.master_params()]
    fc.data.fill_(0.5)
    out.data[0] = 0.25
    assert run.engine.weights_changed([out]) == ['out.bias']
    masters = list(run.engine.master_params())
    assert masters[-1][0].item() == 0.25 and masters[-1][1].item() == exact[-1][1].item()
    assert torch.equal(masters[1], exact[1])
    assert run.engine.weights_changed() == ['fc.bias']
    assert masters[1].tolist() == [0.5] * 6
    assert run.engine.weights_changed() == []


@pytest.mark.parametrize('level', ['O0', 'O1', 'O3', 'O4'])
def test_weights_changed_without_masters(level: str, device: torch.device) -> None:
    run = Run(level, device)
    run.parameter('fc.bias').data.fill_(0.5)
    assert run.engine.weights_changed() == []


@pytest.mark.parametrize('level', MASTER_LEVELS)
def test_in_place_edits_are_taken_up_by_the_next_step(level: str, device: torch.device) -> None:
    run = Run(level, device, lambda p: SGD(p, lr=0.0))
    with torch.no_grad():
        run.parameter('fc.weight').clamp_(-0.125, 0.125)
    run.train(0)
    assert next(run.engine.master_params()).abs().max().item() == 0.125
    assert run.parameter('fc.weight').abs().max().item() == 0.125


def test_a_load_between_steps_is_taken_up(device: torch.device) -> None:
    run = Run('O2', device, lambda p: SGD(p, lr=0.0))
    run.train(0)
    run.model.fc.load_state_dict(
        {'weight': torch.full((6, 4), 0.1, device=device), 'bias': torch.zeros(6, device=device)}
    )
    run.train(1)
    assert torch.equal(next(run.engine.master_params()), torch.full((6, 4), 0.1, device=device))


@pytest.mark.parametrize('level', LEVELS)
def test_disabled_is_a_plain_optimizer(level: str, device: torch.device) -> None:
    plain, run = Run('O0', device, attach=False), Run(level, device, enabled=False)
    for index in range(3):
        plain.losses(index)[0].backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()
    run.train(0, 1, 2)
    assert differing(plain.bits(), run.bits()) == []
    assert same(run.engine.state_dict(), plain.optimizer.state_dict())
    assert run.engine.parts.casts is None and not run.model._forward_pre_hooks
    state = copy.deepcopy(run.engine.state_dict())
    notes = run.engine.load_state_dict(state)
    assert notes == ['saved without mixed precision, resumed without mixed precision: kept: weights, optimizer state']
    run.engine.detach()


# -- against a loop by hand ---------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    f'{kind.__name__}-{name}': (lambda p, kind=kind, words=words, more=more: kind(p, lr=0.05, **words, **more))
    for kind, words, fused in (
        (SGD, {'momentum': 0.9, 'nesterov': True, 'weight_decay': 0.1}, True),
        (Adam, {'weight_decay': 0.1, 'amsgrad': True}, True),
        (AdamW, {'weight_decay': 0.1}, True),
        (RMSprop, {'momentum': 0.5, 'centered': True}, False),
    )
    for name, more in (('plain', {'foreach': False}), ('foreach', {'foreach': True}), ('fused', {'fused': True}))
    if fused or name != 'fused'
}


@pytest.mark.parametrize('name', OPTIMIZERS)
@pytest.mark.parametrize('level', MASTER_LEVELS)
@pytest.mark.parametrize('clip', [None, {'max_norm': 0.5}], ids=['plain', 'clip'])
def test_masters_by_hand(level: str, name: str, clip: Any, device: torch.device) -> None:
    scale, dtype = 128.0, MASTER_LEVELS[level]
    run = Run(level, device, OPTIMIZERS[name], loss_scale=scale, norm=False)

    torch.manual_seed(3)
    model = Net(norm=False).to(device)
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = OPTIMIZERS[name](masters)
    model.to(dtype)
    for index in range(4):
        x, y = batch(device, index)
        loss = (model(x.to(dtype)).float() - y).square().mean()
        (loss * scale).backward()
        for weight, master in zip(model.parameters(), masters):
            master.grad = weight.grad.float() / scale
            weight.grad = None
        if clip:
            # torch's rule, and the order of our sum, which is the same on every device
            grads = [master.grad for master in masters if master.grad is not None]
            coefficient = (clip['max_norm'] / (ops.multi_tensor_l2norm(grads)[0] + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(grads, coefficient)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for weight, master in zip(model.parameters(), masters):
                weight.copy_(master)
        assert torch.equal(run.losses(index)[0], loss)
        run.train(index, clip=GradientClip.parse(clip))

    expected = {f'weight {key}': p.detach() for key, p in model.named_parameters()}
    for index, master in enumerate(masters):
        expected[f'master {index}'] = master.detach()
        for key, value in optimizer.state[master].items():
            if isinstance(value, Tensor):
                expected[f'state {index} {key}'] = value
    assert differing(run.bits(), expected) == []


def test_sparse_embedding(device: torch.device) -> None:
    model = nn.Embedding(5, 2, sparse=True).to(device)
    exact = model.weight.detach().clone()
    engine = AmpEngine(resolve('O2', loss_scale=8.0), SGD(model.parameters(), lr=0.5))
    engine.attach(model)
    index = torch.tensor([1, 3, 1], device=device)
    engine.backward(model(index).sum())
    assert not engine.step().skipped
    exact[1] -= 1.0
    exact[3] -= 0.5
    assert torch.equal(next(engine.master_params()), exact) and torch.equal(model.weight, exact.half())


# -- host reads ---------------------------------------------------------------------------------------------------


class HostReads(TorchDispatchMode):
    """Counts reads of the device; ``tolist`` reads a CPU tensor without the dispatcher, so it is counted apart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count = 0
        tolist = Tensor.tolist

        def counted(tensor: Tensor) -> Any:
            self.count += 1
            return tolist(tensor)

        monkeypatch.setattr(Tensor, 'tolist', counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize('clip', [None, {'max_norm': 0.5}], ids=['plain', 'clip'])
@pytest.mark.parametrize('num_losses', [1, 2])
@pytest.mark.parametrize(
    ('level', 'overrides', 'reads'),
    [
        ('O0', {}, 0),
        ('O0', {'loss_scale': 8.0}, 0),
        ('O0', {'skip_nonfinite': True}, 1),
        ('O1', {}, 1),
        ('O2', {}, 1),
        ('O3', {}, 1),
        ('O4', {}, 1),
        ('O5', {}, 1),
        ('O5', {'skip_nonfinite': False}, 0),
        ('O3', {'skip_nonfinite': False}, 0),
        ('O2', {'enabled': False}, 0),
    ],
    ids=str,
)
def test_host_reads_of_a_step(
    level: str,
    overrides: dict[str, Any],
    reads: int,
    num_losses: int,
    clip: Any,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(level, device, num_losses=num_losses, verbosity=0, **overrides)
    run.train(0)
    for index in (1, 2):
        with HostReads(monkeypatch) as counter:
            run.train(index, clip=GradientClip.parse(clip))
        assert counter.count == reads
    if reads:
        with poisoned(run.parameter('fc.weight')):
            with HostReads(monkeypatch) as counter:
                run.train(3)
        assert counter.count == 1


def test_the_counter_of_host_reads_counts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(2, device=device)
    with HostReads(monkeypatch) as counter:
        tensor.tolist()
        tensor[0].item()
        bool(tensor[0] > 0)
    assert counter.count == 3
