"""How far a pass is from FP32: sums, infinities that are meant, gradients at any loss scale, the modules they belong to."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toy_levels import OffsetInside, OverflowingFormer, PlainCNN, batches, cross_entropy

from amp_wrapper.diagnostics.deviations import Deviation, Distance, Pass, compare, run_pass
from amp_wrapper.diagnostics.sandbox import sandbox
from amp_wrapper.optim import FusedSGD
from amp_wrapper.policy import resolve


def passed(
    model: nn.Module, level: str, shape: tuple[int, ...], times: float = 1.0, **options: object
) -> tuple[Pass, nn.Module]:
    batch = batches(1, *shape)[0]
    with sandbox(model, resolve(level, **options), lambda m: FusedSGD(m.parameters(), lr=0.1)) as box:  # type: ignore[arg-type]
        found = run_pass(box, lambda m: cross_entropy(m, batch) * times, partial(torch.manual_seed, 0))
        return found, box.model


def deviation(model: nn.Module, level: str, shape: tuple[int, ...], times: float = 1.0, **options: object) -> Deviation:
    reference, _ = passed(model, 'O0', shape, times)
    own, copied = passed(model, level, shape, times, **options)
    return compare(copied, reference, own)


def test_distances() -> None:
    exact, other = torch.tensor([3.0, 4.0, 0.0]), torch.tensor([3.0, 0.0, 0.0])
    distance = Distance.of(exact, other)
    assert distance.error == pytest.approx(0.8)
    assert distance.cosine == pytest.approx(0.6)
    assert distance.vanished == pytest.approx(16 / 25)
    both = distance + Distance.of(exact, exact.half())
    assert both.error == pytest.approx(4 / math.sqrt(50))
    assert Distance.of(exact, torch.tensor([3.0, math.inf, 0.0])).error == math.inf
    assert Distance.of(torch.zeros(2), torch.ones(2)).error == math.inf
    assert math.isnan(Distance.of(exact, torch.zeros(3)).cosine)
    assert Distance().error == 0.0


def test_fp32_deviates_by_nothing() -> None:
    found = deviation(PlainCNN(dropout=0.5), 'O0', (1, 8, 8))
    assert (found.loss, found.error, found.first_nonfinite) == (0.0, 0.0, None)
    assert {name for name, each in found.modules.items() if each.outputs == 0.0} == set(found.modules)
    assert set(found.owners) == {'net.0', 'net.1', 'net.3', 'net.4', 'head'}


@pytest.mark.parametrize('level', ['O1', 'O2', 'O3', 'O4', 'O5'])
def test_every_level_deviates_as_its_type_does(level: str) -> None:
    found = deviation(PlainCNN(dropout=0.5), level, (1, 8, 8))
    low, high = (1e-4, 0.02) if level in ('O1', 'O2', 'O3') else (1e-3, 0.1)
    assert found.finite
    assert low < found.error < high
    assert low < found.gradient.error < high
    assert found.gradient.cosine > 0.99
    # the gradient of the whole is that of the root
    whole = found.modules[''].gradient
    assert whole is not None
    assert whole.error == pytest.approx(found.gradient.error)


def test_gradients_are_those_without_the_loss_scale() -> None:
    """A loss of 1e6 overflows at a scale of 2 ** 16: the scale falls until it does not."""
    found = deviation(PlainCNN(), 'O2', (1, 8, 8), times=1e4)
    assert found.finite
    assert found.scale < 2.0**16
    assert found.error < 0.05
    static = deviation(PlainCNN(), 'O2', (1, 8, 8), times=1e4, loss_scale=2.0**16)
    assert not static.finite
    assert static.error == math.inf


def test_the_weights_stay() -> None:
    model = PlainCNN()
    batch = batches(1, 1, 8, 8)[0]
    with sandbox(model, resolve('O5'), lambda m: FusedSGD(m.parameters(), lr=0.1)) as box:
        before = [p.clone() for p in box.model.parameters()]
        run_pass(box, lambda m: cross_entropy(m, batch), partial(torch.manual_seed, 0))
        assert all(torch.equal(a, b) for a, b in zip(before, box.model.parameters()))
        assert not any(p.grad is not None for p in box.model.parameters())
        assert not any(module._forward_hooks for name, module in box.model.named_modules() if name == 'net.2')


def test_the_module_in_which_an_overflow_begins() -> None:
    found = deviation(OverflowingFormer((1, 2)), 'O2', (6, 8))
    assert found.first_nonfinite == 'blocks.1.attn'
    assert not found.modules['head'].finite
    assert found.modules['blocks.0.mlp'].finite
    assert found.error == found.loss == math.inf


def test_the_module_that_adds_the_error() -> None:
    found = deviation(OffsetInside(), 'O5', (8,))
    leaves = [each for each in found.modules.values() if each.kind not in ('OffsetInside', 'Sequential')]
    assert max(leaves, key=lambda each: each.added).name == 'stem.1'
    assert found.modules['stem.1'].inputs < 0.02 < found.modules['stem.1'].outputs


def test_infinities_that_fp32_has_too_are_meant() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(torch.eye(x.shape[1], dtype=torch.bool)[: x.shape[0] % 4 or 4].any(0), -math.inf)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.mask, self.softmax = nn.Linear(8, 8), Masked(), nn.Softmax(1)
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.softmax(self.mask(self.fc(x))))

    found = deviation(Model(), 'O2', (8,))
    assert found.first_nonfinite is None
    assert all(each.finite for each in found.modules.values())
    assert found.modules['mask'].outputs < 0.01


def test_segments_that_are_recomputed_count_once() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.body, x, use_reentrant=False))

    own, _ = passed(Model(), 'O5', (8,))
    assert [call.module for call in own.calls] == ['body', 'head', '']
