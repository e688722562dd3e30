"""Backward passes: loss scales, several losses, and gradients that sum up until a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bits import differing
from torch import Tensor, nn
from torch.optim import SGD
from toy_engine import CAST_LEVELS, Run, batch, poisoned

from amp_wrapper.engine import Stage
from amp_wrapper.engine.clipping import GradientClip
from amp_wrapper.errors import AmpUsageError
from amp_wrapper.policy import LEVELS

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
MASTER_LEVELS = {'O2': torch.float16, 'O5': torch.bfloat16}


# -- scales -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('clip', [None, {'max_norm': 0.5}], ids=['plain', 'clip'])
@pytest.mark.parametrize('scale', [2.0, 16.0, 0.5])
@pytest.mark.parametrize('level', LEVELS)
def test_power_of_two_scales_change_no_bit(level: str, scale: float, clip: Any, device: torch.device) -> None:
    one, scaled = Run(level, device, loss_scale=1.0), Run(level, device, loss_scale=scale)
    for run in (one, scaled):
        run.train(0, 1, 2, clip=GradientClip.parse(clip))
    assert differing(one.bits(), scaled.bits()) == []
    assert torch.equal(one.losses(3)[0], scaled.losses(3)[0])


def test_a_large_scale_saves_small_float16_gradients(device: torch.device) -> None:
    results = []
    for scale in (1.0, 2.0**16):
        run = Run('O2', device, lambda p: SGD(p, lr=1.0), loss_scale=scale, norm=False)
        before = run.bits()['master 0']
        run.engine.backward(run.losses()[0] * 2.0**-26)
        run.engine.step()
        results.append(torch.equal(run.bits()['master 0'], before))
    assert results == [True, False]


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('scales', [(2.0**10, 2.0**3), (1.0, 2.0**12)])
def test_losses_with_different_scales_sum_up(level: str, scales: tuple[float, float], device: torch.device) -> None:
    run = Run(level, device, loss_scale='dynamic', num_losses=2)
    expected: dict[str, Tensor] = {}
    losses = run.losses()
    for loss_id, (scaler, scale) in enumerate(zip(run.engine.scalers, scales)):
        scaler.load_state_dict({**scaler.state_dict(), 'scale': scale})
        grads = torch.autograd.grad(losses[loss_id].float() * scale, list(run.model.parameters()), retain_graph=True)
        for (name, parameter), grad in zip(run.model.named_parameters(), grads):
            wide = F32 if level in MASTER_LEVELS else parameter.dtype
            part = grad.to(wide) * (1 / scale)
            expected[name] = expected[name] + part if name in expected else part
    run.engine.backward(losses[0], 0, retain_graph=True)
    run.engine.backward(losses[1], 1)
    for master, grad in zip(run.engine.master_params(), expected.values()):
        assert master.grad is not None and torch.equal(master.grad, grad)
    assert not run.engine.step().skipped


@pytest.mark.parametrize('level', MASTER_LEVELS)
def test_several_passes_of_several_losses_accumulate_in_fp32(level: str, device: torch.device) -> None:
    run = Run(level, device, num_losses=2, loss_scale=4.0)
    expected: list[Tensor] | None = None
    for index in range(3):
        for loss in run.losses(index):
            grads = torch.autograd.grad(loss * 4.0, list(run.model.parameters()), retain_graph=True)
            parts = [grad.float() * 0.25 for grad in grads]
            expected = parts if expected is None else [a + b for a, b in zip(expected, parts)]
    for index in range(3):
        run.backward(index)
    assert expected is not None
    assert all(torch.equal(m.grad, grad) for m, grad in zip(run.engine.master_params(), expected))


def test_exception_in_one_backward_keeps_the_other_gradients(device: torch.device) -> None:
    run = Run('O2', device, num_losses=2)
    run.engine.backward(run.losses()[0], 0)
    before = [None if m.grad is None else m.grad.clone() for m in run.engine.master_params()]

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    handle = run.parameter('fc.weight').register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        run.engine.backward(run.losses(1)[1], 1)
    handle.remove()
    for master, grad in zip(run.engine.master_params(), before):
        assert grad is not None and master.grad is not None and torch.equal(master.grad, grad)
    assert run.parameter('fc.weight').grad is None
    assert not run.engine.step().skipped


@pytest.mark.parametrize('dtype', [F16, BF16, F32, torch.float64], ids=str)
def test_scale_of_a_loss(dtype: torch.dtype, device: torch.device) -> None:
    run = Run('O2', device)
    scaled = run.engine.scale(torch.tensor(3.0, dtype=dtype, device=device))
    assert scaled.item() == 3.0 * 2**16 and scaled.dtype is (dtype if dtype is torch.float64 else F32)


@pytest.mark.parametrize('loss_id', [-1, 2, '0', None, 0.0])
def test_loss_id_out_of_range(loss_id: Any, device: torch.device) -> None:
    run = Run('O2', device, num_losses=2)
    loss = run.losses()[0]
    for call in (run.engine.backward, run.engine.scale):
        with pytest.raises(AmpUsageError, match='num_losses=2'):
            call(loss, loss_id)
    assert run.engine.stage is Stage.READY and run.parameter('fc.weight').grad is None


@pytest.mark.parametrize('level', LEVELS)
def test_backward_before_attachment(level: str, device: torch.device) -> None:
    run = Run(level, device, attach=False)
    loss = run.losses()[0]
    if level in CAST_LEVELS:
        with pytest.raises(AmpUsageError, match='no model was handed over'):
            run.engine.backward(loss)
        assert run.parameter('fc.weight').grad is None
    else:
        run.engine.backward(loss)
        run.engine.step()
        assert run.engine.attached


@pytest.mark.parametrize('num_losses', [1, 2])
def test_several_losses_under_no_sync_are_refused(num_losses: int, device: torch.device) -> None:
    """Gradients that are unscaled on arrival would never be averaged."""
    import torch.distributed as dist

    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    try:
        run = Run('O1', device, attach=False, num_losses=num_losses)
        ddp = nn.parallel.DistributedDataParallel(run.model)
        run.engine.attach(ddp)
        with ddp.no_sync():
            loss = ddp(batch(device)[0]).sum()
            if num_losses == 1:
                run.engine.backward(loss)
                assert run.engine.stage is Stage.ACCUMULATING
            else:
                with pytest.raises(AmpUsageError, match='no_sync'):
                    run.engine.backward(loss, 1)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize('to_none', [True, False])
@pytest.mark.parametrize('num_losses', [1, 2])
def test_zero_grad_ends_accumulation(to_none: bool, num_losses: int, device: torch.device) -> None:
    run, clean = (Run('O2', device, num_losses=num_losses, loss_scale=4.0) for _ in range(2))
    with poisoned(run.parameter('fc.weight')):
        run.backward(5)
    run.engine.zero_grad(set_to_none=to_none)
    assert run.engine.stage is Stage.READY
    run.train(0)
    clean.train(0)
    assert differing(run.bits(), clean.bits()) == []
