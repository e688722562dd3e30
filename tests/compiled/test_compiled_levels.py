"""``torch.compile`` at every level, in every way: whole graphs, with the types and the values of eager training."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from bits import differences
from grid import but, but_every, long
from torch import Tensor, nn
from toy_compiled import HALF, WAYS, Net, batch, fresh, initialized, step

from amp_wrapper import amp

LEVELS = tuple(HALF)
CASES = [(level, way) for level in LEVELS for way in WAYS]


def train(level: str, way: str, device: torch.device, steps: int = 4) -> tuple[list[float], dict[str, Tensor], Any]:
    """Losses, weights and counters of some steps, one of them with NaN."""
    torch.manual_seed(0)
    model = Net(level).to(device)
    with fresh() as counters:
        call, optimizer = initialized(model, way, level)
        torch.manual_seed(1)
        losses = [step(call, optimizer, [batch(device)]).item() for _ in range(steps)]
        model.eval()
        with torch.no_grad():
            outputs = call(batch(device)[0])
        assert outputs.dtype is torch.float32
        state = {name.replace('._orig_mod', ''): tensor for name, tensor in model.state_dict().items()}
        return losses, {**state, 'outputs': outputs}, copy.deepcopy(counters)


@pytest.mark.parametrize(('level', 'way'), but_every(4, CASES, long))
def test_whole_graphs(level: str, way: str, device: torch.device) -> None:
    """``fullgraph=True`` in training and evaluation. The modules inside assert their types where they are traced."""
    losses, state, counters = train(level, way, device)
    assert not counters['graph_break']
    # a graph each for training and for evaluation; of parts, torch makes one for each module
    assert counters['stats']['unique_graphs'] == 2 or way == 'parts'
    eager, expected, none = train(level, 'eager', device)
    assert not none['stats']
    half = HALF[level]
    bound = 1e-5 if half is torch.float32 else 8 * torch.finfo(half).eps
    assert losses == pytest.approx(eager, rel=bound)
    for name, tensor in expected.items():
        assert torch.allclose(state[name].double(), tensor.double(), rtol=0.1, atol=bound * tensor.abs().max().item())


@pytest.mark.parametrize(
    ('level', 'backend'),
    but(
        [('O2', 'inductor'), ('O1', 'aot_eager'), ('O4', 'aot_eager'), ('O5', 'aot_eager')],
        itertools.product(('O0', 'O1', 'O2', 'O3', 'O4', 'O5'), ('inductor', 'aot_eager')),
        long,
    ),
)
def test_gradients_against_float64(level: str, backend: str, device: torch.device) -> None:
    """The bound of docs/compile.md: as far from float64 as eager training is, and some roundings of the 16-bit type."""
    torch.manual_seed(0)
    model = Net(level).to(device)
    exact = copy.deepcopy(model).double()
    for part in exact.modules():
        if hasattr(part, 'dtype'):
            part.dtype = torch.float64
    x, labels = batch(device)
    exact.level, exact.by_op = None, nn.Identity()
    exact.wide = exact.narrow = nn.Identity()
    exact(x.double(), labels).backward()
    reference = {name: parameter.grad for name, parameter in exact.named_parameters()}
    # behind a BatchNorm, the gradient of a bias is 0 but for roundings
    size = torch.stack([gradient.norm() for gradient in reference.values()]).norm().item()

    def errors(way: str) -> dict[str, float]:
        with fresh():
            tried = copy.deepcopy(model)
            call, optimizer = initialized(tried, way, level, backend, loss_scale=128.0)
            loss = call(x, labels)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            found = dict(zip(reference, amp.master_params(optimizer)))
            return {
                name: ((found[name].grad.double() - gradient).norm() / (gradient.norm() + 0.1 * size)).item()
                for name, gradient in reference.items()
            }

    unit = torch.finfo(HALF[level]).eps
    eager, graph = errors('eager'), errors('function')
    for name, error in graph.items():
        assert error <= 1.5 * eager[name] + 8 * unit, (name, error, eager[name])
    assert 0 < max(eager.values()) < 64 * unit


@pytest.mark.parametrize('level', but(['O1', 'O5'], ['O1', 'O4', 'O5'], long))
def test_nothing_is_compiled_again(level: str, device: torch.device) -> None:
    """After the first step: neither by regions that are opened anew, nor by masters, nor by the loss scale."""
    torch.manual_seed(0)
    for way in ('after', 'function'):
        with fresh() as counters:
            call, optimizer = initialized(Net(level).to(device), way, level)
            step(call, optimizer, [batch(device)])
            before = counters['stats']['unique_graphs']
            for number in range(6):
                step(call, optimizer, [batch(device, bad=number == 2)])
            assert counters['stats']['unique_graphs'] == before == 1


def test_a_model_that_ran_before_it_was_cast(device: torch.device) -> None:
    """Nothing of what was compiled in FP32 is used afterwards, although torch does not look at hooks."""
    for level in ('O4', 'O5'):
        ends = []
        for ran in (False, True):
            torch.manual_seed(0)
            model = Net(None).to(device)
            with fresh():
                wrapper = torch.compile(model, backend='aot_eager', fullgraph=True)
                x, labels = batch(device)
                if ran:
                    model.eval()
                    assert wrapper(x).dtype is torch.float32
                    model.train()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
                amp.initialize(wrapper, optimizer, opt_level=level, verbosity=0, keep_fp32=['hidden*'])
                step(wrapper, optimizer, [(x, labels)])
                ends.append(model.state_dict())
        assert differences(*ends) == []
