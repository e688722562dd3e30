"""What type checkers see of the functional API. Nothing here runs: ``make type`` reads it, and reports an ignore that is not
needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from typing_extensions import assert_type

from amp_wrapper import AmpInferenceHook, AmpOptimWrapper, amp
from amp_wrapper.policy import LEVELS, OptLevel, resolve


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


def levels(net: Net, sgd: SGD, word: str, loss_fn: Callable[[nn.Module, Any], Tensor]) -> None:
    level: OptLevel = 'O4'
    amp.initialize(net, sgd, opt_level=level)
    amp.initialize(net, sgd, opt_level=resolve(level).opt_level)
    amp.initialize(net, sgd, opt_level='o2')  # type: ignore[call-overload]
    amp.initialize(net, sgd, opt_level=word)  # type: ignore[call-overload]
    resolve('O7')  # type: ignore[arg-type]
    AmpOptimWrapper(opt_level=level, optimizer=sgd)
    AmpOptimWrapper(opt_level='02', optimizer=sgd)  # type: ignore[arg-type]
    AmpInferenceHook(opt_level='O6')  # type: ignore[arg-type]
    amp.report(net, loss_fn, opt_level='O5')
    amp.report(net, loss_fn, opt_level='bf16')  # type: ignore[arg-type]
    found = amp.suggest_level(net, loss_fn, [1, 2], levels=['O0', level])
    if found.level is not None:
        amp.initialize(net, sgd, opt_level=found.level)
    amp.suggest_level(net, loss_fn, [1, 2], levels=['O0', 'O8'])  # type: ignore[list-item]
    for each in LEVELS:
        assert_type(each, OptLevel)


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
