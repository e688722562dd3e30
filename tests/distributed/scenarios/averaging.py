"""Gradients are averaged over ranks as plain DDP does it, and training equals that of the joint batch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from scenarios.common import (
    HALF,
    LEVELS,
    ROUNDING,
    Here,
    Net,
    averaged,
    backward,
    data,
    differs_somewhere,
    gradients,
    masters_of,
    optim_wrapper,
    same_on_all_ranks,
    scenario,
    spy,
    weights_of,
    wrap,
)

SETTINGS: dict[str, dict[str, Any]] = {
    'plain': {},
    'unused': dict(find_unused_parameters=True),
    'static': dict(static_graph=True),
    'views': dict(gradient_as_bucket_view=True),
    'buffers': dict(broadcast_buffers=True),
    'small buckets': dict(bucket_cap_mb=0.0001),
}


@scenario
def averaging(here: Here) -> None:
    """Gradients are the average of the ranks' own, bit for bit, under each setting of DDP, at each level."""
    for level in LEVELS:
        for name, settings in SETTINGS.items():
            model = wrap(here, Net(), **settings)
            if name != 'unused':
                model.module.side.requires_grad_(False)
            # a frozen layer that DDP was made around: it has to be made anew without it
            wrapper = optim_wrapper(model.parameters(), level)
            before = (id(model), id(model.module), id(model.process_group))
            buckets: set[torch.dtype] = set()

            if name == 'plain':
                # registered before the cast, so the rebuilt reducer must carry it over
                model.register_comm_hook(buckets, spy)
            wrapper.initialize_count_status(model, 0, 100)
            assert before == (id(model), id(model.module), id(model.process_group))
            for key, value in settings.items():
                if key != 'bucket_cap_mb':
                    assert getattr(model, key) == value, (level, name, key)
            assert model.bucket_bytes_cap == int(settings.get('bucket_cap_mb', 25) * 1024 * 1024)
            with torch.no_grad():
                model.module.seen.add_(here.rank)
            for step in range(4):
                with model.no_sync() if name != 'static' else nullcontext():
                    if name != 'static':
                        backward(wrapper, model, data(here, step))
                        local = gradients(model)
                        assert differs_somewhere(here, local.values()), (level, name)
                        wrapper.zero_grad()
                backward(wrapper, model, data(here, step))
                got = gradients(model)
                same_on_all_ranks(here, got.values(), f'{level} {name} gradients')
                if name != 'static':
                    expected = averaged(here, local)
                    assert got.keys() == expected.keys()
                    for key, value in got.items():
                        assert value.equal(expected[key]), (level, name, key, step)
                    kind = HALF.get(level, torch.float32)
                    assert {value.dtype for value in got.values()} == {kind}
                wrapper.step()
                wrapper.zero_grad()
                assert differs_somewhere(here, [model.module.seen]) == (name != 'buffers'), (level, name)
                same_on_all_ranks(here, weights_of(model), f'{level} {name} weights')
                same_on_all_ranks(here, masters_of(wrapper), f'{level} {name} masters')
            if name == 'plain':
                assert buckets == {HALF.get(level, torch.float32)}, (level, buckets)
    print(sorted(SETTINGS))


@scenario
def joint(here: Here) -> None:
    """Two ranks are one process on the joint batch; an overflow of one rank skips the step on both."""
    for level in LEVELS:
        for counts in (1, 3):
            results = []
            for alone in (False, True):
                net = Net()
                net.side.requires_grad_(False)
                model: nn.Module = net.to(here.device) if alone else wrap(here, net)
                wrapper = optim_wrapper(
                    model.parameters(),
                    level,
                    accumulative_counts=counts,
                    clip_grad=dict(max_norm=10.0),
                    skip_nonfinite=True,
                )
                # five accumulations and a remainder
                total = 5 * counts + counts // 2
                wrapper.initialize_count_status(model, 0, total)
                for step in range(total):
                    inputs = (
                        torch.cat([data(here, step, rank) for rank in range(here.world)]) if alone else data(here, step)
                    )
                    factor = float('inf') if step == 2 * counts and (alone or here.rank == 1) else 1.0
                    with wrapper.optim_context(model):
                        losses = model(inputs, factor=factor)
                    wrapper.update_params(losses['loss'])
                results.append((masters_of(wrapper), wrapper.loss_scaler.counts.tolist()))
                if not alone:
                    same_on_all_ranks(here, weights_of(model), f'{level} {counts} weights')
                    same_on_all_ranks(here, masters_of(wrapper), f'{level} {counts} masters')
            (masters, count), (expected, count_alone) = results
            assert count == count_alone == [5 + (counts // 2 > 0), 1, 0], (level, counts, count, count_alone)
            unit = ROUNDING[
                HALF.get(level, torch.bfloat16 if level == 'O4' else torch.float16 if level == 'O1' else torch.float32)
            ]
            # each step moves a weight by gradients of norm 10 at most; the ranks round each of them a few times
            for a, b in zip(masters, expected):
                torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=max(40 * unit, 1e-5))


@scenario
def disabled(here: Here) -> None:
    """With enabled=False DDP is left as it is: a parameter that is unfrozen later stays on its rank, as in plain torch."""
    net = Net()
    net.side.requires_grad_(False)
    model = wrap(here, net)
    reducer = model.reducer
    wrapper = optim_wrapper(model.parameters(), 'O2', enabled=False)
    wrapper.initialize_count_status(model, 0, 10)
    for step in range(2):
        net.side.requires_grad_(step == 1)
        backward(wrapper, model, data(here, step), side=True)
        same_on_all_ranks(here, [net.first.weight.grad], 'first')
    assert differs_somewhere(here, [net.side.weight.grad])
    assert model.reducer is reducer and {p.dtype for p in net.parameters()} == {torch.float32}
