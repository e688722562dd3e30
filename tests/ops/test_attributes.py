"""Walks through lists of tensors: the compiled ones and those in Python tell and do the same."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_wrapper.ops import attributes, loader


class Told(Tensor):
    """A subclass whose attributes are its own."""

    @property
    def grad(self) -> Any:  # type: ignore[override]
        return self.__dict__.get('kept')

    @grad.setter
    def grad(self, value: Any) -> None:
        self.__dict__['kept'] = value

    @property
    def _version(self) -> int:  # type: ignore[override]
        return 77


@pytest.fixture(params=['python', 'compiled'])
def walks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A fresh copy of the module that has not chosen yet."""
    if request.param == 'compiled' and loader.library().module is None:
        pytest.skip('the ops were not built')
    if request.param == 'python':
        monkeypatch.setattr(loader, 'library', lambda: loader.Library(module=None))
    spec = importlib.util.find_spec(attributes.__name__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors(device: torch.device) -> list[Tensor]:
    """Plain ones, a parameter, and a subclass."""
    torch.manual_seed(0)
    plain = torch.randn(3, device=device, requires_grad=True)
    return [plain, nn.Parameter(torch.randn(2, 2, device=device)), torch.randn(2, device=device).as_subclass(Told)]


def test_the_chosen_function_is_compiled_where_there_is_a_library(walks: ModuleType) -> None:
    name = ['versions', 'addresses', 'gradients', 'set_gradients', 'any_requires_grad', 'float32_like']
    walks.versions([]), walks.addresses([]), walks.gradients([]), walks.set_gradients([], None)
    walks.any_requires_grad([]), walks.float32_like([])
    compiled = loader.library().module
    for each in name:
        assert (getattr(walks, each) is getattr(compiled, each, None)) == (compiled is not None), each


def test_versions_and_addresses(walks: ModuleType, device: torch.device) -> None:
    found = tensors(device)
    with torch.no_grad():
        found[0].add_(1).add_(1)
    assert list(walks.numbers_of(walks.versions([*found, None]))) == [2, 0, 77, -1]
    assert list(walks.numbers_of(walks.addresses([*found, None]))) == [*(t.data_ptr() for t in found), -1]
    before = walks.versions(found)
    assert walks.versions(tuple(found)) == before
    with torch.no_grad():
        found[1].zero_()
    assert walks.versions(found) != before


def test_gradients_are_set_read_and_cleared(walks: ModuleType, device: torch.device) -> None:
    found = tensors(device)
    given = [torch.ones_like(found[0].detach()), None, torch.ones(2, device=device)]
    walks.set_gradients(found, given)
    assert [t.grad is g for t, g in zip(found, given)] == [True] * 3
    assert [one is other for one, other in zip(walks.gradients(found), given)] == [True] * 3
    walks.set_gradients(tuple(found), None)
    assert walks.gradients(found) == [None] * 3


def test_another_number_of_gradients_sets_none(walks: ModuleType, device: torch.device) -> None:
    found = tensors(device)
    with pytest.raises(ValueError, match='1 gradients for 3 tensors'):
        walks.set_gradients(found, [torch.ones(3, device=device)])
    assert walks.gradients(found) == [None] * 3


def test_gradients_belong_to_their_parameter_afterwards(walks: ModuleType, device: torch.device) -> None:
    """The next backward pass adds to what was set."""
    parameter = nn.Parameter(torch.ones(2, device=device))
    walks.set_gradients([parameter], [torch.full((2,), 3.0, device=device)])
    (2 * parameter).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [5.0, 5.0]


def test_any_requires_grad(walks: ModuleType, device: torch.device) -> None:
    plain = torch.ones(2, device=device)
    assert not walks.any_requires_grad([])
    assert not walks.any_requires_grad([None, plain])
    assert walks.any_requires_grad([None, plain, torch.ones(2, device=device, requires_grad=True)])


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_float32_like(walks: ModuleType, device: torch.device, dtype: torch.dtype) -> None:
    layouts = [
        torch.ones(2, 3, dtype=dtype, device=device),
        torch.ones(2, 3, dtype=dtype, device=device).t(),
        torch.ones(2, 3, 4, 4, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last),
        torch.ones((), dtype=dtype, device=device),
        torch.ones(0, dtype=dtype, device=device),
    ]
    for given, made in zip(layouts, walks.float32_like(layouts)):
        want = torch.empty_like(given, dtype=torch.float32)
        assert (made.dtype, made.shape, made.stride()) == (torch.float32, want.shape, want.stride())
        assert made.device == want.device
        assert not made.requires_grad
        if made.numel():
            assert made.data_ptr() != given.data_ptr()
    assert walks.float32_like([torch.ones(2, requires_grad=True, device=device)])[0].requires_grad is False


def test_same_and_unchanged(walks: ModuleType, device: torch.device) -> None:
    one, other = torch.ones(2, device=device), torch.ones(2, device=device)
    assert walks.same([one, other], [one, other])
    assert not walks.same([one, other], [other, one])
    assert not walks.same([one], [one, one])
    state = {'step': one}
    assert walks.unchanged([([one], [one])], [([state], 'step', [one])])
    assert not walks.unchanged([([one], [other])])
    assert not walks.unchanged([], [([state], 'step', [other])])
    assert not walks.unchanged([], [([state], 'missing', [other])])


def test_fingerprints(walks: ModuleType, device: torch.device) -> None:
    """Equal where shape, dtype, layout, device and what is missing are."""
    plain = torch.ones(2, 3, device=device)
    two, sparse = [plain, plain], plain.to_sparse()
    for are_own in (True, False):
        known = walks.fingerprints(two, [plain, None], are_own)
        assert walks.fingerprints([torch.zeros_like(plain), plain], [torch.zeros_like(plain), None], are_own) == known
        for others in ([sparse, None], [None, plain], two):
            assert walks.fingerprints(two, others, are_own) != known
    known = walks.fingerprints(two, two, False)
    for other in (plain.t(), plain.double()):
        assert walks.fingerprints([plain, other], two, False) != known
        assert walks.fingerprints(two, [plain, other], False) != known
        # torch lets no gradient be other than its tensor
        assert walks.fingerprints([plain, other], [plain, other], True) != walks.fingerprints(two, two, True)
