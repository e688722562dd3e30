"""What sharded training costs: collectives in a step, bytes held and sent."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import amp_wrapper
from amp_wrapper import AmpOptimWrapper, FusedAdamW
from scenarios.common import Here, scenario
from scenarios.fsdp import Net, adamw, data, mesh_of, our_fused

# their names changed in torch 2.12
GATHERS = [name for name in ('all_gather_single', 'all_gather_into_tensor') if hasattr(dist, name)]
SCATTERS = [name for name in ('reduce_scatter_single', 'reduce_scatter_tensor') if hasattr(dist, name)]


@contextmanager
def counted(here: Here) -> Iterator[dict[str, int]]:
    """The collectives that begin inside, by name."""
    counts: dict[str, int] = {}
    names = ['all_reduce', 'all_gather', 'broadcast', *GATHERS, *SCATTERS]
    originals = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return originals[name](*args, **kwargs)

        return call

    try:
        for name in names:
            setattr(dist, name, counting(name))
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


@scenario
def fsdp_collectives(here: Here) -> None:
    """One small all-reduce more than plain FSDP2 with the same groups; none more where norms are clipped."""
    for kind in (adamw, our_fused):
        for clip in (None, dict(max_norm=0.5)):
            net: Any = amp_wrapper.fully_shard(Net().to(here.device), 'O2', mesh=mesh_of(here))
            wrapper = AmpOptimWrapper(optimizer=kind(net.parameters()), opt_level='O2', clip_grad=clip, verbosity=0)
            plain: Any = amp_wrapper.fully_shard(Net().to(here.device), 'O2', mesh=mesh_of(here))
            optimizer = torch.optim.AdamW(plain.parameters())
            for step in range(3):
                x, y = data(here, step)
                with counted(here) as mine, wrapper.optim_context(net):
                    loss = F.cross_entropy(net(x), y)
                    wrapper.update_params(loss)
                with counted(here) as theirs:
                    F.cross_entropy(plain(x.half()).float(), y).backward()
                    if clip is not None:
                        clip_grad_norm_(plain.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
            extra = {name: count - theirs.get(name, 0) for name, count in mine.items()}
            assert sum(theirs.get(name, 0) for name in (*GATHERS, *SCATTERS)) > 10
            assert extra.pop('all_reduce') == 1
            assert not any(extra.values()), (mine, theirs)


@scenario
def fsdp_bytes(here: Here) -> None:
    """What a rank holds, and hands to collectives, is what ``benchmarks.sharding`` counts without a process."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from benchmarks.sharding import count, transformer

    for level in ('O0', 'O2', 'O5', 'O3'):
        net: Any = transformer(3, 16).to(here.device)
        amp_wrapper.fully_shard(net, level, mesh=mesh_of(here))
        expected = count(net, here.world)
        optimizer = FusedAdamW(net.parameters())
        wrapper = AmpOptimWrapper(optimizer=optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
        wrapper.attach(net)
        sent = dict.fromkeys((*GATHERS, *SCATTERS), 0)
        calls = dict.fromkeys(sent, 0)
        originals = {name: getattr(dist, name) for name in sent}

        def counting(name: str, originals: Any = originals, sent: Any = sent, calls: Any = calls) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
                whole = max(tensors, key=lambda t: t.numel())
                sent[name] += whole.numel() * whole.element_size() * (here.world - 1) // here.world
                calls[name] += 1
                return originals[name](*args, **kwargs)

            return call

        try:
            for name in sent:
                setattr(dist, name, counting(name))
            with wrapper.optim_context(net):
                loss = net(torch.randn(2, 16, device=here.device)).square().mean()
            wrapper.backward(loss)
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)
        held = [p.to_local() for p in net.parameters()]
        grads = [p.grad.to_local() for p in net.parameters()]
        wrapper.step()
        state = [v.to_local() for p in net.parameters() for v in optimizer.state[p].values() if isinstance(v, DTensor)]
        found = [sum(t.numel() * t.element_size() for t in tensors) for tensors in (held, grads, state)]
        assert found == [expected.shards, expected.gradients, expected.moments], (level, found, expected)
        assert sum(calls.values()) == expected.collectives, (level, calls, expected)
        received = [sum(sent[name] for name in names) for names in (GATHERS, SCATTERS)]
        assert received == [expected.all_gather, expected.reduce_scatter], (level, sent, expected)
