"""Warnings and errors about a forgotten scale, name or step; and none for scripts that forget nothing."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from bits import differing
from grid import grid
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from toy_amp import (
    LEVELS,
    Net,
    amp_speaks,
    backward,
    data,
    logged,
    scaled,
    set_scales,
    sgd,
    values,
)

from amp_wrapper import AmpOptimWrapper, amp
from amp_wrapper.amp import session
from amp_wrapper.errors import AmpUsageError
from amp_wrapper.optim import FusedSGD

MASTERS = ('O2', 'O5')


# -- gradients that are clipped before they are unscaled ------------------------------------------------------------------


def clip_norm(parameters: Any) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)


def clip_value(parameters: Any) -> None:
    torch.nn.utils.clip_grad_value_(parameters, 1.0)


@pytest.mark.parametrize('clip', [clip_norm, clip_value])
@pytest.mark.parametrize('scale', [1.0, 1024.0])
@pytest.mark.parametrize('level', LEVELS)
def test_clipping_inside_of_the_block_is_told_once(
    level: str, scale: float, clip: Callable[[Any], None], device: torch.device
) -> None:
    """Of the model's parameters where gradients have a scale; of masters, which have no gradients there."""
    for whose in ('model', 'optimizer'):
        net, optimizer = scaled(level, device, scale=scale)
        with logged() as lines:
            for index in range(3):
                optimizer.zero_grad()
                with amp.scale_loss(net(data(index, device)), optimizer) as loss:
                    loss.backward()
                    clip(net.parameters() if whose == 'model' else amp.master_params(optimizer))
                optimizer.step()
        matters = scale != 1 if whose == 'model' or level not in MASTERS else True
        told = [line for line in lines if 'inside of a "with amp.scale_loss' in line]
        assert len(told) == matters, (whose, lines)
        assert all(line.startswith('amp: SGD ') for line in told)


@pytest.mark.parametrize('clip', [clip_norm, clip_value])
@pytest.mark.parametrize('level', LEVELS)
def test_what_is_no_clipping_of_scaled_gradients_is_not_told(
    level: str, clip: Callable[[Any], None], device: torch.device
) -> None:
    """After the block, before the backward pass, of another model; and masks, which may be applied at any scale."""
    net, optimizer = scaled(level, device)
    other = nn.Linear(2, 2).to(device)
    other(torch.ones(1, 2, device=device)).sum().backward()
    with logged() as lines:
        for index in range(3):
            optimizer.zero_grad()
            with amp.scale_loss(net(data(index, device)), optimizer) as loss:
                penalty = sum(master.detach().norm() for master in amp.master_params(optimizer))
                (loss + 0 * penalty).backward()
                clip(other.parameters())
                for weight in net.parameters():
                    if weight.grad is not None:
                        weight.grad.mul_(1.0)
            clip(amp.master_params(optimizer))
            optimizer.step()
    assert lines == []


@pytest.mark.parametrize('level', LEVELS)
def test_a_clip_is_not_told_beside_a_backward_of_the_wrong_loss(level: str, device: torch.device) -> None:
    """These gradients carry no scale; what is wrong with them is told when the block ends."""
    net, optimizer = scaled(level, device)
    with logged() as lines:
        loss = net(data(0, device))
        with amp.scale_loss(loss, optimizer):
            loss.backward()
            clip_norm(net.parameters())
    assert [line for line in lines if 'clipped' in line] == []


@pytest.mark.parametrize('level', LEVELS)
def test_without_verbosity_a_clip_is_not_told(level: str, device: torch.device) -> None:
    net, optimizer = scaled(level, device, verbosity=0)
    with logged() as lines, amp.scale_loss(net(data(0, device)), optimizer) as loss:
        loss.backward()
        clip_norm(net.parameters())
        clip_norm(amp.master_params(optimizer))
    assert lines == []


def test_blocks_of_threads_and_generators_are_apart(device: torch.device) -> None:
    """Blocks that end in the order in which they began: nothing is told, and no model stays alive."""
    pairs = [scaled('O2', device) for _ in range(2)]
    models = [weakref.ref(net) for net, _ in pairs]

    def block(net: Net, optimizer: Optimizer) -> Iterator[None]:
        with amp.scale_loss(net(data(0, device)), optimizer) as loss:
            loss.backward()
            yield
        clip_norm(amp.master_params(optimizer))

    with logged() as lines:
        blocks = [block(*pair) for pair in pairs]
        for each in (*blocks, *blocks):
            next(each, None)
        threads = [threading.Thread(target=lambda pair=pair: [*block(*pair)]) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert lines == []
    del pairs, blocks, threads, each, thread
    gc.collect()
    assert [model() for model in models] == [None, None]


def test_a_clip_in_another_thread_is_not_of_an_open_block(device: torch.device) -> None:
    net, optimizer = scaled('O2', device)
    other = nn.Linear(2, 2).to(device)
    other(torch.ones(1, 2, device=device)).sum().backward()
    with logged() as lines, amp.scale_loss(net(data(0, device)), optimizer) as loss:
        loss.backward()
        for parameters in (other.parameters(), net.parameters()):
            thread = threading.Thread(target=clip_norm, args=(parameters,))
            thread.start()
            thread.join()
    assert lines == []


# -- gradients that came past the scaled losses -------------------------------------------------------------------------


@pytest.mark.parametrize('clear', ['none', 'zeros'])
@pytest.mark.parametrize('level', LEVELS)
def test_a_backward_without_scale_is_told_once(level: str, clear: str, device: torch.device, capsys: Any) -> None:
    net, optimizer = scaled(level, device)
    with logged() as lines:
        for index in range(3):
            optimizer.zero_grad(set_to_none=clear == 'none')
            net(data(index, device)).backward()
            optimizer.step()
    assert [line for line in lines if 'no amp.scale_loss block brought' in line] == lines[:1]
    assert len(lines) == 1 and lines[0].startswith('amp: SGD ')


@pytest.mark.parametrize('level', LEVELS)
def test_levels_without_a_scale_say_nothing(level: str, device: torch.device) -> None:
    net, optimizer = scaled(level, device, scale=1.0)
    with logged() as lines:
        net(data(0, device)).backward()
        optimizer.step()
    assert lines == []


def steps_again(net: Net, optimizer: Optimizer, index: int) -> None:
    """Once more with the same gradients."""
    optimizer.step()


def never_clears(net: Net, optimizer: Optimizer, index: int) -> None:
    backward(net(data(index)), optimizer)
    optimizer.step()


def clears_by_zeros(net: Net, optimizer: Optimizer, index: int) -> None:
    net.zero_grad(set_to_none=False)
    optimizer.step()
    backward(net(data(index)), optimizer)


def has_nothing_to_do(net: Net, optimizer: Optimizer, index: int) -> None:
    optimizer.zero_grad()
    optimizer.step()


def penalises(net: Net, optimizer: Optimizer, index: int) -> None:
    x = data(index).requires_grad_()
    (slope,) = torch.autograd.grad(net(x), x, create_graph=True)
    backward(net(x) + slope.square().sum() * 0, optimizer)
    optimizer.step()


def trains_another(net: Net, optimizer: Optimizer, index: int) -> None:
    other = nn.Linear(2, 1)
    plain = SGD(other.parameters(), lr=0.1)
    other(data(index)).sum().backward()
    plain.step()
    backward(net(data(index)), optimizer)
    optimizer.step()


def accumulates(net: Net, optimizer: Optimizer, index: int) -> None:
    for part in range(2):
        backward(net(data(index + part)) / 2, optimizer)
    nn.utils.clip_grad_norm_(list(amp.master_params(optimizer)), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def evaluates(net: Net, optimizer: Optimizer, index: int) -> None:
    with torch.no_grad():
        net(data(index))
    x = data(index).requires_grad_()
    # a saliency map: gradients of the input alone
    torch.autograd.grad(net(x), x)


def uses_a_part(net: Net, optimizer: Optimizer, index: int) -> None:
    with amp.scale_loss(net(data(index)), optimizer) as loss:
        (loss * 1).backward()
    optimizer.step()


def only_looks(net: Net, optimizer: Optimizer, index: int) -> None:
    with amp.scale_loss(net(data(index)), optimizer):
        pass


def closes(net: Net, optimizer: Optimizer, index: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(data(index))
        backward(loss, optimizer)
        return loss

    optimizer.step(closure)


def combines_gradients(net: Net, optimizer: Optimizer, index: int) -> None:
    """As PCGrad does: the gradients of each loss by themselves, and a mixture handed back."""
    kept: list[list[Tensor | None]] = []
    for part in range(2):
        optimizer.zero_grad()
        backward(net(data(index + part)), optimizer)
        kept.append([None if p.grad is None else p.grad.clone() for p in amp.master_params(optimizer)])
    optimizer.zero_grad()
    for parameter, first, second in zip(amp.master_params(optimizer), *kept):
        parameter.grad = None if first is None or second is None else first + second
    optimizer.step()


HABITS: list[Callable[[Net, Optimizer, int], None]] = [
    steps_again, never_clears, clears_by_zeros, has_nothing_to_do, penalises, trains_another, accumulates, evaluates,
    uses_a_part, only_looks, closes, combines_gradients,
]  # fmt: skip


@pytest.mark.parametrize('habit', HABITS)
@pytest.mark.parametrize('level', LEVELS)
def test_no_false_alarm(level: str, habit: Callable[[Net, Optimizer, int], None]) -> None:
    net, optimizer = scaled(level, torch.device('cpu'))
    with logged() as lines:
        for index in range(3):
            backward(net(data(index)), optimizer)
            optimizer.step()
            habit(net, optimizer, index)
    assert lines == []


@pytest.mark.parametrize('level', LEVELS)
def test_the_loss_itself_inside_the_block(level: str, device: torch.device) -> None:
    net, optimizer = scaled(level, device)
    with logged() as lines:
        for index in range(2):
            optimizer.zero_grad()
            loss = net(data(index, device))
            with amp.scale_loss(loss, optimizer):
                loss.backward()
            optimizer.step()
    assert len(lines) == 1 and 'Call scaled_loss.backward()' in lines[0]


@pytest.mark.parametrize('speaks', [0, 1])
@pytest.mark.parametrize('scale', [1.0, 1024.0])
@pytest.mark.parametrize('level', LEVELS)
def test_a_backward_after_its_block_is_told_once(level: str, scale: float, speaks: int, device: torch.device) -> None:
    """An indentation too little: the gradients keep their scale. The scaled loss keeps no optimizer alive."""
    net, optimizer = scaled(level, device, verbosity=speaks, scale=scale)
    kept = []
    with logged() as lines:
        for index in range(2):
            optimizer.zero_grad()
            with amp.scale_loss(net(data(index, device)), optimizer) as loss:
                pass
            kept.append(loss)
            loss.backward()
    told = [line for line in lines if 'after the end of its "with amp.scale_loss' in line]
    assert len(told) == (speaks and scale != 1.0)
    with logged() as lines:
        with amp.scale_loss(net(data(2, device)), optimizer) as loss:
            loss.backward()
        with amp.scale_loss(net(data(2, device)), optimizer):
            pass
    assert not any('after the end' in line for line in lines)
    gone = weakref.ref(optimizer)
    del net, optimizer
    gc.collect()
    assert gone() is None and len(kept) == 2


@pytest.mark.parametrize('level', LEVELS)
def test_a_scaled_loss_of_an_earlier_block_in_an_open_one(level: str, device: torch.device) -> None:
    """The sum of two scaled losses is unscaled at the end of the block whose backward pass it is."""
    net, optimizer = scaled(level, device, scale=1024.0)
    with logged() as lines:
        with amp.scale_loss(net(data(2, device)), optimizer) as first:
            pass
        with amp.scale_loss(net(data(2, device)), optimizer) as second:
            (first + second).backward()
    assert lines == []
    other, single = scaled(level, device, scale=1024.0)
    with amp.scale_loss(other(data(2, device)) * 2, single) as loss:
        loss.backward()
    wanted, found = ([p.grad for p in amp.master_params(o)] for o in (single, optimizer))
    assert len(found) > 1 and all(torch.allclose(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize('level', LEVELS)
def test_an_optimizer_that_no_block_names(level: str, device: torch.device) -> None:
    nets = [Net().to(device), Net(2).to(device)]
    optimizers = [sgd([net]) for net in nets]
    amp.initialize(nets, optimizers, opt_level=level, verbosity=0, loss_scale=8.0)
    amp_speaks(optimizers)
    x = data(0, device)
    with logged() as lines:
        for _ in range(2):
            # what GANs do: the other one's gradients are thrown away
            with amp.scale_loss(nets[0](x) + nets[1](x), optimizers[0]) as loss:
                loss.backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            backward(nets[1](x), optimizers[1])
            optimizers[1].step()
            # both are named
            with amp.scale_loss(nets[0](x) + nets[1](x), optimizers) as loss:
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert lines == []
    with logged() as lines:
        for _ in range(2):
            with amp.scale_loss(nets[0](x) + nets[1](x), optimizers[0]) as loss:
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert len(lines) == 1 and 'optimizer 1' in lines[0] and 'Name it too' in lines[0]


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('clip', [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_clipping_the_weights_of_masters_is_told(clip: Any, level: str, device: torch.device) -> None:
    net, optimizer = scaled(level, device)
    with logged() as lines:
        for index in range(2):
            optimizer.zero_grad()
            backward(net(data(index, device)), optimizer)
            clip(net.trained, 1e-3)
            optimizer.step()
    assert len(lines) == (level in MASTERS)
    assert all('amp.master_params(optimizer)' in line for line in lines)


@pytest.mark.parametrize('fused', [False, True])
@pytest.mark.parametrize('set_to_none', [True, False])
@pytest.mark.parametrize('by_model', [False, True])
@pytest.mark.parametrize('max_norm', [1e-30, 1e-3, 1.0])
@pytest.mark.parametrize('factor', [1.0, 1e3, 1e4])
@pytest.mark.parametrize('speaks', [0, 1])
def test_clipping_the_weights_of_masters_has_no_effect(
    fused: bool, set_to_none: bool, by_model: bool, max_norm: float, factor: float, speaks: int, device: torch.device
) -> None:
    """Whatever the norm: it is infinite, and all gradients become 0, where scaled ones are large in float16; small ones become
    0 where the norm is far above the limit. Bit for bit the steps without the clip, and told in each case."""

    def train(clips: bool, takes_norm: bool = False) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
        optimizer: Optimizer = FusedSGD(net.parameters(), lr=0.01) if fused else SGD(net.parameters(), lr=0.01)
        amp.initialize(net, optimizer, opt_level='O2', loss_scale=64.0, verbosity=speaks)
        for index in range(4):
            x = torch.ones(3, 4, device=device) * (index + 1)
            with amp.scale_loss(net(x).float().square().sum() * factor, optimizer) as loss:
                loss.backward()
            if clips:
                nn.utils.clip_grad_norm_(net.parameters(), max_norm)
            if takes_norm:
                nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
            optimizer.step()
            (net if by_model else optimizer).zero_grad(set_to_none=set_to_none)
        return values([], [optimizer])

    wanted = train(False)
    with logged() as lines:
        assert differing(train(False, takes_norm=True), wanted) == []
    assert not any('master_params' in line for line in lines)
    with logged() as lines:
        assert differing(train(True), wanted) == []
    assert [('That has no effect on them' in line) for line in lines if 'master_params' in line] == [True] * speaks


# c: clips by the norm, C: by value, each to zeros in float16; z, n and o: clears by the model with zeros, by the model, by the
# optimizer with zeros
ACTS = 'bcCznos'


def act(acts: Sequence[str], foreach: bool | None, device: torch.device) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    optimizer = SGD(net.parameters(), lr=0.01, momentum=0.5)
    amp.initialize(net, optimizer, opt_level='O2', loss_scale=64.0, verbosity=0)
    for index, name in enumerate(acts):
        if name == 'b':
            x = torch.ones(3, 4, device=device) * (index + 1)
            with amp.scale_loss(net(x).float().square().sum(), optimizer) as loss:
                loss.backward()
        elif name == 'c':
            nn.utils.clip_grad_norm_(net.parameters(), 1e-30, foreach=foreach)
        elif name == 'C' and net[0].weight.grad is not None:
            # torch takes no empty list
            nn.utils.clip_grad_value_(net.parameters(), 1e-9, foreach=foreach)
        elif name in 'zn':
            net.zero_grad(set_to_none=name == 'n')
        elif name == 'o':
            optimizer.zero_grad(set_to_none=False)
        elif name == 's':
            optimizer.step()
    return values([], [optimizer])


@pytest.mark.parametrize('foreach', [None, True, False])
@pytest.mark.parametrize('length', [2, 3, pytest.param(4, marks=grid)])
def test_clips_of_the_weights_of_masters_in_any_order(length: int, foreach: bool | None, device: torch.device) -> None:
    """Between a backward pass and two steps, clips change nothing: neither what is cleared, nor what is kept."""
    wrong = []
    for acts in itertools.product(ACTS, repeat=length):
        if not {'c', 'C'} & set(acts):
            continue
        whole = ('b', *acts, 's', 'b', 's')
        # a dot does nothing: the inputs of a pass depend on its place
        unclipped = ['.' if name in 'cC' else name for name in whole]
        if differing(act(whole, foreach, device), act(unclipped, foreach, device)):
            wrong.append(''.join(whole))
    assert wrong == []


def test_gradients_that_were_clipped_may_be_cleared_before_the_step(device: torch.device) -> None:
    """Zeros that ``zero_grad`` writes behind a clip are its own: a script may skip a step whose norm it does not like."""
    net, optimizer = scaled('O2', device)
    for index in range(2):
        backward(net(data(index, device)), optimizer)
        nn.utils.clip_grad_norm_(net.trained, 1e-3)
        net.zero_grad(set_to_none=False)
    before = [master.detach().clone() for master in amp.master_params(optimizer)]
    optimizer.step()
    assert all(torch.equal(master, other) for master, other in zip(amp.master_params(optimizer), before))


# -- closures that are called in the middle of a step -------------------------------------------------------------------


class Probing(SGD):
    """Looks at the loss a second time, by itself; SAM and its like, which hold another optimizer, work."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, 'Probing requires closure, but it was not provided'
        with torch.enable_grad():
            closure()
        return super().step()


@pytest.mark.parametrize('level', LEVELS)
def test_a_closure_in_the_middle_of_a_step(level: str, device: torch.device) -> None:
    net = Net().to(device)
    optimizer = Probing(net.trained, lr=0.1)
    amp.initialize(net, optimizer, opt_level=level, verbosity=0, loss_scale=4.0 if level != 'O0' else None)
    before = values([net], [])

    def closure() -> Tensor:
        loss = net(data(0, device))
        backward(loss, optimizer)
        return loss

    if level == 'O0':
        optimizer.step(closure)
        return
    with pytest.raises(AmpUsageError, match=r'Probing\.step\(closure\).*enabled=False'):
        optimizer.step(closure)
    assert not differing(before, values([net], []))


def test_other_errors_of_a_step_stay() -> None:
    class Broken(SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError('out of memory')

    net = Net()
    optimizer = Broken(net.trained, lr=0.1)
    amp.initialize(net, optimizer, opt_level='O2', verbosity=0, loss_scale=4.0)
    with pytest.raises(RuntimeError, match='out of memory'):
        optimizer.step(lambda: backward(net(data(0)), optimizer))


# -- silence ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
def test_verbosity_0_is_silent(
    level: str, device: torch.device, capsys: Any, recwarn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that is told otherwise, one after the other."""
    # those of other tests, which speak
    monkeypatch.setattr(session, '_sessions', [])
    net, optimizer = scaled(level, device, verbosity=0, scale='dynamic')
    other = SGD([nn.Parameter(torch.ones(1, device=device))], lr=0.1)
    with logged() as lines:
        net(data(0, device)).backward()
        optimizer.step()
        loss = net(data(0, device))
        with amp.scale_loss(loss, optimizer):
            loss.backward()
        nn.utils.clip_grad_norm_(net.trained, 1e-3)
        optimizer.step()
        set_scales(optimizer, 2.0**24)
        with amp.scale_loss(net(data(0, device)) * float('inf'), optimizer) as loss:
            loss.backward()
        optimizer.step()
        net.fc.weight.data.mul_(2)
        net.state_dict()
        state = amp.state_dict()
        amp.load_state_dict({**state, f'loss_scaler{len(state)}': dict(loss_scale=1.0, unskipped=0)})
        amp.initialize([], other, verbosity=0)
        half = nn.Linear(2, 2, device=device).bfloat16()
        amp.initialize(half, SGD(half.parameters(), lr=0.1), opt_level=level, from_16bit=True, verbosity=0)
        plain = nn.Linear(2, 2, device=device)
        wrapper = AmpOptimWrapper(opt_level=level, optimizer=torch.optim.Adam(plain.parameters()), verbosity=0)
        wrapper.attach(plain)
        wrapper.load_state_dict(wrapper.state_dict())
        wrapper.backward(plain(torch.ones(1, 2, device=device)).sum())
        wrapper.load_state_dict(wrapper.state_dict())
    captured = capsys.readouterr()
    assert lines == [] and captured.out == captured.err == ''
    assert [str(w.message) for w in recwarn if 'amp' in str(w.message)] == []
