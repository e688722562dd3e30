"""``torch.compile``: what is inside of a graph, around it and beside it has the types and the values of eager code."""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from bits import differences
from compiling import BF16, BY_OP, F16, F32, HALF, TRACED, TRACED_WHOLE, WHOLE, initialized, start
from pairs import pairs
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map
from torch.utils.checkpoint import checkpoint

from amp_wrapper import amp
from amp_wrapper.errors import AmpUsageError


def squared(x: Tensor) -> Tensor:
    """A function of Python that a configuration names; so are the others that follow."""
    return x @ x.t()


def noted(x: Tensor) -> torch.dtype:
    return x.dtype


def doubled(x: Tensor) -> Tensor:
    return x.mul_(2.0)


def clipped(x: Tensor) -> Tensor:
    return F.relu(x, True).sum()


def turned(x: Tensor) -> Tensor:
    return x.swapdims(0, 1).tensor_split(2)[0].mul_(2).sum()


def doubled_in_a_list(x: Tensor) -> None:
    torch._foreach_mul_([x], 2.0)


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert x.dtype is F32
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class AsksForAutocast(torch.autograd.Function):
    """``custom_fwd`` casts where autocast is on."""

    @staticmethod
    @torch.amp.custom_fwd(device_type='cpu', cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x @ x.t()


WRITING = ('doubled', 'clipped', 'turned', 'doubled_in_a_list')
REGISTERED = [f'{__name__}.{name}' for name in ('squared', 'noted', 'Doubles', *WRITING)]
in_float = amp.float_function(lambda x: x @ x.t())
in_half = amp.half_function(lambda x: x @ x.t())
promoted = amp.promote_function(lambda x, y: torch.cat([x, y]))
tripled = amp.float_function(lambda x: x.mul_(3).sum())


def tables(y: Tensor) -> list[Tensor]:
    wide = y.float()
    return [torch.softmax(y, -1), y.sum(), y**2, torch.layer_norm(y, (4,)), wide @ wide.t(), F.mse_loss(y, y)]


def in_autocast(y: Tensor) -> list[Any]:
    """Products in blocks of torch.autocast, and what torch says of them."""
    device, wide = y.device.type, y.float()
    found: list[Any] = [
        wide @ wide.t(),
        torch.is_autocast_enabled(device),
        torch.is_autocast_enabled(device_type=device),
    ]
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


#: Each is called with the output of a layer: a matrix of 8 x 4.
OPS: dict[str, Callable[[Tensor], Any]] = {
    'softmax, three names': lambda x: (torch.softmax(x, -1), x.softmax(-1), F.softmax(x, -1)),
    'powers': lambda x: (x**2, torch.pow(x, 2), x.pow(2.0), 2.0**x),
    'sums': lambda x: (x.sum(), torch.cumsum(x, 0), x.prod(), x.norm(), x.float().sum(dtype=torch.float64)),
    'products': lambda x: (x @ x.t(), torch.mm(x, x.t()), torch.einsum('ij,kj->ik', x, x), F.linear(x, x)),
    'norms': lambda x: (F.layer_norm(x, (4,)), F.group_norm(x, 2), F.normalize(x), torch.linalg.matrix_norm(x)),
    'losses': lambda x: (F.mse_loss(x, x), F.huber_loss(x, x), F.kl_div(x, x, reduction='sum')),
    'loss of classes': lambda x: F.nll_loss(x, x.argmax(1)),
    'loss by its module': lambda x: nn.SmoothL1Loss()(x, x),
    'inverse': lambda x: x[:4].float().inverse().dtype,
    'one type wanted': lambda x: F.grid_sample(x[None, None], x.new_zeros(1, 2, 2, 2), align_corners=False),
    'interpolation': lambda x: [F.interpolate(x[None, None], size=4, mode=mode) for mode in ('nearest-exact', 'area')],
    'interpolation of lines': lambda x: [F.interpolate(x[None], 8, mode=mode) for mode in ('nearest', 'linear')],
    'bicubic': lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode='bicubic'),
    'ldexp': lambda x: torch.ldexp(x, torch.ones(1, dtype=torch.int, device=x.device)),
    'mvlgamma': lambda x: torch.mvlgamma(x.float().abs().to(x.dtype) + 3, 2),
    'cross': lambda x: [torch.linalg.cross(x[:, :3], y) for y in (x[:, :3], x[:, :3].float())],
    'local response norm': lambda x: F.local_response_norm(x[None], 2),
    'mixed types': lambda x: (torch.cat([x, x.float()]), x.double() + x, x + 1, torch.addcmul(x, x, x.float())),
    'in place': lambda x: ((x + 0).exp_(), (x + 0).add_(x.float()), (x + 0).mul_(2)),
    'attention': lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    'decorated': lambda x: (in_float(x), in_half(x), promoted(x, x.float())),
    'registered': lambda x: (squared(x), noted(x), torch.sigmoid(x)),
    'no tensors': lambda x: (x.shape[0], x.dtype, x.new_zeros(2), torch.arange(3, device=x.device)),
    'casts are paused': paused,
    'blocks of autocast': in_autocast,
    'custom_fwd': lambda x: AsksForAutocast.apply(x.detach()),
    'containers': lambda x: {'pair': (x, [x, {'deep': (x, 3)}]), 'levels': OrderedDict([(0, x), ('1', x)])},
}


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


def unlike(found: Any, expected: Any) -> list[str]:
    """Where two nested results differ in types, or in values by more than roundings."""
    (ours, form), (theirs, wanted) = tree_flatten_with_path(found), tree_flatten_with_path(expected)
    assert form == wanted

    def alike(a: Any, b: Any) -> bool:
        if not isinstance(b, Tensor):
            return bool(a == b)
        return a.dtype is b.dtype and torch.allclose(a.double(), b.double(), 0.05, 0.05, equal_nan=True)

    return [f'{keystr(path)}: {a}, not {b}' for (path, a), (_, b) in zip(ours, theirs) if not alike(a, b)]


@pytest.mark.parametrize(
    ('level', 'whole', 'around'),
    [('O1', False, True), ('O4', False, False), ('O5', True, True)],
)
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

    with torch.autocast(device.type, dtype=BF16, enabled=around):
        model.body = body
        expected, outside = model(x), types_of(in_autocast(x))
        model.body = lambda y: {name: call(y) for name, call in calls.items()}
        if whole:
            found = WHOLE(model)(x)
        else:
            before, found, after = TRACED_WHOLE(lambda x: [in_autocast(x), model(x), in_autocast(x)])(x)
            assert types_of([before, after]) == [outside, outside], 'around the model in the same graph'
    assert unlike(found, expected) == [] and len(calls) > 0.8 * len(OPS)
    assert {F16, BF16, F32} <= set(expected[1]['blocks of autocast'])


def written(name: str) -> Callable[[Tensor], Tensor]:
    """What a function writes to a copy in FP32 reaches the tensor of the caller."""

    def body(y: Tensor) -> Tensor:
        y = y.detach().clone()
        # by its name in the module, which is patched
        globals()[name](y)
        return y

    return body


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


def within_a_mode(y: Tensor) -> Tensor:
    """A function mode of the user."""
    with torch.device(y.device):
        return torch.softmax(y @ y.t(), -1)


SPARSE = torch.eye(4).to_sparse()
#: What breaks graphs, or is no part of them: levels, what is compiled, and what is called.
BREAKS: dict[str, tuple[str, str, Callable[[Tensor], Any]]] = {
    'functions that write to their argument': ('O5', 'model', written('doubled')),
    'in-place flags that write': ('O5', 'function', written('clipped')),
    'views that write': ('O5', 'model', written('turned')),
    'lists that are written to': ('O4', 'function', written('doubled_in_a_list')),
    'decorated functions that write': ('O4', 'model', written('tripled')),
    'casts are paused over breaks': ('O1', 'model function', paused_over_breaks),
    'control flow of torch': ('O4', 'model function', lambda y: torch.cond(y.sum() > 0, squared, torch.neg, (y,))),
    'autograd Function of the configuration': ('O1', 'model function', lambda y: Doubles.apply(y)),
    'the same where weights are cast': ('O5', 'function', lambda y: Doubles.apply(y)),
    'function mode of the user': ('O4', 'model function', within_a_mode),
    'part that is left out of graphs': ('O5', 'model', lambda y: torch.compiler.disable(nn.ReLU())(y)),
    'blocks of autocast where casts are paused': ('O4', 'part forward', paused),
    # they have no storage by which a write to them would be found
    'sparse tensors': ('O4', 'model', lambda y: F.layer_norm(torch.sparse.mm(SPARSE, y.float()), (4,)).sum()),
}
_ROWS = [(a, b, name) for name, (levels, calls, _) in BREAKS.items() for a in levels.split() for b in calls.split()]


@pytest.mark.parametrize(('level', 'call', 'name'), _ROWS)
@torch.no_grad()
def test_code_that_breaks_graphs(level: str, call: str, name: str, device: torch.device) -> None:
    """Types and values are those of eager code."""
    model = nn.Sequential(nn.Linear(4, 4), Body(BREAKS[name][2])).to(device)
    x = torch.rand(4, 4, device=device)
    initialized(model, level, fp32_ops=REGISTERED)
    expected = model(x)
    if call == 'part':
        model[1] = TRACED(model[1])
    elif call == 'forward':
        model[1].forward = TRACED(model[1].forward)
    run = dict(model=TRACED(model), function=TRACED(lambda x: model(x))).get(call, model)
    assert unlike(run(x), expected) == []


@pytest.mark.parametrize(
    'way',
    [
        'after',
        pytest.param('function', marks=pytest.mark.xfail(strict=True, reason='autocast', raises=NotImplementedError)),
    ],
)
def test_interpolation_with_antialiasing_runs_in_fp32(way: str) -> None:
    """Of 16-bit numbers, torch has none on a CPU. What a graph does not use is left out of it, so the result is used."""
    model = Body(lambda x: F.interpolate(x[None, None], size=(4, 4), mode='bilinear', antialias=True))
    call, _ = start(model, 'O5', way) if way == 'after' else (WHOLE(lambda x: model(x)), initialized(model, 'O5'))
    x = torch.rand(8, 4)
    assert unlike(call(x), model(x)) == []


@pytest.mark.parametrize('level', ['O1', 'O4', 'O5'])
def test_function_that_was_called_before_the_model_patches_it(level: str, device: torch.device) -> None:
    """The graph is made anew when the model is found to patch what the graph has called outside."""

    def found(x: Tensor) -> list[Any]:
        return [noted(x), torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)]

    model, x = Body(found).to(device), torch.randn(4, 4, device=device).to(HALF[level])
    initialized(model, level, fp32_ops=REGISTERED)

    def train(x: Tensor) -> list[Any]:
        return [found(x), model(x)[0], found(x)]

    expected = train(x)
    assert expected[0] == expected[2] != expected[1]
    assert TRACED(train, fullgraph=True)(x) == expected


@pairs(level=('O1', 'O4'), whole=(True, False))
def test_casts_that_are_paused_around_a_call(level: str, whole: bool, device: torch.device) -> None:
    """What is compiled inside of ``disable_casts()`` is not what runs outside, and the other way round."""
    model, x = Body(lambda y: y).to(device), torch.ones(4, 4, device=device)
    initialized(model, level)
    call = TRACED(model if whole else lambda x: model(x))
    for pause in (False, True, False, True):
        with amp.disable_casts() if pause else torch.enable_grad():
            assert call(x)[1] is (F32 if pause else HALF[level]), pause


def test_plain_model_is_left_alone(device: torch.device) -> None:
    """Of the same classes, in the same process, where other models were compiled at a level: nothing is cast, in one graph."""
    first, plain = [Body(lambda x: [squared(x), F.mse_loss(x, x)]).to(device) for _ in range(2)]
    x = torch.randn(8, 4, device=device)
    initialized(first, 'O5', fp32_ops=REGISTERED)
    assert TRACED_WHOLE(lambda x: first(x))(x)[1] == [BF16, F32]
    plain.bfloat16()
    for call in (TRACED_WHOLE(plain), TRACED_WHOLE(lambda x: plain(x))):
        assert call(x.bfloat16())[1] == [BF16, BF16]


def test_decorated_functions_outside_of_models(device: torch.device) -> None:
    """They act as long as a model at O1 or O4 lives, and are not paused; whatever was so when they were compiled."""
    # models of other tests may live on: where Python finds them in the middle of this, both calls differ
    gc.collect()
    x = torch.randn(4, 4, device=device)
    assert TRACED(lambda x: in_half(x))(x).dtype is in_half(x).dtype
    model = nn.Linear(4, 4).to(device)
    initialized(model, 'O1')
    call = TRACED(lambda x: in_half(x))
    for pause in (True, False, True):
        with amp.disable_casts() if pause else torch.enable_grad():
            assert call(x).dtype is (F32 if pause else F16)
    del model
    assert call(x).dtype is in_half(x).dtype


def test_default_device_and_casts_of_the_whole_process(device: torch.device) -> None:
    """``amp.init()``, apex's oldest interface."""
    handle = amp.init(verbose=False)
    torch.set_default_device(device)
    try:
        x = torch.randn(4, 4)
        assert (x @ x).dtype is not F32
        assert TRACED_WHOLE(lambda x: torch.softmax(x @ x, -1))(x).dtype is F32
    finally:
        torch.set_default_device(None)
        handle._deactivate()


def test_error_in_a_graph_leaves_no_casts_behind(device: torch.device) -> None:
    """The backend 'eager' runs the marks of O1 and O4 as they are, and an error comes between two of them."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.layer = nn.Embedding(3, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.words(x))

    model = Words().to(device)
    initialized(model, 'O4')
    call = TRACED(model)
    call(torch.tensor([0, 1], device=device))
    with pytest.raises((IndexError, RuntimeError)):
        call(torch.tensor([0, 9], device=device))
    y = torch.randn(4, 4, device=device)
    with torch.autocast(device.type, dtype=BF16):
        assert torch.softmax(y @ y, -1).dtype is (BF16 if device.type == 'cpu' else F32)


def test_classes_of_torch_are_left_as_they_were(device: torch.device) -> None:
    """A graph that is made while functions are patched leaves no inherited method on ``torch.Tensor``."""
    inner = nn.Linear(4, 4).to(device)
    model = Body(TRACED(lambda y: inner(y) * 1)).to(device)
    before = set(vars(Tensor))
    for each in (inner, model):
        initialized(each, 'O4')
    model(torch.randn(4, 4, device=device))
    assert set(vars(Tensor)) == before


# -- beside a compilation ------------------------------------------------------------------------------------------------------


@contextmanager
def compilation() -> Iterator[None]:
    """Another thread compiles a function of no model."""
    inside, ends = threading.Event(), threading.Event()

    def backend(graph: Any, inputs: Any) -> Any:
        inside.set()
        assert ends.wait(60)
        return graph

    thread = threading.Thread(target=lambda: torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)))
    thread.start()
    assert inside.wait(60)
    yield
    ends.set()
    thread.join()


@pytest.mark.skipif(
    torch.__version__.startswith('2.11.') and torch.version.cuda is not None and not torch.cuda.is_available(),
    reason='torch 2.11 built for CUDA crashes where there is no GPU and threads compile, without this package too',
)
@pairs(level=('O1', 'O2', 'O5'), when=('around', 'begins', 'ends'))
def test_model_that_runs_while_another_thread_compiles(level: str, when: str, device: torch.device) -> None:
    """Nothing of its forward call takes itself for part of a graph."""
    between: list[Callable[[], Any]] = []

    def body(y: Tensor) -> list[Tensor]:
        for each in between:
            each()
        return tables(y)

    model = Body(body).to(device)
    x = torch.randn(4, 4, device=device)
    initialized(model, level)
    expected = model(x)
    with ExitStack() as stack:
        if when == 'begins':
            between.append(lambda: stack.enter_context(compilation()))
        else:
            stack.enter_context(compilation())
        if when == 'ends':
            between.append(stack.close)
        assert differences(model(x), expected) == []
    between.clear()
    assert differences(model(x), expected) == []
    # a layer by itself, and after all of it nothing is cast outside
    assert model.layer(x).dtype is (F32 if level in BY_OP else model.layer.weight.dtype)
    assert (x @ x.t()).dtype is F32


@pytest.mark.parametrize('level', ['O0', 'O1', 'O2', 'O4', 'O5'])
@torch.no_grad()
def test_export(level: str, device: torch.device) -> None:
    """It records Python as it is; at O1 and O4, whose casts it would lose, it is refused."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2), nn.Softmax(-1)).to(device).eval()
    initialized(model, level)
    x = torch.randn(3, 4, device=device)
    expected = model(x)
    if level not in BY_OP:
        found = torch.export.export(model, (x,), strict=False).module()(x)
        # float16 is rounded in other places
        assert found.dtype is expected.dtype and torch.allclose(found, expected, atol=1e-3)
        return
    hooks = torch.nn.modules.module._global_buffer_registration_hooks
    before = set(hooks)
    with pytest.raises(AmpUsageError, match='lose casts of single ops'):
        torch.export.export(model, (x,), strict=False)
    # those that torch 2.6 leaves where an export fails; they hold the model
    for key in set(hooks) - before:
        del hooks[key]
    assert differences(model(x), expected) == []


@pytest.mark.parametrize(('level', 'way'), [('O2', 'function'), ('O4', 'after')])
@torch.no_grad()
def test_encoders_of_torch_are_one_graph(level: str, way: str, device: torch.device) -> None:
    """They look for hooks before they take a shorter way in evaluation."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).to(device).eval()
    call, _ = start(model, level, way)
    x = torch.randn(2, 3, 8, device=device)
    assert torch.allclose(call(x), model(x), atol=0.05)
