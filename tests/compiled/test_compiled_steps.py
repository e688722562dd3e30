"""Steps of compiled models: skipped ones, accumulation, writes to masters, averages, activation checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bits import differences
from grid import but, but_every, long
from torch.optim.swa_utils import AveragedModel
from toy_compiled import HALF, Net, batch, fresh, initialized, step

from amp_wrapper import amp

INSIDE_AND_OUTSIDE = ('after', 'function')


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        **{f'model.{name}': tensor.clone() for name, tensor in model.state_dict().items()},
        **{f'master.{place}': master.detach().clone() for place, master in enumerate(amp.master_params(optimizer))},
        **{
            f'momentum.{place}': state['momentum_buffer'].clone()
            for place, state in enumerate(optimizer.state.values())
            if state.get('momentum_buffer') is not None
        },
    }


@pytest.mark.parametrize(
    ('windows', 'level', 'way'),
    but_every(
        5,
        [(a, b, c) for a in (1, 3) for b in ('O1', 'O2', 'O3', 'O5') for c in (*INSIDE_AND_OUTSIDE, 'in place')],
        long,
    ),
)
def test_a_skipped_step_changes_nothing(windows: int, level: str, way: str, device: torch.device) -> None:
    """Weights, masters, momentum and the statistics of BatchNorm, wherever in the window the NaN comes."""
    torch.manual_seed(0)
    model = Net(level).to(device)
    with fresh():
        call, optimizer = initialized(model, way, level, loss_scale='dynamic' if level != 'O5' else 8.0)
        for bad in (None, 0, windows - 1, None):
            before = state_of(model, optimizer)
            step(call, optimizer, [batch(device, bad=place == bad) for place in range(windows)])
            changed = differences(before, state_of(model, optimizer))
            assert (changed == []) == (bad is not None), changed


@pytest.mark.parametrize('way', INSIDE_AND_OUTSIDE)
@pytest.mark.parametrize('level', but(['O2'], ['O2', 'O5'], long))
def test_what_is_written_to_masters_is_seen(level: str, way: str, device: torch.device) -> None:
    """SAM, schedulefree and others write to ``optimizer.param_groups`` between two calls; also before an evaluation."""
    torch.manual_seed(0)
    model = Net(level).to(device)
    with fresh():
        call, optimizer = initialized(model, way, level)
        x, labels = batch(device)
        step(call, optimizer, [(x, labels)])
        model.eval()
        with torch.no_grad():
            before = call(x)
            for master in amp.master_params(optimizer):
                master.mul_(0.5)
            after = call(x)
            expected = model(x)
        assert not torch.equal(before, after)
        assert torch.allclose(after, expected, rtol=0.05, atol=8 * torch.finfo(HALF[level]).eps)
        model.train()
        with torch.no_grad():
            for master in amp.master_params(optimizer):
                master.zero_()
        call(x, labels)
        assert all(not weight.any() for weight in model.parameters())


@pytest.mark.parametrize(
    ('level', 'kind', 'way'),
    but_every(
        5, [(a, b, c) for a in ('O1', 'O4', 'O5') for b in (True, False, 'selective') for c in INSIDE_AND_OUTSIDE], long
    ),
)
def test_checkpointed_segments(level: str, kind: Any, way: str, device: torch.device) -> None:
    """The probes inside of the segment assert its types; dropout is the same when it runs again."""
    results = []
    for chosen in (None, kind):
        torch.manual_seed(0)
        model = Net(level, chosen, dropout=0.5).to(device)
        model.selects = chosen == 'selective'
        with fresh() as counters:
            call, optimizer = initialized(model, way, level)
            torch.manual_seed(1)
            data = [batch(device) for _ in range(3)]
            torch.manual_seed(2)
            results.append([step(call, optimizer, [each]).item() for each in data])
            assert not counters['graph_break']
    assert results[0] == pytest.approx(results[1], rel=8 * torch.finfo(HALF[level]).eps)


@pytest.mark.parametrize('way', INSIDE_AND_OUTSIDE)
def test_averages_see_masters(way: str, device: torch.device) -> None:
    torch.manual_seed(0)
    # an average is an FP32 model, whose types are not those of the level
    model = Net(None).to(device)
    with fresh():
        call, optimizer = initialized(model, way, 'O5')
        average = AveragedModel(model)
        for _ in range(3):
            step(call, optimizer, [batch(device)])
            average.update_parameters(model)
        mean = dict(average.module.named_parameters())['head.weight']
        assert mean.dtype is torch.float32
        assert not torch.equal(mean, mean.bfloat16().float())
        assert torch.isfinite(average.module(batch(device)[0])).all()


@pytest.mark.parametrize('backend', ['aot_eager', pytest.param('inductor', marks=long)])
@pytest.mark.parametrize(
    ('level', 'way'), but_every(3, [(a, b) for a in ('O1', 'O2', 'O4', 'O5') for b in INSIDE_AND_OUTSIDE], long)
)
def test_resumed_equals_uninterrupted(level: str, way: str, backend: str, device: torch.device) -> None:
    """Bit for bit: a compiled run that is saved and goes on in new objects, with a scale that moves and a skipped step."""

    def begin() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = Net(level, dropout=0.1).to(device)
        call, optimizer = initialized(model, way, level, backend)
        return model, call, optimizer

    def run(call: Any, optimizer: Any, numbers: range) -> None:
        for number in numbers:
            torch.manual_seed(100 + number)
            step(call, optimizer, [batch(device, bad=number == 3)])

    with fresh():
        model, call, optimizer = begin()
        run(call, optimizer, range(4))
        saved = [copied(part.state_dict()) for part in (model, optimizer, amp)]
        run(call, optimizer, range(4, 7))
        expected = state_of(model, optimizer)
    with fresh():
        model, call, optimizer = begin()
        for part, state in zip((model, optimizer, amp), saved):
            part.load_state_dict(state)
        run(call, optimizer, range(4, 7))
        assert differences(expected, state_of(model, optimizer)) == []


def copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return [copied(value) for value in state] if isinstance(state, list) else state
