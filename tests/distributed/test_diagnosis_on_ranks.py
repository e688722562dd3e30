"""Overflows whose cause is on one rank: that rank names the place, and nobody waits for anybody."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bits import differences
from nets import Door, Net, batch, mesh_of, same_on_all_ranks
from on_ranks import Here, on_ranks
from torch import Tensor, nn
from torch.distributed import all_reduce

from amp_wrapper import amp


class Fault(nn.Module):
    """Multiplies and divides by a number."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.factor) / self.factor


class Asks(nn.Module):
    """Averages over the ranks, as heads of detectors do: where there are others, or in any case."""

    def __init__(self, anyway: str = '') -> None:
        super().__init__()
        self.anyway = anyway

    def forward(self, x: Tensor) -> Tensor:
        if self.anyway or dist.is_initialized():
            total = torch.ones(1, device=x.device)
            group = dist.group.WORLD
            if self.anyway == 'group':
                group.allreduce([total]).wait()
            elif self.anyway == 'op':
                total = torch.ops._c10d_functional.wait_tensor(
                    torch.ops._c10d_functional.all_reduce(total, 'sum', group.group_name)
                )
            else:
                all_reduce(total, group=group)
            return x * (total / total)
        return x


def _deep(here: Here, extra: nn.Module) -> Net:
    net = Net().to(here.device)
    net.blocks[0].place, net.blocks[1].place = extra, Fault()
    return net


def _train(here: Here, level: str, fault: str, extra: nn.Module, diagnoses: bool = True) -> tuple[Any, Any]:
    """Four steps; at the second and the third, rank 1 has the fault."""
    net: Any = _deep(here, extra)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    training = Door(here, net, optimizer, level, ddp={}, loss_scale=8.0)
    with amp.monitor(optimizer, diagnose_overflow=diagnoses) as watch:
        for number in range(4):
            hit, x = here.rank == 1 and number in (1, 2), batch(here, number)
            if hit and fault == 'input':
                x[2, 1] = torch.nan
            net.blocks[1].place.factor = 1e6 if hit and fault == 'range' else 1.0
            training.backward(x)
            training.step()
    assert amp.skipped_steps(optimizer) == 2
    same_on_all_ranks(here, net.parameters(), fault)
    return watch.diagnoses, net.state_dict()


@pytest.mark.parametrize(('level', 'fault'), [('O2', 'input'), ('O2', 'range'), ('O1', 'range')])
@on_ranks()
def test_the_rank_with_the_fault_names_it(here: Here, level: str, fault: str) -> None:
    """The other one finds nothing of its own; training is as without a diagnosis."""
    found, state = _train(here, level, fault, Asks())
    assert len(found) == 2
    for each in found:
        if here.rank == 1:
            assert each.module == ('' if fault == 'input' else 'blocks.1.place')
            assert each.cause in ('input', 'forward_range')
        else:
            assert each.module == '' and each.cause not in ('input', 'forward_range')
    assert differences(state, _train(here, level, fault, Asks(), diagnoses=False)[1]) == []


@pytest.mark.parametrize('way', ['function', 'group', 'op'])
@on_ranks()
def test_a_model_that_asks_other_ranks_is_not_run_again(here: Here, way: str) -> None:
    """It cannot be run alone, which is said once, and nobody waits."""
    found, _ = _train(here, 'O2', 'range', Asks(way))
    (found,) = found
    assert found.cause == 'not_replayed' and 'reduce' in found.text


@pytest.mark.parametrize('level', ['O2', 'O5'])
@on_ranks()
def test_numbers_of_sharded_models_are_those_of_the_whole(here: Here, level: str) -> None:
    """Rank 0 gives them. No copy of such a model can be made, which is said once."""
    net: Any = _deep(here, nn.Identity())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    training = Door(here, net, optimizer, level, mesh=mesh_of(here))
    with amp.monitor(optimizer, 1) as watch:
        for number in range(3):
            hit = number < 2 and here.rank == 1
            net.blocks[1].place.factor = math.inf if hit else 1.0
            training.backward(batch(here, number))
            gradients: list[Any] = [parameter.grad for parameter in amp.master_params(optimizer)]
            largest = max(float(each.full_tensor().abs().max()) for each in gradients) * training.scale
            training.step()
        numbers = watch.read()
    told = [each.text for each in watch.diagnoses]
    # the rank without the fault has a finite loss, and a scale that may fall
    assert len(told) == (here.rank == 1 or level == 'O5') and all('the model is sharded' in text for text in told)
    if here.rank == 1:
        assert numbers == {}
    else:
        assert numbers['amp_skipped'] == 2
        assert ('amp_grad_peak' in numbers) == (level == 'O2')
        assert level != 'O2' or numbers['amp_grad_peak'] == pytest.approx(math.log2(largest / 65504), rel=1e-5)
