"""mmengine's averaged models see masters in FP32, and validation gives everything back bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from bits import differences
from mmengine.hooks import EMAHook, Hook
from mmengine.model import BaseAveragedModel, ExponentialMovingAverage, MomentumAnnealingEMA, StochasticWeightAverage
from mmengine.registry import HOOKS, MODELS
from torch import nn

from amp_wrapper import AmpOptimWrapper
from amp_wrapper.casting import fp32_values
from amp_wrapper.casting.find_hooks import is_cast

SGD = dict(type='SGD', lr=0.1, momentum=0.9)


def masters(model: nn.Module) -> dict[str, torch.Tensor]:
    """FP32 values of a model's parameters, exact where there are masters."""
    result = {}
    for name, parameter in model.named_parameters():
        master = fp32_values.master_tensor(parameter)
        result[name] = (parameter.detach().float() if master is None else master.detach()).clone()
    return result


@HOOKS.register_module()
class OutsideAverage(Hook):
    """Averages an FP32 copy outside, by mmengine's own classes, and watches what validation leaves behind."""

    priority = 'ABOVE_NORMAL'

    def __init__(self, average: dict[str, Any]) -> None:
        self.average_cfg = average
        self.before: Any = None
        self.checked = 0

    def before_run(self, runner: Any) -> None:
        self.copy = toy.ToyModel()
        self.average = MODELS.build(dict(self.average_cfg, model=self.copy))
        self.window: list[torch.Tensor] = []  # the average's buffers, before the first update of an accumulation

    def _ema(self, runner: Any) -> EMAHook:
        return next(hook for hook in runner.hooks if isinstance(hook, EMAHook))

    def after_train_iter(self, runner: Any, *_: Any, **__: Any) -> None:
        buffers = list(self.average.module.buffers())
        with torch.no_grad():
            if runner.iter % 2 == 0:
                self.window = [value.clone() for value in buffers]
            # a skipped step gives the average's buffers back, too; its last update then sees those of the model as they were
            if runner.iter % 2 == 1 and runner.optim_wrapper.step_was_skipped():
                for value, was in zip(buffers, self.window):
                    value.copy_(was)
            now = masters(runner.model)
            for name, parameter in self.copy.named_parameters():
                parameter.copy_(now[name])
            for mine, theirs in zip(self.copy.buffers(), runner.model.buffers()):
                mine.copy_(theirs)
        self.average.update_parameters(self.copy)

    def _everything(self, runner: Any) -> Any:
        average = self._ema(runner).ema_model.module
        return copy.deepcopy(
            [masters(runner.model), dict(runner.model.state_dict(keep_vars=True)), average.state_dict()]
        )

    def before_val_epoch(self, runner: Any) -> None:
        # runs before EMAHook: the training weights
        ema = self._ema(runner).ema_model.module
        assert {value.dtype for value in ema.parameters()} == {torch.float32}
        assert differences(ema.state_dict(), self.average.module.state_dict()) == []
        self.before = self._everything(runner)

    def after_val_iter(self, runner: Any, *_: Any, **__: Any) -> None:
        # in between, the model holds the average, rounded to its own type
        average = dict(self.average.module.named_parameters())
        for name, parameter in runner.model.named_parameters():
            assert parameter.detach().equal(average[name].to(parameter.dtype)), name

    def after_val(self, runner: Any) -> None:
        assert differences(self.before, self._everything(runner)) == []
        self.checked += 1


AVERAGES = [
    dict(type='ExponentialMovingAverage', momentum=0.0002),
    dict(type='MomentumAnnealingEMA', momentum=0.0002, gamma=3, interval=2),
    dict(type='StochasticWeightAverage', interval=3),
]


@pytest.mark.parametrize('buffers', [False, True])
@pytest.mark.parametrize('average', AVERAGES, ids=lambda cfg: cfg['type'])
@pytest.mark.parametrize('level', toy.LEVELS)
def test_average_is_that_of_an_fp32_copy_outside(
    level: str, average: dict[str, Any], buffers: bool, tmp_path: Path
) -> None:
    average = dict(average, update_buffers=buffers)
    words = dict(average)
    hook = dict(type='EMAHook', ema_type=words.pop('type'), **words)
    runner = toy.run(
        tmp_path,
        dict(type='AmpOptimWrapper', opt_level=level, optimizer=SGD, accumulative_counts=2),
        custom_hooks=[hook, dict(type='OutsideAverage', average=average)],
    )
    outside = next(hook for hook in runner.hooks if isinstance(hook, OutsideAverage))
    assert outside.checked == 2
    saved = toy.checkpoint(tmp_path)
    # the file holds the average as the model, ready to deploy, and the masters in the EMA's place
    for name, value in outside.average.module.named_parameters():
        assert differences(saved['state_dict'][name], value.detach()) == []
        assert differences(saved['ema_state_dict'][f'module.{name}'], masters(runner.model)[name]) == []


@pytest.mark.parametrize('kind', [ExponentialMovingAverage, MomentumAnnealingEMA, StochasticWeightAverage])
@pytest.mark.parametrize('level', ['O2', 'O3', 'O5'])
@pytest.mark.parametrize('buffers', [False, True])
def test_copied_before_or_after_attachment_gives_the_same_bits(kind: Any, level: str, buffers: bool) -> None:
    ends = []
    for copy_first in (True, False):
        torch.manual_seed(0)
        model = toy.ToyModel()
        wrapper = AmpOptimWrapper(opt_level=level, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        if not copy_first:
            wrapper.attach(model)
        average: BaseAveragedModel = kind(model, update_buffers=buffers)
        if copy_first:
            wrapper.attach(model)
        data = toy.ToyData()
        for _ in range(4):
            model.train_step(dict(inputs=data.images, labels=data.labels), wrapper)
            average.update_parameters(model)
        assert {p.dtype for p in average.parameters()} == {torch.float32}
        assert not is_cast(average)
        assert average(data.images).dtype == torch.float32
        ends.append((average.state_dict(), model.state_dict()))
    if level == 'O3':
        # no masters: an average copied from the cast model starts from rounded values
        for left, right in zip(ends[0][0].values(), ends[1][0].values()):
            torch.testing.assert_close(left, right, rtol=2e-3, atol=2e-3)
    else:
        assert differences(ends[0][0], ends[1][0]) == []
    assert differences(ends[0][1], ends[1][1]) == []


def test_average_moves_at_momentum_2e_4() -> None:
    """In 16-bit arithmetic it would stand still."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    wrapper = AmpOptimWrapper(opt_level='O2', optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    average = ExponentialMovingAverage(model, momentum=2e-4)
    average.update_parameters(model)  # the first update copies
    start = average.module.weight.detach().clone()
    in_half = start.half()
    for _ in range(5):
        with wrapper.optim_context(model):
            loss = model(torch.randn(4, 8)).square().mean()
        wrapper.update_params(loss)
        average.update_parameters(model)
        if model.weight.dtype == torch.float16:
            in_half.lerp_(model.weight.detach(), 2e-4)
    moved = (average.module.weight != start).float().mean()
    moved_in_half = (in_half != start.half()).float().mean()
    assert moved > 0.9
    assert moved_in_half < 0.1


def test_averaged_models_inside_a_model_stay_fp32() -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Linear(4, 4)
            self.teacher = ExponentialMovingAverage(self.student, momentum=2e-4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.teacher(x)
            return (self.student(x) - target).float().square().mean()

    model = Teacher()
    wrapper = AmpOptimWrapper(opt_level='O2', optimizer=torch.optim.SGD(model.student.parameters(), lr=0.5))
    for _ in range(3):
        with wrapper.optim_context(model):
            loss = model(torch.randn(4, 4))
        wrapper.update_params(loss + model.student.weight.float().sum())
        model.teacher.update_parameters(model.student)
    assert model.teacher.module.weight.dtype == torch.float32
    assert model.student.weight.dtype == torch.float16
    assert not model.teacher.module.weight.equal(model.teacher.module.weight.half().float())


def test_patches_are_the_identity_without_our_wrapper() -> None:
    torch.manual_seed(0)
    model = toy.ToyModel()
    average = ExponentialMovingAverage(model, momentum=0.25)
    average.update_parameters(model)
    start = model.conv.weight.detach().clone()
    with torch.no_grad():
        model.conv.weight.add_(1.0)
    average.update_parameters(model)
    assert average.module.conv.weight.equal(start.lerp(model.conv.weight, 0.25))
    hook = EMAHook()
    hook.src_model, hook.ema_model = model, average
    before = copy.deepcopy((dict(model.state_dict()), dict(average.module.state_dict())))
    hook._swap_ema_parameters()
    assert model.conv.weight.equal(before[1]['conv.weight'])
    hook._swap_ema_parameters()
    assert differences(before, (dict(model.state_dict()), dict(average.module.state_dict()))) == []


def test_an_edit_that_no_step_has_seen_belongs_to_the_average() -> None:
    model = nn.Linear(4, 4)
    wrapper = AmpOptimWrapper(opt_level='O2', optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    wrapper.attach(model)
    with torch.no_grad():
        model.weight.fill_(5.0)
    average = ExponentialMovingAverage(model, momentum=0.5)
    assert bool((average.module.weight == 5.0).all())
    average.update_parameters(model)
    model.weight.data.fill_(7.0)
    average.update_parameters(model)
    assert bool((average.module.weight == 6.0).all())


def test_an_edit_before_validation_survives_the_swap() -> None:
    model = nn.Linear(4, 4)
    average = ExponentialMovingAverage(model)
    AmpOptimWrapper(opt_level='O2', optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).attach(model)
    hook = EMAHook()
    hook.src_model, hook.ema_model = model, average
    model.weight.data.fill_(3.0)
    hook._swap_ema_parameters()
    hook._swap_ema_parameters()
    assert bool((model.weight == 3.0).all())
    assert bool((fp32_values.master_tensor(model.weight) == 3.0).all())
