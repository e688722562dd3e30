"""What a forward writes into its arguments is there after the call, at every level and however the call is cast."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from doors import DOORS, behind
from torch import Tensor, nn

from amp_wrapper import amp
from amp_wrapper.policy import LEVELS


@dataclasses.dataclass
class State:
    hidden: Tensor
    calls: int = 0


@dataclasses.dataclass
class SlottedState:
    __slots__ = ('calls', 'hidden')
    hidden: Tensor
    calls: int


class Output(OrderedDict[str, Any]):
    """A dict with attributes of its own, as outputs of Hugging Face's models are."""

    loss: Any = None


def arguments() -> dict[str, Any]:
    """Containers of each kind with FP32 and 16-bit tensors, so that some are cast at any level."""
    return {
        'aux': {
            'loss': torch.zeros(4),
            'cache': torch.zeros(4),
            'gone': torch.ones(1),
            'deep': {'x': torch.ones(1)},
            'n': 1,
        },
        'half': OrderedDict(x=torch.ones(2).half(), y=torch.ones(2).bfloat16()),
        'output': Output(logits=torch.ones(2), half=torch.ones(1).half()),
        'items': [torch.ones(1), torch.ones(1).half()],
        'state': State(torch.ones(1)),
        'slots': SlottedState(torch.ones(1), 0),
        'cache': torch.zeros(3),
        'q': (same := torch.ones(2)),
        'k': same,
    }


def write(given: dict[str, Any]) -> None:
    aux = given['aux']
    aux['loss'] = aux['loss'] + 1
    aux['cache'][1:3] = 7.0
    del aux['gone']
    aux['deep']['new'] = aux['deep']['x'] * 2
    aux['n'] += 1
    given['half']['z'] = 'text'
    given['output'].loss = given['output']['logits'].sum()
    given['items'].append(3)
    given['items'][0] = given['items'][0] + 4
    given['state'].hidden = given['state'].hidden * 2
    given['state'].calls = 3
    given['slots'].calls = 5
    given['cache'][0].add_(2)
    given['seen'] = given['q'] is given['k']


def plain(value: Any) -> Any:
    """A nested value with lists of numbers in the place of tensors."""
    if isinstance(value, Tensor):
        return value.detach().float().tolist()
    if isinstance(value, Output):
        return plain([dict(value), value.loss])
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


class Writes(nn.Module):
    """A module with a weight of its own that writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.same = False

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        write(given)
        self.same = given['seen']
        return x * self.scale


class WritingLoss(Writes):
    """As its base; a loss by its name."""


class Net(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.block = block

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        return self.block(self.stem(x), **given)


def expected() -> Any:
    given = arguments()
    write(given)
    return plain({key: given[key] for key in arguments()})


def compiled_around(call: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(lambda *args, **kwargs: call(*args, **kwargs), backend='aot_eager', fullgraph=True)


@pytest.mark.parametrize('block', [Writes, WritingLoss])
@pytest.mark.parametrize('options', [{}, {'keep_fp32': ['block']}], ids=['cast', 'kept'])
@pytest.mark.parametrize('door', DOORS)
@pytest.mark.parametrize('level', LEVELS)
def test_what_a_forward_writes_is_in_the_containers_of_the_caller(
    level: str, door: str, options: dict[str, Any], block: type[Writes]
) -> None:
    given = arguments()
    identities = [id(given['aux']['cache']), id(given['aux']['deep']), id(given['items'])]
    net = Net(block())
    behind(door, net, level, **(options if level != 'O0' else {}))(torch.ones(2, 4), **given)
    assert plain(given) == expected()
    assert [id(given['aux']['cache']), id(given['aux']['deep']), id(given['items'])] == identities
    assert net.block.same


@pytest.mark.parametrize('with_gradient', [False, True])
@pytest.mark.parametrize('door', DOORS)
@pytest.mark.parametrize('level', LEVELS)
def test_what_was_not_written_is_not_rounded(level: str, door: str, with_gradient: bool) -> None:
    class Bank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.row = nn.Parameter(torch.full((3,), 7.0))

        def forward(self, bank: Tensor) -> Tensor:
            bank[1] = self.row if with_gradient else 7.0
            return bank.sum()

    bank = torch.tensor([[1000.3, -torch.inf, 1e-9]]).repeat(3, 1)
    right = bank.clone()
    right[1] = 7.0
    net = Bank()
    behind(door, net, level)(bank)
    assert torch.equal(bank, right)
    if with_gradient:
        bank[1].sum().backward()
        assert net.row.grad is not None and net.row.grad.float().tolist() == [1.0] * 3


@pytest.mark.parametrize('level', LEVELS)
def test_what_kept_modules_write_is_not_rounded(level: str) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, count: Tensor) -> Tensor:
            count.add_(1)
            return self.weight * count

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.counts = nn.Linear(4, 4), Counts()

        def forward(self, x: Tensor, count: Tensor) -> Tensor:
            return self.stem(x).sum() + self.counts(count) + self.counts(count)

    options: dict[str, Any] = {} if level == 'O0' else {'keep_fp32': ['counts']}
    net = amp.initialize(Twice(), opt_level=level, verbosity=0, **options)
    count = torch.tensor(2048.0)
    for _ in range(3):
        net(torch.ones(1, 4), count)
    assert count.item() == 2054


@pytest.mark.parametrize('is_caught', [True, False])
@pytest.mark.parametrize('door', DOORS)
@pytest.mark.parametrize('level', LEVELS)
def test_what_was_written_before_an_exception_is_there(level: str, door: str, is_caught: bool) -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, aux: dict[str, Tensor]) -> Tensor:
            aux['calls'] = aux['calls'] + 1
            if not self.training:
                raise ValueError('not here')
            return x * self.scale

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block = nn.Linear(4, 4), Fails()

        def forward(self, x: Tensor, aux: dict[str, Tensor]) -> Tensor:
            hidden = self.stem(x)
            try:
                return self.block(hidden, aux)
            except ValueError:
                if not is_caught:
                    raise
                return hidden

    net = Tries()
    call = behind(door, net, level)
    aux, x = {'calls': torch.zeros(4)}, torch.ones(2, 4)
    for count, training in enumerate((True, False, False, True), 1):
        net.block.train(training)
        with contextlib.nullcontext() if training or is_caught else pytest.raises(ValueError, match='not here'):
            call(x, aux)
        assert aux['calls'].tolist() == [count] * 4
    held = weakref.ref(x)
    del x
    gc.collect()
    assert held() is None


@pytest.mark.parametrize('around', ['model', 'function'])
@pytest.mark.parametrize('level', ['O0', 'O2', 'O4', 'O5'])
def test_the_same_in_a_whole_graph(level: str, around: str) -> None:
    torch._dynamo.reset()
    net = amp.initialize(Net(Compilable()), opt_level=level, verbosity=0, keep_fp32=None)
    call = compiled_around(net) if around == 'function' else torch.compile(net, backend='aot_eager', fullgraph=True)
    for _ in range(2):
        given = {key: value for key, value in arguments().items() if key not in UNTRACED}
        call(torch.ones(2, 4), **given)
        assert plain(given) == {key: expected()[key] for key in given}


#: What torch.compile itself cannot be given.
UNTRACED = ('slots', 'output')


class Compilable(Writes):
    def forward(self, x: Tensor, **given: Any) -> Tensor:
        write({**given, 'slots': SlottedState(x, 0), 'output': Output(logits=x)})
        return x * self.scale


@pytest.mark.parametrize('level', ['O1', 'O2', 'O3', 'O4', 'O5'])
def test_functions_that_are_decorated_or_named_in_fp32_ops_write_too(level: str) -> None:
    amp.register_float_function(Table, 'fill')
    given: dict[str, Any] = {'x': torch.ones(2).to(torch.bfloat16 if level in ('O4', 'O5') else torch.float16)}

    class Filled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            given['x'] = result.to(given['x'].dtype)
            Table.named(given)
            if level in ('O1', 'O4'):
                Table.fill(given)
            return result

    amp.initialize(Filled(2, 2), opt_level=level, verbosity=0, fp32_ops=[Table.named])(torch.ones(1, 2))
    assert given['named'] is torch.float32
    assert given.get('filled', torch.float32) is torch.float32


class Table:
    @staticmethod
    def fill(given: dict[str, Any]) -> None:
        given['filled'] = given['x'].dtype

    @staticmethod
    def named(given: dict[str, Any]) -> None:
        given['named'] = given['x'].dtype


@pytest.mark.parametrize('level', ['O2', 'O5'])
def test_auxiliary_losses_reach_their_gates(level: str) -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(8))
            self.gate = nn.Linear(8, 2)

        def forward(self, x: Tensor, aux: dict[str, Tensor]) -> Tensor:
            aux['balance'] = aux['balance'] + self.gate(x).softmax(-1).float().mean(0).square().sum()
            return x * self.gamma

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Expert() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            aux = {'balance': torch.zeros(())}
            for block in self.blocks:
                x = block(x, aux)
            return aux['balance']

    net = Experts()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    names = [name for name, _ in net.named_parameters()]
    net, optimizer = amp.initialize(net, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
    with amp.scale_loss(net(torch.randn(4, 8)), optimizer) as scaled:
        scaled.backward()
    with_gradient = [name for name, p in zip(names, amp.master_params(optimizer)) if p.grad is not None]
    assert [name for name in names if 'gate' in name] == [name for name in with_gradient if 'gate' in name]


@pytest.mark.parametrize('level', ['O2', 'O5'])
def test_a_module_that_calls_itself_and_one_that_fails_keep_their_own_containers(level: str) -> None:
    class Deep(nn.Linear):
        def forward(self, x: Tensor, seen: list[Any], depth: int = 2) -> Tensor:
            if depth < 0:
                raise KeyError(depth)
            seen.append(depth)
            inner = [torch.ones(1)]
            result = super().forward(x) if depth == 0 else self(x, inner, depth - 1)
            seen.append(len(inner))
            return result

    net = amp.initialize(Deep(2, 2), opt_level=level, verbosity=0)
    seen = [torch.ones(1)]
    net(torch.ones(1, 2), seen)
    assert seen[1:] == [2, 3]
    for _ in range(2):
        with pytest.raises(KeyError):
            net(torch.ones(1, 2), seen, -1)
    net(torch.ones(1, 2), seen, 0)
    assert seen[3:] == [0, 1]


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor

    @functools.cached_property
    def double(self) -> Tensor:
        return self.x * 2


@pytest.mark.parametrize('mode', [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize('level', ['O1', 'O2', 'O4', 'O5'])
def test_caches_are_written_in_every_mode(level: str, mode: Any) -> None:
    class Caches(nn.Linear):
        def forward(self, x: Tensor, cache: Tensor, given: Frozen) -> Tensor:
            with torch.no_grad():
                cache[1:] = 3.0
            return super().forward(x) + given.double

    leaf = torch.zeros(4, requires_grad=True)
    for options in ({}, {'keep_fp32': ['Caches']}):
        net = amp.initialize(nn.Sequential(Caches(4, 4)), opt_level=level, verbosity=0, **options)[0]
        with mode():
            cache = torch.zeros(4)
            net(torch.ones(1, 4), cache, Frozen(torch.ones(4)))
        assert cache.tolist() == [0, 3, 3, 3]
        net(torch.ones(1, 4), leaf, Frozen(torch.ones(4)))
        assert leaf.tolist() == [0, 3, 3, 3]
