"""Compiled models under DDP: inside of it, around it, and a function around both."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from toy_compiled import Net, batch

from amp_wrapper import amp

from .common import Here, scenario

# DDP's own code breaks the graph of what is around it
WORDS: dict[str, Any] = dict(backend='aot_eager', fullgraph=False)


def _losses(here: Here, level: str, way: str) -> tuple[list[float], torch.Tensor]:
    torch.manual_seed(0)
    model = Net(level).to(here.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if way == 'inside':
        model.compile(**WORDS)
    ddp = DistributedDataParallel(model)
    call: Any = ddp
    if way == 'around':
        call = torch.compile(ddp, **WORDS)
    elif way == 'function':
        call = torch.compile(lambda x, labels: ddp(x, labels) * 1, **WORDS)
    torch.manual_seed(10 + here.rank)
    found = []
    for number in range(5):
        # a window of two with one exchange, and NaN on one rank alone
        passes = 2 if number == 3 else 1
        for place in range(passes):
            with ddp.no_sync() if place + 1 < passes else nullcontext():
                loss = call(*batch(here.device, bad=number == 2 and here.rank == 1))
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert torch.isfinite(model.norm.running_mean).all()
    return found, torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])


@scenario
def compiled(here: Here) -> None:
    """Ranks agree bit for bit, skip together, and follow eager training."""
    torch.use_deterministic_algorithms(False)
    for level in here.words:
        expected, _ = _losses(here, level, 'eager')
        for way in ('inside', 'around', 'function'):
            torch.compiler.reset()
            losses, weights = _losses(here, level, way)
            everywhere = [torch.zeros_like(weights) for _ in range(2)]
            torch.distributed.all_gather(everywhere, weights)
            assert torch.equal(*everywhere), (level, way)
            for loss, other in zip(losses, expected):
                assert loss == other or loss != loss or abs(loss - other) < 0.02 * abs(other), (
                    level,
                    way,
                    losses,
                    expected,
                )
