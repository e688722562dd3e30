"""``fp32_ops`` and members of the registry in Python: functions, methods and autograd Functions run in FP32 in a forward."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import same_bits
from forwards import CAST, HALF, PER_OP, Inside, prepared
from torch import Tensor, nn

from amp_wrapper import AmpUsageError, amp

F32 = torch.float32
seen: list[Any] = []


def product(x: Tensor, y: Tensor) -> Tensor:
    seen.append((x.dtype, y.dtype, torch.is_autocast_enabled('cpu')))
    return x @ y.T


def summed(x: Tensor) -> Tensor:
    return x.sum()


def nested(items: dict[str, list[Tensor]], dtype: torch.dtype = F32) -> dict[str, Any]:
    seen.append(dtype)
    return {'sum': items['x'][0] + 1, 'labels': items['x'][1], 'made': torch.zeros(1, dtype=dtype), 'text': 'as it is'}


def written(x: Tensor) -> Tensor:
    return x.add_(1)


def doubled(x: Tensor) -> Tensor:
    seen.append(x.dtype)
    return x * 2


class Coder:
    calls = 0

    def decode(self, x: Tensor) -> Tensor:
        self.calls += 1
        return doubled(x)

    @staticmethod
    def encode(x: Tensor) -> Tensor:
        return doubled(x)

    @classmethod
    def make(cls, x: Tensor) -> Tensor:
        assert cls is Coder
        return doubled(x)


class Square(torch.autograd.Function):
    """A custom op without 16-bit kernels, as most of mmcv's are for bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        if x.dtype is not F32:
            raise RuntimeError(f'expected scalar type Float but found {x.dtype}')
        ctx.save_for_backward(x)
        ctx.scale = scale
        index = (x * 0).argmax()
        ctx.mark_non_differentiable(index)
        return x * x * scale, index

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        (x,) = ctx.saved_tensors
        if gradient.dtype is not F32 or x.dtype is not F32:
            raise RuntimeError(f'expected scalar type Float but found {gradient.dtype}')
        return 2 * x * gradient * ctx.scale, None


square = Square.apply


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()


def called(level: str, names: str, body: Callable[[Tensor], Any]) -> Any:
    """What ``body`` returns in a forward of a model whose ``fp32_ops`` are some names of this file."""
    model = Inside(body)
    prepared(model, level, fp32_ops=[f'{__name__}.{name}' for name in names.split()])(torch.eye(4))
    return model.seen


@pytest.mark.parametrize('level', HALF)
def test_output_has_the_type_of_the_first_tensor(level: str) -> None:
    half = HALF[level]
    narrow, wide = torch.full((2, 2), 1.5, dtype=half), torch.full((2, 2), 0.1)
    for x, y, expected in ((narrow, narrow, half), (narrow, wide, half), (wide, narrow, F32), (wide, wide, F32)):
        result = called(level, 'product', lambda _, x=x, y=y: product(x, y))
        assert same_bits(result, (x.float() @ y.float().T).to(expected)) and seen.pop() == (F32, F32, False)
    model = Inside(lambda x: summed(x))
    prepared(model, level, fp32_ops=[dict(name=f'{__name__}.summed', output='float32')])(torch.eye(4))
    assert model.seen.dtype is F32


def test_exception_leaves_autocast_as_it_was() -> None:
    def body(x: Tensor) -> torch.dtype:
        with pytest.raises(RuntimeError, match='mat1 and mat2'):
            product(torch.ones(2, 3), torch.ones(2, 2))
        return (x @ x.float()).dtype

    for level in PER_OP:
        assert called(level, 'product', body) is HALF[level]


@pytest.mark.parametrize('level', CAST)
def test_nested_arguments_and_dtypes(level: str) -> None:
    labels = torch.tensor([70001])
    for dtype in (HALF[level], torch.int64):
        result = called(level, 'nested', lambda x, dtype=dtype: nested({'x': [x, labels]}, dtype=dtype))
        assert result['sum'].dtype is HALF[level] and result['labels'] is labels and result['text'] == 'as it is'
    assert seen == [F32, torch.int64]


@pytest.mark.parametrize('level', CAST)
def test_methods(level: str) -> None:
    coder = Coder()
    for name in ('decode', 'encode', 'make'):
        result = called(level, f'Coder.{name}', lambda x, name=name: getattr(coder, name)(torch.full_like(x, 3.0)))
        assert result.dtype is HALF[level] and set(result.flatten().tolist()) == {6.0} and seen.pop() is F32
    # the object itself is handed on, and no copy of it
    assert coder.calls == 1


@pytest.mark.parametrize('call', [lambda *args: Square.apply(*args), square], ids=['attribute', 'kept reference'])
@pytest.mark.parametrize('level', ['O2', 'O4', 'O5'])
def test_autograd_function(level: str, call: Any) -> None:
    half = HALF[level]
    x = torch.tensor([1.5, -2.0], dtype=half, requires_grad=True)
    with pytest.raises(RuntimeError, match='expected scalar type Float'):
        call(x)
    for backward_inside in (True, False):

        def body(_: Tensor, backward_inside: bool = backward_inside) -> Tensor:
            result, index = call(x, 3.0)
            assert result.dtype is half and index.dtype is torch.int64 and not index.requires_grad
            if backward_inside:
                result.sum().backward()
            return result

        x.grad = None
        result = called(level, 'Square', body)
        if not backward_inside:
            result.sum().backward()
        assert x.grad is not None and x.grad.dtype is half and x.grad.tolist() == [9.0, -12.0]
    # with an FP32 argument it is the plain function
    wide = torch.tensor([2.0], requires_grad=True)
    called(level, 'Square', lambda _: call(wide)[0].sum().backward())
    assert wide.grad is not None and wide.grad.item() == 4


def test_second_derivative_of_an_autograd_function_is_refused() -> None:
    """Copies made inside of its forward carry no graph: terms would be lost without a word."""
    x = torch.tensor([3.0], dtype=torch.bfloat16, requires_grad=True)
    result = called('O5', 'Square', lambda _: square(x)[0])
    with pytest.raises(AmpUsageError, match=r'create_graph=True.*Square.*second derivative'):
        torch.autograd.grad(result.sum(), x, create_graph=True)


def test_function_that_writes_into_a_16_bit_argument_writes_into_that_of_its_caller() -> None:
    given = torch.full((2,), 1.5, dtype=torch.bfloat16)
    assert called('O5', 'written', lambda _: written(given)) is given and given.tolist() == [2.5, 2.5]


def test_function_runs_in_fp32_as_long_as_a_model_that_named_it_is_alive() -> None:
    model, other = Inside(torch.sin), Inside(doubled)
    prepared(other, 'O5')
    prepared(model, 'O5', fp32_ops=[f'{__name__}.doubled'])
    other(torch.eye(4))
    del model
    gc.collect()
    other(torch.eye(4))
    assert seen == [F32, torch.bfloat16]


# -- how functions are found ---------------------------------------------------------------------------------------------


def test_function_is_found_where_it_was_imported_by_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    home, user = (types.ModuleType(f'{name}_of_this_test') for name in ('home', 'user'))
    # it has a closure, and is kept in one
    kept = home.op = user.renamed = lambda x: seen.append((x.dtype, home.__name__))  # type: ignore[attr-defined]
    for module in (home, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    model = Inside(lambda x: (home.op(x), user.renamed(x), kept(x)))
    prepared(model, 'O5', fp32_ops=[f'{home.__name__}.op'])(torch.eye(4))
    assert seen == [(F32, home.__name__)] * 3


#: Members of the registry: name, the levels at which they are in FP32, and whether their results stay so.
MMCV = [
    ('nms.nms', tuple(HALF), False),
    ('multi_scale_deform_attn.multi_scale_deformable_attn_pytorch', tuple(HALF), False),
    ('carafe.CARAFEFunction', ('O4', 'O5'), False),
    ('roi_align.RoIAlignFunction', tuple(HALF), False),
    ('focal_loss.SigmoidFocalLossFunction', tuple(HALF), True),
]


@pytest.mark.parametrize(('name', 'levels', 'stays'), MMCV, ids=[row[0].split('.')[1] for row in MMCV])
def test_ops_of_mmcv(name: str, levels: tuple[str, ...], stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions in the place of mmcv's: kernels for no 16-bit type, or for float16 alone."""

    def op(x: Tensor) -> Tensor:
        seen.append((x.dtype, torch.is_autocast_enabled('cpu')))
        return x * 1

    function = type('Function', (torch.autograd.Function,), {'forward': staticmethod(lambda ctx, x: op(x))})
    place, _, attribute = name.partition('.')
    module = types.ModuleType(f'mmcv.ops.{place}')
    setattr(module, attribute, function if attribute.endswith('Function') else op)
    monkeypatch.setitem(sys.modules, 'mmcv.ops', types.ModuleType('mmcv.ops'))
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def body(x: Tensor) -> Tensor:
        found = getattr(module, attribute)
        return getattr(found, 'apply', found)(x)

    for level in HALF:
        model = Inside(body)
        prepared(model, level)(torch.eye(4))
        ran = (F32, False) if level in levels else (HALF[level], level in PER_OP)
        assert (seen.pop(), model.seen.dtype) == (ran, F32 if stays else HALF[level]), level


class Head(nn.Module):
    """As the heads of OpenMMLab: anchors get the type of the scores, and a float16 sum of losses is inf."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        wide = torch.ones_like(self.layer(x)).expand(20_000, 4, 4)
        return self.loss_by_feat([wide]), self.predict_by_feat([wide])

    def loss_by_feat(self, scores: list[Tensor]) -> dict[str, Tensor]:
        seen.append(scores[0].dtype)
        return {'loss': sum(s.sum() for s in scores)}  # type: ignore[dict-item]

    def predict_by_feat(self, scores: list[Tensor]) -> Tensor:
        return torch.arange(2049, 2051, dtype=scores[0].dtype)

    def predict(self, x: Tensor) -> torch.dtype:
        return nn.functional.l1_loss(self.layer(x), self.layer(x)).dtype

    def extract_feat(self, x: Tensor) -> Tensor:
        return self.layer(x).softmax(-1)

    other = extract_feat


class SpecialHead(Head):
    def loss_by_feat(self, scores: list[Tensor]) -> dict[str, Tensor]:
        return {'loss': 2 * super().loss_by_feat(scores)['loss']}


@pytest.mark.parametrize(('level', 'door'), [('O2', 'wrapper'), ('O3', 'amp'), ('O5', 'amp'), ('O5', 'wrapper')])
def test_methods_by_convention(level: str, door: str) -> None:
    for cls, factor in ((Head, 1), (SpecialHead, 2), (type('Local', (Head,), {}), 1)):
        loss, points = prepared(cls(), level, door)(torch.ones(4, 4))
        assert loss['loss'].dtype is F32 and loss['loss'].item() == factor * 320_000 and seen.pop() is F32
        # float16 has no 2049
        assert points.tolist() == [2049.0, 2050.0]
    # a method that is called in place of forward begins one, of this model alone
    model, stranger = Head(), Head().bfloat16()
    prepared(model, level, door)(torch.ones(4, 4))
    assert model.predict(torch.ones(1, 4, dtype=HALF[level])) is F32
    assert stranger.predict(torch.ones(1, 4).bfloat16()) is torch.bfloat16


@pytest.mark.parametrize('level', ['O1', 'O4'])
def test_methods_that_are_named_compute_as_calls_do(level: str) -> None:
    x, model = torch.randn(64, 4), nn.Sequential(Head())
    exact = model[0].other(x)  # type: ignore[operator]
    part: Any = amp.initialize(model, opt_level=level, verbosity=0)[0]
    assert torch.equal(part.extract_feat(x), part.other(x)) and not torch.equal(part.extract_feat(x), exact)
