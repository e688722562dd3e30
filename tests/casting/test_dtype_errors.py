"""An error of torch about types in a forward names the module and the ways out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from doors import DOORS, behind
from torch import Tensor, nn

from amp_wrapper import amp


def text(error: BaseException) -> str:
    """The message with its notes, which Python 3.10 does not have."""
    return '\n'.join([str(error), *getattr(error, '__notes__', ())])


class Block(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.neck = nn.Sequential(nn.Linear(4, 4), Block(function))

    def forward(self, x: Tensor) -> Tensor:
        return self.neck(self.stem(x))


def mixes(x: Tensor) -> Tensor:
    return torch.lerp(x, x.float(), 0.5)


@pytest.mark.parametrize('door', DOORS)
@pytest.mark.parametrize('level', ['O2', 'O3', 'O5'])
def test_the_module_and_three_ways_out_are_named(level: str, door: str) -> None:
    call = behind(door, Net(mixes), level)
    with pytest.raises(RuntimeError, match='dtype') as caught:
        call(torch.randn(4, 4))
    said = text(caught.value)
    assert f'neck.1 (Block), in a forward at {level}' in said
    assert "keep_fp32=['neck.1']" in said
    assert 'fp32_ops=' in said
    assert 'another opt_level' in said
    assert said.count('amp: raised in') == 1


def test_models_inside_of_models_add_one_note() -> None:
    inner = amp.initialize(Net(mixes), opt_level='O5', verbosity=0)
    outer = amp.initialize(nn.Sequential(nn.Linear(4, 4)), opt_level='O5', verbosity=0)
    outer.forward = inner  # type: ignore[assignment]
    with pytest.raises(RuntimeError) as caught:
        outer(torch.randn(4, 4))
    assert text(caught.value).count('amp: raised in') == 1


@pytest.mark.parametrize(
    'error',
    [
        RuntimeError('shapes differ'),
        RuntimeError('unknown block type: resnet'),
        RuntimeError('expected target dtype to be Long or Byte'),
        TypeError("unsupported operand type(s) for +: 'Tensor' and 'NoneType'"),
        TypeError('conv2d() received an invalid combination of arguments - got (list, torch.dtype)'),
        KeyError('dtype'),
        ZeroDivisionError('Half'),
    ],
)
def test_other_errors_are_left_alone(error: Exception) -> None:
    def fail(x: Tensor) -> Tensor:
        raise error

    call = amp.initialize(Net(fail), opt_level='O5', verbosity=0)
    with pytest.raises(type(error)) as caught:
        call(torch.randn(4, 4))
    assert 'amp:' not in text(caught.value)


def test_a_forward_while_another_error_is_handled_adds_nothing_to_that() -> None:
    net = amp.initialize(nn.Sequential(nn.Linear(4, 4), Silent()), opt_level='O5', verbosity=0)

    def recover() -> None:
        try:
            raise RuntimeError('expected dtype float')
        except RuntimeError:
            assert net(torch.randn(4, 4)) is None
            raise

    with pytest.raises(RuntimeError) as caught:
        recover()
    assert 'amp:' not in text(caught.value)


class Silent(nn.Module):
    def forward(self, x: Tensor) -> None:
        """Returns nothing, as the hooks of a failed call see it."""


@pytest.mark.parametrize('door', DOORS)
def test_a_layer_that_joins_later_is_named_and_works(door: str, log: list[str]) -> None:
    net = Net(lambda x: x)
    call = behind(door, net, 'O5', verbosity=1)
    call(torch.randn(4, 4))
    net.stem = nn.Linear(4, 4)
    net.neck[0] = nn.Linear(4, 4)
    lines = [line for line in log if 'joins a model at O5' in line]
    assert len(lines) == 2
    assert 'stem (Linear)' in lines[0]
    assert '0 (Linear)' in lines[1]
    assert "amp.initialize(layer, opt_level='O5')" in lines[0]
    call(torch.randn(4, 4)).sum().backward()
    assert net.stem.weight.grad is not None

    net.stem = Block(mixes)  # type: ignore[assignment]
    with pytest.raises(RuntimeError) as caught:
        # the wrapper refuses further steps: its optimizer does not have the new weights
        net(torch.randn(4, 4))
    assert 'stem (Block) joined the model' in text(caught.value)
    assert "amp.initialize(layer, opt_level='O5')" in text(caught.value)


def test_one_that_was_initialised_by_itself_is_part_of_the_model(log: list[str]) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer = amp.initialize(net, optimizer, opt_level='O5', verbosity=1)
    net[1] = amp.initialize(nn.Linear(4, 4), opt_level='O5', verbosity=0)
    assert not [line for line in log if 'joins' in line]
    optimizer.add_param_group({'params': list(net[1].parameters())})
    with amp.scale_loss(net(torch.ones(2, 4)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert {p.dtype for p in amp.master_params(optimizer)} == {torch.float32}
