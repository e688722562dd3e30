"""Recurrent layers and cells under O1 and O4: 16-bit results, and gradients of the types that came in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from amp_wrapper.autocast.global_autocast import GlobalCasts
from amp_wrapper.autocast.patching import patches
from amp_wrapper.casting.plan import CastPlan
from amp_wrapper.policy import resolve

LAYERS = [nn.RNN, nn.LSTM, nn.GRU]
CELLS = [nn.RNNCell, nn.LSTMCell, nn.GRUCell]
SHAPES: list[dict[str, Any]] = [
    {},
    {'num_layers': 2},
    {'num_layers': 2, 'bidirectional': True},
    {'batch_first': True, 'bias': False},
    {'num_layers': 2, 'dropout': 0.5},
]


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=['float16', 'bfloat16'])
def half(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    casts = GlobalCasts(request.param)
    casts.start()
    yield request.param
    casts.stop()
    assert not patches.in_place


def _build(kind: type[nn.Module], **words: Any) -> nn.Module:
    return kind(4, 4, **words)


@pytest.mark.parametrize('kind', [*CELLS, lambda *sizes: nn.RNNCell(*sizes, nonlinearity='relu')])
def test_cells(kind: Any, half: torch.dtype) -> None:
    cell = kind(4, 4)
    for dtype in (torch.float32, half):
        steps = [torch.randn(2, 4).to(dtype).requires_grad_() for _ in range(3)]
        state: Any = torch.zeros(2, 4, dtype=dtype)
        if isinstance(cell, nn.LSTMCell):
            state = (state, state)
        for step in steps:
            state = cell(step, state)
            assert (state[0] if isinstance(state, tuple) else state).dtype is half
        cell.zero_grad()
        (state[0] if isinstance(state, tuple) else state).float().sum().backward()
        assert all(step.grad is not None and step.grad.dtype is dtype for step in steps)
        assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in cell.parameters())


@pytest.mark.parametrize('words', SHAPES, ids=str)
@pytest.mark.parametrize('kind', LAYERS)
@pytest.mark.parametrize('with_state', [True, False])
def test_layers(kind: type[nn.Module], words: dict[str, Any], with_state: bool, half: torch.dtype) -> None:
    layer = _build(kind, **words)
    copies = words.get('num_layers', 1) * (2 if words.get('bidirectional') else 1)
    for dtype in (torch.float32, half):
        x = torch.randn(3, 3, 4).to(dtype).requires_grad_()
        state: Any = torch.zeros(copies, 3, 4, dtype=dtype)
        if kind is nn.LSTM:
            state = (state, state)
        out, last = layer(x, state) if with_state else layer(x)
        assert out.dtype is half
        assert all(t.dtype is half for t in (last if isinstance(last, tuple) else (last,)))
        layer.zero_grad()
        out.float().sum().backward()
        assert x.grad is not None
        assert x.grad.dtype is dtype
        assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in layer.parameters())


def test_projections_and_other_activations(half: torch.dtype) -> None:
    assert nn.LSTM(4, 4, proj_size=2)(torch.randn(3, 2, 4))[0].dtype is half
    assert nn.RNN(4, 4, nonlinearity='relu')(torch.randn(3, 2, 4))[0].dtype is half
    assert nn.GRU(4, 4)(torch.randn(3, 4))[0].dtype is half


@pytest.mark.parametrize('kind', LAYERS)
def test_packed_sequences(kind: type[nn.Module], half: torch.dtype) -> None:
    layer = _build(kind, num_layers=2)
    for dtype in (torch.float32, half):
        x = torch.randn(5, 3, 4).to(dtype).requires_grad_()
        packed = pack_padded_sequence(x, torch.tensor([5, 4, 2]))
        out, _ = layer(packed)
        assert isinstance(out, PackedSequence)
        assert out.data.dtype is half
        padded, lengths = pad_packed_sequence(out)
        assert lengths.tolist() == [5, 4, 2]
        padded.float().sum().backward()
        assert x.grad is not None
        assert x.grad.dtype is dtype


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.rnn, self.head = _build(kind, bidirectional=True), nn.Linear(8, 1)
        self.types: set[torch.dtype] = set()

    def forward(self, x: Any) -> Tensor:
        out = self.rnn(x)[0]
        out = pad_packed_sequence(out)[0] if isinstance(out, PackedSequence) else out
        self.types.add(out.dtype)
        return self.head(out).mean(0)


@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('kind', LAYERS)
@pytest.mark.parametrize(('level', 'dtype'), [('O1', torch.float16), ('O4', torch.bfloat16)])
def test_a_model_trains(kind: type[nn.Module], level: str, dtype: torch.dtype, packed: bool) -> None:
    torch.manual_seed(0)
    model = Tagger(kind)
    CastPlan([('', model)], resolve(opt_level=level), covers_forward=True).apply()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, target = torch.randn(4, 3, 4), torch.tensor([[-0.5], [0.0], [0.5]])
    batch = pack_padded_sequence(x, torch.tensor([4, 4, 4])) if packed else x
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model(batch) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert model.types == {dtype}
    assert losses[-1] < 0.1 * losses[0]
    # a direct call gives FP32, also inside a packed sequence
    direct = model.rnn(batch)[0]
    assert (direct.data if packed else direct).dtype is torch.float32


@pytest.mark.parametrize('kind', LAYERS)
def test_the_arithmetic_is_that_of_a_16_bit_layer(kind: type[nn.Module], half: torch.dtype) -> None:
    layer = _build(kind)
    x = torch.randn(3, 2, 4)
    out = layer(x)[0]
    duplicate = _build(kind)
    duplicate.load_state_dict(layer.state_dict())
    assert out.equal(duplicate.to(half)(x.to(half))[0])
