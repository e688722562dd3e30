"""``optimizer.add_param_group`` around ``amp.initialize``: what comes late is trained like the rest."""

from __future__ import annotations

import itertools

import pytest
import torch
from bits import differing
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from toy_amp import (
    HALF,
    LEVELS,
    MASTERS,
    ZEROINGS,
    Net,
    backward,
    check_rounded,
    data,
    scales,
    set_scales,
    sgd,
    values,
    zero,
)

from amp_wrapper import FusedSGD, amp
from amp_wrapper.errors import AmpUsageError

#: When the group comes: before initialize, or after so many steps.
MOMENTS = ('before', 0, 1, 2)


def train(
    device: torch.device,
    level: str | None,
    moment: str | int,
    how: str,
    passes: int = 1,
    zero_first: bool = True,
    scheduled: bool = False,
    fused: bool = False,
    broken: int | None = None,
) -> tuple[list[Net], Optimizer]:
    """Four steps; the second model joins at ``moment``, with a learning rate of its own."""
    nets = [Net().to(device), Net(2).to(device)]
    optimizer = FusedSGD(nets[0].trained, 0.25, momentum=0.5) if fused else sgd(nets[:1])
    group = {'params': nets[1].trained, 'lr': 0.5}
    if moment == 'before':
        optimizer.add_param_group(group)
    schedulers = [StepLR(optimizer, 2, 0.5)] if scheduled and moment == 'before' else []
    if level is not None:
        options = dict(opt_level=level, loss_scale='dynamic', verbosity=0)
        assert amp.initialize(nets, optimizer, **options) == (nets, optimizer)
        set_scales(optimizer, 4.0)
    for index in range(4):
        if zero_first:
            zero(how, [optimizer], nets)
        if moment == index:
            optimizer.add_param_group(group)
        if not zero_first:
            zero(how, [optimizer], nets)
        reached = nets if moment == 'before' or int(moment) <= index else nets[:1]
        for each in range(passes):
            loss = torch.stack([net(data(index + each, device)) for net in reached]).sum()
            if level is None:
                loss.backward()
            else:
                hit = reached[-1].fc.weight if broken == index and each == 0 else None
                backward(loss, optimizer, poisoned=hit)
        if level is not None or broken != index:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return nets, optimizer


def check(found: tuple[list[Net], Optimizer], wanted: tuple[list[Net], Optimizer], level: str) -> None:
    check_rounded(found[0], level)
    differences = differing(values(found[0], [found[1]]), values(wanted[0], [wanted[1]]))
    assert [key for key in differences if level not in MASTERS or 'net' not in key] == []
    assert [group['lr'] for group in found[1].param_groups] == [group['lr'] for group in wanted[1].param_groups]


@pytest.mark.parametrize('passes', [1, 2])
@pytest.mark.parametrize('moment', MOMENTS)
@pytest.mark.parametrize('level', LEVELS)
def test_trained_like_the_rest(level: str, moment: str | int, passes: int, device: torch.device) -> None:
    """With momentum and accumulation, zeroing before or after the group came."""
    for how, zero_first in itertools.product(ZEROINGS, (True, False) if isinstance(moment, int) else (True,)):
        check(
            train(device, level, moment, how, passes, zero_first),
            train(device, None, moment, how, passes, zero_first),
            level,
        )


@pytest.mark.parametrize('moment', MOMENTS)
@pytest.mark.parametrize('level', LEVELS)
def test_overflow_around_it(level: str, moment: str | int, device: torch.device) -> None:
    """The late weights are looked at too."""
    for broken in range(3):
        found = train(device, level, moment, 'model', 2, broken=broken)
        check(found, train(device, None, moment, 'model', 2, broken=broken), level)
        assert scales(found[1]) == [2.0]


@pytest.mark.parametrize('moment', MOMENTS)
@pytest.mark.parametrize('level', ['O2', 'O5'])
def test_with_the_fused_optimizer(level: str, moment: str | int, device: torch.device) -> None:
    for how in ZEROINGS:
        check(train(device, level, moment, how, fused=True), train(device, None, moment, how, fused=True), level)


@pytest.mark.parametrize('level', LEVELS)
def test_schedulers_hold_the_groups(level: str, device: torch.device) -> None:
    """The very dicts that a scheduler made before has in hand."""
    check(
        train(device, level, 'before', 'optimizer', scheduled=True),
        train(device, None, 'before', 'optimizer', scheduled=True),
        level,
    )


@pytest.mark.parametrize('level', LEVELS)
def test_the_state_dict_has_all_groups(level: str, device: torch.device) -> None:
    _, optimizer = train(device, level, 1, 'optimizer')
    _, plain = train(device, None, 1, 'optimizer')
    ours, theirs = optimizer.state_dict(), plain.state_dict()
    assert ours['param_groups'] == theirs['param_groups']
    for key, state in theirs['state'].items():
        buffer = ours['state'][key]['momentum_buffer']
        assert buffer.dtype is (HALF[level] if level == 'O3' else torch.float32)
        assert torch.equal(buffer.float(), state['momentum_buffer'])


@pytest.mark.parametrize('level', MASTERS)
def test_in_the_middle_of_an_accumulation(level: str, device: torch.device) -> None:
    """Between two passes of one step."""

    def run(at: str | None) -> tuple[list[Net], Optimizer]:
        nets = [Net().to(device), Net(2).to(device)]
        optimizer = sgd(nets[:1])
        if at is not None:
            amp.initialize(nets, optimizer, opt_level=at, loss_scale='dynamic', verbosity=0)
            set_scales(optimizer, 4.0)
        for index in range(3):
            loss = nets[0](data(index, device)) + nets[1](data(index, device))
            if at is None:
                loss.backward()
            else:
                backward(loss, optimizer)
            if index == 0:
                optimizer.add_param_group({'params': nets[1].trained, 'lr': 0.5})
        optimizer.step()
        return nets, optimizer

    found, wanted = run(level), run(None)
    check_rounded(found[0], level)
    a, b = values(found[0], [found[1]]), values(wanted[0], [wanted[1]])
    # what arrived at the late ones before they came carries a scale: nobody stepped them, nobody unscaled them
    assert all(torch.equal(a[f'optimizer 0 parameter {p}'], b[f'optimizer 0 parameter {p}']) for p in (0, 1))


@pytest.mark.parametrize('level', LEVELS)
def test_refused_as_in_torch(level: str, device: torch.device) -> None:
    """A parameter that is there already; nothing has changed."""
    nets, optimizer = train(device, level, 'before', 'optimizer')
    before = values(nets, [optimizer])

    def twice() -> None:
        # torch sees it at once where the parameter is its own master, and otherwise the next pass does
        optimizer.add_param_group({'params': nets[1].trained[:1]})
        backward(nets[1](data(0, device)), optimizer)

    error, word = (AmpUsageError, 'second time') if level in MASTERS else (ValueError, 'more than one')
    with pytest.raises(error, match=word):
        twice()
    del optimizer.param_groups[2:]
    assert differing(before, values(nets, [optimizer])) == []
