"""Which level is taken of what was measured, and the reasons against the others."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from amp_wrapper.diagnostics.deviations import Deviation, Distance, ModuleDeviation
from amp_wrapper.diagnostics.level_study import Study, spread
from amp_wrapper.diagnostics.level_verdicts import (
    LevelFacts,
    Limits,
    Reason,
    choose,
    compare_runs,
    difference,
    judge,
    percent,
)
from amp_wrapper.diagnostics.memory import MemoryCount
from amp_wrapper.diagnostics.side_by_side import LevelRun
from amp_wrapper.diagnostics.suggestion_text import UNSTEADY, notes, reason
from amp_wrapper.policy import LEVELS, resolve

LIMITS = Limits(gradient_noise=1.0, loss_noise=0.01, first_loss=2.0)
CPU = torch.device('cpu')


def run(seconds: float = 1.0, size: int = 100, losses: tuple[float, ...] = (2.0, 1.5), **more: Any) -> LevelRun:
    memory = MemoryCount(size, 0, 0, 0, 0, 0)
    return LevelRun('', dict.fromkeys(range(3), seconds), list(losses), list(losses), memory=memory, done=True, **more)


def facts(level: str, prefer: str = 'memory', lost: float = 0.0, **words: Any) -> LevelFacts:
    found = LevelFacts(level, resolve(level), run=run(**words))
    compare_runs(found, run())
    judge(found, LIMITS, {'float16': lost, 'bfloat16': lost}, prefer, CPU)
    return found


def chosen(facts: list[LevelFacts], prefer: str = 'memory', allowed: tuple[str, ...] = LEVELS) -> str | None:
    found = choose(facts, prefer, allowed)
    return None if found is None else found.level


@pytest.mark.parametrize('apart', [0.9, 1.1])
def test_unsteady_times_are_told(apart: float) -> None:
    """The distance of the quartiles of the ratios to FP32, over their median; batches of different sizes do not matter."""
    study = Study(CPU, LEVELS, 'speed', 5, 0, 1, 'SGD', 0, {})
    width = apart * UNSTEADY
    sizes = [1.0, 7.0, 2.0, 30.0, 5.0]
    ratios = [2.0 * (1 + width * place) for place in (-1, -0.5, 0, 0.5, 1)]
    study.runs['O0'] = dataclasses.replace(run(), seconds=dict(enumerate(sizes)))
    times = dict(enumerate(size * ratio for size, ratio in zip(sizes, ratios)))
    study.runs['O2'] = dataclasses.replace(run(), seconds=times)
    study.side_by_side = True
    assert spread(study.runs['O2'], study.runs['O0']) == pytest.approx(width)
    assert any('times are unsteady' in line for line in notes(study)) == (apart > 1)
    assert math.isnan(spread(dataclasses.replace(run(), seconds={}), study.runs['O0']))


def test_the_one_that_takes_least() -> None:
    tried = [facts('O0'), facts('O2', size=80, seconds=0.5), facts('O5', size=60, seconds=0.9)]
    assert chosen(tried) == 'O5'
    assert chosen(tried, 'speed') == 'O2'


def test_what_gains_less_than_a_tenth_is_not_worth_it() -> None:
    tried = [facts('O0'), facts('O5', size=95)]
    assert chosen(tried) == 'O0'
    # unless FP32 was not asked for
    assert chosen(tried, allowed=('O5',)) == 'O5'


def test_of_equals_the_one_without_a_loss_scale() -> None:
    tried = [facts('O0'), *(facts(level, size=60) for level in ('O1', 'O2', 'O4', 'O5'))]
    assert chosen(tried) == 'O5'
    assert chosen(tried, allowed=('O0', 'O1', 'O2', 'O4')) == 'O2'
    assert chosen([facts('O0'), facts('O5', size=66), facts('O2', size=56)]) == 'O2'


def test_of_equals_the_accurate_one_and_then_the_one_without_kept_modules() -> None:
    plain, kept = facts('O5', size=60), facts('O5', size=62)
    kept.keep_fp32 = ('head',)
    assert choose([facts('O0'), kept, plain], 'memory', LEVELS) is plain
    plain.accurate = False
    assert choose([facts('O0'), kept, plain], 'memory', LEVELS) is kept
    # what keeping modules could not make accurate is still better than without
    kept.accurate = False
    assert choose([facts('O0'), kept, plain], 'memory', LEVELS) is kept
    other = facts('O2', size=62)
    assert choose([facts('O0'), kept, plain, other], 'memory', LEVELS) is other


def with_error(level: str, error: float) -> LevelFacts:
    own = Distance(error**2, 1.0, 1.0, 1.0)
    module = ModuleDeviation('fc', 'Linear', gradient=own)
    found = LevelFacts(level, resolve(level), run=run())
    found.deviation = Deviation(0.0, {'fc': module}, None, 1.0, True, {'fc': module})
    compare_runs(found, run())
    judge(found, dataclasses.replace(LIMITS, sensitivity={'bfloat16': 0.15}), {}, 'memory', CPU)
    return found


def test_gradients_are_compared_with_another_batch_and_with_rounded_weights() -> None:
    assert with_error('O2', 0.09).accurate
    assert not with_error('O2', 0.12).accurate
    assert with_error('O2', 0.12).suits
    assert (
        'gradients are 12 % off FP32, more than the limit of 10 %: compare the accuracy'
        in with_error('O2', 0.12).remarks
    )
    assert [reason.kind for reason in with_error('O2', 0.6).reasons] == ['gradients']
    # a model that is as sensitive in FP32
    assert with_error('O5', 0.14).accurate
    assert with_error('O5', 0.6).suits
    assert [reason.kind for reason in with_error('O5', 0.8).reasons] == ['gradients']


def test_o3_is_the_last_resort() -> None:
    assert chosen([facts('O0'), facts('O3', size=40), facts('O5', size=60)]) == 'O5'
    assert chosen([facts('O0'), facts('O3', size=40)]) == 'O3'
    assert chosen([facts('O0'), facts('O3', size=40, lost=0.02)]) == 'O0'


def test_what_does_not_suit_is_not_taken() -> None:
    off = facts('O5', size=60, losses=(2.0, 1.0))
    assert [reason.kind for reason in off.reasons] == ['loss']
    assert chosen([facts('O0'), off, facts('O4', size=70)]) == 'O4'
    assert chosen([facts('O0'), off]) == 'O0'
    assert chosen([off]) is None


def test_levels_that_are_slower_than_fp32() -> None:
    slow = facts('O5', prefer='speed', seconds=1.5)
    assert [(reason.kind, 'on this device (cpu)' in reason.text) for reason in slow.reasons] == [('slow', True)]
    other = facts('O5', prefer='memory', seconds=1.5)
    assert not other.reasons
    assert other.remarks == ['a step takes 1.5 times as long as in FP32 on this device (cpu)']
    assert not facts('O5', prefer='speed', seconds=1.05).reasons


@pytest.mark.parametrize(
    ('words', 'kind'),
    [
        ({'problem': 'the first step was skipped 40 times'}, 'scale'),
        ({'skipped_at_end': 3}, 'scale'),
        ({'first_scale': 65536.0, 'scale': 0.5}, 'scale'),
        ({'problem': 'the loss was nan at step 3', 'losses': (2.0, float('nan'))}, 'forward'),
        ({'problem': 'RuntimeError: no such op', 'losses': ()}, 'cannot'),
    ],
)
def test_runs_that_went_wrong(words: dict[str, Any], kind: str) -> None:
    assert [reason.kind for reason in facts('O2', **words).reasons] == [kind]


@pytest.mark.parametrize('words', [{'skipped_at_end': 2}, {'first_scale': 65536.0, 'scale': 1.0}, {'skips': 12}])
def test_skips_at_the_beginning_are_usual(words: dict[str, Any]) -> None:
    assert facts('O2', **words).suits


def test_masters_count_for_levels_without_them() -> None:
    assert [reason.kind for reason in facts('O3', lost=0.5).reasons] == ['masters']
    for level in ('O1', 'O2', 'O4', 'O5'):
        assert facts(level, lost=0.5).suits


@pytest.mark.parametrize(
    ('capability', 'level', 'is_there'),
    [((7, 5), 'O5', False), ((7, 5), 'O4', False), ((8, 0), 'O5', True), ((7, 0), 'O2', True), ((5, 2), 'O1', False)],
)
def test_hardware(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], level: str, is_there: bool) -> None:
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: capability)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'GPU')
    found = LevelFacts(level, resolve(level), run=run())
    judge(found, LIMITS, {}, 'memory', torch.device('cuda'))
    assert [reason.kind for reason in found.reasons] == ([] if is_there else ['hardware'])


def test_limits_follow_the_noise() -> None:
    assert Limits(None, None, 2.0).gradient == Limits(0.1, None, 2.0).gradient == 0.05
    assert Limits(0.9, None, 2.0).gradient == pytest.approx(0.09)
    assert Limits(None, None, 2.0).loss == Limits(None, 0.01, -2.0).loss == pytest.approx(0.1)
    assert Limits(None, 0.3, 2.0).loss == pytest.approx(0.6)


def test_reasons_that_modules_in_fp32_may_mend() -> None:
    mendable = {kind for kind in ('cannot', 'hardware', 'forward', 'scale', 'vanished', 'masters', 'gradients', 'loss', 'slow')
                if Reason(kind, '').mendable}  # fmt: skip
    assert mendable == {'forward', 'gradients', 'loss'}


def test_an_interrupted_run_is_compared_as_far_as_it_went() -> None:
    half = LevelRun('', {2: 1.0}, [2.0, 1.9, 1.5, 1.2])
    found = LevelFacts('O5', resolve('O5'), run=half)
    compare_runs(found, LevelRun('', {2: 1.0}, [2.0, 1.9, 1.4, 1.2, 1.0]))
    assert found.tried
    assert found.loss_after == pytest.approx((0.01 / 2) ** 0.5)
    assert found.memory_ratio is None


def test_times_are_compared_step_by_step() -> None:
    """A moment in which everything is slow changes nothing."""
    one, other = LevelRun('', {2: 2.0, 3: 20.0, 4: 2.0, 5: 9.0}), LevelRun('', {2: 1.0, 3: 10.0, 4: 1.0, 6: 1.0})
    assert one.times(other) == 2.0
    assert one.times(LevelRun('', {7: 1.0})) is None


def test_numbers_in_words() -> None:
    assert difference([1.0, 2.0], [1.0, 1.0]) == pytest.approx(0.5**0.5)
    assert difference([], []) is None
    assert difference([float('nan')], [1.0]) == float('inf')
    assert [percent(share) for share in (0.0, 0.00123, 0.5, 0.996, 1.0)] == ['0 %', '0.12 %', '50 %', '100 %', '100 %']


def test_a_mended_level_that_saves_little_suits_all_the_same() -> None:
    kept = LevelFacts('O5', resolve('O5', keep_fp32=['stem']), keep_fp32=('stem',), run=run(size=95))
    study = Study(CPU, ('O0', 'O5'), 'memory', 4, 0, 2, 'SGD', 32, {})
    study.facts = {'O0': facts('O0'), 'O5': facts('O5')}
    study.facts['O5'].reasons = [Reason('gradients', 'gradients are 90 % off FP32')]
    compare_runs(kept, run())
    study.mended, study.limits, study.chosen = [kept], LIMITS, study.facts['O0']
    first, saves = reason(study).split('; ')
    assert first == 'O0 (FP32 training): no level that suits the model saves a tenth of the memory on this device (cpu)'
    assert saves.startswith('O5 with stem in FP32 takes 95 % of that of FP32.')
    study.mended = []
    assert reason(study) == 'O0 (FP32 training): no other level suits. O5: gradients are 90 % off FP32.'
