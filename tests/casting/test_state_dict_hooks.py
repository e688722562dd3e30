"""State dicts of cast models are FP32, and loads reach the masters unrounded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_cast import CAST_LEVELS, cast, cast_with_masters, dtypes, hook_count, net

from amp_wrapper.casting.find_hooks import is_cast
from amp_wrapper.casting.state_dict_hooks import restore_fp32_copy

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


# -- the FP32 view ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', CAST_LEVELS)
@pytest.mark.parametrize('prefix', ['', 'model.'])
def test_state_dict_holds_masters(level: str, prefix: str, device: torch.device, log: list[str]) -> None:
    model = net(device)
    before = copy.deepcopy(model.state_dict(prefix=prefix))
    _, masters = cast_with_masters(model, level)
    state = model.state_dict(prefix=prefix)
    assert list(state) == list(before)
    for key, value in state.items():
        assert value.dtype is before[key].dtype and not value.requires_grad
        if key.removeprefix(prefix) in masters:
            assert torch.equal(value, before[key]), key
    rounded = before[f'{prefix}mean'].to(CAST_LEVELS[level]).float()
    assert torch.equal(state[f'{prefix}mean'], rounded)
    assert log == []


def test_state_dict_of_a_submodule(device: torch.device) -> None:
    model = net(device)
    _, masters = cast_with_masters(model)
    assert torch.equal(model.head.state_dict()['weight'], masters['head.weight'])


def test_state_dict_without_masters_is_the_weights_in_fp32(device: torch.device) -> None:
    model = net(device)
    cast(model, 'O3')
    for key, value in model.state_dict().items():
        parameter = dict((*model.named_parameters(), *model.named_buffers()))[key]
        assert value.dtype in (F32, torch.int64) and torch.equal(value, parameter.to(value.dtype))


def test_keep_vars_gives_the_variables(device: torch.device) -> None:
    model = net(device)
    cast_with_masters(model)
    state = model.state_dict(keep_vars=True)
    for name, parameter in model.named_parameters():
        assert state[name] is parameter
    assert state['mean'] is model.mean and state['mean'].dtype is F16


def mmengine_load(module: nn.Module, state: dict[str, Tensor]) -> None:
    checkpoint = pytest.importorskip('mmengine.runner.checkpoint')
    checkpoint.load_state_dict(module, state, strict=True)


LOADERS: dict[str, Callable[[nn.Module, dict[str, Tensor]], Any]] = {
    'load': lambda module, state: module.load_state_dict(state),
    'assign': lambda module, state: module.load_state_dict(state, assign=True),
    'mmengine': mmengine_load,
}


@pytest.mark.parametrize('how', LOADERS)
@pytest.mark.parametrize('where', ['', 'head', 'bn', 'conv'])
@pytest.mark.parametrize('source', [F32, F16])
def test_loads_reach_the_masters_unrounded(
    how: str, where: str, source: torch.dtype, device: torch.device, log: list[str]
) -> None:
    model = net(device)
    _, masters = cast_with_masters(model)
    objects = dict(model.named_parameters())
    module = model.get_submodule(where)
    torch.manual_seed(7)
    state = {
        key: torch.randn_like(value).to(source) if value.is_floating_point() else value + 3
        for key, value in module.state_dict().items()
    }
    given = {key: value.clone() for key, value in state.items()}
    LOADERS[how](module, state)
    prefix = f'{where}.' if where else ''
    for key, value in given.items():
        name = prefix + key
        if name in masters:
            assert masters[name].dtype is F32 and torch.equal(masters[name], value.float())
            assert torch.equal(objects[name], value.half()) and objects[name].dtype is F16
        elif name in objects:
            assert objects[name].dtype is F32 and torch.equal(objects[name], value.float())
        if name != 'mean':
            assert torch.equal(model.state_dict()[name], value.to(model.state_dict()[name].dtype))
        assert torch.equal(state[key], value)
    assert all(objects[name] is parameter for name, parameter in model.named_parameters())
    assert log == []


def test_a_load_does_not_alias_the_callers_tensors(device: torch.device) -> None:
    model = net(device)
    _, masters = cast_with_masters(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    for assign in (False, True):
        model.load_state_dict(state, assign=assign)
        kept = {key: value.clone() for key, value in state.items()}
        for tensor in (*masters.values(), *model.parameters()):
            tensor.data.fill_(9.0)
        assert all(torch.equal(state[key], value) for key, value in kept.items())


@pytest.mark.parametrize(
    'edit',
    [
        lambda p: p.data.clamp_(-0.01, 0.01),
        lambda p: p.data.copy_(torch.full_like(p, 2.5)),
        lambda p: setattr(p, 'data', torch.full_like(p, 2.5)),
    ],
    ids=['clamp', 'copy', 'replace'],
)
def test_edit_wins_at_saving_with_one_warning(edit: Any, device: torch.device, log: list[str]) -> None:
    model = net(device)
    _, masters = cast_with_masters(model)
    kept = masters['head.bias'].clone()
    edit(model.head.weight)
    rounded = model.head.weight.detach().float()
    changed = model.head.weight.detach() != masters['head.weight'].half()
    expected = torch.where(changed, rounded, masters['head.weight'])
    state = model.state_dict()
    assert torch.equal(state['head.weight'], expected) and torch.equal(masters['head.weight'], expected)
    assert torch.equal(state['head.bias'], kept)
    assert len(log) == 1 and log[0].startswith('WARNING') and 'head.weight' in log[0]
    model.state_dict()
    assert len(log) == 1


def test_restore_fp32_copy(device: torch.device) -> None:
    model = net(device)
    _, masters = cast_with_masters(model)
    duplicate = copy.deepcopy(model)
    objects = dict(duplicate.named_parameters())
    assert restore_fp32_copy(duplicate, model) is True
    assert hook_count(duplicate) == 0 and set(dtypes(duplicate).values()) == {F32, torch.int64}
    for name, parameter in duplicate.named_parameters():
        assert parameter is objects[name]
        if name in masters:
            assert torch.equal(parameter, masters[name]) and parameter.data_ptr() != masters[name].data_ptr()
    assert model.head.weight.dtype is F16 and is_cast(model)
    plain = net(device)
    assert restore_fp32_copy(copy.deepcopy(plain), plain) is False
