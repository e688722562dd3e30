"""FP32 regions inside autocast, and that nothing stays open after exceptions."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_wrapper.autocast import regions, state
from amp_wrapper.autocast.op_set import OpSet
from amp_wrapper.casting.modules import module_device
from amp_wrapper.casting.region_hooks import (
    FORWARD,
    FP32,
    EnterRegion,
    LeaveRegion,
    autocast_context,
    put_region,
    run_in_fp32,
)

HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    yield
    left = regions.count()
    regions.unwind()
    assert left == 0


class Sees(nn.Module):
    """Remembers what arrived, and whether autocast was on."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.seen: list[tuple[torch.dtype, bool]] = []

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        self.seen.append((x.dtype, torch.is_autocast_enabled(x.device.type)))
        return {'scores': self.fc(x), 'labels': labels}


def region(gives_back: bool, device: torch.device) -> Sees:
    module = Sees().to(device)
    run_in_fp32(module, gives_back)
    return module


@pytest.mark.parametrize('dtype', HALVES, ids=str)
@pytest.mark.parametrize('gives_back', [True, False])
def test_region(gives_back: bool, dtype: torch.dtype, device: torch.device) -> None:
    module = region(gives_back, device)
    x = torch.ones(1, 2, device=device)
    labels = torch.tensor([70001], device=device)
    with torch.autocast(device.type, dtype):
        out = module(x.to(dtype), labels=labels)
        wide = module(x)
        assert torch.is_autocast_enabled(device.type) and module.fc(x).dtype is dtype
    assert module.seen == [(torch.float32, False)] * 2
    # a caller who came with FP32 gets FP32
    assert out['scores'].dtype is (dtype if gives_back else torch.float32) and wide['scores'].dtype is torch.float32
    assert out['labels'] is labels


def test_region_outside_autocast(device: torch.device) -> None:
    module = region(True, device)
    assert module(torch.ones(1, 2, device=device))['scores'].dtype is torch.float32
    assert module.seen == [(torch.float32, False)]


def test_nested_regions(device: torch.device) -> None:
    outer, inner = region(True, device), region(True, device)
    outer.inner = inner
    outer.register_forward_hook(lambda module, args, output: inner(args[0].bfloat16()))
    with torch.autocast(device.type, torch.bfloat16):
        out = outer(torch.ones(1, 2, device=device, dtype=torch.bfloat16))
        assert out['scores'].dtype is torch.bfloat16 and torch.is_autocast_enabled(device.type)
    assert inner.seen == [(torch.float32, False)]


@pytest.mark.parametrize('where', ['forward', 'pre-hook', 'earlier pre-hook', 'hook'])
def test_exceptions_close_the_region(where: str, device: torch.device) -> None:
    module = region(True, device)

    def fail(*args: Any) -> None:
        raise RuntimeError('on purpose')

    if where == 'forward':
        module.fc.register_forward_pre_hook(fail)
    elif where == 'hook':
        module.register_forward_hook(fail)
    else:
        module.register_forward_pre_hook(fail, prepend=where == 'earlier pre-hook')
    with torch.autocast(device.type, torch.bfloat16):
        with pytest.raises(RuntimeError, match='on purpose'):
            module(torch.ones(1, 2, device=device))
        assert torch.is_autocast_enabled(device.type)
    assert regions.count() == 0


@pytest.mark.parametrize('error', [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_closes_the_region(error: type[BaseException], device: torch.device) -> None:
    """torch runs hooks after an Exception only, where nothing of ours is open."""
    module = region(True, device)
    root = nn.Sequential(module)
    put_region(root, EnterRegion(FORWARD, OpSet()), LeaveRegion(FORWARD))

    def interrupt(*args: Any) -> None:
        raise error

    module.fc.register_forward_pre_hook(interrupt)
    with torch.autocast(device.type, torch.bfloat16):
        for called in (root, module):
            with pytest.raises(error):
                called(torch.ones(1, 2, device=device))
            assert torch.is_autocast_enabled(device.type) and regions.count() == 0
    assert not hasattr(nn.modules.module, 'Exception')


def test_a_pre_hook_of_somebody_else_that_fails_first(device: torch.device) -> None:
    """The hook that closes runs all the same; it must not close what another module opened."""
    inner = nn.Linear(2, 2).to(device)
    outer = nn.Sequential(nn.Identity()).to(device)
    seen: list[tuple[int, bool]] = []
    for module in (inner, outer):
        put_region(module, EnterRegion(FORWARD, OpSet()), LeaveRegion(FORWARD))
        run_in_fp32(module, True)

    def fail(*args: Any) -> None:
        raise RuntimeError('on purpose')

    inner.register_forward_pre_hook(fail, prepend=True)

    def use_inner(*args: Any) -> None:
        with pytest.raises(RuntimeError, match='on purpose'):
            inner(torch.ones(1, 2, device=device))
        seen.append((state.depth(), torch.is_autocast_enabled(device.type)))

    outer[0].register_forward_hook(use_inner)
    with torch.autocast(device.type, torch.bfloat16):
        outer(torch.ones(1, 2, device=device))
    assert seen == [(1, False)] and regions.count() == 0


@pytest.mark.parametrize('hook', ['region', 'pass'])
def test_a_later_pre_hook_that_fails(hook: str, device: torch.device) -> None:
    """Ours come first, so that the hook that closes finds what it expects."""
    module = nn.Linear(2, 2).to(device)

    def fail(*args: Any) -> None:
        raise RuntimeError('on purpose')

    module.register_forward_pre_hook(fail)
    if hook == 'region':
        run_in_fp32(module, True)
    else:
        put_region(module, EnterRegion(FORWARD, OpSet()), LeaveRegion(FORWARD))
    with torch.autocast(device.type, torch.bfloat16):
        with pytest.raises(RuntimeError, match='on purpose'):
            module(torch.ones(1, 2, device=device))
        assert regions.count() == 0 and torch.is_autocast_enabled(device.type)


def test_tensors_without_autocast(device: torch.device) -> None:
    """Shapes and FLOPs are counted on the meta device."""
    module = nn.Linear(2, 2, device='meta')
    run_in_fp32(module, True)
    assert module(torch.ones(1, 2, device='meta', dtype=torch.float16)).dtype is torch.float16


def test_hooks_can_be_pickled() -> None:
    for hook in (
        EnterRegion(FP32),
        LeaveRegion(FP32, gives_back=True),
        EnterRegion(FORWARD, OpSet()),
        LeaveRegion(FORWARD),
    ):
        again = pickle.loads(pickle.dumps(hook))
        assert type(again) is type(hook)
    assert (
        pickle.loads(pickle.dumps(EnterRegion(FORWARD, OpSet(('torch.softmax',))))).ops.extra[0].name == 'torch.softmax'
    )
    assert pickle.loads(pickle.dumps(LeaveRegion(FP32, gives_back=True))).gives_back is True


def test_autocast_context_of_nothing(device: torch.device) -> None:
    assert autocast_context(device.type, None) is None
    assert autocast_context('meta', torch.float16) is None
    context = autocast_context(device.type, torch.float16)
    assert context is not None
    with context:
        assert torch.get_autocast_dtype(device.type) is torch.float16 and torch.is_autocast_enabled(device.type)


def test_module_device(device: torch.device) -> None:
    assert module_device(nn.Linear(1, 1).to(device)).type == device.type
    assert module_device(nn.BatchNorm1d(1, affine=False).to(device)).type == device.type
    assert module_device(nn.ReLU()) == torch.device('cpu')
