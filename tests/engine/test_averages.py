"""Copies and averages of a model hold FP32 values, whether they are made before or after the model is cast."""

from __future__ import annotations

import copy
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import differing
from mmengine.model import ExponentialMovingAverage
from pairs import pairs
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn
from toy_training import CAST, LEVELS, MASTERED, Training

from amp_wrapper import FusedSGD, amp


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 3)
        self.fc.register_buffer('range', torch.full((2,), 1 / 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.conv(x)).mean((2, 3)))


def images(number: int) -> Tensor:
    return torch.randn(4, 1, 5, 5, generator=torch.Generator(torch.get_default_device()).manual_seed(number))


def scripted(level: str, model: nn.Module | None = None) -> Training:
    return Training(level, 'amp', lambda p: SGD(p, lr=0.25, momentum=0.5), model or Net(), loss_scale=8.0)


def step(run: Training, number: int) -> None:
    run.backward(run.forward(images(number)).float().square().mean())
    run.step()
    run.clear()


class ModelEma:
    """As that of timm: a deep copy whose values follow, one after the other, by ``state_dict()``."""

    def __init__(self, model: nn.Module) -> None:
        self.module = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mean, value in zip(self.module.state_dict().values(), model.state_dict().values()):
            mean.copy_(0.75 * mean + 0.25 * value)


class ModelEmaV3(ModelEma):
    """As that of timm, which reads parameters and buffers in lists."""

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        means, values = list(self.module.parameters()), list(model.parameters())
        torch._foreach_mul_(means, 0.75)
        torch._foreach_add_(means, values, alpha=0.25)
        for mean, value in zip(self.module.buffers(), model.buffers()):
            mean.copy_(value)


AVERAGES: dict[str, Callable[[nn.Module], Any]] = {
    'mean': AveragedModel,
    'avg_fn': lambda model: AveragedModel(model, avg_fn=get_ema_avg_fn(0.75)),
    'multi_avg_fn': lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75)),
    'buffers, too': lambda model: AveragedModel(model, use_buffers=True),
    'all': lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75), use_buffers=True),
    'by state_dict': ModelEma,
    'timm': lambda model: sys.modules['timm.utils.model_ema'].ModelEmaV3(model),
}


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in under the name of timm: a new class, so that each test sees it patched anew."""
    module = types.ModuleType('timm.utils.model_ema')
    cls: Any = type('ModelEmaV3', (ModelEmaV3,), {'update': ModelEmaV3.update})
    monkeypatch.setattr(module, 'ModelEmaV3', cls, raising=False)
    monkeypatch.setitem(sys.modules, 'timm.utils.model_ema', module)


def check(average: Any, expected: Any) -> None:
    mine, theirs = dict(average.module.state_dict()), dict(expected.module.state_dict())
    # a buffer that was copied before the cast begins with another number
    assert [name for name in differing(mine, theirs) if name != 'fc.range'] == []


@pytest.mark.usefixtures('timm')
@pairs(level=MASTERED, kind=AVERAGES, made=('before', 'after'))
def test_averages_are_those_of_an_fp32_model(level: str, kind: str, made: str) -> None:
    torch.manual_seed(0)
    model, outside = Net(), Net()
    early = AVERAGES[kind](model)
    run = scripted(level, model)
    # a BatchNorm's counters and the rounded buffer are those of the model
    outside.load_state_dict(model.state_dict())
    average = early if made == 'before' else AVERAGES[kind](model)
    expected = AVERAGES[kind](outside)
    for number in range(3):
        step(run, number)
        outside.load_state_dict(model.state_dict())
        for each, source in ((average, model), (expected, outside)):
            (getattr(each, 'update_parameters', None) or each.update)(source)
    check(average, expected)
    if not isinstance(average, AveragedModel):
        return
    # it runs, in FP32, and BatchNorm's statistics can be made anew
    x = images(5)
    assert made == 'before' or torch.equal(average.eval()(x), expected.eval()(x))
    for each in (average, expected):
        update_bn([x, x + 1], each)
    check(average, expected)
    # as the model's weights, and back
    before = copy.deepcopy(model.state_dict())
    model.load_state_dict(average.module.state_dict())
    assert torch.equal(model.state_dict()['conv.weight'], average.module.conv.weight)
    model(x)
    model.load_state_dict(before)
    assert differing(before, model.state_dict()) == []


@pytest.mark.parametrize('level', LEVELS)
def test_averages_of_buffers_see_what_a_skipped_step_restored(level: str) -> None:
    model = Net()
    averages = (
        ExponentialMovingAverage(model, momentum=0.5, update_buffers=True),
        AveragedModel(model, use_buffers=True),
    )
    run = Training(level, model=model, skip_nonfinite=True, loss_scale=dict(init_scale=8.0))
    for number in range(4):
        run.backward(run.forward(images(number) * (float('nan') if number % 2 else 1)).float().square().mean())
        run.step()
        run.clear()
        for average in averages:
            average.update_parameters(model)
    assert all(value.isfinite().all() for average in averages for value in average.state_dict().values())


@pytest.mark.parametrize('level', ['O2', 'O3', 'O5'])
def test_a_deep_copy_is_an_fp32_model(level: str) -> None:
    run = scripted(level)
    model = run.model
    step(run, 0)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    for copied, prefix in (
        (copy.deepcopy(model), ''),
        (copy.deepcopy([model])[0], ''),
        (copy.deepcopy(model.fc), 'fc.'),
    ):
        found = {prefix + name: value for name, value in (*copied.named_parameters(), *copied.named_buffers())}
        assert differing(found, {name: saved[name] for name in found}) == []
        # live, as of any FP32 model
        assert next(iter(copied.state_dict().values())).data_ptr() == next(copied.parameters()).data_ptr()
    copied, plain = copy.deepcopy(copy.deepcopy(model)), Net()
    plain.load_state_dict(copied.state_dict())
    assert torch.equal(copied(images(1)), plain(images(1)))
    # a training of its own
    step(scripted(level, copied), 1)
    assert torch.equal(model.state_dict()['fc.weight'], saved['fc.weight']) and model.fc.weight.dtype is CAST[level]
    assert not torch.equal(copied.state_dict()['fc.weight'], saved['fc.weight'])


@pytest.mark.parametrize('level', MASTERED)
def test_copies_without_fp32_values_stay_cast(level: str) -> None:
    """Of models that nobody trains, and pickled ones."""
    model = amp.initialize(Net(), opt_level=level, verbosity=0)
    read = pickle.loads(pickle.dumps(scripted(level).model))
    for copied in (copy.deepcopy(model), read, copy.deepcopy(read)):
        assert copied.fc.weight.dtype is CAST[level]
        assert copied(images(0)).dtype is torch.float32


@pairs(level=MASTERED, masters=(True, 'split'))
def test_copies_and_averages_under_the_wrapper_are_unrounded(level: str, masters: Any) -> None:
    model = Net()
    values = {name: value.detach().clone() for name, value in model.named_parameters()}
    Training(level, make=lambda p: FusedSGD(p, lr=0.1), model=model, master_weights=masters)
    copied, average = copy.deepcopy(model), AveragedModel(model)
    average.update_parameters(model)
    for made in (copied, average.module):
        assert differing(values, {name: value.detach() for name, value in made.named_parameters()}) == []


def test_averages_of_other_models_are_left_alone() -> None:
    run = scripted('O2')
    model, seen = Net(), []
    average = AveragedModel(model, avg_fn=lambda mean, value, number: seen.append(value.data_ptr()) or value)  # type: ignore[func-returns-value]
    for _ in range(2):
        average.update_parameters(model)
    assert seen == [value.data_ptr() for value in model.parameters()]
    step(run, 0)
