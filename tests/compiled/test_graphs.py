"""``torch.compile``: what is inside of a graph, around it and beside it has the types and the values of eager code."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from bits import differences
from compiling import BF16, BY_OP, F16, F32, HALF, TRACED, TRACED_WHOLE, initialized
from op_calls import PRODUCTS
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from amp_wrapper import amp


def squared(x: Tensor) -> Tensor:
    """A function of Python that a configuration names; so are the others that follow."""
    return x @ x.t()


def noted(x: Tensor) -> torch.dtype:
    return x.dtype


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert x.dtype is F32
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


REGISTERED = [f'{__name__}.{name}' for name in ('squared', 'noted', 'Doubles')]
in_float = amp.float_function(lambda x: x @ x.t())
in_half = amp.half_function(lambda x: x @ x.t())
promoted = amp.promote_function(lambda x, y: torch.cat([x, y]))


def tables(y: Tensor) -> list[Tensor]:
    wide = y.float()
    return [torch.softmax(y, -1), y.sum(), y**2, torch.layer_norm(y, (4,)), wide @ wide.t(), F.mse_loss(y, y)]


def in_autocast(y: Tensor) -> list[Any]:
    """Products in blocks of torch.autocast, and what torch says of them."""
    device, wide = y.device.type, y.float()
    found: list[Any] = [wide @ wide.t(), torch.is_autocast_enabled(device)]
    if torch.is_autocast_enabled(device):
        found.append(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        found += [wide @ wide.t(), torch.is_autocast_enabled(device)]
        with torch.autocast(device, dtype=F16):
            found += [wide @ wide.t(), torch.get_autocast_dtype(device)]
    with torch.autocast(device, dtype=BF16):
        found += [wide @ wide.t(), checkpoint(lambda y: y @ y.t(), wide, use_reentrant=False)]
    return [*found, wide @ wide.t()]


def paused(y: Tensor) -> list[Any]:
    """Blocks of torch.autocast act where casts are paused, without the tables of O1 and O4."""
    half = BF16 if y.dtype is F32 else y.dtype
    with amp.disable_casts():
        found = tables(y)
        with torch.autocast(y.device.type, dtype=half):
            found += tables(y)
        with amp.disable_casts(), torch.autocast(y.device.type, dtype=half):
            found += tables(y)
    return found + tables(y)


HUGE = torch.finfo(F32).min


def writes(x: Tensor) -> list[Tensor]:
    """Of 16-bit and FP32 numbers into each other."""
    rows, other = torch.tensor([0, 2], device=x.device), torch.ones(4, 4, device=x.device)
    other[rows] = x[:2]
    other[:, rows] = x[:4, :2]
    return [other, x.index_copy(0, rows, other[:2]), (x + 0).exp_(), (x + 0).add_(x.float()), (x + 0).mul_(2)]


#: Each is called with the output of a layer: a matrix of 8 x 4.
OPS: dict[str, Callable[[Tensor], Any]] = {
    'softmax, three names': lambda x: (torch.softmax(x, -1), x.softmax(-1), F.softmax(x, -1)),
    'sums': lambda x: (x.sum(), torch.cumsum(x, 0), x.prod(), x.norm(), x.float().sum(dtype=torch.float64)),
    'unlike operands': lambda x: [PRODUCTS[name](x[:4], torch.ones(4, 4, device=x.device)) for name in IN_GRAPHS],
    'losses': lambda x: (F.mse_loss(x, x), F.nll_loss(x, x.argmax(1)), nn.L1Loss()(x, x)),
    'antialiasing': lambda x: F.interpolate(x[None, None], size=3, mode='bilinear', antialias=True),
    'local response norm': lambda x: F.local_response_norm(x[None], 2),
    'mixed types': lambda x: (torch.cat([x, x.float()]), x.double() + x, x + 1, torch.addcmul(x, x, x.float())),
    'writes': writes,
    'beyond the range': lambda x: (x.masked_fill(x < 9, HUGE), torch.full_like(x, HUGE), x.clamp(HUGE, HUGE)),
    'decorated': lambda x: (in_float(x), in_half(x), promoted(x, x.float())),
    'registered': lambda x: (squared(x), noted(x), torch.sigmoid(x)),
    'no tensors': lambda x: (x.shape[0], x.dtype, x.new_zeros(2), torch.arange(3, device=x.device)),
    'casts are paused': paused,
    'blocks of autocast': in_autocast,
    'containers': lambda x: {'pair': (x, [x, {'deep': (x, 3)}]), 'levels': OrderedDict([(0, x), ('1', x)])},
}
if torch.__version__.startswith('2.6.'):
    # it traces no contextmanager
    del OPS['casts are paused']
IN_GRAPHS = ('addmm', 'einsum', 'linear', 'conv2d', 'conv_transpose1d', 'attention')


def types_of(found: Any) -> Any:
    return tree_map(lambda each: each.dtype if isinstance(each, Tensor) else each, found)


class Body(nn.Module):
    """A layer, and a function of its output; and which types that gave, before the outputs of the model are cast."""

    def __init__(self, body: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(4, 4), body

    def forward(self, x: Tensor) -> Any:
        found = self.body(self.layer(x))
        return found, types_of(found)


@pytest.mark.parametrize(('level', 'whole', 'around'), [('O1', False, True), ('O4', False, False), ('O5', True, True)])
@torch.no_grad()
def test_types_in_a_graph(level: str, whole: bool, around: bool, device: torch.device) -> None:
    """Of ops, registered and decorated functions: those of eager code, in one graph; also within a block of autocast."""
    model, x = Body(lambda y: None).to(device), torch.rand(8, 4, device=device)
    initialized(model, level, fp32_ops=REGISTERED)
    calls = dict(OPS)

    def body(y: Tensor) -> dict[str, Any]:
        for name, call in OPS.items():
            try:
                call(y)
            except (RuntimeError, NotImplementedError):
                # eager code has no such op at this level
                del calls[name]
        return {name: call(y) for name, call in calls.items()}

    def outside(x: Tensor) -> list[Any]:
        return [in_autocast(x), squared(x), noted(x)]

    with torch.autocast(device.type, dtype=BF16, enabled=around):
        model.body = body
        expected = model(x)
        model.body = lambda y: {name: call(y) for name, call in calls.items()}
        if whole:
            found = TRACED_WHOLE(model)(x)
        else:
            wide = x.to(HALF[level])
            before, found, after = TRACED_WHOLE(lambda x: [outside(wide), model(x), outside(wide)])(x)
            assert differences([before, after], [outside(wide)] * 2) == []
    assert differences(found, expected) == [] and len(calls) > 0.8 * len(OPS)
    assert {F16, BF16, F32} <= set(expected[1]['blocks of autocast'])


@torch.compiler.disable
def left_out(y: Tensor) -> list[Any]:
    """The same, between two graphs."""
    return types_of(in_autocast(y))


def paused_over_breaks(y: Tensor) -> list[Any]:
    """What runs between two graphs is paused as well, and afterwards autocast is what it was around the block."""
    with amp.disable_casts():
        found = types_of(in_autocast(y)) + left_out(y)
        # one type alone: torch 2.6 takes the graph of one type of autocast for that of another
        with torch.autocast(y.device.type, dtype=BF16 if y.dtype is F32 else y.dtype):
            found += types_of(in_autocast(y)) + left_out(y)
        found += types_of(in_autocast(y))
    return found + types_of(in_autocast(y))


SPARSE = torch.eye(4).to_sparse()
#: What breaks graphs, or is no part of them: a level, what is compiled, and what is called.
BREAKS: dict[str, tuple[str, str, Callable[[Tensor], Any]]] = {
    'casts are paused over breaks': ('O1', 'function', paused_over_breaks),
    'control flow of torch': ('O4', 'function', lambda y: torch.cond(y.sum() > 0, squared, torch.neg, (y,))),
    'autograd Function of the configuration': ('O1', 'model', lambda y: Doubles.apply(y)),
    'the same where weights are cast': ('O5', 'function', lambda y: Doubles.apply(y)),
    'part that is left out of graphs': ('O5', 'model', lambda y: torch.compiler.disable(nn.ReLU())(y)),
    'blocks of autocast where casts are paused': ('O4', 'part', paused),
    # they have no storage by which a write to them would be found
    'sparse tensors': ('O4', 'model', lambda y: F.layer_norm(torch.sparse.mm(SPARSE, y.float()), (4,)).sum()),
}


@pytest.mark.parametrize('name', BREAKS)
@torch.no_grad()
def test_code_that_breaks_graphs(name: str, device: torch.device) -> None:
    """Types and values are those of eager code."""
    level, call, body = BREAKS[name]
    model = nn.Sequential(nn.Linear(4, 4), Body(body)).to(device)
    x = torch.rand(4, 4, device=device)
    initialized(model, level, fp32_ops=REGISTERED)
    expected = model(x)
    if call == 'part':
        model[1] = TRACED(model[1])
    run = dict(model=TRACED(model), function=TRACED(lambda x: model(x))).get(call, model)
    assert differences(run(x), expected) == []


@pytest.mark.parametrize(('level', 'whole'), [('O1', True), ('O4', False)])
def test_casts_that_are_paused_around_a_call(level: str, whole: bool, device: torch.device) -> None:
    """What is compiled inside of ``disable_casts()`` is not what runs outside, and the other way round.

    Decorated functions act outside of models, too, whatever was so when they were compiled.
    """
    decorated, x = TRACED(lambda x: in_half(x)), torch.ones(4, 4, device=device)
    decorated(x)
    model = Body(lambda y: y).to(device)
    initialized(model, level)
    call = TRACED(model if whole else lambda x: model(x))
    for pause in (False, True, False, True):
        with amp.disable_casts() if pause else torch.enable_grad():
            assert call(x)[1] is (F32 if pause else HALF[level]), pause
            assert decorated(x).dtype is (F32 if pause else F16), pause


def test_graph_of_a_model_in_the_forward_of_another(device: torch.device) -> None:
    inner = nn.Linear(4, 4).to(device)
    model, x = Body(TRACED(lambda y: inner(y) * 1)).to(device), torch.ones(4, 4, device=device)
    for each in (inner, model):
        initialized(each, 'O4')
    assert model(x)[1] is inner(x).dtype is F32


def test_plain_model_is_left_alone(device: torch.device) -> None:
    """Of the same classes, in the same process, where other models were compiled at a level: nothing is cast, in one graph."""
    first, plain = [Body(lambda x: [squared(x), F.mse_loss(x, x)]).to(device) for _ in range(2)]
    x = torch.randn(8, 4, device=device)
    initialized(first, 'O5', fp32_ops=REGISTERED)
    assert TRACED_WHOLE(lambda x: first(x))(x)[1] == [BF16, F32]
    plain.bfloat16()
    for call in (TRACED_WHOLE(plain), TRACED_WHOLE(lambda x: plain(x))):
        assert call(x.bfloat16())[1] == [BF16, BF16]
    # and what was compiled for a plain one casts another
    either = TRACED(lambda model, x: model(x))
    assert [either(each, x.to(each.layer.weight.dtype))[1] for each in (plain, first)] == [[BF16, BF16], [BF16, F32]]


# -- beside a compilation ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    torch.__version__.startswith('2.11.') and torch.version.cuda is not None and not torch.cuda.is_available(),
    reason='torch 2.11 built for CUDA crashes where there is no GPU and threads compile, without this package too',
)
@pytest.mark.parametrize('level', ['O1', 'O2', 'O5'])
def test_model_that_runs_while_another_thread_compiles(level: str, device: torch.device) -> None:
    """Nothing of its forward call takes itself for part of a graph."""
    began, ending = threading.Event(), threading.Event()

    def backend(graph: Any, inputs: Any) -> Any:
        began.set()
        assert ending.wait(60)
        return graph

    def end() -> None:
        ending.set()
        thread.join()

    thread = threading.Thread(target=lambda: torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)))
    model, x = Body(tables).to(device), torch.randn(4, 4, device=device)
    initialized(model, level)
    expected = model(x)
    thread.start()
    assert began.wait(60)
    assert differences(model(x), expected) == []
    # the compilation ends in the middle of a forward
    model.body = lambda y: (end(), tables(y))[-1]
    assert differences(model(x), expected) == []
    # a layer by itself, and after all of it nothing is cast outside
    assert model.layer(x).dtype is (F32 if level in BY_OP else model.layer.weight.dtype)
    assert (x @ x.t()).dtype is F32
