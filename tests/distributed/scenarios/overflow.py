"""Overflows on some ranks: all ranks skip, or none."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from mmengine.model import MMSeparateDistributedDataParallel
from mmengine.optim import OptimWrapperDict
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks
from torch.nn.parallel import DistributedDataParallel

from scenarios.common import (
    LEVELS,
    Heads,
    Here,
    Net,
    backward,
    data,
    masters_of,
    optim_wrapper,
    same_on_all_ranks,
    scaler_of,
    scenario,
    weights_of,
    wrap,
)


@scenario
def overflows(here: Here) -> None:
    """Infinite gradients on one rank, at each micro-batch of an accumulation: one decision, one scale, one message."""
    for level in LEVELS:
        counts = 3
        for wide in (False, True):
            model = wrap(here, Net(), find_unused_parameters=True)
            wrapper = optim_wrapper(
                model.parameters(),
                level,
                accumulative_counts=counts,
                accumulate_in_fp32=wide,
                skip_nonfinite=True,
                loss_scale=dict(init_scale=256.0, growth_interval=2),
                clip_grad=dict(max_norm=1.0),
                verbosity=0,
            )
            wrapper.initialize_count_status(model, 0, 1000)
            expected_skips = 0
            for update in range(8):
                # update 0 is clean; then rank 0 and rank 1 in turn, at each micro-batch; then clean again
                where = divmod(update - 1, counts) if 1 <= update <= 6 else (None, None)
                before = (weights_of(model), masters_of(wrapper))
                for micro in range(counts):
                    hit = where == (here.rank, micro)
                    with wrapper.optim_context(model):
                        # a layer that only this micro-batch uses, on one rank only
                        losses = model(data(here, micro), factor=float('inf') if hit else 1.0, side=micro == here.rank)
                    wrapper.update_params(losses['loss'])
                expected_skips += where[0] is not None
                assert wrapper.loss_scaler.counts.tolist()[:2] == [update + 1, expected_skips], (level, update)
                changed = any(not a.equal(b) for a, b in zip(before[1], masters_of(wrapper)))
                assert changed == (where[0] is None), (level, update)
                if not changed:
                    assert all(a.equal(b) for a, b in zip(before[0], weights_of(model)))
                same_on_all_ranks(here, scaler_of(wrapper), f'{level} scaler')
                same_on_all_ranks(here, weights_of(model), f'{level} weights')
                same_on_all_ranks(here, masters_of(wrapper), f'{level} masters')
                optimizer_state = [
                    v for s in wrapper.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)
                ]
                same_on_all_ranks(here, optimizer_state, f'{level} momentum')
            # one clean step, six skips, one clean one: the scale has only fallen
            assert wrapper.loss_scaler.get_scale() == 256.0 * 0.5**6, wrapper.loss_scaler.get_scale()


@scenario
def random_overflows(here: Here) -> None:
    """Any sequence of overflows on any rank leaves scale, trackers and counters equal, where gradients are not averaged too."""
    noop = debugging_hooks.noop_hook
    for kind in ('ddp', 'local hook', 'no_sync', 'ignored'):
        for level in ('O1', 'O2', 'O5'):
            net = Net()
            net.side.requires_grad_(kind == 'ignored')
            if kind == 'ignored':
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ['side.weight', 'side.bias'])
            model = wrap(here, net)
            if kind == 'local hook':
                model.register_comm_hook(None, noop)
            wrapper = optim_wrapper(
                model.parameters(),
                level,
                loss_scale=dict(init_scale=2.0**12, growth_interval=3, hysteresis=2),
                verbosity=0,
            )
            wrapper.initialize_count_status(model, 0, 1000)
            # the same generator on all ranks, so that each knows what the others do
            generator = torch.Generator().manual_seed(3)
            skips = 0
            for update in range(20):
                hits = torch.rand(here.world, generator=generator) < 0.3
                hit = bool(hits[here.rank])
                # in a parameter that DDP leaves to its rank, and nowhere else
                handle = None
                if kind == 'ignored':
                    handle = net.side.weight.register_hook(lambda grad, hit=hit: grad * float('inf') if hit else grad)
                with model.no_sync() if kind == 'no_sync' else nullcontext():
                    factor = float('inf') if hit and kind != 'ignored' else 1.0
                    backward(wrapper, model, data(here, update), factor=factor, side=kind == 'ignored')
                if handle is not None:
                    handle.remove()
                wrapper.step()
                wrapper.zero_grad()
                skips += bool(hits.any())
                assert wrapper.loss_scaler.counts.tolist()[:2] == [update + 1, skips], (kind, level, update)
                same_on_all_ranks(here, scaler_of(wrapper), f'{kind} {level} scaler')
            assert 3 < skips < 18


@scenario
def message(here: Here) -> None:
    """The line about a skipped step comes once, not once a rank."""
    model = wrap(here, Net(), find_unused_parameters=True)
    wrapper = optim_wrapper(model.parameters(), 'O2', loss_scale=8.0)
    for _ in range(2):
        backward(wrapper, model, data(here, 0), factor=float('nan'))
        wrapper.step()
        wrapper.zero_grad()


@scenario
def local_flags(here: Here) -> None:
    """An overflow that another's loss brought on one rank, under no_sync, counts on all."""
    for level in ('O1', 'O2', 'O5'):
        model = MMSeparateDistributedDataParallel(Heads().to(here.device))
        net = model.module
        scale = dict(init_scale=2.0**8)
        wrappers = OptimWrapperDict(
            g=optim_wrapper(net.g.parameters(), level, loss_scale=scale, verbosity=0),
            d=optim_wrapper(net.d.parameters(), level, loss_scale=scale, verbosity=0),
        )
        wrappers.initialize_count_status(model, 0, 100)
        for step in range(3):
            factor = float('inf') if (step, here.rank) == (1, 1) else 1.0
            with net.d.no_sync(), wrappers['g'].optim_context(net.g):
                loss = net.d(net.g(data(here, step))).float().square().mean() * factor
            wrappers['g'].update_params(loss)
            with wrappers['d'].optim_context(net.d):
                loss = net.d(data(here, step)).float().square().mean()
            wrappers['d'].update_params(loss)
            for name, wrapper in wrappers.items():
                same_on_all_ranks(here, scaler_of(wrapper), f'{level} {name} {step} scaler')
                same_on_all_ranks(here, masters_of(wrapper), f'{level} {name} {step} masters')
        assert [w.loss_scaler.get_scale() for w in wrappers.values()] == [2.0**7, 2.0**8]
