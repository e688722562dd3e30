"""Modules that stay in FP32 inside autocast, and models that change after they were attached."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_cast import CAST_LEVELS, cast, dtypes, hook_count

from amp_wrapper.autocast import state
from amp_wrapper.casting.region_hooks import FORWARD, region_on
from amp_wrapper.errors import AmpAttachError, AmpConfigError

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


# -- FP32 at the levels that autocast ------------------------------------------------------------------------------

AUTOCAST_LEVELS = {'O1': F16, 'O4': BF16}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        out = self.fc(x)
        self.seen.append(out.dtype)
        return out


class Sum(nn.Module):
    """A loss by its name alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


class SumLoss(Sum): ...


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head, self.plain, self.loss = nn.Linear(2, 4), Head(), Sum(), SumLoss()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        out = self.head(self.backbone(x))
        return out, self.plain(out), self.loss(out)


@pytest.mark.parametrize('level', AUTOCAST_LEVELS)
@pytest.mark.parametrize('keep', [None, ['head'], ['Head'], ['he*'], [Head]], ids=str)
def test_keep_fp32_inside_autocast(keep: Any, level: str, device: torch.device) -> None:
    model = Classifier().to(device)
    handle = cast(model, level, keep_fp32=keep)
    assert handle.parameters == {} and set(dtypes(model).values()) == {F32}
    dtype = AUTOCAST_LEVELS[level]
    with torch.autocast(device.type, dtype):
        out, plain, loss = model(torch.ones(1, 2, device=device))
    assert model.head.seen == [dtype if keep is None else F32]
    assert out.dtype is dtype and plain.dtype is dtype and loss.dtype is F32
    handle.remove()
    assert hook_count(model) == 0


@pytest.mark.parametrize('level', ['O0', 'O1', 'O4', 'O2'])
def test_pattern_without_a_match_is_an_error_at_every_level(level: str, device: torch.device) -> None:
    model = Classifier().to(device)
    with pytest.raises(AmpConfigError, match=r"keep_fp32='headd'.*did you mean 'head'"):
        cast(model, level, keep_fp32=['headd'])
    assert hook_count(model) == 0


@pytest.mark.parametrize('level', [*AUTOCAST_LEVELS, *CAST_LEVELS])
def test_module_class_in_fp32_ops(level: str, device: torch.device) -> None:
    model = Classifier().to(device)
    cast(model, level, fp32_ops=[f'{__name__}.Head'])
    with torch.autocast(device.type, AUTOCAST_LEVELS.get(level, F16), enabled=level in AUTOCAST_LEVELS):
        out = model(torch.ones(1, 2, device=device))[0]
    assert model.head.seen == [F32] and model.head.fc.weight.dtype is F32
    assert out.dtype is AUTOCAST_LEVELS.get(level, F32)


@pytest.mark.parametrize('level', AUTOCAST_LEVELS)
def test_a_second_wrapper_finds_autocast_hooks_in_place(level: str, device: torch.device) -> None:
    model = Classifier().to(device)
    cast(model, level)
    count = hook_count(model)
    cast(model, level)
    assert hook_count(model) == count
    # a level that casts, for a test after an O1 training say, takes their place
    handle = cast(model, 'O2')
    assert set(dtypes(model).values()) == {F16}
    with pytest.raises(AmpAttachError, match='already carries'):
        cast(model, 'O2')
    handle.remove()
    assert hook_count(model) == 0


@pytest.mark.parametrize('level', AUTOCAST_LEVELS)
def test_names_of_a_second_wrapper_are_added(level: str, device: torch.device) -> None:
    model = Classifier().to(device)
    cast(model, level, fp32_ops=['torch.softmax'])
    cast(model, level, fp32_ops=['torch.cumsum'])
    hook = region_on(model, FORWARD)
    assert hook is not None and hook.ops is not None
    assert {op.name for op in hook.ops.extra} == {'torch.softmax', 'torch.cumsum'}


# -- modules that come later ---------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', CAST_LEVELS)
def test_changes_that_are_harmless(level: str, device: torch.device) -> None:
    model = Classifier().to(device)
    model.bn = nn.BatchNorm1d(4).to(device)
    model.layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    cast(model, level)
    model.act = nn.ReLU()
    model.again = model.head
    model.head = model.head
    model.gone = None
    nn.Sequential(model)
    del model.act
    # containers of what is there already, and layers converted with their tensors
    model.layers = model.layers[:1]
    model.sequence = nn.Sequential(model.backbone, model.head)
    model.backbone = torch.compile(model.backbone, backend='eager')
    model.bn = nn.SyncBatchNorm.convert_sync_batchnorm(model.bn)
    copied = copy.deepcopy(model)
    copied.late = nn.Linear(1, 1)
    # a container that came late is watched too
    model.layers.append(SumLoss())
    assert hook_count(model.layers[-1]) > 0


def test_modules_that_left_are_free_after_removal(device: torch.device) -> None:
    model = Classifier().to(device)
    handle = cast(model)
    head = model.head
    del model.head
    handle.remove()
    head.late = SumLoss()
    assert 'late' in dict(head.named_children())
    assert hook_count(head.late) == 0


@pytest.mark.parametrize('level', [*CAST_LEVELS, *AUTOCAST_LEVELS])
def test_a_loss_that_is_switched_runs_in_fp32(level: str, device: torch.device) -> None:
    """mmpretrain's SwitchRecipeHook puts another loss into the head in the middle of a training."""
    model = Classifier().to(device)
    handle = cast(model, level)

    class LaterLoss(SumLoss): ...

    model.loss = LaterLoss()
    dtype = {**CAST_LEVELS, **AUTOCAST_LEVELS}[level]
    with torch.autocast(device.type, dtype, enabled=level in AUTOCAST_LEVELS):
        assert model.loss(torch.full((70_000,), 1.0, device=device, dtype=dtype)).item() == 70_000
    handle.remove()
    assert hook_count(model) == 0


class Pool(nn.Module):
    """Like mmdetection's roi heads: entered by a method, never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 4)

    def pool(self, x: Tensor) -> Tensor:
        return self.fc(x)


class TwoStage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.roi_head = Pool()
        self.layers = nn.ModuleList([Head()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.roi_head.pool(x)
        self.seen = x.dtype
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize('level', [*CAST_LEVELS, *AUTOCAST_LEVELS])
def test_kept_modules_that_are_never_called_themselves(level: str, device: torch.device) -> None:
    model = TwoStage().to(device)
    cast(model, level, keep_fp32=['roi_head', 'layers'])
    with torch.autocast(device.type, AUTOCAST_LEVELS.get(level, F16), enabled=level in AUTOCAST_LEVELS):
        model(torch.ones(1, 2, device=device))
    assert model.seen is F32 and model.layers[0].seen == [F32]


@pytest.mark.parametrize('level', ['O0', *AUTOCAST_LEVELS, *CAST_LEVELS])
def test_modules_may_join(level: str, device: torch.device) -> None:
    """They stay as they come; their types are the script's affair."""
    model = Classifier().to(device)
    handle = cast(model, level)
    model.late = nn.Sequential(nn.Linear(1, 1), SumLoss())
    assert model.late[0].weight.dtype is F32
    assert hook_count(model.late[0]) == 0
    model.late.half()
    assert model.late[0].weight.dtype is F16
    handle.remove()
    model.late.append(SumLoss())
    assert hook_count(model.late) == 0


@pytest.mark.parametrize('level', ['O1', 'O2'])
def test_named_class_that_the_model_does_not_have(level: str, device: torch.device) -> None:
    model = Classifier().to(device)
    with pytest.raises(AmpConfigError, match=r"fp32_ops='torch.nn.GroupNorm' matches no module"):
        cast(model, level, fp32_ops=['torch.nn.GroupNorm'])
    assert hook_count(model) == 0


@pytest.mark.parametrize('level', AUTOCAST_LEVELS)
@pytest.mark.parametrize('training', [True, False])
def test_predictions_under_somebody_elses_autocast(level: str, training: bool, device: torch.device) -> None:
    """ValLoop(fp16=True) autocasts validation; what leaves the model is FP32 all the same."""
    model = Classifier().to(device).train(training)
    cast(model, level)
    with torch.autocast(device.type, AUTOCAST_LEVELS[level]):
        out = model(torch.ones(1, 2, device=device))[0]
    assert out.dtype is (AUTOCAST_LEVELS[level] if training else F32)


@pytest.mark.parametrize('level', [*AUTOCAST_LEVELS, 'O2'])
def test_other_peoples_pre_hooks_run_inside_the_pass(level: str, device: torch.device) -> None:
    model = Classifier().to(device)
    seen = []
    model.register_forward_pre_hook(lambda *args: seen.append(state.depth()))
    model.head.register_forward_pre_hook(lambda *args: seen.append(torch.is_autocast_enabled(device.type)))
    cast(model, level, keep_fp32=['head'])
    with torch.autocast(device.type, AUTOCAST_LEVELS.get(level, F16), enabled=level in AUTOCAST_LEVELS):
        model(torch.ones(1, 2, device=device))
    assert seen == [1, False]
