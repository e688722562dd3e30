"""Models of the projects under ``torch.compile``: the losses of eager training, and the graph breaks of plain autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo
from conftest import skip_without_ops
from mmengine.optim import OptimWrapper
from torch import nn
from zoo import BY_NAME, build_model, make_batch

from amp_wrapper import AmpOptimWrapper

CASES = [(name, level) for name in ('ResNet-18', 'Swin', 'ViT') for level in ('O2', 'O4', 'O5')] + [
    (name, level) for name in ('RetinaNet', 'FCOS', 'DETR') for level in ('O4', 'O5')
]
#: How far the losses of three steps may be from those of eager training, as a part of them.
BOUND = 0.01


class Autocast(OptimWrapper):
    """mmengine's wrapper for AMP asks for a GPU."""

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        with super().optim_context(model), torch.autocast('cpu', dtype=torch.bfloat16):
            yield


def train(name: str, level: str | None, compiles: bool) -> tuple[list[float], int]:
    """Losses of three steps, and the graph breaks."""
    case = BY_NAME[name]
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = build_model(case).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    wrapper: Any = Autocast(optimizer=optimizer)
    if level is not None:
        scale = dict(init_scale=1024.0) if level == 'O2' else None
        wrapper = AmpOptimWrapper(opt_level=level, optimizer=optimizer, loss_scale=scale, verbosity=0)
    wrapper.initialize_count_status(model, 0, 10)
    if compiles:
        model.compile(backend='aot_eager')
    losses = []
    for seed in range(3):
        torch.manual_seed(seed)
        losses.append(float(model.train_step(make_batch(case, seed=seed), wrapper)['loss']))
    try:
        return losses, sum(torch._dynamo.utils.counters['graph_break'].values())
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize(('name', 'level'), CASES)
def test_compiled(name: str, level: str) -> None:
    skip_without_ops(BY_NAME[name].project)
    losses, breaks = train(name, level, True)
    expected, none = train(name, level, False)
    assert none == 0
    assert losses == pytest.approx(expected, rel=BOUND)
    assert breaks <= train(name, None, True)[1]
