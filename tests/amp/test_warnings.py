"""Warnings about a forgotten scale, name or step; none for scripts that forget nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from exact_scripts import KINDS, LEVELS, MASTERS, backward, gradients, sgd, start
from play import Part, data
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from amp_wrapper import AmpOptimWrapper, AmpUsageError, amp

# -- what is forgotten --------------------------------------------------------------------------------------------------


def the_block(net: Part, optimizer: Optimizer, loss: Tensor) -> None:
    loss.backward()


def to_use_the_scaled_loss(net: Part, optimizer: Optimizer, loss: Tensor) -> None:
    with amp.scale_loss(loss, optimizer):
        loss.backward()


def to_clip_the_norm_of_masters(net: Part, optimizer: Optimizer, loss: Tensor) -> None:
    backward(loss, optimizer)
    nn.utils.clip_grad_norm_(net.trained, 1e-3)


#: What is forgotten -> words of the warning, the levels that warn, and whether only a scale other than 1 does.
FORGOTTEN: dict[Callable[[Part, Optimizer, Tensor], None], tuple[str, Sequence[str], bool]] = {
    the_block: ('SGD steps gradients that no amp.scale_loss block brought', LEVELS, True),
    to_use_the_scaled_loss: ('scaled_loss.backward()', LEVELS, True),
    to_clip_the_norm_of_masters: ('amp.master_params(optimizer)', MASTERS, False),
}


@pytest.mark.parametrize('forgets', FORGOTTEN, ids=lambda function: function.__name__)
@pytest.mark.parametrize('to_none', [True, False])
def test_what_is_forgotten_is_warned_of_once(forgets: Any, to_none: bool, log: list[str]) -> None:
    words, levels, needs_scale = FORGOTTEN[forgets]
    wrong = []
    for level, (verbosity, scale) in itertools.product(LEVELS, [(1, '8'), (0, '8'), (1, '1')]):
        net, optimizer = start(level, scale=scale, verbosity=verbosity)
        log.clear()
        for index in range(3):
            optimizer.zero_grad(set_to_none=to_none)
            forgets(net, optimizer, net(data(index)))
            optimizer.step()
        count = int(level in levels and verbosity == 1 and (scale == '8' or not needs_scale))
        if [words in line for line in log] != [True] * count:
            wrong.append((level, verbosity, scale, log[:]))
    assert wrong == []


@pytest.mark.parametrize('level', LEVELS)
def test_backward_pass_after_its_block_is_refused(level: str) -> None:
    """Nothing has come of it then."""
    net, optimizer = start(level)
    with amp.scale_loss(net(data(0)), optimizer) as scaled:
        pass
    with pytest.raises(AmpUsageError, match=r'after its amp\.scale_loss block'):
        scaled.backward()
    assert gradients(optimizer) == [None, None]


@pytest.mark.parametrize('level', LEVELS)
def test_gradients_taken_of_the_scaled_loss_and_written_after_the_block_are_refused(level: str) -> None:
    net, optimizer = start(level, scale='8', verbosity=1)
    with amp.scale_loss(net(data(0)), optimizer) as scaled:
        found = torch.autograd.grad(scaled, net.trained)
    for parameter, gradient in zip(net.trained, found):
        parameter.grad = gradient
    with pytest.raises(AmpUsageError, match='autograd'):
        optimizer.step()


@pytest.mark.parametrize('level', KINDS)
def test_optimizer_that_no_block_names_is_warned_of_once(level: str, log: list[str]) -> None:
    nets = [Part(), Part(2)]
    optimizers = [sgd([net]) for net in nets]
    amp.initialize(nets, optimizers, opt_level=level, verbosity=1, loss_scale=8.0)
    log.clear()

    def joint(named: Any) -> None:
        backward(nets[0](data(0)) + nets[1](data(0)), named)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(2):
        # what GANs do: the gradients of the other are thrown away
        backward(nets[0](data(0)) + nets[1](data(0)), optimizers[0])
        optimizers[0].step()
        optimizers[1].zero_grad()
        backward(nets[1](data(0)), optimizers[1])
        optimizers[1].step()
        joint(optimizers)
    assert log == []
    for _ in range(2):
        joint(optimizers[0])
    assert len(log) == 1 and 'optimizer 1' in log[0] and 'Name it too' in log[0]


def never_clears(net: Part, optimizer: Optimizer, index: int) -> None:
    backward(net(data(index)), optimizer)
    optimizer.step()


def clears_by_zeros(net: Part, optimizer: Optimizer, index: int) -> None:
    net.zero_grad(set_to_none=False)
    optimizer.step()
    backward(net(data(index)), optimizer)


def penalises(net: Part, optimizer: Optimizer, index: int) -> None:
    x = data(index).requires_grad_()
    (slope,) = torch.autograd.grad(net(x), x, create_graph=True)
    backward(net(x) + slope.square().sum() * 0, optimizer)
    optimizer.step()


def trains_another(net: Part, optimizer: Optimizer, index: int) -> None:
    other = nn.Linear(2, 1)
    plain = SGD(other.parameters(), lr=0.1)
    other(data(index)).sum().backward()
    nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    plain.step()
    backward(net(data(index)), optimizer)
    optimizer.step()


def accumulates(net: Part, optimizer: Optimizer, index: int) -> None:
    for part in range(2):
        backward(net(data(index + part)) / 2, optimizer)
    nn.utils.clip_grad_norm_(list(amp.master_params(optimizer)), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def combines_gradients(net: Part, optimizer: Optimizer, index: int) -> None:
    """As PCGrad does: the gradients of each loss by themselves, and a mixture put back."""
    kept: list[list[Tensor | None]] = []
    for part in range(2):
        optimizer.zero_grad()
        backward(net(data(index + part)), optimizer)
        kept.append([None if p.grad is None else p.grad.clone() for p in amp.master_params(optimizer)])
    optimizer.zero_grad()
    for parameter, first, second in zip(amp.master_params(optimizer), *kept):
        parameter.grad = None if first is None or second is None else first + second
    optimizer.step()


HABITS: list[Callable[[Part, Optimizer, int], None]] = [
    never_clears, clears_by_zeros, penalises, trains_another, accumulates, combines_gradients,
]  # fmt: skip


@pytest.mark.parametrize('habit', HABITS)
def test_no_warning_where_nothing_is_wrong(habit: Callable[[Part, Optimizer, int], None], log: list[str]) -> None:
    for level in LEVELS:
        net, optimizer = start(level, scale='8', verbosity=1)
        for index in range(3):
            backward(net(data(index)), optimizer)
            optimizer.step()
            habit(net, optimizer, index)
        assert log == [], level


# -- optimizers that were not initialised, over parameters of no model ---------------------------------------------------


Script = Callable[[Part, Optimizer, Callable[[], Tensor], Optimizer, Tensor], None]


def centres(step: Script, level: str, way: str = '', **words: Any) -> bool:
    """Train a model, and centres of a loss with an optimizer of their own; whether the centres are those of FP32 training.

    Args:
        step: Passes of a step, from the model, its initialised optimizer, the loss of the centres, theirs, and the data.
        level: Of the model.
        way: In which the other optimizer is initialised; not at all by default.
        words: More for ``amp.initialize``.
    """
    net, place = Part(), nn.Parameter(torch.ones(2))
    own, other = SGD(net.trained, lr=0.25), SGD([place], lr=0.25)
    words = {'verbosity': 1, 'loss_scale': 256.0, **words}
    amp.initialize(net, [own, other] if way == 'together' else own, opt_level=level, **words)
    if way == 'later':
        amp.initialize([], other, loss_scale=256.0)
    for index in range(3):
        own.zero_grad()
        other.zero_grad()
        step(net, own, lambda index=index: (place * data(index)).sum(), other, data(index))  # type: ignore[misc]
        own.step()
        other.step()
    return torch.equal(place, 1 - 0.25 * sum(data(index)[0] for index in range(3)))


def named(net: Part, own: Optimizer, loss: Callable[[], Tensor], other: Optimizer, x: Tensor) -> None:
    backward(net(x) + loss(), own)


def both_named(net: Part, own: Optimizer, loss: Callable[[], Tensor], other: Optimizer, x: Tensor) -> None:
    backward(net(x) + loss(), [own, other])


def plain_pass_before(net: Part, own: Optimizer, loss: Callable[[], Tensor], other: Optimizer, x: Tensor) -> None:
    loss().backward()
    backward(net(x), own)


def plain_pass_instead(net: Part, own: Optimizer, loss: Callable[[], Tensor], other: Optimizer, x: Tensor) -> None:
    backward(net(x) + loss(), own)
    other.zero_grad()
    loss().backward()


def divided(net: Part, own: Optimizer, loss: Callable[[], Tensor], other: Optimizer, x: Tensor) -> None:
    backward(net(x) + loss(), own)
    other.param_groups[0]['params'][0].grad.div_(256)


@pytest.mark.parametrize('level', LEVELS[1:])
def test_optimizer_that_was_not_initialised_gets_scaled_gradients(level: str, log: list[str]) -> None:
    """One warning names two remedies, with which training is that of FP32. None comes without a scale or in silence."""
    centres(named, level, loss_scale=1.0)
    centres(named, level, verbosity=0)
    assert centres(plain_pass_before, level) and centres(plain_pass_instead, level) and centres(divided, level)
    assert centres(both_named, level, 'together') and centres(both_named, level, 'later')
    assert [line for line in log if 'not initialised' in line] == []
    for scale in (256.0, 'dynamic'):
        log.clear()
        centres(named, level, loss_scale=scale)
        (line,) = [line for line in log if 'not initialised' in line]
        assert 'SGD' in line and 'amp.initialize([], optimizer)' in line and 'amp.scale_loss(loss, [' in line


@pytest.mark.parametrize('level', ['O1', 'O4'])
def test_optimizer_that_was_not_initialised_steps_weights_of_the_model(level: str, log: list[str]) -> None:
    for verbosity in (1, 0):
        nets = [Part(), Part(2)]
        own, other = sgd(nets[:1]), SGD(nets[1].trained, lr=0.25)
        amp.initialize(nets, own, opt_level=level, loss_scale=8.0, verbosity=verbosity)
        log.clear()
        for _ in range(2):
            backward(nets[0](data(0)) + nets[1](data(0)), own)
            own.step()
            other.step()
        assert ['SGD, which was not initialised' in line for line in log] == [True] * verbosity


# -- silence ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', KINDS)
def test_verbosity_0_is_silent(level: str, log: list[str], capsys: pytest.CaptureFixture[str], recwarn: Any) -> None:
    """Whatever is warned of otherwise, and not above."""
    net, optimizer = start(level)
    backward(net(data(0)) * float('inf'), optimizer)
    optimizer.step()
    net.fc.weight.data.mul_(2)
    net.state_dict()
    saved = amp.state_dict(optimizers=optimizer)
    amp.load_state_dict({**saved, f'loss_scaler{len(saved)}': dict(loss_scale=1.0, unskipped=0)}, optimizers=optimizer)
    amp.initialize([], SGD([nn.Parameter(torch.ones(1))], lr=0.1), verbosity=0)
    half = nn.Linear(2, 2).bfloat16()
    amp.initialize(half, SGD(half.parameters(), lr=0.1), opt_level=level, from_16bit=True, verbosity=0)
    plain = nn.Linear(2, 2)
    wrapper = AmpOptimWrapper(opt_level=level, optimizer=Adam(plain.parameters()), verbosity=0)
    wrapper.attach(plain)
    wrapper.backward(plain(torch.ones(1, 2)).sum())
    wrapper.load_state_dict(wrapper.state_dict())
    captured = capsys.readouterr()
    assert log == [] and captured.out == captured.err == ''
    assert [str(w.message) for w in recwarn if 'amp' in str(w.message)] == []
