"""Sharded models that are compiled, and shards that stay on the CPU: the same training."""

from __future__ import annotations

from typing import Any

import torch
from bits import differences
from torch.nn import functional as F

from amp_wrapper import amp
from amp_wrapper.checkpoint import file as checkpoint_file
from scenarios.common import Here, scenario
from scenarios.fsdp import Net, assembled, data, mesh_of, our_fused
from scenarios.fsdp_runs import settings


def trained(here: Here, level: str, how: str, **sharding: Any) -> Any:
    net: Any = Net().to(here.device)
    optimizer = our_fused(net.parameters())
    scale = 1024.0 if level in ('O1', 'O2') else None
    amp.initialize(
        net, optimizer, opt_level=level, mesh=mesh_of(here), sharding=sharding, loss_scale=scale, verbosity=0
    )
    model = net
    if how == 'model':
        model = torch.compile(net, backend='aot_eager')
    if how == 'blocks':
        for block in net.blocks:
            block.compile(backend='aot_eager')
    losses = []
    for step in range(2):
        x, y = data(here, step)
        loss = F.cross_entropy(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, assembled(net)


@scenario
def fsdp_compiled(here: Here) -> None:
    """A compiled model, or compiled blocks in it, train as without; aot_eager computes as eager training does."""
    for level in ('O2', 'O4', 'O5'):
        eager = trained(here, level, 'eager')
        for how in ('model', 'blocks'):
            torch.compiler.reset()
            mine = trained(here, level, how)
            unit = 2.0**-7
            assert all(abs(a - b) <= unit * abs(b) for a, b in zip(mine[0], eager[0])), (level, how, mine[0], eager[0])
            for name, value in mine[1].items():
                assert torch.allclose(value.float(), eager[1][name].float(), rtol=unit, atol=2 * unit), (
                    level,
                    how,
                    name,
                )


@scenario
def fsdp_offload(here: Here) -> None:
    """On a CPU there is nowhere to go; what is tried is that all of it goes on: gradients, norms, overflow."""
    for level in ('O0', 'O2', 'O3', 'O5'):
        mine, theirs = (trained(here, level, 'eager', offload=yes) for yes in (True, False))
        assert mine[0] == theirs[0] and differences(mine[1], theirs[1]) == [], level


@scenario
def fsdp_compiled_runs(here: Here) -> None:
    """``compile=`` in a config of mmengine."""
    import toy

    files = []
    for name, compile_ in (('eager', False), ('compiled', dict(backend='aot_eager'))):
        case = settings(here, 'fsdp', 'O5', epochs=1)
        case['compile'] = compile_
        case['default_hooks']['checkpoint'] = dict(type='CheckpointHook')
        toy.run(here.folder / name, **case)
        torch.distributed.barrier()
        files.append(checkpoint_file.load(here.folder / name / 'epoch_1.pth'))
    for key, value in files[0]['state_dict'].items():
        assert torch.allclose(value.float(), files[1]['state_dict'][key].float(), rtol=2.0**-7, atol=2.0**-7), key
