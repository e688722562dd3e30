"""The step that decides on the device: fused optimizers in the engine, and torch's own by flag."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import differing
from ops_models import NoHostRead
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from toy_engine import Run, poisoned

from amp_wrapper.engine import AmpEngine
from amp_wrapper.engine.clipping import GradientClip
from amp_wrapper.errors import AmpUsageError, OverflowStreakError
from amp_wrapper.optim import FusedAdam, FusedAdamW, FusedSGD
from amp_wrapper.policy import resolve

pytestmark = pytest.mark.usefixtures('with_and_without_ops')

Make = Callable[[Any], Optimizer]
FUSED: dict[str, Make] = {
    'adamw': lambda p: FusedAdamW(p, lr=0.01, weight_decay=0.1),
    'amsgrad': lambda p: FusedAdam(p, lr=0.01, amsgrad=True),
    'sgd': lambda p: FusedSGD(p, lr=0.125, momentum=0.5, weight_decay=0.01),
}
TORCHS: dict[str, Make] = {
    'adamw': lambda p: AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    'amsgrad': lambda p: Adam(p, lr=0.01, amsgrad=True, fused=True),
    'sgd': lambda p: SGD(p, lr=0.125, momentum=0.5, weight_decay=0.01, fused=True),
}
CLIPS: dict[str, dict[str, Any] | None] = {
    'none': None,
    'norm': dict(max_norm=0.05),
    'largest': dict(max_norm=0.05, norm_type='inf'),
    'value': dict(type='value', clip_value=0.01),
}


def clip(name: str) -> GradientClip | None:
    words = CLIPS[name]
    if words is not None and words.get('norm_type') == 'inf':
        words = words | dict(norm_type=math.inf)
    return GradientClip.parse(words)


class Even(nn.Module):
    """Sizes that are multiples of 16: what lies behind them torch's own kernels round otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 32)
        self.out = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.fc(x).relu())


class EvenRun(Run):
    """The same with that model."""

    def __init__(self, level: str, device: torch.device, make: Make, **overrides: Any) -> None:
        torch.manual_seed(3)
        self.device = device
        self.model: Any = Even().to(device)
        self.optimizer = make(self.model.parameters())
        self.engine = AmpEngine(resolve(level, **overrides), self.optimizer)
        self.engine.attach(self.model)

    def losses(self, index: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(100 + index)
        x, y = (torch.randn(8, width, generator=generator).to(self.device) for width in (4, 16))
        with self.engine.forward_context(self.model):
            output = self.model(x).float()
        return (output - y).square().mean(), output.square().mean() / 2


def unread(device: torch.device) -> Any:
    """No host read while this is entered; on a GPU torch looks as well."""
    if device.type == 'cuda':
        torch.cuda.set_sync_debug_mode('error')
    return NoHostRead()


# -- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', FUSED)
@pytest.mark.parametrize('level', ['O0', 'O1', 'O2', 'O5'])
def test_the_numbers_are_those_of_torchs_fused_optimizers(level: str, kind: str, device: torch.device) -> None:
    """Without a clip, whose norms are summed in another order, bit for bit."""
    if device.type == 'cpu' and torch.backends.cpu.get_cpu_capability() == 'DEFAULT':
        pytest.skip("torch's kernels round otherwise on processors without fused products and sums")
    ours, theirs = EvenRun(level, device, FUSED[kind]), EvenRun(level, device, TORCHS[kind])
    for run in (ours, theirs):
        run.train(*range(6))
    found, expected = ours.bits(), theirs.bits()
    # torch has no count for SGD
    found = {key: value for key, value in found.items() if key in expected}
    assert differing(found, expected) == [] and len(found) > 8


@pytest.mark.parametrize('name', ['norm', 'largest', 'value'])
@pytest.mark.parametrize('kind', FUSED)
def test_clipping_is_torchs_but_for_the_order_of_a_sum(kind: str, name: str, device: torch.device) -> None:
    ours, theirs = EvenRun('O2', device, FUSED[kind]), EvenRun('O2', device, TORCHS[kind])
    for index in range(4):
        norms = []
        for run in (ours, theirs):
            run.backward(index)
            norms.append(run.engine.step(clip(name)).grad_norm)
            run.engine.zero_grad()
        if name == 'value':
            assert norms == [None, None]
        else:
            torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0.0)
    for mine, other in zip(ours.engine.master_params(), theirs.engine.master_params()):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('kind', FUSED)
def test_groups_do_not_matter(kind: str, device: torch.device) -> None:
    """One group of all parameters, or one for each, as paramwise_cfg makes them."""
    together = Run('O2', device, FUSED[kind])
    apart = Run('O2', device, lambda p: FUSED[kind]([dict(params=[one]) for one in p]))
    for run in (together, apart):
        run.train(0, 1, 2, clip=clip('norm'))
    assert differing(together.bits(), apart.bits()) == []


# -- nobody waits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', CLIPS)
@pytest.mark.parametrize('level', ['O0', 'O1', 'O2', 'O3', 'O4', 'O5'])
def test_no_host_read_in_a_step(level: str, name: str, device: torch.device) -> None:
    for make in (*FUSED.values(), TORCHS['adamw']):
        run = Run(level, device, make)
        run.train(0)
        run.backward(1)
        try:
            with unread(device):
                result = run.engine.step(clip(name))
                run.engine.zero_grad()
        finally:
            if device.type == 'cuda':
                torch.cuda.set_sync_debug_mode('default')
        assert not result.was_skipped()
        if name in ('norm', 'largest'):
            assert result.grad_norm is not None and math.isfinite(result.grad_norm.item())


def test_two_losses_and_fp32_sums_need_no_read_either(device: torch.device) -> None:
    for overrides in (dict(num_losses=2), dict(accumulate_in_fp32=True)):
        run, plain = (EvenRun('O2', device, make, **overrides) for make in (FUSED['adamw'], TORCHS['adamw']))
        for index in range(3):
            run.backward(index)
            plain.backward(index)
            with NoHostRead():
                run.engine.step()
            plain.engine.step()
            for one in (run, plain):
                one.engine.zero_grad()
        assert differing(run.bits(), plain.bits()) == []


# -- skipping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('bad', [{0}, {0, 1, 2, 3}, {1, 3}], ids=['first', 'every', 'alternate'])
@pytest.mark.parametrize(
    'make', [*FUSED.values(), *TORCHS.values()], ids=[*FUSED, *(f'torch {name}' for name in TORCHS)]
)
def test_a_skipped_step_is_as_if_the_batch_had_not_been(make: Make, bad: set[int], device: torch.device) -> None:
    with_them, without = (Run('O2', device, make, loss_scale=8.0, verbosity=0) for _ in range(2))
    for index in range(4):
        if index in bad:
            before = with_them.bits()
            with poisoned(with_them.parameter('fc.bias'), [math.inf, math.nan][index % 2]):
                with_them.backward(index)
            result = with_them.engine.step(clip('norm'))
            with_them.engine.zero_grad()
            assert result.was_skipped() and result.skips is not None
            after = with_them.bits()
            # state that was made for the step, and holds nothing yet
            made = set(after) - set(before)
            assert all(not after.pop(key).any() for key in made)
            assert differing(before, after) == []
        else:
            for run in (with_them, without):
                run.train(index, clip=clip('norm'))
    found, expected = with_them.bits(), without.bits()
    found = {key: value for key, value in found.items() if key in expected or value.any()}
    assert differing(found, expected) == []
    assert with_them.engine.scalers[0].counts.tolist()[:2] == [4, len(bad)]


def test_the_scale_moves_as_with_any_optimizer(device: torch.device) -> None:
    scale = dict(init_scale=2.0**10, growth_interval=2, hysteresis=2)
    runs = [Run('O2', device, make, loss_scale=scale, verbosity=0) for make in (FUSED['sgd'], TORCHS['sgd'])]
    for index in range(9):
        for run in runs:
            with poisoned(run.parameter('fc.bias')) if index in (1, 2, 6) else NoHostRead():
                run.backward(index)
            run.engine.step()
            run.engine.zero_grad()
        states = [run.engine.scalers[0].state_dict() for run in runs]
        assert states[0] == states[1]
    assert states[0]['skips'] == 3 and states[0]['scale'] != 2.0**10


@pytest.mark.parametrize('make', [FUSED['adamw'], TORCHS['adamw']], ids=['ours', "torch's"])
def test_a_streak_is_found_when_the_decisions_are_read(make: Make, device: torch.device, caplog: Any) -> None:
    run = Run('O2', device, make, max_consecutive_skips=6)

    def step() -> Any:
        with poisoned(run.parameter('fc.bias')):
            run.backward()
        result = run.engine.step()
        run.engine.zero_grad()
        return result

    rows = [step().info.tolist() for _ in range(3)]
    assert not caplog.records
    run.engine.review(rows)
    assert [
        record.getMessage().split('; ')[0][-len('skipped (1 so far, 1 in a row)') :] for record in caplog.records
    ] == [f'skipped ({n} so far, {n} in a row)' for n in (1, 2, 3)]
    # two more cannot be too many; the one after them waits
    assert step().skipped is None and step().skipped is None
    weights = copy.deepcopy(run.model.state_dict())
    with pytest.raises(OverflowStreakError, match=r'6 optimizer steps in a row.*fc\.bias'):
        step()
    for key, value in run.model.state_dict().items():
        if 'running' not in key and 'tracked' not in key:
            assert torch.equal(value, weights[key])


def test_without_anybody_who_reads_the_limit_holds_all_the_same(device: torch.device) -> None:
    run = Run('O2', device, FUSED['sgd'], max_consecutive_skips=4, verbosity=0)
    with poisoned(run.parameter('fc.bias')):
        for _ in range(3):
            run.backward()
            assert run.engine.step().skipped is None
            run.engine.zero_grad()
        run.backward()
        with pytest.raises(OverflowStreakError, match='4 optimizer steps'):
            run.engine.step()
    one = Run('O2', device, FUSED['sgd'], max_consecutive_skips=1, verbosity=0)
    one.backward()
    assert one.engine.step().skipped is False


# -- gradients that come and go ----------------------------------------------------------------------------------------


@pytest.mark.parametrize('make', [FUSED['adamw'], FUSED['sgd'], TORCHS['sgd']], ids=['adamw', 'sgd', 'torch sgd'])
def test_late_and_missing_gradients(make: Make, device: torch.device) -> None:
    """A parameter that sat out is stepped as if nothing had been; torch's fused SGD raises at its first gradient."""
    run = Run('O2', device, make)
    frozen = run.parameter('out.bias')
    frozen.requires_grad_(False)
    kept = list(run.engine.master_params())[-1]
    before = kept.clone()
    run.train(0, 1)
    assert torch.equal(kept, before)
    frozen.requires_grad_(True)
    run.train(2)
    assert not torch.equal(kept, before)
    count = run.optimizer.state[kept].get('step')
    assert count is None or count.item() == 1
    run.parameter('fc.weight').requires_grad_(False)
    run.train(3)


def test_a_norm_that_the_prologue_cannot_take_goes_the_other_way(device: torch.device) -> None:
    chosen = GradientClip.parse(dict(max_norm=0.05, norm_type=1))
    assert chosen is not None and not chosen.fits_prologue
    ours, theirs = EvenRun('O2', device, FUSED['adamw']), EvenRun('O2', device, TORCHS['adamw'])
    for run in (ours, theirs):
        run.train(0, 1, clip=chosen)
    assert differing(ours.bits(), theirs.bits()) == []


def test_error_if_nonfinite_comes_before_anything_changes(device: torch.device) -> None:
    chosen = GradientClip.parse(dict(max_norm=0.05, error_if_nonfinite=True))
    for make in (FUSED['sgd'], TORCHS['sgd']):
        # a dynamic scale learns from the overflow instead
        for scale, checks in (('dynamic', None), (8.0, True), (8.0, False)):
            run = Run('O2', device, make, loss_scale=scale, skip_nonfinite=checks, verbosity=0)
            run.train(0, clip=chosen)
            before = run.bits()
            with poisoned(run.parameter('fc.bias')):
                run.backward(1)
            if scale == 'dynamic':
                assert run.engine.step(chosen).was_skipped()
                # finite gradients whose norm is not have nothing to do with the scale
                run.engine.zero_grad()
                run.backward(1)
                run.parameter('bn.bias').grad.fill_(1e30)
                before = run.bits()
                with pytest.raises(RuntimeError, match='non-finite'):
                    run.engine.step(chosen)
            else:
                with pytest.raises(RuntimeError, match='non-finite'):
                    run.engine.step(chosen)
            assert differing(before, run.bits()) == []


def test_hooks_before_a_step_see_unscaled_gradients(device: torch.device) -> None:
    seen = []
    run = Run('O2', device, FUSED['sgd'])
    masters = list(run.engine.master_params())
    run.optimizer.register_step_pre_hook(lambda *_: seen.append([m.grad.dtype for m in masters]))
    run.train(0)
    assert seen == [[torch.float32] * len(masters)]


def test_hooks_after_a_step_do_not_change_the_way(device: torch.device) -> None:
    run, calls = Run('O2', device, FUSED['sgd']), []
    run.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    run.backward()
    with NoHostRead():
        run.engine.step()
    assert calls == [1] and all(master.grad is None for _, master in run.engine.parts.params.pairs)


def test_memory_that_two_parameters_share_is_refused_with_nothing_done(device: torch.device) -> None:
    run = Run('O2', device, FUSED['adamw'], norm=False)
    masters = list(run.engine.master_params())
    masters[1].data = masters[0].data.view(-1)[:6]
    run.backward(1)
    before, scale = run.bits(), run.engine.scalers[0].state_dict()
    with pytest.raises(AmpUsageError, match='share memory'):
        run.engine.step(clip('norm'))
    assert differing(before, run.bits()) == [] and run.engine.scalers[0].state_dict() == scale


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', FUSED)
@pytest.mark.parametrize('level', ['O2', 'O3', 'O5'])
def test_a_resumed_run_goes_on_with_the_same_bits(level: str, kind: str, device: torch.device) -> None:
    # loaded before the model is cast, as mmengine does; at O3, too, moments stay float32
    through, resumed = Run(level, device, FUSED[kind]), Run(level, device, FUSED[kind], attach=False)
    through.train(0, 1, 2, clip=clip('norm'))
    saved = copy.deepcopy((through.model.state_dict(), through.engine.state_dict()))
    through.train(3, 4, clip=clip('norm'))
    resumed.model.load_state_dict(saved[0])
    resumed.engine.load_state_dict(saved[1])
    resumed.engine.attach(resumed.model)
    resumed.train(3, 4, clip=clip('norm'))
    assert differing(through.bits(), resumed.bits()) == []


def test_states_move_between_our_optimizers_and_torchs(device: torch.device) -> None:
    for kind in FUSED:
        ours, theirs = EvenRun('O2', device, FUSED[kind]), EvenRun('O2', device, TORCHS[kind])
        for run in (ours, theirs):
            run.train(0, 1)
        other = EvenRun('O2', device, TORCHS[kind])
        other.model.load_state_dict(ours.model.state_dict())
        other.engine.load_state_dict(ours.engine.state_dict())
        # a group says how it is stepped, and ours does not
        other.optimizer.param_groups[0]['fused'] = True
        back = EvenRun('O2', device, FUSED[kind])
        back.model.load_state_dict(theirs.model.state_dict())
        back.engine.load_state_dict(theirs.engine.state_dict())
        for run in (ours, theirs, other, back):
            run.train(2, 3)
        expected = list(theirs.engine.master_params())
        for run in (ours, other, back):
            assert all(torch.equal(a, b) for a, b in zip(run.engine.master_params(), expected, strict=True)), kind
