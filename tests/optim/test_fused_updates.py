"""Fused steps under a loss scale: skipped on the device, with copies and remainders beside the weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from bits import same, same_bits
from ops_models import NoHostRead
from torch import Tensor, nn
from toy_fused import MOMENTUM, THEIRS, give, options, snapshot, weights

from amp_wrapper import AmpUsageError, FusedAdamW, FusedSGD, ops
from amp_wrapper.ops.split import join, split
from amp_wrapper.optim import FusedOptimizer, Update

pytestmark = pytest.mark.usefixtures('with_and_without_ops')

# -- overflow ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('pattern', ['xcc', 'xxx', 'cxcx', 'xcxcc'])
@options
def test_skipped_steps_leave_everything_as_it_was(
    cls: type[FusedOptimizer], kwargs: dict[str, Any], pattern: str, device: torch.device
) -> None:
    mine, theirs = weights(device), weights(device)
    ours, own = cls(mine, **kwargs), THEIRS[cls](theirs, foreach=False, **kwargs)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=2)
    scaler.scale(torch.zeros((), device=device))
    for seed, kind in enumerate(pattern):
        scale = float(scaler.get_scale())
        give(mine, seed, scale, bad=math.inf if kind == 'x' else None)
        # torch's SGD has no momentum then, and Adam no state, or one of zeros
        before = snapshot(mine, ours)
        with NoHostRead():
            scaler.step(ours)
        scaler.update()
        if kind == 'x':
            assert same([b for b in snapshot(mine, ours) if b.any()], [b for b in before if b.any()])
            assert scaler.get_scale() == scale / 2
        else:
            give(theirs, seed)
            own.step()
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    # and torch's own goes on from there
    resumed = THEIRS[cls](theirs, foreach=False, **kwargs)
    resumed.load_state_dict(copy.deepcopy(ours.state_dict()))
    for seed in (20, 21):
        give(mine, seed)
        give(theirs, seed)
        ours.step()
        resumed.step()
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_flag_that_is_a_sum_over_devices(device: torch.device) -> None:
    """torch's fused kernels compare with 1: two devices with infinities make 2, and the gradients are applied."""
    mine = weights(device)
    optimizer = FusedSGD(mine, **MOMENTUM)
    before = [p.detach().clone() for p in mine]
    give(mine, 0, bad=math.inf)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor([2.0], device=device), None
    optimizer.step()
    assert all(map(torch.equal, mine, before)) and optimizer.state_dict()['state'] == {}
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(0.0, dtype=torch.float64), 4.0
    give(mine, 1, scale=4.0)
    optimizer.step()
    other = weights(device)
    give(other, 1)
    FusedSGD(other, **MOMENTUM).step()
    assert all(map(same_bits, mine, other))
    optimizer.grad_scale = 'big'
    with pytest.raises(AmpUsageError, match=r"FusedSGD\.grad_scale is 'big': one number or None"):
        optimizer.step()


@options
def test_a_step_reads_nothing(cls: type[FusedOptimizer], kwargs: dict[str, Any], device: torch.device) -> None:
    mine = weights(device) + weights(device, torch.float64) + weights(device, torch.bfloat16)
    optimizer = cls([dict(params=mine[:4]), dict(params=mine[4:], lr=torch.tensor(0.1, device=device))], **kwargs)
    for seed in range(3):
        give(mine, seed)
        mine[seed].grad = None
        with NoHostRead():
            optimizer.step()


# -- under somebody else's loss scale ---------------------------------------------------------------------------------


class Engine:
    """Holds gradients apart, has a loss scale, and clips: what the engine of the package does."""

    def __init__(self, optimizer: FusedOptimizer, copy_of: Mapping[int, Tensor], device: torch.device) -> None:
        self.optimizer = optimizer
        self.copy_of = copy_of
        self.gradients: dict[int, Tensor] = {}
        self.scale = torch.full((), 1024.0, device=device)
        self.trackers = [torch.zeros((), dtype=torch.int32, device=device) for _ in range(2)]
        self.counts = torch.zeros(3, dtype=torch.int64, device=device)
        self.seen: list[int] = []

    def decide(self, gradients: list[Tensor]) -> dict[str, Any]:
        self.seen.append(len(gradients))
        found = torch.zeros_like(self.scale)
        norm, _ = ops.multi_tensor_l2norm(gradients, None, found)
        return dict(
            found_inf=found,
            norm=norm,
            scale=self.scale,
            growth_tracker=self.trackers[0],
            hysteresis_tracker=self.trackers[1],
            counts=self.counts,
            rule=(2.0, 0.5, 2, 1, 0.0, 2.0**24),
            max_norm=1.0,
        )

    def step(self) -> Tensor | None:
        mine = [p for group in self.optimizer.param_groups for p in group['params']]
        gradients, copy_of = ([found.get(id(p)) for p in mine] for found in (self.gradients, self.copy_of))
        update = Update(gradients, copy_of, lambda grads: self.decide(grads))
        with NoHostRead(), self.optimizer.updating(update):
            self.optimizer.step()
        return update.decision


@pytest.fixture
def weights_and_engine(device: torch.device) -> Iterator[tuple[list[nn.Parameter], Engine]]:
    """A float32 parameter with a copy, a 16-bit one with a remainder, and a float32 one with nothing beside it."""
    mine = weights(device)
    weight, remainder = split(mine[1].detach(), torch.bfloat16)
    mine[1] = nn.Parameter(weight)
    copy_of = {id(mine[0]): mine[0].detach().half(), id(mine[1]): remainder}
    optimizer = FusedAdamW(mine, lr=0.01)
    yield mine, Engine(optimizer, copy_of, device)
    assert optimizer._update is None


def test_an_update_skips_on_the_device_and_copies_follow(
    weights_and_engine: tuple[list[nn.Parameter], Engine], device: torch.device
) -> None:
    mine, engine = weights_and_engine
    exact = weights(device)
    own = torch.optim.AdamW(exact, lr=0.01)
    called: list[str] = []
    engine.optimizer.register_step_pre_hook(lambda *_: called.append('pre'))
    engine.optimizer.register_step_post_hook(lambda *_: called.append('post'))
    for seed, kind in enumerate('xcccx'):
        scale = float(engine.scale)
        give(exact, seed)
        gradients = [p.grad.half() for p in exact]
        engine.gradients = {id(p): g * scale for p, g in zip(mine, gradients)}
        if kind == 'x':
            engine.gradients[id(mine[2])][0, 0, 0] = math.nan
        decision = engine.step()
        assert decision is not None and decision.device.type == device.type
        skip, _, coefficient, _, norm, after, skipped, _ = decision.tolist()
        assert (skip == 1) == (kind == 'x') and math.isnan(norm) == (kind == 'x')
        assert after == float(engine.scale) and skipped == int(engine.counts[1])
        if kind == 'c':
            for parameter, gradient in zip(exact, gradients):
                parameter.grad = gradient.float()
            total = nn.utils.clip_grad_norm_(exact, 1.0)
            assert coefficient < 1 and norm == pytest.approx(float(total), rel=1e-3)
            own.step()
    for parameter, b in zip(mine, exact):
        beside = engine.copy_of.get(id(parameter))
        a = parameter if parameter.dtype is torch.float32 else join(parameter, beside)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert same_bits(engine.copy_of[id(mine[0])], mine[0].detach().half())
    assert called == ['pre', 'post'] * 5 and engine.seen == [3] * 5 and engine.counts.tolist() == [5, 2, 1]
    assert float(engine.scale) == 1024 / 2 * 2 / 2


def test_copies_that_change_and_missing_gradients(weights_and_engine: tuple[list[nn.Parameter], Engine]) -> None:
    mine, engine = weights_and_engine
    # all ranks decide, also one that has no gradient at all
    decision = engine.step()
    assert decision is not None and engine.seen == [0] and not engine.optimizer.state
    engine.gradients = {id(mine[0]): torch.ones_like(mine[0], dtype=torch.float16)}
    engine.step()
    engine.copy_of = {**engine.copy_of, id(mine[0]): torch.zeros_like(mine[0], dtype=torch.bfloat16)}
    again = engine.step()
    # the engine may keep what it was told
    assert again is not None and again.data_ptr() != decision.data_ptr()
    assert same_bits(engine.copy_of[id(mine[0])], mine[0].detach().bfloat16())
    assert list(engine.optimizer.state) == [mine[0]] and engine.seen == [0, 1, 1]
    # without an engine it stands beside nothing
    beside = engine.copy_of[id(mine[0])].clone()
    mine[0].grad = torch.ones_like(mine[0])
    engine.optimizer.step()
    assert same_bits(engine.copy_of[id(mine[0])], beside)
    with engine.optimizer.updating(Update([None] * 3, [None] * 3, engine.decide)):
        with pytest.raises(AmpUsageError, match='does not nest'):
            with engine.optimizer.updating(Update([None] * 3, [None] * 3, engine.decide)):
                pass


@pytest.mark.parametrize('begun', [False, True])
def test_gradients_of_an_update_are_checked_before_its_step(
    weights_and_engine: tuple[list[nn.Parameter], Engine], begun: bool
) -> None:
    mine, engine = weights_and_engine
    good = {id(p): torch.ones_like(p, dtype=torch.float16) for p in mine}
    if begun:
        engine.gradients = good
        engine.step()
        engine.seen.clear()
    count = len(engine.optimizer.state)
    for gradient, words in (
        (torch.ones(3, dtype=torch.float16), r'has shape \(16,\) and its gradient \(3,\)'),
        (torch.ones(16).to_sparse(), 'has a sparse gradient'),
        (torch.ones(16, device='meta'), 'its gradient on meta: move the gradient there'),
    ):
        if begun and gradient.is_meta and mine[0].device.type == 'cpu':
            # torch gives both the same number, and the op refuses
            continue
        engine.gradients = {**good, id(mine[0]): gradient}
        with pytest.raises(AmpUsageError, match=words):
            engine.step()
        assert engine.seen == [] and len(engine.optimizer.state) == count
    engine.optimizer.add_param_group(dict(params=[nn.Parameter(torch.ones(2, device='meta'))]))
    late = engine.optimizer.param_groups[1]['params'][0]
    engine.gradients = {**good, id(late): torch.ones(2, device='meta')}
    with pytest.raises(AmpUsageError, match='under one loss scale they must be on one device'):
        engine.step()
    engine.gradients = good
    engine.step()
    assert engine.seen == [3]
