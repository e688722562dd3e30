"""DistributedDataParallel on two ranks: whatever it does with gradients, training is that of one process, bit for bit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from nets import (
    DOORS,
    HALF,
    LEVELS,
    OPTIMIZERS,
    Exact,
    Layers,
    Training,
    batch,
    differs,
    dyadic,
    fp32,
    optim_wrapper,
    same_on_all_ranks,
    wrapped,
)
from on_ranks import Here, on_ranks
from pairs import pairs
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks

from amp_wrapper import amp

SETTINGS: dict[str, dict[str, Any]] = {
    'plain': {},
    'unused': dict(find_unused_parameters=True),
    'static': dict(static_graph=True),
    'views': dict(gradient_as_bucket_view=True),
    'broadcasts': dict(broadcast_buffers=True),
    'buckets': dict(bucket_cap_mb=0.00001),
}


@pairs(level=LEVELS, door=DOORS, setting=SETTINGS, optimizer=OPTIMIZERS)
@on_ranks()
def test_training_equals_plain_fp32(here: Here, level: str, door: str, setting: str, optimizer: str) -> None:
    """With accumulations, averaged or not in between, overflows on either rank, and accumulations that are given up."""
    training = Training(here, level, door, optimizer, SETTINGS[setting], side=setting == 'unused')
    ddp, group = training.model, training.model.process_group
    # torch has no no_sync for a static graph
    for passes in (
        ('a', 'a', 'a1', 'a') if setting == 'static' else ('a', 'lla', 'l1la', 'aa0', 'aaa', 'l!la', 'll?a', 'a')
    ):
        training.update(passes)
        training.check(passes)
    assert training.scale == (2.0 if setting == 'static' else 1.0)
    assert training.net.fc.weight.dtype is HALF.get(level, torch.float32)
    # DDP is the same object with the same settings
    assert (ddp.module, ddp.process_group) == (training.net, group)
    for name, value in SETTINGS[setting].items():
        found = ddp.bucket_bytes_cap / 2**20 if name == 'bucket_cap_mb' else getattr(ddp, name)
        assert found == pytest.approx(value, rel=0.1), name


@pytest.mark.parametrize('door', DOORS)
@on_ranks()
def test_disabled_training_is_plain_ddp(here: Here, door: str) -> None:
    training = Training(here, 'O2', door, enabled=False)
    for passes in ('a', 'lla', 'l!la'):
        training.update(passes)
        training.check(passes)
    assert training.net.fc.weight.dtype is torch.float32


@pairs(level=LEVELS, door=DOORS)
@on_ranks()
def test_several_losses_are_averaged_each(here: Here, level: str, door: str) -> None:
    training = Training(here, level, door, num_losses=2)
    for hit in (None, 0, None, 1, None):
        for loss_id in range(2):
            training.one_pass(3 + loss_id, hit=here.rank == 1 and hit == loss_id, loss_id=loss_id)
        training.step_both(skips=hit is not None)
        training.check(f'{hit}')


@pytest.mark.parametrize(('level', 'door'), [('O2', 'amp'), ('O5', 'wrapper')])
@on_ranks()
def test_several_losses_under_no_sync(here: Here, level: str, door: str) -> None:
    training = Training(here, level, door, num_losses=2)
    for index in range(4):
        training.one_pass(index, averages=index == 3, loss_id=index % 2)
    training.step_both()
    training.check('two losses')


@pytest.mark.parametrize('level', ['O1', 'O2'])
@on_ranks()
def test_gradients_that_wait_follow_a_scale_that_falls(here: Here, level: str) -> None:
    """Gradients of one optimizer wait under no_sync, while a step of another one lowers the scale that both have."""
    nets = [Exact().to(here.device) for _ in range(2)]
    optimizers = [torch.optim.SGD([net.fc.weight], lr=0.25) for net in nets]
    amp.initialize(nets, optimizers, opt_level=level, loss_scale=dict(init_scale=64.0), verbosity=0)
    ddp = wrapped(here, nets[0], find_unused_parameters=True)
    for index, model, optimizer in ((0, ddp, 0), (1, nets[1], 1), (2, ddp, 0)):
        with ddp.no_sync() if index == 0 else nullcontext():
            with amp.scale_loss(model(dyadic(here, index)), optimizers[optimizer]) as scaled:
                (scaled * (float('inf') if index == 1 else 1.0)).backward()
        if index == 1:
            optimizers[1].step()
            assert amp.loss_scale(optimizers[0]) == 32.0
    expected = sum(dyadic(here, index, rank) for index in (0, 2) for rank in range(2)) / 2
    for master in amp.master_params(optimizers[0]):
        assert master.grad is not None and torch.equal(master.grad.float(), torch.cat([expected, expected]))


@pairs(level=LEVELS, counts=(1, 3))
@on_ranks()
def test_two_ranks_are_one_process_on_the_joint_batch(here: Here, level: str, counts: int) -> None:
    """With clipping, a remainder, and an overflow on one rank; within rounding."""
    found = []
    for alone in (False, True):
        net = Layers()
        model: Any = net.to(here.device) if alone else wrapped(here, net)
        options = dict(accumulative_counts=counts, clip_grad=dict(max_norm=10.0), skip_nonfinite=True)
        wrapper = optim_wrapper(model.parameters(), level, **options)
        total = 5 * counts + counts // 2
        wrapper.initialize_count_status(model, 0, total)
        for number in range(total):
            inputs = torch.cat([batch(here, number, rank) for rank in range(2)]) if alone else batch(here, number)
            with wrapper.optim_context(model):
                loss = model(inputs)
            hit = number == 2 * counts and (alone or here.rank == 1)
            wrapper.update_params(loss * (float('inf') if hit else 1.0))
        found.append((fp32(model), wrapper.loss_scaler.state_dict()))
    same_on_all_ranks(here, found[0][0].values(), 'weights')
    assert found[0][1] == found[1][1]
    # each of six steps moves a weight by gradients of norm 10 at most, which both round a few times to the type of the level
    rounding = {'O0': 2.0**-24, 'O1': 2.0**-11, 'O2': 2.0**-11, 'O3': 2.0**-11}.get(level, 2.0**-8)
    for name, value in found[0][0].items():
        torch.testing.assert_close(value, found[1][0][name], rtol=0, atol=max(40 * rounding, 1e-5), msg=name)


@pairs(kind=('local hook', 'no_sync', 'ignored'), level=('O1', 'O2', 'O5'), optimizer=OPTIMIZERS)
@on_ranks()
def test_ranks_take_one_decision_where_gradients_differ(here: Here, kind: str, level: str, optimizer: str) -> None:
    """Any sequence of overflows on any rank leaves the same scale and counters on all."""
    training = Training(
        here, level, optimizer=optimizer, loss_scale=dict(init_scale=2.0**12, growth_interval=3), side=kind == 'ignored'
    )
    net: Any = training.net
    if kind == 'ignored':
        net._ddp_params_and_buffers_to_ignore = ['side.weight']
        training.model = wrapped(here, net)
    if kind == 'local hook':
        training.model.register_comm_hook(None, debugging_hooks.noop_hook)
    # the same generator on all ranks, so that each knows what the others do
    generator = torch.Generator().manual_seed(3)
    scale, clean, skips = 2.0**12, 0, 0
    for update in range(20):
        hits = torch.rand(here.world, generator=generator) < 0.3
        factor = float('inf') if hits[here.rank] else 1.0
        if kind == 'ignored':
            # an infinity in a parameter that DDP leaves to its rank, and nowhere else
            handle = net.side.weight.register_hook(lambda grad, factor=factor: grad * factor)
            training.backward(dyadic(here, update), side=True)
            handle.remove()
        else:
            with training.model.no_sync() if kind == 'no_sync' else nullcontext():
                training.backward(dyadic(here, update), factor)
        skipped = bool(hits.any())
        assert training.step() == skipped, update
        skips, clean = skips + skipped, 0 if skipped else clean + 1
        scale *= 0.5 if skipped else 2.0 if clean == 3 else 1.0
        clean %= 3
        assert training.scale == scale, update
        same_on_all_ranks(
            here, [torch.tensor(list(map(float, training.wrapper.loss_scaler.state_dict().values())))], 'scaler'
        )
    assert 3 < skips < 18
    assert kind == 'ignored' or differs(here, list(net.fc.parameters()))
