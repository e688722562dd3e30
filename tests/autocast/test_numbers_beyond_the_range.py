"""Finite numbers that a 16-bit type cannot hold become its largest, with one warning for a model; infinities stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from toy_forward import APIS, TYPES, Inside, forward, inside

from amp_wrapper import amp

HUGE = torch.finfo(torch.float32).min
FILLS: dict[str, Callable[[Tensor, float], Tensor]] = {
    'masked_fill': lambda x, v: x.masked_fill(x < 9, v),
    'masked_fill by name': lambda x, v: x.masked_fill(mask=x < 9, value=v),
    'torch.masked_fill': lambda x, v: torch.masked_fill(x, x < 9, v),
    'masked_fill by a tensor': lambda x, v: x.masked_fill(x < 9, torch.tensor(v)),
    'where by a tensor': lambda x, v: torch.where(x > 9, x, torch.tensor(v)),
    'where by a tensor, the other way': lambda x, v: torch.where(x < 9, torch.tensor(v, dtype=torch.float64), x),
    'masked_fill_': lambda x, v: x.clone().masked_fill_(x < 9, v),
    'where': lambda x, v: torch.where(x > 9, x, v),
    'where, the other way': lambda x, v: torch.where(x < 9, v, x),
    'Tensor.where': lambda x, v: x.where(x > 9, v),
    'full_like': lambda x, v: torch.full_like(x, v),
    'new_full': lambda x, v: x.new_full((2, 70000), v),
    'fill_': lambda x, v: x.clone().fill_(v),
    'index_fill': lambda x, v: x.index_fill(0, torch.arange(len(x)), v),
    'scatter': lambda x, v: x.scatter(1, torch.arange(8).expand(8, 8), v),
    'pad': lambda x, v: F.pad(x, (1, 0), value=v)[:, :1],
    'clamp': lambda x, v: x.clamp(v, v) if v < 0 else x.clamp(min=v),
}


@pytest.mark.parametrize('api', APIS)
@pytest.mark.parametrize('level', TYPES)
@pytest.mark.parametrize('name', FILLS)
def test_it_is_the_largest_of_the_type(name: str, level: str, api: str) -> None:
    limits = torch.finfo(TYPES[level])
    for value, expected in ((HUGE, limits.min), (-HUGE, limits.max), (-torch.inf, -torch.inf), (-3.0, -3.0)):
        seen = inside(lambda x, value=value: FILLS[name](x, value), level, api).seen
        assert seen.dtype is TYPES[level] and set(seen.flatten().tolist()) == {expected}


@pytest.mark.parametrize('name', FILLS)
def test_in_a_graph_as_outside(name: str) -> None:
    torch._dynamo.reset()
    model = amp.initialize(Inside(lambda x: FILLS[name](x, -1e9)), opt_level='O2', verbosity=0)
    x = torch.randn(8, 8)
    assert torch.equal(torch.compile(model, backend='aot_eager', fullgraph=True)(x), model(x))


def test_a_row_that_is_masked_as_a_whole_has_no_nan() -> None:
    for level in TYPES:
        assert inside(lambda x: x.masked_fill(x < 99, -1e9).softmax(-1), level).seen.sum() == 8


def test_other_types_are_left_to_torch() -> None:
    def body(x: Tensor) -> Tensor:
        wide = x.float().masked_fill(x < 9, -1e9), torch.full_like(x, -1e9, dtype=torch.float32)
        assert all(y.min() == -1e9 for y in wide)
        with pytest.raises(RuntimeError):
            torch.zeros(2, dtype=torch.int8).fill_(1000)
        return x

    for level in TYPES:
        inside(body, level)
    with pytest.raises(RuntimeError, match='overflow'):
        torch.ones(2, dtype=torch.float16).masked_fill(torch.ones(2) > 0, -1e9)


@pytest.mark.parametrize('api', APIS)
def test_one_warning_for_a_model(api: str, caplog: pytest.LogCaptureFixture) -> None:
    def body(x: Tensor) -> Tensor:
        return x.masked_fill(x > 0, -1e9).masked_fill(x < 0, 1e9)

    for verbosity in (0, 1, 1):
        caplog.clear()
        # another model speaks
        amp.initialize(Inside(body), opt_level='O2', verbosity=1)
        with caplog.at_level('WARNING', 'amp_wrapper'):
            forward(Inside(body), torch.randn(8, 8), 'O2', api, verbosity)
        said = [record.getMessage() for record in caplog.records if 'beyond the range' in record.getMessage()]
        assert len(said) == verbosity and all('masked_fill' in x and 'torch.finfo(x.dtype).min' in x for x in said)
