"""Functions that have no 16-bit kernel, or whose eps is 0 in float16, work in a forward at every level, in both APIs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toy_forward import APIS, TYPES, Inside, inside

from amp_wrapper import amp

Body = Callable[[Tensor], Any]

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
FOURIER = 'fft fft2 fftn ifft ifft2 ifftn rfft rfft2 rfftn ihfft ihfft2 ihfftn'
WINDOW = torch.hann_window(4)
# each ends in a complex tensor, and autograd goes back through it
COMPLEX: dict[str, Body] = {
    # by name: a reference that was taken before is not found
    **{f'fft.{name}': lambda x, name=name: getattr(torch.fft, name)(x) for name in FOURIER.split()},
    'stft': lambda x: torch.stft(x.flatten(), 4, window=WINDOW, return_complex=True),
    'Tensor.stft': lambda x: x.flatten().stft(4, window=WINDOW, return_complex=True),
    'polar': lambda x: torch.polar(x, x),
    'complex': lambda x: torch.complex(x, x).exp(),
    'view_as_complex': lambda x: torch.view_as_complex(x.view(8, 4, 2)).exp(),
}
BACK: dict[str, Body] = {
    'hfft': lambda x: torch.fft.hfft(x),
    'irfft': lambda x: torch.fft.irfft(torch.fft.rfft(x)),
    'irfft2': lambda x: torch.fft.irfft2(torch.fft.rfft2(x)),
    'istft': lambda x: torch.istft(torch.stft(x.flatten(), 4, window=WINDOW, return_complex=True), 4, window=WINDOW),
}


def gradient(model: Inside) -> Tensor:
    value = model.seen.abs() if model.seen.is_complex() else model.seen
    (found,) = torch.autograd.grad(value.float().sum(), model.given)
    return found


@pytest.mark.parametrize('api', APIS)
@pytest.mark.parametrize('level', TYPES)
@pytest.mark.parametrize('name', [*REAL, *COMPLEX])
def test_it_computes_in_float32(name: str, level: str, api: str) -> None:
    body = (REAL | COMPLEX)[name]
    model = inside(body, level, api)
    assert model.given.dtype is TYPES[level] and torch.isfinite(gradient(model)).all()
    expected = body(model.given.detach().float())
    if name in REAL and level not in ('O1', 'O4'):
        # back in the type of the model; under autocast FP32, as what autocast itself casts to FP32
        expected = expected.to(TYPES[level])
    assert model.seen.dtype is expected.dtype and torch.equal(model.seen, expected)


@pytest.mark.parametrize('level', TYPES)
@pytest.mark.parametrize('name', BACK)
def test_what_comes_back_from_complex_numbers(name: str, level: str) -> None:
    model = inside(BACK[name], level)
    assert torch.allclose(model.seen.float(), BACK[name](model.given.float()), rtol=1e-2, atol=1e-2)
    assert torch.isfinite(gradient(model)).all()


@pytest.mark.parametrize('level', TYPES)
def test_rows_of_zeros_have_no_norm(level: str) -> None:
    def body(x: Tensor) -> Tensor:
        zeros = x * 0
        return (
            F.normalize(zeros).sum() + F.cosine_similarity(zeros, x).sum() + torch.cosine_similarity(zeros, zeros).sum()
        )

    assert inside(body, level).seen == 0


@pytest.mark.parametrize('level', ['O2', 'O4', 'O5'])
@pytest.mark.parametrize('name', ['cdist', 'bilinear with antialias', 'avg_pool3d', 'normalize', 'fft.rfft', 'polar'])
def test_in_a_graph_as_outside(name: str, level: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, body = torch.randn(8, 8), (REAL | COMPLEX)[name]
    model = amp.initialize(
        Inside(lambda y: torch.view_as_real(body(y)) if name in COMPLEX else body(y)), opt_level=level, verbosity=0
    )
    expected = model(x)
    assert torch.equal(torch.compile(model, backend='aot_eager', fullgraph=True)(x), expected)
