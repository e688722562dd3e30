"""Optimizers whose state is divided over ranks: the fused ones on shards, and ``ZeroRedundancyOptimizer`` under DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bits import differences
from nets import Door, Net, batch, same_on_all_ranks, whole
from on_ranks import Group, Here, on_ranks
from op_lists import skip_without_library
from pairs import pairs
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from amp_wrapper import AmpAttachError, AmpUsageError, FusedAdam, FusedAdamW, FusedSGD, amp

FUSED: dict[str, Callable[..., Any]] = {
    'amsgrad': lambda p: FusedAdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    'lr tensor': lambda p: FusedAdamW(p, lr=torch.tensor(0.01), maximize=True),
    'bfloat16 state': lambda p: FusedAdam(p, lr=0.01, state_dtype='bfloat16'),
    'nesterov': lambda p: FusedSGD(p, lr=0.1, momentum=0.9, nesterov=True),
    'plain SGD': lambda p: FusedSGD(p, lr=0.1, weight_decay=0.1),
}


def _net(here: Here, wide: bool = False) -> nn.Sequential:
    """First dimensions that are divided evenly, unevenly, and by fewer ranks than there are."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 7), nn.Linear(7, 1), nn.Linear(1, 3))
    return net.to(here.device, torch.float64 if wide else torch.float32)


def _sharded(here: Here, wide: bool = False) -> nn.Sequential:
    net, mesh = _net(here, wide), init_device_mesh(here.device.type, (here.world,))
    for module in net.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))
    return net


def _set_gradients(sharded: nn.Module, whole: nn.Module, number: int) -> None:
    """The same on both; one parameter has none at first."""
    generator = torch.Generator().manual_seed(number)
    for index, (mine, full) in enumerate(zip(sharded.parameters(), whole.parameters())):
        grad = torch.randn(full.shape, generator=generator, dtype=full.dtype).to(full.device)
        late = index == 3 and number < 2
        full.grad = None if late else grad
        mine.grad = None if late else distribute_tensor(grad, mine.device_mesh, mine.placements)


def _step_on_shards(here: Here, kind: str, wide: bool) -> None:
    sharded, alone = _sharded(here, wide), _net(here, wide)
    first, second = (FUSED[kind](model.parameters()) for model in (sharded, alone))
    # torch has no fused step of SGD for shards
    flagged = first._step_supports_amp_scaling
    assert flagged == (not wide or 'SGD' not in type(first).__name__)
    for number in range(6):
        _set_gradients(sharded, alone, number)
        for optimizer in (first, second) if flagged else ():
            # as a GradScaler says it
            optimizer.grad_scale = torch.tensor(4.0, device=here.device)
            optimizer.found_inf = torch.tensor(float(number == 3), device=here.device)
        before = copy.deepcopy(alone.state_dict())
        first.step()
        second.step()
        for mine, theirs in ((sharded.state_dict(), alone.state_dict()), (first.state_dict(), second.state_dict())):
            if wide:
                # torch's vectors and their tails are rounded otherwise
                torch.testing.assert_close(whole(dict(mine)), dict(theirs), rtol=1e-12, atol=1e-12)
            else:
                assert differences(whole(dict(mine)), dict(theirs)) == []
        assert (differences(before, alone.state_dict()) == []) == (flagged and number == 3)
        if number == 4:
            saved = get_optimizer_state_dict(sharded, first)
            first = FUSED[kind](sharded.parameters())
            set_optimizer_state_dict(sharded, first, saved)


@pytest.mark.parametrize('kind', FUSED)
@pytest.mark.parametrize('wide', [False, True])
@pytest.mark.parametrize('world', [2, 4])
def test_fused_steps_of_shards_have_the_bits_of_one_process(
    ranks_of: Callable[[int], Group], device: torch.device, tmp_path: Path, world: int, wide: bool, kind: str
) -> None:
    """Uneven and empty shards, late gradients, a skipped step, a resume; by our op, or by torch's step of float64."""
    if not wide:
        skip_without_library(device)
    ranks_of(world).run(tmp_path, _step_on_shards, kind=kind, wide=wide)


@pytest.mark.usefixtures('library')
@on_ranks()
def test_fused_steps_refuse_other_layouts(here: Here) -> None:
    """Of a gradient or of state, on every rank, and nothing changes."""
    sharded, alone = _sharded(here), _net(here)
    optimizer = FusedAdamW(sharded.parameters())
    _set_gradients(sharded, alone, 5)
    optimizer.step()
    before = copy.deepcopy(whole(dict(sharded.state_dict())))
    parameter: Any = sharded[0].weight
    grad, state = parameter.grad, optimizer.state[parameter]
    parameter.grad = grad.redistribute(parameter.device_mesh, [Replicate()])
    with pytest.raises(AmpUsageError, match=r'Replicate.*Shard.*redistribute'):
        optimizer.step()
    parameter.grad, moment = grad, state['exp_avg']
    state['exp_avg'] = moment.full_tensor()
    with pytest.raises(AmpUsageError, match=r'exp_avg.*set_optimizer_state_dict'):
        optimizer.step()
    state['exp_avg'] = moment
    assert differences(whole(dict(sharded.state_dict())), before) == []
    optimizer.step()
    assert differences(whole(dict(sharded.state_dict())), before) != []


# -- ZeRO --------------------------------------------------------------------------------------------------------------

INSIDE: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    'AdamW': (torch.optim.AdamW, dict(lr=0.01, eps=1e-4)),
    'FusedAdamW': (FusedAdamW, dict(lr=0.01, eps=1e-4)),
    'FusedSGD': (FusedSGD, dict(lr=0.1, momentum=0.9)),
}


class Zero(Door):
    """A training under DDP, with an optimizer in ``ZeroRedundancyOptimizer`` or alone."""

    def __init__(self, here: Here, level: str, kind: str, zero: bool, view: bool) -> None:
        net = Net().to(here.device)
        inside, words = INSIDE[kind]
        if zero:
            words = {**words, 'optimizer_class': inside, 'parameters_as_bucket_view': view}
        optimizer: Any = (ZeroRedundancyOptimizer if zero else inside)(net.parameters(), **words)
        super().__init__(here, net, optimizer, level, ddp={}, loss_scale=1024.0 if level in ('O1', 'O2') else None)

    def train(self, steps: range) -> None:
        for number in steps:
            bad = self.level != 'O0' and (number, self.here.rank) == (3, 1)
            self.backward(batch(self.here, number) * (torch.inf if bad else 1.0))
            assert self.step() == (self.level != 'O0' and number == 3)

    def state(self) -> dict[str, Any]:
        """The whole state of the optimizer, on every rank."""
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            self.optimizer.consolidate_state_dict(to=0)
        box = [self.optimizer.state_dict() if self.here.rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        return copy.deepcopy(box[0])

    def elements(self) -> int:
        """How many numbers of state this rank holds."""
        states = getattr(self.optimizer, 'optim', self.optimizer).state.values()
        return sum(value.numel() for state in states for value in state.values() if isinstance(value, Tensor))


@pairs(level=('O0', 'O1', 'O2', 'O5'), kind=INSIDE, view=(False, True))
@on_ranks()
def test_zero_trains_as_the_optimizer_inside(here: Here, level: str, kind: str, view: bool) -> None:
    """Bit for bit, with a skipped step and a resume, with and without it; each rank holds a part of the state."""
    mine, theirs = (Zero(here, level, kind, zero, view) for zero in (True, False))
    for each in (mine, theirs):
        each.train(range(2))
    weights, state = copy.deepcopy(mine.net.state_dict()), mine.state()
    assert differences(state['state'], theirs.optimizer.state_dict()['state']) == []
    for each in (mine, theirs):
        each.train(range(2, 6))
    assert differences(dict(mine.net.state_dict()), dict(theirs.net.state_dict())) == []
    same_on_all_ranks(here, mine.net.parameters(), level)
    assert mine.elements() < 0.7 * theirs.elements()
    for zero in (True, False):
        again = Zero(here, level, kind, zero, view)
        again.net.load_state_dict(weights)
        again.optimizer.load_state_dict(copy.deepcopy(state))
        again.train(range(2, 6))
        assert differences(dict(again.net.state_dict()), dict(mine.net.state_dict())) == []


@on_ranks()
def test_zero_that_steps_inside_the_backward_pass_is_refused(here: Here) -> None:
    net = nn.Linear(4, 4).to(here.device)
    words = dict(optimizer_class=torch.optim.AdamW, overlap_with_ddp=True, lr=0.1)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), **words)
    with pytest.raises(AmpAttachError, match='overlap_with_ddp'):
        amp.initialize(net, optimizer, opt_level='O5', verbosity=0)
