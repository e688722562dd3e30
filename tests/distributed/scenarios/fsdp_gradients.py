"""The type in which gradients of shards are kept, and that no sum of them is rounded."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import amp_wrapper
from amp_wrapper import AmpOptimWrapper, FusedSGD
from amp_wrapper.engine.gradients.shard_gradients import CAN_DIFFER
from amp_wrapper.fsdp_internals import shard_groups
from amp_wrapper.openmmlab.sharding import MMFullyShard
from amp_wrapper.policy import resolve
from scenarios.common import Here, scenario
from scenarios.fsdp import HALF, Net, data, mesh_of, our_fused, plain_adamw, train


@scenario
def fsdp_types_of_gradients(here: Here) -> None:
    """Gradients of one backward pass are 16-bit, with the numbers that FSDP2 gives in FP32; sums of several are FP32."""
    cases: list[tuple[str, Any]] = [
        ('O2', None),
        ('O5', None),
        ('O5', dict(max_norm=0.1)),
        ('O2', dict(type='value', clip_value=0.01)),
    ]
    for level, clip in cases[::2] if 'quick' in here.words else cases:
        for counts in (1, 3):
            for sharding in ({}, dict(reduce_dtype='float32')) if clip is None else ({},):
                found: list[Any] = []
                for kind in (our_fused, plain_adamw):
                    net: Any = Net().to(here.device)
                    amp_wrapper.fully_shard(net, level, mesh=mesh_of(here), **sharding)
                    wrapper = AmpOptimWrapper(
                        optimizer=kind(net.parameters()),
                        opt_level=level,
                        clip_grad=clip,
                        accumulative_counts=counts,
                        verbosity=0,
                        loss_scale=dict(init_scale=1024.0) if level == 'O2' else None,
                    )
                    seen: list[Any] = []
                    for step in range(3 * counts):
                        x, y = data(here, step)
                        with wrapper.optim_context(net):
                            loss = F.cross_entropy(net(x), y)
                        wrapper.backward(wrapper.scale_loss(loss))
                        types = {
                            p.grad.dtype for n, p in net.named_parameters() if 'bn' not in n and p.grad is not None
                        }
                        is_half = kind is our_fused and not sharding and step % counts == 0
                        assert types == {HALF[level] if is_half and CAN_DIFFER else torch.float32}, (
                            level,
                            counts,
                            step,
                            types,
                        )
                        seen.append([p.grad.to_local().float().clone() for p in net.parameters()])
                        if wrapper.should_update():
                            wrapper.step()
                            wrapper.zero_grad()
                            # weights of both go on alike, whatever the optimizer
                            with torch.no_grad():
                                for p, q in zip(net.parameters(), Net().to(here.device).parameters()):
                                    p.copy_(DTensor.from_local(q, p.device_mesh).redistribute(placements=p.placements))
                    found.append(seen)
                for mine, theirs in zip(*found):
                    assert all(map(torch.equal, mine, theirs)), (level, counts, sharding)
    net, _, _ = train(here, 'O5', our_fused, 'ours')
    x, y = data(here, 9)
    F.cross_entropy(net(x), y).backward()
    # nobody has said whose loss this is
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32}


def _generator(here: Here) -> torch.Generator:
    return torch.Generator(here.device).manual_seed(here.rank)


@scenario
def fsdp_other_passes(here: Here) -> None:
    """Passes that nobody has announced, and penalties on the shards, before, in and after the pass of the wrapper."""
    for level in ('O5',) if 'quick' in here.words else ('O2', 'O5'):
        for acts in ('wp', 'wpp', 'pw', 'wwp', 'W', 'Wp', 'pW', 'wW', 'c'):
            found = []
            for kind in (our_fused, plain_adamw):
                net: Any = Net().to(here.device)
                amp_wrapper.fully_shard(net, level, mesh=mesh_of(here))
                scale = 1.0 if level == 'O2' else None
                wrapper = AmpOptimWrapper(
                    optimizer=kind(net.parameters()),
                    opt_level=level,
                    accumulative_counts=acts.lower().count('w') or 1,
                    loss_scale=scale,
                    verbosity=0,
                )
                with wrapper.optim_context(net):
                    # all forward passes before the first backward pass
                    losses = [F.cross_entropy(net(data(here, n)[0]), data(here, n)[1]) for n in range(len(acts))]
                for act, loss in zip(acts, losses):
                    penalty = sum((p * p).sum() for p in net.blocks.parameters())
                    if act == 'p':
                        loss.backward()
                    elif act == 'c':
                        # parts of a model, one after the other
                        x = torch.randn(4, 7, 5, 5, device=here.device, generator=_generator(here))
                        wrapper.backward(net.blocks[0](x).square().mean())
                        net.blocks[0](2 * x).square().mean().backward()
                    else:
                        wrapper.backward(loss + (1e-3 * penalty.full_tensor() if act == 'W' else 0.0))
                parameters = wrapper.optimizer.param_groups[0]['params']
                found.append([None if p.grad is None else p.grad.to_local().float() for p in parameters])
            for mine, theirs in zip(*found):
                assert (mine is None) == (theirs is None)
                assert mine is None or torch.equal(mine, theirs), (level, acts)


@scenario
def fsdp_gradients_apart(here: Here) -> None:
    """``no_sync`` sums in FP32, whatever the number of micro-batches, unless another type is asked for."""
    for level in ('O2', 'O5') if 'quick' in here.words else ('O0', 'O2', 'O4', 'O5'):
        found = {}
        for name, words in (
            ('each', {}),
            ('apart', dict(no_sync=True)),
            ('bf16', dict(no_sync=True, reduce_dtype='bf16')),
        ):
            net: Any = Net().to(here.device)
            model = MMFullyShard(net, **words)  # type: ignore[arg-type]
            optimizer = FusedSGD(net.parameters(), lr=0.0)
            counts = 16
            wrapper = AmpOptimWrapper(
                optimizer=optimizer, opt_level=level, accumulative_counts=counts, loss_scale=64.0, verbosity=0
            )
            model.shard(resolve(level), [optimizer])
            wrapper.initialize_count_status(model, 0, counts)
            types = {group.reduce_dtype for group in shard_groups(net) if group.param_dtype is not None}
            if level in HALF:
                wanted = {'each': HALF[level], 'apart': torch.float32, 'bf16': torch.bfloat16}[name]
                assert types == {wanted}, (level, name, types)
            for step in range(counts):
                x, y = data(here, step)
                with wrapper.optim_context(model):
                    loss = F.cross_entropy(model(x), y)
                wrapper.backward(wrapper.scale_loss(loss))
            found[name] = torch.cat([p.grad.full_tensor().double().flatten() for p in net.parameters()])
        error = float((found['apart'] - found['each']).norm() / found['each'].norm())
        assert error <= (2.0**-16 if level not in HALF else 2.0**-7), (level, error)
        if level == 'O5':
            assert error < 0.5 * float((found['bf16'] - found['each']).norm() / found['each'].norm())
