"""Non-finite gradients: skipped steps, the counts of them, and the error after too many in a row."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from bits import differing
from torch.optim import Adam, AdamW
from toy_engine import Run, poisoned

from amp_wrapper.engine import Stage
from amp_wrapper.engine.clipping import GradientClip
from amp_wrapper.engine.overflow import what_to_try
from amp_wrapper.errors import OverflowStreakError
from amp_wrapper.policy import LEVELS, resolve

# -- a skipped step -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['fc.weight', 'bn.weight', 'out.bias'])
@pytest.mark.parametrize('which', [None, 0, 1])
@pytest.mark.parametrize('iteration', [0, 1, 3])
@pytest.mark.parametrize('level', LEVELS)
def test_inf_injection(level: str, iteration: int, which: int | None, name: str, device: torch.device) -> None:
    run = Run(level, device, num_losses=1 if which is None else 2, skip_nonfinite=True, verbosity=0)
    clip = GradientClip.parse({'max_norm': 1.0})
    for index in range(4):
        before = run.bits()
        scales = [scaler.get_scale() for scaler in run.engine.scalers]
        losses = run.losses(index)
        for loss_id in range(1 if which is None else 2):
            if index == iteration and loss_id == (which or 0):
                with poisoned(run.parameter(name), [math.inf, -math.inf, math.nan][index % 3]):
                    run.engine.backward(losses[loss_id], loss_id, retain_graph=True)
            else:
                run.engine.backward(losses[loss_id], loss_id, retain_graph=True)
        result = run.engine.step(clip)
        run.engine.zero_grad()
        assert result.skipped == (index == iteration)
        after = run.bits()
        if result.skipped:
            assert differing(before, after) == []
            assert result.grad_norm is None
            for loss_id, scaler in enumerate(run.engine.scalers):
                fell = scaler.is_dynamic and loss_id == (which or 0)
                assert scaler.get_scale() == scales[loss_id] * (0.5 if fell else 1.0)
        else:
            assert all(key in differing(before, after) for key in ('weight fc.weight', 'weight bn.weight'))
            assert [scaler.get_scale() for scaler in run.engine.scalers] == scales
            assert result.grad_norm is not None and math.isfinite(result.grad_norm.item())
    # steps are skipped for all losses, so every scaler counts alike
    for scaler in run.engine.scalers:
        assert scaler.counts.tolist() == [4, 1, int(iteration == 3)]


@pytest.mark.parametrize('level', LEVELS)
def test_a_skipped_step_is_as_if_the_batch_had_not_been(level: str, device: torch.device) -> None:
    with_it, without = (Run(level, device, loss_scale=8.0, skip_nonfinite=True, verbosity=0) for _ in range(2))
    with_it.train(0)
    with poisoned(with_it.parameter('fc.bias')):
        with_it.train(5)
    with_it.train(1, 2)
    without.train(0, 1, 2)
    assert differing(with_it.bits(), without.bits()) == []


def test_without_checking_non_finite_gradients_go_through(device: torch.device) -> None:
    run = Run('O5', device, skip_nonfinite=False)
    with poisoned(run.parameter('fc.bias')):
        run.train(0)
    assert not run.parameter('fc.bias').isfinite().all()


def test_a_skip_makes_no_optimizer_state(device: torch.device) -> None:
    run = Run('O2', device, lambda p: Adam(p, lr=0.1), verbosity=0)
    with poisoned(run.parameter('fc.bias')):
        run.train(0)
    assert len(run.optimizer.state) == 0


def test_a_parameter_without_a_gradient_gets_no_state(device: torch.device) -> None:
    run = Run('O2', device, lambda p: AdamW(p, lr=0.1, weight_decay=0.5))
    run.model.out.bias.requires_grad_(False)
    masters = list(run.engine.master_params())
    kept = masters[-1].clone()
    run.train(0, 1)
    assert masters[-1] not in run.optimizer.state and torch.equal(masters[-1], kept)
    assert len(run.optimizer.state) == 5


@pytest.mark.parametrize('level', ['O1', 'O2', 'O3', 'O5'])
def test_streak_of_skips_ends_in_an_error_that_names_parameters(level: str, device: torch.device) -> None:
    run = Run(level, device, max_consecutive_skips=3, verbosity=0)
    run.train(0)
    before = run.bits()
    with poisoned(run.parameter('fc.weight'), math.nan):
        run.train(1, 2)
        run.backward(3)
        with pytest.raises(OverflowStreakError) as caught:
            run.engine.step()
    text = str(caught.value)
    assert '3 optimizer steps in a row' in text and 'fc.weight' in text and 'out.weight' not in text
    assert 'max_consecutive_skips=3' in text and 'keep_fp32' in text
    assert differing(before, run.bits()) == [] and run.engine.stage is Stage.READY
    run.train(4)
    assert run.engine.scalers[0].counts.tolist() == [5, 3, 0]


@pytest.mark.parametrize('level', LEVELS)
def test_the_error_advises_what_changes_something_at_this_level(level: str, device: torch.device) -> None:
    run = Run(level, device, max_consecutive_skips=2, verbosity=0, skip_nonfinite=True)
    with poisoned(run.parameter('fc.weight'), math.nan):
        run.train(1)
        run.backward(2)
        with pytest.raises(OverflowStreakError) as caught:
            run.engine.step()
    text = str(caught.value)
    policy = resolve(level)
    is_float16 = torch.float16 in (policy.cast_model_type, policy.autocast_dtype)
    assert ('use bfloat16' in text) == is_float16
    assert ('bfloat16 has the range of FP32' in text) == (policy.runs_16_bit and not is_float16)
    assert ('keep_fp32' in text) == policy.runs_16_bit
    if is_float16:
        # what it advises is a configuration in bfloat16
        (setting,) = re.findall(r"\((\w+)='(\w+)'\)", text)
        changed = resolve(**{'opt_level': level, setting[0]: setting[1]})
        assert torch.bfloat16 in (changed.cast_model_type, changed.autocast_dtype)


def test_advice_about_the_loss_scale_is_for_a_large_static_one() -> None:
    for loss_scale, expected in ((1024.0, True), (1.0, False), ('dynamic', False)):
        found = what_to_try(resolve('O2', loss_scale=loss_scale))
        assert any('lower loss_scale' in text for text in found) == expected


@pytest.mark.parametrize('limit', [None, 4])
def test_clean_steps_break_a_streak(limit: int | None, device: torch.device) -> None:
    run = Run('O2', device, max_consecutive_skips=limit, verbosity=0)
    for _ in range(3):
        with poisoned(run.parameter('fc.weight')):
            run.train(0, 1, 2)
        run.train(3)
    assert run.engine.scalers[0].counts.tolist() == [12, 9, 0]


def skip_alternately(run: Run, steps: int) -> list[Any]:
    results = []
    for index in range(steps):
        losses = run.losses(index)
        for loss_id in (0, 1):
            if loss_id == index % 2:
                with poisoned(run.parameter('fc.weight')):
                    run.engine.backward(losses[loss_id], loss_id, retain_graph=True)
            else:
                run.engine.backward(losses[loss_id], loss_id, retain_graph=True)
        results.append(run.engine.step())
        run.engine.zero_grad()
    return results


def test_streak_counts_steps_whichever_loss_overflowed(device: torch.device) -> None:
    run = Run('O2', device, num_losses=2, max_consecutive_skips=4, verbosity=0)
    with pytest.raises(OverflowStreakError, match=r'fc\.weight'):
        skip_alternately(run, 6)


def test_result_counts_every_skipped_step(device: torch.device) -> None:
    run = Run('O2', device, num_losses=2, verbosity=0)
    results = skip_alternately(run, 4)
    assert all(result.skipped for result in results)
    assert [int(result.skips) for result in results] == [1, 2, 3, 4]


@pytest.mark.parametrize(('verbosity', 'lines'), [(0, 0), (1, 6), (2, 6)])
def test_skips_are_told_now_and_then(verbosity: int, lines: int, device: torch.device, log: list[str]) -> None:
    run = Run('O2', device, verbosity=verbosity)
    with poisoned(run.parameter('fc.weight')):
        run.train(*range(10))
    skips = [line for line in log if 'skipped' in line]
    # the first five, which a dynamic scale that begins too high takes, then at every doubling
    assert len(skips) == lines
    assert [line.split()[0] for line in skips] == ['INFO'] * min(lines, 5) + ['WARNING'] * (lines - 5)
    assert lines == 0 or 'loss scale now 32768' in skips[0]


def test_clip_error_on_a_non_finite_norm(device: torch.device) -> None:
    run = Run('O5', device)
    clip = GradientClip.parse({'max_norm': 1.0, 'error_if_nonfinite': True})
    before = run.bits()
    with poisoned(run.parameter('fc.weight')):
        run.backward()
    with pytest.raises(RuntimeError, match='non-finite'):
        run.engine.step(clip)
    assert differing(before, run.bits()) == []
