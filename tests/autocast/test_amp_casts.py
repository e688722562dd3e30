"""What O1 and O4 cast, op by op: outside of models with casts turned on, and inside the forwards of a model."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from amp_wrapper import AmpAttachError, AmpUsageError
from amp_wrapper.amp.functions import disable_casts
from amp_wrapper.autocast import kernels, op_set, regions, state
from amp_wrapper.autocast.global_autocast import GlobalCasts
from amp_wrapper.autocast.patching import Patches, patches
from amp_wrapper.casting import plan as casting
from amp_wrapper.casting.region_hooks import PLAIN, EnterRegion, LeaveRegion, put_region
from amp_wrapper.errors import BannedOpError
from amp_wrapper.policy import resolve
from amp_wrapper.policy.autocast_lists import OP_RULES

TYPES = {'O1': torch.float16, 'O4': torch.bfloat16}
LEVELS = sorted(TYPES)
HALVES = list(TYPES.values())


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    yield
    left = regions.count()
    autocast = torch.is_autocast_enabled('cpu')
    regions.unwind()
    torch.set_autocast_enabled('cpu', False)
    assert left == 0
    assert not autocast
    assert not patches.in_place
    assert not bool(state.thread.global_casts)


@pytest.fixture(params=HALVES, ids=lambda dtype: str(dtype)[6:])
def half(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Casts to this type are on for everything."""
    casts = GlobalCasts(request.param)
    casts.start()
    yield request.param
    casts.stop()


def attach(model: nn.Module, level: str = 'O1', **overrides: Any) -> casting.CastHandle:
    return casting.CastPlan([('', model)], resolve(opt_level=level, **overrides), covers_forward=True).apply()


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
    assert all(rule.cpu_only or rule.rule in ('write', 'follow', 'promote') for rule in beyond)


def test_cuda_gets_what_writes_and_what_mixes() -> None:
    """torch's list stands where it has an entry; what is missing in this version is taken from the table."""
    rules = {rule.rule for rule in kernels.missing('cuda') if f'aten::{rule.op}' not in LATER}
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


# -- banned functions --------------------------------------------------------------------------------------------------


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
def test_bce_is_refused_on_16_bit(function: Callable[..., Tensor], half: torch.dtype) -> None:
    x, target = torch.rand(2, 4, dtype=half), torch.rand(2, 4)
    with pytest.raises(NotImplementedError, match='with_logits') as caught:
        function(x, target)
    assert isinstance(caught.value, BannedOpError)
    assert isinstance(caught.value, AmpUsageError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert function(x.float(), target).dtype is torch.float32
    with disable_casts():
        assert function(x, target).dtype is torch.float32


def test_bce_is_float_where_banned_functions_are_allowed() -> None:
    casts = GlobalCasts(allow_banned=True)
    casts.start()
    x, target = torch.rand(2, 4, dtype=torch.float16), torch.rand(2, 4)
    assert nn.BCELoss()(x, target).dtype is F.binary_cross_entropy(x, target).dtype is torch.float32
    casts.stop()


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
    with pytest.raises(BannedOpError):
        model(x, target, functional, wide=False)
    assert regions.count() == 0
    model(x, target, functional, wide=True).backward()
    assert model.fc.weight.grad is not None


def test_bce_runs_in_float32_under_a_plan_that_does_not_cover_forwards() -> None:
    model = WithBce()
    handle = casting.CastPlan([('', model)], resolve(opt_level='O1')).apply()
    with torch.autocast('cpu', torch.float16):
        assert model(torch.randn(2, 4), torch.rand(2, 1), True, wide=False).dtype is torch.float32
    handle.remove()


# -- handles -----------------------------------------------------------------------------------------------------------


def _types() -> tuple[torch.dtype, torch.dtype]:
    half = torch.ones(2, dtype=torch.float16)
    return F.linear(torch.ones(1, 2), torch.ones(2, 2)).dtype, half.sum().dtype


OFF, ON16, ONB = (torch.float32, torch.float16), (torch.float16, torch.float32), (torch.bfloat16, torch.float32)


def test_start_and_stop() -> None:
    casts = GlobalCasts()
    casts.stop()
    assert (casts.is_on, _types()) == (False, OFF)
    casts.start()
    casts.start()
    assert (casts.is_on, _types()) == (True, ON16)
    casts.stop()
    casts.stop()
    assert (casts.is_on, _types()) == (False, OFF)


@pytest.mark.parametrize('first_to_stop', [0, 1])
def test_two_handles_stop_in_any_order(first_to_stop: int) -> None:
    handles = [GlobalCasts(torch.float16), GlobalCasts(torch.bfloat16)]
    handles[0].start()
    handles[1].start()
    assert _types() == ONB
    handles[first_to_stop].stop()
    assert _types() == (ONB if first_to_stop == 0 else ON16)
    handles[1 - first_to_stop].stop()
    assert _types() == OFF


def test_autocast_is_put_back_as_it_was() -> None:
    with torch.autocast('cpu', torch.bfloat16):
        casts = GlobalCasts(torch.float16)
        casts.start()
        assert torch.get_autocast_dtype('cpu') is torch.float16
        assert not torch.is_autocast_cache_enabled()
        casts.stop()
        assert torch.is_autocast_enabled('cpu')
        assert torch.get_autocast_dtype('cpu') is torch.bfloat16
        assert torch.is_autocast_cache_enabled()


def _on_another_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_a_handle_is_of_its_thread(half: torch.dtype) -> None:
    assert _on_another_thread(_types) == OFF
    casts = GlobalCasts()
    casts.start()
    assert isinstance(_on_another_thread(casts.stop), AmpUsageError)
    assert casts.is_on
    casts.stop()


def test_disable_casts(half: torch.dtype) -> None:
    on = _types()
    with disable_casts():
        assert _types() == OFF
        with disable_casts():
            assert _types() == OFF
        assert _types() == OFF
    assert _types() == on
    with pytest.raises(KeyError), disable_casts():
        raise KeyError
    assert _types() == on


def test_casts_that_start_and_stop_inside_disable_casts() -> None:
    casts = GlobalCasts()
    with disable_casts():
        casts.start()
        assert _types() == OFF
        with disable_casts():
            assert _types() == OFF
        assert _types() == OFF
    assert _types() == ON16
    with disable_casts():
        casts.stop()
        assert _types() == OFF
    assert _types() == OFF
    assert not torch.is_autocast_enabled('cpu')


def test_a_block_of_autocast_that_ends_before_the_casts() -> None:
    casts = GlobalCasts()
    with torch.autocast('cpu', torch.bfloat16):
        casts.start()
    casts.stop()
    assert not torch.is_autocast_enabled('cpu')


@pytest.mark.parametrize('dtype', HALVES)
def test_functions_keep_their_identity(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # without what other tests have registered, for the life of the process
    fresh = Patches()
    monkeypatch.setattr(regions, 'patches', fresh)
    monkeypatch.setattr(op_set, 'patches', fresh)
    # of ops that torch's dispatcher casts
    sites = [(torch, 'softmax'), (torch, 'sum'), (torch, 'mm'), (torch.Tensor, 'sum'), (F, 'softmax'), (F, 'linear')]
    before = [vars(holder).get(name) for holder, name in sites]
    casts = GlobalCasts(dtype)
    casts.start()
    try:
        assert [vars(holder).get(name) for holder, name in sites] == before
        assert pickle.loads(pickle.dumps(F.softmax)) is F.softmax
    finally:
        casts.stop()


def test_weights_that_change_are_seen_at_once(half: torch.dtype) -> None:
    layer, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    with torch.no_grad():
        layer(x)
        layer.weight.fill_(1.0)
    layer.load_state_dict({'weight': torch.full((2, 2), 2.0)})
    result = layer(x)
    assert result.tolist() == [[4.0, 4.0]]
    result.sum().backward()
    assert layer.weight.grad is not None


# -- models ------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.dec = nn.Linear(4, 4)
        self.types: list[torch.dtype] = []
        self.fail: type[BaseException] | None = None

    def encode(self, x: Tensor) -> Tensor:
        return self.enc(x).exp()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enc[0](x)
        wide = hidden.softmax(-1)
        self.types = [hidden.dtype, wide.dtype, self.enc(x).dtype]
        if self.fail is not None:
            raise self.fail
        return self.dec(wide)


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('training', [True, False])
def test_forward_of_a_model(level: str, training: bool) -> None:
    model = Net().train(training)
    handle = attach(model, level)
    out = model(torch.randn(2, 4))
    assert model.types == [TYPES[level], torch.float32, torch.float32]
    assert out.dtype is torch.float32
    out.sum().backward()
    assert model.dec.weight.grad is not None
    assert model.dec.weight.grad.dtype is torch.float32
    handle.remove()
    model(torch.randn(2, 4))
    assert model.types == [torch.float32] * 3
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@pytest.mark.parametrize('level', LEVELS)
def test_outputs_of_another_type(level: str) -> None:
    model = Net()
    attach(model, level, cast_model_outputs='bfloat16')
    assert model(torch.randn(2, 4)).dtype is model.dec(torch.randn(2, 4)).dtype is torch.bfloat16


@pytest.mark.parametrize('level', LEVELS)
def test_direct_calls_of_parts(level: str) -> None:
    model = Net()
    seen: list[torch.dtype] = []
    model.enc[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype), prepend=True)
    attach(model, level)
    x = torch.randn(2, 4)
    for call in (model.encode, model.enc, model.enc[0], model.dec):
        assert call(x).dtype is torch.float32
    assert seen == [TYPES[level]] * 3
    assert model.dec(x).equal(F.linear(*(t.to(TYPES[level]) for t in (x, model.dec.weight, model.dec.bias))).float())


@pytest.mark.parametrize('dtype', HALVES)
def test_direct_calls_of_parts_inside_an_autocast_of_the_user(dtype: torch.dtype) -> None:
    """As calls of the model: its own type inside, and FP32 outputs."""
    model, x = Net(), torch.randn(2, 4)
    attach(model)
    expected = model.enc(x)
    with torch.autocast('cpu', dtype):
        assert model.enc(x).equal(expected)
        assert model.dec(x).dtype is torch.float32
        assert torch.get_autocast_dtype('cpu') is dtype


def test_a_model_on_a_device_without_autocast() -> None:
    model = Net().to('meta')
    attach(model)
    assert model(torch.ones(2, 4, device='meta')).shape == (2, 4)
    assert model.enc(torch.ones(2, 4, device='meta')).dtype is torch.float32


@pytest.mark.parametrize(
    'make', [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 4))], ids=['script', 'trace']
)
def test_scripted_modules(make: Callable[[nn.Module], nn.Module]) -> None:
    """They take no hooks."""
    part = make(nn.Sequential(nn.Linear(4, 4)))
    model = nn.Sequential(nn.Linear(4, 4), part)
    for level in ('O2', 'O3', 'O5'):
        with pytest.raises(AmpAttachError, match=r'1 .*torch\.jit'):
            attach(model, level)
    for level in ('O0', 'O1', 'O2'):
        with pytest.raises(AmpAttachError, match=r'the model .*torch\.jit'):
            attach(part, level)
    assert not model._forward_pre_hooks
    assert all(p.dtype is torch.float32 for p in model.parameters())
    attach(model, 'O1')
    out = model(torch.ones(2, 4))
    assert out.dtype is torch.float32
    assert out.equal(out.half().float())
    assert part(torch.ones(2, 4)).dtype is torch.float32


@pytest.mark.parametrize('level', LEVELS)
def test_parts_kept_in_fp32_are_not_cast_when_called_directly(level: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))), torch.randn(2, 4)
    attach(model, level, keep_fp32=['1'])
    kept = model[1][0]
    expected = F.linear(x, kept.weight, kept.bias)
    assert model[1](x).equal(expected)
    assert kept(x).equal(expected)


@pytest.mark.parametrize('level', ['O0', 'O2', 'O3', 'O5'])
def test_casts_of_another_model_end_at_the_door(level: str) -> None:
    inner, outer = Net(), Net()
    attach(inner, level)
    attach(outer, 'O1')
    outer.dec = nn.Sequential(inner)
    inside: list[Any] = []
    inner.dec.register_forward_hook(
        lambda *_: inside.append((torch.is_autocast_enabled('cpu'), state.casts_on())), prepend=True
    )
    outer(torch.randn(2, 4))
    assert inside == [(False, False)]
    assert outer.types[1] is torch.float32


@pytest.mark.parametrize('level', ['O0', 'O2', 'O3', 'O5'])
def test_the_other_levels_do_not_cast_by_op(level: str) -> None:
    plain, covered = Net(), Net()
    covered.load_state_dict(plain.state_dict())
    casting.CastPlan([('', plain)], resolve(opt_level=level)).apply()
    handle = attach(covered, level)
    x = torch.randn(2, 4)
    assert plain(x).equal(covered(x))
    assert plain.types == covered.types
    handle.remove()
    assert not covered._forward_pre_hooks
    assert not covered._forward_hooks


@pytest.mark.parametrize('part', ['root', 'below'])
@pytest.mark.parametrize('error', [KeyError, KeyboardInterrupt])
def test_exceptions_leave_nothing_open(part: str, error: type[BaseException]) -> None:
    model = Net()
    attach(model)
    x = torch.randn(2, 4)
    if part == 'root':
        model.fail = error
        with pytest.raises(error):
            model(x)
        model.fail = None
    else:
        hook = model.dec.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(error))
        with pytest.raises(error):
            model.dec(x)
        hook.remove()
    assert regions.count() == 0
    assert not torch.is_autocast_enabled('cpu')
    assert model(x).dtype is torch.float32


def test_a_pass_that_cannot_begin_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    attach(model)

    def fail() -> None:
        raise KeyError

    with monkeypatch.context() as patch:
        patch.setattr(patches, 'acquire', fail)
        for call in (model, model.dec):
            with pytest.raises(KeyError):
                call(torch.randn(2, 4))
            assert regions.count() == 0
            assert not torch.is_autocast_enabled('cpu')
    assert model(torch.randn(2, 4)).dtype is torch.float32


@pytest.mark.parametrize('order', [('O1', 'O4'), ('O4', 'O1')])
def test_a_part_of_two_models_has_the_casts_of_the_later(order: tuple[str, str]) -> None:
    part = nn.Linear(4, 4)
    types: list[torch.dtype] = []
    part.register_forward_hook(lambda module, args, output: types.append(output.dtype))
    first, second = nn.Sequential(part), nn.Sequential(part)
    attach(first, order[0])
    attach(second, order[1])
    x = torch.randn(2, 4)
    assert {m(x).dtype for m in (part, first, second)} == {torch.float32}
    assert types == [TYPES[order[1]], TYPES[order[0]], TYPES[order[1]]]
    # one pair of ours, and the test's own
    assert (len(part._forward_pre_hooks), len(part._forward_hooks)) == (1, 2)


def test_the_next_forward_cleans_up_after_an_interrupt_of_our_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may come in the middle of the hook that closes; here torch does not even call it."""
    model = Net()
    attach(model)
    model.fail = KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(regions, '_cover_interrupts', lambda change: None)
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(2, 4))
        assert regions.count() == 1
    regions._cover_interrupts(1)
    model.fail = None
    assert torch.is_autocast_enabled('cpu')
    assert model(torch.randn(2, 4)).dtype is torch.float32
    assert regions.count() == 0
    assert not torch.is_autocast_enabled('cpu')


def test_what_is_under_way_is_not_stale() -> None:
    model = Net()
    attach(model)
    model.dec.register_forward_pre_hook(lambda *_: regions.unwind_stale())
    seen: list[torch.dtype] = []
    model.dec.register_forward_hook(lambda module, args, output: seen.append(output.dtype), prepend=True)
    model(torch.randn(2, 4))
    assert seen == [torch.float16]


@pytest.mark.parametrize('level', ['O0', 'O1', 'O2', 'O4'])
def test_an_interrupt_that_a_model_survives(level: str) -> None:
    class Patient(nn.Module):
        def __init__(self, inner: Net) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            # not a child: a model of its own
            self.inner = [inner]

        def forward(self, x: Tensor) -> Tensor:
            inner = self.inner[0]
            inner.fail = KeyboardInterrupt
            with pytest.raises(KeyboardInterrupt):
                inner(x)
            inner.fail = None
            assert inner(x).dtype is torch.float32
            assert regions.count() == 1
            return self.fc(x).softmax(-1) + self.fc(x)

    model, inner = Patient(Net()), Net()
    model.inner = [inner]
    attach(inner, level)
    attach(model, 'O1')
    seen: list[torch.dtype] = []
    model.fc.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model(torch.randn(2, 4))
    assert seen == [torch.float16] * 2


class Tree(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor, depth: int) -> Tensor:
        if depth:
            self(x, depth - 1)
        return self.fc(x)


def test_a_module_that_calls_itself() -> None:
    model = nn.Sequential(Tree())
    attach(model)
    seen: list[torch.dtype] = []
    model[0].fc.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    assert model[0](torch.randn(1, 2), 2).dtype is torch.float32
    assert seen == [torch.float16] * 3
    tree = Tree()
    attach(tree)
    tree.fc.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    assert tree(torch.randn(1, 2), 2).dtype is torch.float32
    assert seen == [torch.float16] * 6


@pytest.mark.parametrize('level', ['O1', 'O2'])
def test_a_module_that_calls_itself_under_a_plan_that_does_not_cover_forwards(level: str) -> None:
    tree = Tree()
    casting.CastPlan([('', tree)], resolve(opt_level=level)).apply()
    tree(torch.randn(1, 2), 2)
    assert state.depth() == 0
    assert not patches.in_place


def test_hooks_survive_copies_and_pickle() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    attach(model, 'O4')
    x = torch.randn(2, 4)
    expected = model(x)
    assert not expected.equal(F.layer_norm(F.linear(x, model[0].weight, model[0].bias), (4,)))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin(x).equal(expected)
        assert twin[0](x).equal(model[0](x))
        with torch.no_grad():
            twin[0].weight.zero_()
            twin[0].bias.fill_(3.0)
        assert twin[0](x).eq(3).all()
        assert model(x).equal(expected)


def test_no_copy_of_a_weight_outlives_the_forward() -> None:
    model, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    attach(model)
    with torch.autocast('cpu', torch.float16), torch.no_grad():
        model(x)
    with torch.autocast('cpu', torch.float16):
        model(x)
        with torch.no_grad():
            model.weight.fill_(3.0)
        assert model(x).tolist() == [[6.0, 6.0]]


class Outer(nn.Module):
    """Uses a layer before, inside and after a model that has it, too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.layer = [inner], inner[0]  # type: ignore[index]
        self.types: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.types = [F.linear(x, self.layer.weight).dtype]
        self.inner[0](x)
        last = F.linear(x, self.layer.weight)
        self.types.append(last.dtype)
        return last


@pytest.mark.parametrize('level', ['O4', 'O2'])
def test_no_copy_of_a_weight_reaches_a_region_of_another_type(level: str) -> None:
    inner = nn.Sequential(nn.Linear(4, 4))
    outer = Outer(inner)
    attach(outer, 'O1')
    seen: list[torch.dtype] = []
    if level == 'O4':
        attach(inner, level)
    else:
        # at the levels without casts by op a region is plain
        put_region(inner, EnterRegion(PLAIN), LeaveRegion(PLAIN))
    inner[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    outer(torch.randn(2, 4)).sum().backward()
    assert outer.types == [torch.float16] * 2
    assert seen == [torch.bfloat16 if level == 'O4' else torch.float32]
    assert inner[0].weight.grad is not None


class TwoModes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.fc(x)
        return self.fc(x)


def test_a_forward_without_gradients_inside_one_with(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TwoModes()
    attach(model)
    cleared: list[bool] = []
    clear = torch.clear_autocast_cache
    monkeypatch.setattr(torch, 'clear_autocast_cache', lambda: (cleared.append(torch.is_grad_enabled()), clear())[1])
    model(torch.ones(1, 2)).sum().backward()
    assert model.fc.weight.grad is not None
    # into the block, out of it, and at the end
    assert cleared == [False, True, True, True]


@pytest.mark.parametrize('reentrant', [True, False])
@pytest.mark.parametrize('noted', [True, False])
@pytest.mark.parametrize('level', LEVELS)
def test_checkpointed_segments_see_the_same_types(reentrant: bool, noted: bool, level: str) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.types: list[tuple[torch.dtype, ...]] = []

        def segment(self, x: Tensor) -> Tensor:
            hidden = self.fc(x)
            wide = hidden.softmax(-1)
            loss = F.mse_loss(hidden, hidden.detach())
            self.types.append((hidden.dtype, wide.dtype, loss.dtype))
            return wide + loss

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.segment, x, use_reentrant=reentrant)

    model = Checkpointed()
    plan = casting.CastPlan([('', model)], resolve(opt_level=level), covers_forward=True)
    plan.apply()
    session = state.session_opened()
    x = torch.randn(2, 4, requires_grad=True)
    with set_checkpoint_early_stop(False):
        out = model(x)
    assert plan.ops is not None
    if noted:
        with regions.in_backward(plan.ops.keys):
            out.square().sum().backward()
    else:
        out.square().sum().backward()
    assert model.types == [(TYPES[level], torch.float32, torch.float32)] * 2
    assert model.fc.weight.grad is not None
    state.session_closed(session)


@pytest.mark.parametrize('level', LEVELS)
def test_gradient_penalty(level: str) -> None:
    """Second derivatives through every kind of rule, against float64."""

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.norm(F.softplus(self.a(x)))
            return self.b(hidden * hidden.softmax(-1)) + (x**2).sum(-1, keepdim=True)

    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    torch.manual_seed(0)
    model = Critic()
    exact = copy.deepcopy(model).double()
    attach(model, level)
    x = torch.randn(8, 4)
    penalty(exact, x.double().requires_grad_()).backward()
    penalty(model, x.requires_grad_()).backward()
    # eight products of 4 to 8 terms: a few roundings, of 2^-11 and 2^-8
    bound = 2e-2 if level == 'O1' else 1e-1
    for (name, mine), theirs in zip(model.named_parameters(), exact.parameters()):
        if theirs.grad is None:
            assert mine.grad is None
            continue
        assert mine.grad is not None, name
        assert mine.grad.dtype is torch.float32
        assert (mine.grad - theirs.grad).norm() <= bound * theirs.grad.norm() + 1e-6, name


def test_a_session_counts_while_somebody_holds_it() -> None:
    # models of other tests
    gc.collect()
    assert not state.casts_alive()
    session = state.session_opened()
    assert state.casts_alive()
    del session
    gc.collect()
    assert not state.casts_alive()
    session = state.session_opened()
    state.session_closed(session)
    state.session_closed(session)
    assert not state.casts_alive()


def test_autocast_of_somebody_else_is_left_alone() -> None:
    kernels.install('cpu')
    x = torch.ones(2, dtype=torch.bfloat16)
    with torch.autocast('cpu', torch.bfloat16):
        assert x.sum().dtype is x.softmax(0).dtype is (x**2).dtype is torch.bfloat16
        x.clone().exp_()
