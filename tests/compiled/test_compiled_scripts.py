"""Scripts that call compiled code in ways of their own: parts, several optimizers, casts that are paused, failures."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toy_compiled
from bits import differences
from grid import but, but_every, long
from torch import Tensor, nn
from toy_compiled import HALF, fresh

from amp_wrapper import amp

AOT: dict[str, Any] = dict(backend='aot_eager')


class Part(nn.Module):
    def __init__(self, dims: int = 4) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.head = Part(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(x))


def initialized(model: Any, level: str, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return optimizer


#: Calls of a model that are compiled, but for the first.
CALLS: dict[str, Callable[[Whole], Callable[[Tensor], Tensor]]] = {
    'eager': lambda model: model,
    'a function of parts': lambda model: torch.compile(lambda x: model.head(model.part(x)), **AOT),
    'forward itself': lambda model: torch.compile(lambda x: model.forward(x), **AOT),
    'a compiled part': lambda model: (lambda part: lambda x: model.head(part(x)))(torch.compile(model.part, **AOT)),
    # torch takes the graph of the first call: its hooks act all the same
    'compiled anew': lambda model: (lambda loss: lambda x: torch.compile(loss, **AOT)(x))(lambda x: model(x).float()),
}


@pytest.mark.parametrize('call', CALLS)
@pytest.mark.parametrize('level', but(['O2', 'O4'], ['O2', 'O4', 'O5'], long))
def test_parts_that_are_called_by_themselves(level: str, call: str, device: torch.device) -> None:
    """Weights follow their masters before the call, and a skipped step gives the statistics back."""
    torch.manual_seed(0)
    model = Whole().to(device)
    with fresh():
        optimizer = initialized(model, level, loss_scale=8.0)
        run = CALLS[call](model)
        x = torch.randn(6, 4, device=device)
        for number in range(4):
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            with amp.scale_loss(run(x * (float('inf') if number == 2 else 1)).float().sum(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert (differences(before, model.state_dict()) == []) == (number == 2)
        with torch.no_grad():
            for master in amp.master_params(optimizer):
                master.zero_()
        assert not run(x).any()


def test_a_function_around_models_of_two_optimizers(device: torch.device) -> None:
    """Their hooks are put on anew as the second optimizer comes; not while a graph goes through them."""
    for level in ('O2', 'O5'):
        generator, critic = Part().to(device), Part().to(device)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
        amp.initialize([generator, critic], optimizers, opt_level=level, num_losses=2, verbosity=0)
        x = torch.randn(6, 4, device=device)
        with fresh():
            loss = torch.compile(
                lambda x, g=generator, d=critic: d(x).mean() - d(g(x).detach()).mean(), fullgraph=True, **AOT
            )
            for _ in range(3):
                with amp.scale_loss(loss(x), optimizers[1], loss_id=1) as scaled:
                    scaled.backward()
                optimizers[1].step()
                optimizers[1].zero_grad()
            assert torch.isfinite(loss(x))


def doubled(x: Tensor) -> Tensor:
    x.mul_(2.0)
    return x


def filled(buffer: Tensor, x: Tensor) -> Tensor:
    buffer.copy_(x * 2)
    return x.sum()


@amp.float_function
def tripled(x: Tensor) -> Tensor:
    x.mul_(3)
    return x.sum()


def squared(x: Tensor) -> Tensor:
    return x @ x.t()


@amp.half_function
def in_half(x: Tensor) -> Tensor:
    return x @ x.t()


class Body(nn.Module):
    """A layer, and a function of its output."""

    def __init__(self, body: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self.layer(x))


def clipped(x: Tensor) -> Tensor:
    F.relu(x, True)
    return x.sum()


def turned(x: Tensor) -> Tensor:
    x.swapdims(0, 1).tensor_split(2)[0].mul_(2)
    return x.sum()


def doubled_in_a_list(x: Tensor) -> Tensor:
    torch._foreach_mul_([x], 2.0)
    return x.sum()


WRITING = (doubled, filled, tripled, clipped, turned, doubled_in_a_list)


@pytest.mark.parametrize('function', WRITING)
@pytest.mark.parametrize('level', but(['O5'], ['O4', 'O5'], long))
def test_functions_that_write_to_their_arguments(level: str, function: Any, device: torch.device) -> None:
    """What is written to copies in FP32 reaches the tensors of the caller."""

    def write(x: Tensor) -> Tensor:
        y = x.detach().clone()
        # by its name in the module, which is patched
        writes = globals()[function.__name__]
        writes(y, x.detach()) if function.__name__ == 'filled' else writes(y)
        return y

    torch.manual_seed(0)
    model = Body(write).to(device)
    with fresh():
        # the functions that are decorated are cast at O1 and O4 alone
        initialized(model, level, fp32_ops=[f'{__name__}.{each.__name__}' for each in WRITING if each is not tripled])
        x = torch.randn(4, 4, device=device)
        expected = model(x)
        for call in (torch.compile(model, **AOT), torch.compile(lambda x: model(x), **AOT)):
            found = call(x)
            assert found.dtype is expected.dtype and torch.allclose(found, expected, rtol=0.02, atol=0.02)


def test_casts_that_are_paused_around_a_call(device: torch.device) -> None:
    """Before and after: what is compiled inside of ``disable_casts()`` is not what runs outside, and the other way round."""
    x = torch.randn(4, 4, device=device)
    for level in ('O1', 'O4'):
        half = torch.float16 if level == 'O1' else torch.bfloat16
        with fresh():
            model = Body(lambda y: y.dtype).to(device)
            initialized(model, level)
            for call in (torch.compile(lambda x, model=model: model(x), **AOT), torch.compile(model, **AOT)):
                for paused in (False, True, False, True):
                    with amp.disable_casts() if paused else torch.enable_grad():
                        assert call(x) is (torch.float32 if paused else half), (level, paused)
            assert torch._C._len_torch_function_stack() == 0


def test_decorated_functions_outside_of_models(device: torch.device) -> None:
    """They act as long as a model at O1 or O4 lives, and are not paused; whatever was so when they were compiled."""
    x = torch.randn(4, 4, device=device)
    # models of other tests may live on: where Python finds them in the middle of this, both calls differ
    gc.collect()
    with fresh():
        call = torch.compile(lambda x: in_half(x), **AOT)
        assert call(x).dtype is in_half(x).dtype
        model = nn.Linear(4, 4).to(device)
        initialized(model, 'O1')
        call = torch.compile(lambda x: in_half(x), **AOT)
        for paused in (True, False, True):
            with amp.disable_casts() if paused else torch.enable_grad():
                assert call(x).dtype is (torch.float32 if paused else torch.float16)
        del model
        assert call(x).dtype is in_half(x).dtype


def test_the_oldest_interface(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of Python that is registered, where a handle has turned casts on."""
    amp.register_float_function(__import__(__name__), 'squared')
    handle = amp.init(verbose=False)
    try:
        with fresh():
            x = torch.randn(4, 4, device=device)
            assert squared(x @ x).dtype is torch.float32
            assert torch.compile(lambda x: squared(x @ x), **AOT)(x).dtype is torch.float32
            assert torch.compile(lambda x: torch.softmax(x @ x, -1), **AOT)(x).dtype is torch.float32
            handle._deactivate()
    finally:
        handle._deactivate()
    assert torch._C._len_torch_function_stack() == 0


def test_a_failure_leaves_no_casts_behind(device: torch.device) -> None:
    """The backend 'eager' runs the marks of O1 and O4 as they are, and an error comes between two of them."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.layer = nn.Embedding(3, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.words(x))

    model = Words().to(device)
    with fresh():
        initialized(model, 'O4')
        call = torch.compile(model, backend='eager')
        call(torch.tensor([0, 1], device=device))
        with pytest.raises((IndexError, RuntimeError)):
            call(torch.tensor([0, 9], device=device))
        y = torch.randn(4, 4, device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            assert torch.softmax(y @ y, -1).dtype is (torch.bfloat16 if device.type == 'cpu' else torch.float32)


@pytest.mark.parametrize('level', ['O4', 'O5'])
def test_control_flow_of_torch(level: str, device: torch.device) -> None:
    """``torch.cond`` compiles its branches, in eager code too; casts are the same in them."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return torch.cond(y.sum() > 0, lambda y: self.second(y), lambda y: self.second(y) * 2, (y,))

    with fresh(), torch.no_grad():
        model = Branches().to(device)
        initialized(model, level)
        x = torch.randn(2, 4, device=device)
        assert model(x).dtype is torch.float32
        assert torch.allclose(torch.compile(model, **AOT)(x), model(x), atol=0.05)


class Doubles(torch.autograd.Function):
    seen: list[torch.dtype] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Doubles.seen.append(x.dtype)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@pytest.mark.parametrize('level', ['O1', 'O4', 'O5'])
def test_autograd_functions_of_a_configuration(level: str, device: torch.device) -> None:
    model = Body(lambda y: Doubles.apply(y).sum()).to(device)
    with fresh():
        initialized(model, level, fp32_ops=[f'{__name__}.Doubles'])
        x = torch.randn(4, 4, device=device)
        for call in (model, torch.compile(model, **AOT), torch.compile(lambda x: model(x) * 1, **AOT)):
            Doubles.seen.clear()
            call(x).backward()
            assert set(Doubles.seen) == {torch.float32}


@pytest.mark.parametrize('level', ['O2', 'O4', 'O5'])
def test_containers_in_containers(level: str, device: torch.device) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, value: Any) -> Any:
            y = self.layer(value['a'][0])
            return {'pair': (y, [y, {'deep': (y, 3)}]), 'word': 'x', 'levels': OrderedDict([(0, y), ('1', y)])}

    with fresh():
        model = Nested().to(device)
        initialized(model, level)
        x = torch.randn(2, 4, device=device)
        for call in (
            torch.compile(model, fullgraph=True, **AOT),
            torch.compile(lambda value: model(value), fullgraph=True, **AOT),
        ):
            found = call({'a': (x, x), 'n': 2})
            assert found['pair'][0].dtype is found['pair'][1][1]['deep'][0].dtype is torch.float32
            assert (
                type(found['levels']) is OrderedDict
                and [y.dtype for y in found['levels'].values()] == [torch.float32] * 2
            )
            assert found['word'] == 'x' and found['pair'][1][1]['deep'][1] == 3


def test_a_part_that_is_left_out_of_graphs(device: torch.device) -> None:
    """A wrapper of torch.compiler that is made inside of forward, and thrown away."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.compiler.disable(self.layer)(x).sum()

    with fresh():
        model = Around().to(device)
        initialized(model, 'O5')
        x = torch.randn(2, 4, device=device)
        assert torch.allclose(torch.compile(model, **AOT)(x), model(x), atol=0.05)


def test_counters_that_were_cleared(device: torch.device) -> None:
    """A graph from before the casts is forgotten, whoever has cleared the counters of torch in between."""
    model = nn.Linear(4, 4).to(device)
    with fresh() as counters:
        call = torch.compile(lambda x: model(x).dtype, **AOT)
        x = torch.randn(2, 4, device=device)
        assert call(x) is torch.float32
        counters.clear()
        initialized(model, 'O4', cast_model_outputs=torch.bfloat16)
        assert call(x) is torch.bfloat16


def test_classes_of_torch_are_left_as_they_were(device: torch.device) -> None:
    """A graph that is made while patches are in place leaves no inherited method on ``torch.Tensor``."""
    inner = nn.Linear(4, 4).to(device)
    model = Body(torch.compile(lambda y: inner(y) * 1, **AOT)).to(device)
    before = set(vars(torch.Tensor))
    with fresh():
        for each in (inner, model):
            initialized(each, 'O4')
        model(torch.randn(4, 4, device=device))
        assert set(vars(torch.Tensor)) == before
    assert set(vars(torch.Tensor)) == before


def in_autocast(y: Tensor) -> list[Any]:
    """The types of products in blocks of torch.autocast, and what torch says of them."""
    device, wide = y.device.type, y.float()
    found: list[Any] = [(wide @ wide.t()).dtype, torch.is_autocast_enabled(device)]
    if torch.is_autocast_enabled(device):
        found.append(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        found += [(wide @ wide.t()).dtype, torch.is_autocast_enabled(device)]
        with torch.autocast(device, dtype=torch.float16):
            found += [(wide @ wide.t()).dtype, torch.get_autocast_dtype(device)]
    with torch.autocast(device, dtype=torch.bfloat16):
        found.append((wide @ wide.t()).dtype)
        found.append(torch.utils.checkpoint.checkpoint(lambda y: y @ y.t(), wide, use_reentrant=False).dtype)
    return [*found, (wide @ wide.t()).dtype]


@pytest.mark.parametrize('around', [False, True])
@pytest.mark.parametrize('level', but(['O1', 'O5'], ['O0', 'O1', 'O2', 'O4', 'O5'], long))
def test_blocks_of_autocast_in_a_model(level: str, around: bool, device: torch.device) -> None:
    """They say what is cast inside of them, also where the casts of a level are on, or ended at the border of the model."""
    model = Body(in_autocast).to(device)
    with fresh():
        initialized(model, level)
        x = torch.randn(4, 4, device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=around):
            expected, before = model(x), in_autocast(x)
            assert len(set(expected)) > 1
            assert torch.compile(model, **AOT)(x) == expected
            # what comes after the model in the same graph is as it was before
            around_it = torch.compile(lambda x: [in_autocast(x), model(x), in_autocast(x)], fullgraph=True, **AOT)
            assert around_it(x) == [before, expected, before]


@torch.compiler.disable
def left_out(y: Tensor) -> list[Any]:
    """The same, between two graphs."""
    return in_autocast(y)


def paused_over_breaks(y: Tensor, half: torch.dtype) -> list[Any]:
    # one type alone: torch 2.6 takes the graph of one type of autocast for that of another
    found = in_autocast(y)
    with amp.disable_casts():
        found += in_autocast(y) + left_out(y)
        with torch.autocast(y.device.type, dtype=half):
            found += in_autocast(y) + left_out(y)
        found += in_autocast(y)
    return found + in_autocast(y)


@pytest.mark.parametrize(
    ('level', 'around'),
    but_every(4, [(a, b) for a in ('O1', 'O4', 'O5') for b in ((), (False, False), (True,))], long),
)
def test_graph_breaks_where_casts_are_paused(level: str, around: tuple[bool, ...], device: torch.device) -> None:
    """What runs between two graphs is paused as well, and afterwards autocast is what it was around the block."""
    half = HALF[level]
    model = Body(lambda y: paused_over_breaks(y, half)).to(device)
    with fresh(), ExitStack() as blocks:
        initialized(model, level)
        x = torch.randn(4, 4, device=device)
        calls = model, lambda x: paused_over_breaks(x, half)
        compiled = [torch.compile(call, **AOT) for call in calls]
        for enabled in around:
            blocks.enter_context(torch.autocast(device.type, dtype=half, enabled=enabled))
        assert [call(x) for call in compiled] == [call(x) for call in calls]


@pytest.mark.parametrize('way', ['eager', 'before', 'after', 'in place', 'function'])
@pytest.mark.parametrize('level', but(['O1'], ['O1', 'O4'], long))
def test_the_backward_pass_of_a_module_in_fp32(level: str, way: str, device: torch.device) -> None:
    """Its products are in FP32, as in eager training, although torch makes the graph under the autocast of the level."""
    can_be_told = hasattr(torch._functorch.config, 'backward_pass_autocast')
    if not can_be_told and way not in ('eager', 'function'):
        pytest.skip('this torch makes the backward pass under the autocast of the forward pass')
    setting = getattr(torch._functorch.config, 'backward_pass_autocast', None)
    torch.manual_seed(0)
    model = Whole().to(device)
    x = torch.randn(6, 4, device=device)
    with fresh():
        call, optimizer = toy_compiled.initialized(model, way, level, loss_scale=1.0, keep_fp32=['head'])
        with amp.scale_loss(call(x).pow(2).sum(), optimizer) as scaled:
            scaled.backward()
        gradient = model.head.weight.grad
        assert gradient is not None and gradient.dtype is torch.float32
        half = HALF[level]
        assert not torch.equal(gradient, gradient.to(half).float())
        # and of a plain model nothing has changed
        torch.compile(lambda x: x + 1, **AOT)(x)
        assert getattr(torch._functorch.config, 'backward_pass_autocast', None) == setting


def test_names_of_modules_that_were_compiled_before(device: torch.device) -> None:
    """``keep_fp32`` names them as the model does."""
    model = Whole().to(device)
    with fresh():
        model.part = torch.compile(model.part, **AOT)
        optimizer = initialized(model, 'O5', keep_fp32=['part.layer'])
        types = {name: weight.dtype for name, weight in model.named_parameters()}
        assert types['part._orig_mod.layer.weight'] is torch.float32 and types['head.weight'] is torch.bfloat16
        with amp.scale_loss(model(torch.randn(6, 4, device=device)).float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


@pytest.mark.parametrize('level', ['O1', 'O4', 'O5'])
def test_functions_that_ask_for_autocast(level: str, device: torch.device) -> None:
    """``custom_fwd`` casts where autocast is on, and torch's functions are its own again when the graphs are forgotten."""

    class InFloat(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=device.type, cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x @ x.t()

        @staticmethod
        @torch.amp.custom_bwd(device_type=device.type)
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient @ gradient

    def answers(y: Tensor) -> list[Any]:
        named = torch.is_autocast_enabled(device_type=y.device.type)
        found = [InFloat.apply(y.detach()).dtype, named, torch.is_autocast_enabled(y.device.type)]
        with amp.disable_casts():
            return [*found, InFloat.apply(y.detach()).dtype, torch.is_autocast_enabled(y.device.type)]

    asks = torch.is_autocast_enabled, torch.get_autocast_dtype
    model = Body(answers).to(device)
    with fresh():
        initialized(model, level)
        x = torch.randn(4, 4, device=device)
        expected = model(x)
        assert len(set(expected)) == (2 if level == 'O5' else 4)
        for call in (torch.compile(model, **AOT), torch.compile(lambda x: model(x), **AOT)):
            assert call(x) == expected
        # and outside of graphs they answer as ever
        assert not torch.is_autocast_enabled(device.type)
        with torch.autocast(device.type, dtype=torch.float16):
            assert (
                torch.is_autocast_enabled(device_type=device.type)
                and torch.get_autocast_dtype(device.type) is torch.float16
            )
    assert (torch.is_autocast_enabled, torch.get_autocast_dtype) == asks


@pytest.mark.parametrize('level', ['O2', 'O4'])
def test_sparse_tensors_in_a_graph(level: str, device: torch.device) -> None:
    """They have no storage by which a write to them would be found."""
    sparse = torch.eye(4, device=device).to_sparse()

    def product(y: Tensor) -> Tensor:
        return F.layer_norm(torch.sparse.mm(sparse, y.float()), (4,)).sum()

    model = Body(product).to(device)
    with fresh():
        initialized(model, level)
        x = torch.randn(4, 4, device=device)
        assert torch.allclose(torch.compile(model, **AOT)(x), model(x), atol=0.05)


def noted(x: Tensor) -> torch.dtype:
    """Registered by its name, which is looked up before the model is called."""
    return x.dtype


def outside_and_inside(x: Tensor) -> list[Any]:
    asked = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)
    return [noted(x), *asked]


@pytest.mark.parametrize('level', ['O1', 'O4', 'O5'])
def test_what_was_looked_up_before_the_first_region(level: str, device: torch.device) -> None:
    """A graph that has called a function outside of the model is made anew when the model is found to patch it."""
    model = Body(outside_and_inside).to(device)
    with fresh():
        initialized(model, level, fp32_ops=[f'{__name__}.noted'])
        x = torch.randn(4, 4, device=device).to(HALF[level])

        def train(x: Tensor) -> list[Any]:
            return [outside_and_inside(x), model(x), outside_and_inside(x)]

        expected = train(x)
        assert expected[0] == expected[2] != expected[1]
        assert torch.compile(train, fullgraph=True, **AOT)(x) == expected
