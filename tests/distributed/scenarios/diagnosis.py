"""Faults on one rank alone: that rank names the place, and nobody waits for anybody."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from bits import differences
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from toy_overflow import Deep, Fault, in_range_of_fp32, nan_input, square

from amp_wrapper import amp
from amp_wrapper.diagnostics.diagnosis import Diagnosis
from amp_wrapper.diagnostics.measured_numbers import NUMBERS
from scenarios.common import HALF, Here, same_on_all_ranks, scenario


def inputs(here: Here, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + here.rank)
    return torch.randn(6, 4, generator=generator).to(here.device)


class Asks(nn.Module):
    """Averages over the ranks, as heads of detectors do: only where there are others."""

    def forward(self, x: Tensor) -> Tensor:
        if dist.is_available() and dist.is_initialized():
            total = torch.ones(1, device=x.device)
            dist.all_reduce(total.div_(dist.get_world_size()))
            return x * total
        return x


class AsksAnyway(nn.Module):
    """The same without a look whether there are others."""

    def forward(self, x: Tensor) -> Tensor:
        dist.all_reduce(torch.ones(1, device=x.device))
        return x


def train(
    here: Here, level: str, fault: str, extra: nn.Module, watched: bool = True
) -> tuple[list[Diagnosis], nn.Module]:
    """Four steps; at the second and the third, rank 1 has the fault."""
    torch.manual_seed(0)
    model = Deep().to(here.device)
    model.norm = nn.LayerNorm(8).to(here.device)
    model.blocks[0].place = extra
    model.blocks[2].place = place = Fault(lambda x: x)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.01), opt_level=level, loss_scale=8.0, verbosity=0
    )
    ddp = DistributedDataParallel(model)
    watch = amp.monitor(optimizer, diagnose_overflow=watched)
    for step in range(4):
        x = inputs(here, step)
        hit = here.rank == 1 and step in (1, 2)
        if fault == 'input':
            x = nan_input(x) if hit else x
        else:
            place.act = in_range_of_fp32 if hit else lambda x: x
        optimizer.zero_grad()
        with amp.scale_loss(square(ddp(x)), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert amp.skipped_steps(optimizer) == 2
    watch.close()
    return watch.diagnoses, model


def named(found: list[Diagnosis]) -> list[tuple[str, str]]:
    return [(each.cause, each.module) for each in found]


@scenario
def fault_on_one_rank(here: Here) -> None:
    """DDP: the rank with the fault finds it, the others say that it is elsewhere; the training is as without a diagnosis."""
    for level, fault, expected in (
        ('O2', 'input', ('input', '')),
        ('O2', 'range', ('forward_range', 'blocks.2.place')),
        ('O1', 'range', ('forward_range', 'blocks.2.place')),
    ):
        found, model = train(here, level, fault, Asks())
        assert named(found) == [expected if here.rank == 1 else ('other_rank', '')] * 2, (level, fault, named(found))
        _, alone = train(here, level, fault, Asks(), watched=False)
        assert differences(model.state_dict(), alone.state_dict()) == []
        same_on_all_ranks(here, [p.detach().float() for p in model.parameters()], f'{level} {fault}')


@scenario
def collective_in_the_model(here: Here) -> None:
    """A model that talks to other ranks in any case cannot be run again alone: its modules are watched at the next step."""
    found, _ = train(here, 'O2', 'range', AsksAnyway())
    assert [each.cause for each in found] == ['not_replayed', 'forward' if here.rank == 1 else 'other_rank']
    assert 'all_reduce' in found[0].text
    if here.rank == 1:
        assert found[1].module == 'blocks.2.place'


@scenario
def fault_in_a_sharded_model(here: Here) -> None:
    """FSDP2: no copy can be made, so the modules are watched."""
    for level in ('O2', 'O5'):
        torch.manual_seed(0)
        model = Deep().to(here.device)
        model.norm = nn.LayerNorm(8).to(here.device)
        model.blocks[2].place = Fault(lambda x: x)
        mesh = init_device_mesh(here.device.type, (here.world,))
        model, optimizer = amp.initialize(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            opt_level=level,
            verbosity=0,
            mesh=mesh,
            sharding=dict(blocks=['Block']),
        )
        with amp.monitor(optimizer, 1, diagnose_overflow=True) as watch:
            for step in range(3):
                spoilt = step in (0, 1) and here.rank == 1
                model.blocks[2].place.act = (lambda x: (x * 1e30) * 1e30) if spoilt else (lambda x: x)
                optimizer.zero_grad()
                with amp.scale_loss(square(model(inputs(here, step))), optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
            numbers: dict[str, Any] = watch.read()
        found = watch.diagnoses
        causes = ['not_replayed', 'forward' if here.rank == 1 else 'other_rank']
        if here.rank == 0 and level == 'O2':
            # its loss is finite, so it may be that the dynamic scale falls
            causes = []
        assert [each.cause for each in found] == causes, level
        if here.rank == 1:
            assert found[1].module == 'blocks.2.place'
        # rank 0 reads for all, though all have measured
        assert set(numbers) == ({*NUMBERS, 'amp_scale', 'amp_skipped'} if here.rank == 0 else set()), (level, numbers)
        if here.rank == 0:
            assert numbers['amp_skipped'] == 2
            torch.manual_seed(0)
            largest = max(float(p.detach().abs().max()) for p in Deep().parameters())
            # of the whole model, and not of this rank's shards alone
            assert numbers['amp_weight_peak'] >= math.log2(largest / torch.finfo(HALF[level]).max) - 0.1
