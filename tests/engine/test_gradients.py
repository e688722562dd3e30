"""Clipping settings, and the way of gradients from the model to where the optimizer looks."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_wrapper.engine.clipping import GradientClip
from amp_wrapper.engine.gradients.unscale import accumulate_unscaled, nonfinite_names, unscale_to_masters
from amp_wrapper.errors import AmpConfigError, AmpUsageError

HALVES = (torch.float16, torch.bfloat16)


def scalar(value: float, device: torch.device) -> Tensor:
    return torch.tensor(float(value), device=device)


def parameter(values: Any, dtype: torch.dtype, device: torch.device, grad: Any = None) -> nn.Parameter:
    result = nn.Parameter(torch.tensor(values, device=device, dtype=dtype))
    if grad is not None:
        result.grad = torch.tensor(grad, device=device, dtype=dtype)
    return result


# -- clipping -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('given', 'kind', 'arguments', 'raises'),
    [
        ({'max_norm': 1.0}, 'norm', {'max_norm': 1.0}, False),
        ({'type': 'norm', 'max_norm': 0}, 'norm', {'max_norm': 0}, False),
        ({'max_norm': 35, 'norm_type': 2}, 'norm', {'max_norm': 35, 'norm_type': 2}, False),
        ({'max_norm': 1, 'error_if_nonfinite': True}, 'norm', {'max_norm': 1, 'error_if_nonfinite': True}, True),
        ({'type': 'value', 'clip_value': 0.5}, 'value', {'clip_value': 0.5}, False),
        ({'type': 'value', 'clip_value': 0.5, 'foreach': False}, 'value', {'clip_value': 0.5, 'foreach': False}, False),
        ({'max_norm': math.inf}, 'norm', {'max_norm': math.inf}, False),
    ],
    ids=str,
)
def test_parse(given: dict[str, Any], kind: str, arguments: dict[str, Any], raises: bool) -> None:
    before = copy.deepcopy(given)
    clip = GradientClip.parse(given)
    assert clip is not None and clip.kind == kind and clip.arguments == arguments
    assert clip.raises_on_nonfinite is raises
    assert given == before


def test_parse_nothing() -> None:
    assert GradientClip.parse(None) is None


@pytest.mark.parametrize(
    ('given', 'words'),
    [
        ({}, ['clip_grad={}', 'max_norm']),
        (1.0, ['clip_grad=1.0']),
        ([('max_norm', 1)], ['must be a dict']),
        ({'type': 'nrom', 'max_norm': 1}, ["clip_grad['type']='nrom'", "'norm' or 'value'"]),
        ({'max_nrom': 1}, ["'max_nrom'", "did you mean 'max_norm'?", "lacks 'max_norm'"]),
        ({'norm_type': 2}, ["lacks 'max_norm'"]),
        ({'max_norm': -1}, ["clip_grad['max_norm']=-1"]),
        ({'max_norm': math.nan}, ["clip_grad['max_norm']=nan"]),
        ({'max_norm': '1'}, ["clip_grad['max_norm']='1'"]),
        ({'max_norm': None}, ["clip_grad['max_norm']=None"]),
        ({'max_norm': True}, ["clip_grad['max_norm']=True"]),
        ({'type': 'value', 'max_norm': 1}, ["'max_norm'", "lacks 'clip_value'"]),
        ({'type': 'value', 'clip_value': -0.1}, ["clip_grad['clip_value']=-0.1"]),
        ({'max_norm': 1, 'clip_value': 1}, ["'clip_value'"]),
    ],
    ids=str,
)
def test_parse_errors(given: Any, words: list[str]) -> None:
    with pytest.raises(AmpConfigError) as caught:
        GradientClip.parse(given)
    for word in words:
        assert word in str(caught.value)


def test_apply_norm(device: torch.device) -> None:
    parameters = [parameter([0.0], torch.float32, device, [3.0]), parameter([0.0], torch.float32, device, [4.0])]
    parameters += [parameter([0.0], torch.float32, device), nn.Parameter(torch.ones(1, device=device), False)]
    clip = GradientClip.parse({'max_norm': 1.0})
    assert clip is not None
    norm = clip.apply(parameters)
    assert norm is not None and norm.item() == 5.0 and norm.shape == ()
    assert [p.grad.item() for p in parameters[:2]] == pytest.approx([0.6, 0.8], rel=1e-5)
    assert parameters[2].grad is None


def test_apply_value(device: torch.device) -> None:
    p = parameter([0.0, 0.0], torch.float32, device, [3.0, -0.25])
    clip = GradientClip.parse({'type': 'value', 'clip_value': 0.5})
    assert clip is not None and clip.apply([p]) is None
    assert p.grad is not None and p.grad.tolist() == [0.5, -0.25]


def test_apply_without_gradients(device: torch.device) -> None:
    clip = GradientClip.parse({'max_norm': 1.0})
    assert clip is not None and clip.apply([parameter([0.0], torch.float32, device)]) is None and clip.apply([]) is None


# -- unscaling ----------------------------------------------------------------------------------------------------

bits = st.integers(0, 2**16 - 1)


def from_bits(patterns: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    signed = [p - 2**16 if p >= 2**15 else p for p in patterns]
    return torch.tensor(signed, dtype=torch.int16).view(dtype).to(device)


@settings(max_examples=60, deadline=None)
@given(patterns=st.lists(bits, min_size=1, max_size=9), power=st.integers(0, 24), dtype=st.sampled_from(HALVES))
def test_power_of_two_scales_lose_no_bit(
    device: torch.device, patterns: list[int], power: int, dtype: torch.dtype
) -> None:
    grad = from_bits(patterns, dtype, device)
    weight, master = nn.Parameter(torch.zeros_like(grad)), nn.Parameter(torch.zeros_like(grad, dtype=torch.float32))
    weight.grad = grad.clone()
    found = scalar(0, device)
    unscale_to_masters([(weight, master)], [], scalar(2.0**-power, device), found)
    assert master.grad is not None and master.grad.dtype is torch.float32
    exact = grad.double() * 2.0**-power
    # below float32's normal numbers a product may round; there is nothing exact to compare with
    normal = (exact.abs() >= 2.0**-126) | (exact == 0) | ~exact.isfinite()
    assert torch.equal(master.grad.double()[normal].nan_to_num(7.0), exact[normal].nan_to_num(7.0))
    assert found.item() == float(not grad.isfinite().all())
    assert torch.equal(weight.grad.view(torch.int16), grad.view(torch.int16))


@pytest.mark.parametrize('dtype', [torch.float32, *HALVES, torch.float64], ids=str)
def test_own_gradients_are_unscaled_in_place(dtype: torch.dtype, device: torch.device) -> None:
    p = parameter([0.0, 0.0], dtype, device, [8.0, -3.0])
    grad = p.grad
    unscale_to_masters([], [p, parameter([1.0], dtype, device)], scalar(0.25, device), scalar(0, device))
    assert p.grad is grad and grad is not None and grad.tolist() == [2.0, -0.75] and grad.dtype is dtype


def test_small_float16_gradients_survive(device: torch.device) -> None:
    weight, master = parameter([0.0], torch.float16, device, [2.0**-20]), parameter([0.0], torch.float32, device)
    unscale_to_masters([(weight, master)], [], scalar(2.0**-16, device), None)
    assert master.grad is not None and master.grad.item() == 2.0**-36


def test_no_scale_and_no_check(device: torch.device) -> None:
    weight, master = parameter([0.0], torch.float16, device, [math.inf]), parameter([0.0], torch.float32, device)
    own = parameter([0.0], torch.float32, device, [3.0])
    unscale_to_masters([(weight, master)], [own], None, None)
    assert master.grad is not None and master.grad.item() == math.inf
    assert own.grad is not None and own.grad.item() == 3.0


@pytest.mark.parametrize('where', ['pair', 'own', 'nowhere'])
def test_flag(where: str, device: torch.device) -> None:
    weight = parameter([0.0], torch.float16, device, [math.nan if where == 'pair' else 1.0])
    own = parameter([0.0, 0.0], torch.float32, device, [1.0, -math.inf if where == 'own' else 1.0])
    found = scalar(0, device)
    unscale_to_masters([(weight, parameter([0.0], torch.float32, device))], [own], scalar(0.5, device), found)
    assert found.item() == (where != 'nowhere')


def test_missing_gradient_clears_the_masters(device: torch.device) -> None:
    weight, master = parameter([0.0], torch.float16, device), parameter([0.0], torch.float32, device, [5.0])
    unscale_to_masters([(weight, master)], [], scalar(0.5, device), scalar(0, device))
    assert master.grad is None


# -- several passes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype', HALVES, ids=str)
def test_passes_accumulate_in_fp32(dtype: torch.dtype, device: torch.device) -> None:
    """1 + 2^-12 needs more bits than either 16-bit type has."""
    weight, master = parameter([0.0], dtype, device), parameter([0.0], torch.float32, device)
    own = parameter([0.0], torch.float32, device)
    passes = [(1.0, 1.0), (2.0**-4, 2.0**-8), (2.0**-2, 2.0**-10)]
    found = scalar(0, device)
    for grad, inverse in passes:
        weight.grad = torch.full_like(weight, grad)
        before = {} if own.grad is None else {id(own): own.grad}
        own.grad = torch.full_like(own, grad)
        accumulate_unscaled([(weight, master)], [own], before, scalar(inverse, device), found)
        assert weight.grad is not None and weight.grad.item() == grad
    expected = 1.0 + 2.0**-12 + 2.0**-12
    assert master.grad is not None and master.grad.item() == expected and master.grad.dtype is torch.float32
    assert own.grad is not None and own.grad.item() == expected
    assert found.item() == 0.0


def test_pass_without_a_gradient_keeps_the_sum(device: torch.device) -> None:
    weight, master = parameter([0.0], torch.float16, device), parameter([0.0], torch.float32, device, [3.0])
    own, earlier = parameter([0.0], torch.float32, device), torch.full((1,), 4.0, device=device)
    accumulate_unscaled([(weight, master)], [own], {id(own): earlier}, scalar(0.5, device), scalar(0, device))
    assert master.grad is not None and master.grad.item() == 3.0
    assert own.grad is earlier


def test_nonfinite_sum_of_finite_passes_is_no_overflow(device: torch.device) -> None:
    own = parameter([0.0], torch.float32, device, [3e38])
    found = scalar(0, device)
    accumulate_unscaled([], [own], {id(own): torch.full((1,), 3e38, device=device)}, None, found)
    assert own.grad is not None and own.grad.item() == math.inf and found.item() == 0.0


# -- sparse -------------------------------------------------------------------------------------------------------


def sparse(rows: list[int], values: list[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    data = torch.tensor(values, dtype=dtype, device=device)[:, None]
    return torch.sparse_coo_tensor(torch.tensor([rows], device=device), data, (5, 1))


@pytest.mark.parametrize('dtype', [torch.float32, *HALVES], ids=str)
def test_sparse_gradients_stay_sparse(dtype: torch.dtype, device: torch.device) -> None:
    weight = nn.Parameter(torch.zeros(5, 1, device=device, dtype=dtype))
    master, own = (nn.Parameter(torch.zeros(5, 1, device=device)) for _ in range(2))
    weight.grad = sparse([3, 1, 3], [1.0, 2.0, 4.0], dtype, device)
    own.grad = sparse([3, 1, 3], [1.0, 2.0, 4.0], torch.float32, device)
    found = scalar(0, device)
    unscale_to_masters([(weight, master)], [own], scalar(0.5, device), found)
    for grad in (master.grad, own.grad):
        assert grad is not None and grad.is_sparse and grad.dtype is torch.float32
        assert grad.to_dense().flatten().tolist() == [0.0, 1.0, 0.0, 2.5, 0.0]
    assert weight.grad.to_dense().flatten().tolist() == [0.0, 2.0, 0.0, 5.0, 0.0]
    assert found.item() == 0.0


@pytest.mark.parametrize('where', ['pair', 'own'])
def test_sparse_overflow_is_found(where: str, device: torch.device) -> None:
    weight = nn.Parameter(torch.zeros(5, 1, device=device, dtype=torch.float16))
    master, own = (nn.Parameter(torch.zeros(5, 1, device=device)) for _ in range(2))
    weight.grad = sparse([1], [math.inf if where == 'pair' else 1.0], torch.float16, device)
    own.grad = sparse([1], [math.nan if where == 'own' else 1.0], torch.float32, device)
    found = scalar(0, device)
    unscale_to_masters([(weight, master)], [own], scalar(0.5, device), found)
    assert found.item() == 1.0


def test_sparse_duplicates_are_summed_in_fp32(device: torch.device) -> None:
    """Two finite gradients of one row are no overflow, though float16 cannot hold their sum."""
    weight = nn.Parameter(torch.zeros(5, 1, device=device, dtype=torch.float16))
    master = nn.Parameter(torch.zeros(5, 1, device=device))
    weight.grad = sparse([2, 2], [40000.0, 40000.0], torch.float16, device)
    found = scalar(0, device)
    unscale_to_masters([(weight, master)], [], scalar(2.0**-4, device), found)
    assert master.grad is not None and master.grad.to_dense()[2].item() == 5000.0
    assert found.item() == 0.0


def test_sparse_passes_accumulate(device: torch.device) -> None:
    weight = nn.Parameter(torch.zeros(5, 1, device=device, dtype=torch.float16))
    master = nn.Parameter(torch.zeros(5, 1, device=device))
    for row, inverse in ((1, 0.5), (3, 0.25), (1, 1.0)):
        weight.grad = sparse([row], [8.0], torch.float16, device)
        accumulate_unscaled([(weight, master)], [], {}, scalar(inverse, device), scalar(0, device))
    assert master.grad is not None and master.grad.to_dense().flatten().tolist() == [0.0, 12.0, 0.0, 2.0, 0.0]


# -- names --------------------------------------------------------------------------------------------------------


def test_nonfinite_names(device: torch.device) -> None:
    named = [
        ('good', parameter([0.0], torch.float32, device, [1.0])),
        ('nan', parameter([0.0, 0.0], torch.float16, device, [1.0, math.nan])),
        ('none', parameter([0.0], torch.float32, device)),
        ('inf', parameter([0.0], torch.float32, device, [-math.inf])),
        ('huge', parameter([0.0, 0.0], torch.float32, device, [3e38, 3e38])),
        ('empty', nn.Parameter(torch.zeros(0, device=device))),
    ]
    named[-1][1].grad = torch.zeros(0, device=device)
    embedding = nn.Parameter(torch.zeros(5, 1, device=device))
    embedding.grad = sparse([1], [math.inf], torch.float32, device)
    named.append(('sparse', embedding))
    assert nonfinite_names(named) == ['nan', 'inf', 'sparse']
    assert nonfinite_names([]) == []


@pytest.mark.parametrize('kind', ['expanded', 'shared'])
@pytest.mark.parametrize('accumulates', [False, True])
def test_gradients_that_share_memory_are_refused(kind: str, accumulates: bool, device: torch.device) -> None:
    """One tensor as the gradient of two parameters would be unscaled twice."""
    own = [nn.Parameter(torch.zeros(3, device=device)) for _ in range(2)]
    weight = nn.Parameter(torch.zeros(2, device=device, dtype=torch.float16))
    master = nn.Parameter(torch.zeros(2, device=device))
    weight.grad = torch.ones_like(weight)
    shared = torch.full((3,), 8.0, device=device)
    for parameter in own:
        parameter.grad = shared if kind == 'shared' else torch.full((1,), 8.0, device=device).expand(3)
    call = functools.partial(accumulate_unscaled, before={}) if accumulates else unscale_to_masters
    with pytest.raises(AmpUsageError, match=r'share memory.*clone\(\)'):
        call([(weight, master)], own, inverse_scale=scalar(0.5, device), found_inf=scalar(0, device))
    assert master.grad is None and weight.grad is not None
    assert all(parameter.grad is not None and parameter.grad.tolist() == [8.0, 8.0, 8.0] for parameter in own)
