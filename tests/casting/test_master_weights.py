"""Pairs of model weight and master: where masters come from, stand, and go back to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from amp_wrapper.casting.masters import Fp32Masters, cast_state_to_parameters

HALVES = (torch.float16, torch.bfloat16)
# rounded differently by both 16-bit types
VALUES = [0.1, -1 / 3, 1e-9, 1000.1]


def make(device: torch.device, dtype: torch.dtype = torch.float16, **kwargs: Any) -> Any:
    """(optimizer, weights, masters, pairs told of); the weights are 16-bit afterwards, as a cast would leave them."""
    weights = {name: nn.Parameter(torch.tensor(VALUES, device=device) * scale) for name, scale in (('a', 1), ('b', -2))}
    kept = nn.Parameter(torch.ones(2, device=device))
    optimizer = kwargs.get('kind', SGD)(
        [{'params': [weights['a'], kept]}, {'params': [weights['b']], 'lr': 0.5}], lr=0.1
    )
    prepare = kwargs.get('prepare')
    if prepare is not None:
        prepare(optimizer)
    told: list[tuple[nn.Parameter, nn.Parameter]] = []
    masters = Fp32Masters(optimizer, weights, lambda weight, record: told.append((weight, record.tensor)))
    for weight in weights.values():
        weight.data = weight.data.to(dtype)
    masters.settle()
    return optimizer, weights, masters, told, kept


def step_once(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group['params']):
            parameter.grad = torch.full_like(parameter, 0.01 * (index + 1))
    optimizer.step()
    optimizer.zero_grad()


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize('dtype', HALVES, ids=str)
def test_masters_are_the_unrounded_weights(dtype: torch.dtype, device: torch.device) -> None:
    _, weights, masters, told, _ = make(device, dtype)
    assert len(masters) == 2 and [w for w, _ in masters.pairs] == list(weights.values())
    assert list(masters.pairs) == told
    for (weight, master), scale in zip(masters.pairs, (1, -2)):
        exact = torch.tensor(VALUES, device=device) * scale
        assert master.dtype is torch.float32 and torch.equal(master, exact)
        assert not torch.equal(weight.float(), exact) and torch.equal(weight, exact.to(dtype))


def test_masters_stand_where_the_weights_stood(device: torch.device) -> None:
    groups: list[Any] = []
    optimizer, weights, masters, _, kept = make(device, prepare=lambda o: groups.extend(o.param_groups))
    (a, b) = (master for _, master in masters.pairs)
    # schedulers hold these very dicts
    assert all(now is before for now, before in zip(optimizer.param_groups, groups))
    assert groups[0]['params'][0] is a and groups[0]['params'][1] is kept and groups[1]['params'][0] is b
    assert (groups[0]['lr'], groups[1]['lr']) == (0.1, 0.5)
    assert masters.weight_of(a) is weights['a'] and masters.without_master() == [kept]
    assert isinstance(a, nn.Parameter) and a.is_leaf


@pytest.mark.parametrize('frozen', [True, False])
def test_requires_grad_is_carried_over(frozen: bool, device: torch.device) -> None:
    weight = nn.Parameter(torch.ones(2, device=device), requires_grad=not frozen)
    masters = Fp32Masters(SGD([weight], lr=0.1), {'w': weight}, lambda *pair: None)
    assert next(iter(masters.pairs))[1].requires_grad is not frozen


def test_weights_outside_the_optimizer_get_no_master(device: torch.device) -> None:
    inside, outside = (nn.Parameter(torch.ones(1, device=device)) for _ in range(2))
    masters = Fp32Masters(SGD([inside], lr=0.1), {'in': inside, 'out': outside}, lambda *pair: None)
    assert [weight for weight, _ in masters.pairs] == [inside]


def test_optimizer_state_is_carried_over_uncast(device: torch.device) -> None:
    before: dict[str, Tensor] = {}

    def prepare(optimizer: Optimizer) -> None:
        step_once(optimizer)
        before.update(tensors(optimizer.state[optimizer.param_groups[0]['params'][0]]))

    optimizer, weights, masters, _, kept = make(device, kind=Adam, prepare=prepare)
    (_, master), _ = masters.pairs
    assert weights['a'] not in optimizer.state and kept in optimizer.state and len(optimizer.state) == 3
    after = optimizer.state[master]
    assert set(before) == {'step', 'exp_avg', 'exp_avg_sq'}
    assert all(after[key] is value and value.dtype is torch.float32 for key, value in before.items())
    # 1e-4 squared times 1e-3 is 0 in float16
    assert after['exp_avg_sq'].min() > 0


def test_no_state_is_made_where_none_was(device: torch.device) -> None:
    optimizer, _, masters, _, _ = make(device, kind=Adam)
    assert len(optimizer.state) == 0
    masters.release()
    assert len(optimizer.state) == 0


@pytest.mark.parametrize('dtype', HALVES, ids=str)
def test_write_weights(dtype: torch.dtype, device: torch.device) -> None:
    _, _, masters, _, _ = make(device, dtype)
    for _, master in masters.pairs:
        with torch.no_grad():
            master.mul_(1.5)
    for _ in range(2):
        masters.write_weights()
        for weight, master in masters.pairs:
            assert torch.equal(weight, master.to(dtype)) and weight.dtype is dtype
    assert masters.edited() == []


def test_copy_of_some_pairs(device: torch.device) -> None:
    _, weights, masters, _, _ = make(device)
    for _, master in masters.pairs:
        master.data.fill_(2.0)
    masters.write_weights([weights['b']])
    assert weights['b'].tolist() == [2.0] * 4 and weights['a'].tolist() != [2.0] * 4


def test_edits_in_place_are_noticed(device: torch.device) -> None:
    _, weights, masters, _, _ = make(device)
    assert masters.edited() == []
    with torch.no_grad():
        weights['b'].clamp_(-0.5, 0.5)
    assert masters.edited() == [weights['b']]
    assert masters.refresh(masters.edited()) == ['b']
    assert masters.edited() == []


@pytest.mark.parametrize('dtype', HALVES, ids=str)
def test_refresh_is_element_by_element(dtype: torch.dtype, device: torch.device) -> None:
    _, weights, masters, _, _ = make(device, dtype)
    weights['a'].data[1] = 7.0
    (_, master), (_, other) = masters.pairs
    exact = torch.tensor(VALUES, device=device)
    assert masters.refresh() == ['a']
    assert master[1].item() == 7.0
    keep = [0, 2, 3]
    assert torch.equal(master[keep], exact[keep]) and torch.equal(other, -2 * exact)
    assert masters.refresh() == []


def test_refresh_takes_nonfinite_values_too(device: torch.device) -> None:
    _, weights, masters, _, _ = make(device)
    weights['a'].data[0] = math.nan
    weights['b'].data[2] = math.inf
    assert masters.refresh() == ['a', 'b']
    (_, a), (_, b) = masters.pairs
    assert math.isnan(a[0].item()) and b[2].item() == math.inf
    assert masters.refresh([]) == []


@pytest.mark.parametrize('dtype', HALVES, ids=str)
def test_adopt_after_add_param_group(dtype: torch.dtype, device: torch.device) -> None:
    optimizer, _, masters, told, _ = make(device, dtype)
    late = nn.Parameter(torch.tensor(VALUES, device=device).to(dtype))
    wide = nn.Parameter(torch.ones(1, device=device))
    optimizer.add_param_group({'params': [late, wide], 'lr': 0.3})
    masters.adopt()
    assert len(masters) == 3 and told[-1][0] is late
    master = told[-1][1]
    assert optimizer.param_groups[2]['params'][0] is master and optimizer.param_groups[2]['params'][1] is wide
    assert master.dtype is torch.float32 and torch.equal(master, late.float())
    assert 'shape (4,)' in masters.name(late)
    masters.adopt()
    assert len(masters) == 3 and len(told) == 3
    step_once(optimizer)
    masters.write_weights()
    assert torch.equal(late, master.to(dtype))


def test_release(device: torch.device) -> None:
    optimizer, weights, masters, _, kept = make(device, kind=Adam)
    step_once(optimizer)
    pairs = list(masters.pairs)
    states = [tensors(optimizer.state[master]) for _, master in pairs]
    masters.release()
    first, second = optimizer.param_groups
    assert first['params'][0] is weights['a'] and first['params'][1] is kept and second['params'][0] is weights['b']
    for (weight, master), state in zip(pairs, states):
        assert master not in optimizer.state
        assert all(optimizer.state[weight][key] is value for key, value in state.items())
    assert len(masters) == 0 and masters.weight_of(pairs[0][1]) is pairs[0][1] and masters.edited() == []


def test_names(device: torch.device) -> None:
    _, weights, masters, _, _ = make(device)
    assert masters.name(weights['b']) == 'b'
    assert 'shape (2, 3)' in masters.name(torch.ones(2, 3, device=device))


@pytest.mark.parametrize('dtype', HALVES, ids=str)
def test_cast_state_to_parameters(dtype: torch.dtype, device: torch.device) -> None:
    parameters = [nn.Parameter(torch.ones(2, device=device)) for _ in range(3)]
    optimizer = Adam(parameters[:2], lr=0.1)
    step_once(optimizer)
    parameters[0].data = parameters[0].data.to(dtype)
    cast_state_to_parameters(optimizer, [parameters[0], parameters[2]])
    first, second = (optimizer.state[parameter] for parameter in parameters[:2])
    assert first['exp_avg'].dtype is first['exp_avg_sq'].dtype is dtype and first['step'].dtype is torch.float32
    assert second['exp_avg'].dtype is torch.float32
    assert parameters[2] not in optimizer.state
