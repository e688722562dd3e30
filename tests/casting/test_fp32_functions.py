"""Functions of torch that run in FP32 in a forward at every level, in both APIs: losses, linear algebra, what has no kernel."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bits import same_bits
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


@pytest.mark.parametrize('level', HALF)
def test_losses_are_float32(level: str, forwards: Forwards) -> None:
    wrong = []
    for name, loss in LOSSES.items():
        x = torch.randn(4, 4).to(HALF[level]).requires_grad_()
        y = torch.rand(4, 4).to(HALF[level])
        result = forwards(level, loss, x, y).seen
        if not same_bits(result.detach(), loss(x.detach().float(), y.float())):
            wrong.append((name, result.dtype))
        if result.requires_grad:
            result.sum().backward()
            assert x.grad is not None and x.grad.dtype is HALF[level]
    assert wrong == []


PARTIAL = functools.partial(F.mse_loss, reduction='sum')


@pytest.mark.parametrize('level', HALF)
def test_losses_are_float32_however_they_were_imported(level: str, forwards: Forwards) -> None:
    for loss in (imported_by_name, PARTIAL, lambda x, y: torch._C._nn.l1_loss(x, y), nn.MSELoss()):
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


# -- binary cross entropy of probabilities -------------------------------------------------------------------------------

SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    'module': lambda x, y: nn.BCELoss()(x, y),
    'function': lambda x, y: F.binary_cross_entropy(x, y),
    'by name': lambda x, y: F.binary_cross_entropy(input=x, target=y),
    'inner': lambda x, y: torch._C._nn.binary_cross_entropy(x, y, None, 1),
}


@pytest.mark.parametrize('level', HALF)
def test_bce_of_16_bit_probabilities_is_float32(level: str, forwards: Forwards) -> None:
    for name, loss in SCORES.items():
        score, target = torch.rand(2, 4).to(HALF[level]).requires_grad_(), torch.rand(2, 4).to(HALF[level])
        found = forwards(level, loss, score, target).seen
        assert same_bits(found.detach(), F.binary_cross_entropy(score.detach().float(), target.float())), name
        found.backward()
        assert score.grad is not None and score.grad.dtype is HALF[level]


def half_target(score: Tensor) -> Tensor:
    return torch.full_like(score, 0.5)


BCE_WORDS = ['binary_cross_entropy_with_logits', 'nn.BCEWithLogitsLoss', 'sigmoid', 'exactly 0 or 1']
FILL_WORDS = ['masked_fill', 'beyond the range', 'torch.finfo(x.dtype).min']
#: A level, a forward, and words of its warning; none where it does not warn.
WARNS: dict[str, tuple[str, Body, list[str]]] = {
    'bce at O1': ('O1', lambda x: F.binary_cross_entropy(y := x.sigmoid(), half_target(y)), BCE_WORDS),
    'bce by its module at O5': ('O5', lambda x: nn.BCELoss()(y := x.sigmoid(), half_target(y)), BCE_WORDS),
    'bce at O0': ('O0', lambda x: F.binary_cross_entropy(y := x.sigmoid(), half_target(y)), []),
    'bce of FP32': ('O2', lambda x: F.binary_cross_entropy(y := x.float().sigmoid(), half_target(y)), []),
    'numbers beyond the range': ('O2', lambda x: x.masked_fill(x > 0, -1e9).masked_fill(x < 0, 1e9), FILL_WORDS),
}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if BCE_WORDS[0] in text or FILL_WORDS[0] in text]


@pairs(name=WARNS, door=DOORS)
def test_one_warning_for_a_model(name: str, door: str, caplog: pytest.LogCaptureFixture) -> None:
    level, body, words = WARNS[name]
    for verbosity in (0, 1, 1):
        caplog.clear()
        # another model speaks
        prepared(Inside(body), 'O4', verbosity=1)
        call = prepared(Inside(body), level, door, verbosity=verbosity)
        with caplog.at_level('WARNING', 'amp_wrapper'):
            for _ in range(2):
                call(torch.randn(4, 4))
        texts = said(caplog)
        assert len(texts) == (verbosity if words else 0) and all(word in text for text in texts for word in words)


@pytest.mark.parametrize('words', [{}, {'allow_banned': True}])
def test_bce_under_the_oldest_handle(words: dict[str, bool], request: pytest.FixtureRequest, caplog: Any) -> None:
    x, target = torch.rand(2, 4, dtype=torch.float16), torch.rand(2, 4)
    prepared(Inside(torch.sin), 'O4', verbosity=1)
    request.addfinalizer(amp.init(**words)._deactivate)
    for _ in range(2):
        assert same_bits(F.binary_cross_entropy(x, target), F.binary_cross_entropy(x.float(), target))
    with amp.disable_casts():
        assert F.binary_cross_entropy(x, target).dtype is F32
    assert len(said(caplog)) == (not words)


# -- functions without 16-bit kernels, or whose eps is 0 in float16 ------------------------------------------------------

WINDOW = torch.hann_window(4)
FFTS = 'fft fft2 fftn ifft ifft2 ifftn rfft rfft2 rfftn ihfft ihfft2 ihfftn'.split()
FUNCTIONS: dict[str, Body] = {
    'cdist': lambda x: torch.cdist(x, x * 2),
    'pdist': lambda x: torch.pdist(x),
    'quantile': lambda x: torch.quantile(x, 0.3, dim=0),
    'nanquantile': lambda x: torch.nanquantile(x, 0.3),
    'histogram': lambda x: torch.histogram(x.detach(), 3).hist + x.sum() * 0,
    'bilinear with antialias': lambda x: F.interpolate(x[None, None], size=3, mode='bilinear', antialias=True),
    'bicubic with antialias': lambda x: F.interpolate(x[None, None], size=3, mode='bicubic', antialias=True),
    'avg_pool3d': lambda x: F.avg_pool3d(x[None, None, None], (1, 2, 2)),
    'normalize': lambda x: F.normalize(x),
    'cosine_similarity': lambda x: F.cosine_similarity(x, x.flip(0)),
    # complex
    **{f'fft.{name}': lambda x, name=name: getattr(torch.fft, name)(x) for name in FFTS},
    'stft': lambda x: torch.stft(x.flatten(), 4, window=WINDOW, return_complex=True),
    'polar': lambda x: torch.polar(x, x),
    'view_as_complex': lambda x: torch.view_as_complex(x.view(4, 2, 2)).exp(),
}
#: Of complex tensors that were made inside.
INVERSE: dict[str, Body] = {
    'hfft': lambda x: torch.fft.hfft(x),
    'irfft': lambda x: torch.fft.irfft(torch.fft.rfft(x)),
    'istft': lambda x: torch.istft(torch.stft(x.flatten(), 4, window=WINDOW, return_complex=True), 4, window=WINDOW),
}


@pytest.mark.parametrize('level', HALF)
def test_functions_without_16_bit_kernels(level: str, forwards: Forwards) -> None:
    half, wrong = HALF[level], []
    for name, body in (FUNCTIONS | INVERSE).items():
        model = forwards(level, body)
        value = model.seen.abs() if model.seen.is_complex() else model.seen
        # MKL of torch 2.6 takes no gradient without strides
        (gradient,) = torch.autograd.grad((value.float() * 1).sum(), model.given)
        expected = body(model.given.detach().float())
        if not expected.is_complex() and level not in PER_OP:
            # back in the type of the model; under autocast FP32, as what autocast itself casts to FP32
            expected = expected.to(half)
        close = name in INVERSE and torch.allclose(model.seen.float(), expected.float(), rtol=0.01, atol=0.01)
        if not (close or same_bits(model.seen.detach(), expected)) or not gradient.isfinite().all():
            wrong.append((name, model.seen.dtype))
        assert model.given.dtype is gradient.dtype is half
    assert wrong == []
    # eps is no 0: rows of zeros have no direction
    assert not forwards(level, lambda x: F.normalize(x * 0) + torch.cosine_similarity(x * 0, x)).seen.any()


# -- linear algebra ------------------------------------------------------------------------------------------------------

#: Symmetric positive definite; exact in 16 bits.
MATRIX = torch.tensor([[5.0, 1, 0.5, 0], [1, 4, -1, 0.5], [0.5, -1, 6, 1], [0, 0.5, 1, 3]])
PIVOTS = torch.arange(1, 5, dtype=torch.int32)
L, V = torch.tril(MATRIX), MATRIX[0] / 8
TWO = MATRIX.reshape(2, 2, 2, 2)
#: Arguments, by the last part of the name: the matrix alone where none are here.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    'cholesky_inverse': (L,),
    'cholesky_solve': (MATRIX, L),
    'cross': (MATRIX[:, :3], MATRIX[:, 1:]),
    'frobenius_norm': (MATRIX, 0),
    **dict.fromkeys(('householder_product', 'orgqr'), (L - L.diag().diag(), V)),
    'ldl_solve': (MATRIX, PIVOTS, MATRIX),
    'lobpcg': (MATRIX.expand(1, 4, 4), 1),
    **dict.fromkeys(('lstsq', 'vecdot', 'triangular_solve'), (MATRIX, MATRIX)),
    'torch.linalg.lu_solve': (MATRIX, PIVOTS, MATRIX),
    'lu_solve': (MATRIX, MATRIX, PIVOTS),
    'lu_unpack': (MATRIX, PIVOTS),
    'matrix_exp': (MATRIX / 8,),
    'matrix_power': (MATRIX, 3),
    'norm_except_dim': (MATRIX, 2, 0),
    'ormqr': (L - L.diag().diag(), V, MATRIX),
    'pca_lowrank': (MATRIX, 4),
    **dict.fromkeys(('solve', 'solve_ex', 'solve_triangular'), (MATRIX, MATRIX[:, :2])),
    'tensorinv': (TWO, 2),
    'tensorsolve': (TWO, MATRIX[:2, :2]),
    'vander': (V,),
    '_weight_norm': (MATRIX, MATRIX[:, :1].abs() + 1, 0),
}
ALIASES = """
    cholesky cholesky_inverse cholesky_solve det frobenius_norm geqrf inverse lobpcg logdet lu lu_solve lu_unpack
    matrix_exp matrix_power norm_except_dim nuclear_norm orgqr ormqr pca_lowrank pinverse qr slogdet svd svd_lowrank
    triangular_solve _weight_norm
""".split()
#: Products of matrices, a view, and a sum whose kernel adds in float32.
ELSEWHERE = {'matmul', 'multi_dot', 'diagonal', 'vector_norm'}
NAMES = [
    f'{place}.{name}'
    for place, holder, names in (
        ('torch.linalg', torch.linalg, sorted(vars(torch.linalg).keys() - ELSEWHERE)),
        ('torch', torch, ALIASES),
        ('torch.Tensor', Tensor, ALIASES),
    )
    for name in names
    if (name[0] != '_' or name in ALIASES) and inspect.isroutine(getattr(holder, name, None))
]


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('level', ['O1', 'O2', 'O4', 'O5'])
def test_linear_algebra_is_that_of_float32(level: str, forwards: Forwards) -> None:
    assert len(NAMES) > 70

    def called(name: str, *args: Any) -> list[Tensor]:
        # by name, as a model calls it
        torch.manual_seed(0)
        found = eval(name)(*args, **({'upper': True} if name.endswith('solve_triangular') else {}))
        return [part for part in ([found] if isinstance(found, Tensor) else found) if isinstance(part, Tensor)]

    wrong = []
    for name in NAMES:
        arguments = ARGUMENTS.get(name, ARGUMENTS.get(name.rpartition('.')[2], (MATRIX,)))
        for dtype in (F32, HALF[level]):
            given = [x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]
            try:
                expected = called(name, *(x.float() if x is not y else y for x, y in zip(given, arguments)))
            except RuntimeError as error:
                if 'is now removed' not in str(error):
                    raise
                continue
            found = forwards(level, called, name, *given).seen
            # rounded once at most: to the type of a 16-bit model
            kinds = [dtype if level in CAST and one.is_floating_point() else one.dtype for one in found]
            alike = [same_bits(one, other.to(kind)) for one, other, kind in zip(found, expected, kinds)]
            if len(found) != len(expected) or not all(alike):
                wrong.append((name, dtype))
    assert wrong == []


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


def computed(how: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), COMPUTED[how](nn.Linear(4, 4)), nn.Linear(4, 2))


def used(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The weights that two training steps used."""
    weights: list[Tensor] = []
    model[1].register_forward_hook(lambda module, args, output: weights.append(module.weight.detach().clone()))
    for _ in range(2):
        call(torch.linspace(-1, 1, 16).reshape(4, 4)).float().square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.05)
                p.grad = None
    return weights[:2]


@pytest.mark.filterwarnings('ignore::FutureWarning')
@pytest.mark.parametrize('how', COMPUTED)
def test_computed_weights_are_those_of_float32(how: str) -> None:
    plain = computed(how)
    expected = used(plain, plain)
    for level, door in (('O1', 'wrapper'), ('O2', 'amp'), ('O4', 'amp'), ('O5', 'wrapper')):
        model = computed(how)
        for one, other in zip(used(model, prepared(model, level, door)), expected, strict=True):
            # as the module wants it: computed in float32 and rounded once
            assert one.dtype is (HALF[level] if level in CAST else F32)
            assert torch.allclose(one.float(), other, atol=0.02), level
        saved = model.state_dict()
        assert {value.dtype for value in saved.values()} == {F32}
        # the state goes into a plain model and gives the same weight
        plain.load_state_dict(saved)
        for other in [model, plain] if how.startswith('old') else [model, plain, copy.deepcopy(model)]:
            other.eval()(torch.ones(1, 4))
            assert same_bits(other[1].weight.detach().to(model[1].weight.dtype), model[1].weight.detach()), level
        with parametrize.cached():
            assert model(torch.ones(1, 4)).isfinite().all()


@pytest.mark.parametrize('level', LEVELS)
def test_arrays_are_float32_in_a_forward(level: str, forwards: Forwards) -> None:
    def body(x: Tensor) -> tuple[list[np.ndarray], list[np.ndarray], Any]:
        y = x.detach()
        wide = [torch.ones(2).numpy(), torch.ones(2, dtype=torch.float64).numpy(), torch.arange(2).numpy()]
        with pytest.raises(RuntimeError, match='requires grad'):
            x.numpy()
        return [y.numpy(), np.asarray(y), np.array(y), x.numpy(force=True), y[0].__array__()], wide, y.tolist()

    arrays, wide, listed = forwards(level, body).seen
    assert {array.dtype for array in arrays} == {np.dtype('float32')}
    assert np.array_equal(arrays[0], np.array(listed, dtype='float32'))
    assert [array.dtype.name for array in wide] == ['float32', 'float64', 'int64']
    # what needs no cast shares its memory, as ever
    assert not wide[0].flags.owndata
    # and outside of a forward nothing is changed
    assert torch.ones(2, dtype=torch.float16).numpy().dtype == np.dtype('float16')
    with pytest.raises(TypeError, match='BFloat16'):
        torch.ones(2, dtype=torch.bfloat16).numpy()
