"""The numbers of ``amp.monitor``, and the ranges per layer in its file, against the same ones computed plainly in float64."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from op_lists import NoHostRead
from torch import Tensor, nn

from amp_wrapper import FusedAdamW, amp

HALF = {'O1': torch.float16, 'O2': torch.float16, 'O3': torch.float16, 'O4': torch.bfloat16, 'O5': torch.bfloat16}


def start(level: str, device: torch.device, kind: Any = torch.optim.SGD, **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3)).to(device)
    return amp.initialize(model, kind(model.parameters(), lr=1e-3), opt_level=level, verbosity=0, **options)


def backward(model: nn.Module, optimizer: Any, step: int, factor: float = 1.0) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).device)
    optimizer.zero_grad()
    with amp.scale_loss(model(x).float().square().mean() * 1e-3 * factor, optimizer) as scaled:
        scaled.backward()


def cast_tensors(model: nn.Module, optimizer: Any, level: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients without the loss scale, and weights, of those that compute in the 16-bit type; in float64."""
    names = dict(model.named_parameters())
    casts = level in ('O2', 'O3', 'O5')
    chosen = [name for name, p in names.items() if not casts or p.dtype is HALF[level]]
    masters = dict(zip(names, amp.master_params(optimizer)))
    gradients = {name: masters[name].grad.double() for name in chosen}
    return gradients, {name: names[name].detach().double() for name in chosen}


@pytest.mark.parametrize('level', ['O1', 'O2', 'O5'])
def test_peaks_and_ranges_per_layer(level: str, device: torch.device, tmp_path: Path) -> None:
    model, optimizer = start(level, device)
    wanted, peaks = [], []
    with amp.monitor(optimizer, 1, folder=tmp_path, ranges_interval=2) as watch:
        for step in range(3):
            backward(model, optimizer, step)
            scale = amp.loss_scale(optimizer)
            gradients, weights = cast_tensors(model, optimizer, level)
            wanted.append((scale, gradients, weights))
            end = torch.finfo(HALF[level]).max
            largest = [max(float(each.abs().max()) for each in kind.values()) for kind in (gradients, weights)]
            peaks.append([math.log2(largest[0] * scale / end), math.log2(largest[1] / end)])
            optimizer.step()
            numbers = watch.read()
            assert [numbers['amp_grad_peak'], numbers['amp_weight_peak']] == pytest.approx(peaks[-1], rel=1e-6)
            assert numbers['amp_scale'] == scale
    lines = [json.loads(line) for line in (tmp_path / 'amp_ranges.jsonl').read_text().splitlines()]
    assert [line['iteration'] for line in lines] == [1, 2]
    for line, (scale, *kinds) in zip(lines, wanted):
        assert (line['dtype'], line['loss_scale']) == (str(HALF[level]).removeprefix('torch.'), scale)
        for kind, expected in zip(('gradients', 'weights'), kinds):
            factor = 1.0 if kind == 'weights' or line['without_scale'] else scale
            assert list(line[kind]) == list(expected)
            for name, values in expected.items():
                check_ranges(line[kind][name], values * factor)


def check_ranges(found: dict[str, Any], values: Tensor) -> None:
    finite = values[values.isfinite() & (values != 0)].abs()
    powers = Counter(map(str, finite.log2().floor().int().tolist()))
    assert found['powers'] == powers and found['largest'] == float(finite.max() if len(finite) else 0.0)
    counts = {
        'elements': values.numel(),
        'zeros': int((values == 0).sum()),
        'nonfinite': int((~values.isfinite()).sum()),
    }
    assert {name: found[name] for name in counts} == counts


def test_nothing_is_measured_in_fp32(device: torch.device, tmp_path: Path) -> None:
    model, optimizer = start('O0', device)
    with amp.monitor(optimizer, 1, folder=tmp_path, ranges_interval=1) as watch:
        backward(model, optimizer, 0)
        optimizer.step()
        assert not [name for name in watch.read() if 'peak' in name]
    assert not (tmp_path / 'amp_ranges.jsonl').exists()


def test_measuring_does_not_read_the_device(device: torch.device) -> None:
    model, optimizer = start('O2', device, FusedAdamW, loss_scale=128.0)
    with amp.monitor(optimizer, 1, diagnose_overflow=False):
        backward(model, optimizer, 0)
        optimizer.step()
        backward(model, optimizer, 1)
        with NoHostRead():
            optimizer.step()
