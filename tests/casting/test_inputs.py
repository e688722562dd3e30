"""Arguments of a forward: what it writes into them, which are not rounded, and numbers beyond the range of 16 bits."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forwards import CAST, DOORS, HALF, LEVELS, prepared
from pairs import pairs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_wrapper import AmpConfigError, amp

F32 = torch.float32


def initialized(model: nn.Module, level: str = 'O5', **options: Any) -> Any:
    return amp.initialize(model, opt_level=level, **{'verbosity': 0, **options})


def in_a_graph(call: Callable[..., Any], whole: bool = True) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(lambda *args, **kwargs: call(*args, **kwargs), backend='aot_eager', fullgraph=whole)


class Calls(nn.Module):
    """Some parts; its forward is any function. It keeps the arguments that it was given."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = args
        return self.function(self, *args, **kwargs)


class Weighs(Calls):
    """It has a weight of ones, too."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__(function, **parts)
        self.weight = nn.Parameter(torch.ones(4))


class WeighsLoss(Weighs):
    """As its base; a loss by its name."""


# -- written arguments -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class State:
    hidden: Tensor
    calls: int = 0


class Output(OrderedDict[str, Any]):
    """A dict of a class of its own, as outputs of Hugging Face's models are."""


def arguments(traced: bool = False) -> dict[str, Any]:
    """Containers with FP32 and 16-bit tensors, so that some are cast at any level."""
    same = torch.ones(2)
    given: dict[str, Any] = {
        'aux': {'loss': torch.zeros(4), 'cache': torch.zeros(4), 'gone': torch.ones(1), 'deep': {'x': torch.ones(1)}},
        'items': [torch.ones(1), torch.ones(1).half(), torch.ones(1).bfloat16()],
        'cache': torch.zeros(3),
        'q': same,
        'k': same,
    }
    if not traced:
        # what torch.compile itself cannot be given
        given.update(output=Output(logits=torch.ones(2), half=torch.ones(1).half()), state=State(torch.ones(1)))
    return given


def write(given: dict[str, Any], row: Tensor) -> bool:
    """Write into each of :func:`arguments`; whether one tensor under two names is still one."""
    aux = given['aux']
    aux['loss'] = aux['loss'] + row
    aux['cache'][1:3] = 7.0
    del aux['gone']
    aux['deep']['new'] = aux['deep']['x'] * 2
    given['items'].append(3)
    given['items'][0] = given['items'][0] + 4
    given['cache'][0].add_(2)
    if 'output' in given:
        given['output']['loss'] = given['output']['logits'].sum()
        given['state'].hidden, given['state'].calls = given['state'].hidden * 2, 3
    return given['q'] is given['k']


def plain(value: Any) -> Any:
    """A nested value with lists of numbers in the place of tensors."""
    if isinstance(value, Tensor):
        return value.detach().float().tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, State):
        return plain([value.hidden, value.calls])
    return value


def write_all(self: Any, x: Tensor, **given: Any) -> Tensor:
    self.same = write(given, self.weight)
    return x * self.weight


def with_stem(block: Weighs) -> Calls:
    return Calls(lambda self, x, **given: self.block(self.stem(x), **given), stem=nn.Linear(4, 4), block=block)


@pairs(level=LEVELS, door=DOORS, kept=[False, True], block=[Weighs, WeighsLoss])
def test_containers_of_the_caller_have_what_a_forward_writes(level: str, door: str, kept: bool, block: Any) -> None:
    given = arguments()
    objects = [given['aux']['cache'], given['aux']['deep'], given['items']]
    model = with_stem(block(write_all))
    prepared(model, level, door, keep_fp32=['block'] if kept and level != 'O0' else None)(torch.ones(2, 4), **given)
    expected = arguments()
    write(expected, torch.ones(4))
    assert plain(given) == plain(expected) and model.block.same
    assert all(now is then for now, then in zip((given['aux']['cache'], given['aux']['deep'], given['items']), objects))
    # auxiliary losses reach the weights
    given['aux']['loss'].sum().backward()
    assert model.block.weight.grad.tolist() == [1.0] * 4


#: Plain torch 2.6 compares no dicts by identity in a graph.
BREAKS = pytest.mark.xfail(torch.__version__.startswith('2.6.'), raises=torch._dynamo.exc.Unsupported, reason='2.6')


@pytest.mark.parametrize(('level', 'whole'), [('O4', True), pytest.param('O5', True, marks=BREAKS), ('O5', False)])
def test_same_in_a_graph(level: str, whole: bool) -> None:
    def weigh(self: Calls, x: Tensor, **given: Any) -> Tensor:
        if not whole:
            torch._dynamo.graph_break()
        return x * self.weight * write(given, self.weight)

    model = initialized(with_stem(Weighs(weigh)), level)
    call, expected = in_a_graph(model, whole), arguments(traced=True)
    write(expected, torch.ones(4))
    for _ in range(2):
        given = arguments(traced=True)
        # nothing comes of it where one tensor under two names has become two
        assert call(torch.ones(2, 4), **given).any() and plain(given) == plain(expected)


@pairs(level=LEVELS, door=DOORS, with_gradient=[False, True])
def test_elements_that_were_not_written_are_not_rounded(level: str, door: str, with_gradient: bool) -> None:
    def fill(self: Calls, bank: Tensor) -> Tensor:
        bank[1] = self.weight[:3] if with_gradient else 1.0
        return bank.sum()

    bank = torch.tensor([[1000.3, -torch.inf, 1e-9]]).repeat(3, 1)
    right, model = bank.clone(), Weighs(fill)
    right[1] = 1.0
    prepared(model, level, door)(bank)
    assert torch.equal(bank, right)
    if with_gradient:
        bank[1].sum().backward()
        assert model.weight.grad is not None and model.weight.grad.tolist() == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize('level', LEVELS)
def test_kept_module_writes_unrounded(level: str) -> None:
    counts = Weighs(lambda self, count: self.weight * count.add_(1))
    model = Weighs(lambda self, x, count: x.sum() + self.counts(count) + self.counts(count), counts=counts)
    initialized(model, level, keep_fp32=None if level == 'O0' else ['counts'])
    count = torch.tensor(2048.0)
    for _ in range(3):
        model(torch.ones(1, 4), count)
    assert count.item() == 2054


def fail(self: Weighs, x: Tensor, aux: dict[str, Tensor]) -> Tensor:
    aux['calls'] = aux['calls'] + 1
    if not self.training:
        raise ValueError('not here')
    return x * self.weight


@pairs(level=LEVELS, door=DOORS, is_caught=[True, False])
def test_writes_before_an_exception_are_there(level: str, door: str, is_caught: bool) -> None:
    def attempt(self: Any, x: Tensor, aux: dict[str, Tensor]) -> Tensor:
        try:
            return self.block(x, aux)
        except ValueError:
            if is_caught:
                return x
            raise

    model = Calls(attempt, block=Weighs(fail))
    call = prepared(model, level, door)
    aux, x = {'calls': torch.zeros(4)}, torch.ones(2, 4)
    for count, training in enumerate((True, False, False, True), 1):
        model.block.train(training)
        with contextlib.nullcontext() if training or is_caught else pytest.raises(ValueError, match='not here'):
            call(x, aux)
        assert aux['calls'].tolist() == [count] * 4
    model.seen = model.block.seen = ()
    held = weakref.ref(x)
    del x
    gc.collect()
    assert held() is None


@pytest.mark.parametrize('level', CAST)
def test_writes_before_an_exception_in_a_model_that_has_weights_itself_are_there(level: str) -> None:
    model, aux = initialized(Weighs(fail).eval(), level), {'calls': torch.zeros(4)}
    with pytest.raises(ValueError, match='not here'):
        model(torch.ones(2, 4), aux)
    assert aux['calls'].tolist() == [1] * 4


@pairs(level=list(HALF), mode=[torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_caches_are_written_in_every_mode(level: str, mode: Any) -> None:
    def cache_it(self: Weighs, x: Tensor, cache: Tensor) -> Tensor:
        with torch.no_grad():
            cache[1:] = 3.0
        return self.weight * x

    for options in ({}, {'keep_fp32': ['Weighs']}):
        model = initialized(nn.Sequential(Weighs(cache_it)), level, **options)[0]
        with mode():
            cache = torch.zeros(4)
            model(torch.ones(1, 4), cache)
        leaf = torch.zeros(4, requires_grad=True)
        model(torch.ones(1, 4), leaf)
        assert cache.tolist() == leaf.tolist() == [0, 3, 3, 3]


# -- inputs that are not rounded -------------------------------------------------------------------------------------------


def encode(self: Any, batch: dict[str, Tensor]) -> Tensor:
    return self.head(self.encoder(batch['points']))


def network(function: Callable[..., Any] = encode) -> Any:
    torch.manual_seed(0)
    return Calls(function, encoder=Weighs(lambda self, x: (x * self.weight[:3]).square()), head=nn.Linear(3, 2))


POINTS = torch.rand(100, 3, generator=torch.Generator().manual_seed(0)) * 60 + 10


@pairs(level=list(HALF), door=DOORS, options=[{'keep_fp32': ['encoder']}, {'fp32_ops': [Weighs]}])
def test_kept_module_gets_the_inputs_of_the_model_as_they_were(level: str, door: str, options: dict[str, Any]) -> None:
    model = network()
    prepared(model, level, door, **options)({'points': POINTS})
    assert torch.equal(model.encoder.seen[0], POINTS)


def test_kept_module_gets_them_in_a_graph_and_when_it_is_recomputed() -> None:
    model = initialized(network(), keep_fp32=['encoder'])
    in_a_graph(model)({'points': POINTS})
    assert torch.equal(model.encoder.seen[0], POINTS)
    for reentrant in (True, False):
        model.function = lambda self, batch, reentrant=reentrant: self.head(
            checkpoint(self.encoder, batch['points'], use_reentrant=reentrant)
        )
        result = model({'points': POINTS.clone().requires_grad_(reentrant)}).sum()
        model.encoder.seen = ()
        result.backward()
        assert torch.equal(model.encoder.seen[0], POINTS)


@pytest.mark.parametrize('level', ['O2', 'O5'])
def test_kept_module_gets_what_was_written_meanwhile(level: str) -> None:
    def shift(self: Any, batch: dict[str, Tensor]) -> Tensor:
        batch['points'].add_(1)
        return encode(self, batch)

    model, points = initialized(network(shift), level, keep_fp32=['encoder']), POINTS.clone()
    model({'points': points})
    assert torch.equal(model.encoder.seen[0], (POINTS.to(HALF[level]) + 1).float())
    assert torch.equal(points, model.encoder.seen[0])


@pairs(level=LEVELS, is_leaf=[True, False], given=['kept module', 'function of the registry'])
def test_derivative_by_an_input_is_whole(level: str, is_leaf: bool, given: str) -> None:
    def energy(self: Any, points: Tensor) -> Tensor:
        points.requires_grad_(True)
        found = self.encoder(points) if given == 'kept module' else torch.linalg.norm(points, dim=-1) ** 2
        return torch.autograd.grad(found.sum() + points.sum(), points)[0].float()

    def forces(level: str) -> Tensor:
        model = initialized(network(energy), level, keep_fp32=None if level == 'O0' else ['encoder'])
        return model(POINTS.clone().requires_grad_(is_leaf))

    right, found = forces('O0'), forces(level)
    # the input has one rounding, and so has the gradient
    eps = torch.finfo(HALF.get(level, torch.float16)).eps
    assert (found - right).abs().max() <= 2 * eps * right.abs().max()


# -- keep_inputs -----------------------------------------------------------------------------------------------------------


class Embed(Weighs):
    def forward(self, timestep: Tensor) -> Tensor:
        return super().forward(timestep)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = Embed(lambda self, t: (t * self.weight[:2]).sin()[:, None]), nn.Linear(3, 3)

    def forward(self, x: Tensor, timestep: Tensor, scale: Any = None) -> Tensor:
        self.types = x.dtype, timestep.dtype, F32 if scale is None else scale['s'].dtype
        return self.layer(x) + self.embed(timestep)


STEPS = torch.tensor([999.3986, 988.4937])
#: The arguments of the model, and how those reach a module inside of it that keeps them.
WAYS: dict[str, tuple[Any, Any, Any]] = {
    'by place': ((STEPS, {'s': torch.ones(1)}), {}, lambda self, *args: self.net(*args)),
    'by name': ((), dict(timestep=STEPS, scale={'s': torch.ones(1)}), lambda self, x, **words: self.net(x, **words)),
    'entry of a dict': (({'t': STEPS},), {}, lambda self, x, batch: self.net(x, batch['t'])),
}


@pairs(level=LEVELS, door=DOORS, way=WAYS, inside=[True, False])
def test_arguments_that_keep_inputs_names_stay_as_they_are(level: str, door: str, way: str, inside: bool) -> None:
    args, words, pass_on = WAYS[way]
    net = Denoiser()
    model = Calls(pass_on, net=net) if inside or 'dict' in way else net
    prepared(model, level, door, keep_inputs=['timestep', 'scale'])(torch.randn(2, 3), *args, **words).sum().backward()
    assert torch.equal(net.embed.seen[0], STEPS)
    assert net.types == (net.layer.weight.dtype, F32, F32)


@pytest.mark.parametrize('door', DOORS)
def test_name_that_no_forward_has_is_refused_before_anything_changes(door: str) -> None:
    model = Denoiser()
    with pytest.raises(AmpConfigError, match=r"keep_inputs='timesteps'.*timestep"):
        prepared(model, 'O5', door, keep_inputs=['timesteps'])(torch.randn(2, 3), STEPS)
    assert model.layer.weight.dtype is F32


# -- numbers beyond the range ----------------------------------------------------------------------------------------------


@pairs(level=CAST, door=DOORS)
def test_masks_are_clamped_to_the_range(level: str, door: str) -> None:
    """What is below it; what is above it overflows, also among data. The place of an argument does not matter."""
    model = Weighs(lambda self, mask, again: self.weight)
    mask = torch.tensor([torch.finfo(F32).min, -1e9, 1e9, -torch.inf, torch.nan, 0.5])
    prepared(model, level, door)(mask, mask.clone())
    expected = mask.clamp(torch.finfo(HALF[level]).min).to(HALF[level])
    expected[3] = -torch.inf
    for seen in model.seen[:2]:
        assert torch.equal(seen.nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))


@pairs(level=CAST, compiled=[False, True], verbosity=[0, 1], table=[False, True])
def test_late_masks_and_those_from_a_table_are_clamped(level: str, compiled: bool, verbosity: int, table: bool) -> None:
    def add(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        return x * self.weight + (self.table() if table else mask)

    model = initialized(Weighs(add, table=Table(torch.full((4, 4), -1e9).triu(1))), level, verbosity=verbosity)
    call = in_a_graph(model) if compiled else model
    for number in (0.0, torch.finfo(F32).min):
        assert call(torch.ones(4, 4), torch.full((4, 4), number)).isfinite().all()


def test_data_and_activations_still_overflow() -> None:
    second = Weighs(lambda self, x: x * self.weight)
    model = initialized(Weighs(lambda self, x: self.second((x * self.weight).float() * 1e9), second=second), 'O2')
    model(torch.ones(1, 4))
    assert second.seen[0].isinf().all() and not model.seen[0].isinf().any()
    model(torch.full((1, 4), 1e9))
    assert model.seen[0].isinf().all()


# -- tables: modules that have buffers alone -------------------------------------------------------------------------------


class Table(nn.Module):
    def __init__(self, table: Tensor, function: Callable[..., Tensor] = lambda table: table) -> None:
        super().__init__()
        self.register_buffer('table', table)
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(self.table, *args)


def rotary() -> Table:
    """Frequencies of positions, as language models keep them."""
    return Table(1.0 / 10000 ** (torch.arange(0, 8, 2) / 8), lambda table, x: torch.outer(x.float(), table).cos())


def turn(self: Any, positions: Tensor) -> Tensor:
    self.result = self.rotary(positions)
    return self.result * self.weight


@pairs(level=CAST, door=DOORS)
def test_tables_are_exact(level: str, door: str) -> None:
    model, positions = Weighs(turn, rotary=rotary()), torch.arange(4000, 4096)
    # the same tensor under another name, in a module with weights
    model.register_buffer('again', model.rotary.table)
    prepared(model, level, door)(positions)
    assert model.weight.dtype is HALF[level] and model.again is model.rotary.table
    # the output goes on in the type of the model
    assert model.result.dtype is HALF[level] and torch.equal(model.result, rotary()(positions).to(HALF[level]))
    saved = model.state_dict()['rotary.table']
    assert saved.dtype is model.rotary.table.dtype is F32 and torch.equal(saved, rotary().table)


@pairs(level=LEVELS, door=DOORS)
def test_table_that_is_named_gives_its_numbers_unrounded(level: str, door: str) -> None:
    model = Weighs(turn, rotary=Table(torch.tensor([0.3]), lambda table, x: torch.arange(4) * 800 + table))
    prepared(model, level, door, keep_fp32=None if level == 'O0' else ['rotary'])(torch.ones(1))
    assert torch.equal(model.result, torch.arange(4) * 800 + 0.3)


#: Buffers beside weights, and the levels whose type cannot hold them.
BUFFERS: dict[str, tuple[Tensor, str]] = {
    'betas': (1 - torch.linspace(1e-4, 0.02, 1000), 'O2 O3 O5'),
    'positions': (torch.arange(300.0), 'O5'),
    'falling': (-torch.arange(4096.0)[:, None].expand(-1, 3).contiguous(), 'O2 O3 O5'),
    'mask': (torch.tensor([0.0, -1e9]), 'O2 O3'),
    'random': (torch.rand(4, 5000, generator=torch.Generator().manual_seed(0)), ''),
    'limits': (torch.tensor([-torch.inf, torch.inf]), ''),
}


@pairs(level=CAST, door=DOORS)
def test_buffers_that_16_bits_cannot_hold_stay_as_they_are(level: str, door: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    for name, (value, _) in BUFFERS.items():
        model[0].register_buffer(name, value.clone())
    prepared(model, level, door)(torch.ones(1, 4))
    for name, (value, levels) in BUFFERS.items():
        assert torch.equal(getattr(model[0], name), value if level in levels else value.to(HALF[level]))
