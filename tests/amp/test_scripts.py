"""Training scripts of the functional API, bit for bit against plain FP32 training that leaves out the skipped steps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from exact_scripts import CLEARS, KINDS, MASTERS, backward, clear, initialise, scales, sgd, start, state, unlike
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pairs import pairs
from play import DOORS, EXACT_LEVELS, Amp, Part, Setup, adam, check, data, fused_sgd
from play import sgd as play_sgd
from torch.optim import SGD, Adam, Optimizer

from amp_wrapper import AmpAttachError, AmpUsageError, amp

BOTH, STEP = (0, 1), ('step',)
SCRIPTS: dict[str, list[tuple[Any, ...]]] = {
    'overflow in the first of two passes': [('backward', BOTH, 0, 1), ('backward', BOTH, 1), STEP, ('backward', BOTH, 2), STEP],
    'overflow in the last of two passes': [('backward', BOTH, 0), ('backward', (0,), 1, 0), STEP, ('backward', BOTH, 2), STEP],
    'NaN in the first step of all': [('backward', BOTH, 0, 0, 0, math.nan), STEP, ('backward', BOTH, 1), STEP],
    'scale grows after clean steps and stays within its bounds': [*(('backward', BOTH, 0), STEP) * 7],
    'gradients of an overflow cleared without a step': [
        ('backward', BOTH, 0, 0), ('clear',), ('backward', BOTH, 1), STEP, ('backward', (0,), 2, 0), ('clear', False),
        ('backward', BOTH, 3), STEP,
    ],
    'weights edited after each step, as a WGAN clamps': [
        ('backward', BOTH, 0), STEP, ('write_weight', 0, 0.1875), ('backward', BOTH, 1), STEP, ('write_weight', 0, -0.15625),
        ('write_weight', 1, 0.40625), ('backward', BOTH, 2), STEP,
    ],
    'losses that contain masters': [
        ('penalty',), STEP, ('backward', BOTH, 1), ('penalty', BOTH, 2), STEP, ('penalty', (0,), 0, True), STEP, ('penalty',),
        STEP,
    ],
    'saved, loaded and gone on': [
        ('backward', BOTH, 0), STEP, ('backward', BOTH, 1, 1), STEP, ('save_and_load',), ('backward', BOTH, 2), STEP,
    ],
}  # fmt: skip


def foreach_adam(groups: Iterable[Any]) -> Optimizer:
    return Adam(groups, foreach=True)


def torchs_fused_sgd(groups: Iterable[Any]) -> Optimizer:
    return SGD(groups, momentum=0.5, fused=True)


OPTIMIZERS = [play_sgd, fused_sgd, adam, foreach_adam, torchs_fused_sgd]


@pairs(script=SCRIPTS, level=KINDS, door=DOORS, optimizer=OPTIMIZERS, clip=[None, 0.5])
def test_script_trains_as_fp32(script: str, level: str, door: str, optimizer: Any, clip: float | None) -> None:
    check(SCRIPTS[script], DOORS[door], Setup(level, optimizer, clip=clip))


#: Of a second model whose parameters the optimizer gets later.
GROUPS: dict[str, list[tuple[Any, ...]]] = {
    'within an accumulation': [('backward', (0,), 0), ('add_group',), ('backward', BOTH, 1), STEP, ('backward', BOTH), STEP],
    'and the first overflow is in it': [('backward', (0,), 0), STEP, ('add_group',), ('backward', BOTH, 1, 1), STEP, STEP],
}  # fmt: skip


@pairs(script=GROUPS, level=KINDS, optimizer=[play_sgd, fused_sgd, adam])
def test_group_that_is_added_trains_like_the_rest(script: str, level: str, optimizer: Any) -> None:
    check(GROUPS[script], Amp, Setup(level, optimizer, grouped=1))


@pytest.mark.parametrize('level', KINDS[1:])
def test_parameter_that_an_optimizer_gets_twice_is_refused(level: str) -> None:
    """torch sees a second group at once where a parameter is its own master, and the next pass sees the others."""
    net, optimizer = start(level)

    def twice() -> None:
        optimizer.add_param_group({'params': net.trained[:1]})
        backward(net(data(0)), optimizer)

    before = state([net], [optimizer])
    with pytest.raises(AmpUsageError if level in MASTERS else ValueError, match=r'has a master in|more than one'):
        twice()
    assert state([net], [optimizer], buffers=False).items() <= before.items()

    net = Part()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        optimizer = SGD([net.fc.weight, net.norm.weight, net.fc.weight], lr=0.25)
    held = list(optimizer.param_groups[0]['params'])
    with pytest.raises(AmpAttachError, match=r'fc\.weight'):
        amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    assert all(a is b for a, b in zip(held, optimizer.param_groups[0]['params'], strict=True))
    assert net.fc.weight.dtype is torch.float32


@pytest.mark.parametrize('how', CLEARS[:3])
def test_plain_backward_before_a_block_counts_and_no_scale_learns_from_it(how: str) -> None:
    """Finite gradients are added; others skip the step."""
    for level in EXACT_LEVELS:
        ours, theirs = start(level, 4.0), start(None)
        for value in (1.0, math.nan, 2.0):
            for net, optimizer in (ours, theirs):
                clear(how, [optimizer], [net])
                (net(data(0)) * value).backward()
                if net is ours[0] or not math.isnan(value):
                    backward(net(data(1)), optimizer, level=level if net is ours[0] else None)
                    optimizer.step()
        assert unlike(ours, theirs) == [] and scales(ours[1]) == [4.0], level


@pytest.mark.parametrize('how', (*CLEARS[:3], CLEARS[4]))
def test_script_that_skips_steps_itself(how: str) -> None:
    """ESPnet's way: where the norm is not finite, gradients are cleared. The scale falls all the same."""
    for level in EXACT_LEVELS:
        ours = net, optimizer = start(level)
        theirs = plain, other = start(None)
        for index in range(4):
            broken = index in (1, 2)
            backward(net(data(index)), optimizer, hit=net.fc.weight if broken else None)
            norm = torch.nn.utils.clip_grad_norm_(list(amp.master_params(optimizer)), 1e9)
            assert bool(norm.isfinite()) is not broken
            if not broken:
                optimizer.step()
                plain(data(index)).backward()
                other.step()
                other.zero_grad()
            clear(how, [optimizer], [net])
        backward(net(data(0)), optimizer)
        assert unlike(ours, theirs) == [] and scales(optimizer) == [2.0], level


# -- two optimizers at random -------------------------------------------------------------------------------------------

#: Which models each loss reaches, and which optimizers it is for.
LOSSES = ((0,), (0, 1), (1,))
IDS = (0, 1, 0)


class Plain:
    """Two FP32 trainings, two scales, and the flags that decide whether a step is taken."""

    def __init__(self) -> None:
        self.nets = [Part(), Part(2)]
        self.optimizers = [sgd([net]) for net in self.nets]
        #: And the clean steps since each of them fell.
        self.scales, self.clean = [2.0**10, 2.0**6], [0, 0]
        self.bad = [False, False]
        #: Of each optimizer: what the losses that it answers for have found since its last step.
        self.found: list[dict[int, bool]] = [{}, {}]

    def saved_scales(self) -> dict[str, dict[str, float]]:
        both = enumerate(zip(self.scales, self.clean))
        return {f'loss_scaler{index}': {'loss_scale': scale, 'unskipped': clean} for index, (scale, clean) in both}

    def backward(self, loss: int, index: int, broken: bool) -> None:
        sum_of(self.nets, loss, index).backward()
        first = LOSSES[loss][0]
        self.found[first][IDS[loss]] = self.found[first].get(IDS[loss], False) or broken
        for place in LOSSES[loss]:
            self.bad[place] = self.bad[place] or broken

    def step(self, place: int) -> None:
        if not self.bad[place]:
            self.optimizers[place].step()
        self.clear(place)

    def clear(self, place: int, set_to_none: bool = True) -> None:
        for loss_id, overflowed in self.found[place].items():
            self.scales[loss_id] *= 0.5 if overflowed else 1
            self.clean[loss_id] = 0 if overflowed else self.clean[loss_id] + 1
        self.found[place], self.bad[place] = {}, False
        self.optimizers[place].zero_grad(set_to_none)


def sum_of(nets: list[Part], loss: int, index: int) -> torch.Tensor:
    return torch.stack([nets[place](data(index)) for place in LOSSES[loss]]).sum()


def clip(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.clamp_(-0.5, 0.5)


ACTS = st.one_of(
    st.tuples(st.just('backward'), st.integers(0, 2), st.integers(0, 3), st.sampled_from([False, False, True])),
    st.tuples(st.sampled_from(['step', 'clip']), st.integers(0, 1)),
    st.tuples(st.just('clear'), st.integers(0, 1), st.booleans()),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(level=st.sampled_from(EXACT_LEVELS), acts=st.lists(ACTS, max_size=14))
# a scale learns once from a loss of both, whoever steps first; the step of one moves the scale while the other accumulates
@example(level='O2', acts=[('backward', 1, 0, True), ('step', 1), ('step', 0), ('backward', 1, 1, False)])
@example(level='O2', acts=[('backward', 0, 0, False), ('backward', 2, 0, True), ('step', 1), ('backward', 0, 1, False)])
def test_two_optimizers_in_any_order(level: str, acts: list[tuple[Any, ...]]) -> None:
    plain, nets = Plain(), [Part(), Part(2)]
    optimizers: list[Optimizer] = [sgd([net]) for net in nets]
    initialise(nets, optimizers, level, *plain.scales)
    for name, *words in [*acts, ('step', 0), ('step', 1)]:
        if name == 'clip':
            clip(plain.nets[words[0]].trained)
            clip(amp.master_params(optimizers[words[0]]))
            continue
        getattr(plain, name)(*words)
        if name == 'backward':
            loss, index, broken = words
            hit = nets[LOSSES[loss][-1]].fc.weight if broken else None
            backward(sum_of(nets, loss, index), [optimizers[place] for place in LOSSES[loss]], IDS[loss], hit)
        elif name == 'step':
            optimizers[words[0]].step()
            optimizers[words[0]].zero_grad()
        else:
            optimizers[words[0]].zero_grad(set_to_none=words[1])
    assert state(nets, optimizers, buffers=False) == state(plain.nets, plain.optimizers, buffers=False)
    assert amp.state_dict(optimizers=optimizers[0]) == plain.saved_scales()
