"""16-bit and FP32 meet in a forward: products are 16-bit, writes take the type of their destination, numbers fit its range."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bits import same, same_bits
from forwards import CAST, DOORS, HALF, PER_OP, Forwards, Inside, prepared
from mmengine.model.efficient_conv_bn_eval import turn_on_efficient_conv_bn_eval_for_single_model
from op_calls import ALL_ROWS, MASK, MIXED_PRODUCTS, PLACES, PRODUCTS, ROWS, WRITES, Call
from torch import Tensor, nn

from amp_wrapper import amp

F32 = torch.float32
#: A destination and a source, both 4 x 4; those that write return their destination or nothing.
ALL_WRITES: dict[str, Call] = {
    **{
        form: lambda to, x, form=form, name=name: getattr(to, form)(*WRITES[name](x))
        for name in WRITES
        for form in (name, f'{name}_')
    },
    'setitem': lambda to, x: to.__setitem__(ROWS, x[:2]),
    'setitem behind a slice': lambda to, x: to.__setitem__((slice(None), ROWS), x[:, :2]),
    'setitem by a mask': lambda to, x: to.__setitem__(MASK, x[:3]),
    'index_put_ that adds': lambda to, x: to.index_put_((ROWS,), x[:2], accumulate=True),
    'scatter_ that adds': lambda to, x: to.scatter_(0, PLACES, x, reduce='add'),
}
#: More that write, which O1 and O4 know.
ARITHMETIC: dict[str, Call] = {
    'lerp_ by a number': lambda to, x: to.lerp_(x, 0.5),
    'lerp_': lambda to, x: to.lerp_(x, x),
    'addmm_': lambda to, x: to.addmm_(x, x),
    'addmv_': lambda to, x: to[0].addmv_(x, x[0]),
    'addr_': lambda to, x: to.addr_(x[0], x[1]),
    'addbmm_': lambda to, x: to.addbmm_(x[None], x[None]),
    'baddbmm_': lambda to, x: to[None].baddbmm_(x[None], x[None]),
    'pow_': lambda to, x: to.pow_(x),
    'exp_': lambda to, x: to.exp_(),
    'cumsum_': lambda to, x: to.cumsum_(0),
}


@pytest.fixture(scope='module')
def forwards() -> Forwards:
    return Forwards()


@pytest.fixture(autouse=True)
def put_is_allowed() -> None:
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize('level', CAST)
def test_products_of_unlike_operands_are_16_bit(level: str, forwards: Forwards) -> None:
    half, wrong, other = HALF[level], [], torch.randn(4, 4)
    given = torch.randn(4, 4).to(half)
    for name, product in (PRODUCTS | MIXED_PRODUCTS).items():
        for x, y in ((given, other), (other, given)):
            found = forwards(level, product, x, y).seen
            if not same_bits(found, product(x.to(half), y.to(half))):
                wrong.append((name, x.dtype, found.dtype))
    assert wrong == []


@pytest.mark.parametrize('door', DOORS)
@pytest.mark.parametrize('level', HALF)
def test_writes_take_the_type_of_their_destination(level: str, door: str, forwards: Forwards) -> None:
    half, wrong = HALF[level], []
    for name, write in ALL_WRITES.items():
        in_place = write(torch.zeros(4, 4), torch.ones(4, 4)) is None or name.partition(' ')[0].endswith('_')
        for to, source in (
            (torch.zeros(4, 4), torch.randn(4, 4, dtype=half)),
            (torch.zeros(4, 4, dtype=half), torch.randn(4, 4)),
        ):
            # where nothing is written, O1 and O4 of the functional API promote, as autocast does on a GPU
            computes = F32 if level in PER_OP and door == 'amp' and not in_place else to.dtype
            exact = to.to(computes, copy=True)
            result, expected = forwards(level, write, to, source, door=door).seen, write(exact, source.to(computes))
            if not same_bits(to if in_place else result, exact if in_place else expected):
                wrong.append((name, to.dtype))
    assert wrong == []


def outcome(write: Call, dtype: torch.dtype, source: Tensor) -> Any:
    """The numbers of the result and of the destination, with their types; None where torch refuses."""
    to = torch.ones(4, 4).to(dtype)
    try:
        result = write(to, source)
    except RuntimeError:
        return None
    return result is None or (result.dtype, result.tolist()), to.tolist()


@pytest.mark.parametrize('level', HALF)
def test_writes_into_integers_and_float64_are_those_of_plain_torch(level: str, forwards: Forwards) -> None:
    wrong = []
    for name, write in (ALL_WRITES | ARITHMETIC).items():
        for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float64):
            for x in (torch.randn(4, 4).to(HALF[level]), torch.randn(4, 4)):
                found = forwards(level, outcome, write, dtype, x).seen
                if found != outcome(write, dtype, x):
                    wrong.append((name, dtype, x.dtype, found, outcome(write, dtype, x)))
    assert wrong == []


@pytest.mark.parametrize('level', ['O1', 'O2', 'O5'])
def test_convolution_with_folded_batchnorm_runs(level: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    net[1].eval()
    x = torch.randn(2, 3, 8, 8)
    plain = net(x)
    turn_on_efficient_conv_bn_eval_for_single_model(net)
    torch.testing.assert_close(prepared(net, level, 'wrapper')(x).float(), plain, rtol=0.02, atol=0.05)


def refused() -> bool:
    """Whether a product of unlike operands is an error, as in plain torch."""
    try:
        torch.ones(2, 2) @ torch.ones(2, 2).bfloat16()
    except RuntimeError:
        return True
    return False


def test_mixed_products_are_refused_outside_of_a_forward_and_on_other_threads(forwards: Forwards) -> None:
    def elsewhere(x: Tensor) -> list[bool]:
        found = [refused()]
        thread = threading.Thread(target=lambda: found.append(refused()))
        thread.start()
        thread.join()
        # nor are they computed in a plain model inside of a cast one
        return [*found, forwards('O0', lambda x: refused()).seen]

    assert forwards('O5', elsewhere).seen == [False, True, True] and refused()
    with pytest.raises(ZeroDivisionError):
        forwards('O5', lambda x: 1 / 0)
    assert refused()


# -- numbers beyond the range --------------------------------------------------------------------------------------------

HUGE = torch.finfo(F32).min
#: Functions that fill a tensor with a number.
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
    'new_full': lambda x, v: x.new_full((2, 7), v),
    'fill_': lambda x, v: x.clone().fill_(v),
    'index_fill': lambda x, v: x.index_fill(0, ALL_ROWS, v),
    'scatter': lambda x, v: x.scatter(1, torch.arange(4).expand(4, 4), v),
    'pad': lambda x, v: F.pad(x, (1, 0), value=v)[:, :1],
    'clamp': lambda x, v: x.clamp(v, v) if v < 0 else x.clamp(min=v),
}


@pytest.mark.parametrize('level', HALF)
def test_numbers_beyond_the_range_become_its_end(level: str, forwards: Forwards) -> None:
    limits, wrong = torch.finfo(HALF[level]), []
    for name, fill in FILLS.items():
        for value, expected in ((HUGE, limits.min), (-HUGE, limits.max), (-torch.inf, -torch.inf), (-3.0, -3.0)):
            seen = forwards(level, lambda x, fill=fill, value=value: fill(x, value)).seen
            if seen.dtype is not HALF[level] or set(seen.flatten().tolist()) != {expected}:
                wrong.append((name, value, seen.dtype, seen.flatten()[0]))
    assert wrong == []
    # a row that is masked as a whole has no NaN
    assert forwards(level, lambda x: x.masked_fill(x < 99, -1e9).softmax(-1)).seen.sum() == 4


def test_range_of_other_types_is_left_to_torch(forwards: Forwards) -> None:
    def body(x: Tensor) -> None:
        for y in (x.float().masked_fill(x < 9, -1e9), torch.full_like(x, -1e9, dtype=F32)):
            assert y.min() == -1e9
        with pytest.raises(RuntimeError):
            torch.zeros(2, dtype=torch.int8).fill_(1000)

    for level in HALF:
        forwards(level, body)
    with pytest.raises(RuntimeError, match='overflow'):
        torch.ones(2, dtype=torch.float16).masked_fill(torch.ones(2) > 0, -1e9)


@pytest.mark.parametrize('door', DOORS)
def test_one_warning_for_a_model(door: str, caplog: pytest.LogCaptureFixture) -> None:
    def body(x: Tensor) -> Tensor:
        return x.masked_fill(x > 0, -1e9).masked_fill(x < 0, 1e9)

    for verbosity in (0, 1, 1):
        caplog.clear()
        # another model speaks
        prepared(Inside(body), 'O2', verbosity=1)
        with caplog.at_level('WARNING', 'amp_wrapper'):
            prepared(Inside(body), 'O2', door, verbosity=verbosity)(torch.randn(4, 4))
        said = [record.getMessage() for record in caplog.records if 'beyond the range' in record.getMessage()]
        assert len(said) == verbosity and all('masked_fill' in x and 'torch.finfo(x.dtype).min' in x for x in said)


def compiled_as_outside(body: Callable[[Tensor], list[Tensor]]) -> bool:
    torch._dynamo.reset()
    model, x = amp.initialize(Inside(body), opt_level='O2', verbosity=0), torch.randn(4, 4)
    found = torch.compile(lambda x: model(x), backend='eager', fullgraph=True)(x)
    return same(found, model(x))


def test_in_a_whole_graph_as_outside() -> None:
    def body(x: Tensor) -> list[Tensor]:
        other, to = torch.ones(4, 4), torch.zeros(4, 4)
        to[ROWS] = x[:2]
        to[:, ROWS] = x[:, :2]
        found = [product(x, other) for product in PRODUCTS.values()]
        return [
            *found,
            to,
            x.index_copy(0, ROWS, other[:2]),
            *(FILLS[name](x, -1e9) for name in FILLS if name != 'pad'),
        ]

    assert compiled_as_outside(body)


@pytest.mark.xfail(strict=True, reason='casting')
def test_pad_by_a_number_beyond_the_range_in_a_function_that_is_compiled_around_the_model() -> None:
    assert compiled_as_outside(lambda x: [FILLS['pad'](x, -1e9)])
