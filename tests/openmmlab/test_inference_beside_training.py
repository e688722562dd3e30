"""``AmpInferenceHook`` in a process that trains as well: neither changes the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor


@HOOKS.register_module()
class TestsInBetween(Hook):
    """Tests after each epoch, as some projects do."""

    def after_train_epoch(self, runner: Any) -> None:
        runner.test()


def run(work_dir: Path, words: str, level: str, tested_at: str, *hooks: str) -> tuple[dict[str, Tensor], list[Any]]:
    """Weights and buffers after some calls of a runner, and what the calls gave."""
    wrapper = dict(type='AmpOptimWrapper', opt_level=level, optimizer=dict(type='SGD', lr=0.1, momentum=0.9))
    config = toy.toy_config(
        work_dir,
        wrapper,
        custom_hooks=[
            dict(type='amp_wrapper.AmpInferenceHook', opt_level=tested_at),
            *(dict(type=hook) for hook in hooks),
        ],
        test_dataloader=toy.loader(shuffle=False),
        test_evaluator=dict(type='ToyScore'),
        test_cfg=dict(),
    )
    runner = Runner.from_cfg(config)
    found = []
    for word in words.split():
        torch.manual_seed(0)
        result = getattr(runner, word)()
        found.append(result if word == 'test' else None)
    return {name: value.clone() for name, value in runner.model.state_dict().items()}, found


@pytest.mark.parametrize('level', ['O0', 'O1', 'O2', 'O3', 'O4', 'O5'])
@pytest.mark.parametrize('tested_at', ['O0', 'O2', 'O4', 'O5'])
def test_a_test_before_after_or_between_changes_no_bit_of_the_training(
    level: str, tested_at: str, tmp_path: Path
) -> None:
    alone, _ = run(tmp_path / 'alone', 'train', level, tested_at)
    for number, (words, hooks) in enumerate(
        # mmengine swaps averages in for a test
        [('test train', ['EMAHook']), ('train test test', ['EMAHook']), ('train', ['TestsInBetween'])]
    ):
        weights, results = run(tmp_path / str(number), words, level, tested_at, *hooks)
        assert all(torch.equal(weights[name], alone[name]) for name in alone), words
        if words == 'train test test':
            assert results[1] == results[2]


def test_the_level_of_the_test_is_that_of_the_hook(tmp_path: Path) -> None:
    results = {
        tested_at: run(tmp_path / tested_at, 'train test', 'O2', tested_at)[1][1] for tested_at in ('O0', 'O2', 'O5')
    }
    assert len({result['toy/score'] for result in results.values()}) == 3
    assert max(abs(result['toy/score'] - results['O0']['toy/score']) for result in results.values()) < 0.05


def test_a_test_that_an_exception_ended_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, _ = run(tmp_path / 'alone', 'train', 'O2', 'O5')
    calls = []

    def fail(self: Any, *args: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt

    original = Runner.test

    def test(runner: Runner) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(toy.ToyScore, 'process', fail)
            with pytest.raises(KeyboardInterrupt):
                original(runner)

    monkeypatch.setattr(Runner, 'test', test)
    weights, _ = run(tmp_path / 'failed', 'test train', 'O2', 'O5')
    assert calls and all(torch.equal(weights[name], alone[name]) for name in alone)


@pytest.mark.parametrize('tested_at', ['O0', 'O1', 'O2', 'O3', 'O4', 'O5'])
def test_the_model_gives_what_it_gave(tested_at: str, tmp_path: Path) -> None:
    tested = dict(test_dataloader=toy.loader(shuffle=False), test_evaluator=dict(type='ToyScore'), test_cfg=dict())
    hooks = [dict(type='amp_wrapper.AmpInferenceHook', opt_level=tested_at)]
    wrapper: dict[str, Any] = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1))
    runner = Runner.from_cfg(toy.toy_config(tmp_path, wrapper, custom_hooks=hooks, **tested))
    runner.model.eval()
    inputs, labels = torch.randn(2, 1, 6, 6), torch.tensor([0, 1])
    before = runner.model(inputs, labels, mode='loss')['loss'], runner.model(inputs)
    runner.test()
    after = runner.model(inputs, labels, mode='loss')['loss'], runner.model(inputs)
    assert all(torch.equal(one, other) for one, other in zip(before, after))
