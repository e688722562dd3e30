"""What O1 and O4 cast, op by op: to 16-bit, to float32, to the widest type, or not at all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toy_autocast import LEVELS, attach

from amp_wrapper.amp.functions import disable_casts
from amp_wrapper.autocast import kernels
from amp_wrapper.autocast.global_autocast import GlobalCasts
from amp_wrapper.casting.plan import CastPlan
from amp_wrapper.policy import resolve
from amp_wrapper.policy.autocast_lists import OP_RULES

# -- the lists ---------------------------------------------------------------------------------------------------------


def _names(text: str) -> list[str]:
    return text.split()


# torch's documented list for CUDA, written down: what goes to 16-bit, to float32, and to the widest type
CUDA_HALF = _names("""
    __matmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul multi_dot conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d GRUCell linear LSTMCell matmul mm mv prelu RNNCell
""")
CUDA_FLOAT = _names("""
    __pow__ __rpow__ acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss cdist cosine_similarity
    cross_entropy cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log10
    log_softmax log1p log2 margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss nll_loss norm normalize
    pdist poisson_nll_loss pow prod reciprocal rsqrt sinh smooth_l1_loss soft_margin_loss softmax softmin softplus sum
    renorm tan triplet_margin_loss
""")
CUDA_WIDEST = _names(
    'addcdiv addcmul atan2 bilinear cross dot grid_sample grid_sampler index_put scatter_add tensordot'
)


def _calls(x: Tensor, other: Tensor) -> dict[str, Callable[[], Any]]:
    """A call of every function on the lists; ``x`` is 4 x 4, within 0.2 and 0.8, of one type and ``other`` of another."""
    v, w = x[0], other[0]
    batch, wide = x.expand(2, 4, 4), other.expand(2, 4, 4)
    signs, classes = torch.ones(4), torch.tensor([0, 1, 2, 3])
    image, kernel, places = x.expand(1, 4, 4, 4), other.expand(4, 4, 4), other[:, :2].expand(1, 2, 4, 2)
    cell = [p.to(torch.float32) for p in (torch.ones(4, 4), torch.ones(4, 4))]
    four, three = [torch.cat([p] * 4) for p in cell], [torch.cat([p] * 3) for p in cell]
    return {
        '__matmul__': lambda: x @ other,
        'addbmm': lambda: torch.addbmm(x, batch, wide),
        'addmm': lambda: torch.addmm(x, x, other),
        'addmv': lambda: torch.addmv(v, x, w),
        'addr': lambda: torch.addr(x, v, w),
        'baddbmm': lambda: torch.baddbmm(batch, batch, wide),
        'bmm': lambda: torch.bmm(batch, wide),
        'chain_matmul': lambda: torch.chain_matmul(x, other, x),
        'multi_dot': lambda: torch.linalg.multi_dot([x, other]),
        'conv1d': lambda: F.conv1d(batch, kernel),
        'conv2d': lambda: F.conv2d(image, kernel[None].expand(4, 4, 4, 4)),
        'conv3d': lambda: F.conv3d(image[None], kernel[None, None].expand(1, 1, 4, 4, 4)),
        'conv_transpose1d': lambda: F.conv_transpose1d(batch, kernel),
        'conv_transpose2d': lambda: F.conv_transpose2d(image, kernel[None].expand(4, 4, 4, 4)),
        'conv_transpose3d': lambda: F.conv_transpose3d(image[None], kernel[None, None].expand(1, 1, 4, 4, 4)),
        'GRUCell': lambda: torch.gru_cell(x, other, *three),
        'linear': lambda: F.linear(x, other),
        'LSTMCell': lambda: torch.lstm_cell(x, (other, x), *four)[0],
        'matmul': lambda: x.matmul(other),
        'mm': lambda: x.mm(other),
        'mv': lambda: x.mv(w),
        'prelu': lambda: F.prelu(x, w),
        'RNNCell': lambda: torch.rnn_tanh_cell(x, other, *cell),
        '__pow__': lambda: x**2,
        '__rpow__': lambda: 2**x,
        'acos': lambda: x.acos(),
        'asin': lambda: torch.asin(x),
        'binary_cross_entropy_with_logits': lambda: F.binary_cross_entropy_with_logits(x, other),
        'cosh': lambda: x.cosh(),
        'cosine_embedding_loss': lambda: F.cosine_embedding_loss(x, x, signs),
        'cdist': lambda: torch.cdist(x, x),
        'cosine_similarity': lambda: F.cosine_similarity(x, x),
        'cross_entropy': lambda: F.cross_entropy(x, classes),
        'cumprod': lambda: x.cumprod(0),
        'cumsum': lambda: torch.cumsum(x, 0),
        'dist': lambda: torch.dist(x, x),
        'erfinv': lambda: x.erfinv(),
        'exp': lambda: x.exp(),
        'expm1': lambda: torch.expm1(x),
        'group_norm': lambda: F.group_norm(x, 2),
        'hinge_embedding_loss': lambda: F.hinge_embedding_loss(x, signs),
        'kl_div': lambda: F.kl_div(x, x, reduction='sum'),
        'l1_loss': lambda: F.l1_loss(x, x),
        'layer_norm': lambda: F.layer_norm(x, (4,)),
        'log': lambda: x.log(),
        'log10': lambda: torch.log10(x),
        'log_softmax': lambda: F.log_softmax(x, 0),
        'log1p': lambda: x.log1p(),
        'log2': lambda: x.log2(),
        'margin_ranking_loss': lambda: F.margin_ranking_loss(x, x, signs.expand(4, 4)),
        'mse_loss': lambda: F.mse_loss(x, x),
        'multilabel_margin_loss': lambda: F.multilabel_margin_loss(x, classes.expand(4, 4)),
        'multi_margin_loss': lambda: F.multi_margin_loss(x, classes),
        'nll_loss': lambda: F.nll_loss(x, classes),
        'norm': lambda: x.norm(),
        'normalize': lambda: F.normalize(x),
        'pdist': lambda: F.pdist(x),
        'poisson_nll_loss': lambda: F.poisson_nll_loss(x, x),
        'pow': lambda: torch.pow(x, 2),
        'prod': lambda: x.prod(),
        'reciprocal': lambda: x.reciprocal(),
        'rsqrt': lambda: x.rsqrt(),
        'sinh': lambda: torch.sinh(x),
        'smooth_l1_loss': lambda: F.smooth_l1_loss(x, x),
        'soft_margin_loss': lambda: F.soft_margin_loss(x, signs),
        'softmax': lambda: torch.softmax(x, 0),
        'softmin': lambda: F.softmin(x, 0),
        'softplus': lambda: F.softplus(x),
        'sum': lambda: x.sum(0),
        'renorm': lambda: x.renorm(2, 0, 1.0),
        'tan': lambda: x.tan(),
        'triplet_margin_loss': lambda: F.triplet_margin_loss(x, x, x),
        'addcdiv': lambda: torch.addcdiv(x, other, x),
        'addcmul': lambda: torch.addcmul(x, other, x),
        'atan2': lambda: torch.atan2(x, other),
        'bilinear': lambda: F.bilinear(x, other, batch, w[:2]),
        'cross': lambda: torch.cross(x[:, :3], other[:, :3], dim=1),
        'dot': lambda: v.dot(w),
        'grid_sample': lambda: F.grid_sample(image, places, align_corners=False),
        'grid_sampler': lambda: torch.grid_sampler(image, places, 0, 0, False),
        'index_put': lambda: torch.index_put(v, (classes,), w),
        'scatter_add': lambda: v.scatter_add(0, classes, w),
        'tensordot': lambda: torch.tensordot(x, other),
    }


def _values(dtype: torch.dtype) -> Tensor:
    return torch.linspace(0.2, 0.8, 16).reshape(4, 4).to(dtype)


@pytest.mark.parametrize('name', CUDA_HALF)
def test_runs_in_16_bit(name: str, half: torch.dtype) -> None:
    for x, other in ((torch.float32, torch.float32), (half, torch.float32), (half, half)):
        x, other = _values(x).requires_grad_(), _values(other)
        result = _calls(x, other)[name]()
        assert result.dtype is half
        result.float().sum().backward()
        assert x.grad is not None
        assert x.grad.dtype is x.dtype


@pytest.mark.parametrize('name', CUDA_FLOAT)
def test_runs_in_float32(name: str, half: torch.dtype) -> None:
    for dtype in (torch.float32, half):
        x = _values(dtype).requires_grad_()
        result = _calls(x, x.detach())[name]()
        assert result.dtype is torch.float32
        result.sum().backward()
        assert x.grad is not None
        assert x.grad.dtype is dtype


@pytest.mark.parametrize('name', CUDA_WIDEST)
def test_runs_in_the_widest_type(name: str, half: torch.dtype) -> None:
    for left, right in ((half, torch.float32), (torch.float32, half), (half, half), (torch.float32, torch.float32)):
        x, other = _values(left).requires_grad_(), _values(right)
        widest = torch.float32 if torch.float32 in (left, right) else half
        result = _calls(x, other)[name]()
        assert result.dtype is widest
        result.float().sum().backward()
        assert x.grad is not None
        assert x.grad.dtype is left


# in torch's list for CUDA since some version after 2.6
LATER = {'aten::rms_norm'}
#: Made of ops of the list; torch.compile writes them with others.
COMPOSITE = {name for name in OP_RULES if name.endswith('.vec')} | {'ldexp.Tensor', 'mvlgamma'}


def test_the_table_is_the_list_for_cuda_less_what_only_a_gpu_has() -> None:
    on_cuda = set(torch._C._dispatch_get_registrations_for_dispatch_key('AutocastCUDA'))
    on_cpu = set(torch._C._dispatch_get_registrations_for_dispatch_key('AutocastCPU'))
    only_there = {
        # only builds with CUDA have it
        'aten::_cudnn_rnn',
        'aten::_scaled_dot_product_flash_attention',
        'aten::_thnn_fused_gru_cell',
        'aten::_thnn_fused_lstm_cell',
        'aten::cudnn_convolution',
        'aten::cudnn_convolution_transpose',
    }
    # named dimensions, which torch gave up between 2.6 and 2.13: no kernel that is written in Python is handed such tensors
    named = {name for name in on_cuda if 'dimname' in name.lower() or name == 'aten::norm.names_ScalarOpt_dim'}
    assert not named or torch.__version__ < (2, 13)
    ours = {f'aten::{name}' for name in OP_RULES}
    assert len(on_cuda) > 50
    assert on_cuda - on_cpu - only_there - named <= ours
    # and what it has beyond that list is what RNN layers need, functions that write or refuse mixed types, and what 2.6 lacked
    beyond = [OP_RULES[name[6:]] for name in ours - on_cuda - LATER]
    assert on_cuda >= LATER or torch.__version__ < (2, 13)
    assert all(rule.cpu_only or rule.rule in ('write', 'follow', 'promote') or rule.op in COMPOSITE for rule in beyond)


def test_cuda_gets_what_writes_and_what_mixes() -> None:
    """torch's list stands where it has an entry; what is missing in this version is taken from the table."""
    rules = {
        rule.rule for rule in kernels.missing('cuda') if f'aten::{rule.op}' not in LATER and rule.op not in COMPOSITE
    }
    assert rules == {'write', 'follow', 'promote'}


def test_ops_that_torch_casts_itself_are_left_to_it() -> None:
    # asked of a process in which nobody has installed anything would be the same: what is there is never replaced
    names = {rule.op for rule in kernels.missing('cpu')}
    assert not names & {'mse_loss', 'prod', 'cdist', 'grid_sampler', 'kl_div'}
    kernels.install('cpu')
    assert kernels.missing('cpu') == []


# -- layers and functions outside of models ----------------------------------------------------------------------------


def _run(function: Callable[[Tensor], Tensor], shape: tuple[int, ...], half: torch.dtype) -> list[torch.dtype]:
    """The types of the results for float32 and for 16-bit input; the gradients have the input's type."""
    found = []
    for dtype in (torch.float32, half):
        x = torch.randn(shape).to(dtype).requires_grad_()
        result = function(x)
        found.append(result.dtype)
        result.float().sum().backward()
        assert x.grad is not None
        assert x.grad.dtype is dtype
    return found


def test_layers_with_weights_are_16_bit(half: torch.dtype) -> None:
    linear, conv = nn.Linear(4, 4), nn.Conv2d(2, 2, 3)
    for function, shape in (
        (linear, (2, 4)),
        (lambda x: F.linear(x, linear.weight, linear.bias), (2, 4)),
        (conv, (1, 2, 4, 4)),
        (lambda x: F.conv2d(x, conv.weight, conv.bias), (1, 2, 4, 4)),
    ):
        assert _run(function, shape, half) == [half, half]
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype is torch.float32


def test_fragile_layers_are_float(half: torch.dtype) -> None:
    target = torch.randn(2, 4)
    for function, shape in (
        (nn.Softmax(1), (2, 4)),
        (nn.LayerNorm(4), (2, 4)),
        (nn.GroupNorm(2, 4), (1, 4, 2, 2)),
        (nn.Softplus(), (2, 4)),
        (lambda x: nn.CosineSimilarity()(x, target), (2, 4)),
        (lambda x: nn.MSELoss()(x, target), (2, 4)),
        (nn.Upsample(scale_factor=2), (1, 1, 2, 2)),
        (nn.LocalResponseNorm(2), (1, 4, 2, 2)),
    ):
        assert _run(function, shape, half) == [torch.float32] * 2, function


def test_the_rest_matches_its_input(half: torch.dtype) -> None:
    norm = nn.BatchNorm2d(2)
    for function, shape in (
        (nn.ReLU(), (2, 4)),
        (F.relu, (2, 4)),
        (lambda x: x.mean(0), (2, 4)),
        (norm, (1, 2, 4, 4)),
        (copy.deepcopy(norm).eval(), (1, 2, 4, 4)),
    ):
        assert _run(function, shape, half) == [torch.float32, half]


def test_a_sum_that_float16_cannot_hold() -> None:
    casts = GlobalCasts()
    x = torch.full((100_000,), 0.9, dtype=torch.float16)
    assert x.sum().isinf()
    casts.start()
    assert x.sum().item() == pytest.approx(90_000, rel=1e-3)
    casts.stop()


def test_a_type_that_the_caller_asks_for_stands(half: torch.dtype) -> None:
    x = torch.ones(4, dtype=half)
    assert x.sum(dtype=half).dtype is half
    assert torch.softmax(x, 0, half).dtype is half
    assert x.sum(dtype=torch.float64).dtype is torch.float64


def test_other_types_are_left_alone(half: torch.dtype) -> None:
    assert torch.arange(4).sum().dtype is torch.int64
    assert torch.ones(4, dtype=torch.float64).softmax(0).dtype is torch.float64
    assert torch.ones(4, dtype=torch.complex64).sum().dtype is torch.complex64


def test_composite_functions_are_cast_inside(half: torch.dtype) -> None:
    q = torch.randn(1, 2, 4, dtype=half)
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    out, weights = attention(q, q, q)
    assert (out.dtype, weights.dtype) == (half, torch.float32)
    assert F.gumbel_softmax(q, dim=1).dtype is torch.float32
    assert F.embedding(torch.tensor([0]), q[0]).dtype is half


# -- losses of probabilities -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'function',
    [
        nn.BCELoss(),
        lambda x, target: F.binary_cross_entropy(x, target),
        lambda x, target: torch._C._nn.binary_cross_entropy(x, target),
        F.binary_cross_entropy,
    ],
    ids=['module', 'functional', 'inner', 'kept reference'],
)
def test_bce_is_float_on_16_bit(function: Callable[..., Tensor], half: torch.dtype) -> None:
    x, target = torch.rand(2, 4, dtype=half), torch.rand(2, 4)
    expected = function(x.float(), target)
    assert expected.dtype is torch.float32 and torch.equal(function(x, target), expected)
    with disable_casts():
        assert torch.equal(function(x, target), expected)


class WithBce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.loss = nn.Linear(4, 1), nn.BCELoss()

    def forward(self, x: Tensor, target: Tensor, functional: bool, wide: bool) -> Tensor:
        score = self.fc(x).sigmoid()
        score = score.float() if wide else score
        return F.binary_cross_entropy(score, target) if functional else self.loss(score, target)


@pytest.mark.parametrize('functional', [True, False])
@pytest.mark.parametrize('level', LEVELS)
def test_bce_inside_a_model(level: str, functional: bool) -> None:
    model, x, target = WithBce(), torch.randn(2, 4), torch.rand(2, 1)
    attach(model, level)
    for wide in (False, True):
        model.zero_grad()
        loss = model(x, target, functional, wide=wide)
        loss.backward()
        assert loss.dtype is torch.float32 and model.fc.weight.grad is not None


def test_bce_runs_in_float32_under_a_plan_that_does_not_cover_forwards() -> None:
    model = WithBce()
    handle = CastPlan([('', model)], resolve(opt_level='O1')).apply()
    with torch.autocast('cpu', torch.float16):
        assert model(torch.randn(2, 4), torch.rand(2, 1), True, wide=False).dtype is torch.float32
    handle.remove()
