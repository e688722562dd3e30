"""Sums of several backward passes: what 16-bit sums lose, what FP32 sums keep, and where they lie."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from bits import differences
from torch import Tensor, nn

from amp_wrapper import AmpConfigError, AmpOptimWrapper

WIDE = dict(accumulate_in_fp32=True)


def wrapped(model: nn.Module, level: str, counts: int, lr: float = 1.0, **words: Any) -> AmpOptimWrapper:
    wrapper = AmpOptimWrapper(
        opt_level=level,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        accumulative_counts=counts,
        **{'loss_scale': 1.0, **words},
    )
    wrapper.initialize_count_status(model, 0, 10 * counts)
    return wrapper


@pytest.mark.parametrize('level', ['O2', 'O3', 'O5'])
def test_small_gradients_are_swamped_in_16_bit_and_not_in_fp32(level: str, device: torch.device) -> None:
    """One gradient of 1 and 255 of 1/1024: bfloat16 and float16 hold the sum at about 1."""
    moved = {}
    for wide in (False, True):
        model = nn.Linear(1, 1, bias=False).to(device)
        with torch.no_grad():
            model.weight.fill_(4.0)
        wrapper = wrapped(model, level, 256, accumulate_in_fp32=wide)
        for step in range(256):
            with wrapper.optim_context(model):
                # times 256: the division by the accumulation's length is undone
                loss = model(torch.full((1, 1), 1.0 if step == 0 else 2.0**-10, device=device)).sum() * 256
            wrapper.backward(wrapper.scale_loss(loss))
        weight = next(iter(wrapper.master_params()))
        before = weight.detach().clone()
        wrapper.step()
        moved[wide] = float(before - weight.detach())
    exact = 1 + 255 / 1024
    step_of = {'O2': 2.0**-23, 'O3': 2.0**-8, 'O5': 2.0**-23}[level]
    assert abs(moved[True] - exact) <= 4 * step_of
    lost = exact - moved[False]
    assert lost == pytest.approx(255 / 1024) if level == 'O5' else lost < 4 * 2.0**-8


@pytest.mark.parametrize('level', ['O2', 'O3', 'O5'])
def test_between_two_backward_passes_there_is_one_fp32_sum_and_no_gradient(level: str, device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(device)
    wrapper = wrapped(model, level, 3, **WIDE)
    for _ in range(2):
        with wrapper.optim_context(model):
            loss = model(torch.randn(4, 8, device=device)).square().sum()
        wrapper.update_params(loss)
    kept = model[1].weight.dtype == torch.float32
    assert model[0].weight.grad is None
    assert (model[1].weight.grad is not None) == kept
    sums = wrapper._engine.parts.gradients.sums
    assert sums is not None and len(sums) == (2 if kept else 4)
    assert sums.get(model[0].weight).dtype == torch.float32 and sums.get(model[0].weight).shape == (8, 8)
    with wrapper.optim_context(model):
        loss = model(torch.randn(4, 8, device=device)).square().sum()
    wrapper.update_params(loss)
    assert len(sums) == 0 and not wrapper.in_window
    assert all(p.grad is None for p in (*model.parameters(), *wrapper.master_params()))


def test_levels_whose_gradients_are_fp32_take_the_option_and_change_nothing(device: torch.device) -> None:
    for level in ('O0', 'O1', 'O4'):
        ends = []
        for wide in (False, True):
            torch.manual_seed(0)
            model = toy.ToyModel().to(device)
            wrapper = wrapped(model, level, 2, lr=0.1, accumulate_in_fp32=wide)
            data = toy.ToyData()
            for _ in range(4):
                model.train_step(dict(inputs=data.images, labels=data.labels), wrapper)
            ends.append(model.state_dict())
        assert differences(*ends) == []


@pytest.mark.parametrize('level', ['O2', 'O3', 'O5'])
def test_sparse_gradients_are_summed_too(level: str, device: torch.device) -> None:
    if device.type == 'cpu' and level != 'O5':
        pytest.skip('torch has no sparse float16 embedding gradients on a CPU')
    ends = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Embedding(6, 4, sparse=sparse).to(device)
        wrapper = wrapped(model, level, 3, **WIDE)
        for rows in ([0, 0, 1], [1, 2], [5, 5]):
            with wrapper.optim_context(model):
                loss = model(torch.tensor(rows, device=device)).sum()
            wrapper.update_params(loss)
        ends.append([p.detach().clone() for p in wrapper.master_params()])
    assert differences(*ends) == []


@pytest.mark.parametrize('wide', [False, True])
@pytest.mark.parametrize('level', ['O2', 'O3', 'O5'])
def test_accumulated_gradients_go_into_a_file_and_come_back(level: str, wide: bool, device: torch.device) -> None:
    """Sums unrounded: the step that closes the accumulation is the same bit for bit."""

    def micro(model: nn.Module, wrapper: AmpOptimWrapper, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(4, 8, generator=generator).to(device)
        with wrapper.optim_context(model):
            loss = model(inputs).square().sum()
        wrapper.update_params(loss)

    def fresh() -> tuple[nn.Module, AmpOptimWrapper]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, AmpOptimWrapper(
            opt_level=level, optimizer=optimizer, accumulative_counts=4, accumulate_in_fp32=wide, loss_scale=256.0
        )

    model, wrapper = fresh()
    for step in range(6):
        micro(model, wrapper, step)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(wrapper.state_dict())
    kinds = {g.dtype for g in state['amp']['window']['gradients']}
    half = toy.HALF[level]
    expected = {half} if level == 'O3' else {half, torch.float32}
    assert kinds == ({torch.float32} if wide else expected)
    for attach_first in (False, True):
        other, resumed = fresh()
        if attach_first:
            resumed.attach(other)
        other.load_state_dict(weights)
        resumed.load_state_dict(copy.deepcopy(state))
        for step in range(6, 8):
            micro(other, resumed, step)
        if not attach_first:
            for step in range(6, 8):
                micro(model, wrapper, step)
        assert differences(model.state_dict(), other.state_dict()) == []
        assert differences(list(wrapper.master_params()), list(resumed.master_params())) == []
    # an accumulation of the other kind means something else: it is left out, and the log says so
    _, other_kind = fresh()
    words = dict(opt_level=level, optimizer=other_kind.optimizer, accumulative_counts=4, loss_scale=256.0)
    other_kind = AmpOptimWrapper(**words, accumulate_in_fp32=not wide)
    with toy.captured_log() as lines:
        other_kind.load_state_dict(state)
    assert any('unfinished accumulation, which belong to another configuration' in line for line in lines)


def test_files_from_before_the_option_resume_with_their_gradients(device: torch.device) -> None:
    model = nn.Linear(4, 4).to(device)
    wrapper = wrapped(model, 'O2', 2)
    with wrapper.optim_context(model):
        loss = model(torch.ones(1, 4, device=device)).sum()
    wrapper.update_params(loss)
    state = wrapper.state_dict()
    del state['amp']['properties']['accumulate_in_fp32']
    with toy.captured_log() as lines:
        wrapper.load_state_dict(state)
    assert any('are back' in line for line in lines) and wrapper.in_window


def test_an_overflow_in_an_early_micro_batch_skips_the_step(device: torch.device) -> None:
    model = nn.Linear(4, 4).to(device)
    wrapper = wrapped(model, 'O2', 3, loss_scale=dict(init_scale=8.0), **WIDE)
    start = model.weight.detach().clone()
    for step in range(3):
        with wrapper.optim_context(model):
            loss = model(torch.ones(1, 4, device=device)).sum() * (float('inf') if step == 0 else 1.0)
        wrapper.update_params(loss)
    assert wrapper.loss_scaler.counts.tolist() == [1, 1, 1] and wrapper.loss_scaler.get_scale() == 4.0
    assert model.weight.equal(start)


def test_a_sum_that_float16_cannot_hold_is_no_overflow(device: torch.device) -> None:
    """Two gradients of 40,000 in FP32; in float16 they are infinite together."""
    for wide in (False, True):
        model = nn.Linear(1, 1, bias=False).to(device)
        wrapper = wrapped(model, 'O2', 2, lr=1e-6, loss_scale=dict(init_scale=1.0), accumulate_in_fp32=wide)
        for _ in range(2):
            with wrapper.optim_context(model):
                loss = model(torch.full((1, 1), 40000.0, device=device)).sum() * 2
            wrapper.update_params(loss)
        assert wrapper.loss_scaler.counts.tolist()[1] == (0 if wide else 1)


def test_clearing_during_accumulation_forgets_the_sums(device: torch.device) -> None:
    ends = []
    for cleared in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 4).to(device)
        wrapper = wrapped(model, 'O5', 1, **WIDE)
        if cleared:
            with wrapper.optim_context(model):
                loss = model(torch.randn(2, 4, device=device)).sum()
            wrapper.backward(loss)
            wrapper.zero_grad()
        with wrapper.optim_context(model):
            loss = model(torch.ones(2, 4, device=device)).sum()
        wrapper.update_params(loss)
        ends.append(model.state_dict())
    assert differences(*ends) == []


@pytest.mark.parametrize('wide', [False, True])
def test_hidden_edits_of_weights_with_gradients_are_treated_alike(wide: bool, device: torch.device) -> None:
    """Only weights without a gradient follow edits through ``.data`` by themselves; a sum is a gradient."""
    model = nn.Linear(4, 4).to(device)
    wrapper = wrapped(model, 'O2', 1, lr=0.0, accumulate_in_fp32=wide)
    with wrapper.optim_context(model):
        loss = model(torch.ones(1, 4, device=device)).sum()
    wrapper.backward(loss)
    start = model.weight.detach().clone()
    model.weight.data.fill_(3.0)
    wrapper.step()
    assert model.weight.equal(start)


def test_what_the_option_may_be() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(AmpConfigError, match='accumulate_in_fp32=1 must be True or False'):
        AmpOptimWrapper(optimizer=optimizer, accumulate_in_fp32=1)
    with pytest.raises(AmpConfigError, match='accumulate_in_fp32=True conflicts with num_losses=2'):
        AmpOptimWrapper(optimizer=optimizer, opt_level='O3', num_losses=2, **WIDE)
    # with masters, several losses meet in FP32 anyway
    assert (
        AmpOptimWrapper(optimizer=optimizer, opt_level='O2', num_losses=2, **WIDE)._engine.parts.gradients.sums is None
    )
    assert 'sums in FP32' in AmpOptimWrapper(optimizer=optimizer, opt_level='O2', **WIDE).policy.describe()


def test_whole_runs_resume_bit_for_bit(tmp_path: Path) -> None:
    """Accumulations that stay open at the end of an epoch, and a remainder at the end of the training."""
    case = toy.everything('O5', max_epochs=3)
    case['optim_wrapper'].update(accumulative_counts=4, accumulate_in_fp32=True)
    toy.run(tmp_path / 'whole', **case)
    with pytest.raises(toy.Stop):
        toy.run(tmp_path / 'part', **{**case, 'custom_hooks': [*case['custom_hooks'], dict(type='StopAt', iters=10)]})
    toy.run(tmp_path / 'part', **{**case, 'resume': True})
    whole, part = (toy.checkpoint(tmp_path / name) for name in ('whole', 'part'))
    for key in ('state_dict', 'ema_state_dict', 'optimizer'):
        assert differences(whole[key], part[key]) == []
    assert isinstance(whole['state_dict']['fc.weight'], Tensor)
