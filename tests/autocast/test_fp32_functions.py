"""Functions of torch that run in FP32 in a forward at every level, in both APIs: losses, linear algebra, what has no kernel."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bits import same, same_bits
from forwards import CAST, DOORS, HALF, LEVELS, PER_OP, Forwards, Inside, prepared
from op_calls import LOSSES
from pairs import pairs
from torch import Tensor, nn
from torch.nn.functional import l1_loss as imported_by_name
from torch.nn.utils import parametrizations, parametrize

from amp_wrapper import amp

F32 = torch.float32
Body = Callable[[Tensor], Any]


@pytest.fixture(scope='module')
def forwards() -> Forwards:
    return Forwards()


# -- losses --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('door', DOORS)
@pytest.mark.parametrize('level', HALF)
def test_losses_are_float32(level: str, door: str, forwards: Forwards) -> None:
    wrong = []
    for name, loss in LOSSES.items():
        x = torch.randn(4, 4).to(HALF[level]).requires_grad_()
        y = torch.rand(4, 4).to(HALF[level])
        result = forwards(level, loss, x, y, door=door).seen
        if not same_bits(result.detach(), loss(x.detach().float(), y.float())):
            wrong.append((name, result.dtype))
        if result.requires_grad:
            result.sum().backward()
            assert x.grad is not None and x.grad.dtype is HALF[level]
    assert wrong == []


def test_every_loss_of_torch_is_tried_here() -> None:
    offered = {name for name in dir(F) if name.endswith('_loss')} | {'cross_entropy', 'kl_div'}
    assert offered - LOSSES.keys() == {'binary_cross_entropy'} & offered


KEPT_REFERENCE, PARTIAL = F.smooth_l1_loss, functools.partial(F.mse_loss, reduction='sum')


@pytest.mark.parametrize('level', HALF)
def test_losses_are_float32_however_they_were_imported(level: str, forwards: Forwards) -> None:
    for loss in (imported_by_name, KEPT_REFERENCE, PARTIAL, lambda x, y: torch._C._nn.l1_loss(x, y), nn.MSELoss()):
        assert forwards(level, lambda x, loss=loss: loss(x, x * 0)).seen.dtype is F32
    # and other functions, types and devices are left alone
    assert forwards(level, lambda x: F.relu(x) + x).seen.dtype is HALF[level]
    assert forwards(level, lambda x: F.mse_loss(x.double(), x.double())).seen.dtype is torch.float64
    with torch.device('meta'):
        x = torch.ones(3, 3, dtype=HALF[level])
    assert forwards(level, lambda _: F.mse_loss(x, x)).seen.dtype is F32


@pytest.mark.parametrize('level', CAST)
def test_samples_and_norms_of_large_numbers(level: str, forwards: Forwards) -> None:
    """Deformable DETR: 16-bit values at FP32 places are an error in torch. Squares overflow from 256 on."""
    half = HALF[level]
    image, places = torch.arange(16.0).reshape(1, 1, 4, 4).to(half), torch.rand(1, 2, 2, 2) - 0.5

    def sample(x: Tensor, y: Tensor) -> Tensor:
        return F.grid_sample(x, y, align_corners=False)

    assert same_bits(forwards(level, sample, image, places).seen, sample(image.float(), places).to(half))
    normed = forwards(level, lambda x: F.local_response_norm(x[None] * 0 + 300, 2)).seen
    assert normed.dtype is half and normed.isfinite().all() and (normed > 0).all()


# a dict, whose functions keep their identity while others are replaced by name
HELD = {'loss': F.cross_entropy}


@pytest.mark.xfail(strict=True, reason='casting')
@pytest.mark.parametrize('level', ['O2', 'O4'])
def test_function_can_be_pickled_in_a_forward(level: str, forwards: Forwards) -> None:
    assert pickle.loads(forwards(level, lambda x: pickle.dumps(HELD)).seen) == HELD


# -- binary cross entropy of probabilities -------------------------------------------------------------------------------

SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    'module': lambda x, y: nn.BCELoss()(x, y),
    'function': lambda x, y: F.binary_cross_entropy(x, y),
    'by name': lambda x, y: F.binary_cross_entropy(input=x, target=y),
    'inner': lambda x, y: torch._C._nn.binary_cross_entropy(x, y, None, 1),
}


class Scored(Inside):
    """Two losses of probabilities: of the model itself, or of a module below it."""

    def __init__(self, kind: str, wide: bool = False) -> None:
        super().__init__(self.losses)
        self.kind, self.wide, self.module = kind, wide, nn.BCELoss()

    def losses(self, x: Tensor) -> Tensor:
        score = x.float().sigmoid() if self.wide else x.sigmoid()
        target = torch.full_like(score, 0.25)
        loss = self.module if self.kind == 'part' else SCORES[self.kind]
        total = loss(score, target) + loss(score, target)
        self.expected = 2 * F.binary_cross_entropy(score.detach().float(), target.float())
        assert total.dtype is F32
        return total


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if 'binary_cross_entropy' in r.getMessage()]


# whether the probabilities are FP32, and the verbosity
@pairs(level=LEVELS, kind=('part', *SCORES), given=[(False, 1), (True, 1), (False, 0)], door=DOORS)
def test_bce_of_16_bit_probabilities_warns_once_for_each_model(
    level: str, kind: str, given: tuple[bool, int], door: str, caplog: pytest.LogCaptureFixture
) -> None:
    wide, verbosity = given
    model = Scored(kind, wide)
    call = prepared(model, level, door, verbosity=verbosity)
    # another model speaks
    prepared(Inside(torch.sin), 'O4', verbosity=1)
    with caplog.at_level('WARNING', 'amp_wrapper'):
        loss = call(torch.randn(4, 4))
    loss.backward()
    assert same_bits(loss.detach(), model.expected) and model.layer.weight.grad is not None
    texts = said(caplog)
    assert len(texts) == (level != 'O0' and not wide and verbosity == 1)
    for word in ('binary_cross_entropy_with_logits', 'nn.BCEWithLogitsLoss', 'sigmoid', 'exactly 0 or 1'):
        assert all(word in text for text in texts)


def test_bce_in_a_graph_warns_as_outside(caplog: pytest.LogCaptureFixture) -> None:
    def body(x: Tensor) -> Tensor:
        return F.binary_cross_entropy(x.sigmoid(), x.detach().sigmoid())

    x = torch.randn(4, 4)
    for level, verbosity in (('O2', 0), ('O4', 1)):
        caplog.clear()
        torch._dynamo.reset()
        prepared(Inside(torch.sin), 'O4', verbosity=1)
        model = amp.initialize(Inside(body), opt_level=level, verbosity=verbosity)
        with caplog.at_level('WARNING', 'amp_wrapper'):
            loss = torch.compile(model, backend='eager', fullgraph=True)(x)
        assert len(said(caplog)) == verbosity and same_bits(loss, model(x))


@pytest.mark.parametrize('allowed', [False, True])
def test_bce_under_the_oldest_handle(allowed: bool, caplog: pytest.LogCaptureFixture) -> None:
    x, target = torch.rand(2, 4, dtype=torch.float16), torch.rand(2, 4)
    prepared(Scored('function', wide=True), 'O4', verbosity=1)(torch.randn(4, 4))
    handle = amp.init(allow_banned=allowed)
    try:
        with caplog.at_level('WARNING', 'amp_wrapper'):
            for _ in range(2):
                assert same_bits(F.binary_cross_entropy(x, target), F.binary_cross_entropy(x.float(), target))
            with amp.disable_casts():
                assert F.binary_cross_entropy(x, target).dtype is F32
    finally:
        handle._deactivate()
    assert len(said(caplog)) == (not allowed)


# -- functions without 16-bit kernels, or whose eps is 0 in float16 ------------------------------------------------------

REAL: dict[str, Body] = {
    'cdist': lambda x: torch.cdist(x, x * 2),
    'pdist': lambda x: torch.pdist(x),
    'F.pdist': lambda x: F.pdist(x),
    'quantile': lambda x: torch.quantile(x, 0.3, dim=0),
    'Tensor.quantile': lambda x: x.quantile(0.3),
    'nanquantile': lambda x: torch.nanquantile(x, 0.3),
    'Tensor.nanquantile': lambda x: x.nanquantile(0.3),
    'histogram': lambda x: torch.histogram(x.detach(), 3).hist + x.sum() * 0,
    'bilinear with antialias': lambda x: F.interpolate(x[None, None], size=3, mode='bilinear', antialias=True),
    'bicubic with antialias': lambda x: F.interpolate(x[None, None], size=3, mode='bicubic', antialias=True),
    'avg_pool3d': lambda x: F.avg_pool3d(x[None, None, None], (1, 2, 2)),
    'AvgPool3d': lambda x: nn.AvgPool3d((1, 2, 2))(x[None, None, None]),
    'normalize': lambda x: F.normalize(x),
    'cosine_similarity': lambda x: F.cosine_similarity(x, x.flip(0)),
    'CosineSimilarity': lambda x: nn.CosineSimilarity()(x, x.flip(0)),
}
WINDOW = torch.hann_window(4)
#: Each ends in a complex tensor.
COMPLEX: dict[str, Body] = {
    **{
        f'fft.{name}': lambda x, name=name: getattr(torch.fft, name)(x)
        for name in 'fft fft2 fftn ifft ifft2 ifftn rfft rfft2 rfftn ihfft ihfft2 ihfftn'.split()
    },
    'stft': lambda x: torch.stft(x.flatten(), 4, window=WINDOW, return_complex=True),
    'Tensor.stft': lambda x: x.flatten().stft(4, window=WINDOW, return_complex=True),
    'polar': lambda x: torch.polar(x, x),
    'complex': lambda x: torch.complex(x, x).exp(),
    'view_as_complex': lambda x: torch.view_as_complex(x.view(4, 2, 2)).exp(),
}
#: Of complex tensors that were made inside.
OTHERS: dict[str, Body] = {
    'hfft': lambda x: torch.fft.hfft(x),
    'irfft': lambda x: torch.fft.irfft(torch.fft.rfft(x)),
    'irfft2': lambda x: torch.fft.irfft2(torch.fft.rfft2(x)),
    'istft': lambda x: torch.istft(torch.stft(x.flatten(), 4, window=WINDOW, return_complex=True), 4, window=WINDOW),
}


@pytest.mark.parametrize('door', DOORS)
@pytest.mark.parametrize('level', HALF)
def test_functions_without_16_bit_kernels(level: str, door: str, forwards: Forwards) -> None:
    half, wrong = HALF[level], []
    for name, body in (REAL | COMPLEX | OTHERS).items():
        model = forwards(level, body, door=door)
        value = model.seen.abs() if model.seen.is_complex() else model.seen
        (gradient,) = torch.autograd.grad(value.float().sum(), model.given)
        expected = body(model.given.detach().float())
        if not expected.is_complex() and level not in PER_OP:
            # back in the type of the model; under autocast FP32, as what autocast itself casts to FP32
            expected = expected.to(half)
        close = torch.allclose(model.seen.float(), expected.float(), rtol=0.01, atol=0.01) if name in OTHERS else False
        if not (close or same_bits(model.seen.detach(), expected)) or not gradient.isfinite().all():
            wrong.append((name, model.seen.dtype))
        assert model.given.dtype is gradient.dtype is half
    assert wrong == []
    # eps is no 0: rows of zeros have no direction
    assert not forwards(level, lambda x: F.normalize(x * 0) + torch.cosine_similarity(x * 0, x), door=door).seen.any()


@pytest.mark.parametrize('level', ['O2', 'O4'])
def test_in_a_graph_as_outside(level: str) -> None:
    names = ('cdist', 'bilinear with antialias', 'avg_pool3d', 'normalize', 'fft.rfft', 'polar')

    def body(x: Tensor) -> list[Tensor]:
        found = [(REAL | COMPLEX)[name](x) for name in names]
        return [torch.view_as_real(y) if y.is_complex() else y for y in found]

    torch._dynamo.reset()
    model, x = amp.initialize(Inside(body), opt_level=level, verbosity=0), torch.randn(4, 4)
    expected = model(x)
    assert same(torch.compile(model, backend='eager', fullgraph=True)(x), expected)


# -- linear algebra ------------------------------------------------------------------------------------------------------

#: Symmetric positive definite; exact in 16 bits.
MATRIX = torch.tensor([[5.0, 1, 0.5, 0], [1, 4, -1, 0.5], [0.5, -1, 6, 1], [0, 0.5, 1, 3]])
PIVOTS = torch.arange(1, 5, dtype=torch.int32)
#: By the last part of the name; a call with the matrix alone where none is here. What depends on signs is put together again.
SPECIAL: dict[str, Callable[[Any, Tensor], Any]] = {
    'cholesky_inverse': lambda call, a: call(torch.tril(a)),
    'cholesky_solve': lambda call, a: call(a, torch.tril(a)),
    'cross': lambda call, a: call(a[:, :3], a[:, 1:]),
    'eig': lambda call, a: call(a)[0].real.sort().values,
    'eigh': lambda call, a: (lambda r: (r[1] * r[0].unsqueeze(-2)) @ r[1].mT)(call(a)),
    'eigvals': lambda call, a: call(a).real.sort().values,
    'frobenius_norm': lambda call, a: call(a, 0),
    'geqrf': lambda call, a: call(a)[0].triu().abs(),
    'householder_product': lambda call, a: call(a.tril(-1), a[0] / 8),
    'ldl_solve': lambda call, a: call(a, PIVOTS, a),
    'lobpcg': lambda call, a: call(a.expand(1, 4, 4), k=1)[0],
    'lstsq': lambda call, a: call(a, a)[0],
    'lu': lambda call, a: call(a)[-1] if len(call(a)) == 3 else call(a)[0],
    'torch.linalg.lu_solve': lambda call, a: call(a, PIVOTS, a),
    'lu_solve': lambda call, a: call(a, a, PIVOTS),
    'lu_unpack': lambda call, a: call(a, PIVOTS),
    'matrix_exp': lambda call, a: call(a / 8),
    'matrix_norm': lambda call, a: (call(a), call(a, 2), call(a, 'nuc')),
    'matrix_power': lambda call, a: call(a, 3),
    'norm': lambda call, a: (call(a), call(a, 2), call(a, 'nuc')),
    'norm_except_dim': lambda call, a: call(a, 2, 0),
    'orgqr': lambda call, a: call(a.tril(-1), a[0] / 8),
    'ormqr': lambda call, a: call(a.tril(-1), a[0] / 8, a),
    'pca_lowrank': lambda call, a: call(a, 4)[1],
    'qr': lambda call, a: (lambda r: r[0] @ r[1])(call(a)),
    **dict.fromkeys(('solve', 'solve_ex'), lambda call, a: call(a, a[:, :2])),
    'solve_triangular': lambda call, a: call(a, a[:, :2], upper=True),
    **dict.fromkeys(('svd', 'svd_lowrank'), lambda call, a: call(a)[1]),
    'tensorinv': lambda call, a: call(a.reshape(2, 2, 2, 2), ind=2),
    'tensorsolve': lambda call, a: call(a.reshape(2, 2, 2, 2), a[:2, :2]),
    'triangular_solve': lambda call, a: call(a[:, :2], a),
    'vander': lambda call, a: call(a[0] / 8),
    'vecdot': lambda call, a: call(a, a),
    '_weight_norm': lambda call, a: call(a, a[:, :1].abs() + 1, 0),
}
ALIASES = """
    cholesky cholesky_inverse cholesky_solve det frobenius_norm geqrf inverse lobpcg logdet lu lu_solve lu_unpack
    matrix_exp matrix_power norm_except_dim nuclear_norm orgqr ormqr pca_lowrank pinverse qr slogdet svd svd_lowrank
    triangular_solve _weight_norm
"""
#: Products of matrices, a view, and a sum whose kernel adds in float32.
IN_16_BIT = {'matmul', 'multi_dot', 'diagonal', 'vector_norm'}
FUNCTIONS = {
    f'{place}.{name}': getattr(holder, name)
    for place, holder, names in (
        ('torch.linalg', torch.linalg, [n for n in dir(torch.linalg) if n[0] != '_' and n not in IN_16_BIT]),
        ('torch', torch, ALIASES.split()),
        ('torch.Tensor', Tensor, ALIASES.split()),
    )
    for name in names
    if callable(getattr(holder, name, None)) and not inspect.isclass(getattr(holder, name))
}


def tensors(value: Any) -> list[Tensor]:
    parts = (
        [value] if isinstance(value, Tensor) else [] if value is None else [t for part in value for t in tensors(part)]
    )
    return [part for part in parts if part.is_floating_point()]


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('level', ['O1', 'O2', 'O4', 'O5'])
def test_linear_algebra_is_that_of_float32(level: str, forwards: Forwards) -> None:
    assert len(FUNCTIONS) > 70
    wrong = []
    for name in FUNCTIONS:
        call = SPECIAL.get(name, SPECIAL.get(name.rpartition('.')[2], lambda call, a: call(a)))
        try:
            torch.manual_seed(0)
            expected = tensors(call(FUNCTIONS[name], MATRIX))
        except RuntimeError as error:
            if 'is now removed' not in str(error):
                raise
            continue
        for dtype in (F32, HALF[level]):
            torch.manual_seed(0)
            # by name, as a model calls it
            found = tensors(forwards(level, lambda a, call=call, name=name: call(eval(name), a), MATRIX.to(dtype)).seen)
            # rounded once at most, where something was computed from it
            close = [1e-4 if one.dtype is dtype is F32 else 0.05 for one in found]
            if len(found) != len(expected) or not all(
                torch.allclose(a.float(), b, rtol=bound, atol=bound) for a, b, bound in zip(found, expected, close)
            ):
                wrong.append((name, dtype))
    assert wrong == []


@pytest.mark.parametrize('level', CAST)
def test_linear_algebra_has_the_type_of_the_model_and_gradients(level: str, forwards: Forwards) -> None:
    a = MATRIX.to(HALF[level]).requires_grad_()
    found = forwards(level, lambda _: torch.linalg.inv(a)).seen
    assert found.dtype is HALF[level]
    found.sum().backward()
    assert a.grad is not None and a.grad.isfinite().all() and a.grad.any()


# -- computed weights, arrays --------------------------------------------------------------------------------------------


class Softplus(nn.Module):
    """A parametrization of somebody's own; its inverse cancels."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype is F32
        return torch.log(torch.expm1(F.softplus(x) + 1e-3) + 1)

    def right_inverse(self, y: Tensor) -> Tensor:
        return y.clone()


COMPUTED: dict[str, Callable[[nn.Linear], nn.Module]] = {
    'matrix_exp': lambda m: parametrizations.orthogonal(m, orthogonal_map='matrix_exp'),
    'cayley': lambda m: parametrizations.orthogonal(m, orthogonal_map='cayley'),
    'no trivialization': lambda m: parametrizations.orthogonal(m, use_trivialization=False),
    'spectral_norm': parametrizations.spectral_norm,
    'weight_norm': parametrizations.weight_norm,
    'old spectral_norm': nn.utils.spectral_norm,
    'old weight_norm': nn.utils.weight_norm,
    'own': lambda m: parametrize.register_parametrization(m, 'weight', Softplus()),
}


def trained(how: str, level: str = '', door: str = '') -> tuple[nn.Module, list[Tensor]]:
    """A model after two steps, and the weight that each forward used; without a level that of plain torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), COMPUTED[how](nn.Linear(4, 4)), nn.Linear(4, 2))
    call = prepared(model, level, door) if level else model
    used: list[Tensor] = []
    model[1].register_forward_hook(lambda module, args, output: used.append(module.weight.detach().clone()))
    for _ in range(2):
        call(torch.linspace(-1, 1, 16).reshape(4, 4)).float().square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.05)
                p.grad = None
    return model, used


@pytest.mark.filterwarnings('ignore::FutureWarning')
@pytest.mark.parametrize('how', COMPUTED)
def test_computed_weights_are_those_of_float32(how: str) -> None:
    _, expected = trained(how)
    x = torch.ones(1, 4)
    for level, door in (('O1', 'wrapper'), ('O2', 'amp'), ('O4', 'amp'), ('O5', 'wrapper')):
        model, used = trained(how, level, door)
        for one, other in zip(used, expected, strict=True):
            # as the module wants it: computed in float32 and rounded once
            assert one.dtype is (HALF[level] if level in CAST else F32)
            assert torch.allclose(one.float(), other, atol=0.02), (level, door)
        saved = model.state_dict()
        assert {value.dtype for value in saved.values()} == {F32}
        # the state goes into a plain model and gives the same weight
        plain = nn.Sequential(nn.Linear(4, 4), COMPUTED[how](nn.Linear(4, 4)), nn.Linear(4, 2))
        plain.load_state_dict(saved)
        others = [plain] if how.startswith('old') else [plain, copy.deepcopy(model).eval()]
        model.eval()(x)
        for other in others:
            other.eval()(x)
            assert same_bits(other[1].weight.detach().to(model[1].weight.dtype), model[1].weight.detach()), (
                level,
                door,
            )
        with parametrize.cached():
            assert model(x).isfinite().all()


@pytest.mark.parametrize('door', DOORS)
@pytest.mark.parametrize('level', LEVELS)
def test_arrays_are_float32_in_a_forward(level: str, door: str, forwards: Forwards) -> None:
    def body(x: Tensor) -> tuple[list[np.ndarray], list[np.ndarray], Any]:
        y = x.detach()
        wide = [torch.ones(2).numpy(), torch.ones(2, dtype=torch.float64).numpy(), torch.arange(2).numpy()]
        with pytest.raises(RuntimeError, match='requires grad'):
            x.numpy()
        return [y.numpy(), np.asarray(y), np.array(y), x.numpy(force=True), y[0].__array__()], wide, y.tolist()

    arrays, wide, listed = forwards(level, body, door=door).seen
    assert {array.dtype for array in arrays} == {np.dtype('float32')}
    assert np.array_equal(arrays[0], np.array(listed, dtype='float32'))
    assert [array.dtype.name for array in wide] == ['float32', 'float64', 'int64']
    # what needs no cast shares its memory, as ever
    assert not wide[0].flags.owndata
    # and outside of a forward nothing is changed
    assert torch.ones(2, dtype=torch.float16).numpy().dtype == np.dtype('float16')
    with pytest.raises(TypeError, match='BFloat16'):
        torch.ones(2, dtype=torch.bfloat16).numpy()
