"""A registered function runs in FP32: arguments, results, methods, autograd functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp32_functions import (
    Coder,
    Counter,
    InPlace,
    Marks,
    Modern,
    ModernPair,
    OtherBackward,
    Square,
    nested,
    product,
    run,
    seen,
    square,
)
from torch import Tensor, nn

from amp_wrapper import AmpUsageError
from amp_wrapper.autocast import regions
from amp_wrapper.autocast.call import call
from amp_wrapper.autocast.op_set import OpSet
from amp_wrapper.policy.fp32_registry import Fp32Op

HALVES = (torch.float16, torch.bfloat16)


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


def test_marks_in_the_newer_style(device: torch.device) -> None:
    x = torch.ones(3, device=device, dtype=torch.float16, requires_grad=True)
    doubled, total = run('ModernPair', lambda: ModernPair.apply(x))
    assert doubled.requires_grad and not total.requires_grad


def test_subclass_with_a_backward_of_its_own(device: torch.device) -> None:
    x = torch.ones(3, device=device, dtype=torch.float16, requires_grad=True)
    run('Square', lambda: OtherBackward.apply(x))[0].sum().backward()
    assert x.grad is not None and x.grad.tolist() == [5.0] * 3
