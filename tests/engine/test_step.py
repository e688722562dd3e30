"""One optimizer step: what it refuses, its numbers against a loop by hand, skipped steps, hooks, and its saved state."""

from __future__ import annotations

import copy
import functools
import io
import math
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import differing, same
from mmengine.logging import MessageHub
from op_lists import NoHostRead, skip_without_library
from pairs import pairs
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from toy_training import CAST, LEVELS, MASTERED, SCALED, Net, Training, batch, poisoned

from amp_wrapper import AmpCheckpointError, AmpUsageError, FusedAdam, FusedAdamW, FusedSGD, OverflowStreakError, resolve

Make = Callable[[Any], Optimizer]
FUSED: dict[str, Make] = {
    'FusedAdamW': lambda p: FusedAdamW(p, lr=0.01, weight_decay=0.1),
    'FusedAdam': lambda p: FusedAdam(p, lr=0.01, amsgrad=True),
    'FusedSGD': lambda p: FusedSGD(p, lr=0.125, momentum=0.5, weight_decay=0.01),
}
#: Those of torch that take the same steps, and learn of a skip from a flag on the device.
FUSED_OF_TORCH: dict[str, Make] = {
    'FusedAdamW': lambda p: AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    'FusedAdam': lambda p: Adam(p, lr=0.01, amsgrad=True, fused=True),
    'FusedSGD': lambda p: SGD(p, lr=0.125, momentum=0.5, weight_decay=0.01, fused=True),
}
EAGER: dict[str, Make] = {
    'SGD': lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=False),
    'Adam': lambda p: Adam(p, lr=0.05, weight_decay=0.1, amsgrad=True, foreach=True),
    'AdamW': lambda p: AdamW(p, lr=0.05, weight_decay=0.1, fused=True),
    'RMSprop': lambda p: RMSprop(p, lr=0.05, momentum=0.5, centered=True),
}
ALL = {**FUSED, 'FusedSGD of torch': FUSED_OF_TORCH['FusedSGD'], **EAGER}
CLIPS: dict[str, dict[str, Any] | None] = {
    'no clip': None,
    'norm': dict(max_norm=0.05),
    'large norm': dict(max_norm=1e3),
    'largest': dict(max_norm=0.05, norm_type=math.inf),
    'sum': dict(max_norm=0.05, norm_type=1),
    'value': dict(type='value', clip_value=0.01),
}


@pytest.fixture(autouse=True)
def own_log() -> None:
    """Numbers of earlier tests that nobody has read would come between."""
    MessageHub.get_instance(f'log {time.monotonic_ns()}')


def grad_norm(run: Training) -> float:
    run.wrapper.device_log.flush()
    return float(run.wrapper.message_hub.get_scalar('train/grad_norm').current())


# -- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
def test_a_step_needs_a_backward_pass_of_the_wrapper(level: str) -> None:
    """At O0 gradients of other code are as good."""
    run = Training(level)
    before = run.bits()
    if level != 'O0':
        with pytest.raises(AmpUsageError, match='without a backward'):
            run.step()
        run.loss().backward()
        with pytest.raises(AmpUsageError, match='without a backward'):
            run.step()
        assert differing(before, run.bits()) == []
        run.clear()
        run.train(0)
    else:
        run.loss().backward()
        run.step()
    assert 'weight fc.weight' in differing(before, run.bits())


def test_closures_run_where_there_is_no_scale_and_no_master() -> None:
    for level in LEVELS:
        run, calls = Training(level), list[int]()
        run.passes(0)
        if level in SCALED or level in MASTERED:
            with pytest.raises(AmpUsageError, match='closure'):
                run.step(closure=functools.partial(calls.append, 1))
        else:
            run.step(closure=lambda run=run, calls=calls: [calls.append(1), run.loss()][1])
        assert calls == [1] * (level in ('O0', 'O3', 'O4')), level


@pytest.mark.parametrize('level', LEVELS)
def test_steps_of_the_optimizer_beside_the_wrapper(level: str) -> None:
    """Refused where gradients are not what the optimizer takes; nothing has happened then."""
    run = Training(level)
    run.optimizer.step()  # no gradient waits: as scripts do before a scheduler is made
    before = run.bits()
    run.passes(0)
    if level in SCALED or level in MASTERED:
        with pytest.raises(AmpUsageError, match=r'beside the wrapper.*optim_wrapper\.step\(\)'):
            run.optimizer.step()
        assert differing(before, run.bits()) == []
        run.step()
    else:
        run.optimizer.step()
    run.clear()
    assert 'weight fc.weight' in differing(before, run.bits())
    run.wrapper.detach()
    before = run.bits()
    run.model(batch(0)[0]).sum().backward()
    run.optimizer.step()
    assert 'weight fc.weight' in differing(before, run.bits())


# -- the numbers -----------------------------------------------------------------------------------------------------------


@pairs(level=MASTERED, name=ALL, clip=CLIPS)
def test_steps_are_those_of_a_loop_with_masters_by_hand(level: str, name: str, clip: str) -> None:
    """Bit for bit; but for norms, whose sums have an order of their own."""
    scale, dtype = 128.0, CAST[level]
    run = Training(level, make=ALL[name], model=_net(), loss_scale=scale, clip_grad=CLIPS[clip])
    model = _net()
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    by_hand = FUSED_OF_TORCH.get(name, ALL[name])(masters)
    model.to(dtype)
    for index in range(4):
        x, y = batch(index)
        loss = (model(x.to(dtype)).float() - y).square().mean()
        (loss * scale).backward()
        for weight, master in zip(model.parameters(), masters):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float() / scale, None
        words = CLIPS[clip]
        if clip not in ('no clip', 'value'):
            norm = nn.utils.clip_grad_norm_(masters, **words)
        elif clip == 'value':
            nn.utils.clip_grad_value_(masters, words['clip_value'])
        by_hand.step()
        by_hand.zero_grad()
        with torch.no_grad():
            for weight, master in zip(model.parameters(), masters):
                weight.copy_(master)
        run.train(index)
        if clip not in ('no clip', 'value'):
            torch.testing.assert_close(grad_norm(run), float(norm), rtol=1e-5, atol=0.0)
    found, wanted = [m.detach() for m in run.masters()], [m.detach() for m in masters]
    if clip not in ('no clip', 'value'):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
        return
    assert same(found, wanted)
    assert same([p.detach() for p in run.model.parameters()], [p.detach() for p in model.parameters()])
    for mine, other in zip(run.masters(), masters):
        # torch has no count for SGD
        theirs = by_hand.state[other]
        assert same({key: run.optimizer.state[mine][key] for key in theirs}, dict(theirs))


def _net() -> Net:
    torch.manual_seed(3)
    return Net(norm=False)


@pairs(
    level=LEVELS,
    clip=('no clip', 'norm', 'value'),
    name=('FusedAdamW', 'FusedSGD', 'AdamW'),
    losses=(1, 2),
    bad=(False, True),
)
def test_steps_that_skip_on_the_device_read_nothing(level: str, clip: str, name: str, losses: int, bad: bool) -> None:
    if level == 'O3':
        # torch steps no 16-bit weights fused
        skip_without_library(torch.device('cpu'))
        name = 'FusedAdam' if name == 'AdamW' else name
    run = Training(level, make=ALL[name], clip_grad=CLIPS[clip], num_losses=losses, skip_nonfinite=True)
    run.train(0)
    before = run.bits(buffers=True)
    with poisoned(run.weight(), math.inf if bad else 0.0):
        run.passes(1)
    with NoHostRead():
        run.step()
        run.clear()
    assert run.skipped() == bad and (differing(before, run.bits(buffers=True)) == []) == bad


# -- skipped steps ---------------------------------------------------------------------------------------------------------


@pairs(
    name=ALL,
    level=('O1', 'O2', 'O3', 'O5'),
    bad=((0,), (0, 1, 2, 3), (1, 3)),
    where=('fc.weight', 'bn.weight', 'out.bias'),
    losses=(1, 2),
    clip=('no clip', 'norm'),
)
def test_skip_changes_nothing(level: str, name: str, bad: tuple[int, ...], where: str, losses: int, clip: str) -> None:
    """The training goes on as if the batch had not been."""
    if level == 'O3':
        name = 'FusedSGD'  # float16 has no epsilon of 1e-8
    words = dict(num_losses=losses, loss_scale=8.0, skip_nonfinite=True, clip_grad=CLIPS[clip])
    run, without = (Training(level, make=ALL[name], **words) for _ in range(2))
    for index in range(4):
        before = run.bits(buffers=True)
        if index not in bad:
            run.train(index)
            without.train(index)
            assert not run.skipped() and 'weight fc.weight' in differing(before, run.bits(buffers=True))
            continue
        for loss_id in range(losses):
            loss = run.loss(index, loss_id)
            with poisoned(run.weight(where if loss_id == losses - 1 else 'fc.bias'), [math.inf, math.nan][index % 2]):
                run.backward(loss, loss_id)
        run.step()
        run.clear()
        assert run.skipped()
        after = run.bits(buffers=True)
        # state that was made for the step, and holds nothing yet
        assert all(not after.pop(key).any() for key in set(after) - set(before))
        assert differing(before, after) == []
    found, wanted = run.bits(buffers=True), without.bits(buffers=True)
    assert differing({key: value for key, value in found.items() if key in wanted or value.any()}, wanted) == []
    for scaler in run.wrapper.loss_scalers:
        assert scaler.state_dict()['steps'] == 4 and scaler.state_dict()['skips'] == len(bad)


@pytest.mark.parametrize('name', ['Adam', 'FusedAdamW'])
def test_a_weight_that_was_frozen_is_stepped_as_a_new_one(name: str) -> None:
    run = Training('O2', make=ALL[name])
    frozen, master = run.weight('out.bias'), run.masters()[-1]
    frozen.requires_grad_(False)
    before = master.clone()
    run.train(0, 1)
    assert torch.equal(master, before) and not run.optimizer.state.get(master)
    frozen.requires_grad_(True)
    run.train(2)
    assert not torch.equal(master, before) and float(run.optimizer.state[master]['step']) == 1


@pairs(level=('O1', 'O2', 'O3', 'O5'), name=('SGD', 'FusedSGD', 'AdamW'), losses=(1, 2))
def test_a_streak_of_skips_ends_in_an_error(level: str, name: str, losses: int) -> None:
    """Whichever loss overflowed; steps that were taken before do not count; nothing has changed, and training can go on."""
    name = 'FusedSGD' if level == 'O3' else name
    run = Training(level, make=ALL[name], max_consecutive_skips=3, num_losses=losses)
    for index in range(3):
        with poisoned(run.weight(), math.nan):
            run.train(0, 1)
        run.train(index)
    before = run.bits(buffers=True)
    with poisoned(run.weight(), math.nan):
        run.train(1, 2)
        run.passes(3)
        with pytest.raises(OverflowStreakError) as caught:
            run.step()
    text = str(caught.value)
    assert all(words in text for words in ('3 optimizer steps', 'fc.weight', 'max_consecutive_skips=3', 'keep_fp32'))
    assert 'out.weight' not in text and differing(before, run.bits(buffers=True)) == []
    run.clear()
    run.train(4)
    assert run.wrapper.loss_scaler.state_dict()['consecutive_skips'] == 0


@pytest.mark.parametrize('level', LEVELS)
def test_the_error_of_a_streak_advises_what_helps_at_the_level(level: str) -> None:
    run = Training(level, max_consecutive_skips=1, skip_nonfinite=True)
    with poisoned(run.weight(), math.nan):
        run.passes(0)
        with pytest.raises(OverflowStreakError) as caught:
            run.step()
    text = str(caught.value)
    assert ('keep_fp32' in text) == (level != 'O0')
    assert ('use bfloat16' in text) == (level in ('O1', 'O2', 'O3'))
    for name, value in re.findall(r"\((\w+)='(bfloat16)'\)", text):
        assert torch.bfloat16 in vars(resolve(**{'opt_level': level, name: value})).values()


@pytest.mark.parametrize(('verbosity', 'lines'), [(0, 0), (1, 6)])
def test_skips_are_logged_five_times_and_then_at_every_doubling(verbosity: int, lines: int, log: list[str]) -> None:
    run = Training('O2', verbosity=verbosity)
    with poisoned(run.weight()):
        run.train(*range(10))
    skips = [line for line in log if 'skipped' in line]
    assert [line.split()[0] for line in skips] == ['INFO'] * min(lines, 5) + ['WARNING'] * (lines - 5)
    assert lines == 0 or 'loss scale now 32768' in skips[0]


@pytest.mark.parametrize('name', ['FusedSGD', 'SGD'])
def test_a_dynamic_scale_learns_of_an_overflow_in_place_of_error_if_nonfinite(name: str) -> None:
    run = Training('O2', make=ALL[name], clip_grad=dict(max_norm=0.05, error_if_nonfinite=True))
    run.train(0)
    before = run.bits(buffers=True)
    with poisoned(run.weight()):
        run.train(1)
    assert run.skipped() and differing(before, run.bits(buffers=True)) == [] and run.scales() == [2.0**15]


# -- the state -------------------------------------------------------------------------------------------------------------


def reload(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pairs(
    level=LEVELS,
    name=('SGD', 'FusedSGD', 'FusedAdamW'),
    losses=(1, 2),
    when=('before', 'after'),
    overflow=(False, True),
)
def test_an_accumulation_is_resumed_bit_for_bit(level: str, name: str, losses: int, when: str, overflow: bool) -> None:
    """Its gradients, overflows and buffers; the state that is loaded is neither changed nor aliased."""
    name = 'FusedSGD' if level == 'O3' else name
    words = dict(num_losses=losses, clip_grad=dict(max_norm=0.1), skip_nonfinite=True)
    whole = Training(level, make=ALL[name], **words)
    whole.train(0, 1)
    whole.passes(2)
    if overflow:
        with poisoned(whole.weight()):
            whole.passes(3)
    saved = reload((dict(whole.model.state_dict()), whole.wrapper.state_dict()))
    kept = copy.deepcopy(saved)
    part = Training(level, make=ALL[name], attach=when == 'after', **words)
    part.model.load_state_dict(saved[0])
    part.wrapper.load_state_dict(saved[1])
    part.wrapper.attach(part.model)
    assert part.wrapper.in_window
    assert same(saved[1], part.wrapper.state_dict())
    before = part.bits(buffers=True)
    for run in (whole, part):
        run.passes(4)
        run.step()
        run.clear()
        assert run.skipped() == overflow
    if overflow:
        assert not [name for name in differing(before, part.bits(buffers=True)) if 'buffer' not in name]
    for run in (whole, part):
        run.train(5)
    assert differing(whole.bits(buffers=True), part.bits(buffers=True)) == []
    assert same(whole.wrapper.state_dict(), part.wrapper.state_dict()) and same(saved, kept)
    # nothing of the first file is left where another one is loaded
    for state in (saved[1], whole.wrapper.state_dict()):
        part.wrapper.load_state_dict(state)
    before = part.bits(buffers=True)
    with poisoned(part.weight()):
        part.train(6)
    assert differing(before, part.bits(buffers=True)) == []


def test_a_saved_accumulation_is_a_snapshot() -> None:
    run = Training('O2')
    run.passes(0)
    saved = run.wrapper.state_dict()
    kept = copy.deepcopy(saved)
    run.passes(1)
    assert same(saved, kept)


@pairs(damage=('moment', 'gradient'), when=('before', 'after'))
def test_a_damaged_state_is_refused_and_changes_nothing(damage: str, when: str) -> None:
    """A moment or a gradient of another shape; test_damage.py has the rest."""
    source = Training('O2', make=ALL['Adam'])
    source.train(0)
    source.passes(1)
    state = copy.deepcopy(source.wrapper.state_dict())
    if damage == 'moment':
        state['state'][0]['exp_avg'] = torch.ones(7)
    else:
        state['amp']['window']['gradients'][0] = torch.ones(7)
    run = Training('O2', make=ALL['Adam'], attach=when == 'after')
    if when == 'after':
        run.train(4)
    before, own = run.bits(), copy.deepcopy(run.wrapper.state_dict())
    with pytest.raises(AmpCheckpointError):
        run.wrapper.load_state_dict(state)
    assert differing(before, run.bits()) == [] and same(run.wrapper.state_dict(), own)


@pytest.mark.parametrize('target', LEVELS)
def test_state_goes_from_any_level_to_any(target: str, log: list[str]) -> None:
    """An open accumulation stays behind."""
    for source in LEVELS:
        first, second = Training(source), Training(target, attach=False, verbosity=1)
        first.train(0, 1)
        first.passes(2)
        second.model.load_state_dict(first.model.state_dict())
        second.wrapper.load_state_dict(reload(first.wrapper.state_dict()))
        second.wrapper.attach(second.model)
        assert second.wrapper.in_window == (source == target)
        if source != target:
            assert any('unfinished accumulation' in line and f'resumed at {target}' in line for line in log), source
        log.clear()
        for mine, theirs in zip(second.masters(), first.masters()):
            buffer, saved = (r.optimizer.state[p]['momentum_buffer'] for r, p in ((second, mine), (first, theirs)))
            assert buffer.dtype is mine.dtype and torch.equal(buffer, saved.float().to(mine.dtype))
        second.train(2)
        assert second.loss(3).isfinite()


class Outer(SGD):
    """Holds another optimizer, which holds it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.inner: Any = SGD(self.param_groups[0]['params'], lr=0.1)
        self.inner.param_groups, self.inner.parent = self.param_groups, self


def test_optimizers_that_hold_each_other_are_initialised() -> None:
    Training('O1', 'amp', Outer)
