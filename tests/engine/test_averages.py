"""Copies and averages of a model hold FP32 values, made before or after the model was cast."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from mmengine.model import ExponentialMovingAverage
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn

from amp_wrapper import AmpOptimWrapper, AmpUsageError, amp
from amp_wrapper.casting.find_hooks import is_cast
from amp_wrapper.engine import averages
from amp_wrapper.policy import LEVELS, resolve

MASTERED = [level for level in LEVELS if resolve(level).master_weights]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 3)
        self.fc.register_buffer('range', torch.full((2,), 1 / 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.conv(x)).mean((2, 3)))


def build(level: str, device: torch.device, early: Callable[[nn.Module], Any] | None = None) -> Any:
    """(model, optimizer, what ``early`` made of the FP32 model)"""
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = SGD(model.parameters(), lr=0.25, momentum=0.5)
    made = None if early is None else early(model)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    return model, optimizer, made


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    x = torch.randn(4, 1, 5, 5, generator=torch.Generator().manual_seed(number)).to(model.fc.weight.device)
    with amp.scale_loss(model(x).square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()


# -- what libraries do, in our own words ------------------------------------------------------------------------------


class FromStateDict:
    """A deep copy whose ``state_dict()`` values follow those of the model, one after the other."""

    def __init__(self, model: nn.Module) -> None:
        self.module = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mean, value in zip(self.module.state_dict().values(), model.state_dict().values()):
            mean.copy_(0.75 * mean + 0.25 * value)


class FromParameters(FromStateDict):
    """One that reads parameters and buffers in lists."""

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        means, values = list(self.module.parameters()), list(model.parameters())
        torch._foreach_mul_(means, 0.75)
        torch._foreach_add_(means, values, alpha=0.25)
        for mean, value in zip(self.module.buffers(), model.buffers()):
            mean.copy_(value)


class OfAList:
    """One that is given parameters, remembers them weakly, and writes through ``.data``."""

    def __init__(self, parameters: Any, decay: float = 0.75) -> None:
        parameters = list(parameters)
        self.decay = decay
        self.shadow_params = [p.clone().detach() for p in parameters]
        self.collected_params: Any = None
        self._params_refs = [weakref.ref(p) for p in parameters]

    def _all(self, parameters: Any) -> list[Tensor]:
        return [found() for found in self._params_refs] if parameters is None else list(parameters)

    @torch.no_grad()
    def update(self, parameters: Any = None) -> None:
        for mean, parameter in zip(self.shadow_params, self._all(parameters)):
            mean.sub_((mean - parameter).mul_(1 - self.decay))

    def store(self, parameters: Any = None) -> None:
        self.collected_params = [p.clone() for p in self._all(parameters)]

    def copy_to(self, parameters: Any = None) -> None:
        for mean, parameter in zip(self.shadow_params, self._all(parameters)):
            parameter.data.copy_(mean.data)

    def restore(self, parameters: Any = None) -> None:
        for kept, parameter in zip(self.collected_params, self._all(parameters)):
            parameter.data.copy_(kept.data)

    @contextmanager
    def average_parameters(self, parameters: Any = None) -> Iterator[None]:
        parameters = self._all(parameters)
        self.store(parameters)
        self.copy_to(parameters)
        try:
            yield
        finally:
            self.restore(parameters)

    def state_dict(self) -> dict[str, Any]:
        return dict(shadow_params=self.shadow_params, collected_params=self.collected_params)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in copy.deepcopy(state).items():
            setattr(self, name, value and [v.to(p.dtype) for v, p in zip(value, self._all(None))])


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> tuple[type, type]:
    """Stand-ins under the names of timm and torch_ema: new classes, so that each test sees them patched anew."""
    v3 = type('ModelEmaV3', (FromParameters,), {'update': FromParameters.update})
    listed = type('ExponentialMovingAverage', (OfAList,), dict(vars(OfAList)))
    for name, cls in (('timm.utils.model_ema', v3), ('torch_ema', listed)):
        module = types.ModuleType(name)
        setattr(module, cls.__name__, cls)
        monkeypatch.setitem(sys.modules, name, module)
    return v3, listed


AVERAGED: dict[str, Callable[[nn.Module], Any]] = {
    'plain mean': AveragedModel,
    'avg_fn': lambda model: AveragedModel(model, avg_fn=get_ema_avg_fn(0.75)),
    'multi_avg_fn': lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75)),
    'with buffers': lambda model: AveragedModel(model, use_buffers=True),
    'multi_avg_fn, with buffers': lambda model: AveragedModel(
        model, multi_avg_fn=get_ema_multi_avg_fn(0.75), use_buffers=True
    ),
}


def both_orders(
    level: str, device: torch.device, make: Callable[[nn.Module], Any]
) -> Iterator[tuple[Any, Any, Any, Any]]:
    """(model, optimizer, average, the average of an FP32 model outside) after some steps, for both orders."""
    for first in (True, False):
        model, optimizer, average = build(level, device, make if first else None)
        outside = Net().to(device)
        # a BatchNorm's counters and the rounded buffer are those of the model
        outside.load_state_dict(model.state_dict())
        if average is None:
            average = make(model)
        expected = make(outside)
        for number in range(3):
            step(model, optimizer, number)
            outside.load_state_dict(model.state_dict())
            for each, source in ((average, model), (expected, outside)):
                (getattr(each, 'update_parameters', None) or each.update)(source)
        yield model, optimizer, average, expected


def check(average: Any, expected: Any, rounded_start: bool = False) -> None:
    names = [n for n, _ in expected.module.named_parameters()]
    mine, theirs = dict(average.module.state_dict()), dict(expected.module.state_dict())
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        assert mine[name].dtype == value.dtype
        # a buffer that was copied before the cast starts from another number
        assert torch.equal(mine[name], value) or (name not in names and name == 'fc.range'), name


@pytest.mark.parametrize('kind', AVERAGED)
@pytest.mark.parametrize('level', MASTERED)
def test_torch_averages_are_those_of_an_fp32_model(level: str, kind: str, device: torch.device) -> None:
    for model, _, average, expected in both_orders(level, device, AVERAGED[kind]):
        check(average, expected)
        x = torch.randn(4, 1, 5, 5, device=device)
        # it runs, in FP32, and BatchNorm's statistics can be made anew
        assert torch.equal(average.eval()(x), expected.eval()(x))
        for each in (average, expected):
            update_bn([x, x + 1], each)
        check(average, expected)
        # as the model's weights, and back
        before = copy.deepcopy(model.state_dict())
        model.load_state_dict(average.module.state_dict())
        assert torch.equal(model.state_dict()['conv.weight'], average.module.conv.weight)
        model(x)
        model.load_state_dict(before)
        assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))


@pytest.mark.parametrize('kind', ['state_dict', 'parameters'])
@pytest.mark.parametrize('level', MASTERED)
def test_averages_of_libraries_are_those_of_an_fp32_model(
    level: str, kind: str, device: torch.device, libraries: tuple[type, type]
) -> None:
    for _, _, average, expected in both_orders(level, device, FromStateDict if kind == 'state_dict' else libraries[0]):
        check(average, expected)


@pytest.mark.parametrize('given', ['remembered', 'parameters', 'masters'])
@pytest.mark.parametrize('first', [True, False], ids=['made before', 'made after'])
@pytest.mark.parametrize('level', MASTERED)
def test_averages_of_lists_of_parameters(
    level: str, first: bool, given: str, device: torch.device, libraries: tuple[type, type]
) -> None:
    make = libraries[1]
    model, optimizer, average = build(level, device, (lambda model: make(model.parameters())) if first else None)
    if given == 'masters':
        average = make(amp.master_params(optimizer))
    elif average is None:
        average = make(model.parameters())

    def named() -> Any:
        return {'remembered': None, 'parameters': model.parameters(), 'masters': amp.master_params(optimizer)}[given]

    outside = [master.detach().clone() for master in amp.master_params(optimizer)]
    expected = OfAList(outside)
    for number in range(3):
        step(model, optimizer, number)
        for mine, master in zip(outside, amp.master_params(optimizer)):
            mine.copy_(master.detach())
        average.update(named())
        expected.update(outside)
    assert all(torch.equal(a, b) for a, b in zip(average.shadow_params, expected.shadow_params))
    before = copy.deepcopy([*model.parameters(), *amp.master_params(optimizer)])
    x = torch.randn(4, 1, 5, 5, device=device)
    out = model.eval()(x)
    with average.average_parameters(named()):
        assert not torch.equal(model(x), out)
        for weight, master, mean in zip(model.parameters(), amp.master_params(optimizer), expected.shadow_params):
            assert torch.equal(master, mean) and torch.equal(weight, mean.to(weight.dtype))
    assert torch.equal(model(x), out)
    assert all(torch.equal(a, b) for a, b in zip(before, [*model.parameters(), *amp.master_params(optimizer)]))
    # its file is read unrounded
    average.collected_params = None
    average.load_state_dict(copy.deepcopy(average.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(average.shadow_params, expected.shadow_params))


def test_an_average_of_rounded_weights_is_told(device: torch.device, libraries: tuple[type, type]) -> None:
    """Where the package came too late for us to see it."""
    model, _, _ = build('O2', device)
    average = libraries[1].__new__(libraries[1])
    OfAList.__init__(average, model.parameters())
    with pytest.raises(AmpUsageError, match='was made from the 16-bit weights'):
        average.update()


@pytest.mark.parametrize('level', ['O2', 'O3', 'O5'])
def test_a_deep_copy_is_an_fp32_model(level: str, device: torch.device) -> None:
    model, optimizer, _ = build(level, device)
    step(model, optimizer, 0)
    saved = model.state_dict()
    for copied, prefix in (
        (copy.deepcopy(model), ''),
        (copy.deepcopy([model])[0], ''),
        (copy.deepcopy(model.fc), 'fc.'),
    ):
        assert not is_cast(copied)
        assert {p.dtype for p in copied.parameters()} == {torch.float32}
        for name, value in itertools.chain(copied.named_parameters(), copied.named_buffers()):
            assert torch.equal(value, saved[prefix + name]), name
        # live, as of any FP32 model
        assert next(iter(copied.state_dict().values())).data_ptr() == next(copied.parameters()).data_ptr()
    x = torch.randn(4, 1, 5, 5, device=device)
    copied = copy.deepcopy(model)
    plain = Net().to(device)
    plain.load_state_dict(copied.state_dict())
    assert torch.equal(copied(x), plain(x))
    # and a copy of its own, and a training
    again = copy.deepcopy(copied)
    assert torch.equal(again.fc.weight, copied.fc.weight)
    before = model.state_dict()['fc.weight'].clone()
    other = SGD(copied.parameters(), lr=0.25)
    amp.initialize(copied, other, opt_level=level, loss_scale=8.0, verbosity=0)
    step(copied, other, 1)
    assert torch.equal(model.state_dict()['fc.weight'], before)
    assert not torch.equal(copied.state_dict()['fc.weight'], before)
    assert model.fc.weight.dtype is resolve(level).cast_model_type, 'the model itself is what it was'


@pytest.mark.parametrize('level', MASTERED)
def test_models_that_nobody_trains_and_pickled_ones_stay_cast(level: str, device: torch.device) -> None:
    model = amp.initialize(Net().to(device), opt_level=level, verbosity=0)
    trained, _, _ = build(level, device)
    for copied in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(trained)),
        copy.deepcopy(pickle.loads(pickle.dumps(trained))),
    ):
        assert copied.fc.weight.dtype is resolve(level).cast_model_type
        assert copied(torch.randn(2, 1, 5, 5, device=device)).dtype is torch.float32


@pytest.mark.parametrize('masters', [True, 'split'])
@pytest.mark.parametrize('level', MASTERED)
def test_copies_under_the_wrapper(level: str, masters: Any, device: torch.device) -> None:
    from amp_wrapper.optim import FusedSGD

    model = Net().to(device)
    values = {name: value.clone() for name, value in model.named_parameters()}
    wrapper = AmpOptimWrapper(
        opt_level=level, optimizer=FusedSGD(model.parameters(), lr=0.1), master_weights=masters, verbosity=0
    )
    wrapper.attach(model)
    copied, average = copy.deepcopy(model), AveragedModel(model)
    average.update_parameters(model)
    for made in (copied, average.module):
        for name, value in made.named_parameters():
            assert torch.equal(value, values[name]), name


def test_patches_are_the_identity_without_casts(device: torch.device, libraries: tuple[type, type]) -> None:
    build('O2', device)
    model = Net().to(device)
    seen: list[Any] = []
    average = AveragedModel(model, avg_fn=lambda mean, value, number: seen.append(value) or value)
    average.update_parameters(model)
    average.update_parameters(model)
    assert [value.data_ptr() for value in seen] == [value.data_ptr() for value in model.parameters()]
    listed = libraries[1](model.parameters())
    listed.update()
    with listed.average_parameters():
        pass
    assert averages.fp32(model.fc.weight) is model.fc.weight


@pytest.mark.parametrize('interface', ['torch', 'mmengine'])
@pytest.mark.parametrize('level', [level for level in LEVELS if level != 'O0'])
@pytest.mark.parametrize('bad', [None, 0, 1])
def test_buffers_of_an_average_updated_while_gradients_accumulate(
    bad: int | None, level: str, interface: str, device: torch.device
) -> None:
    """A batch with NaN leaves nothing in the average of a model's buffers, wherever it stands in its accumulation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(device)
    wrapper = AmpOptimWrapper(
        opt_level=level, optimizer=SGD(model.parameters(), lr=0.125), accumulative_counts=2, loss_scale=8.0, verbosity=0
    )
    wrapper.initialize_count_status(model, 0, 100)
    with wrapper.optim_context(model):
        pass
    mean: Any
    if interface == 'torch':
        mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    else:
        mean = ExponentialMovingAverage(model, momentum=0.5, update_buffers=True)

    def iteration(factor: float = 1.0) -> None:
        with wrapper.optim_context(model):
            loss = model(torch.randn(5, 3, device=device) * factor).float().pow(2).mean()
        wrapper.update_params(loss)
        mean.update_parameters(model)

    for _ in range(2):
        iteration()
    before = [buffer.clone() for buffer in mean.module.buffers()]
    own = [buffer.clone() for buffer in model.buffers()]
    for index in range(2):
        iteration(math.nan if index == bad else 1.0)
    after = list(mean.module.buffers())
    assert all(bool(buffer.isfinite().all()) for buffer in after)
    if bad is None:
        assert not torch.equal(after[0], before[0])
        return
    # what is left is the update behind the skipped step: of the buffers as they were
    want = [b.lerp(o.to(b.dtype), 0.5) if b.is_floating_point() else b for b, o in zip(before, own)]
    assert torch.allclose(after[0], want[0])
    assert torch.allclose(after[1], want[1])
