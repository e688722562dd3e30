"""What plain autocast runs, runs at O1 and O4: every op of the tables, in its functional, in-place and ``out=`` form.

Plain autocast on a CPU has a shorter list, on a GPU torch's own; the tests run where ``--device`` says.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_wrapper import amp
from amp_wrapper.amp.functions import disable_casts
from amp_wrapper.policy.autocast_lists import OP_RULES

HALF = {'O1': torch.float16, 'O4': torch.bfloat16}
#: Reached by torch's modules and losses, which test_amp_casts calls; or made of matrices, lists, and weights of layers.
ELSEWHERE = frozenset(
    'convolution _convolution lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell lstm gru rnn_tanh rnn_relu '
    'native_layer_norm layer_norm group_norm rms_norm linalg_vector_norm linalg_matrix_norm linalg_multi_dot '
    'upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d '
    'upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d '
    '_upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler bilinear pdist '
    'nll_loss nll_loss2d poisson_nll_loss cosine_embedding_loss hinge_embedding_loss kl_div l1_loss smooth_l1_loss '
    'huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss '
    'multi_margin_loss binary_cross_entropy_with_logits softplus einsum chain_matmul tensordot '
    'cosine_similarity linalg_cross'.split()
)


def arguments(name: str, x: Tensor, y: Tensor) -> tuple[Any, ...]:
    """What comes after ``self`` in a call of ``name``; ``x`` and ``y`` are 3 x 3 of their own types."""
    device = x.device
    rows = torch.tensor([0, 2, 1], device=device)
    places = rows.expand(3, 3)
    mask = torch.tensor([True, False, True], device=device).expand(3, 3)
    found: dict[str, tuple[Any, ...]] = {
        'addbmm': (y.expand(2, 3, 3), y.expand(2, 3, 3)),
        'addcdiv': (y, y),
        'ldexp': (torch.ones(3, dtype=torch.int, device=device),),
        'mvlgamma': (1,),
        'addcmul': (y, y),
        'addmm': (y, y),
        'addmv': (y, y[0]),
        'addr': (y[0], y[1]),
        'atan2': (y,),
        'baddbmm': (y.expand(2, 3, 3), y.expand(2, 3, 3)),
        'cdist': (y,),
        'cross': (y,),
        'cumprod': (0,),
        'cumsum': (0,),
        'dist': (y,),
        'dot': (y[0],),
        'frobenius_norm': (0,),
        'index_add': (0, rows, y),
        'index_copy': (0, rows, y),
        'index_put': ((rows,), y),
        'index_reduce': (0, rows, y, 'mean'),
        'lerp': (y, 0.5),
        'log_softmax': (0,),
        'logsumexp': (0,),
        'masked_scatter': (mask, y),
        'mv': (y[0],),
        'norm': (2, 0),
        'nuclear_norm': ((0, 1),),
        'pow': (-0.5,),
        'put': (places, y),
        'renorm': (2, 0, 1.0),
        'scatter': (0, places, y),
        'scatter_add': (0, places, y),
        'scatter_reduce': (0, places, y, 'sum'),
        'softmax': (0,),
        'vdot': (y[0],),
    }
    return found.get(name, ())


def receiver(name: str, x: Tensor) -> Tensor:
    return {
        'addmv': x[0],
        'baddbmm': x.expand(2, 3, 3),
        'dot': x[0],
        'vdot': x[0],
    }.get(name, x).clone()


NAMES = sorted({name.partition('.')[0].rstrip('_') for name in OP_RULES} - ELSEWHERE)


def forms(name: str) -> Iterator[tuple[str, Callable[[Tensor, Tensor], Any]]]:
    """The ways to call an op; each gives what it computed."""
    function, method = getattr(torch, name, None), getattr(torch.Tensor, name, None)
    in_place = getattr(torch.Tensor, f'{name}_', None)
    if function is not None:
        yield 'function', lambda x, y: function(receiver(name, x), *arguments(name, x, y))
    if method is not None:
        yield 'method', lambda x, y: method(receiver(name, x), *arguments(name, x, y))
    if in_place is not None:

        def write(x: Tensor, y: Tensor) -> Tensor:
            written = receiver(name, x)
            # of a graph, as in a model
            result = in_place(written, *arguments(name, x, y))
            assert result is written
            assert result.dtype is x.dtype
            return result

        yield 'in place', write
    if function is not None:

        def into(x: Tensor, y: Tensor) -> Any:
            with torch.autocast(x.device.type, enabled=False):
                # as somebody would make it who wants the type of x
                shape = function(receiver(name, x.float()), *arguments(name, x.float(), y.float())).shape
            written = torch.empty(shape, dtype=x.dtype, device=x.device)
            return function(receiver(name, x), *arguments(name, x, y), out=written)

        yield 'out', into


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 1)
        self.call: Callable[[], Any] = list

    def forward(self, x: Tensor) -> Tensor:
        self.found = self.call()
        return x


@pytest.fixture(scope='module', params=sorted(HALF))
def model(request: pytest.FixtureRequest, device: torch.device) -> tuple[torch.dtype, Any]:
    level: str = request.param
    return HALF[level], amp.initialize(Calls().to(device), opt_level=level, verbosity=0)


def plain(half: torch.dtype, device: torch.device, call: Callable[[], Any]) -> Any:
    with torch.autocast(device.type, half):
        return call()


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name', NAMES)
def test_what_plain_autocast_runs(name: str, model: tuple[torch.dtype, Any], device: torch.device) -> None:
    half, net = model
    torch.use_deterministic_algorithms(False)  # put_ knows no other way
    values = torch.tensor([[0.25, 0.5, 0.125], [0.75, 0.5, 0.25], [0.5, 0.125, 0.875]], device=device)
    ran = 0
    for form, call in forms(name):
        for left, right in itertools.product((half, torch.float32), repeat=2):
            x, y = values.to(left), values.flip(0).to(right)
            try:
                expected = plain(half, device, functools.partial(call, x, y))
            except (RuntimeError, TypeError):
                continue
            ran += 1
            net.call = functools.partial(call, x, y)
            net(torch.ones(1, device=device))
            # the same up to roundings to 16 bits
            assert torch.allclose(net.found.float(), expected.float(), rtol=0.05, atol=0.02), (form, left, right)
    assert ran >= 2


@pytest.mark.parametrize('name', sorted(op for op, rule in OP_RULES.items() if rule.rule in ('write', 'follow')))
def test_what_is_written_in_place(name: str, model: tuple[torch.dtype, Any], device: torch.device) -> None:
    """In float32 where the op belongs there, rounded once; whatever the other arguments are; and differentiable."""
    half, net = model
    torch.use_deterministic_algorithms(False)
    base = name.partition('.')[0].rstrip('_')
    values = torch.tensor([[0.25, 0.5, 0.125], [0.75, 0.5, 0.25], [0.5, 0.125, 0.875]], device=device)
    method = getattr(torch.Tensor, f'{base}_')
    for right in (half, torch.float32):
        leaf, y = values.clone().requires_grad_(), values.flip(0).to(right)
        kept: list[Tensor] = []

        def call(leaf: Tensor = leaf, y: Tensor = y, kept: list[Tensor] = kept) -> Tensor:
            kept.insert(0, receiver(base, leaf.to(half)))
            # under disable_casts() torch refuses mixed types, as ever
            return method(kept[0], *arguments(base, values, y.to(half) if len(kept) > 1 else y))

        net.call = call
        net(torch.ones(1, device=device))
        assert net.found is kept[0]
        assert net.found.dtype is half
        if OP_RULES[name].rule == 'write':
            expected = method(receiver(base, values), *arguments(base, values, values.flip(0)))
            assert torch.equal(net.found, expected.to(half))
        net.found.float().sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
        with disable_casts():
            net(torch.ones(1, device=device))
            assert net.found.dtype is half


def test_a_convolution_over_a_graph(device: torch.device) -> None:
    """torch_geometric's GCNConv: degrees in the type of the messages, to the power of -0.5 in place."""

    class GCNConv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 2, bias=False)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            x = self.lin(x)
            row, col = edges
            weight = torch.ones(row.numel(), dtype=x.dtype, device=x.device)
            degree = x.new_zeros(x.shape[0]).scatter_add_(0, col, weight)
            degree = degree.pow_(-0.5).masked_fill_(degree == float('inf'), 0)
            weight = degree[row] * weight * degree[col]
            return x.new_zeros(x.shape).index_add_(0, col, weight[:, None].softmax(0) * x[row])

    edges = torch.tensor([[0, 1, 1, 2, 2, 0], [1, 0, 2, 1, 2, 0]], device=device)
    torch.manual_seed(0)
    conv = GCNConv().to(device)
    x = torch.randn(3, 3, device=device)
    expected = conv(x, edges)
    for level in HALF:
        torch.manual_seed(0)
        net = GCNConv().to(device)
        net = amp.initialize(net, opt_level=level, verbosity=0)
        found = net(x, edges)
        assert torch.allclose(found, expected, atol=0.02)
        found.sum().backward()
        assert net.lin.weight.grad is not None


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
def test_a_call_that_names_its_type_gets_it(
    dtype: torch.dtype, model: tuple[torch.dtype, Any], device: torch.device
) -> None:
    half, net = model
    for x in (torch.ones(3, device=device), torch.ones(3, device=device).to(half)):
        for call in (
            lambda x=x: x.sum(dtype=dtype),
            lambda x=x: x.prod(dtype=dtype),
            lambda x=x: x.cumsum(0, dtype=dtype),
            lambda x=x: x.softmax(0, dtype=dtype),
            lambda x=x: torch.nn.functional.log_softmax(x, 0, dtype=dtype),
        ):
            net.call = call
            net(x)
            assert net.found.dtype is dtype
        if x.dtype is dtype:
            # refuses a type narrower than that of what it is given
            net.call = lambda x=x: torch.linalg.vector_norm(x, dtype=dtype)
            net(x)
            assert net.found.dtype is dtype
