"""From the backward pass to the step: attaching, unscaling, sums of several passes, FP32 sums, zeros, memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import differing, same
from hypothesis import given, settings
from hypothesis import strategies as st
from op_lists import skip_without_library
from pairs import pairs
from play import EXACT_LEVELS, Amp, Setup, check, fused_sgd, sgd
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toy_training import CAST, LEVELS, MASTERED, Net, Training, batch, momentum, poisoned

from amp_wrapper import AmpAttachError, AmpConfigError, AmpOptimWrapper, AmpUsageError, FusedAdamW, FusedSGD, amp

F32 = torch.float32
Make = Callable[[Any], Optimizer]

# -- attaching -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('level', LEVELS)
def test_attach_casts_weights_and_logs_their_names(level: str, log: list[str]) -> None:
    for verbosity in range(3):
        log.clear()
        run, plain = Training(level, verbosity=verbosity), Training('O0', attach=False)
        wanted = {'fc.weight', 'fc.bias', 'out.weight', 'out.bias', *(['bn.weight', 'bn.bias'] * (level == 'O3'))}
        told = {name for name in wanted if any(f' {name} ' in line for line in log)}
        assert told == (wanted if verbosity == 2 and level in CAST else set())
        masters = run.masters()
        assert [id(m) for m in masters] == [id(p) for group in run.optimizer.param_groups for p in group['params']]
        for master, before, (name, weight) in zip(masters, plain.model.parameters(), run.model.named_parameters()):
            assert weight.dtype is (CAST.get(level, F32) if name in wanted else F32)
            assert master.dtype is (weight.dtype if level == 'O3' else F32)
            assert torch.equal(master, before.to(master.dtype)) and torch.equal(weight, master.to(weight.dtype))


def test_frozen_modules_are_cast_with_the_rest_and_get_masters_when_they_join() -> None:
    model = Net()
    model.fc.requires_grad_(False)
    run = Training('O2', model=model, make=lambda ps: momentum([p for p in ps if p.requires_grad]), loss_scale=8.0)
    assert model.fc.weight.dtype is torch.float16
    model.fc.requires_grad_(True)
    run.optimizer.add_param_group({'params': list(model.fc.parameters())})
    master = run.masters()[4]
    assert master is not model.fc.weight and master.dtype is F32
    before = master.clone()
    run.train(0)
    assert not torch.equal(master, before) and torch.equal(model.fc.weight, master.half())


def test_a_refused_attachment_changes_nothing() -> None:
    run = Training('O2', attach=False)
    run.model.out.half()
    before, groups = run.bits(), [list(group['params']) for group in run.optimizer.param_groups]
    with pytest.raises(AmpAttachError, match=r'out\.weight'):
        run.wrapper.attach(run.model)
    assert differing(before, run.bits()) == []
    assert all(a is b for g, known in zip(run.optimizer.param_groups, groups) for a, b in zip(g['params'], known))
    for optimizer in (torch.optim.LBFGS([nn.Parameter(torch.ones(1))]), 'SGD'):
        with pytest.raises((AmpAttachError, AmpConfigError), match=r'LBFGS|SGD'):
            AmpOptimWrapper(opt_level='O2', optimizer=optimizer)


@pytest.mark.parametrize('level', LEVELS)
def test_detach_returns_fp32_weights_and_state(level: str) -> None:
    """Not while gradients wait; edits of weights have gone into masters."""
    run = Training(level)
    parameters = list(run.model.parameters())
    run.train(0, 1)
    with torch.no_grad():
        run.weight('out.bias').fill_(2.5)
    masters = [m.detach().float() for m in run.masters()]
    states = [run.optimizer.state[m]['momentum_buffer'].float() for m in run.masters()]
    run.passes(2)
    with pytest.raises(AmpUsageError, match='accumulation'):
        run.wrapper.detach()
    run.clear()
    for _ in range(2):
        run.wrapper.detach()
    held = [p for group in run.optimizer.param_groups for p in group['params']]
    assert all(a is b is c for a, b, c in zip(parameters, run.model.parameters(), held, strict=True))
    assert run.weight('out.bias').tolist() == [2.5] * 16
    assert same([p.detach() for p in parameters], masters)
    assert same([run.optimizer.state[p]['momentum_buffer'] for p in parameters], states)
    loss = run.model(batch(0)[0]).sum()
    assert loss.dtype is F32
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.wrapper.attach(run.model)
    run.train(2)


@pytest.mark.parametrize('level', LEVELS)
def test_a_loss_needs_a_known_id_and_an_attached_model(level: str) -> None:
    run, alone = Training(level, num_losses=2), Training(level, attach=False)
    for loss_id in (-1, 2, '0', None, 0.0):
        with pytest.raises(AmpUsageError, match='num_losses=2'):
            run.backward(run.loss(), loss_id)  # type: ignore[arg-type]
    assert run.weight().grad is None and not run.wrapper.in_window
    loss = alone.model(batch(0)[0]).sum()
    if level in CAST:
        with pytest.raises(AmpUsageError, match='has none'):
            alone.backward(loss)
        assert alone.weight().grad is None
    else:
        alone.backward(loss)
        alone.step()


# -- unscaling -------------------------------------------------------------------------------------------------------------


def arriving(run: Training, gradient: Tensor, *others: Tensor, loss_id: int = 0) -> None:
    """A backward pass in which the parameters get these gradients, whatever the scale."""
    parameters = list(run.model.parameters())
    handles = [p.register_hook(lambda _, g=g: g) for p, g in zip(parameters, (gradient, *others))]
    run.backward(sum((p.float().sum() for p in parameters), torch.zeros(())), loss_id)
    for handle in handles:
        handle.remove()


class Holder(nn.Module):
    """Weights of given sizes."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(*reversed(shape), bias=False) for shape in shapes)


def holder(level: str, *shapes: tuple[int, ...], lr: float = 0.5, **options: Any) -> Training:
    return Training(level, options.pop('door', 'amp'), lambda p: SGD(p, lr=lr), Holder(*shapes), **options)


@settings(max_examples=40, deadline=None)
@given(
    patterns=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=9),
    power=st.integers(0, 24),
    level=st.sampled_from(MASTERED),
)
def test_power_of_two_scales_lose_no_bit_of_a_gradient(patterns: list[int], power: int, level: str) -> None:
    signed = [p - 2**16 if p >= 2**15 else p for p in patterns]
    gradient = torch.tensor([signed], dtype=torch.int16).view(CAST[level])
    run = holder(level, (1, len(patterns)), loss_scale=2.0**power, door='wrapper', skip_nonfinite=True)
    arriving(run, gradient)
    run.step()
    exact = gradient.double() * 2.0**-power
    assert run.skipped() == (not gradient.isfinite().all())
    if not run.skipped():
        master = run.masters()[0]
        # below float32's normal numbers a product may round
        normal = (exact.abs() >= 2.0**-126) | (exact == 0)
        assert torch.equal(master.grad.double()[normal], exact[normal]) and master.grad.dtype is F32


@pytest.mark.parametrize('level', ['O1', *MASTERED])
def test_passes_with_different_scales_are_added_in_fp32(level: str) -> None:
    """1 + 2^-12 + 2^-12 needs more bits than either 16-bit type has."""
    scales = (1.0, 2.0**8, 2.0**10)
    run = holder(level, (1, 1), num_losses=3, loss_scale=dict(init_scale=1.0))
    state = amp.state_dict()
    for index, scale in enumerate(scales):
        state[f'loss_scaler{index}']['loss_scale'] = scale
    amp.load_state_dict(state)
    for index, gradient in enumerate((1.0, 2.0**-4, 2.0**-2)):
        arriving(run, torch.full((1, 1), gradient, dtype=CAST.get(level, F32)), loss_id=index)
    assert run.masters()[0].grad.item() == 1 + 2.0**-12 + 2.0**-12


def test_repeated_rows_of_a_sparse_gradient_are_added_in_fp32() -> None:
    """Two finite gradients of one row are no overflow, though float16 cannot hold their sum."""
    model = nn.Embedding(3, 1, sparse=True)
    nn.init.zeros_(model.weight)
    run = Training('O2', 'wrapper', lambda p: SGD(p, lr=0.5), model, loss_scale=16.0)
    run.backward(run.forward(torch.tensor([2, 2])).float().sum() * 2500)
    run.step()
    assert not run.skipped() and run.masters()[0].tolist() == [[0.0], [0.0], [-2500.0]]


@pairs(level=EXACT_LEVELS[1:3], optimizer=(sgd, fused_sgd))
def test_gradients_of_weights_that_join_the_optimizer_later_are_refused(level: str, optimizer: Any) -> None:
    """They carry the loss scale."""
    script: list[Any] = [('backward', (0, 1), 5), ('add_group',)]
    for act in ('step',), ('backward', (0, 1), 5):
        with pytest.raises(AmpUsageError, match='carry a loss scale'):
            check([*script, act], Amp, Setup(level, optimizer, grouped=1))
    check([*script, ('clear',), ('backward', (0, 1), 5), ('step',)], Amp, Setup(level, optimizer, grouped=1))


# -- clearing --------------------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    'wrapper': {},
    'FP32 sums': dict(accumulate_in_fp32=True),
    'two losses': dict(num_losses=2),
}


@pairs(to_none=(True, False), way=('wrapper', 'FP32 sums', 'two losses'), level=('O1', 'O2', 'O5'))
def test_clearing_ends_an_accumulation(to_none: bool, way: str, level: str) -> None:
    run, clean = (Training(level, loss_scale=4.0, **WAYS[way]) for _ in range(2))
    with poisoned(run.weight()):
        run.passes(5)
    run.clear(set_to_none=to_none)
    assert not run.wrapper.in_window
    for each in (run, clean):
        each.train(0)
    assert not run.skipped() and differing(run.bits(), clean.bits()) == []


# -- sums in FP32 ----------------------------------------------------------------------------------------------------------

WIDE = dict(accumulate_in_fp32=True)


@pairs(level=('O2', 'O5'), wide=(False, True))
def test_small_gradients_are_lost_in_16_bit_sums_and_not_in_fp32_sums(level: str, wide: bool) -> None:
    """One gradient of 1 and 255 of 1/1024; and none lies on the weights between two passes."""
    run = holder(level, (1, 1), door='wrapper', lr=1.0, loss_scale=1.0, accumulate_in_fp32=wide)
    before = run.masters()[0].item()
    for index in range(256):
        arriving(run, torch.full((1, 1), 1.0 if index == 0 else 2.0**-10, dtype=CAST[level]))
        assert (next(run.model.parameters()).grad is None) == wide
    run.step()
    found = before - run.masters()[0].item()
    exact = 1 + 255 / 1024
    assert abs(found - exact) <= 2.0**-21 if wide else found == (1 if level == 'O5' else pytest.approx(exact))


def test_a_sum_that_float16_cannot_hold_overflows_in_16_bit_alone() -> None:
    for wide in (False, True):
        run = holder('O2', (1, 1), door='wrapper', lr=1e-6, loss_scale=dict(init_scale=1.0), accumulate_in_fp32=wide)
        for _ in range(2):
            arriving(run, torch.full((1, 1), 40000.0, dtype=torch.float16))
        run.step()
        assert run.skipped() != wide


@pairs(level=MASTERED, make=(SGD, FusedSGD), wide=(False, True))
def test_fp32_sums_are_saved_unrounded_and_kept_at_overflow(level: str, make: Any, wide: bool, log: list[str]) -> None:
    def fresh(**words: Any) -> Training:
        return Training(level, make=lambda p: make(p, 0.1), loss_scale=256.0, **{'accumulate_in_fp32': wide, **words})

    run = fresh()
    run.train(0)
    run.passes(1, 2)
    saved = copy.deepcopy((run.model.state_dict(), run.wrapper.state_dict()))
    assert {g.dtype for g in saved[1]['amp']['window']['gradients']} == ({F32} if wide else {F32, CAST[level]})
    other = fresh()
    other.model.load_state_dict(saved[0])
    other.wrapper.load_state_dict(saved[1])
    for each in (run, other):
        each.passes(3)
        each.step()
        each.clear()
        with poisoned(each.weight()):
            each.passes(4)
        each.passes(5)
        each.step()
        assert each.skipped()
        each.clear()
        each.train(6)
    assert differing(run.bits(), other.bits()) == []
    # sums of the other kind mean something else
    other = fresh(accumulate_in_fp32=not wide, verbosity=1)
    other.wrapper.load_state_dict(saved[1])
    assert not other.wrapper.in_window and any('unfinished accumulation' in line for line in log)


def test_sparse_gradients_are_summed_in_fp32() -> None:
    ends = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Embedding(6, 4, sparse=sparse)
        run = Training('O5', make=lambda p: SGD(p, lr=1.0), model=model, **WIDE)
        with torch.no_grad():
            model.weight.fill_(0.5)
        for rows in ([0, 0, 1], [1, 2], [5, 5]):
            run.backward(run.forward(torch.tensor(rows)).float().sum())
        run.step()
        ends.append(run.bits())
    assert differing(*ends) == []


def test_fp32_sums_change_nothing_where_gradients_are_fp32() -> None:
    for level in ('O0', 'O1', 'O4'):
        runs = [Training(level, accumulate_in_fp32=wide) for wide in (False, True)]
        for run in runs:
            run.passes(0)
            run.train(1)
        assert differing(runs[0].bits(), runs[1].bits()) == []


@pytest.mark.parametrize('words', [dict(level='O3'), dict(level='O2', master_weights='split')], ids=str)
def test_fp32_sums_without_masters_are_refused(words: dict[str, Any]) -> None:
    with pytest.raises(AmpConfigError, match='accumulate_in_fp32'):
        Training(make=lambda p: FusedSGD(p, lr=0.1), **words, **WIDE)


# -- memory ----------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The size of the largest tensor that is made."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given:
                self.size = max(self.size, made.untyped_storage().nbytes())
        return result


def resident(run: Training) -> float:
    """Bytes for each parameter, of weights, masters, state and gradients; what shares memory counts once."""
    stepped = run.masters()
    tensors: list[Tensor | None] = [*run.model.parameters(), *stepped]
    tensors += [parameter.grad for parameter in (*run.model.parameters(), *stepped)]
    tensors += [v for state in run.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    # scalars, such as step counts, are next to nothing
    return round(sum(sizes.values()) / sum(p.numel() for p in run.model.parameters()), 1)


@pairs(level=MASTERED, make=(FusedAdamW, AdamW))
def test_bytes_of_a_parameter(level: str, make: Any) -> None:
    """A weight takes 2 bytes, its master 4, its moments 8. Fused steps of the wrapper need no FP32 gradient."""
    if make is FusedAdamW:
        skip_without_library(torch.device('cpu'))
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False))
    words = {} if make is FusedAdamW else dict(foreach=False)
    run = Training(level, 'wrapper', lambda p: make(p, lr=1e-3, **words), model, loss_scale=8.0)
    x = torch.ones(2, 128)
    for index in range(2):
        run.backward(run.forward(x).float().mean())
        assert resident(run) == 2 + 4 + 8 * index + 2
        with Largest() as largest:
            run.step()
        if make is FusedAdamW and index:
            assert largest.size < 128 * 128
            assert resident(run) == 2 + 4 + 8 + 2
        run.clear()
        assert resident(run) == 2 + 4 + 8


@pairs(level=MASTERED, make=(FusedAdamW, AdamW))
def test_weights_whose_masters_have_the_gradient_have_none(level: str, make: Any) -> None:
    """18 bytes for each parameter between the block and the step; ``model.zero_grad()`` clears masters, too."""
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False))
    run = Training(level, 'amp', lambda p: make(p, lr=1e-3), model, loss_scale=8.0)
    for index in range(2):
        run.backward(run.forward(torch.ones(2, 128)).float().mean())
        assert resident(run) == 2 + 4 + 8 * index + 4
        run.step()
        run.model.zero_grad()
        assert resident(run) == 2 + 4 + 8


# -- clipping --------------------------------------------------------------------------------------------------------------


def test_kind_of_norm_is_checked() -> None:
    with pytest.raises(AmpConfigError, match='norm_type'):
        Training('O2', clip_grad={'max_norm': 1, 'norm_type': 'two'})
