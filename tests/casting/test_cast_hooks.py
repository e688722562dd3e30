"""The hooks at a cast model: types of inputs and outputs, exceptions, copies, and that the hooks can be taken off."""

from __future__ import annotations

import collections
import copy
import gc
import io
import pickle
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from toy_cast import CAST_LEVELS, WithLoss, cast, cast_with_masters, dtypes, hook_count, images, net

from amp_wrapper.autocast import state
from amp_wrapper.autocast.patching import patches
from amp_wrapper.casting.cast_hooks import CastInputs
from amp_wrapper.casting.find_hooks import is_cast, strip_hooks
from amp_wrapper.casting.fp32_values import master_tensor
from amp_wrapper.casting.plan import CastPlan
from amp_wrapper.casting.region_hooks import autocast_forward
from amp_wrapper.errors import AmpConfigError
from amp_wrapper.policy import resolve

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


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
    duplicate = COPIES[how](model)
    assert hook_count(duplicate) == hook_count(model) > 0 and is_cast(duplicate)
    assert torch.equal(duplicate(images(device)), whole)
    with torch.no_grad():
        duplicate.head.weight.zero_()
        duplicate.head.bias.fill_(5.0)
    assert torch.equal(duplicate(images(device)), (duplicate.mean + 5.0).float().expand(2, 3))
    assert torch.equal(model(images(device)), whole)
    state = duplicate.state_dict()
    assert not state['head.weight'].any() and state['head.weight'].dtype is F32
    assert state['head.bias'].tolist() == [5.0] * 3
    assert model.state_dict()['head.weight'].any()
    assert log == []
    duplicate.load_state_dict(model.state_dict())
    assert torch.equal(duplicate(images(device)), whole)


@pytest.mark.parametrize('how', COPIES)
def test_hooks_of_a_copy_load_into_the_copy(how: str, device: torch.device) -> None:
    model = net(device)
    cast_with_masters(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    duplicate = COPIES[how](model)
    changed = {key: value + 1 if value.is_floating_point() else value for key, value in before.items()}
    duplicate.load_state_dict(changed, assign=True)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(duplicate.state_dict()['bn.weight'], changed['bn.weight'])
    assert torch.equal(duplicate.state_dict()['head.weight'], changed['head.weight'].half().float())


def test_hooks_hold_no_reference_to_the_model(device: torch.device) -> None:
    model = net(device)
    handle, _ = cast_with_masters(model)
    model(images(device)).sum().backward()
    model.load_state_dict(model.state_dict())
    gone = [weakref.ref(model), weakref.ref(model.head), weakref.ref(model.head.weight)]
    del model, handle
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]


def test_master_dies_with_its_weight(device: torch.device) -> None:
    model = net(device)
    masters = cast_with_masters(model)[1]
    gone = weakref.ref(masters.pop('head.weight'))
    assert gone() is master_tensor(model.head.weight)
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
        assert master_tensor(parameter) is None
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
