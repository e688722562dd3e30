"""Members of the FP32 registry run in FP32 during passes of ours, and nothing is left behind afterwards."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import pickle
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import l1_loss as imported_by_name

from amp_wrapper import AmpUsageError
from amp_wrapper.autocast import op_set, regions, state
from amp_wrapper.autocast.call import call
from amp_wrapper.autocast.op_set import OpSet
from amp_wrapper.autocast.patching import PatchedFunction, patches
from amp_wrapper.policy.fp32_registry import FP32_OPS, Fp32Op

HALVES = (torch.float16, torch.bfloat16)
KEPT_REFERENCE = F.smooth_l1_loss
PARTIAL = functools.partial(F.mse_loss, reduction='sum')
ME = __name__


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    assert state.depth() == 0 and not patches.in_place
    yield
    left = state.depth()
    regions.unwind(0)
    assert left == 0 and not patches.in_place


@pytest.fixture
def inside() -> Iterator[None]:
    regions.enter(OpSet().keys)
    yield
    regions.leave()


# -- members that tests name -------------------------------------------------------------------------------------------


def product(x: Tensor, y: Tensor) -> Tensor:
    """Says in which types it ran."""
    seen.append((x.dtype, y.dtype, torch.is_autocast_enabled(x.device.type)))
    return x @ y.T


seen: list[tuple[torch.dtype, torch.dtype, bool]] = []


def nested(items: dict[str, list[Tensor]], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {'sum': items['x'][0] + 1, 'labels': items['x'][1], 'made': torch.zeros(1, dtype=dtype), 'text': 'as it is'}


class Coder:
    def decode(self, x: Tensor) -> Tensor:
        return self._double(x)

    @staticmethod
    def encode(x: Tensor) -> Tensor:
        assert x.dtype is torch.float32
        return x * 2

    @classmethod
    def make(cls, x: Tensor) -> Tensor:
        assert x.dtype is torch.float32 and cls is Coder
        return x * 2

    def _double(self, x: Tensor) -> Tensor:
        assert x.dtype is torch.float32
        return x * 2


class Square(torch.autograd.Function):
    """A custom op without 16-bit kernels, as most of mmcv's are for bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        if x.dtype is not torch.float32:
            raise RuntimeError(f'expected scalar type Float but found {x.dtype}')
        ctx.save_for_backward(x)
        ctx.scale = scale
        index = (x * 0).argmax()
        ctx.mark_non_differentiable(index)
        return x * x * scale, index

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        (x,) = ctx.saved_tensors
        if gradient.dtype is not torch.float32 or x.dtype is not torch.float32:
            raise RuntimeError(f'expected scalar type Float but found {gradient.dtype}')
        return 2 * x * gradient * ctx.scale, None


square = Square.apply


class Modern(torch.autograd.Function):
    """The newer style, with setup_context."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        assert x.dtype is torch.float32
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        assert inputs[0].dtype is torch.float32 and output.dtype is torch.float32
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (output,) = ctx.saved_tensors
        assert gradient.dtype is torch.float32 and output.dtype is torch.float32
        return gradient * output


class Marks(torch.autograd.Function):
    """A floating output that carries no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        score = x.sum(0)
        ctx.mark_non_differentiable(score)
        return x * 2, score

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        return gradient * 2


# -- torch's losses ----------------------------------------------------------------------------------------------------

Make = Callable[[Tensor, Tensor], Tensor]


def classes(x: Tensor) -> Tensor:
    return torch.tensor([0, 1, 2, 3], device=x.device)


# x is (4, 5) scores; y is (4, 5) in (0, 1)
CALLS: dict[str, Make] = {
    'binary_cross_entropy': lambda x, y: F.binary_cross_entropy(y, y),
    'binary_cross_entropy_with_logits': lambda x, y: F.binary_cross_entropy_with_logits(x, y, weight=y),
    'cosine_embedding_loss': lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(4, device=x.device)),
    'cross_entropy': lambda x, y: F.cross_entropy(x, classes(x), label_smoothing=0.1),
    'ctc_loss': lambda x, y: F.ctc_loss(
        x[:, None].float().log_softmax(-1).to(x.dtype), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
    ),
    'gaussian_nll_loss': lambda x, y: F.gaussian_nll_loss(x, y, y),
    'hinge_embedding_loss': lambda x, y: F.hinge_embedding_loss(x, y.round() * 2 - 1),
    'huber_loss': lambda x, y: F.huber_loss(x, y),
    'kl_div': lambda x, y: F.kl_div(x, y, reduction='batchmean'),
    'l1_loss': lambda x, y: F.l1_loss(input=x, target=y),
    'margin_ranking_loss': lambda x, y: F.margin_ranking_loss(x, y, y.round() * 2 - 1),
    'mse_loss': lambda x, y: F.mse_loss(x, target=y),
    'multi_margin_loss': lambda x, y: F.multi_margin_loss(x, classes(x)),
    'multilabel_margin_loss': lambda x, y: F.multilabel_margin_loss(x, torch.full((4, 5), -1, device=x.device)),
    'multilabel_soft_margin_loss': lambda x, y: F.multilabel_soft_margin_loss(x, y.round()),
    'nll_loss': lambda x, y: F.nll_loss(x, classes(x)),
    'poisson_nll_loss': lambda x, y: F.poisson_nll_loss(x, y),
    'smooth_l1_loss': lambda x, y: F.smooth_l1_loss(x, y),
    'soft_margin_loss': lambda x, y: F.soft_margin_loss(x, y.round() * 2 - 1),
    'triplet_margin_loss': lambda x, y: F.triplet_margin_loss(x, y, x * 2),
    'triplet_margin_with_distance_loss': lambda x, y: F.triplet_margin_with_distance_loss(x, y, x * 2),
}
# the same objects under torch, which models call too
DIRECT: dict[str, Make] = {
    'binary_cross_entropy_with_logits': lambda x, y: torch.binary_cross_entropy_with_logits(x, y, reduction=1),
    'cosine_embedding_loss': lambda x, y: torch.cosine_embedding_loss(
        x, y, torch.ones(4, device=x.device), reduction=1
    ),
    'ctc_loss': lambda x, y: torch.ctc_loss(
        x.view(4, 1, 5), torch.tensor([[1, 2]], device=x.device), torch.tensor([4]), torch.tensor([2])
    ),
    'hinge_embedding_loss': lambda x, y: torch.hinge_embedding_loss(x, y.round() * 2 - 1, reduction=1),
    'kl_div': lambda x, y: torch.kl_div(x, y, reduction=1),
    'margin_ranking_loss': lambda x, y: torch.margin_ranking_loss(x, y, y.round() * 2 - 1, reduction=1),
    'poisson_nll_loss': lambda x, y: torch.poisson_nll_loss(x, y, True, False, 1e-8, 1),
    'triplet_margin_loss': lambda x, y: torch.triplet_margin_loss(x, y, x * 2, reduction=1),
}


def test_every_registered_loss_has_a_call_here() -> None:
    prefix = 'torch.nn.functional.'
    functional = {n[len(prefix) :] for n, op in FP32_OPS.items() if n.startswith(prefix) and op.output == 'float32'}
    direct = {n[6:] for n, op in FP32_OPS.items() if n.count('.') == 1 and op.output == 'float32'}
    assert set(CALLS) == functional and set(DIRECT) == direct


def scores(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 2, 20, device=device).reshape(4, 5).to(dtype).requires_grad_()
    y = torch.linspace(0.1, 0.9, 20, device=device).reshape(4, 5).to(dtype)
    return x, y


@pytest.mark.parametrize('dtype', HALVES, ids=str)
@pytest.mark.parametrize('name', CALLS)
@pytest.mark.usefixtures('inside')
def test_loss_runs_in_fp32(name: str, dtype: torch.dtype, device: torch.device) -> None:
    x, y = scores(dtype, device)
    result = CALLS[name](x, y)
    assert result.dtype is torch.float32
    if name != 'ctc_loss':  # its input is rounded on the way here
        assert torch.equal(result.detach(), CALLS[name](x.detach().float(), y.float()))
    if name not in ('binary_cross_entropy', 'multilabel_margin_loss'):
        result.backward()
        assert x.grad is not None and x.grad.dtype is dtype


@pytest.mark.parametrize('dtype', HALVES, ids=str)
@pytest.mark.parametrize('name', DIRECT)
@pytest.mark.usefixtures('inside')
def test_its_namesake_in_torch_runs_in_fp32(name: str, dtype: torch.dtype, device: torch.device) -> None:
    x, y = scores(dtype, device)
    result = DIRECT[name](x, y)
    assert result.dtype is torch.float32
    assert torch.equal(result.detach(), DIRECT[name](x.detach().float(), y.float()))


@pytest.mark.usefixtures('inside')
def test_sum_that_float16_cannot_hold(device: torch.device) -> None:
    x = torch.full((100_000,), 0.9, device=device, dtype=torch.float16)
    loss = F.l1_loss(x, torch.zeros_like(x), reduction='sum')
    assert loss.dtype is torch.float32 and loss.item() == pytest.approx(90_000, rel=1e-3)


@pytest.mark.parametrize('dtype', HALVES, ids=str)
@pytest.mark.usefixtures('inside')
def test_grid_sample_takes_mixed_types(dtype: torch.dtype, device: torch.device) -> None:
    """Deformable DETR: 16-bit values at FP32 locations are an error in torch."""
    value = torch.arange(16.0, device=device).reshape(1, 1, 4, 4).to(dtype)
    grid = torch.rand(1, 2, 2, 2, device=device) - 0.5
    result = F.grid_sample(value, grid, align_corners=False)
    assert result.dtype is dtype
    assert torch.equal(result, F.grid_sample(value.float(), grid, align_corners=False).to(dtype))


@pytest.mark.usefixtures('inside')
def test_local_response_norm_of_large_values(device: torch.device) -> None:
    x = torch.full((1, 4, 2, 2), 300.0, device=device, dtype=torch.float16)
    result = F.local_response_norm(x, 2)
    assert result.dtype is torch.float16 and torch.isfinite(result).all() and bool((result > 0).all())


# -- how a function came to its caller -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'function',
    [
        lambda x: F.l1_loss(x, x * 0),
        lambda x: imported_by_name(x, x * 0),
        lambda x: KEPT_REFERENCE(x, x * 0),
        lambda x: PARTIAL(x, x * 0),
        lambda x: nn.functional.cross_entropy(x[None], torch.zeros(1, dtype=torch.int64, device=x.device)),
    ],
    ids=['attribute', 'from-import', 'kept reference', 'partial', 'another path'],
)
@pytest.mark.usefixtures('inside')
def test_however_it_was_imported(function: Any, device: torch.device) -> None:
    assert function(torch.ones(3, device=device, dtype=torch.float16)).dtype is torch.float32


def test_modules_imported_later_are_seen(device: torch.device) -> None:
    with_ops = OpSet((f'{ME}.product',))
    regions.enter(with_ops.keys)
    regions.leave()
    late = types.ModuleType('late_module_of_this_test')
    late.op = product  # type: ignore[attr-defined]
    sys.modules[late.__name__] = late
    try:
        regions.enter(with_ops.keys)
        x = torch.ones(2, 2, device=device, dtype=torch.float16)
        late.op(x, x)
        assert seen.pop()[:2] == (torch.float32, torch.float32)
        regions.leave()
        late.op(x, x)
        assert seen.pop()[0] is torch.float16
    finally:
        del sys.modules[late.__name__]


def test_outside_everything_is_the_original(device: torch.device) -> None:
    before = (F.mse_loss, torch.kl_div, imported_by_name, torch._C._nn.l1_loss)
    x = torch.ones(3, device=device, dtype=torch.float16)
    assert F.mse_loss(x, x).dtype is torch.float16
    regions.enter(OpSet().keys)
    assert F.mse_loss is not before[0] and imported_by_name is not before[2]
    assert F.mse_loss.__name__ == 'mse_loss' and F.mse_loss.__doc__ == before[0].__doc__
    regions.leave()
    assert (F.mse_loss, torch.kl_div, imported_by_name, torch._C._nn.l1_loss) == before
    assert F.mse_loss(x, x).dtype is torch.float16
    assert pickle.loads(pickle.dumps(F.mse_loss)) is F.mse_loss


def test_what_somebody_else_put_there_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs() -> None: ...

    regions.enter(OpSet().keys)
    monkeypatch.setattr(F, 'hinge_embedding_loss', theirs)
    regions.leave()
    left = F.hinge_embedding_loss
    monkeypatch.undo()
    # monkeypatch gave the stand-in back, which is the original outside of a pass; put that in place again
    F.hinge_embedding_loss = F.hinge_embedding_loss.__wrapped__  # type: ignore[attr-defined]
    assert left is theirs


@pytest.mark.usefixtures('inside')
def test_other_functions_and_types_are_left_alone(device: torch.device) -> None:
    x = torch.ones(3, 3, device=device, dtype=torch.float16)
    assert F.relu(x).dtype is torch.float16 and (x + x).dtype is torch.float16
    wide = x.double()
    assert F.mse_loss(wide, wide).dtype is torch.float64


# -- names from a configuration ----------------------------------------------------------------------------------------


def run(names: str | tuple[str, ...], function: Callable[[], Any]) -> Any:
    names = (names,) if isinstance(names, str) else names
    regions.enter(OpSet(tuple(f'{ME}.{name}' for name in names)).keys)
    try:
        return function()
    finally:
        regions.leave()


@pytest.mark.parametrize('dtype', HALVES, ids=str)
def test_output_has_the_type_of_the_first_tensor(dtype: torch.dtype, device: torch.device) -> None:
    narrow = torch.full((2, 2), 1.5, device=device, dtype=dtype)
    wide = torch.full((2, 2), 0.1, device=device)
    for x, y, expected in ((narrow, narrow, dtype), (narrow, wide, dtype), (wide, narrow, torch.float32)):
        result = run('product', lambda x=x, y=y: product(x, y))
        assert result.dtype is expected and seen.pop()[:2] == (torch.float32, torch.float32)
        assert torch.equal(result, (x.float() @ y.float().T).to(expected))
        seen.clear()


def test_nested_inputs_and_dtype_arguments(device: torch.device) -> None:
    labels = torch.tensor([70001], device=device)
    x = torch.ones(1, device=device, dtype=torch.float16)
    result = run('nested', lambda: nested({'x': [x, labels]}, dtype=torch.float16))
    assert result['sum'].dtype is torch.float16 and result['labels'] is labels and result['text'] == 'as it is'
    widened: list[torch.dtype] = []
    op = Fp32Op('x')
    call(op, lambda t, dtype: widened.append(dtype), (x,), {'dtype': torch.float16})
    call(op, lambda t, dtype: widened.append(dtype), (x, torch.bfloat16), {})
    call(op, lambda t, dtype: widened.append(dtype), (x, torch.int64), {})
    assert widened == [torch.float32, torch.float32, torch.int64]


@pytest.mark.parametrize('name', ['decode', 'encode', 'make'])
def test_methods(name: str, device: torch.device) -> None:
    x = torch.full((2,), 3.0, device=device, dtype=torch.bfloat16)
    before = vars(Coder)[name]
    result = run(f'Coder.{name}', lambda: getattr(Coder(), name)(x))
    assert result.dtype is torch.bfloat16 and result.tolist() == [6.0, 6.0]
    assert vars(Coder)[name] is before


def test_method_of_a_tensor(device: torch.device) -> None:
    x = torch.ones(2, device=device, dtype=torch.float16)
    regions.enter(OpSet(('torch.Tensor.element_size',)).keys)
    inside = x.element_size()
    regions.leave()
    assert (inside, x.element_size()) == (4, 2) and 'element_size' not in vars(torch.Tensor)


@pytest.mark.parametrize('dtype', HALVES, ids=str)
@pytest.mark.parametrize('call', [Square.apply, square], ids=['attribute', 'kept reference'])
@pytest.mark.parametrize('backward_inside', [True, False])
def test_autograd_function(call: Any, backward_inside: bool, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.tensor([1.5, -2.0], device=device, dtype=dtype, requires_grad=True)
    with pytest.raises(RuntimeError, match='expected scalar type Float'):
        call(x)

    def step() -> Tensor:
        result, index = call(x, 3.0)
        assert result.dtype is dtype and index.dtype is torch.int64
        if backward_inside:
            result.sum().backward()
        return result

    result = run('Square', step)
    if not backward_inside:
        result.sum().backward()
    assert x.grad is not None and x.grad.dtype is dtype and x.grad.tolist() == [9.0, -12.0]
    # a graph of FP32 tensors is not touched
    wide = torch.tensor([2.0], device=device, requires_grad=True)
    call(wide)[0].sum().backward()
    assert wide.grad is not None and wide.grad.item() == 4


def test_autograd_function_in_the_newer_style(device: torch.device) -> None:
    x = torch.tensor([0.0, 1.0], device=device, dtype=torch.bfloat16, requires_grad=True)
    result = run('Modern', lambda: Modern.apply(x))
    result.sum().backward()
    assert result.dtype is torch.bfloat16 and x.grad is not None
    assert torch.equal(x.grad, x.detach().float().exp().bfloat16())


def test_marks_of_an_autograd_function_survive(device: torch.device) -> None:
    x = torch.ones(3, device=device, dtype=torch.float16, requires_grad=True)
    doubled, score = run('Marks', lambda: Marks.apply(x))
    assert doubled.requires_grad and not score.requires_grad and score.dtype is torch.float16
    doubled.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0] * 3


def test_types_are_apart(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    only = Fp32Op('x', cpu=frozenset({torch.bfloat16}), cuda=frozenset({torch.bfloat16}))
    ran: list[torch.dtype] = []

    def function(x: Tensor) -> Tensor:
        ran.append(x.dtype)
        return x

    for dtype in HALVES:
        assert call(only, function, (torch.ones(1, device=device, dtype=dtype),), {}).dtype is dtype
    assert ran == [torch.float16, torch.float32]


@pytest.mark.parametrize('dtype', HALVES, ids=str)
def test_inside_autocast(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.full((2, 2), 1.0009765625, device=device)
    with torch.autocast(device.type, dtype):
        assert product(x, x).dtype is dtype
        seen.clear()
        result = run('product', lambda: product(x, x))
        assert torch.is_autocast_enabled(device.type)
    assert result.dtype is torch.float32 and seen.pop() == (torch.float32, torch.float32, False)


@pytest.mark.parametrize('dtype', HALVES, ids=str)
def test_autograd_function_inside_autocast(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.ones(2, 2, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype):
        result = run('Square', lambda: square(x @ x)[0])
    assert result.dtype is dtype
    result.sum().backward()
    assert x.grad is not None and x.grad.dtype is torch.float32


def test_exceptions_pass_and_leave_autocast_as_it_was(device: torch.device) -> None:
    with torch.autocast(device.type, torch.bfloat16):
        with pytest.raises(RuntimeError, match='mat1 and mat2'):
            run('product', lambda: product(torch.ones(2, 3, device=device), torch.ones(2, 2, device=device)))
        assert torch.is_autocast_enabled(device.type)
    seen.clear()


# -- passes ------------------------------------------------------------------------------------------------------------


def test_nested_passes_see_the_union(device: torch.device) -> None:
    x = torch.ones(2, 2, device=device, dtype=torch.float16)
    regions.enter(OpSet((f'{ME}.product',)).keys)
    regions.enter(OpSet().keys)
    product(x, x)
    regions.leave()
    product(x, x)
    regions.leave()
    regions.enter(OpSet().keys)
    product(x, x)
    regions.leave()
    assert [types[0] for types in seen] == [torch.float32, torch.float32, torch.float16]
    seen.clear()


def test_depth() -> None:
    for depth in (1, 2, 3):
        regions.enter(OpSet().keys)
        assert state.depth() == depth and patches.in_place
    for depth in (2, 1, 0):
        regions.leave()
        assert state.depth() == depth and patches.in_place == bool(depth)


def test_leaving_once_too_often_is_harmless() -> None:
    regions.leave()
    assert state.depth() == 0
    regions.enter(OpSet().keys)
    assert state.depth() == 1 and patches.in_place
    regions.leave()


@pytest.mark.parametrize('to', [0, 1, 2])
def test_unwind(to: int) -> None:
    for _ in range(3):
        regions.enter(OpSet().keys)
    regions.unwind(to)
    assert state.depth() == to and patches.in_place == (to > 0)
    regions.unwind(5)
    assert state.depth() == to
    regions.unwind(0)


def other_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.usefixtures('inside')
def test_other_threads_keep_the_original(device: torch.device) -> None:
    x = torch.ones(3, device=device, dtype=torch.float16)
    assert F.mse_loss(x, x).dtype is torch.float32
    assert other_thread(lambda: F.mse_loss(x, x)).dtype is torch.float16


def test_two_threads_at_once(device: torch.device) -> None:
    """The first to leave must not take the stand-ins from the other."""
    x = torch.ones(3, device=device, dtype=torch.float16)
    regions.enter(OpSet().keys)

    def whole_pass() -> torch.dtype:
        regions.enter(OpSet().keys)
        dtype = F.mse_loss(x, x).dtype
        regions.leave()
        return dtype

    assert other_thread(whole_pass) is torch.float32
    assert F.mse_loss(x, x).dtype is torch.float32
    regions.leave()


def test_backward_pass_counts_on_every_thread(device: torch.device) -> None:
    x = torch.ones(3, device=device, dtype=torch.float16)
    with regions.in_backward(OpSet().keys):
        assert state.depth() == 0 and F.mse_loss(x, x).dtype is torch.float32
        assert other_thread(lambda: F.mse_loss(x, x)).dtype is torch.float32
    assert F.mse_loss(x, x).dtype is torch.float16

    def interrupted() -> None:
        with regions.in_backward(OpSet().keys):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert F.mse_loss(x, x).dtype is torch.float16


def test_op_sets_can_be_pickled(device: torch.device) -> None:
    again = pickle.loads(pickle.dumps(OpSet((f'{ME}.product',))))
    x = torch.ones(2, 2, device=device, dtype=torch.float16)
    regions.enter(again.keys)
    product(x, x)
    regions.leave()
    assert seen.pop()[0] is torch.float32


# -- methods by convention ---------------------------------------------------------------------------------------------


class Head(nn.Module):
    """RetinaNet: anchors get the type of the scores, and a float16 sum of losses is inf."""

    def loss_by_feat(self, scores: list[Tensor]) -> dict[str, Tensor]:
        assert all(s.dtype is torch.float32 for s in scores)
        return {'loss': sum(s.sum() for s in scores)}

    def predict_by_feat(self, scores: list[Tensor]) -> Tensor:
        return torch.arange(2049, 2051, dtype=scores[0].dtype, device=scores[0].device)


class SpecialHead(Head):
    def loss_by_feat(self, scores: list[Tensor]) -> dict[str, Tensor]:
        return {'double': 2 * super().loss_by_feat(scores)['loss']}


@pytest.mark.parametrize('cls', [Head, SpecialHead])
def test_methods_by_convention(cls: type[Head], device: torch.device) -> None:
    head = cls()
    x = torch.full((70_000,), 1.0, device=device, dtype=torch.float16)
    regions.enter(OpSet(classes=[cls]).keys)
    loss, points = head.loss_by_feat([x]), head.predict_by_feat([x])
    regions.leave()
    value = loss['loss'] if cls is Head else loss['double'] / 2
    assert value.dtype is torch.float32 and value.item() == 70_000
    assert points.tolist() == [2049.0, 2050.0]  # float16 has no 2049
    assert 'in_fp32' not in repr(Head.loss_by_feat) and 'predict_by_feat' not in vars(SpecialHead)


def test_classes_without_a_dotted_name(device: torch.device) -> None:
    heads = []
    for factor in (1, 2):

        class Local(nn.Module):
            factor_of = factor

            def loss_by_feat(self, x: Tensor) -> Tensor:
                assert x.dtype is torch.float32
                return x.sum() * self.factor_of

        heads.append(Local())
    x = torch.ones(2, device=device, dtype=torch.float16)
    for head, expected in zip(heads, (2, 4)):
        regions.enter(OpSet(classes=[type(head)]).keys)
        assert head.loss_by_feat(x).item() == expected
        regions.leave()


# -- several names for one object --------------------------------------------------------------------------------------


def test_aliases_join(device: torch.device) -> None:
    """mmcv.ops.nms and mmcv.ops.nms.nms: whichever name a wrapper gives, the other's stand-in must not hide it."""
    alias = types.ModuleType('alias_module_of_this_test')
    alias.product, alias.op = product, square  # type: ignore[attr-defined]
    sys.modules[alias.__name__] = alias
    x = torch.ones(2, 2, device=device, dtype=torch.float16)
    try:
        for names in ((f'{ME}.product', f'{ME}.Square'), (f'{alias.__name__}.product', f'{alias.__name__}.op')):
            regions.enter(OpSet(names).keys)
            alias.product(x, x)
            product(x, x)
            assert alias.op(x)[0].dtype is torch.float16
            regions.leave()
            assert [types_[0] for types_ in seen] == [torch.float32] * 2
            seen.clear()
    finally:
        del sys.modules[alias.__name__]


def test_rules_of_one_member_do_not_mix() -> None:
    """A configuration widens a registry entry for its own model, and for no other."""
    only = frozenset({torch.bfloat16})
    narrow, wide = Fp32Op('a', 'float32', only, only), Fp32Op('a')
    member = PatchedFunction()
    member.ops = {'a': narrow, 'config:caller:a': wide}
    assert member.active() is None
    try:
        regions.enter(frozenset({'a'}))
        assert member.active() is narrow
        regions.enter(frozenset({'config:caller:a'}))
        both = member.active()
        assert both is not None and both.avoids('cpu') == set(HALVES) and both.output == 'float32'
    finally:
        regions.unwind()


# -- what is written in place ------------------------------------------------------------------------------------------


def test_in_place_results_reach_the_caller(device: torch.device) -> None:
    x = torch.tensor([1.0, 2.0], device=device, dtype=torch.float16)
    buffer = torch.zeros(2, device=device, dtype=torch.float16)
    regions.enter(OpSet(('torch.Tensor.add_', 'torch.softmax')).keys)
    same = x.add_(1)
    out = torch.softmax(x, 0, out=buffer)
    regions.leave()
    assert same is x and x.tolist() == [2.0, 3.0] and x.dtype is torch.float16
    assert out is buffer and buffer.sum().item() == pytest.approx(1, abs=1e-3)


def test_in_place_with_a_gradient(device: torch.device) -> None:
    x = torch.tensor([1.0, 2.0], device=device, dtype=torch.bfloat16, requires_grad=True)
    regions.enter(OpSet(('torch.Tensor.mul_',)).keys)
    y = (x * 1).mul_(3)
    regions.leave()
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [3.0, 3.0]


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert x.dtype is torch.float32
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_autograd_function_that_works_in_place(device: torch.device) -> None:
    leaf = torch.ones(2, device=device, dtype=torch.float16, requires_grad=True)
    x = leaf * 1
    result = run('InPlace', lambda: InPlace.apply(x))
    assert result is x and x.tolist() == [2.0, 2.0] and x.dtype is torch.float16
    result.sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [2.0, 2.0]


def test_one_argument_twice_stays_one(device: torch.device) -> None:
    x = torch.ones(2, device=device, dtype=torch.float16)
    assert call(Fp32Op('x'), lambda a, b: a is b, (x, x), {}) is True


@dataclasses.dataclass
class Counter:
    weight: Tensor
    calls: int = 0

    def scaled(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


def test_self_is_not_replaced_by_a_copy(device: torch.device) -> None:
    x = torch.ones(2, device=device, dtype=torch.float16)
    counter = Counter(x)
    run('Counter.scaled', lambda: counter.scaled(x))
    assert counter.calls == 1


# -- derivatives -------------------------------------------------------------------------------------------------------


def test_second_derivative_is_refused(device: torch.device) -> None:
    """Copies made inside forward carry no graph: terms would be lost without a word."""
    x = torch.tensor([3.0], device=device, dtype=torch.bfloat16, requires_grad=True)
    result = run('Square', lambda: square(x)[0])
    with pytest.raises(AmpUsageError, match=r'create_graph=True.*Square.*second derivative'):
        torch.autograd.grad(result.sum(), x, create_graph=True)
    wide = torch.tensor([3.0], device=device, requires_grad=True)
    torch.autograd.grad(run('Square', lambda: square(wide)[0]).sum(), wide, create_graph=True)


class ModernPair(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        return gradient * 2


class OtherBackward(Square):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        assert gradient.dtype is torch.float32
        return gradient * 5, None


def test_marks_in_the_newer_style(device: torch.device) -> None:
    x = torch.ones(3, device=device, dtype=torch.float16, requires_grad=True)
    doubled, total = run('ModernPair', lambda: ModernPair.apply(x))
    assert doubled.requires_grad and not total.requires_grad


def test_subclass_with_a_backward_of_its_own(device: torch.device) -> None:
    x = torch.ones(3, device=device, dtype=torch.float16, requires_grad=True)
    run('Square', lambda: OtherBackward.apply(x))[0].sum().backward()
    assert x.grad is not None and x.grad.tolist() == [5.0] * 3


# -- other people's hands ----------------------------------------------------------------------------------------------


def test_a_patch_that_is_there_when_a_pass_begins(device: torch.device) -> None:
    x = torch.ones(3, device=device, dtype=torch.float16)
    original = F.huber_loss
    for _ in range(2):
        with mock.patch.object(F, 'huber_loss', return_value=-1):
            regions.enter(OpSet().keys)
            assert F.huber_loss(x, x) == -1
            regions.leave()
            assert F.huber_loss(x, x) == -1
        regions.enter(OpSet().keys)
        assert F.huber_loss(x, x).dtype is torch.float32
        regions.leave()
        assert F.huber_loss is original


def test_a_patch_that_outlives_the_pass_it_began_in(device: torch.device) -> None:
    x = torch.ones(3, device=device, dtype=torch.float16)
    original = F.soft_margin_loss
    patch = mock.patch.object(F, 'soft_margin_loss', return_value=-1)
    regions.enter(OpSet().keys)
    patch.start()
    assert F.soft_margin_loss(x, x) == -1
    regions.leave()
    assert F.soft_margin_loss(x, x) == -1
    patch.stop()
    # the patch gave our stand-in back, which rests; the next pass puts the original in its place
    assert F.soft_margin_loss(x, x).dtype is torch.float16
    regions.enter(OpSet().keys)
    assert F.soft_margin_loss(x, x).dtype is torch.float32
    regions.leave()
    assert F.soft_margin_loss is original


def test_modules_that_are_imported_in_a_pass_get_the_original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / 'imported_in_a_pass.py').write_text('from torch.nn.functional import l1_loss\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    regions.enter(OpSet().keys)
    import imported_in_a_pass  # type: ignore[import-not-found]

    x = torch.ones(3, dtype=torch.float16)
    assert imported_in_a_pass.l1_loss(x, x).dtype is torch.float32
    regions.leave()
    assert imported_in_a_pass.l1_loss is F.l1_loss
    regions.enter(OpSet().keys)
    assert imported_in_a_pass.l1_loss(x, x).dtype is torch.float32
    regions.leave()
    del sys.modules['imported_in_a_pass']


def test_a_module_that_comes_inside_a_nested_pass_is_seen(device: torch.device) -> None:
    late = types.ModuleType('nested_module_of_this_test')
    x = torch.ones(3, device=device, dtype=torch.float16)
    original = F.l1_loss
    regions.enter(OpSet().keys)
    late.loss = original  # type: ignore[attr-defined]
    sys.modules[late.__name__] = late
    try:
        regions.enter(OpSet().keys)
        assert late.loss is not original and late.loss(x, x).dtype is torch.float32
        regions.leave()
        regions.leave()
        assert late.loss is original
    finally:
        del sys.modules[late.__name__]


def test_a_failed_begin_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = F.l1_loss
    (holder, _), site = next(reversed(patches.targets.items()))

    def fail() -> bool:
        raise TypeError('cannot set')

    monkeypatch.setattr(site, 'prepare', fail)
    # each one by itself, as where something else is found in their place
    monkeypatch.setattr(patches._namespaces[holder], 'patches', {})
    with pytest.raises(TypeError, match='cannot set'):
        regions.enter(OpSet().keys)
    assert F.l1_loss is before and state.depth() == 0 and not patches.in_place


@pytest.mark.parametrize('dtype', HALVES, ids=str)
def test_meta_tensors(dtype: torch.dtype) -> None:
    """Shapes and FLOPs are counted on the meta device, which has no autocast."""
    x = torch.ones(3, 3, device='meta', dtype=dtype)
    regions.enter(OpSet(('torch.matmul',)).keys)
    assert torch.matmul(x, x).dtype is dtype and F.mse_loss(x, x).dtype is torch.float32
    regions.leave()


def test_classes_are_not_kept_alive(device: torch.device) -> None:
    def attach() -> weakref.ref[type]:
        class Local(nn.Module):
            def loss_by_feat(self, x: Tensor) -> Tensor:
                return x

        module = Local()
        ops = OpSet(classes=[Local])
        op_set.attach([module], ops)
        assert module.loss_by_feat(torch.ones(1, device=device, dtype=torch.float16)).dtype is torch.float32
        return weakref.ref(Local)

    sites = len(patches.targets)
    references = [attach() for _ in range(3)]
    gc.collect()
    assert [reference() for reference in references] == [None] * 3 and len(patches.targets) == sites


def test_autocast_to_a_type_that_is_fine_stays_on(device: torch.device) -> None:
    only = frozenset({torch.bfloat16})
    op = Fp32Op('x', cpu=only, cuda=only)
    x = torch.ones(2, 2, device=device)
    for dtype, expected in ((torch.float16, torch.float16), (torch.bfloat16, torch.float32)):
        with torch.autocast(device.type, dtype):
            assert call(op, lambda a: a @ a, (x,), {}).dtype is expected


# -- methods that begin a pass -----------------------------------------------------------------------------------------


class Verbs(nn.Module):
    def predict(self, x: Tensor) -> torch.dtype:
        return F.l1_loss(x, x).dtype

    def other(self, x: Tensor) -> torch.dtype:
        return F.l1_loss(x, x).dtype


def test_methods_of_attached_modules_begin_a_pass(device: torch.device) -> None:
    module, stranger = Verbs(), Verbs()
    ops = OpSet(classes=[Verbs])
    op_set.attach([module], ops)
    x = torch.ones(3, device=device, dtype=torch.float16)
    assert module.predict(x) is torch.float32 and state.depth() == 0
    assert stranger.predict(x) is torch.float16 and module.other(x) is torch.float16
    with pytest.raises(AttributeError):
        module.predict(None)
    assert state.depth() == 0
    op_set.release([module])
    assert module.predict(x) is torch.float16


def test_a_name_that_comes_late_is_found_where_it_was_imported_before(device: torch.device) -> None:
    """The second wrapper of a process names a function that modules scanned long ago have imported."""
    home, user = types.ModuleType('home_of_this_test'), types.ModuleType('user_of_this_test')
    ran: list[torch.dtype] = []
    home.op = lambda x: ran.append(x.dtype)  # type: ignore[attr-defined]
    user.op = home.op  # type: ignore[attr-defined]
    sys.modules.update({home.__name__: home, user.__name__: user})
    x = torch.ones(2, device=device, dtype=torch.float16)
    try:
        for names in ((), (f'{home.__name__}.op',)):
            regions.enter(OpSet(names).keys)
            user.op(x)
            regions.leave()
    finally:
        del sys.modules[home.__name__], sys.modules[user.__name__]
    assert ran == [torch.float16, torch.float32]


def test_op_sets_bring_their_methods_to_another_process(tmp_path: Path) -> None:
    (tmp_path / 'heads_of_this_test.py').write_text(
        'from torch import nn\n\n\nclass Head(nn.Module):\n    def loss_by_feat(self, x):\n        return x\n'
    )
    dump = (
        'import pickle, heads_of_this_test as h; from amp_wrapper.autocast.op_set import OpSet;'
        'pickle.dump(OpSet(classes=[h.Head]), open("set.pkl", "wb"))'
    )
    load = (
        'import pickle, torch, heads_of_this_test as h; from amp_wrapper.autocast import regions;'
        'ops = pickle.load(open("set.pkl", "rb")); regions.enter(ops.keys);'
        'print(h.Head().loss_by_feat(torch.ones(1).half()).dtype)'
    )
    root = str(Path(op_set.__file__).parents[2])
    for code in (dump, load):
        done = subprocess.run(
            [sys.executable, '-c', code],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, 'PYTHONPATH': root},
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == 'torch.float32'


def test_a_name_that_holds_something_else_by_now_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A variable of a notebook: a loss first, and another function later."""
    here = sys.modules[__name__]
    monkeypatch.setattr(here, 'borrowed', F.smooth_l1_loss, raising=False)
    monkeypatch.setattr(patches, '_scanned', set())
    monkeypatch.setattr(patches, '_fingerprint', ())
    x = torch.ones(2, device=device, dtype=torch.bfloat16)
    regions.enter(OpSet().keys)
    try:
        assert here.borrowed(x, x).dtype is torch.float32
    finally:
        regions.leave()

    def other(left: torch.Tensor, right: torch.Tensor) -> torch.dtype:
        return left.dtype

    for function in (other, functools.wraps(F.smooth_l1_loss)(lambda *args: F.smooth_l1_loss(*args))):
        here.borrowed = function
        regions.enter(OpSet().keys)
        try:
            assert (here.borrowed is other) is (function is other)
            found = here.borrowed(x, x)
        finally:
            regions.leave()
        assert here.borrowed is function
        assert found is torch.bfloat16 or found.dtype is torch.float32
