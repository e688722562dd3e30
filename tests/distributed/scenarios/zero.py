"""``ZeroRedundancyOptimizer`` under DistributedDataParallel: each rank has the moments of a part of the parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bits import differences
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.optim import Optimizer

from amp_wrapper import AmpAttachError, FusedAdamW, FusedSGD, amp
from scenarios.common import Here, same_on_all_ranks, scenario
from scenarios.fsdp import Net, data, ddp_of

KINDS: tuple[tuple[type[Optimizer], dict[str, Any]], ...] = (
    (torch.optim.AdamW, dict(lr=0.01, eps=1e-4)),
    (FusedAdamW, dict(lr=0.01, eps=1e-4)),
    (torch.optim.SGD, dict(lr=0.1, momentum=0.9)),
    (FusedSGD, dict(lr=0.1, momentum=0.9)),
)


def make(here: Here, level: str, kind: type[Optimizer], words: dict[str, Any], zero: bool) -> tuple[Any, Any]:
    net = Net().to(here.device)
    if zero:
        optimizer: Any = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=kind, **words)
    else:
        kept = {key: value for key, value in words.items() if key != 'parameters_as_bucket_view'}
        optimizer = kind(net.parameters(), **kept)  # type: ignore[call-arg]
    scale = 1024.0 if level in ('O1', 'O2') else None
    amp.initialize(net, optimizer, opt_level=level, verbosity=0, loss_scale=scale)
    return ddp_of(here, net), optimizer


def steps(here: Here, ddp: nn.Module, optimizer: Any, which: range, bad: tuple[int, int] | None = None) -> None:
    for step in which:
        x, y = data(here, step)
        if bad == (step, here.rank):
            x = x * torch.inf
        with amp.scale_loss(F.cross_entropy(ddp(x), y), optimizer) as loss:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def moments(optimizer: Any) -> int:
    """Elements of the state on this rank."""
    inner = getattr(optimizer, 'optim', optimizer)
    return sum(v.numel() for state in inner.state.values() for v in state.values() if isinstance(v, Tensor))


def saved(optimizer: Any) -> dict[str, Any]:
    """The whole state, on every rank."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
        box = [copy.deepcopy(optimizer.state_dict()) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(box, src=0)
        assert box[0] is not None
        return box[0]
    return copy.deepcopy(optimizer.state_dict())


@scenario
def zero(here: Here) -> None:
    """The bits of the optimizer inside, skipped steps and resumes among them; a part of the state on each rank."""
    quick = 'quick' in here.words
    for level in ('O2', 'O4') if quick else ('O0', 'O1', 'O2', 'O4', 'O5'):
        for kind, words in KINDS[1:3] if quick else KINDS:
            for view in (True,) if quick or level not in ('O2', 'O4') else (False, True):
                bad = None if level == 'O0' else (3, 1)
                words = {**words, 'parameters_as_bucket_view': view}
                mine, theirs = (make(here, level, kind, words, zero=yes) for yes in (True, False))
                for each in (mine, theirs):
                    steps(here, *each, range(2))
                weights, state = copy.deepcopy(mine[0].state_dict()), saved(mine[1])
                assert differences(state['state'], theirs[1].state_dict()['state']) == [], (level, kind.__name__)
                for each in (mine, theirs):
                    steps(here, *each, range(2, 6), bad)
                what = (level, kind.__name__, view)
                assert differences(mine[0].state_dict(), theirs[0].state_dict()) == [], what
                same_on_all_ranks(here, list(mine[0].parameters()), level)
                assert moments(mine[1]) < 0.6 * moments(theirs[1]), what
                for yes in (True, False):
                    again = make(here, level, kind, words, zero=yes)
                    again[0].load_state_dict(weights)
                    again[1].load_state_dict(copy.deepcopy(state))
                    steps(here, *again, range(2, 6), bad)
                    # BatchNorm's statistics are those of rank 0 in a file, and here those of each
                    assert differences(again[0].state_dict(), mine[0].state_dict()) == [], (*what, yes)


@scenario
def zero_refusals(here: Here) -> None:
    """It must not step inside of the backward pass."""
    net = Net().to(here.device)
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), optimizer_class=torch.optim.AdamW, overlap_with_ddp=True, lr=0.1
    )
    with pytest.raises(AmpAttachError, match='leave overlap_with_ddp out'):
        amp.initialize(net, optimizer, opt_level='O5', verbosity=0)
