"""Whole training steps as ``torch.cuda.graph`` takes them, on a processor without a GPU: captured once, and run again.

A graph shows what the host reads, and which memory has to stay, only on a GPU. So the operations of one step are noted, and
run again on the same memory, for which a few functions inside the package are replaced (``captured.py``).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bits import differing
from captured import captured
from pairs import pairs
from torch import Tensor
from toy_training import LEVELS, SCALED, Net, Training, batch

from amp_wrapper import FusedAdamW, FusedSGD

OPTIMIZERS: dict[str, Any] = {
    'FusedAdamW': lambda p: FusedAdamW(p, lr=0.01),
    'FusedSGD': lambda p: FusedSGD(p, lr=0.01, momentum=0.9),
    'AdamW of torch': lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    'a rate on the device': lambda p: FusedAdamW(p, lr=torch.tensor(0.01)),
}


def play(level: str, door: str, make: Any, clip: float | None, captures: bool) -> dict[str, Tensor]:
    """The state after all batches: the first two steps as they are, the third captured, the others replayed."""
    words: dict[str, Any] = dict(loss_scale=dict(init_scale=256.0, growth_interval=2) if level in SCALED else None)
    if door == 'wrapper':
        words |= dict(skip_nonfinite=True, clip_grad=clip and dict(max_norm=clip))
    torch.manual_seed(0)
    run = Training(level, door, make, Net(), **words)
    x, rate = torch.zeros(8, 4), run.optimizer.param_groups[0]['lr']
    graph: Any = None
    for index in range(9):
        # one overflows in 16-bit, and one has NaN
        x.copy_(batch(index)[0] * {4: 1e30, 6: float('nan')}.get(index, 1.0))
        if isinstance(rate, Tensor):
            # a schedule that writes to where the graph reads
            rate.fill_(0.01 / (1 + index))
        if graph is not None:
            graph.replay()
            continue
        with captured() if captures and index == 2 else torch.enable_grad() as found:
            run.backward(run.forward(x).float().square().mean())
            run.step()
            run.clear()
        graph = found
    return run.bits(buffers=True)


@pairs(level=LEVELS, name=OPTIMIZERS, door=('wrapper', 'amp'), clip=(None, 0.05))
def test_replayed_steps_are_those_of_eager_training(level: str, name: str, door: str, clip: float | None) -> None:
    """Bit for bit: dynamic scales, skips, clipping, statistics that are restored, a schedule on the device."""
    eager, replayed = (play(level, door, OPTIMIZERS[name], clip, captures) for captures in (False, True))
    assert differing(eager, replayed) == []


def test_an_optimizer_that_waits_for_the_host_is_noticed() -> None:
    with pytest.raises(AssertionError, match='the host reads the device'):
        play('O2', 'wrapper', lambda p: torch.optim.SGD(p, lr=0.01, foreach=True), None, True)
