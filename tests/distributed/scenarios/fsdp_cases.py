"""Cases of sharded models that went wrong once, and uses that are not a training loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from bits import differences
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import amp_wrapper
from amp_wrapper import AmpAttachError, AmpConfigError, AmpOptimWrapper, FusedSGD, amp
from scenarios.common import Here, same_on_all_ranks, scenario
from scenarios.fsdp import Net, assembled, data, ddp_of, mesh_of, our_fused


@scenario
def fsdp_meshes_without_names(here: Here) -> None:
    net = Net().to(here.device)
    with pytest.raises(AmpConfigError, match=r"mesh_dim_names=\('replicate', 'shard'\)"):
        amp_wrapper.fully_shard(net, 'O5', mesh=init_device_mesh(here.device.type, (1, here.world)))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.g, self.d = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.d(self.g(x).relu())
        return out


@scenario
def fsdp_two_wrappers(here: Here) -> None:
    """Each steps a part of a model that was sharded as a whole; the bits of DDP."""
    for level in ('O0', 'O2', 'O4', 'O5'):
        found = []
        for how in ('fsdp', 'ddp'):
            net: Any = Two().to(here.device)
            if how == 'fsdp':
                amp_wrapper.fully_shard(net, level, mesh=mesh_of(here))
            inner = net
            if how == 'ddp':
                net = ddp_of(here, net)
            wrappers = [
                AmpOptimWrapper(
                    optimizer=FusedSGD(part.parameters(), lr=0.1), opt_level=level, loss_scale=64.0, verbosity=0
                )
                for part in (inner.g, inner.d)
            ]
            wrappers[0].join([wrappers[1]])
            wrappers[1].join([wrappers[0]])
            for wrapper in wrappers:
                wrapper.attach(net, [p for other in wrappers if other is not wrapper for p in other.master_params()])
            for step in range(4):
                wrapper = wrappers[step % 2]
                x = torch.randn(4, 4, generator=torch.Generator().manual_seed(2 * step + here.rank)).to(here.device)
                with wrapper.optim_context(net):
                    loss = net(x).float().square().mean()
                wrapper.update_params(loss)
                for each in wrappers:
                    each.zero_grad()
            found.append(assembled(net))
        assert differences(found[0], found[1]) == [], level


@scenario
def fsdp_nan_and_the_largest(here: Here) -> None:
    """A maximum over ranks must not lose NaN."""
    for row in (0, 2 * here.world - 1):
        for kind in (our_fused, lambda p: torch.optim.SGD(p, lr=0.1)):
            net: Any = nn.Linear(3, 2 * here.world).to(here.device)
            amp_wrapper.fully_shard(net, 'O0', mesh=mesh_of(here))
            clip = dict(max_norm=0.1, norm_type='inf', error_if_nonfinite=True)
            wrapper = AmpOptimWrapper(optimizer=kind(net.parameters()), opt_level='O0', clip_grad=clip, verbosity=0)
            with wrapper.optim_context(net):
                out = net(torch.ones(2, 3, device=here.device))
            mask = torch.ones_like(out)
            mask[:, row] = math.nan
            with pytest.raises(RuntimeError, match='non-finite'):
                wrapper.update_params((out * mask).sum())


@scenario
def fsdp_late_errors_come_early(here: Here) -> None:
    """What torch refuses in the middle of the work, or at the first forward pass, is refused before anything changes."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Two(), Two()])
            self.layers[1].g.weight = self.layers[0].g.weight  # type: ignore[union-attr]

    class Scalar(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.factor = nn.Parameter(torch.ones(()))

    cases: tuple[tuple[nn.Module, dict[str, Any], type[Exception], str], ...] = (
        (Tied(), {}, AmpAttachError, r'layers\.0 \(Two\) .*share a parameter'),
        (Scalar(), {}, AmpAttachError, r'without dimensions.*\(1,\)'),
        (Two(), dict(reshard_after_forward=here.world + 1), AmpConfigError, 'must divide the number of ranks'),
    )
    for net, sharding, kind, text in cases:
        for level in ('O0', 'O3', 'O5'):
            optimizer = FusedSGD(net.parameters(), lr=0.1)
            before = [p for group in optimizer.param_groups for p in group['params']]
            with pytest.raises(kind, match=text):
                amp.initialize(net, optimizer, opt_level=level, mesh=mesh_of(here), sharding=sharding, verbosity=0)
            assert not any(isinstance(module, FSDPModule) for module in net.modules())
            assert {p.dtype for p in net.parameters()} == {torch.float32}
            after = [p for group in optimizer.param_groups for p in group['params']]
            assert len(after) == len(before) and all(map(lambda a, b: a is b, after, before))


@scenario
def fsdp_evaluation_before_a_step(here: Here) -> None:
    """Weights that an evaluation has gathered are gathered anew after the step."""
    for level in ('O0', 'O2', 'O5'):
        found = []
        for how in ('fsdp', 'ddp'):
            net: Any = Net().to(here.device)
            if how == 'fsdp':
                amp_wrapper.fully_shard(net, level, mesh=mesh_of(here))
            optimizer = our_fused(net.parameters())
            amp.initialize(net, optimizer, opt_level=level, verbosity=0, loss_scale=64.0)
            model = net if how == 'fsdp' else ddp_of(here, net)
            for step in range(3):
                x, y = data(here, step)
                with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as loss:
                    loss.backward()
                model.eval()
                with torch.no_grad():
                    model(x)
                model.train()
                optimizer.step()
                optimizer.zero_grad()
            found.append(assembled(net))
        assert differences(found[0], found[1]) == [], level


class Mixed(nn.Module):
    """A parameter of its own of another type than those below."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.own = nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=dtype.is_floating_point or dtype.is_complex)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x)) * self.own.abs().to(x.dtype)
        return out


@scenario
def fsdp_mixed_types(here: Here) -> None:
    """Parameters of other types than float32 make groups of their own, at every level."""
    quick = 'quick' in here.words
    for dtype in (torch.complex64, torch.int8) if quick else (torch.float64, torch.complex64, torch.int64, torch.int8):
        for level in ('O0', 'O5') if quick else ('O0', 'O4', 'O5'):
            net: Any = Mixed(dtype).to(here.device)
            optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
            if torch.__version__ < (2, 12) and not (dtype.is_floating_point or dtype.is_complex):
                with pytest.raises(AmpAttachError, match=r'\(Mixed\) has a parameter of int.*cannot shard'):
                    amp.initialize(net, optimizer, opt_level=level, mesh=mesh_of(here), verbosity=0)
                assert {p.dtype for p in net.parameters()} == {torch.float32, dtype}
                continue
            amp.initialize(net, optimizer, opt_level=level, mesh=mesh_of(here), verbosity=0)
            before = assembled(net)
            with amp.scale_loss(net(torch.ones(2, 4, device=here.device)).square().mean(), optimizer) as loss:
                loss.backward()
            optimizer.step()
            after = assembled(net)
            assert after['own'].dtype is dtype
            assert not torch.equal(after['a.weight'], before['a.weight'])
            same_on_all_ranks(here, list(after.values()), f'{dtype} at {level}')


@scenario
def fsdp_begins_alike(here: Here) -> None:
    """Ranks that were initialised differently train what the first rank has, as under DDP; on a 2 x 1 mesh, too."""
    for mesh in (mesh_of(here), init_device_mesh(here.device.type, (2, here.world // 2), mesh_dim_names=('a', 'b'))):
        torch.manual_seed(here.rank)
        net: Any = Two().to(here.device)
        for module in (net.g, net.d):
            module.reset_parameters()
            torch.manual_seed(100 + here.rank)
            nn.init.normal_(module.weight)
        net.register_buffer('seen', torch.full((2,), float(here.rank), device=here.device))
        first = [tensor.detach().clone() for tensor in net.state_dict().values()]
        for tensor in first:
            torch.distributed.broadcast(tensor, 0)
        amp_wrapper.fully_shard(net, 'O5', mesh=mesh)
        assert all(map(torch.equal, assembled(net).values(), first))


@scenario
def fsdp_averages(here: Here) -> None:
    """torch's own average, made before and sharded in FP32, has the bits of the same under DDP."""
    for level in ('O0', 'O2', 'O4', 'O5'):
        found = []
        for how in ('fsdp', 'ddp'):
            net: Any = Net().to(here.device)
            optimizer = our_fused(net.parameters())
            average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            options: dict[str, Any] = {}
            if how == 'fsdp':
                amp_wrapper.fully_shard(average.module, 'O0', mesh=mesh_of(here))
                options['mesh'] = mesh_of(here)
            amp.initialize(net, optimizer, opt_level=level, verbosity=0, loss_scale=64.0, **options)
            model = net if how == 'fsdp' else ddp_of(here, net)
            for step in range(4):
                x, y = data(here, step)
                with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as loss:
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(net)
            average.eval()
            out = average(data(here, 9)[0])
            found.append({**assembled(average.module), 'out': out.detach().clone()})
            assert out.dtype is torch.float32
        assert differences(found[0], found[1]) == [], level
