"""What O1 and O4 cast, op by op; and at all levels: unlike operands, writes into other types, numbers beyond the range."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bits import same_bits
from forwards import CAST, DOORS, HALF, PER_OP, Forwards, prepared
from mmengine.model.efficient_conv_bn_eval import turn_on_efficient_conv_bn_eval_for_single_model
from op_calls import ALL_ROWS, LOSSES, MASK, MIXED_PRODUCTS, PLACES, PRODUCTS, ROWS, WRITES, Call
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from amp_wrapper import amp

F32 = torch.float32
#: What comes after the first tensor in a call of an op, given another tensor.
Arguments = Callable[[Tensor], tuple[Any, ...]]


def _alike(names: str, arguments: Arguments) -> dict[str, Arguments]:
    return dict.fromkeys(names.split(), arguments)


HALF_OPS: dict[str, Arguments] = {
    'addbmm': lambda y: (y.expand(2, 4, 4), y.expand(2, 4, 4)),
    'addmm': lambda y: (y, y),
    'addmv': lambda y: (y, y[0]),
    'addr': lambda y: (y[0], y[1]),
    'baddbmm': lambda y: (y.expand(4, 4, 4), y.expand(4, 4, 4)),
    'mv': lambda y: (y[0],),
}
FLOAT32_OPS: dict[str, Arguments] = {
    **_alike('acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan prod sum', lambda y: ()),
    **_alike('cumprod cumsum softmax log_softmax logsumexp frobenius_norm', lambda y: (0,)),
    **_alike('cdist dist', lambda y: (y,)),
    'nuclear_norm': lambda y: ((0, 1),),
    'pow': lambda y: (-0.5,),
    'renorm': lambda y: (2, 0, 1.0),
    'ldexp': lambda y: (torch.ones(4, dtype=torch.int),),
    'mvlgamma': lambda y: (1,),
}
WIDEST_OPS: dict[str, Arguments] = {
    **WRITES,
    **_alike('addcdiv addcmul', lambda y: (y, y)),
    **_alike('dot vdot', lambda y: (y[0],)),
    'atan2': lambda y: (y,),
    'lerp': lambda y: (y, 0.5),
}


def first(name: str, x: Tensor) -> Tensor:
    """The tensor that an op is called with: a row of ``x``, a batch of it, or all of it."""
    return x[0] if name in ('addmv', 'dot', 'vdot') else x.expand(4, 4, 4) if name == 'baddbmm' else x


def forms(name: str, arguments: Arguments) -> Iterator[tuple[str, Call]]:
    """The ways to call an op."""
    function, method, in_place = (getattr(*at, None) for at in ((torch, name), (Tensor, name), (Tensor, f'{name}_')))

    def write(x: Tensor, y: Tensor) -> Tensor:
        written = first(name, x).clone()
        assert in_place(written, *arguments(y)) is written
        return written

    def into(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast('cpu', enabled=False):
            shape = function(first(name, x.double()), *arguments(y.double())).shape
        return function(first(name, x.detach()), *arguments(y), out=torch.empty(shape, dtype=x.dtype))

    if function is not None:
        yield 'function', lambda x, y: function(first(name, x), *arguments(y))
        yield 'out', into
    if method is not None:
        yield 'method', lambda x, y: method(first(name, x), *arguments(y))
    if in_place is not None:
        yield 'in place', write


@pytest.fixture(scope='module')
def forwards() -> Forwards:
    return Forwards('amp')


@pytest.fixture(scope='module')
def both() -> Forwards:
    return Forwards()


@pytest.fixture(autouse=True)
def put_is_allowed() -> None:
    """put_ knows no deterministic way."""
    torch.use_deterministic_algorithms(False)


def values(dtype: torch.dtype) -> Tensor:
    return (torch.arange(16.0).square().sin() * 0.3 + 0.5).reshape(4, 4).to(dtype)


@pytest.mark.parametrize('level', PER_OP)
def test_ops_in_each_form(level: str, forwards: Forwards) -> None:
    half, wrong = HALF[level], []
    groups = [(half, HALF_OPS), (F32, FLOAT32_OPS), (None, WIDEST_OPS)]
    ops = [(fixed, name, *form) for fixed, group in groups for name in group for form in forms(name, group[name])]
    for (fixed, name, form, call), left, right in itertools.product(ops, (half, F32), (half, F32)):
        x, y = values(left).requires_grad_(), values(right).flip(0)
        computes = fixed or (F32 if F32 in (left, right) else half)
        # torch itself takes mixed types in these
        if form == 'in place' and fixed is not F32 and name not in ('addcdiv', 'addcmul', 'atan2'):
            computes = left
        try:
            exact = call(x, y) if form == 'out' else call(x.to(computes), y.to(computes)).detach()
        except (RuntimeError, TypeError):
            # torch 2.6 differentiates no ldexp_
            assert form == 'out' or name == 'ldexp'
            continue
        result = forwards(level, call, x, y).seen
        if form in ('function', 'method'):
            result.float().sum().backward()
            assert x.grad is not None and x.grad.dtype is left and x.grad.isfinite().all(), name
        alike = same_bits(result.detach(), exact.to(left) if form == 'in place' else exact)
        if form == 'in place' and fixed is F32 and result.dtype is left:
            # torch's own kernels: rsqrt_ and renorm_ round twice
            alike = torch.allclose(result.float(), exact, rtol=2 * torch.finfo(left).eps)
        if not alike:
            wrong.append((name, form, left, right, result.dtype))
    assert wrong == []


# functions that are made of others, or that are reached by modules
IN_16_BIT: dict[str, Call] = {
    **PRODUCTS,
    'conv_tbc': lambda x, y: torch.conv_tbc(x[None], y[None], y[0]),
    'convolution': lambda x, y: torch.convolution(x[None], y[:, :, None], None, [1], [0], [1], False, [0], 1),
    'prelu': lambda x, y: F.prelu(x, y[0]),
    'gru_cell': lambda x, y: nn.GRUCell(4, 4)(x, y),
    'lstm_cell': lambda x, y: nn.LSTMCell(4, 4)(x, (y, x))[0],
    'rnn_tanh_cell': lambda x, y: nn.RNNCell(4, 4)(x, y),
    'rnn_relu_cell': lambda x, y: nn.RNNCell(4, 4, nonlinearity='relu')(x, y),
    'Linear': lambda x, y: nn.Linear(4, 4)(x),
    'Conv2d': lambda x, y: nn.Conv2d(1, 2, 3)(x[None, None]),
    'MultiheadAttention': lambda x, y: nn.MultiheadAttention(4, 2)(x, x, x)[0],
}
#: By the name of the op: how many axes come first, and arguments of interpolate.
RESIZED: dict[str, tuple[int, dict[str, Any]]] = {
    **{f'upsample_nearest{n}d': (n, {'mode': 'nearest'}) for n in (1, 2, 3)},
    **{f'_upsample_nearest_exact{n}d': (n, {'mode': 'nearest-exact'}) for n in (1, 2, 3)},
    'upsample_linear1d': (1, {'mode': 'linear'}),
    'upsample_bilinear2d': (2, {'mode': 'bilinear'}),
    'upsample_bicubic2d': (2, {'mode': 'bicubic'}),
    'upsample_trilinear3d': (3, {'mode': 'trilinear'}),
    '_upsample_bilinear2d_aa': (2, {'mode': 'bilinear', 'antialias': True}),
    '_upsample_bicubic2d_aa': (2, {'mode': 'bicubic', 'antialias': True}),
}
IN_FLOAT32: dict[str, Call] = {
    # rounded on the way here
    **{name: call for name, call in LOSSES.items() if 'ctc' not in name},
    'linalg.cross': lambda x, y: torch.linalg.cross(x[:, :3], y[:, :3]),
    '__pow__': lambda x, y: x**2,
    '__rpow__': lambda x, y: 2**x,
    'norm': lambda x, y: x.norm(),
    'matrix_norm': lambda x, y: torch.linalg.matrix_norm(x),
    'vecdot': lambda x, y: torch.linalg.vecdot(x, y),
    'nll_loss2d': lambda x, y: F.nll_loss(x[:, :, None, None], ALL_ROWS[:, None, None]),
    'vector_norm': lambda x, y: torch.linalg.vector_norm(x),
    'softmin': lambda x, y: F.softmin(x, 0),
    'softplus': lambda x, y: F.softplus(x),
    'gumbel_softmax': lambda x, y: F.gumbel_softmax(x),
    'cosine_similarity': lambda x, y: F.cosine_similarity(x, y),
    'normalize': lambda x, y: F.normalize(x),
    'pdist': lambda x, y: F.pdist(x),
    'group_norm': lambda x, y: F.group_norm(x, 2),
    'layer_norm': lambda x, y: F.layer_norm(x, (4,)),
    'rms_norm': lambda x, y: F.rms_norm(x, (4,)),
    'grid_sample': lambda x, y: F.grid_sample(x[None, None], y[None, :, :2, None].mT, align_corners=False),
    'grid_sampler': lambda x, y: torch.grid_sampler(x[None, None], y[None, :, :2, None].mT, 0, 0, False),
    'LocalResponseNorm': lambda x, y: nn.LocalResponseNorm(2)(x[None]),
    'attention weights': lambda x, y: nn.MultiheadAttention(4, 2)(x, x, x)[1],
    **{
        name: lambda x, y, axes=axes, words=words: F.interpolate(x[(None,) * axes], scale_factor=2.0, **words)
        for name, (axes, words) in RESIZED.items()
    },
}
IN_THE_WIDEST: dict[str, Call] = {
    **MIXED_PRODUCTS,
    **{name: getattr(operator, name) for name in ('add', 'sub', 'mul', 'truediv')},
    'bilinear': lambda x, y: F.bilinear(x, y, torch.ones(2, 4, 4, dtype=y.dtype), y[0, :2]),
    'cross': lambda x, y: torch.cross(x[:, :3], y[:, :3], dim=1),
    'cat': lambda x, y: torch.cat([x, y]),
    'stack': lambda x, y: torch.stack([x, y]),
}
AS_GIVEN: dict[str, Call] = {
    'relu': lambda x, y: F.relu(x),
    'mean': lambda x, y: x.mean(0),
    'embedding': lambda x, y: F.embedding(ALL_ROWS, x),
    'BatchNorm1d': lambda x, y: nn.BatchNorm1d(4)(x),
    'BatchNorm1d in eval': lambda x, y: nn.BatchNorm1d(4).eval()(x),
}


@pytest.mark.parametrize('level', PER_OP)
def test_types_of_functions_and_layers(level: str, forwards: Forwards) -> None:
    half, wrong = HALF[level], []
    groups = [(half, IN_16_BIT), (F32, IN_FLOAT32), ('widest', IN_THE_WIDEST), ('given', AS_GIVEN)]
    calls = [(kind, name, group[name]) for kind, group in groups for name in group]
    for (kind, name, call), left, right in itertools.product(calls, (half, F32), (half, F32)):
        x, y = values(left).requires_grad_(), values(right)
        widest = F32 if F32 in (left, right) else half
        expected = {'widest': widest, 'given': left}.get(str(kind), kind)
        result = forwards(level, call, x, y).seen
        if result.grad_fn is not None:
            result.float().sum().backward()
        if (result.dtype, x.grad is None or x.grad.dtype) != (expected, left):
            wrong.append((name, left, right, result.dtype, x.grad is None or x.grad.dtype))
    assert wrong == []


@pytest.mark.parametrize('level', PER_OP)
def test_types_that_no_list_changes(level: str, forwards: Forwards) -> None:
    def body(half: Tensor) -> None:
        for x, y in itertools.product((half, half.float()), repeat=2):
            for compare in (operator.eq, operator.gt, operator.le, torch.ne, torch.lt):
                assert compare(x, y).dtype is torch.bool
            for write in (operator.iadd, operator.isub, operator.imul, operator.itruediv, Tensor.copy_):
                assert write(x.clone(), y).dtype is x.dtype
            # a type that the caller asks for stands
            for dtype in (torch.float16, torch.bfloat16, torch.float64):
                for reduce in (torch.sum, torch.prod, torch.cumsum, torch.softmax, F.log_softmax):
                    assert reduce(x, 0, dtype=dtype).dtype is dtype
                assert x.sum(dtype=dtype).dtype is torch.softmax(x, 0, dtype).dtype is dtype
        assert torch.linalg.vector_norm(half, dtype=half.dtype).dtype is half.dtype
        # and so do other types
        assert ALL_ROWS.sum().dtype is torch.int64 and half.to(torch.complex64).sum().dtype is torch.complex64
        x = half.double()
        assert x.sum().dtype is x.exp().dtype is F.mse_loss(x, x).dtype is torch.float64

    forwards(level, body)


@pytest.mark.parametrize('level', PER_OP)
def test_sum_that_float16_cannot_hold(level: str, forwards: Forwards) -> None:
    x = torch.full((100_000,), 0.875, dtype=HALF[level])
    found = forwards(level, lambda _: (x.sum(), F.l1_loss(x, x * 0, reduction='sum'), x.norm(1))).seen
    assert [total.item() for total in found] == [87_500.0] * 3


@pytest.mark.parametrize('level', PER_OP)
def test_second_derivatives(level: str) -> None:
    """A gradient penalty through every kind of rule, against float64."""

    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    layers = [nn.Linear(4, 8), nn.Softplus(), nn.LayerNorm(8), nn.Softmax(-1), nn.GroupNorm(2, 8), nn.Linear(8, 1)]
    model = nn.Sequential(*layers)
    exact = copy.deepcopy(model).double()
    x = torch.randn(8, 4)
    penalty(exact, x.double().requires_grad_()).backward()
    penalty(amp.initialize(model, opt_level=level, verbosity=0), x.requires_grad_()).backward()
    # eight products of 4 to 8 terms: a few roundings, of 2^-11 and 2^-8
    bound = 2e-2 if level == 'O1' else 1e-1
    for mine, theirs in zip(model.parameters(), exact.parameters()):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None and theirs.grad is not None:
            assert mine.grad.dtype is F32
            assert (mine.grad - theirs.grad).norm() <= bound * theirs.grad.norm() + 1e-6


# -- recurrent layers ----------------------------------------------------------------------------------------------------

KINDS = (nn.RNN, nn.LSTM, nn.GRU)
LAYERS: list[tuple[Any, dict[str, Any]]] = [
    *((kind, {'num_layers': 2, 'bidirectional': True}) for kind in KINDS),
    *((kind, {'batch_first': True, 'bias': False}) for kind in KINDS),
    *((kind, {'num_layers': 2, 'dropout': 0.5}) for kind in KINDS),
    (nn.LSTM, {'proj_size': 2}),
    (nn.RNN, {'nonlinearity': 'relu'}),
]


@pytest.mark.parametrize('level', PER_OP)
def test_recurrent_layers(level: str, forwards: Forwards) -> None:
    """Results are those of a 16-bit layer; gradients have the types that came in."""
    half = HALF[level]
    for (kind, words), dtype, packed in itertools.product(LAYERS, (half, F32), (False, True)):
        layer = kind(4, 4, **words)
        x = torch.randn(3, 3, 4).to(dtype).requires_grad_()

        def call(module: nn.Module, x: Tensor, packed: bool = packed) -> Any:
            torch.manual_seed(1)
            out, last = module(pack_padded_sequence(x, torch.tensor([3, 3, 2])) if packed else x)
            return pad_packed_sequence(out)[0] if packed else out, last

        expected = call(copy.deepcopy(layer).to(half), x.detach().to(half))[0].detach()
        out, last = forwards(level, call, layer, x).seen
        assert same_bits(out.detach(), expected), (kind, words, dtype)
        assert {t.dtype for t in (last if isinstance(last, tuple) else (last,))} == {half}
        out.float().sum().backward()
        assert x.grad is not None and x.grad.dtype is dtype
        assert all(p.grad is not None and p.grad.dtype is F32 for p in layer.parameters())
        # called directly it gives float32
        direct = amp.initialize(nn.Sequential(layer), opt_level=level, verbosity=0)[0]
        assert call(direct, x.detach().float())[0].dtype is F32


# -- 16-bit and FP32 meet: products are 16-bit, writes take the type of their destination ---------------------------------

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
ARITHMETIC = {
    f'{name}_': call
    for name, arguments in (HALF_OPS | FLOAT32_OPS | WIDEST_OPS).items()
    for form, call in forms(name, arguments)
    if form == 'in place' and name not in WRITES
}


@pytest.mark.parametrize('level', CAST)
def test_products_of_unlike_operands_are_16_bit(level: str, both: Forwards) -> None:
    half, wrong, other = HALF[level], [], torch.randn(4, 4)
    given = torch.randn(4, 4).to(half)
    for name, product in (PRODUCTS | MIXED_PRODUCTS).items():
        for x, y in ((given, other), (other, given)):
            found = both(level, product, x, y).seen
            if not same_bits(found, product(x.to(half), y.to(half))):
                wrong.append((name, x.dtype, found.dtype))
    assert wrong == []


@pytest.mark.parametrize('door', DOORS)
@pytest.mark.parametrize('level', HALF)
def test_writes_take_the_type_of_their_destination(level: str, door: str, both: Forwards) -> None:
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
            result, expected = both(level, write, to, source, door=door).seen, write(exact, source.to(computes))
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
def test_writes_into_integers_and_float64_are_those_of_plain_torch(level: str, both: Forwards) -> None:
    wrong = []
    for name, write in (ALL_WRITES | ARITHMETIC).items():
        if name == 'mvlgamma_' and torch.__version__.startswith('2.9.'):
            # plain torch 2.9 ends there with a signal
            continue
        for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float64):
            for x in (torch.randn(4, 4).to(HALF[level]), torch.randn(4, 4)):
                found = both(level, outcome, write, dtype, x).seen
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


def test_mixed_products_are_refused_outside_of_a_forward_and_on_other_threads(both: Forwards) -> None:
    def elsewhere(x: Tensor) -> list[bool]:
        with ThreadPoolExecutor(1) as thread:
            # nor are they computed in a plain model inside of a cast one
            return [refused(), thread.submit(refused).result(), both('O0', lambda x: refused()).seen]

    assert both('O5', elsewhere).seen == [False, True, True] and refused()


# -- numbers beyond the range --------------------------------------------------------------------------------------------

HUGE = torch.finfo(F32).min
#: Functions that fill a tensor with a number.
FILLS: dict[str, Callable[[Tensor, float], Tensor]] = {
    'masked_fill': lambda x, v: x.masked_fill(x < 9, v),
    'torch.masked_fill': lambda x, v: torch.masked_fill(x, x < 9, v),
    'masked_fill by a tensor': lambda x, v: x.masked_fill(x < 9, torch.tensor(v)),
    'where by a tensor': lambda x, v: torch.where(x > 9, x, torch.tensor(v)),
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
def test_numbers_beyond_the_range_become_its_end(level: str, both: Forwards) -> None:
    limits, wrong = torch.finfo(HALF[level]), []
    for name, fill in FILLS.items():
        for value, expected in ((HUGE, limits.min), (-HUGE, limits.max), (-torch.inf, -torch.inf), (-3.0, -3.0)):
            seen = both(level, lambda x, fill=fill, value=value: fill(x, value)).seen
            if seen.dtype is not HALF[level] or set(seen.flatten().tolist()) != {expected}:
                wrong.append((name, value, seen.dtype, seen.flatten()[0]))
    assert wrong == []
    # a row that is masked as a whole has no NaN
    assert both(level, lambda x: x.masked_fill(x < 99, -1e9).softmax(-1)).seen.sum() == 4


def test_range_of_other_types_is_left_to_torch(both: Forwards) -> None:
    def body(x: Tensor) -> None:
        for y in (x.float().masked_fill(x < 9, -1e9), torch.full_like(x, -1e9, dtype=F32)):
            assert y.min() == -1e9
        with pytest.raises(RuntimeError):
            torch.zeros(2, dtype=torch.int8).fill_(1000)

    for level in HALF:
        both(level, body)
    with pytest.raises(RuntimeError, match='overflow'):
        torch.ones(2, dtype=torch.float16).masked_fill(torch.ones(2) > 0, -1e9)
