"""Linear algebra, computed weights, and arrays inside forwards: float32 inside, at every level."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from amp_wrapper import AmpOptimWrapper, amp
from amp_wrapper.policy import LEVELS, resolve
from amp_wrapper.policy.fp32_registry import IN_16_BIT, linalg_functions

HALF = {'O1': torch.float16, 'O2': torch.float16, 'O3': torch.float16, 'O4': torch.bfloat16, 'O5': torch.bfloat16}


def matrix(device: torch.device) -> Tensor:
    """(4, 4) symmetric positive definite; exact in 16 bits, and so are the vectors in it."""
    rows = [[5.0, 1, 0.5, 0], [1, 4, -1, 0.5], [0.5, -1, 6, 1], [0, 0.5, 1, 3]]
    return torch.tensor(rows, device=device)


def _calls() -> dict[str, Callable[[Any, Tensor], Any]]:
    """A call of every function; what depends on signs of vectors is put together again."""

    def on(*more: Any, **words: Any) -> Callable[[Any, Tensor], Any]:
        return lambda call, a: call(a, *more, **words)

    def whole(put: Callable[[Any], Any]) -> Callable[[Any, Tensor], Any]:
        return lambda call, a: put(call(a))

    special: dict[str, Callable[[Any, Tensor], Any]] = {
        'cholesky_inverse': lambda call, a: call(torch.tril(a)),
        'cholesky_solve': lambda call, a: call(a, torch.tril(a)),
        'cross': lambda call, a: call(a[:, :3], a[:, 1:]),
        'eig': whole(lambda r: r[0].real.sort().values),
        'eigh': whole(lambda r: (r[1] * r[0].unsqueeze(-2)) @ r[1].mT),
        'eigvals': whole(lambda r: r.real.sort().values),
        'frobenius_norm': on(0),
        'geqrf': whole(lambda r: r[0].triu().abs()),
        'householder_product': lambda call, a: call(a.tril(-1), a[0] / 8),
        'ldl_solve': lambda call, a: call(a, torch.arange(1, 5, dtype=torch.int32, device=a.device), a),
        'lobpcg': lambda call, a: call(a.expand(1, 4, 4), k=1)[0],
        'lstsq': lambda call, a: call(a, a)[0],
        'lu': lambda call, a: call(a)[-1] if len(call(a)) == 3 else call(a)[0],
        'torch.linalg.lu_solve': lambda call, a: call(a, torch.arange(1, 5, dtype=torch.int32, device=a.device), a),
        'lu_solve': lambda call, a: call(a, a, torch.arange(1, 5, dtype=torch.int32, device=a.device)),
        'lu_unpack': lambda call, a: call(a, torch.arange(1, 5, dtype=torch.int32, device=a.device)),
        'matrix_exp': lambda call, a: call(a / 8),
        'matrix_norm': lambda call, a: (call(a), call(a, 2), call(a, 'nuc')),
        'matrix_power': lambda call, a: call(a, 3),
        'norm': lambda call, a: (call(a), call(a, 2), call(a, 'nuc')),
        'norm_except_dim': lambda call, a: call(a, 2, 0),
        'orgqr': lambda call, a: call(a.tril(-1), a[0] / 8),
        'ormqr': lambda call, a: call(a.tril(-1), a[0] / 8, a),
        'pca_lowrank': lambda call, a: call(a, 4)[1],
        'qr': whole(lambda r: r[0] @ r[1]),
        'solve': lambda call, a: call(a, a[:, :2]),
        'solve_ex': lambda call, a: call(a, a[:, :2]),
        'solve_triangular': lambda call, a: call(a, a[:, :2], upper=True),
        'svd': whole(lambda r: r[1]),
        'svd_lowrank': whole(lambda r: r[1]),
        'tensorinv': lambda call, a: call(a.reshape(2, 2, 2, 2), ind=2),
        'tensorsolve': lambda call, a: call(a.reshape(2, 2, 2, 2), a[:2, :2]),
        'triangular_solve': lambda call, a: call(a[:, :2], a),
        'vecdot': lambda call, a: call(a, a),
        '_weight_norm': lambda call, a: call(a, a[:, :1].abs() + 1, 0),
    }
    return {name: special.get(name, special.get(name.rpartition('.')[2], on())) for name in linalg_functions()}


CALLS = _calls()


def named(name: str) -> Any:
    found: Any = torch
    for part in name.split('.')[1:]:
        found = getattr(found, part)
    return found


class Calls(nn.Module):
    """One function, by its name, inside of a forward."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 1)
        self.name = name
        self.found: Any = None

    def forward(self, a: Tensor) -> Tensor:
        self.found = CALLS[self.name](named(self.name), a)
        return a.sum()


def tensors(value: Any) -> list[Tensor]:
    return (
        [value] if isinstance(value, Tensor) else [] if value is None else [t for part in value for t in tensors(part)]
    )


@pytest.fixture(scope='module')
def models(device: torch.device) -> dict[str, Any]:
    """One model of each level; a pass costs less than a session."""
    return {
        level: amp.initialize(Calls('torch.linalg.det').to(device), opt_level=level, verbosity=0) for level in LEVELS
    }


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name', sorted(CALLS))
def test_linear_algebra_is_that_of_float32(name: str, models: dict[str, Any], device: torch.device) -> None:
    a = matrix(device)
    torch.manual_seed(0)
    try:
        expected = tensors(CALLS[name](named(name), a))
    except RuntimeError as error:
        if 'is now removed' not in str(error):
            raise
        pytest.skip(f'torch {torch.__version__} keeps {name} for its error message alone')
    for level, model in models.items():
        model.name = name
        for dtype in {torch.float32, HALF.get(level, torch.float32)}:
            torch.manual_seed(0)
            model(a.to(dtype))
            found = tensors(model.found)
            assert len(found) == len(expected)
            for one, other in zip(found, expected):
                if not one.is_floating_point():
                    continue
                # rounded once at most, where something was computed from it
                close = 1e-4 if one.dtype is torch.float32 and dtype is torch.float32 else 0.05
                assert torch.allclose(one.float(), other.float(), rtol=close, atol=close), (level, dtype)


def test_the_grid_is_everything_that_torch_has() -> None:
    listed = {name.rpartition('.')[2] for name in CALLS if name.startswith('torch.linalg.')}
    offered = {
        name
        for name, value in vars(torch.linalg).items()
        if callable(value) and not inspect.isclass(value) and not name.startswith('_')
    }
    assert offered - listed == IN_16_BIT
    assert len(CALLS) > 70


@pytest.mark.parametrize('level', ['O2', 'O5'])
def test_results_have_the_type_of_the_model_and_gradients(
    level: str, models: dict[str, Any], device: torch.device
) -> None:
    a = matrix(device).to(HALF[level]).requires_grad_()
    out = torch.empty(0, dtype=HALF[level], device=device)

    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, torch.dtype, bool]:
            found = torch.linalg.inv(a)
            same = torch.linalg.inv(a.detach(), out=out) is out
            return self.fc(found).sum() + found.sum(), found.dtype, same

    model = amp.initialize(Inverse().to(device), opt_level=level, verbosity=0)
    loss, dtype, same = model(matrix(device))
    loss.backward()
    assert dtype is HALF[level]
    assert same
    assert torch.allclose(out.float(), matrix(device).inverse(), atol=0.01)
    assert a.grad is not None and a.grad.isfinite().all() and a.grad.any()


# -- weights that are computed -----------------------------------------------------------------------------------------


class Softplus(nn.Module):
    """A parametrization of somebody's own; its inverse cancels."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dtype
        return torch.log(torch.expm1(torch.nn.functional.softplus(x) + 1e-3) + 1)

    def right_inverse(self, y: Tensor) -> Tensor:
        return y.clone()


def _own(module: nn.Linear) -> nn.Module:
    return parametrize.register_parametrization(module, 'weight', Softplus())


COMPUTED: dict[str, Callable[[nn.Linear], nn.Module]] = {
    'matrix_exp': lambda m: parametrizations.orthogonal(m, orthogonal_map='matrix_exp'),
    'cayley': lambda m: parametrizations.orthogonal(m, orthogonal_map='cayley'),
    'householder': lambda m: parametrizations.orthogonal(m, orthogonal_map='householder'),
    'no trivialization': lambda m: parametrizations.orthogonal(m, use_trivialization=False),
    'spectral_norm': parametrizations.spectral_norm,
    'weight_norm': parametrizations.weight_norm,
    'old spectral_norm': nn.utils.spectral_norm,
    'old weight_norm': nn.utils.weight_norm,
    'own': _own,
}


def computed(how: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), COMPUTED[how](nn.Linear(8, 8)), nn.Linear(8, 2)).to(device)


def train(
    how: str, level: str | None, api: str, device: torch.device
) -> tuple[nn.Module, list[Tensor], dict[str, Tensor]]:
    """Four steps; the model, the weight that each forward used, and the state dict."""
    model = computed(how, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wrapper = None
    if level is not None and api == 'functional':
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    elif level is not None:
        wrapper = AmpOptimWrapper(optimizer=optimizer, opt_level=level, loss_scale=1.0)
    x = torch.linspace(-1, 1, 32, device=device).reshape(4, 8)
    used: list[Tensor] = []
    model[1].register_forward_hook(lambda module, args, output: used.append(module.weight.detach().clone()))
    for _ in range(4):
        if wrapper is not None:
            with wrapper.optim_context(model):
                loss = model(x).float().square().mean()
            wrapper.update_params(loss)
            continue
        loss = model(x).float().square().mean()
        if level is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, used, {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.filterwarnings('ignore::FutureWarning')
@pytest.mark.parametrize('how', sorted(COMPUTED))
def test_computed_weights_train_as_in_float32(how: str, device: torch.device) -> None:
    _, expected, _ = train(how, None, '', device)
    start = computed(how, device).state_dict()
    for level in LEVELS:
        for api in ('functional', 'wrapper'):
            model, used, saved = train(how, level, api, device)
            casts = resolve(level).casts_model
            for one, other in zip(used, expected, strict=True):
                # as the module wants it, computed in float32 and rounded once
                assert one.dtype is (HALF[level] if casts and level in HALF else torch.float32), level
                bound = 0.02 if level in HALF else 1e-6
                assert torch.allclose(one.float(), other, atol=bound), (level, api)
            moved = [key for key in saved if not torch.equal(saved[key], start[key])]
            assert any(key.startswith('1.') for key in moved), (level, api)
            assert {value.dtype for value in saved.values()} == {torch.float32}
            # the state goes into a plain model and gives the same weight
            plain = computed(how, device)
            plain.load_state_dict(saved)
            assert all(torch.equal(saved[key], value) for key, value in plain.state_dict().items())
            x = torch.ones(1, 8, device=device)
            model.eval()(x)
            plain.eval()(x)
            assert torch.equal(model[1].weight, plain[1].weight.to(model[1].weight.dtype)), (level, api)
            if not how.startswith('old'):
                # torch cannot copy what its old hooks leave on a module
                copied = copy.deepcopy(model)
                copied(x)
                assert torch.equal(copied[1].weight.to(model[1].weight.dtype), model[1].weight), (level, api)
                assert all(torch.equal(saved[key], value) for key, value in copied.state_dict().items())


@pytest.mark.parametrize('level', LEVELS)
def test_a_parametrization_sees_float32(level: str, device: torch.device) -> None:
    model, _, _ = train('own', level, 'functional', device)
    assert model[1].parametrizations.weight[0].seen is torch.float32
    model(torch.ones(1, 8, device=device))
    with parametrize.cached():
        assert model(torch.ones(1, 8, device=device)).isfinite().all()


# -- arrays ------------------------------------------------------------------------------------------------------------


class Accuracy(nn.Module):
    """A head that computes an accuracy beside its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.arrays: list[np.ndarray] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        narrow = y.detach().cpu()
        self.arrays = [narrow.numpy(), np.asarray(narrow), np.array(narrow), y.numpy(force=True), narrow[0].__array__()]
        self.listed = narrow.tolist()
        self.wide = torch.ones(2).numpy(), torch.ones(2, dtype=torch.float64).numpy(), torch.arange(2).numpy()
        return y.sum()


@pytest.mark.parametrize('api', ['functional', 'wrapper'])
@pytest.mark.parametrize('level', LEVELS)
def test_arrays_are_float32_inside_of_a_forward(level: str, api: str, device: torch.device) -> None:
    model = Accuracy().to(device)
    x = torch.ones(2, 3, device=device)
    if api == 'functional':
        model = amp.initialize(model, opt_level=level, verbosity=0)
        model(x)
    else:
        wrapper = AmpOptimWrapper(optimizer=torch.optim.SGD(model.parameters(), 0.1), opt_level=level)
        with wrapper.optim_context(model):
            model(x)
    assert {array.dtype for array in model.arrays} == {np.dtype('float32')}
    assert np.array_equal(model.arrays[0], np.array(model.listed, dtype='float32'))
    assert [array.dtype.name for array in model.wide] == ['float32', 'float64', 'int64']
    # what needs no cast shares its memory, as ever
    assert not model.wide[0].flags.owndata
    # and outside of a forward nothing is changed
    assert 'numpy' not in vars(torch.Tensor)
    assert torch.ones(2, dtype=torch.float16).numpy().dtype == np.dtype('float16')
    with pytest.raises(TypeError, match='BFloat16'):
        torch.ones(2, dtype=torch.bfloat16).numpy()


def test_a_tensor_that_requires_a_gradient_has_no_array(device: torch.device) -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            return self.fc(x).numpy()

    for level in LEVELS:
        with pytest.raises((RuntimeError, TypeError), match=r'requires grad|convert cuda'):
            amp.initialize(Careless().to(device), opt_level=level, verbosity=0)(torch.ones(1, 3, device=device))
