"""Which tensors of a model become 16-bit, which stay FP32, and the types that each module sees."""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forwards import CAST, DOORS, HALF, LEVELS, PER_OP, prepared
from mmengine.model import ExponentialMovingAverage
from pairs import pairs
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from amp_wrapper import (
    AmpAttachError,
    AmpConfigError,
    AmpOptimWrapper,
    NonfiniteError,
    NonfiniteHook,
    amp,
    nonfinite_watch,
)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
X = torch.linspace(-1, 1, 12).reshape(4, 3)


def initialized(model: nn.Module, level: str = 'O5', **options: Any) -> Any:
    return amp.initialize(model, opt_level=level, **{'verbosity': 0, **options})


def note_types(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """The types of the input and the output of each module, as its forward sees them."""
    seen = {}
    for name, module in model.named_modules():

        def forward(x: Tensor, name: str = name, call: Callable[[Tensor], Tensor] = module.forward) -> Tensor:
            result = call(x)
            seen[name] = x.dtype, result.dtype
            return result

        module.forward = forward  # type: ignore[method-assign]
    return seen


# -- which tensors --------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A layer, BatchNorm, and a layer that is given FP32 numbers which the forward made."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.register_buffer('mean', torch.tensor([0.1, 0.2, 0.3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bn(self.stem(x)).relu() + torch.zeros(1, 4)) + self.mean


@pairs(level=LEVELS, door=DOORS, training=[True, False])
def test_types_of_tensors_and_modules(level: str, door: str, training: bool) -> None:
    model = Net().train(training)
    seen = note_types(model)
    call = prepared(model, level, door)
    half, is_cast = HALF.get(level, F32), level in CAST
    for dtype in (F32, F16, BF16) if is_cast or level == 'O0' else (F32,):
        # the wrapper leaves losses of O1 and O4 to mmengine, which makes them FP32
        own = half if level in PER_OP and door == 'wrapper' and training else F32
        assert call(X.to(dtype)).dtype is own
    assert seen['stem'] == seen['head'] == (half if is_cast else F32, half)
    assert int(model.bn.num_batches_tracked) == training * (3 if is_cast or level == 'O0' else 1)
    weight, norm = half if is_cast else F32, F16 if level == 'O3' else F32
    assert model.stem.weight.dtype is model.head.bias.dtype is model.mean.dtype is weight
    assert model.bn.weight.dtype is model.bn.running_mean.dtype is norm
    if is_cast:
        # parts may be called by themselves
        assert model.head(model.stem(X)).dtype is half and call(X).dtype is F32


@pytest.mark.parametrize('level', CAST)
def test_outputs_have_the_type_that_is_asked_for(level: str) -> None:
    for outputs in (torch.float64, F16, BF16):
        assert initialized(Net(), level, cast_model_outputs=outputs)(X).dtype is outputs


def test_other_types_are_left_alone() -> None:
    for level in CAST:
        for dtype in (torch.int64, torch.bool, torch.complex64, torch.float64):
            model = nn.Linear(2, 2)
            model.register_buffer('other', torch.tensor([1, 70001]).to(dtype))
            model.extra = nn.Parameter(torch.ones(1).to(dtype), requires_grad=False)
            kept = model.other
            initialized(model, level)
            assert model.other is kept and model.state_dict()['other'].dtype is dtype
            assert model.extra.dtype is dtype and model.weight.dtype is HALF[level]


def test_batchnorm() -> None:
    for keeps in (True, False):
        for level in ('O2', 'O5'):
            for options, seen_by_norm in (({}, HALF[level]), ({'keep_fp32': ['1']}, F32)):
                model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
                seen = note_types(model)
                initialized(model, level, keep_batchnorm_fp32=keeps, **options)
                assert model(X).dtype is model.eval()(X).dtype is F32
                want = F32 if keeps or options else HALF[level]
                assert model[1].running_mean.dtype is model[1].weight.dtype is want
                # one that is named gets FP32
                assert seen['1'][0] is seen_by_norm and seen['2'] == (HALF[level],) * 2
    namesake = type('SyncBatchNorm', (nn.BatchNorm1d,), {})
    model = initialized(nn.Sequential(nn.SyncBatchNorm(2), namesake(2), nn.LayerNorm(2)), 'O2')
    assert [module.weight.dtype for module in model] == [F32, F32, F16]


@pytest.mark.parametrize('level', LEVELS[:3] + LEVELS[4:])
def test_cast_model_type_false_changes_no_type(level: str) -> None:
    model = nn.Linear(2, 2).double()
    initialized(model, level, cast_model_type=False)
    assert model(torch.ones(1, 2, dtype=torch.float64)).dtype is model.weight.dtype is torch.float64


@pytest.mark.parametrize('order', [1, -1])
def test_parameter_that_is_shared_with_a_kept_module_stays_float32(order: int) -> None:
    """A decoder tied to an embedding, whichever comes first."""
    for bias in (False, True):
        for keep, dtype in (([nn.Embedding], F32), (None, BF16)):
            parts = {'embed': nn.Embedding(5, 3), 'decode': nn.Linear(3, 5, bias=bias)}
            parts['decode'].weight = parts['embed'].weight
            model = initialized(nn.ModuleDict(list(parts.items())[::order]), keep_fp32=keep)
            assert model['embed'].weight is model['decode'].weight and model['embed'].weight.dtype is dtype
            model['decode'](model['embed'](torch.tensor([1, 2])))


@pytest.mark.parametrize('level', ['O2', 'O3', 'O5', 'O1'])
def test_models_that_are_refused_stay_as_they_are(level: str) -> None:
    for change in (
        lambda m: initialized(m, 'O2'),
        lambda m: initialized(m.head, 'O2'),
        lambda m: setattr(m, 'head', nn.LazyLinear(3)),
    ):
        model = Net()
        change(model)
        before = [p.dtype for p in model.parameters()]
        with pytest.raises(AmpAttachError, match=r'casts already|already carries|lazy'):
            initialized(model, level)
        assert [p.dtype for p in model.parameters()] == before


# -- modules that stay FP32 -----------------------------------------------------------------------------------------------


class Tail(nn.Linear): ...


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), Tail(3, 3))
        self.head = nn.ModuleDict({'cls': nn.Linear(3, 2), 'reg': nn.Linear(3, 2)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        self.given = [self.head[name](x).dtype for name in self.head]
        return self.head['cls'](x)


KEPT: dict[str, tuple[dict[str, Any], set[str]]] = {
    'class': (dict(keep_fp32=nn.LayerNorm), {'body.1'}),
    'class name': (dict(keep_fp32='LayerNorm'), {'body.1'}),
    'star': (dict(keep_fp32='head.*'), {'head.cls', 'head.reg'}),
    'name': (dict(keep_fp32='head.cls'), {'head.cls'}),
    'container': (dict(keep_fp32='body'), {'body.0', 'body.1', 'body.2'}),
    'container that is never called': (dict(keep_fp32='head'), {'head.cls', 'head.reg'}),
    'fp32_ops': (dict(fp32_ops=[Tail]), {'body.2'}),
    'nothing': ({}, set()),
}


@pairs(kept=KEPT, level=list(HALF), door=DOORS)
def test_kept_modules_compute_in_float32(kept: str, level: str, door: str) -> None:
    options, names = KEPT[kept]
    model = Deep()
    seen = note_types(model)
    result = prepared(model, level, door, **options)(X)
    half = HALF[level]
    for name in ('body.0', 'body.1', 'body.2', 'head.cls', 'head.reg'):
        if name in names:
            assert seen[name] == (F32, F32), name
        elif level in CAST or name != 'body.1':
            assert seen[name][1] is half, name
        is_fp32 = model.get_submodule(name).weight.dtype is F32
        assert is_fp32 is (name in names or level in PER_OP), name
    # what comes after them goes on in 16-bit, but where the kept part as a whole is never called
    assert model.given == [F32 if kept == 'container that is never called' else half] * 2
    assert result.dtype is (model.given[0] if level in PER_OP and door == 'wrapper' else F32)


@pytest.mark.parametrize('level', LEVELS)
def test_name_without_a_match_is_refused_with_the_nearest(level: str) -> None:
    for options, words in (
        (dict(keep_fp32=['head.*', 'heads.*']), ["'heads.*'", 'did you mean', 'body']),
        (dict(keep_fp32=['head.*', 'LayerNrm']), ["'LayerNrm'", "did you mean 'LayerNorm'?"]),
        (dict(keep_fp32=['head.*', 'head.clz']), ["did you mean 'head.cls'?"]),
        (dict(keep_fp32=['head.*', nn.GRU]), ["'GRU'", 'matches no module']),
        (dict(fp32_ops=['torch.nn.GroupNorm']), ["fp32_ops='torch.nn.GroupNorm'", 'matches no module']),
    ):
        if level == 'O0' and 'fp32_ops' in options:
            continue
        model = Deep()
        with pytest.raises(AmpConfigError) as caught:
            initialized(model, level, **options)
        assert len(caught.value.problems) == 1 and all(word in str(caught.value) for word in words)
        assert model.head['cls'].weight.dtype is F32 and model(X).dtype is F32


class FocalLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype is self.alpha.dtype is F32
        return (x * self.alpha).sum()


@pairs(nested=[False, True], level=list(HALF))
def test_losses_compute_in_float32_where_float16_would_overflow(nested: bool, level: str) -> None:
    class WithLoss(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.loss = nn.Sequential(FocalLoss()) if nested else FocalLoss()

        def forward(self, x: Tensor) -> Tensor:
            assert super().forward(x[:1]).dtype is HALF[level]
            x = x.to(HALF[level])
            return torch.stack([self.loss(x), nn.L1Loss(reduction='sum')(x, torch.zeros_like(x))])

    result = initialized(WithLoss(), level)(torch.full((50_000, 2), 0.9))
    assert result.dtype is F32 and (result > 50_000).all() and (result < 100_000).all()


def test_loss_with_weights_is_kept_and_a_model_named_loss_is_cast() -> None:
    weights = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 0.9]))
    model = initialized(nn.ModuleDict({'fc': nn.Linear(2, 2), 'loss': weights}))
    assert model['loss'].weight.dtype is F32
    assert model['loss'](torch.ones(2, 2, dtype=BF16), torch.tensor([0, 1])).dtype is F32
    assert initialized(type('DetectorWithLoss', (nn.Linear,), {})(2, 2)).weight.dtype is BF16


@pairs(level=CAST, kind=[AveragedModel, ExponentialMovingAverage])
def test_average_inside_a_model_stays_float32(level: str, kind: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Linear(3, 3)
            self.teacher = kind(self.student)

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.teacher(x).dtype, self.student(x).dtype
            return x

    model = Model()
    prepared(model, level, 'amp' if kind is AveragedModel else 'wrapper')(X)
    assert model.seen == (HALF[level], HALF[level])
    assert model.student.weight.dtype is HALF[level] and model.teacher.module.weight.dtype is F32


# -- the casts end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', CAST)
def test_detach_restores_the_model(level: str) -> None:
    model = Net()
    before, objects = copy.deepcopy(model.state_dict()), list(model.parameters())
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_scale=1.0)
    for _ in range(2):
        wrapper.attach(model)
        assert model.stem.weight.dtype is HALF[level]
        model(X).sum().backward()
        wrapper.detach()
        assert all(now is then for now, then in zip(model.parameters(), objects, strict=True))
        assert {p.dtype for p in objects} == {p.grad.dtype for p in objects} == {F32}
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name].to(F16 if level == 'O3' else F32).float()), name
        assert model(X).dtype is F32
    assert model.stem(X).dtype is F32


def test_model_is_freed_with_its_masters() -> None:
    for level in CAST:
        model = Net()
        prepared(model, level)(X).sum().backward()
        gone = [weakref.ref(model), weakref.ref(model.head), weakref.ref(model.head.weight)]
        del model
        gc.collect()
        assert [reference() for reference in gone] == [None, None, None]


# -- modules that join later -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('door', DOORS)
def test_layer_that_joins_later_works(door: str) -> None:
    model = Block(lambda x: x)
    call = prepared(model, 'O5', door)
    call(torch.randn(4, 4))
    model.stem, model.neck[0] = nn.Linear(4, 4), nn.Linear(4, 4)
    # one that was initialized by itself is part of the model
    model.neck.append(initialized(nn.Linear(4, 4)))
    assert model.neck[1].weight.dtype is BF16
    call(torch.randn(4, 4)).sum().backward()
    assert model.stem.weight.grad is not None
    model.stem = Block(mixes)  # type: ignore[assignment]
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(4, 4))
    assert 'joined the model' in str(caught.value) and "amp.initialize(layer, opt_level='O5')" in str(caught.value)


# -- errors of torch about types -------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.function = nn.Linear(4, 4), function
        self.neck = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.neck(self.stem(x)))


def mixes(x: Tensor) -> Tensor:
    return torch.lerp(x, x.float(), 0.5)


@pairs(level=CAST, door=DOORS)
def test_error_about_types_names_the_module_and_three_remedies(level: str, door: str) -> None:
    call = prepared(nn.Sequential(nn.Linear(4, 4), nn.Sequential(Block(mixes))), level, door)
    with pytest.raises(RuntimeError, match='dtype') as caught:
        call(torch.randn(4, 4))
    found = str(caught.value)
    for words in (f'1.0 (Block), in a forward at {level}', "keep_fp32=['1.0']", 'fp32_ops=', 'another opt_level'):
        assert words in found
    assert found.count('raised in') == 1


def test_other_errors_have_no_note() -> None:
    def fail(x: Tensor) -> Tensor:
        raise error

    call = initialized(Block(fail))
    for error in (
        RuntimeError('shapes differ'),
        RuntimeError('expected target dtype to be Long or Byte'),
        TypeError("unsupported operand type(s) for +: 'Tensor' and 'NoneType'"),
    ):
        with pytest.raises(type(error)) as caught:
            call(torch.randn(4, 4))
        assert 'amp:' not in str(caught.value)


# -- the first module whose output is not finite ----------------------------------------------------------------------------


def test_first_nonfinite_module_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), nn.Softmax(-1))
    with nonfinite_watch(model) as watch:
        model(torch.full((1, 4), 1e30))
        assert watch.first() is None
        with torch.no_grad():
            model[1][1].weight.fill_(torch.inf)
        model(torch.ones(1, 4))
        assert watch.first() == '1.1 (Linear)' and watch.first() is None
        model(torch.full((1, 4), torch.nan))
        assert watch.first() == "the model's input"
    assert type(model[0]) is nn.Linear


def test_hook_names_the_first_nonfinite_module(log: list[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    nn.init.constant_(model[0].weight, torch.inf)
    runner = SimpleNamespace(model=model, iter=6, logger=SimpleNamespace(warning=log.append))
    words = 'output of 0 (Linear)'
    for stop in (False, True):
        hook = NonfiniteHook(stop=stop)
        hook.before_train(runner)
        model(torch.ones(2, 4))
        with pytest.raises(NonfiniteError, match=re.escape(words)) if stop else contextlib.nullcontext():
            hook.after_train_iter(runner, 0)
        hook.after_train(runner)
    assert len(log) == 1 and 'iteration 7' in log[0] and words in log[0] and not model[0]._forward_hooks
