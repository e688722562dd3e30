"""What type checkers see of the functional API. Nothing here runs: ``make type`` reads it, and reports an ignore that is not
needed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from typing_extensions import assert_type

from amp_wrapper import amp


class Net(nn.Module):
    """A class of the user's, which must not become a plain module."""


def single(net: Net, sgd: SGD) -> None:
    assert_type(amp.initialize(net), Net)
    assert_type(amp.initialize(net, opt_level='O5'), Net)
    assert_type(amp.initialize(net, sgd, opt_level='O2', loss_scale='dynamic', num_losses=2), tuple[Net, SGD])
    assert_type(amp.initialize(net, sgd, True, 'O1'), tuple[Net, SGD])


def several(nets: list[Net], optimizers: list[Optimizer], net: Net, linear: nn.Linear, sgd: SGD, adam: Adam) -> None:
    assert_type(amp.initialize(nets, optimizers), tuple[list[Net], list[Optimizer]])
    assert_type(amp.initialize((net, linear), (sgd, adam)), tuple[tuple[Net, nn.Linear], tuple[SGD, Adam]])


def wrong(net: Net, sgd: SGD, loss: Tensor) -> None:
    amp.initialize(net, sgd, opt_levl='O2')  # type: ignore[call-overload]
    amp.initialize(net, sgd, num_losses='3')  # type: ignore[call-overload]
    amp.initialize(3, sgd)  # type: ignore[call-overload]
    with amp.scale_loss(loss, net):  # type: ignore[arg-type]
        pass


def the_rest(sgd: SGD, loss: Tensor) -> None:
    with amp.scale_loss(loss, [sgd], loss_id=1, delay_unscale=True) as scaled_loss:
        assert_type(scaled_loss, Tensor)
    for parameter in amp.master_params(sgd):
        assert_type(parameter, Tensor)

    @amp.float_function
    def distance(left: Tensor, right: Tensor) -> Tensor:
        return torch.cdist(left, right)

    assert_type(distance(loss, loss), Tensor)
    distance(loss)  # type: ignore[call-arg]
