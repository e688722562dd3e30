"""The mechanism on this torch: spare kinds of autocast, kernels at their keys, a class of its own for each cast module.

To be run by itself, and before anything else, on a torch that is new.
"""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from bits import differences, same_bits
from compiling import start
from pairs import pairs
from processes import python
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call, grad, jacrev, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from amp_wrapper import AmpOptimWrapper, amp

LEVELS = ('O4', 'O5', 'O1', 'O2')
X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Part(nn.Sequential):
    """Dropout, an op and a function of the FP32 registry, and something that is called in between."""

    between: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self[1](self[0](x))
        if self.between:
            self.between()
        return self[2](x) + F.mse_loss(x, x * 2) * F.normalize(x, dim=-1)


def usual(net: Net, y: Tensor, part: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    # torch 2.6 asks no partial for its truth in a graph
    return (net.part if part is None else part)(y).softmax(-1) + y.sum()


class Net(nn.Module):
    """A layer, a part, and a function of both."""

    def __init__(self, body: Callable[[Net, Tensor], Tensor] = usual) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(4, 4), body
        self.part = Part(nn.Linear(4, 4), nn.Dropout(0.5), nn.LayerNorm(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.layer(x))


def cast(level: str, net: nn.Module | None = None) -> Any:
    return amp.initialize(Net().eval() if net is None else net, opt_level=level, verbosity=0)


# -- torch.compile -----------------------------------------------------------------------------------------------------------


def broken(net: Net, y: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return usual(net, y)


def broken_within(net: Net, y: Tensor) -> Tensor:
    net.part.between = torch._dynamo.graph_break
    return usual(net, y)


def again(reentrant: bool, net: Net, y: Tensor) -> Tensor:
    return usual(net, y, functools.partial(checkpoint, net.part, use_reentrant=reentrant))


BODIES: dict[str, Any] = {
    'usual': usual,
    'graph break': broken,
    'graph break in a part': broken_within,
    'checkpoint': functools.partial(again, False),
    'reentrant checkpoint': functools.partial(again, True),
    'cond': lambda net, y: torch.cond(
        y.sum() > 9, lambda y: y.float(), lambda y: F.mse_loss(y, y * 2) * y.float(), (y,)
    ),
}


def trained(body: str, level: str, way: str) -> list[Any]:
    """An output and all gradients, twice."""
    torch.manual_seed(0)
    net, found = Net(BODIES[body]), []
    by = functools.partial(torch.compile, backend='aot_eager', fullgraph='break' not in body)
    call, _ = start(net, level, way, by, loss_scale=1.0)
    for _ in range(2):
        x = X.clone().requires_grad_()
        output = call(x)
        output.square().sum().backward()
        found.append([output.detach(), x.grad, [p.grad for p in net.parameters()]])
        net.zero_grad()
    with ThreadPoolExecutor(1) as thread:
        return [*found, thread.submit(call, X).result().detach()]


@pairs(body=BODIES, way=['before', 'after', 'in place', 'function'], level=LEVELS)
def test_compiled(body: str, way: str, level: str) -> None:
    assert differences(trained(body, level, way), trained(body, level, 'eager')) == []


# -- all else that torch does with a model -----------------------------------------------------------------------------------


def replica(module: nn.Module) -> nn.Module:
    """As DataParallel makes them."""
    twin: nn.Module = module._replicate_for_data_parallel()  # type: ignore[operator]
    for name, part in module.named_children():
        setattr(twin, name, replica(part))
    for name, weight in module._parameters.items():
        setattr(twin, name, weight.clone())
    return twin


#: The first two have weights of their own.
COPIES: dict[str, Any] = {'deepcopy': copy.deepcopy, 'pickle': lambda net: pickle.loads(pickle.dumps(net))}
COPIES |= {'copy': copy.copy, 'replica': replica}


@pytest.mark.parametrize('level', ['O4', 'O5'])
def test_model_that_is_read_in_another_process(level: str, tmp_path: Path) -> None:
    net = cast(level)
    torch.save(net, tmp_path / 'net')
    code = "from test_mechanism import *; torch.save(torch.load('{0}/net', weights_only=False)(X), '{0}/out')"
    assert python('-c', code.format(tmp_path), cwd=Path(__file__).parent).returncode == 0
    assert same_bits(torch.load(tmp_path / 'out'), net(X))


class Reversed(nn.LayerNorm):
    """Copies itself with its weights in another order."""

    def __deepcopy__(self, memo: Any) -> Reversed:
        copied = Reversed(4)
        copied._parameters = dict(reversed(copy.deepcopy(self._parameters, memo).items()))
        return copied


@pytest.mark.parametrize('level', LEVELS)
def test_copy_with_weights_in_another_order(level: str) -> None:
    net = Reversed(4)
    expected = net(X)
    amp.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), opt_level=level, verbosity=0)
    assert torch.allclose(copy.deepcopy(net)(X), expected, atol=0.05)


@pytest.mark.parametrize('level', LEVELS)
def test_module_that_was_compiled_in_place_runs_after_detach(level: str) -> None:
    net = Net().eval()
    expected = net(X)
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    wrapper.attach(net)
    net.compile(backend='eager')
    wrapper.detach()
    assert torch.allclose(net(X), expected, atol=0.01)


@pairs(way=COPIES, level=(*LEVELS, 'O3'))
def test_copies(way: str, level: str) -> None:
    net = cast(level)
    expected, twin = net(X), COPIES[way](net)
    assert same_bits(twin(X), expected) and isinstance(twin, Net)
    if way in list(COPIES)[:2]:
        for weight in twin.layer.parameters():
            nn.init.constant_(weight, 3)
        assert twin.layer(torch.ones(2, 4)).eq(15).all() and same_bits(net(X), expected)


def plainly(net: Net, x: Tensor) -> Tensor:
    return net(x)


def summed(net: Net) -> Callable[[Tensor], Tensor]:
    return lambda x: net(x).square().sum()


def nested(net: Net, x: Tensor) -> Tensor:
    net.body = lambda net, y: net.part[2](net.part[0](y)).softmax(-1)
    return torch.cat(net(torch.nested.nested_tensor([x[:1], x[1:]])).unbind())


#: What is called, and what gives the same. In its strict mode, torch.export fails over blocks of torch.autocast by themselves.
CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    'export': (lambda net, x: torch.export.export(net, (x,), strict=False).module()(x), plainly),
    'jit.trace': (lambda net, x: torch.jit.trace(net, (x,))(x), plainly),
    'make_fx': (lambda net, x: make_fx(net)(x)(x), plainly),
    'functional_call': (lambda net, x: functional_call(net, dict(net.named_parameters()), x), plainly),
    'inference_mode': (lambda net, x: torch.inference_mode()(lambda: net(x))(), plainly),
    'nested tensor': (nested, plainly),
    'vmap': (lambda net, x: vmap(net)(x), lambda net, x: torch.stack([net(row) for row in x])),
    'grad': (lambda net, x: grad(summed(net))(x), lambda net, x: jacobian(summed(net), x)),
    'jacrev': (lambda net, x: jacrev(net)(x), jacobian),
    'double backward': (lambda net, x: hessian(summed(net), x), lambda net, x: jacrev(jacrev(summed(net)))(x)),
}


@pairs(name=CALLS, level=LEVELS)
def test_calls(name: str, level: str) -> None:
    net = cast(level)
    found, expected = (call(net, X) for call in CALLS[name])
    # a batch of vmap is another product, and is rounded in other places
    assert torch.allclose(found, expected, atol=0.05) if 'vmap' in name else same_bits(found, expected)


@pytest.mark.parametrize('level', LEVELS)
def test_tensors_without_numbers(level: str) -> None:
    net = cast(level)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert net.layer(mode.from_tensor(X)).dtype is net.layer(X).dtype
    assert net.to('meta')(X.to('meta')).dtype is torch.float32


@pytest.mark.parametrize('reentrant', [True, False])
def test_threads(reentrant: bool) -> None:
    """One model on two threads and another on a third, whose parts meet, and meet where they run again."""
    models = [cast(level, Net(functools.partial(again, reentrant)).eval()) for level in ('O1', 'O4')]
    meet = threading.Barrier(3, timeout=60)

    def run(net: Net) -> Tensor:
        output = net(x := X.clone().requires_grad_())
        output.sum().backward()
        return torch.stack([output, x.grad])

    first, other = map(run, models)
    for net in models:
        net.part.between = meet.wait
    with ThreadPoolExecutor(3) as threads:
        assert differences(list(threads.map(run, [models[0], *models])), [first, first, other]) == []


# -- classes -----------------------------------------------------------------------------------------------------------------


class Kind(type):
    def __call__(cls, *args: Any) -> Any:
        made = super().__call__(*args)
        made._amp = 2
        return made


class Odd(nn.Linear, metaclass=Kind):
    __slots__ = ('scale',)

    def __init_subclass__(cls, *, kind: str) -> None:
        cls.kind = kind

    def __reduce__(self) -> Any:
        return Odd, (4, 4), self.__dict__

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * self._amp * getattr(self, 'scale', 1)

    def __setattr__(self, name: str, value: Any) -> None:
        assert name != '__class__'
        super().__setattr__(name, value)


@pytest.mark.parametrize('level', LEVELS)
def test_class_that_is_its_own_way(level: str) -> None:
    net = nn.Sequential(Odd(4, 4), nn.Linear(4, 4))
    expected = net(X)
    found = cast(level, net)(X)
    assert not same_bits(found, expected) and torch.allclose(found, expected, atol=0.05)
    assert isinstance(net[0], Odd) and (type(net[0]).__name__, str(net[0])) == ('Odd', str(Odd(4, 4)))
    assert all(same_bits(copied(net)(X), found) for copied in COPIES.values())


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize('level', LEVELS)
def test_parametrization_of_a_cast_module(level: str) -> None:
    net = cast(level, nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)))
    expected, cls = net(X), type(net[0])
    parametrize.register_parametrization(net[0], 'weight', Double())
    assert same_bits(net(X), expected * 2)
    # as torch copies one whose class has a __deepcopy__ of its own
    with pytest.raises(RuntimeError, match='parametrized modules'):
        copy.deepcopy(net)
    parametrize.remove_parametrizations(net[0], 'weight', leave_parametrized=False)
    assert same_bits(net(X), expected) and type(net[0]) is cls
