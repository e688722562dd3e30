"""16-bit and FP32 tensors meet in a forward: products compute in 16-bit, and writes take the type of their destination."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from doors import CAST_LEVELS, DOORS, behind
from mmengine.model.efficient_conv_bn_eval import turn_on_efficient_conv_bn_eval_for_single_model
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from amp_wrapper import amp

_ROWS = torch.tensor([0, 2])
_MASK = torch.tensor([True, False, True, True])

#: Products of ``x`` (4 x 4) and ``y`` (4 x 4).
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    'matmul': lambda x, y: x @ y,
    'mm': torch.mm,
    'mv': lambda x, y: x.mv(y[0]),
    'dot': lambda x, y: x[0].dot(y[0]),
    'vdot': lambda x, y: torch.vdot(x[0], y[0]),
    'bmm': lambda x, y: torch.bmm(x[None], y[None]),
    'broadcast': lambda x, y: x[None, None] @ y.expand(2, 4, 4),
    'addmm': lambda x, y: torch.addmm(y, x, y),
    'addmv': lambda x, y: torch.addmv(x[0], x, y[0]),
    'addr': lambda x, y: torch.addr(x, x[0], y[0]),
    'baddbmm': lambda x, y: torch.baddbmm(x[None], y[None], x[None]),
    'addbmm': lambda x, y: torch.addbmm(x, y[None], x[None]),
    'einsum': lambda x, y: torch.einsum('ij,kj->ik', x, y),
    'tensordot': lambda x, y: torch.tensordot(x, y, 1),
    'multi_dot': lambda x, y: torch.linalg.multi_dot([x, y, x]),
    'chain_matmul': lambda x, y: torch.chain_matmul(x, y, x),
    'linear': lambda x, y: functional.linear(x, y, y[0]),
    'linear of three dimensions': lambda x, y: functional.linear(x[None], y),
    'conv1d': lambda x, y: functional.conv1d(x[None], y[:, :, None], y[0]),
    'conv1d with a bias alone': lambda x, y: functional.conv1d(x[None], x[:, :, None], y[0]),
    'conv1d, same': lambda x, y: functional.conv1d(x[None], y[:, :, None], padding='same'),
    'conv2d': lambda x, y: functional.conv2d(x[None, :, None], y[:, :, None, None]),
    'conv3d': lambda x, y: functional.conv3d(x[None, :, None, None], y[:, :, None, None, None]),
    'conv_transpose1d': lambda x, y: functional.conv_transpose1d(x[None], y[:, :, None], y[0]),
    'conv_transpose2d': lambda x, y: functional.conv_transpose2d(x[None, :, None], y[:, :, None, None]),
    'attention': lambda x, y: functional.scaled_dot_product_attention(x[None], y[None], x[None]),
}
#: What is written: a destination and a source (4 x 4) give the destination.
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    'setitem': lambda to, y: to.__setitem__(_ROWS, y[:2]),
    'setitem behind a slice': lambda to, y: to.__setitem__((slice(None), _ROWS), y[:, :2]),
    'setitem by a mask': lambda to, y: to.__setitem__(_MASK, y[:3]),
    'index_put_': lambda to, y: to.index_put_((_ROWS,), y[:2], accumulate=True),
    'index_put': lambda to, y: to.index_put((_ROWS,), y[:2]),
    'index_copy_': lambda to, y: to.index_copy_(0, _ROWS, y[:2]),
    'index_copy': lambda to, y: to.index_copy(0, _ROWS, y[:2]),
    'index_add_': lambda to, y: to.index_add_(0, _ROWS, y[:2]),
    'index_add': lambda to, y: to.index_add(0, _ROWS, y[:2]),
    'scatter_': lambda to, y: to.scatter_(0, torch.zeros(1, 4, dtype=torch.long), y),
    'scatter': lambda to, y: to.scatter(0, torch.zeros(1, 4, dtype=torch.long), y),
    'scatter_add_': lambda to, y: to.scatter_add_(0, torch.zeros(1, 4, dtype=torch.long), y),
    'scatter_add': lambda to, y: to.scatter_add(0, torch.zeros(1, 4, dtype=torch.long), y),
    'scatter_reduce': lambda to, y: to.scatter_reduce(0, torch.zeros(1, 4, dtype=torch.long), y, 'amax'),
    'index_reduce_': lambda to, y: to.index_reduce_(0, _ROWS, y[:2], 'amax'),
    'index_reduce': lambda to, y: to.index_reduce(0, _ROWS, y[:2], 'amax'),
    'put_': lambda to, y: to.put_(_ROWS, y[0, :2], accumulate=True),
    'put': lambda to, y: to.put(_ROWS, y[0, :2], accumulate=True),
    'masked_scatter_': lambda to, y: to.masked_scatter_(_MASK, y),
    'masked_scatter': lambda to, y: to.masked_scatter(_MASK, y),
}


class Inside(nn.Module):
    """Calls a function in a forward, with the 16-bit output of a layer."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function
        self.result: Any = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        self.result = self.function(hidden)
        return hidden


def bits(tensor: Tensor) -> Any:
    return tensor.dtype, tensor.detach().float().tolist()


@pytest.mark.parametrize('name', PRODUCTS)
@pytest.mark.parametrize('level', CAST_LEVELS)
def test_products_compute_in_the_16_bit_type(level: str, name: str) -> None:
    product, other = PRODUCTS[name], torch.randn(4, 4)

    def compare(x: Tensor) -> None:
        half = x.dtype
        assert half in (torch.float16, torch.bfloat16)
        for left, right in ((x, other), (other, x)):
            assert bits(product(left, right)) == bits(product(left.to(half), right.to(half)))

    for door in DOORS:
        net = Inside(compare)
        behind(door, net, level)(torch.randn(4, 4)).sum().backward()


@pytest.mark.parametrize('name', WRITES)
@pytest.mark.parametrize('level', ['O1', 'O2', 'O3', 'O4', 'O5'])
def test_what_is_written_takes_the_type_of_its_destination(level: str, name: str) -> None:
    write = WRITES[name]
    in_place = name.endswith('_') or name.startswith('setitem')

    def compare(x: Tensor) -> None:
        for to, source in ((torch.zeros(4, 4), x), (x.clone(), torch.randn(4, 4))):
            same, result = to.clone(), write(to, source)
            if in_place:
                write(same, source.to(same.dtype))
                assert bits(to) == bits(same)
            else:
                # the tables of O1 and O4 promote, as autocast does
                assert bits(result)[1] == bits(write(same.to(result.dtype), source.to(result.dtype)))[1]

    for door in DOORS:
        behind(door, Inside(compare), level)(torch.randn(4, 4))


@pytest.mark.parametrize('name', [name for name in WRITES if name not in ('scatter_reduce',)])
@pytest.mark.parametrize('level', ['O1', 'O2', 'O3', 'O4', 'O5'])
def test_floats_are_not_written_into_integers(level: str, name: str) -> None:
    def compare(x: Tensor) -> None:
        with pytest.raises(RuntimeError):
            WRITES[name](torch.zeros(4, 4, dtype=torch.long), x)

    for door in DOORS:
        behind(door, Inside(compare), level)(torch.randn(4, 4))


@pytest.mark.parametrize('around', ['model', 'function'])
@pytest.mark.parametrize('level', ['O2', 'O5'])
def test_operands_meet_in_whole_graphs(level: str, around: str) -> None:
    def many(x: Tensor) -> list[Tensor]:
        other, to = torch.ones(4, 4), torch.zeros(4, 4)
        to[_ROWS] = x[:2]
        to[:, _ROWS] = x[:, :2]
        return [*(product(x, other) for product in PRODUCTS.values()), to, x.index_copy(0, _ROWS, other[:2])]

    torch._dynamo.reset()
    net = Inside(many)
    call: Callable[[Tensor], Tensor] = amp.initialize(net, opt_level=level, verbosity=0)
    x = torch.randn(4, 4)
    call(x)
    eager = net.result
    inner = call
    graph = torch.compile(inner if around == 'model' else lambda x: inner(x), backend='aot_eager', fullgraph=True)
    graph(x)
    assert list(map(bits, net.result)) == list(map(bits, eager))


@pytest.mark.parametrize('reentrant', [True, False])
def test_recomputed_segments_take_unlike_operands(reentrant: bool) -> None:
    other = torch.randn(4, 4)
    net = Inside(lambda x: checkpoint(lambda x: (x @ other).relu(), x, use_reentrant=reentrant))
    amp.initialize(net, opt_level='O5', verbosity=0)(torch.randn(4, 4))
    net.result.sum().backward()
    assert net.layer.weight.grad is not None


def test_nothing_acts_outside_of_a_forward_nor_on_other_threads() -> None:
    def mixed() -> None:
        with pytest.raises(RuntimeError):
            torch.ones(2, 2) @ torch.ones(2, 2).bfloat16()

    def elsewhere(x: Tensor) -> None:
        failed: list[BaseException] = []

        def run() -> None:
            try:
                mixed()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert not failed

    net = amp.initialize(Inside(elsewhere), opt_level='O5', verbosity=0)
    net(torch.randn(4, 4))
    mixed()
    net.function = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        net(torch.randn(4, 4))
    mixed()


def test_a_plain_model_inside_of_a_cast_one_is_left_alone() -> None:
    plain = amp.initialize(Inside(lambda x: x @ torch.ones(4, 4).bfloat16()), opt_level='O0', verbosity=0)
    net = amp.initialize(Inside(lambda x: plain(x)), opt_level='O5', verbosity=0)
    with pytest.raises(RuntimeError, match='same dtype'):
        net(torch.randn(4, 4))


@pytest.mark.parametrize('level', ['O1', 'O2', 'O4', 'O5'])
def test_convolutions_with_folded_batchnorm_run(level: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    net[1].eval()
    x = torch.randn(2, 3, 8, 8)
    plain = net(x)
    turn_on_efficient_conv_bn_eval_for_single_model(net)
    torch.testing.assert_close(behind('wrapper', net, level)(x).float(), plain, rtol=0.02, atol=0.05)


def test_what_is_compiled_after_a_checkpoint_in_a_forward_is_compiled() -> None:
    """Checkpointing imports torch._dynamo, which knows functions by identity, while some of them are patched."""
    code = """
import torch
from torch.utils.checkpoint import checkpoint
from amp_wrapper import amp

class Net(torch.nn.Linear):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)

amp.initialize(Net(4, 4), opt_level='O5', verbosity=0)(torch.ones(1, 4))
for function in (torch.abs, lambda x: torch.where(x > 0, x, 0.0), lambda x: torch.masked_fill(x, x > 0, 1.0), torch.linalg.inv):
    torch.compile(function, fullgraph=True, backend='eager')(torch.eye(4))
"""
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
