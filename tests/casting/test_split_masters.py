"""Split masters: a 16-bit weight and its remainder are the FP32 value, wherever a model is saved, loaded or averaged."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from bits import differences, same_bits
from mmengine.hooks import EMAHook
from mmengine.model import ExponentialMovingAverage
from mmengine.optim import OptimWrapperDict
from torch import Tensor, nn
from weight_edits import FINE, HIDDEN, IN_PLACE, LOADS

from amp_wrapper import AmpAttachError, AmpConfigError, AmpOptimWrapper, AmpUsageError, ops
from amp_wrapper.casting import fp32_values
from amp_wrapper.casting.split_masters import SplitMasters
from amp_wrapper.ops.split import join, split
from amp_wrapper.optim import FusedAdamW, FusedSGD

LEVELS = {'O2': torch.float16, 'O5': torch.bfloat16}


def wrap(
    level: str, *modules: nn.Module, masters: Any = 'split', kind: Any = FusedSGD, momentum: float = 0.0, **words: Any
) -> AmpOptimWrapper:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = kind(parameters, lr=0.5, momentum=momentum) if kind is FusedSGD else kind(parameters, lr=0.01)
    return AmpOptimWrapper(opt_level=level, master_weights=masters, optimizer=optimizer, **words)


def train(model: toy.ToyModel, wrapper: AmpOptimWrapper, steps: Any = (0,), factor: float = 1.0) -> list[float]:
    """The losses of some steps."""
    data, losses = toy.ToyData(), []
    for step in steps:
        chosen = slice(8 * (step % 3), 8 * (step % 3) + 8)
        images = data.images[chosen].to(model.fc.weight.device) * factor
        batch = dict(inputs=images, labels=data.labels[chosen].to(images.device))
        losses.append(float(model.train_step(batch, wrapper)['loss']))
    return losses


def toy_model(level: str, device: torch.device, **words: Any) -> tuple[toy.ToyModel, AmpOptimWrapper]:
    torch.manual_seed(0)
    model = toy.ToyModel().to(device)
    wrapper = wrap(level, model, **words)
    wrapper.attach(model)
    return model, wrapper


def special(level: str) -> Tensor:
    """FP32 numbers that split exactly: every upper half with lower halves around ties; for float16, those in its range."""
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int64)
    words = (torch.arange(1 << 16) << 16).reshape(-1, 1) + lower
    values = words.to(torch.int32).view(torch.float32).flatten()
    values = values[~values.isnan()]
    if level == 'O2':
        near = torch.arange(1 << 16).to(torch.int16).view(torch.float16).float()
        near = near[near.isfinite()]
        values = torch.cat([values, near, near.nextafter(near * 2), near.nextafter(near * 0)])
        size = values.abs()
        values = values[(size == 0) | size.isinf() | ((size >= 2.0**-16) & (size < 65520))]
    return values[: len(values) // 8 * 8].reshape(-1, 8)


class Weight(nn.Module):
    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values.clone())


# -- what is saved ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
def test_what_is_saved_is_what_was_attached_and_what_detach_gives_back(level: str, device: torch.device) -> None:
    values = special(level).to(device)
    model = nn.Sequential(Weight(values))
    weight = model[0].weight
    wrapper = wrap(level, model)
    moment = wrapper.optimizer.state[weight]['momentum_buffer'] = torch.rand_like(weight)
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        wrapper.attach(model)
        assert weight.grad.dtype is weight.dtype
        masters = wrapper._engine.parts.params
        remainder = fp32_values.remainder_of(weight)
        assert weight.dtype is LEVELS[level] and remainder is not None and remainder.bits.dtype is torch.int16
        assert wrapper.optimizer.param_groups[0]['params'] == [weight] == list(wrapper.master_params())
        assert wrapper.optimizer.state[weight]['momentum_buffer'] is moment and moment.dtype is torch.float32
        assert fp32_values.master_tensor(weight) is None
        assert same_bits(model.state_dict()['0.weight'], values)
        copied = copy.deepcopy(model)
        assert same_bits(copied.state_dict()['0.weight'], copied[0].weight), 'a copy speaks for itself'
        assert same_bits(copied[0].weight, values), 'and holds the FP32 values'
        average = ExponentialMovingAverage(model)
        assert same_bits(average.module[0].weight, values)
        wrapper.detach()
        assert len(masters) == 0 and weight.grad.dtype is torch.float32
        assert weight.dtype is torch.float32 and same_bits(weight, values)
        assert fp32_values.remainder_of(weight) is None


def test_what_float16_cannot_keep(device: torch.device) -> None:
    values = torch.tensor([65519.996, 65520.0, -1e6, 2.0**-17 + 2.0**-40, -3e-9, torch.nan], device=device)
    model = nn.Sequential(Weight(torch.zeros_like(values)))
    wrap('O2', model).attach(model)
    model.load_state_dict({'0.weight': values})
    saved = model.state_dict()['0.weight']
    assert saved[0] == values[0] and saved[1:3].tolist() == [torch.inf, -torch.inf]
    assert bool(((saved - values)[3:5].abs() <= 2.0**-40).all()) and bool(saved[5].isnan())


@pytest.mark.parametrize('start', ['split', True])
@pytest.mark.parametrize('level', LEVELS)
def test_checkpoints_move_between_split_and_whole_masters(level: str, start: bool | str, device: torch.device) -> None:
    torch.manual_seed(0)
    source = toy.ToyModel().to(device)
    wrapper = wrap(level, source, masters=start, momentum=0.5)
    train(source, wrapper)
    saved = copy.deepcopy(source.state_dict()), copy.deepcopy(wrapper.state_dict())
    for masters in ('split', True):
        for early in (True, False):
            model = toy.ToyModel().to(device)
            other = wrap(level, model, masters=masters, momentum=0.5)
            if early:
                other.attach(model)
            model.load_state_dict(saved[0])
            other.load_state_dict(saved[1])
            other.attach(model)
            assert differences(saved[0], model.state_dict()) == []
            assert differences(saved[1]['state'], other.state_dict()['state']) == []
    plain = toy.ToyModel().to(device)
    plain.load_state_dict(saved[0])
    other = wrap('O0', plain, masters=None, momentum=0.5)
    other.load_state_dict(saved[1])
    other.attach(plain)
    assert differences(saved[0], plain.state_dict()) == []
    assert differences(saved[1]['state'], other.state_dict()['state']) == []


# -- steps ------------------------------------------------------------------------------------------------------------


def everything(model: nn.Module, wrapper: AmpOptimWrapper) -> Any:
    """All that a step changes, in FP32 and as it lies."""
    held = [fp32_values.remainder_of(parameter) for parameter in model.parameters()]
    remainders = [None if remainder is None else remainder.bits for remainder in held]
    state = wrapper.state_dict()
    return copy.deepcopy([dict(model.state_dict()), dict(model.state_dict(keep_vars=True)), remainders, state['state']])


SETTINGS: dict[str, dict[str, Any]] = {
    'SGD': dict(momentum=0.9),
    'AdamW, clip': dict(kind=FusedAdamW, clip_grad=dict(max_norm=0.1)),
    'AdamW, windows': dict(kind=FusedAdamW, accumulative_counts=2, accumulate_in_fp32=True),
}


@pytest.mark.parametrize('setting', SETTINGS)
@pytest.mark.parametrize('level', LEVELS)
def test_training_is_that_of_whole_masters(level: str, setting: str, device: torch.device) -> None:
    """In bfloat16, a weight whose master lies half-way is another one: the first step alone has the same gradients for sure."""
    words = SETTINGS[setting]
    runs = [toy_model(level, device, masters=masters, **words) for masters in ('split', True)]
    steps = range(8) if level == 'O2' else range(words.get('accumulative_counts', 1))
    start = everything(*runs[0])[0]
    losses = [train(*run, steps) for run in runs]
    assert losses[0] == losses[1]
    (split_one, _, remainders, state), (whole, _, _, expected) = (everything(*run) for run in runs)
    assert differences(split_one, whole) == [] and differences(state, expected) == []
    moved = [name for name in start if start[name].is_floating_point() and not start[name].equal(split_one[name])]
    assert len(moved) >= 6
    assert sum(bool(remainder.any()) for remainder in remainders if remainder is not None) >= 4
    moments = [value for entry in state.values() for value in entry.values() if isinstance(value, Tensor)]
    assert {value.dtype for value in moments} == {torch.float32}
    assert runs[0][1]._engine.parts.params.edited() == [], 'a step is no edit'


@pytest.mark.parametrize('early', [True, False], ids=['attached first', 'loaded first'])
@pytest.mark.parametrize('level', LEVELS)
def test_resumed_runs_are_the_same_bit_for_bit(level: str, early: bool, device: torch.device) -> None:
    words: dict[str, Any] = dict(kind=FusedAdamW, accumulative_counts=2, loss_scale='dynamic')
    model, wrapper = toy_model(level, device, **words)
    wrapper.initialize_count_status(model, 0, 8)
    # in the middle of an accumulation
    train(model, wrapper, range(3))
    saved = copy.deepcopy((dict(model.state_dict()), wrapper.state_dict()))
    losses = train(model, wrapper, range(3, 8))
    other = toy.ToyModel().to(device)
    resumed = wrap(level, other, **words)
    if early:
        resumed.attach(other)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    resumed.initialize_count_status(other, 3, 8)
    assert train(other, resumed, range(3, 8)) == losses
    assert differences(everything(model, wrapper), everything(other, resumed)) == []


@pytest.mark.parametrize('level', LEVELS)
def test_skipped_steps_change_nothing_and_are_no_edit(level: str, device: torch.device) -> None:
    model, wrapper = toy_model(level, device, kind=FusedAdamW, loss_scale='dynamic')
    for _ in range(2):
        before = everything(model, wrapper)
        norm = copy.deepcopy(model.bn.state_dict())
        train(model, wrapper, factor=torch.inf)
        model.bn.load_state_dict(
            {**model.bn.state_dict(), **{key: norm[key] for key in norm if 'running' in key or 'num' in key}}
        )
        assert differences(before[:3], everything(model, wrapper)[:3]) == []
        assert wrapper._engine.parts.params.edited() == []
        train(model, wrapper)
        assert differences(before, everything(model, wrapper)) != []


def test_an_edit_before_a_step_is_where_the_step_starts(device: torch.device) -> None:
    model, wrapper = toy_model('O5', device)
    wrapper.optimizer.param_groups[0]['lr'] = 0.0
    values = model.state_dict()['conv.weight'].clone()
    with torch.no_grad():
        model.fc.weight.fill_(0.3)
    train(model, wrapper)
    assert bool((model.state_dict()['fc.weight'] == torch.tensor(0.3).bfloat16().float()).all())
    assert same_bits(model.state_dict()['conv.weight'], values)


def test_what_one_pass_cannot_do_is_refused(device: torch.device) -> None:
    with pytest.raises(AmpConfigError, match=r"'norm_type': 1.*conflicts with master_weights='split'"):
        wrap('O2', nn.Linear(2, 2), clip_grad=dict(max_norm=1.0, norm_type=1))
    model = nn.Embedding(3, 2, sparse=True).to(device)
    wrapper = wrap('O2', model, momentum=0.5)
    wrapper.attach(model)
    before = everything(model, wrapper)
    with wrapper.optim_context(model):
        loss = model(torch.zeros(1, dtype=torch.int64, device=device)).float().sum()
    with pytest.raises((AmpUsageError, ValueError), match='sparse'):
        wrapper.update_params(loss)
    assert differences(before[:3], everything(model, wrapper)[:3]) == []


def test_a_step_without_any_gradient_steps_nothing(device: torch.device) -> None:
    model, wrapper = toy_model('O2', device, kind=FusedAdamW)
    outside = torch.ones(1, requires_grad=True, device=device)
    before = everything(model, wrapper)
    wrapper.update_params(outside.sum())
    assert differences(before, everything(model, wrapper)) == []


# -- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('place', LOADS)
@pytest.mark.parametrize('level', LEVELS)
def test_loads_arrive_unrounded(level: str, place: str, tmp_path: Path) -> None:
    model, wrapper = toy_model(level, torch.device('cpu'))
    rest = {name: value.clone() for name, value in model.state_dict().items() if name != 'fc.weight'}
    weight = model.fc.weight
    LOADS[place](model, tmp_path)
    assert model.fc.weight is weight
    near, remainder = split(FINE, weight.dtype)
    held = fp32_values.remainder_of(weight)
    assert held is not None and weight.equal(near) and held.bits.equal(remainder) and remainder.any()
    assert wrapper._engine.parts.params.edited() == []
    after = model.state_dict()
    assert same_bits(after.pop('fc.weight'), FINE)
    # another part loads biases that were rounded before
    if 'submodule' not in place:
        assert differences(rest, after) == []


def test_a_tie_that_is_loaded_is_rounded_away_from_zero(device: torch.device) -> None:
    """torch's own copy rounds to even, and the remainder belongs to the other neighbour."""
    model = nn.Sequential(Weight(torch.zeros(2, device=device)))
    wrap('O5', model).attach(model)
    ties = torch.tensor([1.0 + 2.0**-8, -1.0 - 2.0**-8], device=device)
    model.load_state_dict({'0.weight': ties})
    assert model[0].weight.tolist() == [1 + 2.0**-7, -1 - 2.0**-7]
    assert model.state_dict()['0.weight'].equal(ties)


@pytest.mark.parametrize('place', IN_PLACE)
@pytest.mark.parametrize('level', LEVELS)
def test_edits_in_place_win(level: str, place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, wrapper = toy_model(level, torch.device('cpu'))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    IN_PLACE[place](model, tmp_path)
    masters = wrapper._engine.parts.params
    assert [weight is model.fc.weight for weight in masters.edited()] == [True]
    with caplog.at_level(logging.WARNING, 'amp_wrapper'):
        saved = model.state_dict()
    assert 'fc.weight was changed' in caplog.text
    edited = model.fc.weight.detach()
    assert saved['fc.weight'].equal(edited.float()) and not fp32_values.remainder_of(model.fc.weight).bits.any()
    assert differences({**before, 'fc.weight': edited.float()}, saved) == []
    with torch.no_grad():
        model.conv.weight.mul_(0.5)
    edited = model.conv.weight.detach().float()
    # as a step begins
    assert masters.refresh() == ['conv.weight'] and masters.edited() == masters.refresh() == []
    assert masters.copy_of(model.conv.weight) is fp32_values.remainder_of(model.conv.weight).bits
    with torch.no_grad():
        model.conv.weight.mul_(0.5)
    assert fp32_values.fp32_value(model.conv.weight).equal(edited * 0.5)
    assert not masters.copy_of(model.conv.weight).any() and masters.copy_of(torch.ones(1)) is None


@pytest.mark.parametrize('place', HIDDEN)
@pytest.mark.parametrize('level', LEVELS)
def test_hidden_edits_win_when_they_are_named(level: str, place: str, tmp_path: Path) -> None:
    model, wrapper = toy_model(level, torch.device('cpu'))
    bias = model.state_dict()['fc.bias'].clone()
    HIDDEN[place](model, tmp_path)
    assert not model.state_dict()['fc.weight'].equal(model.fc.weight.float()), 'nobody told'
    with pytest.raises(AmpUsageError, match=r"weights_changed\(None\) with master_weights='split'.*name those"):
        wrapper.weights_changed()
    assert wrapper.weights_changed([model.fc.weight, torch.ones(1)]) == ['fc.weight']
    assert model.state_dict()['fc.weight'].equal(model.fc.weight.float())
    assert model.state_dict()['fc.bias'].equal(bias)


@pytest.mark.parametrize('dtype', LEVELS.values())
def test_a_remainder_of_another_number_makes_no_nan(dtype: torch.dtype, device: torch.device) -> None:
    """Whatever was written to a weight through ``.data``: pruned to zero, say."""
    weight = torch.arange(1 << 16, device=device).to(torch.int16).view(dtype).reshape(-1, 1)
    remainder = torch.tensor([-(1 << 15), -1, 0, 1, (1 << 15) - 1], dtype=torch.int16, device=device)
    weight, remainder = (half.contiguous() for half in torch.broadcast_tensors(weight, remainder))
    joined = join(weight, remainder)
    assert joined.isnan().equal(weight.isnan())
    if dtype is torch.bfloat16:
        unit = 2.0 ** (weight.abs().double().log2().floor().clamp(-126, 127) - 7)
        error = (joined.double() - weight.double()).abs()
        assert bool((error <= unit / 2)[weight.isfinite() & joined.isfinite()].all())
    # an update by nothing: sign, decay, momentum, 1 - dampening, nesterov, minus lr, first
    row = torch.tensor([[1.0, 0, 0, 1, 0, -1, 1, 0, 0, 0, 0, 0]], device=device)
    decision = torch.tensor([0, 1, 1, torch.inf, torch.nan, torch.nan, 0, 0], device=device)
    halves = weight.clone(), remainder.clone()
    ops.fused_sgd([torch.zeros_like(weight)], [halves[0]], [], [halves[1]], row, decision)
    assert differences(list(halves), list(split(joined, dtype))) == []


# -- averages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('buffers', [False, True])
@pytest.mark.parametrize('level', LEVELS)
def test_validation_with_an_average_gives_every_bit_back(level: str, buffers: bool, device: torch.device) -> None:
    model, _ = toy_model(level, device)
    average = ExponentialMovingAverage(model, momentum=0.5, update_buffers=buffers)
    average.update_parameters(model)
    exact = model.fc.weight.detach().float().clone(), model.state_dict()['fc.weight'].clone()
    model.load_state_dict({**model.state_dict(), 'fc.weight': exact[1] + 0.1})
    average.update_parameters(model)
    assert average.module.fc.weight.equal(exact[1].lerp(exact[1] + 0.1, 0.5)), 'of FP32 values'
    with torch.no_grad():
        # float16 remainders hold neither
        average.module.fc.weight[0, :2] = torch.tensor([1e-12, 1e30])
    hook = EMAHook()
    hook.src_model, hook.ema_model = model, average

    def all_of_it() -> Any:
        remainders = [fp32_values.remainder_of(parameter) for parameter in model.parameters()]
        held = [None if r is None else r.bits.clone() for r in remainders]
        return copy.deepcopy(
            [dict(model.state_dict(keep_vars=True)), dict(model.state_dict()), held, dict(average.state_dict())]
        )

    before = all_of_it()
    hook._swap_ema_parameters()
    assert differences(before, all_of_it()) != []
    assert model.fc.bias.equal(split(before[3]['module.fc.bias'], model.fc.bias.dtype)[0])
    assert average.module.fc.weight.equal(before[1]['fc.weight'])
    hook._swap_ema_parameters()
    assert differences(before, all_of_it()) == []


# -- the optimizer ----------------------------------------------------------------------------------------------------


def test_only_optimizers_that_step_both_halves(device: torch.device) -> None:
    model = toy.ToyModel().to(device)
    adam = torch.optim.AdamW(model.parameters())
    with pytest.raises(
        AmpAttachError, match="master_weights='split' with AdamW: only FusedAdam, FusedAdamW and FusedSGD"
    ):
        AmpOptimWrapper(opt_level='O2', master_weights='split', optimizer=adam)
    # it does nothing
    AmpOptimWrapper(opt_level='O2', master_weights='split', enabled=False, optimizer=adam)
    with pytest.raises(AmpConfigError, match="master_weights='split' conflicts with opt_level='O1'"):
        AmpOptimWrapper(opt_level='O1', master_weights='split', optimizer=adam)


@pytest.mark.parametrize('level', LEVELS)
def test_parameters_that_come_later(level: str, device: torch.device) -> None:
    model, wrapper = toy_model(level, device, loss_scale=1.0)
    late, wide = (
        nn.Parameter(torch.ones(3, device=device, dtype=LEVELS[level])),
        nn.Parameter(torch.ones(2, device=device)),
    )
    wrapper.optimizer.add_param_group(dict(params=[late, wide]))
    masters = wrapper._engine.parts.params
    assert isinstance(masters, SplitMasters) and masters.copy_of(late) is None
    assert list(wrapper.master_params())[-2] is late
    assert masters.copy_of(late).tolist() == [0, 0, 0] and masters.copy_of(wide) is None
    assert len(masters) == len([p for p in model.parameters() if p.dtype is late.dtype]) + 1
    assert 'shape (3,)' in masters.weights_changed([late])[0]
    wrapper.backward((late.float() * 2.0**-12).sum() + wide.sum() + model.fc.bias.float().sum())
    wrapper.step()
    assert wide.tolist() == [0.5, 0.5] and bool((late == 1).all())
    assert fp32_values.fp32_value(late).tolist() == [1 - 2.0**-13] * 3


def test_two_optimizers_share_a_remainder(device: torch.device) -> None:
    parts = nn.ModuleDict({name: nn.Linear(4, 4) for name in 'abc'}).to(device)
    wrappers = OptimWrapperDict(x=wrap('O2', parts['a'], parts['b']), y=wrap('O2', parts['a'], parts['c']))
    wrappers.initialize_count_status(parts, 0, 10)
    mine, theirs = (wrapper._engine.parts.params for wrapper in wrappers.values())
    weight = parts['a'].weight
    assert mine.copy_of(weight) is theirs.copy_of(weight) is not None
    with torch.no_grad():
        weight.mul_(2)
    mine.write_weights()
    assert theirs.edited() == [], 'a step of one is no edit to the other'
    value = parts.state_dict()['a.weight'].clone()
    wrappers['x'].detach()
    assert weight.dtype is torch.float32 and weight.equal(value)
    assert theirs.copy_of(weight) is None and theirs.edited() == []
    wrappers['y'].detach()
    assert weight.equal(value) and {p.dtype for p in parts.parameters()} == {torch.float32}
    mixed = wrap('O2', parts['a'], parts['b']), wrap('O2', parts['a'], parts['c'], masters=True)
    with pytest.raises(AmpAttachError, match='stepped by two optimizers'):
        OptimWrapperDict(x=mixed[0], y=mixed[1])
