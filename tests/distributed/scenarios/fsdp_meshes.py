"""Meshes of four ranks: sharded and repeated, sharded alone, and tensor parallelism below FSDP2, against one process."""

from __future__ import annotations

from typing import Any

import torch
from bits import differences
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import amp_wrapper
from amp_wrapper import AmpOptimWrapper
from amp_wrapper.checkpoint import sharded
from scenarios.common import Here, same_on_all_ranks, scenario
from scenarios.fsdp import Kind, adamw, assembled, mesh_of, our_sgd


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


def transformer() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), Layer(), Layer(), nn.Linear(8, 3))


@scenario
def fsdp_two_by_two(here: Here) -> None:
    """Four ranks: sharded and repeated (2 x 2), sharded alone, and tensor parallel below FSDP2, against one process."""
    kind = here.device.type
    grid = init_device_mesh(kind, (2, 2), mesh_dim_names=('data', 'tensor'))
    levels = (('O0', None), ('O4', None), ('O5', torch.bfloat16))
    for level, half in levels[::2] if 'quick' in here.words else levels:
        for clip, makes in (
            (None, (adamw,)),
            (dict(max_norm=0.3), (adamw, our_sgd)),
            (dict(max_norm=0.1, norm_type='inf'), (our_sgd,)),
        ):
            for make in makes:
                one: dict[int, Any] = {}
                for how, parts in (('hsdp', 4), ('fsdp', 4), ('tensor', 2)):
                    net = transformer().to(here.device)
                    rank = here.rank
                    if how == 'tensor':
                        for layer in net[1:3]:
                            parallelize_module(
                                layer, grid['tensor'], {'up': ColwiseParallel(), 'down': RowwiseParallel()}
                            )
                        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
                        for module in (*net[1:3], net):
                            fully_shard(module, mesh=grid['data'], mp_policy=policy)
                        rank = grid['data'].get_local_rank()
                    else:
                        mesh = grid if how == 'hsdp' else mesh_of(here)
                        amp_wrapper.fully_shard(net, level, mesh=mesh, reduce_dtype='float32')
                    mine, norms = _steps(net, level, make, clip, [rank])
                    if parts not in one:
                        one[parts] = _steps(transformer().to(here.device), level, make, clip, list(range(parts)))
                    exact, wanted = one[parts]
                    unit = 2.0**-18 if level == 'O0' else 2.0**-7
                    for norm, full in zip(norms, wanted):
                        assert abs(norm - full) <= 4 * unit * full, (level, how, norm, full)
                    for name, value in mine.items():
                        assert torch.allclose(value, exact[name], rtol=unit, atol=4 * unit), (level, how, clip, name)
                    same_on_all_ranks(here, list(mine.values()), how)


def _steps(net: Any, level: str, kind: Kind, clip: Any, ranks: list[int]) -> tuple[dict[str, Tensor], list[float]]:
    wrapper = AmpOptimWrapper(optimizer=kind(net.parameters()), opt_level=level, clip_grad=clip, verbosity=0)
    norms = []
    for step in range(3):
        parts = [torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in ranks]
        x = torch.cat(parts).to(next(net.parameters()).device)
        with wrapper.optim_context(net):
            loss = net(x).float().square().mean()
        wrapper.update_params(loss)
        norm = wrapper._last.grad_norm  # type: ignore[union-attr]
        norms += [] if norm is None else [float(norm)]
    return assembled(net), norms


@scenario
def fsdp_tensor_parallel_folders(here: Here) -> None:
    """Shards of a 2 x 2 mesh, of tensor parallelism below FSDP2 among them: saved, read again, and read as whole tensors."""
    grid = init_device_mesh(here.device.type, (2, 2), mesh_dim_names=('data', 'tensor'))

    def make(how: str) -> Any:
        net = transformer().to(here.device)
        if how == 'tensor':
            for layer in net[1:3]:
                parallelize_module(layer, grid['tensor'], {'up': ColwiseParallel(), 'down': RowwiseParallel()})
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for module in (*net[1:3], net):
                fully_shard(module, mesh=grid['data'], mp_policy=policy)
        else:
            amp_wrapper.fully_shard(net, 'O5', mesh=grid)
        return net, AmpOptimWrapper(optimizer=our_sgd(net.parameters()), opt_level='O5', verbosity=0)

    def step(net: Any, wrapper: Any, number: int) -> None:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).to(here.device)
        with wrapper.optim_context(net):
            loss = net(x).float().square().mean()
        wrapper.update_params(loss)

    for how in ('tensor', 'hsdp'):
        net, wrapper = make(how)
        step(net, wrapper, 0)
        folder = here.folder / how
        pending = sharded.begin({'model': net.state_dict(), 'optimizer': wrapper.state_dict()}, folder)
        before = assembled(net)
        step(net, wrapper, 1)
        pending.finish()
        whole = sharded.load(folder)
        assert differences(whole['model'], {name: value.cpu() for name, value in before.items()}) == [], how
        again, other = make(how)
        parameters, named = list(again.parameters()), dict(again.named_parameters())

        def like(name: str, parameters: Any = parameters, named: Any = named) -> Any:
            part, key = name.split('/', 1)
            return named[key] if part == 'model' else parameters[int(key.split('/')[1])]

        found = sharded.load(folder, like)
        again.load_state_dict(found['model'])
        other.load_state_dict(found['optimizer'])
        step(again, other, 1)
        assert differences(assembled(again), assembled(net)) == [], how
