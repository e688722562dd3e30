"""Models for tests of the functional API whose arithmetic is exact, and the plain FP32 training that they are held against.

Losses are linear in the weights, and inputs, weights and learning rates are small dyadic numbers: gradients are the same at
every level, and so are all sums of them. Whatever differs from plain FP32 training by one bit is a gradient that was lost,
counted twice, or scaled wrongly.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from bits import differing
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from amp_wrapper import amp
from amp_wrapper.amp import session
from amp_wrapper.engine.loss_scale import LossScaler
from amp_wrapper.engine.pass_watch import PassWatch

LEVELS = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')
HALF = {'O2': torch.float16, 'O3': torch.float16, 'O5': torch.bfloat16}
MASTERS = ('O2', 'O5')
#: Ways to clear gradients that scripts have.
ZEROINGS = ('optimizer', 'model', 'none', 'zeros', 'model zeros')


class Net(nn.Module):
    """One weight that the cast levels cast, and one that stays FP32 where BatchNorm does. Linear in both."""

    def __init__(self, unique: int = 1) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2, bias=False)
        self.bn = nn.BatchNorm1d(2)
        self.bn.bias.requires_grad_(False)
        with torch.no_grad():
            self.fc.weight.copy_(torch.tensor([[1.0, 2.0], [0.5, -1.0]]) * unique)
            self.bn.weight.copy_(torch.tensor([1.0, -2.0]) + unique)

    def forward(self, x: Tensor) -> Tensor:
        # (1, 2) in; what BatchNorm normalises would not be exact
        return self.fc(x).float().sum() + (self.bn.weight.float() * x.float()).sum()

    @property
    def trained(self) -> list[nn.Parameter]:
        return [self.fc.weight, self.bn.weight]


def network() -> nn.Linear:
    """A line: the smallest model with a weight and a bias."""
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, -1.0]]))
        model.bias.fill_(0.25)
    return model


def data(index: int, device: torch.device | str = 'cpu') -> Tensor:
    """(1, 2) of small dyadic numbers, others at each index."""
    return torch.tensor([[(1.0, 0.5, 2.0, -1.0)[index % 4], (0.25, 1.0, -0.5)[index % 3]]], device=device)


def sgd(nets: Sequence[Net], lr: float = 0.25, momentum: float = 0.5) -> Optimizer:
    return SGD([{'params': net.trained, 'lr': lr / 2**index} for index, net in enumerate(nets)], momentum=momentum)


def zero(how: str, optimizers: Sequence[Optimizer], models: Sequence[nn.Module]) -> None:
    for optimizer in optimizers:
        if how in ('optimizer', 'zeros'):
            optimizer.zero_grad(set_to_none=how == 'optimizer')
    for model in models:
        if how in ('model', 'model zeros'):
            model.zero_grad(set_to_none=how == 'model')
        elif how == 'none':
            for parameter in model.parameters():
                parameter.grad = None


def make(level: str | None, device: torch.device, momentum: float = 0.5, **options: Any) -> tuple[Net, Optimizer]:
    """A net and its optimizer, initialized with scales of 8; ``level=None`` for the plain FP32 training beside them."""
    net = Net().to(device)
    optimizer = sgd([net], momentum=momentum)
    if level is not None:
        amp.initialize(net, optimizer, opt_level=level, **{'loss_scale': 'dynamic', 'verbosity': 0, **options})
        if options.get('loss_scale', 'dynamic') == 'dynamic':
            set_scales(optimizer, *[8.0] * options.get('num_losses', 1))
    return net, optimizer


def scaled(level: str, device: torch.device, verbosity: int = 1, scale: Any = 8.0) -> tuple[Net, Optimizer]:
    """As :func:`make`, with a static scale, and as talkative as scripts have it."""
    net = Net().to(device)
    optimizer = sgd([net])
    with logged():
        amp.initialize(net, optimizer, opt_level=level, verbosity=verbosity, loss_scale=scale)
    return net, optimizer


def amp_speaks(optimizers: list[Optimizer]) -> None:
    """As with verbosity=1, without the options on standard output."""
    for optimizer in optimizers:
        engine = session.engines_of(optimizer)[0]
        engine.parts.pass_watch = PassWatch(f'SGD ({engine.parts.label})', True)


def scalers(optimizer: Optimizer) -> list[LossScaler]:
    found = session.session_of(optimizer)
    assert found is not None
    return found.scalers


def set_scales(optimizer: Optimizer, *scales: float) -> None:
    for scaler, scale in zip(scalers(optimizer), scales, strict=True):
        scaler.current_scale.fill_(scale)


def scales(optimizer: Optimizer) -> list[float]:
    return [scaler.get_scale() for scaler in scalers(optimizer)]


def unskipped(optimizer: Optimizer) -> list[int]:
    return [scaler.state_dict()['_growth_tracker'] for scaler in scalers(optimizer)]


def values(nets: Sequence[Net], optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """What optimizers step, and their momenta, in FP32."""
    found: dict[str, Tensor] = {}
    for o, optimizer in enumerate(optimizers):
        for p, parameter in enumerate(amp.master_params(optimizer)):
            found[f'optimizer {o} parameter {p}'] = parameter.detach().float().clone()
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f'optimizer {o} parameter {p} {key}'] = value.detach().float().clone()
    for n, net in enumerate(nets):
        for name, parameter in net.named_parameters():
            found[f'net {n} {name}'] = parameter.detach().float().clone()
    return found


def check_rounded(nets: Sequence[nn.Module], level: str) -> None:
    """Weights are their masters, rounded."""
    for net in nets:
        for name, value in net.state_dict().items():
            weight = dict(net.named_parameters()).get(name)
            if weight is not None:
                assert value.dtype is torch.float32 and torch.equal(weight, value.to(weight.dtype)), name
        if isinstance(net, Net):
            assert net.fc.weight.dtype is HALF.get(level, torch.float32)
            assert net.bn.weight.dtype is (torch.float16 if level == 'O3' else torch.float32)


def agree(ours: tuple[Net, Optimizer], theirs: tuple[Net, Optimizer], level: str) -> None:
    """Bit for bit, but for weights that are rounded masters."""
    check_rounded([ours[0]], level)
    wrong = differing(values([ours[0]], [ours[1]]), values([theirs[0]], [theirs[1]]))
    assert [key for key in wrong if level not in MASTERS or 'net' not in key] == []


def gradients(optimizers: Sequence[Optimizer]) -> list[Tensor | None]:
    found = [p.grad for optimizer in optimizers for p in amp.master_params(optimizer)]
    return [None if grad is None else grad.detach().to_dense().float().clone() for grad in found]


def poison(parameter: Tensor, value: float = math.inf) -> None:
    """A non-finite element in the gradient that has just arrived."""
    assert parameter.grad is not None
    parameter.grad.view(-1)[0] = value


def backward(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    poisoned: Tensor | None = None,
    spoil: Callable[[], None] | None = None,
    retain_graph: bool = False,
    **kwargs: Any,
) -> None:
    """One pass, and a non-finite element in it where asked for."""
    with amp.scale_loss(loss, optimizers, loss_id, **kwargs) as scaled:
        scaled.backward(retain_graph=retain_graph)
        if poisoned is not None:
            poison(poisoned)


@contextmanager
def logged(level: int = logging.INFO) -> Iterator[list[str]]:
    """Lines of the package's logger, whether or not it propagates."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger('amp_wrapper')
    before = logger.level
    logger.setLevel(level)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
