"""Which tensors of a model are cast, which stay in FP32, and what a refusal leaves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from toy_cast import CAST_LEVELS, WithLoss, cast, dtypes, hook_count, images, net

from amp_wrapper.casting.plan import CastPlan
from amp_wrapper.errors import AmpAttachError, AmpConfigError
from amp_wrapper.policy import resolve

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class Sees(nn.Module):
    """Asserts the type that arrives, and has a weight of its own."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.expected = dtype
        self.weight = nn.Parameter(torch.full((3,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        assert self.expected is None or x.dtype is self.expected
        return x * self.weight


# -- which tensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(('level', 'dtype'), CAST_LEVELS.items())
def test_parameters_and_buffers(level: str, dtype: torch.dtype, device: torch.device) -> None:
    model = net(device)
    cast(model, level)
    kept = level != 'O3'
    for name, found in dtypes(model).items():
        if name == 'bn.num_batches_tracked':
            assert found is torch.int64
        else:
            assert found is (F32 if kept and name.startswith('bn.') else dtype), name
    assert model(images(device)).dtype is F32


@pytest.mark.parametrize('override', [True, False])
@pytest.mark.parametrize('affine', [True, False])
@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('dtype', [F16, BF16], ids=str)
def test_batchnorm(override: bool, affine: bool, training: bool, dtype: torch.dtype, device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=affine), Sees(dtype)).to(device).train(training)
    model[2].weight = nn.Parameter(torch.ones(4, device=device))
    cast(model, 'O2', keep_batchnorm_fp32=override, cast_model_type=dtype)
    want = F32 if override else dtype
    assert model[1].running_mean.dtype is want and (not affine or model[1].weight.dtype is want)
    assert model(torch.randn(4, 3, device=device)).dtype is F32
    assert int(model[1].num_batches_tracked) == int(training)


def test_sync_batchnorm_and_its_namesake_stay_fp32(device: torch.device) -> None:
    namesake = type('SyncBatchNorm', (nn.BatchNorm1d,), {})
    model = nn.Sequential(nn.SyncBatchNorm(2), namesake(2), nn.LayerNorm(2)).to(device)
    cast(model)
    assert model[0].weight.dtype is model[1].weight.dtype is F32 and model[2].weight.dtype is F16


@pytest.mark.parametrize('level', CAST_LEVELS)
@pytest.mark.parametrize('dtype', [torch.int64, torch.bool, torch.complex64, torch.float64], ids=str)
def test_other_dtypes_are_left_alone(level: str, dtype: torch.dtype, device: torch.device) -> None:
    model = nn.Linear(2, 2).to(device)
    model.register_buffer('other', torch.tensor([1, 70001], device=device).to(dtype))
    if dtype.is_floating_point or dtype.is_complex:
        model.extra = nn.Parameter(torch.ones(1, dtype=dtype, device=device))
    kept = model.other
    cast(model, level)
    assert model.other is kept and model.other.dtype is dtype
    assert not hasattr(model, 'extra') or model.extra.dtype is dtype
    assert model.state_dict()['other'].dtype is dtype


def test_classes_to_leave_are_not_touched(device: torch.device) -> None:
    class Preprocessor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer('mean', torch.tensor([123.675]))
            self.inner = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            assert x.dtype is F32
            return self.inner(x)

    model = nn.ModuleDict({'pre': Preprocessor(), 'fc': nn.Linear(1, 1)}).to(device)
    cast(model, leave=(Preprocessor,))
    assert set(dtypes(model['pre']).values()) == {F32} and hook_count(model['pre']) == 0
    assert model['fc'].weight.dtype is F16
    assert model['pre'](torch.ones(1, 1, device=device)).dtype is F32


@pytest.mark.parametrize('custom', [True, False])
def test_averaged_models_inside_stay_fp32(custom: bool, device: torch.device) -> None:
    class Teacher(nn.Module):
        def __init__(self, student: nn.Module) -> None:
            super().__init__()
            self.module = copy.deepcopy(student)

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Linear(3, 3)
            self.teacher = Teacher(self.student) if custom else AveragedModel(self.student)

        def forward(self, x: Tensor) -> Tensor:
            seen = self.teacher(x)
            assert x.dtype is seen.dtype is self.student(x).dtype is F16
            return seen

    model = Student().to(device)
    cast(model, average=(Teacher,) if custom else ())
    assert model.student.weight.dtype is F16 and model.teacher.module.weight.dtype is F32
    before = model.teacher.module.weight.clone()
    assert model(torch.ones(2, 3, device=device)).dtype is F32
    with torch.no_grad():
        model.teacher.module.weight.lerp_(model.student.weight.float() + 1, 2e-4)
    assert not torch.equal(model.teacher.module.weight, before)


# -- keep_fp32 ----------------------------------------------------------------------------------------------------


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), Sees(None))
        self.head = nn.ModuleDict({'cls': nn.Linear(3, 2), 'reg': nn.Linear(3, 2)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        assert x.dtype is F16
        y, z = self.head['cls'](x), self.head['reg'](x)
        assert y.dtype is z.dtype is F16
        return y + z


@pytest.mark.parametrize(
    ('keep', 'kept'),
    [
        (nn.LayerNorm, {'body.1'}),
        ('LayerNorm', {'body.1'}),
        ([nn.LayerNorm, 'Sees'], {'body.1', 'body.2'}),
        ('head.*', {'head.cls', 'head.reg'}),
        ('head.cls', {'head.cls'}),
        ('*.reg', {'head.reg'}),
        ('body', {'body.0', 'body.1', 'body.2'}),
        (['body', 'body.1'], {'body.0', 'body.1', 'body.2'}),
        ('body.[01]', {'body.0', 'body.1'}),
        (nn.Linear, {'body.0', 'head.cls', 'head.reg'}),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, set) else str(value),
)
def test_keep_fp32(keep: Any, kept: set[str], device: torch.device) -> None:
    model = Deep().to(device)
    cast(model, keep_fp32=keep)
    found = {name.rpartition('.')[0] for name, dtype in dtypes(model).items() if dtype is F32}
    assert found == kept
    for name in kept:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda module, args: check_fp32(args))
    assert model(torch.ones(2, 3, device=device)).dtype is F32


def check_fp32(args: tuple[Tensor, ...]) -> None:
    assert args[0].dtype is F32


@pytest.mark.parametrize(
    ('keep', 'words'),
    [
        ('heads.*', ["'heads.*'", 'did you mean', 'body']),
        ('LayerNrm', ["'LayerNrm'", "did you mean 'LayerNorm'?"]),
        ('head.clz', ["did you mean 'head.cls'?"]),
        (nn.GRU, ["'GRU'", 'matches no module']),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, set) else str(value),
)
def test_pattern_without_a_match_changes_nothing(keep: Any, words: list[str], device: torch.device) -> None:
    model = Deep().to(device)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(AmpConfigError) as caught:
        cast(model, keep_fp32=['head.*', keep])
    assert len(caught.value.problems) == 1
    for word in words:
        assert word in str(caught.value)
    assert set(dtypes(model).values()) == {F32} and hook_count(model) == 0
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_pattern_on_the_second_name_of_a_shared_module(device: torch.device) -> None:
    model = nn.Module()
    model.body = nn.Linear(2, 2)
    model.head = model.body
    cast(model.to(device), keep_fp32='head')
    assert model.body.weight.dtype is F32


# -- losses -------------------------------------------------------------------------------------------------------


class FocalLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype is F32 and self.alpha.dtype is F32
        return (x * self.alpha).sum()


@pytest.mark.parametrize(
    'loss',
    [
        FocalLoss(),
        nn.Sequential(FocalLoss()),
        lambda x: nn.L1Loss(reduction='sum')(x, torch.zeros_like(x)),
        lambda x: F.l1_loss(x, torch.zeros_like(x), reduction='sum'),
        lambda x: F.smooth_l1_loss(x * 2, torch.zeros_like(x), reduction='sum') / 2,
    ],
    ids=['module', 'nested', 'made-inside', 'functional', 'smooth'],
)
def test_losses_stay_fp32_where_float16_would_overflow(loss: Any, device: torch.device) -> None:
    model = WithLoss(loss).to(device)
    cast(model)
    x = torch.full((50_000, 2), 0.9, device=device)
    assert torch.isinf(x.half().sum(dtype=F16))
    result = model(x)
    assert result.dtype is F32 and 50_000 < result.item() < 100_000


def test_loss_module_of_torch_is_kept(device: torch.device) -> None:
    model = nn.ModuleDict({'fc': nn.Linear(2, 2), 'ce': nn.CrossEntropyLoss(weight=torch.tensor([0.1, 0.9]))}).to(
        device
    )
    cast(model)
    assert model['ce'].weight.dtype is F32
    score = torch.ones(2, 2, device=device, dtype=F16)
    assert model['ce'](score, torch.tensor([0, 1], device=device)).dtype is F32


def test_a_root_whose_class_is_named_loss_is_cast(device: torch.device) -> None:
    model = type('DetectorWithLoss', (nn.Linear,), {})(2, 2).to(device)
    cast(model)
    assert model.weight.dtype is F16


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('spoil', 'words'),
    [
        (lambda m: m.half(), ['16-bit already', 'conv.weight', 'float16']),
        (lambda m: m.head.bfloat16(), ['16-bit already', 'head.weight', 'bfloat16']),
        (lambda m: cast(m), ['already carries the casts']),
        (lambda m: cast(m.head), ['already carries the casts']),
        (lambda m: setattr(m, 'head', nn.LazyLinear(3)), ['head.weight', 'lazy']),
    ],
    ids=['half', 'part', 'cast', 'cast-part', 'lazy'],
)
@pytest.mark.parametrize('level', ['O0', 'O2', 'O3', 'O5'])
def test_refusals_change_nothing(spoil: Any, words: list[str], level: str, device: torch.device) -> None:
    model = net(device)
    spoil(model)
    before, hooks = dtypes(model), hook_count(model)
    with pytest.raises(AmpAttachError) as caught:
        CastPlan([('', model)], resolve(level))
    for word in words:
        assert word in str(caught.value)
    assert dtypes(model) == before and hook_count(model) == hooks
