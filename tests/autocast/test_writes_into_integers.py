"""In-place functions whose destination is no type that levels move between do at O1 and O4 what plain torch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_forward import inside

INDEX = torch.tensor([0, 2, 1])
ROWS = INDEX[:, None].expand(3, 3)
# (destination, floating source) -> result; both are 3 x 3
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    'index_put_': lambda d, x: d.index_put_((INDEX,), x),
    'index_put_ that adds': lambda d, x: d.index_put_((INDEX,), x, accumulate=True),
    'index_put': lambda d, x: d.index_put((INDEX,), x),
    'put_': lambda d, x: d.put_(INDEX, x[0]),
    'index_add_': lambda d, x: d.index_add_(0, INDEX, x),
    'index_add': lambda d, x: d.index_add(0, INDEX, x),
    'index_copy_': lambda d, x: d.index_copy_(0, INDEX, x),
    'index_copy': lambda d, x: d.index_copy(0, INDEX, x),
    'index_reduce_': lambda d, x: d.index_reduce_(0, INDEX, x, 'prod'),
    'scatter_': lambda d, x: d.scatter_(0, ROWS, x),
    'scatter': lambda d, x: d.scatter(0, ROWS, x),
    'scatter_ that adds': lambda d, x: d.scatter_(0, ROWS, x, reduce='add'),
    'scatter_add_': lambda d, x: d.scatter_add_(0, ROWS, x),
    'scatter_add': lambda d, x: d.scatter_add(0, ROWS, x),
    'scatter_reduce_': lambda d, x: d.scatter_reduce_(0, ROWS, x, 'sum'),
    'scatter_reduce': lambda d, x: d.scatter_reduce(0, ROWS, x, 'sum'),
    'masked_scatter_': lambda d, x: d.masked_scatter_(ROWS > 0, x),
    'masked_scatter': lambda d, x: d.masked_scatter(ROWS > 0, x),
    'lerp_ by a number': lambda d, x: d.lerp_(x, 0.5),
    'lerp_': lambda d, x: d.lerp_(x, x),
    'addmm_': lambda d, x: d.addmm_(x, x),
    'addmv_': lambda d, x: d[0].addmv_(x, x[0]),
    'addr_': lambda d, x: d.addr_(x[0], x[1]),
    'addbmm_': lambda d, x: d.addbmm_(x[None], x[None]),
    'baddbmm_': lambda d, x: d[None].baddbmm_(x[None], x[None]),
    'pow_': lambda d, x: d.pow_(x),
    'exp_': lambda d, x: d.exp_(),
    'cumsum_': lambda d, x: d.cumsum_(0),
}


def outcome(write: Callable[[Tensor, Tensor], Any], dtype: torch.dtype, x: Tensor) -> Any:
    """The type and numbers of the result and of the destination; None where torch refuses."""
    destination = torch.ones(3, 3).to(dtype)
    try:
        result = write(destination, x)
    except RuntimeError:
        return None
    return result.dtype, result.tolist(), destination.tolist()


@pytest.mark.parametrize(
    'dtype', [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float64], ids=lambda t: str(t)[6:]
)
@pytest.mark.parametrize('level', ['O1', 'O4'])
@pytest.mark.parametrize('name', WRITES)
def test_as_in_plain_torch(name: str, level: str, dtype: torch.dtype) -> None:
    def body(x: Tensor) -> Tensor:
        for source in (x, x.float()):
            given.append(source.clone())
            found.append(outcome(WRITES[name], dtype, source))
        return x

    found: list[Any] = []
    given: list[Tensor] = []
    with torch.no_grad():
        inside(body, level, size=3)
    assert found == [outcome(WRITES[name], dtype, x) for x in given]
