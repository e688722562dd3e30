"""The order of a step: skipping, scaling, masters, windows, and every misuse that has a message."""

from __future__ import annotations

import copy
import io
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.utils._python_dispatch import TorchDispatchMode

from amp_wrapper import ops
from amp_wrapper.autocast import regions
from amp_wrapper.autocast.op_set import OpSet
from amp_wrapper.autocast.patching import patches
from amp_wrapper.casting.roots import unwrap
from amp_wrapper.engine import AmpEngine, Stage
from amp_wrapper.engine.clipping import GradientClip
from amp_wrapper.errors import AmpAttachError, AmpCheckpointError, AmpConfigError, AmpUsageError, OverflowStreakError
from amp_wrapper.policy import LEVELS, resolve

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
MASTER_LEVELS = {'O2': F16, 'O5': BF16}
CAST_LEVELS = {'O2': F16, 'O3': F16, 'O5': BF16}


class Net(nn.Module):
    """One 16-bit and one FP32 parameter group at the levels that keep BatchNorm."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 6)
        self.bn = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.bn(self.fc(x)).relu())


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.125, momentum=0.5)


def batch(device: torch.device, index: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + index)
    x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)
    return x.to(device), y.to(device)


class Run:
    """A model, its optimizer and an engine around them."""

    def __init__(
        self,
        level: str,
        device: torch.device,
        make: Callable[[Any], Optimizer] = momentum,
        attach: bool = True,
        norm: bool = True,
        **overrides: Any,
    ) -> None:
        torch.manual_seed(3)
        self.device = device
        self.model = Net(norm).to(device)
        self.optimizer = make(self.model.parameters())
        self.engine = AmpEngine(resolve(level, **overrides), self.optimizer)
        if attach:
            self.engine.attach(self.model)

    def losses(self, index: int = 0) -> tuple[Tensor, Tensor]:
        x, y = batch(self.device, index)
        with self.engine.forward_context(self.model):
            output = self.model(x).float()
        return (output - y).square().mean(), output.square().mean() / 2

    def backward(self, index: int = 0) -> None:
        first, second = self.losses(index)
        if self.engine.policy.num_losses > 1:
            self.engine.backward(first, 0, retain_graph=True)
            self.engine.backward(second, 1)
        else:
            self.engine.backward(first)

    def train(self, *indices: int, clip: GradientClip | None = None) -> None:
        for index in indices:
            self.backward(index)
            self.engine.step(clip)
            self.engine.zero_grad()

    def parameter(self, name: str) -> nn.Parameter:
        return dict(self.model.named_parameters())[name]

    def bits(self) -> dict[str, Tensor]:
        """Clones of weights, masters and optimizer state."""
        found = {f'weight {name}': p.detach().clone() for name, p in self.model.named_parameters()}
        for index, master in enumerate(self.engine.master_params()):
            found[f'master {index}'] = master.detach().clone()
            for key, value in self.optimizer.state.get(master, {}).items():
                if isinstance(value, Tensor):
                    found[f'state {index} {key}'] = value.clone()
        return found


def differ(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """The names of entries that are not equal bit for bit."""
    views = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bad = sorted(set(a) ^ set(b))
    for key in set(a) & set(b):
        x, y = a[key], b[key]
        same = x.dtype is y.dtype and x.shape == y.shape
        view = views[x.element_size()]
        if not same or not torch.equal(x.contiguous().view(view), y.contiguous().view(view)):
            bad.append(key)
    return bad


@contextmanager
def poisoned(parameter: Tensor, value: float = math.inf) -> Iterator[None]:
    """Gradients that arrive at ``parameter`` have one non-finite element."""

    def spoil(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[-1] = value
        return grad

    handle = parameter.register_hook(spoil)
    yield
    handle.remove()


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    yield
    left = regions.count()
    regions.unwind()
    assert left == 0 and not patches.in_place


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Lines of the package's logger, whether or not it propagates."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f'{record.levelname} {record.getMessage()}')  # type: ignore[method-assign]
    logger = logging.getLogger('amp_wrapper')
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(before)


# -- attaching ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('verbosity', [0, 1, 2])
def test_attach(level: str, verbosity: int, device: torch.device, log: list[str]) -> None:
    run = Run(level, device, verbosity=verbosity)
    assert run.engine.attached and run.engine.stage is Stage.READY
    assert run.parameter('fc.weight').dtype is CAST_LEVELS.get(level, F32)
    assert run.engine.parts.casts.casts == (level in CAST_LEVELS)
    run.engine.attach(run.model)
    run.train(0, 1)
    wanted = {'fc.weight', 'fc.bias', 'out.weight', 'out.bias'} | ({'bn.weight', 'bn.bias'} if level == 'O3' else set())
    told = {name for name in wanted if any(f' {name} ' in line for line in log)}
    assert told == (wanted if verbosity == 2 and level in CAST_LEVELS else set())
    assert level in CAST_LEVELS or log == []


@pytest.mark.parametrize('level', MASTER_LEVELS)
def test_masters_are_unrounded_and_in_the_optimizer(level: str, device: torch.device) -> None:
    plain, run = Run('O0', device, attach=False), Run(level, device)
    masters = list(run.engine.master_params())
    assert [id(m) for m in masters] == [id(p) for g in run.optimizer.param_groups for p in g['params']]
    for master, before, weight in zip(masters, plain.model.parameters(), run.model.parameters()):
        assert master.dtype is F32 and torch.equal(master, before)
        assert torch.equal(weight, master.to(weight.dtype))
    assert masters[2] is run.model.bn.weight


def test_only_what_the_optimizer_owns_is_cast(device: torch.device) -> None:
    model = Net().to(device)
    engine = AmpEngine(resolve('O2'), momentum(model.out.parameters()))
    engine.attach(model)
    assert model.out.weight.dtype is F16 and model.fc.weight.dtype is F32
    x, _ = batch(device)
    engine.backward(model(x).sum())
    engine.step()
    assert model.fc.weight.grad is not None and model.fc.weight.grad.dtype is F32


def test_frozen_parts_are_cast_with_the_rest(device: torch.device) -> None:
    model = Net().to(device)
    model.fc.requires_grad_(False)
    policy = resolve('O2', loss_scale=8.0)
    engine = AmpEngine(policy, momentum([p for p in model.parameters() if p.requires_grad]))
    engine.attach(model)
    assert model.fc.weight.dtype is F16
    model.fc.requires_grad_(True)
    engine.optimizer.add_param_group({'params': list(model.fc.parameters())})
    masters = list(engine.master_params())
    assert len(masters) == 6 and all(m.dtype is F32 for m in masters) and masters[4] is not model.fc.weight
    before = masters[4].clone()
    engine.backward(model(batch(device)[0]).square().sum())
    engine.step()
    assert not torch.equal(masters[4], before) and torch.equal(model.fc.weight, masters[4].half())


def test_refused_attachment_changes_nothing(device: torch.device) -> None:
    run = Run('O2', device, attach=False)
    run.model.out.half()
    before = run.bits()
    groups = [list(group['params']) for group in run.optimizer.param_groups]
    with pytest.raises(AmpAttachError, match=r'out\.weight'):
        run.engine.attach(run.model)
    assert differ(before, run.bits()) == [] and not run.engine.attached
    assert all(a is b for g, k in zip(run.optimizer.param_groups, groups) for a, b in zip(g['params'], k))


def test_inference_needs_no_optimizer(device: torch.device) -> None:
    model = Net().to(device).eval()
    engine = AmpEngine(resolve('O2'), None)
    engine.attach(model)
    assert model.fc.weight.dtype is F16 and model(batch(device)[0]).dtype is F32
    engine.detach()
    assert model.fc.weight.dtype is F32


class ZeroRedundancyOptimizer(SGD):
    pass


class FullyShardedDataParallel(nn.Module):
    pass


@pytest.mark.parametrize(
    ('make', 'words'),
    [
        (lambda p: torch.optim.LBFGS(p), 'LBFGS'),
        (lambda p: type('Mine', (torch.optim.LBFGS,), {})(p), 'LBFGS'),
        (lambda p: ZeroRedundancyOptimizer(p, lr=0.1), 'ZeroRedundancyOptimizer'),
        (lambda p: 'SGD', "'SGD' must be a torch.optim.Optimizer"),
    ],
    ids=['LBFGS', 'subclass', 'ZeRO', 'string'],
)
def test_optimizers_that_cannot_be_wrapped(make: Any, words: str, device: torch.device) -> None:
    optimizer = make([nn.Parameter(torch.ones(1, device=device))])
    with pytest.raises((AmpAttachError, AmpConfigError), match=words):
        AmpEngine(resolve('O2'), optimizer)
    assert AmpEngine(resolve('O2', enabled=False), optimizer).optimizer is optimizer


def test_unwrap(device: torch.device) -> None:
    model = nn.Linear(1, 1).to(device)
    compiled = nn.Module()
    compiled._orig_mod = nn.DataParallel(model)
    assert unwrap(model) is model and unwrap(nn.DataParallel(model)) is model and unwrap(compiled) is model
    with pytest.raises(AmpAttachError, match='FSDP'):
        unwrap(FullyShardedDataParallel())


# -- a skipped step -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['fc.weight', 'bn.weight', 'out.bias'])
@pytest.mark.parametrize('which', [None, 0, 1])
@pytest.mark.parametrize('iteration', [0, 1, 3])
@pytest.mark.parametrize('level', LEVELS)
def test_inf_injection(level: str, iteration: int, which: int | None, name: str, device: torch.device) -> None:
    run = Run(level, device, num_losses=1 if which is None else 2, skip_nonfinite=True, verbosity=0)
    clip = GradientClip.parse({'max_norm': 1.0})
    for index in range(4):
        before = run.bits()
        scales = [scaler.get_scale() for scaler in run.engine.scalers]
        losses = run.losses(index)
        for loss_id in range(1 if which is None else 2):
            if index == iteration and loss_id == (which or 0):
                with poisoned(run.parameter(name), [math.inf, -math.inf, math.nan][index % 3]):
                    run.engine.backward(losses[loss_id], loss_id, retain_graph=True)
            else:
                run.engine.backward(losses[loss_id], loss_id, retain_graph=True)
        result = run.engine.step(clip)
        run.engine.zero_grad()
        assert result.skipped == (index == iteration)
        after = run.bits()
        if result.skipped:
            assert differ(before, after) == []
            assert result.grad_norm is None
            for loss_id, scaler in enumerate(run.engine.scalers):
                fell = scaler.is_dynamic and loss_id == (which or 0)
                assert scaler.get_scale() == scales[loss_id] * (0.5 if fell else 1.0)
        else:
            assert all(key in differ(before, after) for key in ('weight fc.weight', 'weight bn.weight'))
            assert [scaler.get_scale() for scaler in run.engine.scalers] == scales
            assert result.grad_norm is not None and math.isfinite(result.grad_norm.item())
    # steps are skipped for all losses, so every scaler counts alike
    for scaler in run.engine.scalers:
        assert scaler.counts.tolist() == [4, 1, int(iteration == 3)]


@pytest.mark.parametrize('level', LEVELS)
def test_a_skipped_step_is_as_if_the_batch_had_not_been(level: str, device: torch.device) -> None:
    with_it, without = (Run(level, device, loss_scale=8.0, skip_nonfinite=True, verbosity=0) for _ in range(2))
    with_it.train(0)
    with poisoned(with_it.parameter('fc.bias')):
        with_it.train(5)
    with_it.train(1, 2)
    without.train(0, 1, 2)
    assert differ(with_it.bits(), without.bits()) == []


def test_without_checking_non_finite_gradients_go_through(device: torch.device) -> None:
    run = Run('O5', device, skip_nonfinite=False)
    with poisoned(run.parameter('fc.bias')):
        run.train(0)
    assert not run.parameter('fc.bias').isfinite().all()


def test_a_skip_makes_no_optimizer_state(device: torch.device) -> None:
    run = Run('O2', device, lambda p: Adam(p, lr=0.1), verbosity=0)
    with poisoned(run.parameter('fc.bias')):
        run.train(0)
    assert len(run.optimizer.state) == 0


def test_a_parameter_without_a_gradient_gets_no_state(device: torch.device) -> None:
    run = Run('O2', device, lambda p: AdamW(p, lr=0.1, weight_decay=0.5))
    run.model.out.bias.requires_grad_(False)
    masters = list(run.engine.master_params())
    kept = masters[-1].clone()
    run.train(0, 1)
    assert masters[-1] not in run.optimizer.state and torch.equal(masters[-1], kept)
    assert len(run.optimizer.state) == 5


@pytest.mark.parametrize('level', ['O1', 'O2', 'O3', 'O5'])
def test_streak_of_skips_ends_in_an_error_that_names_parameters(level: str, device: torch.device) -> None:
    run = Run(level, device, max_consecutive_skips=3, verbosity=0)
    run.train(0)
    before = run.bits()
    with poisoned(run.parameter('fc.weight'), math.nan):
        run.train(1, 2)
        run.backward(3)
        with pytest.raises(OverflowStreakError) as caught:
            run.engine.step()
    text = str(caught.value)
    assert '3 optimizer steps in a row' in text and 'fc.weight' in text and 'out.weight' not in text
    assert 'max_consecutive_skips=3' in text and 'keep_fp32' in text
    assert differ(before, run.bits()) == [] and run.engine.stage is Stage.READY
    run.train(4)
    assert run.engine.scalers[0].counts.tolist() == [5, 3, 0]


@pytest.mark.parametrize('limit', [None, 4])
def test_clean_steps_break_a_streak(limit: int | None, device: torch.device) -> None:
    run = Run('O2', device, max_consecutive_skips=limit, verbosity=0)
    for _ in range(3):
        with poisoned(run.parameter('fc.weight')):
            run.train(0, 1, 2)
        run.train(3)
    assert run.engine.scalers[0].counts.tolist() == [12, 9, 0]


def skip_alternately(run: Run, steps: int) -> list[Any]:
    results = []
    for index in range(steps):
        losses = run.losses(index)
        for loss_id in (0, 1):
            if loss_id == index % 2:
                with poisoned(run.parameter('fc.weight')):
                    run.engine.backward(losses[loss_id], loss_id, retain_graph=True)
            else:
                run.engine.backward(losses[loss_id], loss_id, retain_graph=True)
        results.append(run.engine.step())
        run.engine.zero_grad()
    return results


def test_streak_counts_steps_whichever_loss_overflowed(device: torch.device) -> None:
    run = Run('O2', device, num_losses=2, max_consecutive_skips=4, verbosity=0)
    with pytest.raises(OverflowStreakError, match=r'fc\.weight'):
        skip_alternately(run, 6)


def test_result_counts_every_skipped_step(device: torch.device) -> None:
    run = Run('O2', device, num_losses=2, verbosity=0)
    results = skip_alternately(run, 4)
    assert all(result.skipped for result in results)
    assert [int(result.skips) for result in results] == [1, 2, 3, 4]


@pytest.mark.parametrize(('verbosity', 'lines'), [(0, 0), (1, 6), (2, 6)])
def test_skips_are_told_now_and_then(verbosity: int, lines: int, device: torch.device, log: list[str]) -> None:
    run = Run('O2', device, verbosity=verbosity)
    with poisoned(run.parameter('fc.weight')):
        run.train(*range(10))
    skips = [line for line in log if 'skipped' in line]
    # the first five, then at every doubling
    assert len(skips) == lines
    assert all(line.startswith('WARNING') for line in skips)
    assert lines == 0 or 'loss scale now 32768' in skips[0]


# -- scales -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('clip', [None, {'max_norm': 0.5}], ids=['plain', 'clip'])
@pytest.mark.parametrize('scale', [2.0, 16.0, 0.5])
@pytest.mark.parametrize('level', LEVELS)
def test_power_of_two_scales_change_no_bit(level: str, scale: float, clip: Any, device: torch.device) -> None:
    one, scaled = Run(level, device, loss_scale=1.0), Run(level, device, loss_scale=scale)
    for run in (one, scaled):
        run.train(0, 1, 2, clip=GradientClip.parse(clip))
    assert differ(one.bits(), scaled.bits()) == []
    assert torch.equal(one.losses(3)[0], scaled.losses(3)[0])


def test_a_large_scale_saves_small_float16_gradients(device: torch.device) -> None:
    results = []
    for scale in (1.0, 2.0**16):
        run = Run('O2', device, lambda p: SGD(p, lr=1.0), loss_scale=scale, norm=False)
        before = run.bits()['master 0']
        run.engine.backward(run.losses()[0] * 2.0**-26)
        run.engine.step()
        results.append(torch.equal(run.bits()['master 0'], before))
    assert results == [True, False]


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('scales', [(2.0**10, 2.0**3), (1.0, 2.0**12)])
def test_losses_with_different_scales_sum_up(level: str, scales: tuple[float, float], device: torch.device) -> None:
    run = Run(level, device, loss_scale='dynamic', num_losses=2)
    expected: dict[str, Tensor] = {}
    losses = run.losses()
    for loss_id, (scaler, scale) in enumerate(zip(run.engine.scalers, scales)):
        scaler.load_state_dict({**scaler.state_dict(), 'scale': scale})
        grads = torch.autograd.grad(losses[loss_id].float() * scale, list(run.model.parameters()), retain_graph=True)
        for (name, parameter), grad in zip(run.model.named_parameters(), grads):
            wide = F32 if level in MASTER_LEVELS else parameter.dtype
            part = grad.to(wide) * (1 / scale)
            expected[name] = expected[name] + part if name in expected else part
    run.engine.backward(losses[0], 0, retain_graph=True)
    run.engine.backward(losses[1], 1)
    for master, grad in zip(run.engine.master_params(), expected.values()):
        assert master.grad is not None and torch.equal(master.grad, grad)
    assert not run.engine.step().skipped


@pytest.mark.parametrize('level', MASTER_LEVELS)
def test_several_passes_of_several_losses_accumulate_in_fp32(level: str, device: torch.device) -> None:
    run = Run(level, device, num_losses=2, loss_scale=4.0)
    expected: list[Tensor] | None = None
    for index in range(3):
        for loss in run.losses(index):
            grads = torch.autograd.grad(loss * 4.0, list(run.model.parameters()), retain_graph=True)
            parts = [grad.float() * 0.25 for grad in grads]
            expected = parts if expected is None else [a + b for a, b in zip(expected, parts)]
    for index in range(3):
        run.backward(index)
    assert expected is not None
    assert all(torch.equal(m.grad, grad) for m, grad in zip(run.engine.master_params(), expected))


def test_exception_in_one_backward_keeps_the_other_gradients(device: torch.device) -> None:
    run = Run('O2', device, num_losses=2)
    run.engine.backward(run.losses()[0], 0)
    before = [None if m.grad is None else m.grad.clone() for m in run.engine.master_params()]

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    handle = run.parameter('fc.weight').register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        run.engine.backward(run.losses(1)[1], 1)
    handle.remove()
    for master, grad in zip(run.engine.master_params(), before):
        assert grad is not None and master.grad is not None and torch.equal(master.grad, grad)
    assert run.parameter('fc.weight').grad is None
    assert not run.engine.step().skipped


@pytest.mark.parametrize('dtype', [F16, BF16, F32, torch.float64], ids=str)
def test_scale_of_a_loss(dtype: torch.dtype, device: torch.device) -> None:
    run = Run('O2', device)
    scaled = run.engine.scale(torch.tensor(3.0, dtype=dtype, device=device))
    assert scaled.item() == 3.0 * 2**16 and scaled.dtype is (dtype if dtype is torch.float64 else F32)


# -- misuse -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS[1:])
def test_step_without_backward(level: str, device: torch.device) -> None:
    run = Run(level, device)
    for _ in range(2):
        with pytest.raises(AmpUsageError, match='without a backward'):
            run.engine.step()
        run.losses()[0].backward()
        with pytest.raises(AmpUsageError, match='without a backward'):
            run.engine.step()
        run.engine.zero_grad()
        run.train(0)


def test_step_of_foreign_gradients_is_fine_at_o0(device: torch.device) -> None:
    run = Run('O0', device)
    before = run.bits()
    run.losses()[0].backward()
    assert not run.engine.step().skipped
    assert 'weight fc.weight' in differ(before, run.bits())


@pytest.mark.parametrize('level', LEVELS)
def test_closure(level: str, device: torch.device) -> None:
    run, calls = Run(level, device), []

    def closure() -> Tensor:
        calls.append(1)
        return run.losses()[0]

    run.backward()
    if level in ('O0', 'O3', 'O4'):
        # no scale and no masters: the optimizer runs it, and nobody checks its gradients
        run.engine.step(closure=closure)
        assert calls == [1]
    else:
        before = run.bits()
        with pytest.raises(AmpUsageError, match='closure'):
            run.engine.step(closure=closure)
        assert calls == [] and differ(before, run.bits()) == []


@pytest.mark.parametrize('loss_id', [-1, 2, '0', None, 0.0])
def test_loss_id_out_of_range(loss_id: Any, device: torch.device) -> None:
    run = Run('O2', device, num_losses=2)
    loss = run.losses()[0]
    for call in (run.engine.backward, run.engine.scale):
        with pytest.raises(AmpUsageError, match='num_losses=2'):
            call(loss, loss_id)
    assert run.engine.stage is Stage.READY and run.parameter('fc.weight').grad is None


@pytest.mark.parametrize('level', LEVELS)
def test_backward_before_attachment(level: str, device: torch.device) -> None:
    run = Run(level, device, attach=False)
    loss = run.losses()[0]
    if level in CAST_LEVELS:
        with pytest.raises(AmpUsageError, match='no model was handed over'):
            run.engine.backward(loss)
        assert run.parameter('fc.weight').grad is None
    else:
        run.engine.backward(loss)
        run.engine.step()
        assert run.engine.attached


@pytest.mark.parametrize('num_losses', [1, 2])
def test_several_losses_under_no_sync_are_refused(num_losses: int, device: torch.device) -> None:
    """Gradients that are unscaled on arrival would never be averaged."""
    import torch.distributed as dist

    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    try:
        run = Run('O1', device, attach=False, num_losses=num_losses)
        ddp = nn.parallel.DistributedDataParallel(run.model)
        run.engine.attach(ddp)
        with ddp.no_sync():
            loss = ddp(batch(device)[0]).sum()
            if num_losses == 1:
                run.engine.backward(loss)
                assert run.engine.stage is Stage.ACCUMULATING
            else:
                with pytest.raises(AmpUsageError, match='no_sync'):
                    run.engine.backward(loss, 1)
    finally:
        dist.destroy_process_group()


def test_clip_error_on_a_non_finite_norm(device: torch.device) -> None:
    run = Run('O5', device)
    clip = GradientClip.parse({'max_norm': 1.0, 'error_if_nonfinite': True})
    before = run.bits()
    with poisoned(run.parameter('fc.weight')):
        run.backward()
    with pytest.raises(RuntimeError, match='non-finite'):
        run.engine.step(clip)
    assert differ(before, run.bits()) == []


@pytest.mark.parametrize('to_none', [True, False])
@pytest.mark.parametrize('num_losses', [1, 2])
def test_zero_grad_ends_a_window(to_none: bool, num_losses: int, device: torch.device) -> None:
    run, clean = (Run('O2', device, num_losses=num_losses, loss_scale=4.0) for _ in range(2))
    with poisoned(run.parameter('fc.weight')):
        run.backward(5)
    run.engine.zero_grad(set_to_none=to_none)
    assert run.engine.stage is Stage.READY
    run.train(0)
    clean.train(0)
    assert differ(run.bits(), clean.bits()) == []


# -- detaching and editing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
def test_detach(level: str, device: torch.device) -> None:
    run = Run(level, device)
    objects = dict(run.model.named_parameters())
    run.train(0, 1)
    masters = [m.detach().clone() for m in run.engine.master_params()]
    states = [run.optimizer.state[m]['momentum_buffer'].clone() for m in run.engine.master_params()]
    run.engine.detach()
    assert not run.engine.attached
    held = [p for group in run.optimizer.param_groups for p in group['params']]
    assert len(run.optimizer.state) == len(held)
    for (name, parameter), master, state, mine in zip(run.model.named_parameters(), masters, states, held):
        assert parameter is objects[name] is mine and parameter.dtype is F32
        assert torch.equal(parameter, master.float())
        buffer = run.optimizer.state[mine]['momentum_buffer']
        assert buffer.dtype is F32 and torch.equal(buffer, state.float())
    loss = run.model(batch(device)[0]).sum()
    assert loss.dtype is F32
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.engine.attach(run.model)
    run.train(2)


def test_detach_inside_a_window(device: torch.device) -> None:
    run = Run('O2', device)
    run.backward()
    with pytest.raises(AmpUsageError, match='accumulation window'):
        run.engine.detach()
    assert run.parameter('fc.weight').dtype is F16
    run.engine.step()
    run.engine.zero_grad()
    run.engine.detach()
    run.engine.detach()
    assert run.parameter('fc.weight').dtype is F32


def test_detach_lets_edits_win(device: torch.device) -> None:
    run = Run('O2', device)
    run.parameter('fc.bias').data.fill_(2.5)
    run.engine.detach()
    assert run.parameter('fc.bias').tolist() == [2.5] * 6


@pytest.mark.parametrize('level', MASTER_LEVELS)
def test_weights_changed(level: str, device: torch.device) -> None:
    run = Run(level, device)
    fc, out = run.parameter('fc.bias'), run.parameter('out.bias')
    exact = [m.detach().clone() for m in run.engine.master_params()]
    fc.data.fill_(0.5)
    out.data[0] = 0.25
    assert run.engine.weights_changed([out]) == ['out.bias']
    masters = list(run.engine.master_params())
    assert masters[-1][0].item() == 0.25 and masters[-1][1].item() == exact[-1][1].item()
    assert torch.equal(masters[1], exact[1])
    assert run.engine.weights_changed() == ['fc.bias']
    assert masters[1].tolist() == [0.5] * 6
    assert run.engine.weights_changed() == []


@pytest.mark.parametrize('level', ['O0', 'O1', 'O3', 'O4'])
def test_weights_changed_without_masters(level: str, device: torch.device) -> None:
    run = Run(level, device)
    run.parameter('fc.bias').data.fill_(0.5)
    assert run.engine.weights_changed() == []


@pytest.mark.parametrize('level', MASTER_LEVELS)
def test_in_place_edits_are_taken_up_by_the_next_step(level: str, device: torch.device) -> None:
    run = Run(level, device, lambda p: SGD(p, lr=0.0))
    with torch.no_grad():
        run.parameter('fc.weight').clamp_(-0.125, 0.125)
    run.train(0)
    assert next(run.engine.master_params()).abs().max().item() == 0.125
    assert run.parameter('fc.weight').abs().max().item() == 0.125


def test_a_load_between_steps_is_taken_up(device: torch.device) -> None:
    run = Run('O2', device, lambda p: SGD(p, lr=0.0))
    run.train(0)
    run.model.fc.load_state_dict(
        {'weight': torch.full((6, 4), 0.1, device=device), 'bias': torch.zeros(6, device=device)}
    )
    run.train(1)
    assert torch.equal(next(run.engine.master_params()), torch.full((6, 4), 0.1, device=device))


# -- state --------------------------------------------------------------------------------------------------------


def reload(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def same(a: Any, b: Any) -> bool:
    """Equality down to types and bits; the order of keys means nothing."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return differ({'': a}, {'': b}) == []
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b or (a != a and b != b))


@pytest.mark.parametrize('when', ['before', 'after'])
@pytest.mark.parametrize('num_losses', [1, 2])
@pytest.mark.parametrize('level', LEVELS)
def test_resume_inside_a_window_is_exact(level: str, num_losses: int, when: str, device: torch.device) -> None:
    # in float16, Adam's epsilon is 0 and its weights NaN: nothing to compare
    make = momentum if level == 'O3' else lambda p: Adam(p, lr=0.01)
    whole = Run(level, device, make, num_losses=num_losses)
    whole.train(0, 1)
    whole.backward(2)
    whole.backward(3)
    model, optimizer = reload(copy.deepcopy(dict(whole.model.state_dict()))), reload(whole.engine.state_dict())

    part = Run(level, device, make, attach=False, num_losses=num_losses)
    part.model.load_state_dict(model)
    if when == 'after':
        part.engine.attach(part.model)
    notes = part.engine.load_state_dict(optimizer)
    assert not any('dropped' in note for note in notes) and any('open accumulation window' in note for note in notes)
    part.engine.attach(part.model)
    assert part.engine.stage is Stage.ACCUMULATING
    assert differ(whole.bits(), part.bits()) == []
    assert same(whole.engine.state_dict(), part.engine.state_dict())
    for run in (whole, part):
        run.backward(4)
        run.engine.step(GradientClip.parse({'max_norm': 0.1}))
        run.engine.zero_grad()
        run.train(5)
    assert differ(whole.bits(), part.bits()) == []
    assert torch.equal(whole.losses(6)[0], part.losses(6)[0])
    assert same(whole.engine.state_dict(), part.engine.state_dict())


def test_overflow_inside_a_window_is_resumed(device: torch.device) -> None:
    whole, part = (Run('O2', device, num_losses=2, verbosity=0) for _ in range(2))
    with poisoned(whole.parameter('fc.weight')):
        whole.backward(0)
    part.engine.load_state_dict(reload(whole.engine.state_dict()))
    part.backward(1)
    before = part.bits()
    assert part.engine.step().skipped and differ(before, part.bits()) == []
    assert [scaler.get_scale() for scaler in part.engine.scalers] == [2.0**15, 2.0**15]


@pytest.mark.parametrize('when', ['before', 'after'])
@pytest.mark.parametrize('level', LEVELS)
def test_load_neither_changes_nor_aliases_the_callers_dict(level: str, when: str, device: torch.device) -> None:
    make = momentum if level == 'O3' else lambda p: Adam(p, lr=0.1)
    source = Run(level, device, make, num_losses=2)
    source.train(0)
    source.backward(1)
    state = copy.deepcopy(source.engine.state_dict())
    kept = copy.deepcopy(state)
    run = Run(level, device, make, attach=when == 'after', num_losses=2)
    run.engine.load_state_dict(state)
    run.engine.attach(run.model)
    run.backward(2)
    run.engine.step()
    run.train(3)
    assert same(state, kept) and not run.engine.scalers[0].counts[1]


def test_a_window_waiting_for_attachment_is_not_the_callers(device: torch.device) -> None:
    source = Run('O2', device)
    source.backward(0)
    state = copy.deepcopy(source.engine.state_dict())
    run = Run('O2', device, attach=False)
    run.engine.load_state_dict(state)
    for gradient in state['amp']['window']['gradients']:
        gradient.fill_(9.0)
    run.engine.attach(run.model)
    assert torch.equal(run.parameter('fc.weight').grad, source.parameter('fc.weight').grad)


def test_state_dict_is_a_snapshot_of_the_window(device: torch.device) -> None:
    run = Run('O2', device)
    run.backward(0)
    state = run.engine.state_dict()
    kept = copy.deepcopy(state['amp']['window'])
    run.backward(1)
    assert same(state['amp']['window'], kept)


BREAK: dict[str, Callable[[dict[str, Any]], Any]] = {
    'group missing': lambda s: s['param_groups'].pop(),
    'group twice': lambda s: s['param_groups'].append(copy.deepcopy(s['param_groups'][0])),
    'parameter missing': lambda s: s['param_groups'][0]['params'].pop(),
    'parameters lost': lambda s: s['param_groups'][0].pop('params'),
    'scale': lambda s: s['amp']['loss_scalers'][0].update(scale=math.nan),
    'counter': lambda s: s['amp']['loss_scalers'][0].update(steps=2**70),
    'future': lambda s: s['amp'].update(version=2),
    'properties': lambda s: s['amp']['properties'].update(loss_scale=None),
    'state shape': lambda s: s['state'][0].update(exp_avg=torch.ones(7)),
    'state type': lambda s: s['state'].update({0: 'text'}),
    'gradient shape': lambda s: s['amp']['window']['gradients'].__setitem__(0, torch.ones(7)),
}


@pytest.mark.parametrize('when', ['before', 'after'])
@pytest.mark.parametrize('how', BREAK)
def test_a_bad_state_is_a_typed_error_and_changes_nothing(how: str, when: str, device: torch.device) -> None:
    def adam(parameters: Any) -> Optimizer:
        return Adam(parameters, lr=0.1)

    source = Run('O2', device, adam)
    source.train(0)
    source.backward(1)
    state = copy.deepcopy(source.engine.state_dict())
    BREAK[how](state)
    run = Run('O2', device, adam, attach=when == 'after')
    if when == 'after':
        run.train(4)
    before, own = run.bits(), copy.deepcopy(run.engine.state_dict())
    with pytest.raises(AmpCheckpointError):
        run.engine.load_state_dict(state)
    assert differ(before, run.bits()) == [] and same(run.engine.state_dict(), own)


def _verbs(source: str, target: str) -> list[str]:
    dynamic = ('O1', 'O2')
    # to O3, weights and state are rounded; from O3, the state becomes FP32
    verbs = ['kept'] if source == target or 'O3' not in (source, target) else ['kept', 'converted'][target == 'O3' :]
    return verbs + (['dropped'] if (source in dynamic) != (target in dynamic) else [])


@pytest.mark.parametrize('target', LEVELS)
@pytest.mark.parametrize('source', LEVELS)
def test_state_goes_from_any_level_to_any(source: str, target: str, device: torch.device) -> None:
    first = Run(source, device)
    first.train(0, 1)
    second = Run(target, device, attach=False)
    second.model.load_state_dict(first.model.state_dict())
    notes = second.engine.load_state_dict(reload(first.engine.state_dict()))
    second.engine.attach(second.model)
    assert all(note.startswith(f'saved at {source}, resumed at {target}: ') for note in notes)
    assert [note.split(': ')[1] for note in notes] == _verbs(source, target)
    for mine, theirs in zip(second.engine.master_params(), first.engine.master_params()):
        buffer, saved = (r.optimizer.state[p]['momentum_buffer'] for r, p in ((second, mine), (first, theirs)))
        assert buffer.dtype is mine.dtype and torch.equal(buffer, saved.float().to(mine.dtype))
    second.train(2)
    assert second.losses(3)[0].isfinite()


@pytest.mark.parametrize('level', LEVELS)
def test_stock_and_plain_states_are_read(level: str, device: torch.device) -> None:
    plain = Run('O0', device, attach=False)
    plain.losses()[0].backward()
    plain.optimizer.step()
    stock = torch.amp.GradScaler(device.type, init_scale=512.0).state_dict()
    run = Run(level, device, loss_scale='dynamic')
    run.engine.load_state_dict({**copy.deepcopy(plain.optimizer.state_dict()), 'loss_scaler': stock})
    assert run.engine.scalers[0].get_scale() == 512.0
    run = Run(level, device, loss_scale='dynamic')
    notes = run.engine.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    if run.engine.scalers[0].is_dynamic:
        assert 'new: loss scale 65536, which the checkpoint does not hold' in notes[-1]
    assert run.engine.scalers[0].get_scale() == 2.0**16


def test_window_of_another_configuration_is_dropped(device: torch.device) -> None:
    source, run = Run('O2', device), Run('O5', device)
    source.backward()
    notes = run.engine.load_state_dict(source.engine.state_dict())
    assert any('dropped' in note and 'window' in note for note in notes) and run.engine.stage is Stage.READY
    assert run.parameter('fc.weight').grad is None


@pytest.mark.parametrize('level', LEVELS)
def test_disabled_is_a_plain_optimizer(level: str, device: torch.device) -> None:
    plain, run = Run('O0', device, attach=False), Run(level, device, enabled=False)
    for index in range(3):
        plain.losses(index)[0].backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()
    run.train(0, 1, 2)
    assert differ(plain.bits(), run.bits()) == []
    assert same(run.engine.state_dict(), plain.optimizer.state_dict())
    assert run.engine.parts.casts is None and not run.model._forward_pre_hooks
    state = copy.deepcopy(run.engine.state_dict())
    notes = run.engine.load_state_dict(state)
    assert notes == ['saved without mixed precision, resumed without mixed precision: kept: weights, optimizer state']
    run.engine.detach()


# -- against a loop by hand ---------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    f'{kind.__name__}-{name}': (lambda p, kind=kind, words=words, more=more: kind(p, lr=0.05, **words, **more))
    for kind, words, fused in (
        (SGD, {'momentum': 0.9, 'nesterov': True, 'weight_decay': 0.1}, True),
        (Adam, {'weight_decay': 0.1, 'amsgrad': True}, True),
        (AdamW, {'weight_decay': 0.1}, True),
        (RMSprop, {'momentum': 0.5, 'centered': True}, False),
    )
    for name, more in (('plain', {'foreach': False}), ('foreach', {'foreach': True}), ('fused', {'fused': True}))
    if fused or name != 'fused'
}


@pytest.mark.parametrize('name', OPTIMIZERS)
@pytest.mark.parametrize('level', MASTER_LEVELS)
@pytest.mark.parametrize('clip', [None, {'max_norm': 0.5}], ids=['plain', 'clip'])
def test_masters_by_hand(level: str, name: str, clip: Any, device: torch.device) -> None:
    scale, dtype = 128.0, MASTER_LEVELS[level]
    run = Run(level, device, OPTIMIZERS[name], loss_scale=scale, norm=False)

    torch.manual_seed(3)
    model = Net(norm=False).to(device)
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = OPTIMIZERS[name](masters)
    model.to(dtype)
    for index in range(4):
        x, y = batch(device, index)
        loss = (model(x.to(dtype)).float() - y).square().mean()
        (loss * scale).backward()
        for weight, master in zip(model.parameters(), masters):
            master.grad = weight.grad.float() / scale
            weight.grad = None
        if clip:
            # torch's rule, and the order of our sum, which is the same on every device
            grads = [master.grad for master in masters if master.grad is not None]
            coefficient = (clip['max_norm'] / (ops.multi_tensor_l2norm(grads)[0] + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(grads, coefficient)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for weight, master in zip(model.parameters(), masters):
                weight.copy_(master)
        assert torch.equal(run.losses(index)[0], loss)
        run.train(index, clip=GradientClip.parse(clip))

    expected = {f'weight {key}': p.detach() for key, p in model.named_parameters()}
    for index, master in enumerate(masters):
        expected[f'master {index}'] = master.detach()
        for key, value in optimizer.state[master].items():
            if isinstance(value, Tensor):
                expected[f'state {index} {key}'] = value
    assert differ(run.bits(), expected) == []


def test_sparse_embedding(device: torch.device) -> None:
    model = nn.Embedding(5, 2, sparse=True).to(device)
    exact = model.weight.detach().clone()
    engine = AmpEngine(resolve('O2', loss_scale=8.0), SGD(model.parameters(), lr=0.5))
    engine.attach(model)
    index = torch.tensor([1, 3, 1], device=device)
    engine.backward(model(index).sum())
    assert not engine.step().skipped
    exact[1] -= 1.0
    exact[3] -= 0.5
    assert torch.equal(next(engine.master_params()), exact) and torch.equal(model.weight, exact.half())


# -- host reads ---------------------------------------------------------------------------------------------------


class HostReads(TorchDispatchMode):
    """Counts reads of the device; ``tolist`` reads a CPU tensor without the dispatcher, so it is counted apart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count = 0
        tolist = Tensor.tolist

        def counted(tensor: Tensor) -> Any:
            self.count += 1
            return tolist(tensor)

        monkeypatch.setattr(Tensor, 'tolist', counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize('clip', [None, {'max_norm': 0.5}], ids=['plain', 'clip'])
@pytest.mark.parametrize('num_losses', [1, 2])
@pytest.mark.parametrize(
    ('level', 'overrides', 'reads'),
    [
        ('O0', {}, 0),
        ('O0', {'loss_scale': 8.0}, 0),
        ('O0', {'skip_nonfinite': True}, 1),
        ('O1', {}, 1),
        ('O2', {}, 1),
        ('O3', {}, 1),
        ('O4', {}, 1),
        ('O5', {}, 1),
        ('O5', {'skip_nonfinite': False}, 0),
        ('O3', {'skip_nonfinite': False}, 0),
        ('O2', {'enabled': False}, 0),
    ],
    ids=str,
)
def test_host_reads_of_a_step(
    level: str,
    overrides: dict[str, Any],
    reads: int,
    num_losses: int,
    clip: Any,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(level, device, num_losses=num_losses, verbosity=0, **overrides)
    run.train(0)
    for index in (1, 2):
        with HostReads(monkeypatch) as counter:
            run.train(index, clip=GradientClip.parse(clip))
        assert counter.count == reads
    if reads:
        with poisoned(run.parameter('fc.weight')):
            with HostReads(monkeypatch) as counter:
                run.train(3)
        assert counter.count == 1


def test_the_counter_of_host_reads_counts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(2, device=device)
    with HostReads(monkeypatch) as counter:
        tensor.tolist()
        tensor[0].item()
        bool(tensor[0] > 0)
    assert counter.count == 3


# -- forward context ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('fails', [True, False])
def test_forward_context(level: str, fails: bool, device: torch.device) -> None:
    run = Run(level, device)
    wanted = {'O1': F16, 'O4': BF16}.get(level)
    try:
        with run.engine.forward_context(run.model):
            assert torch.is_autocast_enabled(device.type) == (wanted is not None)
            assert wanted is None or torch.get_autocast_dtype(device.type) is wanted
            regions.enter(OpSet().keys)
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert not torch.is_autocast_enabled(device.type) and regions.count() == 0
