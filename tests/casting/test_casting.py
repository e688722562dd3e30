"""Which tensors are cast, what the hooks at the modules do, and the FP32 view of the model's state."""

from __future__ import annotations

import collections
import copy
import gc
import io
import logging
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.optim.swa_utils import AveragedModel

from amp_wrapper.autocast import regions, state
from amp_wrapper.autocast.patching import patches
from amp_wrapper.casting.cast_hooks import CastInputs
from amp_wrapper.casting.find_hooks import is_cast, strip_hooks
from amp_wrapper.casting.fp32_values import Master, fp32_twin, pair
from amp_wrapper.casting.plan import CastHandle, CastPlan
from amp_wrapper.casting.region_hooks import FORWARD, autocast_forward, region_on
from amp_wrapper.casting.state_dict_hooks import restore_fp32_copy
from amp_wrapper.errors import AmpAttachError, AmpConfigError
from amp_wrapper.policy import resolve

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CAST_LEVELS = {'O2': F16, 'O3': F16, 'O5': BF16}


def cast(model: nn.Module, level: str = 'O2', leave: Any = (), average: Any = (), **overrides: Any) -> CastHandle:
    return CastPlan([('', model)], resolve(level, **overrides), leave, average).apply()


def cast_with_masters(model: nn.Module, level: str = 'O2', **overrides: Any) -> tuple[CastHandle, dict[str, Tensor]]:
    """Cast and pair every cast parameter with its unrounded values."""
    plan = CastPlan([('', model)], resolve(level, **overrides))
    masters = {name: parameter.detach().clone() for name, parameter in plan.parameters.items()}
    handle = plan.apply()
    for name, parameter in plan.parameters.items():
        pair(parameter, Master(parameter, masters[name], name))
    return handle, masters


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: t.dtype for name, t in (*model.named_parameters(), *model.named_buffers())}


def hook_count(model: nn.Module) -> int:
    return sum(
        len(getattr(module, table))
        for module in model.modules()
        for table in (
            '_forward_pre_hooks',
            '_forward_hooks',
            '_state_dict_hooks',
            '_load_state_dict_pre_hooks',
            '_load_state_dict_post_hooks',
            '_forward_pre_hooks_with_kwargs',
            '_forward_hooks_always_called',
        )
    )


class Sees(nn.Module):
    """Asserts the type that arrives, and has a weight of its own."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.expected = dtype
        self.weight = nn.Parameter(torch.full((3,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        assert self.expected is None or x.dtype is self.expected
        return x * self.weight


class Net(nn.Module):
    """Convolution, BatchNorm, head; makes an FP32 tensor inside."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        self.register_buffer('mean', torch.tensor([0.1, 0.2, 0.3]))

    def features(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)).relu().mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.zeros(len(x), 4, device=x.device)
        return self.head(self.features(x) + noise) + self.mean


def net(device: torch.device) -> Net:
    torch.manual_seed(1)
    return Net().to(device)


def images(device: torch.device) -> Tensor:
    return torch.linspace(-1, 1, 2 * 2 * 5 * 5, device=device).reshape(2, 2, 5, 5)


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    yield
    left = regions.count()
    regions.unwind()
    assert left == 0 and not patches.in_place


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Lines of the package's logger, whether or not it propagates."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f'{record.levelname} {record.getMessage()}')  # type: ignore[method-assign]
    logger = logging.getLogger('amp_wrapper')
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


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


class WithLoss(nn.Module):
    def __init__(self, loss: nn.Module | Callable[..., Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        assert self.fc(x[:1, :2].expand(1, 2)).dtype is F16
        result = self.loss(x)
        assert result.dtype is F32
        return result


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


# -- casts at the leaves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(('level', 'dtype'), CAST_LEVELS.items())
def test_submodules_take_fp32_directly(level: str, dtype: torch.dtype, device: torch.device) -> None:
    model = net(device)
    cast(model, level)
    assert model.conv(images(device)).dtype is dtype
    assert model.features(images(device)).dtype is dtype
    assert model.head(torch.ones(1, 4, device=device)).dtype is dtype
    assert model(images(device)).dtype is F32
    assert model(images(device).to(dtype)).dtype is F32


@pytest.mark.parametrize(
    'inputs',
    [
        lambda x: ((x,), {}),
        lambda x: ((), {'x': x}),
        lambda x: ((x, x.bfloat16()), {}),
        lambda x: ((x.half(), None, 'text', 3), {'mask': torch.ones(2, dtype=torch.bool)}),
    ],
    ids=['positional', 'keyword', 'mixed', 'strangers'],
)
def test_root_casts_positional_and_keyword_inputs(inputs: Any, device: torch.device) -> None:
    seen: list[Any] = []

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor, *args: Any, mask: Any = None) -> Tensor:
            seen.extend([x, *args, mask])
            return self.fc(x)

    model = Root().to(device)
    cast(model)
    args, kwargs = inputs(torch.ones(2, 2, device=device))
    assert model(*args, **kwargs).dtype is F32
    assert all(t.dtype in (F16, torch.bool) for t in seen if isinstance(t, Tensor))
    assert [s for s in seen if s is not None and not isinstance(s, Tensor)] == [
        s for s in args if type(s) in (str, int)
    ]


class Pair(NamedTuple):
    a: Tensor
    b: Any


@pytest.mark.parametrize(
    'wrap',
    [
        lambda t: [t, 1],
        lambda t: (t, 'a'),
        lambda t: Pair(t, None),
        lambda t: {'a': t, 'b': [t]},
        lambda t: collections.OrderedDict(a=t),
        lambda t: collections.defaultdict(list, a=t),
    ],
    ids=['list', 'tuple', 'namedtuple', 'dict', 'OrderedDict', 'defaultdict'],
)
@pytest.mark.parametrize('outputs', [None, 'float16', 'float64'])
def test_nested_inputs_and_outputs(wrap: Any, outputs: str | None, device: torch.device) -> None:
    def tensors(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            for item in value.values() if isinstance(value, dict) else value:
                yield from tensors(item)

    class Echo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(1, 1)

        def forward(self, value: Any) -> Any:
            assert all(t.dtype is BF16 for t in tensors(value))
            return value

    model = Echo().to(device)
    cast(model, 'O5', cast_model_outputs=outputs)
    given = wrap(torch.ones(1, device=device))
    result = model(given)
    want = F32 if outputs is None else getattr(torch, outputs)
    assert type(result) is type(given) and all(t.dtype is want for t in tensors(result))
    assert all(t.dtype is F32 for t in tensors(given))


def test_o0_casts_inputs_and_outputs_to_fp32(device: torch.device) -> None:
    model = nn.Linear(2, 2).to(device)
    handle = cast(model, 'O0')
    assert not handle.casts and model.weight.dtype is F32
    assert model(torch.ones(1, 2, device=device, dtype=F16)).dtype is F32
    assert model(torch.ones(1, 2, device=device, dtype=BF16)).dtype is F32
    handle.remove()
    assert hook_count(model) == 0


@pytest.mark.parametrize('level', ['O0', 'O1', 'O2', 'O4', 'O5'])
def test_cast_model_type_false_means_no_hooks(level: str, device: torch.device) -> None:
    model = nn.Linear(2, 2).to(device).double()
    handle = cast(model, level, cast_model_type=False)
    assert hook_count(model) == 0 or level in ('O1', 'O4')
    x = torch.ones(1, 2, device=device, dtype=torch.float64)
    assert model(x).dtype is torch.float64 and not handle.casts


def test_shared_parameters_stay_shared(device: torch.device) -> None:
    model = nn.ModuleDict({'a': nn.Linear(3, 3), 'b': nn.Linear(3, 3)}).to(device)
    model['b'].weight = model['a'].weight
    plan = CastPlan([('', model)], resolve('O2'))
    assert set(plan.parameters) == {'a.weight', 'a.bias', 'b.bias'}
    weight = model['a'].weight
    plan.apply()
    assert model['b'].weight is model['a'].weight is weight and weight.dtype is F16


@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize('kept_first', [False, True])
def test_parameter_shared_with_a_kept_module(bias: bool, kept_first: bool, device: torch.device) -> None:
    """A decoder tied to an embedding that stays FP32."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parts = {'embed': nn.Embedding(5, 3), 'decode': nn.Linear(3, 5, bias=bias)}
            parts['decode'].weight = parts['embed'].weight
            for name in parts if kept_first else reversed(parts):
                self.add_module(name, parts[name])

        def forward(self, index: Tensor) -> Tensor:
            return self.decode(self.embed(index))

    model = Tied().to(device)
    cast(model, keep_fp32=nn.Embedding)
    assert model.embed.weight is model.decode.weight and model.embed.weight.dtype is F32
    assert model(torch.tensor([1, 2], device=device)).dtype is F32


@pytest.mark.parametrize('level', CAST_LEVELS)
def test_parametrized_modules(level: str, device: torch.device) -> None:
    model = nn.Sequential(weight_norm(nn.Linear(3, 4)), nn.ReLU(), weight_norm(nn.Conv1d(4, 2, 1))).to(device)
    model[2].register_forward_pre_hook(lambda module, args: (args[0].unsqueeze(-1),))
    plain = copy.deepcopy(model)
    handle, masters = cast_with_masters(model, level)
    # what the weight is computed from stays FP32 and needs no master
    assert '0.parametrizations.weight.original0' not in masters
    assert '0.bias' in masters and model[0].parametrizations.weight.original0.dtype is F32
    x = torch.randn(2, 3, device=device)
    assert model[0].weight.dtype is CAST_LEVELS[level] and model[0](x).dtype is CAST_LEVELS[level]
    assert torch.allclose(model(x), plain(x), rtol=0.1, atol=0.05)
    model(x).sum().backward()
    assert model[0].parametrizations.weight.original0.grad is not None
    for key, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[key]) and value.dtype is F32
    handle.remove()
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize('level', CAST_LEVELS)
def test_lstm_with_packed_sequence(level: str, device: torch.device) -> None:
    model = nn.LSTM(2, 3).to(device)
    cast(model, level)
    packed = pack_sequence([torch.ones(3, 2, device=device), torch.ones(1, 2, device=device)])
    state = (torch.zeros(1, 2, 3, device=device), torch.zeros(1, 2, 3, device=device))
    output, (hidden, cell) = model(packed, state)
    assert isinstance(output, PackedSequence)
    assert output.data.dtype is hidden.dtype is cell.dtype is F32
    assert model(packed)[0].data.shape == (4, 3)
    output.data.sum().backward()
    assert model.weight_ih_l0.grad is not None and model.weight_ih_l0.grad.dtype is CAST_LEVELS[level]


@pytest.mark.parametrize('training', [True, False])
def test_transformer_layer_with_a_float_mask(training: bool, device: torch.device) -> None:
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).to(device).train(training)
    cast(model, 'O5', keep_fp32=nn.LayerNorm)
    x, mask = torch.randn(2, 3, 4, device=device), torch.zeros(3, 3, device=device)
    with torch.set_grad_enabled(training):
        assert model(x, src_mask=mask).dtype is F32
        assert model.self_attn(x, x, x)[0].dtype is BF16


# -- hooks --------------------------------------------------------------------------------------------------------


def reload(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {'deepcopy': copy.deepcopy, 'pickle': lambda m: pickle.loads(pickle.dumps(m)), 'torch.save': reload}


@pytest.mark.parametrize('how', COPIES)
@pytest.mark.parametrize('level', CAST_LEVELS)
def test_a_copy_speaks_for_itself(how: str, level: str, device: torch.device, log: list[str]) -> None:
    model = net(device)
    cast_with_masters(model, level)
    model.eval()
    whole = model(images(device))
    twin = COPIES[how](model)
    assert hook_count(twin) == hook_count(model) > 0 and is_cast(twin)
    assert torch.equal(twin(images(device)), whole)
    with torch.no_grad():
        twin.head.weight.zero_()
        twin.head.bias.fill_(5.0)
    assert torch.equal(twin(images(device)), (twin.mean + 5.0).float().expand(2, 3))
    assert torch.equal(model(images(device)), whole)
    state = twin.state_dict()
    assert not state['head.weight'].any() and state['head.weight'].dtype is F32
    assert state['head.bias'].tolist() == [5.0] * 3
    assert model.state_dict()['head.weight'].any()
    assert log == []
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(images(device)), whole)


@pytest.mark.parametrize('how', COPIES)
def test_hooks_of_a_copy_load_into_the_copy(how: str, device: torch.device) -> None:
    model = net(device)
    cast_with_masters(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    twin = COPIES[how](model)
    changed = {key: value + 1 if value.is_floating_point() else value for key, value in before.items()}
    twin.load_state_dict(changed, assign=True)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(twin.state_dict()['bn.weight'], changed['bn.weight'])
    assert torch.equal(twin.state_dict()['head.weight'], changed['head.weight'].half().float())


def test_hooks_hold_no_reference_to_the_model(device: torch.device) -> None:
    model = net(device)
    handle, _ = cast_with_masters(model)
    model(images(device)).sum().backward()
    model.load_state_dict(model.state_dict())
    gone = [weakref.ref(model), weakref.ref(model.head), weakref.ref(model.head.weight)]
    del model, handle
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]


def test_twin_dies_with_its_weight(device: torch.device) -> None:
    model = net(device)
    masters = cast_with_masters(model)[1]
    gone = weakref.ref(masters.pop('head.weight'))
    assert gone() is fp32_twin(model.head.weight)
    model.head = None
    gc.collect()
    assert gone() is None


class Breaks(nn.Module):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 1)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        assert state.depth() > 0
        raise self.error('inside forward')


def test_exception_in_forward_leaves_nothing_open(device: torch.device) -> None:
    model = Breaks(RuntimeError).to(device)
    cast(model)
    for _ in range(3):
        with pytest.raises(RuntimeError, match='inside forward'):
            model(torch.ones(1, 1, device=device))
        assert state.depth() == 0 and not patches.in_place


def test_exception_in_a_later_hook_leaves_nothing_open(device: torch.device) -> None:
    model = nn.Linear(1, 1).to(device)
    cast(model)

    def fail(*args: Any) -> None:
        raise RuntimeError('inside a hook')

    for register in (model.register_forward_pre_hook, model.register_forward_hook):
        hook = register(fail)
        with pytest.raises(RuntimeError, match='inside a hook'):
            model(torch.ones(1, 1, device=device))
        assert state.depth() == 0
        hook.remove()


def test_nested_cast_models_nest(device: torch.device) -> None:
    inner = WithLoss(lambda x: F.mse_loss(x, x)).to(device)
    outer = nn.Sequential(nn.Linear(2, 2)).to(device)
    cast(inner)
    cast(outer)
    outer.register_forward_hook(lambda module, args, output: inner(args[0]))
    assert outer(torch.ones(1, 2, device=device)).dtype is F32
    assert state.depth() == 0


# -- the FP32 view ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', CAST_LEVELS)
@pytest.mark.parametrize('prefix', ['', 'model.'])
def test_state_dict_holds_masters(level: str, prefix: str, device: torch.device, log: list[str]) -> None:
    model = net(device)
    before = copy.deepcopy(model.state_dict(prefix=prefix))
    _, masters = cast_with_masters(model, level)
    state = model.state_dict(prefix=prefix)
    assert list(state) == list(before)
    for key, value in state.items():
        assert value.dtype is before[key].dtype and not value.requires_grad
        if key.removeprefix(prefix) in masters:
            assert torch.equal(value, before[key]), key
    rounded = before[f'{prefix}mean'].to(CAST_LEVELS[level]).float()
    assert torch.equal(state[f'{prefix}mean'], rounded)
    assert log == []


def test_state_dict_of_a_submodule(device: torch.device) -> None:
    model = net(device)
    _, masters = cast_with_masters(model)
    assert torch.equal(model.head.state_dict()['weight'], masters['head.weight'])


def test_state_dict_without_masters_is_the_weights_in_fp32(device: torch.device) -> None:
    model = net(device)
    cast(model, 'O3')
    for key, value in model.state_dict().items():
        parameter = dict((*model.named_parameters(), *model.named_buffers()))[key]
        assert value.dtype in (F32, torch.int64) and torch.equal(value, parameter.to(value.dtype))


def test_keep_vars_gives_the_variables(device: torch.device) -> None:
    model = net(device)
    cast_with_masters(model)
    state = model.state_dict(keep_vars=True)
    for name, parameter in model.named_parameters():
        assert state[name] is parameter
    assert state['mean'] is model.mean and state['mean'].dtype is F16


def mmengine_load(module: nn.Module, state: dict[str, Tensor]) -> None:
    checkpoint = pytest.importorskip('mmengine.runner.checkpoint')
    checkpoint.load_state_dict(module, state, strict=True)


LOADERS: dict[str, Callable[[nn.Module, dict[str, Tensor]], Any]] = {
    'load': lambda module, state: module.load_state_dict(state),
    'assign': lambda module, state: module.load_state_dict(state, assign=True),
    'mmengine': mmengine_load,
}


@pytest.mark.parametrize('how', LOADERS)
@pytest.mark.parametrize('where', ['', 'head', 'bn', 'conv'])
@pytest.mark.parametrize('source', [F32, F16])
def test_loads_reach_the_masters_unrounded(
    how: str, where: str, source: torch.dtype, device: torch.device, log: list[str]
) -> None:
    model = net(device)
    _, masters = cast_with_masters(model)
    objects = dict(model.named_parameters())
    module = model.get_submodule(where)
    torch.manual_seed(7)
    state = {
        key: torch.randn_like(value).to(source) if value.is_floating_point() else value + 3
        for key, value in module.state_dict().items()
    }
    given = {key: value.clone() for key, value in state.items()}
    LOADERS[how](module, state)
    prefix = f'{where}.' if where else ''
    for key, value in given.items():
        name = prefix + key
        if name in masters:
            assert masters[name].dtype is F32 and torch.equal(masters[name], value.float())
            assert torch.equal(objects[name], value.half()) and objects[name].dtype is F16
        elif name in objects:
            assert objects[name].dtype is F32 and torch.equal(objects[name], value.float())
        if name != 'mean':
            assert torch.equal(model.state_dict()[name], value.to(model.state_dict()[name].dtype))
        assert torch.equal(state[key], value)
    assert all(objects[name] is parameter for name, parameter in model.named_parameters())
    assert log == []


def test_a_load_does_not_alias_the_callers_tensors(device: torch.device) -> None:
    model = net(device)
    _, masters = cast_with_masters(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    for assign in (False, True):
        model.load_state_dict(state, assign=assign)
        kept = {key: value.clone() for key, value in state.items()}
        for tensor in (*masters.values(), *model.parameters()):
            tensor.data.fill_(9.0)
        assert all(torch.equal(state[key], value) for key, value in kept.items())


@pytest.mark.parametrize(
    'edit',
    [
        lambda p: p.data.clamp_(-0.01, 0.01),
        lambda p: p.data.copy_(torch.full_like(p, 2.5)),
        lambda p: setattr(p, 'data', torch.full_like(p, 2.5)),
    ],
    ids=['clamp', 'copy', 'replace'],
)
def test_edit_wins_at_saving_with_one_warning(edit: Any, device: torch.device, log: list[str]) -> None:
    model = net(device)
    _, masters = cast_with_masters(model)
    kept = masters['head.bias'].clone()
    edit(model.head.weight)
    rounded = model.head.weight.detach().float()
    changed = model.head.weight.detach() != masters['head.weight'].half()
    expected = torch.where(changed, rounded, masters['head.weight'])
    state = model.state_dict()
    assert torch.equal(state['head.weight'], expected) and torch.equal(masters['head.weight'], expected)
    assert torch.equal(state['head.bias'], kept)
    assert len(log) == 1 and log[0].startswith('WARNING') and 'head.weight' in log[0]
    model.state_dict()
    assert len(log) == 1


# -- taking it back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', CAST_LEVELS)
def test_remove(level: str, device: torch.device) -> None:
    model = net(device)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    objects = dict(model.named_parameters())
    handle, _ = cast_with_masters(model, level)
    model(images(device)).sum().backward()
    handle.remove()
    assert set(dtypes(model).values()) == {F32, torch.int64} and hook_count(model) == 0 and not is_cast(model)
    for name, parameter in model.named_parameters():
        assert parameter is objects[name] and torch.equal(parameter, before[name])
        assert fp32_twin(parameter) is None
        assert parameter.grad is not None and parameter.grad.dtype is F32
    assert model.conv(images(device)).dtype is F32
    cast(model, level)
    assert model.head.weight.dtype is CAST_LEVELS[level]


def test_remove_leaves_other_peoples_hooks(device: torch.device) -> None:
    model = net(device)
    calls: list[str] = []
    model.register_forward_pre_hook(lambda module, args: calls.append('pre'))
    model.register_forward_hook(lambda module, args, output: calls.append('post'), always_call=True)
    model.head.register_forward_pre_hook(lambda module, args, kwargs: calls.append('head'), with_kwargs=True)
    model.register_state_dict_pre_hook(lambda *args: calls.append('save'))
    model.register_load_state_dict_post_hook(lambda *args: calls.append('load'))
    before = hook_count(model)
    handle = cast(model)
    assert hook_count(model) > before
    handle.remove()
    assert hook_count(model) == before
    model(images(device))
    model.load_state_dict(model.state_dict())
    assert calls == ['pre', 'head', 'post', 'save', 'load']


def test_strip_hooks_keeps_the_tensors(device: torch.device) -> None:
    model = net(device)
    cast(model)
    strip_hooks(model)
    assert hook_count(model) == 0 and model.head.weight.dtype is F16


def test_restore_fp32_copy(device: torch.device) -> None:
    model = net(device)
    _, masters = cast_with_masters(model)
    twin = copy.deepcopy(model)
    objects = dict(twin.named_parameters())
    assert restore_fp32_copy(twin, model) is True
    assert hook_count(twin) == 0 and set(dtypes(twin).values()) == {F32, torch.int64}
    for name, parameter in twin.named_parameters():
        assert parameter is objects[name]
        if name in masters:
            assert torch.equal(parameter, masters[name]) and parameter.data_ptr() != masters[name].data_ptr()
    assert model.head.weight.dtype is F16 and is_cast(model)
    plain = net(device)
    assert restore_fp32_copy(copy.deepcopy(plain), plain) is False


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


# -- small parts --------------------------------------------------------------------------------------------------


def test_input_hook_that_finds_nothing_returns_nothing(device: torch.device) -> None:
    hook = CastInputs(F16)
    x = torch.ones(1, device=device, dtype=F16)
    assert hook(nn.Identity(), (x, x), {}) is None
    assert hook(nn.Identity(), ([x], 3, None), {'a': x}) is None
    args, kwargs = hook(nn.Identity(), (x, x.float()), {'a': x.float()})
    assert args[0] is x and args[1].dtype is kwargs['a'].dtype is F16


@pytest.mark.parametrize('fails', [True, False])
def test_autocast_forward(fails: bool, device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(2, 2)).to(device)
    autocast_forward(model, BF16)
    if fails:
        model[0].register_forward_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(1, 2, device=device))
    else:
        seen = []
        model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        assert model(torch.ones(1, 2, device=device)).dtype is F32 and seen == [BF16]
    assert not torch.is_autocast_enabled(device.type)
    strip_hooks(model)
    assert hook_count(model) == 1


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


@pytest.mark.parametrize('how', ['O0', 'refused'])
def test_methods_are_wrapped_only_where_something_runs_in_16_bit(how: str, device: torch.device) -> None:
    class Untouched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def loss_by_feat(self, x: Tensor) -> Tensor:
            return x

    before = Untouched.loss_by_feat
    if how == 'O0':
        cast(Untouched().to(device), 'O0')
    else:
        with pytest.raises(AmpConfigError):
            cast(Untouched().to(device), 'O2', keep_fp32=['nowhere'])
    assert Untouched.loss_by_feat is before
    cast(Untouched().to(device), 'O2')
    assert Untouched.loss_by_feat is not before
